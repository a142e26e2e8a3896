//! Rule 11: a lost ledger is not an empty one. What runs on the node is taken over before anything is given out.

use std::collections::{BTreeMap, BTreeSet};

use crate::evidence::{AllocatedClaim, BoundPod, Claims, Listing, PodPhase, Pods, UnitProcesses};
use crate::hold::{ForeignCause, Hold, HoldKind};
use crate::id::{ClaimUid, DeviceId, DeviceName, PodName, PodRef, PodUid, UnitId};
use crate::ledger::{Access, Preparation, PreparedDevice, UnitRecord};
use crate::pool::{Pool, Standing, Transition};
use crate::report::Report;
use crate::settings::Face;

/// A claim that was not prepared here must be listed this many times in a row: the kubelet forgets one that was given
/// back only after the answer.
pub(crate) const LISTED_TWICE: i32 = 2;
/// After an Unprepare the count begins so far below: lists come 200 ms apart or more, and a kubelet on a busy machine may
/// list the claim for a second until it has taken in the answer.
pub(crate) const GIVEN_BACK: i32 = -4;

/// All that a node can tell about a time before the ledger. Every part was read successfully, or is said to be missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adoption {
    /// pod-resources.
    pub listing: Listing,
    /// The pods bound here.
    pub pods: Pods,
    /// The entries of our resource in the kubelet's `kubelet_internal_checkpoint`.
    pub checkpoint: Vec<CheckpointedDevices>,
    /// The claims allocated here.
    pub claims: Claims,
    /// Claims named by the kubelet's `dra_manager_state` or by our CDI files; `None` if either can't be read, and
    /// then every claim allocated here counts as prepared.
    pub prepared: Option<BTreeSet<ClaimUid>>,
    /// Claims that were unprepared while adoption was waited for.
    pub unprepared: BTreeSet<ClaimUid>,
}

/// One container's entry in the kubelet's checkpoint (`pkg/kubelet/cm/devicemanager/checkpoint`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointedDevices {
    /// The pod.
    pub pod: PodUid,
    /// The ids that the kubelet has allocated.
    pub ids: Vec<DeviceId>,
    /// What the device plugin answered then: this, not the id, says which GPU the container has.
    pub response: CheckpointedResponse,
}

/// The units in a stored `ContainerAllocateResponse`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointedResponse {
    /// These.
    Units(Vec<UnitId>),
    /// It names none that this node has.
    Unknown,
}

/// What says that a claim was prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// pod-resources lists it with its device, which the kubelet has from a successful Prepare.
    Listed,
    /// The kubelet's DRA state or a CDI file names it, or could not be read.
    OnDisk,
}

impl Transition {
    /// Remembers which ids the kubelet has allocated, while adoption is waited for: those stay Healthy.
    pub fn observe_kubelet_ids(&mut self, ids: BTreeSet<DeviceId>) {
        self.pool.seen.kubelet_ids = ids;
    }

    /// Gives units back the device names by which claims know them, as a CDI file or something like it shows, while
    /// adoption is waited for. A unit whose number another one needs gets another number (rule 12).
    pub fn observe_names(&mut self, names: &BTreeMap<DeviceName, UnitId>) {
        if self.pool.standing != Standing::WaitingForAdoption {
            return;
        }
        let mut numbers: BTreeMap<UnitId, u32> = BTreeMap::new();
        for (name, unit) in names {
            // A unit with two names keeps the first: the other one is a leftover.
            if let Some(number) = UnitRecord::number_in(name)
                && self.pool.ledger.units.contains_key(unit)
            {
                numbers.entry(unit.clone()).or_insert(number);
            }
        }
        let mut taken: BTreeSet<u32> = numbers.values().copied().collect();
        let others = self.pool.ledger.in_order().into_iter();
        let others: Vec<(UnitId, u32)> = others
            .filter(|(unit, _)| !numbers.contains_key(*unit))
            .map(|(unit, record)| (unit.clone(), record.number))
            .collect();
        for (unit, number) in others {
            let free = std::iter::once(number)
                .chain(0..=u32::MAX)
                .find(|number| taken.insert(*number));
            numbers.insert(unit, free.unwrap_or(number));
        }
        for (unit, record) in self.pool.ledger.units.iter_mut() {
            if let Some(number) = numbers.get(unit) {
                record.number = *number;
            }
        }
    }

    /// Takes over what runs on the node, and serves from now on.
    ///
    /// Does nothing unless the pool waits for adoption, and has seen an inventory: units that join later would be
    /// taken for free.
    pub fn adopt(&mut self, adoption: Adoption) {
        if self.pool.standing != Standing::WaitingForAdoption || self.pool.ledger.units.is_empty() {
            return;
        }
        let unknown = self.adopt_counted(&adoption);
        let claims = self.adopt_claims(&adoption, &unknown);
        let foreign = self.adopt_foreign(&unknown);
        let counted = self.pool.held_through(Face::Legacy);
        self.pool.standing = Standing::Serving;
        self.pool.seen.kubelet_ids.clear();
        self.report(Report::Adopted {
            counted,
            claims,
            foreign,
        });
        self.pool.seen.listing = Some(adoption.listing);
        self.pool.seen.listed_at = Some(self.now.uptime);
        self.pool.seen.pods = Some(adoption.pods);
        self.pool.seen.claims = Some(adoption.claims);
        self.steer();
        self.settle();
    }

    /// Counted pods by what they were given. Returns the pods of which nothing says what they have.
    fn adopt_counted(&mut self, adoption: &Adoption) -> Vec<PodRef> {
        let mut unknown = Vec::new();
        let mut given: Vec<(PodRef, &[DeviceId], &[UnitId])> = Vec::new();
        let mut explained: BTreeSet<(&PodName, &DeviceId)> = BTreeSet::new();
        for entry in &adoption.checkpoint {
            let Some(bound) = adoption.owner_of(entry) else {
                continue;
            };
            let pod = PodRef {
                name: bound.pod.clone(),
                uid: Some(bound.uid.clone()),
            };
            explained.extend(entry.ids.iter().map(|id| (&bound.pod, id)));
            match &entry.response {
                CheckpointedResponse::Units(units) if !units.is_empty() => {
                    given.push((pod, &entry.ids, units));
                }
                CheckpointedResponse::Units(_) | CheckpointedResponse::Unknown => unknown.push(pod),
            }
        }
        // First what is as it should be: an id with its own unit. What was substituted takes the ids that are left.
        for (pod, ids, units) in &given {
            let own = ids.iter().filter(|id| units.contains(id.named_unit()));
            for id in own
                .filter(|id| self.pool.ledger.lists(id))
                .cloned()
                .collect::<Vec<_>>()
            {
                let unit = id.named_unit().clone();
                self.adopt_bound(pod, Some(id), &unit);
            }
        }
        for (pod, ids, units) in &given {
            for (id, unit) in self.pool.pair(ids, units) {
                self.adopt_bound(pod, Some(id), &unit);
            }
            // More units than ids: whatever the reason, they are in use.
            for unit in *units {
                self.adopt_bound(pod, None, unit);
            }
        }
        for listed in &adoption.listing.pods {
            let unexplained = |id: &&DeviceId| !explained.contains(&(&listed.pod, *id));
            if listed.ids().iter().any(unexplained) {
                unknown.push(PodRef {
                    name: listed.pod.clone(),
                    uid: live_uid(&adoption.pods, &listed.pod),
                });
            }
        }
        // A kubelet whose checkpoint is lost too lists these without devices.
        let silent = adoption.pods.pods.iter().filter(|bound| {
            let checkpointed = adoption.checkpoint.iter().any(|e| e.pod == bound.uid);
            bound.phase == PodPhase::Live && bound.started && bound.may_own > 0 && !checkpointed
        });
        unknown.extend(silent.map(|bound| PodRef {
            name: bound.pod.clone(),
            uid: Some(bound.uid.clone()),
        }));
        unknown.sort();
        unknown.dedup();
        unknown
    }

    /// Binds a unit to a pod, under the id or, where another unit has that, under the one that stands for the unit.
    pub(crate) fn adopt_bound(&mut self, pod: &PodRef, id: Option<DeviceId>, unit: &UnitId) {
        let ledger = &self.pool.ledger;
        let own = ledger.holds_on(unit).iter().any(|hold| match &hold.kind {
            HoldKind::Bound { pod: holder, .. } => holder == pod,
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => false,
        });
        if own {
            return;
        }
        let usable = id
            .clone()
            .filter(|id| ledger.lists(id) && ledger.carrier_of(id).is_none());
        let stands_for = usable.or_else(|| ledger.id_before(unit));
        let is_held = ledger.holds_touching(unit).next().is_some();
        match stands_for {
            Some(id) if !is_held && ledger.units.contains_key(unit) => {
                let kind = HoldKind::Bound {
                    id,
                    pod: pod.clone(),
                };
                self.pool
                    .ledger
                    .take(unit, Hold::exclusive(kind, self.now.wall));
                self.turn(unit, Face::Legacy);
            }
            Some(_) | None => self.report(Report::UnknownHolder {
                id: id.unwrap_or_else(|| DeviceId::of_unit(unit.clone())),
                pod: pod.clone(),
            }),
        }
    }

    /// Claims by what pod-resources lists, then by what is on disk for them: a claim whose Prepare was refused is in
    /// the kubelet's state too, so that gives way to whoever may have the unit.
    fn adopt_claims(&mut self, adoption: &Adoption, unknown: &[PodRef]) -> usize {
        let (listed, others): (Vec<_>, Vec<_>) = adoption
            .claims
            .claims
            .iter()
            .partition(|allocated| adoption.listing.has_claim(&allocated.claim));
        let on_disk = others.into_iter().filter(|allocated| {
            let named = adoption.prepared.as_ref();
            unknown.is_empty() && named.is_none_or(|named| named.contains(&allocated.claim.uid))
        });
        let mut adopted = 0;
        let listed = listed.into_iter().map(|claim| (claim, Proof::Listed));
        for (allocated, proof) in listed.chain(on_disk.map(|claim| (claim, Proof::OnDisk))) {
            let given_back = adoption.unprepared.contains(&allocated.claim.uid);
            if !given_back && self.adopt_prepared(allocated, proof) {
                adopted += 1;
            }
        }
        adopted
    }

    /// Takes a claim over as prepared, on those of its units that have no other proven holder.
    fn adopt_prepared(&mut self, allocated: &AllocatedClaim, proof: Proof) -> bool {
        let mut devices = Vec::new();
        for device in &allocated.devices {
            let Some(unit) = self.pool.ledger.unit_named(&device.device).cloned() else {
                continue;
            };
            if device.access == Access::Owner && !self.adopt_claimed(allocated, &unit, proof) {
                continue;
            }
            devices.push(PreparedDevice {
                requests: vec![device.request.clone()],
                pool: device.pool.clone(),
                device: device.device.clone(),
                unit,
                access: device.access,
            });
        }
        if devices.is_empty() {
            return false;
        }
        self.pool.ledger.prepared.insert(
            allocated.claim.uid.clone(),
            Preparation {
                claim: allocated.claim.clone(),
                devices,
            },
        );
        true
    }

    fn adopt_claimed(&mut self, allocated: &AllocatedClaim, unit: &UnitId, proof: Proof) -> bool {
        let free = self.pool.is_clean(unit) || self.pool.runs_only(unit, &allocated.reserved_for);
        let ledger = &mut self.pool.ledger;
        let own = |hold: &Hold| hold.is_of_claim(&allocated.claim.uid);
        let prepared = |hold: &Hold| matches!(hold.kind, HoldKind::Prepared { .. }) && own(hold);
        if ledger.holds_on(unit).iter().any(prepared) {
            return true;
        }
        ledger.drop_holds(unit, own);
        let proven = free || proof == Proof::Listed;
        if !proven || ledger.holds_touching(unit).next().is_some() {
            return false;
        }
        let kind = HoldKind::Prepared {
            claim: allocated.claim.clone(),
        };
        ledger.take(unit, Hold::exclusive(kind, self.now.wall));
        self.turn(unit, Face::Dra);
        true
    }

    /// Claims that the kubelet lists with a device of this pool, and that were not prepared here: another driver did it,
    /// or a ledger from before was put back. The kubelet has a claim's device from a Prepare that succeeded.
    pub(crate) fn take_listed_claims(&mut self) {
        let Some(claims) = self.pool.seen.claims.clone() else {
            return;
        };
        for allocated in &claims.claims {
            let uid = &allocated.claim.uid;
            let times = self.pool.seen.listed_claims.get(uid);
            if times.is_none_or(|times| *times < LISTED_TWICE) {
                continue;
            }
            self.pool.seen.listed_claims.remove(uid);
            if self.adopt_prepared(allocated, Proof::Listed) {
                self.report(Report::ClaimTakenOver {
                    claim: allocated.claim.clone(),
                });
            }
        }
    }

    /// While one counted pod's unit is unknown, every unit without a proven holder may be it. The pods are spread
    /// over these units, so that none of them is forgotten.
    fn adopt_foreign(&mut self, unknown: &[PodRef]) -> usize {
        let units: Vec<UnitId> = self.pool.ledger.units.keys().cloned().collect();
        let mut pods = unknown.iter().cycle();
        let mut foreign = 0;
        for unit in units {
            if self.pool.ledger.holds_touching(&unit).next().is_some() {
                continue;
            }
            let cause = match pods.next() {
                Some(pod) => ForeignCause::UnknownUnitOf { pod: pod.clone() },
                None if !self.pool.is_clean(&unit) => ForeignCause::UnknownProcess,
                None => continue,
            };
            foreign += 1;
            let kind = HoldKind::Foreign { cause };
            self.pool
                .ledger
                .take(&unit, Hold::exclusive(kind, self.now.wall));
        }
        foreign
    }
}

impl Adoption {
    /// The pod of a checkpoint's entry, unless it has ended: the kubelet drops entries late.
    fn owner_of(&self, entry: &CheckpointedDevices) -> Option<&BoundPod> {
        let bound = self.pods.pods.iter().find(|bound| bound.uid == entry.pod)?;
        let ended = self.pods.has_ended(&bound.pod, Some(&bound.uid));
        (!ended || self.listing.counts(&bound.pod)).then_some(bound)
    }
}

impl Pool {
    /// Counts the listings in a row with claims that were not prepared here.
    pub(crate) fn note_listed_claims(&mut self, listing: &Listing) {
        let claims = self.seen.claims.iter().flat_map(|claims| &claims.claims);
        let unprepared = claims.filter(|it| !self.ledger.prepared.contains_key(&it.claim.uid));
        let listed: BTreeSet<ClaimUid> = unprepared
            .filter(|allocated| listing.has_claim_on(allocated))
            .map(|allocated| allocated.claim.uid.clone())
            .collect();
        let times = &mut self.seen.listed_claims;
        times.retain(|uid, _| listed.contains(uid));
        for uid in listed {
            *times.entry(uid).or_default() += 1;
        }
    }

    /// Whether every process on a unit is of one of these pods; no if NVML does not say.
    fn runs_only(&self, unit: &UnitId, pods: &BTreeSet<PodUid>) -> bool {
        match self.seen.processes.on(unit) {
            UnitProcesses::Unknown => false,
            UnitProcesses::Known(processes) => processes
                .iter()
                .all(|process| process.pod.as_ref().is_some_and(|pod| pods.contains(pod))),
        }
    }

    /// Pairs ids with units: each id with its own unit where that is among them, the rest in order.
    pub(crate) fn pair(&self, ids: &[DeviceId], units: &[UnitId]) -> Vec<(DeviceId, UnitId)> {
        let (own, other): (Vec<&DeviceId>, Vec<&DeviceId>) = ids
            .iter()
            .partition(|id| self.ledger.lists(id) && units.contains(id.named_unit()));
        let rest = units
            .iter()
            .filter(|unit| !own.iter().any(|id| id.named_unit() == *unit));
        let substituted = other.into_iter().zip(rest);
        own.iter()
            .map(|id| ((*id).clone(), id.named_unit().clone()))
            .chain(substituted.map(|(id, unit)| (id.clone(), unit.clone())))
            .collect()
    }
}

fn live_uid(pods: &Pods, name: &PodName) -> Option<PodUid> {
    pods.live(name).map(|bound| bound.uid.clone())
}
