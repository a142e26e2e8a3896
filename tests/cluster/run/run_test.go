package main

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// testOptions are options with programs that exist, in a short folder.
func testOptions(t *testing.T, args ...string) (*options, error) {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"kube", "fakecri"} {
		if err := os.WriteFile(filepath.Join(bin, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return parseOptions("up", "/tmp/s", append([]string{"--bin=" + bin}, args...))
}

func TestMistakesOnTheCommandLineAreNamed(t *testing.T) {
	long := "/tmp/" + strings.Repeat("x", maxStateLen)
	cases := []struct {
		name, want string
		err        func() error
	}{
		{"a state path that is too long", long, func() error { return (&options{Bin: "/", ServiceAccount: "a/b"}).complete(long) }},
		{"a state that the cluster hides", "/var/lib", func() error { return (&options{ServiceAccount: "a/b"}).complete("/var/lib/x") }},
		{"a service account without namespace", `"bridge"`, func() error { _, err := testOptions(t, "--service-account=bridge"); return err }},
		{"no programs", "build.sh", func() error {
			return (&options{Bin: "/nowhere", Runtime: runtimeFake, ServiceAccount: "a/b"}).complete("/tmp/s")
		}},
		{"a runtime that nobody knows", `"docker"`, func() error { _, err := testOptions(t, "--runtime=docker"); return err }},
		{"no containerd", "build-containerd.sh", func() error { _, err := testOptions(t, "--runtime=containerd"); return err }},
		{"a file that is not there", "nope.yaml", func() error { _, err := testOptions(t, "--apply=nope.yaml"); return err }},
		{"a cluster to join that is not there", "no cluster is ready in", func() error { _, err := testOptions(t, "--join=/nowhere"); return err }},
		{"a node that the cluster does not know", "--member=node-0", func() error { _, err := testOptions(t, "--join="+readyCluster(t, "node-1")); return err }},
		{"a word too many", `"extra"`, func() error { _, err := testOptions(t, "extra"); return err }},
	}
	for _, c := range cases {
		err := c.err()
		var mistake usageError
		if !errors.As(err, &mistake) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// readyCluster is the folder of a cluster that such a node may join.
func readyCluster(t *testing.T, member string) string {
	t.Helper()
	o := &options{State: t.TempDir(), PortBase: 16400, Members: []string{member}}
	if err := o.save(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.path("ready"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return o.State
}

func TestANodeThatJoinsFindsTheAPIServerOfItsCluster(t *testing.T) {
	o, err := testOptions(t, "--node=node-1", "--join="+readyCluster(t, "node-1"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "https://127.0.0.1:16402"; o.apiURL() != want {
		t.Errorf("%s, not %s", o.apiURL(), want)
	}
	cl := &cluster{o: o, components: map[string]*component{}}
	cl.define()
	if want := []string{"cri", "kubelet"}; !reflect.DeepEqual(cl.order, want) {
		t.Errorf("it runs %v, not %v", cl.order, want)
	}
}

func TestPathsAreMadeAbsolute(t *testing.T) {
	o, err := testOptions(t, "--apply=run_test.go", "--gpus=gpus.json")
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	if o.Apply[0] != filepath.Join(here, "run_test.go") || o.GPUs != filepath.Join(here, "gpus.json") {
		t.Errorf("%v, %v", o.Apply, o.GPUs)
	}
	if o.NVMLState != "/tmp/s/nvml" {
		t.Errorf("the fake NVML's state is %v", o.NVMLState)
	}
}

func TestASecondClusterTakesAnotherBlockOfPorts(t *testing.T) {
	first, second := &options{}, &options{}
	guard, err := first.reservePorts()
	if err != nil {
		t.Fatal(err)
	}
	defer guard.Close()
	other, err := second.reservePorts()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if first.PortBase == second.PortBase {
		t.Errorf("both have %d", first.PortBase)
	}
	said := &options{PortBase: first.PortBase}
	if _, err := said.reservePorts(); err == nil {
		t.Error("a block that is taken was given out")
	}
}

func TestAStateFolderHasOneClusterAtATime(t *testing.T) {
	state := t.TempDir()
	lock, err := lockState(state)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lockState(state); err == nil || !strings.Contains(err.Error(), state) {
		t.Errorf("the second one: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := lockState(state)
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	_ = again.Close()
}

func TestMappingsAreMergedAndAllElseReplaced(t *testing.T) {
	base := map[string]any{"a": 1, "gates": map[string]any{"x": true, "y": true}}
	merge(base, map[string]any{"a": 2, "gates": map[string]any{"y": false}, "new": "z"})
	want := map[string]any{"a": 2, "gates": map[string]any{"x": true, "y": false}, "new": "z"}
	if !reflect.DeepEqual(base, want) {
		t.Errorf("%v, not %v", base, want)
	}
}

func TestAWaitInVainSaysWhatForAndWhatWasSeenLast(t *testing.T) {
	seen := errors.New("still dark")
	err := await("the sun is up", 30*time.Millisecond, func() error { return seen }, func() string { return " (the log)" })
	for _, part := range []string{"the sun is up", "still dark", "(the log)"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("no %q in %v", part, err)
		}
	}
	calls := 0
	err = await("it works", time.Minute, func() error { calls++; return permanent{seen} }, nil)
	if !errors.Is(err, seen) || calls != 1 {
		t.Errorf("a permanent error: %v after %d calls", err, calls)
	}
}

// testComponent runs a shell script.
func testComponent(t *testing.T, script string) (*component, chan error) {
	t.Helper()
	failed := make(chan error, 1)
	c := &component{
		name: "shell", argv: []string{"/bin/sh", "-c", script}, failed: failed,
		logPath: filepath.Join(t.TempDir(), "shell.log"), healthy: func() error { return nil },
	}
	if err := c.start(); err != nil {
		t.Fatal(err)
	}
	return c, failed
}

func TestAComponentThatEndsByItselfIsReportedWithItsLog(t *testing.T) {
	_, failed := testComponent(t, "echo no disk; exit 3")
	select {
	case err := <-failed:
		for _, part := range []string{"shell", "exit status 3", "no disk"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("no %q in %v", part, err)
			}
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nothing was reported")
	}
}

func TestAComponentThatIsStoppedIsNotReported(t *testing.T) {
	c, failed := testComponent(t, "exec sleep 100")
	signal, err := signalOf("SIGKILL")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.stop(signal); err != nil {
		t.Fatal(err)
	}
	if c.running() {
		t.Error("it runs")
	}
	if err := c.stop(signal); err == nil {
		t.Error("what does not run was stopped")
	}
	select {
	case err := <-failed:
		t.Errorf("reported: %v", err)
	default:
	}
}

func TestASignalThatNobodyKnowsIsNamed(t *testing.T) {
	if _, err := signalOf("POLITE"); err == nil || !strings.Contains(err.Error(), `"POLITE"`) {
		t.Errorf("the error is %v", err)
	}
}
