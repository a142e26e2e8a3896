package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// The containerd mode: containerd and runc instead of the fake runtime, with
// one image, and device nodes that look like NVIDIA's.

// sleeperImage is the only image there is; pods of this mode must name it. Its
// program prints the GPUs it sees to the container's log.
const sleeperImage = "gpu-bridge.test/sleeper:1"

// containerdPrograms are needed besides kube.
var containerdPrograms = []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc", "runc-plain", "sleeper"}

// shimFolder is where containerd's shims put their sockets, whatever the
// configuration says.
const shimFolder = "/run/containerd"

// importDeadline limits the import of an image of a few megabytes.
const importDeadline = time.Minute

// Numbers of NVIDIA's device nodes. The major number of nvidia-uvm is given
// out at run time; this one is usual.
const (
	nvidiaMajor    = 195
	nvidiaUVMMajor = 510
	nvidiaCtlMinor = 255
)

// layOutContainerd writes containerd's files and makes the device nodes.
func (o *options) layOutContainerd() error {
	if o.UserNamespace {
		return fmt.Errorf("%w with containerd: that takes root", errSkipped)
	}
	for _, name := range []string{"cni/conf", "cni/bin", "dev"} {
		if err := os.RemoveAll(o.path(name)); err != nil {
			return err
		}
		if err := os.MkdirAll(o.path(name), 0o755); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(o.path("containerd")); err != nil {
		return err
	}
	files := []struct {
		name string
		mode os.FileMode
		text string
	}{
		{"cni/conf/10-none.conflist", 0o644, `{"cniVersion":"1.0.0","name":"none","plugins":[{"type":"none"}]}`},
		{"cni/bin/none", 0o755, noNetwork},
		{"containerd.toml", 0o644, o.containerdConfig()},
	}
	for _, f := range files {
		if err := os.WriteFile(o.path(f.name), []byte(f.text), f.mode); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(shimFolder, 0o755); err != nil {
		return err
	}
	if err := mount("tmpfs", shimFolder, "tmpfs", 0); err != nil {
		return o.mountError(err)
	}
	return o.makeDeviceNodes()
}

// noNetwork is a network plugin that gives each pod an address and no network.
const noNetwork = `#!/bin/sh
if [ "$CNI_COMMAND" = ADD ]; then
  printf '{"cniVersion":"1.0.0","interfaces":[{"name":"%s","sandbox":"%s"}],"ips":[{"interface":0,"address":"10.250.0.2/32"}]}' "$CNI_IFNAME" "$CNI_NETNS"
elif [ "$CNI_COMMAND" = VERSION ]; then
  printf '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}'
fi
`

func (o *options) containerdConfig() string {
	return fmt.Sprintf(`version = 3
root = %q
state = %q
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = %q

[plugins.'io.containerd.internal.v1.opt']
  path = %q

# Copies files instead of stacking them: works on every file system.
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "native"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = %q

[plugins.'io.containerd.cri.v1.runtime']
  cdi_spec_dirs = [%q]
  # Lowering a score takes a right that root in a container lacks.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    conf_dir = %q
    bin_dirs = [%q]
    use_internal_loopback = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = %q
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = %q
      Root = %q
`, o.path("containerd/root"), o.path("containerd/run"), o.path("cri.sock"), o.path("containerd/opt"), sleeperImage, o.path("cdi"),
		o.path("cni/conf"), o.path("cni/bin"), filepath.Join(o.Bin, "containerd-shim-runc-v2"), filepath.Join(o.Bin, "runc-plain"),
		o.path("containerd/runc"))
}

// makeDeviceNodes makes STATE/dev with a node for each GPU of the table, and
// those that every container with a GPU gets.
func (o *options) makeDeviceNodes() error {
	var table []struct {
		Minor uint32 `json:"minor"`
	}
	text, err := os.ReadFile(o.GPUs)
	if err != nil {
		return fmt.Errorf("containerd mode needs the GPU table for its device nodes: %w", err)
	}
	if err := json.Unmarshal(text, &table); err != nil {
		return fmt.Errorf("%s is not a list of {minor, uuid}: %w", o.GPUs, err)
	}
	type node struct {
		name         string
		major, minor uint32
	}
	nodes := []node{
		{"nvidiactl", nvidiaMajor, nvidiaCtlMinor}, {"nvidia-uvm", nvidiaUVMMajor, 0}, {"nvidia-uvm-tools", nvidiaUVMMajor, 1},
	}
	for _, gpu := range table {
		nodes = append(nodes, node{fmt.Sprintf("nvidia%d", gpu.Minor), nvidiaMajor, gpu.Minor})
	}
	for _, n := range nodes {
		path := o.path("dev", n.name)
		// The kernel's encoding of small device numbers.
		number := int(n.minor&0xff | n.major<<8 | n.minor&^0xff<<12)
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, number); err != nil {
			return fmt.Errorf("device node %s: %w", path, err)
		}
		// Whatever the umask is.
		if err := os.Chmod(path, 0o666); err != nil {
			return err
		}
	}
	return nil
}

// importImage makes the image around the program sleeper and gives it to
// containerd.
func (o *options) importImage() error {
	archive, err := sleeperArchive(filepath.Join(o.Bin, "sleeper"))
	if err != nil {
		return err
	}
	path := o.path("sleeper.tar")
	if err := os.WriteFile(path, archive, 0o644); err != nil {
		return err
	}
	command := exec.Command(filepath.Join(o.Bin, "ctr"), "--address", o.path("cri.sock"), "--namespace", "k8s.io",
		"--timeout", importDeadline.String(), "images", "import", "--local", "--snapshotter", "native", path)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("the image cannot be imported: %w\n%s", err, output)
	}
	return nil
}

// tarFile is one file of an archive.
type tarFile struct {
	name string
	mode int64
	data []byte
}

func tarOf(files ...tarFile) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), Typeflag: tar.TypeReg}
		if f.data == nil {
			header.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}

// sleeperArchive returns an image archive with one layer.
func sleeperArchive(program string) ([]byte, error) {
	text, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	layer, err := tarOf(tarFile{"dev/", 0o755, nil}, tarFile{"proc/", 0o755, nil}, tarFile{"sys/", 0o755, nil},
		tarFile{"tmp/", 0o777, nil}, tarFile{"etc/", 0o755, nil}, tarFile{"sleeper", 0o755, text})
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/sleeper"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(digest[:])}},
	})
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{sleeperImage}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return nil, err
	}
	return tarOf(tarFile{"config.json", 0o644, config}, tarFile{"layer.tar", 0o644, layer}, tarFile{"manifest.json", 0o644, manifest})
}

// removeCgroups removes the cgroups of a cluster's containers, which outlive
// them when everything is killed at once. Only empty ones can be removed.
func removeCgroups(state string) {
	tasks, err := filepath.Glob(filepath.Join(state, "containerd/run/io.containerd.runtime.v2.task/k8s.io/*"))
	if err != nil {
		return
	}
	for _, task := range tasks {
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			found, err := filepath.Glob(filepath.Join(root, "k8s.io", filepath.Base(task)))
			if err != nil {
				continue
			}
			for _, cgroup := range found {
				removeTree(cgroup)
				_ = os.Remove(filepath.Dir(cgroup))
			}
		}
	}
}

// removeTree removes a cgroup and those below it, the deepest first.
func removeTree(root string) {
	var folders []string
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			folders = append(folders, path)
		}
		return nil
	})
	for i := len(folders) - 1; i >= 0; i-- {
		_ = os.Remove(folders[i])
	}
}
