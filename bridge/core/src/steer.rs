//! Where each free unit is offered: at rest on both sides, in motion on one.
//!
//! Two schedulers that see the same free unit sell it twice within 50 ms, so a unit is on both sides only while
//! nothing arrives. The first arrival splits what rests; after that units move one way at a time, each step only
//! when nobody can be on the way to the unit any more. The policy is this file and `demand.rs` beside it, which takes
//! the place of turns where it is known which pods wait; everything else only shows sides.

mod demand;

#[cfg(any(test, feature = "model"))]
mod canonical;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::demand::{Meant, Waiting};
use crate::arrivals::Arrivals;
use crate::confine::Shared;
use crate::evidence::PodPhase;
use crate::hold::HoldKind;
use crate::id::{ClaimUid, PodUid, UnitId};
use crate::ledger::{Access, Side};
use crate::pool::{Pool, Transition};
use crate::settings::{Face, Mode};

/// The first turn lasts this long.
const TURN_FIRST: Duration = Duration::from_secs(1);
/// So long after a counted pod ended the rest what is left is shared, or rests again: all of a burst are bound by then.
const SHARE_AFTER: Duration = Duration::from_millis(600);
/// Turns double up to this while nobody takes anything.
const TURN_LAST: Duration = Duration::from_secs(30);
/// Turns go by fours: two that share by weight, one that gathers all for counted pods, one for claims.
const TURNS_IN_ROUND: u32 = 4;

/// What steering remembers between observations; all of it comes back within a second after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct Motion {
    node: NodeView,
    /// The watch has shown a count, and this daemon could change it: what was promised by it may be on its way for as
    /// long as the kubelet does not write another one by itself.
    was_shown: bool,
    /// Counted pods and allocated claims that are no news; the pods with the time at which they were seen first.
    known_pods: BTreeMap<PodUid, Duration>,
    known_claims: BTreeSet<ClaimUid>,
    arrivals: Arrivals,
    /// Since when each unit is promised to a claim of which nothing is prepared.
    promised_since: BTreeMap<UnitId, Duration>,
    /// Since when each free unit is free.
    free_since: BTreeMap<UnitId, Duration>,
    /// Since when the node shows the lowered count without a break.
    lowered_since: Option<Duration>,
    /// Since when a unit is on its way out of the count. A higher count may be on its way to the Node at that moment,
    /// so what the Node showed before says nothing about it.
    withdrawn_since: BTreeMap<UnitId, Duration>,
    /// Units that the count promised and that a lower limit keeps counted pods from: shown until they are gone.
    outgoing: BTreeSet<UnitId>,
    /// Units whose devices the published slice shows to claims; `None` while nobody says what is published.
    shown_to_claims: Option<BTreeSet<UnitId>>,
    /// Since when a unit is dark, and no slice shows its device to claims any more.
    dark_since: BTreeMap<UnitId, Duration>,
    turn: Option<Turn>,
    /// Until then pods may come that were scheduled while everything rested, since a counted pod ended the rest.
    burst_ends: Option<Duration>,
    waiting: Waiting,
    wake_at: Option<Duration>,
    /// The daemon was told to stop, and wants no higher count than this any more.
    pub(crate) leaving: Option<u32>,
    /// Since when the lowered count is shown to the last while nobody is in flight, on the way out.
    pub(crate) clear_since: Option<Duration>,
    /// Whether that is long enough.
    pub(crate) clear: bool,
}

/// What is known of the count in the own Node's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
enum NodeView {
    /// Nothing since the start: units stay as they are.
    #[default]
    NotYet,
    /// A role does not let this daemon see or change it, or the changes fail: it may stay so for good.
    Blind,
    /// Nothing, because the server can't be reached. Schedulers may go on with what they read before, and send pods for
    /// every unit that the count of before promised, so units stay as they are.
    Away,
    /// The watch shows this count.
    Shown(u32),
}

impl Motion {
    pub(crate) fn is_node_shown(&self) -> bool {
        matches!(self.node, NodeView::Shown(_))
    }

    pub(crate) fn shows_at_most(&self, count: u32) -> bool {
        match self.node {
            NodeView::Shown(shown) => shown <= count,
            NodeView::NotYet | NodeView::Blind | NodeView::Away => false,
        }
    }
}

impl Motion {
    /// Nothing is shown that could move: what was measured counts for nothing, and begins anew with the next look.
    fn pause(&mut self) {
        self.lowered_since = None;
        self.withdrawn_since.clear();
        self.dark_since.clear();
        self.turn = None;
        self.burst_ends = None;
        self.wake_at = None;
    }

    /// Whether a limit that is in force since a moment does not hide this unit yet.
    pub(crate) fn is_outgoing(&self, unit: &UnitId) -> bool {
        self.outgoing.contains(unit)
    }

    /// Forgets what only a node on which units are shared out needs.
    pub(crate) fn hold_no_turns(&mut self) {
        self.arrivals.take();
        self.turn = None;
        self.burst_ends = None;
    }

    /// Notes that somebody came in this turn.
    fn take_turn(&mut self) {
        if let Some(turn) = &mut self.turn {
            turn.taken = true;
        }
    }

    /// Whether pods may still come that were scheduled while everything rested.
    fn is_in_burst(&self, now: Duration) -> bool {
        self.burst_ends.is_some_and(|ends| now < ends)
    }

    /// Since when a counted pod is known to be bound here; for ever after, if it is not.
    pub(crate) fn known_since(&self, pod: &PodUid) -> Duration {
        self.known_pods.get(pod).copied().unwrap_or(Duration::MAX)
    }
}

/// One turn of those that share out what is free while things keep arriving.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Turn {
    number: u32,
    length: Duration,
    ends: Duration,
    /// Whether anything was given out in it.
    taken: bool,
}

impl Pool {
    /// When this pool wants to be looked at again, as uptime: a move is settled then, a turn over, an eviction,
    /// or the way out.
    #[must_use]
    pub fn wake_at(&self) -> Option<Duration> {
        let motion = &self.seen.motion;
        let clear = motion.clear_since.filter(|_| !motion.clear);
        let clear = clear.map(|since| since + self.settings.pace.settle);
        let due = [motion.wake_at, self.seen.lost.wake_at, clear];
        due.into_iter().flatten().min()
    }

    /// Whether free units move, now or when the server is back: both faces are open, the limits leave room, and the
    /// count can be lowered.
    pub(crate) fn is_mobile(&self) -> bool {
        self.may_move() && self.can_move()
    }

    /// Whether a move can end, now or when the server is back.
    pub(crate) fn can_move(&self) -> bool {
        match self.seen.motion.node {
            NodeView::Shown(_) | NodeView::Away => true,
            NodeView::NotYet | NodeView::Blind => false,
        }
    }

    /// Whether mode and limits leave units to be shared out.
    pub(crate) fn may_move(&self) -> bool {
        let limits = self.settings.limits;
        let hidden = self.ledger.units.keys();
        let hidden = hidden.filter(|unit| self.is_excluded(unit)).count();
        let units = self.ledger.units.len() - hidden;
        let fixed = match (limits.legacy, limits.dra) {
            (Some(legacy), Some(dra)) => {
                u64::from(legacy) + u64::from(dra) <= u64::try_from(units).unwrap_or(u64::MAX)
            }
            (Some(_) | None, Some(_) | None) => false,
        };
        self.settings.mode == Mode::Both && !fixed
    }

    /// Units that nobody holds and that are fit, in order, each with its side.
    pub(crate) fn free_units(&self) -> Vec<(UnitId, Side)> {
        self.ledger
            .in_order()
            .into_iter()
            .map(|(unit, _)| unit)
            .filter(|unit| self.is_fit(unit))
            .filter(|unit| self.ledger.holds_touching(unit).next().is_none())
            .filter_map(|unit| Some((unit.clone(), self.side_of(unit)?)))
            .collect()
    }

    /// Units that claims were allocated and that nothing is prepared on, the last promised last.
    fn promised_units(&self) -> Vec<(UnitId, Side)> {
        let mut promised: Vec<_> = self
            .ledger
            .in_order()
            .into_iter()
            .filter_map(|(unit, record)| {
                let holds = self.ledger.holds_on(unit);
                let only = holds
                    .iter()
                    .all(|hold| matches!(hold.kind, HoldKind::Reserved { .. }));
                let since = self.seen.motion.promised_since.get(unit);
                let since = since.copied().unwrap_or_default();
                (only && !holds.is_empty()).then(|| (since, unit.clone(), record.side))
            })
            .collect();
        promised.sort();
        promised
            .into_iter()
            .map(|(_, unit, side)| (unit, side))
            .collect()
    }

    /// When free units may rest if nobody comes any more, where so many are free.
    fn quiet_at(&self, free: usize) -> Duration {
        let is_scarce = free <= self.ledger.units.len().div_ceil(2);
        let arrivals = &self.seen.motion.arrivals;
        arrivals.quiet_at(self.settings.pace.quiet, is_scarce)
    }

    /// How many units counted pods in flight lack beyond those that are free and promised to nobody.
    fn counted_short(&self) -> u32 {
        let free = self.free_units();
        let counted = free.iter().filter(|(_, side)| side.is_counted()).count();
        self.counted_in_flight()
            .saturating_sub(u32::try_from(counted).unwrap_or(u32::MAX))
    }

    /// How many of `all` units go to the counted side where `wanted` should, so that no face gets more than its limit
    /// lets it show while the other could show it. The sides have `counted` and `claimable` free units already.
    fn share_within_limits(
        &self,
        wanted: usize,
        all: usize,
        counted: usize,
        claimable: usize,
    ) -> usize {
        let most = all.min(self.room(Face::Legacy).saturating_sub(counted));
        let least = all.saturating_sub(self.room(Face::Dra).saturating_sub(claimable));
        // With room on neither side it does not matter where a unit is left.
        wanted.clamp(least.min(most), most)
    }

    /// Free ids that are in the count.
    fn counted_free(&self) -> u32 {
        let units = self.on_offer(Face::Legacy).into_iter();
        let counted = units.filter(|unit| self.side_of(unit).is_some_and(Side::is_counted));
        u32::try_from(counted.count()).unwrap_or(u32::MAX)
    }
}

impl Transition {
    /// Takes what the own Node shows as the count of the resource. `None`: this daemon may not see or not change it;
    /// then nothing moves. What rested stays with the counted pods that the count promised it to, and free units are
    /// split for good only if it was never otherwise.
    pub fn observe_node(&mut self, count: Option<u32>) {
        let motion = &mut self.pool.seen.motion;
        motion.node = count.map_or(NodeView::Blind, NodeView::Shown);
        motion.was_shown |= count.is_some();
        self.settle();
    }

    /// Takes which devices the ResourceSlice in the API shows to claims: while it shows one, a claim may be on its way to
    /// it.
    pub fn observe_slice(&mut self, open: BTreeSet<UnitId>) {
        self.pool.seen.motion.shown_to_claims = Some(open);
        self.settle();
    }

    /// The server that shows the own Node can't be reached: units stay as they are until it is back.
    pub fn observe_node_away(&mut self) {
        self.pool.seen.motion.node = NodeView::Away;
        self.settle();
    }

    /// Lets time pass: moves settle, turns end.
    pub fn pass_time(&mut self) {
        self.settle();
    }

    /// Notes that somebody came for a unit.
    pub(crate) fn arrive(&mut self, face: Face) {
        let motion = &mut self.pool.seen.motion;
        motion.arrivals.note(face, self.now.uptime);
        motion.take_turn();
    }

    /// Notes that so many new pods came for units.
    fn arrive_new(&mut self, face: Face, pods: usize) {
        if pods > 0 {
            let motion = &mut self.pool.seen.motion;
            motion.arrivals.note_new(face, pods, self.now.uptime);
            motion.take_turn();
        }
    }

    /// Notes that a claim lost a unit to a counted pod.
    pub(crate) fn note_lost_race(&mut self) {
        self.pool.seen.motion.arrivals.lose(self.now.uptime);
    }

    /// Decides for every free unit where it is offered.
    pub(crate) fn steer(&mut self) {
        let claimed = self.note_arrivals();
        self.note_free();
        self.watch_the_way_out();
        self.note_promised();
        if self.pool.has_rivals() {
            self.pool.seen.motion.pause();
            return;
        }
        let shares = self.pool.may_move();
        match self.pool.seen.motion.node {
            NodeView::Shown(_) if shares => {}
            NodeView::Shown(_) => {
                self.head_for_share();
                self.call_off();
                self.keep_promises();
                self.settle_moves();
                self.set_wake();
                return;
            }
            NodeView::NotYet if shares => return,
            NodeView::NotYet => return self.head_for_share(),
            NodeView::Away => {
                if !shares {
                    self.head_for_share();
                }
                self.pool.seen.motion.pause();
                return;
            }
            NodeView::Blind => {
                self.stand_still();
                self.confine_at_once(|_| true);
                if !shares || !self.pool.seen.motion.was_shown {
                    self.rebalance(|_| true);
                }
                return;
            }
        }
        self.confine();
        self.split_what_rests();
        if claimed {
            self.hold_back();
        }
        self.call_off();
        self.keep_promises();
        self.settle_moves();
        self.rest_or_turn();
        self.set_wake();
    }

    /// Counted pods that were bound, and claims that were allocated, since the last look. Whether there was a claim.
    fn note_arrivals(&mut self) -> bool {
        let seen = &self.pool.seen;
        let pods: BTreeSet<PodUid> = seen
            .pods
            .iter()
            .flat_map(|pods| &pods.pods)
            .filter(|bound| bound.phase == PodPhase::Live && bound.may_own > 0)
            .map(|bound| bound.uid.clone())
            .collect();
        let claims: BTreeSet<ClaimUid> = seen
            .claims
            .iter()
            .flat_map(|claims| &claims.claims)
            .filter(|claim| claim.devices.iter().any(|d| d.access == Access::Owner))
            .map(|claim| claim.claim.uid.clone())
            .collect();
        let known = &seen.motion.known_pods;
        let counted = pods.iter().filter(|pod| !known.contains_key(*pod)).count();
        let since = |pod: &PodUid| known.get(pod).copied().unwrap_or(self.now.uptime);
        let pods = pods
            .into_iter()
            .map(|pod| (pod.clone(), since(&pod)))
            .collect();
        let claimed = claims.difference(&seen.motion.known_claims).count();
        self.pool.seen.motion.known_pods = pods;
        self.pool.seen.motion.known_claims = claims;
        self.arrive_new(Face::Legacy, counted);
        self.arrive_new(Face::Dra, claimed);
        claimed > 0
    }

    fn note_free(&mut self) {
        let free: BTreeMap<UnitId, Side> = self.pool.free_units().into_iter().collect();
        let now = self.now.uptime;
        let mut outgoing = std::mem::take(&mut self.pool.seen.motion.outgoing);
        outgoing.retain(|unit| {
            let side = self.pool.side_of(unit);
            let leaves = matches!(side, Some(Side::Legacy | Side::Lowering | Side::Yielding));
            leaves && self.pool.is_free_for(unit, Face::Legacy)
        });
        let motion = &mut self.pool.seen.motion;
        motion.outgoing = outgoing;
        motion.free_since.retain(|unit, _| free.contains_key(unit));
        for unit in free.into_keys() {
            motion.free_since.entry(unit).or_insert(now);
        }
        self.note_dark();
    }

    fn note_dark(&mut self) {
        let free = self.pool.free_units();
        let now = self.now.uptime;
        let motion = &mut self.pool.seen.motion;
        let shown = motion.shown_to_claims.as_ref();
        let is_shown = |unit: &UnitId| shown.is_some_and(|shown| shown.contains(unit));
        let dark: BTreeSet<UnitId> = free
            .into_iter()
            .filter(|(unit, side)| *side == Side::Dark && !is_shown(unit))
            .map(|(unit, _)| unit)
            .collect();
        motion.dark_since.retain(|unit, _| dark.contains(unit));
        for unit in dark {
            motion.dark_since.entry(unit).or_insert(now);
        }
    }

    fn note_promised(&mut self) {
        let promised = self.pool.promised_units();
        let promised: BTreeSet<UnitId> = promised.into_iter().map(|(unit, _)| unit).collect();
        let now = self.now.uptime;
        let since = &mut self.pool.seen.motion.promised_since;
        since.retain(|unit, _| promised.contains(unit));
        for unit in promised {
            since.entry(unit).or_insert(now);
        }
    }

    /// Takes a unit from the counted side that it has no room for any more.
    pub(crate) fn send_out(&mut self, unit: &UnitId) {
        let way = match self.pool.side_of(unit) {
            Some(Side::Legacy) => Side::Lowering,
            Some(Side::Rest) => Side::Yielding,
            Some(way @ (Side::Lowering | Side::Yielding)) => way,
            Some(Side::Dra | Side::Dark) | None => return,
        };
        self.set_side(unit, way);
        self.pool.seen.motion.outgoing.insert(unit.clone());
    }

    pub(crate) fn set_side(&mut self, unit: &UnitId, side: Side) {
        if let Some(record) = self.pool.ledger.units.get_mut(unit) {
            record.side = side;
        }
    }

    /// Without the means to lower the count nothing may be on both sides or on the way.
    fn stand_still(&mut self) {
        for record in self.pool.ledger.units.values_mut() {
            match record.side {
                Side::Legacy | Side::Dra => {}
                Side::Rest | Side::Lowering | Side::Yielding | Side::Dark => {
                    record.side = Side::Legacy;
                }
            }
        }
        let motion = &mut self.pool.seen.motion;
        motion.arrivals.take();
        motion.pause();
    }

    /// The first arrival ends the rest. Of what rests a claim leaves half to counted pods, beside what those in flight
    /// need, as far as the limits let both show their half. A counted pod leaves nothing to claims at first: counted
    /// pods of one burst are bound before the first of them is seen, so lowering the count comes too late, while claims
    /// are allocated later than taints can be written. What is left is shared [`SHARE_AFTER`].
    fn split_what_rests(&mut self) {
        let Some(face) = self.pool.seen.motion.arrivals.take() else {
            return;
        };
        let free = self.pool.free_units();
        let mut rest: Vec<UnitId> = Vec::new();
        let mut counted: usize = 0;
        let mut claimable: usize = 0;
        for (unit, side) in free {
            match side {
                Side::Rest => rest.push(unit),
                Side::Legacy => counted += 1,
                Side::Dra => claimable += usize::from(self.pool.may_show(&unit, Face::Dra)),
                Side::Lowering | Side::Yielding | Side::Dark => {}
            }
        }
        let need = self.pool.due().saturating_sub(counted).min(rest.len());
        for unit in rest.split_off(rest.len() - need) {
            self.set_side(&unit, Side::Legacy);
        }
        let share = match face {
            Face::Legacy => rest.len(),
            Face::Dra => rest.len() / 2,
        };
        if face == Face::Legacy && !rest.is_empty() {
            self.share_soon();
        }
        let share = self
            .pool
            .share_within_limits(share, rest.len(), counted + need, claimable);
        for unit in rest.split_off(rest.len() - share) {
            self.set_side(&unit, Side::Legacy);
        }
        for unit in rest {
            self.set_side(&unit, Side::Yielding);
        }
    }

    /// Lets the first turn end soon.
    fn share_soon(&mut self) {
        let ends = self.now.uptime + SHARE_AFTER;
        let motion = &mut self.pool.seen.motion;
        motion.burst_ends = Some(ends);
        motion.turn = Some(Turn {
            number: 0,
            length: TURN_FIRST,
            ends,
            taken: true,
        });
    }

    /// A claim in the burst that a counted pod began: more of both kinds may be on the way, so counted pods get no more
    /// than those need that are bound already, until what is left is shared.
    fn hold_back(&mut self) {
        if !self.pool.seen.motion.is_in_burst(self.now.uptime) {
            return;
        }
        let Shared { units, counted, .. } = self.pool.shared();
        let shared = on(&units, Side::Legacy);
        let spare = (shared.len() + counted).saturating_sub(self.pool.due());
        for unit in shared.into_iter().take(spare) {
            self.set_side(unit, Side::Lowering);
        }
    }

    /// Counted pods that are bound and not served yet get back what was about to be taken from them.
    fn call_off(&mut self) {
        let mut short = self.pool.counted_short();
        for (unit, side) in self.pool.free_units().iter().rev() {
            if short == 0 {
                return;
            }
            if matches!(side, Side::Lowering | Side::Yielding) {
                self.set_side(unit, Side::Legacy);
                short -= 1;
            }
        }
    }

    /// Units that claims were allocated go to the claims' side before any other, except those that counted pods in
    /// flight can't do without: the last allocated yields first.
    fn keep_promises(&mut self) {
        let mut promised = self.pool.promised_units();
        for _ in 0..self.pool.counted_short() {
            let healthy = promised.iter().rposition(|(_, side)| side.is_healthy());
            let Some(last) = healthy else { break };
            let (unit, _) = promised.remove(last);
            self.set_side(&unit, Side::Legacy);
        }
        for (unit, side) in promised {
            match side {
                Side::Legacy => self.set_side(&unit, Side::Lowering),
                Side::Rest => self.set_side(&unit, Side::Yielding),
                Side::Dark => self.set_side(&unit, Side::Dra),
                Side::Dra | Side::Lowering | Side::Yielding => {}
            }
        }
    }

    fn note_withdrawn(&mut self) {
        let now = self.now.uptime;
        let withdrawn = &mut self.pool.seen.motion.withdrawn_since;
        for (unit, record) in &self.pool.ledger.units {
            match record.side {
                Side::Lowering | Side::Yielding => {
                    withdrawn.entry(unit.clone()).or_insert(now);
                }
                Side::Legacy | Side::Dra | Side::Rest | Side::Dark => {
                    withdrawn.remove(unit);
                }
            }
        }
    }

    fn settle_moves(&mut self) {
        self.note_withdrawn();
        let now = self.now.uptime;
        let settle = self.pool.settings.pace.settle;
        let is_lowered = self.pool.seen.motion.shows_at_most(self.pool.count());
        let motion = &mut self.pool.seen.motion;
        if is_lowered {
            motion.lowered_since.get_or_insert(now);
        } else {
            motion.lowered_since = None;
        }
        let settled = |since: Duration| now.saturating_sub(since) >= settle;
        let lowered = motion.lowered_since.is_some_and(settled);
        let dark: Vec<UnitId> = motion
            .dark_since
            .iter()
            .filter(|(_, since)| settled(**since))
            .map(|(unit, _)| unit.clone())
            .collect();
        let withdrawn: Vec<UnitId> = motion
            .withdrawn_since
            .iter()
            .filter(|(_, since)| settled(**since))
            .map(|(unit, _)| unit.clone())
            .collect();
        let nobody_short = self.pool.counted_in_flight() <= self.pool.counted_free();
        if lowered && nobody_short {
            for unit in withdrawn {
                self.set_side(&unit, Side::Dra);
                self.pool.seen.motion.withdrawn_since.remove(&unit);
            }
        }
        for unit in dark {
            self.set_side(&unit, Side::Legacy);
            self.pool.seen.motion.dark_since.remove(&unit);
        }
    }

    fn rest_or_turn(&mut self) {
        let now = self.now.uptime;
        let pace = self.pool.settings.pace;
        let free = self.pool.free_units();
        let moves = free
            .iter()
            .any(|(_, side)| matches!(side, Side::Lowering | Side::Yielding | Side::Dark));
        let motion = &self.pool.seen.motion;
        let has_dwelt = |unit: &UnitId| {
            let since = motion.free_since.get(unit).copied().unwrap_or(now);
            now.saturating_sub(since) >= pace.dwell
        };
        let quiet_at = self.pool.quiet_at(free.len());
        let shared = self.pool.shared().units.into_iter();
        let dwelt: Vec<(UnitId, Side)> = shared.filter(|(unit, _)| has_dwelt(unit)).collect();
        let nobody_comes = now >= quiet_at && !motion.is_in_burst(now);
        let quiet = nobody_comes && self.pool.counted_in_flight() == 0;
        if moves {
            return;
        }
        let demand = self.weigh_demand();
        let may_rest = quiet && !demand.as_ref().is_some_and(Meant::is_contended);
        if may_rest || demand.is_some() {
            self.pool.seen.motion.turn = None;
        }
        if may_rest {
            for (unit, _) in dwelt {
                self.set_side(&unit, Side::Rest);
            }
        } else if !self.clear_over_limit(&dwelt) {
            match demand {
                Some(meant) => self.move_for(&meant, &dwelt),
                None => self.take_turns(&dwelt),
            }
        }
    }

    /// Moves what a limit keeps a face from showing to the other side, if that may show it. Whether it moved any.
    fn clear_over_limit(&mut self, dwelt: &[(UnitId, Side)]) -> bool {
        let shared = self.pool.shared();
        let free = &shared.units;
        let (counted, claimable) = (on(free, Side::Legacy).len(), on(free, Side::Dra).len());
        let all = counted + claimable;
        let want = self
            .pool
            .share_within_limits(counted, all, shared.counted, shared.claimable);
        self.share_out(dwelt, want, counted)
    }

    /// While things keep arriving, what is free is shared by weight, and every second pair of turns gathers all of
    /// it on one side and then on the other, so that large requests come through.
    fn take_turns(&mut self, free: &[(UnitId, Side)]) {
        let now = self.now.uptime;
        let turn = self.pool.seen.motion.turn.get_or_insert(Turn {
            number: 0,
            length: TURN_FIRST,
            ends: now + TURN_FIRST,
            taken: false,
        });
        if now < turn.ends {
            return;
        }
        turn.length = if turn.taken {
            TURN_FIRST
        } else {
            (turn.length * 2).min(TURN_LAST)
        };
        turn.number = turn.number.wrapping_add(1);
        turn.taken = false;
        turn.ends = now + turn.length;
        let turn_number = turn.number;
        let legacy = on(free, Side::Legacy).len();
        let all = legacy + on(free, Side::Dra).len();
        let want = self.wanted_in_turn(turn_number, all);
        // What has not dwelt yet stays where it is, and takes its part of what the limits leave.
        let every = self.pool.shared();
        let (staying, staying_claimable) = (
            on(&every.units, Side::Legacy).len() - legacy + every.counted,
            on(&every.units, Side::Dra).len() - (all - legacy) + every.claimable,
        );
        let want = self
            .pool
            .share_within_limits(want, all, staying, staying_claimable);
        self.share_out(free, want, legacy);
    }

    /// How many of `all` free units are for counted pods in a turn, limits aside.
    fn wanted_in_turn(&self, turn: u32, all: usize) -> usize {
        let weights = self.pool.settings.weights;
        let total = u64::from(weights.legacy) + u64::from(weights.dra);
        let (legacy, total) = if total == 0 {
            (1, 2)
        } else {
            (u64::from(weights.legacy), total)
        };
        let share = u64::try_from(all)
            .unwrap_or(u64::MAX)
            .saturating_mul(legacy);
        let share = match turn % TURNS_IN_ROUND {
            2 => return all,
            3 => return 0,
            // What can't be shared out is for either kind in its turn, or one free unit would be for one kind alone.
            1 => share / total,
            _ => share.div_ceil(total),
        };
        usize::try_from(share).unwrap_or(all)
    }

    /// Begins the moves after which the counted side has `want` of these free units and not `have` any more: to
    /// claims from the head of the list, to counted pods from its tail. Whether it began any.
    fn share_out(&mut self, free: &[(UnitId, Side)], want: usize, have: usize) -> bool {
        let legacy = on(free, Side::Legacy).into_iter();
        let to_dra: Vec<UnitId> = legacy.take(have.saturating_sub(want)).cloned().collect();
        let dra = on(free, Side::Dra).into_iter().rev();
        let to_legacy: Vec<UnitId> = dra.take(want.saturating_sub(have)).cloned().collect();
        for unit in &to_dra {
            self.set_side(unit, Side::Lowering);
        }
        for unit in &to_legacy {
            self.set_side(unit, Side::Dark);
        }
        !to_dra.is_empty() || !to_legacy.is_empty()
    }

    /// When the next step can be due.
    fn set_wake(&mut self) {
        let pace = self.pool.settings.pace;
        let free = self.pool.free_units();
        self.note_withdrawn();
        self.note_dark();
        let motion = &self.pool.seen.motion;
        let mut times: Vec<Duration> = Vec::new();
        if let Some(lowered) = motion.lowered_since {
            let since = motion.withdrawn_since.values();
            times.extend(since.map(|since| (*since).max(lowered) + pace.settle));
        }
        times.extend(motion.dark_since.values().map(|since| *since + pace.settle));
        if free.iter().any(|(_, side)| *side != Side::Rest) {
            times.push(self.pool.quiet_at(free.len()));
            times.extend(motion.free_since.values().map(|since| *since + pace.dwell));
            times.extend(motion.turn.as_ref().map(|turn| turn.ends));
        }
        times.extend(motion.waiting.wakes());
        let now = self.now.uptime;
        self.pool.seen.motion.wake_at = times.into_iter().filter(|at| *at > now).min();
    }
}

fn on(free: &[(UnitId, Side)], wanted: Side) -> Vec<&UnitId> {
    free.iter()
        .filter(|(_, side)| *side == wanted)
        .map(|(unit, _)| unit)
        .collect()
}
