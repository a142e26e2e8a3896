//! What must be so in every state, and on every step.

use std::collections::BTreeSet;

use bridge_core::{Face, Health, HoldKind, Ledger, Pool, Side, Standing, UnitProcesses};

use crate::daemon::{Answer, Daemon, Disk, Memory, Up};
use crate::names::{claim_uid, id, number_of, unit};
use crate::node::{Cached, Node};
use crate::play::State;
use crate::scope::{FIRST_USER, Scope, Sides};
use crate::set::Set;
use crate::view::View;

/// A step that must not be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Breach {
    /// The core found a bug in itself.
    Panic,
    /// The last call of an `Allocate` is told to wait.
    WaitsAtLast,
    /// An `Allocate` with a listing asks for one.
    ListsForEver,
    /// The same call was answered in another way.
    AnswersDiffer,
    /// An `Allocate` is refused although a unit could be given.
    RefusedTooEarly,
    /// A unit is given over a process, and that is not the reported exception.
    GivenOverProcess,
    /// Something is given without a ledger.
    GivenWithoutLedger,
    /// The ledger breaks a rule of its own.
    LedgerRule,
    /// Ids and units are no bijection.
    TwoIdsForOneUnit,
    /// A free unit that is not at rest is offered on both sides.
    OnBothSides,
    /// The count is below what counted pods have and what is on its way to them.
    CountTooLow,
    /// Something free is offered without a ledger.
    OfferedWithoutLedger,
    /// A scheduler of claims that has seen everything would give what a counted pod has.
    SoldTwice,
    /// A counted pod that was bound on the count fails.
    CountedPodFails,
}

impl Breach {
    /// How many kinds there are.
    pub(crate) const COUNT: usize = Self::CountedPodFails as usize + 1;
}

/// What holds of any pool.
pub(crate) fn check_pool(pool: &Pool) -> Result<(), Breach> {
    let ledger = pool.ledger();
    ledger.check().map_err(|_| Breach::LedgerRule)?;
    let mut behind = BTreeSet::new();
    for named in ledger.units.keys().map(number_of).map(id) {
        let is_one = |unit| behind.insert(unit) && ledger.id_before(unit).as_ref() == Some(&named);
        if !ledger.unit_behind(&named).is_some_and(is_one) {
            return Err(Breach::TwoIdsForOneUnit);
        }
    }
    check_offers(pool)
}

fn check_offers(pool: &Pool) -> Result<(), Breach> {
    let offers = pool.offers();
    let claims = || offers.claims.iter().flatten();
    if pool.standing() != Standing::Serving {
        let open = offers.counted.iter().any(|offer| offer.free)
            || claims().any(|offer| offer.taint.is_none());
        return if open {
            Err(Breach::OfferedWithoutLedger)
        } else {
            Ok(())
        };
    }
    let ledger = pool.ledger();
    for offer in claims().filter(|offer| offer.taint.is_none() && !offer.held_by_claim) {
        let unit = &offer.gpu.uuid;
        let counted = offers.counted.iter().find(|counted| counted.unit == *unit);
        let healthy = counted.is_some_and(|counted| counted.health == Health::Healthy);
        let at_rest = matches!(ledger.units[unit].side, Side::Rest | Side::Yielding);
        if (healthy && !at_rest) || ledger.holds_touching(unit).next().is_some() {
            return Err(Breach::OnBothSides);
        }
    }
    Ok(())
}

/// The count is never below what counted pods have and what is on its way to them. Where it could not be written for a
/// while, pods that were bound on a higher one may fail.
pub(crate) fn check_count(
    scope: &Scope,
    node: &Node,
    after: &Memory,
    answers: &[Answer],
) -> Result<(), Breach> {
    let is_kept = scope.sides == Sides::Move && node.views.always_right;
    if !is_kept || after.pool.standing() != Standing::Serving {
        return Ok(());
    }
    let is_answered = |pod: usize| {
        answers.iter().any(|answer| match answer {
            Answer::Granted { pod: of, .. } | Answer::Refused { pod: of } => *of == pod,
            Answer::Prepared { .. }
            | Answer::NotNow { .. }
            | Answer::Unprepared { .. }
            | Answer::Seen => false,
        })
    };
    let given = answers.iter().map(|answer| match answer {
        Answer::Granted { units, .. } => units.len(),
        Answer::Refused { .. }
        | Answer::Prepared { .. }
        | Answer::NotNow { .. }
        | Answer::Unprepared { .. }
        | Answer::Seen => 0,
    });
    // What an ended pod had is held for a while, and the next one gets it.
    let active = scope
        .counted_pods()
        .filter(|pod| node.pods[*pod].is_active());
    let had: usize = active.map(|pod| node.pods[pod].units.len()).sum();
    let waits = |pod: &usize| node.pods[*pod].waits() && !is_answered(*pod);
    let on_the_way = scope.counted_pods().filter(waits);
    let asked: usize = on_the_way.map(|pod| scope.counted[pod]).sum();
    let seen = node.views.pods_seen;
    let due = had + given.sum::<usize>() + if seen { asked } else { 0 };
    if usize::try_from(after.offered.count).unwrap_or(0) < due {
        return Err(Breach::CountTooLow);
    }
    Ok(())
}

/// What the scheduler of claims believes, once everybody has seen everything.
pub(crate) fn check_views(scope: &Scope, node: &Node, pool: &Pool) -> Result<(), Breach> {
    if scope.sides == Sides::Fixed {
        return Ok(());
    }
    for number in node.views.claimable.iter() {
        let unit = unit(number);
        let mut holds = pool.ledger().holds_touching(&unit);
        if holds.any(|(_, hold)| hold.face() == Some(Face::Legacy)) {
            return Err(Breach::SoldTwice);
        }
    }
    Ok(())
}

/// What is given is idle, and nothing is given without a ledger.
pub(crate) fn check_answers(
    scope: &Scope,
    node: &Node,
    before: &Up,
    answers: &[Answer],
) -> Result<(), Breach> {
    for answer in answers {
        let (pod, units, over) = match answer {
            Answer::Granted {
                pod, units, over, ..
            } => (*pod, *units, *over),
            Answer::Prepared { pod, unit } => (*pod, Set::of(*unit), Set::EMPTY),
            Answer::Refused { .. }
            | Answer::NotNow { .. }
            | Answer::Unprepared { .. }
            | Answer::Seen => continue,
        };
        if !before.serves() {
            return Err(Breach::GivenWithoutLedger);
        }
        let claim = scope.claim_of(pod);
        let had = claim.is_some_and(|claim| {
            let prepared = before.memory.ledger.prepared.get(&claim_uid(claim));
            prepared.is_some_and(|p| p.devices.iter().any(|d| units.has(number_of(&d.unit))))
        });
        let excused = scope.hardware_of(over);
        for number in scope.hardware_of(units).iter().filter(|_| !had) {
            let users = node.processes_on(number);
            let counted = users.iter().all(|user| scope.claim_of(user).is_none());
            let reported = excused.has(number) && counted;
            if (!users.is_empty() && !reported) || node.strangers.has(number) {
                return Err(Breach::GivenOverProcess);
            }
        }
    }
    Ok(())
}

/// A refusal is final for the pod, so nothing that could be given may be left.
pub(crate) fn check_refusal(
    scope: &Scope,
    view: &View,
    pool: &Pool,
    ids: Set,
) -> Result<(), Breach> {
    if pool.standing() != Standing::Serving {
        return Ok(());
    }
    let processes = crate::shown::processes(scope, view);
    let usable = scope.units().iter().filter(|number| {
        let unit = unit(*number);
        let is_clean = |number: usize| {
            let known = processes.on(&self::unit(number));
            matches!(known, UnitProcesses::Known(known) if known.is_empty())
        };
        let idle = scope.hardware(*number).iter().all(is_clean);
        let reserved = |kind: &HoldKind| matches!(kind, HoldKind::Reserved { .. });
        let mut holds = pool.ledger().holds_touching(&unit);
        pool.is_present(&unit) && idle && holds.all(|(_, hold)| reserved(&hold.kind))
    });
    if usable.count() >= ids.len() {
        return Err(Breach::RefusedTooEarly);
    }
    if scope.sides == Sides::Move && view.always_right {
        return Err(Breach::CountedPodFails);
    }
    Ok(())
}

/// One holder for each unit, by what containers were given.
pub(crate) fn one_holder(scope: &Scope, state: &State) -> bool {
    state.node.doubled(scope).is_none()
}

/// Whatever the file may hold now, what was answered is in it.
pub(crate) fn answers_are_durable(scope: &Scope, state: &State) -> bool {
    let in_memory = match &state.daemon {
        Daemon::Up(up) => Some(&*up.memory.ledger),
        Daemon::Down => None,
    };
    let on_disk = match &state.disk {
        Disk::AsInMemory => in_memory,
        Disk::Is(ledger) => Some(&**ledger),
        Disk::Missing => None,
    };
    let in_doubt = state.doubt.as_deref();
    on_disk
        .into_iter()
        .chain(in_doubt)
        .all(|ledger| has_all(scope, &state.node, ledger))
}

/// No hold ends while its holder's containers run.
pub(crate) fn memory_is_right(scope: &Scope, state: &State) -> bool {
    match &state.daemon {
        Daemon::Up(up) => !up.serves() || has_all(scope, &state.node, &up.memory.ledger),
        Daemon::Down => true,
    }
}

/// Whether a ledger has everything that active pods were given.
fn has_all(scope: &Scope, node: &Node, ledger: &Ledger) -> bool {
    let pods = scope.counted_pods().chain(scope.user_pods());
    pods.filter(|pod| node.pods[*pod].is_active()).all(|pod| {
        let claim = scope.claim_of(pod).map(claim_uid);
        node.pods[pod].units.iter().all(|number| {
            let holds = ledger.holds_on(&unit(number));
            holds.iter().any(|hold| match &hold.kind {
                HoldKind::Granted { .. } | HoldKind::Bound { .. } => claim.is_none(),
                HoldKind::Prepared { claim: holder } => Some(&holder.uid) == claim.as_ref(),
                HoldKind::Reserved { .. } => false,
                // After a lost ledger nobody may be named.
                HoldKind::Foreign { .. } => true,
            })
        })
    })
}

/// A runtime without the file starts nothing.
pub(crate) fn claims_have_their_files(scope: &Scope, state: &State) -> bool {
    let node = &state.node;
    scope.user_pods().all(|pod| {
        let claim = scope.users[pod - FIRST_USER];
        let prepared = matches!(node.claims[claim].cached, Cached::Prepared(_));
        !prepared || !node.pods[pod].is_active() || node.cdi.has(claim)
    })
}
