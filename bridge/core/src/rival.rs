//! Another daemon on the node that serves our resource or our driver: while one is there, nothing is offered.
//!
//! The kubelet listens to whoever registered last, so neither of the two knows what the other gives out. Which of
//! them shall serve is for the admin to say. Whoever holds something keeps it, and everything may be given back.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::id::ClaimRef;
use crate::ledger::{Access, PreparedDevice};
use crate::pool::{Pool, Standing, Transition};
use crate::refusal::Refusal;
use crate::report::Report;
use crate::settings::Face;

/// A rival must not have been seen for this long. A DaemonSet that is rolled out anew, and one that crashes, are
/// back within it as a rule (the kubelet's first pauses are 10 and 20 s); an admin who has removed it waits once.
pub const RIVAL_GONE: Duration = Duration::from_secs(30);

/// A daemon other than this one that serves our resource or our driver on this node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rival {
    /// Which of our two names it has.
    pub face: Face,
    /// Where it shows, in words: a socket, or what the kubelet says.
    pub place: String,
    /// Whose it is, in words; `None`: that can't be told.
    pub owner: Option<String>,
}

impl fmt::Display for Rival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.owner {
            None => f.write_str(&self.place),
            Some(owner) => write!(f, "{} ({owner})", self.place),
        }
    }
}

/// Rivals are there, or were a moment ago.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Rivalry {
    /// As last seen, one at least.
    rivals: BTreeSet<Rival>,
    /// Uptime at which one was there last.
    seen_at: Duration,
}

impl Transition {
    /// Takes a complete look at who else serves our names here. It must be repeated while [`Pool::rivals`] has some:
    /// that they are gone is believed after [`RIVAL_GONE`].
    pub fn observe_rivals(&mut self, rivals: BTreeSet<Rival>) {
        let now = self.now.uptime;
        let known = self.pool.seen.rivalry.take();
        if rivals.is_empty() {
            match known {
                Some(rivalry) if now.saturating_sub(rivalry.seen_at) < RIVAL_GONE => {
                    self.pool.seen.rivalry = Some(rivalry);
                }
                Some(_) => self.report(Report::RivalsGone),
                None => {}
            }
        } else {
            let before = known.map(|rivalry| rivalry.rivals).unwrap_or_default();
            for rival in rivals.difference(&before) {
                self.report(Report::OtherRegistrant {
                    rival: rival.clone(),
                });
            }
            self.pool.seen.rivalry = Some(Rivalry {
                rivals,
                seen_at: now,
            });
        }
        self.settle();
    }
}

impl Pool {
    /// Who else serves our names on this node, or did until a moment ago.
    pub fn rivals(&self) -> impl Iterator<Item = &Rival> {
        let rivalry = self.seen.rivalry.iter();
        rivalry.flat_map(|rivalry| &rivalry.rivals)
    }

    /// Whether something new may be given out at all.
    pub(crate) fn is_open(&self) -> bool {
        self.standing == Standing::Serving && !self.has_rivals()
    }

    /// Why nothing new is given out, if a rival is there.
    pub(crate) fn rival_refusal(&self) -> Option<Refusal> {
        let rival = self.rivals().next()?.clone();
        Some(Refusal::OtherRegistrant { rival })
    }

    /// Whether a rival may give out what is free here. The kubelet's book still keeps ids apart, so a call for an id
    /// gets the id's own unit if nobody has it; what else is free may be in the rival's hands.
    pub(crate) fn has_rivals(&self) -> bool {
        self.seen.rivalry.is_some()
    }

    /// Whether a claim owns all this already: then a Prepare of it gives nothing new out.
    pub(crate) fn has_prepared(&self, claim: &ClaimRef, devices: &[PreparedDevice]) -> bool {
        let prepared = self.ledger.prepared.get(&claim.uid);
        let mut owned = devices.iter().filter(|it| it.access == Access::Owner);
        owned.all(|device| {
            prepared.is_some_and(|prepared| {
                let mut known = prepared.devices.iter();
                known.any(|it| it.unit == device.unit && it.access == Access::Owner)
            })
        })
    }
}

#[cfg(any(test, feature = "model"))]
impl Rivalry {
    /// The canonical form on another clock; see `canonical.rs` of the crate.
    pub(crate) fn canonical(self, clocks: &crate::canonical::Clocks) -> Self {
        let Self { rivals, seen_at } = self;
        Self {
            rivals,
            seen_at: clocks.past(seen_at, RIVAL_GONE),
        }
    }
}
