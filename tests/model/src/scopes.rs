//! The walks.

use std::time::Duration;

use crate::broken::Broken;
use crate::daemon::Look;
use crate::reach::Reach;
use crate::scope::{CAUSELESS, Ids, Looks, Rare, Scope, Sides, Steps};

const TWO_GPUS: &[Option<usize>] = &[None, None];
/// A GPU with an instance, and another GPU.
const INSTANCE: &[Option<usize>] = &[None, Some(0), None];

/// Longer than a granted unit stays with nobody.
const UNSEEN: Duration = Duration::from_secs(11);
/// Longer than each step of a move takes, and shorter than anything else.
const SETTLED: Duration = Duration::from_secs(5);

const FACES: Scope = Scope {
    name: "faces",
    about: "both faces, one force delete, each source looked at on its own",
    parents: TWO_GPUS,
    counted: &[1],
    users: &[0],
    name_comes_back: false,
    ids: Ids::Any,
    sides: Sides::Fixed,
    steps: Steps::Whole,
    looks: Looks::Apart(&[Look::Listing, Look::Pods, Look::Claims]),
    tick: CAUSELESS,
    rare: &[(Rare::ForceDelete, 1)],
    reaches: &[Reach::BothRun, Reach::ClaimLost],
    broken: None,
};

const NAMES: Scope = Scope {
    name: "names",
    about: "a pod of two GPUs, and one that comes back under its name",
    counted: &[2, 1],
    users: &[],
    name_comes_back: true,
    tick: UNSEEN,
    reaches: &[Reach::HandedOver, Reach::CountedLingers],
    ..FACES
};

const LAG: Scope = Scope {
    name: "lag",
    about: "answers of pod-resources come late, and the API hears late who has ended",
    rare: &[(Rare::LateListing, 1), (Rare::LateNews, 1)],
    ..FACES
};

const REPEATS: Scope = Scope {
    name: "repeats",
    about: "calls come again after they were answered, and the time of a Prepare is up",
    looks: Looks::Together,
    rare: &[
        (Rare::Repeat, 1),
        (Rare::LastCall, 1),
        (Rare::KubeletRestart, 1),
    ],
    reaches: &[Reach::BothRun, Reach::PreparedAgain],
    ..FACES
};

const SHARING: Scope = Scope {
    name: "sharing",
    about: "two pods with one claim, a third with another, and a counted pod",
    users: &[0, 0, 1],
    looks: Looks::Together,
    rare: &[(Rare::ForceDelete, 1)],
    reaches: &[Reach::ClaimShared, Reach::ClaimLingers, Reach::Substituted],
    ..FACES
};

const CRASHES: Scope = Scope {
    name: "crashes",
    about: "the daemon dies between any two steps, saves fail and stay in doubt",
    steps: Steps::Each,
    looks: Looks::Together,
    rare: &[
        (Rare::Crash, 1),
        (Rare::SaveFails, 1),
        (Rare::SaveInDoubt, 1),
    ],
    reaches: &[Reach::InDoubt, Reach::DownWhileRunning],
    ..FACES
};

const BATCHES: Scope = Scope {
    name: "batches",
    about: "the same with two calls in one batch, of a counted pod and of two claims",
    users: &[0, 1],
    ..CRASHES
};

const KUBELET: Scope = Scope {
    name: "kubelet",
    about: "the kubelet starts anew at any moment, and a pod is force-deleted",
    looks: Looks::Together,
    rare: &[(Rare::KubeletRestart, 1), (Rare::ForceDelete, 1)],
    reaches: &[Reach::PreparedAgain],
    ..FACES
};

const BOOK: Scope = Scope {
    name: "book",
    about: "the kubelet starts anew and has forgotten which ids it has given out",
    counted: &[1, 1],
    rare: &[(Rare::LostBook, 1)],
    reaches: &[Reach::Forgotten],
    ..KUBELET
};

const REBOOT: Scope = Scope {
    name: "reboot",
    about: "the node starts anew, its CDI files are gone, and the daemon dies once more",
    rare: &[(Rare::Reboot, 1), (Rare::Crash, 1), (Rare::ForceDelete, 1)],
    reaches: &[Reach::BothRun, Reach::DownWhileRunning],
    ..KUBELET
};

const API: Scope = Scope {
    name: "api",
    about: "the API server is away, the kubelet starts anew, and the daemon does",
    rare: &[
        (Rare::ApiAway, 1),
        (Rare::KubeletRestart, 1),
        (Rare::Crash, 1),
    ],
    reaches: &[Reach::PreparedAgain, Reach::DownWhileRunning],
    ..KUBELET
};

const GPUS: Scope = Scope {
    name: "gpus",
    about: "a GPU drops out and comes back, and NVML does not say what runs on one",
    rare: &[(Rare::GpuLost, 1), (Rare::NvmlSilent, 1)],
    reaches: &[Reach::BothRun],
    ..KUBELET
};

const STRANGERS: Scope = Scope {
    name: "strangers",
    about: "somebody without a pod uses a GPU, and a pod is force-deleted",
    rare: &[(Rare::Stranger, 1), (Rare::ForceDelete, 1)],
    reaches: &[Reach::Stranger],
    ..KUBELET
};

const ADOPTION: Scope = Scope {
    name: "adoption",
    about: "a daemon starts without its ledger on a node where pods run",
    counted: &[1, 1],
    rare: &[(Rare::Crash, 1), (Rare::LostLedger, 1)],
    reaches: &[Reach::LedgerLost, Reach::Adopted],
    ..KUBELET
};

const OVERLAPS: Scope = Scope {
    name: "overlaps",
    about: "a GPU, its MIG instance, and another GPU",
    parents: INSTANCE,
    counted: &[1, 1],
    rare: &[(Rare::ForceDelete, 1)],
    reaches: &[Reach::InstanceHeld],
    ..KUBELET
};

const SIDES: Scope = Scope {
    name: "sides",
    about: "free units move between the sides, and schedulers go by what they saw",
    ids: Ids::Healthy,
    sides: Sides::Move,
    tick: SETTLED,
    rare: &[],
    reaches: &[
        Reach::Rests,
        Reach::Lowers,
        Reach::Darkens,
        Reach::OnClaimsSide,
    ],
    ..KUBELET
};

const COUNT: Scope = Scope {
    name: "count",
    about: "the same with two counted pods while the kubelet reverts the count, and the right to write it is withdrawn",
    counted: &[1, 1],
    rare: &[(Rare::CountReverted, 1), (Rare::NoRight, 1)],
    reaches: &[Reach::Rests, Reach::Lowers, Reach::OnClaimsSide],
    ..SIDES
};

const ALL_AT_ONCE: Scope = Scope {
    name: "all at once",
    about: "everything that can go wrong on a node with a counted pod and a claim, each once",
    rare: &[
        (Rare::ForceDelete, 1),
        (Rare::SaveFails, 1),
        (Rare::SaveInDoubt, 1),
        (Rare::Crash, 1),
        (Rare::KubeletRestart, 1),
        (Rare::LostBook, 1),
        (Rare::Reboot, 1),
        (Rare::ApiAway, 1),
        (Rare::GpuLost, 1),
        (Rare::NvmlSilent, 1),
        (Rare::Stranger, 1),
        (Rare::LateNews, 1),
        (Rare::LateListing, 1),
        (Rare::LostLedger, 1),
        (Rare::Repeat, 1),
        (Rare::LastCall, 1),
    ],
    reaches: &[Reach::BothRun, Reach::DownWhileRunning, Reach::InDoubt],
    ..KUBELET
};

/// What CI walks.
#[must_use]
pub fn scopes() -> Vec<Scope> {
    vec![
        FACES,
        NAMES,
        LAG,
        REPEATS,
        SHARING,
        CRASHES,
        BATCHES,
        KUBELET,
        BOOK,
        REBOOT,
        API,
        GPUS,
        STRANGERS,
        ADOPTION,
        OVERLAPS,
        SIDES,
        COUNT,
        ALL_AT_ONCE,
    ]
}

/// The scope in which a broken rule shows.
#[must_use]
pub fn scope_that_finds(broken: Broken) -> Scope {
    let scope = match broken {
        Broken::AnswersBeforeSaving
        | Broken::SavesNoPreparation
        | Broken::AnswersAfterFailedSave
        | Broken::ForgetsTheDoubt
        | Broken::StartsEmpty => Scope {
            steps: Steps::Whole,
            ..CRASHES
        },
        Broken::DecidesCallsApart => BATCHES,
        Broken::AsksForNoProcesses | Broken::NeverLists | Broken::AllocatesOverPrepared => FACES,
        Broken::TakesAbsenceForTheEnd => KUBELET,
        Broken::AsksForNoListing => BOOK,
        Broken::TakesSilenceForNothing => API,
        Broken::UnpreparesWithTheFirstPod => SHARING,
        Broken::AdoptsNoClaims | Broken::AdoptsByIds => ADOPTION,
        Broken::ForgetsOverlap => OVERLAPS,
        Broken::NeverTaintsAgain | Broken::MovesUnseen => COUNT,
    };
    Scope {
        broken: Some(broken),
        ..scope
    }
}
