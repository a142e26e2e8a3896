//! Writes events, one after the other.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event as ApiEvent, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::bucket::Bucket;
use super::{About, Event, NOTE_LIMIT, Severity};
use crate::metrics::{EventOutcome, Metrics};

/// Who reports.
const CONTROLLER: &str = "gpu-bridge.dev/gpu-bridge";

/// Where events about what has no namespace go: the kubelet's about the Node are there too.
const NAMESPACE_OF_NODES: &str = "default";

/// The same event within this time counts as one more of the first, as client-go has it.
const SAME_FOR: Duration = Duration::from_secs(360);

/// How often that count is written: one who looks sees that it goes on.
const COUNT_AGAIN: Duration = Duration::from_secs(60);

/// How long the API server may take; what comes meanwhile waits.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// After a 403 nothing is tried for this time: somebody has to change a role first.
const RIGHT_AGAIN: Duration = Duration::from_secs(600);

/// The name of an event begins with that of its object, and has a number behind it; 253 bytes are a name's limit.
const NAME_OF_OBJECT_LIMIT: usize = 200;

/// HTTP status of a missing right.
const FORBIDDEN: u16 = 403;

/// Writes what is recorded until told to stop. Needs the right to create and patch `events` in `events.k8s.io`; without
/// it this is said once, and events are dropped.
pub async fn run(
    client: Client,
    node: String,
    mut queue: mpsc::Receiver<Event>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut writer = Writer {
        client,
        node,
        metrics,
        bucket: Bucket::full(Instant::now()),
        written: BTreeMap::new(),
        forbidden: None,
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            event = queue.recv() => match event {
                Some(event) => {
                    let written = writer.write(event);
                    if stop.run_until_cancelled(written).await.is_none() {
                        return;
                    }
                }
                // Nobody is left who could record any.
                None => return stop.cancelled().await,
            },
        }
    }
}

/// An event that was written.
struct Written {
    name: String,
    namespace: String,
    /// How often it happened.
    count: i32,
    /// When it was written last.
    at: Instant,
}

/// What makes two events the same.
type Key = (About, &'static str, String);

struct Writer {
    client: Client,
    node: String,
    metrics: Metrics,
    bucket: Bucket,
    written: BTreeMap<Key, Written>,
    /// Until then the right is taken to be missing. `None`: it is there, as far as is known.
    forbidden: Option<Instant>,
}

impl Writer {
    async fn write(&mut self, event: Event) {
        let outcome = self.outcome(event, Instant::now()).await;
        self.metrics.event(outcome);
    }

    async fn outcome(&mut self, event: Event, now: Instant) -> EventOutcome {
        if self.forbidden.is_some_and(|until| now < until) {
            return EventOutcome::Forbidden;
        }
        // This bounds the map as well: the bucket bounds what comes in.
        self.written
            .retain(|_, it| now.duration_since(it.at) < SAME_FOR);
        let key = (event.about.clone(), event.reason, event.note.clone());
        if let Some(before) = self.written.get_mut(&key) {
            before.count = before.count.saturating_add(1);
            if now.duration_since(before.at) < COUNT_AGAIN {
                return EventOutcome::Repeated;
            }
        }
        if !self.bucket.take(now) {
            debug!(reason = event.reason, "too many events; one is dropped");
            return EventOutcome::Dropped;
        }
        let done = match self.written.get_mut(&key) {
            Some(before) => {
                before.at = now;
                let (name, namespace, count) =
                    (before.name.clone(), before.namespace.clone(), before.count);
                self.count_up(&name, &namespace, count).await
            }
            None => self.create(event, key, now).await,
        };
        match done {
            Ok(()) => {
                if self.forbidden.take().is_some() {
                    info!("events can be written again");
                }
                EventOutcome::Written
            }
            Err(Failure::Forbidden(why)) => self.note_forbidden(&why, now),
            Err(Failure::Other(why)) => {
                debug!(error = why, "an event could not be written");
                EventOutcome::Failed
            }
        }
    }

    fn note_forbidden(&mut self, why: &str, now: Instant) -> EventOutcome {
        if self.forbidden.is_none() {
            warn!(
                reason = "NoEventRight",
                error = why,
                "Kubernetes Events can't be written; everything else goes on"
            );
        }
        self.forbidden = Some(now + RIGHT_AGAIN);
        EventOutcome::Forbidden
    }

    async fn create(&mut self, event: Event, key: Key, now: Instant) -> Result<(), Failure> {
        let object = api_event(&self.node, event, Timestamp::now());
        let namespace = object.metadata.namespace.clone().unwrap_or_default();
        let api: Api<ApiEvent> = Api::namespaced(self.client.clone(), &namespace);
        ask(api.create(&PostParams::default(), &object)).await?;
        let written = Written {
            name: object.metadata.name.unwrap_or_default(),
            namespace,
            count: 1,
            at: now,
        };
        self.written.insert(key, written);
        Ok(())
    }

    async fn count_up(&self, name: &str, namespace: &str, count: i32) -> Result<(), Failure> {
        let series = EventSeries {
            count,
            last_observed_time: MicroTime(Timestamp::now()),
        };
        let patch = Patch::Merge(serde_json::json!({ "series": series }));
        let api: Api<ApiEvent> = Api::namespaced(self.client.clone(), namespace);
        ask(api.patch(name, &PatchParams::default(), &patch)).await
    }
}

/// Why an event was not written.
enum Failure {
    Forbidden(String),
    Other(String),
}

async fn ask<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<(), Failure> {
    match timeout(ANSWER_LIMIT, answer).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == FORBIDDEN => {
            Err(Failure::Forbidden(status.message.clone()))
        }
        Ok(Err(error)) => Err(Failure::Other(error.to_string())),
        Err(_) => Err(Failure::Other(format!(
            "no answer within {} s",
            ANSWER_LIMIT.as_secs()
        ))),
    }
}

/// The event as the API has it.
fn api_event(node: &str, event: Event, now: Timestamp) -> ApiEvent {
    let regarding = reference(node, &event.about);
    let object = regarding.name.as_deref().unwrap_or_default();
    let name = format!(
        "{}.{:x}",
        cut(object, NAME_OF_OBJECT_LIMIT),
        now.as_nanosecond()
    );
    let namespace = regarding.namespace.as_deref().unwrap_or(NAMESPACE_OF_NODES);
    ApiEvent {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(cut(node, NAME_LIMIT).to_owned()),
        action: Some(event.action.to_owned()),
        reason: Some(event.reason.to_owned()),
        type_: Some(
            match event.severity {
                Severity::Normal => "Normal",
                Severity::Warning => "Warning",
            }
            .to_owned(),
        ),
        note: Some(cut(&event.note, NOTE_LIMIT).to_owned()),
        regarding: Some(regarding),
        ..ApiEvent::default()
    }
}

/// The API takes 128 bytes of a reporting instance.
const NAME_LIMIT: usize = 128;

fn reference(node: &str, about: &About) -> ObjectReference {
    let (api, kind) = match about {
        About::Node => ("v1", "Node"),
        About::Pod { .. } => ("v1", "Pod"),
        About::Claim(_) => ("resource.k8s.io/v1", "ResourceClaim"),
    };
    let (namespace, name, uid) = match about {
        // The kubelet puts the name where the UID should be, and `kubectl describe node` looks there.
        About::Node => (None, node.to_owned(), node.to_owned()),
        About::Pod { pod, uid } => (
            Some(pod.namespace.clone()),
            pod.name.clone(),
            uid.to_string(),
        ),
        About::Claim(claim) => (
            Some(claim.namespace.clone()),
            claim.name.clone(),
            claim.uid.to_string(),
        ),
    };
    ObjectReference {
        api_version: Some(api.to_owned()),
        kind: Some(kind.to_owned()),
        namespace,
        name: Some(name),
        uid: Some(uid),
        ..ObjectReference::default()
    }
}

/// The first bytes of a text, up to the end of a character.
fn cut(text: &str, limit: usize) -> &str {
    let end = text.floor_char_boundary(limit);
    &text[..end]
}

#[cfg(test)]
mod tests;
