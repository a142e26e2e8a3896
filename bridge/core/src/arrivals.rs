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
/// So many new pods of each kind, none later than [`CONTEST_WITHIN`] after the one before, are the bursts of two
/// controllers, which come again. Few, since only those are seen that got a unit: of a burst of six and six on eight
/// units it may be six of one kind and two of the other.
const CROWD: u32 = 2;
/// For so long nothing rests after them, and after each contest within this time. All of them are on their way before a
/// taint or a count can follow, so what rests when they come again is a race that one in twenty of their claims has lost.
const APART_AFTER_CROWD: Duration = Duration::from_secs(60);
/// For so long nothing rests after a lost race: the rest is a bet that pods of both kinds do not come within the time
/// that a taint takes, and here they do. Bursts of two controllers come again.
const APART_FIRST: Duration = Duration::from_secs(15 * 60);
/// Each race that is lost within this of the end of such a time doubles the next, up to this.
const APART_LAST: Duration = Duration::from_secs(4 * 60 * 60);
/// Races that are lost within this of each other are one: claims of one burst are refused one after the other, 10 s
/// after they came.
const ONE_RACE: Duration = Duration::from_secs(30);

/// The last arrivals of each kind, as uptime.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct Arrivals {
    counted: Option<Duration>,
    claimed: Option<Duration>,
    /// When both kinds came within [`CONTEST_WITHIN`] last.
    contested: Option<Duration>,
    /// Those who have come without a break.
    crowd: Crowd,
    /// When there was a crowd of both kinds last, or a contest while the sides were apart for one.
    crowded: Option<Duration>,
    /// The kind of the first arrival since the last [`take`](Self::take).
    first: Option<Face>,
    /// The last lost race, and how long nothing rests after it.
    lost: Option<Lost>,
}

/// New pods that came without a break of [`CONTEST_WITHIN`], up to [`CROWD`] of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
struct Crowd {
    last: Duration,
    counted: u32,
    claimed: u32,
}

/// A lost race.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Lost {
    at: Duration,
    apart: Duration,
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
            // While the sides are apart fewer than a crowd can be bound: the next burst shows itself so.
            if self.is_apart(now) {
                self.crowded = Some(now);
            }
        }
    }

    /// Notes that so many new pods, one at least, came for units.
    pub(crate) fn note_new(&mut self, face: Face, pods: usize, now: Duration) {
        self.note(face, now);
        if now.saturating_sub(self.crowd.last) > CONTEST_WITHIN {
            self.crowd = Crowd::default();
        }
        self.crowd.last = now;
        let came = match face {
            Face::Legacy => &mut self.crowd.counted,
            Face::Dra => &mut self.crowd.claimed,
        };
        let pods = u32::try_from(pods).unwrap_or(u32::MAX);
        *came = came.saturating_add(pods).min(CROWD);
        if self.crowd.counted.min(self.crowd.claimed) == CROWD {
            self.crowded = Some(now);
        }
    }

    /// Whether there was a crowd so lately that nothing rests.
    fn is_apart(&self, now: Duration) -> bool {
        self.crowded
            .is_some_and(|crowded| now.saturating_sub(crowded) <= APART_AFTER_CROWD)
    }

    /// Notes that a claim lost a unit to a counted pod although both were offered it in good faith. What rests is split
    /// as if a counted pod had come.
    pub(crate) fn lose(&mut self, now: Duration) {
        let apart = match self.lost {
            Some(lost) if now.saturating_sub(lost.at) < ONE_RACE => return,
            Some(lost) if now < lost.at + lost.apart + APART_LAST => {
                (lost.apart * 2).min(APART_LAST)
            }
            Some(_) | None => APART_FIRST,
        };
        self.lost = Some(Lost { at: now, apart });
        self.first.get_or_insert(Face::Legacy);
    }

    /// The kind that came first since this was asked last.
    pub(crate) fn take(&mut self) -> Option<Face> {
        self.first.take()
    }

    /// When free units may rest if nobody comes any more, as uptime. At once if nobody ever came.
    /// `is_scarce`: half of the units or fewer are free.
    pub(crate) fn quiet_at(&self, quiet: Duration, is_scarce: bool) -> Duration {
        let Some(last) = self.counted.max(self.claimed) else {
            return quiet;
        };
        let contested = self
            .contested
            .is_some_and(|contested| last.saturating_sub(contested) <= CONTEST_LASTS);
        let longer = contested || is_scarce;
        let quiet = last + quiet * if longer { LONGER_QUIET } else { 1 };
        let lost = self.lost.map(|lost| lost.at + lost.apart);
        let crowded = self.crowded.map(|crowded| crowded + APART_AFTER_CROWD);
        quiet.max(lost.max(crowded).unwrap_or_default())
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
            crowd,
            crowded,
            first,
            lost,
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
        // Matters for as long as nothing rests, and then as long as it doubles the next.
        let remembered = |lost: &Lost| clocks.age(lost.at) <= lost.apart + APART_LAST;
        Self {
            counted: counted.map(came),
            claimed: claimed.map(came),
            contested: contested
                .filter(counts)
                .map(|at| clocks.past(at, CONTEST_LASTS + longest)),
            crowd: if clocks.age(crowd.last) <= CONTEST_WITHIN {
                Crowd {
                    last: clocks.past(crowd.last, CONTEST_WITHIN),
                    ..crowd
                }
            } else {
                Crowd::default()
            },
            crowded: crowded
                .filter(|at| clocks.age(*at) <= APART_AFTER_CROWD)
                .map(|at| clocks.past(at, APART_AFTER_CROWD)),
            first,
            lost: lost.filter(remembered).map(|lost| Lost {
                at: clocks.past(lost.at, lost.apart + APART_LAST),
                ..lost
            }),
        }
    }
}
