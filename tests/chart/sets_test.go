package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// writeTo names the variable with the folder into which the objects of each set of values are written, one file of JSON
// documents for each: a real API server takes them in tests/e2e/chart.rs.
const writeTo = "CHART_WRITE_TO"

// sets are the values of values/NAME.yaml by NAME, which is the namespace of the release, too.
func sets(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("values/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("no sets of values: %v", err)
	}
	found := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimSuffix(filepath.Base(file), ".yaml")] = string(text)
	}
	return found
}

func TestEachSetOfValuesIsRendered(t *testing.T) {
	folder := os.Getenv(writeTo)
	for name, values := range sets(t) {
		rendered := mustRender(t, name, values)
		if rendered["DaemonSet/gpu-bridge"] == nil {
			t.Errorf("%s has no DaemonSet: %v", name, keys(rendered))
		}
		if folder == "" {
			continue
		}
		var documents strings.Builder
		for _, key := range keys(rendered) {
			document, err := json.Marshal(rendered[key])
			if err != nil {
				t.Fatal(err)
			}
			documents.Write(append(document, '\n'))
		}
		if err := os.WriteFile(filepath.Join(folder, name+".json"), []byte(documents.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestEachValueIsChangedBySomeSet(t *testing.T) {
	var known, changed []string
	collectKeys := func(text string) []string {
		read := object{}
		if err := yaml.UnmarshalStrict([]byte(text), &read); err != nil {
			t.Fatal(err)
		}
		var found []string
		for key, value := range read {
			inner, is := value.(object)
			if !is || len(inner) == 0 || key == "config" {
				found = append(found, key)
				continue
			}
			for name := range inner {
				found = append(found, key+"."+name)
			}
		}
		return found
	}
	text, err := os.ReadFile(filepath.Join(manifests, "chart/gpu-bridge/values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	known = collectKeys(string(text))
	for _, values := range sets(t) {
		changed = append(changed, collectKeys(values)...)
	}
	for _, key := range known {
		of := func(other string) bool { return other == key || strings.HasPrefix(other, key+".") }
		if !slices.ContainsFunc(changed, of) {
			t.Errorf("no set of values changes %s", key)
		}
	}
}
