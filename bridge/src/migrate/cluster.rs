//! What the API server says about a node, read with the caller's own credentials.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use bridge_core::Face;
use futures::StreamExt as _;
use futures::stream::iter;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::timeout;

use super::plan::{Holder, Mapped, MappedClass, Marks, NodeView};
use super::progress::Shown;
use crate::client::{self, Error, answer, every};
use crate::config::MapName;
use crate::config::profile::LABEL;
use crate::dra::claims;
use crate::dra::slices::{self, is_open};
use crate::usage;

/// The first minor version of Kubernetes that keeps a class's `extendedResourceName` without a feature gate.
pub(crate) const NAMES_KEPT_SINCE: u32 = 36;
/// The last one whose scheduler goes by such a name only on nodes that do not name the resource at all: it looks for the
/// key in `status.allocatable`, and a device plugin leaves it there with a 0 (kubernetes#133488).
const KEYS_LOOKED_FOR_UNTIL: u32 = 34;

/// Pods of the daemon have this label. Their namespace has hardly any others, so all are read.
const OURS: (&str, &str) = ("app.kubernetes.io/name", "gpu-bridge");

/// Requests for single nodes that are made at once.
const AT_ONCE: usize = 8;
/// How long the API server may take to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// By the nodes whose devices they have: who, and the names of the devices.
type Claims = BTreeMap<String, Vec<(Holder, Vec<String>)>>;

/// What a node offers.
struct Offer {
    /// `status.allocatable` of the Node.
    count: u32,
    devices: Vec<Device>,
}

/// How a node looks.
pub(super) struct Seen {
    pub(super) shown: Shown,
    pub(super) holders: Vec<Holder>,
}

/// Labels by which cluster-autoscaler expects a count of GPUs above 0 (kubernetes/autoscaler, `cloudprovider/*`,
/// `GPULabel`; `processors/customresources/gpu_processor.go`).
const GPU_LABELS: [&str; 3] = [
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "kubernetes.azure.com/accelerator",
];
/// With this label it expects none (`cloudprovider/gce/dynamicresources.go`).
const DRA_LABEL: (&str, &str) = ("cloud.google.com/gke-gpu-dra-driver", "true");

/// What of a Node others go by.
fn marks_of(node: &Node) -> Marks {
    let labels = node.metadata.labels.iter().flatten();
    let labels: BTreeMap<&str, &str> = labels.map(|(key, value)| (&**key, &**value)).collect();
    let (is_spared, value) = DRA_LABEL;
    let is_spared = labels.get(is_spared) == Some(&value);
    let mut gpu_labels = GPU_LABELS.into_iter();
    let taints = node
        .spec
        .iter()
        .flat_map(|spec| spec.taints.iter().flatten());
    let taints = taints.filter(|taint| taint.key == Face::Legacy.served_name());
    Marks {
        expects_count: gpu_labels.find(|label| labels.contains_key(label) && !is_spared),
        taints: taints
            .map(|taint| {
                let value = taint.value.as_ref().filter(|value| !value.is_empty());
                let value = value.map_or(String::new(), |value| format!("={value}"));
                format!("{}{value}:{}", taint.key, taint.effect)
            })
            .collect(),
    }
}

/// A class that has the name of the counted resource. Of several the first in order counts: the newest, and of two of
/// one moment the first by name (KEP-5004).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidate {
    created: Reverse<Option<Time>>,
    name: String,
}

impl Candidate {
    /// `None`: it has another name, or none.
    pub(crate) fn of(class: &DeviceClass) -> Option<Self> {
        has_counts_name(class).then(|| Self {
            created: Reverse(class.metadata.creation_timestamp.clone()),
            name: class.metadata.name.clone().unwrap_or_default(),
        })
    }
}

/// The class that counts among these.
fn effective(candidates: impl Iterator<Item = Candidate>) -> Option<MappedClass> {
    let mut candidates: Vec<Candidate> = candidates.collect();
    candidates.sort();
    let mut names = candidates.into_iter().map(|candidate| candidate.name);
    let name = names.next()?;
    Some(MappedClass {
        name,
        passed_over: names.collect(),
    })
}

/// The cluster, as the caller may see it.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cluster")
    }
}

impl Cluster {
    /// With the caller's credentials.
    ///
    /// # Errors
    /// There are none, or they can't be used.
    pub async fn connect(kubeconfig: Option<&Path>) -> Result<Self, Error> {
        let client = client::of_caller(kubeconfig).await?;
        Ok(Self { client })
    }

    /// Who has GPUs of a node, and what may stand in the way of a change.
    pub(crate) async fn view(&self, node: &str) -> Result<NodeView, Error> {
        let holders = self.holders(node, &self.claims().await?).await?;
        Ok(NodeView {
            node: node.to_owned(),
            mode: None,
            holders,
            doubts: Vec::new(),
            mapped: self.mapped().await,
            // A caller who may not see the Node is not told of it.
            marks: self
                .node(node)
                .await
                .map(|node| marks_of(&node))
                .unwrap_or_default(),
        })
    }

    /// What nodes offer, and who has GPUs of each. Who has them is read last: whoever came while a node still offered
    /// is among them.
    pub(super) async fn look(&self, nodes: &[String]) -> Vec<Result<Seen, Error>> {
        let offers = iter(nodes).map(|node| self.offer(node)).buffered(AT_ONCE);
        let offers: Vec<Result<Offer, Error>> = offers.collect().await;
        let claims = self.claims().await;
        let seen = nodes.iter().zip(offers).map(|(node, offer)| {
            let claims = claims.as_ref();
            async move {
                let (offer, claims) = (offer?, claims.map_err(Error::clone)?);
                let holders = self.holders(node, claims).await?;
                Ok(Seen {
                    shown: shown(&offer, claims.get(node)),
                    holders,
                })
            }
        });
        iter(seen).buffered(AT_ONCE).collect().await
    }

    async fn offer(&self, node: &str) -> Result<Offer, Error> {
        let found = self.node(node).await?;
        let allocatable = found.status.and_then(|status| status.allocatable);
        let count = allocatable
            .as_ref()
            .and_then(|all| all.get(Face::Legacy.served_name()))
            .and_then(|quantity| quantity.0.parse().ok());
        let params = ListParams::default().fields(&slices::selector(node));
        let slices = Api::<ResourceSlice>::all(self.client.clone());
        let devices = |slice: ResourceSlice| Some(slice.spec.devices.unwrap_or_default());
        Ok(Offer {
            count: count.unwrap_or(0),
            devices: every(&slices, params, devices).await?.concat(),
        })
    }

    /// Who has GPUs of a node.
    async fn holders(&self, node: &str, claims: &Claims) -> Result<Vec<Holder>, Error> {
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = Api::<Pod>::all(self.client.clone());
        let mut holders = every(&pods, params, counted_holder).await?;
        let claims = claims.get(node).into_iter().flatten();
        holders.extend(claims.map(|(holder, _)| holder.clone()));
        holders.sort();
        Ok(holders)
    }

    async fn node(&self, node: &str) -> Result<Node, Error> {
        let nodes = Api::<Node>::all(self.client.clone());
        answer(|| format!("the Node {node} can't be read"), nodes.get(node)).await
    }

    /// Who has devices by claims.
    async fn claims(&self) -> Result<Claims, Error> {
        let claims = Api::<ResourceClaim>::all(self.client.clone());
        let holders = |claim| Some(claim_holders(&claim));
        let mut by_node = Claims::new();
        for (node, holder) in every(&claims, ListParams::default(), holders)
            .await?
            .concat()
        {
            by_node.entry(node).or_default().push(holder);
        }
        Ok(by_node)
    }

    /// The class by which counted pods are made to claim.
    pub(super) async fn mapped(&self) -> Mapped {
        let classes = Api::<DeviceClass>::all(self.client.clone());
        let of = |class: DeviceClass| Candidate::of(&class);
        // A caller who may not see classes is told that this is not known.
        let Ok(candidates) = every(&classes, ListParams::default(), of).await else {
            return Mapped::Unknown;
        };
        what_comes_of(candidates, minor_of(&self.client).await)
    }

    /// The profile that a node's label names.
    pub(crate) async fn profile(&self, node: &str) -> Result<Option<String>, Error> {
        Ok(profile_of(&self.node(node).await?))
    }

    /// The value of an annotation of a node.
    pub(crate) async fn annotation(&self, node: &str, name: &str) -> Result<Option<String>, Error> {
        let annotations = self.node(node).await?.metadata.annotations;
        Ok(annotations.unwrap_or_default().remove(name))
    }

    /// Labels a node with a profile, or takes the label away, and notes what was there.
    pub(crate) async fn set_profile(
        &self,
        node: &str,
        profile: Option<&str>,
        note: (&str, &str),
    ) -> Result<(), Error> {
        let patch = json!({"metadata": {
            "labels": {LABEL: profile},
            "annotations": {note.0: note.1},
        }});
        let nodes = Api::<Node>::all(self.client.clone());
        let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let patched = nodes.patch(node, &params, &patch);
        let what = || format!("the Node {node} can't be labelled");
        answer(what, patched).await.map(drop)
    }

    /// The nodes on which a pod of the daemon runs, each with the profile that its label names.
    pub(crate) async fn nodes(
        &self,
        namespace: &str,
    ) -> Result<BTreeMap<String, Option<String>>, Error> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let with_daemon = every(&pods, ListParams::default(), |pod: Pod| {
            let labels = pod.metadata.labels.unwrap_or_default();
            let is_ours = labels.get(OURS.0).is_some_and(|name| name == OURS.1);
            pod.spec?.node_name.filter(|_| is_ours)
        });
        let with_daemon: BTreeSet<String> = with_daemon.await?.into_iter().collect();
        let nodes = Api::<Node>::all(self.client.clone());
        let nodes = every(&nodes, ListParams::default(), |node: Node| {
            let profile = profile_of(&node);
            let name = node.metadata.name?;
            with_daemon.contains(&name).then_some((name, profile))
        });
        Ok(nodes.await?.into_iter().collect())
    }

    /// The ConfigMap.
    pub(crate) async fn config_map(&self, map: &MapName) -> Result<ConfigMap, Error> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &map.namespace);
        let what = || format!("the ConfigMap {map} can't be read");
        answer(what, maps.get(&map.name)).await
    }

    /// Writes the ConfigMap, unless somebody else has since it was read.
    pub(crate) async fn write_config_map(
        &self,
        map: &MapName,
        changed: &ConfigMap,
    ) -> Result<(), Error> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &map.namespace);
        let params = PostParams::default();
        let written = maps.replace(&map.name, &params, changed);
        let what = || format!("the ConfigMap {map} can't be written");
        answer(what, written).await.map(drop)
    }
}

/// The profile that a Node's label names.
fn profile_of(node: &Node) -> Option<String> {
    let labels = node.metadata.labels.as_ref()?;
    labels.get(LABEL).filter(|name| !name.is_empty()).cloned()
}

/// Whether a class has the name of the counted resource (KEP-5004).
fn has_counts_name(class: &DeviceClass) -> bool {
    let spec = class.spec.as_ref();
    let name = spec.and_then(|spec| spec.extended_resource_name.as_deref());
    name == Some(Face::Legacy.served_name())
}

/// What the classes come to on a version of Kubernetes; a version that is not known is taken for a new one. Whoever
/// tells of them, the daemon, `plan`, `switch` and `doctor`, asks this.
pub(crate) fn what_comes_of(
    candidates: impl IntoIterator<Item = Candidate>,
    minor: Option<u32>,
) -> Mapped {
    let is_before = |version: u32| minor.is_some_and(|minor| minor < version);
    match effective(candidates.into_iter()) {
        Some(class) if is_before(KEYS_LOOKED_FOR_UNTIL + 1) => Mapped::NotHere(class),
        Some(class) => Mapped::By(class),
        None if is_before(NAMES_KEPT_SINCE) => Mapped::NotKept,
        None => Mapped::No,
    }
}

/// The minor version of a server; `None`: it does not say so, or not in time.
pub(crate) async fn minor_of(client: &Client) -> Option<u32> {
    let version = timeout(VERSION_LIMIT, client.apiserver_version()).await;
    minor_version(&version.ok()?.ok()?.minor)
}

/// The number in an API server's `minor`, for which providers write `34+` too.
pub(crate) fn minor_version(minor: &str) -> Option<u32> {
    let digits = minor.split(|it: char| !it.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// Who has GPUs by the device plugin, or is about to; one for which Kubernetes has made a claim has them by that.
fn counted_holder(pod: Pod) -> Option<Holder> {
    let gpus = usage::counted(&pod);
    (gpus > 0).then(|| Holder {
        kind: "pod",
        namespace: pod.metadata.namespace.unwrap_or_default(),
        name: pod.metadata.name.unwrap_or_default(),
        gpus,
        pods: Vec::new(),
    })
}

/// Who has devices by a claim, for each node of which it has some.
fn claim_holders(claim: &ResourceClaim) -> Vec<(String, (Holder, Vec<String>))> {
    let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for owned in claims::owned(claim) {
        let of_node = devices.entry(owned.pool.clone()).or_default();
        of_node.push(owned.device.clone());
    }
    let status = claim.status.as_ref();
    let users = status.and_then(|status| status.reserved_for.as_ref());
    let users = users.into_iter().flatten();
    let pods = users.filter(|user| user.resource == "pods");
    let pods: Vec<String> = pods.map(|user| user.name.clone()).collect();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let holder = |devices: &Vec<String>| Holder {
        kind: "claim",
        namespace: text(&claim.metadata.namespace),
        name: text(&claim.metadata.name),
        gpus: u32::try_from(devices.len()).unwrap_or(u32::MAX),
        pods: pods.clone(),
    };
    let of_nodes = devices.into_iter();
    of_nodes
        .map(|(node, devices)| (node, (holder(&devices), devices)))
        .collect()
}

fn shown(offer: &Offer, claims: Option<&Vec<(Holder, Vec<String>)>>) -> Shown {
    let claims = claims.into_iter().flatten();
    let claimed: Vec<&String> = claims.flat_map(|(_, devices)| devices).collect();
    let devices = &offer.devices;
    let is_open = |device: &&Device| is_open(device) || claimed.contains(&&device.name);
    Shown {
        count: offer.count,
        devices: (!devices.is_empty()).then_some(devices.len()),
        open: devices.iter().filter(is_open).count(),
        claimed: claimed.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use bridge_core::Mode;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::Value;

    use super::super::progress::{Stage, stage};
    use super::*;

    /// What an API server says; a pod is bound in the last moment in which the node `n` still has a count.
    fn answer_to(path: &str, is_closed: &AtomicBool) -> Value {
        match path {
            "/api/v1/nodes/n" => {
                is_closed.store(true, Ordering::Relaxed);
                json!({"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "0"}}})
            }
            "/api/v1/pods" if is_closed.load(Ordering::Relaxed) => {
                let limits = json!({"limits": {"nvidia.com/gpu": "1"}});
                let containers = json!([{"name": "main", "resources": limits}]);
                let metadata = json!({"name": "late", "namespace": "train", "uid": "u"});
                json!({"metadata": {}, "items": [{"metadata": metadata, "spec": {"containers": containers}}]})
            }
            "/apis/resource.k8s.io/v1/resourceslices" => json!({"metadata": {}, "items": [
                {"metadata": {}, "spec": {"driver": Face::Dra.served_name(), "devices": [{"name": "gpu-0"}],
                    "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}}}]}),
            _ => json!({"metadata": {}, "items": []}),
        }
    }

    #[tokio::test]
    async fn who_comes_while_a_node_is_about_to_close_is_waited_for() {
        let is_closed = Arc::new(AtomicBool::new(false));
        let service = tower::service_fn(move |request: Request<Body>| {
            let page = answer_to(request.uri().path(), &is_closed).to_string();
            let body = Body::from(page.into_bytes());
            ready(Ok::<_, tower::BoxError>(Response::new(body)))
        });
        let cluster = Cluster {
            client: Client::new(service, "default"),
        };
        let seen = cluster.look(&["n".to_owned()]).await.remove(0).unwrap();
        let stage = stage(&seen.holders, seen.shown, Mode::Dra);
        assert!(
            matches!(&stage, Stage::Waits(first) if first[0].name == "late"),
            "{stage:?}"
        );
    }

    #[test]
    fn a_counted_pod_has_what_its_containers_and_sidecars_ask_for_together() {
        let asks = |name: &str| {
            json!({"name": name, "restartPolicy": "Always",
                "resources": {"limits": {"nvidia.com/gpu": "2"}}})
        };
        let pod = json!({
            "metadata": {"name": "a", "namespace": "train", "uid": "u"},
            "spec": {"initContainers": [asks("sidecar")], "containers": [asks("app")]},
        });
        let holder = counted_holder(serde_json::from_value(pod).unwrap());
        assert_eq!(holder.map(|it| it.gpus), Some(4));
    }

    #[test]
    fn what_a_class_comes_to_depends_on_the_version() {
        let class = || Candidate {
            created: Reverse(None),
            name: "counts".to_owned(),
        };
        for (minor, with, without) in [
            ("34+", "NotHere", "NotKept"),
            ("35", "By", "NotKept"),
            ("36", "By", "No"),
            ("37", "By", "No"),
            ("x", "By", "No"),
        ] {
            let minor = minor_version(minor);
            let told = |mapped| format!("{mapped:?}");
            let mapped = told(what_comes_of([class()], minor));
            assert!(mapped.starts_with(with), "{minor:?}: {mapped}");
            assert_eq!(told(what_comes_of([], minor)), without, "{minor:?}");
        }
    }
}
