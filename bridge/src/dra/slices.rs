//! The node's ResourceSlice: what it says (a pure function of the offers), and keeping it so in the API.
//!
//! One slice per node, so that every change is one atomic write and needs no new pool generation. All slices of our
//! driver on this node are ours, whoever made them: the API has one owner per driver and node, and the newest
//! publisher is it, as in upstream's helper (`k8s.io/dynamic-resource-allocation` v0.37.2, `resourceslice`).
//!
//! Kubernetes types of slices stop here.

mod ask;
mod device;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{
    ClaimOffer, DeviceName, Mode, NAME_LIMIT, Offers, SliceWanted, TaintEffect, UnitId,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::ask::{Refusal, ask};
pub(crate) use self::device::is_open;
use super::DRIVER;
use crate::follow::{self, Complaints, Event, Lists};
use crate::metrics::{Metrics, SliceWrite};

/// The most devices of a slice in which any device has a taint
/// (`ResourceSliceMaxDevicesWithTaintsOrConsumesCounters` in k8s.io/api `resource/v1/types.go`).
pub const DEVICE_LIMIT: usize = 64;

/// Annotation of the slice with the mode of its node, for other schedulers and for who looks at all nodes.
pub const MODE_ANNOTATION: &str = "gpu-bridge.dev/mode";

/// How often all slices of this driver and node are listed beside the watch. A watch has been seen to lose the deletion
/// of a slice that had just been written (k/k#132683); more often would cost an idle node more than two requests a
/// minute in all.
pub const RELIST: Duration = Duration::from_secs(90);

/// A slice that somebody deleted is made again at once, but not more often than this: whoever deletes it all the
/// time (a kubelet that restarts in a loop) gets no storm.
const CREATE_PAUSE: Duration = Duration::from_secs(1);

/// Pause after a failed write; it doubles with each failure.
const RETRY_FIRST: Duration = Duration::from_millis(250);

/// The longest pause after a failed write.
const RETRY_LAST: Duration = Duration::from_secs(30);

/// So many tries in a row that found a slice changed are a race with a late event. More are somebody else who writes.
const QUIET_CONFLICTS: u32 = 3;

/// While taints are known to be dropped, the server is asked again this often whether it takes them now: it may
/// have been upgraded.
const PROBE_TAINTS: Duration = Duration::from_secs(600);

/// Slices per page of a list. There is one; a driver before us may have left a few dozen.
const PAGE_SIZE: u32 = 100;

/// Events that may wait for the publisher.
const EVENT_BOUND: usize = 16;

/// How publishing goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishState {
    /// Nothing was written yet: the API server has not answered.
    Waiting,
    /// The slice is as the offers want it.
    Published {
        /// Its name.
        slice: String,
        /// Devices in it.
        devices: usize,
        /// What becomes of taints.
        taints: TaintSupport,
    },
    /// There is no slice, because the face is closed.
    Withdrawn,
    /// The last try failed; it is tried again.
    Failed {
        /// What failed and why.
        error: String,
    },
}

/// Whether the API server keeps the taints of devices (feature gate `DRADeviceTaints`, on since Kubernetes 1.36).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaintSupport {
    /// It was not asked yet: no device had a taint.
    Unknown,
    /// It keeps them.
    Kept,
    /// It drops them: devices that nobody may take are left out of the slice instead.
    Dropped,
}

/// Why the slice could not be published.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("could not {what}: {why}")]
    Api { what: &'static str, why: String },
    #[error("could not {what}: the object was changed or removed meanwhile")]
    Conflict { what: &'static str },
    #[error(
        "the node has {0} devices, and one ResourceSlice with taints holds {DEVICE_LIMIT}: this version does not publish more"
    )]
    TooManyDevices(usize),
    #[error("node {0} has no UID in the API, so the slice could have no owner")]
    NoNodeUid(String),
}

/// Keeps the slice as the offers want it, until told to stop.
///
/// Needs the rights to get, list, watch, create, update and delete `resourceslices` in `resource.k8s.io`, and to get
/// the own `nodes` object. Call it only while this process owns the node's ledger: two publishers would undo each
/// other's writes. The slice stays when this ends.
/// An API server that is away or says no is tried again, and `state` says so. `shown` gets the units whose devices the
/// slice in the API shows to claims, each time that it has become what the offers want.
pub async fn run(
    client: Client,
    node: String,
    mut offers: watch::Receiver<Arc<Offers>>,
    state: watch::Sender<PublishState>,
    shown: watch::Sender<Option<BTreeSet<UnitId>>>,
    metrics: Metrics,
    shutdown: CancellationToken,
) {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let following = follow::run(
        Api::<ResourceSlice>::all(client.clone()),
        follow::Config {
            what: "resourceslices",
            fields: Some(selector(&node)),
            page_size: PAGE_SIZE,
            lists: Lists::Every(RELIST),
            closeness: follow::Closeness::Close,
            unknown_after: follow::UNKNOWN_AFTER,
            trouble: None,
        },
        |slice| slice,
        |_| true,
        events,
    );
    let mut publisher = Publisher::new(client, node, state, metrics);
    let publishing = async {
        loop {
            let again = publisher.again;
            tokio::select! {
                event = seen.recv() => match event {
                    Some(event) => publisher.take(event),
                    None => return,
                },
                changed = offers.changed() => if changed.is_err() {
                    // The arbiter is gone, and the daemon with it.
                    return std::future::pending().await;
                },
                () = at(again) => {}
            }
            while let Ok(event) = seen.try_recv() {
                publisher.take(event);
            }
            let wanted = Arc::clone(&offers.borrow_and_update());
            publisher.mode = wanted.mode;
            if publisher.publish(&wanted).await {
                let open = open_units(&wanted);
                shown.send_if_modified(|before| {
                    let changed = before.as_ref() != Some(&open);
                    *before = Some(open);
                    changed
                });
            }
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = following => {}
        () = publishing => {}
    }
}

/// The units whose devices claims may be allocated.
fn open_units(offers: &Offers) -> BTreeSet<UnitId> {
    let claims = offers.claims.iter().flatten();
    claims
        .filter(|offer| offer.taint.is_none())
        .map(|offer| offer.gpu.uuid.clone())
        .collect()
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

struct Publisher {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    node: String,
    mode: Mode,
    owner: Option<OwnerReference>,
    /// The slices of our driver and node, as last seen or written; `None` before the first list.
    known: Option<BTreeMap<String, ResourceSlice>>,
    taints: TaintSupport,
    /// Devices that are to evict, and can't because the server drops taints: said once each time.
    unevicted: BTreeSet<DeviceName>,
    /// When the server was last asked what it makes of taints.
    probed: Option<Instant>,
    created: Option<Instant>,
    /// Somebody else's object has the name of our slice.
    name_taken: bool,
    /// When to try again although nothing has changed.
    again: Option<Instant>,
    pause: Duration,
    failures: u32,
    complaints: Complaints,
    state: watch::Sender<PublishState>,
    metrics: Metrics,
}

impl Publisher {
    fn new(
        client: Client,
        node: String,
        state: watch::Sender<PublishState>,
        metrics: Metrics,
    ) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client),
            node,
            mode: Mode::default(),
            owner: None,
            known: None,
            taints: TaintSupport::Unknown,
            unevicted: BTreeSet::new(),
            probed: None,
            created: None,
            name_taken: false,
            again: None,
            pause: RETRY_FIRST,
            failures: 0,
            complaints: Complaints::new("resourceslices"),
            state,
            metrics,
        }
    }

    fn take(&mut self, event: Event<ResourceSlice>) {
        match event {
            Event::Listed(all) => {
                let named = all
                    .into_iter()
                    .filter_map(|slice| Some((name_of(&slice)?, slice)));
                self.known = Some(named.collect());
            }
            Event::Applied(slice) => self.note(slice),
            Event::Deleted(slice) => {
                let (Some(known), Some(name)) = (&mut self.known, name_of(&slice)) else {
                    return;
                };
                if known
                    .get(&name)
                    .is_some_and(|before| !is_newer(before, &slice))
                {
                    known.remove(&name);
                }
            }
            // What is known stays the best guess; each write is checked against the server's version.
            Event::Running | Event::Unknown => {}
        }
    }

    /// Keeps what is newer: an event about a write of ours may come long after its answer.
    fn note(&mut self, slice: ResourceSlice) {
        let (Some(known), Some(name)) = (&mut self.known, name_of(&slice)) else {
            return;
        };
        if known
            .get(&name)
            .is_none_or(|before| !is_newer(before, &slice))
        {
            known.insert(name, slice);
        }
    }

    /// Whether the API shows now what is wanted.
    async fn publish(&mut self, wanted: &Offers) -> bool {
        if self.known.is_none() {
            return false;
        }
        self.again = None;
        let makes_none = wanted.slice == SliceWanted::Kept && self.keeper().is_none();
        let done = match &wanted.claims {
            Some(offers) if !makes_none => self.bring_about(offers).await,
            Some(_) | None => self.withdraw().await,
        };
        match done {
            Ok(Some(state)) => {
                self.complaints.none();
                self.pause = RETRY_FIRST;
                self.failures = 0;
                self.state.send_if_modified(|old| {
                    let changed = *old != state;
                    *old = state;
                    changed
                });
                if self.taints == TaintSupport::Dropped {
                    // Where it is over, nothing had a taint meanwhile; the next offer that has brings it up.
                    self.again = self
                        .probed
                        .map(|probed| probed + PROBE_TAINTS)
                        .filter(|due| *due > Instant::now());
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.fail(&error).await;
                false
            }
        }
    }

    async fn fail(&mut self, error: &Error) {
        self.metrics.slice_not_written();
        self.again = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(RETRY_LAST);
        self.failures += 1;
        if matches!(error, Error::Conflict { .. }) {
            // What the server has now is the start of the next try.
            match self.list().await {
                Ok(()) if self.failures <= QUIET_CONFLICTS => return,
                Ok(()) => {}
                Err(error) => self.complaints.about(&error.to_string()),
            }
        }
        let error = error.to_string();
        self.complaints.about(&error);
        self.state.send_replace(PublishState::Failed { error });
    }

    async fn withdraw(&mut self) -> Result<Option<PublishState>, Error> {
        self.delete_all_but(None).await?;
        Ok(Some(PublishState::Withdrawn))
    }

    /// Makes the slice what the offers want. `None`: not now, `again` says when.
    async fn bring_about(&mut self, offers: &[ClaimOffer]) -> Result<Option<PublishState>, Error> {
        if offers.len() > DEVICE_LIMIT {
            return Err(Error::TooManyDevices(offers.len()));
        }
        let kept = self.keeper();
        self.delete_all_but(kept.as_deref()).await?;
        if self.wants_probe(offers) {
            self.probe(offers).await?;
        }
        // A second round where the first has shown that the server drops taints after all.
        loop {
            let devices = device::all(offers, self.taints);
            let count = devices.len();
            let Some(stored) = self.store(devices).await? else {
                return Ok(None);
            };
            if self.taints != TaintSupport::Dropped && has_taints(offers) {
                let lacking = lacks_taints(&stored, offers);
                self.learn(if lacking {
                    TaintSupport::Dropped
                } else {
                    TaintSupport::Kept
                });
                if lacking {
                    continue;
                }
            }
            self.tell_unevicted(offers);
            return Ok(Some(PublishState::Published {
                slice: name_of(&stored).unwrap_or_default(),
                devices: count,
                taints: self.taints,
            }));
        }
    }

    /// The slice that stays: ours before others, the newest generation, the first name.
    fn keeper(&self) -> Option<String> {
        let known = self.known.as_ref()?;
        known
            .iter()
            .filter(|(_, slice)| slice.spec.pool.name == self.node)
            .max_by_key(|(name, slice)| (slice.spec.pool.generation, std::cmp::Reverse(*name)))
            .map(|(name, _)| name.clone())
    }

    async fn delete_all_but(&mut self, kept: Option<&str>) -> Result<(), Error> {
        let Some(known) = &self.known else {
            return Ok(());
        };
        let others: Vec<ResourceSlice> = known
            .iter()
            .filter(|(name, _)| Some(name.as_str()) != kept)
            .map(|(_, slice)| slice.clone())
            .collect();
        for slice in others {
            let Some(name) = name_of(&slice) else {
                continue;
            };
            if kept.is_some() {
                warn!(
                    slice = name,
                    pool = slice.spec.pool.name,
                    "another ResourceSlice of this driver and node is deleted: does a second DRA driver for gpu.nvidia.com run here?"
                );
            }
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: slice.metadata.uid.clone(),
                    resource_version: slice.metadata.resource_version.clone(),
                }),
                ..DeleteParams::default()
            };
            match ask(self.slices.delete(&name, &params)).await {
                Ok(_) => {
                    self.metrics.slice_written(SliceWrite::Delete);
                    info!(slice = name, "deleted a ResourceSlice");
                }
                Err(Refusal::Gone) => {}
                Err(refusal) => return Err(refusal.into_error("delete a ResourceSlice")),
            }
            if let Some(known) = &mut self.known {
                known.remove(&name);
            }
        }
        Ok(())
    }

    /// Where taints are dropped nobody is evicted by them.
    fn tell_unevicted(&mut self, offers: &[ClaimOffer]) {
        let evicts = |offer: &&ClaimOffer| {
            offer
                .taint
                .is_some_and(|taint| taint.effect == TaintEffect::NoExecute)
        };
        let unevicted: BTreeSet<DeviceName> = match self.taints {
            TaintSupport::Dropped => offers
                .iter()
                .filter(evicts)
                .map(|it| it.device.clone())
                .collect(),
            TaintSupport::Unknown | TaintSupport::Kept => BTreeSet::new(),
        };
        for device in unevicted.difference(&self.unevicted) {
            warn!(
                %device,
                reason = "ClaimPodNotEvicted",
                why = "TaintsDropped",
                "the pods of a claim that lost this device are not evicted, because the API server drops the taints of devices; delete them to have them scheduled anew"
            );
        }
        self.unevicted = unevicted;
    }

    fn wants_probe(&self, offers: &[ClaimOffer]) -> bool {
        let due = self
            .probed
            .is_none_or(|probed| probed.elapsed() >= PROBE_TAINTS);
        match self.taints {
            TaintSupport::Unknown | TaintSupport::Dropped => due && has_taints(offers),
            TaintSupport::Kept => false,
        }
    }

    /// Asks the server, without a write, what it makes of the taints: had it to drop them from a real write, the
    /// devices would stand there without for a moment.
    async fn probe(&mut self, offers: &[ClaimOffer]) -> Result<(), Error> {
        let wanted = device::all(offers, TaintSupport::Kept);
        let dry = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let mut slice = self.new_slice(wanted).await?;
        // A name of its own, since the slice may be there already.
        slice.metadata.name = None;
        slice.metadata.generate_name = Some(format!("probe-{DRIVER}-"));
        let answer = match ask(self.slices.create(&dry, &slice)).await {
            Ok(answer) => answer,
            Err(refusal @ Refusal::NoAnswer(_)) => {
                return Err(refusal.into_error("ask whether the API server keeps taints"));
            }
            // An admission webhook may not allow dry runs. What comes back from the write says it too.
            Err(refusal) => {
                let error = refusal.into_error("ask whether the API server keeps taints");
                debug!(error = %error, "the first write will tell");
                self.probed = Some(Instant::now());
                return Ok(());
            }
        };
        self.probed = Some(Instant::now());
        self.learn(if lacks_taints(&answer, offers) {
            TaintSupport::Dropped
        } else {
            TaintSupport::Kept
        });
        Ok(())
    }

    fn learn(&mut self, taints: TaintSupport) {
        if self.taints == taints {
            return;
        }
        let before = std::mem::replace(&mut self.taints, taints);
        self.probed = Some(Instant::now());
        match taints {
            TaintSupport::Dropped => self.metrics.taints_dropped(),
            TaintSupport::Kept | TaintSupport::Unknown => self.metrics.taints_kept(),
        }
        match (taints, before) {
            (TaintSupport::Dropped, _) => warn!(
                "the API server drops the taints of devices (feature gate DRADeviceTaints, on since Kubernetes 1.36): devices that no claim may get are left out of the ResourceSlice instead"
            ),
            (TaintSupport::Kept, TaintSupport::Dropped) => {
                info!("the API server keeps the taints of devices now");
            }
            (TaintSupport::Kept | TaintSupport::Unknown, _) => {}
        }
    }

    /// Writes the devices, unless they are there already. `None`: not now, `again` says when.
    async fn store(&mut self, devices: Vec<Device>) -> Result<Option<ResourceSlice>, Error> {
        let kept = self
            .keeper()
            .and_then(|name| self.known.as_ref()?.get(&name).cloned());
        let how = match kept {
            Some(_) => SliceWrite::Update,
            None => SliceWrite::Create,
        };
        let stored = match kept {
            Some(before) => {
                let slice = self.changed(&before, devices).await?;
                if is_same(&before, &slice) {
                    return Ok(Some(before));
                }
                let name = name_of(&before).unwrap_or_default();
                let params = PostParams::default();
                match ask(self.slices.replace(&name, &params, &slice)).await {
                    Ok(stored) => stored,
                    Err(Refusal::Gone) => {
                        if let Some(known) = &mut self.known {
                            known.remove(&name);
                        }
                        return Err(Error::Conflict {
                            what: "update the ResourceSlice",
                        });
                    }
                    Err(refusal) => return Err(refusal.into_error("update the ResourceSlice")),
                }
            }
            None => {
                let next = self.created.map(|created| created + CREATE_PAUSE);
                if let Some(next) = next.filter(|next| *next > Instant::now()) {
                    self.again = Some(next);
                    return Ok(None);
                }
                self.created = Some(Instant::now());
                // The node may have been deleted and made anew, and the slice with it.
                self.owner = None;
                let slice = self.new_slice(devices).await?;
                match ask(self.slices.create(&PostParams::default(), &slice)).await {
                    Ok(stored) => stored,
                    Err(refusal) => {
                        self.name_taken |= matches!(refusal, Refusal::Conflict);
                        return Err(refusal.into_error("create the ResourceSlice"));
                    }
                }
            }
        };
        self.metrics.slice_written(how);
        info!(
            slice = name_of(&stored),
            devices = stored.spec.devices.as_ref().map_or(0, Vec::len),
            "wrote the ResourceSlice"
        );
        self.note(stored.clone());
        Ok(Some(stored))
    }

    async fn new_slice(&mut self, devices: Vec<Device>) -> Result<ResourceSlice, Error> {
        // Upstream's form: the scheduler takes slices in the order of their names, and the index comes first. A
        // fixed name makes a second create fail, instead of publishing every device twice.
        let name = format!("00000-{DRIVER}-{}", self.node);
        let (name, generate_name) = if self.name_taken || name.len() > NAME_LIMIT {
            (None, Some(format!("{name}-")))
        } else {
            (Some(name), None)
        };
        Ok(ResourceSlice {
            metadata: ObjectMeta {
                name,
                generate_name,
                owner_references: Some(vec![self.owner().await?]),
                annotations: Some(BTreeMap::from([self.annotation()])),
                ..ObjectMeta::default()
            },
            spec: self.spec(INITIAL_GENERATION, devices),
        })
    }

    /// The slice as it is, with the devices as they shall be. The pool generation stays: one slice changes in one
    /// write, so nobody ever sees half of a change.
    async fn changed(
        &mut self,
        before: &ResourceSlice,
        mut devices: Vec<Device>,
    ) -> Result<ResourceSlice, Error> {
        device::keep_times(
            before.spec.devices.as_deref().unwrap_or_default(),
            &mut devices,
        );
        let mut slice = before.clone();
        slice.metadata.managed_fields = None;
        let (key, mode) = self.annotation();
        let annotations = slice.metadata.annotations.get_or_insert_default();
        annotations.insert(key, mode);
        slice.metadata.owner_references = Some(vec![self.owner().await?]);
        slice.spec = self.spec(before.spec.pool.generation, devices);
        Ok(slice)
    }

    fn annotation(&self) -> (String, String) {
        (MODE_ANNOTATION.to_owned(), self.mode.as_str().to_owned())
    }

    fn spec(&self, generation: i64, devices: Vec<Device>) -> ResourceSliceSpec {
        ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(self.node.clone()),
            pool: ResourcePool {
                name: self.node.clone(),
                generation,
                resource_slice_count: 1,
            },
            devices: Some(devices),
            ..ResourceSliceSpec::default()
        }
    }

    /// The Node, which the slice goes with.
    async fn owner(&mut self) -> Result<OwnerReference, Error> {
        if let Some(owner) = &self.owner {
            return Ok(owner.clone());
        }
        let node = ask(self.nodes.get(&self.node))
            .await
            .map_err(|refusal| refusal.into_error("read the own Node"))?;
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.clone(),
            uid: node
                .metadata
                .uid
                .ok_or_else(|| Error::NoNodeUid(self.node.clone()))?,
            controller: Some(true),
            block_owner_deletion: None,
        };
        self.owner = Some(owner.clone());
        Ok(owner)
    }

    async fn list(&mut self) -> Result<(), Error> {
        let params = ListParams::default()
            .fields(&selector(&self.node))
            .limit(PAGE_SIZE);
        let all = ask(self.slices.list(&params))
            .await
            .map_err(|refusal| refusal.into_error("list the ResourceSlices"))?;
        self.take(Event::Listed(all.items));
        Ok(())
    }
}

/// `spec.pool.generation` of a pool that is new.
const INITIAL_GENERATION: i64 = 1;

/// A field selector of the slices of a node.
pub(crate) fn selector(node: &str) -> String {
    format!("spec.driver={DRIVER},spec.nodeName={node}")
}

fn name_of(slice: &ResourceSlice) -> Option<String> {
    slice.metadata.name.clone()
}

/// Whether the first is newer than the second. Resource versions of one kind are numbers that grow
/// (KEP-5504); what is none counts as older.
fn is_newer(first: &ResourceSlice, second: &ResourceSlice) -> bool {
    let version = |slice: &ResourceSlice| -> Option<u64> {
        slice.metadata.resource_version.as_ref()?.parse().ok()
    };
    version(first) > version(second)
}

/// Whether a write would change anything. When a taint was added is the server's to say.
fn is_same(stored: &ResourceSlice, wanted: &ResourceSlice) -> bool {
    let plain = |slice: &ResourceSlice| {
        let mut spec = slice.spec.clone();
        let devices = spec.devices.get_or_insert_default();
        device::forget_times(devices);
        let annotations = slice.metadata.annotations.as_ref();
        let mode = annotations
            .and_then(|all| all.get(MODE_ANNOTATION))
            .cloned();
        (spec, slice.metadata.owner_references.clone(), mode)
    };
    plain(stored) == plain(wanted)
}

fn has_taints(offers: &[ClaimOffer]) -> bool {
    offers.iter().any(|offer| offer.taint.is_some())
}

/// Whether a device that is to have a taint came back without.
fn lacks_taints(stored: &ResourceSlice, offers: &[ClaimOffer]) -> bool {
    let devices = stored.spec.devices.as_deref().unwrap_or_default();
    offers
        .iter()
        .filter(|offer| offer.taint.is_some())
        .any(|offer| {
            devices
                .iter()
                .filter(|device| device.name == offer.device.as_str())
                .any(|device| device.taints.as_deref().unwrap_or_default().is_empty())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(version: &str, devices: usize) -> ResourceSlice {
        let device = |number: usize| Device {
            name: format!("gpu-{number}"),
            ..Device::default()
        };
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some("slice".to_owned()),
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                devices: Some((0..devices).map(device).collect()),
                ..ResourceSliceSpec::default()
            },
        }
    }

    fn known(publisher: &Publisher) -> Vec<usize> {
        let slices = publisher.known.as_ref().unwrap().values();
        slices
            .map(|slice| slice.spec.devices.as_ref().unwrap().len())
            .collect()
    }

    #[tokio::test]
    async fn an_event_that_comes_after_the_answer_to_a_later_write_is_passed_over() {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let (state, _) = watch::channel(PublishState::Waiting);
        let mut publisher = Publisher::new(client, "node-a".to_owned(), state, Metrics::new());
        publisher.take(Event::Listed(vec![slice("9", 1)]));
        publisher.note(slice("11", 3));
        publisher.take(Event::Applied(slice("10", 2)));
        assert_eq!(known(&publisher), [3]);
        publisher.take(Event::Deleted(slice("10", 2)));
        assert_eq!(
            known(&publisher),
            [3],
            "an earlier slice of the name was deleted"
        );
        publisher.take(Event::Deleted(slice("12", 3)));
        assert_eq!(known(&publisher), [0_usize; 0]);
    }
}
