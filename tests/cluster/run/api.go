package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// callTimeout ends a call that hangs.
const callTimeout = 10 * time.Second

// applyDeadline is how long an object may be refused because what it refers to
// has not appeared yet (its namespace, its API group).
const applyDeadline = 20 * time.Second

// client talks to the API server as admin.
type client struct {
	url       string
	http      *http.Client
	resources map[string][]resource
}

// resource is one entry of a group's discovery document.
type resource struct {
	Name       string `json:"name"`
	Kind       string `json:"kind"`
	Namespaced bool   `json:"namespaced"`
}

// statusError is an answer other than 2xx.
type statusError struct {
	code    int
	message string
}

func (e statusError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.code, e.message) }

func newClient(o *options) (*client, error) {
	authority, err := os.ReadFile(o.path("pki", "ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	return &client{
		url: o.apiURL(), http: &http.Client{Transport: transport, Timeout: callTimeout}, resources: map[string][]resource{},
	}, nil
}

// call sends one request; out may be nil.
func (c *client) call(method, path, contentType string, body []byte, out any) error {
	request, err := http.NewRequest(method, c.url+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+adminToken)
	request.Header.Set("Accept", "application/json")
	if body != nil {
		request.Header.Set("Content-Type", contentType)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		var failure struct {
			Message string `json:"message"`
		}
		if json.Unmarshal(text, &failure) != nil || failure.Message == "" {
			failure.Message = strings.TrimSpace(string(text))
		}
		return statusError{response.StatusCode, failure.Message}
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}

func (c *client) get(path string, out any) error {
	return c.call(http.MethodGet, path, "", nil, out)
}

// post creates an object, and is content when it is there already.
func (c *client) post(path string, object, out any) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	err = c.call(http.MethodPost, path, "application/json", body, out)
	var failure statusError
	if errors.As(err, &failure) && failure.code == http.StatusConflict {
		return nil
	}
	return err
}

// mayPass are the refusals that time can mend: a namespace, its service account
// or an API that is not there yet, and a server that has too much to do.
var mayPass = map[int]bool{
	http.StatusForbidden: true, http.StatusNotFound: true, http.StatusTooManyRequests: true,
	http.StatusServiceUnavailable: true, http.StatusGatewayTimeout: true,
}

// documentBreak separates the documents of a YAML file.
var documentBreak = regexp.MustCompile(`(?m)^---\s*$`)

// applyFile applies each document of a file. An object that needs a namespace
// and names none goes to the given one.
func (c *client) applyFile(path, namespace string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for i, document := range documentBreak.Split(string(text), -1) {
		var object struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Metadata   struct {
				Name      string `json:"name"`
				Namespace string `json:"namespace"`
			} `json:"metadata"`
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			return fmt.Errorf("%s, document %d: %w", path, i+1, err)
		}
		if object.Kind == "" && object.APIVersion == "" {
			continue // only comments
		}
		into := object.Metadata.Namespace
		if into == "" {
			into = namespace
		}
		what := fmt.Sprintf("%s %s of %s is accepted", object.Kind, object.Metadata.Name, filepath.Base(path))
		err := await(what, applyDeadline, func() error {
			target, err := c.target(object.APIVersion, object.Kind, into, object.Metadata.Name)
			if err == nil {
				err = c.call(http.MethodPatch, target+"?fieldManager=cluster&force=true", "application/apply-patch+yaml", []byte(document), nil)
			}
			var failure statusError
			if errors.As(err, &failure) && !mayPass[failure.code] {
				return permanent{fmt.Errorf("%s %s of %s is refused: %w", object.Kind, object.Metadata.Name, path, err)}
			}
			return err
		}, nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// target returns the path of an object.
func (c *client) target(apiVersion, kind, namespace, name string) (string, error) {
	root := "/apis/" + apiVersion
	if !strings.Contains(apiVersion, "/") {
		root = "/api/" + apiVersion
	}
	known, ok := c.resources[apiVersion]
	if !ok {
		var found struct {
			Resources []resource `json:"resources"`
		}
		if err := c.get(root, &found); err != nil {
			return "", err
		}
		known = found.Resources
		c.resources[apiVersion] = known
	}
	for _, r := range known {
		if r.Kind != kind || strings.Contains(r.Name, "/") {
			continue
		}
		if r.Namespaced {
			root += "/namespaces/" + namespace
		}
		return root + "/" + r.Name + "/" + url.PathEscape(name), nil
	}
	return "", permanent{fmt.Errorf("%s has no kind %s", apiVersion, kind)}
}

// nodeReady returns nil when the node is Ready.
func (c *client) nodeReady(node string) error {
	var object struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := c.get("/api/v1/nodes/"+node, &object); err != nil {
		return err
	}
	for _, condition := range object.Status.Conditions {
		if condition.Type == "Ready" {
			if condition.Status == "True" {
				return nil
			}
			return fmt.Errorf("node %s is not Ready: %s", node, condition.Message)
		}
	}
	return fmt.Errorf("node %s says nothing about being Ready", node)
}

// applyCommand is "cluster apply".
func applyCommand(state string, files []string) error {
	o, err := loadOptions(state)
	if err != nil {
		return err
	}
	c, err := newClient(o)
	if err != nil {
		return err
	}
	namespace, _, _ := strings.Cut(o.ServiceAccount, "/")
	for _, file := range files {
		if err := c.applyFile(file, namespace); err != nil {
			return err
		}
	}
	return nil
}
