//! What the adapters saw. Whole snapshots, never deltas: what is absent from a snapshot was not there.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use crate::id::{ClaimName, ClaimRef, ClaimUid, DeviceId, DeviceName, PodName, PodUid, UnitId};
use crate::ledger::Access;
use crate::taint::Toleration;

/// A point in time, twice: for people and for decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Moment {
    /// Wall-clock time. It jumps; it is only stored and shown.
    pub wall: SystemTime,
    /// Monotonic time since the daemon started. Every wait is measured in it.
    pub uptime: Duration,
}

impl Default for Moment {
    fn default() -> Self {
        Self {
            wall: SystemTime::UNIX_EPOCH,
            uptime: Duration::ZERO,
        }
    }
}

/// One answer of the kubelet's `PodResourcesLister/List`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Listing {
    /// Every active pod, also those with nothing of ours: a pod that holds a unit and is active without its id is
    /// how a kubelet shows that it has lost its book.
    pub pods: Vec<ListedPod>,
}

/// A pod of a [`Listing`]. The kubelet gives no UID here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ListedPod {
    /// Namespace and name.
    pub pod: PodName,
    /// The ids of our resource in its containers.
    pub devices: Vec<ListedDevice>,
    /// The claims of our driver in its containers.
    pub claims: Vec<ListedClaim>,
}

/// A device id in a [`ListedPod`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ListedDevice {
    /// Container name.
    pub container: String,
    /// The kubelet's id.
    pub id: DeviceId,
}

/// A claim in a [`ListedPod`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ListedClaim {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// The device of our pool.
    pub device: DeviceName,
}

impl ListedPod {
    /// The different ids of our resource in its containers.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<&DeviceId> {
        self.devices.iter().map(|device| &device.id).collect()
    }
}

impl Listing {
    /// Whether a pod is active for the kubelet, with something of ours or without.
    #[must_use]
    pub fn shows(&self, pod: &PodName) -> bool {
        self.pods.iter().any(|listed| listed.pod == *pod)
    }

    /// The first pod that an id is listed under. The kubelet may list it under more than one.
    #[must_use]
    pub fn owner_of(&self, id: &DeviceId) -> Option<&PodName> {
        self.pods
            .iter()
            .find(|listed| listed.devices.iter().any(|device| device.id == *id))
            .map(|listed| &listed.pod)
    }

    /// Whether a pod is listed with devices of our resource.
    #[must_use]
    pub fn counts(&self, pod: &PodName) -> bool {
        self.pods
            .iter()
            .any(|listed| listed.pod == *pod && !listed.devices.is_empty())
    }

    /// Whether any listed pod has the claim.
    #[must_use]
    pub fn has_claim(&self, claim: &ClaimRef) -> bool {
        self.pods.iter().any(|listed| {
            listed
                .claims
                .iter()
                .any(|c| c.namespace == claim.namespace && c.name == claim.name)
        })
    }
}

impl Listing {
    /// Whether any listed pod has the claim with a device that is allocated to it.
    #[must_use]
    pub fn has_claim_on(&self, allocated: &AllocatedClaim) -> bool {
        let claim = &allocated.claim;
        let listed = self.pods.iter().flat_map(|listed| &listed.claims);
        let mut of_claim =
            listed.filter(|it| it.namespace == claim.namespace && it.name == claim.name);
        of_claim.any(|it| {
            allocated
                .devices
                .iter()
                .any(|device| device.device == it.device)
        })
    }
}

/// Where a list of pods comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodSource {
    /// The API server's, by `spec.nodeName`, from a watch in sync.
    Api,
    /// The kubelet's own Pods API (KEP-4188), after its initial sync.
    Kubelet,
}

/// The pods bound to this node. Only a complete list is evidence: an adapter that is not in sync sends none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pods {
    /// Who said so.
    pub source: PodSource,
    /// Every pod bound here.
    pub pods: Vec<BoundPod>,
}

/// Whether a pod may still run something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PodPhase {
    /// Anything but the two below, `Pending` included.
    Live,
    /// `Succeeded` or `Failed`.
    Terminal,
}

/// A pod bound to this node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BoundPod {
    /// Namespace and name.
    pub pod: PodName,
    /// `metadata.uid`.
    pub uid: PodUid,
    /// Whether it may still run.
    pub phase: PodPhase,
    /// The most ids of our resource that the kubelet may have given it: the larger of the sum over its
    /// containers and the largest init container, sidecars counted with both.
    pub may_own: u32,
    /// Whether any container of it has a status yet: then its devices were allocated.
    pub started: bool,
}

impl Pods {
    /// Whether a pod with this name and UID is terminal or gone.
    #[must_use]
    pub fn has_ended(&self, name: &PodName, uid: Option<&PodUid>) -> bool {
        !self.pods.iter().any(|bound| {
            bound.phase == PodPhase::Live
                && bound.pod == *name
                && uid.is_none_or(|uid| bound.uid == *uid)
        })
    }

    /// The live pod of a name.
    #[must_use]
    pub fn live(&self, name: &PodName) -> Option<&BoundPod> {
        self.pods
            .iter()
            .find(|bound| bound.phase == PodPhase::Live && bound.pod == *name)
    }
}

/// The claims that the live pods bound here name, by pod: those to read where claims are noticed at bind. A generated
/// claim has no name before it exists. Like [`Pods`], all of them or none.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct NamedClaims {
    /// By pod; a pod without claims may be left out.
    pub by_pod: BTreeMap<PodUid, BTreeSet<ClaimName>>,
}

/// The claims whose allocation names a device of this node's pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Claims {
    /// Each of them, as far as they are known.
    pub claims: Vec<AllocatedClaim>,
    /// Of which claims this says something.
    pub scope: ClaimScope,
}

/// Of which claims a [`Claims`] says something, if only that they are not allocated here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub enum ClaimScope {
    /// Of every claim there is: a watch in sync.
    #[default]
    All,
    /// Of those that were read one by one. Of any other nothing is known: it may be allocated here or not be there.
    Read(BTreeSet<ClaimUid>),
}

impl Claims {
    /// All that are allocated here, from a watch in sync.
    #[must_use]
    pub fn all(claims: Vec<AllocatedClaim>) -> Self {
        Self {
            claims,
            scope: ClaimScope::All,
        }
    }

    /// Whether this says anything of a claim.
    #[must_use]
    pub fn knows(&self, claim: &ClaimUid) -> bool {
        match &self.scope {
            ClaimScope::All => true,
            ClaimScope::Read(read) => read.contains(claim),
        }
    }

    /// Whether a claim's allocation names a device, in whatever role.
    #[must_use]
    pub fn name(&self, claim: &ClaimUid, device: &DeviceName) -> bool {
        self.claims
            .iter()
            .filter(|allocated| allocated.claim.uid == *claim)
            .any(|allocated| allocated.devices.iter().any(|d| d.device == *device))
    }
}

/// An allocated claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AllocatedClaim {
    /// The claim.
    pub claim: ClaimRef,
    /// The devices of our pool in `status.allocation`.
    pub devices: Vec<AllocatedDevice>,
    /// UIDs in `status.reservedFor` that are pods.
    pub reserved_for: BTreeSet<PodUid>,
    /// Who has asked for it, and how.
    pub asked: Asked,
}

/// How somebody has asked for what an allocated claim has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Asked {
    /// By a claim, or by a template for one.
    #[default]
    ByClaim,
    /// By a count in a pod, for which the scheduler has made the claim (KEP-5004).
    ByCount,
}

/// A device in an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AllocatedDevice {
    /// The request that it answers, without sub-request names.
    pub request: String,
    /// The pool in the allocation result.
    pub pool: String,
    /// Its name in the slice.
    pub device: DeviceName,
    /// Owner or onlooker.
    pub access: Access,
    /// What the request tolerated when it was allocated.
    pub tolerations: Vec<Toleration>,
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its id on the host.
    pub pid: u32,
    /// The pod that its cgroup names.
    pub pod: Option<PodUid>,
}

/// What NVML said about the processes of one unit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum UnitProcesses {
    /// These run on it; processes that the configuration ignores are left out.
    Known(Vec<Process>),
    /// NVML did not answer for this unit.
    Unknown,
}

/// The processes of every unit, at one moment. A unit that is absent counts as [`UnitProcesses::Unknown`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Processes {
    /// By unit.
    pub units: BTreeMap<UnitId, UnitProcesses>,
}

impl Processes {
    /// What is known of one unit.
    #[must_use]
    pub fn on(&self, unit: &UnitId) -> &UnitProcesses {
        self.units.get(unit).unwrap_or(&UnitProcesses::Unknown)
    }
}

/// What a call brings along that was read after it arrived.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Evidence {
    /// What pod-resources said about the ids of the call after it arrived; `None` if nobody asked yet. It need not be
    /// complete: pods that were not asked about are as in the last listing, so nothing but the call is judged by it.
    pub listing: Option<Listing>,
}
