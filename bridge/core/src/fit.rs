//! Whether a node could run a pod at all, GPUs aside: what the scheduler's filters for the node's name, its labels,
//! its taints and its size would say of it.
//!
//! It is for pods that wait, so it errs to one side only: what it can't judge (volumes, ports, spreading, other pods,
//! CEL selectors) it takes for fitting, and a pod that draws GPUs for nothing is given up after a while.
//! Source: kubernetes v1.37.2, `pkg/scheduler/framework/plugins/{nodeaffinity,tainttoleration,nodeunschedulable}` and
//! `component-helpers/scheduling/corev1`.

use std::collections::BTreeMap;

use crate::taint::TaintEffect;

/// What counts of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeShape {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.taints`, those that keep pods off.
    pub taints: Vec<NodeTaint>,
    /// Whether pods may be bound to it.
    pub cordon: Cordon,
    /// `status.allocatable`, in thousandths; what is left out is not on the node.
    pub allocatable_milli: BTreeMap<String, u64>,
}

/// Whether pods may be bound to a node (`spec.unschedulable`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cordon {
    /// They may.
    #[default]
    Open,
    /// Only those that tolerate that.
    Closed,
}

/// A taint that keeps pods off a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTaint {
    /// Its key.
    pub key: String,
    /// Its value.
    pub value: String,
    /// How it keeps pods off; `PreferNoSchedule` does not, and has no taint here.
    pub effect: TaintEffect,
}

/// What counts of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodShape {
    /// `spec.nodeSelector`.
    pub selector: BTreeMap<String, String>,
    /// The terms of the required node affinity, of which one must hold; `None`: it has none.
    pub affinity: Option<Vec<NodeTerm>>,
    /// `spec.tolerations`.
    pub tolerations: Vec<PodToleration>,
    /// At least so much it asks for, in thousandths. The resource of counted pods is not among them.
    pub requests_milli: BTreeMap<String, u64>,
}

/// A term of a node selector: all of it must hold, and one without anything holds nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeTerm {
    /// About labels.
    pub labels: Vec<Requirement>,
    /// About the node's name, `metadata.name`.
    pub name: Vec<Requirement>,
}

/// One requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The label; of no meaning for a name.
    pub key: String,
    /// What must hold.
    pub test: Test,
}

/// What must hold of a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    /// It has one of these values.
    In(Vec<String>),
    /// It has none of these values, or is not there.
    NotIn(Vec<String>),
    /// It is there.
    Exists,
    /// It is not there.
    DoesNotExist,
    /// It is a number above this.
    Above(i64),
    /// It is a number below this.
    Below(i64),
    /// Something that this version does not know: it holds nowhere.
    Unknown,
}

/// A toleration of a pod for taints of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodToleration {
    /// The key; `None`: every key.
    pub key: Option<String>,
    /// The value; `None`: every value.
    pub value: Option<String>,
    /// The effect; `None`: every effect.
    pub effect: Option<TaintEffect>,
}

/// The taint that a cordoned node counts as having (`v1.TaintNodeUnschedulable`).
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

impl PodShape {
    /// Whether the node could run the pod if nothing else ran there.
    #[must_use]
    pub fn could_run_on(&self, node: &NodeShape) -> bool {
        self.is_selected(node) && self.tolerates(node) && self.is_small_enough(node)
    }

    fn is_selected(&self, node: &NodeShape) -> bool {
        let mut wanted = self.selector.iter();
        let selected = wanted.all(|(key, value)| node.labels.get(key) == Some(value));
        let mut terms = self.affinity.iter().flatten();
        selected && (self.affinity.is_none() || terms.any(|term| term.holds(node)))
    }

    fn tolerates(&self, node: &NodeShape) -> bool {
        let cordoned = (node.cordon == Cordon::Closed).then(|| NodeTaint {
            key: UNSCHEDULABLE.to_owned(),
            value: String::new(),
            effect: TaintEffect::NoSchedule,
        });
        node.taints.iter().chain(&cordoned).all(|taint| {
            let mut tolerations = self.tolerations.iter();
            tolerations.any(|toleration| toleration.covers(taint))
        })
    }

    fn is_small_enough(&self, node: &NodeShape) -> bool {
        self.requests_milli.iter().all(|(resource, wanted)| {
            let there = node.allocatable_milli.get(resource).copied();
            *wanted <= there.unwrap_or(0)
        })
    }
}

impl NodeTerm {
    fn holds(&self, node: &NodeShape) -> bool {
        let is_empty = self.labels.is_empty() && self.name.is_empty();
        let mut labels = self.labels.iter();
        let mut name = self.name.iter();
        !is_empty
            && labels.all(|it| it.test.holds(node.labels.get(&it.key).map(String::as_str)))
            && name.all(|it| it.test.holds(Some(&node.name)))
    }
}

impl Test {
    fn holds(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::In(values) => value.is_some_and(|value| values.iter().any(|it| it == value)),
            Self::NotIn(values) => !value.is_some_and(|value| values.iter().any(|it| it == value)),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::Above(bound) => number().is_some_and(|number| number > *bound),
            Self::Below(bound) => number().is_some_and(|number| number < *bound),
            Self::Unknown => false,
        }
    }
}

impl PodToleration {
    fn covers(&self, taint: &NodeTaint) -> bool {
        self.key.as_ref().is_none_or(|key| *key == taint.key)
            && self
                .value
                .as_ref()
                .is_none_or(|value| *value == taint.value)
            && self.effect.is_none_or(|effect| effect == taint.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeShape {
        NodeShape {
            name: "node-1".to_owned(),
            labels: [("zone", "a"), ("gen", "7")].map(text).into(),
            taints: Vec::new(),
            cordon: Cordon::Open,
            allocatable_milli: [("cpu".to_owned(), 8_000)].into(),
        }
    }

    fn text((key, value): (&str, &str)) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    fn require(key: &str, test: Test) -> Requirement {
        Requirement {
            key: key.to_owned(),
            test,
        }
    }

    fn with_affinity(terms: Vec<NodeTerm>) -> PodShape {
        PodShape {
            affinity: Some(terms),
            ..PodShape::default()
        }
    }

    fn labelled(key: &str, test: Test) -> NodeTerm {
        NodeTerm {
            labels: vec![require(key, test)],
            name: Vec::new(),
        }
    }

    #[test]
    fn a_pod_that_asks_for_nothing_runs_anywhere() {
        assert!(PodShape::default().could_run_on(&node()));
    }

    #[test]
    fn every_label_of_a_selector_must_be_there() {
        let mut pod = PodShape {
            selector: [text(("zone", "a"))].into(),
            ..PodShape::default()
        };
        assert!(pod.could_run_on(&node()));
        pod.selector.extend([text(("gpu", "h200"))]);
        assert!(!pod.could_run_on(&node()));
    }

    #[test]
    fn one_term_of_an_affinity_must_hold_and_all_of_it() {
        let values = |values: &[&str]| values.iter().map(|it| (*it).to_owned()).collect();
        for (key, test, holds) in [
            ("zone", Test::In(values(&["a", "b"])), true),
            ("zone", Test::In(values(&["b"])), false),
            ("rack", Test::In(values(&["b"])), false),
            ("zone", Test::NotIn(values(&["a"])), false),
            ("rack", Test::NotIn(values(&["a"])), true),
            ("zone", Test::Exists, true),
            ("rack", Test::Exists, false),
            ("zone", Test::DoesNotExist, false),
            ("rack", Test::DoesNotExist, true),
            ("gen", Test::Above(6), true),
            ("gen", Test::Above(7), false),
            ("gen", Test::Below(8), true),
            ("zone", Test::Below(8), false),
            ("zone", Test::Unknown, false),
        ] {
            let pod = with_affinity(vec![labelled(key, test.clone())]);
            assert_eq!(pod.could_run_on(&node()), holds, "{key} {test:?}");
        }
        let no = || labelled("rack", Test::Exists);
        let yes = || labelled("zone", Test::Exists);
        assert!(with_affinity(vec![no(), yes()]).could_run_on(&node()));
        let mut both = yes();
        both.labels.extend(no().labels);
        assert!(!with_affinity(vec![both]).could_run_on(&node()));
        let empty = NodeTerm::default();
        assert!(!with_affinity(vec![empty]).could_run_on(&node()));
        assert!(!with_affinity(Vec::new()).could_run_on(&node()));
    }

    #[test]
    fn an_affinity_may_name_the_node() {
        let named = |name: &str| NodeTerm {
            labels: Vec::new(),
            name: vec![require("metadata.name", Test::In(vec![name.to_owned()]))],
        };
        assert!(with_affinity(vec![named("node-1")]).could_run_on(&node()));
        assert!(!with_affinity(vec![named("node-2")]).could_run_on(&node()));
    }

    #[test]
    fn every_taint_must_be_tolerated() {
        let mut tainted = node();
        tainted.taints.push(NodeTaint {
            key: "gpu".to_owned(),
            value: "yes".to_owned(),
            effect: TaintEffect::NoSchedule,
        });
        let tolerates = |key: Option<&str>, value: Option<&str>, effect: Option<TaintEffect>| {
            let pod = PodShape {
                tolerations: vec![PodToleration {
                    key: key.map(str::to_owned),
                    value: value.map(str::to_owned),
                    effect,
                }],
                ..PodShape::default()
            };
            pod.could_run_on(&tainted)
        };
        assert!(!PodShape::default().could_run_on(&tainted));
        assert!(tolerates(None, None, None));
        assert!(tolerates(Some("gpu"), None, None));
        assert!(tolerates(
            Some("gpu"),
            Some("yes"),
            Some(TaintEffect::NoSchedule)
        ));
        assert!(!tolerates(Some("gpu"), Some("no"), None));
        assert!(!tolerates(Some("cpu"), None, None));
        assert!(!tolerates(Some("gpu"), None, Some(TaintEffect::NoExecute)));
    }

    #[test]
    fn a_cordoned_node_runs_what_tolerates_that() {
        let mut closed = node();
        closed.cordon = Cordon::Closed;
        assert!(!PodShape::default().could_run_on(&closed));
        let pod = PodShape {
            tolerations: vec![PodToleration {
                key: Some(UNSCHEDULABLE.to_owned()),
                value: None,
                effect: None,
            }],
            ..PodShape::default()
        };
        assert!(pod.could_run_on(&closed));
    }

    #[test]
    fn a_pod_that_is_larger_than_the_node_never_runs_there() {
        let asks = |resource: &str, milli: u64| {
            let pod = PodShape {
                requests_milli: [(resource.to_owned(), milli)].into(),
                ..PodShape::default()
            };
            pod.could_run_on(&node())
        };
        assert!(asks("cpu", 8_000));
        assert!(!asks("cpu", 8_001));
        assert!(asks("rdma/hca", 0));
        assert!(!asks("rdma/hca", 1));
    }
}
