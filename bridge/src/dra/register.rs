//! The two sockets of the face: the DRA service, and the registration through which the kubelet finds it.
//!
//! The kubelet watches a folder for registration sockets, asks each once who it is, and says whether it took it. So
//! registering again means making the socket again: when the kubelet said no, and when somebody removed the file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{Face, PodUid};
use dra_proto::registration;
use kube::Client;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::listener::Listener;
use super::service::Service;
use super::successor::Successors;
use super::{DRIVER, chain, wire};
use crate::arbiter::Handle;
use crate::folders::{Folders, WATCHED};
use crate::uds;

/// How often a socket that is not there is tried to be made. One that somebody removes is noticed by an event.
const LOOK: Duration = Duration::from_secs(1);

/// Pause before registering again after the kubelet said no; it doubles with each no.
const REFUSED_FIRST: Duration = Duration::from_secs(1);

/// The longest pause after a no. The kubelet's own pauses go up to two minutes.
const REFUSED_LAST: Duration = Duration::from_secs(60);

/// A socket that can't be made is tried again at every look, and logged once in this time.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// How long the end waits for calls that are here. Waiting Prepares answer at once when the end begins.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Where the sockets are.
#[derive(Debug, Clone)]
pub struct Place {
    /// The kubelet's root directory. The same path inside the container and outside: the kubelet is told paths.
    pub kubelet_dir: PathBuf,
    /// UID of the daemon's pod: then two daemons can be there at once, as in a rolling update.
    pub pod: Option<PodUid>,
}

impl Place {
    /// The DRA service's socket.
    #[must_use]
    pub fn service_socket(&self) -> PathBuf {
        let name = match &self.pod {
            None => "dra.sock".to_owned(),
            Some(pod) => format!("dra-{pod}.sock"),
        };
        self.kubelet_dir
            .join(registration::PLUGINS_DIR)
            .join(DRIVER)
            .join(name)
    }

    /// The registration socket.
    #[must_use]
    pub fn registration_socket(&self) -> PathBuf {
        let name = uds::registration_socket_name(DRIVER, self.pod.as_ref().map(PodUid::as_str));
        self.registry().join(name)
    }

    /// The folders of both sockets.
    fn folders(&self) -> Vec<PathBuf> {
        let service = self.service_socket();
        let own = service.parent().map(Path::to_owned);
        own.into_iter().chain([self.registry()]).collect()
    }

    fn registry(&self) -> PathBuf {
        self.kubelet_dir.join(registration::DIR)
    }
}

/// How registration goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistrationState {
    /// The sockets are not there yet.
    Starting,
    /// A socket can't be made; it is tried again.
    NoSocket {
        /// What is wrong.
        error: String,
    },
    /// The sockets are there, and the kubelet has not come yet.
    Waiting,
    /// The kubelet has taken the driver.
    Registered,
    /// The kubelet said no; it is asked again.
    Refused {
        /// The kubelet's words.
        error: String,
    },
}

/// Why the sockets can't be served at all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path that no socket can have.
    #[error("the DRA face can't be served")]
    Socket(#[from] uds::Error),
}

/// What the registration service tells.
#[derive(Debug, Clone)]
pub(super) struct Registrar {
    endpoint: Arc<Path>,
    state: watch::Sender<RegistrationState>,
    refused: Arc<Notify>,
}

impl Registrar {
    /// Path of the service's socket, as the kubelet dials it.
    pub(super) fn endpoint(&self) -> &Path {
        debug!("the kubelet asks who is there");
        &self.endpoint
    }

    /// The kubelet has taken the driver.
    pub(super) fn registered(&self) {
        info!("the kubelet has registered the DRA driver");
        self.state.send_replace(RegistrationState::Registered);
    }

    /// The kubelet has not taken it.
    pub(super) fn refused(&self, why: &str) {
        error!(
            error = why,
            "the kubelet refused the DRA driver; it is asked again"
        );
        self.state.send_replace(RegistrationState::Refused {
            error: why.to_owned(),
        });
        self.refused.notify_one();
    }
}

/// Serves the DRA socket and registers it, until told to stop; then takes both sockets away and answers what is
/// here.
///
/// # Errors
/// A path is too long for a socket. What may change (a folder that is missing, another process on the socket) is
/// waited for, and `state` says so.
pub async fn run(
    client: Client,
    node: String,
    place: Place,
    handle: Handle,
    state: watch::Sender<RegistrationState>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let anew = handle.registers_anew(Face::Dra);
    let successors = Successors {
        kubelet_dir: place.kubelet_dir.clone(),
    };
    let service = Service::new(client, node, handle, successors, shutdown.clone());
    let registrar = Registrar {
        endpoint: place.service_socket().into(),
        state,
        refused: Arc::new(Notify::new()),
    };
    let mut sockets = Sockets {
        service_listener: Listener::new(place.service_socket()),
        registration_listener: Listener::new(place.registration_socket()),
        place,
        service,
        registrar,
        anew,
        logged: None,
    };
    sockets.sweep();
    let kept = sockets.keep(&shutdown).await;
    sockets.registration_listener.close();
    sockets.service_listener.close();
    sockets.registration_listener.drain(DRAIN_LIMIT).await;
    sockets.service_listener.drain(DRAIN_LIMIT).await;
    kept
}

struct Sockets {
    service_listener: Listener,
    registration_listener: Listener,
    place: Place,
    service: Arc<Service>,
    registrar: Registrar,
    /// Changes when the kubelet may call another driver of the name.
    anew: watch::Receiver<u64>,
    /// The last trouble that was logged, and when.
    logged: Option<(String, Instant)>,
}

impl Sockets {
    /// Sockets of this driver on which nobody listens: the kubelet would dial them for ever.
    fn sweep(&self) {
        match uds::sweep_registration_sockets(&self.place.registry(), DRIVER) {
            Ok(removed) => {
                for path in removed {
                    info!(socket = %path.display(), "removed a registration socket that nobody listened on");
                }
            }
            Err(error) => warn!(error = %error, "could not look for old registration sockets"),
        }
    }

    /// Keeps both sockets open until told to stop.
    async fn keep(&mut self, shutdown: &CancellationToken) -> Result<(), Error> {
        let refused = Arc::clone(&self.registrar.refused);
        let mut pause = REFUSED_FIRST;
        let mut register_at = Instant::now();
        let mut folders = Folders::new(self.place.folders(), uds::is_socket_name);
        loop {
            self.look(register_at)?;
            if *self.registrar.state.borrow() == RegistrationState::Registered {
                pause = REFUSED_FIRST;
            }
            let look_in = self.pause();
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                () = refused.notified() => {
                    // A closed socket is a deregistration; the next one is a new question.
                    self.registration_listener.close();
                    register_at = Instant::now() + pause;
                    pause = (pause * 2).min(REFUSED_LAST);
                }
                Ok(()) = self.anew.changed() => {
                    // A closed socket is a deregistration; whoever registers last is called.
                    self.registration_listener.close();
                    register_at = Instant::now() + REFUSED_FIRST;
                }
                _ = folders.changed_within(look_in) => {}
            }
        }
    }

    /// How long nothing needs to be done.
    fn pause(&self) -> Duration {
        if self.service_listener.is_open() && self.registration_listener.is_open() {
            WATCHED
        } else {
            LOOK
        }
    }

    /// Opens what is not open: the service first, since the kubelet may call as soon as it has registered it.
    fn look(&mut self, register_at: Instant) -> Result<(), Error> {
        if !self.service_listener.is_open() {
            make_folder(self.service_listener.path());
            let service = wire::dra_service(Arc::clone(&self.service));
            if let Err(error) = self.service_listener.open(service) {
                return self.trouble(error);
            }
        }
        if !self.registration_listener.is_open() && Instant::now() >= register_at {
            let registration = wire::registration_service(self.registrar.clone());
            // Before the socket is there: from then on the kubelet may answer.
            self.registrar
                .state
                .send_replace(RegistrationState::Waiting);
            if let Err(error) = self.registration_listener.open(registration) {
                return self.trouble(error);
            }
        }
        self.logged = None;
        Ok(())
    }

    fn trouble(&mut self, error: uds::Error) -> Result<(), Error> {
        match error {
            uds::Error::PathTooLong { .. } => return Err(error.into()),
            uds::Error::NoFolder { .. }
            | uds::Error::OpenFolder { .. }
            | uds::Error::InUse { .. }
            | uds::Error::NotASocket { .. }
            | uds::Error::Os { .. } => {}
        }
        let text = chain(&error);
        let is_new = self
            .logged
            .as_ref()
            .is_none_or(|(logged, at)| *logged != text || at.elapsed() >= LOG_AGAIN);
        if is_new {
            warn!(
                error = text,
                "the DRA face has no socket; it is tried again"
            );
            self.logged = Some((text.clone(), Instant::now()));
        }
        self.registrar
            .state
            .send_replace(RegistrationState::NoSocket { error: text });
        Ok(())
    }
}

/// The driver's folder below `plugins`. What goes wrong here is told by the bind that follows.
fn make_folder(socket: &Path) {
    let Some(folder) = socket.parent() else {
        return;
    };
    let made = fs::create_dir_all(folder);
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        debug!(error = %error, folder = %folder.display(), "could not make the driver's folder");
    }
}
