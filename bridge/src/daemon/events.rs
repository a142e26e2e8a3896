//! What is worth a Kubernetes Event: a claim that lost its GPU, to its owner; to the admin, at the Node, what changes
//! the node or keeps it from serving.
//!
//! No event about a pod or a claim names anybody else: it says what kind of holder was quicker.

use std::collections::BTreeMap;
use std::future::pending;

use bridge_core::{
    Asked, ClaimRef, Claims, Face, FaultEnd, HolderKind, Mode, NotEvicted, Pods, RIVAL_GONE,
    Report, Rival, UnitId,
};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::time::{Duration, Instant, sleep_until};
use tracing::{debug, warn};

use super::{Faces, Followed, Tasks};
use crate::admin::{Condition, ConditionName, Conditions};
use crate::arbiter::{Handle, News};
use crate::events::{self, About, Event, Recorder, Severity};

/// For so long a pod that waits for a claim is looked for after the race: it is bound within a second of its claim's
/// allocation, or not at all.
const POD_EXPECTED: Duration = Duration::from_secs(30);

/// Pods that are looked for. More races than that are told at their claims alone.
const OWED_LIMIT: usize = 64;

/// For so long something that every start passes through has to stand before it is told.
const PASSING: Duration = Duration::from_secs(10);

/// Conditions whose reason is told at the Node, and how long it has to stand before. The others pass by themselves, or
/// are on the node's pages alone.
const TOLD: [(ConditionName, &str, Duration); 4] = [
    (
        ConditionName::LedgerServing,
        "LedgerUnreadable",
        Duration::ZERO,
    ),
    (
        ConditionName::ConfigInForce,
        "ConfigFileRejected",
        Duration::ZERO,
    ),
    (ConditionName::ConfigInForce, "ConfigUnread", PASSING),
    (
        ConditionName::CountsStayCounts,
        "MappedClass",
        Duration::ZERO,
    ),
];

/// How far it is with a reason of [`TOLD`].
#[derive(Clone, Copy)]
enum Told {
    /// It does not stand.
    Not,
    /// It stands, and is told then.
    At(Instant),
    /// It stands, and was told.
    Yes,
}

impl Faces<'_> {
    /// Starts what writes events, and what says which.
    pub(super) fn start_events(&self, tasks: &mut Tasks, (claims, pods): Followed) {
        let (node, handle, stop) = self.own();
        let metrics = handle.metrics().clone();
        let (recorder, queue) = Recorder::new(metrics.clone());
        let client = self.client.clone();
        tasks.spawn(async move {
            events::run(client, node, queue, metrics, stop).await;
            ("event writer", Ok(()))
        });
        let teller = Teller {
            news: handle.news(),
            mode: handle.status().borrow().settings.mode,
            bypassed: false,
            told: [Told::Not; TOLD.len()],
            owed: Vec::new(),
            claims,
            pods,
            recorder,
        };
        let (conditions, stop) = (self.conditions.clone(), self.stop.clone());
        tasks.spawn(async move {
            stop.run_until_cancelled(teller.run(handle, conditions))
                .await;
            // Whoever told the news has ended, and says so itself.
            stop.cancelled().await;
            ("event teller", Ok(()))
        });
    }
}

struct Teller {
    news: broadcast::Receiver<News>,
    /// The mode that is known.
    mode: Mode,
    /// Whether a claim stands for a count, in a mode in which counts are served as such.
    bypassed: bool,
    /// How far it is with each reason of [`TOLD`].
    told: [Told; TOLD.len()],
    /// Claims whose pods were not known yet when they lost a GPU.
    owed: Vec<Owed>,
    claims: watch::Receiver<Option<Claims>>,
    pods: watch::Receiver<Option<Pods>>,
    recorder: Recorder,
}

struct Owed {
    claim: ClaimRef,
    reason: &'static str,
    note: String,
    until: Instant,
}

impl Teller {
    /// Returns when the arbiter has ended.
    async fn run(mut self, handle: Handle, conditions: Conditions) {
        let mut status = handle.status();
        let mut conditions = conditions.subscribe();
        let (mut pods, mut claims) = (self.pods.clone(), self.claims.clone());
        drop(handle);
        loop {
            let next = self.next_told();
            tokio::select! {
                news = self.news.recv() => match news {
                    Ok(news) => self.tell(news),
                    Err(RecvError::Lagged(missed)) => debug!(missed, "news were too many"),
                    Err(RecvError::Closed) => return,
                },
                changed = status.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let mode = status.borrow_and_update().settings.mode;
                    self.tell_mode(mode);
                    self.tell_bypassed();
                }
                Ok(()) = claims.changed() => {
                    claims.mark_unchanged();
                    self.tell_bypassed();
                }
                Ok(()) = conditions.changed() => self.tell_standing(&conditions.borrow_and_update()),
                () = until(next) => self.tell_standing(&conditions.borrow()),
                Ok(()) = pods.changed() => {
                    pods.mark_unchanged();
                    self.tell_owed();
                }
            }
        }
    }

    /// Tells the reasons that have stood for long enough.
    fn tell_standing(&mut self, all: &BTreeMap<ConditionName, Condition>) {
        let now = Instant::now();
        for (place, (name, reason, time)) in TOLD.into_iter().enumerate() {
            let Some(condition) = all.get(&name) else {
                continue;
            };
            self.told[place] = match self.told[place] {
                _ if condition.met.reason() != Some(reason) => Told::Not,
                Told::Not if time > Duration::ZERO => Told::At(now + time),
                Told::At(at) if at > now => Told::At(at),
                Told::Not | Told::At(_) => {
                    self.warn_node(reason, condition.message.clone());
                    Told::Yes
                }
                Told::Yes => Told::Yes,
            };
        }
    }

    /// When a reason has stood for long enough.
    fn next_told(&self) -> Option<Instant> {
        let due = self.told.iter().filter_map(|told| match told {
            Told::At(at) => Some(*at),
            Told::Not | Told::Yes => None,
        });
        due.min()
    }

    fn tell(&mut self, news: News) {
        match news {
            News::Happened(report) => self.tell_report(report),
            News::NotSaved(why) => self.warn_node("NotSaved", format!(
                "{why}. Make room on the file system of gpu-bridge's state directory, or look at its errors."
            )),
            News::SavedAgain => self.node(
                "LedgerSavedAgain",
                "the ledger is saved again, and GPUs are given out".to_owned(),
            ),
        }
    }

    fn tell_report(&mut self, report: Report) {
        match report {
            Report::ClaimLostRace { claim, unit } => {
                self.warn("ClaimLostRace", claim.clone(), lost(&claim, &unit));
            }
            Report::EvictionAsked { claim, unit } => {
                self.warn("ClaimPodEvicted", claim.clone(), evicted(&claim, &unit));
            }
            Report::NotEvicted { claim, unit, why } => {
                self.warn("ClaimPodNotEvicted", claim.clone(), not_evicted(&claim, &unit, &why));
            }
            Report::UnitLost { unit } => self.warn_node("UnitLost", format!(
                "{unit} does not answer NVML any more, and is offered to nobody; who has it keeps it. Have the GPU looked at."
            )),
            Report::UnitReturned { unit } => {
                self.node("UnitReturned", format!("{unit} answers NVML again"));
            }
            Report::UnitFaulty { unit, xid } => self.warn_node("UnitFaulty", format!(
                "the driver told of XID {xid} of {unit}, which is offered to nobody now; who has it keeps it. `gpu-bridge status` says what has to be done about it."
            )),
            Report::FaultEnded { unit, cause } => {
                self.node("FaultEnded", format!("the fault of {unit} has ended: {}", ended(cause)));
            }
            Report::OtherRegistrant { rival } => {
                self.warn_node("OtherRegistrant", stands_beside(&rival));
            }
            Report::RivalsGone => self.node(
                "OtherRegistrantGone",
                "no other daemon serves the same names any more, and GPUs are offered again".to_owned(),
            ),
            Report::Granted { .. }
            | Report::Substituted { .. }
            | Report::KubeletLostItsBook { .. }
            | Report::HandedOverBusy { .. }
            | Report::EvictionOver { .. }
            | Report::Bound { .. }
            | Report::Reserved { .. }
            | Report::Prepared { .. }
            | Report::Ended { .. }
            | Report::Lingering { .. }
            | Report::ForeignFound { .. }
            | Report::UnknownHolder { .. }
            | Report::UnitAdded { .. }
            | Report::XidSeen { .. }
            | Report::ClaimTakenOver { .. }
            | Report::Adopted { .. } => {}
        }
    }

    fn tell_mode(&mut self, mode: Mode) {
        let before = std::mem::replace(&mut self.mode, mode);
        if before != mode {
            let (before, mode) = (before.as_str(), mode.as_str());
            self.node(
                "ModeChanged",
                format!(
                    "gpu-bridge's mode was {before} and is {mode} now; who holds a GPU keeps it"
                ),
            );
        }
    }

    /// Tells once that counted pods come by claims, until none does.
    fn tell_bypassed(&mut self) {
        let serves_counts = self.mode.opens(Face::Legacy);
        let is_bypassed = serves_counts
            && self.claims.borrow().as_ref().is_some_and(|claims| {
                let mut claims = claims.claims.iter();
                claims.any(|claim| claim.asked == Asked::ByCount)
            });
        if is_bypassed && !self.bypassed {
            warn!(
                reason = "CountMadeClaim",
                mode = self.mode.as_str(),
                "a counted pod has come by a claim that Kubernetes made for it, although counts are served here"
            );
            self.warn_node("CountMadeClaim", format!(
                "a pod that asked for {} by count got a GPU of this node by a claim, which the scheduler makes when the \
                 node's count is 0 and a DeviceClass has that extendedResourceName. Set offers.minLegacy: 1, or take \
                 the name from the class.",
                Face::Legacy.served_name()
            ));
        }
        self.bypassed = is_bypassed;
    }

    /// Tells it at the claim, and at its pods as soon as they are known.
    fn warn(&mut self, reason: &'static str, claim: ClaimRef, note: String) {
        self.record(
            About::Claim(claim.clone()),
            Severity::Warning,
            reason,
            note.clone(),
        );
        if self.owed.len() < OWED_LIMIT {
            self.owed.push(Owed {
                claim,
                reason,
                note,
                until: Instant::now() + POD_EXPECTED,
            });
        }
        self.tell_owed();
    }

    /// Tells the pods of claims that lost a GPU, as far as they are known.
    fn tell_owed(&mut self) {
        let now = Instant::now();
        for owed in std::mem::take(&mut self.owed) {
            let waiting = self.pods_of(&owed.claim);
            if waiting.is_empty() && now < owed.until {
                self.owed.push(owed);
                continue;
            }
            for about in waiting {
                self.record(about, Severity::Warning, owed.reason, owed.note.clone());
            }
        }
    }

    /// The pods bound here for which a claim is reserved.
    fn pods_of(&self, claim: &ClaimRef) -> Vec<About> {
        let claims = self.claims.borrow();
        let mut claims = claims.iter().flat_map(|claims| &claims.claims);
        let Some(allocated) = claims.find(|it| it.claim.uid == claim.uid) else {
            return Vec::new();
        };
        let pods = self.pods.borrow();
        let bound = pods.iter().flat_map(|pods| &pods.pods);
        bound
            .filter(|bound| allocated.reserved_for.contains(&bound.uid))
            .map(|bound| About::Pod {
                pod: bound.pod.clone(),
                uid: bound.uid.clone(),
            })
            .collect()
    }

    fn warn_node(&self, reason: &'static str, note: String) {
        self.record(About::Node, Severity::Warning, reason, note);
    }

    fn node(&self, reason: &'static str, note: String) {
        self.record(About::Node, Severity::Normal, reason, note);
    }

    fn record(&self, about: About, severity: Severity, reason: &'static str, note: String) {
        let action = match about {
            About::Node => "Serve",
            About::Pod { .. } | About::Claim(_) => "Allocate",
        };
        self.recorder.record(Event {
            about,
            severity,
            reason,
            action,
            note,
        });
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// Why a fault has ended, in words.
fn ended(cause: FaultEnd) -> &'static str {
    match cause {
        FaultEnd::Rebooted => "the node was booted anew",
        FaultEnd::Recovered => "by NVML nothing has to be done any more",
        FaultEnd::Returned => "the GPU was away, as in a reset, and answers again",
        FaultEnd::Ignored => "by the configuration its XIDs close no GPU",
        FaultEnd::Cleared => "an admin has cleared it",
    }
}

/// For the claim and for its pod: who was quicker, by kind alone, and what to do.
fn lost(claim: &ClaimRef, unit: &UnitId) -> String {
    format!(
        "{unit} was allocated to claim {}, and {} got it before the claim was prepared; nothing of it had run. \
         From Kubernetes 1.36 on the pod is evicted and its controller makes a new one; before, delete the pod, so \
         that it is scheduled anew.",
        claim.name,
        HolderKind::CountedPod
    )
}

fn evicted(claim: &ClaimRef, unit: &UnitId) -> String {
    format!(
        "claim {} can't be prepared, because {unit} is in use by {} or by a process that does not end, so the pods of \
         the claim are evicted. Their controller makes new ones; a pod without a controller has to be made anew.",
        claim.name,
        HolderKind::CountedPod
    )
}

fn not_evicted(claim: &ClaimRef, unit: &UnitId, why: &NotEvicted) -> String {
    format!(
        "claim {} can't be prepared, because {unit} is in use by {} or by a process that does not end, and its pods are \
         not evicted ({}). Delete them, so that they are scheduled anew.",
        claim.name,
        HolderKind::CountedPod,
        why.as_str()
    )
}

/// Who else serves a name, without the name of its pod.
fn stands_beside(rival: &Rival) -> String {
    let Rival { face, place, .. } = rival;
    format!(
        "another daemon serves {} on this node too, at {place}, so gpu-bridge offers no GPU. \
         Remove that daemon from the node, or gpu-bridge; once it is gone for {} s GPUs are offered again.",
        face.served_name(),
        RIVAL_GONE.as_secs()
    )
}
