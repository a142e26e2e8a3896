//! What the configuration says, to those who go by it while the daemon runs.

use std::path::Path;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Ended, Faces, Tasks, conditions, feeds};
use crate::arbiter::Observation;
use crate::cli::RunOptions;
use crate::config::live::{self, Current, Taker};
use crate::config::profile::{self, Label};
use crate::config::{Source, map};
use crate::metrics::Metrics;
use crate::store;

/// What the copy of the last good file is called, beside the ledger.
const KEPT: &str = "config.last-good.yaml";

/// Reads the configuration at the start.
pub(super) async fn read(
    options: &RunOptions,
    client: &kube::Client,
) -> Result<Current, crate::config::Error> {
    let (node, kept) = (&options.node_name, options.state_dir.join(KEPT));
    match &options.config {
        Some(Source::File(path)) => {
            let label = || profile::read(client, node);
            live::begin(path, live::read(path), &kept, label).await
        }
        Some(Source::ConfigMap(name)) => map::at_start(client, name, node, &kept).await,
        None => Ok(Current::default()),
    }
}

/// Follows the source and the node's label, and tells the pool and the pages what they say.
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
        seen.clone(),
        |current: &Current| Some(Observation::Settings(current.config.settings.clone())),
        handle.clone(),
        stop.clone(),
    ));
    tasks.spawn(count(
        current.subscribe(),
        handle.metrics().clone(),
        stop.clone(),
    ));
    let (label_out, label) = watch::channel(Label::default());
    let (client, node, cancel) = (
        faces.client.clone(),
        options.node_name.clone(),
        stop.clone(),
    );
    tasks.spawn(async move {
        profile::follow(client, node, seen, label_out, cancel).await;
        ("profile label", Ok(()))
    });
    let (source, cancel) = (options.config.clone(), stop.clone());
    let (client, kept) = (faces.client.clone(), options.state_dir.join(KEPT));
    tasks.spawn(async move {
        if let Some(source) = source {
            let keep = |text: &str| keep(&kept, text);
            let taker = Taker::new(source.origin(), keep, current, label);
            match source {
                Source::File(path) => live::follow(path, taker, cancel).await,
                Source::ConfigMap(name) => map::follow(client, name, taker, cancel).await,
            }
        } else {
            // Without a source nothing changes.
            cancel.cancelled().await;
            drop(current);
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
