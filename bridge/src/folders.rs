//! What changes in folders that others write to.
//!
//! It owns the kernel's events (inotify) and what makes up for those that do not come: a folder may come and go, be
//! replaced, or lie on a file system that tells nothing. It must not know what the files are.
//!
//! Only what comes, goes and is written is asked for, not what is read: a daemon that looks would wake itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use crate::ticks;

/// How often the folders are looked at while no event would tell: one of them is missing, or the kernel has no inotify
/// instance left. Some stats cost nothing.
pub const UNWATCHED: Duration = Duration::from_secs(1);

/// The same with events: they do not tell when a folder is replaced, and not every file system has them.
pub const WATCHED: Duration = Duration::from_secs(10);

/// Room for some ten events: more are read in further rounds.
const BUFFER: usize = 1024;

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

/// An inotify instance, and what it watches.
struct Events {
    inotify: AsyncFd<OwnedFd>,
    watched: BTreeMap<PathBuf, Watched>,
}

/// A folder that is watched.
#[derive(Debug, Clone, Copy)]
struct Watched {
    number: i32,
    /// Device and inode; a folder that is moved away leaves another one in its place.
    identity: (u64, u64),
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
        let now = Instant::now();
        let end = if limit == WATCHED {
            ticks::next(now, WATCHED)
        } else {
            now + limit
        };
        let names = self.names;
        tokio::select! {
            () = next(self.events.as_mut(), names) => Why::Changed,
            () = sleep_until(end) => Why::Due,
        }
    }

    /// Watches the folders that are there now: whether one of them was not watched before, and whether all are.
    fn renew(&mut self) -> (bool, bool) {
        if self.events.is_none() {
            self.events = match Events::new() {
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
                    if error.kind() != io::ErrorKind::NotFound {
                        tracing::debug!(%error, folder = %folder.display(), "no events for a folder, it is looked at each second");
                    }
                }
            }
        }
        (news, all)
    }
}

/// Waits for an event that is of interest; for ever without events.
async fn next(events: Option<&mut Events>, names: Names) {
    let Some(events) = events else {
        return std::future::pending().await;
    };
    loop {
        let Ok(mut ready) = events.inotify.readable().await else {
            // The runtime is ending.
            return std::future::pending().await;
        };
        ready.clear_ready();
        drop(ready);
        if events.read(names) {
            return;
        }
    }
}

impl Events {
    #[expect(
        deprecated,
        reason = "a descriptor that is owned stays open, as is asked for; what is offered instead is unsafe code"
    )]
    fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self {
            inotify: AsyncFd::with_interest(inotify, tokio::io::Interest::READABLE)?,
            watched: BTreeMap::new(),
        })
    }

    /// Watches a folder, if this one is not watched already; answers whether it was not.
    fn watch(&mut self, folder: &Path) -> io::Result<bool> {
        let found = fs::metadata(folder);
        let identity = found.as_ref().map(|it| (it.dev(), it.ino())).ok();
        let before = self.watched.get(folder).copied();
        if let Some(before) = before {
            if Some(before.identity) == identity {
                return Ok(false);
            }
            self.forget(folder);
        }
        let Some(identity) = identity else {
            return Err(found
                .err()
                .unwrap_or_else(|| io::ErrorKind::NotFound.into()));
        };
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let number = inotify::add_watch(self.inotify.get_ref(), folder, flags)?;
        self.watched
            .insert(folder.to_owned(), Watched { number, identity });
        Ok(true)
    }

    fn forget_others(&mut self, wanted: &BTreeSet<PathBuf>) {
        let others = self.watched.keys().filter(|it| !wanted.contains(*it));
        let others: Vec<PathBuf> = others.cloned().collect();
        for folder in others {
            self.forget(&folder);
        }
    }

    fn forget(&mut self, folder: &Path) {
        if let Some(watched) = self.watched.remove(folder)
            && !self.watched.values().any(|it| it.number == watched.number)
        {
            // The kernel has forgotten one that was removed by itself.
            let _ = inotify::remove_watch(self.inotify.get_ref(), watched.number);
        }
    }

    /// Takes all events; answers whether one is of interest.
    fn read(&mut self, names: Names) -> bool {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut news = false;
        let mut ended = BTreeSet::new();
        let mut reader = Reader::new(self.inotify.get_ref(), &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                Err(_) => break,
            };
            let flags = event.events();
            let is_watched = self.watched.values().any(|it| it.number == event.wd());
            if !is_watched {
                // Of a folder that was forgotten meanwhile, or events were lost.
                news |= flags.contains(ReadFlags::QUEUE_OVERFLOW);
                continue;
            }
            if flags.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) {
                ended.insert(event.wd());
            }
            // An event without a name is about the folder itself.
            let name = event.file_name();
            news |= name.is_none_or(|name| names(OsStr::from_bytes(name.to_bytes())));
        }
        // One that is moved is elsewhere; whatever is in its place now is watched with the next look.
        let gone = self
            .watched
            .iter()
            .filter(|(_, it)| ended.contains(&it.number));
        let gone: Vec<PathBuf> = gone.map(|(folder, _)| folder.clone()).collect();
        for folder in gone {
            self.forget(&folder);
        }
        news
    }
}

#[cfg(test)]
mod tests;
