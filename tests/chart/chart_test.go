// Package chart renders manifests/chart/gpu-bridge with Helm's own loader, schema check and template engine, which is
// what `helm template` does, and compares what comes out with manifests/base.
package chart

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	yamldecoder "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

const manifests = "../../manifests"

type object = map[string]any

func TestMain(m *testing.M) {
	// Helm tells of every link that it follows.
	log.SetOutput(io.Discard)
	m.Run()
}

// render returns the objects of a release by kind and name.
func render(t *testing.T, namespace, values string) (map[string]object, error) {
	t.Helper()
	chart, err := loader.Load(filepath.Join(manifests, "chart/gpu-bridge"))
	if err != nil {
		t.Fatal(err)
	}
	given := object{}
	if err := yaml.Unmarshal([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	capabilities := chartutil.DefaultCapabilities.Copy()
	capabilities.KubeVersion = chartutil.KubeVersion{Version: "v1.37.2", Major: "1", Minor: "37"}
	release := chartutil.ReleaseOptions{Name: "gpu-bridge", Namespace: namespace, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, given, release, capabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	found := map[string]object{}
	for name, text := range files {
		if strings.HasSuffix(name, ".yaml") {
			collect(t, name, []byte(text), found)
		}
	}
	return found, nil
}

// mustRender is render for values that have to be good.
func mustRender(t *testing.T, namespace, values string) map[string]object {
	t.Helper()
	found, err := render(t, namespace, values)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// collect adds every document of a file.
func collect(t *testing.T, name string, text []byte, found map[string]object) {
	t.Helper()
	documents := yamldecoder.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var read object
		if err := yaml.UnmarshalStrict(document, &read); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, document)
		}
		if len(read) == 0 {
			continue
		}
		key := read["kind"].(string) + "/" + at(read, "metadata", "name").(string)
		if _, twice := found[key]; twice {
			t.Fatalf("%s: %s comes twice", name, key)
		}
		found[key] = read
	}
}

// base returns the objects of manifests/base, without the namespace, which Helm makes.
func base(t *testing.T, folders ...string) map[string]object {
	t.Helper()
	found := map[string]object{}
	for _, folder := range append([]string{"base"}, folders...) {
		files, err := filepath.Glob(filepath.Join(manifests, folder, "*.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", folder, err)
		}
		for _, file := range files {
			if filepath.Base(file) == "kustomization.yaml" || filepath.Base(file) == "namespace.yaml" {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			collect(t, file, text, found)
		}
	}
	return found
}

// at follows keys, and numbers into lists.
func at(value any, path ...any) any {
	for _, step := range path {
		switch step := step.(type) {
		case string:
			inner, ok := value.(object)
			if !ok {
				return nil
			}
			value = inner[step]
		case int:
			value = value.([]any)[step]
		}
	}
	return value
}

// named returns the element of a list with that name.
func named(list any, name string) object {
	for _, element := range list.([]any) {
		if element.(object)["name"] == name {
			return element.(object)
		}
	}
	return nil
}

func TestWithoutValuesTheChartIsTheBase(t *testing.T) {
	rendered, expected := mustRender(t, "gpu-bridge", ""), base(t)
	if got, want := keys(rendered), keys(expected); !slices.Equal(got, want) {
		t.Fatalf("the objects are %v, and those of the base %v", got, want)
	}
	for key, want := range expected {
		if got := rendered[key]; !reflect.DeepEqual(got, want) {
			t.Errorf("%s differs from the base:\n%v\n%v", key, got, want)
		}
	}
}

func TestInAnotherNamespaceRightsAndPoliciesAreThoseOfItsServiceAccount(t *testing.T) {
	rendered := mustRender(t, "gpus", "networkPolicy: {enabled: true}")
	for key, read := range rendered {
		namespace := at(read, "metadata", "namespace")
		if namespace != nil && namespace != "gpus" {
			t.Errorf("%s is in %v", key, namespace)
		}
		text, err := yaml.Marshal(read)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "namespace: gpu-bridge") || strings.Contains(string(text), "serviceaccount:gpu-bridge:") {
			t.Errorf("%s names the namespace of the base:\n%s", key, text)
		}
		if strings.HasPrefix(key, "ClusterRoleBinding/") && at(read, "subjects", 0, "namespace") != "gpus" {
			t.Errorf("%s is for %v", key, at(read, "subjects", 0))
		}
		if strings.HasPrefix(key, "ValidatingAdmissionPolicy/") && !strings.Contains(string(text), "system:serviceaccount:gpus:gpu-bridge") {
			t.Errorf("%s is not for the daemon's user:\n%s", key, text)
		}
	}
	if rendered["NetworkPolicy/gpu-bridge"] == nil {
		t.Error("there is no NetworkPolicy")
	}
}

func TestValuesThatNvidiasUsersKnowDoWhatTheySay(t *testing.T) {
	rendered := mustRender(t, "gpu-bridge", `
image: {repository: example.org/gpu-bridge, tag: v9, pullPolicy: Always}
imagePullSecrets: [{name: secret}]
config: {mode: dra, limits: {legacy: 5, dra: 3}, devicePlugin: {deviceListStrategy: [envvar, cdi-cri], passDeviceSpecs: true}, devices: [{index: 7, faces: [legacy]}], profiles: {claims: {limits: {legacy: 0}}}}
nvidiaDriverRoot: /run/nvidia/driver
nvidiaDevRoot: /
nvidiaDriverLibraries: /run/nvidia/driver/usr/lib64
kubeletRootDir: /data/kubelet
cdiRoot: /etc/cdi
log: debug
priorityClassName: high
tolerations: [{key: nvidia.com/gpu, operator: Exists}]
nodeSelector: {pool: gpu}
affinity: {nodeAffinity: {}}
updateStrategy: {type: OnDelete}
resources: {limits: {memory: 1Gi}}
podAnnotations: {a: b}
podLabels: {team: x}
deviceClass: {create: false}
`)
	if rendered["DeviceClass/gpu.nvidia.com"] != nil {
		t.Error("deviceClass.create does nothing")
	}
	config := at(rendered["ConfigMap/gpu-bridge"], "data", "config.yaml").(string)
	for _, line := range []string{"apiVersion: gpu-bridge.dev/v1alpha1\n", "mode: dra\n", "legacy: 5\n", "- envvar\n", "passDeviceSpecs: true\n", "index: 7\n", "profiles:\n"} {
		if !strings.Contains(config, line) {
			t.Errorf("the configuration lacks %q:\n%s", line, config)
		}
	}
	set := rendered["DaemonSet/gpu-bridge"]
	template := at(set, "spec", "template")
	pod := at(template, "spec")
	container := at(pod, "containers", 0)
	for _, check := range []struct{ got, want any }{
		{at(container, "image"), "example.org/gpu-bridge:v9"},
		{at(container, "imagePullPolicy"), "Always"},
		{at(container, "resources", "limits", "memory"), "1Gi"},
		{at(pod, "imagePullSecrets", 0, "name"), "secret"},
		{at(pod, "priorityClassName"), "high"},
		{at(pod, "tolerations", 0, "key"), "nvidia.com/gpu"},
		{at(pod, "nodeSelector", "pool"), "gpu"},
		{at(pod, "affinity"), object{"nodeAffinity": object{}}},
		{at(set, "spec", "updateStrategy", "type"), "OnDelete"},
		{at(template, "metadata", "annotations", "a"), "b"},
		{at(template, "metadata", "labels", "team"), "x"},
		{at(template, "metadata", "labels", "app.kubernetes.io/name"), "gpu-bridge"},
		{at(set, "spec", "selector", "matchLabels", "app.kubernetes.io/name"), "gpu-bridge"},
	} {
		if !reflect.DeepEqual(check.got, check.want) {
			t.Errorf("%v where %v was expected", check.got, check.want)
		}
	}
	for name, want := range map[string]string{
		"GPU_BRIDGE_DRIVER_ROOT":          "/run/nvidia/driver",
		"GPU_BRIDGE_DRIVER_ROOT_CTR_PATH": "/driver-root",
		"GPU_BRIDGE_NVML_LIBRARY":         "/driver-root/usr/lib64/libnvidia-ml.so.1",
		"GPU_BRIDGE_DEV_ROOT":             "/",
		"GPU_BRIDGE_KUBELET_DIR":          "/data/kubelet",
		"GPU_BRIDGE_CDI_DIR":              "/etc/cdi",
		"GPU_BRIDGE_LOG":                  "debug",
		"GPU_BRIDGE_PROC_ROOT":            "/host/proc",
	} {
		if variable := named(at(container, "env"), name); variable["value"] != want {
			t.Errorf("%s is %v and not %s", name, variable, want)
		}
	}
	for name, want := range map[string][2]string{
		"kubelet":          {"/data/kubelet", "/data/kubelet"},
		"plugins":          {"/data/kubelet/plugins", "/data/kubelet/plugins"},
		"plugins-registry": {"/data/kubelet/plugins_registry", "/data/kubelet/plugins_registry"},
		"device-plugins":   {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/device-plugins"},
		"cdi":              {"/etc/cdi", "/etc/cdi"},
		"driver-libraries": {"/run/nvidia/driver/usr/lib64", "/driver-root/usr/lib64"},
		"driver-programs":  {"/run/nvidia/driver/usr/bin", "/driver-root/usr/bin"},
		"proc":             {"/proc", "/host/proc"},
	} {
		host := at(named(at(pod, "volumes"), name), "hostPath", "path")
		inside := named(at(container, "volumeMounts"), name)["mountPath"]
		if host != want[0] || inside != want[1] {
			t.Errorf("%s is %v on the host and %v in the container", name, host, inside)
		}
	}
}

func TestFromTheApiServerTheConfigurationIsReadByNameWithTheRightOfTheComponent(t *testing.T) {
	rendered := mustRender(t, "gpus", "configSource: api")
	for key, want := range base(t, "components/config-map") {
		if !strings.HasPrefix(key, "Role/") && !strings.HasPrefix(key, "RoleBinding/") {
			continue
		}
		read := rendered[key]
		if read == nil || at(read, "metadata", "namespace") != "gpus" {
			t.Fatalf("%s is %v", key, read)
		}
		for _, part := range []string{"rules", "roleRef"} {
			if !reflect.DeepEqual(read[part], want[part]) {
				t.Errorf("%s differs in %s: %v", key, part, read[part])
			}
		}
		if key == "RoleBinding/gpu-bridge-config" && at(read, "subjects", 0, "namespace") != "gpus" {
			t.Errorf("%s is for %v", key, at(read, "subjects", 0))
		}
	}
	pod := at(rendered["DaemonSet/gpu-bridge"], "spec", "template", "spec")
	container := at(pod, "containers", 0)
	if variable := named(at(container, "env"), "GPU_BRIDGE_CONFIG_MAP"); variable["value"] != "gpus/gpu-bridge" {
		t.Errorf("the source is %v", variable)
	}
	for _, found := range []object{named(at(container, "env"), "GPU_BRIDGE_CONFIG"), named(at(container, "volumeMounts"), "config"), named(at(pod, "volumes"), "config")} {
		if found != nil {
			t.Errorf("%v is left", found)
		}
	}
	mounted := mustRender(t, "gpus", "")
	if mounted["Role/gpu-bridge-config"] != nil {
		t.Error("a right that nobody needs is given")
	}
	if named(at(mounted["DaemonSet/gpu-bridge"], "spec", "template", "spec", "containers", 0, "env"), "GPU_BRIDGE_CONFIG") == nil {
		t.Error("nothing is read")
	}
}

func TestWrongValuesAreRefusedByTheSchema(t *testing.T) {
	for _, values := range []string{
		"config: {mode: drianed}",
		"configSource: file",
		"confg: {}",
		"kubeletRootDir: kubelet",
		"image: {repository: ''}",
		"config: {limits: {legacy: -1}}",
		"config: {offers: {settle: soon}}",
		"config: {devicePlugin: {deviceListStrategy: cdi}}",
		"config: {offers: {minLegacy: some}}",
		"config: {devices: [{index: 0}]}",
		"config: {profiles: [claims]}",
		"tolerations: {}",
		"deviceClass: {create: 'yes'}",
	} {
		if _, err := render(t, "gpu-bridge", values); err == nil {
			t.Errorf("%s is taken", values)
		}
	}
}

// What is found below /driver-root in the container would be named on the host where it is not.
func TestLibrariesBesideTheDriversRootAreRefused(t *testing.T) {
	_, err := render(t, "gpu-bridge", "nvidiaDriverRoot: /run/nvidia/driver")
	if err == nil || !strings.Contains(err.Error(), "nvidiaDriverLibraries (/usr/lib/x86_64-linux-gnu) is not below") {
		t.Errorf("%v", err)
	}
}

func keys(objects map[string]object) []string {
	return slices.Sorted(maps.Keys(objects))
}
