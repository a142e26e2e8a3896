//! Rule 7: a hold ends for a named cause only. And rule 8: a unit changes hands only when nothing runs on it.

use std::time::Duration;

use crate::evidence::{Claims, Listing, Pods};
use crate::hold::{ForeignCause, Hold, HoldKind};
use crate::id::{ClaimUid, PodRef, UnitId};
use crate::pool::Transition;
use crate::report::{EndCause, Report};

/// A bound pod must be missing from this many listings in a row: one listing is no atomic snapshot.
const UNLISTED_LIMIT: u32 = 2;
/// A process must be seen on a free unit this many times in a row: one that is just ending is no stranger.
const SUSPECT_LIMIT: u32 = 2;
/// A prepared claim without any cause to be is ended after this time without an Unprepare.
const CAUSELESS_LIMIT: Duration = Duration::from_secs(60);

impl Transition {
    /// Takes an answer of pod-resources.
    pub fn observe_listing(&mut self, listing: Listing) {
        let bound: Vec<(UnitId, PodRef)> = self.bound_units();
        for (unit, pod) in bound {
            if listing.counts(&pod.name) {
                self.pool.seen.unlisted.remove(&unit);
            } else {
                *self.pool.seen.unlisted.entry(unit).or_default() += 1;
            }
        }
        self.pool.seen.listing = Some(listing);
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
        self.settle();
    }

    /// Takes the processes that the transition was begun with as a scan of their own: strangers on free units.
    pub fn observe_processes(&mut self) {
        self.find_strangers();
        self.settle();
    }

    /// Draws every conclusion that the last observations allow.
    pub(crate) fn settle(&mut self) {
        if self.pool.standing != crate::pool::Standing::Serving {
            return;
        }
        self.bind_listed();
        self.end_bound();
        self.end_granted();
        self.end_reserved();
        self.end_causeless();
        self.free_foreign();
        self.reserve_allocated();
        self.rebalance();
    }

    fn bound_units(&self) -> Vec<(UnitId, PodRef)> {
        self.holds_where(|hold| match &hold.kind {
            HoldKind::Bound { pod, .. } => Some(pod.clone()),
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        })
    }

    fn holds_where<T>(&self, pick: impl Fn(&Hold) -> Option<T>) -> Vec<(UnitId, T)> {
        self.pool
            .ledger
            .holds
            .iter()
            .flat_map(|(unit, holds)| holds.iter().map(move |hold| (unit, hold)))
            .filter_map(|(unit, hold)| pick(hold).map(|found| (unit.clone(), found)))
            .collect()
    }

    /// Granted ids that are listed are bound to their pod; a listed id without a hold is a stranger.
    fn bind_listed(&mut self) {
        let Some(listing) = self.pool.seen.listing.clone() else {
            return;
        };
        for listed in &listing.pods {
            let uid = self
                .pool
                .seen
                .pods
                .as_ref()
                .and_then(|pods| pods.live(&listed.pod))
                .map(|bound| bound.uid.clone());
            let pod = PodRef {
                name: listed.pod.clone(),
                uid,
            };
            for device in &listed.devices {
                self.bind(&device.id, &pod);
            }
        }
    }

    fn bind(&mut self, id: &crate::id::DeviceId, pod: &PodRef) {
        let Some(unit) = self.pool.ledger.unit_behind(id).cloned() else {
            return;
        };
        let holds = self.pool.ledger.holds.get_mut(&unit).into_iter().flatten();
        for hold in holds {
            let bind = match &hold.kind {
                HoldKind::Granted { id: carried } => carried == id,
                // The UID is filled in once a pod list names it.
                HoldKind::Bound {
                    id: carried,
                    pod: known,
                } => {
                    if carried == id
                        && known.name == pod.name
                        && known.uid.is_none()
                        && pod.uid.is_some()
                    {
                        hold.kind = HoldKind::Bound {
                            id: id.clone(),
                            pod: pod.clone(),
                        };
                    }
                    return;
                }
                HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. }
                | HoldKind::Foreign { .. } => false,
            };
            if bind {
                hold.kind = HoldKind::Bound {
                    id: id.clone(),
                    pod: pod.clone(),
                };
                self.report(Report::Bound {
                    unit,
                    pod: pod.clone(),
                });
                return;
            }
        }
        self.take_stranger(id, &unit, pod);
    }

    /// The kubelet says that a pod has an id which no hold carries. If its unit is free, the pod has it.
    fn take_stranger(&mut self, id: &crate::id::DeviceId, unit: &UnitId, pod: &PodRef) {
        let free = self
            .pool
            .ledger
            .holds_touching(unit)
            .all(|(_, hold)| matches!(hold.kind, HoldKind::Reserved { .. }));
        if free {
            self.pool.ledger.drop_holds(unit, |_| true);
            let kind = HoldKind::Bound {
                id: id.clone(),
                pod: pod.clone(),
            };
            self.pool
                .ledger
                .take(unit, Hold::exclusive(kind, self.now.wall));
            self.turn(unit, crate::settings::Face::Legacy);
            self.report(Report::Bound {
                unit: unit.clone(),
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
        for (unit, pod) in self.bound_units() {
            let unlisted = self.pool.seen.unlisted.get(&unit).copied().unwrap_or(0);
            let ended = self
                .pool
                .seen
                .pods
                .as_ref()
                .is_some_and(|pods| pods.has_ended(&pod.name, pod.uid.as_ref()));
            if unlisted >= UNLISTED_LIMIT && ended {
                self.end(&unit, EndCause::PodEnded, |hold| {
                    matches!(hold.kind, HoldKind::Bound { .. })
                });
            }
        }
    }

    fn end_granted(&mut self) {
        let Some(listing) = &self.pool.seen.listing else {
            return;
        };
        if self.pool.can_be_owned(listing) {
            return;
        }
        let granted =
            self.holds_where(|hold| matches!(hold.kind, HoldKind::Granted { .. }).then_some(()));
        for (unit, ()) in granted {
            if self.pool.has_aged(&unit, self.now.uptime) {
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

    fn end_causeless(&mut self) {
        let (Some(claims), Some(listing)) = (&self.pool.seen.claims, &self.pool.seen.listing)
        else {
            self.pool.seen.causeless.clear();
            return;
        };
        let (caused, causeless): (Vec<_>, Vec<_>) =
            self.pool
                .ledger
                .prepared
                .iter()
                .partition(|(uid, preparation)| {
                    let mut devices = preparation.devices.iter();
                    devices.any(|device| claims.name(uid, &device.device))
                        || listing.has_claim(&preparation.claim)
                });
        let caused: Vec<ClaimUid> = caused.into_iter().map(|(uid, _)| uid.clone()).collect();
        let causeless: Vec<ClaimUid> = causeless.into_iter().map(|(uid, _)| uid.clone()).collect();
        for uid in &caused {
            self.pool.seen.causeless.remove(uid);
        }
        for uid in causeless {
            let now = self.now.uptime;
            let since = *self.pool.seen.causeless.entry(uid.clone()).or_insert(now);
            let clean = self
                .pool
                .units_of(&uid)
                .iter()
                .all(|unit| self.pool.is_clean(unit));
            if clean && self.now.uptime.saturating_sub(since) >= CAUSELESS_LIMIT {
                self.release_claim(&uid, EndCause::ClaimEnded);
            }
        }
    }

    /// Foreign units that are shown to be free are free.
    pub(crate) fn free_foreign(&mut self) {
        let foreign = self.holds_where(|hold| match &hold.kind {
            HoldKind::Foreign { cause } => Some(cause.clone()),
            HoldKind::Granted { .. }
            | HoldKind::Bound { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. } => None,
        });
        for (unit, cause) in foreign {
            if !self.pool.is_clean(&unit) || self.is_listed(&unit) {
                continue;
            }
            let free = match &cause {
                ForeignCause::UnknownProcess | ForeignCause::Lingering { .. } => true,
                ForeignCause::UnknownUnitOf { pod } => self.has_left(pod),
            };
            if free {
                self.end(&unit, EndCause::ShownFree, |hold| hold.face().is_none());
            }
        }
    }

    fn is_listed(&self, unit: &UnitId) -> bool {
        let Some(listing) = &self.pool.seen.listing else {
            return true;
        };
        listing
            .pods
            .iter()
            .flat_map(|listed| &listed.devices)
            .any(|device| self.pool.ledger.unit_behind(&device.id) == Some(unit))
    }

    fn has_left(&self, pod: &PodRef) -> bool {
        let (Some(pods), Some(listing)) = (&self.pool.seen.pods, &self.pool.seen.listing) else {
            return false;
        };
        pods.has_ended(&pod.name, pod.uid.as_ref()) && !listing.counts(&pod.name)
    }

    fn reserve_allocated(&mut self) {
        let units: Vec<UnitId> = self.pool.ledger.units.keys().cloned().collect();
        for unit in units {
            self.reserve(&unit);
        }
    }

    fn find_strangers(&mut self) {
        let free: Vec<UnitId> = self
            .pool
            .ledger
            .units
            .keys()
            .filter(|unit| self.pool.ledger.holds_touching(unit).next().is_none())
            .cloned()
            .collect();
        for unit in &free {
            let busy = self.pool.busy(unit).is_some_and(|pids| !pids.is_empty());
            if !busy {
                self.pool.seen.suspects.remove(unit);
                continue;
            }
            let times = self.pool.seen.suspects.entry(unit.clone()).or_default();
            *times += 1;
            if *times >= SUSPECT_LIMIT {
                let kind = HoldKind::Foreign {
                    cause: ForeignCause::UnknownProcess,
                };
                self.pool
                    .ledger
                    .take(unit, Hold::exclusive(kind, self.now.wall));
                self.report(Report::ForeignFound { unit: unit.clone() });
            }
        }
        self.pool
            .seen
            .suspects
            .retain(|unit, _| free.contains(unit));
    }
}
