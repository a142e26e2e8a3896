// Command sleeper is what runs in the containers of the containerd mode. It
// prints what it can see of GPUs as one JSON line, and then waits to be told
// to stop:
//
//	{"devices":[{"name":"nvidia0","major":195,"minor":0}],"env":{"GPU_BRIDGE_...":"..."}}
//
// The environment variables FAKE_RUN_MS, FAKE_EXIT_CODE and FAKE_EXIT_DELAY_MS
// mean to it what they mean to the fake runtime.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

type device struct {
	Name  string `json:"name"`
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

type sight struct {
	Devices []device          `json:"devices"`
	Env     map[string]string `json:"env"`
}

func main() {
	seen, err := look()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(seen)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sleeper:", err)
		os.Exit(1)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	var end <-chan time.Time
	if after := number("FAKE_RUN_MS"); after > 0 {
		end = time.After(time.Duration(after) * time.Millisecond)
	}
	select {
	case <-end:
		os.Exit(number("FAKE_EXIT_CODE"))
	case <-stop:
		time.Sleep(time.Duration(number("FAKE_EXIT_DELAY_MS")) * time.Millisecond)
	}
}

// look lists the device nodes that NVIDIA's software would use, those in
// subfolders included.
func look() (sight, error) {
	s := sight{Devices: []device{}, Env: map[string]string{}}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/nvidia*/*"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return s, err
		}
		for _, path := range paths {
			var stat syscall.Stat_t
			if err := syscall.Stat(path, &stat); err != nil {
				return s, fmt.Errorf("%s: %w", path, err)
			}
			if stat.Mode&syscall.S_IFMT != syscall.S_IFCHR {
				continue
			}
			// Linux keeps the major number in bits 8 to 19 of small device
			// numbers and the minor's low byte below it.
			s.Devices = append(s.Devices, device{
				Name:  strings.TrimPrefix(path, "/dev/"),
				Major: uint32(stat.Rdev >> 8 & 0xfff), Minor: uint32(stat.Rdev&0xff | stat.Rdev>>12&0xfff00),
			})
		}
	}
	for _, pair := range os.Environ() {
		key, value, _ := strings.Cut(pair, "=")
		s.Env[key] = value
	}
	return s, nil
}

// number reads an environment variable; what is missing or no number is 0.
func number(name string) int {
	value, err := strconv.Atoi(os.Getenv(name))
	if err != nil {
		return 0
	}
	return value
}
