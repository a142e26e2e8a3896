package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// podIP is the address of every pod. None has a network; the kubelet only
// wants to see one.
const podIP = "10.250.0.2"

// runtime is the state behind the CRI's runtime service.
type runtime struct {
	cri.UnimplementedRuntimeServiceServer

	options options
	// boot makes the ids of this run differ from those of an earlier one.
	boot   uint32
	record *recorder

	mu         sync.Mutex
	next       int
	random     *rand.Rand
	sandboxes  map[string]*sandbox
	containers map[string]*container
	processes  *processTable
}

// sandbox is a pod without its containers.
type sandbox struct {
	id      string
	config  *cri.PodSandboxConfig
	state   cri.PodSandboxState
	created int64
}

func (s *sandbox) pod() podName {
	m := s.config.GetMetadata()
	return podName{m.GetNamespace(), m.GetName(), m.GetUid()}
}

// newID returns an id of the usual form, 64 hexadecimal digits.
func (r *runtime) newID() string {
	r.next++
	return fmt.Sprintf("%08x%056x", r.boot, r.next)
}

func labelsMatch(want, have map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

// Version implements the CRI.
func (r *runtime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{Version: "0.1.0", RuntimeName: "fakecri", RuntimeVersion: "1.0.0", RuntimeApiVersion: "v1"}, nil
}

// Status implements the CRI: always ready.
func (r *runtime) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	return &cri.StatusResponse{
		Status: &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
			{Type: cri.RuntimeReady, Status: true}, {Type: cri.NetworkReady, Status: true},
		}},
		RuntimeHandlers: []*cri.RuntimeHandler{{Features: &cri.RuntimeHandlerFeatures{}}},
		Features:        &cri.RuntimeFeatures{},
	}, nil
}

// RuntimeConfig implements the CRI.
func (r *runtime) RuntimeConfig(context.Context, *cri.RuntimeConfigRequest) (*cri.RuntimeConfigResponse, error) {
	return &cri.RuntimeConfigResponse{Linux: &cri.LinuxRuntimeConfiguration{CgroupDriver: cri.CgroupDriver_CGROUPFS}}, nil
}

// UpdateRuntimeConfig implements the CRI: there is nothing to configure.
func (r *runtime) UpdateRuntimeConfig(context.Context, *cri.UpdateRuntimeConfigRequest) (*cri.UpdateRuntimeConfigResponse, error) {
	return &cri.UpdateRuntimeConfigResponse{}, nil
}

// RunPodSandbox implements the CRI.
func (r *runtime) RunPodSandbox(_ context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &sandbox{id: r.newID(), config: q.GetConfig(), state: cri.PodSandboxState_SANDBOX_READY, created: time.Now().UnixNano()}
	r.sandboxes[s.id] = s
	r.record.write(line{Event: eventSandboxStarted, Pod: s.pod(), Sandbox: s.id})
	return &cri.RunPodSandboxResponse{PodSandboxId: s.id}, nil
}

// StopPodSandbox implements the CRI: containers that still run are killed.
func (r *runtime) StopPodSandbox(_ context.Context, q *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.GetPodSandboxId()]
	if s == nil || s.state == cri.PodSandboxState_SANDBOX_NOTREADY {
		return &cri.StopPodSandboxResponse{}, nil
	}
	for _, c := range r.sorted() {
		if c.sandbox == s {
			r.exit(c, exitKilled, reasonKilled)
		}
	}
	s.state = cri.PodSandboxState_SANDBOX_NOTREADY
	r.record.write(line{Event: eventSandboxStopped, Pod: s.pod(), Sandbox: s.id})
	return &cri.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox implements the CRI.
func (r *runtime) RemovePodSandbox(_ context.Context, q *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.GetPodSandboxId()]
	if s == nil {
		return &cri.RemovePodSandboxResponse{}, nil
	}
	for _, c := range r.sorted() {
		if c.sandbox == s {
			r.remove(c)
		}
	}
	delete(r.sandboxes, s.id)
	r.record.write(line{Event: eventSandboxRemoved, Pod: s.pod(), Sandbox: s.id})
	return &cri.RemovePodSandboxResponse{}, nil
}

// PodSandboxStatus implements the CRI.
func (r *runtime) PodSandboxStatus(_ context.Context, q *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.GetPodSandboxId()]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "there is no sandbox %q", q.GetPodSandboxId())
	}
	namespaces := s.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{
		Id: s.id, Metadata: s.config.GetMetadata(), State: s.state, CreatedAt: s.created,
		Network: &cri.PodSandboxNetworkStatus{Ip: podIP},
		Linux:   &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: namespaces}},
		Labels:  s.config.GetLabels(), Annotations: s.config.GetAnnotations(),
	}}, nil
}

// ListPodSandbox implements the CRI.
func (r *runtime) ListPodSandbox(_ context.Context, q *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := q.GetFilter()
	out := &cri.ListPodSandboxResponse{}
	all := slices.SortedFunc(maps.Values(r.sandboxes), func(a, b *sandbox) int { return cmp.Compare(a.id, b.id) })
	for _, s := range all {
		if f.GetId() != "" && f.GetId() != s.id ||
			f.GetState() != nil && f.GetState().GetState() != s.state ||
			!labelsMatch(f.GetLabelSelector(), s.config.GetLabels()) {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{
			Id: s.id, Metadata: s.config.GetMetadata(), State: s.state, CreatedAt: s.created,
			Labels: s.config.GetLabels(), Annotations: s.config.GetAnnotations(),
		})
	}
	return out, nil
}

// ListPodSandboxStats implements the CRI: nothing uses anything.
func (r *runtime) ListPodSandboxStats(context.Context, *cri.ListPodSandboxStatsRequest) (*cri.ListPodSandboxStatsResponse, error) {
	return &cri.ListPodSandboxStatsResponse{}, nil
}
