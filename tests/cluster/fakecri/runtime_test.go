package main

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const uid = "11111111-2222-3333-4444-555555555555"

// rig is a runtime in a folder of its own, with one sandbox.
type rig struct {
	*runtime
	t       *testing.T
	dir     string
	sandbox string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	record, err := openRecord(filepath.Join(dir, "cri.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, runtime: &runtime{
		random: rand.New(rand.NewPCG(1, 0)), sandboxes: map[string]*sandbox{}, containers: map[string]*container{}, record: record,
		processes: &processTable{nvmlState: filepath.Join(dir, "nvml"), procRoot: filepath.Join(dir, "proc"), style: "cgroupfs", next: firstPID},
	}}
	answer, err := r.RunPodSandbox(context.Background(), &cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: "p", Uid: uid},
	}})
	if err != nil {
		t.Fatal(err)
	}
	r.sandbox = answer.GetPodSandboxId()
	return r
}

// run creates and starts a container that sees GPU A.
func (r *rig) run(env ...string) string {
	r.t.Helper()
	config := withEnv(wants(), append(env, "NVIDIA_VISIBLE_DEVICES", uuidA)...)
	created, err := r.CreateContainer(context.Background(), &cri.CreateContainerRequest{PodSandboxId: r.sandbox, Config: config})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.StartContainer(context.Background(), &cri.StartContainerRequest{ContainerId: created.GetContainerId()}); err != nil {
		r.t.Fatal(err)
	}
	return created.GetContainerId()
}

func (r *rig) stop(id string, timeoutS int64) {
	r.t.Helper()
	if _, err := r.StopContainer(context.Background(), &cri.StopContainerRequest{ContainerId: id, Timeout: timeoutS}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) status(id string) *cri.ContainerStatus {
	r.t.Helper()
	answer, err := r.ContainerStatus(context.Background(), &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return answer.GetStatus()
}

// seen counts the processes that the fake NVML shows on GPU A.
func (r *rig) seen() int {
	r.t.Helper()
	paths, err := filepath.Glob(filepath.Join(r.dir, "nvml", "processes", uuidA, "*"))
	if err != nil {
		r.t.Fatal(err)
	}
	return len(paths)
}

// waitFor reads the record, and waits until it has a line of the event.
func (r *rig) waitFor(event string) []line {
	r.t.Helper()
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(r.dir, "cri.jsonl"))
		if err != nil {
			r.t.Fatal(err)
		}
		var out []line
		found := false
		for row := range strings.Lines(string(text)) {
			var l line
			if err := json.Unmarshal([]byte(row), &l); err != nil {
				r.t.Fatal(err)
			}
			out = append(out, l)
			found = found || l.Event == event
		}
		if found {
			return out
		}
		if time.Since(began) > 10*time.Second {
			r.t.Fatalf("no %s in %s", event, text)
		}
	}
}

func events(lines []line) string {
	var names []string
	for _, l := range lines {
		names = append(names, l.Event)
	}
	return strings.Join(names, " ")
}

func TestWhatAKilledRuntimeLeftIsRecordedAsGone(t *testing.T) {
	r := newRig(t)
	r.stop(r.run(), 30)
	r.waitFor(eventProcessGone)
	r.run()
	again, err := openRecord(filepath.Join(r.dir, "cri.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := again.endLeft(); err != nil {
			t.Fatal(err)
		}
	}
	var gone []string
	for _, l := range r.waitFor(eventProcessGone) {
		if l.Event == eventProcessGone {
			gone = append(gone, l.Container+" "+strings.Join(l.GPUs, ","))
		}
	}
	if len(gone) != 2 || gone[0] == gone[1] {
		t.Errorf("recorded as gone: %q", gone)
	}
}

func TestTwoContainersOnOneGPUAreTwoProcesses(t *testing.T) {
	r := newRig(t)
	first := r.run()
	r.run()
	if r.seen() != 2 {
		t.Errorf("%d processes", r.seen())
	}
	r.stop(first, 30)
	if r.seen() != 1 {
		t.Errorf("%d processes after one has stopped", r.seen())
	}
}

func TestTheRecordHasTheWholeLifeOfAContainerInOrder(t *testing.T) {
	r := newRig(t)
	id := r.run()
	r.stop(id, 30)
	if _, err := r.RemoveContainer(context.Background(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	lines := r.waitFor(eventRemoved)
	if got, want := events(lines), "sandbox_started created started stop_requested exited process_gone removed"; got != want {
		t.Errorf("%s, not %s", got, want)
	}
	last := int64(0)
	for _, l := range lines {
		if l.MonoNs < last {
			t.Errorf("%s is before what came before it", l.Event)
		}
		last = l.MonoNs
		if l.Pod.UID != uid {
			t.Errorf("%s is of pod %q", l.Event, l.Pod.UID)
		}
		if l.Container != "" && (len(l.GPUs) != 1 || l.GPUs[0] != uuidA) {
			t.Errorf("%s has GPUs %v", l.Event, l.GPUs)
		}
	}
}

func TestAProcessThatLingersIsSeenAfterItsContainerHasExited(t *testing.T) {
	r := newRig(t)
	id := r.run(envLinger, "300")
	r.stop(id, 30)
	if r.status(id).GetState() != cri.ContainerState_CONTAINER_EXITED {
		t.Error("the container has not exited")
	}
	if r.seen() != 1 {
		t.Error("the process is not seen any more")
	}
	r.waitFor(eventProcessGone)
	if r.seen() != 0 {
		t.Error("the process is still seen after it is recorded as gone")
	}
}

func TestAProcessThatOutlivesItsGracePeriodIsKilled(t *testing.T) {
	r := newRig(t)
	id := r.run(envExitDelay, "60000")
	r.stop(id, 0)
	if s := r.status(id); s.GetExitCode() != exitKilled || s.GetReason() != "Error" {
		t.Errorf("exit code %d, reason %s", s.GetExitCode(), s.GetReason())
	}
}

func TestAContainerThatIsToldToStopLivesOnForItsExitDelay(t *testing.T) {
	r := newRig(t)
	id := r.run(envExitDelay, "200")
	began := time.Now()
	r.stop(id, 30)
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("it was gone after %v", took)
	}
	if s := r.status(id); s.GetExitCode() != 0 {
		t.Errorf("exit code %d", s.GetExitCode())
	}
}

func TestAContainerWithARunTimeEndsByItself(t *testing.T) {
	r := newRig(t)
	id := r.run(envRun, "20", envExitCode, "3")
	lines := r.waitFor(eventExited)
	if s := r.status(id); s.GetState() != cri.ContainerState_CONTAINER_EXITED || s.GetExitCode() != 3 {
		t.Errorf("%v, exit code %d", s.GetState(), s.GetExitCode())
	}
	for _, l := range lines {
		if l.Event == eventExited && l.Reason != reasonCompleted {
			t.Errorf("the reason is %s", l.Reason)
		}
	}
}

func TestAVariableThatIsNoNumberIsNamedInTheError(t *testing.T) {
	r := newRig(t)
	config := withEnv(wants(), envRun, "soon")
	_, err := r.CreateContainer(context.Background(), &cri.CreateContainerRequest{PodSandboxId: r.sandbox, Config: config})
	if err == nil || !strings.Contains(err.Error(), `FAKE_RUN_MS="soon"`) {
		t.Errorf("the error is %v", err)
	}
	if lines := r.waitFor(eventCreateFailed); lines[len(lines)-1].Error == "" {
		t.Error("the record has no error")
	}
}

func TestStoppingASandboxKillsItsContainers(t *testing.T) {
	r := newRig(t)
	id := r.run(envExitDelay, "60000")
	if _, err := r.StopPodSandbox(context.Background(), &cri.StopPodSandboxRequest{PodSandboxId: r.sandbox}); err != nil {
		t.Fatal(err)
	}
	if r.status(id).GetExitCode() != exitKilled || r.seen() != 0 {
		t.Error("the container goes on")
	}
}

func TestAProcessCanBeTracedToItsPod(t *testing.T) {
	const id = "c0ffee"
	under := strings.ReplaceAll(uid, "-", "_")
	cases := []struct{ style, qos, want string }{
		{"cgroupfs", "besteffort", "0::/kubepods/besteffort/pod" + uid + "/c0ffee\n"},
		{"cgroupfs", "", "0::/kubepods/pod" + uid + "/c0ffee\n"},
		{"systemd", "burstable", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-c0ffee.scope\n"},
		{"systemd", "", "0::/kubepods.slice/kubepods-pod" + under + ".slice/cri-containerd-c0ffee.scope\n"},
	}
	for _, c := range cases {
		if got := cgroupText(c.style, c.qos, uid, id); got != c.want {
			t.Errorf("%s %s: %q, not %q", c.style, c.qos, got, c.want)
		}
	}
	if got := cgroupText("v1", "burstable", uid, id); !strings.Contains(got, ":memory:/kubepods/burstable/pod"+uid+"/c0ffee\n") {
		t.Errorf("v1: %q", got)
	}
}

func TestANewRuntimeSweepsTheProcessesOfTheOldOneAndNothingElse(t *testing.T) {
	r := newRig(t)
	r.run()
	other := filepath.Join(r.dir, "nvml", "processes", uuidA, "1234")
	if err := os.WriteFile(other, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.runtime.processes.sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(other); err != nil || r.seen() != 1 {
		t.Errorf("%d processes are left, and of the foreign one: %v", r.seen(), err)
	}
	if paths, _ := filepath.Glob(filepath.Join(r.dir, "proc", "*")); len(paths) != 0 {
		t.Errorf("%v is left", paths)
	}
}

func TestASpanIsReadAndDrawnFrom(t *testing.T) {
	var s span
	for _, text := range []string{"", "5-", "9-3", "x", "-1"} {
		if s.Set(text) == nil {
			t.Errorf("%q was taken", text)
		}
	}
	if err := s.Set("46-548"); err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(7, 0))
	for range 1000 {
		if d := s.draw(random); d < 46*time.Millisecond || d > 548*time.Millisecond {
			t.Fatalf("%v", d)
		}
	}
}
