package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// hiddenFolders are replaced by empty ones that only the cluster sees: the
// kubelet insists on paths below them, whatever its configuration says.
var hiddenFolders = []string{"/var/lib", "/var/log"}

// kubeletDir is where the kubelet's folder is on a plain node. Its device plugins do not move with --root-dir, and a
// daemon that is started as its pod says tells the kubelet of sockets below it.
const kubeletDir = "/var/lib/kubelet"

// kernelSettings are the values that the kubelet writes to the kernel when it
// finds others (setupKernelTunables in pkg/kubelet/cm). They belong to the
// machine and not to a test, so the cluster sees files with these values in
// their places and the kubelet has nothing to write.
var kernelSettings = map[string]int{
	"vm/overcommit_memory":      1,
	"vm/panic_on_oom":           0,
	"kernel/panic":              10,
	"kernel/panic_on_oops":      1,
	"kernel/keys/root_maxkeys":  1_000_000,
	"kernel/keys/root_maxbytes": 25_000_000,
}

// mountAll lays out the file systems of the new mount namespace.
func (o *options) mountAll() error {
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE); err != nil {
		return o.mountError(err)
	}
	if err := mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC); err != nil {
		// Where parts of /proc are masked (as in a container) a user namespace
		// may not mount a new one. The old one does: it only shows more.
		if !o.UserNamespace || !errors.Is(err, syscall.EPERM) {
			return o.mountError(err)
		}
		fmt.Fprintln(os.Stderr, "cluster: /proc stays that of the machine:", err)
	}
	for _, folder := range hiddenFolders {
		if err := mount("tmpfs", folder, "tmpfs", 0); err != nil {
			return o.mountError(err)
		}
	}
	if err := os.MkdirAll(kubeletDir, 0o755); err != nil {
		return err
	}
	if err := mount(o.path("kubelet"), kubeletDir, "", syscall.MS_BIND); err != nil {
		return o.mountError(err)
	}
	// etcd's disk is the one thing whose speed everything else waits for.
	if err := mount("tmpfs", o.path("etcd"), "tmpfs", 0); err != nil {
		return o.mountError(err)
	}
	return o.coverKernelSettings()
}

func (o *options) coverKernelSettings() error {
	dir := o.path("sysctl")
	for name, value := range kernelSettings {
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(value)+"\n"), 0o644); err != nil {
			return err
		}
		if err := mount(file, filepath.Join("/proc/sys", name), "", syscall.MS_BIND); err != nil {
			return o.mountError(err)
		}
	}
	return nil
}

func mount(source, target, kind string, flags uintptr) error {
	if err := syscall.Mount(source, target, kind, flags, ""); err != nil {
		return fmt.Errorf("mount on %s: %w", target, err)
	}
	return nil
}

// mountError sorts out mounts that the machine forbids: some let everybody
// make a user namespace and then grant no rights in it.
func (o *options) mountError(err error) error {
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("%w: %w", errSkipped, err)
	}
	return err
}
