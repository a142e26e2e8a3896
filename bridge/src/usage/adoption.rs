//! Rule 11: gathers all that a node without a ledger can tell, before anything is given out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{
    Adoption, BoundPod, CheckpointedDevices, CheckpointedResponse, ClaimUid, Claims, DeviceId,
    DeviceName, Listing, PodPhase, PodUid, Pods, Presence, Standing, UnitId,
};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::checkpoint::{self, Devices};
use super::{LOG_AGAIN, PodResources};
use crate::arbiter::{self, Handle, Observation, Told};
use crate::follow::chain;
use crate::uds::Throttle;

/// Time between two attempts. The files are small, and each attempt is one List.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The units of the node with their device minors; `None` until NVML has answered.
pub type UnitMinors = Arc<dyn Fn() -> Option<Vec<(UnitId, u32)>> + Send + Sync>;

/// The claims that were unprepared so far while adoption is waited for.
pub type UnpreparedClaims = Arc<dyn Fn() -> BTreeSet<ClaimUid> + Send + Sync>;

/// Where to look.
pub struct AdoptionInputs {
    /// pod-resources.
    pub resources: PodResources,
    /// The kubelet's root folder, with `dra_manager_state` in it.
    pub kubelet_dir: PathBuf,
    /// The kubelet's device plugin folder, with `kubelet_internal_checkpoint` in it.
    pub device_plugin_dir: PathBuf,
    /// The pods bound here, as [`run_pods`](super::run_pods) tells them.
    pub pods: watch::Receiver<Option<Pods>>,
    /// The claims allocated here.
    pub claims: watch::Receiver<Option<Claims>>,
    /// The claims that have a CDI file of ours; `None`: the folder can't be read.
    pub cdi_claims: Option<BTreeSet<ClaimUid>>,
    /// The device minors in those files, by claim and device name.
    pub cdi_minors: BTreeMap<ClaimUid, BTreeMap<DeviceName, u32>>,
    /// Claims unprepared meanwhile.
    pub unprepared: UnpreparedClaims,
    /// The inventory.
    pub minors: UnitMinors,
    /// What is still waited for, in words, for readiness; empty once there is nothing.
    pub waiting: watch::Sender<String>,
}

impl fmt::Debug for AdoptionInputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptionInputs")
            .field("kubelet_dir", &self.kubelet_dir)
            .field("device_plugin_dir", &self.device_plugin_dir)
            .finish_non_exhaustive()
    }
}

/// Takes over what runs on the node, if the pool waits for it; then there is nothing more to do until `stop`. Until
/// then, and as long as the ledger can't be read, the pool is told what the kubelet has allocated.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. Sources that do not answer are waited for.
pub async fn run_adoption(
    inputs: AdoptionInputs,
    handle: Handle,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    tokio::select! {
        () = stop.cancelled() => return Ok(()),
        ended = adopt(inputs, &handle) => ended?,
    }
    stop.cancelled().await;
    Ok(())
}

async fn adopt(mut inputs: AdoptionInputs, handle: &Handle) -> Result<(), arbiter::Error> {
    let status = handle.status();
    let mut ids_told = None;
    let mut voice = Voice::default();
    while status.borrow().standing != Standing::Serving {
        let devices = checkpoint::read_devices(&inputs.device_plugin_dir).await;
        if let Ok(devices) = &devices {
            let ids = devices.ids(inputs.pods.borrow().as_ref());
            tell_ids(handle, ids, &mut ids_told).await?;
        }
        if status.borrow().standing == Standing::WaitingForAdoption {
            take_over(&mut inputs, handle, devices, &mut voice).await?;
        } else if let Err(error) = devices {
            voice.say_unread(&error);
        }
        if status.borrow().standing == Standing::Serving {
            break;
        }
        tokio::select! {
            () = sleep(TRY_AGAIN) => {}
            Ok(()) = inputs.pods.changed() => {}
            Ok(()) = inputs.claims.changed() => {}
        }
    }
    inputs.waiting.send_replace(String::new());
    Ok(())
}

/// What the kubelet has allocated stays shown while nothing is given out. An unreadable ledger can last for days, so
/// the book is read again and again: the kubelet's, not the daemon's, says then what is in use.
async fn tell_ids(
    handle: &Handle,
    ids: BTreeSet<DeviceId>,
    told: &mut Option<BTreeSet<DeviceId>>,
) -> Result<(), arbiter::Error> {
    if told.as_ref() != Some(&ids)
        && handle.tell(Observation::KubeletIds(ids.clone())).await? == Told::Taken
    {
        *told = Some(ids);
    }
    Ok(())
}

async fn take_over(
    inputs: &mut AdoptionInputs,
    handle: &Handle,
    devices: Result<Devices, checkpoint::Error>,
    voice: &mut Voice,
) -> Result<(), arbiter::Error> {
    match gather(inputs, handle, devices).await {
        Ok(adoption) => match handle
            .tell(Observation::Adoption(Box::new(adoption)))
            .await?
        {
            // Whether it serves is seen by the loop.
            Told::Taken => {}
            Told::NotTaken(_) => voice.say(&inputs.waiting, "the ledger can't be saved"),
        },
        Err(missing) => voice.say(&inputs.waiting, &missing.join("; ")),
    }
    Ok(())
}

/// All parts, or what is missing, each in words.
async fn gather(
    inputs: &mut AdoptionInputs,
    handle: &Handle,
    devices: Result<Devices, checkpoint::Error>,
) -> Result<Adoption, Vec<String>> {
    let mut missing = Vec::new();
    let minors = (inputs.minors)().filter(|units| pool_has(handle, units));
    if minors.is_none() {
        missing.push("NVML has not shown the GPUs yet".to_owned());
    }
    let pods = inputs.pods.borrow_and_update().clone();
    if pods.is_none() {
        missing.push(
            "the pods bound here are not known: neither the API server nor the kubelet's Pods API shows them"
                .to_owned(),
        );
    }
    let claims = inputs.claims.borrow_and_update().clone();
    if claims.is_none() {
        missing.push(
            "the claims allocated here are not known: the API server does not show them".to_owned(),
        );
    }
    let listing = inputs
        .resources
        .list()
        .await
        .map_err(|error| missing.push(error.to_string()))
        .ok();
    let devices = devices.map_err(|error| missing.push(chain(&error))).ok();
    let (Some(minors), Some(pods), Some(claims), Some(listing), Some(devices)) =
        (minors, pods, claims, listing, devices)
    else {
        return Err(missing);
    };
    let names = names_in_use(&inputs.cdi_minors, &claims, &minors);
    if !names.is_empty() {
        handle
            .tell(Observation::Names(names))
            .await
            .map_err(|error| vec![error.to_string()])?;
    }
    Ok(Adoption {
        checkpoint: checkpoint_for_pool(&devices, &minors, &pods, &listing),
        prepared: prepared(inputs).await,
        unprepared: (inputs.unprepared)(),
        listing,
        pods,
        claims,
    })
}

/// By which names the claims allocated here know their units: their CDI files have the minors. A unit that was replaced
/// has another name than a pool without a ledger gives it.
fn names_in_use(
    cdi: &BTreeMap<ClaimUid, BTreeMap<DeviceName, u32>>,
    claims: &Claims,
    minors: &[(UnitId, u32)],
) -> BTreeMap<DeviceName, UnitId> {
    let mut names = BTreeMap::new();
    for allocated in &claims.claims {
        let Some(shown) = cdi.get(&allocated.claim.uid) else {
            continue;
        };
        for device in &allocated.devices {
            let minor = shown.get(&device.device);
            let unit = minors.iter().find(|(_, known)| Some(known) == minor);
            if let Some((unit, _)) = unit {
                names.insert(device.device.clone(), unit.clone());
            }
        }
    }
    names
}

/// Whether the pool has been told of the units: what is adopted for a unit that it does not know would be lost.
fn pool_has(handle: &Handle, units: &[(UnitId, u32)]) -> bool {
    let status = handle.status();
    let status = status.borrow();
    units.iter().all(|(unit, _)| {
        let mut known = status.units.iter();
        known.any(|known| known.unit == *unit && known.presence == Presence::Present)
    })
}

/// The kubelet's entries, and one without ids for each pod that may have GPUs of which the kubelet's book says
/// nothing: a book that was lost, or a pod-resources that does not list ordinary init containers.
fn checkpoint_for_pool(
    devices: &Devices,
    minors: &[(UnitId, u32)],
    pods: &Pods,
    listing: &Listing,
) -> Vec<CheckpointedDevices> {
    let entries = devices.entries();
    let is_in_book = |bound: &BoundPod| entries.iter().any(|entry| *entry.pod() == bound.uid);
    let may_have = |bound: &BoundPod| match devices {
        Devices::Missing => true,
        // The book is written before the pod's status, and a pod without a status is yet to ask.
        Devices::Entries(_) => bound.started,
    };
    let unexplained = pods
        .pods
        .iter()
        .filter(|bound| bound.phase == PodPhase::Live && bound.may_own > 0)
        .filter(|bound| may_have(bound) && !is_in_book(bound) && !listing.counts(&bound.pod))
        .map(|bound| CheckpointedDevices {
            pod: bound.uid.clone(),
            ids: Vec::new(),
            response: CheckpointedResponse::Unknown,
        });
    let mut known = BTreeMap::new();
    entries
        .iter()
        .filter_map(|entry| only_new(entry.for_pool(minors), &mut known))
        .chain(unexplained)
        .collect()
}

/// What earlier containers of each pod have.
type Known = BTreeMap<PodUid, (BTreeSet<DeviceId>, BTreeSet<UnitId>)>;

/// An entry without what an earlier container of its pod has too: app containers take over the ids of init containers.
fn only_new(mut entry: CheckpointedDevices, known: &mut Known) -> Option<CheckpointedDevices> {
    let CheckpointedResponse::Units(units) = &mut entry.response else {
        return Some(entry);
    };
    let (known_ids, known_units) = known.entry(entry.pod.clone()).or_default();
    entry.ids.retain(|id| known_ids.insert(id.clone()));
    units.retain(|unit| known_units.insert(unit.clone()));
    let repeats = entry.ids.is_empty() && units.is_empty();
    (!repeats).then_some(entry)
}

/// The claims that the kubelet or our CDI files name; `None` if one of the two does not say.
async fn prepared(inputs: &AdoptionInputs) -> Option<BTreeSet<ClaimUid>> {
    let by_kubelet = match checkpoint::read_claims(&inputs.kubelet_dir).await {
        Ok(claims) => claims,
        Err(error) => {
            warn!(
                error = chain(&error),
                "which claims the kubelet has prepared can't be read; every claim allocated here counts as prepared"
            );
            None
        }
    };
    let on_disk = inputs.cdi_claims.as_ref()?;
    let by_kubelet = by_kubelet?.into_iter().map(|claim| claim.uid);
    Some(by_kubelet.chain(on_disk.iter().cloned()).collect())
}

/// Says what is waited for: when it changes, and once in a while.
#[derive(Debug)]
struct Voice {
    throttle: Throttle,
}

impl Default for Voice {
    fn default() -> Self {
        Self {
            throttle: Throttle::new(LOG_AGAIN),
        }
    }
}

impl Voice {
    fn say(&mut self, waiting: &watch::Sender<String>, missing: &str) {
        let changed = waiting.send_if_modified(|shown| {
            let changed = shown != missing;
            if changed {
                missing.clone_into(shown);
            }
            changed
        });
        if changed {
            self.throttle.reset();
        }
        if self.throttle.pass().is_some() {
            info!(
                missing,
                "the ledger is missing, and what runs here is not fully known yet; nothing is given out"
            );
        }
    }

    /// While the ledger can't be read nobody waits for this file, but the ids of running pods are hidden without it.
    fn say_unread(&mut self, error: &checkpoint::Error) {
        if self.throttle.pass().is_some() {
            warn!(
                error = chain(error),
                "which ids the kubelet has allocated can't be read; until it can, ids of running pods may be shown as unhealthy"
            );
        }
    }
}
