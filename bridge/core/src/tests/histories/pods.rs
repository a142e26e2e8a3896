//! The truth about pods and claims, and what the kubelet and the API show of it.

use std::collections::{BTreeMap, BTreeSet};

use super::super::kit::{POOL, device, pod_name, tolerating};
use super::world::World;
use super::{Evicted, Late, PodOp, Role, Shape};
use crate::{
    Access, AllocatedClaim, AllocatedDevice, Asked, BoundPod, ClaimRef, ClaimUid, Claims, DeviceId,
    DeviceName, ListedClaim, ListedDevice, ListedPod, Listing, PodName, PodPhase, PodSource,
    PodUid, Pods, UnitId,
};

/// A pod in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Live,
    /// It has ended, and the API server hears of it with the next tick.
    LiveForNow,
    Terminal,
    Gone,
}

/// A pod in the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kubelet {
    Waiting,
    Active,
    Inactive,
}

/// The containers of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Containers {
    None,
    Running,
    /// The pod was force-deleted, and they run on.
    Orphaned,
}

/// A pod through its whole life.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) name: PodName,
    pub(super) uid: PodUid,
    /// `None`: its GPUs come by a claim.
    pub(super) shape: Option<Shape>,
    pub(super) claim: Option<usize>,
    pub(super) api: Api,
    pub(super) started: bool,
    pub(super) kubelet: Kubelet,
    pub(super) containers: Containers,
    /// Whether NVML shows its processes.
    pub(super) opened: bool,
    /// Whether the kubelet's book names it.
    pub(super) booked: bool,
    /// Ids of ordinary init containers and of the others, as the kubelet gave them.
    pub(super) init_ids: Vec<DeviceId>,
    pub(super) ids: Vec<DeviceId>,
    /// What its containers were given: the truth.
    pub(super) units: BTreeSet<UnitId>,
    /// What the kubelet's checkpoint has of each answer.
    pub(super) answers: Vec<(Vec<DeviceId>, Vec<UnitId>)>,
}

/// A claim through its whole life.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) claim: ClaimRef,
    pub(super) devices: Vec<(DeviceName, Access)>,
    /// Whether the API shows the allocation.
    pub(super) allocated: bool,
    pub(super) reserved_for: BTreeSet<PodUid>,
    /// It stays on devices that evict.
    pub(super) tolerates: bool,
    /// The kubelet has it in its state: it has called Prepare, with success or without.
    pub(super) in_state: bool,
    /// Prepare was answered with success.
    pub(super) prepared: bool,
}

impl Claim {
    pub(super) fn owned(&self) -> impl Iterator<Item = &DeviceName> {
        self.devices
            .iter()
            .filter(|(_, access)| *access == Access::Owner)
            .map(|(device, _)| device)
    }
}

impl Pod {
    pub(super) fn is_live(&self) -> bool {
        matches!(self.api, Api::Live | Api::LiveForNow)
    }

    /// Whether its containers may use its units.
    pub(super) fn occupies(&self) -> bool {
        match self.containers {
            Containers::None => false,
            Containers::Running => true,
            Containers::Orphaned => self.opened,
        }
    }

    fn waits_for_admission(&self) -> bool {
        self.is_live() && self.kubelet == Kubelet::Waiting && self.shape.is_some()
    }

    fn waits_for_its_claim(&self) -> bool {
        self.is_live()
            && self.claim.is_some()
            && self.kubelet != Kubelet::Inactive
            && self.containers == Containers::None
    }

    fn may_own(&self) -> u32 {
        match self.shape {
            None => 0,
            Some(Shape::Two) => 2,
            Some(Shape::One | Shape::InitOnly | Shape::InitAndApp | Shape::StatefulSet) => 1,
        }
    }
}

/// The place of the nth that fits, counted around.
pub(super) fn nth<T>(all: &[T], n: u8, fits: impl Fn(&T) -> bool) -> Option<usize> {
    let places: Vec<usize> = (0..all.len()).filter(|place| fits(&all[*place])).collect();
    (!places.is_empty()).then(|| places[usize::from(n) % places.len()])
}

impl World {
    pub(super) fn new_pod(&mut self, shape: Option<Shape>, claim: Option<usize>) -> usize {
        let number = self.pods.len();
        let again = "web-0";
        let taken = self
            .pods
            .iter()
            .any(|pod| pod.is_live() && pod.name.name == again);
        let name = if shape == Some(Shape::StatefulSet) && !taken {
            again.to_owned()
        } else {
            format!("pod-{number}")
        };
        self.pods.push(Pod {
            name: pod_name(&name),
            uid: PodUid::new(format!("uid-{number}")).expect("a number is a UID"),
            shape,
            claim,
            api: Api::Live,
            started: false,
            kubelet: Kubelet::Waiting,
            containers: Containers::None,
            opened: false,
            booked: false,
            init_ids: Vec::new(),
            ids: Vec::new(),
            units: BTreeSet::new(),
            answers: Vec::new(),
        });
        number
    }

    pub(super) fn new_claim(&mut self, pick: u8, more: bool, role: Role, evicted: Evicted) {
        let all: Vec<DeviceName> = (0..self.count)
            .map(|n| device(&format!("gpu-{n}")))
            .collect();
        let candidates: Vec<DeviceName> = match role {
            Role::OwnerByHand | Role::Admin => all,
            Role::Owner => self.allocatable(),
        };
        if candidates.is_empty() {
            return;
        }
        let access = match role {
            Role::Owner | Role::OwnerByHand => Access::Owner,
            Role::Admin => Access::Admin,
        };
        let take = if more { 2 } else { 1 };
        let start = usize::from(pick) % candidates.len();
        let picked = candidates
            .iter()
            .cycle()
            .skip(start)
            .take(take.min(candidates.len()));
        let devices = picked.map(|device| (device.clone(), access)).collect();
        let number = self.claims.len();
        self.claims.push(Claim {
            claim: ClaimRef {
                uid: ClaimUid::new(format!("uid-claim-{number}")).expect("a number is a UID"),
                namespace: "default".to_owned(),
                name: format!("claim-{number}"),
            },
            devices,
            allocated: true,
            reserved_for: BTreeSet::new(),
            tolerates: evicted == Evicted::Stays,
            in_state: false,
            prepared: false,
        });
        self.next_pod(number);
    }

    pub(super) fn next_pod(&mut self, claim: usize) {
        let pod = self.new_pod(None, Some(claim));
        let uid = self.pods[pod].uid.clone();
        self.claims[claim].reserved_for.insert(uid);
    }

    /// What the scheduler may give: untainted in the slice, and allocated to no claim.
    fn allocatable(&self) -> Vec<DeviceName> {
        let offers = self.daemon.pool.offers();
        let used: BTreeSet<&DeviceName> = self
            .claims
            .iter()
            .filter(|claim| claim.allocated)
            .flat_map(Claim::owned)
            .collect();
        offers
            .claims
            .into_iter()
            .flatten()
            .filter(|offer| offer.taint.is_none() && !used.contains(&offer.device))
            .map(|offer| offer.device)
            .collect()
    }

    /// Containers stop, the API hears of it, and the kubelet gives the claim back.
    pub(super) fn finish(&mut self, place: usize, api: Late, unprepare: Late) {
        let pod = &mut self.pods[place];
        pod.containers = Containers::None;
        pod.opened = false;
        pod.kubelet = Kubelet::Inactive;
        pod.api = match api {
            Late::AtOnce if self.api_up => Api::Terminal,
            Late::AtOnce | Late::Later => Api::LiveForNow,
        };
        self.leave_claim(place, unprepare);
        if api == Late::AtOnce {
            self.deallocate_unused();
        }
    }

    pub(super) fn force_delete(&mut self, place: usize) {
        let pod = &mut self.pods[place];
        pod.api = Api::Gone;
        pod.kubelet = Kubelet::Inactive;
        if pod.containers == Containers::Running {
            pod.containers = Containers::Orphaned;
        }
        let running = pod.containers == Containers::Orphaned;
        if let Some(claim) = pod.claim {
            let uid = pod.uid.clone();
            self.claims[claim].reserved_for.remove(&uid);
            self.deallocate_unused();
        }
        if !running {
            self.leave_claim(place, Late::AtOnce);
        }
    }

    pub(super) fn reap(&mut self, place: usize, unprepare: Late) {
        self.pods[place].containers = Containers::None;
        self.pods[place].opened = false;
        self.leave_claim(place, unprepare);
    }

    /// The kubelet unprepares with the last pod of a claim here; `Later`: it has lost the claim with its state.
    fn leave_claim(&mut self, place: usize, unprepare: Late) {
        let Some(claim) = self.pods[place].claim else {
            return;
        };
        let used = self.pods.iter().any(|pod| {
            pod.claim == Some(claim)
                && (pod.kubelet == Kubelet::Active || pod.containers != Containers::None)
        });
        if used || !self.claims[claim].in_state {
            return;
        }
        match unprepare {
            Late::AtOnce => self.unprepare(claim),
            Late::Later => {
                self.claims[claim].in_state = false;
                self.claims[claim].prepared = false;
            }
        }
    }

    pub(super) fn unprepare(&mut self, claim: usize) {
        self.claims[claim].in_state = false;
        self.claims[claim].prepared = false;
        let uid = self.claims[claim].claim.uid.clone();
        if self.daemon.pool.standing() != crate::Standing::Serving {
            self.unprepared.insert(uid.clone());
        }
        self.act(|t| t.unprepare(&uid));
    }

    /// The claim controller: drops pods that have ended, and allocations that nobody uses.
    pub(super) fn deallocate_unused(&mut self) {
        if !self.api_up {
            return;
        }
        let live: BTreeSet<PodUid> = self
            .pods
            .iter()
            .filter(|pod| pod.is_live())
            .map(|pod| pod.uid.clone())
            .collect();
        for claim in &mut self.claims {
            claim.reserved_for.retain(|uid| live.contains(uid));
            claim.allocated &= !claim.reserved_for.is_empty();
        }
    }

    // ---- What is shown ----

    pub(super) fn shown_pods(&self) -> Pods {
        let phase = |pod: &Pod| match pod.api {
            Api::Live | Api::LiveForNow => Some(PodPhase::Live),
            Api::Terminal => Some(PodPhase::Terminal),
            Api::Gone => None,
        };
        let bound = |pod: &Pod| {
            Some(BoundPod {
                pod: pod.name.clone(),
                uid: pod.uid.clone(),
                phase: phase(pod)?,
                may_own: pod.may_own(),
                started: pod.started,
            })
        };
        Pods {
            source: PodSource::Api,
            pods: self.pods.iter().filter_map(bound).collect(),
        }
    }

    pub(super) fn shown_claims(&self) -> Claims {
        let allocated = |claim: &Claim| AllocatedClaim {
            claim: claim.claim.clone(),
            devices: claim
                .devices
                .iter()
                .map(|(device, access)| AllocatedDevice {
                    request: "gpu".to_owned(),
                    pool: POOL.to_owned(),
                    device: device.clone(),
                    access: *access,
                    tolerations: claim.tolerates.then(tolerating).into_iter().collect(),
                })
                .collect(),
            reserved_for: claim.reserved_for.clone(),
            asked: Asked::ByClaim,
        };
        let claims = self.claims.iter().filter(|claim| claim.allocated);
        Claims::all(claims.map(allocated).collect())
    }

    pub(super) fn listing(&self) -> Listing {
        if !self.kubelet_ready {
            return Listing::default();
        }
        let active = self
            .pods
            .iter()
            .filter(|pod| pod.kubelet == Kubelet::Active);
        let listed = |pod: &Pod| ListedPod {
            pod: pod.name.clone(),
            devices: pod
                .ids
                .iter()
                .filter(|_| pod.booked)
                .map(|id| ListedDevice {
                    container: "main".to_owned(),
                    id: id.clone(),
                })
                .collect(),
            claims: pod
                .claim
                .iter()
                .map(|claim| &self.claims[*claim])
                .filter(|claim| claim.prepared)
                .flat_map(|claim| {
                    claim.devices.iter().map(|(device, _)| ListedClaim {
                        namespace: claim.claim.namespace.clone(),
                        name: claim.claim.name.clone(),
                        device: device.clone(),
                    })
                })
                .collect(),
        };
        Listing {
            pods: active.map(listed).collect(),
        }
    }

    /// Processes that NVML shows, by unit: who they belong to.
    pub(super) fn running(&self) -> BTreeMap<UnitId, BTreeSet<PodUid>> {
        let mut running: BTreeMap<UnitId, BTreeSet<PodUid>> = BTreeMap::new();
        for pod in self.pods.iter().filter(|pod| pod.opened) {
            for unit in &pod.units {
                running
                    .entry(unit.clone())
                    .or_default()
                    .insert(pod.uid.clone());
            }
        }
        running
    }

    pub(super) fn play_pod(&mut self, op: &PodOp) -> Result<(), String> {
        match op {
            PodOp::NewCounted(shape) => {
                if self.api_up {
                    self.new_pod(Some(*shape), None);
                }
            }
            PodOp::NewClaim {
                device,
                more,
                role,
                evicted,
            } => {
                if self.api_up {
                    self.new_claim(*device, *more, *role, *evicted);
                }
            }
            PodOp::NextPod { claim } => {
                let place = nth(&self.claims, *claim, |claim| claim.allocated);
                if let Some(place) = place.filter(|_| self.api_up) {
                    self.next_pod(place);
                }
            }
            PodOp::Admit { pod, ids, then } => {
                if let Some(place) = nth(&self.pods, *pod, Pod::waits_for_admission) {
                    return self.admit(place, *ids, *then);
                }
            }
            PodOp::Prepare { pod, then } => {
                if let Some(place) = nth(&self.pods, *pod, Pod::waits_for_its_claim) {
                    return self.prepare(place, *then);
                }
            }
            PodOp::OpenGpu { pod } => {
                let runs = |pod: &Pod| pod.containers == Containers::Running && !pod.opened;
                if let Some(place) = nth(&self.pods, *pod, runs) {
                    self.pods[place].opened = true;
                }
            }
            PodOp::Finish {
                pod,
                api,
                unprepare,
            } => {
                let live = |pod: &Pod| pod.api == Api::Live && pod.kubelet == Kubelet::Active;
                if let Some(place) = nth(&self.pods, *pod, live) {
                    self.finish(place, *api, *unprepare);
                }
            }
            PodOp::ForceDelete { pod } => {
                let place = nth(&self.pods, *pod, Pod::is_live);
                if let Some(place) = place.filter(|_| self.api_up) {
                    self.force_delete(place);
                }
            }
            PodOp::Reap { pod, unprepare } => {
                let orphaned = |pod: &Pod| pod.containers == Containers::Orphaned;
                if let Some(place) = nth(&self.pods, *pod, orphaned) {
                    self.reap(place, *unprepare);
                }
            }
            PodOp::Unprepare { claim } => {
                let unused: Vec<usize> = (0..self.claims.len())
                    .filter(|place| !self.runs_with(*place))
                    .collect();
                if let Some(place) = nth(&unused, *claim, |_| true) {
                    self.unprepare(unused[place]);
                }
            }
        }
        Ok(())
    }

    /// Whether containers run with a claim.
    fn runs_with(&self, claim: usize) -> bool {
        self.pods
            .iter()
            .any(|pod| pod.claim == Some(claim) && pod.containers != Containers::None)
    }
}
