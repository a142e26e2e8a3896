package queries

import (
	"os"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// page is all that a daemon may show; a test of bridge/src/metrics writes it.
const page = "../golden/metrics.txt"

// ofTheScrape are the labels that Prometheus adds to what is on the page: the name of the node as
// manifests/monitoring/podmonitor.yaml says, and what every target of Prometheus' operator has.
var ofTheScrape = []string{"instance", "job", "namespace"}

// series is what a selector can name: a counter, a gauge, or one of the three that a histogram has.
type series struct {
	kind dto.MetricType
	// words are the values of each label. A label without words can have any.
	words map[string][]string
}

// isCounted says whether it only grows, so that rate and increase are of use.
func (s series) isCounted() bool {
	return s.kind == dto.MetricType_COUNTER || s.kind == dto.MetricType_HISTOGRAM
}

// has says whether it has a label, from the page or from the scrape.
func (s series) has(label string) bool {
	_, ours := s.words[label]
	return ours || slices.Contains(ofTheScrape, label)
}

// labels are all that it has.
func (s series) labels() set {
	all := set{}
	for label := range s.words {
		all[label] = true
	}
	for _, label := range ofTheScrape {
		all[label] = true
	}
	return all
}

// known reads the page.
func known(t *testing.T) map[string]series {
	t.Helper()
	text, err := os.Open(page)
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(text)
	if err != nil {
		t.Fatalf("%s: %v", page, err)
	}
	found := map[string]series{}
	for name, family := range families {
		words := map[string][]string{}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				words[label.GetName()] = append(words[label.GetName()], label.GetValue())
			}
		}
		one := series{family.GetType(), words}
		if family.GetType() != dto.MetricType_HISTOGRAM {
			found[name] = one
			continue
		}
		found[name+"_sum"], found[name+"_count"] = one, one
		bucket := series{one.kind, map[string][]string{"le": nil}}
		for label, values := range words {
			bucket.words[label] = values
		}
		found[name+"_bucket"] = bucket
	}
	if len(found) < 20 || !strings.HasPrefix(anyOf(found), "gpu_bridge_") {
		t.Fatalf("%s shows little: %v", page, found)
	}
	return found
}

func anyOf(found map[string]series) string {
	for name := range found {
		return name
	}
	return ""
}
