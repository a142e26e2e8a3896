// Command fakecri is a container runtime that runs nothing. It answers the
// kubelet's Container Runtime Interface from memory and pretends that each
// container is one process which uses the container's GPUs:
//
//   - CDI devices are looked up in real CDI spec files, and a device that no
//     file describes fails CreateContainer, as containerd does it;
//   - while a container's process lives there is a file for it in the fake
//     NVML's state (processes/<GPU UUID>/<pid>) and in a fake /proc
//     (<pid>/cgroup, with the pod's UID in the path);
//   - every change is one JSON line in the record (see record.go), with wall
//     clock and monotonic time, so that a test can tell afterwards who had
//     which GPU when.
//
// It knows nothing about the daemon under test.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// span is an inclusive range that a duration is drawn from.
type span struct{ min, max time.Duration }

// String and Set make a span a flag value: "46-548" or "0", in milliseconds.
func (s *span) String() string {
	return fmt.Sprintf("%d-%d", s.min.Milliseconds(), s.max.Milliseconds())
}

func (s *span) Set(text string) error {
	low, high, isRange := strings.Cut(text, "-")
	if !isRange {
		high = low
	}
	from, err := strconv.ParseUint(low, 10, 31)
	if err != nil {
		return fmt.Errorf("%q is not MIN-MAX in milliseconds: %w", text, err)
	}
	to, err := strconv.ParseUint(high, 10, 31)
	if err != nil {
		return fmt.Errorf("%q is not MIN-MAX in milliseconds: %w", text, err)
	}
	if from > to {
		return fmt.Errorf("%q has its minimum above its maximum", text)
	}
	s.min, s.max = time.Duration(from)*time.Millisecond, time.Duration(to)*time.Millisecond
	return nil
}

func (s span) draw(random *rand.Rand) time.Duration {
	if s.max == s.min {
		return s.min
	}
	return s.min + time.Duration(random.Int64N(int64(s.max-s.min)+1))
}

// options is the command line.
type options struct {
	listen, record, gpus, nvmlState, procRoot, cgroups string
	cdiDirs                                            []string
	exitDelay, linger                                  span
	seed                                               uint64
}

func parse() options {
	o := options{exitDelay: span{46 * time.Millisecond, 548 * time.Millisecond}}
	flag.StringVar(&o.listen, "listen", "", "unix socket to serve the CRI on (required)")
	flag.StringVar(&o.record, "record", "", "file that gets one JSON line per change (required)")
	flag.StringVar(&o.gpus, "gpus", "", `JSON file [{"minor":0,"uuid":"GPU-..."}], read anew for each container; missing: no table`)
	flag.StringVar(&o.nvmlState, "nvml-state", "", "state folder of the fake NVML; empty: no processes are shown there")
	flag.StringVar(&o.procRoot, "proc-root", "", "fake /proc to write <pid>/cgroup in; empty: none")
	flag.StringVar(&o.cgroups, "cgroups", "mixed", "style of the cgroup paths: cgroupfs, systemd, v1, or mixed (one after the other)")
	flag.Func("cdi-dir", "folder of CDI spec files (may be repeated; a later one wins)", func(dir string) error {
		o.cdiDirs = append(o.cdiDirs, dir)
		return nil
	})
	flag.Var(&o.exitDelay, "exit-delay-ms", "how long a process lives on after it was told to stop, MIN-MAX; FAKE_EXIT_DELAY_MS in a container overrides it")
	flag.Var(&o.linger, "linger-ms", "how long a process is still seen on its GPUs after its container is reported exited, MIN-MAX; FAKE_LINGER_MS in a container overrides it")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the random delays")
	flag.Parse()
	if o.listen == "" || o.record == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "fakecri: --listen and --record are needed, and no other arguments")
		os.Exit(2)
	}
	if !validCgroupStyle(o.cgroups) {
		fmt.Fprintf(os.Stderr, "fakecri: --cgroups %q is none of cgroupfs, systemd, v1, mixed\n", o.cgroups)
		os.Exit(2)
	}
	return o
}

func main() {
	if err := serve(parse()); err != nil {
		fmt.Fprintln(os.Stderr, "fakecri:", err)
		os.Exit(1)
	}
}

func serve(o options) error {
	// A socket file left by a killed runtime is in the way of the new one.
	if err := os.Remove(o.listen); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("cannot remove the old socket: %w", err)
	}
	listener, err := net.Listen("unix", o.listen)
	if err != nil {
		return fmt.Errorf("cannot listen: %w", err)
	}
	record, err := openRecord(o.record)
	if err != nil {
		return err
	}
	processes := &processTable{nvmlState: o.nvmlState, procRoot: o.procRoot, style: o.cgroups, next: firstPID}
	if err := processes.sweep(); err != nil {
		return err
	}
	if err := record.endLeft(); err != nil {
		return err
	}
	r := &runtime{
		options:    o,
		boot:       uint32(time.Now().Unix()),
		random:     rand.New(rand.NewPCG(o.seed, 0)),
		sandboxes:  map[string]*sandbox{},
		containers: map[string]*container{},
		record:     record,
		processes:  processes,
	}
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, r)
	cri.RegisterImageServiceServer(server, images{root: o.record})
	return server.Serve(listener)
}
