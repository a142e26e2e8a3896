//! What a node's files said when they were read last, for as long as nothing has changed there.
//!
//! A client asks about each GPU many times a minute, and on most nodes nothing ever happens. So the folders are watched,
//! and the kernel queues an event before the change is done: whoever has changed something is heard by the next call.

use std::collections::BTreeMap;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::layout;
use crate::state::{Process, State};

/// What the files said.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Whether some call has a fault of its own.
    pub(crate) has_faults: bool,
    /// Whether a trace is wanted.
    pub(crate) has_trace: bool,
    /// Whether some GPU is marked as lost.
    pub(crate) has_lost: bool,
    /// Whether something has to be done about some GPU.
    pub(crate) has_recovery: bool,
    /// Whether an event has happened.
    pub(crate) has_events: bool,
    /// The processes of the GPUs that were asked about.
    pub(crate) processes: BTreeMap<String, Vec<Process>>,
}

/// Tells whether something has changed.
#[derive(Debug)]
pub(crate) struct Changes(OwnedFd);

impl Changes {
    /// `None`: the system has none left, and every call reads the files.
    pub(crate) fn new() -> Option<Self> {
        let flags = CreateFlags::NONBLOCK | CreateFlags::CLOEXEC;
        inotify::init(flags).ok().map(Self)
    }

    /// Whether nothing has changed since this was asked last.
    pub(crate) fn are_none(&self) -> bool {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut none = true;
        loop {
            match reader.next() {
                Ok(_) => none = false,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return none,
                Err(_) => return false,
            }
        }
    }

    /// Watches the files and reads them, in this order. `None`: some folder can't be watched.
    pub(crate) fn look(&self, scenario: &Path, state: &State) -> Option<Seen> {
        let folder = state.folder();
        if scenario.is_symlink() {
            // What it leads to may change elsewhere.
            return None;
        }
        self.watch(scenario.parent()?)?;
        self.watch(folder)?;
        let folders = [
            layout::faults(folder),
            layout::all_lost(folder),
            layout::all_recovery(folder),
            layout::all_processes(folder),
        ];
        // One that comes later shows in the folder that it lies in.
        for folder in folders.iter().filter(|it| it.is_dir()) {
            self.watch(folder)?;
        }
        // These are listed after the folder that they lie in is watched.
        for folder in below(&layout::all_processes(folder)).filter(|it| it.is_dir()) {
            self.watch(&folder)?;
        }
        let has_some = |folder: &Path| below(folder).next().is_some();
        Some(Seen {
            has_faults: has_some(&layout::faults(folder)),
            has_lost: has_some(&layout::all_lost(folder)),
            has_recovery: has_some(&layout::all_recovery(folder)),
            has_trace: layout::trace(folder).exists(),
            has_events: layout::events(folder).exists(),
            processes: BTreeMap::new(),
        })
    }

    fn watch(&self, folder: &Path) -> Option<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        inotify::add_watch(&self.0, folder, flags).ok().map(drop)
    }
}

/// What lies in a folder; nothing if it is not there.
fn below(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).ok().into_iter().flatten();
    entries.flatten().map(|entry| entry.path())
}
