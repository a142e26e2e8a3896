//! DRA drivers: found by their registration sockets, registered, picked for a call.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/pluginmanager` and `pkg/kubelet/cm/dra/plugin`; the error texts
//! are the kubelet's. Not imitated: the wiping of ResourceSlices 30 s after a driver has gone and when the
//! kubelet starts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dra_proto::registration::registration_client::RegistrationClient;
use dra_proto::registration::{
    DRA_PLUGIN, GET_INFO_TIMEOUT, InfoRequest, NOTIFY_TIMEOUT, PluginInfo, RegistrationStatus,
};
use dra_proto::{health_v1, health_v1alpha1, v1, v1beta1};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::health::{self, Reported};
use super::registry::{Identity, Registry};
use crate::dial::{self, go_error};
use crate::lock;

/// How often the folder of registration sockets is looked through. The kubelet uses inotify and then a
/// loop of a second; a test need not wait for that.
const SCAN_INTERVAL: Duration = Duration::from_millis(10);

/// The pause after a failed registration, doubled each time up to [`MAX_RETRY`]: upstream's figures
/// (`pkg/util/goroutinemap/exponentialbackoff`).
const FIRST_RETRY: Duration = Duration::from_millis(500);
const MAX_RETRY: Duration = Duration::from_secs(122);

/// The DRA service that a driver is called by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// `v1.DRAPlugin`.
    V1,
    /// `v1beta1.DRAPlugin`.
    V1beta1,
}

/// A registered instance of a driver.
#[derive(Debug, Clone)]
pub struct Driver {
    /// The first service of its list that the kubelet knows.
    pub service: Service,
    /// The health service that the kubelet would use, if the driver offers one.
    pub health_service: Option<&'static str>,
    /// Path of its service socket.
    pub endpoint: PathBuf,
    pub(crate) channel: Channel,
}

/// All drivers that one kubelet process knows.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    /// By name, the newest last.
    by_name: Mutex<BTreeMap<String, Vec<Driver>>>,
    failures: Mutex<Vec<String>>,
    /// What each driver has said of its devices.
    health: Mutex<BTreeMap<String, Reported>>,
    /// As before 1.34.
    knows_v1beta1_alone: AtomicBool,
}

impl Drivers {
    /// The newest instance that answers on its socket, else the newest (`DRAPluginManager.get`).
    pub(crate) async fn pick(&self, name: &str) -> Result<Driver, String> {
        let instances = lock(&self.by_name).get(name).cloned().unwrap_or_default();
        for driver in instances.iter().rev() {
            if UnixStream::connect(&driver.endpoint).await.is_ok() {
                return Ok(driver.clone());
            }
        }
        let newest = instances.last().cloned();
        newest.ok_or_else(|| format!("DRA driver {name} is not registered"))
    }

    /// From now on the service of v1 is not known.
    pub(crate) fn know_v1beta1_alone(&self) {
        self.knows_v1beta1_alone.store(true, Ordering::SeqCst);
    }

    /// All instances of a driver, the newest last.
    pub(crate) fn instances(&self, name: &str) -> Vec<Driver> {
        lock(&self.by_name).get(name).cloned().unwrap_or_default()
    }

    /// What a driver says of its devices now; `None`: nothing.
    pub(crate) fn health(&self, name: &str) -> Option<Reported> {
        lock(&self.health).get(name).cloned()
    }

    pub(crate) fn note_health(&self, name: &str, reported: Reported) {
        lock(&self.health).insert(name.to_owned(), reported);
    }

    pub(crate) fn forget_health(&self, name: &str) {
        lock(&self.health).remove(name);
    }

    pub(crate) fn is_registered(&self, name: &str, endpoint: &Path) -> bool {
        let by_name = lock(&self.by_name);
        let mut instances = by_name.get(name).into_iter().flatten();
        instances.any(|driver| driver.endpoint == endpoint)
    }

    /// Why registrations failed, in order.
    pub(crate) fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }

    /// Watches a folder of registration sockets until the token is cancelled.
    pub(crate) async fn watch(self: Arc<Self>, dir: PathBuf, stop: CancellationToken) {
        let mut known: BTreeMap<PathBuf, Socket> = BTreeMap::new();
        let mut registry = Registry::default();
        loop {
            let found = registry.sockets(&dir).clone();
            self.scan(found, &mut known, &stop).await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(SCAN_INTERVAL) => {}
            }
        }
    }

    async fn scan(
        self: &Arc<Self>,
        found: BTreeMap<PathBuf, Identity>,
        known: &mut BTreeMap<PathBuf, Socket>,
        stop: &CancellationToken,
    ) {
        // Unregistrations come first. A socket that was made anew is another one.
        let gone: BTreeSet<PathBuf> = known
            .iter()
            .filter(|(path, socket)| found.get(*path) != Some(&socket.identity))
            .map(|(path, _)| path.clone())
            .collect();
        for path in gone {
            if let Some(PluginOf { name, endpoint }) = known.remove(&path).and_then(|it| it.plugin)
            {
                self.deregister(&name, &endpoint);
            }
        }
        for (path, identity) in found {
            let socket = known.entry(path.clone()).or_insert_with(|| Socket {
                identity,
                plugin: None,
                retry_at: Instant::now(),
                pause: FIRST_RETRY,
            });
            if socket.plugin.is_some() || Instant::now() < socket.retry_at {
                continue;
            }
            match self.register(&path).await {
                Ok(plugin) => {
                    self.follow_health(&plugin, stop);
                    socket.plugin = Some(plugin);
                }
                Err(error) => {
                    lock(&self.failures).push(error);
                    socket.retry_at = Instant::now() + socket.pause;
                    socket.pause = (socket.pause * 2).min(MAX_RETRY);
                }
            }
        }
    }

    fn follow_health(self: &Arc<Self>, plugin: &PluginOf, stop: &CancellationToken) {
        let instances = self.instances(&plugin.name);
        let registered = instances
            .into_iter()
            .find(|it| it.endpoint == plugin.endpoint);
        if let Some(driver) = registered {
            let (drivers, name) = (Arc::clone(self), plugin.name.clone());
            tokio::spawn(health::follow(drivers, name, driver, stop.clone()));
        }
    }

    async fn register(&self, socket: &Path) -> Result<PluginOf, String> {
        let at = socket.display();
        let channel = dial::as_kubelet_registers(socket)?;
        let mut client = RegistrationClient::new(channel);
        let mut request = tonic::Request::new(InfoRequest {});
        request.set_timeout(GET_INFO_TIMEOUT);
        let info = client.get_info(request).await.map_err(|status| {
            format!(
                "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {at}, err: {}",
                go_error(&status)
            )
        })?;
        let registered = self.admit(socket, info.into_inner());
        let error = registered.as_ref().err().cloned().unwrap_or_default();
        let mut request = tonic::Request::new(RegistrationStatus {
            plugin_registered: registered.is_ok(),
            error,
        });
        request.set_timeout(NOTIFY_TIMEOUT);
        let notified = client.notify_registration_status(request).await;
        let plugin = registered?;
        if let Err(status) = notified {
            self.deregister(&plugin.name, &plugin.endpoint);
            return Err(format!(
                "RegisterPlugin error -- failed to send registration status at socket {at}, err: {}",
                go_error(&status)
            ));
        }
        Ok(plugin)
    }

    fn admit(&self, socket: &Path, info: PluginInfo) -> Result<PluginOf, String> {
        if info.r#type != DRA_PLUGIN {
            return Err(format!(
                "RegisterPlugin error -- no handler registered for plugin type: {} at socket {}",
                info.r#type,
                socket.display()
            ));
        }
        let endpoint = if info.endpoint.is_empty() {
            socket.to_owned()
        } else {
            PathBuf::from(&info.endpoint)
        };
        let name = info.name;
        let known: &[(&str, Service)] = if self.knows_v1beta1_alone.load(Ordering::SeqCst) {
            &KNOWN[1..]
        } else {
            &KNOWN
        };
        let service = pick_service(&info.supported_versions, known).map_err(|error| {
            format!(
                "RegisterPlugin error -- plugin validation failed with err: invalid supported gRPC versions of DRA driver plugin {name} at endpoint {}: {error}",
                endpoint.display()
            )
        })?;
        let mut by_name = lock(&self.by_name);
        let instances = by_name.entry(name.clone()).or_default();
        if instances.iter().any(|it| it.endpoint == endpoint) {
            return Err(format!(
                "RegisterPlugin error -- plugin registration failed with err: endpoint {} already registered for DRA driver plugin {name}",
                endpoint.display()
            ));
        }
        instances.push(Driver {
            service,
            health_service: pick_health_service(&info.supported_versions),
            channel: dial::localhost(&endpoint),
            endpoint: endpoint.clone(),
        });
        Ok(PluginOf { name, endpoint })
    }

    fn deregister(&self, name: &str, endpoint: &Path) {
        let mut by_name = lock(&self.by_name);
        if let Some(instances) = by_name.get_mut(name) {
            instances.retain(|it| it.endpoint != endpoint);
            if instances.is_empty() {
                by_name.remove(name);
            }
        }
    }
}

/// A registration socket that was seen.
#[derive(Debug)]
struct Socket {
    identity: Identity,
    plugin: Option<PluginOf>,
    retry_at: Instant,
    pause: Duration,
}

/// The plugin behind a registration socket.
#[derive(Debug)]
struct PluginOf {
    name: String,
    endpoint: PathBuf,
}

/// The services that a kubelet knows, each with its name in the list of a driver.
const KNOWN: [(&str, Service); 2] = [
    (v1::SERVICE, Service::V1),
    (v1beta1::SERVICE, Service::V1beta1),
];

fn pick_service(offered: &[String], known: &[(&str, Service)]) -> Result<Service, String> {
    if offered.is_empty() {
        return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
    }
    let of = |name: &String| known.iter().find(|(service, _)| name == service);
    let picked = offered.iter().find_map(of).map(|(_, service)| *service);
    picked.ok_or_else(|| {
        let known: Vec<_> = known.iter().map(|(service, _)| *service).collect();
        format!(
            "none of services supported by the plugin ({offered:?}) are supported by the kubelet ({known:?})"
        )
    })
}

fn pick_health_service(offered: &[String]) -> Option<&'static str> {
    [health_v1::SERVICE, health_v1alpha1::SERVICE]
        .into_iter()
        .find(|known| offered.iter().any(|name| name == known))
}
