//! The gRPC service `v1beta1.DevicePlugin`.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bridge_core::{AllocateRequest, Face, Listing, Offers, Patience, PodUid, Refusal, shown};
use futures::Stream;
use legacy_proto::deviceplugin::device_plugin_server::DevicePlugin;
use legacy_proto::deviceplugin::{
    AllocateRequest as AllocateCall, AllocateResponse, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty, HEALTHY,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::successor;
use super::{ListNow, TellContainer, wire};
use crate::arbiter::{self, AllocateReply, GrantedDevice, HOLD_LIMIT, Handle, LOOK_AGAIN};
use crate::metrics::{Answer, Metrics};

/// How long an `Allocate` waits for a unit that a process still uses. The kubelet admits one pod at a time and sets
/// no deadline, so all later pods of the node wait as well.
const WAIT_LIMIT: Duration = Duration::from_secs(1);

/// How often it asks again meanwhile: a process that ends is seen within this time.
const WAIT_STEP: Duration = Duration::from_millis(50);

/// Containers of one call. The kubelet asks for one at a time.
const CONTAINERS_LIMIT: usize = 64;

/// Ids in one list of a call. A node has less than 256 units, and the kubelet asks for ids that were listed to it.
const IDS_LIMIT: usize = 4096;

/// Why an `Allocate` gets no decision, besides a [`Refusal`].
const OWN_REASONS: [&str; 4] = ["NotSaved", "NotOwnerYet", "Stopping", "PodResourcesSilent"];

/// Ids that a log line repeats.
const IDS_SHOWN: usize = 16;

/// The counted face of one socket.
#[derive(Clone)]
pub(super) struct Service {
    /// The kubelet's device plugin folder.
    folder: Arc<Path>,
    handle: Handle,
    list_now: ListNow,
    tell: TellContainer,
    streams: Open,
    calls: Open,
    stop: CancellationToken,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

/// How many of something are open: `ListAndWatch` streams, of which the kubelet keeps exactly one for each
/// registration, or calls of a pod's admission.
#[derive(Debug, Clone)]
pub(super) struct Open(Arc<watch::Sender<usize>>);

impl Open {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<usize> {
        self.0.subscribe()
    }

    fn one(&self) -> OneOpen {
        self.0.send_modify(|open| *open += 1);
        OneOpen(self.clone())
    }
}

/// Counts until it is dropped, as tonic does when the kubelet goes away.
#[derive(Debug)]
struct OneOpen(Open);

impl Drop for OneOpen {
    fn drop(&mut self) {
        self.0.0.send_modify(|open| *open -= 1);
    }
}

/// Why an `Allocate` has no devices for an answer.
#[derive(Debug)]
enum NoDecision {
    /// What the kubelet is told.
    Failed(Status),
    /// The successor has to be asked.
    NotOwner(PodUid),
}

impl From<Status> for NoDecision {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

impl Service {
    pub(super) fn new(
        folder: &Path,
        handle: Handle,
        list_now: ListNow,
        tell: TellContainer,
        (streams, calls): (Open, Open),
        stop: CancellationToken,
    ) -> Self {
        let own = OWN_REASONS.into_iter().chain(Refusal::REASONS);
        handle.metrics().may_refuse(Face::Legacy, own);
        Self {
            folder: folder.into(),
            handle,
            list_now,
            tell,
            streams,
            calls,
            stop,
        }
    }

    fn metrics(&self) -> &Metrics {
        self.handle.metrics()
    }

    fn refuse(&self, refusal: &Refusal, ids: &[String]) -> Status {
        let ids = ids_shown(ids);
        self.metrics().refused(Face::Legacy, refusal.reason());
        tracing::info!(
            face = "legacy",
            reason = refusal.reason(),
            ?ids,
            refusal = %refusal,
            "refused an Allocate"
        );
        wire::refused(refusal)
    }

    /// Gives all containers of a call their devices.
    async fn decide(&self, call: &AllocateCall) -> Result<AllocateResponse, NoDecision> {
        let mut container_responses: Vec<ContainerAllocateResponse> = Vec::new();
        for container in &call.container_requests {
            let devices = self.allocate_container(&container.devices_ids).await?;
            container_responses.push(wire::answer(self.tell.edits(&devices)));
        }
        Ok(AllocateResponse {
            container_responses,
        })
    }

    /// Gives a container its devices, waiting as rule 5 says.
    async fn allocate_container(&self, texts: &[String]) -> Result<Vec<GrantedDevice>, NoDecision> {
        if texts.is_empty() {
            let why = "the kubelet asked for no device at all, so none was given";
            return Err(Status::invalid_argument(why).into());
        }
        if texts.len() > IDS_LIMIT {
            return Err(too_much("devices", texts.len(), IDS_LIMIT).into());
        }
        let ids = wire::device_ids(texts).map_err(|refusal| {
            // The pool, which writes its own refusals down, does not get to see it.
            let (who, why) = (who(&ids_shown(texts)), refusal.to_string());
            self.handle.note_refused(refusal.reason(), who, why);
            self.refuse(&refusal, texts)
        })?;
        let started = Instant::now();
        let mut listing: Option<Listing> = None;
        loop {
            let patience = if started.elapsed() < WAIT_LIMIT {
                Patience::Waits
            } else {
                Patience::LastCall
            };
            let request = AllocateRequest {
                ids: ids.clone(),
                patience,
            };
            let reply = self.handle.allocate(request, listing.clone()).await;
            let reply = reply.map_err(|error| match error {
                arbiter::Error::NotOwner(successor) => NoDecision::NotOwner(successor),
                error @ (arbiter::Error::NotSaved(_)
                | arbiter::Error::NoCdiFile(_)
                | arbiter::Error::Stopping) => undecided(&self.handle, &error, texts).into(),
            })?;
            match reply {
                AllocateReply::Granted(devices) => return Ok(devices),
                AllocateReply::Refused(refusal) => return Err(self.refuse(&refusal, texts).into()),
                AllocateReply::NeedsListing if listing.is_none() => {
                    listing = Some(
                        (self.list_now)(ids.clone())
                            .await
                            .map_err(|why| unlisted(&self.handle, &why, texts))?,
                    );
                }
                AllocateReply::Wait if patience == Patience::Waits => {
                    tokio::time::sleep(WAIT_STEP).await;
                }
                AllocateReply::NeedsListing | AllocateReply::Wait => {
                    tracing::error!(ids = ?texts, "the arbiter asks for what it was given");
                    let why = "gpu-bridge could not decide, which is a mistake in it: please report it with its log. \
                         Delete the pod, so that it is scheduled anew.";
                    return Err(Status::internal(why).into());
                }
            }
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(wire::options()))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = Lists {
            offers: self.handle.offers(),
            successor: self.handle.successor(),
            sent: None,
            stop: self.stop.clone(),
            _open: self.streams.one(),
        };
        let stream = futures::stream::unfold(lists, |mut lists| async move {
            let devices = lists.next().await?;
            Some((Ok(ListAndWatchResponse { devices }), lists))
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let _call = self.calls.one();
        self.handle.announce_allocate();
        let offers = Arc::clone(&self.handle.offers().borrow());
        let containers = request.into_inner().container_requests;
        let container_responses = containers
            .into_iter()
            .take(CONTAINERS_LIMIT)
            .map(|container| ContainerPreferredAllocationResponse {
                device_i_ds: offers.preferred(
                    up_to_limit(&container.available_device_i_ds),
                    up_to_limit(&container.must_include_device_i_ds),
                    usize::try_from(container.allocation_size).unwrap_or(0),
                ),
            })
            .collect();
        Ok(Response::new(PreferredAllocationResponse {
            container_responses,
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateCall>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let _call = self.calls.one();
        let _open = self.handle.open_allocate();
        let _timed = self.metrics().timed(Answer::Allocate);
        let call = request.into_inner();
        if call.container_requests.is_empty() {
            // An empty answer would make the kubelet leak what it has reserved.
            return Err(Status::invalid_argument(
                "the kubelet asked for no container at all, so nothing was given",
            ));
        }
        let containers = call.container_requests.len();
        if containers > CONTAINERS_LIMIT {
            return Err(too_much("containers", containers, CONTAINERS_LIMIT));
        }
        let mut turned_away = None;
        loop {
            let successor = match self.decide(&call).await {
                Ok(answer) => return Ok(Response::new(answer)),
                Err(NoDecision::Failed(status)) => return Err(status),
                Err(NoDecision::NotOwner(successor)) => successor,
            };
            let since = *turned_away.get_or_insert_with(tokio::time::Instant::now);
            let until = since + HOLD_LIMIT;
            // The same question gets the same answer, so what this daemon gave before is given again.
            let asked = successor::allocate(&self.folder, &successor, &call, until).await;
            if let Some(answer) = asked {
                return answer.map(Response::new);
            }
            if since.elapsed() >= HOLD_LIMIT {
                let ids: Vec<String> = call
                    .container_requests
                    .iter()
                    .flat_map(|container| container.devices_ids.iter().cloned())
                    .collect();
                let error = arbiter::Error::NotOwner(successor);
                return Err(undecided(&self.handle, &error, &ids));
            }
            // Without a successor after all, the next question is decided here.
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// What one `ListAndWatch` stream says.
#[derive(Debug)]
struct Lists {
    offers: watch::Receiver<Arc<Offers>>,
    successor: watch::Receiver<Option<PodUid>>,
    sent: Option<Vec<Device>>,
    stop: CancellationToken,
    _open: OneOpen,
}

impl Lists {
    /// The list at once, then each one that differs from what was sent; `None` when serving ends. While a successor
    /// has the ledger nothing is said, and the stream stays: what a kubelet hears last from any socket is what it
    /// believes, and the end of the only stream makes all devices unhealthy.
    async fn next(&mut self) -> Option<Vec<Device>> {
        loop {
            let has_successor = self.successor.borrow_and_update().is_some();
            if has_successor {
                // The kubelet may hear another list meanwhile.
                self.sent = None;
                tokio::select! {
                    () = self.stop.cancelled() => return None,
                    changed = self.successor.changed() => changed.ok()?,
                }
                continue;
            }
            let devices = wire::devices(&self.offers.borrow_and_update());
            if self.sent.as_ref() != Some(&devices) {
                let healthy = devices.iter().filter(|it| it.health == HEALTHY).count();
                tracing::debug!(
                    devices = devices.len(),
                    healthy,
                    "sending the list of devices"
                );
                self.sent = Some(devices.clone());
                return Some(devices);
            }
            tokio::select! {
                () = self.stop.cancelled() => return None,
                changed = self.offers.changed() => changed.ok()?,
                Ok(()) = self.successor.changed() => {}
            }
        }
    }
}

fn too_much(what: &str, count: usize, limit: usize) -> Status {
    Status::invalid_argument(format!(
        "the call names {count} {what}, and no kubelet asks for more than {limit}, so nothing was given"
    ))
}

/// What is beyond the limit is not preferred, which is no error.
fn up_to_limit(ids: &[String]) -> &[String] {
    ids.get(..IDS_LIMIT).unwrap_or(ids)
}

/// Ids as a log line repeats them.
fn ids_shown(ids: &[String]) -> Vec<String> {
    ids.iter().take(IDS_SHOWN).map(|id| shown(id)).collect()
}

/// Ids as the history has them.
fn who(ids: &[String]) -> String {
    format!("ids {}", ids.join(", "))
}

fn undecided(handle: &Handle, error: &arbiter::Error, ids: &[String]) -> Status {
    let ids = ids_shown(ids);
    let reason = error.reason();
    handle.metrics().refused(Face::Legacy, reason);
    handle.note_refused(reason, who(&ids), format!("{reason}: {error}"));
    tracing::warn!(face = "legacy", reason, %error, ?ids, "could not decide an Allocate");
    wire::undecided(error)
}

/// pod-resources did not answer, so it can't be told whether the pod that had the id is still there.
fn unlisted(handle: &Handle, why: &str, ids: &[String]) -> Status {
    let ids = ids_shown(ids);
    handle.metrics().refused(Face::Legacy, "PodResourcesSilent");
    let told = format!("PodResourcesSilent: {why}");
    handle.note_refused("PodResourcesSilent", who(&ids), told);
    tracing::warn!(
        face = "legacy",
        reason = "PodResourcesSilent",
        error = why,
        ?ids,
        "could not decide an Allocate"
    );
    Status::unavailable(format!(
        "PodResourcesSilent: a pod had this GPU before, and whether it still has it can't be told: {why}. \
         The kubelet does not try this pod again: delete it, so that it is scheduled anew."
    ))
}
