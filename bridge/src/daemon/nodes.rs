//! All nodes with GPUs of a cluster, by what stands in the API anyway: the Nodes with their counts, the ResourceSlices,
//! and what pods and claims have. No daemon is asked, and none writes anything for this.
//!
//! Kubernetes' types stop in here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::Path;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Api, ListParams};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client;
use crate::device_plugin::RESOURCE;
use crate::dra::slices::{MODE_ANNOTATION, is_open};
use crate::dra::{self, DRIVER};
use crate::usage;

/// What the API says of a node with GPUs. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePage {
    /// Its name.
    pub node: String,
    /// What schedulers make of it.
    pub state: NodeState,
    /// The mode of its daemon, as its slice says; `None`: it has no slice, as in the modes `legacy` and `drained` and
    /// where another driver serves.
    pub mode: Option<String>,
    /// GPUs that the Node has or that its slice names, whichever are more.
    pub gpus: u32,
    /// By the Node's count.
    pub counted: Share,
    /// By the slice.
    pub claims: Share,
}

/// What one kind of pods has, and could get. At rest a free GPU is free for both kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Share {
    /// GPUs that pods or claims of this kind have.
    pub held: u32,
    /// GPUs that a new one could get now.
    pub free: u32,
}

/// Whether pods are placed on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum NodeState {
    /// They are.
    Ready,
    /// An admin has closed it.
    Cordoned,
    /// Its kubelet is not heard, or says that it is not ready.
    NotReady,
}

impl NodeState {
    /// The word in a table.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Cordoned => "Cordoned",
            Self::NotReady => "NotReady",
        }
    }
}

/// Reads all of it, with the caller's credentials. Needs the right to list nodes, pods, resourceclaims and
/// resourceslices.
///
/// # Errors
/// There are no credentials, or the API server does not show what is needed.
pub async fn all_nodes(kubeconfig: Option<&Path>) -> Result<Vec<NodePage>, client::Error> {
    let client = client::of_caller(kubeconfig).await?;
    let nodes = every(&client, Some::<Node>).await?;
    let slices = every(&client, ours).await?;
    let allocated = every(&client, |claim| Some(devices(&claim))).await?;
    let counted = every(&client, |pod| asked_of(&pod)).await?;
    Ok(pages(nodes, slices, allocated, counted))
}

/// All objects of a kind, as far as they are of use.
async fn every<K, T>(
    client: &kube::Client,
    keep: impl Fn(K) -> Option<T>,
) -> Result<Vec<T>, client::Error>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    client::every(&Api::all(client.clone()), ListParams::default(), keep).await
}

/// A slice of our driver.
fn ours(slice: ResourceSlice) -> Option<ResourceSlice> {
    (slice.spec.driver == DRIVER).then_some(slice)
}

/// Pool and device of each GPU that a claim owns; who only looks on owns none.
fn devices(claim: &ResourceClaim) -> Vec<(String, String)> {
    dra::claims::owned(claim)
        .map(|it| (it.pool.clone(), it.device.clone()))
        .collect()
}

/// The node that a pod is bound to, and how many GPUs its scheduler has counted for it.
fn asked_of(pod: &Pod) -> Option<(String, u32)> {
    let node = pod.spec.as_ref()?.node_name.clone()?;
    let asked = usage::counted(pod);
    (asked > 0).then_some((node, asked))
}

/// One page for each node that has GPUs, by name.
fn pages(
    nodes: Vec<Node>,
    slices: Vec<ResourceSlice>,
    allocated: Vec<Vec<(String, String)>>,
    asked: Vec<(String, u32)>,
) -> Vec<NodePage> {
    let allocated: BTreeSet<(String, String)> = allocated.into_iter().flatten().collect();
    let mut counted: BTreeMap<String, u32> = BTreeMap::new();
    for (node, gpus) in asked {
        let sum = counted.entry(node).or_default();
        *sum = sum.saturating_add(gpus);
    }
    let mut of_node: BTreeMap<String, Vec<ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        if let Some(node) = slice.spec.node_name.clone() {
            of_node.entry(node).or_default().push(slice);
        }
    }
    let mut pages: Vec<NodePage> = nodes
        .iter()
        .filter_map(|node| {
            let name = node.metadata.name.as_ref()?;
            let slices = of_node.get(name).map_or(&[][..], Vec::as_slice);
            let counted = counted.get(name).copied().unwrap_or(0);
            page(name, node, slices, &allocated, counted)
        })
        .collect();
    pages.sort_by(|a, b| a.node.cmp(&b.node));
    pages
}

/// `None`: the node has no GPUs.
fn page(
    name: &str,
    node: &Node,
    slices: &[ResourceSlice],
    allocated: &BTreeSet<(String, String)>,
    counted: u32,
) -> Option<NodePage> {
    let status = node.status.as_ref();
    let capacity = status.and_then(|it| count(it.capacity.as_ref()?.get(RESOURCE)?));
    let allocatable = status.and_then(|it| count(it.allocatable.as_ref()?.get(RESOURCE)?));
    let listed = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    let is_had = |device: &&Device| allocated.contains(&(name.to_owned(), device.name.clone()));
    let is_free = |device: &&Device| !is_had(device) && is_open(device);
    let gpus = capacity.unwrap_or(0).max(number(listed.clone().count()));
    if gpus == 0 {
        return None;
    }
    let held = allocated.iter().filter(|(pool, _)| pool == name).count();
    let mode = slices.iter().find_map(|slice| {
        let annotations = slice.metadata.annotations.as_ref()?;
        annotations.get(MODE_ANNOTATION).cloned()
    });
    Some(NodePage {
        node: name.to_owned(),
        state: state(node),
        mode,
        gpus,
        counted: Share {
            held: counted,
            free: allocatable.unwrap_or(0).saturating_sub(counted),
        },
        claims: Share {
            held: number(held),
            free: number(listed.filter(is_free).count()),
        },
    })
}

fn state(node: &Node) -> NodeState {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let is_ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
    let is_closed = node.spec.as_ref().and_then(|spec| spec.unschedulable);
    match (is_ready, is_closed) {
        (false, _) => NodeState::NotReady,
        (true, Some(true)) => NodeState::Cordoned,
        (true, Some(false) | None) => NodeState::Ready,
    }
}

/// A count of GPUs is written as digits alone.
fn count(quantity: &Quantity) -> Option<u32> {
    quantity.0.parse().ok()
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn objects<T: DeserializeOwned>(objects: Value) -> Vec<T> {
        serde_json::from_value(objects).unwrap()
    }

    fn node(name: &str, allocatable: &str) -> Value {
        json!({"metadata": {"name": name}, "status": {
            "capacity": {RESOURCE: "8"}, "allocatable": {RESOURCE: allocatable},
            "conditions": [{"type": "Ready", "status": "True"}]}})
    }

    fn slice(node: &str, mode: &str, devices: Value) -> Value {
        json!({"metadata": {"name": node, "annotations": {MODE_ANNOTATION: mode}},
            "spec": {"driver": DRIVER, "nodeName": node, "devices": devices,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}})
    }

    fn device(name: &str, effects: &[&str]) -> Value {
        let taint = |effect| json!({"key": "gpu-bridge.dev/x", "effect": effect});
        json!({"name": name, "taints": effects.iter().map(taint).collect::<Vec<_>>()})
    }

    fn claim(devices: &[(&str, Value)]) -> Value {
        let result = |(device, admin): &(&str, Value)| json!({"driver": DRIVER, "pool": "a", "device": device, "request": "r", "adminAccess": admin});
        let results: Vec<Value> = devices.iter().map(result).collect();
        json!({"metadata": {"name": "c"}, "spec": {},
            "status": {"allocation": {"devices": {"results": results}}}})
    }

    fn pod(node: &str, phase: &str, gpus: &str) -> Value {
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "status": {"phase": phase},
            "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": {RESOURCE: gpus}}}]}})
    }

    fn told(nodes: Value, slices: Value, claims: Value, pods: Value) -> Vec<NodePage> {
        let slices: Vec<ResourceSlice> = objects(slices);
        let claims: Vec<ResourceClaim> = objects(claims);
        let pods: Vec<Pod> = objects(pods);
        pages(
            objects(nodes),
            slices.into_iter().filter_map(ours).collect(),
            claims.iter().map(devices).collect(),
            pods.iter().filter_map(asked_of).collect(),
        )
    }

    #[test]
    fn what_is_free_for_each_kind_follows_from_count_slice_claims_and_pods() {
        let devices = json!([
            device("gpu-0", &[]),
            device("gpu-1", &[]),
            device("gpu-2", &["NoSchedule"]),
            device("gpu-3", &["NoExecute"]),
            device("gpu-4", &["None"]),
            device("gpu-5", &[]),
        ]);
        let claims = json!([
            claim(&[("gpu-0", Value::Null), ("gpu-9", Value::Null)]),
            claim(&[("gpu-5", json!(true))]),
            {"metadata": {"name": "waits"}, "spec": {}},
        ]);
        let pods = json!([
            pod("a", "Running", "2"),
            pod("a", "Pending", "1"),
            pod("a", "Succeeded", "4"),
            pod("b", "Running", "8"),
        ]);
        let pages = told(
            json!([node("b", "7"), node("a", "5"), {"metadata": {"name": "without"}}]),
            json!([slice("a", "both", devices)]),
            claims,
            pods,
        );
        let [a, b] = pages.as_slice() else {
            panic!("{pages:?}");
        };
        assert_eq!(
            (a.node.as_str(), a.mode.as_deref(), a.gpus),
            ("a", Some("both"), 8)
        );
        assert_eq!(a.counted, Share { held: 3, free: 2 });
        assert_eq!(a.claims, Share { held: 2, free: 3 });
        assert_eq!((b.mode.as_deref(), b.claims), (None, Share::default()));
        assert_eq!(
            b.counted,
            Share { held: 8, free: 0 },
            "the count is below what pods have"
        );
    }

    #[test]
    fn a_slice_of_another_driver_makes_no_node_with_gpus() {
        let mut other = slice("a", "both", json!([device("gpu-0", &[])]));
        other["spec"]["driver"] = json!("net.example.com");
        let bare = json!([{"metadata": {"name": "a"}}]);
        assert_eq!(told(bare.clone(), json!([other]), json!([]), json!([])), []);
        let ours = slice("a", "dra", json!([device("gpu-0", &[])]));
        let pages = told(bare, json!([ours]), json!([]), json!([]));
        assert_eq!((pages[0].gpus, pages[0].state), (1, NodeState::NotReady));
    }

    #[test]
    fn a_node_that_takes_no_pods_says_so() {
        for (ready, closed, want) in [
            ("True", Value::Null, NodeState::Ready),
            ("True", json!(true), NodeState::Cordoned),
            ("False", json!(true), NodeState::NotReady),
            ("Unknown", json!(false), NodeState::NotReady),
        ] {
            let mut node = node("a", "8");
            node["status"]["conditions"][0]["status"] = json!(ready);
            node["spec"]["unschedulable"] = closed;
            let pages = told(json!([node]), json!([]), json!([]), json!([]));
            assert_eq!(pages[0].state, want, "{ready}");
        }
    }
}
