package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// The control channel is the unix socket STATE/control.sock: one command line
// in, one answer line out, which starts with "ok " or "error: ". The answer
// comes when the command is done.

// maxCommandBytes is far above the longest command.
const maxCommandBytes = 256

// controlDeadline is how long the slowest command may take: a restart with
// both of its deadlines used up. A restore restarts five components, each of
// which takes a second or two.
const controlDeadline = 2*stopDeadline + 2*healthDeadline + callTimeout

// serveControl begins to take commands.
func (cl *cluster) serveControl() error {
	listener, err := net.Listen("unix", cl.o.path("control.sock"))
	if err != nil {
		return err
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				cl.failed <- fmt.Errorf("the control socket is broken: %w", err)
				return
			}
			go cl.answer(connection)
		}
	}()
	return nil
}

func (cl *cluster) answer(connection net.Conn) {
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(controlDeadline))
	text, err := bufio.NewReader(io.LimitReader(connection, maxCommandBytes)).ReadString('\n')
	if err != nil {
		return
	}
	began := time.Now()
	result, err := cl.obey(strings.Fields(text))
	if err != nil {
		// One line is one answer, whatever a log's tail holds.
		fmt.Fprintf(connection, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", " | "))
		fmt.Fprintf(os.Stderr, "%s: %v\n", strings.TrimSpace(text), err)
		return
	}
	fmt.Fprintf(connection, "ok %s\n", result)
	if words := strings.Fields(text); words[0] != "status" {
		fmt.Printf("%s: %s, %d ms\n", strings.TrimSpace(text), result, time.Since(began).Milliseconds())
	}
}

// obey carries out one command.
func (cl *cluster) obey(words []string) (string, error) {
	if len(words) == 1 {
		switch words[0] {
		case "status":
			return cl.status(), nil
		case "token":
			return "gpu-bridge.kubeconfig is written anew", cl.o.daemonIdentity(cl.api)
		case "back-up":
			return "the state of etcd is kept", cl.backUp()
		case "restore":
			return "the state of etcd is the one that was kept", cl.restore()
		}
	}
	if len(words) < 2 || len(words) > 3 {
		return "", errors.New("a command is status, token, back-up, restore, stop NAME [SIGNAL], start NAME, restart NAME [SIGNAL] or signal NAME SIGNAL")
	}
	c := cl.components[words[1]]
	if c == nil {
		return "", fmt.Errorf("there is no component %q, only %s", words[1], strings.Join(cl.order, ", "))
	}
	signal := syscall.SIGTERM
	if len(words) == 3 {
		var err error
		if signal, err = signalOf(words[2]); err != nil {
			return "", err
		}
	}
	c.verb.Lock()
	defer c.verb.Unlock()
	began := time.Now()
	var err error
	switch words[0] {
	case "stop":
		err = c.stop(signal)
	case "start":
		err = c.startHealthy()
	case "restart":
		if err = c.stop(signal); err == nil {
			err = c.startHealthy()
		}
	case "signal":
		err = c.send(signal)
	default:
		err = fmt.Errorf("there is no command %q", words[0])
	}
	return fmt.Sprintf("%s %s %d ms", words[0], c.name, time.Since(began).Milliseconds()), err
}

func (c *component) startHealthy() error {
	if err := c.start(); err != nil {
		return err
	}
	return c.waitHealthy(healthDeadline)
}

// status names each component with "running" or "stopped".
func (cl *cluster) status() string {
	var parts []string
	for _, name := range cl.order {
		state := "stopped"
		if cl.components[name].running() {
			state = "running"
		}
		parts = append(parts, name+"="+state)
	}
	return strings.Join(parts, " ")
}

// controlClient is "cluster control".
func controlClient(state string, words []string) error {
	connection, err := net.Dial("unix", filepath.Join(state, "control.sock"))
	if err != nil {
		return fmt.Errorf("no cluster takes commands in %s: %w", state, err)
	}
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(controlDeadline))
	if _, err := fmt.Fprintln(connection, strings.Join(words, " ")); err != nil {
		return err
	}
	answer, err := bufio.NewReader(connection).ReadString('\n')
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	if text, failed := strings.CutPrefix(answer, "error: "); failed {
		return errors.New(strings.TrimSpace(text))
	}
	fmt.Print(answer)
	return nil
}
