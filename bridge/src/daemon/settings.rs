//! What the configuration file says, to those who go by it while the daemon runs.

use std::path::Path;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Ended, Faces, Tasks, conditions, feeds};
use crate::arbiter::Observation;
use crate::cli::RunOptions;
use crate::config::live::{self, Current};
use crate::metrics::Metrics;
use crate::store;

/// What the copy of the last good file is called, beside the ledger.
const KEPT: &str = "config.last-good.yaml";

/// Reads the configuration at the start.
pub(super) fn read(options: &RunOptions) -> Result<Current, crate::config::Error> {
    match &options.config {
        Some(path) => live::at_start(path, &options.state_dir.join(KEPT)),
        None => Ok(Current::default()),
    }
}

/// Follows the file, and tells the pool and the pages what it says.
pub(super) fn start(tasks: &mut Tasks, current: watch::Sender<Current>, faces: &Faces<'_>) {
    let (options, handle) = (faces.options, faces.handle);
    let (conditions, stop) = (faces.conditions, faces.stop);
    let seen = current.subscribe();
    tasks.spawn(conditions::config(
        seen.clone(),
        options.config.clone(),
        conditions.clone(),
        stop.clone(),
    ));
    tasks.spawn(feeds::feed(
        "settings feed",
        seen,
        |current: &Current| Some(Observation::Settings(current.config.settings.clone())),
        handle.clone(),
        stop.clone(),
    ));
    tasks.spawn(count(
        current.subscribe(),
        handle.metrics().clone(),
        stop.clone(),
    ));
    let (path, cancel) = (options.config.clone(), stop.clone());
    let kept = options.state_dir.join(KEPT);
    tasks.spawn(async move {
        match path {
            Some(path) => live::follow(path, |text| keep(&kept, text), current, cancel).await,
            None => cancel.cancelled().await,
        }
        ("configuration", Ok(()))
    });
}

/// Counts the good files.
async fn count(
    mut seen: watch::Receiver<Current>,
    metrics: Metrics,
    stop: CancellationToken,
) -> Ended {
    let mut shown = 0;
    loop {
        let generation = seen.borrow_and_update().generation;
        if generation != shown {
            metrics.configured(generation);
            shown = generation;
        }
        tokio::select! {
            () = stop.cancelled() => break,
            changed = seen.changed() => if changed.is_err() {
                // Who follows the file has ended, and says so itself.
                stop.cancelled().await;
            },
        }
    }
    ("configuration metrics", Ok(()))
}

/// Keeps a copy of a good file. Without it only the next start with a bad one is harder.
fn keep(kept: &Path, text: &str) {
    if let Err(error) = store::replace(kept, text.as_bytes(), 0o600) {
        warn!(%error, path = %kept.display(), "no copy of the good configuration could be kept");
    }
}
