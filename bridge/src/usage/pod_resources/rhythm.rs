//! When pod-resources is asked for its list, and which answers are news to the pool.
//!
//! What ends or begins is told by the pods bound here and by the pool's own status, so the list is asked for when those
//! change. Where nothing changes and the list has every holder, there is nothing for it to say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bridge_core::{Hold, HoldKind, Listing, Pods, Standing, Status, UnitId};
use tokio::time::Instant;

use crate::ticks;

/// Time between two Lists while anything is held.
const PERIOD_HELD: Duration = Duration::from_secs(1);
/// Time between two Lists while nothing is, and where all holders are listed and nothing has changed for [`CALM_AFTER`].
const PERIOD_IDLE: Duration = Duration::from_secs(10);
/// Time between two Lists while a pod is expected to show up with an id that was just given out.
const PERIOD_EXPECTING: Duration = Duration::from_millis(200);
/// For so long after a grant its pod is expected: the kubelet stores the answer at once, and an ordinary init
/// container never shows up.
const EXPECTING: Duration = Duration::from_secs(2);
/// Time between two Lists while a pod that has ended still holds a unit: two Lists without it end the hold.
const PERIOD_ENDING: Duration = Duration::from_millis(200);
/// The same for the first two, which are enough as a rule.
const PERIOD_ENDING_FIRST: Duration = Duration::from_millis(100);
/// For so long after a pod has ended the kubelet is expected not to list it any more. After a force delete it may list
/// it for the whole grace period.
const ENDING: Duration = Duration::from_secs(5);
/// After so long without a change nothing is on its way.
const CALM_AFTER: Duration = Duration::from_secs(10);
/// So often the pool is told the same: what must show in two lists in a row has been shown then.
const TOLD_ENOUGH: u32 = 2;

/// What is remembered from List to List.
#[derive(Debug)]
pub(super) struct Rhythm {
    /// Granted units, and until when their pods are expected.
    expected: BTreeMap<UnitId, Instant>,
    /// Units of pods that have ended, and until when the kubelet is expected to unlist them.
    ending: BTreeMap<UnitId, Instant>,
    /// The last answer; `None` while the kubelet gives none.
    last: Option<Listing>,
    /// When the pool, the pods or the answer changed last.
    changed: Instant,
    /// How often the pool has taken the last answer since then.
    told: u32,
}

impl Default for Rhythm {
    fn default() -> Self {
        Self {
            expected: BTreeMap::new(),
            ending: BTreeMap::new(),
            last: None,
            changed: Instant::now(),
            told: 0,
        }
    }
}

impl Rhythm {
    /// The pool or the pods have changed.
    pub(super) fn has_changed(&mut self) {
        self.changed = Instant::now();
        self.told = 0;
    }

    /// The kubelet has answered, or has not.
    pub(super) fn has_answered(&mut self, answer: Option<&Listing>) {
        if answer.is_none() || self.last.as_ref() != answer {
            self.last = answer.cloned();
            self.has_changed();
        }
    }

    /// The pool has taken the last answer, or could not save what follows from it.
    pub(super) fn was_told(&mut self, taken: bool) {
        if taken {
            self.told = self.told.saturating_add(1);
        } else {
            self.has_changed();
        }
    }

    /// Whether the pool has to hear the last answer, though it be the same as before.
    pub(super) fn is_news(&self, status: &Status, pods: Option<&Pods>) -> bool {
        self.told < TOLD_ENOUGH || !self.is_calm(status, pods, Instant::now())
    }

    /// When to ask next.
    pub(super) fn next(&mut self, status: &Status, pods: Option<&Pods>, asked: Instant) -> Instant {
        ticks::after(asked, self.period(status, pods), PERIOD_IDLE)
    }

    fn period(&mut self, status: &Status, pods: Option<&Pods>) -> Duration {
        let now = Instant::now();
        let granted = units_with(status, |kind| matches!(kind, HoldKind::Granted { .. }));
        keep_since(&mut self.expected, &granted, now + EXPECTING);
        let ended = units_with(status, |kind| has_ended(kind, pods));
        keep_since(&mut self.ending, &ended, now + ENDING);
        let runs = |times: &BTreeMap<UnitId, Instant>| times.values().any(|until| *until > now);
        let first = now + ENDING - PERIOD_ENDING;
        let has_just_ended = self.ending.values().any(|until| *until > first);
        let held = holds(status).next().is_some();
        if has_just_ended {
            PERIOD_ENDING_FIRST
        } else if runs(&self.ending) {
            PERIOD_ENDING
        } else if runs(&self.expected) {
            PERIOD_EXPECTING
        } else if held && !self.is_calm(status, pods, now) {
            PERIOD_HELD
        } else {
            PERIOD_IDLE
        }
    }

    /// Whether nothing waits for a list: nothing has changed for long, who has something is there and is listed with
    /// it, and nobody is listed with anything else.
    fn is_calm(&self, status: &Status, pods: Option<&Pods>, now: Instant) -> bool {
        let (Some(listing), Some(pods)) = (&self.last, pods) else {
            return false;
        };
        let is_settled = |hold: &Hold| match &hold.kind {
            HoldKind::Bound { pod, .. } => {
                pod.uid.is_some()
                    && !pods.has_ended(&pod.name, pod.uid.as_ref())
                    && listing.counts(&pod.name)
            }
            HoldKind::Prepared { claim } => listing.has_claim(claim),
            HoldKind::Granted { .. } | HoldKind::Reserved { .. } | HoldKind::Foreign { .. } => {
                false
            }
        };
        let is_held = |id| holds(status).any(|hold| hold.device_id() == Some(id));
        let mut listed = listing.pods.iter().flat_map(|listed| &listed.devices);
        now - self.changed >= CALM_AFTER
            && status.standing == Standing::Serving
            && status.rivals.is_empty()
            && holds(status).all(is_settled)
            // Onlookers too, which hold nothing.
            && status.claims.iter().all(|claim| listing.has_claim(claim))
            && listed.all(|device| is_held(&device.id))
            && listing.pods.iter().all(|listed| {
                listed.claims.iter().all(|listed| {
                    let is_it = |it: &bridge_core::ClaimRef| {
                        it.namespace == listed.namespace && it.name == listed.name
                    };
                    status.claims.iter().any(is_it)
                })
            })
    }
}

fn holds(status: &Status) -> impl Iterator<Item = &Hold> {
    status.units.iter().flat_map(|unit| &unit.holds)
}

fn units_with(status: &Status, is: impl Fn(&HoldKind) -> bool) -> BTreeSet<&UnitId> {
    let units = status.units.iter();
    units
        .filter(|unit| unit.holds.iter().any(|hold| is(&hold.kind)))
        .map(|unit| &unit.unit)
        .collect()
}

/// Forgets the units that are not there any more, and notes `until` for new ones.
fn keep_since(times: &mut BTreeMap<UnitId, Instant>, units: &BTreeSet<&UnitId>, until: Instant) {
    times.retain(|unit, _| units.contains(unit));
    for unit in units {
        times.entry((*unit).clone()).or_insert(until);
    }
}

fn has_ended(kind: &HoldKind, pods: Option<&Pods>) -> bool {
    match kind {
        HoldKind::Bound { pod, .. } => {
            pods.is_some_and(|pods| pods.has_ended(&pod.name, pod.uid.as_ref()))
        }
        HoldKind::Granted { .. }
        | HoldKind::Reserved { .. }
        | HoldKind::Prepared { .. }
        | HoldKind::Foreign { .. } => false,
    }
}

#[cfg(test)]
mod tests;
