//! The thread that waits for XIDs.
//!
//! It runs beside the NVML thread for as long as NVML is open, and borrows it: before NVML is shut down it has ended. It
//! waits in the driver, [`EVENT_WAIT`] at a time, so that it costs nothing and ends soon when it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use tokio::sync::watch;

use crate::error::{CallError, Code};
use crate::inventory::{self, Handle};
use crate::raw::{EventSet, RawGpu};

/// How long one wait in the driver takes at most: so long may NVML's next start be put off.
pub const EVENT_WAIT: Duration = Duration::from_secs(1);
/// Pause before the driver is asked again that does not let anybody wait for XIDs; it doubles up to [`RETRY_LONGEST`].
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// The longest such pause: trouble of the driver that lasts is told once and not asked about often.
const RETRY_LONGEST: Duration = Duration::from_secs(60);
/// Different XIDs of different GPUs that are kept apart: more than a node has.
const KINDS_LIMIT: usize = 4096;

/// How often the driver has told of each XID since the session was started, by UUID of the GPU and number.
pub type Xids = BTreeMap<(String, u64), u64>;

/// What lasts from one start of NVML to the next.
#[derive(Debug)]
pub(crate) struct Events {
    seen: watch::Sender<Xids>,
    /// What was said of GPUs whose XIDs can't be heard, so that it is said once.
    told: Mutex<BTreeSet<String>>,
}

impl Events {
    /// With where to tell of them.
    pub(crate) fn new(seen: watch::Sender<Xids>) -> Self {
        Self {
            seen,
            told: Mutex::default(),
        }
    }

    /// Whether this is said for the first time.
    fn is_news(&self, text: String) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert(text)
    }

    fn note(&self, gpu: &str, xid: u64) {
        self.seen.send_modify(|seen| {
            let is_full = seen.len() >= KINDS_LIMIT;
            let key = (gpu.to_owned(), xid);
            match seen.get_mut(&key) {
                Some(times) => *times += 1,
                None if is_full => {
                    tracing::warn!(gpu, xid, "too many kinds of XIDs; this one is not counted");
                }
                None => drop(seen.insert(key, 1)),
            }
        });
    }
}

/// The thread, from the other side.
#[derive(Debug)]
pub(crate) struct Waiter<'scope> {
    thread: ScopedJoinHandle<'scope, ()>,
    leave: Arc<AtomicBool>,
}

impl<'scope> Waiter<'scope> {
    /// Starts the thread for these GPUs. `None`: the system gives no thread; it is told, and tried with NVML's next start.
    pub(crate) fn start<'env, 'nvml: 'scope>(
        scope: &'scope Scope<'scope, 'env>,
        nvml: &'nvml Nvml,
        handles: &[Handle<'_>],
        events: &'nvml Events,
    ) -> Option<Self> {
        let gpus = gpus(handles);
        let leave = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&leave);
        let thread = std::thread::Builder::new()
            .name("nvml-events".to_owned())
            .spawn_scoped(scope, move || run(nvml, &gpus, events, &told));
        match thread {
            Ok(thread) => Some(Self { thread, leave }),
            Err(error) => {
                tracing::warn!(%error, "no thread can be started for the errors of GPUs (XIDs); they are not noticed");
                None
            }
        }
    }

    /// Asks the thread to end. It does within [`EVENT_WAIT`], unless the driver hangs.
    pub(crate) fn tell_to_leave(&self) {
        self.leave.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
    }

    /// Whether the thread has ended.
    pub(crate) fn has_left(&self) -> bool {
        self.thread.is_finished()
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        // The scope waits for the thread.
        self.tell_to_leave();
    }
}

/// The GPUs that have a handle and tell who they are.
fn gpus(handles: &[Handle<'_>]) -> Vec<(RawGpu, String)> {
    let devices = handles.iter().flatten();
    let named = devices.filter_map(|device| {
        let uuid = inventory::uuid(device).ok()?;
        Some((RawGpu::of(device), uuid))
    });
    named.collect()
}

fn run(nvml: &Nvml, gpus: &[(RawGpu, String)], events: &Events, leave: &AtomicBool) {
    let mut pause = RETRY_FIRST;
    while !leave.load(Ordering::Relaxed) {
        let since = Instant::now();
        if let Err(error) = listen(nvml, gpus, events, leave) {
            if events.is_news(error.to_string()) {
                tracing::warn!(%error, "the driver lets nobody wait for the errors of GPUs (XIDs); it is asked again");
            }
            if since.elapsed() > RETRY_LONGEST {
                pause = RETRY_FIRST;
            }
            rest(pause, leave);
            pause = (pause * 2).min(RETRY_LONGEST);
        }
    }
}

/// Waits for XIDs until told to leave, or until the driver does not let us.
fn listen(
    nvml: &Nvml,
    gpus: &[(RawGpu, String)],
    events: &Events,
    leave: &AtomicBool,
) -> Result<(), CallError> {
    let milliseconds = u32::try_from(EVENT_WAIT.as_millis()).unwrap_or(u32::MAX);
    let set = EventSet::create(nvml)?;
    let mut listened = 0_usize;
    for (gpu, uuid) in gpus {
        match set.add(*gpu) {
            Ok(()) => listened += 1,
            Err(error) => tell_deaf(events, uuid, &error),
        }
    }
    tracing::debug!(gpus = listened, "waiting for XIDs");
    while !leave.load(Ordering::Relaxed) {
        if listened == 0 {
            // Nothing would come, and a set without a GPU need not wait.
            std::thread::park();
            continue;
        }
        let Some(event) = set.wait(milliseconds)? else {
            continue;
        };
        let gpu = gpus.iter().find(|(gpu, _)| *gpu == event.gpu);
        match gpu {
            Some((_, uuid)) => events.note(uuid, event.xid),
            None => {
                tracing::warn!(
                    xid = event.xid,
                    "the driver tells of an XID of a GPU that it has not named before"
                );
            }
        }
    }
    Ok(())
}

/// Says once of a GPU that its XIDs can't be heard.
fn tell_deaf(events: &Events, gpu: &str, error: &CallError) {
    if !events.is_news(format!("{gpu}: {error}")) {
        return;
    }
    if error.code() == Some(Code::NotSupported) {
        tracing::info!(
            gpu,
            "the GPU does not tell of its errors (XIDs), so none closes it"
        );
    } else {
        tracing::warn!(gpu, %error, "the errors (XIDs) of a GPU are not noticed; those of the others are");
    }
}

/// Waits, unless told to leave.
fn rest(pause: Duration, leave: &AtomicBool) {
    let end = Instant::now() + pause;
    while !leave.load(Ordering::Relaxed) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::park_timeout(left);
    }
}
