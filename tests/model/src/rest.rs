//! What must come of every state in the end: once everything works again and everybody goes home, whoever still waits
//! for a claim gets it, and then nothing is held.
//!
//! It is one way of many that a state can go on, and the way of a node on which nothing fails any more. Most ways join
//! soon, so what is known to come to rest is remembered.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bridge_core::Side;

use crate::actions::{Action, Fate, Step, slice};
use crate::daemon::{Call, Daemon, Doing, Look, Progress};
use crate::decided::Game;
use crate::keyed::key_of;
use crate::node::{Api, Cached, Kubelet, Source, Stage};
use crate::play::State;
use crate::scope::{CAUSELESS, FIRST_USER, Sides};
use crate::set::Set;

/// A Prepare is asked so many times, with a tick after each: a move takes two, and a process that ends is seen by then.
const ASKS: usize = 6;
/// After this long what was granted and never seen is free.
const UNSEEN: Duration = Duration::from_secs(11);
/// After this long a lost race no longer keeps units from being on both sides.
const APART: Duration = Duration::from_secs(5 * 60 * 60);
/// Parts of the memory, so that threads seldom meet.
const PARTS: usize = 64;

/// States that are known to come to rest.
#[derive(Debug)]
pub(crate) struct Rested([Mutex<HashSet<u64>>; PARTS]);

/// One step on the way.
#[derive(Clone, Copy, Debug, Hash)]
enum Way {
    /// What is under way is finished, and what has failed works again.
    Mend,
    Look(Look),
    /// Count and slice go out, and are seen.
    Show,
    Pass(Duration),
    /// Everybody ends but those that wait for a claim.
    EndAll,
    /// Who waits for a claim gets it, one after the other, and ends.
    ServeClaims,
}

impl Rested {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Mutex::new(HashSet::new())))
    }

    fn part(&self, key: u64) -> MutexGuard<'_, HashSet<u64>> {
        let place = usize::try_from(key).unwrap_or(0) % PARTS;
        let part = self.0[place].lock();
        part.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a state comes to rest.
    pub(crate) fn comes_to_rest(&self, scope: &Game, state: &State) -> bool {
        let mut state = state.clone();
        let mut passed = Vec::new();
        for (place, way) in ways().enumerate() {
            if !state.go(scope, way) || state.broken.is_some() {
                return false;
            }
            let key = key_of(&(place, &state));
            if self.part(key).contains(&key) {
                break;
            }
            passed.push(key);
            if place + 1 == ways().count() && !state.is_at_rest(scope) {
                return false;
            }
        }
        for key in passed {
            self.part(key).insert(key);
        }
        true
    }
}

fn ways() -> impl Iterator<Item = Way> {
    let begin = [
        Way::Mend,
        Way::Look(Look::Inventory),
        Way::Look(Look::Adoption),
    ];
    begin
        .into_iter()
        .chain([Way::EndAll])
        .chain(calm())
        .chain([Way::ServeClaims])
        .chain(calm())
        .chain([Way::Pass(APART), Way::Look(Look::Pods), Way::Show])
}

/// As long and with as many looks as the rules of ending ask for.
fn calm() -> impl Iterator<Item = Way> {
    let pauses = [Duration::ZERO, UNSEEN, UNSEEN, CAUSELESS, CAUSELESS];
    pauses.into_iter().flat_map(|pause| {
        [
            Way::Pass(pause),
            Way::Look(Look::Pods),
            Way::Look(Look::Claims),
            Way::Look(Look::Listing),
            Way::Look(Look::Processes),
            Way::Show,
        ]
    })
}

impl State {
    /// Goes one step; whether that was possible.
    fn go(&mut self, scope: &Game, way: Way) -> bool {
        match way {
            Way::Mend => self.mend(scope),
            Way::Look(Look::Adoption) if self.serves() => {}
            Way::Look(look) => self.look(scope, look),
            Way::Show => self.show(scope),
            Way::Pass(time) => self.pass(scope, time),
            Way::EndAll => {
                let waits = self.waiting_users(scope);
                self.end_all_but(scope, waits);
            }
            Way::ServeClaims => return self.serve_claims(scope),
        }
        true
    }

    fn serves(&self) -> bool {
        matches!(&self.daemon, Daemon::Up(up) if up.serves())
    }

    fn mend(&mut self, scope: &Game) {
        loop {
            let step = match &self.daemon {
                Daemon::Down => break self.start(scope),
                Daemon::Up(up) => match &up.doing {
                    Doing::Idle => break,
                    Doing::Batch(Progress::Planned, _) => Step::Save { fate: Fate::Fine },
                    Doing::Batch(Progress::Saved, _) => Step::Commit,
                    Doing::Batch(Progress::Committed, _) => Step::WriteFiles,
                    Doing::Batch(Progress::Written, _) => Step::Answer,
                },
            };
            self.play(scope, Action::Arbiter(step));
        }
        if let Some(asking) = self.node.asking {
            let pod = asking.pod.into();
            let call = Call::Allocate {
                pod,
                ids: asking.ids,
            };
            self.serve(scope, call, Fate::Fine);
        }
        let node = &mut self.node;
        node.forget_spending();
        node.late = None;
        node.api = Source::Answers;
        node.kubelet = Kubelet::Ready;
        node.lost = Set::EMPTY;
        node.silent = Set::EMPTY;
        node.strangers = Set::EMPTY;
        node.views.right = Source::Answers;
    }

    fn show(&mut self, scope: &Game) {
        if scope.sides == Sides::Fixed {
            return;
        }
        if let Daemon::Up(up) = &self.daemon {
            let count = up.memory.offered.count;
            self.node.views.node = u8::try_from(count).unwrap_or(u8::MAX);
            self.node.views.slice = slice(scope, &self.node, up);
            self.node.views.scheduler = self.node.views.node;
            self.node.views.claimable = self.node.views.slice;
        }
        self.look(scope, Look::Node);
    }

    /// Live pods whose claim is allocated and that have nothing of it yet.
    fn waiting_users(&self, scope: &Game) -> Set {
        let waits = |pod: &usize| {
            let claim = self.node.claims[scope.users[pod - FIRST_USER]];
            self.node.pods[*pod].waits() && claim.reserved.has(*pod) && claim.allocated.is_some()
        };
        scope.user_pods().filter(waits).collect()
    }

    fn end_all_but(&mut self, scope: &Game, keep: Set) {
        for pod in scope.counted_pods().chain(scope.user_pods()) {
            if keep.has(pod) || self.node.pods[pod].api == Api::Absent {
                continue;
            }
            self.node.end(pod);
            self.node.pods[pod].api = Api::Gone;
        }
        for claim in scope.claims() {
            self.node.drop_ended(claim);
            let kept = keep.iter().any(|pod| scope.claim_of(pod) == Some(claim));
            if !kept && self.node.claims[claim].cached != Cached::No {
                self.serve(scope, Call::Unprepare { claim }, Fate::Fine);
            }
        }
    }

    fn serve_claims(&mut self, scope: &Game) -> bool {
        while let Some(pod) = self.waiting_users(scope).iter().next() {
            for _ in 0..ASKS {
                self.serve(scope, Call::Prepare { pod }, Fate::Fine);
                if self.node.pods[pod].stage == Stage::Given {
                    break;
                }
                self.look_at_everything(scope);
                self.show(scope);
                self.pass(scope, scope.tick);
            }
            if self.node.pods[pod].stage != Stage::Given {
                return false;
            }
            let mut keep = self.waiting_users(scope);
            keep.remove(pod);
            self.end_all_but(scope, keep);
            self.look_at_everything(scope);
        }
        true
    }

    fn is_at_rest(&self, scope: &Game) -> bool {
        let Daemon::Up(up) = &self.daemon else {
            return false;
        };
        let ledger = &up.memory.ledger;
        let both = |side| scope.sides == Sides::Fixed || side == Side::Rest;
        up.serves()
            && ledger.holds.is_empty()
            && ledger.prepared.is_empty()
            && ledger.units.values().all(|record| both(record.side))
            && self.node.cdi.is_empty()
    }
}
