//! Rule 6: `NodePrepareResources` and its counterpart. A refusal is safe but slow, so the caller waits first.

use std::time::Duration;

use crate::adopt::GIVEN_BACK;
use crate::allocate::Patience;
use crate::hold::{Hold, HoldKind};
use crate::id::{ClaimRef, ClaimUid, DeviceName, UnitId};
use crate::ledger::{Access, Preparation, PreparedDevice, Side};
use crate::pool::{Pool, Standing, Transition};
use crate::refusal::{HolderKind, Refusal};
use crate::report::{EndCause, Report};
use crate::settings::Face;

/// A claim as read from the API for one Prepare call: UID checked, allocated, our driver's and our pool's results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareRequest {
    /// The claim.
    pub claim: ClaimRef,
    /// The devices of our pool that were allocated to it.
    pub devices: Vec<ClaimedDevice>,
    /// Uptime at which the call arrived.
    pub arrived: Duration,
    /// Whether the caller asks again. If not, a refusal is what the kubelet hears, and the claim may have to go.
    pub patience: Patience,
}

/// One device of a [`PrepareRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedDevice {
    /// The requests of the claim that it answers, without sub-request names.
    pub requests: Vec<String>,
    /// The pool in the allocation result.
    pub pool: String,
    /// The device name in the allocation result.
    pub device: DeviceName,
    /// Owner or onlooker.
    pub access: Access,
}

/// What became of a [`PrepareRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrepareOutcome {
    /// The claim has its units.
    Prepared(Preparation),
    /// Not now, but what stands in the way may go: ask again. Never the answer to a last call.
    Wait(Refusal),
    /// No.
    Refused(Refusal),
}

impl Transition {
    /// Gives a claim the units that it was allocated, all of them or none.
    pub fn prepare(&mut self, request: &PrepareRequest) -> PrepareOutcome {
        let outcome = match (self.try_prepare(request), request.patience) {
            (PrepareOutcome::Wait(refusal), Patience::LastCall) => PrepareOutcome::Refused(refusal),
            (outcome, Patience::Waits | Patience::LastCall) => outcome,
        };
        if let PrepareOutcome::Refused(refusal) = &outcome {
            self.note_refused(&request.claim, refusal);
        }
        outcome
    }

    fn try_prepare(&mut self, request: &PrepareRequest) -> PrepareOutcome {
        match self.pool.standing {
            Standing::Serving => {}
            Standing::WaitingForAdoption => {
                return PrepareOutcome::Refused(Refusal::WaitingForAdoption);
            }
            Standing::LedgerUnreadable => {
                return PrepareOutcome::Refused(Refusal::LedgerUnreadable);
            }
        }
        // A unit whose last process has just ended need not wait for the next look at pod-resources.
        self.free_foreign();
        let devices = match self.pool.resolve(request) {
            Ok(devices) => devices,
            Err(refusal) => return PrepareOutcome::Refused(refusal),
        };
        if let Some(refusal) = self.pool.rival_refusal()
            && !self.pool.has_prepared(&request.claim, &devices)
        {
            return PrepareOutcome::Refused(refusal);
        }
        for device in devices
            .iter()
            .filter(|device| device.access == Access::Owner)
        {
            if let Err(outcome) = self.pool.may_prepare(request, device) {
                self.promise(&request.claim, &devices);
                return outcome;
            }
        }
        if let Some(refusal) = self.pool.overlap_in(&request.claim, &devices) {
            return PrepareOutcome::Refused(refusal);
        }
        PrepareOutcome::Prepared(self.put_prepared(&request.claim, devices))
    }

    /// A claim that waits has been read from the API: its free units are reserved for it, and begin to move to its
    /// side, whether the watch of claims has told so already or not.
    fn promise(&mut self, claim: &ClaimRef, devices: &[PreparedDevice]) {
        if !self.pool.is_mobile() {
            return;
        }
        let owned = devices
            .iter()
            .filter(|device| device.access == Access::Owner);
        for device in owned {
            if self
                .pool
                .ledger
                .holds_touching(&device.unit)
                .next()
                .is_none()
            {
                let kind = HoldKind::Reserved {
                    claim: claim.clone(),
                };
                self.report(Report::Reserved {
                    unit: device.unit.clone(),
                    claim: claim.clone(),
                });
                let hold = Hold::exclusive(kind, self.now.wall);
                self.pool.ledger.take(&device.unit, hold);
                self.arrive(Face::Dra);
            }
        }
    }

    fn put_prepared(&mut self, claim: &ClaimRef, devices: Vec<PreparedDevice>) -> Preparation {
        let owned: Vec<UnitId> = devices
            .iter()
            .filter(|device| device.access == Access::Owner)
            .map(|device| device.unit.clone())
            .collect();
        let preparation = Preparation {
            claim: claim.clone(),
            devices,
        };
        let before = self
            .pool
            .ledger
            .prepared
            .insert(claim.uid.clone(), preparation.clone());
        self.pool.seen.causeless.remove(&claim.uid);
        self.note_prepared(&claim.uid);
        for unit in self.pool.units_of(&claim.uid) {
            if !owned.contains(&unit) {
                self.end(&unit, EndCause::ClaimEnded, |hold| {
                    hold.is_of_claim(&claim.uid)
                });
            }
        }
        for unit in &owned {
            let already = |hold: &Hold| {
                matches!(hold.kind, HoldKind::Prepared { .. }) && hold.is_of_claim(&claim.uid)
            };
            if self.pool.ledger.holds_on(unit).iter().any(already) {
                continue;
            }
            self.pool
                .ledger
                .drop_holds(unit, |hold| hold.is_of_claim(&claim.uid));
            let kind = HoldKind::Prepared {
                claim: claim.clone(),
            };
            self.pool
                .ledger
                .take(unit, Hold::exclusive(kind, self.now.wall));
            self.turn(unit, Face::Dra);
        }
        if before.as_ref() != Some(&preparation) {
            self.report(Report::Prepared {
                claim: claim.clone(),
                units: owned,
            });
        }
        preparation
    }

    /// `NodeUnprepareResources`: the claim gives back what was prepared. An unknown claim has nothing to give.
    ///
    /// While the API shows the claim still allocated to a unit, or can't be asked, the unit stays reserved for it.
    pub fn unprepare(&mut self, claim: &ClaimUid) {
        // What was listed until now is from before the answer to this, even if the claim was given back already.
        let listed = &mut self.pool.seen.listed_claims;
        listed.insert(claim.clone(), GIVEN_BACK);
        self.release_claim(claim, EndCause::Unprepared);
        self.steer();
    }

    pub(crate) fn release_claim(&mut self, claim: &ClaimUid, cause: EndCause) {
        let prepared = self.pool.ledger.prepared.remove(claim);
        self.pool.seen.causeless.remove(claim);
        let Some(prepared) = prepared else { return };
        for device in prepared
            .devices
            .iter()
            .filter(|device| device.access == Access::Owner)
        {
            let unit = &device.unit;
            let ours = |hold: &Hold| {
                matches!(hold.kind, HoldKind::Prepared { .. }) && hold.is_of_claim(claim)
            };
            if self.pool.is_allocated(claim, unit).unwrap_or(true) {
                for hold in self.pool.ledger.drop_holds(unit, ours) {
                    let reserved = HoldKind::Reserved {
                        claim: prepared.claim.clone(),
                    };
                    self.report(Report::Ended {
                        unit: unit.clone(),
                        cause,
                    });
                    self.pool
                        .ledger
                        .take(unit, Hold::exclusive(reserved, hold.since));
                }
            } else {
                self.end(unit, cause, ours);
            }
        }
    }
}

impl Pool {
    fn resolve(&self, request: &PrepareRequest) -> Result<Vec<PreparedDevice>, Refusal> {
        request
            .devices
            .iter()
            .map(|device| {
                let unit = self.ledger.unit_named(&device.device).ok_or_else(|| {
                    Refusal::UnknownDevice {
                        claim: request.claim.clone(),
                        device: device.device.clone(),
                    }
                })?;
                Ok(PreparedDevice {
                    requests: device.requests.clone(),
                    pool: device.pool.clone(),
                    device: device.device.clone(),
                    unit: unit.clone(),
                    access: device.access,
                })
            })
            .collect()
    }

    /// An allocation that names two units of the same hardware can never be served.
    fn overlap_in(&self, claim: &ClaimRef, devices: &[PreparedDevice]) -> Option<Refusal> {
        let owned: Vec<&PreparedDevice> = devices
            .iter()
            .filter(|device| device.access == Access::Owner)
            .collect();
        let overlapped = owned.iter().find(|device| {
            let mut overlapping = self.ledger.units.overlapping(&device.unit);
            overlapping.any(|part| owned.iter().any(|other| other.unit == *part))
        })?;
        Some(Refusal::UnitHeld {
            unit: overlapped.unit.clone(),
            device: overlapped.device.clone(),
            holder: HolderKind::AllocatedClaim,
            claim: claim.clone(),
        })
    }

    fn may_prepare(
        &self,
        request: &PrepareRequest,
        device: &PreparedDevice,
    ) -> Result<(), PrepareOutcome> {
        let unit = &device.unit;
        let claim = &request.claim;
        let prepared_before = |hold: &Hold| {
            matches!(hold.kind, HoldKind::Prepared { .. }) && hold.is_of_claim(&claim.uid)
        };
        if self.ledger.holds_on(unit).iter().any(prepared_before) {
            return Ok(());
        }
        if !self.is_present(unit) {
            return Err(PrepareOutcome::Wait(Refusal::UnitLost {
                unit: unit.clone(),
                device: device.device.clone(),
                claim: claim.clone(),
            }));
        }
        if let Some(fault) = self.fault_of(unit) {
            // It does not end within the wait.
            return Err(PrepareOutcome::Refused(Refusal::UnitFaulty {
                unit: unit.clone(),
                device: device.device.clone(),
                claim: claim.clone(),
                fault: fault.clone(),
            }));
        }
        if let Some(lack) = self.lack_of(unit) {
            // A module that is just being loaded is worth a wait.
            return Err(PrepareOutcome::Wait(Refusal::DeviceNodeMissing {
                unit: unit.clone(),
                lack: lack.clone(),
                claim: Some(claim.clone()),
            }));
        }
        if let Some((holder, hold)) = self
            .ledger
            .holds_touching(unit)
            .find(|(holder, hold)| *holder != unit || !hold.is_of_claim(&claim.uid))
        {
            return Err(self.in_the_way(request, device, holder, hold));
        }
        if let Some(used) = self.hardware(unit).find(|unit| !self.is_clean(unit)) {
            let busy = self.busy(used);
            return Err(PrepareOutcome::Wait(unit_busy(request, device, busy)));
        }
        let is_moving = match self.side_of(unit) {
            Some(Side::Dra) => false,
            Some(Side::Legacy) | None => self.is_mobile(),
            Some(Side::Rest | Side::Lowering | Side::Yielding | Side::Dark) => self.can_move(),
        };
        if is_moving || self.is_wanted_by_counted(request, unit) {
            return Err(PrepareOutcome::Wait(Refusal::CountedPodsFirst {
                unit: unit.clone(),
                device: device.device.clone(),
                claim: claim.clone(),
            }));
        }
        Ok(())
    }

    /// A hold of somebody else: worth waiting for, unless a counted pod took the unit while this claim waited.
    fn in_the_way(
        &self,
        request: &PrepareRequest,
        device: &PreparedDevice,
        holder: &UnitId,
        hold: &Hold,
    ) -> PrepareOutcome {
        if hold.face().is_none() && !self.is_clean(holder) {
            let busy = self.busy(holder);
            return PrepareOutcome::Wait(unit_busy(request, device, busy));
        }
        let refusal = Refusal::UnitHeld {
            unit: device.unit.clone(),
            device: device.device.clone(),
            holder: HolderKind::of(hold),
            claim: request.claim.clone(),
        };
        let taken_since = hold.face() == Some(Face::Legacy)
            && self
                .seen
                .answered
                .get(holder)
                .is_some_and(|answered| *answered >= request.arrived);
        if taken_since {
            PrepareOutcome::Refused(refusal)
        } else {
            PrepareOutcome::Wait(refusal)
        }
    }

    /// Whether counted pods in flight need the unit: it stands on their side, and what else is there is too little.
    fn is_wanted_by_counted(&self, request: &PrepareRequest, unit: &UnitId) -> bool {
        if self.side_of(unit) != Some(Side::Legacy) {
            return false;
        }
        let others = self
            .on_offer(Face::Legacy)
            .into_iter()
            .filter(|other| {
                !request
                    .devices
                    .iter()
                    .any(|device| self.ledger.unit_named(&device.device) == Some(*other))
            })
            .count();
        u32::try_from(others).unwrap_or(u32::MAX) < self.counted_in_flight()
    }

    pub(crate) fn units_of(&self, claim: &ClaimUid) -> Vec<UnitId> {
        self.ledger
            .holds
            .iter()
            .filter(|(_, holds)| holds.iter().any(|hold| hold.is_of_claim(claim)))
            .map(|(unit, _)| unit.clone())
            .collect()
    }
}

fn unit_busy(request: &PrepareRequest, device: &PreparedDevice, busy: Option<Vec<u32>>) -> Refusal {
    Refusal::UnitBusy {
        unit: device.unit.clone(),
        device: device.device.clone(),
        claim: request.claim.clone(),
        pids: busy.unwrap_or_default(),
    }
}
