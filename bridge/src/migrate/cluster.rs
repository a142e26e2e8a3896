//! What the API server says about a node, read with the caller's own credentials.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use bridge_core::Face;
use k8s_openapi::api::core::v1::{ConfigMap, Container, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use serde_json::json;

use super::plan::{Holder, Mapped, MappedClass, NodeView};
use super::progress::Shown;
use crate::config::MapName;
use crate::config::profile::LABEL;
use crate::follow::chain;

/// Pods of the daemon have this label. Their namespace has hardly any others, so all are read.
const OURS: (&str, &str) = ("app.kubernetes.io/name", "gpu-bridge");

/// The API server could not be asked, or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Error {
    what: String,
    why: String,
}

fn failed(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Error {
    let what = what.into();
    move |error| Error {
        why: chain(&error),
        what,
    }
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
    /// By a kubeconfig, or else as `kubectl` would: `KUBECONFIG`, the file of the user, or the pod's service account.
    ///
    /// # Errors
    /// There are no credentials, or they can't be used.
    pub async fn connect(kubeconfig: Option<&Path>) -> Result<Self, Error> {
        // What is in a kubeconfig is not told: it may be a token.
        let unusable = |what: &str| Error {
            what: "the API server can't be asked".to_owned(),
            why: format!("{what} can't be used; compare with kubectl config view"),
        };
        let config = match kubeconfig {
            Some(path) => {
                let wrong = || unusable(&format!("the kubeconfig {}", path.display()));
                let file = Kubeconfig::read_from(path).map_err(|_| wrong())?;
                kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                    .await
                    .map_err(|_| wrong())?
            }
            None => kube::Config::infer()
                .await
                .map_err(|_| unusable("no kubeconfig was given, and the one of the user"))?,
        };
        let client = Client::try_from(config).map_err(|_| unusable("what the kubeconfig has"))?;
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
        let slices = Api::<ResourceSlice>::all(self.client.clone());
        let slices = slices
            .list(&ListParams::default())
            .await
            .map_err(failed("the ResourceSlices can't be listed"))?;
        let ours = slices.items.into_iter().filter(|slice| {
            slice.spec.driver == Face::Dra.served_name()
                && slice.spec.node_name.as_deref() == Some(node)
        });
        let mut shown = Shown {
            count: count.unwrap_or(0),
            devices: None,
            open: 0,
            claimed: claimed.len(),
        };
        for device in ours.flat_map(|slice| slice.spec.devices.unwrap_or_default()) {
            *shown.devices.get_or_insert(0) += 1;
            let is_free = device.taints.unwrap_or_default().is_empty();
            shown.open += usize::from(is_free || claimed.contains(&device.name));
        }
        Ok(shown)
    }

    async fn node(&self, node: &str) -> Result<Node, Error> {
        let nodes = Api::<Node>::all(self.client.clone());
        nodes
            .get(node)
            .await
            .map_err(failed(format!("the Node {node} can't be read")))
    }

    /// Pods that have GPUs by the device plugin, or are about to.
    async fn counted(&self, node: &str) -> Result<Vec<Holder>, Error> {
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = Api::<Pod>::all(self.client.clone());
        let pods = pods
            .list(&params)
            .await
            .map_err(failed(format!("the pods of {node} can't be listed")))?;
        Ok(pods.items.into_iter().filter_map(counted_holder).collect())
    }

    /// Claims that have devices of a node, each with the names of these.
    async fn claims(&self, node: &str) -> Result<Vec<(Holder, Vec<String>)>, Error> {
        let claims = Api::<ResourceClaim>::all(self.client.clone());
        let claims = claims
            .list(&ListParams::default())
            .await
            .map_err(failed("the ResourceClaims can't be listed"))?;
        Ok(claims
            .items
            .into_iter()
            .filter_map(|claim| claim_holder(claim, node))
            .collect())
    }

    /// The class by which counted pods are made to claim.
    pub(super) async fn mapped(&self) -> Mapped {
        let classes = Api::<DeviceClass>::all(self.client.clone());
        // A caller who may not see classes is told that this is not known.
        let Ok(classes) = classes.list(&ListParams::default()).await else {
            return Mapped::Unknown;
        };
        let has_name = |class: &DeviceClass| {
            let spec = class.spec.as_ref();
            let mapped = spec.and_then(|spec| spec.extended_resource_name.as_deref());
            mapped == Some(Face::Legacy.served_name())
        };
        let mut mapped: Vec<_> = classes
            .items
            .into_iter()
            .filter(has_name)
            .map(|class| {
                (
                    Reverse(class.metadata.creation_timestamp),
                    class.metadata.name,
                )
            })
            .collect();
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
        let labels = self.node(node).await?.metadata.labels.unwrap_or_default();
        Ok(labels.get(LABEL).filter(|name| !name.is_empty()).cloned())
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
        let patched = nodes
            .patch(node, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        patched
            .map(drop)
            .map_err(failed(format!("the Node {node} can't be labelled")))
    }

    /// The nodes on which a pod of the daemon runs, each with the profile that its label names.
    pub(crate) async fn nodes(
        &self,
        namespace: &str,
    ) -> Result<BTreeMap<String, Option<String>>, Error> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let pods = pods
            .list(&ListParams::default())
            .await
            .map_err(failed(format!("the pods in {namespace} can't be listed")))?;
        let mut nodes = BTreeMap::new();
        for pod in pods.items {
            let labels = pod.metadata.labels.unwrap_or_default();
            let is_ours = labels.get(OURS.0).is_some_and(|name| name == OURS.1);
            if let Some(node) = pod.spec.and_then(|spec| spec.node_name).filter(|_| is_ours) {
                let profile = self.profile(&node).await?;
                nodes.insert(node, profile);
            }
        }
        Ok(nodes)
    }

    /// The ConfigMap.
    pub(crate) async fn config_map(&self, map: &MapName) -> Result<ConfigMap, Error> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &map.namespace);
        maps.get(&map.name)
            .await
            .map_err(failed(format!("the ConfigMap {map} can't be read")))
    }

    /// Writes the ConfigMap, unless somebody else has since it was read.
    pub(crate) async fn write_config_map(
        &self,
        map: &MapName,
        changed: &ConfigMap,
    ) -> Result<(), Error> {
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), &map.namespace);
        let written = maps
            .replace(&map.name, &PostParams::default(), changed)
            .await;
        written
            .map(drop)
            .map_err(failed(format!("the ConfigMap {map} can't be written")))
    }
}

fn counted_holder(pod: Pod) -> Option<Holder> {
    let status = pod.status.unwrap_or_default();
    let is_over = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    // Kubernetes has made a claim for it.
    if is_over || status.extended_resource_claim_status.is_some() {
        return None;
    }
    let spec = pod.spec?;
    let asked = |containers: &[Container]| containers.iter().map(asks).collect::<Vec<u32>>();
    let main: u32 = asked(&spec.containers).into_iter().sum();
    let init = asked(spec.init_containers.as_deref().unwrap_or_default());
    let gpus = main.max(init.into_iter().max().unwrap_or(0));
    (gpus > 0).then(|| Holder {
        kind: "pod",
        namespace: pod.metadata.namespace.unwrap_or_default(),
        name: pod.metadata.name.unwrap_or_default(),
        gpus,
        pods: Vec::new(),
    })
}

fn asks(container: &Container) -> u32 {
    let resources = container.resources.as_ref();
    let limits = resources.and_then(|resources| resources.limits.as_ref());
    limits
        .and_then(|limits| limits.get(Face::Legacy.served_name()))
        .and_then(|quantity| quantity.0.parse().ok())
        .unwrap_or(0)
}

fn claim_holder(claim: ResourceClaim, node: &str) -> Option<(Holder, Vec<String>)> {
    let status = claim.status?;
    let results = status.allocation?.devices?.results.unwrap_or_default();
    let devices: Vec<String> = results
        .into_iter()
        .filter(|result| result.driver == Face::Dra.served_name() && result.pool == node)
        .filter(|result| result.admin_access != Some(true))
        .map(|result| result.device)
        .collect();
    let users = status.reserved_for.unwrap_or_default().into_iter();
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
