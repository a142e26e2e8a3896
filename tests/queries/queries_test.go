// Package queries reads each query that is shipped, those of the dashboard, of the alerts and of the guide, with
// Prometheus' own parser, and checks it against the metrics that there are.
package queries

import (
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"sigs.k8s.io/yaml"
)

const root = "../.."

func read(t *testing.T, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	// JSON is YAML, too.
	if err := yaml.Unmarshal(text, to); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// dashboard is what of one of Grafana's matters here.
type dashboard struct {
	Panels []struct {
		Title, Type string
		Targets     []struct{ Expr, LegendFormat string }
	}
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

// variables are what Grafana has for every dashboard, each with a value that it could have.
var variables = map[string]string{
	"__interval":      "30s",
	"__rate_interval": "2m",
	"__range":         "1h",
}

var (
	variable     = regexp.MustCompile(`\$(\w+)`)
	ofALegend    = regexp.MustCompile(`\{\{ *(\w+) *\}\}`)
	ofAnAlert    = regexp.MustCompile(`\$labels\.(\w+)`)
	labelValues  = regexp.MustCompile(`^label_values\((.*), *(\w+)\)$`)
	quotedInPage = regexp.MustCompile("`[^`\n]*gpu_bridge_\\w+[^`\n]*`")
)

// filled is an expression as Grafana sends it.
func filled(t *testing.T, expression string, values map[string]string) string {
	t.Helper()
	return variable.ReplaceAllStringFunc(expression, func(name string) string {
		value, is := values[name[1:]]
		if !is {
			t.Errorf("%s is no variable of the dashboard: %s", name, expression)
		}
		return value
	})
}

// named are the labels in a text for people.
func named(pattern *regexp.Regexp, text string) []string {
	var found []string
	for _, match := range pattern.FindAllStringSubmatch(text, -1) {
		found = append(found, match[1])
	}
	return found
}

func TestTheDashboardsQueriesAreOfTheMetricsThatThereAre(t *testing.T) {
	known := known(t)
	var board dashboard
	read(t, "manifests/grafana/gpu-bridge.json", &board)
	values := maps.Clone(variables)
	for _, variable := range board.Templating.List {
		values[variable.Name] = "(node-1|node-2)"
		if variable.Type != "query" {
			continue
		}
		asked := labelValues.FindStringSubmatch(variable.Definition)
		if asked == nil {
			t.Fatalf("%s is no question for values of a label", variable.Definition)
		}
		if result, err := check(asked[1], known); err != nil || !result[asked[2]] {
			t.Errorf("%s: %v, and %s", variable.Name, err, result)
		}
	}
	used := set{}
	for _, panel := range board.Panels {
		if panel.Type == "row" {
			continue
		}
		if len(panel.Targets) == 0 {
			t.Errorf("%s has no query", panel.Title)
		}
		for _, target := range panel.Targets {
			expression := filled(t, target.Expr, values)
			result, err := check(expression, known)
			if err != nil {
				t.Errorf("%s: %s\n%v", panel.Title, expression, err)
				continue
			}
			for _, label := range named(ofALegend, target.LegendFormat) {
				if !result[label] {
					t.Errorf("%s: the legend has %s, and the result %s", panel.Title, label, result)
				}
			}
			tree, _ := parse(expression)
			for _, selector := range selectors(tree) {
				used[selector.Name] = true
				isOfNode := func(matcher *labels.Matcher) bool {
					return matcher.Name == "instance" && matcher.Type == labels.MatchRegexp && matcher.Value == values["node"]
				}
				if !slices.ContainsFunc(selector.LabelMatchers, isOfNode) {
					t.Errorf("%s: %s is of all nodes", panel.Title, selector)
				}
			}
		}
	}
	if len(used) <= 15 {
		t.Errorf("the dashboard shows little: %s", used)
	}
}

func TestTheAlertsAreOfTheMetricsThatThereAreAndNameLabelsThatTheyHave(t *testing.T) {
	known := known(t)
	var rules struct {
		Spec struct {
			Groups []struct {
				Rules []struct {
					Alert, Expr string
					Annotations map[string]string
				}
			}
		}
	}
	read(t, "manifests/monitoring/prometheusrule.yaml", &rules)
	seen := 0
	for _, group := range rules.Spec.Groups {
		for _, rule := range group.Rules {
			seen++
			result, err := check(rule.Expr, known)
			if err != nil {
				t.Errorf("%s: %s\n%v", rule.Alert, rule.Expr, err)
				continue
			}
			for _, text := range rule.Annotations {
				for _, label := range named(ofAnAlert, text) {
					if !result[label] {
						t.Errorf("%s speaks of the label %s, and has %s", rule.Alert, label, result)
					}
				}
			}
		}
	}
	if seen < 5 {
		t.Errorf("there are %d alerts", seen)
	}
}

func TestTheQueriesInTheGuideAreOfTheMetricsThatThereAre(t *testing.T) {
	known := known(t)
	seen := 0
	err := filepath.WalkDir(filepath.Join(root, "migration-guide"), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, quoted := range quotedInPage.FindAllString(string(text), -1) {
			quoted = strings.Trim(quoted, "`")
			// The bare name of a histogram is no query, but is what its row in the table is about.
			if _, isHistogram := known[quoted+"_bucket"]; isHistogram {
				continue
			}
			seen++
			if _, err := check(quoted, known); err != nil {
				t.Errorf("%s: %s\n%v", path, quoted, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 25 {
		t.Errorf("%d queries and names were found", seen)
	}
}

func TestAWrongQueryIsSeen(t *testing.T) {
	known := known(t)
	for expression, words := range map[string]string{
		"sum(gpu_bridge_units{":                             "parse error",
		"sum(gpu_bridge_unit)":                              "no metric gpu_bridge_unit",
		"up":                                                "no metric up",
		"time()":                                            "asks for no metric",
		`gpu_bridge_units{pod="a"}`:                         "no label pod",
		`gpu_bridge_units{state="Free"}`:                    `no state="Free"`,
		`gpu_bridge_units{state!="Free"}`:                   `no state="Free"`,
		`gpu_bridge_units{state=~"FreeDra|Freed"}`:          `no state="Freed"`,
		`gpu_bridge_units{state=~"Fred.*"}`:                 "nothing is left",
		"sum by (pod) (gpu_bridge_units)":                   "no label pod",
		"sum by (state) (sum by (face) (gpu_bridge_units))": "no label state",
		"rate(gpu_bridge_units[5m])":                        "nothing for rate",
		"increase(gpu_bridge_units)":                        "expected type range vector",
		"delta(gpu_bridge_grants_total[5m])":                "nothing for delta",
		"histogram_quantile(0.95, sum by (call, le) (rate(gpu_bridge_call_duration_seconds_count[5m])))": "no bucket",
		"histogram_quantile(0.95, sum by (call) (rate(gpu_bridge_call_duration_seconds_bucket[5m])))":    "le is lost",
		"gpu_bridge_call_duration_seconds":                                      "no metric",
		"gpu_bridge_units / gpu_bridge_units_allocated":                         "nothing fits",
		"gpu_bridge_units / on (face) group_left () gpu_bridge_units_allocated": "a side has no label face",
		"gpu_bridge_grants_total[5m:1m]":                                        "of which this check knows nothing",
	} {
		if _, err := check(expression, known); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", expression, err)
		}
	}
	for expression, expected := range map[string]string{
		`gpu_bridge_units{state=~"FreeDra|FreeRest",instance=~"node-1|node-2"} > 0`:                                     "face, instance, job, namespace, state",
		"sum by (face) (gpu_bridge_units) / ignoring (face) group_left () sum(gpu_bridge_units_allocated)":              "face",
		"sum without (face, job, namespace) (rate(gpu_bridge_grants_total[5m]))":                                        "instance",
		"histogram_quantile(0.9, sum by (call, le) (rate(gpu_bridge_call_duration_seconds_bucket[5m])))":                "call",
		"time() - gpu_bridge_config_loaded_timestamp_seconds > 60 and on (instance) gpu_bridge_mode{mode=\"dra\"} == 1": "instance, job, namespace",
	} {
		if result, err := check(expression, known); err != nil || result.String() != expected {
			t.Errorf("%s: %v, and %s", expression, err, result)
		}
	}
}

// A query that is broken on purpose, as a rename of a metric or of a label would break it.
func TestAPanelWithABrokenQueryIsSeen(t *testing.T) {
	known := known(t)
	var board dashboard
	read(t, "manifests/grafana/gpu-bridge.json", &board)
	text, err := json.Marshal(board)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []struct{ from, to string }{
		{"gpu_bridge_units_offered", "gpu_bridge_units_offers"},
		{"sum by (face, reason)", "sum by (face, cause)"},
		{"call, le", "call"},
		{"rate(gpu_bridge_grants_total", "rate(gpu_bridge_units"},
	} {
		if !strings.Contains(string(text), change.from) {
			t.Fatalf("the dashboard has no %s", change.from)
		}
		broken := strings.ReplaceAll(string(text), change.from, change.to)
		var board dashboard
		if err := json.Unmarshal([]byte(broken), &board); err != nil {
			t.Fatal(err)
		}
		seen := false
		for _, panel := range board.Panels {
			for _, target := range panel.Targets {
				if _, err := check(strings.ReplaceAll(target.Expr, "$node", ".*"), known); err != nil {
					seen = true
				}
			}
		}
		if !seen {
			t.Errorf("%s in place of %s is not seen", change.to, change.from)
		}
	}
}
