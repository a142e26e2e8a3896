//! Who else serves our resource or our driver on this node.
//!
//! The kubelet takes as many plugins of one name as come, and asks the one that registered last (kubernetes v1.37.2,
//! `pkg/kubelet/cm/devicemanager/manager.go` `PluginConnected`, `pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go`
//! `get`). It tells nobody, so this module looks for what shows:
//!
//! - a socket in the device plugin folder that has the name of a GPU plugin's, with somebody behind it;
//! - a registration socket whose owner says that it is our driver, or a plugin of our resource;
//! - a list of our resource at the kubelet that is not the one we sent: whoever of the other sockets lists our GPUs.
//!
//! It owns that search, and asks the faces to register anew where the kubelet listens to somebody else, so that the
//! calls come here and are refused. It decides nothing: the pool is told who is there. It must not know the faces.

mod ask;
mod sockets;
mod view;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bridge_core::{Face, Rival};
use futures::future::BoxFuture;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::arbiter::{self, Handle, Observation, Told};
use crate::folders::{Folders, WATCHED, Why};
use sockets::{Folder, Kind};
use view::{Verdict, View};

/// The extended resource of counted pods.
const RESOURCE: &str = Face::Legacy.served_name();

/// The DRA driver of claim pods.
const DRIVER: &str = Face::Dra.served_name();

/// How often the two folders are read while somebody comes, is there, or may be. A plugin makes its socket before it
/// registers, so the sooner it is seen the fewer calls it gets. Otherwise they are read when something in them changes,
/// and each [`WATCHED`].
const LOOK: Duration = Duration::from_millis(500);

/// So long after a change they are not read: whoever makes a socket listens on it by then.
const SETTLE: Duration = Duration::from_millis(20);

/// For so long after a change somebody may be about to come.
const WATCHFUL: Duration = Duration::from_secs(10);

/// How often the kubelet is asked what it counts, in that time and until it counts what we list.
const ASK_KUBELET: Duration = Duration::from_secs(2);

/// The same at any other time. The kubelet writes a file into the device plugin folder when it takes a list (kubernetes
/// v1.37.2, `genericDeviceUpdateCallback` in `pkg/kubelet/cm/devicemanager`), so this is for folders that tell nothing.
const ASK_KUBELET_CALM: Duration = Duration::from_secs(30);

/// So long after a rival has come the device plugin registers after it: at once, and again in case the rival was slow.
const PLUGIN_AFTER_RIVAL: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// The same of the DRA driver: the kubelet looks once a second who is there, and has nobody of ours for a second when
/// the driver registers anew.
const DRIVER_AFTER_RIVAL: [Duration; 1] = [Duration::from_secs(2)];

/// For a list that is not ours no face is asked to register anew more often than this, and half as often each time.
const ANEW_FIRST: Duration = Duration::from_secs(10);

/// The longest of these pauses.
const ANEW_LAST: Duration = Duration::from_secs(300);

/// Asks the kubelet which ids of the resource it counts as healthy; the error says in words why there is no answer.
pub type KubeletIds =
    Arc<dyn Fn() -> BoxFuture<'static, Result<BTreeSet<String>, String>> + Send + Sync>;

/// Names a process of the host, as an admin would: its pod where it has one.
pub type Owner = Arc<dyn Fn(u32) -> Option<String> + Send + Sync>;

/// Whether the kubelet reads our list.
pub type IsRegistered = Arc<dyn Fn() -> bool + Send + Sync>;

/// Where to look.
pub struct Places {
    /// The kubelet's device plugin folder.
    pub device_plugins: PathBuf,
    /// The kubelet's folder of registration sockets.
    pub registry: PathBuf,
    /// `GetAllocatableResources` of pod-resources.
    pub kubelet_ids: KubeletIds,
    /// Whether our list is read.
    pub is_registered: IsRegistered,
    /// Who a process is.
    pub owner: Owner,
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places")
            .field("device_plugins", &self.device_plugins)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// The search, with what it remembers from look to look.
#[derive(Debug)]
pub struct Lookout {
    places: Places,
    handle: Handle,
    device_plugins: Folder,
    registry: Folder,
    view: View,
    asked_kubelet: Option<Instant>,
    /// The kubelet counted what we list when it was asked last.
    agrees: bool,
    /// When something changed last.
    news: Instant,
    /// What the kubelet counts against our list and no socket explains.
    unexplained: Option<Rival>,
    legacy: Anew,
    dra: Anew,
}

/// When a face is to register anew.
#[derive(Debug, Default)]
struct Anew {
    /// At these times, for a rival that has come; the next one last.
    due: Vec<Instant>,
    last: Option<Instant>,
    pause: Option<Duration>,
    /// The sockets of rivals at the last look.
    known: BTreeSet<PathBuf>,
}

impl Anew {
    /// Whether nothing is to come, and no rival is there.
    fn is_done(&self) -> bool {
        self.due.is_empty() && self.known.is_empty()
    }
}

/// What a plugin or the kubelet writes for others to see: the kubelet's temporary files begin with a dot.
fn is_of_interest(name: &OsStr) -> bool {
    !name.as_encoded_bytes().starts_with(b".")
}

/// Looks once which sockets in the two folders are of our names and not ours. What has no socket, a list at the kubelet
/// that is not ours, is not found this way.
pub async fn look_once(device_plugins: &Path, registry: &Path) -> Vec<(Face, PathBuf)> {
    let mut plugins = Folder::new(device_plugins.to_owned(), Kind::DevicePlugins);
    let mut drivers = Folder::new(registry.to_owned(), Kind::Registry);
    let found = plugins.look().await.into_iter().chain(drivers.look().await);
    found.map(|socket| (socket.face, socket.path)).collect()
}

impl Lookout {
    /// A search that has seen nothing yet.
    #[must_use]
    pub fn new(places: Places, handle: Handle) -> Self {
        Self {
            device_plugins: Folder::new(places.device_plugins.clone(), Kind::DevicePlugins),
            registry: Folder::new(places.registry.clone(), Kind::Registry),
            view: View::default(),
            asked_kubelet: None,
            agrees: false,
            news: Instant::now(),
            unexplained: None,
            legacy: Anew::default(),
            dra: Anew::default(),
            places,
            handle,
        }
    }

    /// Looks once and tells the pool: to be awaited before a face opens, so that nothing is offered beside a rival
    /// that was there first. Takes a few seconds at most, where a plugin hangs.
    ///
    /// # Errors
    /// [`arbiter::Error::Stopping`]: the arbiter has ended.
    pub async fn look(&mut self) -> Result<(), arbiter::Error> {
        let plugins = self.device_plugins.look().await;
        let drivers = self.registry.look().await;
        self.compare_lists().await;
        let found = plugins.iter().chain(&drivers);
        let rivals: BTreeSet<Rival> = found
            .map(|socket| Rival {
                face: socket.face,
                place: socket.path.display().to_string(),
                owner: socket.pid.and_then(|pid| (self.places.owner)(pid)),
            })
            .chain(self.unexplained.clone())
            .collect();
        let of = |face: Face| -> BTreeSet<PathBuf> {
            let all = plugins.iter().chain(&drivers);
            let of_face = all.filter(|socket| socket.face == face);
            of_face.map(|socket| socket.path.clone()).collect()
        };
        let (counted, claims) = (of(Face::Legacy), of(Face::Dra));
        self.register_after(Face::Legacy, counted);
        self.register_after(Face::Dra, claims);
        if self.contested() || !rivals.is_empty() {
            // What could not be saved is told anew with the next look.
            let (Told::Taken | Told::NotTaken(_)) =
                self.handle.tell(Observation::Rivals(rivals)).await?;
        }
        Ok(())
    }

    /// Looks until told to stop.
    ///
    /// # Errors
    /// As [`Lookout::look`].
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), arbiter::Error> {
        let mut folders = Folders::new(self.folders(), is_of_interest);
        let mut offers = self.handle.offers();
        loop {
            let pause = self.pause();
            let changed = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                why = folders.changed_within(pause) => why == Why::Changed,
                Ok(()) = offers.changed() => true,
            };
            if changed {
                self.news = Instant::now();
                tokio::select! {
                    () = stop.cancelled() => return Ok(()),
                    () = sleep(SETTLE) => {}
                }
            }
            if self.handle.successor().borrow().is_some() {
                // The successor looks, and the kubelet counts what it lists.
                self.view.reset();
                self.agrees = false;
                continue;
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                looked = self.look() => looked?,
            }
            folders.watch(self.folders());
        }
    }

    fn folders(&self) -> BTreeSet<PathBuf> {
        let registry = self.registry.folders();
        self.device_plugins.folders().chain(registry).collect()
    }

    /// How long nothing needs to be looked at unless something changes.
    fn pause(&self) -> Duration {
        let is_calm = !self.is_watchful()
            && !self.contested()
            && self.unexplained.is_none()
            && !self.device_plugins.is_open()
            && !self.registry.is_open()
            && (self.agrees || !(self.places.is_registered)())
            && self.legacy.is_done()
            && self.dra.is_done();
        if is_calm { WATCHED } else { LOOK }
    }

    fn is_watchful(&self) -> bool {
        self.news.elapsed() < WATCHFUL
    }

    /// Whether the pool knows of a rival, were it one that has gone a moment ago.
    fn contested(&self) -> bool {
        !self.handle.status().borrow().rivals.is_empty()
    }

    /// Compares what the kubelet counts with what we list.
    async fn compare_lists(&mut self) {
        if !(self.places.is_registered)() {
            self.view.reset();
            self.unexplained = None;
            self.agrees = false;
            return;
        }
        let period = if self.agrees && !self.is_watchful() {
            ASK_KUBELET_CALM
        } else {
            ASK_KUBELET
        };
        let due = self
            .asked_kubelet
            .is_none_or(|asked| asked.elapsed() >= period);
        if !due {
            return;
        }
        self.asked_kubelet = Some(Instant::now());
        self.agrees = false;
        let Ok(counted) = (self.places.kubelet_ids)().await else {
            self.view.reset();
            return;
        };
        let offers = Arc::clone(&self.handle.offers().borrow());
        match self.view.judge(&offers, &counted) {
            Verdict::Open => {}
            Verdict::Agrees => {
                self.agrees = true;
                self.unexplained = None;
            }
            Verdict::Lacks(ids) => {
                tracing::warn!(
                    ?ids,
                    "the kubelet does not count ids that are listed to it as healthy"
                );
                self.order(Face::Legacy);
            }
            Verdict::Foreign(ids) => {
                let units = offers
                    .counted
                    .iter()
                    .map(|offer| offer.unit.to_string())
                    .collect();
                self.device_plugins.find_lister(&units, &ids).await;
                self.unexplained = Some(Rival {
                    face: Face::Legacy,
                    place: format!(
                        "the kubelet's list, which has {} from elsewhere",
                        ids.join(", ")
                    ),
                    owner: None,
                });
                self.order(Face::Legacy);
            }
        }
    }

    /// Has a face register after a rival that came later than it.
    fn register_after(&mut self, face: Face, rivals: BTreeSet<PathBuf>) {
        let was_first = (self.places.is_registered)();
        let anew = self.anew(face);
        if rivals.difference(&anew.known).next().is_some() && was_first {
            let now = Instant::now();
            let after = match face {
                Face::Legacy => PLUGIN_AFTER_RIVAL.as_slice(),
                Face::Dra => DRIVER_AFTER_RIVAL.as_slice(),
            };
            anew.due = after.iter().rev().map(|after| now + *after).collect();
        }
        anew.known = rivals;
        if anew.due.pop_if(|due| *due <= Instant::now()).is_some() {
            self.handle.register_anew(face);
        }
    }

    fn order(&mut self, face: Face) {
        let anew = self.anew(face);
        let pause = anew.pause.unwrap_or(ANEW_FIRST);
        if anew.last.is_some_and(|last| last.elapsed() < pause) {
            return;
        }
        // What was quiet for long begins anew.
        let quiet = anew.last.is_none_or(|last| last.elapsed() >= ANEW_LAST);
        anew.pause = Some(if quiet {
            ANEW_FIRST
        } else {
            (pause * 2).min(ANEW_LAST)
        });
        anew.last = Some(Instant::now());
        self.handle.register_anew(face);
    }

    fn anew(&mut self, face: Face) -> &mut Anew {
        match face {
            Face::Legacy => &mut self.legacy,
            Face::Dra => &mut self.dra,
        }
    }
}

#[cfg(test)]
mod tests;
