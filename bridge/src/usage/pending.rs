//! The pods that wait for GPUs and that this node could run.
//!
//! Watches the unscheduled pods of the cluster, the own Node and the DeviceClasses, and reads the claims of the pods
//! that come into question. What it knows goes to the pool, which decides where free units are offered; where it may
//! not or can't look, the pool hears that nothing is known. Whether the node could run a pod is the core's to say.

mod book;
mod claims;
mod quantity;
mod shape;

use std::fmt;
use std::time::Duration;

use bridge_core::{ClaimName, Demand};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::book::{Answer, Book};
use self::claims::{ClaimSpec, Class};
use self::shape::Seen;
use super::TELL_AGAIN;
use crate::arbiter::{self, Handle, Observation, Told};
use crate::follow::{self, Lists, Trouble, chain};

/// Objects per page of a list.
const PAGE_SIZE: u32 = 250;
/// Events that may wait; more of them wait in the connection.
const EVENT_BOUND: usize = 64;
/// What comes within this time is looked at together: the pods of a job come in bursts.
const COALESCE: Duration = Duration::from_millis(20);
/// How long the API server may take to show a claim.
const READ_LIMIT: Duration = Duration::from_secs(5);
/// Without anything that comes, what is known is looked at again after this: for a retry that somebody forgot.
const LOOK_PERIOD: Duration = Duration::from_secs(60);
/// Claims read at once.
const READS_AT_ONCE: usize = 4;
/// HTTP status of a missing right.
const FORBIDDEN: u16 = 403;
/// Field selector of pods that have no node. Of a pod that is bound the watch says that it is gone.
const UNSCHEDULED: &str = "spec.nodeName=,status.phase=Pending";

/// Whether it is known which pods wait.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DemandState {
    /// Not yet.
    #[default]
    Starting,
    /// It is.
    Known,
    /// A role does not allow it.
    NoDemandRight {
        /// What the server said.
        why: String,
    },
    /// The API server does not show it.
    Unseen {
        /// Why, in words.
        why: String,
    },
}

impl DemandState {
    /// The name of its page in `migration-guide/reasons`, if it has one.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::NoDemandRight { .. } => Some("NoDemandRight"),
            Self::Starting | Self::Known | Self::Unseen { .. } => None,
        }
    }
}

impl fmt::Display for DemandState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str(
                "the pods that wait have not been read yet; free GPUs move by turns until they are",
            ),
            Self::Known => f.write_str("free GPUs move by what the pods that wait ask for"),
            Self::NoDemandRight { why } => write!(
                f,
                "NoDemandRight: a right to see the pods that wait is missing, so free GPUs move by turns; grant it as in manifests/base/rbac.yaml, or leave offers.demand out: {why}"
            ),
            Self::Unseen { why } => write!(
                f,
                "the pods that wait can't be seen, so free GPUs move by turns until they can: {why}"
            ),
        }
    }
}

/// Follows the pods that wait until told to stop, and tells the pool.
///
/// Needs the rights to list and watch `pods`, `nodes` and `deviceclasses`, and to get `resourceclaims`.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. A right that is missing and an API server that is away are no
/// errors: they are told, and tried again.
pub async fn run_pending(
    client: Client,
    node: String,
    handle: Handle,
    state: watch::Sender<DemandState>,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    let (to_nodes, mut from_nodes) = mpsc::channel(EVENT_BOUND);
    let (to_classes, mut from_classes) = mpsc::channel(EVENT_BOUND);
    let (to_pods, mut from_pods) = mpsc::channel(EVENT_BOUND);
    let (of_nodes, mut node_trouble) = watch::channel(Trouble::None);
    let (of_classes, mut class_trouble) = watch::channel(Trouble::None);
    let (of_pods, mut pod_trouble) = watch::channel(Trouble::None);
    let mut desk = Desk::new(client.clone(), node.clone(), handle, state);
    let nodes = follow::run(
        Api::<Node>::all(client.clone()),
        what("nodes", Some(format!("metadata.name={node}")), of_nodes),
        |node| shape::of_node(&node),
        |_| true,
        to_nodes,
    );
    let classes = follow::run(
        Api::<DeviceClass>::all(client.clone()),
        what("deviceclasses", None, of_classes),
        |class| Class::of(&class),
        |_| true,
        to_classes,
    );
    let pods = follow::run(
        Api::<Pod>::all(client),
        what("pods", Some(UNSCHEDULED.to_owned()), of_pods),
        move |pod| Seen::of(&pod, &node),
        |seen: &Seen| seen.pending.is_some(),
        to_pods,
    );
    let deciding = async {
        loop {
            let next = desk.next();
            tokio::select! {
                Some(event) = from_nodes.recv() => desk.book.take_node(event),
                Some(event) = from_classes.recv() => desk.book.take_class(event),
                Some(event) = from_pods.recv() => desk.book.take_pod(event, Instant::now()),
                Some((name, answer)) = desk.reads.next() => {
                    desk.book.take_read(&name, answer, Instant::now());
                }
                Ok(()) = node_trouble.changed() => {}
                Ok(()) = class_trouble.changed() => {}
                Ok(()) = pod_trouble.changed() => {}
                () = sleep_until(next) => {
                    let troubles = [&node_trouble, &class_trouble, &pod_trouble];
                    desk.step(troubles.map(|trouble| trouble.borrow().clone())).await?;
                    continue;
                }
            }
            desk.look_soon();
        }
    };
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = nodes => Ok(()),
        () = classes => Ok(()),
        () = pods => Ok(()),
        ended = deciding => ended,
    }
}

fn what(
    what: &'static str,
    fields: Option<String>,
    trouble: watch::Sender<Trouble>,
) -> follow::Config {
    follow::Config {
        what,
        fields,
        page_size: PAGE_SIZE,
        lists: Lists::Once,
        closeness: follow::Closeness::Close,
        unknown_after: follow::UNKNOWN_AFTER,
        trouble: Some(trouble),
    }
}

/// The book, and those who are told what is in it.
struct Desk {
    client: Client,
    handle: Handle,
    state: watch::Sender<DemandState>,
    book: Book,
    reads: FuturesUnordered<BoxFuture<'static, (ClaimName, Answer)>>,
    told: Option<Option<Demand>>,
    /// When to look although nothing has come; never later than [`LOOK_PERIOD`] from now.
    look_at: Instant,
}

impl Desk {
    fn new(
        client: Client,
        node: String,
        handle: Handle,
        state: watch::Sender<DemandState>,
    ) -> Self {
        Self {
            client,
            handle,
            state,
            book: Book::new(node),
            reads: FuturesUnordered::new(),
            told: None,
            look_at: Instant::now(),
        }
    }

    fn look_soon(&mut self) {
        self.look_at = self.look_at.min(Instant::now() + COALESCE);
    }

    fn next(&self) -> Instant {
        let may_read = self.reads.len() < READS_AT_ONCE;
        let read = self.book.next_read().filter(|_| may_read);
        read.map_or(self.look_at, |read| read.min(self.look_at))
    }

    /// Begins the readings that are due, and tells what is known.
    async fn step(&mut self, troubles: [Trouble; 3]) -> Result<(), arbiter::Error> {
        let now = Instant::now();
        self.look_at = now + LOOK_PERIOD;
        while self.reads.len() < READS_AT_ONCE
            && let Some(name) = self.book.begin_read(now)
        {
            self.reads.push(Box::pin(read(self.client.clone(), name)));
        }
        let state = self.book.state(troubles);
        let demand = (state == DemandState::Known).then(|| self.book.demand(now));
        self.say(state);
        if self.told.as_ref() == Some(&demand) {
            return Ok(());
        }
        match self
            .handle
            .tell(Observation::Demand(demand.clone()))
            .await?
        {
            Told::Taken => self.told = Some(demand),
            Told::NotTaken(_) => self.look_at = now + TELL_AGAIN,
        }
        Ok(())
    }

    fn say(&self, state: DemandState) {
        self.state.send_if_modified(|told| {
            if *told == state {
                return false;
            }
            match &state {
                DemandState::Starting => {}
                DemandState::Known => info!("free GPUs move by what the pods that wait ask for"),
                DemandState::NoDemandRight { why } => warn!(
                    reason = "NoDemandRight",
                    error = why,
                    "the pods that wait may not be seen; free GPUs move by turns"
                ),
                DemandState::Unseen { why } => warn!(
                    error = why,
                    "the pods that wait can't be seen; free GPUs move by turns until they can"
                ),
            }
            *told = state;
            true
        });
    }
}

async fn read(client: Client, name: ClaimName) -> (ClaimName, Answer) {
    let claims: Api<ResourceClaim> = Api::namespaced(client, &name.namespace);
    let answer = match timeout(READ_LIMIT, claims.get_opt(&name.name)).await {
        Err(_) => Answer::Failed(format!("no answer within {} s", READ_LIMIT.as_secs())),
        Ok(Ok(Some(claim))) => Answer::Read(ClaimSpec::of(&claim)),
        Ok(Ok(None)) => Answer::Gone,
        Ok(Err(kube::Error::Api(status))) if status.code == FORBIDDEN => {
            Answer::Forbidden(status.message.clone())
        }
        Ok(Err(error)) => Answer::Failed(chain(&error)),
    };
    (name, answer)
}
