//! What the configuration file says, to those who go by it while the daemon runs.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Ended, Tasks, conditions};
use crate::admin::Conditions;
use crate::arbiter::{Handle, Observation};
use crate::cli::RunOptions;
use crate::config::live::{self, Current};
use crate::store;

/// What the copy of the last good file is called, beside the ledger.
const KEPT: &str = "config.last-good.yaml";
/// How long settings that could not be taken wait: a full disk is not emptied by asking it.
const AGAIN: Duration = Duration::from_secs(1);

/// Reads the configuration at the start.
pub(super) fn read(options: &RunOptions) -> Result<Current, crate::config::Error> {
    match &options.config {
        Some(path) => live::at_start(path, &options.state_dir.join(KEPT)),
        None => Ok(Current::default()),
    }
}

/// Follows the file, and tells the pool and the pages what it says.
pub(super) fn start(
    tasks: &mut Tasks,
    options: &RunOptions,
    current: watch::Sender<Current>,
    handle: &Handle,
    conditions: &Conditions,
    stop: &CancellationToken,
) {
    let seen = current.subscribe();
    tasks.spawn(conditions::config(
        seen.clone(),
        options.config.clone(),
        conditions.clone(),
        stop.clone(),
    ));
    tasks.spawn(feed(seen, handle.clone(), stop.clone()));
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

/// Keeps a copy of a good file. Without it only the next start with a bad one is harder.
fn keep(kept: &Path, text: &str) {
    if let Err(error) = store::replace(kept, text.as_bytes(), 0o600) {
        warn!(%error, path = %kept.display(), "no copy of the good configuration could be kept");
    }
}

/// Tells the pool of new settings; it began with the first ones.
async fn feed(
    mut seen: watch::Receiver<Current>,
    handle: Handle,
    stop: CancellationToken,
) -> Ended {
    let mut taken = seen.borrow_and_update().config.settings.clone();
    loop {
        tokio::select! {
            () = stop.cancelled() => return ("settings feed", Ok(())),
            changed = seen.changed() => if changed.is_err() {
                stop.cancelled().await;
                return ("settings feed", Ok(()));
            }
        }
        loop {
            let settings = seen.borrow_and_update().config.settings.clone();
            if settings == taken {
                break;
            }
            match handle
                .observe(Observation::Settings(settings.clone()))
                .await
            {
                Ok(()) => taken = settings,
                Err(failure) => {
                    warn!(error = %failure, "the new settings could not be taken; they are told again");
                    tokio::select! {
                        () = stop.cancelled() => return ("settings feed", Ok(())),
                        () = tokio::time::sleep(AGAIN) => {}
                    }
                }
            }
        }
    }
}
