//! ResourceClaims: reading one for a Prepare call, and knowing all that are allocated to this node's pool: by a watch
//! of all claims of the cluster ([`run`]), or by reading those that pods bound here name ([`run_bound`]).
//!
//! Kubernetes types of claims stop here. What leaves are `bridge_core` types.

mod bound;
mod teller;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bridge_core::{
    Access, AllocatedClaim, AllocatedDevice, Asked, ClaimRef, ClaimUid, ClaimedDevice, Claims,
    DeviceName, PodUid, TaintEffect, Toleration,
};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceRequestAllocationResult,
    DeviceToleration, ResourceClaim,
};
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use self::bound::{BoundInputs, run_bound};
use self::teller::Teller;
use super::opaque;
use super::{DRIVER, chain};
use crate::arbiter::{self, Handle};
use crate::follow::{self, Event, Lists};

/// How long the API server may take to show a claim. The kubelet gives the whole call 45 s and comes back after
/// some 80 s, so a short limit leaves time to wait for the unit itself.
pub const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Claims per page of a list. A page is dropped as soon as ours are picked out of it, so this bounds memory.
const PAGE_SIZE: u32 = 250;

/// Events that may wait for the arbiter; more of them wait in the connection.
const EVENT_BOUND: usize = 64;

/// The annotation of a claim that the scheduler makes for a count: k8s.io/api `resource/v1/types.go`,
/// `ExtendedResourceClaimAnnotation`.
const MADE_FOR_A_COUNT: &str = "resource.kubernetes.io/extended-resource-claim";

/// Why a claim can't be prepared, as far as the claim itself says. `Display` is for the pod's event.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A UID that is none.
    #[error(
        "the kubelet asked for claim {namespace}/{name} with an unusable UID: {source}. This is a fault of the kubelet or of the API server; see its log."
    )]
    InvalidUid {
        /// Namespace asked for.
        namespace: String,
        /// Name asked for.
        name: String,
        /// What is wrong with it.
        source: bridge_core::InvalidId,
    },
    /// Names that no claim has.
    #[error(
        "the kubelet asked for claim {claim}, which is no name that a claim can have. This is a fault of the kubelet or of the API server; see its log."
    )]
    InvalidName {
        /// The claim asked for.
        claim: ClaimRef,
    },
    /// The API server has no such claim.
    #[error(
        "claim {claim} does not exist any more, so it cannot be prepared. Delete the pod; if a controller made it, a new one gets a new claim."
    )]
    Gone {
        /// The claim asked for.
        claim: ClaimRef,
    },
    /// There is a claim of that name, with another UID.
    #[error(
        "claim {claim} was replaced: the pod was started for UID {}, and the API server has UID {found}. Delete the pod, so that it is scheduled with the new claim.",
        claim.uid
    )]
    Replaced {
        /// The claim asked for.
        claim: ClaimRef,
        /// UID of the one there is.
        found: String,
    },
    /// `status.allocation` is missing.
    #[error(
        "claim {claim} is not allocated, so there is nothing to prepare. Delete the pod, so that the scheduler allocates the claim anew."
    )]
    NotAllocated {
        /// The claim asked for.
        claim: ClaimRef,
    },
    /// No result is of our driver.
    #[error(
        "claim {claim} has no device of driver {DRIVER}, so this driver has nothing to prepare for it. Delete the pod and the claim, so that both are made anew."
    )]
    NothingOfOurs {
        /// The claim asked for.
        claim: ClaimRef,
    },
    /// A device of our driver in the pool of another node.
    #[error(
        "claim {claim} is allocated to device {device} of pool {pool}, but the pool of this node is {node}. Delete the pod and the claim, so that the scheduler allocates on the node where the pod runs."
    )]
    OtherPool {
        /// The claim asked for.
        claim: ClaimRef,
        /// Its device.
        device: String,
        /// The device's pool.
        pool: String,
        /// Our pool.
        node: String,
    },
    /// A device name that can't be one.
    #[error(
        "claim {claim} is allocated to a device that cannot exist: {source}. Delete the pod and the claim, so that the scheduler picks a device from the current ResourceSlice."
    )]
    InvalidDevice {
        /// The claim asked for.
        claim: ClaimRef,
        /// What is wrong with it.
        source: bridge_core::InvalidId,
    },
    /// A share of a device.
    #[error(
        "claim {claim} is allocated to share {share} of device {device}, and this node offers whole devices only. Delete the pod and the claim, so that the scheduler allocates from the current ResourceSlice."
    )]
    Share {
        /// The claim asked for.
        claim: ClaimRef,
        /// Its device.
        device: String,
        /// The share.
        share: String,
    },
    /// Configuration of our driver that is wrong or not served.
    #[error(
        "claim {claim} cannot be prepared as configured: {source}. Change spec.devices.config of the claim or its template, or spec.config of the DeviceClass, then delete the pod and the claim."
    )]
    Config {
        /// The claim asked for.
        claim: ClaimRef,
        /// What is wrong with it.
        source: opaque::Error,
    },
    /// The API server did not show the claim.
    #[error(
        "claim {claim} could not be read from the API server: {why}. The kubelet tries again by itself; if this stays, look at the API server, and at the rights of gpu-bridge (get resourceclaims.resource.k8s.io)."
    )]
    Unreadable {
        /// The claim asked for.
        claim: ClaimRef,
        /// The client's words.
        why: String,
    },
}

impl Error {
    /// The stable name of the reason, as [`bridge_core::Refusal::reason`] gives them.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::InvalidUid { .. } => "InvalidClaimUid",
            Self::InvalidName { .. } => "InvalidClaimName",
            Self::Gone { .. } => "ClaimGone",
            Self::Replaced { .. } => "ClaimReplaced",
            Self::NotAllocated { .. } => "ClaimNotAllocated",
            Self::NothingOfOurs { .. } => "NoDeviceOfThisDriver",
            Self::OtherPool { .. } => "OtherPool",
            Self::InvalidDevice { .. } => "InvalidDeviceName",
            Self::Share { .. } => "ShareNotServed",
            Self::Config { source, .. } => match source {
                opaque::Error::Invalid { .. }
                | opaque::Error::UnknownKind { .. }
                | opaque::Error::WrongKind { .. } => "ConfigInvalid",
                opaque::Error::NotServed { .. } => "ConfigNotServed",
            },
            Self::Unreadable { .. } => "ClaimUnreadable",
        }
    }

    /// Every reason, for metrics that start at zero and for the guide.
    pub const REASONS: [&'static str; 12] = [
        "InvalidClaimUid",
        "InvalidClaimName",
        "ClaimGone",
        "ClaimReplaced",
        "ClaimNotAllocated",
        "NoDeviceOfThisDriver",
        "OtherPool",
        "InvalidDeviceName",
        "ShareNotServed",
        "ConfigInvalid",
        "ConfigNotServed",
        "ClaimUnreadable",
    ];

    /// Whether it may be different the next time, without anybody changing the claim.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unreadable { .. })
    }
}

/// Reads a claim for Prepare and takes out of it what this node has to give.
///
/// # Errors
/// The claim can't be read, is not the one asked for, or asks for what this node can't serve.
pub(super) async fn read(
    client: &Client,
    node: &str,
    asked: &ClaimRef,
) -> Result<Vec<ClaimedDevice>, Error> {
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), &asked.namespace);
    let unreadable = |why| Error::Unreadable {
        claim: asked.clone(),
        why,
    };
    match timeout(READ_TIMEOUT, api.get_opt(&asked.name)).await {
        Err(_) => Err(unreadable(format!(
            "no answer within {} s",
            READ_TIMEOUT.as_secs()
        ))),
        Ok(Err(error)) => Err(unreadable(chain(&error))),
        Ok(Ok(None)) => Err(Error::Gone {
            claim: asked.clone(),
        }),
        Ok(Ok(Some(claim))) => verify(&claim, node, asked),
    }
}

/// The devices of our driver and pool in a claim's allocation, in its order.
fn verify(
    claim: &ResourceClaim,
    node: &str,
    asked: &ClaimRef,
) -> Result<Vec<ClaimedDevice>, Error> {
    let found = claim.metadata.uid.as_deref().unwrap_or("(none)");
    if found != asked.uid.as_str() {
        return Err(Error::Replaced {
            claim: asked.clone(),
            found: found.to_owned(),
        });
    }
    let allocation = allocation(claim).ok_or_else(|| Error::NotAllocated {
        claim: asked.clone(),
    })?;
    let results = of_our_driver(allocation);
    if results.is_empty() {
        return Err(Error::NothingOfOurs {
            claim: asked.clone(),
        });
    }
    let mut devices = Vec::new();
    for result in &results {
        put(&mut devices, device_of(result, node, asked)?);
    }
    check_config(allocation, &results).map_err(|source| Error::Config {
        claim: asked.clone(),
        source,
    })?;
    Ok(devices)
}

fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

fn of_our_driver(allocation: &AllocationResult) -> Vec<&DeviceRequestAllocationResult> {
    allocation
        .devices
        .iter()
        .flat_map(|devices| devices.results.iter().flatten())
        .filter(|result| result.driver == DRIVER)
        .collect()
}

/// What a claim owns of our driver's devices; who only looks on owns none.
pub(crate) fn owned(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let ours = allocation(claim).into_iter().flat_map(of_our_driver);
    ours.filter(|result| access_of(result) == Access::Owner)
}

fn access_of(result: &DeviceRequestAllocationResult) -> Access {
    if result.admin_access == Some(true) {
        Access::Admin
    } else {
        Access::Owner
    }
}

fn device_of(
    result: &DeviceRequestAllocationResult,
    node: &str,
    asked: &ClaimRef,
) -> Result<ClaimedDevice, Error> {
    if result.pool != node {
        return Err(Error::OtherPool {
            claim: asked.clone(),
            device: result.device.clone(),
            pool: result.pool.clone(),
            node: node.to_owned(),
        });
    }
    if let Some(share) = &result.share_id {
        return Err(Error::Share {
            claim: asked.clone(),
            device: result.device.clone(),
            share: share.clone(),
        });
    }
    let device = DeviceName::new(&result.device).map_err(|source| Error::InvalidDevice {
        claim: asked.clone(),
        source,
    })?;
    Ok(ClaimedDevice {
        requests: vec![opaque::base_request(&result.request).to_owned()],
        pool: result.pool.clone(),
        device,
        access: access_of(result),
    })
}

/// A device that answers two requests in the same role is one device of the answer.
fn put(devices: &mut Vec<ClaimedDevice>, device: ClaimedDevice) {
    let same = devices
        .iter_mut()
        .find(|known| known.device == device.device && known.access == device.access);
    match same {
        None => devices.push(device),
        Some(known) => {
            for request in device.requests {
                if !known.requests.contains(&request) {
                    known.requests.push(request);
                }
            }
        }
    }
}

fn check_config(
    allocation: &AllocationResult,
    results: &[&DeviceRequestAllocationResult],
) -> Result<(), opaque::Error> {
    let configs: Vec<_> = allocation
        .devices
        .iter()
        .flat_map(|devices| devices.config.iter().flatten())
        .filter_map(our_config)
        .collect();
    let requests: Vec<&str> = results
        .iter()
        .map(|result| result.request.as_str())
        .collect();
    opaque::check(&configs, &requests)
}

fn our_config(config: &DeviceAllocationConfiguration) -> Option<opaque::Config<'_>> {
    // Of what is not opaque parameters nobody knows which driver it is for, so it is not passed over.
    let opaque = config.opaque.as_ref();
    if opaque.is_some_and(|opaque| opaque.driver != DRIVER) {
        return None;
    }
    // `AllocationConfigSourceClass` in k8s.io/api resource/v1/types.go; what is not the class's is the claim's.
    let source = if config.source == "FromClass" {
        opaque::Source::Class
    } else {
        opaque::Source::Claim
    };
    let parameters: Option<&Value> = opaque.map(|opaque| &opaque.parameters.0);
    Some(opaque::Config {
        source,
        requests: config.requests.as_deref().unwrap_or_default(),
        parameters,
    })
}

/// What the watch keeps of a claim.
#[derive(Debug)]
struct Seen {
    uid: String,
    ours: Option<AllocatedClaim>,
}

impl Seen {
    fn of(claim: &ResourceClaim, node: &str) -> Self {
        Self {
            uid: claim.metadata.uid.clone().unwrap_or_default(),
            ours: allocated_here(claim, node),
        }
    }
}

fn allocated_here(claim: &ResourceClaim, node: &str) -> Option<AllocatedClaim> {
    let devices: Vec<_> = of_our_driver(allocation(claim)?)
        .into_iter()
        .filter(|result| result.pool == node)
        .filter_map(|result| {
            // A name that is no label is no device of this pool.
            let device = DeviceName::new(&result.device).ok()?;
            Some(AllocatedDevice {
                request: opaque::base_request(&result.request).to_owned(),
                pool: result.pool.clone(),
                device,
                access: access_of(result),
                tolerations: tolerations_of(result),
            })
        })
        .collect();
    if devices.is_empty() {
        return None;
    }
    let claim_ref = ClaimRef {
        uid: ClaimUid::new(claim.metadata.uid.clone()?).ok()?,
        namespace: claim.metadata.namespace.clone()?,
        name: claim.metadata.name.clone()?,
    };
    Some(AllocatedClaim {
        claim: claim_ref,
        devices,
        reserved_for: pods_reserved_for(claim),
        asked: asked(claim),
    })
}

/// The scheduler marks the claims that it makes itself.
fn asked(claim: &ResourceClaim) -> Asked {
    let annotations = claim.metadata.annotations.as_ref();
    if annotations.is_some_and(|all| all.contains_key(MADE_FOR_A_COUNT)) {
        Asked::ByCount
    } else {
        Asked::ByClaim
    }
}

fn tolerations_of(result: &DeviceRequestAllocationResult) -> Vec<Toleration> {
    let tolerations = result.tolerations.iter().flatten();
    tolerations.filter_map(toleration).collect()
}

/// A toleration; `None` for what tolerates no taint that we know, because of its operator or its effect.
fn toleration(given: &DeviceToleration) -> Option<Toleration> {
    let named = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let value = match given.operator.as_deref().unwrap_or_default() {
        // The server writes the default of the operator, `Equal`.
        "" | "Equal" => Some(given.value.clone().unwrap_or_default()),
        "Exists" => None,
        _ => return None,
    };
    let effect = match named(&given.effect).as_deref() {
        None => None,
        Some("NoSchedule") => Some(TaintEffect::NoSchedule),
        Some("NoExecute") => Some(TaintEffect::NoExecute),
        Some(_) => return None,
    };
    // What is negative counts as 0.
    let seconds = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    Some(Toleration {
        key: named(&given.key),
        value,
        effect,
        lasts: given.toleration_seconds.map(seconds),
    })
}

fn pods_reserved_for(claim: &ResourceClaim) -> BTreeSet<PodUid> {
    claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten())
        .filter(|consumer| {
            consumer.resource == "pods" && consumer.api_group.as_deref().unwrap_or("").is_empty()
        })
        .filter_map(|consumer| PodUid::new(&consumer.uid).ok())
        .collect()
}

/// Watches the claims of all namespaces, and tells the arbiter which are allocated to this node's pool whenever
/// that has changed; also puts it into `out`, where `None` stands for "not known".
///
/// Needs the right to get, list and watch `resourceclaims` in `resource.k8s.io`.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. The API server being away is no error: it is waited for.
pub async fn run(
    client: Client,
    node: String,
    handle: Handle,
    out: watch::Sender<Option<Claims>>,
    shutdown: CancellationToken,
) -> Result<(), arbiter::Error> {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let following = follow::run(
        Api::<ResourceClaim>::all(client),
        follow::Config {
            what: "resourceclaims",
            fields: None,
            page_size: PAGE_SIZE,
            lists: Lists::Once,
            closeness: follow::Closeness::Close,
            unknown_after: follow::UNKNOWN_AFTER,
            trouble: None,
        },
        move |claim| Seen::of(&claim, &node),
        |seen: &Seen| seen.ours.is_some(),
        events,
    );
    let mut book = Book {
        teller: Teller::new(handle, out),
        claims: BTreeMap::new(),
        completeness: Completeness::Unknown,
    };
    let telling = async {
        loop {
            tokio::select! {
                event = seen.recv() => match event {
                    Some(event) => book.take(event),
                    None => return Ok(()),
                },
                () = at(book.teller.retry_at) => {}
            }
            // What has arrived meanwhile goes into the same snapshot.
            while let Ok(event) = seen.try_recv() {
                book.take(event);
            }
            book.tell().await?;
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        () = following => Ok(()),
        told = telling => told,
    }
}

/// Waits until a time, or for ever.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// The claims as the watch shows them.
struct Book {
    teller: Teller,
    claims: BTreeMap<String, AllocatedClaim>,
    completeness: Completeness,
}

/// Whether the claims in the book are all there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Completeness {
    /// No list yet, or no watch for too long since.
    Unknown,
    /// Yes, give or take what the watch has not brought yet.
    Complete,
}

impl Book {
    fn take(&mut self, event: Event<Seen>) {
        match event {
            Event::Listed(all) => {
                self.claims = all
                    .into_iter()
                    .filter_map(|seen| Some((seen.uid, seen.ours?)))
                    .collect();
                self.completeness = Completeness::Complete;
            }
            Event::Applied(seen) => {
                match seen.ours {
                    Some(ours) => self.claims.insert(seen.uid, ours),
                    None => self.claims.remove(&seen.uid),
                };
            }
            Event::Deleted(seen) => {
                self.claims.remove(&seen.uid);
            }
            Event::Running => {}
            Event::Unknown => {
                warn!(
                    "which claims are allocated to this node is not known until the API server answers"
                );
                self.completeness = Completeness::Unknown;
            }
        }
    }

    /// Tells what has changed since the last time, if anything.
    async fn tell(&mut self) -> Result<(), arbiter::Error> {
        let now = match self.completeness {
            Completeness::Complete => Some(Claims::all(self.claims.values().cloned().collect())),
            Completeness::Unknown => None,
        };
        self.teller.tell(now).await
    }
}
