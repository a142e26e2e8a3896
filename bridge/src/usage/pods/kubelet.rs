//! The kubelet's own Pods API (KEP-4188).

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use bridge_core::PodUid;
use legacy_proto::pod_subset::{self, Pod};
use legacy_proto::pods::pods_client::PodsClient;
use legacy_proto::pods::{self, EventType, GetPodRequest, WatchPodsEvent, WatchPodsRequest};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Streaming};
use tracing::{debug, info};

use super::Event;
use super::shape::{Asking, Role, SIDECAR_POLICY, Shape, Shown};
use crate::uds::{self, Throttle};
use crate::usage::{LOG_AGAIN, RESOURCE, status_text};

/// Pause before the watch is opened again. The socket is local, and a kubelet that was restarted is back in a second.
const RETRY: Duration = Duration::from_secs(1);
/// The same while there is no such API: a kubelet before 1.37, or one that has it switched off.
const RETRY_ABSENT: Duration = Duration::from_secs(10);
/// How long the kubelet may take to send its first pods. Meanwhile the last list counts, as after a loss.
const SYNC_LIMIT: Duration = Duration::from_secs(4);
/// A watch is opened anew after this time: the kubelet may drop events when it is busy, and a new watch begins with
/// all pods.
const WATCH_TIME: Duration = Duration::from_secs(120);

/// How long the kubelet may take to say that it is starting. One that hangs must not keep counted pods away.
const STARTING_LIMIT: Duration = Duration::from_millis(300);

/// Whether the kubelet has started anew and not heard from all its sources of pods yet. Until then it fails counted
/// pods by a book that has pods which are gone (kubernetes v1.37.2, `UpdateAllocatedDevices` in
/// `pkg/kubelet/cm/devicemanager`). One that does not say so counts as one that has heard: those before 1.37 can't.
pub async fn is_starting(kubelet_dir: &Path) -> bool {
    /// No pod has it: what is asked for is whether there is an answer at all.
    const NOBODY: &str = "00000000-0000-0000-0000-000000000000";
    let mut client = PodsClient::new(uds::channel(
        &kubelet_dir.join(pods::DIR).join(pods::SOCKET),
    ));
    let asked = client.get_pod(GetPodRequest {
        pod_uid: NOBODY.to_owned(),
    });
    let answer = timeout(STARTING_LIMIT, asked).await;
    matches!(answer, Ok(Err(status)) if status.code() == Code::FailedPrecondition)
}

/// Follows until nobody listens.
pub(super) async fn follow(kubelet_dir: &Path, node: &str, events: mpsc::Sender<Event>) {
    let socket = kubelet_dir.join(pods::DIR).join(pods::SOCKET);
    let client =
        PodsClient::new(uds::channel(&socket)).max_decoding_message_size(pods::MAX_MESSAGE_BYTES);
    let trouble = Throttle::new(LOG_AGAIN);
    loop {
        let end = match watch(client.clone(), node, &events, &trouble).await {
            // The next watch begins at once, and until then what was seen counts.
            End::TimeIsUp => continue,
            End::NobodyListens => return,
            End::Error(error) => error,
        };
        if events.send(Event::Lost).await.is_err() {
            return;
        }
        let absent = !socket.exists();
        if trouble.pass().is_some() {
            let socket = socket.display();
            if absent {
                info!(%socket, "the kubelet has no Pods API; pods are known from the API server alone");
            } else {
                info!(%socket, error = end, "the kubelet's Pods API can't be followed; it is tried again");
            }
        }
        sleep(if absent { RETRY_ABSENT } else { RETRY }).await;
    }
}

enum End {
    TimeIsUp,
    NobodyListens,
    Error(String),
}

async fn watch(
    mut client: PodsClient<Channel>,
    node: &str,
    events: &mpsc::Sender<Event>,
    trouble: &Throttle,
) -> End {
    let opened = timeout(SYNC_LIMIT, async {
        let mut stream = client.watch_pods(WatchPodsRequest {}).await?.into_inner();
        let first = first_pods(&mut stream, node).await?;
        Ok::<_, tonic::Status>((stream, first))
    });
    let (mut stream, first) = match opened.await {
        Err(_) => {
            return End::Error(format!(
                "no complete list within {} s",
                SYNC_LIMIT.as_secs()
            ));
        }
        Ok(Err(status)) => {
            if status.code() == Code::FailedPrecondition {
                debug!("the kubelet has not heard from all its sources of pods yet");
            }
            return End::Error(status_text(&status));
        }
        Ok(Ok(opened)) => opened,
    };
    trouble.reset();
    for event in [Event::Listed(first), Event::Running] {
        if events.send(event).await.is_err() {
            return End::NobodyListens;
        }
    }
    let until = Instant::now() + WATCH_TIME;
    loop {
        let event = match timeout_at(until, stream.message()).await {
            Err(_) => return End::TimeIsUp,
            Ok(Err(status)) => return End::Error(status_text(&status)),
            Ok(Ok(None)) => return End::Error("the kubelet ended the watch".to_owned()),
            Ok(Ok(Some(event))) => event,
        };
        let told = match read(&event, node) {
            Err(error) => return End::Error(error),
            Ok(told) => told,
        };
        if let Some(told) = told
            && events.send(told).await.is_err()
        {
            return End::NobodyListens;
        }
    }
}

/// The pods that the kubelet sends before it says that these were all.
async fn first_pods(
    stream: &mut Streaming<WatchPodsEvent>,
    node: &str,
) -> Result<Vec<Shown>, tonic::Status> {
    let mut pods = Vec::new();
    while let Some(event) = stream.message().await? {
        if event.r#type() == EventType::InitialSyncComplete {
            return Ok(pods);
        }
        if let Some(Event::Applied(shown)) = read(&event, node).map_err(tonic::Status::internal)? {
            pods.push(shown);
        }
    }
    Err(tonic::Status::unavailable(
        "the watch ended before all pods had come",
    ))
}

/// An event about a pod of this node, if it is one.
fn read(event: &WatchPodsEvent, node: &str) -> Result<Option<Event>, String> {
    let pod = || Pod::decode(event.pod.as_slice()).map_err(|error| format!("a pod: {error}"));
    match event.r#type() {
        EventType::Added | EventType::Modified => Ok(shown(&pod()?, node).map(Event::Applied)),
        EventType::Deleted => {
            let uid = pod()?.metadata.unwrap_or_default().uid;
            Ok(PodUid::new(uid).ok().map(Event::Gone))
        }
        EventType::InitialSyncComplete | EventType::Unspecified => Ok(None),
    }
}

fn shown(pod: &Pod, node: &str) -> Option<Shown> {
    let metadata = pod.metadata.as_ref()?;
    let spec = pod.spec.clone().unwrap_or_default();
    // A static pod may lack it; every pod that the kubelet has is bound to its node.
    if !spec.node_name.is_empty() && spec.node_name != node {
        return None;
    }
    let status = pod.status.clone().unwrap_or_default();
    let mapped = |container: &str| {
        let claim = status.extended_resource_claim_status.iter();
        let mut mappings = claim.flat_map(|claim| &claim.request_mappings);
        mappings.any(|it| it.container_name == container && it.resource_name == RESOURCE)
    };
    let asking = |container: &'_ pod_subset::Container| {
        let limits = container.resources.as_ref().map(|it| &it.limits);
        limits
            .and_then(|limits| limits.get(RESOURCE))
            .filter(|_| !mapped(&container.name))
            .map(|quantity| quantity.string.clone())
    };
    let inits = spec.init_containers.iter().map(|container| {
        let role = if container.restart_policy == SIDECAR_POLICY {
            Role::Sidecar
        } else {
            Role::Init
        };
        (role, asking(container))
    });
    let apps = spec.containers.iter().map(|it| (Role::App, asking(it)));
    let limits: Vec<(Role, Option<String>)> = inits.chain(apps).collect();
    let shape = Shape {
        namespace: &metadata.namespace,
        name: &metadata.name,
        uid: &metadata.uid,
        phase: &status.phase,
        containers: limits
            .iter()
            .map(|(role, limit)| Asking {
                role: *role,
                limit: limit.as_deref(),
            })
            .collect(),
        started: !status.container_statuses.is_empty()
            || !status.init_container_statuses.is_empty(),
        claims: claims_of(&spec, &status),
    };
    shape.shown()
}

/// The claims that a pod names itself, those that were generated for it, and the one that stands for its counts.
fn claims_of(spec: &pod_subset::PodSpec, status: &pod_subset::PodStatus) -> BTreeSet<String> {
    let named = spec.resource_claims.iter();
    let generated = status.resource_claim_statuses.iter();
    let counted = status.extended_resource_claim_status.iter();
    named
        .map(|claim| claim.resource_claim_name.clone())
        .chain(generated.map(|claim| claim.resource_claim_name.clone()))
        .chain(counted.map(|claim| claim.resource_claim_name.clone()))
        // What proto3 leaves out is empty: a claim that is generated, and is not there yet.
        .filter(|name| !name.is_empty())
        .collect()
}
