package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// insideCommand is the command by which this program runs itself as the first
// process of the new namespaces.
const insideCommand = "inside"

// The blocks of ports that are tried; they end below the ports that the kernel
// gives to outgoing connections.
const (
	firstPortBase = 16400
	lastPortBase  = 19990
)

// pollInterval is how often something is looked at that cannot be waited for.
const pollInterval = 20 * time.Millisecond

// goneDeadline is how long a killed cluster may take to be gone: the kernel
// tears down six processes and their memory.
const goneDeadline = 30 * time.Second

// runOuter makes the namespaces, runs the cluster in them and stays, so that
// there is one process outside whose end is the end of everything.
func runOuter(o *options) error {
	lock, err := lockState(o.State)
	if err != nil {
		return err
	}
	defer lock.Close()
	for _, name := range []string{"ready", "pids"} {
		if err := os.Remove(o.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if o.Address == "" {
		if o.Address, err = nodeAddress(); err != nil {
			return err
		}
	}
	guard, err := o.reservePorts()
	if err != nil {
		return err
	}
	defer guard.Close()
	o.OuterPID = os.Getpid()

	inner, err := o.startInner()
	if err != nil {
		return err
	}
	pids := fmt.Sprintf("%d %d\n", o.OuterPID, inner.Process.Pid)
	if err := os.WriteFile(o.path("pids"), []byte(pids), 0o644); err != nil {
		_ = inner.Process.Kill()
		return err
	}
	asked := make(chan struct{})
	go func() {
		o.untilAsked()
		close(asked)
		_ = inner.Process.Kill()
	}()
	err = inner.Wait()
	select {
	case <-asked:
		return nil
	default:
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		return childStatus(exit.ExitCode())
	}
	return err
}

// untilAsked returns when somebody wants the cluster to end.
func (o *options) untilAsked() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	ended := make(chan struct{})
	if o.UntilEOF {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			close(ended)
		}()
	}
	select {
	case <-signals:
	case <-ended:
	}
}

// startInner starts this program again in new namespaces. Root that lacks the
// right to do so (as in many containers) is treated like anybody else: it gets
// a user namespace.
func (o *options) startInner() (*exec.Cmd, error) {
	// The parent death signal is tied to the thread that made the child. The
	// main thread lives as long as the process.
	runtime.LockOSThread()
	var first error
	for _, userNamespace := range []bool{false, true} {
		if !userNamespace && os.Geteuid() != 0 {
			continue
		}
		o.UserNamespace = userNamespace
		if err := o.save(); err != nil {
			return nil, err
		}
		command := exec.Command("/proc/self/exe", insideCommand, o.State)
		command.Stdout, command.Stderr = os.Stdout, os.Stderr
		command.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
			Pdeathsig:  syscall.SIGKILL,
		}
		if userNamespace {
			command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
			command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
			command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
		}
		err := command.Start()
		if err == nil {
			return command, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, fmt.Errorf("%w: the namespaces cannot be made: %w", errSkipped, first)
}

// lockState makes the state folder and keeps a second cluster out of it. The
// lock ends with this process.
func lockState(state string) (*os.File, error) {
	if err := os.MkdirAll(state, 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(state, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("a cluster is running in %s already (end it with \"cluster down\"): %w", state, err)
	}
	return file, nil
}

// reservePorts picks the block of ports, if none was said, and holds its guard
// port so that no other cluster takes the block.
func (o *options) reservePorts() (net.Listener, error) {
	if o.PortBase != 0 {
		guard, err := tryPorts(o.PortBase)
		if err != nil {
			return nil, fmt.Errorf("ports %d to %d are not free, use another --port-base or none: %w", o.PortBase, o.port(portGuard), err)
		}
		return guard, nil
	}
	var last error
	for base := firstPortBase; base <= lastPortBase; base += portBlock {
		guard, err := tryPorts(base)
		if err == nil {
			o.PortBase = base
			return guard, nil
		}
		last = err
	}
	return nil, fmt.Errorf("no free block of ports from %d to %d: %w", firstPortBase, lastPortBase, last)
}

func tryPorts(base int) (net.Listener, error) {
	listen := func(port int) (net.Listener, error) { return net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)) }
	guard, err := listen(base + portGuard)
	if err != nil {
		return nil, err
	}
	for offset := range portsUsed {
		probe, err := listen(base + offset)
		if err != nil {
			_ = guard.Close()
			return nil, err
		}
		_ = probe.Close()
	}
	return guard, nil
}

// nodeAddress returns the first IPv4 address that a kubelet accepts for its
// node: not a loopback one.
func nodeAddress() (string, error) {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String(), nil
		}
	}
	return "", errors.New("this machine has no IPv4 address but loopback, and the kubelet wants one for its node: give it one (ip address add 192.0.2.1/32 dev lo) and say --address")
}

// startDetached runs "cluster up" with the same arguments in a session of its
// own and returns when it is ready.
func startDetached(o *options, args []string) error {
	if err := os.MkdirAll(o.path("log"), 0o755); err != nil {
		return err
	}
	lock, err := lockState(o.State)
	if err != nil {
		return err
	}
	_ = os.Remove(o.path("ready"))
	_ = lock.Close()
	log, err := os.Create(o.path("cluster.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	command := exec.Command("/proc/self/exe", append([]string{"up"}, args...)...)
	// The name that this program was called by leads to the others.
	command.Args[0] = filepath.Join(o.Bin, "cluster")
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	// The cluster has a deadline of its own; this one only ends a wait for a
	// process that hangs.
	deadline := time.After(o.Timeout + goneDeadline)
	for {
		if text, err := os.ReadFile(o.path("ready")); err == nil {
			fmt.Print(string(text))
			return nil
		}
		select {
		case <-ended:
			text, _ := os.ReadFile(log.Name())
			fmt.Fprint(os.Stderr, string(text))
			return childStatus(command.ProcessState.ExitCode())
		case <-deadline:
			_ = command.Process.Kill()
			return fmt.Errorf("the cluster is not ready after %v, see %s", o.Timeout+goneDeadline, log.Name())
		case <-time.After(pollInterval):
		}
	}
}

// down ends the cluster of a state folder and returns when all of it is gone.
func down(state string) error {
	lock, err := lockState(state)
	if err == nil {
		defer lock.Close()
		fmt.Printf("no cluster is running in %s\n", state)
		return nil
	}
	text, err := os.ReadFile(filepath.Join(state, "pids"))
	if err != nil {
		return fmt.Errorf("a cluster is being started in %s, it cannot be ended yet: %w", state, err)
	}
	fields := strings.Fields(string(text))
	if len(fields) != 2 {
		return fmt.Errorf("%s/pids does not hold two process ids: %q", state, text)
	}
	outer, err := strconv.Atoi(fields[0])
	if err != nil {
		return fmt.Errorf("%s/pids: %w", state, err)
	}
	if err := syscall.Kill(outer, syscall.SIGKILL); err != nil {
		return fmt.Errorf("process %d cannot be killed: %w", outer, err)
	}
	// The first process of a PID namespace is not gone before all others are.
	for began := time.Now(); ; time.Sleep(pollInterval) {
		if gone(fields[0]) && gone(fields[1]) {
			break
		}
		if time.Since(began) > goneDeadline {
			return fmt.Errorf("processes %s are still there %v after SIGKILL", strings.TrimSpace(string(text)), goneDeadline)
		}
	}
	removeCgroups(state)
	for _, name := range []string{"ready", "pids", "control.sock"} {
		_ = os.Remove(filepath.Join(state, name))
	}
	fmt.Printf("the cluster in %s is gone\n", state)
	return nil
}

// gone tells whether a process has ended; it may still be waiting for its
// parent to take note.
func gone(pid string) bool {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(text), ") ")
	return strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}
