//! What transitions did, as log lines an admin finds in a post-mortem.

use bridge_core::{ClaimRef, Former, NotEvicted, Report, Rival, UnitId, UnitStatus};
use tracing::{info, warn};

/// An error with everything behind it, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Every unit with its side, in one line; a star says that somebody holds it.
pub(super) fn sides(units: &[UnitStatus]) -> String {
    let words: Vec<String> = units
        .iter()
        .map(|unit| {
            let held = if unit.holds.is_empty() { "" } else { "*" };
            format!("{}:{}{held}", unit.device, unit.side.as_str())
        })
        .collect();
    words.join(" ")
}

/// Logs each report.
pub(super) fn tell(reports: &[Report]) {
    for report in reports {
        tell_one(report);
    }
}

fn tell_rival(rival: &Rival) {
    warn!(
        face = rival.face.as_str(),
        place = rival.place,
        owner = rival.owner,
        reason = "OtherRegistrant",
        "another daemon serves the same name on this node; nothing is offered while it is there"
    );
}

fn tell_one(report: &Report) {
    match report {
        Report::Granted { id, unit } => info!(%id, %unit, face = "legacy", "granted"),
        Report::Substituted { id, unit } => {
            info!(%id, %unit, face = "legacy", "another unit was given than the id names");
        }
        Report::KubeletLostItsBook { id, pod } => {
            warn!(%id, %pod, reason = "KubeletLostItsBook", "the kubelet asked for an id that a running pod has; another unit was given");
        }
        Report::HandedOverBusy { id, unit, pids } => {
            warn!(%id, %unit, ?pids, reason = "HandedOverBusy", "a unit went to a counted pod while a process of a force-deleted counted pod still ran on it");
        }
        Report::ClaimLostRace { claim, unit } => {
            warn!(%claim, %unit, reason = "ClaimLostRace", "a counted pod took a unit that this claim was allocated");
        }
        Report::EvictionAsked { claim, unit } => {
            warn!(%claim, %unit, reason = "ClaimPodEvicted", "the device of a claim that lost its unit is tainted NoExecute: the pods of the claim are evicted, and their controller makes new ones");
        }
        Report::EvictionOver { claim, unit } => {
            info!(%claim, %unit, "the device evicts no more for this claim");
        }
        Report::NotEvicted { claim, unit, why } => tell_not_evicted(claim, unit, why),
        Report::Bound { unit, pod } => info!(%unit, %pod, face = "legacy", "bound"),
        Report::Reserved { unit, claim } => info!(%unit, %claim, face = "dra", "reserved"),
        Report::Prepared { claim, units } => {
            let units: Vec<_> = units.iter().map(UnitId::as_str).collect();
            info!(%claim, ?units, face = "dra", "prepared");
        }
        Report::Ended { unit, cause } => info!(%unit, cause = cause.as_str(), "hold ended"),
        Report::Lingering { unit, former } => {
            let former = match former {
                Former::Counted(Some(pod)) => pod.to_string(),
                Former::Counted(None) => "a counted pod".to_owned(),
                Former::Claim(claim) => claim.to_string(),
            };
            warn!(%unit, former, "a process of the former holder is still on the unit; it goes to nobody until NVML shows it free");
        }
        Report::ForeignFound { unit } => {
            warn!(%unit, "a process of no known holder runs on a free unit; it is offered to nobody");
        }
        Report::UnknownHolder { id, pod } => {
            warn!(%id, %pod, reason = "UnknownHolder", "the kubelet lists an id for a pod, and the unit behind it belongs to somebody else");
        }
        Report::UnitAdded { unit } => info!(%unit, "a GPU joined the pool"),
        Report::UnitLost { unit } => {
            warn!(%unit, "a GPU does not answer any more; it stays listed as unhealthy")
        }
        Report::UnitReturned { unit } => info!(%unit, "a GPU answers again"),
        Report::XidSeen { .. } | Report::UnitFaulty { .. } | Report::FaultEnded { .. } => {
            tell_fault(report);
        }
        Report::ClaimTakenOver { claim } => {
            warn!(%claim, face = "dra", "the kubelet has this claim from another driver or an older ledger; it is held from now on");
        }
        Report::OtherRegistrant { rival } => tell_rival(rival),
        Report::RivalsGone => {
            info!(
                "no other daemon serves the same name on this node any more; GPUs are offered again"
            );
        }
        Report::Adopted {
            counted,
            claims,
            foreign,
        } => info!(counted, claims, foreign, "took over what runs on the node"),
    }
}

fn tell_fault(report: &Report) {
    if let Report::XidSeen {
        unit,
        xid,
        times,
        action,
    } = report
    {
        info!(%unit, %xid, times, action = action.as_str(), "the driver told of an error of a GPU");
    }
    if let Report::UnitFaulty { unit, xid } = report {
        warn!(%unit, %xid, reason = "UnitFaulty", "an error closes a GPU: it is offered to nobody, and who has it keeps it");
    }
    if let Report::FaultEnded { unit, cause } = report {
        info!(%unit, cause = cause.as_str(), "the fault of a GPU has ended");
    }
}

/// The claim's pod waits until somebody does something, so each line ends with what that can be.
fn tell_not_evicted(claim: &ClaimRef, unit: &UnitId, why: &NotEvicted) {
    match why {
        NotEvicted::Tolerates => {
            warn!(%claim, %unit, reason = "ClaimPodNotEvicted", why = why.as_str(), "a claim that lost its unit tolerates the taint, so its pods are not evicted; delete them to have them scheduled anew");
        }
        NotEvicted::Onlooker(other) => {
            warn!(%claim, %unit, %other, reason = "ClaimPodNotEvicted", why = why.as_str(), "the pods of a claim that lost its unit are not evicted, because a claim with adminAccess to the device, which does not tolerate the taint, would go with them; delete the pods, or give that claim a toleration");
        }
        NotEvicted::InUse(other) => {
            warn!(%claim, %unit, %other, reason = "ClaimPodNotEvicted", why = why.as_str(), "the pods of a claim that lost its unit are not evicted, because a pod of a claim to the device may run, and does not tolerate the taint; delete the pods that wait");
        }
        NotEvicted::NoEffect => {
            warn!(%claim, %unit, reason = "ClaimPodNotEvicted", why = why.as_str(), "the pods of a claim that lost its unit are still there after the device was tainted NoExecute; delete them, and look at the controller manager's device-taint-eviction-controller");
        }
    }
}
