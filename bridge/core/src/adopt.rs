//! Rule 11: a lost ledger is not an empty one. What runs on the node is taken over before anything is given out.

use std::collections::BTreeSet;

use crate::evidence::{AllocatedClaim, Claims, Listing, Pods};
use crate::hold::{ForeignCause, Hold, HoldKind};
use crate::id::{ClaimUid, DeviceId, PodName, PodRef, PodUid, UnitId};
use crate::ledger::{Access, Preparation, PreparedDevice};
use crate::pool::{Standing, Transition};
use crate::report::Report;
use crate::settings::Face;

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

impl Transition {
    /// Remembers which ids the kubelet has allocated, while adoption is waited for: those stay Healthy.
    pub fn observe_kubelet_ids(&mut self, ids: BTreeSet<DeviceId>) {
        self.pool.seen.kubelet_ids = ids;
    }

    /// Takes over what runs on the node, and serves from now on. The inventory must have been seen before.
    ///
    /// Does nothing unless the pool waits for adoption.
    pub fn adopt(&mut self, adoption: Adoption) {
        if self.pool.standing != Standing::WaitingForAdoption {
            return;
        }
        let unknown = self.adopt_counted(&adoption);
        let claims = self.adopt_claims(&adoption);
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
        self.pool.seen.pods = Some(adoption.pods);
        self.pool.seen.claims = Some(adoption.claims);
        self.rebalance();
        self.settle();
    }

    /// Counted pods by what they were given. Returns the pods of which nothing says what they have.
    fn adopt_counted(&mut self, adoption: &Adoption) -> Vec<PodRef> {
        let mut unknown = Vec::new();
        let mut explained: BTreeSet<&DeviceId> = BTreeSet::new();
        for entry in &adoption.checkpoint {
            let Some(bound) = adoption
                .pods
                .pods
                .iter()
                .find(|bound| bound.uid == entry.pod)
            else {
                continue;
            };
            let pod = PodRef {
                name: bound.pod.clone(),
                uid: Some(bound.uid.clone()),
            };
            if adoption.pods.has_ended(&bound.pod, Some(&bound.uid))
                && !adoption.listing.counts(&bound.pod)
            {
                continue;
            }
            explained.extend(&entry.ids);
            match &entry.response {
                CheckpointedResponse::Units(units) => self.adopt_pairs(&pod, &entry.ids, units),
                CheckpointedResponse::Unknown => unknown.push(pod),
            }
        }
        for listed in &adoption.listing.pods {
            if listed
                .devices
                .iter()
                .any(|device| !explained.contains(&device.id))
            {
                unknown.push(PodRef {
                    name: listed.pod.clone(),
                    uid: live_uid(&adoption.pods, &listed.pod),
                });
            }
        }
        unknown
    }

    /// Pairs each id with its own unit where that was given, and the rest in order.
    fn adopt_pairs(&mut self, pod: &PodRef, ids: &[DeviceId], units: &[UnitId]) {
        let own: Vec<&DeviceId> = ids
            .iter()
            .filter(|id| units.contains(id.named_unit()))
            .collect();
        let mut other_ids = ids.iter().filter(|id| !own.contains(id));
        let other_units = units
            .iter()
            .filter(|unit| !own.iter().any(|id| id.named_unit() == *unit));
        let mut pairs: Vec<(DeviceId, UnitId)> = own
            .iter()
            .map(|id| ((*id).clone(), id.named_unit().clone()))
            .collect();
        for unit in other_units {
            let Some(id) = other_ids.next() else { break };
            pairs.push((id.clone(), unit.clone()));
        }
        for (id, unit) in pairs {
            let taken = !self.pool.ledger.units.contains_key(&unit)
                || self.pool.ledger.holds_touching(&unit).next().is_some()
                || self.pool.ledger.carrier_of(&id).is_some();
            if taken {
                self.report(Report::UnknownHolder {
                    id,
                    pod: pod.clone(),
                });
                continue;
            }
            let kind = HoldKind::Bound {
                id,
                pod: pod.clone(),
            };
            self.pool
                .ledger
                .take(&unit, Hold::exclusive(kind, self.now.wall));
            self.turn(&unit, Face::Legacy);
        }
    }

    fn adopt_claims(&mut self, adoption: &Adoption) -> usize {
        let mut adopted = 0;
        for allocated in &adoption.claims.claims {
            let uid = &allocated.claim.uid;
            let prepared = adoption
                .prepared
                .as_ref()
                .is_none_or(|named| named.contains(uid))
                || adoption.listing.has_claim(&allocated.claim);
            if prepared && !adoption.unprepared.contains(uid) && self.adopt_prepared(allocated) {
                adopted += 1;
            }
        }
        adopted
    }

    /// Takes a claim over as prepared, unless one of its units has another proven holder.
    fn adopt_prepared(&mut self, allocated: &AllocatedClaim) -> bool {
        let devices: Vec<PreparedDevice> = allocated
            .devices
            .iter()
            .filter_map(|device| {
                let unit = self.pool.ledger.unit_named(&device.device)?.clone();
                Some(PreparedDevice {
                    requests: vec![device.request.clone()],
                    pool: device.pool.clone(),
                    device: device.device.clone(),
                    unit,
                    access: device.access,
                })
            })
            .collect();
        let owned = || {
            devices
                .iter()
                .filter(|device| device.access == Access::Owner)
        };
        let conflict = owned().any(|device| {
            self.pool
                .ledger
                .holds_touching(&device.unit)
                .next()
                .is_some()
        });
        if conflict || devices.is_empty() {
            return false;
        }
        for unit in owned()
            .map(|device| device.unit.clone())
            .collect::<Vec<_>>()
        {
            let kind = HoldKind::Prepared {
                claim: allocated.claim.clone(),
            };
            self.pool
                .ledger
                .take(&unit, Hold::exclusive(kind, self.now.wall));
            self.turn(&unit, Face::Dra);
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

    /// While one counted pod's unit is unknown, every unit without a proven holder may be it.
    fn adopt_foreign(&mut self, unknown: &[PodRef]) -> usize {
        let free: Vec<UnitId> = self
            .pool
            .ledger
            .units
            .keys()
            .filter(|unit| self.pool.ledger.holds_touching(unit).next().is_none())
            .cloned()
            .collect();
        let mut foreign = 0;
        for unit in free {
            let cause = match unknown.first() {
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

fn live_uid(pods: &Pods, name: &PodName) -> Option<PodUid> {
    pods.live(name).map(|bound| bound.uid.clone())
}
