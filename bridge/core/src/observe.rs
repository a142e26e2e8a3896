//! Rule 7: a hold ends for a named cause only.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::evidence::{Claims, ListedPod, Listing, Pods};
use crate::hold::{Hold, HoldKind};
use crate::id::{ClaimUid, DeviceId, PodRef, UnitId};
use crate::ledger::Preparation;
use crate::pool::{LINGER_COUNTED, Pool, Transition};
use crate::report::{EndCause, Report};

/// A bound pod must be missing from this many listings in a row: one listing is no atomic snapshot.
pub(crate) const UNLISTED_LIMIT: u32 = 2;
/// A prepared claim without any cause to be is ended after this time without an Unprepare.
pub(crate) const CAUSELESS_LIMIT: Duration = Duration::from_secs(60);

impl Pool {
    /// Whether pod-resources was listed since the unit was granted, in the same moment at the earliest.
    fn is_listed_since_answer(&self, unit: &UnitId) -> bool {
        let answered = self.seen.answered.get(unit);
        answered.is_none_or(|answered| self.seen.listed_at.is_some_and(|at| at >= *answered))
    }

    /// Prepared claims that neither the API nor pod-resources knows any more; `None` while one of them is not known.
    fn causeless_claims(&self) -> Option<BTreeSet<ClaimUid>> {
        let claims = self.seen.claims.as_ref()?;
        let listing = self.seen.listing.as_ref()?;
        let has_cause = |preparation: &Preparation| {
            let uid = &preparation.claim.uid;
            let mut devices = preparation.devices.iter();
            !claims.knows(uid)
                || devices.any(|device| claims.name(uid, &device.device))
                || listing.has_claim(&preparation.claim)
        };
        let prepared = self.ledger.prepared.iter();
        let causeless = prepared.filter(|(_, preparation)| !has_cause(preparation));
        Some(causeless.map(|(uid, _)| uid.clone()).collect())
    }
}

impl Transition {
    /// Takes an answer of pod-resources.
    pub fn observe_listing(&mut self, listing: Listing) {
        let silent = self.pool.says_nothing(&listing);
        for (unit, (id, pod)) in self.bound_units() {
            if self.pool.is_shown(&id, &pod, &listing) {
                self.pool.seen.unlisted.remove(&unit);
            } else if !silent {
                *self.pool.seen.unlisted.entry(unit).or_default() += 1;
            }
        }
        self.pool.note_listed_claims(&listing);
        self.pool.seen.listed_at = Some(self.now.uptime);
        self.pool.seen.listing = Some(listing);
        self.note_causeless();
        self.settle();
    }

    /// Takes a complete list of the pods bound here. `None`: the source is out of sync, so nothing ends by it.
    pub fn observe_pods(&mut self, pods: Option<Pods>) {
        self.pool.seen.pods = pods;
        self.settle();
    }

    /// Takes a complete list of the claims allocated here. `None`: the API can't be asked.
    pub fn observe_claims(&mut self, claims: Option<Claims>) {
        self.pool.seen.claims = claims;
        self.forget_losers();
        self.settle();
    }

    /// Takes the processes that the transition was begun with as a scan of their own: strangers on free units.
    pub fn observe_processes(&mut self) {
        // Before adoption nobody is known, so nobody is a stranger.
        if self.pool.standing == crate::pool::Standing::Serving {
            self.find_strangers();
        }
        self.settle();
    }

    /// Draws every conclusion that the last observations allow.
    pub(crate) fn settle(&mut self) {
        if self.pool.standing != crate::pool::Standing::Serving {
            return;
        }
        self.bind_listed();
        self.end_bound();
        // What one pod leaves may be another's as well, where NVIDIA's plugin had shared it out.
        self.bind_listed();
        self.take_listed_claims();
        self.end_granted();
        self.end_reserved();
        self.end_causeless();
        self.show_units();
        self.free_foreign();
        self.reserve_allocated();
        self.forget_lingering();
        self.judge_lost_races();
        self.steer();
    }

    /// Units whose process has gone, or is no passing one.
    fn forget_lingering(&mut self) {
        let now = self.now.uptime;
        let ledger = &self.pool.ledger;
        self.pool.seen.lingering.retain(|unit, since| {
            let foreign = ledger
                .holds_on(unit)
                .iter()
                .any(|hold| hold.face().is_none());
            foreign && now.saturating_sub(*since) < LINGER_COUNTED
        });
    }

    pub(crate) fn bound_units(&self) -> Vec<(UnitId, (DeviceId, PodRef))> {
        self.holds_where(|hold| match &hold.kind {
            HoldKind::Bound { id, pod } => Some((id.clone(), pod.clone())),
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        })
    }

    pub(crate) fn holds_where<T>(&self, pick: impl Fn(&Hold) -> Option<T>) -> Vec<(UnitId, T)> {
        self.pool
            .ledger
            .holds
            .iter()
            .flat_map(|(unit, holds)| holds.iter().map(move |hold| (unit, hold)))
            .filter_map(|(unit, hold)| pick(hold).map(|found| (unit.clone(), found)))
            .collect()
    }

    /// Granted ids that are listed are bound to their pod; a listed id without a hold is a stranger.
    pub(crate) fn bind_listed(&mut self) {
        let Some(listing) = self.pool.seen.listing.clone() else {
            return;
        };
        for listed in &listing.pods {
            let pod = PodRef {
                name: listed.pod.clone(),
                uid: self.pool.live_uid(&listed.pod),
            };
            for id in listed.ids() {
                self.bind(id, &pod, listed);
            }
        }
        let ids: BTreeSet<&DeviceId> = listing.pods.iter().flat_map(ListedPod::ids).collect();
        self.pool.seen.strangers.retain(|id| ids.contains(id));
    }

    fn bind(&mut self, id: &DeviceId, pod: &PodRef, listed: &ListedPod) {
        let Some((unit, hold)) = self.pool.ledger.carrier_of(id) else {
            self.take_stranger(id, pod, listed);
            return;
        };
        let unit = unit.clone();
        let bind = match &hold.kind {
            // A listing from before the answer names the pod that had the id before. One that was under way when the
            // call came does too, and is told after the answer; that pod has ended, or the id would not be given.
            HoldKind::Granted { .. } => {
                self.pool.is_listed_since_answer(&unit)
                    && self.pool.is_owed(listed, id)
                    && !self.pool.has_ended(pod)
            }
            // The UID is filled in once a pod list names it.
            HoldKind::Bound { pod: known, .. } if known.name == pod.name => {
                known.uid.is_none() && pod.uid.is_some()
            }
            // A listing that was overtaken by an Allocate may have bound it to the pod before.
            HoldKind::Bound { pod: known, .. } => {
                self.pool.has_ended(known) && self.pool.is_owed(listed, id)
            }
            HoldKind::Reserved { .. } | HoldKind::Prepared { .. } | HoldKind::Foreign { .. } => {
                false
            }
        };
        if bind {
            self.bind_to(id, unit, pod);
        }
    }

    fn bind_to(&mut self, id: &DeviceId, unit: UnitId, pod: &PodRef) {
        for hold in self.pool.ledger.holds.get_mut(&unit).into_iter().flatten() {
            if hold.device_id() == Some(id) {
                hold.kind = HoldKind::Bound {
                    id: id.clone(),
                    pod: pod.clone(),
                };
            }
        }
        self.pool.seen.unlisted.remove(&unit);
        self.report(Report::Bound {
            unit,
            pod: pod.clone(),
        });
    }

    /// The kubelet says that a pod has an id which no hold carries: another plugin gave it. If its unit is free, the pod
    /// has it.
    fn take_stranger(&mut self, id: &DeviceId, pod: &PodRef, listed: &ListedPod) {
        let Some(unit) = self.pool.unit_meant(id) else {
            return;
        };
        if !self.pool.is_owed(listed, id) || self.pool.has_ended(pod) {
            return;
        }
        let free = self
            .pool
            .ledger
            .holds_touching(&unit)
            .all(|(_, hold)| matches!(hold.kind, HoldKind::Reserved { .. }));
        if free {
            self.take_reserved(&unit);
            self.adopt_bound(pod, Some(id.clone()), &unit);
            self.report(Report::Bound {
                unit,
                pod: pod.clone(),
            });
        } else if self.pool.seen.strangers.insert(id.clone()) {
            self.report(Report::UnknownHolder {
                id: id.clone(),
                pod: pod.clone(),
            });
        }
    }

    fn end_bound(&mut self) {
        for (unit, (_, pod)) in self.bound_units() {
            let unlisted = self.pool.seen.unlisted.get(&unit).copied().unwrap_or(0);
            if unlisted >= UNLISTED_LIMIT && self.pool.has_ended(&pod) {
                self.end(&unit, EndCause::PodEnded, |hold| {
                    matches!(hold.kind, HoldKind::Bound { .. })
                });
            }
        }
    }

    fn end_granted(&mut self) {
        let (Some(listing), Some(listed_at)) = (&self.pool.seen.listing, self.pool.seen.listed_at)
        else {
            return;
        };
        if self.pool.can_be_owned(listing) {
            return;
        }
        let granted = self.holds_where(|hold| match &hold.kind {
            HoldKind::Granted { id } => Some(listing.owner_of(id).is_some()),
            HoldKind::Bound { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        });
        for (unit, is_listed) in granted {
            // A listing from before the ten seconds are over says nothing about what came into use within them.
            if !is_listed && self.pool.has_aged(&unit, listed_at) {
                self.end(&unit, EndCause::NeverUsed, |hold| {
                    matches!(hold.kind, HoldKind::Granted { .. })
                });
            }
        }
    }

    fn end_reserved(&mut self) {
        let reserved = self.holds_where(|hold| match &hold.kind {
            HoldKind::Reserved { claim } => Some(claim.uid.clone()),
            HoldKind::Granted { .. }
            | HoldKind::Bound { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        });
        for (unit, claim) in reserved {
            if self.pool.is_allocated(&claim, &unit) == Some(false) {
                self.end(&unit, EndCause::ClaimEnded, |hold| {
                    matches!(hold.kind, HoldKind::Reserved { .. }) && hold.is_of_claim(&claim)
                });
            }
        }
    }

    /// Ends prepared claims that have had no cause to be for a minute. It begins with a listing that came after the
    /// Prepare, and ends with another: a kubelet that does not answer shows nothing, and what was known before the
    /// claim was prepared says nothing about it.
    fn end_causeless(&mut self) {
        let Some(causeless) = self.pool.causeless_claims() else {
            self.pool.seen.causeless.clear();
            return;
        };
        let seen = &mut self.pool.seen;
        seen.causeless.retain(|uid, _| causeless.contains(uid));
        let due: Vec<ClaimUid> = seen
            .causeless
            .iter()
            .filter(|(_, since)| {
                let listed_at = seen.listed_at.unwrap_or_default();
                listed_at.saturating_sub(**since) >= CAUSELESS_LIMIT
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in due {
            let units = self.pool.units_of(&uid);
            if units.iter().all(|unit| self.pool.is_clean(unit)) {
                self.release_claim(&uid, EndCause::ClaimEnded);
            }
        }
    }

    /// Notes since when prepared claims have had no cause to be.
    fn note_causeless(&mut self) {
        for uid in self.pool.causeless_claims().into_iter().flatten() {
            let since = self.pool.seen.causeless.entry(uid);
            since.or_insert(self.now.uptime);
        }
    }

    fn reserve_allocated(&mut self) {
        let units: Vec<UnitId> = self.pool.ledger.units.keys().cloned().collect();
        for unit in units {
            self.reserve(&unit);
        }
    }
}
