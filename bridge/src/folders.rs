//! What changes in folders that others write to.
//!
//! It owns the kernel's events (inotify) and what makes up for those that do not come: a folder may come and go, be
//! replaced, or lie on a file system that tells nothing. It must not know what the files are.
//!
//! What is opened and read is no change: a daemon that looks would wake itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::ticks;

/// How often the folders are looked at while no event would tell: one of them is missing, or the kernel has no inotify
/// instance left. Some stats cost nothing.
pub const UNWATCHED: Duration = Duration::from_secs(1);

/// The same with events: they do not tell when a folder is replaced, and not every file system has them.
pub const WATCHED: Duration = Duration::from_secs(10);

/// Which names are of interest.
type Names = fn(&OsStr) -> bool;

/// Tells when something comes, goes or is written in folders, which may themselves come and go.
pub struct Folders {
    wanted: BTreeSet<PathBuf>,
    names: Names,
    events: Option<Events>,
    /// The events can't be had; it is said once.
    told: bool,
}

impl fmt::Debug for Folders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Folders")
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}

/// A watcher with a thread of its own, and what it watches.
struct Events {
    watcher: RecommendedWatcher,
    told: Arc<Told>,
    /// Device and inode of each folder: one that is moved away leaves another in its place.
    identities: BTreeMap<PathBuf, (u64, u64)>,
}

/// What the watcher has told and nobody has heard yet.
struct Told {
    names: Names,
    changed: Notify,
    folders: Mutex<Watched>,
}

/// Folders that are watched.
#[derive(Debug, Default)]
struct Watched {
    all: BTreeSet<PathBuf>,
    /// Those of them that were removed or moved: the next ones may well get their inodes.
    ended: BTreeSet<PathBuf>,
}

/// Why it is time to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Something has changed, or may have before the folder was watched.
    Changed,
    /// The time is up.
    Due,
}

impl Folders {
    /// A watch of these folders, for files whose names are of interest.
    #[must_use]
    pub fn new(wanted: impl IntoIterator<Item = PathBuf>, names: Names) -> Self {
        Self {
            wanted: wanted.into_iter().collect(),
            names,
            events: None,
            told: false,
        }
    }

    /// Watches these folders from now on.
    pub fn watch(&mut self, wanted: BTreeSet<PathBuf>) {
        if let Some(events) = &mut self.events {
            events.forget_others(&wanted);
        }
        self.wanted = wanted;
    }

    /// Returns after a change, or when it is time to look without one: after [`WATCHED`], or after [`UNWATCHED`] where no
    /// event would tell. What changes between two calls is not lost.
    pub async fn changed(&mut self) -> Why {
        self.changed_within(WATCHED).await
    }

    /// The same, after this time at the latest.
    pub async fn changed_within(&mut self, longest: Duration) -> Why {
        let (is_new, all) = self.renew();
        if is_new {
            // What came before the watch has no event.
            return Why::Changed;
        }
        let limit = if all { longest } else { longest.min(UNWATCHED) };
        let end = ticks::after(Instant::now(), limit, WATCHED);
        tokio::select! {
            () = next(self.events.as_ref()) => Why::Changed,
            () = sleep_until(end) => Why::Due,
        }
    }

    /// Watches the folders that are there now: whether one of them was not watched before, and whether all are.
    fn renew(&mut self) -> (bool, bool) {
        if self.events.is_none() {
            self.events = match Events::new(self.names) {
                Ok(events) => Some(events),
                Err(error) => {
                    if !std::mem::replace(&mut self.told, true) {
                        tracing::warn!(%error, "the kernel tells of no changes in folders; they are looked at each second instead");
                    }
                    None
                }
            };
        }
        let Some(events) = &mut self.events else {
            return (false, false);
        };
        let mut news = false;
        let mut all = true;
        for folder in &self.wanted {
            match events.watch(folder) {
                Ok(is_new) => news |= is_new,
                Err(error) => {
                    all = false;
                    if folder.exists() {
                        tracing::debug!(%error, folder = %folder.display(), "no events for a folder, it is looked at each second");
                    }
                }
            }
        }
        (news, all)
    }
}

/// Waits for an event that is of interest; for ever without events.
async fn next(events: Option<&Events>) {
    match events {
        Some(events) => events.told.changed.notified().await,
        None => std::future::pending().await,
    }
}

impl Events {
    fn new(names: Names) -> notify::Result<Self> {
        let told = Arc::new(Told {
            names,
            changed: Notify::new(),
            folders: Mutex::default(),
        });
        let ear = Arc::clone(&told);
        Ok(Self {
            watcher: notify::recommended_watcher(move |event| ear.hear(event))?,
            told,
            identities: BTreeMap::new(),
        })
    }

    /// Watches a folder, if this one is not watched already; answers whether it was not.
    fn watch(&mut self, folder: &Path) -> notify::Result<bool> {
        let found = fs::metadata(folder);
        let identity = found.as_ref().map(|it| (it.dev(), it.ino())).ok();
        let ended = self.told.folders().ended.remove(folder);
        if let Some(before) = self.identities.get(folder) {
            if Some(*before) == identity && !ended {
                return Ok(false);
            }
            self.forget(folder);
        }
        let identity = found.map(|it| (it.dev(), it.ino()))?;
        self.told.folders().all.insert(folder.to_owned());
        self.watcher.watch(folder, RecursiveMode::NonRecursive)?;
        self.identities.insert(folder.to_owned(), identity);
        Ok(true)
    }

    fn forget_others(&mut self, wanted: &BTreeSet<PathBuf>) {
        let others = self.identities.keys().filter(|it| !wanted.contains(*it));
        let others: Vec<PathBuf> = others.cloned().collect();
        for folder in others {
            self.forget(&folder);
        }
    }

    fn forget(&mut self, folder: &Path) {
        self.identities.remove(folder);
        let mut folders = self.told.folders();
        folders.all.remove(folder);
        folders.ended.remove(folder);
        drop(folders);
        // One that was removed is forgotten already.
        let _ = self.watcher.unwatch(folder);
    }
}

impl Told {
    fn folders(&self) -> MutexGuard<'_, Watched> {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an event on the watcher's thread.
    fn hear(&self, event: notify::Result<notify::Event>) {
        let is_news = match event {
            // Events were lost, or may have been.
            Err(_) => true,
            Ok(event) if event.need_rescan() => true,
            Ok(event) => changes(event.kind) && self.is_of_interest(&event),
        };
        if is_news {
            self.changed.notify_one();
        }
    }

    fn is_of_interest(&self, event: &notify::Event) -> bool {
        let mut folders = self.folders();
        let mut is_news = false;
        for path in &event.paths {
            if folders.all.contains(path) {
                // Whatever is in its place now is watched with the next look.
                folders.ended.insert(path.clone());
                is_news = true;
            }
            is_news |= path.file_name().is_some_and(self.names);
        }
        is_news
    }
}

/// Whether something came, went or was written, and not only opened or read.
fn changes(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Create(_)
        | EventKind::Modify(ModifyKind::Name(_))
        | EventKind::Remove(_)
        | EventKind::Any
        | EventKind::Other => true,
        // What is being written is closed in the end.
        EventKind::Access(_) | EventKind::Modify(_) => false,
    }
}

#[cfg(test)]
mod tests;
