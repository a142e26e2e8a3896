package main

import (
	"fmt"
	"os"
	"syscall"
)

// backUp keeps the present state of etcd, in the place of what was kept before.
func (cl *cluster) backUp() error {
	return cl.with(func() error {
		return replaceDir(cl.o.path("etcd", "backup"), cl.o.path("etcd", "data"))
	}, "etcd")
}

// restore puts the kept state of etcd back. Then everything that watches is
// started anew, as Kubernetes asks for after a restore: a watch from a version
// that the API server has not come to is silent until it has.
func (cl *cluster) restore() error {
	if _, err := os.Stat(cl.o.path("etcd", "backup")); err != nil {
		return fmt.Errorf("nothing was kept: %w", err)
	}
	return cl.with(func() error {
		return replaceDir(cl.o.path("etcd", "data"), cl.o.path("etcd", "backup"))
	}, "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
}

// with does something while components are stopped, which start again in the
// order given.
func (cl *cluster) with(do func() error, names ...string) error {
	if cl.o.Join != "" {
		return fmt.Errorf("etcd is not here, but in %s", cl.o.Join)
	}
	for i := len(names) - 1; i >= 0; i-- {
		c := cl.components[names[i]]
		c.verb.Lock()
		defer c.verb.Unlock()
		// Only etcd has something to finish.
		signal := syscall.SIGKILL
		if names[i] == "etcd" {
			signal = syscall.SIGTERM
		}
		if err := c.stop(signal); err != nil {
			return err
		}
	}
	if err := do(); err != nil {
		return err
	}
	for _, name := range names {
		if err := cl.components[name].startHealthy(); err != nil {
			return err
		}
	}
	return nil
}

// replaceDir makes the first folder a copy of the second.
func replaceDir(to, from string) error {
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	return os.CopyFS(to, os.DirFS(from))
}
