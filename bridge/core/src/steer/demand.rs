//! Which pods wait, and what free units are moved for them: where it is known, it takes the place of turns.
//!
//! What is free is meant for the pods that wait in the order of age, each all that it asks for or nothing: a unit kept
//! for a pod that can't start yet would be idle, and what it still lacks goes from one small pod to the next without
//! ever being free for long enough to be moved. While something is to spare nothing is taken from anybody: units rest
//! as ever, and where they don't, as many move as a side lacks. Otherwise each unit is *gathered*: it is on the side
//! of its pod alone, so that neither the other kind nor a newcomer takes it while the pod's scheduler still waits to
//! look again. A pod that does not come is given up after [`GATHER_LIMIT`], and then nobody keeps anything from
//! anybody for a while: the node can't know why a scheduler does not place it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::on;
use crate::confine::Shared;
use crate::demand::{Claimed, Demand, WaitingPod};
use crate::evidence::PodPhase;
use crate::id::{PodUid, UnitId};
use crate::ledger::Side;
use crate::pool::{Pool, Transition};
use crate::settings::Face;

/// For so long the oldest pod that fits keeps free units on its side. A scheduler looks again at a pod that did not fit
/// after 10 s at most (`podMaxBackoffSeconds`), some batch schedulers later.
const GATHER_LIMIT: Duration = Duration::from_secs(30);
/// After a gather that was given up no other begins for this time; it doubles with each, so that a backlog that can't
/// be served here costs the pods that can be little.
const PAUSE_FIRST: Duration = Duration::from_secs(30);
/// The longest such pause.
const PAUSE_LAST: Duration = Duration::from_secs(480);

/// What is known of pods that wait, and for whom units are gathered.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(super) struct Waiting {
    /// `None`: nobody watches them, and turns decide.
    known: Option<Demand>,
    gather: Option<Gather>,
    /// Pods that had their time; they come after all others.
    given_up: BTreeSet<PodUid>,
    /// The length of the last pause; none since a pod for which units were gathered has been placed.
    pause: Duration,
    /// Until then nobody keeps units from others.
    pause_ends: Option<Duration>,
}

/// The pod that comes first, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Gather {
    pod: PodUid,
    since: Duration,
}

impl Waiting {
    /// When something changes although nobody comes or goes.
    pub(super) fn wakes(&self) -> impl Iterator<Item = Duration> {
        let given_up = self.gather.as_ref().map(|it| it.since + GATHER_LIMIT);
        let waits = self.known.as_ref().is_some_and(|it| !it.pods.is_empty());
        let resumes = self.pause_ends.filter(|_| waits);
        given_up.into_iter().chain(resumes)
    }
}

/// How many free units are meant for each side.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Meant {
    counted: usize,
    claimed: usize,
    /// The oldest pod that something is meant for.
    first: Option<PodUid>,
    state: Contention,
}

impl Meant {
    /// Whether more is asked for than is free, so that nothing may be on both sides.
    pub(super) fn is_contended(&self) -> bool {
        self.state == Contention::NothingToSpare
    }
}

/// Whether anything is free beyond what is meant for somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Contention {
    #[default]
    SomethingToSpare,
    /// A unit on both sides would be taken from whom it is meant for.
    NothingToSpare,
}

/// What a pod asks for that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asks {
    pod: PodUid,
    counted: usize,
    claimed: usize,
}

/// What is there to be given.
#[derive(Debug, Clone, Copy)]
struct Left {
    units: usize,
    counted: usize,
    claimed: usize,
}

impl Left {
    fn fits(self, asks: &Asks) -> bool {
        asks.counted <= self.counted
            && asks.claimed <= self.claimed
            && asks.counted.saturating_add(asks.claimed) <= self.units
    }

    fn take(&mut self, asks: &Asks) {
        self.units -= asks.counted + asks.claimed;
        self.counted = self.counted.saturating_sub(asks.counted).min(self.units);
        self.claimed = self.claimed.saturating_sub(asks.claimed).min(self.units);
    }
}

/// Means what is free for the pods in their order. Of these the first `hopeful` were not given up, and only what is
/// meant for them is kept from others.
fn mean(pods: &[Asks], hopeful: usize, free: Left) -> Meant {
    let mut meant = Meant::default();
    let mut left = free;
    let (hopeful, given_up) = pods.split_at(hopeful);
    // Who would have been served but for somebody older.
    let (mut lacks_counted, mut lacks_claimed) = (false, false);
    for asks in hopeful {
        if left.fits(asks) {
            left.take(asks);
            meant.counted += asks.counted;
            meant.claimed += asks.claimed;
            meant.first.get_or_insert_with(|| asks.pod.clone());
        } else if free.fits(asks) {
            lacks_counted |= asks.counted > 0;
            lacks_claimed |= asks.claimed > 0;
        }
    }
    let rivals = lacks_counted && meant.claimed > 0 || lacks_claimed && meant.counted > 0;
    if meant.first.is_some() && (left.units == 0 || rivals) {
        meant.state = Contention::NothingToSpare;
    }
    for asks in given_up {
        if left.fits(asks) {
            left.take(asks);
            meant.counted += asks.counted;
            meant.claimed += asks.claimed;
        }
    }
    meant
}

impl Pool {
    /// The pods that wait and that are not on their way here already, the oldest first, and behind them those that
    /// were given up; and how many of them were not.
    fn asking(&self) -> (Vec<Asks>, usize) {
        let waiting = &self.seen.motion.waiting;
        let mut pods: Vec<(bool, &WaitingPod, Asks)> = waiting
            .known
            .iter()
            .flat_map(|demand| &demand.pods)
            .filter(|pod| !self.is_on_its_way(&pod.uid))
            .filter_map(|pod| {
                let asks = self.asks(pod)?;
                Some((waiting.given_up.contains(&pod.uid), pod, asks))
            })
            .collect();
        pods.sort_by_key(|(given_up, pod, _)| (*given_up, pod.created, pod.uid.clone()));
        let hopeful = pods.iter().filter(|(given_up, _, _)| !given_up).count();
        (pods.into_iter().map(|(_, _, asks)| asks).collect(), hopeful)
    }

    /// Whether a pod has been bound here or a claim allocated for it: the watch of pods that wait is behind then.
    fn is_on_its_way(&self, pod: &PodUid) -> bool {
        let mut bound = self.seen.pods.iter().flat_map(|pods| &pods.pods);
        let mut claims = self.seen.claims.iter().flat_map(|claims| &claims.claims);
        bound.any(|bound| bound.uid == *pod && bound.phase == PodPhase::Live)
            || claims.any(|claim| claim.reserved_for.contains(pod))
    }

    /// What a pod asks for; `None` if this node could not give it that if all of it were free.
    fn asks(&self, pod: &WaitingPod) -> Option<Asks> {
        let all = self.ledger.units.len();
        let present = self.ledger.units.keys();
        let present = present.filter(|unit| self.is_fit(unit) && !self.is_excluded(unit));
        let present = present.count();
        let least = usize::try_from(self.settings.min_legacy).unwrap_or(all);
        let most = |face: Face| {
            let limit = self.settings.limits.of(face);
            let limit = limit.map_or(all, |limit| usize::try_from(limit).unwrap_or(all));
            let kept = if face == Face::Dra { least } else { 0 };
            limit.min(self.showable(face)).min(all.saturating_sub(kept))
        };
        let counted = usize::try_from(pod.counted).ok()?;
        let claimed = match pod.claimed {
            Claimed::Units(units) => usize::try_from(units).ok()?,
            Claimed::All => all,
        };
        let both = counted.saturating_add(claimed);
        let fits = (1..=present).contains(&both)
            && counted <= most(Face::Legacy)
            && claimed <= most(Face::Dra);
        fits.then(|| Asks {
            pod: pod.uid.clone(),
            counted,
            claimed,
        })
    }
}

impl Transition {
    /// Takes the pods that wait and that this node could run. `None`: nobody may or can watch them; then turns
    /// decide where free units are offered.
    pub fn observe_demand(&mut self, demand: Option<Demand>) {
        let waiting = &mut self.pool.seen.motion.waiting;
        match demand {
            None => *waiting = Waiting::default(),
            Some(demand) => {
                let waits = |uid: &PodUid| demand.pods.iter().any(|pod| pod.uid == *uid);
                waiting.given_up.retain(waits);
                waiting.known = Some(demand);
            }
        }
        self.settle();
    }

    /// For whom the free units are meant now; `None`: it is not known who waits, and turns decide.
    pub(super) fn weigh_demand(&mut self) -> Option<Meant> {
        self.pool.seen.motion.waiting.known.as_ref()?;
        let meant = self.mean_units();
        if self.gives_up(&meant) {
            return Some(self.mean_units());
        }
        Some(meant)
    }

    fn mean_units(&mut self) -> Meant {
        let left = self.left_for_demand();
        let (pods, hopeful) = self.pool.asking();
        let mut meant = mean(&pods, hopeful, left);
        self.note_first(&meant, &pods);
        if self.pool.seen.motion.waiting.gather.is_none() {
            meant.state = Contention::SomethingToSpare;
        }
        meant
    }

    /// What is free and not on its way to a counted pod that is bound already.
    fn left_for_demand(&self) -> Left {
        let pool = &self.pool;
        let due = pool.due();
        let Shared {
            units: shared,
            counted,
            claimable,
        } = pool.shared();
        let units = (shared.len() + counted + claimable).saturating_sub(due);
        let room = |face| pool.room(face);
        Left {
            units,
            counted: (units.saturating_sub(claimable)).min(room(Face::Legacy).saturating_sub(due)),
            claimed: (units.saturating_sub(counted)).min(room(Face::Dra)),
        }
    }

    /// The clock of the oldest pod that fits.
    fn note_first(&mut self, meant: &Meant, pods: &[Asks]) {
        let now = self.now.uptime;
        let waiting = &mut self.pool.seen.motion.waiting;
        if waiting.pause_ends.is_some_and(|end| end > now) {
            waiting.gather = None;
            return;
        }
        waiting.pause_ends = None;
        let before = waiting.gather.as_ref().map(|gather| &gather.pod);
        if before == meant.first.as_ref() {
            return;
        }
        if before.is_some_and(|before| pods.iter().all(|asks| asks.pod != *before)) {
            // It was placed, here or elsewhere, or is gone: it did not wait in vain.
            waiting.pause = Duration::ZERO;
        }
        waiting.gather = meant.first.clone().map(|pod| Gather { pod, since: now });
    }

    /// Whether the first pod has had its time. If others had to stand back for it, a pause follows.
    fn gives_up(&mut self, meant: &Meant) -> bool {
        let now = self.now.uptime;
        let waiting = &mut self.pool.seen.motion.waiting;
        let is_over = |gather: &mut Gather| now.saturating_sub(gather.since) >= GATHER_LIMIT;
        let Some(gather) = waiting.gather.take_if(is_over) else {
            return false;
        };
        waiting.given_up.insert(gather.pod);
        if meant.is_contended() {
            waiting.pause = (waiting.pause * 2).clamp(PAUSE_FIRST, PAUSE_LAST);
            waiting.pause_ends = Some(now + waiting.pause);
        }
        true
    }

    /// Begins the moves that bring each side what is meant for it: first out of what rests, then from the other side,
    /// as far as that has more than is meant for it.
    pub(super) fn move_for(&mut self, meant: &Meant, dwelt: &[(UnitId, Side)]) {
        let due = self.pool.due();
        let free = self.pool.free_units();
        let mut counted = on(&free, Side::Legacy).len().saturating_sub(due);
        let shown = |unit: &&UnitId| self.pool.may_show(unit, Face::Dra);
        let mut claimable = on(&free, Side::Dra).into_iter().filter(shown).count();
        let mut rest: Vec<UnitId> = on(&free, Side::Rest).into_iter().cloned().collect();
        let to_counted = meant.counted.saturating_sub(counted).min(rest.len());
        for unit in rest.split_off(rest.len() - to_counted) {
            self.set_side(&unit, Side::Legacy);
        }
        let to_claims = meant.claimed.saturating_sub(claimable).min(rest.len());
        for unit in rest.drain(..to_claims) {
            self.set_side(&unit, Side::Yielding);
        }
        counted += to_counted;
        claimable += to_claims;
        let lacks = meant.counted.saturating_sub(counted);
        let spare = claimable.saturating_sub(meant.claimed);
        let have = on(dwelt, Side::Legacy).len();
        if lacks > 0 {
            self.share_out(dwelt, have + lacks.min(spare), have);
            return;
        }
        let lacks = meant.claimed.saturating_sub(claimable);
        let spare = counted.saturating_sub(meant.counted);
        self.share_out(dwelt, have.saturating_sub(lacks.min(spare)), have);
    }
}

#[cfg(any(test, feature = "model"))]
impl Waiting {
    /// The canonical form on another clock; see `canonical.rs` of the crate.
    pub(super) fn canonical(self, clocks: &crate::canonical::Clocks) -> Self {
        let Self {
            known,
            gather,
            given_up,
            pause,
            pause_ends,
        } = self;
        Self {
            known: known.map(Demand::canonical),
            gather: gather.map(|gather| Gather {
                since: clocks.past(gather.since, GATHER_LIMIT),
                ..gather
            }),
            given_up,
            pause,
            pause_ends: pause_ends.and_then(|end| clocks.yet_to_come(end)),
        }
    }
}
