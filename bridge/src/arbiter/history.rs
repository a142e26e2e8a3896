//! What transitions did and what was refused, as lines of the history: for people, long after.

use bridge_core::{ClaimRef, DeviceId, Former, PodRef, Refusal, Report, UnitId};

use crate::store::Event;

/// The line of a report; errors that close no GPU have none, since an application can make thousands of them.
pub(super) fn of_report(report: &Report, generation: u64) -> Option<Event> {
    let event = |what: &str| Event::now(generation, what);
    Some(match report {
        Report::Granted { id, unit } => on(unit, by_id(id), event("Granted")),
        Report::Substituted { id, unit } => on(unit, by_id(id), event("Substituted")),
        Report::KubeletLostItsBook { id, pod } => {
            let why = format!("the kubelet asked for {id} again, which this pod has");
            because(why, of(by_pod(pod), event("KubeletLostItsBook")))
        }
        Report::HandedOverBusy { id, unit, pids } => {
            let why = format!("host PIDs {pids:?} were still on it");
            because(why, on(unit, by_id(id), event("HandedOverBusy")))
        }
        Report::ClaimLostRace { claim, unit } => on(unit, by_claim(claim), event("ClaimLostRace")),
        Report::EvictionAsked { claim, unit } => {
            on(unit, by_claim(claim), event("ClaimPodEvicted"))
        }
        Report::EvictionOver { claim, unit } => on(unit, by_claim(claim), event("EvictionOver")),
        Report::NotEvicted { claim, unit, why } => Event {
            reason: Some(why.as_str().to_owned()),
            ..on(unit, by_claim(claim), event("ClaimPodNotEvicted"))
        },
        Report::Bound { unit, pod } => on(unit, by_pod(pod), event("Bound")),
        Report::Reserved { unit, claim } => on(unit, by_claim(claim), event("Reserved")),
        Report::Prepared { claim, units } => Event {
            unit: Some(
                units
                    .iter()
                    .map(UnitId::as_str)
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
            who: by_claim(claim),
            ..event("Prepared")
        },
        Report::Ended { unit, cause } => Event {
            reason: Some(cause.as_str().to_owned()),
            ..on(unit, None, event("Ended"))
        },
        Report::Lingering { unit, former } => on(unit, by_former(former), event("Lingering")),
        Report::UnknownHolder { id, pod } => {
            let why = format!("the kubelet lists {id} for it");
            because(why, of(by_pod(pod), event("UnknownHolder")))
        }
        Report::ClaimTakenOver { claim } => of(by_claim(claim), event("ClaimTakenOver")),
        Report::ForeignFound { unit } => on(unit, None, event("ForeignFound")),
        Report::UnitAdded { unit } => on(unit, None, event("UnitAdded")),
        Report::UnitLost { unit } => on(unit, None, event("UnitLost")),
        Report::UnitReturned { unit } => on(unit, None, event("UnitReturned")),
        Report::XidSeen { .. } => return None,
        Report::UnitFaulty { unit, xid } => {
            because(format!("XID {xid}"), on(unit, None, event("UnitFaulty")))
        }
        Report::FaultEnded { unit, cause } => Event {
            reason: Some(cause.as_str().to_owned()),
            ..on(unit, None, event("FaultEnded"))
        },
        Report::OtherRegistrant { rival } => because(rival.to_string(), event("OtherRegistrant")),
        Report::RivalsGone => event("RivalsGone"),
        Report::Adopted {
            counted,
            claims,
            foreign,
        } => {
            let why = format!("{counted} counted, {claims} claims, {foreign} foreign");
            because(why, event("Adopted"))
        }
    })
}

/// The line of a refusal.
pub(super) fn of_refusal(refusal: &Refusal, who: String, generation: u64) -> Event {
    refused(refusal.reason(), who, refusal.to_string(), generation)
}

/// The line of a call that was refused before the pool was asked, or that got no decision.
pub(super) fn refused(reason: &str, who: String, why: String, generation: u64) -> Event {
    Event {
        reason: Some(reason.to_owned()),
        who: Some(who),
        why: Some(why),
        ..Event::now(generation, "Refused")
    }
}

/// The line of an admin's command.
pub(super) fn of_command(what: &str, unit: &UnitId, reason: &str, generation: u64) -> Event {
    Event {
        unit: Some(unit.to_string()),
        why: Some(reason.to_owned()),
        ..Event::now(generation, what)
    }
}

fn of(who: Option<String>, event: Event) -> Event {
    Event { who, ..event }
}

fn because(why: String, event: Event) -> Event {
    Event {
        why: Some(why),
        ..event
    }
}

fn on(unit: &UnitId, who: Option<String>, event: Event) -> Event {
    Event {
        unit: Some(unit.to_string()),
        who,
        ..event
    }
}

fn by_id(id: &DeviceId) -> Option<String> {
    Some(format!("id {id}"))
}

fn by_pod(pod: &PodRef) -> Option<String> {
    Some(format!("pod {pod}"))
}

fn by_claim(claim: &ClaimRef) -> Option<String> {
    Some(format!("claim {claim}"))
}

fn by_former(former: &Former) -> Option<String> {
    match former {
        Former::Counted(Some(pod)) => by_pod(pod),
        Former::Counted(None) => Some("a counted pod".to_owned()),
        Former::Claim(claim) => by_claim(claim),
    }
}
