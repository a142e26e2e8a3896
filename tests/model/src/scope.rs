//! What a walk through the states includes: how many of everything, and what may go wrong how often.

use std::time::Duration;

use crate::broken::Broken;
use crate::daemon::Look;
use crate::reach::Reach;
use crate::set::Set;

/// The most units, pods and claims of any scope.
pub(crate) const UNITS: usize = 3;
pub(crate) const PODS: usize = 5;
pub(crate) const CLAIMS: usize = 2;

/// Counted pods have the first numbers, pods that use a claim those from here on.
pub(crate) const FIRST_USER: usize = 2;

/// Longer than a prepared claim stays that has no cause to be.
pub(crate) const CAUSELESS: Duration = Duration::from_secs(61);

/// What is rare, and happens at most so many times in one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rare {
    /// A pod is deleted with grace 0 while its processes run.
    ForceDelete,
    /// A save fails, and the old ledger is on disk.
    SaveFails,
    /// A save fails, and either ledger may be on disk.
    SaveInDoubt,
    /// The daemon dies at whatever step.
    Crash,
    /// The kubelet starts anew.
    KubeletRestart,
    /// It does, and has forgotten which ids it has given out and which claims it has prepared.
    LostBook,
    /// The node starts anew.
    Reboot,
    /// The API server goes away for a while.
    ApiAway,
    /// A GPU drops out, and comes back.
    GpuLost,
    /// NVML does not say what runs on a unit for a while.
    NvmlSilent,
    /// Somebody without a pod uses a GPU for a while.
    Stranger,
    /// The API hears late that a pod has ended.
    LateNews,
    /// An answer of pod-resources is on its way while other things happen.
    LateListing,
    /// The daemon starts without its ledger.
    LostLedger,
    /// A call is made that was answered before.
    Repeat,
    /// The time of a Prepare is up while it waits.
    LastCall,
    /// The kubelet writes its own count into the Node's status.
    CountReverted,
    /// The right to write the Node's status is withdrawn for a while.
    NoRight,
}

impl Rare {
    pub(crate) const COUNT: usize = Self::NoRight as usize + 1;

    pub(crate) fn place(self) -> usize {
        self as usize
    }
}

/// What kind of ids the kubelet asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    /// Any that it has not given out: whatever list of healthy ids it goes by, however old.
    Any,
    /// Those that are healthy now.
    Healthy,
}

/// Whether free units move between the sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sides {
    /// The count can't be lowered: a fixed split. Schedulers decide on whatever they believe.
    Fixed,
    /// They move. Schedulers decide on what they have seen, which is never older than a tick.
    Move,
}

/// How finely the arbiter's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Steps {
    /// A call is planned, saved, committed and answered before anything else happens.
    Whole,
    /// Anything may happen between any two steps, and the daemon may die there.
    Each,
}

/// How the daemon looks around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Looks {
    /// At one thing after the other, and anything may happen between.
    Apart(&'static [Look]),
    /// At everything at once.
    Together,
}

/// One walk.
#[derive(Clone, Debug)]
pub struct Scope {
    /// Its name in the results.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    /// Each unit's parent, if it is a MIG instance.
    pub(crate) parents: &'static [Option<usize>],
    /// How many units each counted pod asks for.
    pub(crate) counted: &'static [usize],
    /// The claim that each of the other pods uses.
    pub(crate) users: &'static [usize],
    /// Whether the second counted pod has the name of the first and comes after it.
    pub(crate) name_comes_back: bool,
    pub(crate) ids: Ids,
    pub(crate) sides: Sides,
    pub(crate) steps: Steps,
    pub(crate) looks: Looks,
    /// How much time passes at once.
    pub(crate) tick: Duration,
    /// What may happen, and how often. What is not here never does.
    pub(crate) rare: &'static [(Rare, u8)],
    /// What it must come by.
    pub(crate) reaches: &'static [Reach],
    /// The rule that is broken in it.
    pub(crate) broken: Option<Broken>,
}

impl Scope {
    /// The rule that is broken on purpose in it.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.broken
    }

    pub(crate) fn units(&self) -> Set {
        Set::below(self.parents.len())
    }

    /// A unit and all that shares hardware with it.
    pub(crate) fn hardware(&self, unit: usize) -> Set {
        let parents = self.parents;
        let related =
            |other: &usize| parents[*other] == Some(unit) || parents[unit] == Some(*other);
        self.units().iter().filter(related).chain([unit]).collect()
    }

    /// The same for some units.
    pub(crate) fn hardware_of(&self, units: Set) -> Set {
        let each = units.iter().map(|unit| self.hardware(unit));
        each.fold(Set::EMPTY, Set::and)
    }

    pub(crate) fn counted_pods(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.counted.len()
    }

    pub(crate) fn user_pods(&self) -> impl Iterator<Item = usize> + use<> {
        FIRST_USER..FIRST_USER + self.users.len()
    }

    pub(crate) fn claim_of(&self, pod: usize) -> Option<usize> {
        pod.checked_sub(FIRST_USER).map(|place| self.users[place])
    }

    pub(crate) fn claims(&self) -> impl Iterator<Item = usize> + use<> {
        let last = self.users.iter().max().copied();
        0..last.map_or(0, |last| last + 1)
    }

    /// The name of a pod, by number.
    pub(crate) fn name_of(&self, pod: usize) -> usize {
        if self.name_comes_back && pod == 1 {
            0
        } else {
            pod
        }
    }

    pub(crate) fn limit(&self, rare: Rare) -> u8 {
        let limit = self.rare.iter().find(|(kind, _)| *kind == rare);
        limit.map_or(0, |(_, times)| *times)
    }
}
