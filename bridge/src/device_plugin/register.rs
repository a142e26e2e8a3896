//! Being registered with the kubelet, and staying so.
//!
//! A kubelet never comes back by itself to a plugin that it has lost: after its restart, and after the end of its
//! `ListAndWatch` stream, all ids count as unhealthy until the plugin registers once more.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bridge_core::Face;
use futures::future::join_all;
use legacy_proto::deviceplugin::registration_client::RegistrationClient;
use legacy_proto::deviceplugin::{DIAL_TIMEOUT, KUBELET_SOCKET, RegisterRequest, VERSION};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::endpoint::Endpoint;
use super::{ListNow, RESOURCE, Settings, wire};
use crate::arbiter::Handle;
use crate::folders::{Folders, UNWATCHED};
use crate::uds::{self, Identity, Throttle};

/// The time limit of `Register`: the kubelet dials our socket within the call, and gives up on that earlier.
const REGISTER_LIMIT: Duration = DIAL_TIMEOUT.saturating_add(Duration::from_secs(5));

/// The kubelet opens its stream right after `Register`; without one after this time it has failed.
const STREAM_LIMIT: Duration = Duration::from_secs(5);

/// How long the stream may be missing. When it ends, the kubelet clears its side of the connection away first, and
/// a registration that comes before that is refused.
const STREAM_GRACE: Duration = Duration::from_secs(1);

/// Registrations that are kept beside the last one while another plugin of the resource is there. When one ends, the
/// kubelet asks any of those that are left (kubernetes v1.37.2, `PluginDisconnected`).
const KEPT_LIMIT: usize = 8;

/// A registration that lasted this long has worked: the next failure is the first of a new row.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// The first pause after a failure. Short: a kubelet that has made its socket listens within a millisecond.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause: pods that are bound meanwhile fail, so it is seconds, not minutes.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Trouble that lasts gets one line per this time.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Why the counted face can't be served at all. Everything else is waited for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket can't be made, and waiting will not help.
    #[error("the device plugin can't be served")]
    Socket(#[source] uds::Error),
}

/// How far the registration is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RegistrationState {
    /// Nothing was tried yet.
    #[default]
    NotStarted,
    /// There is no `kubelet.sock`: no kubelet runs, or the folder is the wrong one.
    KubeletAbsent {
        /// Where it is looked for.
        socket: PathBuf,
    },
    /// The kubelet is being asked, or has not opened its stream yet.
    Registering,
    /// The kubelet reads our list.
    Registered,
    /// The last try failed; there will be another.
    Failing {
        /// Why, in words.
        why: String,
    },
}

impl RegistrationState {
    /// Whether the kubelet reads our list.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        match self {
            Self::Registered => true,
            Self::NotStarted
            | Self::KubeletAbsent { .. }
            | Self::Registering
            | Self::Failing { .. } => false,
        }
    }
}

impl fmt::Display for RegistrationState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStarted => f.write_str("the device plugin has not been started yet"),
            Self::KubeletAbsent { socket } => write!(
                f,
                "there is no kubelet at {}: waiting for it; if it runs, check --device-plugin-dir",
                socket.display()
            ),
            Self::Registering => f.write_str("the device plugin is being registered"),
            Self::Registered => f.write_str("the device plugin is registered"),
            Self::Failing { why } => {
                write!(f, "the kubelet did not register the device plugin: {why}")
            }
        }
    }
}

/// Serves the counted face until `stop`: makes the socket, registers it, and registers anew when the kubelet was
/// restarted or has lost us. Never without need, since each registration makes the node's count drop for a moment.
///
/// # Errors
/// The socket can't be made, and waiting will not help: its path is too long, or its folder is open to everybody.
pub async fn run(
    settings: Settings,
    handle: Handle,
    list_now: ListNow,
    state: watch::Sender<RegistrationState>,
    stop: CancellationToken,
) -> Result<(), Error> {
    match uds::sweep_device_plugin_sockets(&settings.folder) {
        Ok(removed) => {
            for path in removed {
                tracing::info!(path = %path.display(), "removed a socket that a former process left behind");
            }
        }
        Err(error) => {
            tracing::warn!(%error, folder = %settings.folder.display(), "could not sweep old sockets");
        }
    }
    let mut plugin = Plugin {
        watch: Folders::new([settings.folder.clone()], uds::is_socket_name),
        settings,
        anew: handle.registers_anew(Face::Legacy),
        handle,
        list_now,
        state,
        serial: 0,
        started: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs(),
        pause: Pause::default(),
        trouble: Throttle::new(LOG_INTERVAL),
        kept: Vec::new(),
        closing: JoinSet::new(),
    };
    let mut current = None;
    let outcome = stop.run_until_cancelled(plugin.serve(&mut current)).await;
    plugin.kept.extend(current);
    let open = std::mem::take(&mut plugin.kept);
    plugin.closing.spawn(close_all(open));
    while plugin.closing.join_next().await.is_some() {}
    outcome.unwrap_or(Ok(()))
}

async fn close_all(endpoints: Vec<Endpoint>) {
    join_all(endpoints.into_iter().map(Endpoint::close)).await;
}

#[derive(Debug, Default)]
struct Pause(Option<Duration>);

impl Pause {
    fn next(&mut self) -> Duration {
        let pause = self
            .0
            .map_or(FIRST_PAUSE, |last| (last * 2).min(LONGEST_PAUSE));
        self.0 = Some(pause);
        pause
    }

    fn reset(&mut self) {
        self.0 = None;
    }
}

/// Why a registration is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// `kubelet.sock` is another one: the kubelet was restarted.
    KubeletRestarted,
    /// The kubelet's stream has ended, and no other came.
    StreamEnded,
    /// It may listen to another plugin of the resource.
    Displaced,
}

struct Plugin {
    settings: Settings,
    handle: Handle,
    list_now: ListNow,
    state: watch::Sender<RegistrationState>,
    watch: Folders,
    serial: u32,
    started: u64,
    pause: Pause,
    /// Changes when the kubelet may listen to another plugin.
    anew: watch::Receiver<u64>,
    trouble: Throttle,
    /// Former sockets that are still registered, beside another plugin's.
    kept: Vec<Endpoint>,
    /// Former sockets whose last calls are finishing. A registration must not wait for them.
    closing: JoinSet<()>,
}

impl Plugin {
    async fn serve(&mut self, current: &mut Option<Endpoint>) -> Result<(), Error> {
        loop {
            self.until_owner().await;
            let kubelet = self.kubelet().await;
            if let Some(former) = current.take() {
                self.closing.spawn(former.close());
                while self.closing.try_join_next().is_some() {}
            }
            self.tell(RegistrationState::Registering);
            match self.open() {
                Ok(endpoint) => *current = Some(endpoint),
                Err(error @ (uds::Error::PathTooLong { .. } | uds::Error::OpenFolder { .. })) => {
                    return Err(Error::Socket(error));
                }
                Err(
                    error @ (uds::Error::NoFolder { .. }
                    | uds::Error::InUse { .. }
                    | uds::Error::NotASocket { .. }
                    | uds::Error::Os { .. }),
                ) => {
                    self.fail(kubelet, with_sources(&error)).await;
                    continue;
                }
            }
            let Some(endpoint) = current.as_mut() else {
                continue;
            };
            if let Err(why) = self.register(endpoint).await {
                self.fail(kubelet, why).await;
                continue;
            }
            let since = Instant::now();
            self.tell(RegistrationState::Registered);
            self.trouble.reset();
            tracing::info!(
                resource = RESOURCE,
                socket = endpoint.name(),
                "registered the device plugin"
            );
            let lost = self.stay(endpoint, kubelet).await;
            self.tell(RegistrationState::Registering);
            tracing::info!(
                resource = RESOURCE,
                ?lost,
                "the kubelet has lost the device plugin"
            );
            if lost == Lost::Displaced {
                self.kept.extend(current.take());
                let over = self.kept.len().saturating_sub(KEPT_LIMIT);
                self.closing
                    .spawn(close_all(self.kept.drain(..over).collect()));
                continue;
            }
            self.closing
                .spawn(close_all(std::mem::take(&mut self.kept)));
            if since.elapsed() >= STABLE_AFTER || lost == Lost::KubeletRestarted {
                self.pause.reset();
            } else {
                self.wait(kubelet).await;
            }
        }
    }

    fn owns(&self) -> bool {
        self.handle.successor().borrow().is_none()
    }

    /// Waits until this daemon owns the ledger. While a successor does, it is the one to register, and the socket
    /// that is there stays for the calls that still come.
    async fn until_owner(&self) {
        let mut successor = self.handle.successor();
        let is_gone = successor.wait_for(Option::is_none).await.is_err();
        if is_gone {
            // The arbiter is gone, and the daemon with it.
            std::future::pending::<()>().await;
        }
    }

    /// Waits for a kubelet.
    async fn kubelet(&mut self) -> Identity {
        let socket = self.settings.folder.join(KUBELET_SOCKET);
        loop {
            if let Some(kubelet) = Identity::of(&socket) {
                return kubelet;
            }
            self.tell(RegistrationState::KubeletAbsent {
                socket: socket.clone(),
            });
            if let Some(withheld) = self.trouble.pass() {
                tracing::warn!(socket = %socket.display(), withheld, "there is no kubelet: waiting for it");
            }
            // A folder that is mounted over, or whose parent is moved, tells nothing.
            let _ = self.watch.changed_within(UNWATCHED).await;
        }
    }

    fn open(&mut self) -> Result<Endpoint, uds::Error> {
        self.serial += 1;
        let name =
            uds::device_plugin_socket_name(&self.settings.instance, self.started, self.serial);
        let path = self.settings.folder.join(name);
        let (list_now, tell) = (self.list_now.clone(), self.settings.tell.clone());
        Endpoint::open(&path, self.handle.clone(), list_now, tell)
    }

    /// Registers, and waits for the kubelet's stream.
    async fn register(&self, endpoint: &Endpoint) -> Result<(), String> {
        let socket = self.settings.folder.join(KUBELET_SOCKET);
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: endpoint.name(),
            resource_name: RESOURCE.to_owned(),
            options: Some(wire::options()),
        };
        let mut client = RegistrationClient::new(uds::channel(&socket));
        let call = client.register(request);
        match tokio::time::timeout(REGISTER_LIMIT, call).await {
            Err(_) => return Err(format!("no answer to Register within {REGISTER_LIMIT:?}")),
            Ok(Err(status)) => return Err(with_sources(&status)),
            Ok(Ok(_)) => {}
        }
        let mut streams = endpoint.streams();
        let opened = streams.wait_for(|open| *open > 0);
        match tokio::time::timeout(STREAM_LIMIT, opened).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(format!(
                "Register was answered, but the kubelet did not ask for the list within {STREAM_LIMIT:?}"
            )),
        }
    }

    /// Returns when the kubelet has lost us.
    async fn stay(&mut self, endpoint: &mut Endpoint, kubelet: Identity) -> Lost {
        let socket = self.settings.folder.join(KUBELET_SOCKET);
        let mut streams = endpoint.streams();
        let mut missing_since: Option<Instant> = None;
        self.anew.mark_unchanged();
        loop {
            // A socket that is missing says nothing: a kubelet that starts removes the old one first.
            if Identity::of(&socket).is_some_and(|now| now != kubelet) {
                return Lost::KubeletRestarted;
            }
            if *streams.borrow_and_update() == 0 {
                // Said before it is certain: from now on the kubelet fails every counted pod.
                self.tell(RegistrationState::Registering);
                let since = *missing_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= STREAM_GRACE {
                    return Lost::StreamEnded;
                }
            } else {
                missing_since = None;
                self.tell(RegistrationState::Registered);
                if self.owns() {
                    self.keep_file(endpoint);
                    self.close_kept();
                }
            }
            let grace = missing_since.map_or(Duration::MAX, |since| {
                STREAM_GRACE.saturating_sub(since.elapsed())
            });
            tokio::select! {
                _ = self.watch.changed() => {}
                _ = streams.changed() => {}
                // While a successor has the ledger it is the one that is to be called.
                Ok(()) = self.anew.changed() => if self.owns() {
                    return Lost::Displaced;
                },
                () = sleep_for(grace) => {}
            }
        }
    }

    /// Former registrations are of no use once no other plugin is there.
    fn close_kept(&mut self) {
        if !self.kept.is_empty() && self.handle.status().borrow().rivals.is_empty() {
            self.closing
                .spawn(close_all(std::mem::take(&mut self.kept)));
        }
    }

    /// Makes our socket's file anew when somebody has removed it. The kubelet's connection does not need it, so there
    /// is nothing to register; it is for whoever looks for it, and for the next connection.
    fn keep_file(&self, endpoint: &mut Endpoint) {
        if endpoint.is_in_place() {
            return;
        }
        match endpoint.reopen() {
            Ok(()) => {
                tracing::info!(
                    socket = endpoint.name(),
                    "made the socket anew that somebody had removed"
                );
            }
            Err(error) => {
                if let Some(withheld) = self.trouble.pass() {
                    tracing::warn!(
                        error = with_sources(&error),
                        withheld,
                        "could not make the socket anew"
                    );
                }
            }
        }
    }

    async fn fail(&mut self, kubelet: Identity, why: String) {
        if let Some(withheld) = self.trouble.pass() {
            tracing::warn!(
                error = why,
                withheld,
                "could not register the device plugin: trying again"
            );
        }
        self.tell(RegistrationState::Failing { why });
        self.wait(kubelet).await;
    }

    /// Waits before the next try, and no longer than until the kubelet is another one.
    async fn wait(&mut self, kubelet: Identity) {
        let socket = self.settings.folder.join(KUBELET_SOCKET);
        let until = Instant::now() + self.pause.next();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            tokio::select! {
                _ = self.watch.changed() => {}
                () = sleep_for(left) => {}
            }
            if Identity::of(&socket).is_some_and(|now| now != kubelet) {
                self.pause.reset();
                return;
            }
        }
    }

    fn tell(&self, state: RegistrationState) {
        self.state.send_if_modified(|told| {
            let news = *told != state;
            *told = state;
            news
        });
    }
}

async fn sleep_for(time: Duration) {
    if time == Duration::MAX {
        std::future::pending::<()>().await;
    }
    tokio::time::sleep(time).await;
}

/// An error with all that caused it, in one line.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pause = Pause::default();
        let row: Vec<u128> = (0..8).map(|_| pause.next().as_millis()).collect();
        assert_eq!(row, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        pause.reset();
        assert_eq!(pause.next(), FIRST_PAUSE);
    }

    #[test]
    fn each_state_says_in_words_what_is_waited_for() {
        let absent = RegistrationState::KubeletAbsent {
            socket: "/k/kubelet.sock".into(),
        };
        assert!(absent.to_string().contains("/k/kubelet.sock"));
        assert!(!absent.is_registered());
        let failing = RegistrationState::Failing {
            why: "no answer".to_owned(),
        };
        assert!(failing.to_string().ends_with("no answer"));
        assert!(RegistrationState::Registered.is_registered());
    }
}
