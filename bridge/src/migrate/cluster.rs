//! What the API server says about a node, read with the caller's own credentials.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bridge_core::Face;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use super::plan::{Holder, Mapped, MappedClass, NodeView};
use super::progress::Shown;
use crate::client::{self, Error, answer, every};
use crate::config::MapName;
use crate::config::profile::LABEL;
use crate::dra::claims;
use crate::dra::slices::{self, is_open};
use crate::usage;

/// Pods of the daemon have this label. Their namespace has hardly any others, so all are read.
const OURS: (&str, &str) = ("app.kubernetes.io/name", "gpu-bridge");

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
        let mut holders = self.counted(node).await?;
        let claims = self.claims(node).await?;
        holders.extend(claims.into_iter().map(|(holder, _)| holder));
        holders.sort();
        Ok(NodeView {
            node: node.to_owned(),
            mode: None,
            holders,
            doubts: Vec::new(),
            mapped: self.mapped().await,
        })
    }

    /// What a node offers.
    pub(super) async fn shown(&self, node: &str) -> Result<Shown, Error> {
        let found = self.node(node).await?;
        let allocatable = found.status.and_then(|status| status.allocatable);
        let count = allocatable
            .as_ref()
            .and_then(|all| all.get(Face::Legacy.served_name()))
            .and_then(|quantity| quantity.0.parse().ok());
        let claimed = self.claims(node).await?;
        let claimed: Vec<String> = claimed
            .into_iter()
            .flat_map(|(_, devices)| devices)
            .collect();
        let params = ListParams::default().fields(&slices::selector(node));
        let slices = Api::<ResourceSlice>::all(self.client.clone());
        let ours = every(&slices, params, Some).await?.into_iter();
        let mut shown = Shown {
            count: count.unwrap_or(0),
            devices: None,
            open: 0,
            claimed: claimed.len(),
        };
        for device in ours.flat_map(|slice| slice.spec.devices.unwrap_or_default()) {
            *shown.devices.get_or_insert(0) += 1;
            shown.open += usize::from(is_open(&device) || claimed.contains(&device.name));
        }
        Ok(shown)
    }

    async fn node(&self, node: &str) -> Result<Node, Error> {
        let nodes = Api::<Node>::all(self.client.clone());
        answer(|| format!("the Node {node} can't be read"), nodes.get(node)).await
    }

    /// Pods that have GPUs by the device plugin, or are about to.
    async fn counted(&self, node: &str) -> Result<Vec<Holder>, Error> {
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = Api::<Pod>::all(self.client.clone());
        every(&pods, params, counted_holder).await
    }

    /// Claims that have devices of a node, each with the names of these.
    async fn claims(&self, node: &str) -> Result<Vec<(Holder, Vec<String>)>, Error> {
        let claims = Api::<ResourceClaim>::all(self.client.clone());
        every(&claims, ListParams::default(), |claim| {
            claim_holder(claim, node)
        })
        .await
    }

    /// The class by which counted pods are made to claim.
    pub(super) async fn mapped(&self) -> Mapped {
        let classes = Api::<DeviceClass>::all(self.client.clone());
        // A caller who may not see classes is told that this is not known.
        let created_and_name = |class: DeviceClass| {
            has_counts_name(&class).then_some((
                Reverse(class.metadata.creation_timestamp),
                class.metadata.name,
            ))
        };
        let mapped = every(&classes, ListParams::default(), created_and_name).await;
        let Ok(mut mapped) = mapped else {
            return Mapped::Unknown;
        };
        mapped.sort();
        let mut names = mapped.into_iter().filter_map(|(_, name)| name);
        names.next().map_or(Mapped::No, |name| {
            Mapped::By(MappedClass {
                name,
                passed_over: names.collect(),
            })
        })
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

/// Whether Kubernetes makes claims of counted pods by this class (KEP-5004).
pub(crate) fn has_counts_name(class: &DeviceClass) -> bool {
    let spec = class.spec.as_ref();
    let name = spec.and_then(|spec| spec.extended_resource_name.as_deref());
    name == Some(Face::Legacy.served_name())
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

fn claim_holder(claim: ResourceClaim, node: &str) -> Option<(Holder, Vec<String>)> {
    let devices: Vec<String> = claims::owned(&claim)
        .filter(|result| result.pool == node)
        .map(|result| result.device.clone())
        .collect();
    let users = claim.status?.reserved_for.unwrap_or_default().into_iter();
    let pods = users
        .filter(|user| user.resource == "pods")
        .map(|user| user.name);
    let holder = Holder {
        kind: "claim",
        namespace: claim.metadata.namespace.unwrap_or_default(),
        name: claim.metadata.name.unwrap_or_default(),
        gpus: u32::try_from(devices.len()).unwrap_or(u32::MAX),
        pods: pods.collect(),
    };
    (!devices.is_empty()).then_some((holder, devices))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
