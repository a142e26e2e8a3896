//! The kubelet's pod-resources: which pod has which ids and claims, asked again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{
    DeviceId, DeviceName, HoldKind, ListedClaim, ListedDevice, ListedPod, Listing, PodName, Status,
    UnitId,
};
use legacy_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use legacy_proto::podresources::{
    self, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tracing::{info, warn};

use super::{DRIVER, LOG_AGAIN, RESOURCE, Told, status_text, tell};
use crate::arbiter::{self, Handle, Observation};
use crate::uds::{self, Throttle};

/// How long a List may take. The kubelet answers from memory within milliseconds; rule 5 asks inside an `Allocate`,
/// which should not hang for more than some seconds.
const LIST_LIMIT: Duration = Duration::from_secs(2);
/// Time between two Lists while anything is held.
const PERIOD_HELD: Duration = Duration::from_secs(1);
/// Time between two Lists while nothing is.
const PERIOD_IDLE: Duration = Duration::from_secs(10);
/// Time between two Lists while a pod is expected to show up with an id that was just given out.
const PERIOD_EXPECTING: Duration = Duration::from_millis(200);
/// For so long after a grant its pod is expected: the kubelet stores the answer at once, and an ordinary init
/// container never shows up.
const EXPECTING: Duration = Duration::from_secs(2);

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
        }
    }

    /// Asks once, now; takes 2 s at most.
    ///
    /// # Errors
    /// The kubelet does not answer. That says nothing about any pod.
    pub async fn list(&self) -> Result<Listing, Error> {
        let mut client = self.client.clone();
        let answer = timeout(LIST_LIMIT, client.list(ListPodResourcesRequest {}))
            .await
            .map_err(|_| Error::TimedOut {
                socket: self.socket.clone(),
            })?
            .map_err(|status| Error::NoAnswer {
                socket: self.socket.clone(),
                reason: status_text(&status),
            })?;
        Ok(self.listing(answer.into_inner()))
    }

    fn listing(&self, answer: ListPodResourcesResponse) -> Listing {
        let pods = answer.pod_resources.into_iter().filter_map(|pod| {
            let mut devices = Vec::new();
            let mut claims = BTreeSet::new();
            for container in &pod.containers {
                self.devices_of(container, &mut devices);
                self.claims_of(container, &mut claims);
            }
            let listed = ListedPod {
                pod: PodName {
                    namespace: pod.namespace,
                    name: pod.name,
                },
                devices,
                claims: claims.into_iter().collect(),
            };
            let has_ours = !listed.devices.is_empty() || !listed.claims.is_empty();
            has_ours.then_some(listed)
        });
        Listing {
            pods: pods.collect(),
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

/// Asks pod-resources for ever, and tells the pool: each second while anything is held, else each 10 s, and more
/// often for a moment after a grant.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. A kubelet that is away is no error: it is asked again.
pub async fn run_listing(
    resources: PodResources,
    handle: Handle,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        ended = ask_for_ever(&resources, &handle) => ended,
    }
}

async fn ask_for_ever(resources: &PodResources, handle: &Handle) -> Result<(), arbiter::Error> {
    let mut status = handle.status();
    let mut rhythm = Rhythm::default();
    let mut trouble = Trouble::default();
    loop {
        let asked = Instant::now();
        match resources.list().await {
            Ok(listing) => {
                trouble.over();
                // What could not be saved is told anew with the next answer.
                let (Told::Taken | Told::NotTaken) =
                    tell(handle, Observation::Listing(listing)).await?;
            }
            Err(error) => trouble.about(&error),
        }
        loop {
            let next = {
                let shown = status.borrow_and_update();
                rhythm.next(&shown, asked)
            };
            tokio::select! {
                () = sleep_until(next) => break,
                changed = status.changed() => changed.map_err(|_| arbiter::Error::Stopping)?,
            }
        }
    }
}

/// When to ask next.
#[derive(Debug, Default)]
struct Rhythm {
    /// Granted units, and until when their pods are expected.
    expected: BTreeMap<UnitId, Instant>,
}

impl Rhythm {
    fn next(&mut self, status: &Status, asked: Instant) -> Instant {
        let now = Instant::now();
        let granted: BTreeSet<&UnitId> = status
            .units
            .iter()
            .filter(|unit| {
                let mut holds = unit.holds.iter();
                holds.any(|hold| matches!(hold.kind, HoldKind::Granted { .. }))
            })
            .map(|unit| &unit.unit)
            .collect();
        self.expected.retain(|unit, _| granted.contains(unit));
        for unit in granted {
            self.expected
                .entry(unit.clone())
                .or_insert_with(|| now + EXPECTING);
        }
        let held = status.units.iter().any(|unit| !unit.holds.is_empty());
        let period = if self.expected.values().any(|until| *until > now) {
            PERIOD_EXPECTING
        } else if held {
            PERIOD_HELD
        } else {
            PERIOD_IDLE
        };
        asked + period
    }
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
