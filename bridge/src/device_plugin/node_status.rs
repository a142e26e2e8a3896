//! The count of the resource in the own Node's status, kept as the offers say.
//!
//! The kubelet writes it by itself, up to ten seconds late, and what schedulers read meanwhile sends pods to GPUs
//! that are gone. So the count is PATCHed here: down at once, which is before `ListAndWatch` withdraws anything,
//! and up as soon as the kubelet counts that many. What agrees with the kubelet stays; what it reverts at its own
//! tick is written again. What the Node shows goes to the arbiter, which moves nothing without it.
//!
//! A kubelet that has lost our list fails every counted pod that it admits, and the Node shows the old count for up
//! to ten seconds more, or for as long as the kubelet is away. So it is lowered to what the kubelet will say in the end.
//!
//! Nothing is decided here. Source: kubernetes v1.37.2, `pkg/kubelet/kubelet_node_status.go`.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{Health, Offers};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{RESOURCE, RegistrationState};
use crate::arbiter::{self, Handle, Observation};
use crate::follow::{self, Complaints, Event, Lists, Trouble, chain};

/// After this long without a running watch the count is unknown. Short, since a count that is not seen can be
/// reverted unseen; long enough for an API server that closes a watch and takes the next.
const UNSEEN_AFTER: Duration = Duration::from_secs(2);

/// Events of one object that wait for this task; it takes them within the time of one PATCH.
const EVENT_BOUND: usize = 16;

/// The count while the kubelet does not read our list: the kubelet's own. With what is held instead, the next pod
/// would come as soon as one ends, and fail.
const UNSERVED: u32 = 0;

/// How long the server may take for a PATCH. The task is deaf meanwhile, so it is short.
const PATCH_LIMIT: Duration = Duration::from_secs(2);

/// No two PATCHes come closer than this, whoever writes against us: 20 a second at most.
const PATCH_GAP: Duration = Duration::from_millis(50);

/// A PATCH that succeeded is shown by the watch within milliseconds; after this time it is sent again.
const SHOWN_WITHIN: Duration = Duration::from_secs(1);

/// How long the kubelet may take to say how many it counts. It answers from memory.
const KUBELET_LIMIT: Duration = Duration::from_secs(1);

/// Pause between two questions to the kubelet, which answers 100 a second at most and needs some 5 ms to take what
/// `ListAndWatch` says.
const KUBELET_POLL: Duration = Duration::from_millis(20);

/// For so long the kubelet is asked at that pace; what it has not taken by then may take longer.
const KUBELET_POLL_FOR: Duration = Duration::from_millis(500);

/// The pace after that.
const KUBELET_POLL_SLOW: Duration = Duration::from_secs(1);

/// Pause before the first retry of a PATCH that failed; it doubles with each.
const RETRY_FIRST: Duration = Duration::from_millis(100);

/// The longest of these pauses.
const RETRY_LAST: Duration = Duration::from_secs(5);

/// After a 403 the right is looked for again: soon, since a role that is being replaced is gone for a moment, then after
/// twice as long each time, and at this pace in the end, because somebody has to change a role first.
pub const RIGHT_AGAIN: RangeInclusive<Duration> = Duration::from_secs(5)..=Duration::from_secs(60);

/// When the arbiter could not save what it was told, it is told again after this.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// HTTP status of a missing right.
const FORBIDDEN: u16 = 403;

/// Asks the kubelet how many devices of the resource it counts as allocatable; the error says in words why there is
/// no answer.
pub type KubeletCount = Arc<dyn Fn() -> BoxFuture<'static, Result<u32, String>> + Send + Sync>;

/// What the count is kept with.
pub struct NodeStatusInputs {
    /// Of the API server.
    pub client: Client,
    /// The name of the own Node.
    pub node: String,
    /// Where the offers come from, and where the count is told.
    pub handle: Handle,
    /// Whether the kubelet reads our list; while it does not, it gives nothing out, and writes 0 in the end.
    pub registered: watch::Receiver<RegistrationState>,
    /// `GetAllocatableResources` of pod-resources.
    pub kubelet_count: KubeletCount,
    /// The first and the longest pause before the right is looked for again after a 403: [`RIGHT_AGAIN`], unless a test
    /// can't wait for that.
    pub right_again: RangeInclusive<Duration>,
}

impl fmt::Debug for NodeStatusInputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStatusInputs")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

/// Whether the count can be seen and changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodeStatusState {
    /// Nothing is known yet.
    #[default]
    Starting,
    /// It is seen, and may be changed.
    Kept,
    /// The kubelet does not read our list; no counted pod should come.
    NoKubelet,
    /// The own Node can't be watched.
    Unseen,
    /// A role does not allow it.
    NoStatusRight {
        /// What the server said.
        why: String,
    },
    /// PATCHes fail for another reason.
    Failing {
        /// Why, in words.
        why: String,
    },
}

impl NodeStatusState {
    /// The name of its page in `migration-guide/reasons`, if it has one.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::NoStatusRight { .. } => Some("NoStatusRight"),
            Self::Starting | Self::Kept | Self::NoKubelet | Self::Unseen | Self::Failing { .. } => {
                None
            }
        }
    }
}

impl fmt::Display for NodeStatusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("the Node has not been read yet"),
            Self::Kept => write!(f, "the Node's count of {RESOURCE} is kept"),
            Self::NoKubelet => write!(
                f,
                "the kubelet does not read the list of {RESOURCE}: the count is 0, so that no counted pod comes, until it does"
            ),
            Self::Unseen => f.write_str(
                "the own Node can't be watched: free GPUs stay on their side; if the API server answers, check the right to get, list and watch nodes",
            ),
            Self::NoStatusRight { why } => write!(
                f,
                "NoStatusRight: the right to patch nodes/status is missing, so free GPUs do not move; grant it as in manifests/base/rbac.yaml: {why}"
            ),
            Self::Failing { why } => write!(
                f,
                "the Node's count of {RESOURCE} can't be changed, so free GPUs stay on their side: {why}"
            ),
        }
    }
}

/// Keeps the count until told to stop.
///
/// Needs the rights to get, list and watch `nodes` and to patch `nodes/status`. Without the last, and while the API
/// server is away, the arbiter is told that nothing is known, and it is tried again.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended.
pub async fn run_node_status(
    inputs: NodeStatusInputs,
    state: watch::Sender<NodeStatusState>,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let (trouble, mut troubles) = watch::channel(Trouble::None);
    let following = follow::run(
        Api::<Node>::all(inputs.client.clone()),
        follow::Config {
            what: "nodes",
            fields: Some(format!("metadata.name={}", inputs.node)),
            page_size: 1,
            lists: Lists::Once,
            closeness: follow::Closeness::Close,
            unknown_after: UNSEEN_AFTER,
            trouble: Some(trouble),
        },
        |node| count_of(&node),
        |_| true,
        events,
    );
    let mut offers = inputs.handle.offers();
    let mut registered = inputs.registered.clone();
    let mut keeper = Keeper::new(inputs, state);
    let keeping = async {
        loop {
            let again = keeper.again.take();
            tokio::select! {
                event = seen.recv() => match event {
                    Some(event) => keeper.take(&event),
                    None => return Ok(()),
                },
                changed = offers.changed() => changed.map_err(|_| arbiter::Error::Stopping)?,
                changed = registered.changed() => if changed.is_err() {
                    // The device plugin has ended, and the daemon with it.
                    return std::future::pending().await;
                },
                Ok(()) = troubles.changed() => {}
                () = at(again) => {}
            }
            while let Ok(event) = seen.try_recv() {
                keeper.take(&event);
            }
            offers.mark_unchanged();
            keeper.is_watch_forbidden =
                matches!(*troubles.borrow_and_update(), Trouble::Forbidden(_));
            keeper.is_registered = registered.borrow_and_update().is_registered();
            keeper.step().await?;
        }
    };
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = following => Ok(()),
        kept = keeping => kept,
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// The count that a Node shows. A number that can't be read counts as too high, since that withdraws nothing.
fn count_of(node: &Node) -> u32 {
    node.status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref()?.get(RESOURCE))
        .map_or(0, |quantity| quantity.0.parse().unwrap_or(u32::MAX))
}

/// What is known of the right to change the count.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Right {
    /// It has to be tried.
    Unknown,
    Given,
    Missing {
        why: String,
    },
}

/// What the arbiter is told of the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Count(Option<u32>),
    Away,
}

/// Why PATCHes fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// The server says no.
    Answered,
    /// It does not answer.
    Silent,
}

struct Keeper {
    inputs: NodeStatusInputs,
    nodes: Api<Node>,
    state: watch::Sender<NodeStatusState>,
    /// What the watch shows; `None`: nothing.
    shown: Option<u32>,
    /// Whether the watch has shown all there is, and runs.
    is_watched: bool,
    is_watch_forbidden: bool,
    is_registered: bool,
    started: Instant,
    right: Right,
    /// What the arbiter was told last; `None`: nothing yet.
    told: Option<Told>,
    /// What was written and is not shown yet.
    written: Option<(u32, Instant)>,
    /// A higher count that is being written, or was and is not shown yet: a scheduler may have read it.
    raised_to: Option<(u32, Instant)>,
    last_patch: Option<Instant>,
    /// Since when the kubelet is asked for a higher count.
    raising: Option<Instant>,
    /// Since when PATCHes fail, and why the last did.
    failing: Option<(Instant, Failure, String)>,
    pause: Duration,
    /// The next pause after a 403.
    right_pause: Duration,
    /// Nothing is written before.
    not_before: Option<Instant>,
    /// When to look again although nothing has changed.
    again: Option<Instant>,
    complaints: Complaints,
}

impl Keeper {
    fn new(inputs: NodeStatusInputs, state: watch::Sender<NodeStatusState>) -> Self {
        Self {
            nodes: Api::all(inputs.client.clone()),
            right_pause: *inputs.right_again.start(),
            inputs,
            is_registered: false,
            started: Instant::now(),
            state,
            shown: None,
            is_watched: false,
            is_watch_forbidden: false,
            right: Right::Unknown,
            told: None,
            written: None,
            raised_to: None,
            last_patch: None,
            raising: None,
            failing: None,
            pause: RETRY_FIRST,
            not_before: None,
            again: None,
            complaints: Complaints::new("nodes/status"),
        }
    }

    fn take(&mut self, event: &Event<u32>) {
        match event {
            Event::Listed(all) => {
                self.is_watched = true;
                self.shown = all.first().copied();
            }
            Event::Applied(count) => self.shown = Some(*count),
            Event::Deleted(_) => self.shown = None,
            Event::Unknown => {
                self.is_watched = false;
                self.shown = None;
            }
            Event::Running => {}
        }
        if self.written.map(|(count, _)| count) == self.shown {
            self.written = None;
        }
        if self.raised_to.map(|(count, _)| count) <= self.shown {
            self.raised_to = None;
        }
    }

    /// Tells what is seen, and writes what is due.
    async fn step(&mut self) -> Result<(), arbiter::Error> {
        self.tell().await?;
        if let Some(shown) = self.shown
            && !self.is_too_early()
        {
            if self.right != Right::Given {
                // A dry run needs the same right, and changes nothing.
                self.patch(shown, Run::Dry).await;
            }
            if self.right == Right::Given {
                self.tell().await?;
                self.write(shown).await?;
            }
            self.tell().await?;
        }
        self.say();
        Ok(())
    }

    fn is_too_early(&mut self) -> bool {
        let Some(time) = self.not_before else {
            return false;
        };
        if Instant::now() < time {
            self.look_again(time);
            return true;
        }
        self.not_before = None;
        false
    }

    fn look_again(&mut self, time: Instant) {
        self.again = Some(self.again.map_or(time, |again| again.min(time)));
    }

    /// Tells the arbiter what the Node shows, or is about to show if that is more, where this is news. That nothing is
    /// known is none for a moment after the start: what rested before would be split for nothing.
    async fn tell(&mut self) -> Result<(), arbiter::Error> {
        if let Some((_, since)) = self.raised_to
            && since.elapsed() >= SHOWN_WITHIN
        {
            self.raised_to = None;
        }
        let raised_to = self.raised_to.map_or(0, |(count, _)| count);
        let shown = self.shown.filter(|_| self.right == Right::Given);
        let count = shown.map(|shown| shown.max(raised_to));
        let told = if count.is_none() && self.is_away() {
            Told::Away
        } else {
            Told::Count(count)
        };
        if self.told == Some(told) {
            return Ok(());
        }
        let known_by = self.started + UNSEEN_AFTER;
        let may_come = !matches!(self.right, Right::Missing { .. }) && Instant::now() < known_by;
        if self.told.is_none() && count.is_none() && may_come {
            self.look_again(known_by);
            return Ok(());
        }
        let observation = match told {
            Told::Count(count) => Observation::Node(count),
            Told::Away => Observation::NodeAway,
        };
        match self.inputs.handle.tell(observation).await? {
            arbiter::Told::Taken => self.told = Some(told),
            arbiter::Told::NotTaken(_) => self.look_again(Instant::now() + TELL_AGAIN),
        }
        Ok(())
    }

    /// Whether nothing is known because the server does not answer, which is no reason to withdraw anything: schedulers
    /// that reach it go on by the count that it shows.
    fn is_away(&self) -> bool {
        if matches!(self.right, Right::Missing { .. }) || self.is_watch_forbidden {
            return false;
        }
        let is_silent = matches!(&self.failing, Some((_, Failure::Silent, _)));
        !self.is_watched || is_silent
    }

    /// Writes the count if the Node shows another. A higher one is told first: what goes to claims from then on has to
    /// settle, since a scheduler may read it as soon as it is written.
    async fn write(&mut self, shown: u32) -> Result<(), arbiter::Error> {
        if !self.is_registered {
            self.raising = None;
            if shown > UNSERVED {
                self.write_count(UNSERVED).await;
            }
            return Ok(());
        }
        let offers = Arc::clone(&self.inputs.handle.offers().borrow());
        if shown > offers.count {
            self.raising = None;
            self.write_count(offers.count).await;
            return Ok(());
        }
        if let Some(count) = self.raised(shown, &offers).await
            && self.is_due(count)
        {
            self.raised_to = Some((count, Instant::now()));
            self.tell().await?;
            if self.inputs.handle.offers().borrow().count < count {
                self.raised_to = None;
                self.look_again(Instant::now());
                return Ok(());
            }
            self.patch(count, Run::Real).await;
            // It may have arrived even if no answer came.
            self.raised_to = Some((count, Instant::now()));
            self.look_again(Instant::now() + SHOWN_WITHIN);
        }
        Ok(())
    }

    async fn write_count(&mut self, count: u32) {
        if self.is_due(count) {
            self.patch(count, Run::Real).await;
        }
    }

    /// Whether it is time to write this count.
    fn is_due(&mut self, count: u32) -> bool {
        let now = Instant::now();
        if let Some((written, time)) = self.written
            && written == count
            && now < time + SHOWN_WITHIN
        {
            self.look_again(time + SHOWN_WITHIN);
            return false;
        }
        if let Some(last) = self.last_patch
            && now < last + PATCH_GAP
        {
            self.look_again(last + PATCH_GAP);
            return false;
        }
        true
    }

    /// How far the count may rise now: no further than the kubelet has got with what `ListAndWatch` told it.
    /// `None`: nothing is to be written now.
    async fn raised(&mut self, shown: u32, offers: &Offers) -> Option<u32> {
        if shown == offers.count {
            self.raising = None;
            return None;
        }
        let since = *self.raising.get_or_insert_with(Instant::now);
        let pace = if since.elapsed() < KUBELET_POLL_FOR {
            KUBELET_POLL
        } else {
            KUBELET_POLL_SLOW
        };
        let answer = timeout(KUBELET_LIMIT, (self.inputs.kubelet_count)()).await;
        let counted = match answer {
            Ok(Ok(counted)) => counted,
            Ok(Err(error)) => {
                debug!(error, "the kubelet does not say how many GPUs it counts");
                0
            }
            Err(_) => 0,
        };
        let reached = reached(offers, counted);
        if reached < offers.count {
            self.look_again(Instant::now() + pace);
        }
        // What is offered may have shrunk while the kubelet was asked.
        let still = self.inputs.handle.offers().borrow().count;
        let count = reached.min(still);
        (count > shown).then_some(count)
    }

    async fn patch(&mut self, count: u32, run: Run) {
        let params = PatchParams {
            dry_run: run == Run::Dry,
            ..PatchParams::default()
        };
        let body = json!({"status": {"allocatable": {RESOURCE: count.to_string()}}});
        let patch = Patch::Merge(&body);
        let call = self.nodes.patch_status(&self.inputs.node, &params, &patch);
        let answer = timeout(PATCH_LIMIT, call).await;
        self.last_patch = Some(Instant::now());
        match answer {
            Ok(Ok(_)) => self.has_worked(count, run),
            Ok(Err(kube::Error::Api(status))) if status.code == FORBIDDEN => {
                self.has_no_right(&status.message);
            }
            Ok(Err(error @ kube::Error::Api(_))) => {
                self.has_failed(Failure::Answered, chain(&error));
            }
            Ok(Err(error)) => self.has_failed(Failure::Silent, chain(&error)),
            Err(_) => {
                let why = format!("no answer within {} s", PATCH_LIMIT.as_secs());
                self.has_failed(Failure::Silent, why);
            }
        }
    }

    fn has_worked(&mut self, count: u32, run: Run) {
        if let Right::Missing { .. } = self.right {
            info!(node = self.inputs.node, "nodes/status may be patched now");
        }
        self.right = Right::Given;
        self.failing = None;
        self.pause = RETRY_FIRST;
        self.complaints.none();
        if run == Run::Real {
            debug!(count, "wrote the count into the own Node");
            // A dry run may be allowed what the real one is not.
            self.right_pause = *self.inputs.right_again.start();
            let now = Instant::now();
            self.written = Some((count, now));
            self.look_again(now + SHOWN_WITHIN);
        }
    }

    fn has_no_right(&mut self, why: &str) {
        if !matches!(self.right, Right::Missing { .. }) {
            let state = NodeStatusState::NoStatusRight {
                why: why.to_owned(),
            };
            warn!(
                node = self.inputs.node,
                reason = "NoStatusRight",
                error = %state,
                "the count in the own Node can't be changed; it is tried again later"
            );
        }
        self.right = Right::Missing {
            why: why.to_owned(),
        };
        self.failing = None;
        self.wait(self.right_pause);
        self.right_pause = (self.right_pause * 2).min(*self.inputs.right_again.end());
    }

    fn has_failed(&mut self, failure: Failure, why: String) {
        self.complaints.about(&why);
        let now = Instant::now();
        let since = self.failing.as_ref().map_or(now, |(since, ..)| *since);
        self.failing = Some((since, failure, why));
        if now - since >= UNSEEN_AFTER {
            self.right = Right::Unknown;
        }
        self.wait(self.pause);
        self.pause = (self.pause * 2).min(RETRY_LAST);
    }

    fn wait(&mut self, pause: Duration) {
        let time = Instant::now() + pause;
        self.not_before = Some(time);
        self.look_again(time);
    }

    fn say(&self) {
        let state = match (&self.right, &self.failing) {
            (Right::Missing { why }, _) => NodeStatusState::NoStatusRight { why: why.clone() },
            _ if !self.is_registered => NodeStatusState::NoKubelet,
            _ if self.shown.is_none() => NodeStatusState::Unseen,
            (Right::Unknown, Some((.., why))) => NodeStatusState::Failing { why: why.clone() },
            (Right::Unknown, None) => NodeStatusState::Starting,
            (Right::Given, _) => NodeStatusState::Kept,
        };
        self.state.send_if_modified(|told| {
            let news = *told != state;
            *told = state;
            news
        });
    }
}

/// Whether a PATCH is only tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    Dry,
    Real,
}

/// How much of the count the kubelet has taken. Ids that are about to be withdrawn are healthy and not in the count;
/// whatever the kubelet has not taken yet may be those that are.
fn reached(offers: &Offers, kubelet_counts: u32) -> u32 {
    let healthy = offers.counted.iter();
    let healthy = healthy.filter(|offer| offer.health == Health::Healthy);
    let healthy = u32::try_from(healthy.count()).unwrap_or(u32::MAX);
    let withdrawn = healthy.saturating_sub(offers.count);
    kubelet_counts.saturating_sub(withdrawn).min(offers.count)
}
