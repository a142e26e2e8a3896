//! The pods that the API server has bound to this node: list, then watch.
//!
//! Not `kube::runtime::watcher`: after a break that one does not say when its watch runs again, and here this decides
//! whether a pod that is not shown counts as gone.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use bridge_core::{PodPhase, PodUid};
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::{ListParams, WatchParams};
use kube::core::WatchEvent;
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::warn;

use super::shape::{Asking, MIRROR_ANNOTATION, Role, SIDECAR_POLICY, Shape, Shown};
use super::{Event, UNSYNCED_LIMIT};
use crate::follow::chain;
use crate::uds::Throttle;
use crate::usage::{LOG_AGAIN, RESOURCE};

/// How long a watch runs. It also bounds how long a connection that died in silence goes unnoticed.
const WATCH_TIME: Duration = Duration::from_secs(120);
/// What a watch may run over its time before it counts as dead.
const WATCH_MARGIN: Duration = Duration::from_secs(5);
/// How long the server may take to answer a page of a list, or to open a watch. While a watch that has run its time
/// is opened again the last list counts, as after a loss.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// A watch that ends sooner is not opened again at once, or a server that ends each of them would be flooded.
const SHORT_WATCH: Duration = Duration::from_secs(1);
/// Pods per page. A node has 110 pods by default.
const PAGE_SIZE: u32 = 250;
/// Pause before the first retry; it doubles with each.
const RETRY_FIRST: Duration = Duration::from_millis(250);
/// The longest pause.
const RETRY_LAST: Duration = Duration::from_secs(8);
/// HTTP status of a resource version that is too old to go on from.
const EXPIRED: u16 = 410;

/// Follows until nobody listens.
pub(super) async fn follow(client: Client, node: &str, events: mpsc::Sender<Event>) {
    let follower = Follower {
        api: Api::all(client),
        fields: format!("spec.nodeName={node}"),
        events,
    };
    let trouble = Throttle::new(LOG_AGAIN);
    let mut version = None;
    let mut lost: Option<Instant> = None;
    let mut pause = RETRY_FIRST;
    loop {
        // After a long break a resumed watch would show the past for a moment as if it were the present.
        if lost.is_some_and(|at| at.elapsed() >= UNSYNCED_LIMIT) {
            version = None;
        }
        let began = Instant::now();
        match follower.round(&mut version).await {
            Round::NobodyListens => return,
            Round::Ended => {
                lost = None;
                pause = RETRY_FIRST;
                trouble.reset();
                if began.elapsed() < SHORT_WATCH {
                    sleep(pause).await;
                }
            }
            Round::Failed { ran, error } => {
                if ran {
                    lost = None;
                    pause = RETRY_FIRST;
                    trouble.reset();
                }
                lost.get_or_insert_with(Instant::now);
                if trouble.pass().is_some() {
                    warn!(
                        error,
                        "the API server does not show the pods bound here; it is tried again"
                    );
                }
                if follower.events.send(Event::Lost).await.is_err() {
                    return;
                }
                sleep(pause).await;
                pause = (pause * 2).min(RETRY_LAST);
            }
        }
    }
}

/// How one list and watch ended.
enum Round {
    NobodyListens,
    /// In peace, after it ran: the next goes on at once, and what was seen counts until then.
    Ended,
    Failed {
        ran: bool,
        error: String,
    },
}

struct Follower {
    api: Api<Pod>,
    fields: String,
    events: mpsc::Sender<Event>,
}

impl Follower {
    async fn round(&self, version: &mut Option<String>) -> Round {
        let from = match version {
            Some(from) => from.clone(),
            None => match self.list().await {
                Err(error) => return Round::Failed { ran: false, error },
                Ok((pods, listed)) => {
                    if self.events.send(Event::Listed(pods)).await.is_err() {
                        return Round::NobodyListens;
                    }
                    version.insert(listed).clone()
                }
            },
        };
        self.watch(from, version).await
    }

    async fn list(&self) -> Result<(Vec<Shown>, String), String> {
        let mut pods = Vec::new();
        let mut params = ListParams::default().fields(&self.fields).limit(PAGE_SIZE);
        loop {
            let page = match timeout(ANSWER_LIMIT, self.api.list(&params)).await {
                Err(_) => return Err(no_answer("list")),
                Ok(Err(error)) => return Err(chain(&error)),
                Ok(Ok(page)) => page,
            };
            pods.extend(page.items.iter().filter_map(shown));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => {
                    let version = page.metadata.resource_version;
                    let version =
                        version.ok_or_else(|| "the list has no resourceVersion".to_owned())?;
                    return Ok((pods, version));
                }
            }
        }
    }

    async fn watch(&self, from: String, version: &mut Option<String>) -> Round {
        let seconds = u32::try_from(WATCH_TIME.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields).timeout(seconds);
        let stream = match timeout(ANSWER_LIMIT, self.api.watch(&params, &from)).await {
            Err(_) => {
                let error = no_answer("watch");
                return Round::Failed { ran: false, error };
            }
            Ok(Err(error)) => {
                if let kube::Error::Api(status) = &error
                    && status.code == EXPIRED
                {
                    *version = None;
                }
                let error = chain(&error);
                return Round::Failed { ran: false, error };
            }
            Ok(Ok(stream)) => stream,
        };
        if self.events.send(Event::Running).await.is_err() {
            return Round::NobodyListens;
        }
        let mut stream = pin!(stream);
        let deadline = Instant::now() + WATCH_TIME + WATCH_MARGIN;
        loop {
            let event = match timeout_at(deadline, stream.try_next()).await {
                Err(_) => {
                    let error = "the watch did not end in its time".to_owned();
                    return Round::Failed { ran: true, error };
                }
                Ok(Err(error)) => {
                    let error = chain(&error);
                    return Round::Failed { ran: true, error };
                }
                Ok(Ok(None)) => return Round::Ended,
                Ok(Ok(Some(event))) => event,
            };
            let told = match event {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    advance(version, &pod);
                    shown(&pod).map(Event::Applied)
                }
                WatchEvent::Deleted(pod) => {
                    advance(version, &pod);
                    PodUid::new(uid(&pod)).ok().map(Event::Gone)
                }
                WatchEvent::Bookmark(bookmark) => {
                    *version = Some(bookmark.metadata.resource_version);
                    None
                }
                WatchEvent::Error(status) if status.code == EXPIRED => {
                    *version = None;
                    return Round::Ended;
                }
                WatchEvent::Error(status) => {
                    *version = None;
                    let error = status.message;
                    return Round::Failed { ran: true, error };
                }
            };
            if let Some(told) = told
                && self.events.send(told).await.is_err()
            {
                return Round::NobodyListens;
            }
        }
    }
}

fn no_answer(to: &str) -> String {
    format!(
        "no answer to the {to} of pods within {} s",
        ANSWER_LIMIT.as_secs()
    )
}

fn advance(version: &mut Option<String>, pod: &Pod) {
    if let Some(newer) = pod.resource_version() {
        *version = Some(newer);
    }
}

/// The UID that the kubelet knows the pod by.
fn uid(pod: &Pod) -> &str {
    let own = pod.metadata.uid.as_deref().unwrap_or_default();
    pod.annotations()
        .get(MIRROR_ANNOTATION)
        .map_or(own, String::as_str)
}

/// How many GPUs a scheduler subtracts for a pod from the count of the Node that it is bound to; 0 for one that has ended.
#[must_use]
pub fn counted(pod: &Pod) -> u32 {
    let bound = shown(pod).map(|shown| shown.bound);
    let live = bound.filter(|bound| bound.phase == PodPhase::Live);
    live.map_or(0, |bound| bound.may_own)
}

/// What counts of a pod.
pub(in crate::usage) fn shown(pod: &Pod) -> Option<Shown> {
    let spec = pod.spec.as_ref()?;
    let status = pod.status.as_ref();
    let claim = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    let asking = |role: Role, container: &'_ Container| -> (Role, Option<String>) {
        let mapped = claim.is_some_and(|claim| {
            let mut mappings = claim.request_mappings.iter();
            mappings.any(|it| it.container_name == container.name && it.resource_name == RESOURCE)
        });
        let limits = container
            .resources
            .as_ref()
            .and_then(|it| it.limits.as_ref());
        let limit = limits
            .and_then(|limits| limits.get(RESOURCE))
            .filter(|_| !mapped);
        (role, limit.map(|quantity| quantity.0.clone()))
    };
    let inits = spec.init_containers.iter().flatten().map(|container| {
        let sidecar = container.restart_policy.as_deref() == Some(SIDECAR_POLICY);
        let role = if sidecar { Role::Sidecar } else { Role::Init };
        asking(role, container)
    });
    let apps = spec.containers.iter().map(|it| asking(Role::App, it));
    let limits: Vec<(Role, Option<String>)> = inits.chain(apps).collect();
    let statuses = status.into_iter().flat_map(|status| {
        let apps = status.container_statuses.iter().flatten();
        apps.chain(status.init_container_statuses.iter().flatten())
    });
    let shape = Shape {
        namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
        name: pod.metadata.name.as_deref().unwrap_or_default(),
        uid: uid(pod),
        phase: status
            .and_then(|status| status.phase.as_deref())
            .unwrap_or_default(),
        containers: limits
            .iter()
            .map(|(role, limit)| Asking {
                role: *role,
                limit: limit.as_deref(),
            })
            .collect(),
        started: statuses.count() > 0,
        claims: claims_of(pod),
    };
    shape.shown()
}

/// The claims that a pod names itself, those that were generated for it, and the one that stands for its counts.
fn claims_of(pod: &Pod) -> BTreeSet<String> {
    let spec = pod.spec.iter();
    let named = spec.flat_map(|spec| spec.resource_claims.iter().flatten());
    let status = pod.status.as_ref();
    let generated = status.and_then(|status| status.resource_claim_statuses.as_ref());
    let counted = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    named
        .filter_map(|claim| claim.resource_claim_name.clone())
        .chain(
            generated
                .into_iter()
                .flatten()
                .filter_map(|claim| claim.resource_claim_name.clone()),
        )
        .chain(counted.map(|claim| claim.resource_claim_name.clone()))
        .collect()
}
