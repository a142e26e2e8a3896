//! How many units each face gets where mode or limits leave nothing to share out: a fixed split of the free ones.
//!
//! The share is a pure function of settings and counts. Where the count in the Node can be lowered a new share is
//! reached by moves, as any other change of side, so that a change of mode or limits refuses nobody who was promised
//! a unit before; where it can't be, free units turn at once.

use std::collections::BTreeSet;

use crate::hold::Hold;
use crate::id::UnitId;
use crate::ledger::Side;
use crate::pool::{Pool, Transition};
use crate::settings::{Face, Mode, Settings};

/// How many of `units` units belong to the Legacy side.
pub(crate) fn legacy_share(settings: &Settings, units: u32) -> u32 {
    match settings.mode {
        Mode::Legacy => units,
        // Drained: all of them leave the count, and the other face is closed.
        Mode::Dra | Mode::Drained => 0,
        Mode::Both => {
            let weights = settings.weights;
            let total = u64::from(weights.legacy) + u64::from(weights.dra);
            // The odd unit goes to the counted pods: their refusals are the ones that can't be repaired.
            let by_weight = if total == 0 {
                units.div_ceil(2)
            } else {
                let share = (u64::from(units) * u64::from(weights.legacy)).div_ceil(total);
                u32::try_from(share).unwrap_or(units)
            };
            let most = settings.limits.legacy.unwrap_or(units).min(units);
            let least = match settings.limits.dra {
                Some(dra) => units.saturating_sub(dra).min(most),
                None if settings.limits.legacy.is_some() => most,
                None => 0,
            };
            by_weight.max(settings.min_legacy).clamp(least, most)
        }
    }
}

impl Pool {
    /// The face that has a unit now: its holder's, or else the one whose side it is on or on its way to.
    fn belongs_to(&self, unit: &UnitId, side: Side) -> Face {
        let holder = self.ledger.holds_on(unit).iter().find_map(Hold::face);
        holder.unwrap_or(match side {
            Side::Legacy | Side::Rest | Side::Dark => Face::Legacy,
            Side::Dra | Side::Lowering | Side::Yielding => Face::Dra,
        })
    }

    /// How many of the units that no rule confines the counted side should have, and how many it has.
    fn counted_share(&self) -> (usize, usize) {
        let (settings, shared) = self.settings_of_shared();
        let count = u32::try_from(shared).unwrap_or(u32::MAX);
        let want = usize::try_from(legacy_share(&settings, count)).unwrap_or(usize::MAX);
        let have = self
            .ledger
            .units
            .iter()
            .filter(|(unit, _)| self.confined_to(unit).is_none())
            .filter(|(unit, record)| self.belongs_to(unit, record.side) == Face::Legacy)
            .count();
        (want, have)
    }
}

/// What may leave the counted side at once: what it does not show, and of what it shows all but as many as counted pods
/// in flight need. A limit can hide units, and those are no help to them.
pub(crate) struct Spare {
    shown: BTreeSet<UnitId>,
    left: usize,
}

impl Spare {
    pub(crate) fn of(pool: &Pool) -> Self {
        let shown = pool.on_offer(Face::Legacy).into_iter();
        let shown: BTreeSet<UnitId> = shown
            .filter(|unit| pool.ledger.holds_touching(unit).next().is_none())
            .cloned()
            .collect();
        let left = shown.len().saturating_sub(pool.due());
        Self { shown, left }
    }

    /// Whether this unit may leave; it is taken for gone then.
    pub(crate) fn leaves(&mut self, unit: &UnitId) -> bool {
        if !self.shown.contains(unit) {
            return true;
        }
        let may_leave = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may_leave
    }
}

impl Transition {
    /// Gives each face its share again, by turning free units at once, of those that `may_turn`.
    pub(crate) fn rebalance(&mut self, may_turn: impl Fn(&UnitId) -> bool) {
        self.confine_at_once(&may_turn);
        let (want, have) = self.pool.counted_share();
        let free: Vec<(UnitId, Side)> = self
            .pool
            .ledger
            .in_order()
            .into_iter()
            .filter(|(unit, _)| self.pool.ledger.holds_touching(unit).next().is_none())
            .filter(|(unit, _)| may_turn(unit) && self.pool.confined_to(unit).is_none())
            .map(|(unit, record)| (unit.clone(), record.side))
            .collect();
        // Claims are given devices from the head of the list and counted pods from its tail, so units turn to
        // claims from the head and to counted pods from the tail.
        if have > want {
            let mut spare = Spare::of(&self.pool);
            let free = free.iter().filter(|(_, side)| *side == Side::Legacy);
            let spared = free.filter(|(unit, _)| spare.leaves(unit));
            for (unit, _) in spared.take(have - want) {
                self.turn(unit, Face::Dra);
            }
        } else {
            let free = free.iter().rev().filter(|(_, side)| *side == Side::Dra);
            for (unit, _) in free.take(want - have) {
                self.turn(unit, Face::Legacy);
            }
        }
    }

    /// Begins the moves after which each face has its share, and ends the rest: nothing is on offer to both any more.
    pub(crate) fn head_for_share(&mut self) {
        self.pool.seen.motion.hold_no_turns();
        self.confine();
        let (want, have) = self.pool.counted_share();
        let mut free = self.pool.free_units();
        free.retain(|(unit, _)| self.pool.confined_to(unit).is_none());
        let counted: Vec<_> = free.iter().filter(|(_, side)| side.is_counted()).collect();
        let dark: Vec<_> = free.iter().filter(|(_, it)| *it == Side::Dark).collect();
        let mut surplus = have.saturating_sub(want);
        // Of no count yet: it goes back where it came from.
        for (unit, _) in dark.into_iter().take(surplus) {
            self.set_side(unit, Side::Dra);
            surplus -= 1;
        }
        // Of these, what pods in flight need is called off in the same step.
        for (place, (unit, side)) in counted.into_iter().enumerate() {
            let way = match side {
                Side::Rest => Side::Yielding,
                Side::Legacy | Side::Dra | Side::Lowering | Side::Yielding | Side::Dark => {
                    Side::Lowering
                }
            };
            self.set_side(unit, if place < surplus { way } else { Side::Legacy });
        }
        self.call_back(&free, want.saturating_sub(have));
    }

    /// Gives so many units to the counted side: first those that are about to leave it, then free ones of the other.
    fn call_back(&mut self, free: &[(UnitId, Side)], lacking: usize) {
        let tail = || free.iter().rev();
        let motion = &self.pool.seen.motion;
        let leaving = tail()
            .filter(|(_, it)| matches!(it, Side::Lowering | Side::Yielding))
            .filter(|(unit, _)| !motion.is_outgoing(unit));
        let claimable = tail().filter(|(_, it)| *it == Side::Dra);
        let chosen: Vec<_> = leaving.chain(claimable).take(lacking).collect();
        for (unit, side) in chosen {
            let way = if *side == Side::Dra {
                Side::Dark
            } else {
                Side::Legacy
            };
            self.set_side(unit, way);
        }
    }

    pub(crate) fn turn(&mut self, unit: &UnitId, face: Face) {
        if let Some(record) = self.pool.ledger.units.get_mut(unit) {
            record.side = Side::of(face);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Limits, Weights};

    fn share(mode: Mode, legacy: Option<u32>, dra: Option<u32>, weights: (u32, u32)) -> u32 {
        let settings = Settings {
            mode,
            limits: Limits { legacy, dra },
            weights: Weights {
                legacy: weights.0,
                dra: weights.1,
            },
            ..Settings::default()
        };
        legacy_share(&settings, 8)
    }

    #[test]
    fn limits_that_add_up_to_the_node_are_the_split() {
        assert_eq!(share(Mode::Both, Some(5), Some(3), (1, 1)), 5);
        assert_eq!(share(Mode::Both, Some(0), Some(8), (1, 1)), 0);
    }

    #[test]
    fn one_limit_leaves_the_rest_to_the_other_face() {
        assert_eq!(share(Mode::Both, Some(2), None, (1, 1)), 2);
        assert_eq!(share(Mode::Both, None, Some(2), (1, 1)), 6);
    }

    #[test]
    fn without_limits_the_weights_decide_and_the_odd_unit_is_counted() {
        assert_eq!(share(Mode::Both, None, None, (1, 1)), 4);
        assert_eq!(share(Mode::Both, None, None, (1, 2)), 3);
        assert_eq!(share(Mode::Both, None, None, (0, 0)), 4);
    }

    #[test]
    fn limits_beyond_the_node_only_cap_the_weights() {
        assert_eq!(share(Mode::Both, Some(8), Some(8), (1, 1)), 4);
        assert_eq!(share(Mode::Both, Some(8), Some(2), (1, 1)), 6);
        assert_eq!(share(Mode::Both, Some(2), Some(2), (1, 1)), 2);
    }

    #[test]
    fn a_mode_of_one_face_gives_it_everything() {
        assert_eq!(share(Mode::Legacy, Some(5), Some(3), (1, 1)), 8);
        assert_eq!(share(Mode::Dra, Some(5), Some(3), (1, 1)), 0);
    }
}
