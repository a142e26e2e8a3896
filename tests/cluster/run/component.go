package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Deadlines of one component.
const (
	// stopDeadline is how long it may take to end after a signal; then it gets
	// SIGKILL. The API server finishes its requests first.
	stopDeadline = 20 * time.Second
	// healthDeadline is how long it may take to answer its health check after
	// a restart. The whole start has the deadline --timeout instead.
	healthDeadline = 60 * time.Second
)

// tailBytes is how much of a log is shown when its component fails: the error
// and what led to it.
const tailBytes = 3000

// component is one program of the cluster.
type component struct {
	name    string
	argv    []string
	logPath string
	// healthy returns nil when the program does its work.
	healthy func() error
	// failed gets an error when the program ends without having been told to.
	failed chan<- error

	// verb is held while a command changes the component.
	verb sync.Mutex

	mu       sync.Mutex
	process  *os.Process
	ended    chan struct{}
	stopping bool
}

// start runs the program; it does not wait for its health.
func (c *component) start() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.process != nil {
		return fmt.Errorf("%s runs already", c.name)
	}
	log, err := os.OpenFile(c.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	command := exec.Command(c.argv[0], c.argv[1:]...)
	command.Stdout, command.Stderr = log, log
	command.Dir = filepath.Dir(filepath.Dir(c.logPath))
	if err := command.Start(); err != nil {
		return fmt.Errorf("%s cannot be started: %w", c.name, err)
	}
	c.process, c.ended, c.stopping = command.Process, make(chan struct{}), false
	go c.wait(command, c.ended)
	return nil
}

func (c *component) wait(command *exec.Cmd, ended chan<- struct{}) {
	err := command.Wait()
	c.mu.Lock()
	expected := c.stopping
	c.process = nil
	c.mu.Unlock()
	close(ended)
	if !expected {
		if err == nil {
			err = errors.New("exit status 0")
		}
		c.failed <- fmt.Errorf("%s ended by itself: %w%s", c.name, err, c.tail())
	}
}

// stop ends the program by a signal and returns when it is gone.
func (c *component) stop(signal syscall.Signal) error {
	c.mu.Lock()
	process, ended := c.process, c.ended
	c.stopping = true
	c.mu.Unlock()
	if process == nil {
		return fmt.Errorf("%s does not run", c.name)
	}
	if err := process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	// A stopped process (SIGSTOP) would never see its signal.
	_ = process.Signal(syscall.SIGCONT)
	select {
	case <-ended:
		return nil
	case <-time.After(stopDeadline):
	}
	_ = process.Kill()
	select {
	case <-ended:
		return nil
	case <-time.After(stopDeadline):
		return fmt.Errorf("%s is still there %v after SIGKILL", c.name, stopDeadline)
	}
}

// send passes a signal on and expects nothing of it.
func (c *component) send(signal syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.process == nil {
		return fmt.Errorf("%s does not run", c.name)
	}
	return c.process.Signal(signal)
}

// running tells whether the program runs.
func (c *component) running() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.process != nil
}

// waitHealthy waits until the health check passes.
func (c *component) waitHealthy(limit time.Duration) error {
	return await(c.name+" is healthy", limit, func() error {
		if !c.running() {
			return permanent{fmt.Errorf("%s has ended%s", c.name, c.tail())}
		}
		return c.healthy()
	}, c.tail)
}

// tail returns the end of the component's log, ready to be put behind an error.
func (c *component) tail() string {
	text, err := os.ReadFile(c.logPath)
	if err != nil {
		return ""
	}
	if len(text) > tailBytes {
		text = text[len(text)-tailBytes:]
	}
	return fmt.Sprintf("\n--- end of %s ---\n%s", c.logPath, strings.TrimSpace(string(text)))
}

// permanent is an error that waiting does not mend.
type permanent struct{ error }

// await looks at something until it is so. On failure it says what was waited
// for, what was seen last, and, by detail, more.
func await(what string, limit time.Duration, check func() error, detail func() string) error {
	began := time.Now()
	for {
		err := check()
		var final permanent
		switch {
		case err == nil:
			return nil
		case errors.As(err, &final):
			return final.error
		case time.Since(began) > limit:
			more := ""
			if detail != nil {
				more = detail()
			}
			return fmt.Errorf("waited %v until %s, in vain: %w%s", limit.Round(time.Second), what, err, more)
		}
		time.Sleep(pollInterval)
	}
}
