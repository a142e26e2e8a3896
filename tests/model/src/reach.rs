//! What a walk has to come by, or its silence says nothing.

use bridge_core::{ForeignCause, Former, Hold, HoldKind, Ledger, Side, Standing};

use crate::daemon::Daemon;
use crate::names::unit;
use crate::node::{Cached, Stage};
use crate::play::State;
use crate::scope::{Rare, Scope};

/// Something that can come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// A counted pod and a claim's pod run at the same time.
    BothRun,
    /// A counted pod has another unit than its id names.
    Substituted,
    /// Two pods run with one claim.
    ClaimShared,
    /// A counted pod has what a claim was allocated.
    ClaimLost,
    /// The process of a counted pod that has ended keeps its unit.
    CountedLingers,
    /// The process of a claim's pod that has ended keeps its unit.
    ClaimLingers,
    /// A counted pod was given a unit over a process.
    HandedOver,
    /// A process of nobody keeps a unit.
    Stranger,
    /// The kubelet names a claim that it has to prepare again while its pod runs.
    PreparedAgain,
    /// A daemon is down while pods run.
    DownWhileRunning,
    /// Either ledger may be on disk.
    InDoubt,
    /// A counted pod runs that the kubelet has forgotten.
    Forgotten,
    /// A daemon without a ledger has a node with running pods before it.
    LedgerLost,
    /// It has taken them over.
    Adopted,
    /// A free unit is on both sides.
    Rests,
    /// A unit is on its way to claims.
    Lowers,
    /// A unit is on its way back.
    Darkens,
    /// A unit is on the claims' side alone.
    OnClaimsSide,
    /// An instance and another unit are used, its parent is not.
    InstanceHeld,
}

impl Reach {
    pub(crate) const ALL: [Self; 19] = [
        Self::BothRun,
        Self::Substituted,
        Self::ClaimShared,
        Self::ClaimLost,
        Self::CountedLingers,
        Self::ClaimLingers,
        Self::HandedOver,
        Self::Stranger,
        Self::PreparedAgain,
        Self::DownWhileRunning,
        Self::InDoubt,
        Self::Forgotten,
        Self::LedgerLost,
        Self::Adopted,
        Self::Rests,
        Self::Lowers,
        Self::Darkens,
        Self::OnClaimsSide,
        Self::InstanceHeld,
    ];

    pub(crate) fn place(self) -> usize {
        self as usize
    }

    /// Whether it has come about.
    pub(crate) fn is_so(self, scope: &Scope, state: &State) -> bool {
        let node = &state.node;
        let mut counted = scope.counted_pods().map(|pod| node.pods[pod]);
        let mut users = scope.user_pods().map(|pod| node.pods[pod]);
        let ledger = match &state.daemon {
            Daemon::Up(up) => Some(up.memory.pool.ledger()),
            Daemon::Down => None,
        };
        let serves = matches!(&state.daemon, Daemon::Up(up) if up.memory.pool.standing() == Standing::Serving);
        let runs = counted.any(|pod| pod.is_active());
        match self {
            Self::BothRun => runs && users.any(|pod| pod.is_active()),
            Self::Substituted => ledger.is_some_and(|ledger| !ledger.substitutions().is_empty()),
            Self::ClaimShared => users.filter(|pod| pod.stage == Stage::Open).count() > 1,
            Self::ClaimLost => scope.claims().any(|claim| {
                let lost = |number: u8| {
                    let number = usize::from(number);
                    let mut counted = scope.counted_pods().map(|pod| node.pods[pod]);
                    counted.any(|pod| pod.is_active() && pod.units.has(number))
                };
                node.claims[claim].allocated.is_some_and(lost)
            }),
            Self::CountedLingers => has(ledger, |hold| {
                matches!(lingers(hold), Some(Former::Counted(_)))
            }),
            Self::ClaimLingers => has(ledger, |hold| {
                matches!(lingers(hold), Some(Former::Claim(_)))
            }),
            Self::HandedOver => node.over.iter().any(Option::is_some),
            Self::Stranger => has(ledger, |hold| {
                let cause = ForeignCause::UnknownProcess;
                hold.kind == HoldKind::Foreign { cause }
            }),
            Self::PreparedAgain => scope.user_pods().any(|pod| {
                let claim = scope.claim_of(pod).map(|claim| node.claims[claim].cached);
                node.pods[pod].is_active() && claim == Some(Cached::Named)
            }),
            Self::DownWhileRunning => state.daemon == Daemon::Down && runs,
            Self::InDoubt => state.doubt.is_some(),
            Self::Forgotten => scope
                .counted_pods()
                .any(|pod| node.pods[pod].is_active() && node.pods[pod].ids.is_empty()),
            Self::LedgerLost => ledger.is_some() && !serves && runs,
            Self::Adopted => serves && runs && !node.may(scope, Rare::LostLedger),
            Self::Rests => on_side(ledger, Side::Rest),
            Self::Lowers => on_side(ledger, Side::Lowering) || on_side(ledger, Side::Yielding),
            Self::Darkens => on_side(ledger, Side::Dark),
            Self::OnClaimsSide => on_side(ledger, Side::Dra),
            Self::InstanceHeld => ledger.is_some_and(|ledger| {
                let held = |number: usize| !ledger.holds_on(&unit(number)).is_empty();
                scope
                    .units()
                    .iter()
                    .any(|u| scope.parents[u].is_some() && held(u))
            }),
        }
    }
}

fn has(ledger: Option<&Ledger>, which: impl Fn(&Hold) -> bool) -> bool {
    ledger.is_some_and(|ledger| ledger.holds.values().flatten().any(which))
}

fn lingers(hold: &Hold) -> Option<&Former> {
    match &hold.kind {
        HoldKind::Foreign {
            cause: ForeignCause::Lingering { former },
        } => Some(former),
        HoldKind::Foreign { .. }
        | HoldKind::Granted { .. }
        | HoldKind::Bound { .. }
        | HoldKind::Reserved { .. }
        | HoldKind::Prepared { .. } => None,
    }
}

fn on_side(ledger: Option<&Ledger>, side: Side) -> bool {
    ledger.is_some_and(|ledger| ledger.units.values().any(|record| record.side == side))
}
