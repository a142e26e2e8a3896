//! What the kubelet serves to others: pod-resources v1 and the Pods API v1alpha1.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/apis/podresources/server_v1.go`, `pkg/kubelet/apis/pods/server.go`
//! `pkg/kubelet/apis/grpc/ratelimit.go` and `pkg/kubelet/cm/container_manager*.go`.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::{Stream, StreamExt as _, stream};
use legacy_proto::deviceplugin;
use legacy_proto::podresources::pod_resources_lister_server::PodResourcesLister;
use legacy_proto::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource,
    ContainerDevices, ContainerResources, DynamicResource, GetPodResourcesRequest,
    GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse, NumaNode,
    PodResources, TopologyInfo,
};
use legacy_proto::pods::pods_server::Pods as PodsApi;
use legacy_proto::pods::{
    GetPodRequest, GetPodResponse, ListPodsRequest, ListPodsResponse, WatchPodsEvent,
    WatchPodsRequest,
};
use prost::Message as _;
use tokio_stream::wrappers::BroadcastStream;
use tonic::{Request, Response, Status};

use super::claims::ClaimInfo;
use super::pod::{ContainerKind, Entry};
use super::session::Session;
use crate::lock;

/// Calls of pod-resources that come at once and are all served.
const BURST: f64 = 10.0;
/// Calls a second beyond those.
const CALLS_PER_SECOND: f64 = 100.0;

/// Pod-resources of one kubelet process.
#[derive(Debug)]
pub(crate) struct PodResourcesService {
    session: Arc<Session>,
    /// Calls that may come now, and when that was so.
    limit: Mutex<(f64, Instant)>,
}

impl PodResourcesService {
    pub(crate) fn new(session: Arc<Session>) -> Self {
        Self {
            session,
            limit: Mutex::new((BURST, Instant::now())),
        }
    }

    fn check_limit(&self) -> Result<(), Status> {
        let mut limit = lock(&self.limit);
        let (left, since) = *limit;
        let now = Instant::now();
        let grown = (now - since).as_secs_f64() * CALLS_PER_SECOND;
        let left = (left + grown).min(BURST);
        let is_within = left >= 1.0;
        *limit = (if is_within { left - 1.0 } else { left }, now);
        if is_within {
            Ok(())
        } else {
            Err(Status::resource_exhausted("rejected by rate limit"))
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.check_limit()?;
        let active = self.session.pods.active();
        // List frees what inactive pods have; Get does not.
        self.session.free_inactive();
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: active.iter().map(|it| self.pod(it)).collect(),
        }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.check_limit()?;
        let GetPodResourcesRequest {
            pod_name,
            pod_namespace,
        } = request.into_inner();
        let active = self.session.pods.active();
        let found = active
            .iter()
            .find(|it| it.pod.name == pod_name && it.pod.namespace == pod_namespace);
        let found = found.ok_or_else(|| {
            Status::unknown(format!(
                "pod {pod_name} in namespace {pod_namespace} not found"
            ))
        })?;
        Ok(Response::new(GetPodResourcesResponse {
            pod_resources: Some(self.pod(found)),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.check_limit()?;
        let book = lock(&self.session.devices);
        let devices = book
            .allocatable()
            .into_iter()
            .flat_map(|(resource, device)| container_devices(resource, device));
        Ok(Response::new(AllocatableResourcesResponse {
            devices: devices.collect(),
            ..AllocatableResourcesResponse::default()
        }))
    }
}

impl PodResourcesService {
    fn pod(&self, entry: &Entry) -> PodResources {
        // Ordinary init containers are not shown.
        let shown = entry.pod.containers.iter().filter(|it| match it.kind {
            ContainerKind::Init => false,
            ContainerKind::Sidecar | ContainerKind::App => true,
        });
        let containers = shown.map(|container| {
            let has = lock(&self.session.devices).container(&entry.pod.uid, &container.name);
            let devices = has.iter().flat_map(|(resource, grant)| {
                grant.ids.iter().flat_map(move |(node, ids)| {
                    ids.iter().map(move |id| ContainerDevices {
                        resource_name: resource.clone(),
                        device_ids: vec![id.clone()],
                        topology: (*node >= 0).then(|| topology(*node)),
                    })
                })
            });
            ContainerResources {
                name: container.name.clone(),
                devices: devices.collect(),
                dynamic_resources: self.claims(entry),
                ..ContainerResources::default()
            }
        });
        PodResources {
            name: entry.pod.name.clone(),
            namespace: entry.pod.namespace.clone(),
            containers: containers.collect(),
            ..PodResources::default()
        }
    }

    /// All claims of the pod. If one is not known (yet), the kubelet shows none of them.
    fn claims(&self, entry: &Entry) -> Vec<DynamicResource> {
        let infos = entry
            .claims
            .iter()
            .map(|claim| self.session.claims.info(&claim.namespace, &claim.name));
        let infos: Option<Vec<ClaimInfo>> = infos.collect();
        infos
            .unwrap_or_default()
            .iter()
            .map(dynamic_resource)
            .collect()
    }
}

fn dynamic_resource(info: &ClaimInfo) -> DynamicResource {
    let mut claim_resources = Vec::new();
    for (driver, devices) in &info.drivers {
        // As upstream has it, the ids of a driver's earlier devices are repeated with the later ones.
        let mut cdi_devices = Vec::new();
        for device in devices {
            let names = device.cdi_ids.iter().cloned();
            cdi_devices.extend(names.map(|name| CdiDevice { name }));
            claim_resources.push(ClaimResource {
                cdi_devices: cdi_devices.clone(),
                driver_name: driver.clone(),
                pool_name: device.pool.clone(),
                device_name: device.device.clone(),
                share_id: device.share_id.clone(),
            });
        }
    }
    DynamicResource {
        claim_name: info.name.clone(),
        claim_namespace: info.namespace.clone(),
        claim_resources,
    }
}

/// One entry per NUMA node of a device, or one without topology.
fn container_devices(resource: &str, device: &deviceplugin::Device) -> Vec<ContainerDevices> {
    let entry = |topology| ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![device.id.clone()],
        topology,
    };
    match &device.topology {
        None => vec![entry(None)],
        Some(nodes) => nodes
            .nodes
            .iter()
            .map(|node| entry(Some(topology(node.id))))
            .collect(),
    }
}

fn topology(node: i64) -> TopologyInfo {
    TopologyInfo {
        nodes: vec![NumaNode { id: node }],
    }
}

/// The Pods API of one kubelet process.
#[derive(Debug)]
pub(crate) struct PodsService(pub(crate) Arc<Session>);

impl PodsService {
    fn ready(&self) -> Result<(), Status> {
        if self.0.pods.sources_are_ready() {
            Ok(())
        } else {
            Err(Status::failed_precondition("Kubelet is initializing"))
        }
    }
}

#[tonic::async_trait]
impl PodsApi for PodsService {
    type WatchPodsStream = Pin<Box<dyn Stream<Item = Result<WatchPodsEvent, Status>> + Send>>;

    async fn watch_pods(
        &self,
        _: Request<WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        self.ready()?;
        let (initial, after) = self.0.pods.watch();
        let after = BroadcastStream::new(after)
            .map(|event| event.map_err(|_| Status::unavailable("the watcher was too slow")));
        let stop = self.0.stop.clone();
        let events = stream::iter(initial.into_iter().map(Ok))
            .chain(after)
            .take_until(stop.cancelled_owned());
        Ok(Response::new(Box::pin(events)))
    }

    async fn list_pods(
        &self,
        _: Request<ListPodsRequest>,
    ) -> Result<Response<ListPodsResponse>, Status> {
        self.ready()?;
        let pods = self.0.pods.all();
        Ok(Response::new(ListPodsResponse {
            pods: pods
                .iter()
                .map(|it| it.to_proto().encode_to_vec())
                .collect(),
        }))
    }

    async fn get_pod(
        &self,
        request: Request<GetPodRequest>,
    ) -> Result<Response<GetPodResponse>, Status> {
        self.ready()?;
        let uid = request.into_inner().pod_uid;
        let found = self.0.pods.find(&uid);
        let found =
            found.ok_or_else(|| Status::not_found(format!("pod with UID {uid} not found")))?;
        Ok(Response::new(GetPodResponse {
            pod: found.to_proto().encode_to_vec(),
        }))
    }
}
