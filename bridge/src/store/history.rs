//! What has happened, for people: a line for each change of a hold and each refusal, kept over restarts.
//!
//! Nothing is decided by it, and nobody waits for it: an event goes to a thread of its own, and is lost if that thread is
//! behind or the disk says no. A daemon that is killed loses the lines of that moment.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::iter;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::SystemTime;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::atomic::no_follow;
use super::own_file::read_own;

/// The file in the state folder, one JSON object a line.
const FILE_NAME: &str = "history.jsonl";
/// What it is called once it is full and a new one has begun.
const OLDER_NAME: &str = "history.older.jsonl";
/// What is kept at least; a full node that is filled and emptied once an hour makes some 400 a day.
pub const KEPT: usize = 1000;
/// The longest line. Longer texts are cut: a sentence that says why is some 300 bytes.
const LINE_LIMIT_BYTES: usize = 1024;
/// When a new file is begun: a full one has [`KEPT`] lines at least.
const FILE_LIMIT_BYTES: u64 = LINE_LIMIT_BYTES as u64 * KEPT as u64;
/// Events that may wait for the disk: more than one batch of calls can make.
const QUEUE_LIMIT: usize = 1024;

/// Something that has happened. Fields are added, never renamed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// When, RFC 3339 in UTC with milliseconds.
    pub at: String,
    /// Generation of the ledger after it.
    pub generation: u64,
    /// What, in one word: that of a log line, or `Refused`.
    pub what: String,
    /// The reason of a refusal, or the cause of an end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// UUID of the unit, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Pod, claim or kubelet id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// A sentence, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Event {
    /// Something that happens now, without anything else.
    #[must_use]
    pub fn now(generation: u64, what: &str) -> Self {
        let at = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
        Self {
            at: format!("{at:.3}"),
            generation,
            what: what.to_owned(),
            reason: None,
            unit: None,
            who: None,
            why: None,
        }
    }

    /// The line in the file, with its end.
    fn line(mut self) -> Option<String> {
        loop {
            let line = serde_json::to_string(&self).ok()? + "\n";
            if line.len() <= LINE_LIMIT_BYTES {
                return Some(line);
            }
            // Names are short; a text of somebody else's may be anything.
            let text = [&mut self.why, &mut self.who, &mut self.reason]
                .into_iter()
                .flatten()
                .find(|text| !text.is_empty())?;
            let half = text.chars().count() / 2;
            *text = text.chars().take(half).collect();
        }
    }
}

/// The way to the file.
#[derive(Debug)]
pub(super) struct History {
    events: Option<SyncSender<Event>>,
}

impl History {
    /// The history in a state folder. Where no thread can be had there is none.
    pub(super) fn new(folder: &Path) -> Self {
        let (events, queue) = sync_channel(QUEUE_LIMIT);
        let folder = folder.to_owned();
        let thread = std::thread::Builder::new().name("history".to_owned());
        match thread.spawn(move || write_all(&folder, &queue)) {
            Ok(_) => Self {
                events: Some(events),
            },
            Err(error) => {
                warn!(%error, "no history is kept, because its thread can't be started");
                Self { events: None }
            }
        }
    }

    /// Adds an event, or drops it. Never waits.
    pub(super) fn add(&self, event: Event) {
        let Some(events) = &self.events else {
            return;
        };
        match events.try_send(event) {
            // The ledger has what counts.
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

/// Whether a missing file is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// It is.
    Made,
    /// It was there before, so somebody is removing it, or its folder: nothing is put in their way.
    Left,
}

/// Writes until the [`History`] is gone. What waits together is one write.
fn write_all(folder: &Path, queue: &Receiver<Event>) {
    let mut missing = Missing::Made;
    let mut told = false;
    while let Ok(first) = queue.recv() {
        let events = iter::once(first).chain(queue.try_iter().take(QUEUE_LIMIT));
        let text: String = events.filter_map(Event::line).collect();
        match append(folder, &text, missing) {
            Ok(()) => {
                missing = Missing::Left;
                told = false;
            }
            Err(error) if !told => {
                told = true;
                warn!(%error, path = %folder.join(FILE_NAME).display(), "the history can't be written; it lacks what happens meanwhile");
            }
            Err(_) => {}
        }
    }
}

/// The file is opened each time: meanwhile another daemon may have owned the folder and begun a new one.
fn append(folder: &Path, text: &str, missing: Missing) -> io::Result<()> {
    let path = folder.join(FILE_NAME);
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(missing == Missing::Made)
        .mode(0o600)
        .custom_flags(no_follow())
        .open(&path)?;
    let length = file.metadata()?.len();
    if length > 0 && !ends_with_a_line(&file, length)? {
        // What was being written when a daemon was killed.
        file.write_all(b"\n")?;
    }
    if length > 0 && length + text.len() as u64 > FILE_LIMIT_BYTES {
        // It need not outlast a power failure.
        rustix::fs::rename(&path, folder.join(OLDER_NAME))?;
        return append(folder, text, Missing::Made);
    }
    file.write_all(text.as_bytes())
}

fn ends_with_a_line(file: &File, length: u64) -> io::Result<bool> {
    let mut last = [0];
    file.read_exact_at(&mut last, length - 1)?;
    Ok(last == *b"\n")
}

/// The last events of a state folder, the oldest first, [`KEPT`] at most. What is no line of a history is passed over.
///
/// # Errors
/// A file that is there can't be read.
pub fn history(folder: &Path) -> io::Result<Vec<Event>> {
    let mut last = VecDeque::with_capacity(KEPT);
    for file in [OLDER_NAME, FILE_NAME] {
        let path: PathBuf = folder.join(file);
        let bytes = match read_own(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for line in bytes.split(|byte| *byte == b'\n') {
            if let Ok(event) = serde_json::from_slice(line) {
                if last.len() == KEPT {
                    last.pop_front();
                }
                last.push_back(event);
            }
        }
    }
    Ok(last.into())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn event(number: u64) -> Event {
        Event {
            unit: Some(format!("GPU-{number}")),
            ..Event::now(number, "Granted")
        }
    }

    /// Waits until the last line is there.
    fn read_up_to(folder: &Path, generation: u64) -> Vec<Event> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let events = history(folder).unwrap();
            if events.last().is_some_and(|it| it.generation == generation) {
                return events;
            }
            assert!(Instant::now() < deadline, "{:?}", events.last());
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_has_happened_is_there_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(history(folder.path()).unwrap(), []);
        let first = History::new(folder.path());
        first.add(event(1));
        read_up_to(folder.path(), 1);
        drop(first);
        History::new(folder.path()).add(event(2));
        let events = read_up_to(folder.path(), 2);
        assert_eq!(
            events.iter().map(|it| it.generation).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(events[0].unit.as_deref(), Some("GPU-1"));
    }

    #[test]
    fn the_last_thousand_are_kept_in_two_files_of_bounded_size() {
        let folder = tempfile::tempdir().unwrap();
        let long = "x".repeat(5000);
        for number in 0..2500 {
            let mut event = event(number);
            event.why = Some(long.clone());
            append(folder.path(), &event.line().unwrap(), Missing::Made).unwrap();
        }
        let events = history(folder.path()).unwrap();
        assert_eq!(events.len(), KEPT);
        assert_eq!(events.last().unwrap().generation, 2499);
        assert_eq!(events[0].generation, 1500);
        for file in [FILE_NAME, OLDER_NAME] {
            let length = folder.path().join(file).metadata().unwrap().len();
            assert!(length <= FILE_LIMIT_BYTES, "{file}: {length}");
        }
    }

    #[test]
    fn a_line_that_a_crash_has_cut_off_costs_itself_alone() {
        let folder = tempfile::tempdir().unwrap();
        append(folder.path(), &event(1).line().unwrap(), Missing::Made).unwrap();
        append(folder.path(), "{\"at\":\"2026", Missing::Made).unwrap();
        append(folder.path(), &event(2).line().unwrap(), Missing::Made).unwrap();
        let events = history(folder.path()).unwrap();
        assert_eq!(
            events.iter().map(|it| it.generation).collect::<Vec<_>>(),
            [1, 2]
        );
    }

    #[test]
    fn a_disk_that_says_no_hinders_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let history = History::new(&folder.path().join("is-not-there"));
        let started = Instant::now();
        for number in 0..10 * QUEUE_LIMIT as u64 {
            history.add(event(number));
        }
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}
