package main

import (
	"os"
	"strings"
)

// tokenSeconds is the life of the daemon's token: longer than a test.
const tokenSeconds = 24 * 3600

type metadata struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
}

// daemonIdentity gives the daemon under test its user: a service account
// without rights, and a token for it that is bound to the node, as the token
// of a DaemonSet's pod is. It writes STATE/gpu-bridge.token and
// STATE/gpu-bridge.kubeconfig.
func (o *options) daemonIdentity(c *client) error {
	namespace, name, _ := strings.Cut(o.ServiceAccount, "/")
	object := func(name string) any { return map[string]any{"metadata": metadata{Name: name}} }
	if err := c.post("/api/v1/namespaces", object(namespace), nil); err != nil {
		return err
	}
	accounts := "/api/v1/namespaces/" + namespace + "/serviceaccounts"
	if err := c.post(accounts, object(name), nil); err != nil {
		return err
	}
	var node struct {
		Metadata metadata `json:"metadata"`
	}
	// A node that was deleted comes back some seconds after its kubelet has
	// started.
	err := await("node "+o.Node+" exists", applyDeadline, func() error { return c.get("/api/v1/nodes/"+o.Node, &node) }, nil)
	if err != nil {
		return err
	}
	request := map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec": map[string]any{
			"expirationSeconds": tokenSeconds,
			"boundObjectRef":    map[string]any{"apiVersion": "v1", "kind": "Node", "name": o.Node, "uid": node.Metadata.UID},
		},
	}
	var answer struct {
		Status struct {
			Token string `json:"token"`
		} `json:"status"`
	}
	if err := c.post(accounts+"/"+name+"/token", request, &answer); err != nil {
		return err
	}
	if err := os.WriteFile(o.path("gpu-bridge.token"), []byte(answer.Status.Token), 0o600); err != nil {
		return err
	}
	return o.writeKubeconfig("gpu-bridge", answer.Status.Token)
}
