package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// cdiAnnotationPrefix marks annotations that name CDI devices (the older way
// to ask for them; a device plugin may still use it).
const cdiAnnotationPrefix = "cdi.k8s.io/"

// unknownMinor starts the stand-in for a UUID that the GPU table lacks.
const unknownMinor = "minor:"

var (
	gpuNode = regexp.MustCompile(`/nvidia([0-9]+)$`)
	gpuUUID = regexp.MustCompile(`(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`)
)

// resolution is what the CDI devices of a container come to.
type resolution struct {
	DeviceNodes []resolvedNode    `json:"device_nodes"`
	Env         map[string]string `json:"env"`
	Mounts      []recordedMount   `json:"mounts"`
	Hooks       []string          `json:"hooks"`
	// SpecFiles are the files that described the devices.
	SpecFiles []string `json:"spec_files"`
}

type resolvedNode struct {
	Path     string `json:"path"`
	HostPath string `json:"host_path"`
}

// requestedCDI lists the CDI devices of a container in order, each once.
func requestedCDI(config *cri.ContainerConfig) []string {
	var names []string
	for _, d := range config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	for key, value := range config.GetAnnotations() {
		if strings.HasPrefix(key, cdiAnnotationPrefix) {
			names = append(names, strings.Split(value, ",")...)
		}
	}
	var unique []string
	for _, name := range names {
		if !slices.Contains(unique, name) {
			unique = append(unique, name)
		}
	}
	return unique
}

// resolve looks the names up in the CDI spec files as they are now. The device
// nodes need not exist on this machine: its GPUs are pretended.
func resolve(dirs, names []string) (*resolution, error) {
	if len(names) == 0 {
		return nil, nil
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, status.Errorf(codes.Internal, "cannot read CDI specs in %s: %v", strings.Join(dirs, ", "), err)
	}
	out := &resolution{DeviceNodes: []resolvedNode{}, Env: map[string]string{}, Mounts: []recordedMount{}, Hooks: []string{}, SpecFiles: []string{}}
	var missing []string
	for _, name := range names {
		device := cache.GetDevice(name)
		if device == nil {
			missing = append(missing, name)
			continue
		}
		spec := device.GetSpec()
		if !slices.Contains(out.SpecFiles, spec.GetPath()) {
			out.SpecFiles = append(out.SpecFiles, spec.GetPath())
			out.add(spec.ContainerEdits)
		}
		out.add(device.ContainerEdits)
	}
	if len(missing) > 0 {
		return nil, status.Errorf(codes.Unknown, "CDI device injection failed: unresolvable CDI devices %s%s",
			strings.Join(missing, ", "), specErrors(cache))
	}
	return out, nil
}

// specErrors tells which spec files could not be used: the usual cause of a
// device that is not found.
func specErrors(cache *cdi.Cache) string {
	var text []string
	for path, errs := range cache.GetErrors() {
		for _, err := range errs {
			text = append(text, fmt.Sprintf("%s: %v", path, err))
		}
	}
	if len(text) == 0 {
		return ""
	}
	slices.Sort(text)
	return " (" + strings.Join(text, "; ") + ")"
}

func (r *resolution) add(e specs.ContainerEdits) {
	for _, n := range e.DeviceNodes {
		host := n.HostPath
		if host == "" {
			host = n.Path
		}
		r.DeviceNodes = append(r.DeviceNodes, resolvedNode{n.Path, host})
	}
	for _, env := range e.Env {
		key, value, _ := strings.Cut(env, "=")
		r.Env[key] = value
	}
	for _, m := range e.Mounts {
		r.Mounts = append(r.Mounts, recordedMount{m.ContainerPath, m.HostPath, slices.Contains(m.Options, "ro")})
	}
	for _, h := range e.Hooks {
		r.Hooks = append(r.Hooks, h.HookName+" "+h.Path)
	}
}

// gpuEntry is one line of the GPU table.
type gpuEntry struct {
	Minor int    `json:"minor"`
	UUID  string `json:"uuid"`
}

// gpuTable reads device minor -> UUID. A missing file is an empty table.
func gpuTable(path string) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var entries []gpuEntry
	if err := json.Unmarshal(text, &entries); err != nil {
		return nil, fmt.Errorf("%s is not a list of {minor, uuid}: %w", path, err)
	}
	table := map[string]string{}
	for _, e := range entries {
		table[fmt.Sprint(e.Minor)] = e.UUID
	}
	return table, nil
}

// gpusOf returns the GPUs that a container can reach. Device nodes tell it;
// where there are none, the UUIDs in its CDI device names do, and last the
// variable that NVIDIA's runtime hook obeys.
func gpusOf(table map[string]string, config *cri.ContainerConfig, r *resolution) []string {
	var found []string
	add := func(uuid string) {
		if !slices.Contains(found, uuid) {
			found = append(found, uuid)
		}
	}
	addNode := func(paths ...string) {
		for _, path := range paths {
			match := gpuNode.FindStringSubmatch(filepath.Clean(path))
			if match == nil {
				continue
			}
			if uuid := table[match[1]]; uuid != "" {
				add(uuid)
			} else {
				add(unknownMinor + match[1])
			}
			return
		}
	}
	if r != nil {
		for _, n := range r.DeviceNodes {
			addNode(n.Path, n.HostPath)
		}
	}
	for _, d := range config.GetDevices() {
		addNode(d.GetContainerPath(), d.GetHostPath())
	}
	if len(found) == 0 {
		for _, uuid := range gpuUUID.FindAllString(strings.Join(requestedCDI(config), ","), -1) {
			add(uuid)
		}
	}
	if len(found) == 0 {
		for _, uuid := range gpuUUID.FindAllString(envOf(config)["NVIDIA_VISIBLE_DEVICES"], -1) {
			add(uuid)
		}
	}
	return found
}
