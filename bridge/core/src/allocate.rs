//! Rule 5: `Allocate`. A refusal is terminal for the pod, so it is the last resort.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::evidence::Evidence;
use crate::hold::{ForeignCause, Former, Hold, HoldKind};
use crate::id::{DeviceId, PodRef, UnitId};
use crate::ledger::Side;
use crate::listed::Owner;
use crate::pool::{Pool, Standing, Transition};
use crate::refusal::Refusal;
use crate::report::{EndCause, Report};
use crate::settings::Face;

/// A granted id that is not listed within this time can be ended, or asked for again as if it were in use
/// (rule 7). The kubelet lists a pod's devices as soon as it has stored the answer.
pub(crate) const GRANT_UNSEEN: Duration = Duration::from_secs(10);

/// One container's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocateRequest {
    /// The ids that the kubelet chose.
    pub ids: Vec<DeviceId>,
    /// Whether the caller can ask again.
    pub patience: Patience,
}

/// Whether a call can still wait for something better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// It asks again in a moment.
    Waits,
    /// Its time is up: decide now.
    LastCall,
}

/// A unit given for an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The kubelet's id.
    pub id: DeviceId,
    /// The unit behind it.
    pub unit: UnitId,
}

/// What became of an [`AllocateRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllocateOutcome {
    /// Every id has a unit, in the order of the request.
    Granted(Vec<Grant>),
    /// Ask pod-resources, then ask again with the answer as evidence. Nothing was changed.
    NeedsListing,
    /// Nothing clean is free now, and a process may end any moment: ask again. Nothing was changed.
    Wait,
    /// No. Nothing was changed.
    Refused(Refusal),
}

/// What the ledger says about an id that the kubelet asks for.
enum Carried {
    /// No hold carries it.
    Not,
    /// It was granted just now, and nothing runs on it: the same question, the same answer.
    Again(UnitId),
    /// Its pod has ended, so the hold has.
    Ended(UnitId, EndCause),
    /// Its pod is still there, or may be: the kubelet has lost its book.
    InUse(UnitId, Owner),
    /// Its pod is not active for the kubelet any more, and the pod list does not say yet that it has ended.
    Leaving(UnitId),
    /// pod-resources must be asked first.
    Unclear,
}

impl Transition {
    /// Gives a unit for each id of a container, or refuses the container whole.
    pub fn allocate(&mut self, request: &AllocateRequest, evidence: &Evidence) -> AllocateOutcome {
        match self.pool.standing {
            Standing::Serving => {}
            Standing::WaitingForAdoption => {
                return AllocateOutcome::Refused(Refusal::WaitingForAdoption);
            }
            Standing::LedgerUnreadable => {
                return AllocateOutcome::Refused(Refusal::LedgerUnreadable);
            }
        }
        if let Some(refusal) = self.malformed(&request.ids) {
            return AllocateOutcome::Refused(refusal);
        }
        let mut draft = self.clone();
        draft.free_foreign();
        let granted = draft.allocate_all(request, evidence);
        match (granted, self.pool.rival_refusal()) {
            (Ok(grants), _) => {
                *self = draft;
                AllocateOutcome::Granted(grants)
            }
            (Err(AllocateOutcome::Refused(_)), Some(refusal)) => AllocateOutcome::Refused(refusal),
            (Err(outcome), _) => outcome,
        }
    }

    fn malformed(&self, ids: &[DeviceId]) -> Option<Refusal> {
        let mut seen = BTreeSet::new();
        for id in ids {
            if !seen.insert(id) {
                return Some(Refusal::RepeatedDeviceId { id: id.clone() });
            }
            if self.pool.ledger.unit_behind(id).is_none() {
                return Some(Refusal::UnknownDeviceId { id: id.to_string() });
            }
        }
        None
    }

    fn allocate_all(
        &mut self,
        request: &AllocateRequest,
        evidence: &Evidence,
    ) -> Result<Vec<Grant>, AllocateOutcome> {
        let mut grants = Vec::new();
        for id in &request.ids {
            // The other ids' units are not for this id: what the call has picked for them, or their own.
            let spoken_for: BTreeSet<UnitId> = request
                .ids
                .iter()
                .filter(|other| *other != id)
                .filter_map(|other| self.pool.ledger.unit_behind(other).cloned())
                .collect();
            let unit = self.allocate_one(id, &spoken_for, request.patience, evidence)?;
            grants.push(Grant {
                id: id.clone(),
                unit,
            });
        }
        Ok(grants)
    }

    fn allocate_one(
        &mut self,
        id: &DeviceId,
        spoken_for: &BTreeSet<UnitId>,
        patience: Patience,
        evidence: &Evidence,
    ) -> Result<UnitId, AllocateOutcome> {
        let mut leaving = None;
        match self.pool.carried(id, spoken_for, evidence, self.now.uptime) {
            Carried::Not => {}
            Carried::Again(unit) => {
                self.pool
                    .seen
                    .answered
                    .insert(unit.clone(), self.now.uptime);
                return Ok(unit);
            }
            Carried::Unclear => return Err(AllocateOutcome::NeedsListing),
            Carried::Ended(unit, cause) => self.end(&unit, cause, |h| h.device_id() == Some(id)),
            Carried::InUse(unit, owner) => {
                return self.substitute_lost(id, unit, owner, spoken_for, patience);
            }
            Carried::Leaving(unit) => leaving = Some(unit),
        }
        let own = self.pool.ledger.unit_behind(id).cloned();
        let leaves = leaving.is_some();
        if let Some(unit) = self.best_for(own.as_ref(), spoken_for, patience, leaves) {
            if let Some(leaving) = leaving {
                self.swap_id(&leaving, id, &unit);
            }
            return Ok(self.grant(id, &unit));
        }
        let may_become_free = leaving.is_some()
            || self.pool.any_busy(spoken_for)
            || self.pool.any_leaving(spoken_for);
        if patience == Patience::Waits && may_become_free {
            return Err(AllocateOutcome::Wait);
        }
        if let Some(unit) = leaving {
            // The kubelet gives an id again only when it has given up the pod that had it.
            self.end(&unit, EndCause::IdGivenAgain, |h| h.device_id() == Some(id));
            if let Some(unit) = self.pool.best_clean(Some(&unit), spoken_for) {
                return Ok(self.grant(id, &unit));
            }
        }
        let own = self.pool.ledger.unit_behind(id).cloned();
        let unit = self.take_busy(id, own.as_ref(), spoken_for)?;
        Ok(self.grant(id, &unit))
    }

    /// The best clean unit now. What belongs to claims, or is on its way to them, is worth a wait first, if a unit of
    /// the counted side is about to become free: a process ends within half a second as a rule, and a claim that
    /// loses its unit waits for the kubelet for more than a minute. `leaves`: the kubelet says so itself, by giving the
    /// unit's id again.
    fn best_for(
        &mut self,
        own: Option<&UnitId>,
        spoken_for: &BTreeSet<UnitId>,
        patience: Patience,
        leaves: bool,
    ) -> Option<UnitId> {
        if let Some(unit) = self.pool.best_counted(own, spoken_for) {
            return Some(unit);
        }
        match patience {
            Patience::Waits if leaves || self.pool.any_leaving(spoken_for) => return None,
            Patience::Waits => {}
            Patience::LastCall => {
                self.end_given_up(spoken_for);
                if let Some(unit) = self.pool.best_counted(own, spoken_for) {
                    return Some(unit);
                }
            }
        }
        self.pool.best_clean(own, spoken_for)
    }

    /// Ends the holds of pods that the pod list shows as ended and pod-resources has not listed once since: the
    /// kubelet has given up so many pods as it asks units for.
    fn end_given_up(&mut self, spoken_for: &BTreeSet<UnitId>) {
        for (unit, (_, pod)) in self.bound_units() {
            let unlisted = self.pool.seen.unlisted.contains_key(&unit);
            if unlisted && !spoken_for.contains(&unit) && self.pool.has_surely_ended(&pod) {
                self.end(&unit, EndCause::PodEnded, |hold| {
                    matches!(hold.kind, HoldKind::Bound { .. })
                });
            }
        }
    }

    /// The pod that has the id is still there, so this call is for another pod: it gets another unit, and the two
    /// ids change places. Never the same unit again.
    fn substitute_lost(
        &mut self,
        id: &DeviceId,
        used: UnitId,
        owner: Owner,
        spoken_for: &BTreeSet<UnitId>,
        patience: Patience,
    ) -> Result<UnitId, AllocateOutcome> {
        let mut spoken_for = spoken_for.clone();
        spoken_for.insert(used.clone());
        let unit = match self.best_for(None, &spoken_for, patience, false) {
            Some(unit) => unit,
            // A process may end, and so may the pod: the pod list can be a moment behind the kubelet.
            None if patience == Patience::Waits => return Err(AllocateOutcome::Wait),
            None => self.take_busy(id, None, &spoken_for)?,
        };
        self.swap_id(&used, id, &unit);
        if let Owner::Known(pod) = &owner {
            // The kubelet takes the id that the hold has now for free, and no list will ever show whose it is.
            self.bind_granted(&used, pod);
        }
        match owner {
            Owner::Known(pod) | Owner::Perhaps(pod) => self.report(Report::KubeletLostItsBook {
                id: id.clone(),
                pod,
            }),
            Owner::Unknown => {}
        }
        Ok(self.grant(id, &unit))
    }

    /// Lets the hold on `used` carry the id that stands for `unit`, so that `id` is free to be given with `unit`.
    fn swap_id(&mut self, used: &UnitId, id: &DeviceId, unit: &UnitId) {
        let Some(other) = self.pool.ledger.id_before(unit) else {
            return;
        };
        for hold in self.pool.ledger.holds.get_mut(used).into_iter().flatten() {
            match &mut hold.kind {
                HoldKind::Granted { id: carried } | HoldKind::Bound { id: carried, .. }
                    if carried == id =>
                {
                    *carried = other.clone();
                }
                HoldKind::Granted { .. }
                | HoldKind::Bound { .. }
                | HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. }
                | HoldKind::Foreign { .. } => {}
            }
        }
    }

    fn bind_granted(&mut self, unit: &UnitId, pod: &PodRef) {
        for hold in self.pool.ledger.holds.get_mut(unit).into_iter().flatten() {
            if let HoldKind::Granted { id } = &hold.kind {
                hold.kind = HoldKind::Bound {
                    id: id.clone(),
                    pod: pod.clone(),
                };
            }
        }
    }

    /// The last resort: takes a unit on which a process of a counted pod still runs that the kubelet has given up.
    fn take_busy(
        &mut self,
        id: &DeviceId,
        own: Option<&UnitId>,
        spoken_for: &BTreeSet<UnitId>,
    ) -> Result<UnitId, AllocateOutcome> {
        let Some(unit) = self.pool.best_lingering(own, spoken_for) else {
            return Err(AllocateOutcome::Refused(self.pool.nothing_left_for(id)));
        };
        let hardware = self.pool.hardware(&unit);
        let pids: BTreeSet<u32> = hardware
            .filter_map(|unit| self.pool.busy(unit))
            .flatten()
            .collect();
        self.report(Report::HandedOverBusy {
            id: id.clone(),
            unit: unit.clone(),
            pids: pids.into_iter().collect(),
        });
        self.pool.ledger.clear(&unit);
        Ok(unit)
    }

    fn grant(&mut self, id: &DeviceId, unit: &UnitId) -> UnitId {
        self.take_reserved(unit);
        self.arrive(Face::Legacy);
        self.report(Report::Granted {
            id: id.clone(),
            unit: unit.clone(),
        });
        if id.named_unit() != unit {
            self.report(Report::Substituted {
                id: id.clone(),
                unit: unit.clone(),
            });
        }
        let hold = Hold::exclusive(HoldKind::Granted { id: id.clone() }, self.now.wall);
        let take = |transition: &mut Self| {
            transition.pool.ledger.take(unit, hold);
            transition.turn(unit, Face::Legacy);
        };
        // One that was about to leave takes the room of another below a lowered limit; without a limit there is room.
        match self.pool.settings.limits.of(Face::Legacy) {
            Some(_) => self.keeping_promises(take),
            None => take(self),
        }
        self.pool
            .seen
            .answered
            .insert(unit.clone(), self.now.uptime);
        unit.clone()
    }

    /// Ends the reservations of a unit, and of all that overlaps it, for a counted pod.
    pub(crate) fn take_reserved(&mut self, unit: &UnitId) {
        for (unit, hold) in self.pool.ledger.clear(unit) {
            if let HoldKind::Reserved { claim } = hold.kind {
                self.note_lost_race();
                self.report(Report::ClaimLostRace { claim, unit });
            }
        }
    }
}

impl Pool {
    fn carried(
        &self,
        id: &DeviceId,
        spoken_for: &BTreeSet<UnitId>,
        evidence: &Evidence,
        uptime: Duration,
    ) -> Carried {
        let Some((unit, hold)) = self.ledger.carrier_of(id) else {
            return Carried::Not;
        };
        let unit = unit.clone();
        let pod = match &hold.kind {
            HoldKind::Bound { pod, .. } => Some(pod.clone()),
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        };
        // Asked for a granted unit too: a kubelet that gave it to one pod may have forgotten it at once (`listed`).
        let Some(listing) = &evidence.listing else {
            return Carried::Unclear;
        };
        if let Some(owner) = self.still_has(id, &unit, pod.as_ref(), spoken_for, listing) {
            return Carried::InUse(unit, owner);
        }
        let answered_here = self.seen.answered.contains_key(&unit);
        let is_known = answered_here || self.seen.pods.is_some();
        if pod.is_none() && is_known && !self.has_aged(&unit, uptime) && self.is_clean(&unit) {
            return Carried::Again(unit);
        }
        match pod {
            Some(pod) if self.has_ended(&pod) => Carried::Ended(unit, EndCause::PodEnded),
            Some(_) => Carried::Leaving(unit),
            // A kubelet that lost its book while the API is away asks like this for what its pods have.
            None if self.seen.pods.is_none() => Carried::InUse(unit, Owner::Unknown),
            None if !self.can_be_owned(listing) => Carried::Ended(unit, EndCause::NeverUsed),
            None => Carried::Leaving(unit),
        }
    }

    /// Whether the last answer for a granted unit is older than [`GRANT_UNSEEN`].
    pub(crate) fn has_aged(&self, unit: &UnitId, uptime: Duration) -> bool {
        let answered = self.seen.answered.get(unit).copied().unwrap_or_default();
        uptime.saturating_sub(answered) >= GRANT_UNSEEN
    }

    /// The best unit of the counted side that nobody has and nothing runs on: the id's own wherever it stands, then
    /// one from the tail of the list.
    fn best_counted(&self, own: Option<&UnitId>, spoken_for: &BTreeSet<UnitId>) -> Option<UnitId> {
        let is_free = |unit: &UnitId| self.is_usable(unit, spoken_for) && self.is_unheld(unit);
        let own = own.filter(|unit| is_free(unit)).cloned();
        if self.has_rivals() {
            return own.filter(|_| self.seen.claims.is_some());
        }
        own.or_else(|| self.last_on(&[Side::Legacy, Side::Rest], is_free))
    }

    /// The best unit that nobody has and nothing runs on: one of the counted side, then one on the move, then one of
    /// the claims' side, then one that is only reserved. Substitutes come from the tail of the list.
    fn best_clean(&self, own: Option<&UnitId>, spoken_for: &BTreeSet<UnitId>) -> Option<UnitId> {
        if self.has_rivals() {
            return self.best_counted(own, spoken_for);
        }
        let is_usable = |unit: &UnitId| self.is_usable(unit, spoken_for);
        let is_free = |unit: &UnitId| is_usable(unit) && self.is_unheld(unit);
        let is_reserved = |unit: &UnitId| is_usable(unit) && self.is_only_reserved(unit);
        self.best_counted(own, spoken_for)
            .or_else(|| self.last_on(&[Side::Lowering, Side::Yielding, Side::Dark], is_free))
            // What the admin has excluded is for nobody who was not promised it.
            .or_else(|| self.last_on(&[Side::Dra], |it| is_free(it) && !self.is_excluded(it)))
            .or_else(|| own.filter(|unit| is_reserved(unit)).cloned())
            .or_else(|| self.last_on(&Side::ALL, |it| is_reserved(it) && !self.is_excluded(it)))
    }

    fn is_usable(&self, unit: &UnitId, spoken_for: &BTreeSet<UnitId>) -> bool {
        !spoken_for.contains(unit) && self.is_fit(unit) && self.is_idle(unit)
    }

    fn is_unheld(&self, unit: &UnitId) -> bool {
        self.ledger.holds_touching(unit).next().is_none()
            && self.allocated_to(unit).next().is_none()
    }

    /// The last unit of the list that is on one of these sides and fit.
    fn last_on(&self, sides: &[Side], is_fit: impl Fn(&UnitId) -> bool) -> Option<UnitId> {
        self.ledger
            .in_order()
            .into_iter()
            .rev()
            .map(|(unit, _)| unit)
            .filter(|unit| self.side_of(unit).is_some_and(|side| sides.contains(&side)))
            .find(|unit| is_fit(unit))
            .cloned()
    }

    /// Whether some unit of a counted pod is about to become free: the pod has ended, or only its process is left.
    fn any_leaving(&self, spoken_for: &BTreeSet<UnitId>) -> bool {
        let has_ended = |hold: &Hold| match &hold.kind {
            HoldKind::Bound { pod, .. } => self.has_ended(pod),
            HoldKind::Foreign {
                cause:
                    ForeignCause::Lingering {
                        former: Former::Counted(_),
                    },
            } => true,
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => false,
        };
        self.ledger
            .holds
            .iter()
            .filter(|(unit, _)| !spoken_for.contains(*unit) && self.is_fit(unit))
            .any(|(_, holds)| holds.iter().any(has_ended))
    }

    fn is_only_reserved(&self, unit: &UnitId) -> bool {
        self.ledger
            .holds_touching(unit)
            .all(|(_, hold)| matches!(hold.kind, HoldKind::Reserved { .. }))
    }

    /// Whether some unit might become clean within the wait: only a process stands in the way.
    fn any_busy(&self, spoken_for: &BTreeSet<UnitId>) -> bool {
        self.ledger
            .units
            .keys()
            .filter(|unit| !spoken_for.contains(*unit) && self.is_fit(unit))
            .any(|unit| {
                self.only_lingers(unit, |_| true)
                    || (self.is_only_reserved(unit) && !self.is_idle(unit))
            })
    }

    /// Whether nothing but a process of an ended holder of this kind keeps the unit.
    fn only_lingers(&self, unit: &UnitId, is_of_kind: impl Fn(&Former) -> bool) -> bool {
        let mut holds = self.ledger.holds_touching(unit).peekable();
        holds.peek().is_some()
            && holds.all(|(_, hold)| match &hold.kind {
                HoldKind::Foreign {
                    cause: ForeignCause::Lingering { former },
                } => is_of_kind(former),
                HoldKind::Granted { .. }
                | HoldKind::Bound { .. }
                | HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. }
                | HoldKind::Foreign { .. } => false,
            })
    }

    /// A unit on which only a process of a former counted pod stands in the way. Never a claim's, never a stranger's.
    fn best_lingering(
        &self,
        own: Option<&UnitId>,
        spoken_for: &BTreeSet<UnitId>,
    ) -> Option<UnitId> {
        if self.has_rivals() {
            return None;
        }
        let of_counted =
            |unit: &&UnitId| self.only_lingers(unit, |former| matches!(former, Former::Counted(_)));
        let usable = |unit: &&UnitId| !spoken_for.contains(*unit) && self.is_fit(unit);
        let tail = self
            .ledger
            .in_order()
            .into_iter()
            .rev()
            .map(|(unit, _)| unit);
        own.into_iter()
            .chain(tail)
            .filter(usable)
            .find(of_counted)
            .cloned()
    }

    /// Why a unit can't be given though NVML sees it: the host lacks what its container would need.
    fn lacks_a_node(&self, unit: &UnitId) -> Option<Refusal> {
        let lack = self.lack_of(unit).filter(|_| self.is_present(unit))?;
        Some(Refusal::DeviceNodeMissing {
            unit: unit.clone(),
            lack: lack.clone(),
            claim: None,
        })
    }

    /// What keeps the last free units from being given, if there are any, or that there are none.
    fn nothing_left_for(&self, id: &DeviceId) -> Refusal {
        let mut unheld = self.ledger.units.keys().filter(|unit| self.is_unheld(unit));
        let lacking = unheld.find_map(|unit| self.lacks_a_node(unit));
        lacking.unwrap_or_else(|| self.no_free_unit(id))
    }

    fn no_free_unit(&self, id: &DeviceId) -> Refusal {
        let usable = |unit: &&UnitId| self.is_fit(unit) && self.is_clean(unit);
        let foreign = self
            .ledger
            .holds
            .values()
            .filter(|holds| holds.iter().any(|hold| hold.face().is_none()))
            .count();
        let lost_or_silent = self
            .ledger
            .units
            .keys()
            .filter(|unit| self.ledger.holds_on(unit).is_empty() && !usable(unit))
            .count();
        Refusal::NoFreeUnit {
            id: id.clone(),
            units: self.ledger.units.len(),
            claims: self.held_through(Face::Dra),
            counted: self.held_through(Face::Legacy),
            unusable: foreign + lost_or_silent,
        }
    }
}
