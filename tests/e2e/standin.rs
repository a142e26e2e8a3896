//! How a node runs both APIs without a bridge: a device plugin and a DRA driver that know nothing of each other.
//!
//! Each offers every GPU and gives out what it is asked for. They are here to be compared with, and to show that the
//! record's judge sees a double use when there is one. Both end with [`StandIns::end`], and at the latest with the
//! value. They come back as NVIDIA's do: after a restart of their own, and to a new kubelet as soon as its socket is
//! there.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dra_proto::registration::registration_server::{Registration, RegistrationServer};
use dra_proto::registration::{
    DIR, DRA_PLUGIN, InfoRequest, PLUGINS_DIR, PluginInfo, RegistrationStatus,
    RegistrationStatusResponse,
};
use dra_proto::v1;
use dra_proto::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use futures::stream::{self, Stream, StreamExt as _};
use gpu_bridge::uds::{self, Identity, Incoming};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use legacy_proto::deviceplugin as v1beta1;
use legacy_proto::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use legacy_proto::deviceplugin::registration_client::RegistrationClient;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::world::{World, tick};

const NODE: &str = "node-0";
const DRIVER: &str = "gpu.nvidia.com";
const RESOURCE: &str = "nvidia.com/gpu";
/// The kinds of CDI devices are those of NVIDIA's two daemons.
const COUNTED_KIND: &str = "k8s.device-plugin.nvidia.com/gpu";
const CLAIM_KIND: &str = "k8s.gpu.nvidia.com/claim";
/// The kubelet looks at its folders once a second, and writes its node's status every ten.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// How often it is looked whether another kubelet is there: sooner than any of its pods can come.
const LOOK: Duration = Duration::from_millis(20);

/// Both daemons.
pub struct StandIns {
    site: Site,
    /// `None` while they come back.
    serving: Option<Serving>,
    coming: Option<JoinHandle<Serving>>,
}

/// Where both of them are, and stay over a restart.
#[derive(Clone)]
struct Site {
    gpus: Arc<[Gpu]>,
    cdi: CdiFolder,
    /// The kubelet's folder.
    kubelet: PathBuf,
    client: Client,
}

/// Both daemons, serving.
struct Serving {
    servers: JoinSet<()>,
    stop: CancellationToken,
    site: Site,
}

/// A GPU as both of them see it.
struct Gpu {
    minor: u32,
    uuid: String,
}

impl Gpu {
    fn device(&self) -> String {
        format!("gpu-{}", self.minor)
    }
}

impl StandIns {
    /// Starts both, and waits until the scheduler can place pods of either kind.
    pub async fn start(world: &World) -> Self {
        let stand_ins = Self::serve_on(world).await;
        let nodes: Api<Node> = Api::all(world.client.clone());
        let all = stand_ins.site.gpus.len().to_string();
        let counted = async |_: &World| {
            let node = nodes.get(NODE).await.expect("the node exists");
            let allocatable = node.status.and_then(|status| status.allocatable);
            allocatable.is_some_and(|allocatable| {
                allocatable
                    .get(RESOURCE)
                    .is_some_and(|count| count.0 == all)
            })
        };
        world
            .wait_for("the node counts every GPU", READY_LIMIT, counted)
            .await;
        stand_ins
    }

    /// Starts both beside whatever else serves the node.
    pub async fn serve_on(world: &World) -> Self {
        let gpus = world.node.gpus();
        let gpus = gpus.into_iter().map(|gpu| Gpu {
            minor: gpu.minor,
            uuid: gpu.uuid,
        });
        let site = Site {
            gpus: gpus.collect(),
            cdi: CdiFolder(world.state().join("cdi")),
            kubelet: world.state().join("kubelet"),
            client: world.client.clone(),
        };
        Self {
            serving: Some(Serving::start(site.clone()).await),
            coming: None,
            site,
        }
    }

    /// Ends both, as SIGTERM does: connections close, and the sockets go.
    pub async fn end(mut self) {
        while !self.are_back().await {
            tick().await;
        }
        if let Some(serving) = self.serving {
            serving.end().await;
        }
    }

    /// Has both end and come back, and does not wait. The kubelet sees what it sees of a kill: its streams end.
    pub fn restart(&mut self) {
        self.come_back(async {});
    }

    /// Has both come to the kubelet that follows the one that runs, and does not wait.
    pub fn follow_to_next_kubelet(&mut self) {
        let socket = self.site.device_plugins().join(v1beta1::KUBELET_SOCKET);
        let former = Identity::of(&socket);
        self.come_back(async move {
            while Identity::of(&socket).is_none_or(|now| Some(now) == former) {
                tokio::time::sleep(LOOK).await;
            }
        });
    }

    fn come_back(&mut self, when: impl Future<Output = ()> + Send + 'static) {
        let serving = self.serving.take().expect("they serve");
        let site = self.site.clone();
        self.coming = Some(tokio::spawn(async move {
            when.await;
            serving.end().await;
            Serving::start(site).await
        }));
    }

    /// Whether both serve, after one of these.
    pub async fn are_back(&mut self) -> bool {
        if let Some(coming) = self.coming.take_if(|coming| coming.is_finished()) {
            self.serving = Some(coming.await.expect("the stand-ins come back"));
        }
        self.serving.is_some()
    }
}

impl Site {
    fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }
}

impl Serving {
    /// Starts both, and waits until the kubelet knows them.
    async fn start(site: Site) -> Self {
        let mut serving = Self {
            servers: JoinSet::new(),
            stop: CancellationToken::new(),
            site,
        };
        serving.start_device_plugin().await;
        serving.start_dra_driver().await;
        serving.publish().await;
        serving
    }

    async fn end(mut self) {
        self.stop.cancel();
        while self.servers.join_next().await.is_some() {}
    }

    /// Makes a socket and serves on it.
    fn serve<F>(
        &mut self,
        socket: &Path,
        server: impl FnOnce(Incoming, WaitForCancellationFutureOwned) -> F,
    ) where
        F: Future<Output = Result<(), tonic::transport::Error>> + Send + 'static,
    {
        let (incoming, file) = uds::bind(socket).expect("a socket").into_parts();
        let serving = server(incoming, self.stop.clone().cancelled_owned());
        self.servers.spawn(async move {
            let _file = file;
            serving.await.expect("a socket is served until the end");
        });
    }

    async fn start_device_plugin(&mut self) {
        const SOCKET: &str = "nvidia-gpu.sock";
        let site = &self.site;
        let nodes = site.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.minor));
        site.cdi.write(COUNTED_KIND, "", nodes);
        let folder = site.device_plugins();
        let service = DevicePluginServer::new(Counted {
            gpus: Arc::clone(&site.gpus),
            stop: self.stop.clone(),
        });
        self.serve(&folder.join(SOCKET), |incoming, stop| {
            Server::builder().serve_with_incoming_shutdown(service, incoming, stop)
        });
        let request = v1beta1::RegisterRequest {
            version: v1beta1::VERSION.to_owned(),
            endpoint: SOCKET.to_owned(),
            resource_name: RESOURCE.to_owned(),
            options: Some(v1beta1::DevicePluginOptions::default()),
        };
        let kubelet = uds::channel(&folder.join(v1beta1::KUBELET_SOCKET));
        let mut client = RegistrationClient::new(kubelet);
        let deadline = Instant::now() + READY_LIMIT;
        // A kubelet that has not noticed the end of the former stream says no to the same socket.
        while let Err(error) = client.register(request.clone()).await {
            assert!(
                Instant::now() < deadline,
                "the kubelet does not register the device plugin: {error}"
            );
            tick().await;
        }
    }

    async fn start_dra_driver(&mut self) {
        let site = self.site.clone();
        let folder = site.kubelet.join(PLUGINS_DIR).join(DRIVER);
        fs::create_dir_all(&folder).expect("the driver's folder");
        let endpoint = folder.join("dra-standin.sock");
        let service = DraPluginServer::new(Claims {
            client: site.client,
            gpus: site.gpus,
            cdi: site.cdi,
        });
        self.serve(&endpoint, |incoming, stop| {
            Server::builder().serve_with_incoming_shutdown(service, incoming, stop)
        });
        let (told, mut answer) = watch::channel(None);
        let registration = RegistrationServer::new(Registrar { endpoint, told });
        let socket = site
            .kubelet
            .join(DIR)
            .join(uds::registration_socket_name("standin", None));
        self.serve(&socket, |incoming, stop| {
            Server::builder().serve_with_incoming_shutdown(registration, incoming, stop)
        });
        // A kubelet that has not noticed the end of the former one says no, and comes back.
        let is_registered = |told: &Option<RegistrationStatus>| {
            let status = told.as_ref();
            status.is_some_and(|status| status.plugin_registered)
        };
        let registered = tokio::time::timeout(READY_LIMIT, answer.wait_for(is_registered)).await;
        let in_time = registered.is_ok_and(|told| told.is_ok());
        assert!(
            in_time,
            "the kubelet does not register the DRA driver: {:?}",
            answer.borrow()
        );
    }

    /// Writes the slice with all devices: after the registration, for a kubelet removes slices of drivers that it
    /// does not know.
    async fn publish(&self) {
        let devices: Vec<_> = self
            .site
            .gpus
            .iter()
            .map(|gpu| {
                json!({"name": gpu.device(), "attributes": {
                    "type": {"string": "gpu"}, "uuid": {"string": gpu.uuid}}})
            })
            .collect();
        let slice: ResourceSlice = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": {"name": format!("{NODE}-{DRIVER}")},
            "spec": {"driver": DRIVER, "nodeName": NODE, "devices": devices,
                "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1}},
        }))
        .expect("a slice");
        let api: Api<ResourceSlice> = Api::all(self.site.client.clone());
        // Another driver may have made it its own.
        let params = PatchParams::apply("standin").force();
        let name = slice.name_any();
        api.patch(&name, &params, &Patch::Apply(&slice))
            .await
            .expect("the slice is written");
    }
}

/// The device plugin.
struct Counted {
    gpus: Arc<[Gpu]>,
    stop: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for Counted {
    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        Ok(Response::new(v1beta1::DevicePluginOptions::default()))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<v1beta1::ListAndWatchResponse, Status>> + Send>>;

    /// Every GPU, healthy, until the end.
    async fn list_and_watch(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |gpu: &Gpu| v1beta1::Device {
            id: gpu.uuid.clone(),
            health: v1beta1::HEALTHY.to_owned(),
            topology: None,
        };
        let list = v1beta1::ListAndWatchResponse {
            devices: self.gpus.iter().map(device).collect(),
        };
        let stream = stream::iter([Ok(list)])
            .chain(stream::pending())
            .take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }

    /// Grants what is asked for.
    async fn allocate(
        &self,
        request: Request<v1beta1::AllocateRequest>,
    ) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        let grant =
            |container: v1beta1::ContainerAllocateRequest| v1beta1::ContainerAllocateResponse {
                cdi_devices: container
                    .devices_ids
                    .iter()
                    .map(|id| v1beta1::CdiDevice {
                        name: format!("{COUNTED_KIND}={id}"),
                    })
                    .collect(),
                ..v1beta1::ContainerAllocateResponse::default()
            };
        let containers = request.into_inner().container_requests;
        Ok(Response::new(v1beta1::AllocateResponse {
            container_responses: containers.into_iter().map(grant).collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }
}

/// The DRA driver.
struct Claims {
    client: Client,
    gpus: Arc<[Gpu]>,
    cdi: CdiFolder,
}

impl Claims {
    /// Hands out what the claim's allocation names.
    async fn prepare(&self, asked: &v1::Claim) -> Result<Vec<v1::Device>, String> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &asked.namespace);
        let claim = claims
            .get(&asked.name)
            .await
            .map_err(|error| format!("could not read claim {}: {error}", asked.name))?;
        if claim.uid().as_ref() != Some(&asked.uid) {
            return Err(format!("claim {} is another one by now", asked.name));
        }
        let allocation = claim.status.and_then(|status| status.allocation);
        let results = allocation
            .and_then(|allocation| allocation.devices?.results)
            .unwrap_or_default();
        let mut devices = Vec::new();
        let mut nodes = Vec::new();
        for result in results.into_iter().filter(|it| it.driver == DRIVER) {
            let gpu = self
                .gpus
                .iter()
                .find(|gpu| gpu.device() == result.device)
                .ok_or_else(|| format!("there is no device {}", result.device))?;
            let name = format!("{}-{}", asked.uid, result.device);
            devices.push(v1::Device {
                request_names: vec![result.request],
                pool_name: result.pool,
                device_name: result.device,
                cdi_device_ids: vec![format!("{CLAIM_KIND}={name}")],
                share_id: None,
            });
            nodes.push((name, gpu.minor));
        }
        self.cdi
            .write(CLAIM_KIND, &format!("_{}", asked.uid), nodes);
        Ok(devices)
    }
}

#[tonic::async_trait]
impl DraPlugin for Claims {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let mut answer = v1::NodePrepareResourcesResponse::default();
        for asked in request.into_inner().claims {
            let prepared = match self.prepare(&asked).await {
                Ok(devices) => v1::NodePrepareResourceResponse {
                    devices,
                    error: String::new(),
                },
                Err(error) => v1::NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error,
                },
            };
            answer.claims.insert(asked.uid, prepared);
        }
        Ok(Response::new(answer))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let mut answer = v1::NodeUnprepareResourcesResponse::default();
        for asked in request.into_inner().claims {
            self.cdi.remove(CLAIM_KIND, &format!("_{}", asked.uid));
            let done = v1::NodeUnprepareResourceResponse::default();
            answer.claims.insert(asked.uid, done);
        }
        Ok(Response::new(answer))
    }
}

/// What the kubelet asks a DRA driver that it has found.
struct Registrar {
    endpoint: PathBuf,
    told: watch::Sender<Option<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![v1::SERVICE.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.told.send_replace(Some(request.into_inner()));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The folder in which the runtime looks CDI devices up.
#[derive(Clone)]
struct CdiFolder(PathBuf);

impl CdiFolder {
    fn path(&self, kind: &str, suffix: &str) -> PathBuf {
        self.0
            .join(format!("{}{suffix}.json", kind.replace('/', "-")))
    }

    /// Writes a spec of named devices, each with the node of one GPU.
    fn write(&self, kind: &str, suffix: &str, nodes: impl IntoIterator<Item = (String, u32)>) {
        let device = |(name, minor)| {
            let node = format!("/dev/nvidia{minor}");
            json!({"name": name, "containerEdits": {"deviceNodes": [{"path": node}]}})
        };
        let devices: Vec<_> = nodes.into_iter().map(device).collect();
        let spec = json!({"cdiVersion": "0.5.0", "kind": kind, "devices": devices});
        // The runtime must never read half a file.
        let mut file = tempfile::NamedTempFile::new_in(&self.0).expect("a file in the CDI folder");
        file.write_all(spec.to_string().as_bytes())
            .expect("the spec is written");
        file.persist(self.path(kind, suffix))
            .expect("the spec gets its name");
    }

    fn remove(&self, kind: &str, suffix: &str) {
        // The kubelet may ask twice.
        let _ = fs::remove_file(self.path(kind, suffix));
    }
}
