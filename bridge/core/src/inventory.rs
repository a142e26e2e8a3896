//! Rule 12: which units there are. A unit once seen stays until an admin forgets it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::gpu::Gpu;
use crate::id::UnitId;
use crate::ledger::{Side, UnitKind, UnitRecord};
use crate::pool::{Presence, Transition};
use crate::report::Report;
use crate::settings::Face;
use crate::topology::Topology;

/// What NVML says about the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inventory {
    /// It answers, and these GPUs do too.
    Seen(Vec<Gpu>),
    /// It does not answer at all: no library, no driver, or a version mismatch.
    Unavailable,
}

impl Transition {
    /// Takes what NVML says: new GPUs join, missing ones are lost, and nobody's hold is touched.
    pub fn observe_inventory(&mut self, inventory: Inventory) {
        match inventory {
            // What was lost stays lost until NVML shows it again; of the others nothing is known now.
            Inventory::Unavailable => self
                .pool
                .seen
                .presence
                .retain(|_, presence| *presence == Presence::Lost),
            Inventory::Seen(gpus) => {
                self.lose_all_but(&gpus);
                let known: BTreeSet<UnitId> = self.pool.ledger.units.keys().cloned().collect();
                for gpu in gpus {
                    self.see(gpu);
                }
                if !self.pool.may_move() {
                    self.rebalance(|unit| !known.contains(unit));
                }
            }
        }
        self.steer();
        self.settle();
    }

    /// Takes which units no container could use now, each with what it lacks on the host. Whoever has one keeps it.
    pub fn observe_unfit(&mut self, unfit: BTreeMap<UnitId, String>) {
        self.pool.seen.unfit = unfit;
    }

    /// Takes what was read of the connections between the units. No unit changes sides or hands for it.
    pub fn observe_topology(&mut self, topology: Arc<Topology>) {
        self.pool.seen.topology = topology;
    }

    fn lose_all_but(&mut self, gpus: &[Gpu]) {
        let missing: Vec<_> = self
            .pool
            .ledger
            .units
            .keys()
            .filter(|unit| !gpus.iter().any(|gpu| gpu.uuid == **unit))
            .cloned()
            .collect();
        for unit in missing {
            let before = self.pool.seen.presence.insert(unit.clone(), Presence::Lost);
            if before != Some(Presence::Lost) {
                self.note_presence(&unit, Presence::Lost);
                self.report(Report::UnitLost { unit });
            }
        }
    }

    fn see(&mut self, gpu: Gpu) {
        let unit = gpu.uuid.clone();
        let before = self.pool.presence(&unit);
        self.pool
            .seen
            .presence
            .insert(unit.clone(), Presence::Present);
        if let Some(record) = self.pool.ledger.units.get_mut(&unit) {
            if *record.gpu != gpu {
                record.gpu = Arc::new(gpu);
            }
            self.note_presence(&unit, Presence::Present);
            if before == Presence::Lost {
                self.report(Report::UnitReturned { unit });
            }
            return;
        }
        let mut record = UnitRecord {
            number: self.free_number(gpu.minor),
            kind: UnitKind::Gpu,
            capacity: NonZeroU32::MIN,
            side: Side::Legacy,
            gpu: Arc::new(gpu),
        };
        // What is new was promised to nobody: it begins on the side where it belongs.
        if self.pool.settings.confines(&record) == Some(Face::Dra) {
            record.side = Side::Dra;
        }
        self.pool.ledger.units.insert(unit.clone(), record);
        self.report(Report::UnitAdded { unit });
    }

    /// The minor number where it is free, as NVIDIA's driver names devices; else the lowest free number.
    fn free_number(&self, minor: u32) -> u32 {
        let taken = |number: u32| {
            self.pool
                .ledger
                .units
                .values()
                .any(|record| record.number == number)
        };
        if taken(minor) {
            (0..=u32::MAX)
                .find(|number| !taken(*number))
                .unwrap_or(minor)
        } else {
            minor
        }
    }
}
