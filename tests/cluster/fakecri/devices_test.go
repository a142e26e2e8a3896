package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	uuidA = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
	uuidB = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
)

// specFolder makes a CDI folder with one file per text.
func specFolder(t *testing.T, texts ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i, text := range texts {
		if err := os.WriteFile(filepath.Join(dir, string(rune('a'+i))+".json"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func spec(device, node string) string {
	return `{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","containerEdits":{"env":["EVERY=1"]},"devices":[{"name":"` + device +
		`","containerEdits":{"env":["MY_UUID=` + device + `"],"deviceNodes":[{"path":"` + node + `","hostPath":"/dev/null"}]}}]}`
}

func wants(names ...string) *cri.ContainerConfig {
	config := &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "main"}}
	for _, name := range names {
		config.CDIDevices = append(config.CDIDevices, &cri.CDIDevice{Name: name})
	}
	return config
}

func withEnv(config *cri.ContainerConfig, pairs ...string) *cri.ContainerConfig {
	for i := 0; i < len(pairs); i += 2 {
		config.Envs = append(config.Envs, &cri.KeyValue{Key: pairs[i], Value: []byte(pairs[i+1])})
	}
	return config
}

func TestADeviceOfASpecFileIsResolved(t *testing.T) {
	dir := specFolder(t, spec("gpu-0", "/dev/nvidia0"))
	got, err := resolve([]string{dir}, []string{"nvidia.com/gpu=gpu-0"})
	if err != nil {
		t.Fatal(err)
	}
	if want := []resolvedNode{{"/dev/nvidia0", "/dev/null"}}; !slices.Equal(got.DeviceNodes, want) {
		t.Errorf("device nodes are %v, not %v", got.DeviceNodes, want)
	}
	if got.Env["EVERY"] != "1" || got.Env["MY_UUID"] != "gpu-0" {
		t.Errorf("the edits of the file and of the device are both wanted, got %v", got.Env)
	}
}

func TestADeviceThatNoFileDescribesIsNamedInTheError(t *testing.T) {
	dir := specFolder(t, spec("gpu-0", "/dev/nvidia0"))
	_, err := resolve([]string{dir}, []string{"nvidia.com/gpu=gpu-0", "nvidia.com/gpu=gpu-7"})
	if err == nil || !strings.Contains(err.Error(), "unresolvable CDI devices nvidia.com/gpu=gpu-7") {
		t.Errorf("the error is %v", err)
	}
}

func TestABrokenSpecFileIsNamedInTheError(t *testing.T) {
	dir := specFolder(t, `{"cdiVersion":"0.6.0","kind":`)
	_, err := resolve([]string{dir}, []string{"nvidia.com/gpu=gpu-0"})
	if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "a.json")) {
		t.Errorf("the error is %v", err)
	}
}

func TestADeviceThatTwoFilesDescribeIsRefused(t *testing.T) {
	dir := specFolder(t, spec("gpu-0", "/dev/nvidia0"), spec("gpu-0", "/dev/nvidia1"))
	if _, err := resolve([]string{dir}, []string{"nvidia.com/gpu=gpu-0"}); err == nil {
		t.Error("a name with two meanings was resolved")
	}
}

func TestTheGPUsOfAContainerAreFound(t *testing.T) {
	table := map[string]string{"0": uuidA, "1": uuidB}
	dir := specFolder(t, spec("gpu-1", "/dev/nvidia1"), spec(uuidA, "/dev/other"))
	hostDevice := wants()
	hostDevice.Devices = []*cri.Device{{ContainerPath: "/dev/nvidia0", HostPath: "/dev/nvidia0"}, {ContainerPath: "/dev/nvidiactl", HostPath: "/dev/nvidiactl"}}
	cases := []struct {
		name   string
		config *cri.ContainerConfig
		want   []string
	}{
		{"by the CDI device node", wants("nvidia.com/gpu=gpu-1"), []string{uuidB}},
		{"by the CDI device name", wants("nvidia.com/gpu=" + uuidA), []string{uuidA}},
		{"by the kubelet's device", hostDevice, []string{uuidA}},
		{"by the environment", withEnv(wants(), "NVIDIA_VISIBLE_DEVICES", uuidA+","+uuidB), []string{uuidA, uuidB}},
		{"by the node before the environment", withEnv(wants("nvidia.com/gpu=gpu-1"), "NVIDIA_VISIBLE_DEVICES", uuidA), []string{uuidB}},
		{"none", withEnv(wants(), "NVIDIA_VISIBLE_DEVICES", "void"), nil},
	}
	for _, c := range cases {
		resolved, err := resolve([]string{dir}, requestedCDI(c.config))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := gpusOf(table, c.config, resolved); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, not %v", c.name, got, c.want)
		}
	}
	unknown := wants()
	unknown.Devices = []*cri.Device{{ContainerPath: "/dev/nvidia9"}}
	if got := gpusOf(table, unknown, nil); !slices.Equal(got, []string{"minor:9"}) {
		t.Errorf("a minor that the table lacks: %v", got)
	}
}

func TestDevicesOfAnnotationsAreAskedForToo(t *testing.T) {
	config := wants("a/b=1")
	config.Annotations = map[string]string{"cdi.k8s.io/plugin_x": "a/b=1,a/b=2", "other": "a/b=3"}
	if got, want := requestedCDI(config), []string{"a/b=1", "a/b=2"}; !slices.Equal(got, want) {
		t.Errorf("%v, not %v", got, want)
	}
}

func TestAGPUTableThatIsNoListIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gpus.json")
	if table, err := gpuTable(path); err != nil || table != nil {
		t.Errorf("a missing file: %v, %v", table, err)
	}
	if err := os.WriteFile(path, []byte(`{"minor":0}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := gpuTable(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("the error is %v", err)
	}
}
