//! Events of GPUs, for clients that wait for them.
//!
//! An event is a line that somebody appends to `events.jsonl`. Each event set remembers how far it has read,
//! and a waiting call sleeps on inotify in the thread of its caller: no thread of ours outlives the library.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nvml_wrapper_sys::bindings::{nvmlEventSet_t, nvmlEventTypeXidCriticalError, nvmlReturn_t};
use rustix::fs::inotify;
use serde::Deserialize;

use crate::driver::World;
use crate::ffi::{Handle, code};
use crate::layout;

/// The event sets of this process.
#[derive(Debug)]
pub(crate) struct EventSets(BTreeMap<u8, EventSet>);

/// What a client wants to hear of.
#[derive(Debug)]
struct EventSet {
    /// Kinds of events by GPU.
    wanted: BTreeMap<String, u64>,
    /// How much of the file was read.
    offset: u64,
    /// Tells of changes in the state folder. Kept, since closing one takes milliseconds.
    changes: Arc<OwnedFd>,
}

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    gpu: String,
    /// Short for the type of XID errors, with this number as data.
    xid: Option<u64>,
    r#type: Option<u64>,
    #[serde(default)]
    data: u64,
}

/// Something that happened to a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) gpu_uuid: String,
    /// `nvmlEventType…`.
    pub(crate) kind: u64,
    /// The number of an XID error.
    pub(crate) data: u64,
}

impl EventSets {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// A new set that hears of what happens from now on.
    pub(crate) fn create(&mut self, state: &Path) -> Result<nvmlEventSet_t, nvmlReturn_t> {
        let number = (0..=u8::MAX)
            .find(|number| !self.0.contains_key(number))
            .ok_or(code::INSUFFICIENT_RESOURCES)?;
        let changes = std::fs::create_dir_all(state)
            .map_err(|_error| code::UNKNOWN)
            .and_then(|()| watch(state).map_err(|_errno| code::UNKNOWN))?;
        let offset = std::fs::metadata(layout::events(state)).map_or(0, |file| file.len());
        self.0.insert(
            number,
            EventSet {
                wanted: BTreeMap::new(),
                offset,
                changes: Arc::new(changes),
            },
        );
        Ok(Handle::event_set(number))
    }

    pub(crate) fn free(&mut self, set: nvmlEventSet_t) -> Result<(), nvmlReturn_t> {
        let number = number(set)?;
        self.0
            .remove(&number)
            .map(drop)
            .ok_or(code::INVALID_ARGUMENT)
    }

    /// The set hears of these kinds of events of a GPU, too.
    pub(crate) fn register(
        &mut self,
        set: nvmlEventSet_t,
        gpu_uuid: &str,
        kinds: u64,
    ) -> Result<(), nvmlReturn_t> {
        *self
            .set(set)?
            .wanted
            .entry(gpu_uuid.to_owned())
            .or_default() |= kinds;
        Ok(())
    }

    fn set(&mut self, set: nvmlEventSet_t) -> Result<&mut EventSet, nvmlReturn_t> {
        self.0.get_mut(&number(set)?).ok_or(code::INVALID_ARGUMENT)
    }
}

/// What a set has not heard of yet, and what to wait on if that is nothing.
pub(crate) fn next(
    world: &mut World,
    set: nvmlEventSet_t,
) -> Result<(Option<Event>, Arc<OwnedFd>), nvmlReturn_t> {
    let file = layout::events(world.state()?.folder());
    let has_events = world.has_events();
    let set = world.event_sets.set(set)?;
    let changes = Arc::clone(&set.changes);
    let event = if has_events { set.read(&file) } else { None };
    Ok((event, changes))
}

impl EventSet {
    fn read(&mut self, file: &Path) -> Option<Event> {
        let mut reader = BufReader::new(File::open(file).ok()?);
        reader.seek(SeekFrom::Start(self.offset)).ok()?;
        loop {
            let mut line = String::new();
            let length = reader.read_line(&mut line).ok()?;
            if !line.ends_with('\n') {
                // The end, or a line that is still being written.
                return None;
            }
            self.offset += u64::try_from(length).ok()?;
            // What is no event is not delivered; a client of the driver would not hear of it either.
            let Ok(line) = serde_json::from_str::<Line>(&line) else {
                continue;
            };
            let event = Event {
                kind: line
                    .r#type
                    .unwrap_or_else(|| u64::from(nvmlEventTypeXidCriticalError)),
                data: line.xid.unwrap_or(line.data),
                gpu_uuid: line.gpu,
            };
            let wanted = self.wanted.get(&event.gpu_uuid).copied().unwrap_or(0);
            if wanted & event.kind != 0 {
                return Some(event);
            }
        }
    }
}

/// Sleeps until something changes in the state folder; answers whether it did before the end.
pub(crate) fn wait_for_change(changes: &OwnedFd, end: Option<Instant>) -> bool {
    let milliseconds = end.map_or(-1, |end| {
        let left = end.saturating_duration_since(Instant::now());
        // Rounded up, so that the last round does not spin.
        i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
    });
    let mut poll = libc::pollfd {
        fd: changes.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, which lives as long as the call.
    if unsafe { libc::poll(&raw mut poll, 1, milliseconds) } <= 0 {
        return false;
    }
    // What changed is found by reading the file; here it is only taken out of the way.
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(changes, &mut buffer);
    while reader.next().is_ok() {}
    true
}

fn watch(state: &Path) -> rustix::io::Result<OwnedFd> {
    let changes = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(
        &changes,
        state,
        inotify::WatchFlags::MODIFY | inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO,
    )?;
    Ok(changes)
}

fn number(set: nvmlEventSet_t) -> Result<u8, nvmlReturn_t> {
    match Handle::read(set)? {
        Handle::EventSet(number) => Ok(number),
        Handle::Gpu(_) => Err(code::INVALID_ARGUMENT),
    }
}
