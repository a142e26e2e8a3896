//! Rule 10: whether a GPU may be given out, by the errors that its driver tells of. One verdict for both faces.
//!
//! NVIDIA's driver tells of errors by number (XID, <https://docs.nvidia.com/deploy/xid-errors/>). A table says of each
//! number whether it is the application's own fault or the GPU's. A fault closes the GPU to whoever comes, touches
//! nobody who has it, is in the ledger, and ends by one of the causes of [`FaultEnd`] alone: never by a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, SystemTime};

use crate::id::UnitId;
use crate::pool::{Pool, Presence, Standing, Transition};
use crate::report::Report;

/// The XIDs that close no GPU unless an admin says so. 13, 31, 43, 45, 68 and 109 are faults of applications, and those
/// that NVIDIA's device plugin and DRA driver pass over. 94 is a memory error that the driver has contained, which ends
/// the application and no more; 63 tells that the row with such an error will be replaced, and comes together with it.
pub const IGNORED_XIDS: [u32; 8] = [13, 31, 43, 45, 63, 68, 94, 109];

/// Different XIDs that are remembered of one fault: it is closed by the first, and people read a handful.
pub const XIDS_OF_A_FAULT: usize = 16;

/// For so long after its last XID a GPU must be without one before NVML's word that nothing has to be done is taken: the
/// driver may not have decided yet what has to be.
pub const STEADY_FIRST: Duration = Duration::from_secs(10);
/// That time doubles with each fault that ended by NVML's word, up to this, so that a GPU that fails again and again
/// does not take a pod with it each time.
pub const STEADY_LONGEST: Duration = Duration::from_secs(60 * 60);

/// A GPU that was lost for so long, and answers again, was reset or taken out. One that is lost for one scan was not:
/// a GPU that is in trouble answers now and then.
pub const AWAY_LEAST: Duration = Duration::from_secs(30);

/// The number of an error of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(u32);

impl Xid {
    /// By its number in the driver's documentation.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What an XID does to its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum XidAction {
    /// Nothing: it is the application's fault, or no harm.
    Ignore,
    /// The GPU is offered to nobody until the fault has ended.
    #[default]
    Fault,
}

impl XidAction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ignore, Self::Fault];

    /// The word in configuration, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ignore => "ignore",
            Self::Fault => "fault",
        }
    }
}

/// What the admin says of XIDs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct XidRules {
    /// These close nothing.
    pub ignore: BTreeSet<Xid>,
    /// These do.
    pub fault: BTreeSet<Xid>,
    /// What those do that are in neither list and not among [`IGNORED_XIDS`].
    pub others: XidAction,
}

impl XidRules {
    /// What an XID does.
    #[must_use]
    pub fn action(&self, xid: Xid) -> XidAction {
        if self.ignore.contains(&xid) {
            XidAction::Ignore
        } else if self.fault.contains(&xid) {
            XidAction::Fault
        } else if IGNORED_XIDS.contains(&xid.number()) {
            XidAction::Ignore
        } else {
            self.others
        }
    }
}

/// Why a unit is closed. In the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fault {
    /// Its XIDs, up to [`XIDS_OF_A_FAULT`].
    pub xids: BTreeSet<Xid>,
    /// When the first came; for people.
    pub since: SystemTime,
}

impl Fault {
    /// One that begins at this moment, for people; its XIDs are added.
    fn begun(since: SystemTime) -> Self {
        Self {
            xids: BTreeSet::new(),
            since,
        }
    }

    /// Its XIDs, for a sentence.
    #[must_use]
    pub fn numbers(&self) -> String {
        let numbers: Vec<String> = self.xids.iter().map(Xid::to_string).collect();
        numbers.join(", ")
    }
}

/// What NVML says has to be done about a GPU (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, `nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recovery {
    /// Nothing.
    None,
    /// Reset the GPU.
    Reset,
    /// Boot the node anew.
    Reboot,
    /// End what uses connections between GPUs.
    DrainP2p,
    /// End what uses the GPU, and reset it.
    DrainAndReset,
    /// Something that is newer than this program.
    Other(u32),
}

impl fmt::Display for Recovery {
    /// What to do, as the middle of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nothing"),
            Self::Reset => f.write_str("reset the GPU"),
            Self::Reboot => f.write_str("boot the node anew"),
            Self::DrainP2p => f.write_str("end what uses connections between GPUs"),
            Self::DrainAndReset => f.write_str("end what uses the GPU, and reset it"),
            Self::Other(number) => write!(f, "recovery action {number} of nvml.h"),
        }
    }
}

/// The causes for which a fault ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultEnd {
    /// The node was booted anew.
    Rebooted,
    /// NVML says that nothing has to be done.
    Recovered,
    /// The GPU was away, as in a reset, and is back; only where NVML does not say what has to be done.
    Returned,
    /// By the configuration its XIDs close nothing.
    Ignored,
    /// An admin's command.
    Cleared,
}

impl FaultEnd {
    /// The word in logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rebooted => "Rebooted",
            Self::Recovered => "Recovered",
            Self::Returned => "Returned",
            Self::Ignored => "Ignored",
            Self::Cleared => "Cleared",
        }
    }
}

/// Why no fault was cleared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotCleared {
    /// The pool does not serve.
    #[error(
        "the ledger is not in force, so there is no fault to clear. `gpu-bridge status` says what is waited for"
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
    /// It has none.
    #[error("{unit} has no fault, so nothing has to be cleared")]
    NoFault {
        /// The unit.
        unit: UnitId,
    },
}

/// What is remembered of faults, in memory only.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct Faults {
    /// Uptime of the last XID that counted as one; of faults of before the start it is 0.
    last: BTreeMap<UnitId, Duration>,
    /// How often a fault has ended by NVML's word.
    recovered: BTreeMap<UnitId, u32>,
    /// What NVML says has to be done about units with a fault.
    actions: BTreeMap<UnitId, Recovery>,
    /// Since when a unit with a fault is lost.
    away_since: BTreeMap<UnitId, Duration>,
    /// Whether NVML says of any GPU what has to be done, which is a matter of the driver.
    driver: Driver,
}

/// Whether the driver knows recovery actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
enum Driver {
    /// It has not named one.
    #[default]
    Silent,
    /// It has.
    Tells,
}

impl Faults {
    fn steady_for(&self, unit: &UnitId) -> Duration {
        let times = self.recovered.get(unit).copied().unwrap_or(0);
        let doubled = 1u32.checked_shl(times).unwrap_or(u32::MAX);
        STEADY_FIRST.saturating_mul(doubled).min(STEADY_LONGEST)
    }

    /// Times long past are as good as older ones.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn canonical(self, clocks: &crate::canonical::Clocks) -> Self {
        let Self {
            last,
            recovered,
            actions,
            away_since,
            driver,
        } = self;
        Self {
            last: clocks.all(last, |at| clocks.past(at, STEADY_LONGEST)),
            recovered,
            actions,
            away_since: clocks.all(away_since, |since| clocks.past(since, AWAY_LEAST)),
            driver,
        }
    }

    fn forget(&mut self, unit: &UnitId) {
        self.last.remove(unit);
        self.actions.remove(unit);
        self.away_since.remove(unit);
    }
}

impl Pool {
    /// What closes a unit: a fault of its own, or of hardware that it shares.
    #[must_use]
    pub fn fault_of(&self, unit: &UnitId) -> Option<&Fault> {
        if self.ledger.faults.is_empty() {
            return None;
        }
        let mut hardware = self.hardware(unit);
        hardware.find_map(|unit| self.ledger.faults.get(unit))
    }

    /// What NVML says has to be done about a unit with a fault, as far as it says so.
    pub(crate) fn recovery_of(&self, unit: &UnitId) -> Option<Recovery> {
        let mut hardware = self.hardware(unit);
        hardware.find_map(|unit| self.seen.faults.actions.get(unit).copied())
    }
}

impl Transition {
    /// Takes XIDs that the driver has told of, each with how often it did. Who has a unit keeps it.
    pub fn observe_xids(&mut self, xids: &BTreeMap<(UnitId, Xid), u64>) {
        for ((unit, xid), times) in xids {
            let action = self.pool.settings.xids.action(*xid);
            self.report(Report::XidSeen {
                unit: unit.clone(),
                xid: *xid,
                times: *times,
                action,
            });
            if action == XidAction::Fault {
                self.find_fault(unit, *xid);
            }
        }
        self.steer();
        self.settle();
    }

    fn find_fault(&mut self, unit: &UnitId, xid: Xid) {
        // A GPU that is served by nobody here, as one that is split.
        if !self.pool.ledger.units.contains_key(unit) {
            return;
        }
        let known = self.pool.ledger.faults.entry(unit.clone());
        let fault = known.or_insert_with(|| Fault::begun(self.now.wall));
        let is_news = fault.xids.len() < XIDS_OF_A_FAULT && fault.xids.insert(xid);
        let faults = &mut self.pool.seen.faults;
        faults.last.insert(unit.clone(), self.now.uptime);
        // What NVML said was said before this.
        faults.actions.remove(unit);
        if is_news {
            self.report(Report::UnitFaulty {
                unit: unit.clone(),
                xid,
            });
        }
    }

    /// Takes what NVML says has to be done about the GPUs, asked at an uptime. A GPU that is not named is one of which
    /// it does not say.
    pub fn observe_recovery(&mut self, asked: Duration, actions: &BTreeMap<UnitId, Recovery>) {
        if !actions.is_empty() {
            self.pool.seen.faults.driver = Driver::Tells;
        }
        let faulty: Vec<UnitId> = self.pool.ledger.faults.keys().cloned().collect();
        for unit in faulty {
            let faults = &mut self.pool.seen.faults;
            let last = faults.last.get(&unit).copied().unwrap_or_default();
            // It may be from before the XID.
            let Some(action) = actions.get(&unit).filter(|_| asked >= last) else {
                continue;
            };
            faults.actions.insert(unit.clone(), *action);
            if *action == Recovery::None && asked.saturating_sub(last) >= faults.steady_for(&unit) {
                *faults.recovered.entry(unit.clone()).or_default() += 1;
                self.end_fault(&unit, FaultEnd::Recovered);
            }
        }
        self.steer();
        self.settle();
    }

    /// The node was booted anew since the ledger was written: what a boot repairs is repaired.
    pub fn observe_boot(&mut self) {
        self.end_faults(FaultEnd::Rebooted, |_, _| true);
    }

    /// Ends the fault of a unit because an admin says so.
    ///
    /// # Errors
    /// [`NotCleared`]; nothing has changed.
    pub fn clear_fault(&mut self, unit: &UnitId) -> Result<(), NotCleared> {
        if self.pool.standing != Standing::Serving {
            return Err(NotCleared::NotServing);
        }
        let unit = unit.clone();
        if !self.pool.ledger.units.contains_key(&unit) {
            return Err(NotCleared::UnknownUnit { unit });
        }
        if !self.pool.ledger.faults.contains_key(&unit) {
            return Err(NotCleared::NoFault { unit });
        }
        self.pool.seen.faults.recovered.remove(&unit);
        self.end_fault(&unit, FaultEnd::Cleared);
        self.steer();
        self.settle();
        Ok(())
    }

    /// Ends the faults of which no XID closes a GPU any more.
    pub(crate) fn end_ignored_faults(&mut self) {
        let rules = self.pool.settings.xids.clone();
        let is_fault = move |xid: &Xid| rules.action(*xid) == XidAction::Fault;
        self.end_faults(FaultEnd::Ignored, |_, fault| {
            !fault.xids.iter().any(&is_fault)
        });
    }

    /// Notes that a GPU is lost, or is back.
    pub(crate) fn note_presence(&mut self, unit: &UnitId, presence: Presence) {
        if !self.pool.ledger.faults.contains_key(unit) {
            return;
        }
        let now = self.now.uptime;
        let faults = &mut self.pool.seen.faults;
        match presence {
            Presence::Lost => drop(faults.away_since.entry(unit.clone()).or_insert(now)),
            Presence::Unknown => {}
            Presence::Present => {
                let since = faults.away_since.remove(unit);
                let was_away = since.is_some_and(|since| now.saturating_sub(since) >= AWAY_LEAST);
                // Where NVML says what has to be done, it says so when nothing has to be any more.
                if was_away && faults.driver == Driver::Silent {
                    self.end_fault(unit, FaultEnd::Returned);
                }
            }
        }
    }

    fn end_faults(&mut self, cause: FaultEnd, which: impl Fn(&UnitId, &Fault) -> bool) {
        let faults = self.pool.ledger.faults.iter();
        let over = faults.filter(|(unit, fault)| which(unit, fault));
        let over: Vec<UnitId> = over.map(|(unit, _)| unit.clone()).collect();
        for unit in over {
            self.end_fault(&unit, cause);
        }
    }

    fn end_fault(&mut self, unit: &UnitId, cause: FaultEnd) {
        self.pool.ledger.faults.remove(unit);
        self.pool.seen.faults.forget(unit);
        self.report(Report::FaultEnded {
            unit: unit.clone(),
            cause,
        });
    }
}
