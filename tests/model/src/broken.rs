//! Rules that are broken on purpose, one at a time, around the pool: what a check that finds nothing is worth, shows
//! in what it finds then.

/// A rule that is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The caller is answered before the ledger is saved.
    AnswersBeforeSaving,
    /// What was prepared is kept in memory alone.
    SavesNoPreparation,
    /// A save that failed is taken for one that did not.
    AnswersAfterFailedSave,
    /// After a save in doubt, what changes nothing is answered without another save.
    ForgetsTheDoubt,
    /// Two calls that wait together are each decided as if the other were not there.
    DecidesCallsApart,
    /// NVML is not asked who runs where.
    AsksForNoProcesses,
    /// A pod that pod-resources does not list has ended.
    TakesAbsenceForTheEnd,
    /// What the API server does not answer is empty.
    TakesSilenceForNothing,
    /// An id that is given again is given with the same unit, whoever has it.
    AsksForNoListing,
    /// A claim is given back with the first of its pods.
    UnpreparesWithTheFirstPod,
    /// `Allocate` takes what a claim has prepared.
    AllocatesOverPrepared,
    /// A start finds the units and forgets who has them.
    StartsEmpty,
    /// A lost ledger is made anew without the claims.
    AdoptsNoClaims,
    /// A lost ledger is made anew from the kubelet's ids, whatever was given for them.
    AdoptsByIds,
    /// Instances and their parent are taken for different hardware.
    ForgetsOverlap,
    /// pod-resources is never looked at.
    NeverLists,
    /// A device that was once untainted in the slice stays so.
    NeverTaintsAgain,
    /// A unit moves before the Node has shown the lowered count.
    MovesUnseen,
}

impl Broken {
    /// Each of them.
    pub const ALL: [Self; 18] = [
        Self::AnswersBeforeSaving,
        Self::SavesNoPreparation,
        Self::AnswersAfterFailedSave,
        Self::ForgetsTheDoubt,
        Self::DecidesCallsApart,
        Self::AsksForNoProcesses,
        Self::TakesAbsenceForTheEnd,
        Self::TakesSilenceForNothing,
        Self::AsksForNoListing,
        Self::UnpreparesWithTheFirstPod,
        Self::AllocatesOverPrepared,
        Self::StartsEmpty,
        Self::AdoptsNoClaims,
        Self::AdoptsByIds,
        Self::ForgetsOverlap,
        Self::NeverLists,
        Self::NeverTaintsAgain,
        Self::MovesUnseen,
    ];
}
