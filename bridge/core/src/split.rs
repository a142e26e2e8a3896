//! How many units each face gets while nothing moves between them: a fixed split of the free ones.
//!
//! The policy is a pure function of settings and counts. Moves with their settle times, the rest on both sides,
//! and turns replace it; nothing else in the core knows how sides are chosen.

use crate::id::UnitId;
use crate::ledger::Side;
use crate::pool::{Pool, Transition};
use crate::settings::{Face, Mode, Settings};

/// How many of `units` units belong to the Legacy side.
pub(crate) fn legacy_share(settings: &Settings, units: u32) -> u32 {
    match settings.mode {
        Mode::Legacy => units,
        Mode::Dra => 0,
        Mode::Both | Mode::Drained => {
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
            by_weight.clamp(least, most)
        }
    }
}

impl Pool {
    /// The face that has a unit now: its holder's, or the side on which it is free.
    fn belongs_to(&self, unit: &UnitId, side: Side) -> Side {
        self.ledger
            .holds_on(unit)
            .iter()
            .find_map(|hold| hold.face())
            .map_or(side, Side::of)
    }
}

impl Transition {
    /// Gives each face its share again, by turning free units only.
    pub(crate) fn rebalance(&mut self) {
        let units: Vec<(UnitId, Side, bool)> = self
            .pool
            .ledger
            .in_order()
            .into_iter()
            .map(|(unit, record)| {
                let side = self.pool.belongs_to(unit, record.side);
                let free = self.pool.ledger.holds_touching(unit).next().is_none();
                (unit.clone(), side, free)
            })
            .collect();
        let count = u32::try_from(units.len()).unwrap_or(u32::MAX);
        let want = usize::try_from(legacy_share(&self.pool.settings, count)).unwrap_or(usize::MAX);
        let have = units
            .iter()
            .filter(|(_, side, _)| *side == Side::Legacy)
            .count();
        // Claims are given devices from the head of the list and counted pods from its tail, so units turn to
        // claims from the head and to counted pods from the tail.
        if have > want {
            let free: Vec<_> = units
                .iter()
                .filter(|(_, side, free)| *free && *side == Side::Legacy)
                .collect();
            // Counted pods that are bound already find what they were bound on.
            let due = usize::try_from(self.pool.counted_in_flight()).unwrap_or(usize::MAX);
            let spare = free.len().saturating_sub(due);
            for (unit, _, _) in free.into_iter().take((have - want).min(spare)) {
                self.turn(unit, Face::Dra);
            }
        } else {
            let free = units
                .iter()
                .rev()
                .filter(|(_, side, free)| *free && *side == Side::Dra);
            for (unit, _, _) in free.take(want - have) {
                self.turn(unit, Face::Legacy);
            }
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
