//! The words of a script: what outcomes, reports and offers are called, and how names are read.

use std::time::Duration;

use crate::{
    AllocateOutcome, ClaimOffer, Claimed, CountedOffer, DeviceId, DeviceName, Face, Health, Limits,
    Mode, Offers, PrepareOutcome, Recovery, Standing, Taint, TaintEffect, UnitId, Xid, XidAction,
    XidRules,
};

pub(super) fn mode(word: &str) -> Result<Mode, String> {
    Mode::ALL
        .into_iter()
        .find(|mode| mode.as_str() == word)
        .ok_or_else(|| format!("`{word}` is not a mode: legacy, both, dra or drained"))
}

pub(super) fn face(word: &str) -> Result<Face, String> {
    [Face::Legacy, Face::Dra]
        .into_iter()
        .find(|face| face.as_str() == word)
        .ok_or_else(|| format!("`{word}` is not a face: legacy or dra"))
}

pub(super) fn limits(words: &[&str]) -> Result<Limits, String> {
    let mut limits = Limits::default();
    match words {
        ["none"] => {}
        ["legacy", legacy] => limits.legacy = Some(number(legacy, "a limit")?),
        ["dra", dra] => limits.dra = Some(number(dra, "a limit")?),
        ["legacy", legacy, "dra", dra] => {
            limits.legacy = Some(number(legacy, "a limit")?);
            limits.dra = Some(number(dra, "a limit")?);
        }
        _ => {
            return Err(
                "write `limits legacy 5 dra 3`, one of the two, or `limits none`".to_owned(),
            );
        }
    }
    Ok(limits)
}

/// What the driver says has to be done about a GPU.
pub(super) fn recovery(word: &str) -> Result<Recovery, String> {
    match word {
        "none" => Ok(Recovery::None),
        "reset" => Ok(Recovery::Reset),
        "reboot" => Ok(Recovery::Reboot),
        other => Err(format!("`{other}` is none of none, reset and reboot")),
    }
}

/// What XIDs do: `ignore 48 62`, `fault 94`, `others-ignored`, one after the other.
pub(super) fn xids(words: &[&str]) -> Result<XidRules, String> {
    let mut rules = XidRules::default();
    let mut list = &mut rules.ignore;
    for word in words {
        match *word {
            "ignore" => list = &mut rules.ignore,
            "fault" => list = &mut rules.fault,
            "others-ignored" => rules.others = XidAction::Ignore,
            xid => drop(list.insert(Xid::new(number(xid, "an XID")?))),
        }
    }
    Ok(rules)
}

pub(super) fn number(word: &str, what: &str) -> Result<u32, String> {
    word.parse().map_err(|_| format!("`{word}` is not {what}"))
}

/// What a pod that waits asks for, by count and by claim.
pub(super) fn wants(words: &[&str]) -> Result<(u32, Claimed), String> {
    match words {
        ["counted", count] => Ok((number(count, "a number of GPUs")?, Claimed::Units(0))),
        ["claims", "all"] => Ok((0, Claimed::All)),
        ["claims", count] => Ok((0, Claimed::Units(number(count, "a number of GPUs")?))),
        _ => Err("write `waits pod-a counted 2`, `... claims 2`, `... claims all`".to_owned()),
    }
}

pub(super) fn span(word: &str) -> Result<Duration, String> {
    let seconds = word
        .strip_prefix('+')
        .and_then(|word| word.strip_suffix('s'))
        .and_then(|word| word.parse().ok());
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| format!("`{word}` is not a time: write +11s"))
}

pub(super) fn unit(word: &str) -> Result<UnitId, String> {
    UnitId::new(word).map_err(|why| why.to_string())
}

pub(super) fn id(word: &str) -> Result<DeviceId, String> {
    DeviceId::parse(word).map_err(|why| why.to_string())
}

pub(super) fn device(word: &str) -> Result<DeviceName, String> {
    DeviceName::new(word).map_err(|why| why.to_string())
}

pub(super) fn allocate_outcome(outcome: &AllocateOutcome) -> String {
    match outcome {
        AllocateOutcome::Granted(grants) => {
            let units: Vec<String> = grants.iter().map(|grant| grant.unit.to_string()).collect();
            units.join(" ")
        }
        AllocateOutcome::NeedsListing => "needs-listing".to_owned(),
        AllocateOutcome::Wait => "wait".to_owned(),
        AllocateOutcome::Refused(refusal) => format!("refused {}", refusal.reason()),
    }
}

pub(super) fn prepare_outcome(outcome: &PrepareOutcome) -> String {
    match outcome {
        PrepareOutcome::Prepared(_) => "prepared".to_owned(),
        PrepareOutcome::Wait(refusal) => format!("wait {}", refusal.reason()),
        PrepareOutcome::Refused(refusal) => format!("refused {}", refusal.reason()),
    }
}

pub(super) fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Serving => "serving",
        Standing::WaitingForAdoption => "waiting-for-adoption",
        Standing::LedgerUnreadable => "ledger-unreadable",
    }
}

/// `H U H`: one letter per id, in the order of the list.
pub(super) fn counted_offers(offers: &Offers) -> String {
    let letter = |offer: &CountedOffer| match offer.health {
        Health::Healthy => "H",
        Health::Unhealthy => "U",
    };
    let letters: Vec<&str> = offers.counted.iter().map(letter).collect();
    letters.join(" ")
}

/// `on Counted Lost`: one word per device; `on` is untainted, `Counted:NoExecute` evicts. `none`: no slice at all.
pub(super) fn claim_offers(offers: &Offers) -> String {
    let Some(claims) = &offers.claims else {
        return "none".to_owned();
    };
    let word = |offer: &ClaimOffer| match offer.taint {
        None => "on".to_owned(),
        Some(Taint {
            reason,
            effect: TaintEffect::NoSchedule,
        }) => reason.as_str().to_owned(),
        Some(Taint { reason, effect }) => format!("{}:{}", reason.as_str(), effect.as_str()),
    };
    let words: Vec<String> = claims.iter().map(word).collect();
    words.join(" ")
}
