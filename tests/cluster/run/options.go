package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The longest state path: a socket path ends at 107 bytes, and the longest
// socket below STATE is kubelet/plugins_registry/gpu.nvidia.com@reg.sock.
const maxStateLen = 107 - len("/kubelet/plugins_registry/gpu.nvidia.com@reg.sock")

// options is what a cluster is started with. It is kept as STATE/options.json,
// which is also how the inner process learns it.
type options struct {
	State   string   `json:"state"`
	Bin     string   `json:"bin"`
	Runtime string   `json:"runtime"`
	Node    string   `json:"node"`
	Members []string `json:"members"`
	Join    string   `json:"join"`
	// Server is the API server of the cluster that is joined.
	Server          string        `json:"server"`
	Address         string        `json:"address"`
	PortBase        int           `json:"port_base"`
	Timeout         time.Duration `json:"timeout_ns"`
	KubeletConfig   []string      `json:"kubelet_config"`
	KubeletFlags    []string      `json:"kubelet_flags"`
	APIServerFlags  []string      `json:"apiserver_flags"`
	ControllerFlags []string      `json:"controller_manager_flags"`
	SchedulerFlags  []string      `json:"scheduler_flags"`
	RuntimeFlags    []string      `json:"runtime_flags"`
	Apply           []string      `json:"apply"`
	ServiceAccount  string        `json:"service_account"`
	GPUs            string        `json:"gpus"`
	NVMLState       string        `json:"nvml_state"`
	UntilEOF        bool          `json:"until_eof"`
	// UserNamespace is set by the outer process when it had no root.
	UserNamespace bool `json:"user_namespace"`
	// OuterPID is the process that SIGKILL ends everything with.
	OuterPID int `json:"outer_pid"`
}

// The container runtimes.
const (
	runtimeFake       = "fake"
	runtimeContainerd = "containerd"
)

// path returns a path below the state folder.
func (o *options) path(parts ...string) string {
	return filepath.Join(append([]string{o.State}, parts...)...)
}

// Ports, counted from the base.
const (
	portEtcd = iota
	portEtcdPeer
	portAPI
	portKubelet
	portScheduler
	portControllers
	// portsUsed is how many the cluster listens on; the two after them are
	// left to whoever tests.
	portsUsed
	// portGuard is held by the outer process: it reserves the whole block.
	portGuard = 9
	// portBlock is the distance between two blocks.
	portBlock = 10
)

func (o *options) port(offset int) int { return o.PortBase + offset }

func (o *options) etcdURL() string { return fmt.Sprintf("http://127.0.0.1:%d", o.port(portEtcd)) }

func (o *options) apiURL() string {
	if o.Server != "" {
		return o.Server
	}
	return fmt.Sprintf("https://127.0.0.1:%d", o.port(portAPI))
}

// list is a flag that may be repeated.
type list []string

func (l *list) String() string { return strings.Join(*l, " ") }

func (l *list) Set(value string) error {
	*l = append(*l, value)
	return nil
}

func parseOptions(command, state string, args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("cluster "+command+" STATE", flag.ContinueOnError)
	f.StringVar(&o.Bin, "bin", "", "folder with the programs kube and fakecri (default: where this program is)")
	if command == "up" {
		f.BoolVar(&o.UntilEOF, "until-eof", false, "end when standard input ends, so that no cluster outlives a caller that is killed")
	}
	f.StringVar(&o.Runtime, "runtime", runtimeFake, "container runtime: fake or containerd")
	f.StringVar(&o.Node, "node", "node-0", "name of the node")
	f.Var((*list)(&o.Members), "member", "name of one more `node`, which may join this cluster (may be repeated)")
	f.StringVar(&o.Join, "join", "", "`STATE` of a cluster that runs: be one more node of it, which it has named as --member, instead of a cluster")
	f.StringVar(&o.Address, "address", "", "address of the node, not a loopback one (default: the first of this machine)")
	f.IntVar(&o.PortBase, "port-base", 0, "first of ten ports; 0: the first free block from 16400 on")
	f.DurationVar(&o.Timeout, "timeout", 3*time.Minute, "how long the start may take")
	f.Var((*list)(&o.KubeletConfig), "kubelet-config", "`YAML` merged into the KubeletConfiguration, such as 'syncFrequency: 2s' (may be repeated)")
	f.Var((*list)(&o.KubeletFlags), "kubelet-flag", "one more `flag` for the kubelet (may be repeated)")
	f.Var((*list)(&o.APIServerFlags), "apiserver-flag", "one more `flag` for kube-apiserver (may be repeated)")
	f.Var((*list)(&o.ControllerFlags), "controller-manager-flag", "one more `flag` for kube-controller-manager (may be repeated)")
	f.Var((*list)(&o.SchedulerFlags), "scheduler-flag", "one more `flag` for kube-scheduler (may be repeated)")
	f.Var((*list)(&o.RuntimeFlags), "runtime-flag", "one more `flag` for the fake runtime, such as --seed=7 (may be repeated)")
	f.Var((*list)(&o.Apply), "apply", "YAML `file` to apply before the cluster is called ready (may be repeated)")
	f.StringVar(&o.ServiceAccount, "service-account", "gpu-bridge/gpu-bridge", "`namespace/name` of the daemon's user; made if it is not there")
	f.StringVar(&o.GPUs, "gpus", "", `file with the GPU table of the fake runtime, [{"minor":0,"uuid":"GPU-..."}] (default: STATE/gpus.json)`)
	f.StringVar(&o.NVMLState, "nvml-state", "", "state folder of the fake NVML (default: STATE/nvml)")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil, childStatus(0)
		}
		return nil, childStatus(exitUsage)
	}
	if f.NArg() > 0 {
		return nil, usageError(fmt.Sprintf("%q is not a flag", f.Arg(0)))
	}
	return o, o.complete(state)
}

// complete fills in defaults and makes paths absolute: the inner process and
// the components have other working folders.
func (o *options) complete(state string) error {
	self, err := exec.LookPath(os.Args[0])
	if err != nil {
		return err
	}
	o.State = state
	if o.Bin == "" {
		// Where this program was called by, which may be a link: the others are
		// linked beside it.
		o.Bin = filepath.Dir(self)
	}
	if o.GPUs == "" {
		o.GPUs = filepath.Join(state, "gpus.json")
	}
	if o.NVMLState == "" {
		o.NVMLState = filepath.Join(state, "nvml")
	}
	paths := []*string{&o.State, &o.Bin, &o.GPUs, &o.NVMLState}
	if o.Join != "" {
		paths = append(paths, &o.Join)
	}
	for i := range o.Apply {
		paths = append(paths, &o.Apply[i])
	}
	for _, path := range paths {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
		for _, hidden := range hiddenFolders {
			if strings.HasPrefix(*path, hidden+"/") {
				return usageError(fmt.Sprintf("%s is below %s, which the cluster replaces by an empty folder of its own: use another place", *path, hidden))
			}
		}
	}
	for _, file := range o.Apply {
		if _, err := os.Stat(file); err != nil {
			return usageError(fmt.Sprintf("--apply: %v", err))
		}
	}
	if len(o.State) > maxStateLen {
		return usageError(fmt.Sprintf("the state folder's path has %d bytes, and with more than %d its sockets cannot be reached: use a shorter one than %s", len(o.State), maxStateLen, o.State))
	}
	if namespace, name, ok := strings.Cut(o.ServiceAccount, "/"); !ok || namespace == "" || name == "" {
		return usageError(fmt.Sprintf("--service-account %q is not namespace/name", o.ServiceAccount))
	}
	if err := o.checkJoin(); err != nil {
		return err
	}
	return o.checkPrograms()
}

// checkJoin finds the API server of the cluster that is joined.
func (o *options) checkJoin() error {
	if o.Join == "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(o.Join, "ready")); err != nil {
		return usageError(fmt.Sprintf("--join: no cluster is ready in %s: %v", o.Join, err))
	}
	joined, err := loadOptions(o.Join)
	if err != nil {
		return err
	}
	if !slices.Contains(joined.Members, o.Node) {
		return usageError(fmt.Sprintf("--join: the cluster in %s knows no node %s: start it with --member=%s", o.Join, o.Node, o.Node))
	}
	o.Server = joined.apiURL()
	return nil
}

// checkPrograms looks for what the chosen runtime needs.
func (o *options) checkPrograms() error {
	programs, script := []string{"kube"}, "build.sh"
	switch o.Runtime {
	case runtimeFake:
		programs = append(programs, "fakecri")
	case runtimeContainerd:
		programs, script = append(programs, containerdPrograms...), "build-containerd.sh"
	default:
		return usageError(fmt.Sprintf("--runtime %q is neither %s nor %s", o.Runtime, runtimeFake, runtimeContainerd))
	}
	for _, program := range programs {
		if _, err := os.Stat(filepath.Join(o.Bin, program)); err != nil {
			return usageError(fmt.Sprintf("%v: run tests/cluster/%s, or say --bin", err, script))
		}
	}
	return nil
}

// save writes STATE/options.json.
func (o *options) save() error {
	text, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(o.path("options.json"), text, 0o644)
}

// loadOptions reads STATE/options.json.
func loadOptions(state string) (*options, error) {
	text, err := os.ReadFile(filepath.Join(state, "options.json"))
	if err != nil {
		return nil, fmt.Errorf("%s is not the state folder of a cluster: %w", state, err)
	}
	o := &options{}
	return o, json.Unmarshal(text, o)
}
