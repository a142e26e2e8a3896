//! The DRA manager: which claims are prepared for which pods, and the calls to the drivers.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/cm/dra/{manager,claiminfo}.go`; the error texts are the kubelet's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;

use dra_proto::CALL_TIMEOUT;
use dra_proto::v1::dra_plugin_client::DraPluginClient;
use dra_proto::v1::{self, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use dra_proto::v1beta1;

use super::checkpoint;
use super::drivers::{Driver, Drivers, Service};
use super::pod::Claim;
use crate::dial::go_error;
use crate::lock;

/// A device that a driver prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreparedDevice {
    pub(crate) pool: String,
    pub(crate) device: String,
    pub(crate) share_id: Option<String>,
    pub(crate) requests: Vec<String>,
    pub(crate) cdi_ids: Vec<String>,
}

/// A claim that the kubelet keeps track of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimInfo {
    pub(crate) uid: String,
    pub(crate) name: String,
    pub(crate) namespace: String,
    /// UIDs of the pods that use it.
    pub(crate) pods: BTreeSet<String>,
    pub(crate) drivers: BTreeMap<String, Vec<PreparedDevice>>,
    /// In memory only: after a restart no claim counts as prepared.
    pub(crate) prepared: bool,
    /// From the decision to call the driver until the claim is forgotten.
    pub(crate) unpreparing: bool,
}

impl ClaimInfo {
    fn new(claim: &Claim) -> Self {
        let drivers = claim.drivers.iter().map(|it| (it.clone(), Vec::new()));
        Self {
            uid: claim.uid.clone(),
            name: claim.name.clone(),
            namespace: claim.namespace.clone(),
            pods: BTreeSet::new(),
            drivers: drivers.collect(),
            prepared: false,
            unpreparing: false,
        }
    }

    fn to_proto(&self) -> v1::Claim {
        v1::Claim {
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            name: self.name.clone(),
        }
    }
}

/// Namespace and name: what the kubelet keys claims by.
type ClaimKey = (String, String);

/// The claims of a call, by driver name.
type Batches = BTreeMap<String, Vec<v1::Claim>>;

/// The DRA manager of one kubelet process.
#[derive(Debug)]
pub(crate) struct Claims {
    infos: Mutex<BTreeMap<ClaimKey, ClaimInfo>>,
    checkpoint: PathBuf,
}

impl Claims {
    /// The manager after a start, with the claims of its checkpoint.
    pub(crate) fn restored(checkpoint: PathBuf) -> anyhow::Result<Self> {
        let claims = checkpoint::read_claims(&checkpoint)?;
        let keyed = claims
            .into_iter()
            .map(|info| ((info.namespace.clone(), info.name.clone()), info));
        Ok(Self {
            infos: Mutex::new(keyed.collect()),
            checkpoint,
        })
    }

    /// `PrepareResources`.
    ///
    /// # Errors
    ///
    /// The text that the pod's event shows after "Failed to prepare dynamic resources: ".
    pub(crate) async fn prepare(
        &self,
        pod_uid: &str,
        claims: &[Claim],
        drivers: &Drivers,
    ) -> Result<(), String> {
        let outcome = self.try_prepare(pod_uid, claims, drivers).await;
        outcome.map_err(|error| format!("prepare dynamic resources: {error}"))
    }

    async fn try_prepare(
        &self,
        pod_uid: &str,
        claims: &[Claim],
        drivers: &Drivers,
    ) -> Result<(), String> {
        // All drivers must be there before anything is written down.
        let mut plugins = BTreeMap::new();
        for driver in claims.iter().flat_map(|claim| &claim.drivers) {
            plugins.insert(driver.clone(), drivers.pick(driver).await?);
        }
        let batches = self.attach(pod_uid, claims)?;
        for (name, batch) in &batches {
            let answers = call_prepare(&plugins[name], batch).await?;
            self.note(name, batch, &answers)?;
            if answers.len() < batch.len() {
                return Err(format!(
                    "NodePrepareResources skipped {} ResourceClaims",
                    batch.len() - answers.len()
                ));
            }
        }
        let prepared: BTreeSet<&String> = batches.values().flatten().map(|it| &it.uid).collect();
        let mut infos = lock(&self.infos);
        for info in infos.values_mut() {
            info.prepared |= prepared.contains(&info.uid);
        }
        self.save(&infos)
    }

    /// Writes down that the pod uses the claims, before any driver is called, and says which of them are
    /// still to be prepared.
    fn attach(&self, pod_uid: &str, claims: &[Claim]) -> Result<Batches, String> {
        let mut infos = lock(&self.infos);
        let mut batches = Batches::new();
        for claim in claims {
            let info = infos
                .entry((claim.namespace.clone(), claim.name.clone()))
                .or_insert_with(|| ClaimInfo::new(claim));
            if info.uid != claim.uid {
                return Err(format!(
                    "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                    claim.name, info.uid
                ));
            }
            if info.unpreparing {
                return Err(format!("ResourceClaim {} is being unprepared", claim.name));
            }
            info.pods.insert(pod_uid.to_owned());
            if !info.prepared {
                for driver in info.drivers.keys() {
                    batches
                        .entry(driver.clone())
                        .or_default()
                        .push(info.to_proto());
                }
            }
            self.save(&infos)?;
        }
        Ok(batches)
    }

    /// Takes over what a driver answered.
    fn note(&self, driver: &str, batch: &[v1::Claim], answers: &Answers) -> Result<(), String> {
        for (uid, answer) in answers {
            let claim = asked(batch, uid).ok_or_else(|| {
                format!("NodePrepareResources returned result for unknown claim UID {uid}")
            })?;
            let devices = answer.as_ref().map_err(|error| {
                format!(
                    "NodePrepareResources failed for ResourceClaim {}: {error}",
                    claim.name
                )
            })?;
            let key = (claim.namespace.clone(), claim.name.clone());
            if let Some(info) = lock(&self.infos).get_mut(&key) {
                info.drivers.insert(driver.to_owned(), devices.clone());
            }
        }
        Ok(())
    }

    /// `UnprepareResources`, for all claims that the pod uses.
    ///
    /// # Errors
    ///
    /// The kubelet's text. The pod goes on hanging in Terminating, and the call is made again.
    pub(crate) async fn unprepare(&self, pod_uid: &str, drivers: &Drivers) -> Result<(), String> {
        let outcome = self.try_unprepare(pod_uid, drivers).await;
        outcome.map_err(|error| format!("unprepare dynamic resources: {error}"))
    }

    async fn try_unprepare(&self, pod_uid: &str, drivers: &Drivers) -> Result<(), String> {
        let (batches, leaving) = self.detach(pod_uid);
        for (name, batch) in &batches {
            let driver = drivers.pick(name).await?;
            let answers = call_unprepare(&driver, batch).await?;
            for (uid, error) in &answers {
                let claim = asked(batch, uid).ok_or_else(|| {
                    format!("NodeUnprepareResources returned result for unknown claim UID {uid}")
                })?;
                if !error.is_empty() {
                    return Err(format!(
                        "NodeUnprepareResources failed for ResourceClaim {}: {error}",
                        claim.name
                    ));
                }
            }
            if answers.len() < batch.len() {
                return Err(format!(
                    "NodeUnprepareResources skipped {} ResourceClaims",
                    batch.len() - answers.len()
                ));
            }
        }
        let mut infos = lock(&self.infos);
        infos.retain(|_, info| !leaving.contains(&info.uid));
        self.save(&infos)
    }

    /// Takes the pod off its claims; those that no other pod uses are to be unprepared.
    fn detach(&self, pod_uid: &str) -> (Batches, BTreeSet<String>) {
        let mut batches = Batches::new();
        let mut leaving = BTreeSet::new();
        let mut infos = lock(&self.infos);
        for info in infos.values_mut() {
            if !info.pods.contains(pod_uid) {
                continue;
            }
            if info.pods.len() > 1 {
                info.pods.remove(pod_uid);
                continue;
            }
            info.unpreparing = true;
            leaving.insert(info.uid.clone());
            for driver in info.drivers.keys() {
                batches
                    .entry(driver.clone())
                    .or_default()
                    .push(info.to_proto());
            }
        }
        (batches, leaving)
    }

    /// `reconcileLoop`, which the kubelet runs each minute: unprepares what pods have that are gone.
    pub(crate) async fn reconcile(
        &self,
        active: &BTreeSet<String>,
        drivers: &Drivers,
    ) -> Result<(), String> {
        let gone: BTreeSet<String> = lock(&self.infos)
            .values()
            .flat_map(|info| &info.pods)
            .filter(|uid| !active.contains(*uid))
            .cloned()
            .collect();
        for pod_uid in gone {
            self.unprepare(&pod_uid, drivers).await?;
        }
        Ok(())
    }

    /// What the kubelet knows of a claim.
    pub(crate) fn info(&self, namespace: &str, name: &str) -> Option<ClaimInfo> {
        let key = (namespace.to_owned(), name.to_owned());
        lock(&self.infos).get(&key).cloned()
    }

    fn save(&self, infos: &BTreeMap<ClaimKey, ClaimInfo>) -> Result<(), String> {
        checkpoint::write_claims(&self.checkpoint, infos.values())
            .map_err(|error| format!("checkpoint ResourceClaim state: {error:#}"))
    }
}

fn asked<'a>(batch: &'a [v1::Claim], uid: &str) -> Option<&'a v1::Claim> {
    batch.iter().find(|claim| claim.uid == uid)
}

/// What a driver said of each claim: its devices, or why not.
type Answers = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

async fn call_prepare(driver: &Driver, claims: &[v1::Claim]) -> Result<Answers, String> {
    let answers = match driver.service {
        Service::V1 => {
            let mut client = DraPluginClient::new(driver.channel.clone());
            let request = deadline(NodePrepareResourcesRequest {
                claims: claims.to_vec(),
            });
            let answer = client.node_prepare_resources(request).await;
            answer.map(|it| it.into_inner().claims)
        }
        Service::V1beta1 => {
            let mut client =
                v1beta1::dra_plugin_client::DraPluginClient::new(driver.channel.clone());
            let request = deadline(v1beta1::NodePrepareResourcesRequest {
                claims: claims.iter().map(as_v1beta1).collect(),
            });
            let answer = client.node_prepare_resources(request).await;
            answer.map(|it| upgraded(it.into_inner()))
        }
    };
    let answers =
        answers.map_err(|status| format!("NodePrepareResources: {}", go_error(&status)))?;
    let outcome = |answer: v1::NodePrepareResourceResponse| {
        if answer.error.is_empty() {
            Ok(answer.devices.into_iter().map(prepared_device).collect())
        } else {
            Err(answer.error)
        }
    };
    Ok(answers
        .into_iter()
        .map(|(uid, answer)| (uid, outcome(answer)))
        .collect())
}

async fn call_unprepare(
    driver: &Driver,
    claims: &[v1::Claim],
) -> Result<BTreeMap<String, String>, String> {
    let errors = match driver.service {
        Service::V1 => {
            let mut client = DraPluginClient::new(driver.channel.clone());
            let request = deadline(NodeUnprepareResourcesRequest {
                claims: claims.to_vec(),
            });
            let answer = client.node_unprepare_resources(request).await;
            answer.map(|it| {
                let claims = it.into_inner().claims.into_iter();
                claims.map(|(uid, it)| (uid, it.error)).collect()
            })
        }
        Service::V1beta1 => {
            let mut client =
                v1beta1::dra_plugin_client::DraPluginClient::new(driver.channel.clone());
            let request = deadline(v1beta1::NodeUnprepareResourcesRequest {
                claims: claims.iter().map(as_v1beta1).collect(),
            });
            let answer = client.node_unprepare_resources(request).await;
            answer.map(|it| {
                let claims = it.into_inner().claims.into_iter();
                claims.map(|(uid, it)| (uid, it.error)).collect()
            })
        }
    };
    errors.map_err(|status| format!("NodeUnprepareResources: {}", go_error(&status)))
}

fn deadline<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}

fn as_v1beta1(claim: &v1::Claim) -> v1beta1::Claim {
    v1beta1::Claim {
        namespace: claim.namespace.clone(),
        uid: claim.uid.clone(),
        name: claim.name.clone(),
    }
}

fn upgraded(
    answer: v1beta1::NodePrepareResourcesResponse,
) -> BTreeMap<String, v1::NodePrepareResourceResponse> {
    let device = |it: v1beta1::Device| v1::Device {
        request_names: it.request_names,
        pool_name: it.pool_name,
        device_name: it.device_name,
        cdi_device_ids: it.cdi_device_ids,
        share_id: None,
    };
    let answers = answer.claims.into_iter().map(|(uid, it)| {
        let answer = v1::NodePrepareResourceResponse {
            devices: it.devices.into_iter().map(device).collect(),
            error: it.error,
        };
        (uid, answer)
    });
    answers.collect()
}

fn prepared_device(device: v1::Device) -> PreparedDevice {
    PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share_id: device.share_id,
        requests: device.request_names,
        cdi_ids: device.cdi_device_ids,
    }
}
