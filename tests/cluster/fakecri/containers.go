package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Environment variables of a container that say how its process behaves.
// Times are in milliseconds.
const (
	// envRun ends the process by itself after this time; without it the
	// process runs until it is told to stop.
	envRun = "FAKE_RUN_MS"
	// envExitCode is the exit code of a process that ends by itself.
	envExitCode = "FAKE_EXIT_CODE"
	// envExitDelay is how long the process lives on after it was told to stop.
	envExitDelay = "FAKE_EXIT_DELAY_MS"
	// envLinger is how long the GPUs still show the process after the runtime
	// has reported the container as exited.
	envLinger = "FAKE_LINGER_MS"
)

// exitKilled is the exit code of a process that got SIGKILL.
const exitKilled = 137

// Reasons of a container's end, as containerd names them, and as recorded.
const (
	reasonCompleted = "completed"
	reasonStopped   = "stopped"
	reasonKilled    = "killed"
)

// behaviour is what the environment of a container says about its process.
type behaviour struct {
	run       *time.Duration
	exitCode  int32
	exitDelay time.Duration
	linger    time.Duration
}

// container is one container. Its fields are guarded by the runtime's lock.
type container struct {
	id      string
	sandbox *sandbox
	config  *cri.ContainerConfig
	gpus    []string
	does    behaviour

	state                      cri.ContainerState
	created, started, finished int64
	exitCode                   int32
	reason                     string
	process                    *process
	// exited is closed when the state becomes EXITED.
	exited chan struct{}
}

// base is the part that all lines about a container share.
func (c *container) base(event string) line {
	m := c.config.GetMetadata()
	l := line{
		Event: event, Pod: c.sandbox.pod(), Sandbox: c.sandbox.id,
		Container: c.id, Name: m.GetName(), Attempt: m.GetAttempt(), GPUs: c.gpus,
	}
	if c.process != nil {
		l.PID = c.process.pid
	}
	return l
}

func (r *runtime) sorted() []*container {
	return slices.SortedFunc(maps.Values(r.containers), func(a, b *container) int { return cmp.Compare(a.id, b.id) })
}

func (r *runtime) find(id string) (*container, error) {
	if c := r.containers[id]; c != nil {
		return c, nil
	}
	return nil, status.Errorf(codes.NotFound, "there is no container %q", id)
}

// behaviourOf reads the environment; the random defaults are always drawn, so
// that a variable in one container does not shift the delays of the others.
func (r *runtime) behaviourOf(config *cri.ContainerConfig) (behaviour, error) {
	b := behaviour{exitDelay: r.options.exitDelay.draw(r.random), linger: r.options.linger.draw(r.random)}
	env := envOf(config)
	number := func(name string, bits int, set func(uint64)) error {
		text, given := env[name]
		if !given {
			return nil
		}
		value, err := strconv.ParseUint(text, 10, bits)
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "environment variable %s=%q is not a whole number: %v", name, text, err)
		}
		set(value)
		return nil
	}
	millis := func(v uint64) time.Duration { return time.Duration(v) * time.Millisecond }
	for _, err := range []error{
		number(envRun, 32, func(v uint64) { b.run = new(millis(v)) }),
		number(envExitCode, 8, func(v uint64) { b.exitCode = int32(v) }),
		number(envExitDelay, 32, func(v uint64) { b.exitDelay = millis(v) }),
		number(envLinger, 32, func(v uint64) { b.linger = millis(v) }),
	} {
		if err != nil {
			return b, err
		}
	}
	return b, nil
}

// CreateContainer implements the CRI. It fails, as containerd does, when a CDI
// device is not described by a spec file.
func (r *runtime) CreateContainer(_ context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.GetPodSandboxId()]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "there is no sandbox %q", q.GetPodSandboxId())
	}
	c := &container{
		sandbox: s, config: q.GetConfig(), created: time.Now().UnixNano(),
		state: cri.ContainerState_CONTAINER_CREATED, exited: make(chan struct{}),
	}
	resolved, err := r.prepare(c)
	if err != nil {
		l := c.base(eventCreateFailed)
		l.Config, l.Error = configOf(c.config), status.Convert(err).Message()
		r.record.write(l)
		return nil, err
	}
	c.id = r.newID()
	r.containers[c.id] = c
	l := c.base(eventCreated)
	l.Config, l.Resolved = configOf(c.config), resolved
	r.record.write(l)
	return &cri.CreateContainerResponse{ContainerId: c.id}, nil
}

func (r *runtime) prepare(c *container) (*resolution, error) {
	resolved, err := resolve(r.options.cdiDirs, requestedCDI(c.config))
	if err != nil {
		return nil, err
	}
	table, err := gpuTable(r.options.gpus)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "cannot read the GPU table: %v", err)
	}
	c.gpus = gpusOf(table, c.config, resolved)
	c.does, err = r.behaviourOf(c.config)
	return resolved, err
}

// StartContainer implements the CRI.
func (r *runtime) StartContainer(_ context.Context, q *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.find(q.GetContainerId())
	if err != nil {
		return nil, err
	}
	if c.state != cri.ContainerState_CONTAINER_CREATED {
		return nil, status.Errorf(codes.FailedPrecondition, "container %q was started before", c.id)
	}
	if err := c.touchLog(); err != nil {
		return nil, status.Errorf(codes.Internal, "cannot make the log file: %v", err)
	}
	// The line comes before the process can be seen and the line of its end
	// after it is gone: the record never shows less use than there was.
	c.process = r.processes.invent(c.gpus)
	r.record.write(c.base(eventStarted))
	if err := r.processes.show(c.process, c.sandbox.pod(), c.id, c.config); err != nil {
		r.exit(c, exitKilled, reasonKilled)
		return nil, status.Errorf(codes.Internal, "cannot show the process: %v", err)
	}
	c.state, c.started = cri.ContainerState_CONTAINER_RUNNING, time.Now().UnixNano()
	if c.does.run != nil {
		time.AfterFunc(*c.does.run, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.exit(c, c.does.exitCode, reasonCompleted)
		})
	}
	return &cri.StartContainerResponse{}, nil
}

// StopContainer implements the CRI: it returns when the container has exited,
// at the latest when the timeout has passed, for then it is killed.
func (r *runtime) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	c, err := r.requestStop(q)
	if err != nil {
		return nil, err
	}
	select {
	case <-c.exited:
		return &cri.StopContainerResponse{}, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (r *runtime) requestStop(q *cri.StopContainerRequest) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.find(q.GetContainerId())
	if err != nil {
		return nil, err
	}
	switch c.state {
	case cri.ContainerState_CONTAINER_EXITED:
		return c, nil
	case cri.ContainerState_CONTAINER_CREATED:
		r.exit(c, exitKilled, reasonKilled)
		return c, nil
	}
	l := c.base(eventStopRequested)
	l.TimeoutS = new(q.GetTimeout())
	r.record.write(l)
	after, code, reason := c.does.exitDelay, int32(0), reasonStopped
	if timeout := time.Duration(q.GetTimeout()) * time.Second; after > timeout {
		after, code, reason = timeout, exitKilled, reasonKilled
	}
	time.AfterFunc(after, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.exit(c, code, reason)
	})
	return c, nil
}

// exit ends a container, unless it has ended already. Its process leaves the
// GPUs now or, if it lingers, later. The caller holds the lock.
func (r *runtime) exit(c *container, code int32, reason string) {
	if c.state == cri.ContainerState_CONTAINER_EXITED {
		return
	}
	c.state, c.exitCode, c.reason, c.finished = cri.ContainerState_CONTAINER_EXITED, code, reason, time.Now().UnixNano()
	if c.started == 0 {
		c.started = c.finished
	}
	lingers := c.process != nil && c.does.linger > 0
	if !lingers {
		r.endProcess(c)
	}
	l := c.base(eventExited)
	l.ExitCode, l.Reason = new(code), reason
	r.record.write(l)
	close(c.exited)
	if !lingers {
		r.recordGone(c)
		return
	}
	time.AfterFunc(c.does.linger, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.endProcess(c)
		r.recordGone(c)
	})
}

func (r *runtime) endProcess(c *container) {
	if c.process == nil {
		return
	}
	if err := r.processes.end(c.process); err != nil {
		r.record.fail(fmt.Errorf("process %d cannot be ended: %w", c.process.pid, err))
	}
}

func (r *runtime) recordGone(c *container) {
	if c.process != nil {
		r.record.write(c.base(eventProcessGone))
	}
}

// RemoveContainer implements the CRI: one that still runs is killed.
func (r *runtime) RemoveContainer(_ context.Context, q *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[q.GetContainerId()]; c != nil {
		r.remove(c)
	}
	return &cri.RemoveContainerResponse{}, nil
}

func (r *runtime) remove(c *container) {
	r.exit(c, exitKilled, reasonKilled)
	delete(r.containers, c.id)
	r.record.write(c.base(eventRemoved))
}

// ListContainers implements the CRI.
func (r *runtime) ListContainers(_ context.Context, q *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := q.GetFilter()
	out := &cri.ListContainersResponse{}
	for _, c := range r.sorted() {
		if f.GetId() != "" && f.GetId() != c.id ||
			f.GetPodSandboxId() != "" && f.GetPodSandboxId() != c.sandbox.id ||
			f.GetState() != nil && f.GetState().GetState() != c.state ||
			!labelsMatch(f.GetLabelSelector(), c.config.GetLabels()) {
			continue
		}
		image := c.config.GetImage()
		out.Containers = append(out.Containers, &cri.Container{
			Id: c.id, PodSandboxId: c.sandbox.id, Metadata: c.config.GetMetadata(), State: c.state, CreatedAt: c.created,
			Image: image, ImageRef: image.GetImage(), ImageId: image.GetImage(),
			Labels: c.config.GetLabels(), Annotations: c.config.GetAnnotations(),
		})
	}
	return out, nil
}

// ContainerStatus implements the CRI.
func (r *runtime) ContainerStatus(_ context.Context, q *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.find(q.GetContainerId())
	if err != nil {
		return nil, err
	}
	image := c.config.GetImage()
	return &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{
		Id: c.id, Metadata: c.config.GetMetadata(), State: c.state,
		CreatedAt: c.created, StartedAt: c.started, FinishedAt: c.finished, ExitCode: c.exitCode, Reason: c.criReason(),
		Image: image, ImageRef: image.GetImage(), ImageId: image.GetImage(),
		Labels: c.config.GetLabels(), Annotations: c.config.GetAnnotations(), Mounts: c.config.GetMounts(),
		LogPath: c.logPath(), Resources: &cri.ContainerResources{Linux: c.config.GetLinux().GetResources()},
	}}, nil
}

// criReason is the reason that pod status shows.
func (c *container) criReason() string {
	switch {
	case c.state != cri.ContainerState_CONTAINER_EXITED:
		return ""
	case c.exitCode == 0:
		return "Completed"
	default:
		return "Error"
	}
}

func (c *container) logPath() string {
	if c.config.GetLogPath() == "" {
		return ""
	}
	return filepath.Join(c.sandbox.config.GetLogDirectory(), c.config.GetLogPath())
}

// touchLog makes the log file that the kubelet looks for; it stays empty.
func (c *container) touchLog() error {
	path := c.logPath()
	if path == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, nil, 0o640)
}

// ReopenContainerLog implements the CRI.
func (r *runtime) ReopenContainerLog(_ context.Context, q *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.find(q.GetContainerId())
	if err != nil {
		return nil, err
	}
	return &cri.ReopenContainerLogResponse{}, c.touchLog()
}

// UpdateContainerResources implements the CRI: nothing is limited.
func (r *runtime) UpdateContainerResources(context.Context, *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// ExecSync implements the CRI: every command succeeds, so exec probes pass.
func (r *runtime) ExecSync(context.Context, *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	return &cri.ExecSyncResponse{}, nil
}

// ListContainerStats implements the CRI: nothing uses anything.
func (r *runtime) ListContainerStats(context.Context, *cri.ListContainerStatsRequest) (*cri.ListContainerStatsResponse, error) {
	return &cri.ListContainerStatsResponse{}, nil
}
