//! The pool as people see it.

use std::collections::BTreeSet;
use std::time::SystemTime;

use crate::health::{Fault, Recovery};
use crate::hold::Hold;
use crate::id::{ClaimRef, DeviceId, DeviceName, UnitId};
use crate::ledger::Side;
use crate::pool::{Pool, Presence, Standing};
use crate::rival::Rival;
use crate::settings::Settings;

/// What a unit is in, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnitState {
    /// Free, offered to counted pods.
    FreeLegacy,
    /// Free, offered to claims.
    FreeDra,
    /// Free, offered to both while nothing moves.
    FreeRest,
    /// Free, on the way from one side to the other.
    Moving,
    /// Held; the hold says by whom.
    Held,
    /// The GPU does not answer, and nobody holds it.
    Lost,
    /// The driver told of an error that closes the GPU, and nobody holds it.
    Faulty,
    /// NVML has not spoken about it since the start.
    Unseen,
}

impl UnitState {
    /// The word in status and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FreeLegacy => "FreeLegacy",
            Self::FreeDra => "FreeDra",
            Self::FreeRest => "FreeRest",
            Self::Moving => "Moving",
            Self::Held => "Held",
            Self::Lost => "Lost",
            Self::Faulty => "Faulty",
            Self::Unseen => "Unseen",
        }
    }
}

/// One unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitStatus {
    /// Its UUID.
    pub unit: UnitId,
    /// Its name in the slice.
    pub device: DeviceName,
    /// The id that stands for it at the kubelet.
    pub id: Option<DeviceId>,
    /// NVML's product name.
    pub product_name: String,
    /// Where it is offered while free.
    pub side: Side,
    /// In one word.
    pub state: UnitState,
    /// Whether NVML sees the GPU.
    pub presence: Presence,
    /// What a container that is given the unit would miss on the host, in words.
    pub lacks: Option<String>,
    /// The error that closes it.
    pub fault: Option<FaultStatus>,
    /// Who holds it.
    pub holds: Vec<Hold>,
}

/// Why a unit is closed, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultStatus {
    /// The error.
    pub fault: Fault,
    /// What NVML says has to be done; `None` where it does not say, as with an old driver.
    pub recovery: Option<Recovery>,
}

impl std::fmt::Display for FaultStatus {
    /// A sentence without its end: which error it was, and what to do.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the driver told of XID {}; ", self.fault.numbers())?;
        match self.recovery {
            Some(Recovery::None) => {
                f.write_str("by NVML nothing has to be done, so it is served again soon")
            }
            Some(action) => write!(f, "by NVML this has to be done: {action}"),
            None => f.write_str(
                "reset the GPU or boot the node anew, then `gpu-bridge ledger clear-fault`, which a new boot does not need",
            ),
        }
    }
}

/// How a unit is for whoever has it, or would be for whoever is given it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitHealth<'a> {
    /// NVML sees the GPU, and a container has what it needs of it.
    Well,
    /// NVML has not told of the GPU since the daemon started.
    Unknown,
    /// NVML saw the GPU once, and does not now.
    Lost,
    /// The driver told of an error that closes it.
    Faulty(&'a FaultStatus),
    /// This is missing on the host, in words.
    Lacks(&'a str),
}

impl UnitStatus {
    /// How the unit is.
    #[must_use]
    pub fn health(&self) -> UnitHealth<'_> {
        match (&self.fault, self.presence, self.lacks.as_deref()) {
            // What to do about a GPU that has fallen off the bus is known if there was an error before.
            (Some(fault), _, _) => UnitHealth::Faulty(fault),
            (None, Presence::Unknown, _) => UnitHealth::Unknown,
            (None, Presence::Lost, _) => UnitHealth::Lost,
            (None, Presence::Present, Some(lacks)) => UnitHealth::Lacks(lacks),
            (None, Presence::Present, None) => UnitHealth::Well,
        }
    }
}

/// The pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether it serves.
    pub standing: Standing,
    /// Who else serves our names on this node: while there is somebody, nothing is offered.
    pub rivals: Vec<Rival>,
    /// Generation of the ledger.
    pub generation: u64,
    /// Settings in force.
    pub settings: Settings,
    /// When this was taken.
    pub at: SystemTime,
    /// Every unit, in order.
    pub units: Vec<UnitStatus>,
    /// Every claim that has a unit or was prepared, onlookers included.
    pub claims: BTreeSet<ClaimRef>,
}

impl Pool {
    /// The pool as people see it, at a moment.
    #[must_use]
    pub fn status(&self, at: SystemTime) -> Status {
        let ledger = self.ledger();
        let units = ledger
            .in_order()
            .into_iter()
            .map(|(unit, record)| UnitStatus {
                unit: unit.clone(),
                device: record.device_name(),
                id: ledger.id_before(unit),
                product_name: record.gpu.product_name.clone(),
                side: record.side,
                state: self.unit_state(unit, record.side),
                presence: self.presence(unit),
                lacks: self.lack_of(unit).cloned(),
                fault: self.fault_of(unit).map(|fault| FaultStatus {
                    fault: fault.clone(),
                    recovery: self.recovery_of(unit),
                }),
                holds: ledger.holds_on(unit).to_vec(),
            })
            .collect();
        Status {
            standing: self.standing(),
            rivals: self.rivals().cloned().collect(),
            generation: ledger.generation,
            settings: self.settings().clone(),
            at,
            units,
            claims: self.known_claims(),
        }
    }

    fn known_claims(&self) -> BTreeSet<ClaimRef> {
        let ledger = self.ledger();
        let held = ledger.holds.values().flatten().filter_map(Hold::claim);
        let prepared = ledger.prepared.values().map(|prepared| &prepared.claim);
        held.chain(prepared).cloned().collect()
    }

    fn unit_state(&self, unit: &UnitId, side: Side) -> UnitState {
        if !self.ledger().holds_on(unit).is_empty() {
            return UnitState::Held;
        }
        match self.presence(unit) {
            Presence::Unknown => UnitState::Unseen,
            Presence::Lost => UnitState::Lost,
            Presence::Present if self.fault_of(unit).is_some() => UnitState::Faulty,
            Presence::Present => match side {
                Side::Legacy => UnitState::FreeLegacy,
                Side::Dra => UnitState::FreeDra,
                Side::Rest => UnitState::FreeRest,
                Side::Lowering | Side::Yielding | Side::Dark => UnitState::Moving,
            },
        }
    }
}
