package main

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// adminToken is the bearer token of the cluster's admin. The API server
// listens on loopback only and lives as long as a test.
const adminToken = "admin-token"

// clusterDNS is named to the kubelet so that it does not warn each pod that
// there is none. Nothing listens there.
const clusterDNS = "10.96.0.10"

// Folders below STATE. The first list is emptied at each start.
var (
	freshFolders = []string{
		"etcd", "pki", "kubelet/device-plugins", "kubelet/plugins_registry", "kubelet/plugins", "kubelet-pki",
		"log", "pod-logs", "volume-plugins", "cdi", "proc", "sysctl",
	}
	freshFiles  = []string{"cri.jsonl", "audit.log", "cri.sock", "control.sock"}
	keptFolders = []string{"nvml"}
)

// layOut makes the folders and files that the components start from.
func (o *options) layOut() error {
	for _, name := range freshFolders {
		// The parent goes: the kubelet keeps more in its folder than is listed.
		top, _, _ := strings.Cut(name, "/")
		if err := os.RemoveAll(o.path(top)); err != nil {
			return err
		}
	}
	for _, name := range freshFiles {
		if err := os.RemoveAll(o.path(name)); err != nil {
			return err
		}
	}
	for _, name := range append(freshFolders, keptFolders...) {
		if err := os.MkdirAll(o.path(name), 0o755); err != nil {
			return err
		}
	}
	if err := o.fakeProc(); err != nil {
		return err
	}
	layOutAPI := o.layOutAPIServer
	if o.Join != "" {
		layOutAPI = o.layOutJoined
	}
	if err := layOutAPI(); err != nil {
		return err
	}
	for name, token := range map[string]string{"admin": adminToken, "node": nodeToken(o.Node)} {
		if err := o.writeKubeconfig(name, token); err != nil {
			return err
		}
	}
	return o.writeKubeletConfig()
}

// nodeToken is the bearer token of a node's kubelet.
func nodeToken(node string) string { return "node-token-" + node }

// nodes are all that may be in the cluster.
func (o *options) nodes() []string { return append([]string{o.Node}, o.Members...) }

// layOutAPIServer makes what the API server and its neighbours start from.
func (o *options) layOutAPIServer() error {
	if err := writePKI(o.path("pki"), o.Address); err != nil {
		return err
	}
	const scheduler, manager = "scheduler-token", "controller-manager-token"
	users := []struct{ name, token, user, groups string }{
		{"admin", adminToken, "admin", "system:masters"},
		{"scheduler", scheduler, "system:kube-scheduler", ""},
		{"controller-manager", manager, "system:kube-controller-manager", "system:masters"},
	}
	for _, node := range o.nodes() {
		users = append(users, struct{ name, token, user, groups string }{node, nodeToken(node), "system:node:" + node, "system:nodes"})
	}
	var tokens strings.Builder
	for _, u := range users {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", u.token, u.user, u.name, u.groups)
	}
	if err := os.WriteFile(o.path("tokens.csv"), []byte(tokens.String()), 0o600); err != nil {
		return err
	}
	for name, token := range map[string]string{"scheduler": scheduler, "controller-manager": manager} {
		if err := o.writeKubeconfig(name, token); err != nil {
			return err
		}
	}
	return os.WriteFile(o.path("audit.yaml"), []byte(o.auditPolicy()), 0o644)
}

// layOutJoined takes over by what the API server of the cluster is known.
func (o *options) layOutJoined() error {
	const authority = "pki/ca.crt"
	text, err := os.ReadFile(filepath.Join(o.Join, authority))
	if err != nil {
		return err
	}
	return os.WriteFile(o.path(authority), text, 0o644)
}

// fakeProc gives the fake /proc what a daemon reads there besides processes.
func (o *options) fakeProc() error {
	const bootID = "sys/kernel/random/boot_id"
	text, err := os.ReadFile("/proc/" + bootID)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.path("proc", "sys/kernel/random"), 0o755); err != nil {
		return err
	}
	return os.WriteFile(o.path("proc", bootID), text, 0o644)
}

// writeKubeconfig writes STATE/NAME.kubeconfig.
func (o *options) writeKubeconfig(name, token string) error {
	authority, err := os.ReadFile(o.path("pki", "ca.crt"))
	if err != nil {
		return err
	}
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": o.apiURL(), "certificate-authority-data": base64.StdEncoding.EncodeToString(authority),
		}}},
		"users":    []any{map[string]any{"name": name, "user": map[string]any{"token": token}}},
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": name}}},
	})
	if err != nil {
		return err
	}
	// Renamed into place, for a daemon may read it while it is written anew.
	path := o.path(name + ".kubeconfig")
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// daemonUser is the name by which the API server knows the daemon.
func (o *options) daemonUser() string {
	namespace, name, _ := strings.Cut(o.ServiceAccount, "/")
	return "system:serviceaccount:" + namespace + ":" + name
}

// auditPolicy logs what the daemon does, and how the kubelet fares with
// claims: it may read one only after the node authorizer has seen the pod
// bound, and its refusals are no fault of the daemon.
func (o *options) auditPolicy() string {
	kubelets := make([]string, 0, len(o.nodes()))
	for _, node := range o.nodes() {
		kubelets = append(kubelets, fmt.Sprintf("%q", "system:node:"+node))
	}
	return fmt.Sprintf(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: [%q]}
- level: Metadata
  users: [%s]
  resources: [{group: resource.k8s.io, resources: [resourceclaims, resourceclaims/status]}]
- {level: None}
`, o.daemonUser(), strings.Join(kubelets, ", "))
}

// writeKubeletConfig writes the kubelet's configuration: its defaults, less
// what needs the machine's cgroups, firewall or disk to be the kubelet's own.
func (o *options) writeKubeletConfig() error {
	none := "0%"
	config := map[string]any{
		"apiVersion":                    "kubelet.config.k8s.io/v1beta1",
		"kind":                          "KubeletConfiguration",
		"containerRuntimeEndpoint":      "unix://" + o.path("cri.sock"),
		"failCgroupV1":                  false,
		"cgroupDriver":                  "cgroupfs",
		"cgroupsPerQOS":                 false,
		"enforceNodeAllocatable":        []string{},
		"failSwapOn":                    false,
		"makeIPTablesUtilChains":        false,
		"localStorageCapacityIsolation": false,
		"imageGCHighThresholdPercent":   100,
		"evictionHard": map[string]any{
			"memory.available": none, "nodefs.available": none, "nodefs.inodesFree": none, "imagefs.available": none,
		},
		"address":         "127.0.0.1",
		"port":            o.port(portKubelet),
		"healthzPort":     0,
		"readOnlyPort":    0,
		"authentication":  map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":   map[string]any{"mode": "AlwaysAllow"},
		"clusterDNS":      []string{clusterDNS},
		"podLogsDir":      o.path("pod-logs"),
		"volumePluginDir": o.path("volume-plugins"),
	}
	if o.UserNamespace {
		config["featureGates"] = map[string]any{"KubeletInUserNamespace": true}
	}
	for _, text := range o.KubeletConfig {
		var extra map[string]any
		if err := yaml.Unmarshal([]byte(text), &extra); err != nil {
			return usageError(fmt.Sprintf("--kubelet-config %q is not a YAML mapping: %v", text, err))
		}
		merge(config, extra)
	}
	text, err := yaml.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(o.path("kubelet.yaml"), text, 0o644)
}

// merge lays extra over base; mappings are merged, all else is replaced.
func merge(base, extra map[string]any) {
	for key, value := range extra {
		have, both := base[key].(map[string]any)
		inner, ok := value.(map[string]any)
		if both && ok {
			merge(have, inner)
		} else {
			base[key] = value
		}
	}
}
