package main

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The events of the record, in the order in which one container passes them.
const (
	eventSandboxStarted = "sandbox_started"
	eventSandboxStopped = "sandbox_stopped"
	eventSandboxRemoved = "sandbox_removed"
	eventCreated        = "created"
	eventCreateFailed   = "create_failed"
	eventStarted        = "started"
	eventStopRequested  = "stop_requested"
	eventExited         = "exited"
	eventProcessGone    = "process_gone"
	eventRemoved        = "removed"
)

// podName says whose container a line is about.
type podName struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// line is one line of the record. Which of the optional fields are there
// depends on the event; README.md has the table.
type line struct {
	// Time is the wall clock, RFC 3339 with nanoseconds, UTC.
	Time string `json:"time"`
	// MonoNs is CLOCK_MONOTONIC in nanoseconds: the clock of every process on
	// this machine until it reboots, so lines compare with a test's own stamps.
	MonoNs int64   `json:"mono_ns"`
	Event  string  `json:"event"`
	Pod    podName `json:"pod"`

	Sandbox   string `json:"sandbox,omitempty"`
	Container string `json:"container,omitempty"`
	Name      string `json:"name,omitempty"`
	Attempt   uint32 `json:"attempt"`

	// GPUs are the UUIDs that the container can reach ("minor:N" where the
	// table has no UUID for a device node).
	GPUs     []string `json:"gpus,omitempty"`
	PID      int      `json:"pid,omitempty"`
	ExitCode *int32   `json:"exit_code,omitempty"`
	Reason   string   `json:"reason,omitempty"`
	TimeoutS *int64   `json:"timeout_s,omitempty"`
	Error    string   `json:"error,omitempty"`

	Config   *recordedConfig `json:"config,omitempty"`
	Resolved *resolution     `json:"resolved,omitempty"`
}

// recordedConfig is what the kubelet asked for.
type recordedConfig struct {
	Image       string            `json:"image"`
	Command     []string          `json:"command,omitempty"`
	Args        []string          `json:"args,omitempty"`
	CDIDevices  []string          `json:"cdi_devices"`
	Envs        map[string]string `json:"envs"`
	Mounts      []recordedMount   `json:"mounts"`
	Devices     []recordedDevice  `json:"devices"`
	Annotations map[string]string `json:"annotations"`
}

type recordedMount struct {
	ContainerPath string `json:"container_path"`
	HostPath      string `json:"host_path"`
	ReadOnly      bool   `json:"read_only"`
}

type recordedDevice struct {
	ContainerPath string `json:"container_path"`
	HostPath      string `json:"host_path"`
	Permissions   string `json:"permissions"`
}

func configOf(c *cri.ContainerConfig) *recordedConfig {
	out := &recordedConfig{
		Image: c.GetImage().GetImage(), Command: c.GetCommand(), Args: c.GetArgs(), CDIDevices: []string{}, Envs: envOf(c),
		Mounts: []recordedMount{}, Devices: []recordedDevice{}, Annotations: c.GetAnnotations(),
	}
	for _, d := range c.GetCDIDevices() {
		out.CDIDevices = append(out.CDIDevices, d.GetName())
	}
	for _, m := range c.GetMounts() {
		out.Mounts = append(out.Mounts, recordedMount{m.GetContainerPath(), m.GetHostPath(), m.GetReadonly()})
	}
	for _, d := range c.GetDevices() {
		out.Devices = append(out.Devices, recordedDevice{d.GetContainerPath(), d.GetHostPath(), d.GetPermissions()})
	}
	return out
}

// envOf returns the environment; of a name given twice the last value counts,
// as it does for a real process.
func envOf(c *cri.ContainerConfig) map[string]string {
	out := map[string]string{}
	for _, e := range c.GetEnvs() {
		out[e.GetKey()] = string(e.GetValue())
	}
	return out
}

// recorder appends lines to the record. Lines are written whole and in the
// order of their times.
type recorder struct {
	mu   sync.Mutex
	file *os.File
}

func openRecord(path string) (*recorder, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("cannot open the record: %w", err)
	}
	return &recorder{file: file}, nil
}

// endLeft writes that the processes are gone which an earlier run of the
// runtime recorded as started: it was killed, and they with it.
func (r *recorder) endLeft() error {
	file, err := os.Open(r.file.Name())
	if err != nil {
		return err
	}
	defer file.Close()
	left := map[string]line{}
	var order []string
	decoder := json.NewDecoder(file)
	for decoder.More() {
		var l line
		if err := decoder.Decode(&l); err != nil {
			return fmt.Errorf("the record of before cannot be read: %w", err)
		}
		switch l.Event {
		case eventStarted:
			left[l.Container] = l
			order = append(order, l.Container)
		case eventProcessGone:
			delete(left, l.Container)
		}
	}
	for _, container := range order {
		if l, ok := left[container]; ok {
			l.Event = eventProcessGone
			r.write(l)
		}
	}
	return nil
}

// write stamps and appends a line. A record with a hole proves nothing, so a
// failure to write ends the runtime.
func (r *recorder) write(l line) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		r.fail(err)
	}
	l.MonoNs = now.Nano()
	l.Time = time.Now().UTC().Format(time.RFC3339Nano)
	text, err := json.Marshal(l)
	if err != nil {
		r.fail(err)
	}
	if _, err := r.file.Write(append(text, '\n')); err != nil {
		r.fail(err)
	}
}

func (r *recorder) fail(err error) {
	fmt.Fprintln(os.Stderr, "fakecri: cannot write the record, giving up:", err)
	os.Exit(1)
}
