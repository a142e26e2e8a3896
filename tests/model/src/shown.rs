//! What the daemon sees, in the types of the core.

use std::collections::BTreeSet;
use std::time::Duration;

use bridge_core::{
    Access, Adoption, AllocatedClaim, AllocatedDevice, Asked, BoundPod, CheckpointedDevices,
    CheckpointedResponse, ClaimedDevice, Claims, Gpu, Inventory, ListedClaim, ListedDevice,
    ListedPod, Listing, Patience, PodPhase, PodSource, Pods, PrepareRequest, Process, Processes,
    UnitProcesses,
};

use crate::names::{POOL, claim_ref, claim_uid, device, id, pod_name, pod_uid, unit};
use crate::node::Book;
use crate::scope::Scope;
use crate::set::Set;
use crate::view::{Runs, View};

/// A GPU of which nothing matters but that it is there.
pub(crate) fn gpu(number: usize) -> Gpu {
    Gpu {
        uuid: unit(number),
        pci_bus_id: String::new(),
        minor: u32::try_from(number).unwrap_or(u32::MAX),
        product_name: String::new(),
        brand: String::new(),
        architecture: String::new(),
        compute_capability: (0, 0),
        memory_bytes: 0,
        driver_version: String::new(),
        cuda_driver_version: (0, 0),
        numa_node: None,
        pcie_root: None,
        addressing_mode: None,
    }
}

pub(crate) fn listing(scope: &Scope, book: &Book) -> Listing {
    let listed = |(pod, ids): (usize, &Option<Set>)| {
        let ids = (*ids)?;
        let claim = scope.claim_of(pod);
        let prepared = claim.and_then(|claim| Some((claim, book.claims[claim]?)));
        Some(ListedPod {
            pod: pod_name(scope.name_of(pod)),
            devices: ids
                .iter()
                .map(|number| ListedDevice {
                    container: String::new(),
                    id: id(number),
                })
                .collect(),
            claims: prepared
                .into_iter()
                .map(|(claim, unit)| ListedClaim {
                    namespace: String::new(),
                    name: claim_ref(claim).name,
                    device: device(usize::from(unit)),
                })
                .collect(),
        })
    };
    Listing {
        pods: book.pods.iter().enumerate().filter_map(listed).collect(),
    }
}

/// The counted pods bound here.
pub(crate) fn pods(scope: &Scope, view: &View) -> Pods {
    let bound = |pod: usize| BoundPod {
        pod: pod_name(scope.name_of(pod)),
        uid: pod_uid(pod),
        phase: PodPhase::Live,
        may_own: u32::try_from(scope.counted[pod]).unwrap_or(u32::MAX),
        started: view.started.has(pod),
    };
    Pods {
        source: PodSource::Api,
        pods: view.live.iter().map(bound).collect(),
    }
}

pub(crate) fn claims(scope: &Scope, view: &View) -> Claims {
    let allocated = |claim: usize| {
        let unit = view.allocated[claim]?;
        Some(AllocatedClaim {
            claim: claim_ref(claim),
            devices: vec![AllocatedDevice {
                request: String::new(),
                pool: POOL.to_owned(),
                device: device(usize::from(unit)),
                access: Access::Owner,
                tolerations: Vec::new(),
            }],
            reserved_for: view.reserved[claim].iter().map(pod_uid).collect(),
            asked: Asked::ByClaim,
        })
    };
    Claims::all(scope.claims().filter_map(allocated).collect())
}

/// What NVML says: GPUs that are lost say nothing, and their processes run on.
pub(crate) fn processes(scope: &Scope, view: &View) -> Processes {
    let mut processes = Processes::default();
    for number in scope.units().iter() {
        let known = match view.runs[number] {
            Runs::Unknown => UnitProcesses::Unknown,
            Runs::Known { pods, stranger } => {
                let of_pods = pods.iter().map(|pod| Process {
                    pid: u32::try_from(pod).unwrap_or(u32::MAX),
                    pod: Some(pod_uid(pod)),
                });
                let stranger = stranger.then_some(Process {
                    pid: u32::MAX,
                    pod: None,
                });
                UnitProcesses::Known(of_pods.chain(stranger).collect())
            }
        };
        processes.units.insert(unit(number), known);
    }
    processes
}

/// A node on which nothing runs, whatever does.
pub(crate) fn no_processes(scope: &Scope) -> Processes {
    let idle = |number| (unit(number), UnitProcesses::Known(Vec::new()));
    Processes {
        units: scope.units().iter().map(idle).collect(),
    }
}

pub(crate) fn inventory(scope: &Scope, view: &View) -> Inventory {
    Inventory::Seen(scope.units().without(view.lost).iter().map(gpu).collect())
}

pub(crate) fn request(
    view: &View,
    claim: usize,
    arrived: Duration,
    patience: Patience,
) -> PrepareRequest {
    let allocated = view.allocated[claim];
    PrepareRequest {
        claim: claim_ref(claim),
        devices: allocated
            .into_iter()
            .map(|unit| ClaimedDevice {
                requests: Vec::new(),
                pool: POOL.to_owned(),
                device: device(usize::from(unit)),
                access: Access::Owner,
            })
            .collect(),
        arrived,
        patience,
    }
}

/// All that tells of the time before a ledger that was lost.
pub(crate) fn adoption(scope: &Scope, view: &View) -> Adoption {
    let booked = |pod: &usize| !view.kept[*pod].0.is_empty();
    let entry = |pod: usize| {
        let (ids, units) = view.kept[pod];
        CheckpointedDevices {
            pod: pod_uid(pod),
            ids: ids.iter().map(id).collect(),
            response: CheckpointedResponse::Units(units.iter().map(unit).collect()),
        }
    };
    Adoption {
        listing: listing(scope, &view.book),
        pods: pods(scope, view),
        checkpoint: scope.counted_pods().filter(booked).map(entry).collect(),
        claims: claims(scope, view),
        prepared: Some(view.named.iter().map(claim_uid).collect()),
        unprepared: view.early.iter().map(claim_uid).collect::<BTreeSet<_>>(),
    }
}
