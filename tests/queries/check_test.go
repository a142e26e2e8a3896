package queries

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// set is a set of names of labels.
type set map[string]bool

func (s set) String() string { return strings.Join(slices.Sorted(maps.Keys(s)), ", ") }

// ofCounters are the functions that take a series for one that only grows; ofGauges those that don't.
var (
	ofCounters = []string{"rate", "irate", "increase", "resets"}
	ofGauges   = []string{"delta", "idelta", "deriv", "predict_linear"}
)

// parse reads an expression as Prometheus does.
func parse(expression string) (parser.Expr, error) {
	return parser.NewParser(parser.Options{}).ParseExpr(expression)
}

// check parses an expression and returns the labels of what comes out of it. All mistakes are told.
func check(expression string, known map[string]series) (set, error) {
	tree, err := parse(expression)
	if err != nil {
		return nil, err
	}
	checked := checker{known: known}
	result := checked.labels(tree)
	if len(selectors(tree)) == 0 {
		checked.fail("it asks for no metric")
	}
	return result, errors.Join(checked.failures...)
}

// selectors are all that an expression asks for.
func selectors(tree parser.Expr) []*parser.VectorSelector {
	var found []*parser.VectorSelector
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		if selector, is := node.(*parser.VectorSelector); is {
			found = append(found, selector)
		}
		return nil
	})
	return found
}

type checker struct {
	known    map[string]series
	failures []error
}

func (c *checker) fail(format string, values ...any) {
	c.failures = append(c.failures, fmt.Errorf(format, values...))
}

// labels checks an expression, and returns the labels that its result can have. A number has none.
func (c *checker) labels(tree parser.Expr) set {
	switch node := tree.(type) {
	case *parser.NumberLiteral, *parser.StringLiteral:
		return set{}
	case *parser.ParenExpr:
		return c.labels(node.Expr)
	case *parser.UnaryExpr:
		return c.labels(node.Expr)
	case *parser.VectorSelector:
		return c.selected(node)
	case *parser.MatrixSelector:
		return c.labels(node.VectorSelector)
	case *parser.AggregateExpr:
		return c.aggregated(node)
	case *parser.BinaryExpr:
		return c.combined(node)
	case *parser.Call:
		return c.called(node)
	default:
		c.fail("%s is a %T, of which this check knows nothing", tree, tree)
		return set{}
	}
}

func (c *checker) selected(selector *parser.VectorSelector) set {
	one, is := c.known[selector.Name]
	if !is {
		c.fail("there is no metric %s", selector)
		return set{}
	}
	for _, matcher := range selector.LabelMatchers {
		if matcher.Name == labels.MetricName {
			continue
		}
		if !one.has(matcher.Name) {
			c.fail("%s has no label %s, but %s", selector.Name, matcher.Name, one.labels())
			continue
		}
		c.matched(selector.Name, matcher, one.words[matcher.Name])
	}
	return one.labels()
}

// matched checks that a matcher is about words that there are.
func (c *checker) matched(name string, matcher *labels.Matcher, words []string) {
	if len(words) == 0 {
		return
	}
	wanted := []string{matcher.Value}
	if matcher.Type == labels.MatchRegexp || matcher.Type == labels.MatchNotRegexp {
		wanted = matcher.SetMatches()
	}
	for _, word := range wanted {
		if !slices.Contains(words, word) {
			c.fail("%s has no %s=%q", name, matcher.Name, word)
		}
	}
	if !slices.ContainsFunc(words, matcher.Matches) {
		c.fail("%s: nothing is left by %s", name, matcher)
	}
}

func (c *checker) aggregated(node *parser.AggregateExpr) set {
	inner := c.labels(node.Expr)
	for _, label := range node.Grouping {
		if !inner[label] {
			c.fail("%s: there is no label %s, but %s", node, label, inner)
		}
	}
	if node.Op == parser.TOPK || node.Op == parser.BOTTOMK {
		return inner
	}
	result := set{}
	for label := range inner {
		if slices.Contains(node.Grouping, label) != node.Without {
			result[label] = true
		}
	}
	return result
}

func (c *checker) combined(node *parser.BinaryExpr) set {
	left, right := c.labels(node.LHS), c.labels(node.RHS)
	matching := node.VectorMatching
	switch {
	case node.LHS.Type() != parser.ValueTypeVector:
		return right
	case node.RHS.Type() != parser.ValueTypeVector || matching == nil:
		return left
	}
	used := map[bool]set{false: {}, true: {}}
	for is, side := range map[bool]set{false: left, true: right} {
		for label := range side {
			if slices.Contains(matching.MatchingLabels, label) == matching.On {
				used[is][label] = true
			}
		}
	}
	for _, label := range matching.MatchingLabels {
		if !left[label] && !right[label] || matching.On && !(left[label] && right[label]) {
			c.fail("%s: a side has no label %s", node, label)
		}
	}
	if !maps.Equal(used[false], used[true]) {
		c.fail("%s: nothing fits, since one side has %s and the other %s", node, used[false], used[true])
	}
	if matching.Card == parser.CardOneToMany {
		return right
	}
	return left
}

func (c *checker) called(node *parser.Call) set {
	var inner []set
	for _, argument := range node.Args {
		inner = append(inner, c.labels(argument))
	}
	name := node.Func.Name
	wantsCounter := slices.Contains(ofCounters, name)
	if wantsCounter || slices.Contains(ofGauges, name) {
		for _, selector := range selectors(node) {
			if one, is := c.known[selector.Name]; is && one.isCounted() != wantsCounter {
				c.fail("%s is a %s, which is nothing for %s", selector.Name, one.kind, name)
			}
		}
	}
	if name == "histogram_quantile" {
		for _, selector := range selectors(node.Args[1]) {
			if !strings.HasSuffix(selector.Name, "_bucket") {
				c.fail("%s is no bucket of a histogram", selector.Name)
			}
		}
		if !inner[1]["le"] {
			c.fail("%s: the label le is lost on the way", node)
		}
		delete(inner[1], "le")
	}
	// What a function makes of a vector has the labels of the vector.
	for at, argument := range node.Args {
		if is := argument.Type(); is == parser.ValueTypeVector || is == parser.ValueTypeMatrix {
			return inner[at]
		}
	}
	return set{}
}
