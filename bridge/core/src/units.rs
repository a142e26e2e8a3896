//! The units of a ledger, and which of them share hardware.

use std::collections::BTreeMap;
use std::collections::btree_map::{IterMut, ValuesMut};
use std::ops::Deref;

use crate::id::UnitId;
use crate::ledger::{UnitKind, UnitRecord};

/// The units of a node by UUID. Beside them stands which GPU has which instances: that is asked for each unit several
/// times in a transition, and a search for it would make each of them grow with the square of the node.
///
/// Reads like the map that it holds. What kind of hardware a unit is never changes while it is in here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Units {
    records: BTreeMap<UnitId, UnitRecord>,
    /// The instances of each GPU that has some, known or not, in the order of their UUIDs.
    parts: BTreeMap<UnitId, Vec<UnitId>>,
}

impl Units {
    /// Adds a unit; the record that it had before comes back.
    pub fn insert(&mut self, unit: UnitId, record: UnitRecord) -> Option<UnitRecord> {
        let before = self.remove(&unit);
        if let UnitKind::Mig { parent } = &record.kind {
            let parts = self.parts.entry(parent.clone()).or_default();
            let place = parts.partition_point(|other| *other < unit);
            parts.insert(place, unit.clone());
        }
        self.records.insert(unit, record);
        before
    }

    /// Takes a unit out.
    pub fn remove(&mut self, unit: &UnitId) -> Option<UnitRecord> {
        let record = self.records.remove(unit)?;
        if let UnitKind::Mig { parent } = &record.kind
            && let Some(parts) = self.parts.get_mut(parent)
        {
            parts.retain(|other| other != unit);
            if parts.is_empty() {
                self.parts.remove(parent);
            }
        }
        Some(record)
    }

    /// A record to be changed, but for its kind.
    pub(crate) fn get_mut(&mut self, unit: &UnitId) -> Option<&mut UnitRecord> {
        self.records.get_mut(unit)
    }

    /// All records to be changed, but for their kinds.
    pub(crate) fn values_mut(&mut self) -> ValuesMut<'_, UnitId, UnitRecord> {
        self.records.values_mut()
    }

    /// All units, with their records to be changed, but for their kinds.
    pub(crate) fn iter_mut(&mut self) -> IterMut<'_, UnitId, UnitRecord> {
        self.records.iter_mut()
    }

    /// The units that share hardware with this one, itself left out: a MIG instance and its parent GPU. Instances of one
    /// GPU do not share any.
    pub(crate) fn overlapping<'a>(
        &'a self,
        unit: &UnitId,
    ) -> impl Iterator<Item = &'a UnitId> + use<'a> {
        let of_whole_gpus = self.parts.is_empty();
        let record = (!of_whole_gpus).then(|| self.records.get(unit)).flatten();
        let parent = record.and_then(|record| match &record.kind {
            UnitKind::Mig { parent } => self.records.get_key_value(parent),
            UnitKind::Gpu => None,
        });
        let parts = self.parts.get(unit).into_iter().flatten();
        parent.map(|(parent, _)| parent).into_iter().chain(parts)
    }
}

impl Deref for Units {
    type Target = BTreeMap<UnitId, UnitRecord>;

    fn deref(&self) -> &Self::Target {
        &self.records
    }
}

impl<'a> IntoIterator for &'a Units {
    type Item = (&'a UnitId, &'a UnitRecord);
    type IntoIter = std::collections::btree_map::Iter<'a, UnitId, UnitRecord>;

    fn into_iter(self) -> Self::IntoIter {
        self.records.iter()
    }
}
