// Command cluster runs a Kubernetes cluster for tests, of one node unless others
// join it: etcd,
// kube-apiserver, kube-scheduler, kube-controller-manager and kubelet as
// upstream ships them (program kube), over a container runtime that runs
// nothing (program fakecri).
//
//	cluster up STATE [flags]        run it in the foreground
//	cluster start STATE [flags]     run it in the background, return when it is ready
//	cluster down STATE              end it
//	cluster control STATE COMMAND   stop, start or restart one component
//	cluster apply STATE FILE...     server-side apply YAML files as admin
//
// Everything runs in a mount and a PID namespace of its own, so SIGKILL on
// "cluster up" leaves neither a process nor a mount behind. Without root it
// does so in a user namespace.
package main

import (
	"errors"
	"fmt"
	"os"
)

// Exit statuses besides 0.
const (
	exitFailed = 1
	exitUsage  = 2
	// exitSkipped says that this machine cannot run a cluster at all, by which
	// test runners know a skipped test from a failed one.
	exitSkipped = 77
)

// errSkipped marks a reason why no cluster can run on this machine.
var errSkipped = errors.New("no cluster can run here")

const usage = `usage:
  cluster up STATE [flags]        run a cluster in the foreground (--help for the flags)
  cluster start STATE [flags]     run it in the background, return when it is ready
  cluster down STATE              end it
  cluster control STATE COMMAND   status | stop NAME [SIGNAL] | start NAME | restart NAME [SIGNAL] | signal NAME SIGNAL | token
  cluster apply STATE FILE...     server-side apply YAML files as admin
`

func main() {
	os.Exit(exitStatus(dispatch(os.Args[1:])))
}

func dispatch(args []string) error {
	if len(args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		return usageError("a command and a state folder are needed")
	}
	command, state, rest := args[0], args[1], args[2:]
	switch command {
	case "up", "start":
		o, err := parseOptions(command, state, rest)
		if err != nil {
			return err
		}
		if command == "start" {
			return startDetached(o, args[1:])
		}
		return runOuter(o)
	case insideCommand:
		return runInside(state)
	case "down":
		return down(state)
	case "control":
		return controlClient(state, rest)
	case "apply":
		return applyCommand(state, rest)
	default:
		fmt.Fprint(os.Stderr, usage)
		return usageError(fmt.Sprintf("there is no command %q", command))
	}
}

// usageError is a mistake on the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

// childStatus passes on the exit status of a child that has already said why.
type childStatus int

func (childStatus) Error() string { return "" }

func exitStatus(err error) int {
	var child childStatus
	var mistake usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &child):
		return int(child)
	case errors.As(err, &mistake):
		fmt.Fprintln(os.Stderr, "cluster:", err)
		return exitUsage
	case errors.Is(err, errSkipped):
		fmt.Fprintln(os.Stderr, "SKIPPED: the real-cluster tests need root, or user namespaces for everybody:", err)
		return exitSkipped
	default:
		fmt.Fprintln(os.Stderr, "cluster:", err)
		return exitFailed
	}
}
