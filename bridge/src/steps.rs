//! The steps of a transition by name: where a test kills the daemon, to learn whether anything is lost there.
//!
//! The product has none of this: without the feature `kill-points`, which the tests of this package alone ask for,
//! every function here is empty. With it the process ends itself by SIGKILL at the step that the file of [`KILL_AT`] names.

/// The environment variable with the path of a file that says where to end: `prepare/save-renamed` is when a ledger with
/// a Prepare in it has got its name. The file need not be there, and is read anew for every transition.
pub const KILL_AT: &str = "GPU_BRIDGE_KILL_AT";

/// What a transition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// It answers an Allocate.
    Allocate,
    /// It answers a Prepare.
    Prepare,
    /// It answers an Unprepare.
    Unprepare,
    /// Holds have ended without a call.
    Release,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 4] = [
        Self::Allocate,
        Self::Prepare,
        Self::Unprepare,
        Self::Release,
    ];

    /// The name in the file of [`KILL_AT`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::Prepare => "prepare",
            Self::Unprepare => "unprepare",
            Self::Release => "release",
        }
    }
}

/// A moment between two effects of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The calls are decided on the copy of the pool, and nothing is written.
    Planned,
    /// The ledger's new text is in its temporary file.
    SaveWritten,
    /// That file is flushed.
    SaveFlushed,
    /// It has the ledger's name.
    SaveRenamed,
    /// Its folder is flushed: the ledger is saved.
    SaveDurable,
    /// The copy has taken the pool's place.
    Committed,
    /// A claim's CDI spec is removed.
    SpecRemoved,
    /// The faces know what they have to show.
    Published,
    /// The text of a CDI spec is in its temporary file.
    SpecWritten,
    /// That file is flushed.
    SpecFlushed,
    /// It has the spec's name.
    SpecRenamed,
    /// Its folder is flushed.
    SpecDurable,
    /// The face has a call's answer, and is about to send it.
    Answered,
}

impl Step {
    /// Every step, in the order of a transition.
    pub const ALL: [Self; 13] = [
        Self::Planned,
        Self::SaveWritten,
        Self::SaveFlushed,
        Self::SaveRenamed,
        Self::SaveDurable,
        Self::Committed,
        Self::SpecRemoved,
        Self::Published,
        Self::SpecWritten,
        Self::SpecFlushed,
        Self::SpecRenamed,
        Self::SpecDurable,
        Self::Answered,
    ];

    /// The name in the file of [`KILL_AT`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::SaveWritten => "save-written",
            Self::SaveFlushed => "save-flushed",
            Self::SaveRenamed => "save-renamed",
            Self::SaveDurable => "save-durable",
            Self::Committed => "committed",
            Self::SpecRemoved => "spec-removed",
            Self::Published => "published",
            Self::SpecWritten => "spec-written",
            Self::SpecFlushed => "spec-flushed",
            Self::SpecRenamed => "spec-renamed",
            Self::SpecDurable => "spec-durable",
            Self::Answered => "answered",
        }
    }

    /// Whether a transition with this operation in it comes to this step.
    #[must_use]
    pub const fn is_of(self, operation: Operation) -> bool {
        match self {
            Self::Planned
            | Self::SaveWritten
            | Self::SaveFlushed
            | Self::SaveRenamed
            | Self::SaveDurable
            | Self::Committed
            | Self::Published => true,
            Self::SpecRemoved => matches!(operation, Operation::Unprepare),
            Self::SpecWritten | Self::SpecFlushed | Self::SpecRenamed | Self::SpecDurable => {
                matches!(operation, Operation::Prepare)
            }
            Self::Answered => !matches!(operation, Operation::Release),
        }
    }
}

/// A step in replacing one file. Before a transition is committed that is the ledger, and after it a CDI spec.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FileStep {
    Written,
    Flushed,
    Renamed,
    Durable,
}

#[cfg(feature = "kill-points")]
pub(crate) use armed::{planned, reached, reached_in_file};

/// The calls of a batch are decided: this is what the ledger was before, and what is to be saved.
#[cfg(not(feature = "kill-points"))]
#[inline(always)]
pub(crate) fn planned(
    _: &bridge_core::Ledger,
    _: &bridge_core::Ledger,
    _: impl Iterator<Item = Operation>,
) {
}

/// A transition has come to a step.
#[cfg(not(feature = "kill-points"))]
#[inline(always)]
pub(crate) const fn reached(_: Step) {}

/// The same in the file that is being replaced.
#[cfg(not(feature = "kill-points"))]
#[inline(always)]
pub(crate) const fn reached_in_file(_: FileStep) {}

#[cfg(feature = "kill-points")]
mod armed {
    use std::path::PathBuf;
    use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

    use bridge_core::Ledger;
    use rustix::process::{Signal, getpid, kill_process};

    use super::{FileStep, KILL_AT, Operation, Step};

    /// The transition that is being made: the arbiter makes one after the other.
    struct Current {
        /// Where to end in it.
        target: Option<Step>,
        is_committed: bool,
    }

    static FILE: LazyLock<Option<PathBuf>> =
        LazyLock::new(|| std::env::var_os(KILL_AT).map(PathBuf::from));
    static CURRENT: Mutex<Current> = Mutex::new(Current {
        target: None,
        is_committed: true,
    });

    pub(crate) fn planned(
        before: &Ledger,
        after: &Ledger,
        operations: impl Iterator<Item = Operation>,
    ) {
        let Some((operation, step)) = target() else {
            return;
        };
        let mut operations: Vec<_> = operations.collect();
        let holds = |ledger: &Ledger| ledger.holds.values().map(Vec::len).sum::<usize>();
        if holds(after) < holds(before) && !operations.contains(&Operation::Unprepare) {
            operations.push(Operation::Release);
        }
        *current() = Current {
            target: operations.contains(&operation).then_some(step),
            is_committed: false,
        };
        reached(Step::Planned);
    }

    pub(crate) fn reached(step: Step) {
        let mut current = current();
        current.is_committed |= step == Step::Committed;
        if current.target == Some(step) {
            // As `kill -9` does it: nothing is tidied up, and no other thread goes on.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    pub(crate) fn reached_in_file(step: FileStep) {
        let is_committed = current().is_committed;
        reached(match (step, is_committed) {
            (FileStep::Written, false) => Step::SaveWritten,
            (FileStep::Flushed, false) => Step::SaveFlushed,
            (FileStep::Renamed, false) => Step::SaveRenamed,
            (FileStep::Durable, false) => Step::SaveDurable,
            (FileStep::Written, true) => Step::SpecWritten,
            (FileStep::Flushed, true) => Step::SpecFlushed,
            (FileStep::Renamed, true) => Step::SpecRenamed,
            (FileStep::Durable, true) => Step::SpecDurable,
        });
    }

    fn current() -> MutexGuard<'static, Current> {
        CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the file says; nothing, while it is being written.
    fn target() -> Option<(Operation, Step)> {
        let text = std::fs::read_to_string(FILE.as_ref()?).ok()?;
        let (operation, step) = text.split_once('/')?;
        let mut operations = Operation::ALL.into_iter();
        let mut steps = Step::ALL.into_iter();
        Some((
            operations.find(|it| it.as_str() == operation)?,
            steps.find(|it| it.as_str() == step)?,
        ))
    }
}
