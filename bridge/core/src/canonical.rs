//! One form for all pools that behave alike from now on: what a check of every reachable state tells states apart by.
//!
//! It forgets what no decision reads, and how long ago a thing was where only "long enough" counts. No part of the
//! product: it is compiled for tests and with the feature `model`. Each struct is taken apart whole, so that a field
//! that is added later must be thought of here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::adopt::LISTED_TWICE;
use crate::allocate::GRANT_UNSEEN;
use crate::evidence::Processes;
use crate::foreign::SUSPECT_LIMIT;
use crate::hold::HoldKind;
use crate::id::UnitId;
use crate::ledger::Ledger;
use crate::observe::{CAUSELESS_LIMIT, UNLISTED_LIMIT};
use crate::pool::{LINGER_COUNTED, Pool, Seen};
use crate::settings::Pace;

/// How closely time and steering are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    /// Shorter spans count as an instant, longer ones in whole multiples. No longer than anything that is waited for.
    pub grain: Duration,
    /// Whether units ever move.
    pub moves: Moves,
}

/// Whether units ever move between the sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    /// They do.
    Happen,
    /// They never do and never will: when somebody came, and since when a unit is free, is no matter then.
    Never,
}

/// Uptimes that begin anew leave room below for what was before: more than anything that is waited for, hours after a
/// lost race included.
const BEGIN: Duration = Duration::from_secs(24 * 60 * 60);
/// So long after a start it does not matter any more when it was.
const STARTED: Duration = Duration::from_secs(100);
/// The least span that there is.
const INSTANT: Duration = Duration::from_nanos(1);

/// Two clocks that differ in how they show times long past.
#[derive(Debug)]
pub(crate) struct Clocks {
    /// What the clock shows that the pool was on.
    before: Duration,
    /// What the clock shows that the pool goes on with.
    after: Duration,
    /// Spans are whole multiples of this.
    grain: Duration,
    /// Times that are compared with each other, on both clocks.
    times: BTreeMap<Duration, Duration>,
    /// When the first of the units was granted that no listing has shown yet; `before`, if there is none.
    first: Duration,
}

impl Clocks {
    /// How long ago a past time is.
    pub(crate) fn age(&self, time: Duration) -> Duration {
        rounded(self.before.saturating_sub(time), self.grain)
    }

    /// A past time on the new clock, where an age of `longest` is as good as any longer one.
    pub(crate) fn past(&self, time: Duration, longest: Duration) -> Duration {
        self.after.saturating_sub(self.age(time).min(longest))
    }

    /// A time to come on the new clock.
    pub(crate) fn to_come(&self, time: Duration) -> Duration {
        let span = time.saturating_sub(self.before);
        let down = rounded(span, self.grain);
        let up = if down < span { down + self.grain } else { down };
        self.after + up
    }

    /// The same, unless it has come already.
    pub(crate) fn yet_to_come(&self, time: Duration) -> Option<Duration> {
        (time > self.before).then(|| self.to_come(time))
    }

    /// A past time that is compared with others; if nothing is there to compare it with, only whether it is now.
    fn compared(&self, time: Duration) -> Duration {
        let past = self.after.saturating_sub(INSTANT);
        let on_both = self.times.get(&time).copied();
        on_both.unwrap_or(if time == self.before {
            self.after
        } else {
            past
        })
    }

    /// Times of which only the order matters up to `first`, the first that they are compared with.
    pub(crate) fn in_order<K: Ord>(&self, marks: BTreeMap<K, Duration>) -> BTreeMap<K, Duration> {
        let mut times: BTreeSet<Duration> = marks.values().copied().collect();
        times.retain(|time| *time <= self.first);
        times.insert(self.first);
        let latest_first = times.into_iter().rev();
        let places: BTreeMap<Duration, u32> = latest_first.zip(0..).collect();
        let first = self.compared(self.first);
        self.all(marks, |time| match places.get(&time) {
            Some(place) => first.saturating_sub(INSTANT * *place),
            None => self.compared(time),
        })
    }

    /// Times that are compared with each other and with the present alone.
    pub(crate) fn among_themselves<K: Ord>(
        &self,
        marks: BTreeMap<K, Duration>,
    ) -> BTreeMap<K, Duration> {
        let mut times: BTreeSet<Duration> = marks.values().copied().collect();
        times.insert(self.before);
        let latest_first = times.into_iter().rev();
        let places: BTreeMap<Duration, u32> = latest_first.zip(0..).collect();
        self.all(marks, |time| {
            self.after.saturating_sub(INSTANT * places[&time])
        })
    }

    /// The same for every mark.
    pub(crate) fn all<K: Ord>(
        &self,
        marks: BTreeMap<K, Duration>,
        on_other_clock: impl Fn(Duration) -> Duration,
    ) -> BTreeMap<K, Duration> {
        let marks = marks.into_iter();
        marks
            .map(|(key, time)| (key, on_other_clock(time)))
            .collect()
    }
}

impl Pool {
    /// The canonical form of a pool whose daemon has been up for `uptime`, and the uptime to go on with.
    ///
    /// It gives every answer that this pool gives to calls that arrive from now on, as far as that sight goes. What the
    /// processes were is forgotten, since each transition brings its own, and so are the generation of the ledger and
    /// what was reported before.
    #[must_use]
    pub fn canonical(self, uptime: Duration, sight: Sight) -> (Self, Duration) {
        let Self {
            ledger,
            settings,
            standing,
            seen,
        } = self;
        let (seen, uptime) = seen.canonical(&ledger, uptime, sight, settings.pace);
        let pool = Self {
            ledger: ledger.canonical(),
            settings,
            standing,
            seen,
        };
        (pool, uptime)
    }
}

impl Seen {
    fn canonical(
        mut self,
        ledger: &Ledger,
        uptime: Duration,
        sight: Sight,
        pace: Pace,
    ) -> (Self, Duration) {
        let granted = units_with(ledger, |kind| matches!(kind, HoldKind::Granted { .. }));
        let bound = units_with(ledger, |kind| matches!(kind, HoldKind::Bound { .. }));
        // Once it is bound, an answer counts only for a Prepare that came before it.
        self.answered
            .retain(|unit, at| granted.contains(unit) || *at == uptime);
        self.unlisted.retain(|unit, _| bound.contains(unit));
        let is_compared = !granted.is_empty() || !self.causeless.is_empty();
        let mut times: BTreeSet<Duration> = self.answered.values().copied().collect();
        times.extend(self.causeless.values());
        times.extend(self.listed_at.filter(|_| is_compared));
        times.insert(uptime);
        // A unit that was granted before the start counts from it.
        if granted
            .iter()
            .any(|unit| !self.answered.contains_key(*unit))
        {
            times.insert(Duration::ZERO);
        }
        let granted_at = self
            .answered
            .iter()
            .filter(|(unit, _)| granted.contains(unit));
        let first = granted_at.map(|(_, at)| *at).min().unwrap_or(uptime);
        times.extend(
            self.motion
                .pods_known_since()
                .filter(|since| *since > first),
        );
        let first_causeless = self.causeless.values().min().copied();
        let from_start = times.contains(&Duration::ZERO);
        let times = cut(times, sight.grain, |time| match first_causeless {
            _ if from_start => STARTED,
            Some(first) if first <= time => CAUSELESS_LIMIT,
            Some(_) | None => GRANT_UNSEEN,
        });
        let clocks = Clocks {
            before: uptime,
            after: times[&uptime],
            grain: sight.grain,
            times,
            first,
        };
        (
            self.on_other_clock(&clocks, pace, sight.moves),
            clocks.after,
        )
    }

    fn on_other_clock(self, clocks: &Clocks, pace: Pace, moves: Moves) -> Self {
        let Self {
            motion,
            lost,
            rivalry,
            presence,
            listing,
            listed_at,
            pods,
            claims,
            processes: _,
            answered,
            mut unlisted,
            mut listed_claims,
            mut suspects,
            causeless,
            kubelet_ids,
            lingering,
            unfit,
            faults,
            strangers: _, // only says what has been reported
            topology: _,  // decides nothing but which units are preferred
        } = self;
        for n in unlisted.values_mut() {
            *n = UNLISTED_LIMIT.min(*n);
        }
        for n in listed_claims.values_mut() {
            *n = LISTED_TWICE.min(*n);
        }
        for n in suspects.values_mut() {
            *n = SUSPECT_LIMIT.min(*n);
        }
        Self {
            motion: motion.canonical(clocks, pace, moves),
            lost: lost.canonical(clocks),
            rivalry: rivalry.map(|rivalry| rivalry.canonical(clocks)),
            presence,
            listing,
            listed_at: listed_at.map(|at| clocks.compared(at)),
            pods,
            claims,
            processes: Processes::default(),
            answered: clocks.all(answered, |at| clocks.compared(at)),
            unlisted,
            listed_claims,
            suspects,
            causeless: clocks.all(causeless, |since| clocks.compared(since)),
            kubelet_ids,
            lingering: clocks.all(lingering, |since| clocks.past(since, LINGER_COUNTED)),
            strangers: BTreeSet::new(),
            topology: Arc::default(),
            unfit,
            faults: faults.canonical(clocks),
        }
    }
}

impl Ledger {
    /// The canonical form of a ledger: it has no generation, and no times.
    #[must_use]
    pub fn canonical(mut self) -> Self {
        self.generation = 0;
        for hold in self.holds.values_mut().flatten() {
            hold.since = SystemTime::UNIX_EPOCH;
        }
        for fault in self.faults.values_mut() {
            fault.since = SystemTime::UNIX_EPOCH;
        }
        self
    }
}

fn units_with(ledger: &Ledger, which: impl Fn(&HoldKind) -> bool) -> BTreeSet<&UnitId> {
    let holds = ledger.holds.iter();
    holds
        .filter(|(_, holds)| holds.iter().any(|hold| which(&hold.kind)))
        .map(|(unit, _)| unit)
        .collect()
}

/// A span in whole grains.
fn rounded(span: Duration, grain: Duration) -> Duration {
    let nanos = span.as_nanos() - span.as_nanos() % grain.as_nanos();
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// The times in the same order, with the gaps between them in whole grains, or an instant, and none longer than
/// `longest` of the time that it begins at. They are compared with each other, so it is not their ages that are cut.
fn cut(
    times: BTreeSet<Duration>,
    grain: Duration,
    longest: impl Fn(Duration) -> Duration,
) -> BTreeMap<Duration, Duration> {
    let mut cut = BTreeMap::new();
    let mut last: Option<(Duration, Duration)> = None;
    for time in times {
        let at = match last {
            None if time.is_zero() => Duration::ZERO,
            None => BEGIN,
            Some((before, at)) => {
                let gap = rounded(time - before, grain).min(longest(before));
                // Everything else was after the start.
                at + gap.max(if before.is_zero() { grain } else { INSTANT })
            }
        };
        cut.insert(time, at);
        last = Some((time, at));
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(times: &[u64]) -> Vec<Duration> {
        times.iter().copied().map(Duration::from_secs).collect()
    }

    #[test]
    fn long_gaps_are_cut_and_the_order_and_the_short_ones_stay() {
        let times = seconds(&[0, 3, 100, 109, 500]).into_iter().collect();
        let cut = cut(times, Duration::from_secs(1), |_| Duration::from_secs(10));
        assert_eq!(
            cut.into_values().collect::<Vec<_>>(),
            seconds(&[0, 3, 13, 22, 32])
        );
    }

    #[test]
    fn what_is_shorter_than_a_grain_is_an_instant() {
        let times = [7, 8, 14].map(Duration::from_millis).into_iter().collect();
        let cut = cut(times, Duration::from_millis(5), |_| LINGER_COUNTED);
        let expected = [
            BEGIN,
            BEGIN + INSTANT,
            BEGIN + INSTANT + Duration::from_millis(5),
        ];
        assert_eq!(cut.into_values().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn an_age_beyond_the_longest_is_the_longest() {
        let clocks = Clocks {
            before: Duration::from_secs(100),
            after: Duration::from_secs(20),
            grain: Duration::from_secs(1),
            times: BTreeMap::new(),
            first: Duration::ZERO,
        };
        let past = |time| clocks.past(Duration::from_secs(time), Duration::from_secs(5));
        assert_eq!(
            (past(98), past(50)),
            (Duration::from_secs(18), Duration::from_secs(15))
        );
    }
}
