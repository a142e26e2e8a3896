//! The search for other daemons of our names, on the paths of this daemon's flags.

use std::sync::Arc;

use bridge_core::{PodUid, Pods};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Ended;
use crate::arbiter::Handle;
use crate::cli::RunOptions;
use crate::device_plugin::RegistrationState;
use crate::rivals::{Lookout, Owner, Places};
use crate::usage;

/// A search that has not begun.
pub(super) fn new(
    options: &RunOptions,
    resources: usage::PodResources,
    pods: watch::Receiver<Option<Pods>>,
    registered: watch::Receiver<RegistrationState>,
    handle: Handle,
) -> Lookout {
    let places = Places {
        device_plugins: options.device_plugin_dir.clone(),
        registry: options.kubelet_dir.join(dra_proto::registration::DIR),
        kubelet_ids: Arc::new(move || {
            let resources = resources.clone();
            Box::pin(async move {
                let ids = resources.allocatable_ids().await;
                ids.map_err(|error| error.to_string())
            })
        }),
        is_registered: Arc::new(move || registered.borrow().is_registered()),
        owner: owner(options, pods),
    };
    Lookout::new(places, handle)
}

/// Looks until told to stop.
pub(super) async fn run(lookout: Lookout, stop: CancellationToken) -> Ended {
    let done = lookout.run(stop).await;
    (
        "lookout for other daemons",
        done.map_err(anyhow::Error::from),
    )
}

/// Names a process by its pod where it has one, as far as the pods bound here are known, else by its program.
fn owner(options: &RunOptions, pods: watch::Receiver<Option<Pods>>) -> Owner {
    let proc_root = options.proc_root.clone();
    Arc::new(move |pid| {
        let name = |uid: &PodUid| {
            let pods = pods.borrow();
            let mut bound = pods.iter().flat_map(|pods| &pods.pods);
            let found = bound.find(|bound| bound.uid == *uid);
            found.map_or_else(|| uid.to_string(), |bound| bound.pod.to_string())
        };
        match usage::pod_of_process(&proc_root, pid) {
            Some(uid) => Some(format!("pod {}", name(&uid))),
            None => usage::process_name(&proc_root, pid)
                .map(|program| format!("process {pid}, {program}")),
        }
    })
}
