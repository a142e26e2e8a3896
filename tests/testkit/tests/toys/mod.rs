//! A device plugin and a DRA driver that do what a test tells them, and note what they were asked.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several test files, each of which uses its own part"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dra_proto::registration::registration_server::{Registration, RegistrationServer};
use dra_proto::registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use dra_proto::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use dra_proto::v1::{
    Device as DraDevice, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use futures::{Stream, StreamExt as _};
use legacy_proto::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use legacy_proto::deviceplugin::registration_client::RegistrationClient;
use legacy_proto::deviceplugin::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse, Device,
    DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    RegisterRequest, TopologyInfo, UNHEALTHY, VERSION,
};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tower::ServiceBuilder;

/// Far more than anything here takes, even on a busy machine.
pub const SOON: Duration = Duration::from_secs(20);
/// The resource of the toy plugin.
pub const GPU: &str = "nvidia.com/gpu";
/// The name of the toy driver.
pub const DRIVER: &str = "gpu.nvidia.com";

/// What the toy plugin does and was asked; shared by all its lives.
#[derive(Debug)]
pub struct PluginState {
    /// What ListAndWatch sends.
    pub devices: watch::Sender<Vec<Device>>,
    /// The ids of each Allocate.
    pub allocates: Mutex<Vec<Vec<String>>>,
    /// Each container's part of each GetPreferredAllocation.
    pub questions: Mutex<Vec<ContainerPreferredAllocationRequest>>,
    /// What it prefers; empty: it does not offer to choose.
    pub prefers: Mutex<Vec<String>>,
    /// If set, Allocate is refused so.
    pub refusal: Mutex<Option<Status>>,
}

/// A healthy device on a NUMA node.
pub fn device(id: &str, node: i64) -> Device {
    Device {
        id: id.to_owned(),
        health: HEALTHY.to_owned(),
        topology: Some(TopologyInfo {
            nodes: vec![NumaNode { id: node }],
        }),
    }
}

impl PluginState {
    pub fn new(ids: &[&str]) -> Arc<Self> {
        let devices = ids.iter().map(|id| device(id, 0)).collect();
        Arc::new(Self {
            devices: watch::Sender::new(devices),
            allocates: Mutex::default(),
            questions: Mutex::default(),
            prefers: Mutex::default(),
            refusal: Mutex::default(),
        })
    }

    pub fn set_unhealthy(&self, id: &str) {
        self.devices.send_modify(|devices| {
            let device = devices.iter_mut().find(|device| device.id == id);
            device.expect("a known id").health = UNHEALTHY.to_owned();
        });
    }

    pub fn allocates(&self) -> Vec<Vec<String>> {
        self.allocates.lock().unwrap().clone()
    }
}

struct PluginService(Arc<PluginState>, CancellationToken);

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: false,
            get_preferred_allocation_available: !self.0.prefers.lock().unwrap().is_empty(),
        }))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.0.devices.subscribe())
            .map(|devices| Ok(ListAndWatchResponse { devices }))
            .take_until(self.1.clone().cancelled_owned());
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let mut answer = PreferredAllocationResponse::default();
        for it in request.into_inner().container_requests {
            self.0.questions.lock().unwrap().push(it);
            answer
                .container_responses
                .push(ContainerPreferredAllocationResponse {
                    device_i_ds: self.0.prefers.lock().unwrap().clone(),
                });
        }
        Ok(Response::new(answer))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        if let Some(status) = self.0.refusal.lock().unwrap().clone() {
            return Err(status);
        }
        let mut answer = AllocateResponse::default();
        for mut it in request.into_inner().container_requests {
            it.devices_ids.sort();
            let cdi_devices = it.devices_ids.iter().map(|id| CdiDevice {
                name: format!("nvidia.com/gpu={id}"),
            });
            answer.container_responses.push(ContainerAllocateResponse {
                cdi_devices: cdi_devices.collect(),
                ..ContainerAllocateResponse::default()
            });
            self.0.allocates.lock().unwrap().push(it.devices_ids);
        }
        Ok(Response::new(answer))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }
}

/// A running toy plugin. Its socket stays when it is dropped, as after a kill.
pub struct Plugin {
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    dir: PathBuf,
}

impl Plugin {
    /// Serves on `device-plugins/toy.sock`.
    pub fn serve(root: &Path, state: &Arc<PluginState>) -> Self {
        let dir = root.join("device-plugins");
        let socket = dir.join("toy.sock");
        let _ = std::fs::remove_file(&socket);
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        let stop = CancellationToken::new();
        let service = DevicePluginServer::new(PluginService(Arc::clone(state), stop.clone()));
        let stopped = stop.clone().cancelled_owned();
        let task = tokio::spawn(async move {
            let server = Server::builder().serve_with_incoming_shutdown(service, incoming, stopped);
            server.await.unwrap();
        });
        Self { stop, task, dir }
    }

    pub async fn register(&self) -> Result<(), Status> {
        self.register_as(VERSION, GPU).await
    }

    pub async fn register_as(&self, version: &str, resource: &str) -> Result<(), Status> {
        let kubelet = testkit::dial::localhost(&self.dir.join("kubelet.sock"));
        let request = RegisterRequest {
            version: version.to_owned(),
            endpoint: "toy.sock".to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        RegistrationClient::new(kubelet).register(request).await?;
        Ok(())
    }

    pub async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// What the toy driver does and was asked.
#[derive(Debug, Default)]
pub struct DriverState {
    /// The claims' UIDs of each NodePrepareResources.
    pub prepares: Mutex<Vec<Vec<String>>>,
    /// The same for NodeUnprepareResources.
    pub unprepares: Mutex<Vec<Vec<String>>>,
    /// Claims that it can't prepare, and why.
    pub broken: Mutex<BTreeMap<String, String>>,
    /// What the kubelet said of the registration.
    pub statuses: Mutex<Vec<RegistrationStatus>>,
    /// `:authority` of each call to the registration socket.
    pub authorities: Mutex<Vec<String>>,
    /// `supported_versions`.
    pub versions: Mutex<Vec<String>>,
}

impl DriverState {
    pub fn new(versions: &[&str]) -> Arc<Self> {
        let state = Self::default();
        *state.versions.lock().unwrap() = versions.iter().map(|&it| it.to_owned()).collect();
        Arc::new(state)
    }

    pub fn prepares(&self) -> Vec<Vec<String>> {
        self.prepares.lock().unwrap().clone()
    }

    pub fn unprepares(&self) -> Vec<Vec<String>> {
        self.unprepares.lock().unwrap().clone()
    }
}

struct DriverService(Arc<DriverState>);

#[tonic::async_trait]
impl DraPlugin for DriverService {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let uids: Vec<String> = claims.iter().map(|it| it.uid.clone()).collect();
        let answers = uids.iter().map(|uid| {
            let broken = self.0.broken.lock().unwrap().get(uid).cloned();
            let answer = NodePrepareResourceResponse {
                devices: vec![DraDevice {
                    request_names: vec!["gpu".to_owned()],
                    pool_name: "node-1".to_owned(),
                    device_name: "gpu-0".to_owned(),
                    cdi_device_ids: vec![format!("k8s.gpu.nvidia.com/claim={uid}")],
                    share_id: None,
                }],
                error: broken.unwrap_or_default(),
            };
            (uid.clone(), answer)
        });
        let claims = answers.collect();
        self.0.prepares.lock().unwrap().push(uids);
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let uids: Vec<String> = claims.iter().map(|it| it.uid.clone()).collect();
        let answers = uids
            .iter()
            .map(|uid| (uid.clone(), NodeUnprepareResourceResponse::default()));
        let claims = answers.collect();
        self.0.unprepares.lock().unwrap().push(uids);
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

/// The same driver, by the older service.
struct OldDriverService(DriverService);

#[tonic::async_trait]
impl dra_proto::v1beta1::dra_plugin_server::DraPlugin for OldDriverService {
    async fn node_prepare_resources(
        &self,
        request: Request<dra_proto::v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_proto::v1beta1::NodePrepareResourcesResponse>, Status> {
        use prost::Message as _;
        // The messages are the same on the wire.
        let bytes = request.into_inner().encode_to_vec();
        let request = NodePrepareResourcesRequest::decode(bytes.as_slice()).unwrap();
        let answer = self.0.node_prepare_resources(Request::new(request)).await?;
        let bytes = answer.into_inner().encode_to_vec();
        Ok(Response::new(
            prost::Message::decode(bytes.as_slice()).unwrap(),
        ))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra_proto::v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_proto::v1beta1::NodeUnprepareResourcesResponse>, Status> {
        use prost::Message as _;
        let bytes = request.into_inner().encode_to_vec();
        let request = NodeUnprepareResourcesRequest::decode(bytes.as_slice()).unwrap();
        let answer = self
            .0
            .node_unprepare_resources(Request::new(request))
            .await?;
        let bytes = answer.into_inner().encode_to_vec();
        Ok(Response::new(
            prost::Message::decode(bytes.as_slice()).unwrap(),
        ))
    }
}

struct RegistrarService(Arc<DriverState>, PathBuf);

#[tonic::async_trait]
impl Registration for RegistrarService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.1.to_string_lossy().into_owned(),
            supported_versions: self.0.versions.lock().unwrap().clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.statuses.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// A running toy driver.
pub struct DraDriver {
    stop: CancellationToken,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    registration: PathBuf,
}

impl DraDriver {
    /// Serves on `plugins/toy-dra.sock` and registers by `plugins_registry/<name>`.
    pub fn serve(root: &Path, state: &Arc<DriverState>, name: &str) -> Self {
        let endpoint = root.join("plugins/toy-dra.sock");
        let registration = root.join("plugins_registry").join(name);
        for socket in [&endpoint, &registration] {
            let _ = std::fs::remove_file(socket);
        }
        let stop = CancellationToken::new();
        let old = state.versions.lock().unwrap()[0] == dra_proto::v1beta1::SERVICE;
        let service = DriverService(Arc::clone(state));
        let incoming = UnixListenerStream::new(UnixListener::bind(&endpoint).unwrap());
        let stopped = stop.clone().cancelled_owned();
        let serving = tokio::spawn(async move {
            let served = if old {
                let service = OldDriverService(service);
                let service = dra_proto::v1beta1::dra_plugin_server::DraPluginServer::new(service);
                Server::builder()
                    .serve_with_incoming_shutdown(service, incoming, stopped)
                    .await
            } else {
                let service = DraPluginServer::new(service);
                Server::builder()
                    .serve_with_incoming_shutdown(service, incoming, stopped)
                    .await
            };
            served.unwrap();
        });
        let noted = Arc::clone(state);
        let registrar = ServiceBuilder::new()
            .map_request(move |request: http::Request<tonic::body::Body>| {
                let authority = request.uri().authority().map(ToString::to_string);
                let mut authorities = noted.authorities.lock().unwrap();
                authorities.push(authority.unwrap_or_default());
                request
            })
            .service(RegistrationServer::new(RegistrarService(
                Arc::clone(state),
                endpoint,
            )));
        let incoming = UnixListenerStream::new(UnixListener::bind(&registration).unwrap());
        let stopped = stop.clone().cancelled_owned();
        let registering = tokio::spawn(async move {
            let server =
                Server::builder().serve_with_incoming_shutdown(registrar, incoming, stopped);
            server.await.unwrap();
        });
        Self {
            stop,
            tasks: vec![serving, registering],
            registration,
        }
    }

    /// Ends, and takes its registration socket away.
    pub async fn end(self) {
        std::fs::remove_file(&self.registration).unwrap();
        self.stop.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}
