//! Device plugins: the Registration service, and the connection to each plugin.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/plugin/v1beta1/{server,handler,client}.go`.
//! One trap of that code is kept: a second Register for a socket whose first stream is still open fails, and
//! makes the kubelet forget the first client, so that it does not notice the end of that stream any more.
//! Its devices stay as they are, and the socket can't be registered again until the kubelet restarts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::registration_server::Registration;
use legacy_proto::deviceplugin::{DIAL_TIMEOUT, Empty, RegisterRequest, VERSION};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::devices::Endpoint;
use super::session::Session;
use crate::dial::{self, go_error};
use crate::lock;

/// The pause between two attempts to reach a plugin's socket. grpc-go's first pause is a second; a test need
/// not wait for that.
const DIAL_PAUSE: Duration = Duration::from_millis(10);

/// The clients that the registration server knows, by resource.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    all: Mutex<BTreeMap<String, Vec<PathBuf>>>,
    /// Before 1.37: what closes the connection of the one client of a resource. `None`: as in 1.37.
    only: Mutex<Option<BTreeMap<String, CancellationToken>>>,
}

impl Clients {
    /// Knows one client for each resource from now on, as before 1.37: whichever client's stream ends, the newest one's
    /// connection is closed (kubernetes v1.36, `runClient` and `disconnectClient` in the same file).
    pub(crate) fn know_one_of_each(&self) {
        *lock(&self.only) = Some(BTreeMap::new());
    }

    /// The newest client of a resource; what closes its connection.
    fn is_newest(&self, resource: &str) -> CancellationToken {
        let close = CancellationToken::new();
        if let Some(only) = lock(&self.only).as_mut() {
            only.insert(resource.to_owned(), close.clone());
        }
        close
    }

    /// A client's stream has ended.
    fn stream_ended(&self, session: &Session, resource: &str, socket: &Path) {
        if let Some(only) = lock(&self.only).as_mut() {
            if let Some(newest) = only.remove(resource) {
                newest.cancel();
                lock(&self.all).remove(resource);
                lock(&session.devices).disconnect_all(resource);
            }
        } else if self.remove(resource, socket) {
            lock(&session.devices).disconnect(resource, socket);
        }
    }

    fn add(&self, resource: &str, socket: &Path) {
        let mut clients = lock(&self.all);
        let sockets = clients.entry(resource.to_owned()).or_default();
        sockets.push(socket.to_owned());
    }

    /// Removes **all** clients of that socket, and says whether there was one.
    fn remove(&self, resource: &str, socket: &Path) -> bool {
        let mut clients = lock(&self.all);
        let Some(sockets) = clients.get_mut(resource) else {
            return false;
        };
        let before = sockets.len();
        sockets.retain(|it| it != socket);
        sockets.len() < before
    }
}

/// The Registration service of one kubelet process.
#[derive(Debug)]
pub(crate) struct Registrar(pub(crate) Arc<Session>);

#[tonic::async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.version != VERSION {
            return Err(Status::unknown(format!(
                "requested API version \"{}\" is not supported by kubelet. Supported version is [\"{VERSION}\"]",
                request.version
            )));
        }
        if !is_extended_resource(&request.resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName \"{}\" is invalid",
                request.resource_name
            )));
        }
        let socket = self.0.paths.device_plugins.join(&request.endpoint);
        let connected = connect(&self.0, &request.resource_name, socket).await;
        connected.map_err(Status::unknown)?;
        Ok(Response::new(Empty {}))
    }
}

async fn connect(session: &Arc<Session>, resource: &str, socket: PathBuf) -> Result<(), String> {
    session.clients.add(resource, &socket);
    let client = match handshake(session, resource, &socket).await {
        Ok(client) => client,
        Err(error) => {
            session.clients.remove(resource, &socket);
            return Err(error);
        }
    };
    let close = session.clients.is_newest(resource);
    let session = Arc::clone(session);
    let resource = resource.to_owned();
    let tasks = session.tasks.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = session.stop.cancelled() => {}
            () = close.cancelled() => {}
            () = list_and_watch(&session, &resource, client) => {
                session.clients.stream_ended(&session, &resource, &socket);
            }
        }
    });
    Ok(())
}

async fn handshake(
    session: &Session,
    resource: &str,
    socket: &Path,
) -> Result<DevicePluginClient<Channel>, String> {
    let reached = async {
        while UnixStream::connect(socket).await.is_err() {
            tokio::time::sleep(DIAL_PAUSE).await;
        }
    };
    if tokio::time::timeout(DIAL_TIMEOUT, reached).await.is_err() {
        return Err(
            "failed to dial device plugin: failed to exit idle mode: context deadline exceeded"
                .to_owned(),
        );
    }
    let mut client = DevicePluginClient::new(dial::localhost(socket));
    let options = client
        .get_device_plugin_options(Empty {})
        .await
        .map_err(|status| format!("failed to get device plugin options: {}", go_error(&status)))?
        .into_inner();
    let endpoint = Endpoint::new(socket.to_owned(), client.clone(), options);
    lock(&session.devices).connect(resource, endpoint)?;
    Ok(client)
}

async fn list_and_watch(
    session: &Session,
    resource: &str,
    mut client: DevicePluginClient<Channel>,
) {
    let Ok(stream) = client.list_and_watch(Empty {}).await else {
        return;
    };
    let mut stream = stream.into_inner();
    while let Ok(Some(message)) = stream.message().await {
        lock(&session.devices).update(resource, message.devices);
        session.save_devices();
    }
}

/// The gist of `v1helper.IsExtendedResourceName`: a name with a domain that is not Kubernetes' own.
fn is_extended_resource(name: &str) -> bool {
    match name.split_once('/') {
        Some((domain, rest)) => {
            !domain.is_empty()
                && !rest.is_empty()
                && !domain.ends_with("kubernetes.io")
                && !name.starts_with("requests.")
        }
        None => false,
    }
}
