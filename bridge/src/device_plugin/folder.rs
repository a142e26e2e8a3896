//! What happens in the kubelet's device plugin folder.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;

#[cfg(test)]
use crate::uds::Identity;

/// How often the folder is looked at when no event tells of a change: events are lost when the folder itself is
/// replaced, and where the kernel has no inotify instance left. Some stats per interval cost nothing.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Tells when files come or go in a folder, which may itself come and go.
#[derive(Debug)]
pub(super) struct FolderWatch {
    folder: PathBuf,
    watched: Option<Watched>,
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Watched {
    /// Device and inode of what was watched; a folder that is moved away leaves another one in its place.
    folder: (u64, u64),
    /// Set when the watched folder was removed. The next one may well get its inode.
    removed: Arc<AtomicBool>,
    _watcher: RecommendedWatcher,
}

impl FolderWatch {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            watched: None,
            changed: Arc::new(Notify::new()),
        }
    }

    /// Returns after a change, or after the poll interval: look again. What changes between two calls is not lost.
    pub(super) async fn changed(&mut self) {
        self.renew();
        let _ = tokio::time::timeout(POLL_INTERVAL, self.changed.notified()).await;
    }

    /// Watches the folder that is there now.
    fn renew(&mut self) {
        let Ok(metadata) = fs::metadata(&self.folder) else {
            self.watched = None;
            return;
        };
        let folder = (metadata.dev(), metadata.ino());
        let in_force = |it: &Watched| it.folder == folder && !it.removed.load(Ordering::SeqCst);
        if self.watched.as_ref().is_some_and(in_force) {
            return;
        }
        let removed = Arc::new(AtomicBool::new(false));
        let watcher = watch(
            &self.folder,
            Arc::clone(&removed),
            Arc::clone(&self.changed),
        );
        self.watched = match watcher {
            Ok(watcher) => {
                // What came before the watch has no event.
                self.changed.notify_one();
                Some(Watched {
                    folder,
                    removed,
                    _watcher: watcher,
                })
            }
            Err(error) => {
                tracing::debug!(%error, folder = %self.folder.display(), "no events for a folder, it is polled");
                None
            }
        };
    }
}

fn watch(
    folder: &Path,
    removed: Arc<AtomicBool>,
    changed: Arc<Notify>,
) -> notify::Result<RecommendedWatcher> {
    let watched = folder.to_owned();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let Ok(event) = event else { return };
        let ended = event.kind.is_remove() && event.paths.contains(&watched);
        if ended {
            removed.store(true, Ordering::SeqCst);
        }
        // A socket is of interest when it comes or goes. The kubelet also writes its checkpoint here.
        let news = event.kind.is_create() || event.kind.is_remove() || event.kind.is_modify();
        if ended || (news && event.paths.iter().any(|path| is_socket_name(path))) {
            changed.notify_one();
        }
    })?;
    watcher.watch(folder, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

fn is_socket_name(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "sock")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Well under the poll interval: only an event can be that quick.
    const QUICK: Duration = Duration::from_millis(700);

    async fn appears(watch: &mut FolderWatch, path: &Path, since: Instant) -> Duration {
        while Identity::of(path).is_none() {
            watch.changed().await;
            assert!(since.elapsed() < Duration::from_secs(10), "no change seen");
        }
        since.elapsed()
    }

    #[tokio::test]
    async fn a_socket_that_comes_is_told_by_an_event() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("kubelet.sock");
        let mut watch = FolderWatch::new(folder.path().to_owned());
        watch.changed().await;
        let since = Instant::now();
        let (took, ()) = tokio::join!(appears(&mut watch, &path, since), async {
            fs::File::create(&path).unwrap();
        });
        assert!(took < QUICK, "{took:?}");
    }

    #[tokio::test]
    async fn a_folder_that_is_replaced_is_watched_again() {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let folder = parent.path().join("device-plugins");
        let path = folder.join("kubelet.sock");
        let mut watch = FolderWatch::new(folder.clone());
        watch.changed().await;
        fs::create_dir(&folder).unwrap();
        watch.changed().await;
        fs::remove_dir(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        fs::File::create(&path).unwrap();
        appears(&mut watch, &path, Instant::now()).await;
        watch.changed().await;
        let since = Instant::now();
        let second = folder.join("second.sock");
        let (took, ()) = tokio::join!(appears(&mut watch, &second, since), async {
            fs::File::create(&second).unwrap();
        });
        assert!(took < QUICK, "{took:?}");
    }
}
