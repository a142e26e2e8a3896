//! Who has come for a unit lately, and how long nobody must come before free units rest.

use std::time::Duration;

use crate::settings::Face;

/// Both kinds of pods within this long of each other compete for what is free: a unit that was on both sides then
/// would have been seen by both schedulers before either taint or count could follow.
const CONTEST_WITHIN: Duration = Duration::from_secs(1);
/// So long after that the contest is believed to go on: a scheduler leaves a pod that did not fit alone for up to
/// 10 s (`podMaxBackoffSeconds`), and looks again at a moment that the other scheduler does not know.
const CONTEST_LASTS: Duration = Duration::from_secs(10);
/// How many times longer nobody must come before units rest where that is likely to be a race: both kinds compete, or
/// few units are free, which is where somebody is likely to wait. Turns serve both kinds meanwhile.
const LONGER_QUIET: u32 = 8;

/// The last arrivals of each kind, as uptime.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct Arrivals {
    counted: Option<Duration>,
    claimed: Option<Duration>,
    /// When both kinds came within [`CONTEST_WITHIN`] last.
    contested: Option<Duration>,
    /// The kind of the first arrival since the last [`take`](Self::take).
    first: Option<Face>,
}

impl Arrivals {
    /// Notes that somebody came.
    pub(crate) fn note(&mut self, face: Face, now: Duration) {
        self.first.get_or_insert(face);
        let other = match face {
            Face::Legacy => {
                self.counted = Some(now);
                self.claimed
            }
            Face::Dra => {
                self.claimed = Some(now);
                self.counted
            }
        };
        if other.is_some_and(|other| now.saturating_sub(other) <= CONTEST_WITHIN) {
            self.contested = Some(now);
        }
    }

    /// The kind that came first since this was asked last.
    pub(crate) fn take(&mut self) -> Option<Face> {
        self.first.take()
    }

    /// When it is quiet if nobody comes any more, as uptime. At once if nobody ever came.
    /// `is_scarce`: half of the units or fewer are free.
    pub(crate) fn quiet_at(&self, quiet: Duration, is_scarce: bool) -> Duration {
        let Some(last) = self.counted.max(self.claimed) else {
            return quiet;
        };
        let contested = self
            .contested
            .is_some_and(|contested| last.saturating_sub(contested) <= CONTEST_LASTS);
        last + if contested || is_scarce {
            quiet * LONGER_QUIET
        } else {
            quiet
        }
    }
}

#[cfg(any(test, feature = "model"))]
impl Arrivals {
    /// The canonical form on another clock; see `canonical.rs` of the crate.
    pub(crate) fn canonical(self, clocks: &crate::canonical::Clocks, quiet: Duration) -> Self {
        let Self {
            counted,
            claimed,
            contested,
            first,
        } = self;
        // Longer than what is waited for: a span as long still counts.
        let longest = (quiet * LONGER_QUIET).max(CONTEST_WITHIN * 2);
        let came = |at: Duration| clocks.past(at, longest);
        let last = counted.max(claimed);
        let counts = |contested: &Duration| {
            let is_fresh = last.is_some_and(|last| clocks.age(last) < longest);
            last.is_some_and(|last| last.saturating_sub(*contested) <= CONTEST_LASTS)
                && (is_fresh || clocks.age(*contested) <= CONTEST_LASTS)
        };
        Self {
            counted: counted.map(came),
            claimed: claimed.map(came),
            contested: contested
                .filter(counts)
                .map(|at| clocks.past(at, CONTEST_LASTS + longest)),
            first,
        }
    }
}
