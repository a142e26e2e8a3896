//! What became of each pod, with the times at which the API said so.

use std::collections::BTreeMap;
use std::time::Duration;

use super::load::{Fate, Kind};

/// The runtime's record and the driver have one clock: CLOCK_MONOTONIC since it began.
pub fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).expect("the clock is positive");
    let nanoseconds = u32::try_from(now.tv_nsec).expect("less than a second");
    Duration::new(seconds, nanoseconds)
}

/// One pod from its creation to its end.
#[derive(Clone, Debug)]
pub struct Life {
    pub kind: Kind,
    pub fate: Fate,
    /// In which round or burst it came.
    pub round: u32,
    pub uid: Option<String>,
    /// The name of its claim.
    pub claim: Option<String>,
    pub created: Duration,
    /// Bound to the node: whatever it needs is allocated to it.
    pub bound: Option<Duration>,
    pub running: Option<Duration>,
    /// By the driver.
    pub deleted: Option<Duration>,
    pub gone: Option<Duration>,
    pub failed: Option<Trouble>,
    /// Deleted by somebody else.
    pub evicted: Option<Trouble>,
    /// What the kubelet said when the DRA driver, or the API server, refused, and when.
    pub refusals: Vec<(Duration, String)>,
    pub stuck: bool,
    /// The pod that it replaces.
    pub successor_of: Option<String>,
}

/// What went wrong, when and why.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub at: Duration,
    pub why: String,
}

impl Life {
    pub fn new(kind: Kind, fate: Fate, round: u32) -> Self {
        Self {
            kind,
            fate,
            round,
            uid: None,
            claim: None,
            created: now(),
            bound: None,
            running: None,
            deleted: None,
            gone: None,
            failed: None,
            evicted: None,
            refusals: Vec::new(),
            stuck: false,
            successor_of: None,
        }
    }

    /// Neither running nor on its way out.
    pub fn waits(&self) -> bool {
        self.running.is_none() && !self.is_ending()
    }

    /// Whether nothing but its end is to be waited for.
    pub fn is_ending(&self) -> bool {
        self.deleted.is_some() || self.gone.is_some() || self.is_lost()
    }

    /// Failed, or deleted by somebody else.
    pub fn is_lost(&self) -> bool {
        self.failed.is_some() || self.evicted.is_some()
    }

    /// Since when it has been bound without running.
    pub fn bound_only_for(&self, now: Duration) -> Option<Duration> {
        self.waits().then_some(now.saturating_sub(self.bound?))
    }

    /// From its creation until it ran.
    pub fn wait(&self) -> Option<Duration> {
        Some(self.running?.saturating_sub(self.created))
    }

    /// Whether the kubelet could not read its claim.
    pub fn was_forbidden(&self) -> bool {
        self.refusals.iter().any(|(_, why)| is_forbidden(why))
    }

    /// Whether it should have run: nobody deleted it before, and it did not fail.
    pub fn never_ran(&self) -> bool {
        self.running.is_none() && !self.is_lost() && self.fate.early.is_none()
    }
}

/// All pods of a run by name.
pub type Lives = BTreeMap<String, Life>;

/// Whether the kubelet could not read the claim: then no driver was asked.
pub fn is_forbidden(refusal: &str) -> bool {
    refusal.contains("fetch ResourceClaim") && refusal.contains("forbidden")
}
