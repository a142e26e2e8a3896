//! One life of the kubelet's process: everything that a restart forgets.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use dra_proto::KUBELET_STATE_FILE;
use dra_proto::registration;
use legacy_proto::deviceplugin::registration_server::RegistrationServer;
use legacy_proto::deviceplugin::{KUBELET_CHECKPOINT, KUBELET_SOCKET};
use legacy_proto::podresources::pod_resources_lister_server::PodResourcesListerServer;
use legacy_proto::pods::pods_server::PodsServer;
use legacy_proto::{podresources, pods};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::transport::Server;
use tower::Service;

use super::checkpoint;
use super::claims::Claims;
use super::devices::Devices;
use super::drivers::Drivers;
use super::plugins::{Clients, Registrar};
use super::pods::Pods;
use super::servers::{PodResourcesService, PodsService};
use crate::lock;
use crate::rng::Rng;

/// How long a stop waits for clients to close their connections before it cuts them off.
const STOP_DEADLINE: Duration = Duration::from_secs(1);

/// Where everything lies, as below the real kubelet's `--root-dir`.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    pub(crate) root: PathBuf,
    pub(crate) device_plugins: PathBuf,
    pub(crate) plugins_registry: PathBuf,
}

impl Paths {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            device_plugins: root.join("device-plugins"),
            plugins_registry: root.join(registration::DIR),
        }
    }

    pub(crate) fn device_checkpoint(&self) -> PathBuf {
        self.device_plugins.join(KUBELET_CHECKPOINT)
    }

    pub(crate) fn claim_checkpoint(&self) -> PathBuf {
        self.root.join(KUBELET_STATE_FILE)
    }
}

/// Background tasks of a session.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        lock(&self.0).spawn(task);
    }

    async fn end(&self) {
        let mut tasks = std::mem::take(&mut *lock(&self.0));
        let all = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP_DEADLINE, all).await.is_err() {
            tasks.shutdown().await;
        }
    }
}

/// The kubelet's process.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) paths: Paths,
    pub(crate) devices: Mutex<Devices>,
    pub(crate) clients: Clients,
    pub(crate) claims: Claims,
    pub(crate) drivers: Arc<Drivers>,
    pub(crate) pods: Arc<Pods>,
    pub(crate) rng: Arc<Mutex<Rng>>,
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: Tasks,
}

impl Session {
    /// Starts the process: reads the checkpoints, wipes the sockets of device plugins, serves.
    pub(crate) fn start(
        paths: Paths,
        pods: Arc<Pods>,
        rng: Arc<Mutex<Rng>>,
    ) -> anyhow::Result<Arc<Self>> {
        let folders = [
            paths.device_plugins.clone(),
            paths.plugins_registry.clone(),
            paths.root.join(registration::PLUGINS_DIR),
            paths.root.join(podresources::DIR),
            paths.root.join(pods::DIR),
        ];
        for folder in &folders {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        // The kubelet goes on with an empty book when it can't read the device checkpoint.
        let (grants, resources) =
            checkpoint::read_devices(&paths.device_checkpoint()).unwrap_or_default();
        let session = Arc::new(Self {
            devices: Mutex::new(Devices::restored(grants, resources)),
            clients: Clients::default(),
            claims: Claims::restored(paths.claim_checkpoint())?,
            drivers: Arc::default(),
            pods,
            rng,
            stop: CancellationToken::new(),
            tasks: Tasks::default(),
            paths,
        });
        session.wipe_device_plugin_sockets()?;
        session.serve_all()?;
        let drivers = Arc::clone(&session.drivers);
        let registry = session.paths.plugins_registry.clone();
        session
            .tasks
            .spawn(drivers.watch(registry, session.stop.clone()));
        Ok(session)
    }

    fn serve_all(self: &Arc<Self>) -> anyhow::Result<()> {
        self.serve(
            &self.paths.device_plugins.join(KUBELET_SOCKET),
            RegistrationServer::new(Registrar(Arc::clone(self))),
        )?;
        let resources = self.paths.root.join(podresources::DIR);
        self.serve(
            &resources.join(podresources::SOCKET),
            PodResourcesListerServer::new(PodResourcesService::new(Arc::clone(self))),
        )?;
        let local = self.paths.root.join(pods::DIR);
        self.serve(
            &local.join(pods::SOCKET),
            PodsServer::new(PodsService(Arc::clone(self))),
        )
    }

    fn serve<S>(&self, socket: &Path, service: S) -> anyhow::Result<()>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>
            + NamedService
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        match fs::remove_file(socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(socket)
            .with_context(|| format!("no listening on {}", socket.display()))?;
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let served = Server::builder()
                .serve_with_incoming_shutdown(service, incoming, stop.cancelled_owned())
                .await;
            served.expect("a server on a unix socket ends when it is told to");
        });
        Ok(())
    }

    /// `CleanupPluginDirectory`: all sockets go, other files stay.
    fn wipe_device_plugin_sockets(&self) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.paths.device_plugins)? {
            let entry = entry?;
            if entry.file_type()?.is_socket() {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Ends the process. Its files stay, its sockets too (nobody listens on them).
    pub(crate) async fn end(&self) {
        self.stop.cancel();
        self.tasks.end().await;
    }

    /// `UpdateAllocatedDevices`: not before the kubelet knows all its pods.
    pub(crate) fn free_inactive(&self) {
        if self.pods.sources_are_ready() {
            let active: BTreeSet<String> = self.pods.active_uids();
            lock(&self.devices).free_inactive(&active);
        }
    }

    /// Writes the device checkpoint.
    pub(crate) fn save_devices(&self) {
        let devices = lock(&self.devices);
        checkpoint::write_devices(&self.paths.device_checkpoint(), &devices)
            .expect("the test's folder can be written to");
    }
}
