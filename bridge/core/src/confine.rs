//! Free units that are not shared out between the faces: what the admin has given to one of them, or to none, and what
//! counted pods keep so that the Node's count never says 0.
//!
//! A unit goes where it belongs by the same steps as any other, so nobody who was promised it is refused, and who has
//! it is not touched.

use std::collections::BTreeMap;

use crate::devices::Faces;
use crate::id::UnitId;
use crate::ledger::{Side, UnitKind, UnitRecord};
use crate::pool::{Pool, Transition};
use crate::settings::{Face, Limits, Mode, Settings};
use crate::split::Spare;

/// The free units that are shared out, and how many of the others each face shows beside them.
pub(crate) struct Shared {
    pub(crate) units: Vec<(UnitId, Side)>,
    pub(crate) counted: usize,
    pub(crate) claimable: usize,
}

impl Settings {
    /// The faces that may offer a unit: what the first rule says that is for it.
    pub(crate) fn faces_of(&self, record: &UnitRecord) -> Faces {
        let rule = self.devices.iter().find(|rule| rule.is_for(record));
        rule.map_or(Faces::BOTH, |rule| rule.faces)
    }

    /// The face that a unit is for alone, since a rule says so; `None`: it is shared out. What no open face may offer
    /// is kept on the claims' side, where it is hidden.
    pub(crate) fn confines(&self, record: &UnitRecord) -> Option<Face> {
        let faces = self.faces_of(record);
        let counted = faces.legacy && self.mode.opens(Face::Legacy);
        (faces != Faces::BOTH).then_some(if counted { Face::Legacy } else { Face::Dra })
    }
}

impl Pool {
    /// The record by which a unit is judged: an instance goes with its GPU.
    fn judged(&self, unit: &UnitId) -> Option<&UnitRecord> {
        let record = self.ledger.units.get(unit)?;
        match &record.kind {
            UnitKind::Gpu => Some(record),
            UnitKind::Mig { parent } => self.ledger.units.get(parent).or(Some(record)),
        }
    }

    /// The faces that may offer a unit, by the rules; none may one that is not known.
    fn faces_of(&self, unit: &UnitId) -> Faces {
        let record = self.judged(unit);
        record.map_or(Faces::NONE, |record| self.settings.faces_of(record))
    }

    /// Whether the rules let a face offer a unit.
    pub(crate) fn may_show(&self, unit: &UnitId, face: Face) -> bool {
        self.faces_of(unit).allows(face)
    }

    /// Whether the rules leave a unit to nobody.
    pub(crate) fn is_excluded(&self, unit: &UnitId) -> bool {
        self.faces_of(unit) == Faces::NONE
    }

    /// The face that a unit is for alone, since a rule says so.
    pub(crate) fn confined_to(&self, unit: &UnitId) -> Option<Face> {
        self.settings.confines(self.judged(unit)?)
    }

    /// How many units a face may ever show, limits aside.
    pub(crate) fn showable(&self, face: Face) -> usize {
        let units = self.ledger.units.keys();
        units.filter(|unit| self.may_show(unit, face)).count()
    }

    /// Free units that are not shared out, each with the face that it is for.
    pub(crate) fn kept(&self) -> BTreeMap<UnitId, Face> {
        let free = self.free_units();
        let mut kept: BTreeMap<UnitId, Face> = free
            .iter()
            .filter_map(|(unit, _)| Some((unit.clone(), self.confined_to(unit)?)))
            .collect();
        if self.settings.mode != Mode::Both {
            return kept;
        }
        let counted = kept.values().filter(|face| **face == Face::Legacy).count();
        let least = usize::try_from(self.settings.min_legacy).unwrap_or(usize::MAX);
        let lacking = least.saturating_sub(self.held_through(Face::Legacy) + counted);
        let room = self.room(Face::Legacy).saturating_sub(counted);
        let mut others: Vec<&(UnitId, Side)> = free
            .iter()
            .rev()
            .filter(|(unit, _)| !kept.contains_key(unit))
            .collect();
        // The fewest moves, and always the same units.
        others.sort_by_key(|(_, side)| match side {
            Side::Legacy => 0,
            Side::Rest => 1,
            Side::Lowering | Side::Yielding => 2,
            Side::Dark => 3,
            Side::Dra => 4,
        });
        let chosen: Vec<UnitId> = others
            .into_iter()
            .take(lacking.min(room))
            .map(|(unit, _)| unit.clone())
            .collect();
        kept.extend(chosen.into_iter().map(|unit| (unit, Face::Legacy)));
        kept
    }

    /// The free units that are shared out.
    pub(crate) fn shared(&self) -> Shared {
        let kept = self.kept();
        let counted = kept.values().filter(|face| **face == Face::Legacy).count();
        let claimable = kept
            .iter()
            .filter(|(unit, face)| **face == Face::Dra && self.may_show(unit, Face::Dra))
            .count();
        let mut units = self.free_units();
        units.retain(|(unit, _)| !kept.contains_key(unit));
        Shared {
            units,
            counted,
            claimable,
        }
    }

    /// The settings for the units that no rule confines, and how many of those there are.
    pub(crate) fn settings_of_shared(&self) -> (Settings, usize) {
        let mut confined = [0, 0];
        let mut shared = 0;
        for unit in self.ledger.units.keys() {
            match self.confined_to(unit) {
                None => shared += 1,
                Some(Face::Legacy) => confined[0] += 1,
                Some(Face::Dra) if self.may_show(unit, Face::Dra) => confined[1] += 1,
                Some(Face::Dra) => {}
            }
        }
        let less = |limit: Option<u32>, by: u32| limit.map(|limit| limit.saturating_sub(by));
        let settings = Settings {
            limits: Limits {
                legacy: less(self.settings.limits.legacy, confined[0]),
                dra: less(self.settings.limits.dra, confined[1]),
            },
            min_legacy: self.settings.min_legacy.saturating_sub(confined[0]),
            ..self.settings.clone()
        };
        (settings, shared)
    }
}

impl Transition {
    /// Begins the moves of free units that are for one face alone to where they belong.
    pub(crate) fn confine(&mut self) {
        for (unit, face) in self.pool.kept() {
            let Some(side) = self.pool.side_of(&unit) else {
                continue;
            };
            let way = match (face, side) {
                (Face::Legacy, Side::Rest | Side::Lowering | Side::Yielding) => Side::Legacy,
                (Face::Legacy, Side::Dra) => Side::Dark,
                (Face::Dra, Side::Legacy) => Side::Lowering,
                (Face::Dra, Side::Rest) => Side::Yielding,
                (Face::Dra, Side::Dark) => Side::Dra,
                (Face::Legacy, Side::Legacy | Side::Dark)
                | (Face::Dra, Side::Dra | Side::Lowering | Side::Yielding) => continue,
            };
            self.set_side(&unit, way);
        }
    }

    /// The same at once, where the count can't be lowered; but what counted pods in flight need stays with them.
    pub(crate) fn confine_at_once(&mut self, may_turn: impl Fn(&UnitId) -> bool) {
        let free = self.pool.free_units();
        let mut spare = Spare::of(&self.pool);
        for (unit, side) in free.iter().filter(|(unit, _)| may_turn(unit)) {
            match (self.pool.confined_to(unit), side) {
                (Some(Face::Legacy), Side::Dra) => self.turn(unit, Face::Legacy),
                (Some(Face::Dra), Side::Legacy) if spare.leaves(unit) => {
                    self.turn(unit, Face::Dra);
                }
                _ => {}
            }
        }
    }
}
