//! Rule 7, *an admin's command*: a hold whose holder nothing shows ends because somebody who has looked says so.
//!
//! It can't make one unit two holders': a holder that the kubelet or the API still shows keeps its unit, whoever insists,
//! and a unit with a process on it goes to nobody, since `Allocate` and `Prepare` look for that themselves.

use crate::evidence::UnitProcesses;
use crate::hold::{Hold, HoldKind};
use crate::id::{ClaimUid, UnitId};
use crate::pool::{Pool, Standing, Transition};
use crate::report::EndCause;

/// What an admin wants where NVML does not show that the unit is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Insistence {
    /// The hold stays.
    None,
    /// The hold ends all the same; the unit goes to nobody until NVML shows that nothing runs on it.
    Forced,
}

/// Why nothing was released.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReleased {
    /// The pool does not serve.
    #[error(
        "the ledger is not in force, so there is no hold to release. `gpu-bridge status` says what is waited for"
    )]
    NotServing,
    /// There is no such unit.
    #[error(
        "{unit} is no GPU of this node. Give its exact UUID: `gpu-bridge status -o wide` has them"
    )]
    UnknownUnit {
        /// What was asked for.
        unit: UnitId,
    },
    /// Nobody has it.
    #[error("{unit} is held by nobody, so nothing has to be released")]
    Free {
        /// The unit.
        unit: UnitId,
    },
    /// Its holder is there, or may be.
    #[error(
        "the holder of {unit} is still there, or it is not known that it has ended. Delete its pod, and for a claim the \
         claim: the hold ends by itself then"
    )]
    HolderThere {
        /// The unit.
        unit: UnitId,
    },
    /// Something runs on it.
    #[error(
        "processes run on {unit} (host PIDs {}). End them first; --force ends the hold all the same, and the GPU goes to \
         nobody until they have ended", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    Busy {
        /// The unit.
        unit: UnitId,
        /// Host PIDs on it and on all that overlaps it.
        pids: Vec<u32>,
    },
    /// NVML does not say what runs on it.
    #[error(
        "NVML does not say what runs on {unit}. Look at the driver first; --force ends the hold all the same, and the GPU \
         goes to nobody until NVML shows it idle"
    )]
    ProcessesUnknown {
        /// The unit.
        unit: UnitId,
    },
}

impl Transition {
    /// Ends what holds a unit, because an admin says so. Returns how many holds ended.
    ///
    /// # Errors
    /// [`NotReleased`]; nothing has changed.
    pub fn release(&mut self, unit: &UnitId, insistence: Insistence) -> Result<usize, NotReleased> {
        self.pool.may_release(unit, insistence)?;
        let holds = self.pool.ledger.holds_on(unit).to_vec();
        let claims: Vec<ClaimUid> = holds
            .iter()
            .filter_map(Hold::claim)
            .map(|claim| claim.uid.clone())
            .collect();
        // The whole preparation: half of one can't be given back.
        for claim in &claims {
            self.release_claim(claim, EndCause::Released);
        }
        self.end(unit, EndCause::Released, |_| true);
        self.settle();
        Ok(holds.len())
    }
}

impl Pool {
    fn may_release(&self, unit: &UnitId, insistence: Insistence) -> Result<(), NotReleased> {
        let named = || unit.clone();
        if self.standing != Standing::Serving {
            return Err(NotReleased::NotServing);
        }
        if !self.ledger.units.contains_key(unit) {
            return Err(NotReleased::UnknownUnit { unit: named() });
        }
        let holds = self.ledger.holds_on(unit);
        if holds.is_empty() {
            return Err(NotReleased::Free { unit: named() });
        }
        if !holds.iter().all(|hold| self.may_be_gone(unit, hold)) {
            return Err(NotReleased::HolderThere { unit: named() });
        }
        if insistence == Insistence::Forced {
            return Ok(());
        }
        let is_unknown = |unit: &UnitId| *self.seen.processes.on(unit) == UnitProcesses::Unknown;
        if self.hardware(unit).any(is_unknown) {
            return Err(NotReleased::ProcessesUnknown { unit: named() });
        }
        let pids: Vec<u32> = self
            .hardware(unit)
            .filter_map(|unit| self.busy(unit))
            .flatten()
            .collect();
        match pids.as_slice() {
            [] => Ok(()),
            _ => Err(NotReleased::Busy {
                unit: named(),
                pids,
            }),
        }
    }

    /// Whether nothing shows the holder any more.
    fn may_be_gone(&self, unit: &UnitId, hold: &Hold) -> bool {
        match &hold.kind {
            // Its pod has not been seen yet: if none comes, the hold ends by itself.
            HoldKind::Granted { .. } => false,
            HoldKind::Bound { pod, .. } => self.has_left(pod),
            HoldKind::Reserved { claim } | HoldKind::Prepared { claim } => {
                let listing = self.seen.listing.as_ref();
                self.is_allocated(&claim.uid, unit) == Some(false)
                    && listing.is_some_and(|listing| !listing.has_claim(claim))
            }
            HoldKind::Foreign { .. } => true,
        }
    }
}
