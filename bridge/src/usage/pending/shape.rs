//! Pods that wait and the own Node, in the words of the core.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use bridge_core::{
    ClaimName, Cordon, NodeShape, NodeTaint, NodeTerm, PodShape, PodToleration, PodUid,
    Requirement, TaintEffect, Test,
};
use k8s_openapi::api::core::v1::{
    self as api, Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::quantity::milli;
use crate::usage::{RESOURCE, pods};

/// A pod of the watch, and what is kept of it.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) uid: String,
    /// `None`: it asks for nothing of ours, or does not wait for a node.
    pub(super) pending: Option<Pending>,
}

/// A pod that waits for a node, and may ask for GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) uid: PodUid,
    pub(super) created: SystemTime,
    pub(super) shape: PodShape,
    pub(super) counted: u32,
    /// Its claims; `None`: one of them is not made yet.
    pub(super) claims: Option<BTreeSet<ClaimName>>,
}

impl Seen {
    pub(super) fn of(pod: &Pod, node: &str) -> Self {
        Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            pending: pending(pod, node),
        }
    }
}

fn pending(pod: &Pod, node: &str) -> Option<Pending> {
    let spec = pod.spec.as_ref()?;
    if !waits_for_a_node(pod, spec, node) {
        return None;
    }
    let shown = pods::shown(pod)?;
    let wanted = spec.resource_claims.as_ref().map_or(0, Vec::len);
    if wanted == 0 && shown.bound.may_own == 0 {
        return None;
    }
    let made = claims_made(pod, spec);
    Some(Pending {
        uid: shown.bound.uid,
        created: pod
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(SystemTime::UNIX_EPOCH, |time| SystemTime::from(time.0)),
        shape: of_pod(spec),
        counted: shown.bound.may_own,
        claims: (made == wanted).then_some(shown.claims),
    })
}

/// How many of a pod's claims have a name: its own do, and generated ones once the controller has written it, or that
/// none is needed.
fn claims_made(pod: &Pod, spec: &PodSpec) -> usize {
    let status = pod.status.as_ref();
    let written = status.and_then(|status| status.resource_claim_statuses.as_ref());
    let is_made = |claim: &&api::PodResourceClaim| {
        claim.resource_claim_name.is_some()
            || written
                .into_iter()
                .flatten()
                .any(|status| status.name == claim.name)
    };
    spec.resource_claims
        .iter()
        .flatten()
        .filter(is_made)
        .count()
}

/// Whether a scheduler has looked for a node and found none: the mark by which cluster autoscalers go, too. A pod
/// that nobody has looked at yet may be placed without any move.
fn waits_for_a_node(pod: &Pod, spec: &PodSpec, node: &str) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let unschedulable = conditions.into_iter().flatten().any(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    let nominated = status.and_then(|status| status.nominated_node_name.as_deref());
    let is_elsewhere = nominated.is_some_and(|name| !name.is_empty() && name != node);
    let gates = spec.scheduling_gates.as_ref();
    unschedulable
        && !is_elsewhere
        && gates.is_none_or(Vec::is_empty)
        && pod.metadata.deletion_timestamp.is_none()
}

fn of_pod(spec: &PodSpec) -> PodShape {
    let affinity = spec.affinity.as_ref();
    let of_node = affinity.and_then(|affinity| affinity.node_affinity.as_ref());
    let required = of_node.and_then(|it| {
        it.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    PodShape {
        selector: spec
            .node_selector
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect(),
        affinity: required.map(|it| it.node_selector_terms.iter().map(term).collect()),
        tolerations: spec
            .tolerations
            .iter()
            .flatten()
            .filter_map(toleration)
            .collect(),
        requests_milli: requests(spec),
    }
}

/// What the app containers ask for at the same time: the pod needs no less. GPUs are counted apart.
fn requests(spec: &PodSpec) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for container in &spec.containers {
        let resources = container.resources.as_ref();
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        for (name, quantity) in requests.into_iter().flatten() {
            let sum = sums.entry(name.clone()).or_default();
            *sum = sum.saturating_add(milli(&quantity.0).unwrap_or(0));
        }
    }
    sums.remove(RESOURCE);
    sums
}

fn term(term: &NodeSelectorTerm) -> NodeTerm {
    let all = |list: &Option<Vec<NodeSelectorRequirement>>| {
        list.iter().flatten().map(requirement).collect()
    };
    NodeTerm {
        labels: all(&term.match_expressions),
        name: all(&term.match_fields),
    }
}

fn requirement(requirement: &NodeSelectorRequirement) -> Requirement {
    let values = requirement.values.clone().unwrap_or_default();
    let number = || match values.as_slice() {
        [value] => value.parse::<i64>().ok(),
        _ => None,
    };
    let test = match requirement.operator.as_str() {
        "In" => Test::In(values),
        "NotIn" => Test::NotIn(values),
        "Exists" => Test::Exists,
        "DoesNotExist" => Test::DoesNotExist,
        "Gt" => number().map_or(Test::Unknown, Test::Above),
        "Lt" => number().map_or(Test::Unknown, Test::Below),
        _ => Test::Unknown,
    };
    Requirement {
        key: requirement.key.clone(),
        test,
    }
}

/// `None`: by an operator or for an effect that this version does not know, so it tolerates nothing here.
fn toleration(toleration: &api::Toleration) -> Option<PodToleration> {
    let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let value = match toleration.operator.as_deref() {
        Some("Exists") => None,
        None | Some("" | "Equal") => Some(toleration.value.clone().unwrap_or_default()),
        Some(_) => return None,
    };
    let effect = match some(&toleration.effect) {
        None => None,
        Some(effect) => Some(keeps_off(&effect)?),
    };
    Some(PodToleration {
        key: some(&toleration.key),
        value,
        effect,
    })
}

fn keeps_off(effect: &str) -> Option<TaintEffect> {
    match effect {
        "NoSchedule" => Some(TaintEffect::NoSchedule),
        "NoExecute" => Some(TaintEffect::NoExecute),
        _ => None,
    }
}

/// What counts of the own Node.
pub(super) fn of_node(node: &Node) -> NodeShape {
    let spec = node.spec.as_ref();
    let taints = spec.and_then(|spec| spec.taints.as_ref());
    let closed = spec.is_some_and(|spec| spec.unschedulable == Some(true));
    let status = node.status.as_ref();
    let allocatable = status.and_then(|status| status.allocatable.as_ref());
    // A number that can't be read keeps no pod off.
    let size = |(name, quantity): (&String, &Quantity)| {
        (name.clone(), milli(&quantity.0).unwrap_or(u64::MAX))
    };
    NodeShape {
        name: node.metadata.name.clone().unwrap_or_default(),
        labels: node
            .metadata
            .labels
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect(),
        taints: taints
            .into_iter()
            .flatten()
            .filter_map(|taint| {
                Some(NodeTaint {
                    key: taint.key.clone(),
                    value: taint.value.clone().unwrap_or_default(),
                    effect: keeps_off(&taint.effect)?,
                })
            })
            .collect(),
        cordon: if closed { Cordon::Closed } else { Cordon::Open },
        allocatable_milli: allocatable
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.as_str() != RESOURCE)
            .map(size)
            .collect(),
    }
}
