//! The sockets of other plugins in a folder of the kubelet, and which of them are of our names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bridge_core::Face;
use futures::future::join_all;
use tokio::time::Instant;

use super::DRIVER;
use super::ask::{self, Plugin};
use crate::uds::{self, Identity, Listener};

/// What the sockets of plugins begin with that give out whole GPUs or parts of them: NVIDIA's
/// (`nvidia-<resource>.sock`, k8s-device-plugin `internal/plugin/server.go`; HAMi's is the same), and GKE's
/// (`nvidiaGPU-<time>.sock`, container-engine-accelerators `cmd/nvidia_gpu`).
const GPU_PLUGINS: [&str; 3] = ["nvidia-gpu", "nvidia-mig-", "nvidiaGPU"];

/// What the name of a socket ends with.
const SUFFIX: &str = ".sock";

/// How often it is looked again whether somebody listens, and how often one is asked that did not answer.
const AGAIN: Duration = Duration::from_secs(2);

/// More sockets than this are no node: the rest is passed over.
const SOCKET_LIMIT: usize = 128;

/// Folders below the registry that are looked into. The kubelet looks into all; plugins use one at most.
const DEPTH: usize = 2;

/// More folders than this are not watched; the others are looked into now and then.
const FOLDER_LIMIT: usize = 16;

/// Which of the kubelet's folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Device plugins: nothing but the name tells what a socket serves.
    DevicePlugins,
    /// Registration sockets: who listens says what it is.
    Registry,
}

/// The socket of a rival.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RivalSocket {
    pub(super) path: PathBuf,
    pub(super) face: Face,
    pub(super) pid: Option<u32>,
}

/// A folder, with what is known of its sockets.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    kind: Kind,
    /// How long what was found is believed.
    again: Duration,
    known: BTreeMap<PathBuf, Known>,
    /// The folders below it at the last look.
    below: BTreeSet<PathBuf>,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    identity: Identity,
    what: What,
    listener: Listener,
    /// When it was looked at last.
    looked: Instant,
}

/// What a socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// It can't be told yet: nobody answers.
    Open,
    /// Something else.
    Other,
    /// Of one of our names.
    Rival(Face),
}

impl Known {
    /// Whether it need not be looked at again yet.
    fn is_believed(&self, now: Instant, again: Duration) -> bool {
        match (self.what, self.listener) {
            (What::Other, _) => true,
            // A plugin makes its socket a moment before it listens.
            (What::Open, Listener::Nobody) => false,
            (What::Open, Listener::Somebody(_)) | (What::Rival(_), _) => now - self.looked < again,
        }
    }
}

impl Folder {
    pub(super) fn new(path: PathBuf, kind: Kind) -> Self {
        Self {
            path,
            kind,
            again: AGAIN,
            known: BTreeMap::new(),
            below: BTreeSet::new(),
        }
    }

    /// The rivals that listen here now.
    pub(super) async fn look(&mut self) -> Vec<RivalSocket> {
        let mut found = BTreeMap::new();
        self.below.clear();
        collect(&self.path, DEPTH, &mut found, &mut self.below);
        self.known
            .retain(|path, known| found.get(path) == Some(&known.identity));
        let now = Instant::now();
        let due: Vec<(PathBuf, Identity, Option<What>)> = found
            .into_iter()
            .filter(|(path, _)| !self.is_passed_over(path))
            .filter_map(|(path, identity)| match self.known.get(&path) {
                None => Some((path, identity, None)),
                Some(known) if known.is_believed(now, self.again) => None,
                Some(known) => Some((path, identity, Some(known.what))),
            })
            .collect();
        let kind = self.kind;
        let asked = due.into_iter().map(|(path, identity, before)| async move {
            let listener = uds::listener(&path);
            let what = match (listener, before) {
                (Listener::Nobody, _) => before.unwrap_or(What::Open),
                (Listener::Somebody(_), Some(known @ What::Rival(_))) => known,
                (Listener::Somebody(_), _) => judge(kind, &path).await,
            };
            (
                path,
                Known {
                    identity,
                    what,
                    listener,
                    looked: now,
                },
            )
        });
        let asked = join_all(asked).await;
        self.known.extend(asked);
        self.rivals()
    }

    /// This folder and those below it.
    pub(super) fn folders(&self) -> impl Iterator<Item = PathBuf> {
        let below = self.below.iter().take(FOLDER_LIMIT).cloned();
        std::iter::once(self.path.clone()).chain(below)
    }

    /// Whether somebody listens of whom it can't be told yet what it is.
    pub(super) fn is_open(&self) -> bool {
        let is_open = |known: &Known| {
            known.what == What::Open && matches!(known.listener, Listener::Somebody(_))
        };
        self.known.values().any(is_open)
    }

    fn rivals(&self) -> Vec<RivalSocket> {
        let rivals =
            self.known
                .iter()
                .filter_map(|(path, known)| match (known.what, known.listener) {
                    (What::Rival(face), Listener::Somebody(pid)) => Some(RivalSocket {
                        path: path.clone(),
                        face,
                        pid,
                    }),
                    (What::Rival(_), Listener::Nobody) | (What::Open | What::Other, _) => None,
                });
        rivals.collect()
    }

    /// Asks the sockets that are of unknown plugins for their list, and marks those that list our GPUs. Only on good
    /// evidence that one does: a plugin may be built for one stream alone.
    pub(super) async fn find_lister(&mut self, units: &BTreeSet<String>, ids: &[String]) {
        let suspects: Vec<PathBuf> = self
            .known
            .iter()
            .filter(|(_, known)| known.what == What::Other)
            .map(|(path, _)| path.clone())
            .collect();
        let lists = suspects.into_iter().map(|path| async move {
            let listed = ask::first_list(&path).await;
            (path, listed)
        });
        for (path, listed) in join_all(lists).await {
            let is_ours = |id: &String| {
                ids.contains(id) || units.iter().any(|unit| id.contains(unit.as_str()))
            };
            let lists_ours = listed.is_some_and(|listed| listed.iter().any(is_ours));
            if let Some(known) = self.known.get_mut(&path).filter(|_| lists_ours) {
                known.what = What::Rival(Face::Legacy);
                known.listener = uds::listener(&path);
            }
        }
    }

    /// Ours, and the kubelet's own.
    fn is_passed_over(&self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.kind {
            Kind::DevicePlugins => {
                name == legacy_proto::deviceplugin::KUBELET_SOCKET
                    || uds::is_device_plugin_socket_name(&name)
            }
            Kind::Registry => uds::is_registration_socket_name(DRIVER, &name),
        }
    }
}

async fn judge(kind: Kind, path: &Path) -> What {
    match kind {
        Kind::DevicePlugins => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let named = GPU_PLUGINS.iter().any(|prefix| name.starts_with(prefix));
            if named && name.ends_with(SUFFIX) {
                What::Rival(Face::Legacy)
            } else {
                What::Other
            }
        }
        Kind::Registry => match ask::plugin(path).await {
            None => What::Open,
            Some(Plugin::Driver) => What::Rival(Face::Dra),
            Some(Plugin::Resource) => What::Rival(Face::Legacy),
            Some(Plugin::Other) => What::Other,
        },
    }
}

/// All sockets below a folder whose name does not begin with a dot, as the kubelet looks for them.
fn collect(
    folder: &Path,
    depth: usize,
    found: &mut BTreeMap<PathBuf, Identity>,
    below: &mut BTreeSet<PathBuf>,
) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if found.len() >= SOCKET_LIMIT || name.to_string_lossy().starts_with('.') {
            continue;
        }
        if kind.is_dir() && depth > 1 {
            collect(&path, depth - 1, found, below);
            below.insert(path);
        } else if kind.is_socket()
            && let Some(identity) = Identity::of(&path)
        {
            found.insert(path, identity);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn names(rivals: &[RivalSocket]) -> Vec<String> {
        let name = |it: &RivalSocket| it.path.file_name().unwrap().to_string_lossy().into_owned();
        rivals.iter().map(name).collect()
    }

    #[tokio::test]
    async fn of_the_sockets_of_device_plugins_those_of_gpu_plugins_that_listen_are_rivals() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let ours = uds::device_plugin_socket_name("node", 1_700_000_000, 1);
        let open: Vec<UnixListener> = [
            "kubelet.sock",
            ours.as_str(),
            "nvidia-gpu.sock",
            "nvidiaGPU-1700000000.sock",
            "nvidia-mig-1g.10gb.sock",
            "rdma.sock",
        ]
        .iter()
        .map(|name| UnixListener::bind(path(name)).unwrap())
        .collect();
        drop(UnixListener::bind(path("nvidia-gpu.shared.sock")).unwrap());
        fs::File::create(path("nvidia-gpu.txt")).unwrap();
        let mut watch = Folder::new(folder.path().to_owned(), Kind::DevicePlugins);
        let expected = [
            "nvidia-gpu.sock",
            "nvidia-mig-1g.10gb.sock",
            "nvidiaGPU-1700000000.sock",
        ];
        let found = watch.look().await;
        assert_eq!(names(&found), expected);
        assert_eq!(found[0].pid, Some(std::process::id()));
        drop(open);
        watch.again = Duration::ZERO;
        assert!(watch.look().await.is_empty(), "the files are still there");
    }

    #[tokio::test]
    async fn a_folder_that_is_not_there_has_no_rivals() {
        let mut watch = Folder::new("/nowhere".into(), Kind::Registry);
        assert!(watch.look().await.is_empty());
    }
}
