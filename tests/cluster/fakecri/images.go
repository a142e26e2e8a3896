package main

import (
	"context"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// images is an image store that has every image.
type images struct {
	cri.UnimplementedImageServiceServer
	// root is a file on the file system that the images pretend to be on.
	root string
}

func (images) ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	return &cri.ListImagesResponse{}, nil
}

func (images) ImageStatus(_ context.Context, r *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	name := r.GetImage().GetImage()
	return &cri.ImageStatusResponse{Image: &cri.Image{
		Id: name, RepoTags: []string{name}, Size: 1, Spec: &cri.ImageSpec{Image: name}, Uid: &cri.Int64Value{},
	}}, nil
}

func (images) PullImage(_ context.Context, r *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	return &cri.PullImageResponse{ImageRef: r.GetImage().GetImage()}, nil
}

func (images) RemoveImage(context.Context, *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	return &cri.RemoveImageResponse{}, nil
}

func (i images) ImageFsInfo(context.Context, *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error) {
	one := func() *cri.UInt64Value { return &cri.UInt64Value{Value: 1} }
	usage := []*cri.FilesystemUsage{{
		Timestamp: time.Now().UnixNano(), UsedBytes: one(), InodesUsed: one(),
		FsId: &cri.FilesystemIdentifier{Mountpoint: filepath.Dir(i.root)},
	}}
	return &cri.ImageFsInfoResponse{ImageFilesystems: usage, ContainerFilesystems: usage}, nil
}
