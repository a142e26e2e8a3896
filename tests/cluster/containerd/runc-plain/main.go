// Command runc-plain runs the runc beside it, and takes the seccomp profile
// out of a container's configuration first.
//
// A runc that can load seccomp profiles has to be built with libseccomp's
// headers, which not every machine has; one without refuses a container that
// has a profile, and the kubelet gives one to each sandbox. What these tests
// ask, which devices a container sees, does not depend on it.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "runc-plain:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if slices.Contains(args, "create") {
		bundle, err := bundleOf(args)
		if err != nil {
			return err
		}
		if err := dropSeccomp(filepath.Join(bundle, "config.json")); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	runc := filepath.Join(filepath.Dir(self), "runc")
	return syscall.Exec(runc, append([]string{runc}, args...), os.Environ())
}

// bundleOf returns the folder that "runc create" is told; by default it is the
// working folder.
func bundleOf(args []string) (string, error) {
	for i, arg := range args {
		if (arg == "--bundle" || arg == "-b") && i+1 < len(args) {
			return args[i+1], nil
		}
		if dir, found := strings.CutPrefix(arg, "--bundle="); found {
			return dir, nil
		}
	}
	return os.Getwd()
}

func dropSeccomp(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	// Raw messages keep all numbers as they are.
	var config, linux map[string]json.RawMessage
	if err := json.Unmarshal(text, &config); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if config["linux"] == nil {
		return nil
	}
	if err := json.Unmarshal(config["linux"], &linux); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	delete(linux, "seccomp")
	if config["linux"], err = json.Marshal(linux); err != nil {
		return err
	}
	if text, err = json.Marshal(config); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}
