//! Random histories of a node, checked after each step.
//!
//! The world keeps the truth (which container runs on which unit); the daemon sees only what it may see: answers of
//! the kubelet and of the API, possibly late, and processes. An `invariant_...` compares the two.

mod invariants;
mod kubelet;
mod pods;
mod world;

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::kit::SIGHT;
use crate::{Limits, Mode};
use world::World;

/// One thing that happens. Numbers pick among what there is at that moment, so that every history makes sense and a
/// failing one shrinks well.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Pod(PodOp),
    Node(NodeOp),
}

/// One thing that happens to pods and claims.
#[derive(Debug, Clone)]
pub(super) enum PodOp {
    /// A pod that asks by count is bound here.
    NewCounted(Shape),
    /// The kubelet admits a bound pod.
    Admit { pod: u8, ids: Ids, then: Then },
    /// A claim is allocated, with a pod that uses it.
    NewClaim {
        device: u8,
        more: bool,
        role: Role,
        evicted: Evicted,
    },
    /// One more pod is put on a claim.
    NextPod { claim: u8 },
    /// The kubelet prepares the claim of a bound pod.
    Prepare { pod: u8, then: Then },
    /// A container of a pod opens its GPUs.
    OpenGpu { pod: u8 },
    /// A pod ends as it should.
    Finish { pod: u8, api: Late, unprepare: Late },
    /// A pod is force-deleted; its containers run on.
    ForceDelete { pod: u8 },
    /// The containers of a force-deleted pod are gone at last.
    Reap { pod: u8, unprepare: Late },
    /// Unprepare of whatever claim, as a repeated or late call.
    Unprepare { claim: u8 },
}

/// One thing that happens to the node.
#[derive(Debug, Clone)]
pub(super) enum NodeOp {
    /// The daemon looks at one source.
    Look(Look),
    /// Time passes, and the daemon looks at everything it can.
    Tick { seconds: u8 },
    /// The API server goes away or comes back.
    Api,
    /// The count in the own Node can be lowered, or not any more: then free units move, or stand still.
    Count,
    /// NVML stops to say, or says again, what runs on a unit.
    Nvml { unit: u8 },
    /// A GPU drops out or comes back.
    Gpu { unit: u8 },
    /// The driver tells of an error of a GPU, or an admin clears its fault.
    Xid { unit: u8 },
    /// Somebody without a pod opens or leaves a GPU.
    Stranger { unit: u8 },
    /// The kubelet starts anew: it lists nothing for a while.
    KubeletRestart { book: Book },
    /// The kubelet is ready.
    KubeletReady,
    /// The daemon dies and starts anew.
    Crash,
    /// Nothing of any process is left, and everybody starts anew.
    Reboot,
    /// The daemon starts without its ledger.
    LostLedger,
    /// Another device plugin for the resource comes or goes.
    Rival,
    /// So many pods of either kind wait for so many units each, or it is not known any more who waits.
    Demand { pods: Option<Vec<(Kind, u8)>> },
    /// The admin changes the settings.
    Configure { mode: Mode, limits: Limits },
}

/// How a pod asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Counted,
    Claim,
}

/// What a counted pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    One,
    Two,
    /// In an ordinary init container only.
    InitOnly,
    /// In an init and in an app container.
    InitAndApp,
    /// One GPU, under a name that comes back.
    StatefulSet,
}

/// Which ids the kubelet chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ids {
    /// Healthy ones that it has not allocated, preferred ones first.
    Preferred,
    /// Healthy ones that it has not allocated.
    Any(u8),
    /// As above, from an old list.
    Stale(u8),
    /// One that a running pod has: the kubelet has forgotten that.
    Forgotten(u8),
}

/// What goes wrong after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Fine,
    /// The ledger could not be saved.
    NotSaved,
    /// The daemon dies after it has saved and before it has answered.
    DiesBeforeAnswer,
    /// The kubelet rejects the pod after the answer.
    RejectedLater,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Late {
    AtOnce,
    Later,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Owner,
    /// Allocated by hand or from a stale cache, whatever the slice says.
    OwnerByHand,
    Admin,
}

/// Whether a claim stays on a device that evicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evicted {
    Goes,
    Stays,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Listing,
    Pods,
    Claims,
    Processes,
    Inventory,
    Rivals,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Book {
    Kept,
    Lost,
}

fn then() -> impl Strategy<Value = Then> {
    prop_oneof![
        8 => Just(Then::Fine),
        1 => Just(Then::NotSaved),
        1 => Just(Then::DiesBeforeAnswer),
        1 => Just(Then::RejectedLater),
    ]
}

fn late() -> impl Strategy<Value = Late> {
    prop_oneof![2 => Just(Late::AtOnce), 1 => Just(Late::Later)]
}

fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        5 => Just(Shape::One),
        2 => Just(Shape::Two),
        1 => Just(Shape::InitOnly),
        1 => Just(Shape::InitAndApp),
        2 => Just(Shape::StatefulSet),
    ]
}

fn ids() -> impl Strategy<Value = Ids> {
    prop_oneof![
        4 => Just(Ids::Preferred),
        4 => any::<u8>().prop_map(Ids::Any),
        2 => any::<u8>().prop_map(Ids::Stale),
        1 => any::<u8>().prop_map(Ids::Forgotten),
    ]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![
        4 => Just(Role::Owner),
        2 => Just(Role::OwnerByHand),
        1 => Just(Role::Admin),
    ]
}

fn evicted() -> impl Strategy<Value = Evicted> {
    prop_oneof![3 => Just(Evicted::Goes), 1 => Just(Evicted::Stays)]
}

fn look() -> impl Strategy<Value = Look> {
    prop_oneof![
        3 => Just(Look::Listing),
        2 => Just(Look::Pods),
        2 => Just(Look::Claims),
        2 => Just(Look::Processes),
        1 => Just(Look::Inventory),
    ]
}

fn settings() -> impl Strategy<Value = (Mode, Limits)> {
    let mode = prop_oneof![
        4 => Just(Mode::Both),
        1 => Just(Mode::Legacy),
        1 => Just(Mode::Dra),
        1 => Just(Mode::Drained),
    ];
    let limit = || prop_oneof![1 => Just(None), 1 => (0u32..4).prop_map(Some)];
    (mode, limit(), limit()).prop_map(|(mode, legacy, dra)| (mode, Limits { legacy, dra }))
}

fn pod_op() -> impl Strategy<Value = PodOp> {
    prop_oneof![
        6 => shape().prop_map(PodOp::NewCounted),
        9 => (any::<u8>(), ids(), then())
            .prop_map(|(pod, ids, then)| PodOp::Admit { pod, ids, then }),
        5 => (any::<u8>(), any::<bool>(), role(), evicted())
            .prop_map(|(device, more, role, evicted)| PodOp::NewClaim { device, more, role, evicted }),
        1 => any::<u8>().prop_map(|claim| PodOp::NextPod { claim }),
        7 => (any::<u8>(), then()).prop_map(|(pod, then)| PodOp::Prepare { pod, then }),
        5 => any::<u8>().prop_map(|pod| PodOp::OpenGpu { pod }),
        4 => (any::<u8>(), late(), late())
            .prop_map(|(pod, api, unprepare)| PodOp::Finish { pod, api, unprepare }),
        3 => any::<u8>().prop_map(|pod| PodOp::ForceDelete { pod }),
        2 => (any::<u8>(), late()).prop_map(|(pod, unprepare)| PodOp::Reap { pod, unprepare }),
        1 => any::<u8>().prop_map(|claim| PodOp::Unprepare { claim }),
    ]
}

fn node_op() -> impl Strategy<Value = NodeOp> {
    prop_oneof![
        8 => look().prop_map(NodeOp::Look),
        6 => prop_oneof![Just(1u8), Just(11), Just(61)].prop_map(|seconds| NodeOp::Tick { seconds }),
        1 => Just(NodeOp::Api),
        1 => Just(NodeOp::Count),
        1 => any::<u8>().prop_map(|unit| NodeOp::Nvml { unit }),
        1 => any::<u8>().prop_map(|unit| NodeOp::Gpu { unit }),
        1 => any::<u8>().prop_map(|unit| NodeOp::Xid { unit }),
        1 => any::<u8>().prop_map(|unit| NodeOp::Stranger { unit }),
        1 => prop_oneof![2 => Just(Book::Kept), 1 => Just(Book::Lost)]
            .prop_map(|book| NodeOp::KubeletRestart { book }),
        2 => Just(NodeOp::KubeletReady),
        2 => Just(NodeOp::Crash),
        1 => Just(NodeOp::Reboot),
        1 => Just(NodeOp::LostLedger),
        1 => Just(NodeOp::Rival),
        1 => demand().prop_map(|pods| NodeOp::Demand { pods }),
        1 => settings().prop_map(|(mode, limits)| NodeOp::Configure { mode, limits }),
    ]
}

fn demand() -> impl Strategy<Value = Option<Vec<(Kind, u8)>>> {
    let kind = prop_oneof![Just(Kind::Counted), Just(Kind::Claim)];
    prop::option::weighted(0.8, prop::collection::vec((kind, 1_u8..4), 0..4))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![43 => pod_op().prop_map(Op::Pod), 27 => node_op().prop_map(Op::Node)]
}

/// Long enough for a force delete, a restart and what comes of it; a longer history finds nothing that many short
/// ones do not.
const STEPS: usize = 60;
/// As many histories as a debug build plays in a few seconds.
const HISTORIES: u32 = 160;

/// In so many histories everything must have come about: the rarest does once in some two hundred.
const SEARCHED: u32 = 1000;

/// What the histories must bring about, or the invariants have seen nothing.
const REACHED: [&str; 26] = [
    "Adopted",
    "Bound",
    "ClaimLostRace",
    "Ended:ClaimEnded",
    "Ended:IdGivenAgain",
    "Ended:NeverUsed",
    "Ended:PodEnded",
    "Ended:ShownFree",
    "Ended:Unprepared",
    "EvictionAsked",
    "EvictionOver",
    "FaultEnded:Cleared",
    "ForeignFound",
    "Granted",
    "HandedOverBusy",
    "KubeletLostItsBook",
    "Lingering",
    "OtherRegistrant",
    "Prepared",
    "Reserved",
    "RivalsGone",
    "Substituted",
    "UnitAdded",
    "UnitFaulty",
    "UnitLost",
    "UnitReturned",
];

/// `PROPTEST_CASES` asks for more than the tests of every day play.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: asked
            .and_then(|cases| cases.parse().ok())
            .unwrap_or(HISTORIES),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

type History = (u32, (Mode, Limits), Vec<Op>);

fn history() -> impl Strategy<Value = History> {
    (1u32..=4, settings(), prop::collection::vec(op(), 0..STEPS))
}

/// Plays a history to its end, checks all the way, and returns every kind of report that there was.
fn play((units, (mode, limits), ops): &History) -> Result<BTreeSet<String>, TestCaseError> {
    let mut world = World::new(*units, *mode, *limits);
    for op in ops {
        world.play(op).map_err(TestCaseError::fail)?;
        invariants::check(&world).map_err(TestCaseError::fail)?;
    }
    world.end_everything();
    invariants::invariant_nothing_is_left_when_all_is_gone(&world).map_err(TestCaseError::fail)?;
    Ok(world.told)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_history_breaks_a_rule(history in history()) {
        play(&history)?;
    }

    #[test]
    fn a_pool_in_its_canonical_form_lives_on_as_it_would_have((units, (mode, limits), ops) in history()) {
        let mut as_it_is = World::new(units, mode, limits);
        let mut canonical = World::new(units, mode, limits);
        canonical.canonical = true;
        for op in &ops {
            as_it_is.play(op).map_err(TestCaseError::fail)?;
            canonical.play(op).map_err(TestCaseError::fail)?;
            let form = |world: &World| {
                let daemon = &world.daemon;
                daemon.pool.clone().canonical(daemon.uptime, SIGHT)
            };
            prop_assert_eq!(form(&as_it_is), form(&canonical));
            prop_assert_eq!(&as_it_is.told, &canonical.told);
        }
    }
}

#[test]
fn the_histories_reach_everything_that_can_happen_to_a_hold() {
    let mut runner = TestRunner::deterministic();
    let mut told = BTreeSet::new();
    let mut missing = REACHED.to_vec();
    for _ in 0..SEARCHED {
        let tree = history()
            .new_tree(&mut runner)
            .expect("the strategy rejects nothing");
        let history = tree.current();
        told.extend(play(&history).unwrap_or_else(|why| panic!("{why} after {history:?}")));
        missing.retain(|kind| !told.contains(*kind));
        if missing.is_empty() {
            break;
        }
    }
    assert!(missing.is_empty(), "never seen: {missing:?}");
}
