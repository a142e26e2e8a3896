//! What must be so after every step. Each function names the rule that it guards.

use std::collections::BTreeSet;

use super::super::kit::Daemon;
use super::pods::{Containers, Pod};
use super::world::World;
use crate::{
    AllocateOutcome, AllocateRequest, DeviceId, Evidence, Face, ForeignCause, Former, Health, Hold,
    HoldKind, Preparation, Side, TaintEffect, UnitId, UnitProcesses,
};

type Checked = Result<(), String>;

/// All that holds at any time.
pub(super) fn check(world: &World) -> Checked {
    invariant_no_unit_is_in_use_twice(world)?;
    if !world.serves() {
        return invariant_nothing_is_offered_without_a_ledger(world);
    }
    invariant_the_disk_has_what_was_said(world)?;
    invariant_one_holder_per_unit(world)?;
    invariant_ids_and_units_are_a_bijection(world)?;
    invariant_healthy_minus_allocated_is_free(world)?;
    invariant_no_free_unit_is_on_both_faces(world)?;
    invariant_nothing_is_offered_beside_a_rival(world)?;
    invariant_limits_cap_each_face(world)?;
    invariant_what_a_running_pod_was_given_is_held(world)?;
    invariant_no_pod_that_runs_is_evicted(world)
}

/// The promise, checked against the truth: which containers run on which unit.
fn invariant_no_unit_is_in_use_twice(world: &World) -> Checked {
    for unit in world.units() {
        let users: Vec<&Pod> = world
            .pods
            .iter()
            .filter(|pod| pod.units.contains(&unit) && pod.occupies())
            .collect();
        let shares_a_claim = |a: &Pod, b: &Pod| a.claim.is_some() && a.claim == b.claim;
        for (place, one) in users.iter().enumerate() {
            for other in &users[place + 1..] {
                if shares_a_claim(one, other) || may_follow(world, &unit, one, other) {
                    continue;
                }
                return Err(format!("{unit} is used by {} and {}", one.uid, other.uid));
            }
        }
    }
    Ok(())
}

/// The one exception of rule 8: a counted pod after a force-deleted counted pod, as reported.
fn may_follow(world: &World, unit: &UnitId, one: &Pod, other: &Pod) -> bool {
    let orphaned = |pod: &Pod| pod.containers == Containers::Orphaned;
    let counted = one.claim.is_none() && other.claim.is_none();
    let both_given_up = orphaned(one) && orphaned(other);
    let reported = |pod: &Pod| world.handed_over.get(unit) == Some(&pod.uid);
    counted
        && (both_given_up
            || (orphaned(one) && reported(other))
            || (orphaned(other) && reported(one)))
}

/// Whoever else serves the resource may give the same GPU out.
fn invariant_nothing_is_offered_beside_a_rival(world: &World) -> Checked {
    if world.daemon.pool.rivals().next().is_none() {
        return Ok(());
    }
    nothing_is_offered(world)
}

/// Rule 11.
fn invariant_nothing_is_offered_without_a_ledger(world: &World) -> Checked {
    nothing_is_offered(world)
}

fn nothing_is_offered(world: &World) -> Checked {
    let offers = world.daemon.pool.offers();
    if offers.counted.iter().any(|offer| offer.free) {
        return Err("an id is offered while nothing may be".to_owned());
    }
    let untainted = offers
        .claims
        .iter()
        .flatten()
        .any(|offer| offer.taint.is_none() && !offer.held_by_claim);
    if untainted {
        return Err("a device is offered while nothing may be".to_owned());
    }
    Ok(())
}

/// Rule 2.
fn invariant_the_disk_has_what_was_said(world: &World) -> Checked {
    let memory = world.daemon.pool.ledger();
    match &world.daemon.disk {
        Some(disk) if disk == memory => Ok(()),
        Some(_) | None => Err("memory is ahead of the disk".to_owned()),
    }
}

/// Rule 1.
fn invariant_one_holder_per_unit(world: &World) -> Checked {
    world.daemon.pool.ledger().check()
}

/// Rule 4.
fn invariant_ids_and_units_are_a_bijection(world: &World) -> Checked {
    let ledger = world.daemon.pool.ledger();
    let mut behind = BTreeSet::new();
    for named in ledger.units.keys() {
        let id = DeviceId::of_unit(named.clone());
        let unit = ledger
            .unit_behind(&id)
            .ok_or_else(|| format!("no unit stands behind {id}"))?;
        if !behind.insert(unit) {
            return Err(format!("{unit} stands behind two ids"));
        }
        if ledger.id_before(unit).as_ref() != Some(&id) {
            return Err(format!("{id} is not before {unit}"));
        }
    }
    Ok(())
}

/// Rule 4: what the kubelet counts as free is what is free on its side.
fn invariant_healthy_minus_allocated_is_free(world: &World) -> Checked {
    let pool = &world.daemon.pool;
    let ledger = pool.ledger();
    let offers = pool.offers();
    if offers.counted.len() != ledger.units.len() {
        return Err("an id is not listed".to_owned());
    }
    let open = pool.rivals().next().is_none();
    let mut left_out = 0;
    for offer in &offers.counted {
        let carried = ledger.carrier_of(&offer.id).is_some();
        let is_faulty = pool.fault_of(&offer.unit).is_some();
        let is_lost = world.lost.contains(&offer.unit) && !pool.is_present(&offer.unit);
        let only = |fits: fn(&HoldKind) -> bool| {
            ledger
                .holds_touching(&offer.unit)
                .all(|(_, hold)| fits(&hold.kind))
        };
        let open = open
            && !is_faulty
            && pool.is_present(&offer.unit)
            && ledger.units[&offer.unit].side.is_healthy();
        let free = open && only(is_reserved);
        match offer.health {
            Health::Healthy if is_faulty && world.serves() => {
                return Err(format!("{} is healthy and has a fault", offer.id));
            }
            Health::Healthy if carried || free || (open && only(is_passing)) => {}
            Health::Healthy => return Err(format!("{} is healthy and not free", offer.id)),
            Health::Unhealthy if carried && !is_lost && !is_faulty => {
                return Err(format!("{} is allocated and unhealthy", offer.id));
            }
            Health::Unhealthy => left_out += usize::from(free),
        }
    }
    if left_out > 0 && pool.settings().limits.legacy.is_none() {
        return Err(format!(
            "{left_out} free units are not offered to counted pods"
        ));
    }
    Ok(())
}

fn is_reserved(kind: &HoldKind) -> bool {
    matches!(kind, HoldKind::Reserved { .. })
}

/// Only the process of a former counted pod is left; for ten seconds a pod that is bound already may wait for it.
fn is_passing(kind: &HoldKind) -> bool {
    matches!(
        kind,
        HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Counted(_)
            }
        }
    )
}

/// While nothing arrives a unit may rest on both; in motion it is on one.
fn invariant_no_free_unit_is_on_both_faces(world: &World) -> Checked {
    let pool = &world.daemon.pool;
    let offers = pool.offers();
    for claim in offers.claims.iter().flatten() {
        let unit = &claim.gpu.uuid;
        let counted = offers.counted.iter().find(|offer| offer.unit == *unit);
        let healthy = counted.is_some_and(|offer| offer.health == Health::Healthy);
        let is_free = pool.ledger().holds_on(unit).is_empty();
        let may_be = matches!(pool.ledger().units[unit].side, Side::Rest | Side::Yielding);
        if is_free && healthy && claim.taint.is_none() && !may_be {
            return Err(format!("{unit} is offered on both faces"));
        }
        if claim.taint.is_none() && !is_free && !claim.held_by_claim {
            return Err(format!("{unit} is held and untainted"));
        }
    }
    Ok(())
}

fn invariant_limits_cap_each_face(world: &World) -> Checked {
    let pool = &world.daemon.pool;
    let limits = pool.settings().limits;
    let held = |face: Face| {
        let holds = pool.ledger().holds.values();
        holds
            .filter(|holds| holds.iter().any(|hold| hold.face() == Some(face)))
            .count()
    };
    let offers = pool.offers();
    let healthy = offers.counted.iter().filter(|offer| {
        offer.health == Health::Healthy
            && pool.ledger().carrier_of(&offer.id).is_none()
            && !pool.seen.motion.is_outgoing(&offer.unit)
    });
    let untainted = offers.claims.iter().flatten().filter(|offer| {
        offer.taint.is_none() && pool.ledger().holds_on(&offer.gpu.uuid).is_empty()
    });
    for (face, offered, limit) in [
        (Face::Legacy, healthy.count(), limits.legacy),
        (Face::Dra, untainted.count(), limits.dra),
    ] {
        let Some(limit) = limit else { continue };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if offered > 0 && held(face) + offered > limit {
            return Err(format!(
                "{} offers {offered} beside {} held, over its limit of {limit}",
                face.as_str(),
                held(face)
            ));
        }
    }
    Ok(())
}

/// Rule 7: no hold ends while its holder's containers run.
fn invariant_what_a_running_pod_was_given_is_held(world: &World) -> Checked {
    let ledger = world.daemon.pool.ledger();
    for pod in world
        .pods
        .iter()
        .filter(|pod| pod.containers == Containers::Running)
    {
        for unit in &pod.units {
            let holds = ledger.holds_on(unit);
            let fits = |hold: &Hold| match &hold.kind {
                HoldKind::Granted { .. } | HoldKind::Bound { .. } => pod.claim.is_none(),
                HoldKind::Prepared { claim } => pod
                    .claim
                    .is_some_and(|own| world.claims[own].claim.uid == claim.uid),
                HoldKind::Reserved { .. } => false,
                // After a lost ledger nobody may be named.
                HoldKind::Foreign { .. } => true,
            };
            if !holds.iter().any(fits) {
                return Err(format!("{} runs on {unit}, which has {holds:?}", pod.uid));
            }
        }
    }
    Ok(())
}

/// The lost race: a device evicts only while somebody else keeps its unit from a claim, and only pods of which nothing
/// runs.
fn invariant_no_pod_that_runs_is_evicted(world: &World) -> Checked {
    let pool = &world.daemon.pool;
    let offers = pool.offers();
    let evicting = offers.claims.iter().flatten().filter(|offer| {
        offer
            .taint
            .is_some_and(|taint| taint.effect == TaintEffect::NoExecute)
    });
    for offer in evicting {
        let unit = &offer.gpu.uuid;
        let holds = pool.ledger().holds_on(unit);
        let kept = |hold: &Hold| hold.claim().is_none();
        if holds.is_empty() || !holds.iter().all(kept) {
            return Err(format!("{unit} evicts, and has {holds:?}"));
        }
        for (number, claim) in world.claims.iter().enumerate() {
            let named = claim.allocated && claim.devices.iter().any(|(it, _)| *it == offer.device);
            let runs = world
                .pods
                .iter()
                .any(|pod| pod.claim == Some(number) && pod.containers == Containers::Running);
            if named && runs && !claim.tolerates {
                return Err(format!("{} runs and is evicted by {unit}", claim.claim));
            }
        }
    }
    Ok(())
}

/// Rule 5: a refusal ends the pod, so nothing that could be given may be left.
pub(super) fn invariant_a_refusal_is_the_last_resort(world: &World, ids: &[DeviceId]) -> Checked {
    if !world.serves() || world.daemon.pool.rivals().next().is_some() {
        return Ok(());
    }
    let pool = &world.daemon.pool;
    let processes = world.processes();
    let usable = world.units().into_iter().filter(|unit| {
        let idle = matches!(processes.on(unit), UnitProcesses::Known(known) if known.is_empty());
        let free = pool
            .ledger()
            .holds_on(unit)
            .iter()
            .all(|hold| matches!(hold.kind, HoldKind::Reserved { .. }));
        pool.is_present(unit) && pool.fault_of(unit).is_none() && idle && free
    });
    let usable = usable.count();
    if usable >= ids.len() {
        return Err(format!("{ids:?} were refused, and {usable} units are idle"));
    }
    Ok(())
}

/// Rule 8: what is given to a counted pod is idle, or reported.
pub(super) fn invariant_what_is_granted_is_idle(world: &World, units: &[UnitId]) -> Checked {
    for unit in units {
        let busy = world.pods.iter().find(|pod| {
            let counts = pod.opened && pod.units.contains(unit);
            let reported = world.daemon.reports.iter().any(|report| {
                matches!(report, crate::Report::HandedOverBusy { unit: over, .. } if over == unit)
            });
            counts && (pod.claim.is_some() || !reported)
        });
        if let Some(pod) = busy {
            return Err(format!("{unit} was granted over a process of {}", pod.uid));
        }
    }
    Ok(())
}

/// Rules 6 and 8: what a claim did not have before is idle.
pub(super) fn invariant_what_is_prepared_is_idle(
    world: &World,
    before: &Daemon,
    preparation: &Preparation,
) -> Checked {
    let had = before
        .pool
        .ledger()
        .prepared
        .contains_key(&preparation.claim.uid);
    for device in &preparation.devices {
        let owner = device.access == crate::Access::Owner;
        let used = world
            .pods
            .iter()
            .any(|pod| pod.opened && pod.units.contains(&device.unit));
        if owner && !had && (used || world.strangers.contains(&device.unit)) {
            return Err(format!("{} was prepared and is in use", device.unit));
        }
    }
    Ok(())
}

/// Rule 3.
pub(super) fn invariant_the_same_question_has_the_same_answer(
    world: &mut World,
    request: &AllocateRequest,
    evidence: &Evidence,
    units: &[UnitId],
) -> Checked {
    let handed_over = world
        .daemon
        .reports
        .iter()
        .any(|report| matches!(report, crate::Report::HandedOverBusy { .. }));
    if handed_over {
        return Ok(()); // over a process no answer is given twice: the second may be for another pod
    }
    let fresh = Evidence {
        listing: evidence.listing.clone().or_else(|| Some(world.listing())),
    };
    let again = world.act(|t| t.allocate(request, &fresh));
    match again {
        AllocateOutcome::Granted(grants)
            if grants.iter().map(|grant| &grant.unit).eq(units.iter()) =>
        {
            Ok(())
        }
        other @ (AllocateOutcome::Granted(_)
        | AllocateOutcome::NeedsListing
        | AllocateOutcome::Wait
        | AllocateOutcome::Refused(_)) => Err(format!(
            "after {units:?} the same call was answered with {other:?}"
        )),
    }
}

/// Rule 7, the other way round: nothing outlives its cause.
pub(super) fn invariant_nothing_is_left_when_all_is_gone(world: &World) -> Checked {
    let ledger = world.daemon.pool.ledger();
    if !ledger.holds.is_empty() || !ledger.prepared.is_empty() {
        return Err(format!(
            "nothing runs, and there is {:?} and {:?}",
            ledger.holds, ledger.prepared
        ));
    }
    if !ledger.substitutions().is_empty() {
        return Err("nothing runs, and ids are substituted".to_owned());
    }
    Ok(())
}
