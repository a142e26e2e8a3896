//! The configuration file while the daemon runs: what is in force, and what was refused.
//!
//! A ConfigMap's volume changes by one rename of the link `..data`, an editor's file in several steps, so the folder is
//! watched and the text is compared. A file with mistakes changes nothing: what was good goes on, and a copy of it is
//! kept beside the ledger, so that a restart does not take the node's GPUs away for a typing mistake.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::Config;
use super::load::{self, Error};

/// How often the file is read without an event: not every file system tells, and a folder can be mounted anew.
const LOOK_PERIOD: Duration = Duration::from_secs(10);
/// So long after an event the file is read: who writes it in steps is done by then.
const WRITING: Duration = Duration::from_millis(100);

/// A text that was looked at; `Err`: it could not be read.
type Seen = Result<String, io::ErrorKind>;

/// What the file says. The default is what holds without a file.
#[derive(Debug, Clone, Default)]
pub struct Current {
    /// What is in force.
    pub config: Arc<Config>,
    /// Why the newest file is not, with all its mistakes; `None`: it is.
    pub rejected: Option<String>,
    /// How many good files there were since the start.
    pub generation: u64,
    /// The text that was looked at last.
    seen: Option<Seen>,
}

/// Reads the file at the start of the daemon. If it is not good, the last good one is in force, if there was one.
///
/// # Errors
/// The file is not good, and no good one was kept.
pub fn at_start(path: &Path, kept: &Path) -> Result<Current, Error> {
    let text = load::read(path);
    let seen = Some(seen(&text));
    let (config, rejected, generation) = match load::interpret(path, text) {
        Ok(config) => (config, None, 1),
        Err(error) => match load::load(kept) {
            Ok(config) => (config, Some(tell(&error)), 0),
            Err(_) => return Err(error),
        },
    };
    Ok(Current {
        config: Arc::new(config),
        rejected,
        generation,
        seen,
    })
}

fn seen(text: &io::Result<String>) -> Seen {
    text.as_ref().cloned().map_err(io::Error::kind)
}

/// Follows the file until it is told to stop. A good text is handed to `keep`, for the next start.
pub async fn follow(
    path: PathBuf,
    keep: impl Fn(&str),
    current: watch::Sender<Current>,
    stop: CancellationToken,
) {
    if let Current {
        rejected: None,
        seen: Some(Ok(text)),
        ..
    } = &*current.borrow()
    {
        keep(text);
    }
    let (told, mut events) = mpsc::channel(1);
    let _watcher = watch_folder(&path, told);
    let mut looks = tokio::time::interval(LOOK_PERIOD);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = looks.tick() => {}
            Some(()) = events.recv() => tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(WRITING) => {}
            },
        }
        look(&path, &keep, &current);
    }
}

/// Tells when something in the file's folder changes, for as long as the watcher lives.
fn watch_folder(path: &Path, told: mpsc::Sender<()>) -> Option<RecommendedWatcher> {
    let folder = path.parent()?;
    let watcher = notify::recommended_watcher(move |_| {
        // One that waits already is as good as another.
        let _ = told.try_send(());
    });
    let watched = watcher.and_then(|mut watcher| {
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watched
        .inspect_err(|error| {
            warn!(%error, folder = %folder.display(), "the configuration's folder can't be watched; the file is read every few seconds instead");
        })
        .ok()
}

fn look(path: &Path, keep: &impl Fn(&str), current: &watch::Sender<Current>) {
    let text = load::read(path);
    let seen = Some(seen(&text));
    if current.borrow().seen == seen {
        return;
    }
    match load::interpret(path, text) {
        Ok(config) => {
            info!(path = %path.display(), mode = config.settings.mode.as_str(), "the configuration has changed and is in force");
            if let Some(Ok(text)) = &seen {
                keep(text);
            }
            current.send_modify(|current| {
                *current = Current {
                    config: Arc::new(config),
                    rejected: None,
                    generation: current.generation + 1,
                    seen,
                };
            });
        }
        Err(error) => {
            let rejected = tell(&error);
            current.send_modify(|current| {
                current.rejected = Some(rejected);
                current.seen = seen;
            });
        }
    }
}

fn tell(error: &Error) -> String {
    error!(reason = "ConfigFileRejected", %error, "the configuration file is not used; the last good one stays in force");
    error.to_string()
}
