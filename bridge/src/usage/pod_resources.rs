//! The kubelet's pod-resources: which pod has which ids and claims, asked again and again.

mod about;
mod rhythm;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bridge_core::{
    DeviceId, DeviceName, ListedClaim, ListedDevice, ListedPod, Listing, PodName, Pods, Status,
};
use legacy_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use legacy_proto::podresources::{
    self, AllocatableResourcesRequest, ContainerResources, ListPodResourcesRequest,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Response};
use tracing::{debug, info, warn};

pub use about::{AskAbout, ask_about};

use self::rhythm::Rhythm;
use super::{DRIVER, LOG_AGAIN, RESOURCE, status_text};
use crate::arbiter::{self, Handle, Observation, Told};
use crate::uds::{self, Throttle};

/// How long a List may take. The kubelet answers from memory within milliseconds; rule 5 asks inside an `Allocate`,
/// which should not hang for more than some seconds.
const LIST_LIMIT: Duration = Duration::from_secs(2);
/// Pause after the kubelet has turned a call away for its rate: room for two more comes within it.
const RATE_PAUSE: Duration = Duration::from_millis(20);
/// How long a List waits for an `Allocate` to end. It takes about a second at worst; on a node where one follows the
/// other without a pause, holds must end all the same.
const GATE_LIMIT: Duration = Duration::from_secs(2);

/// Why there is no listing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The kubelet refused, or can't be reached.
    #[error(
        "pod-resources at {} can't be asked: {reason}. Is the kubelet running, and is its root folder the one given?",
        socket.display()
    )]
    NoAnswer {
        /// The socket.
        socket: PathBuf,
        /// In words.
        reason: String,
    },
    /// It took too long.
    #[error(
        "pod-resources at {} did not answer within {} s. The kubelet may be overloaded; see its log.",
        socket.display(),
        LIST_LIMIT.as_secs()
    )]
    TimedOut {
        /// The socket.
        socket: PathBuf,
    },
}

/// A client of pod-resources v1, cheap to clone.
#[derive(Debug, Clone)]
pub struct PodResources {
    socket: PathBuf,
    client: PodResourcesListerClient<Channel>,
    node: String,
    oddities: Arc<Throttle>,
    /// The last List's answer; `None` when it failed.
    last: Arc<Mutex<Option<Listing>>>,
}

impl PodResources {
    /// A client of the kubelet whose root folder is `kubelet_dir`, on the node of that name. It connects when asked.
    #[must_use]
    pub fn new(kubelet_dir: &Path, node: String) -> Self {
        let socket = kubelet_dir
            .join(podresources::DIR)
            .join(podresources::SOCKET);
        let client = PodResourcesListerClient::new(uds::channel(&socket))
            .max_decoding_message_size(podresources::MAX_MESSAGE_BYTES);
        Self {
            socket,
            client,
            node,
            oddities: Arc::new(Throttle::new(LOG_AGAIN)),
            last: Arc::default(),
        }
    }

    /// Asks for all pods once, now; takes 2 s at most.
    ///
    /// While an `Allocate` is in progress it does harm, see [`Handle::no_allocate`].
    ///
    /// # Errors
    /// The kubelet does not answer. That says nothing about any pod.
    pub async fn list(&self) -> Result<Listing, Error> {
        let listing = self.try_list().await;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = listing.clone().ok();
        listing
    }

    async fn try_list(&self) -> Result<Listing, Error> {
        let list = within_the_rate(|| {
            let mut client = self.client.clone();
            async move { client.list(ListPodResourcesRequest {}).await }
        });
        let answer = timeout(LIST_LIMIT, list)
            .await
            .map_err(|_| Error::TimedOut {
                socket: self.socket.clone(),
            })?
            .map_err(|status| Error::NoAnswer {
                socket: self.socket.clone(),
                reason: status_text(&status),
            })?;
        let pods = answer.into_inner().pod_resources.into_iter();
        let mut pods: Vec<ListedPod> = pods.map(|pod| self.listed(pod)).collect();
        // The kubelet takes them from a map: each answer has an order of its own.
        pods.sort_by(|one, other| one.pod.cmp(&other.pod));
        Ok(Listing { pods })
    }

    /// How many devices of the resource the kubelet counts as allocatable now, held or not; takes 2 s at most.
    ///
    /// # Errors
    /// The kubelet does not answer.
    pub async fn allocatable(&self) -> Result<u32, Error> {
        let ids = self.allocatable_ids().await?;
        Ok(u32::try_from(ids.len()).unwrap_or(u32::MAX))
    }

    /// The devices of the resource that the kubelet counts as allocatable now, whoever listed them; takes 2 s at most.
    ///
    /// # Errors
    /// The kubelet does not answer.
    pub async fn allocatable_ids(&self) -> Result<BTreeSet<String>, Error> {
        let call = within_the_rate(|| {
            let mut client = self.client.clone();
            let request = AllocatableResourcesRequest {};
            async move { client.get_allocatable_resources(request).await }
        });
        let answer = timeout(LIST_LIMIT, call)
            .await
            .map_err(|_| Error::TimedOut {
                socket: self.socket.clone(),
            })?
            .map_err(|status| Error::NoAnswer {
                socket: self.socket.clone(),
                reason: status_text(&status),
            })?
            .into_inner();
        let devices = answer.devices.into_iter();
        // A device on several NUMA nodes comes with an entry for each.
        Ok(devices
            .filter(|entry| entry.resource_name == RESOURCE)
            .flat_map(|entry| entry.device_ids)
            .collect())
    }

    fn listed(&self, pod: podresources::PodResources) -> ListedPod {
        let mut devices = Vec::new();
        let mut claims = BTreeSet::new();
        for container in &pod.containers {
            self.devices_of(container, &mut devices);
            self.claims_of(container, &mut claims);
        }
        devices.sort_by(|one: &ListedDevice, other| {
            (&one.container, &one.id).cmp(&(&other.container, &other.id))
        });
        ListedPod {
            pod: PodName {
                namespace: pod.namespace,
                name: pod.name,
            },
            devices,
            claims: claims.into_iter().collect(),
        }
    }

    fn devices_of(&self, container: &ContainerResources, devices: &mut Vec<ListedDevice>) {
        let ours = container
            .devices
            .iter()
            .filter(|entry| entry.resource_name == RESOURCE);
        // A device on several NUMA nodes comes with an entry for each.
        let texts: BTreeSet<&String> = ours.flat_map(|entry| &entry.device_ids).collect();
        for text in texts {
            match DeviceId::parse(text) {
                Ok(id) => devices.push(ListedDevice {
                    container: container.name.clone(),
                    id,
                }),
                Err(error) => self.odd(&error.to_string()),
            }
        }
    }

    fn claims_of(&self, container: &ContainerResources, claims: &mut BTreeSet<ListedClaim>) {
        for claim in &container.dynamic_resources {
            let ours = claim
                .claim_resources
                .iter()
                .filter(|entry| entry.driver_name == DRIVER && entry.pool_name == self.node);
            for entry in ours {
                match DeviceName::new(&entry.device_name) {
                    Ok(device) => {
                        claims.insert(ListedClaim {
                            namespace: claim.claim_namespace.clone(),
                            name: claim.claim_name.clone(),
                            device,
                        });
                    }
                    Err(error) => self.odd(&error.to_string()),
                }
            }
        }
    }

    fn odd(&self, error: &str) {
        if self.oddities.pass().is_some() {
            warn!(
                error,
                "pod-resources shows a device that can't be one of ours; it is skipped"
            );
        }
    }
}

/// Asks until the kubelet has room for the call. It serves 100 calls a second and 10 at once, whoever asks, and turns
/// the others away; inside an `Allocate` that would fail a pod for good. The caller has the time limit.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/apis/grpc/ratelimit.go`.
async fn within_the_rate<T, F>(call: impl Fn() -> F) -> Result<Response<T>, tonic::Status>
where
    F: Future<Output = Result<Response<T>, tonic::Status>>,
{
    loop {
        match call().await {
            Err(status) if is_turned_away(&status) => sleep(RATE_PAUSE).await,
            answer => return answer,
        }
    }
}

/// An answer that is too long has the same code.
fn is_turned_away(status: &tonic::Status) -> bool {
    status.code() == Code::ResourceExhausted && status.message().contains("rate limit")
}

/// Asks pod-resources for ever, and tells the pool: each second while anything is held, more often for a moment after a
/// grant and after the end of a pod that holds a unit, and each 10 s while nothing is held or nothing changes. Never while an `Allocate` is in
/// progress, unless that takes longer than 2 s.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. A kubelet that is away is no error: it is asked again.
pub async fn run_listing(
    resources: PodResources,
    pods: watch::Receiver<Option<Pods>>,
    handle: Handle,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        ended = ask_for_ever(&resources, pods, &handle) => ended,
    }
}

async fn ask_for_ever(
    resources: &PodResources,
    mut pods: watch::Receiver<Option<Pods>>,
    handle: &Handle,
) -> Result<(), arbiter::Error> {
    let mut status = handle.status();
    let mut rhythm = Rhythm::default();
    let mut trouble = Trouble::default();
    loop {
        if timeout(GATE_LIMIT, handle.no_allocate()).await.is_err() {
            debug!("pod-resources is listed while an Allocate is in progress");
        }
        let asked = Instant::now();
        let listing = resources.list().await;
        rhythm.has_answered(listing.as_ref().ok());
        match listing {
            Ok(listing) => {
                trouble.over();
                handle.metrics().pod_resources_answered();
                if seen(&mut rhythm, &mut status, &mut pods, |it, shown, bound| {
                    it.is_news(shown, bound)
                }) {
                    // What could not be saved is told anew with the next answer.
                    let told = handle.tell(Observation::Listing(listing)).await?;
                    rhythm.was_told(told == Told::Taken);
                }
            }
            Err(error) => trouble.about(&error),
        }
        loop {
            let next = seen(
                &mut rhythm,
                &mut status,
                &mut pods,
                |rhythm, shown, bound| rhythm.next(shown, bound, asked),
            );
            tokio::select! {
                () = sleep_until(next) => break,
                changed = status.changed() => changed.map_err(|_| arbiter::Error::Stopping)?,
                Ok(()) = pods.changed() => {}
            }
        }
    }
}

/// What the rhythm says by what is known now of the pool and of the pods.
fn seen<T>(
    rhythm: &mut Rhythm,
    status: &mut watch::Receiver<Arc<Status>>,
    pods: &mut watch::Receiver<Option<Pods>>,
    says: impl FnOnce(&mut Rhythm, &Status, Option<&Pods>) -> T,
) -> T {
    let (shown, bound) = (status.borrow_and_update(), pods.borrow_and_update());
    if shown.has_changed() || bound.has_changed() {
        rhythm.has_changed();
    }
    says(rhythm, &shown, bound.as_ref())
}

/// Says once in a while that the kubelet does not answer, and when it does again.
#[derive(Debug, Default)]
struct Trouble {
    since: Option<Instant>,
    logged: Option<Instant>,
}

impl Trouble {
    fn about(&mut self, error: &Error) {
        let now = Instant::now();
        self.since.get_or_insert(now);
        if self.logged.is_none_or(|at| now - at >= LOG_AGAIN) {
            self.logged = Some(now);
            warn!(error = %error, "who has which GPU can't be read from the kubelet; no counted hold ends meanwhile");
        }
    }

    fn over(&mut self) {
        if let Some(since) = self.since {
            info!(
                seconds = since.elapsed().as_secs(),
                "pod-resources answers again"
            );
            *self = Self::default();
        }
    }
}
