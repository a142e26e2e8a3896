//! What a start without a ledger would take over, found out without a daemon, and without changing anything.

use std::time::Duration;

use anyhow::Context as _;
use bridge_core::{ClaimRef, Claims, DeviceName, Pool, Report, Standing, Status};
use bridge_nvml::Session;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Faces, NO_NVML_THREAD, OnDisk, RunOptions, Tasks, handout, nvml_options, process_probe, roots,
    settings, start_feeds, start_scans,
};
use crate::admin::Conditions;
use crate::arbiter::Rehearsal;
use crate::cdi::CdiFiles;
use crate::metrics::Metrics;
use crate::{client, store, usage};

/// How long the sources may take to answer. An admin waits for it.
const PATIENCE: Duration = Duration::from_secs(15);

/// What an adoption would lead to.
#[derive(Debug, Clone)]
pub struct Preview {
    /// The pool after it.
    pub status: Status,
    /// What it would report.
    pub reports: Vec<Report>,
    /// Claims allocated here by names that no GPU of this node has now.
    pub nameless: Vec<(ClaimRef, DeviceName)>,
}

/// What can be said of an adoption.
#[derive(Debug, Clone)]
pub enum Foresight {
    /// Every source has answered.
    Full(Box<Preview>),
    /// These have not, in words: a start would wait for them, and give nothing out meanwhile.
    Waiting(String),
}

/// Asks everything that an adoption asks.
///
/// # Errors
/// The configuration or the kubeconfig can't be used, or NVML's thread can't be started.
pub async fn preview(options: &RunOptions) -> anyhow::Result<Foresight> {
    let client = client::of_daemon(options.kubeconfig.as_deref()).await?;
    let (_current, config) = watch::channel(settings::read(options, &client).await?);
    let nvml = Session::spawn(nvml_options(options)).context(NO_NVML_THREAD)?;
    let probe = process_probe(nvml.clone(), options, config.clone(), Metrics::new());
    let chosen = config.borrow().config.settings.clone();
    let (rehearsal, handle) = Rehearsal::new(Pool::waiting(chosen), probe);
    let reports = rehearsal.reports();
    let stop = CancellationToken::new();
    let _stop_all = stop.clone().drop_guard();
    let conditions = Conditions::new();
    let mut tasks = Tasks::new();
    tasks.spawn(async move {
        rehearsal.run().await;
        ("rehearsal", Ok(()))
    });
    let (scans, _) = start_scans(&mut tasks, nvml, &conditions, &Metrics::new(), &stop);
    start_feeds(&mut tasks, scans.clone(), &handle, &stop).await;
    let roots = roots(options);
    let faces = Faces {
        options,
        tell: handout::tell(config.clone(), scans.clone(), roots.clone()),
        config,
        handle: &handle,
        conditions: &conditions,
        client,
        resources: usage::PodResources::new(&options.kubelet_dir, options.node_name.clone()),
        stop: &stop,
    };
    let (claims, pods) = faces.follow(&mut tasks);
    let (waiting, waiting_for) = watch::channel(String::new());
    let cdi = CdiFiles::new(options.cdi_dir.clone(), roots);
    let found = super::Leftovers {
        on_disk: OnDisk::of(&cdi),
        unprepared: {
            let unprepared = store::unprepared(&options.state_dir);
            std::sync::Arc::new(move || unprepared.clone())
        },
        scans,
    };
    faces.adopt(&mut tasks, found, (claims.clone(), pods), waiting);
    let mut status = handle.status();
    let adopted = status.wait_for(|status| status.standing == Standing::Serving);
    match tokio::time::timeout(PATIENCE, adopted).await {
        Ok(adopted) => {
            let status = adopted.context("the rehearsal has ended")?.as_ref().clone();
            let claims = claims.borrow().clone().unwrap_or_default();
            Ok(Foresight::Full(Box::new(Preview {
                nameless: nameless(&status, &claims),
                status,
                reports: reports(),
            })))
        }
        Err(_) => Ok(Foresight::Waiting(waiting_for.borrow().clone())),
    }
}

fn nameless(status: &Status, claims: &Claims) -> Vec<(ClaimRef, DeviceName)> {
    let known = |name: &DeviceName| status.units.iter().any(|unit| unit.device == *name);
    let named = claims.claims.iter().flat_map(|allocated| {
        let devices = allocated.devices.iter();
        devices.map(|device| (allocated.claim.clone(), device.device.clone()))
    });
    named.filter(|(_, name)| !known(name)).collect()
}
