//! `NodePrepareResources` and `NodeUnprepareResources`: what happens between the kubelet's call and the arbiter.
//!
//! Each claim of a call goes its own way and gets its own answer, whatever becomes of the others. Prepare reads the
//! claim from the API server, because the kubelet sends its name alone; Unprepare never does, because the claim
//! may be gone.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{
    ClaimRef, ClaimUid, Face, Patience, PrepareRequest, Refusal, is_object_name, shown,
};
use futures::{Stream, StreamExt};
use kube::Client;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info, info_span, warn};

use super::claims;
use super::health::{self, DeviceHealth};
use super::successor::Successors;
use super::wire::{Prepared, PreparedDevice, Unprepared};
use crate::arbiter::{self, HOLD_LIMIT, Handle, LOOK_AGAIN, PrepareReply};
use crate::metrics::Answer;

/// How long Prepare waits for a unit that may become free. The kubelet comes back only after 77-89 s, so waiting
/// is better than an early no; it gives a call 45 s.
pub const WAIT_LIMIT: Duration = Duration::from_secs(10);

/// How often Prepare asks again while it waits, if nothing in the pool changes.
pub const ASK_AGAIN: Duration = Duration::from_millis(250);

/// The shortest time between two questions: a pool that changes all the time is not asked all the time.
const ASK_PAUSE: Duration = Duration::from_millis(20);

/// When a call has run this long, the claims that have no answer yet get one: far enough below the kubelet's 45 s
/// (`dra_proto::CALL_TIMEOUT`), after which it would ignore all answers of the call.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);

/// Claims of one call that are worked on at once. A pod has a few; this keeps one call from filling the API
/// server's and the arbiter's queues.
const CLAIMS_AT_ONCE: usize = 16;

/// Claims of one call: the kubelet asks for those of one pod, which has a handful.
pub(super) const CLAIMS_LIMIT: usize = 1024;

/// Why a claim is not prepared, besides a [`Refusal`] and what is wrong with the claim.
const OWN_REASONS: [&str; 5] = [
    "NotSaved",
    "NoCdiFile",
    "NotOwnerYet",
    "Stopping",
    "TimeIsUp",
];

/// A claim as the kubelet names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

/// Why a claim was not prepared. `Display` is for the pod's event.
#[derive(Debug, thiserror::Error)]
enum Why {
    #[error(transparent)]
    Claim(#[from] claims::Error),
    #[error("{0}")]
    Refused(Refusal),
    #[error("claim {claim} was not {verb}: {error}. {}", advice(.error))]
    Arbiter {
        claim: ClaimRef,
        verb: &'static str,
        error: arbiter::Error,
    },
    #[error(
        "claim {claim} was not {verb} within {} s. The kubelet tries again by itself; if this stays, see gpu-bridge's log.",
        CALL_LIMIT.as_secs()
    )]
    TimeIsUp { claim: ClaimRef, verb: &'static str },
    /// The successor's words, with their reason.
    #[error("{0}")]
    Successor(String),
}

fn advice(error: &arbiter::Error) -> &'static str {
    match error {
        arbiter::Error::NotSaved(_) => {
            "The kubelet tries again by itself; make room on the file system of gpu-bridge's state directory, or look at its errors."
        }
        arbiter::Error::NoCdiFile(_) => {
            "The kubelet tries again by itself; make room in gpu-bridge's CDI directory, or look at its errors."
        }
        arbiter::Error::NotOwner(_) => {
            "The kubelet tries again by itself, and the successor answers once it serves; if this stays, see its log."
        }
        arbiter::Error::Stopping => {
            "The kubelet tries again by itself, and gpu-bridge answers once it runs again."
        }
    }
}

impl Why {
    fn reason(&self) -> &'static str {
        match self {
            Self::Claim(error) => error.reason(),
            Self::Refused(refusal) => refusal.reason(),
            Self::Arbiter { error, .. } => error.reason(),
            Self::TimeIsUp { .. } => "TimeIsUp",
            // The reason why it was not decided here; the successor's log has its own.
            Self::Successor(_) => "NotOwnerYet",
        }
    }

    /// Whether the daemon or the API server is not ready, rather than the claim wrong or the unit held.
    fn is_unavailable(&self) -> bool {
        match self {
            Self::Claim(error) => error.is_unavailable(),
            Self::Refused(refusal) => refusal.is_unavailable(),
            Self::Arbiter { .. } | Self::TimeIsUp { .. } => true,
            Self::Successor(_) => false,
        }
    }

    /// The text that the kubelet puts into the pod's event.
    fn text(&self) -> String {
        let kind = if self.is_unavailable() {
            "UNAVAILABLE: "
        } else {
            ""
        };
        match self {
            // It begins with its reason.
            Self::Refused(refusal) => format!("{kind}{refusal}"),
            Self::Successor(text) => text.clone(),
            Self::Claim(_) | Self::Arbiter { .. } | Self::TimeIsUp { .. } => {
                format!("{kind}{}: {self}", self.reason())
            }
        }
    }
}

/// The DRA plugin's side of a node.
pub(super) struct Service {
    client: Client,
    node: String,
    handle: Handle,
    successors: Successors,
    health_streams: Arc<Semaphore>,
    shutdown: CancellationToken,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl Service {
    pub(super) fn new(
        client: Client,
        node: String,
        handle: Handle,
        successors: Successors,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let of_claims = claims::Error::REASONS.into_iter();
        let all = of_claims.chain(Refusal::REASONS).chain(OWN_REASONS);
        handle.metrics().may_refuse(Face::Dra, all);
        Arc::new(Self {
            client,
            node,
            handle,
            successors,
            health_streams: Arc::new(Semaphore::new(health::STREAMS_LIMIT)),
            shutdown,
        })
    }

    /// The pool of this node's devices.
    pub(super) fn pool(&self) -> &str {
        &self.node
    }

    /// Reports of how the devices are; `None`: there are too many such streams already.
    pub(super) fn watch_health(
        &self,
    ) -> Option<impl Stream<Item = Vec<DeviceHealth>> + Send + use<>> {
        let permit = Arc::clone(&self.health_streams).try_acquire_owned().ok()?;
        let (status, shutdown) = (self.handle.status(), self.shutdown.clone());
        Some(health::reports(status, shutdown, permit))
    }

    /// Prepares each claim, or says why not; one entry per claim.
    pub(super) async fn prepare(&self, asked: Vec<Asked>) -> Prepared {
        let arrived = self.handle.uptime();
        let start = Instant::now();
        each(asked, |asked| async move {
            let _timed = self.handle.metrics().timed(Answer::Prepare);
            let who = format!("claim {}/{}", shown(&asked.namespace), shown(&asked.name));
            let answer = self.prepare_in_time(asked, arrived, start).await;
            answer.inspect_err(|why| self.note_refused(why, who))
        })
        .await
    }

    fn note_refused(&self, why: &Why, who: String) {
        self.handle.metrics().refused(Face::Dra, why.reason());
        match why {
            Why::Claim(_) | Why::Arbiter { .. } | Why::TimeIsUp { .. } => {
                let text = format!("{}: {why}", why.reason());
                self.handle.note_refused(why.reason(), who, text);
            }
            // The pool has written it down, or the successor.
            Why::Refused(_) | Why::Successor(_) => {}
        }
    }

    async fn prepare_in_time(
        &self,
        asked: Asked,
        arrived: Duration,
        start: Instant,
    ) -> Result<Vec<PreparedDevice>, Why> {
        let claim = named(asked)?;
        let end = start + CALL_LIMIT;
        match timeout_at(end, self.prepare_one(&claim, arrived, start + WAIT_LIMIT)).await {
            Ok(answer) => answer,
            Err(_) => Err(Why::TimeIsUp {
                claim,
                verb: "prepared",
            }),
        }
    }

    /// Gives each claim's units back. A claim that is not known has none.
    pub(super) async fn unprepare(&self, asked: Vec<Asked>) -> Unprepared {
        let end = Instant::now() + CALL_LIMIT;
        each(asked, |asked| async move {
            let _timed = self.handle.metrics().timed(Answer::Unprepare);
            // What has no proper UID was never prepared.
            let Ok(claim) = claim_ref(asked) else {
                return Ok(());
            };
            match timeout_at(end, self.unprepare_one(&claim)).await {
                Ok(answer) => answer,
                Err(_) => Err(Why::TimeIsUp {
                    claim,
                    verb: "unprepared",
                }),
            }
        })
        .await
    }

    /// What the kubelet is told of a call that this daemon did not decide: the successor's answer, if there is one.
    /// `None`: ask again.
    async fn settled<T>(
        &self,
        Failed { claim, verb, error }: Failed<'_>,
        answer: Option<Result<T, String>>,
        held: &mut Held,
    ) -> Option<Result<T, Why>> {
        if let Some(answer) = answer {
            return Some(answer.map_err(Why::Successor));
        }
        if error.successor().is_some() && held.lasts(&self.shutdown).await {
            return None;
        }
        Some(Err(Why::Arbiter {
            claim: claim.clone(),
            verb,
            error,
        }))
    }

    async fn unprepare_one(&self, claim: &ClaimRef) -> Result<(), Why> {
        let mut held = Held::default();
        loop {
            let error = match self.handle.unprepare(claim.clone()).await {
                Ok(()) => {
                    debug!("unprepared");
                    return Ok(());
                }
                Err(error) => error,
            };
            let answer = match error.successor() {
                Some(successor) => self.successors.unprepare(successor, claim).await,
                None => None,
            };
            let failed = Failed {
                claim,
                verb: "unprepared",
                error,
            };
            if let Some(answer) = self.settled(failed, answer, &mut held).await {
                return answer;
            }
        }
    }

    async fn prepare_one(
        &self,
        claim: &ClaimRef,
        arrived: Duration,
        wait_until: Instant,
    ) -> Result<Vec<PreparedDevice>, Why> {
        let devices = claims::read(&self.client, &self.node, claim).await?;
        let mut request = PrepareRequest {
            claim: claim.clone(),
            devices,
            arrived,
            patience: Patience::Waits,
        };
        let mut status = self.handle.status();
        let mut held = Held::default();
        loop {
            // Before the question: what changes while it is answered is a reason to ask again.
            status.mark_unchanged();
            if Instant::now() >= wait_until {
                request.patience = Patience::LastCall;
            }
            let reply = self.handle.prepare(request.clone()).await;
            let waits_for = match reply {
                Ok(PrepareReply::Prepared(devices)) => {
                    info!("prepared");
                    return Ok(devices.into_iter().map(PreparedDevice::from).collect());
                }
                Ok(PrepareReply::Refused(refusal)) => return Err(Why::Refused(refusal)),
                Ok(PrepareReply::Wait(refusal)) => refusal,
                Err(error) => {
                    let answer = match error.successor() {
                        Some(successor) => self.successors.prepare(successor, claim).await,
                        None => None,
                    };
                    let failed = Failed {
                        claim,
                        verb: "prepared",
                        error,
                    };
                    match self.settled(failed, answer, &mut held).await {
                        Some(answer) => return answer,
                        None => continue,
                    }
                }
            };
            // Who stops does not say that the time is up: the next daemon may serve the claim.
            if request.patience == Patience::LastCall || self.shutdown.is_cancelled() {
                return Err(Why::Refused(waits_for));
            }
            let asked = Instant::now();
            debug!(reason = waits_for.reason(), "waiting for a unit");
            sleep_until((asked + ASK_PAUSE).min(wait_until)).await;
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    return Err(Why::Arbiter {
                        claim: claim.clone(),
                        verb: "prepared",
                        error: arbiter::Error::Stopping,
                    });
                },
                () = self.shutdown.cancelled() => return Err(Why::Refused(waits_for)),
                () = sleep_until((asked + ASK_AGAIN).min(wait_until)) => {}
            }
        }
    }
}

/// A call that this daemon did not decide.
struct Failed<'a> {
    claim: &'a ClaimRef,
    verb: &'static str,
    error: arbiter::Error,
}

/// How long a claim waits for a successor that does not serve yet.
#[derive(Debug, Default)]
struct Held(Option<Instant>);

impl Held {
    /// Waits a moment; `false` if the time is up, or the daemon ends.
    async fn lasts(&mut self, shutdown: &CancellationToken) -> bool {
        let until = *self.0.get_or_insert_with(|| Instant::now() + HOLD_LIMIT);
        if Instant::now() >= until {
            return false;
        }
        tokio::select! {
            () = shutdown.cancelled() => false,
            () = sleep_until(Instant::now() + LOOK_AGAIN) => true,
        }
    }
}

/// Does the same for each claim, a bounded number of them at once, and logs and words what failed.
async fn each<T, F, W>(asked: Vec<Asked>, work: W) -> BTreeMap<String, Result<T, String>>
where
    F: Future<Output = Result<T, Why>>,
    W: Fn(Asked) -> F,
{
    let work = &work;
    futures::stream::iter(asked)
        .map(|asked| async move {
            let (claim, namespace) = (shown(&asked.name), shown(&asked.namespace));
            let span = info_span!("claim", %claim, %namespace, uid = shown(&asked.uid));
            let uid = asked.uid.clone();
            let answer = async move {
                work(asked).await.map_err(|why| {
                    log(&why);
                    why.text()
                })
            };
            (uid, answer.instrument(span).await)
        })
        .buffer_unordered(CLAIMS_AT_ONCE)
        .collect()
        .await
}

/// The claim that is asked for. What counts is the UID; a name that no claim can have is kept as far as it is shown.
fn claim_ref(asked: Asked) -> Result<ClaimRef, claims::Error> {
    let kept = |text: String| {
        if is_object_name(&text) {
            text
        } else {
            shown(&text)
        }
    };
    let (namespace, name) = (kept(asked.namespace), kept(asked.name));
    match ClaimUid::new(asked.uid) {
        Ok(uid) => Ok(ClaimRef {
            uid,
            namespace,
            name,
        }),
        Err(source) => Err(claims::Error::InvalidUid {
            namespace,
            name,
            source,
        }),
    }
}

/// The same for who reads the claim by its names: they become a part of a path at the API server, and the client does
/// not look at them.
fn named(asked: Asked) -> Result<ClaimRef, claims::Error> {
    let good = is_object_name(&asked.namespace) && is_object_name(&asked.name);
    let claim = claim_ref(asked)?;
    if good {
        return Ok(claim);
    }
    Err(claims::Error::InvalidName { claim })
}

fn log(why: &Why) {
    if matches!(why, Why::Successor(_)) {
        debug!(error = %why, "the successor refused a claim");
    } else if why.is_unavailable() {
        warn!(reason = why.reason(), error = %why, "a claim got no decision");
    } else {
        info!(reason = why.reason(), error = %why, "a claim was refused");
    }
}
