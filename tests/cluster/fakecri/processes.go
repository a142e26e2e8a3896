package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// firstPID lies above the kernel's largest possible process id (2^22), so an
// invented process is never mistaken for one that runs.
const firstPID = 5_000_001

// processMemoryBytes is what every invented process claims to use on its GPU.
const processMemoryBytes = 512 << 20

// The kubelet's out-of-memory scores tell the QoS class of a container.
const (
	oomScoreGuaranteed = -997
	oomScoreBestEffort = 1000
)

var cgroupStyles = []string{"cgroupfs", "systemd", "v1"}

func validCgroupStyle(style string) bool {
	for _, s := range cgroupStyles {
		if s == style {
			return true
		}
	}
	return style == "mixed"
}

// process is an invented process.
type process struct {
	pid  int
	gpus []string
}

// processTable shows invented processes to whoever looks at the fake NVML or
// the fake /proc. The caller serialises calls.
type processTable struct {
	nvmlState, procRoot, style string
	next                       int
}

// sweep removes what an earlier runtime on the same folders left behind: its
// processes died with it.
func (t *processTable) sweep() error {
	var patterns []string
	if t.nvmlState != "" {
		patterns = append(patterns, filepath.Join(t.nvmlState, "processes", "*", "*"))
	}
	if t.procRoot != "" {
		patterns = append(patterns, filepath.Join(t.procRoot, "*"))
	}
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, path := range paths {
			if pid, err := strconv.Atoi(filepath.Base(path)); err != nil || pid < firstPID {
				continue
			}
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("cannot remove an old process: %w", err)
			}
		}
	}
	return nil
}

// invent makes up a process that nobody sees yet.
func (t *processTable) invent(gpus []string) *process {
	p := &process{pid: t.next, gpus: gpus}
	t.next++
	return p
}

// show makes a process of this container visible: in /proc first, so that
// whoever finds the pid on a GPU can also find out whose it is.
func (t *processTable) show(p *process, pod podName, containerID string, config *cri.ContainerConfig) error {
	if t.procRoot != "" {
		dir := filepath.Join(t.procRoot, strconv.Itoa(p.pid))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		style := t.style
		if style == "mixed" {
			style = cgroupStyles[p.pid%len(cgroupStyles)]
		}
		text := cgroupText(style, qosOf(config), pod.UID, containerID)
		if err := os.WriteFile(filepath.Join(dir, "cgroup"), []byte(text), 0o644); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "comm"), []byte("fake\n"), 0o644); err != nil {
			return err
		}
	}
	for _, path := range t.nvmlFiles(p) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, fmt.Appendf(nil, `{"usedMemoryBytes":%d}`, processMemoryBytes), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// end takes a process away, in the opposite order.
func (t *processTable) end(p *process) error {
	var errs []error
	for _, path := range t.nvmlFiles(p) {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			errs = append(errs, err)
		}
	}
	if t.procRoot != "" {
		errs = append(errs, os.RemoveAll(filepath.Join(t.procRoot, strconv.Itoa(p.pid))))
	}
	return errors.Join(errs...)
}

func (t *processTable) nvmlFiles(p *process) []string {
	if t.nvmlState == "" {
		return nil
	}
	var out []string
	for _, uuid := range p.gpus {
		if !strings.HasPrefix(uuid, unknownMinor) {
			out = append(out, filepath.Join(t.nvmlState, "processes", uuid, strconv.Itoa(p.pid)))
		}
	}
	return out
}

// qosOf returns the folder name of a QoS class; guaranteed pods have none.
func qosOf(config *cri.ContainerConfig) string {
	switch score := config.GetLinux().GetResources().GetOomScoreAdj(); {
	case score <= oomScoreGuaranteed:
		return ""
	case score >= oomScoreBestEffort:
		return "besteffort"
	default:
		return "burstable"
	}
}

// cgroupText is the content of /proc/PID/cgroup as the kubelet's two cgroup
// drivers make it: below /kubepods with the UID as it is (cgroupfs), or as
// systemd slices, where a dash in the UID is an underscore.
func cgroupText(style, qos, uid, containerID string) string {
	plain := "/kubepods/"
	slice := "/kubepods.slice/"
	prefix := "kubepods-"
	if qos != "" {
		plain += qos + "/"
		slice += "kubepods-" + qos + ".slice/"
		prefix += qos + "-"
	}
	plain += "pod" + uid + "/" + containerID
	switch style {
	case "systemd":
		scope := prefix + "pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/cri-containerd-" + containerID + ".scope"
		return "0::" + slice + scope + "\n"
	case "v1":
		return "3:cpu,cpuacct:" + plain + "\n2:memory:" + plain + "\n1:name=systemd:" + plain + "\n0::/\n"
	default:
		return "0::" + plain + "\n"
	}
}
