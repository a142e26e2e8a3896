package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// controllers are those that a test of a node daemon can notice; each of the
// others costs processor time and nothing else.
var controllers = []string{
	"clusterrole-aggregation-controller", "daemonset-controller", "deployment-controller", "device-taint-eviction-controller",
	"garbage-collector-controller", "job-controller", "namespace-controller", "node-lifecycle-controller",
	"pod-garbage-collector-controller", "replicaset-controller", "resourceclaim-controller", "resourcequota-controller",
	"root-ca-certificate-publisher-controller", "serviceaccount-controller", "serviceaccount-token-controller",
	"statefulset-controller", "taint-eviction-controller",
}

// cluster is the running cluster, seen from the first process of its
// namespaces.
type cluster struct {
	o          *options
	api        *client
	components map[string]*component
	order      []string
	failed     chan error
	began      time.Time
}

// runInside is the first process of the namespaces.
func runInside(state string) error {
	o, err := loadOptions(state)
	if err != nil {
		return err
	}
	if err := o.layOut(); err != nil {
		return err
	}
	if err := o.mountAll(); err != nil {
		return err
	}
	if o.Runtime == runtimeContainerd {
		if err := o.layOutContainerd(); err != nil {
			return err
		}
	}
	cl := &cluster{o: o, components: map[string]*component{}, failed: make(chan error, 1), began: time.Now()}
	cl.api, err = newClient(o)
	if err != nil {
		return err
	}
	cl.define()
	started := make(chan error, 1)
	go func() { started <- cl.start() }()
	select {
	case err := <-started:
		if err != nil {
			return err
		}
	case err := <-cl.failed:
		return err
	}
	return <-cl.failed
}

// left is what remains of the time for the start.
func (cl *cluster) left() time.Duration { return max(cl.o.Timeout-time.Since(cl.began), 0) }

// stages are the components, those together that start side by side.
func (cl *cluster) stages() [][]string {
	if cl.o.Join != "" {
		return [][]string{{"cri"}, {"kubelet"}}
	}
	return [][]string{
		{"etcd", "cri"},
		{"kube-apiserver"},
		{"kubelet", "kube-controller-manager", "kube-scheduler"},
	}
}

// start brings everything up in the order of need, and then says so.
func (cl *cluster) start() error {
	for i, stage := range cl.stages() {
		for _, name := range stage {
			if err := cl.components[name].start(); err != nil {
				return err
			}
		}
		for _, name := range stage {
			if err := cl.components[name].waitHealthy(cl.left()); err != nil {
				return err
			}
		}
		if cl.o.Runtime == runtimeContainerd && i == 0 {
			if err := cl.o.importImage(); err != nil {
				return err
			}
		}
		fmt.Printf("%s after %d ms\n", strings.Join(stage, ", "), time.Since(cl.began).Milliseconds())
	}
	kubelet := cl.components["kubelet"]
	err := await("node "+cl.o.Node+" is Ready", cl.left(), func() error { return cl.api.nodeReady(cl.o.Node) }, kubelet.tail)
	if err != nil {
		return err
	}
	if manager := cl.components["kube-controller-manager"]; manager != nil {
		err = await("the default service account exists", cl.left(), func() error {
			return cl.api.get("/api/v1/namespaces/default/serviceaccounts/default", nil)
		}, manager.tail)
		if err != nil {
			return err
		}
	}
	if err := cl.o.daemonIdentity(cl.api); err != nil {
		return fmt.Errorf("the daemon's user cannot be made: %w", err)
	}
	for _, file := range cl.o.Apply {
		if err := applyCommand(cl.o.State, []string{file}); err != nil {
			return err
		}
	}
	if err := cl.serveControl(); err != nil {
		return err
	}
	return cl.sayReady()
}

// sayReady writes STATE/ready, whole or not at all.
func (cl *cluster) sayReady() error {
	text, err := json.Marshal(map[string]any{
		"server": cl.o.apiURL(), "node": cl.o.Node, "port_base": cl.o.PortBase, "pid": cl.o.OuterPID,
		"kubeconfig": cl.o.path("admin.kubeconfig"), "user_namespace": cl.o.UserNamespace,
		"start_ms": time.Since(cl.began).Milliseconds(),
	})
	if err != nil {
		return err
	}
	fmt.Printf("ready: %s\n", text)
	path := cl.o.path("ready")
	if err := os.WriteFile(path+".new", append(text, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// add defines one component.
func (cl *cluster) add(name string, healthy func() error, argv ...string) {
	cl.components[name] = &component{
		name: name, argv: argv, healthy: healthy, failed: cl.failed, logPath: cl.o.path("log", name+".log"),
	}
	cl.order = append(cl.order, name)
}

// define names the components and their command lines.
func (cl *cluster) define() {
	kube := filepath.Join(cl.o.Bin, "kube")
	if cl.o.Join == "" {
		cl.defineControlPlane(kube)
	}
	cl.defineNode(kube)
}

// defineNode is what every node has.
func (cl *cluster) defineNode(kube string) {
	o := cl.o
	cri := []string{filepath.Join(o.Bin, "containerd"), "--config=" + o.path("containerd.toml"), "--log-level=info"}
	if o.Runtime == runtimeFake {
		cri = []string{
			filepath.Join(o.Bin, "fakecri"), "--listen=" + o.path("cri.sock"), "--record=" + o.path("cri.jsonl"),
			"--cdi-dir=" + o.path("cdi"), "--gpus=" + o.GPUs, "--nvml-state=" + o.NVMLState, "--proc-root=" + o.path("proc"),
		}
	}
	cl.add("cri", socketHealth(o.path("cri.sock")), append(cri, o.RuntimeFlags...)...)

	cl.add("kubelet", cl.kubeletHealth(), append([]string{
		kube, "kubelet", "--config=" + o.path("kubelet.yaml"), "--kubeconfig=" + o.path("node.kubeconfig"),
		"--root-dir=" + o.path("kubelet"), "--cert-dir=" + o.path("kubelet-pki"),
		"--hostname-override=" + o.Node, "--node-ip=" + o.Address, "-v=2",
	}, o.KubeletFlags...)...)
}

// defineControlPlane is what a cluster has once.
func (cl *cluster) defineControlPlane(kube string) {
	o := cl.o
	peer := fmt.Sprintf("http://127.0.0.1:%d", o.port(portEtcdPeer))
	loopback := func(port int) []string {
		return []string{"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", o.port(port))}
	}

	cl.add("etcd", httpHealth(o.etcdURL()+"/health"), kube, "etcd", "--name=test", "--data-dir="+o.path("etcd", "data"), "--unsafe-no-fsync",
		"--log-level=warn", "--listen-client-urls="+o.etcdURL(), "--advertise-client-urls="+o.etcdURL(),
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=test="+peer)

	api := append([]string{
		kube, "kube-apiserver", "--etcd-servers=" + o.etcdURL(), "--advertise-address=" + o.Address,
		"--tls-cert-file=" + o.path("pki", "server.crt"), "--tls-private-key-file=" + o.path("pki", "server.key"),
		"--token-auth-file=" + o.path("tokens.csv"), "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged", "--service-cluster-ip-range=" + serviceNetwork,
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + o.path("pki", "sa.key"),
		"--service-account-signing-key-file=" + o.path("pki", "sa.key"),
		"--audit-log-path=" + o.path("audit.log"), "--audit-policy-file=" + o.path("audit.yaml"),
		"--enable-priority-and-fairness=false",
	}, loopback(portAPI)...)
	cl.add("kube-apiserver", func() error { return cl.api.get("/readyz", nil) }, append(api, o.APIServerFlags...)...)

	scheduler := append([]string{
		kube, "kube-scheduler", "--kubeconfig=" + o.path("scheduler.kubeconfig"), "--leader-elect=false",
	}, loopback(portScheduler)...)
	cl.add("kube-scheduler", cl.localHealth(portScheduler), append(scheduler, o.SchedulerFlags...)...)

	manager := append([]string{
		kube, "kube-controller-manager", "--kubeconfig=" + o.path("controller-manager.kubeconfig"), "--leader-elect=false",
		"--service-account-private-key-file=" + o.path("pki", "sa.key"), "--root-ca-file=" + o.path("pki", "ca.crt"),
		"--controllers=" + strings.Join(controllers, ","),
	}, loopback(portControllers)...)
	cl.add("kube-controller-manager", cl.localHealth(portControllers), append(manager, o.ControllerFlags...)...)
}

// healthClient asks programs on this machine that serve with a certificate of
// their own making.
var healthClient = &http.Client{
	Timeout:   callTimeout,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
}

func httpHealth(url string) func() error {
	return func() error {
		response, err := healthClient.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s answers %s", url, response.Status)
		}
		return nil
	}
}

func (cl *cluster) localHealth(port int) func() error {
	return httpHealth(fmt.Sprintf("https://127.0.0.1:%d/healthz", cl.o.port(port)))
}

// socketHealth is content when somebody listens on a unix socket.
func socketHealth(path string) func() error {
	return func() error {
		connection, err := net.DialTimeout("unix", path, callTimeout)
		if err != nil {
			return err
		}
		return connection.Close()
	}
}

// kubeletHealth is content when the kubelet serves all that a node daemon
// needs of it, not just its health port.
func (cl *cluster) kubeletHealth() func() error {
	checks := []func() error{
		cl.localHealth(portKubelet),
		socketHealth(cl.o.path("kubelet", "device-plugins", "kubelet.sock")),
		socketHealth(cl.o.path("kubelet", "pod-resources", "kubelet.sock")),
	}
	return func() error {
		for _, check := range checks {
			if err := check(); err != nil {
				return err
			}
		}
		return nil
	}
}

// signalOf reads the name of a signal: "KILL" or "SIGKILL".
func signalOf(name string) (syscall.Signal, error) {
	signals := map[string]syscall.Signal{
		"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL, "INT": syscall.SIGINT, "HUP": syscall.SIGHUP,
		"STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT, "QUIT": syscall.SIGQUIT,
	}
	if s, ok := signals[strings.TrimPrefix(name, "SIG")]; ok {
		return s, nil
	}
	return 0, fmt.Errorf("%q is none of the signals TERM, KILL, INT, HUP, STOP, CONT, QUIT", name)
}
