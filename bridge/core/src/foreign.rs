//! Units in use by something that is no known holder: found, offered to nobody, and given back once shown free.

use crate::evidence::{ListedPod, UnitProcesses};
use crate::hold::{ForeignCause, Hold, HoldKind};
use crate::id::{DeviceId, PodRef, PodUid, UnitId};
use crate::pool::{Pool, Transition};
use crate::report::{EndCause, Report};

/// A process must be seen on a free unit this many times in a row: one that is just ending is no stranger.
pub(crate) const SUSPECT_LIMIT: u32 = 2;

impl Transition {
    /// Foreign units that are shown to be free are free.
    pub(crate) fn free_foreign(&mut self) {
        let all_explained = self
            .pool
            .pods_of_unknown_units()
            .iter()
            .all(|pod| self.pool.has_left(pod) || self.pool.units_missing(pod) == Some(0));
        let foreign = self.holds_where(|hold| match &hold.kind {
            HoldKind::Foreign { cause } => Some(cause.clone()),
            HoldKind::Granted { .. }
            | HoldKind::Bound { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. } => None,
        });
        for (unit, cause) in foreign {
            if !self.pool.is_clean(&unit) || self.pool.may_be_listed(&unit) {
                continue;
            }
            let listing = self.pool.seen.listing.is_some();
            let free = match &cause {
                // Its holder is known to have ended.
                ForeignCause::Lingering { .. } => true,
                ForeignCause::UnknownProcess => listing,
                // Any of these units may be any of these pods'.
                ForeignCause::UnknownUnitOf { .. } => listing && all_explained,
            };
            if free {
                self.end(&unit, EndCause::ShownFree, |hold| hold.face().is_none());
            }
        }
    }

    /// A pod whose units are unknown shows them by its processes: once it runs on as many as it may own.
    pub(crate) fn show_units(&mut self) {
        for pod in self.pool.pods_of_unknown_units() {
            let Some(uid) = pod.uid.clone() else { continue };
            let units = self.pool.unknown_units_with(&uid);
            if units.is_empty() || Some(units.len()) != self.pool.units_missing(&pod) {
                continue;
            }
            let ids = self.pool.ids_without_a_unit(&pod);
            for unit in &units {
                self.pool
                    .ledger
                    .drop_holds(unit, |hold| hold.face().is_none());
            }
            for (id, unit) in self.pool.pair(&ids, &units) {
                self.adopt_bound(&pod, Some(id), &unit);
            }
            for unit in units {
                self.adopt_bound(&pod, None, &unit);
                self.report(Report::Bound {
                    unit,
                    pod: pod.clone(),
                });
            }
        }
    }

    pub(crate) fn find_strangers(&mut self) {
        let is_free =
            |pool: &Pool, unit: &UnitId| pool.ledger.holds_touching(unit).next().is_none();
        let units: Vec<UnitId> = self.pool.ledger.units.keys().cloned().collect();
        for unit in units {
            let busy = self.pool.busy(&unit).is_some_and(|pids| !pids.is_empty());
            if !busy || !is_free(&self.pool, &unit) {
                self.pool.seen.suspects.remove(&unit);
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
                    .take(&unit, Hold::exclusive(kind, self.now.wall));
                self.report(Report::ForeignFound { unit });
            }
        }
    }
}

impl Pool {
    /// The pods that had some unit when the ledger was lost, and nothing says which.
    fn pods_of_unknown_units(&self) -> Vec<PodRef> {
        let mut pods: Vec<PodRef> = self
            .ledger
            .holds
            .values()
            .flatten()
            .filter_map(|hold| match &hold.kind {
                HoldKind::Foreign {
                    cause: ForeignCause::UnknownUnitOf { pod },
                } => Some(pod.clone()),
                HoldKind::Foreign { .. }
                | HoldKind::Granted { .. }
                | HoldKind::Bound { .. }
                | HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. } => None,
            })
            .collect();
        pods.sort();
        pods.dedup();
        pods
    }

    /// Units in question on which a process of the pod runs.
    fn unknown_units_with(&self, pod: &PodUid) -> Vec<UnitId> {
        let unknown = |hold: &Hold| {
            matches!(
                hold.kind,
                HoldKind::Foreign {
                    cause: ForeignCause::UnknownUnitOf { .. }
                }
            )
        };
        let runs_on = |unit: &UnitId| match self.seen.processes.on(unit) {
            UnitProcesses::Known(processes) => processes
                .iter()
                .any(|process| process.pod.as_ref() == Some(pod)),
            UnitProcesses::Unknown => false,
        };
        self.ledger
            .holds
            .iter()
            .filter(|(unit, holds)| holds.iter().any(unknown) && runs_on(unit))
            .map(|(unit, _)| unit.clone())
            .collect()
    }

    /// How many units are missing to what a live pod may own.
    fn units_missing(&self, pod: &PodRef) -> Option<usize> {
        let bound = self.seen.pods.as_ref()?.live(&pod.name)?;
        let may_own = usize::try_from(bound.may_own).unwrap_or(usize::MAX);
        (Some(&bound.uid) == pod.uid.as_ref())
            .then(|| may_own.saturating_sub(self.bound_to(&pod.name)))
    }

    /// What pod-resources says of a pod, if it says it of this one and not of another of the same name.
    fn listed_as(&self, pod: &PodRef) -> Option<&ListedPod> {
        let listing = self.seen.listing.as_ref()?;
        listing
            .pods
            .iter()
            .find(|listed| listed.pod == pod.name && self.live_uid(&listed.pod) == pod.uid)
    }

    /// The ids that a pod is listed with and that no hold carries.
    fn ids_without_a_unit(&self, pod: &PodRef) -> Vec<DeviceId> {
        self.listed_as(pod)
            .into_iter()
            .flat_map(ListedPod::ids)
            .filter(|id| self.ledger.carrier_of(id).is_none())
            .cloned()
            .collect()
    }

    pub(crate) fn has_left(&self, pod: &PodRef) -> bool {
        let Some(listing) = &self.seen.listing else {
            return false;
        };
        self.has_ended(pod) && !listing.counts(&pod.name)
    }

    /// Whether the last listing may mean this unit: it has a pod with too few units and the id that stands for it.
    fn may_be_listed(&self, unit: &UnitId) -> bool {
        let mut listed = self.seen.listing.iter().flat_map(|listing| &listing.pods);
        listed.any(|listed| {
            let behind = |id: &DeviceId| self.unit_meant(id).as_ref() == Some(unit);
            listed
                .ids()
                .into_iter()
                .any(|id| behind(id) && self.is_owed(listed, id))
        })
    }
}
