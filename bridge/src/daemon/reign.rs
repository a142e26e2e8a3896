//! What only the owner of the ledger does, and how it ends: a rolling update, seen from the old pod.
//!
//! Two writers of one slice or one count would undo each other's writes, and there is one fixed address for pages.
//! So these tasks end before the ledger is handed over, and begin anew should it come back. Everything else goes on
//! until SIGTERM: the kubelet's streams stay open, and calls are passed on to the successor.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bridge_core::UnitId;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Ended, Tasks, feeds, why_it_ended};
use crate::admin::{self, HandOver, Pages};
use crate::arbiter::{Handle, Observation, TakenBack};
use crate::cli::RunOptions;
use crate::device_plugin::RegistrationState;
use crate::{device_plugin, dra, uds, usage};

/// For so long a successor that was answered may leave the lock alone: it tries it every 20 ms, on a busy node too.
/// Then the ledger is taken back. Counted from the answer, and as long as calls are held for it.
const TAKE_BACK_AFTER: Duration = Duration::from_secs(5);

/// How often it is looked whether the successor still has the lock: so long a node can be without an owner after its
/// death, if nobody restarts it sooner.
const TAKE_BACK_PERIOD: Duration = Duration::from_secs(1);

/// How long the count stays as a former owner has left it: registering takes some ten milliseconds. A kubelet that is
/// not there does not bind pods either, but the scheduler does.
const REGISTERED_LIMIT: Duration = Duration::from_secs(2);

/// How long the addresses of a former owner may take to become free. It gives them up before the lock; one that was
/// killed does so in the same moment.
const ADDRESS_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two tries to get an address.
const ADDRESS_AGAIN: Duration = Duration::from_millis(20);

/// Requests that may wait. Each successor asks one at a time.
pub(super) const REQUEST_LIMIT: usize = 4;

/// The owner's tasks and what they are made of.
pub(super) struct Reign {
    pub(super) options: RunOptions,
    pub(super) handle: Handle,
    pub(super) client: Client,
    pub(super) pages: Pages,
    pub(super) resources: usage::PodResources,
    pub(super) registered: watch::Receiver<RegistrationState>,
    pub(super) node_status: watch::Sender<device_plugin::NodeStatusState>,
    pub(super) published: watch::Sender<dra::PublishState>,
}

/// How a time without the ledger ended.
enum After {
    TakenBack,
    Stopped,
}

impl Reign {
    /// Starts the owner's tasks, but for the one that keeps the count.
    ///
    /// # Errors
    /// An address can't be had.
    pub(super) async fn begin(
        &self,
        tasks: &mut Tasks,
        over: &CancellationToken,
    ) -> anyhow::Result<()> {
        let since = Instant::now();
        let (http, socket) = loop {
            match self.addresses().await {
                Ok(addresses) => break addresses,
                // Without a pod UID there is no former owner: it is somebody else's address.
                Err(error) if self.options.pod_uid.is_none() => return Err(error),
                Err(error) if since.elapsed() >= ADDRESS_LIMIT => return Err(error),
                Err(_) => tokio::time::sleep(ADDRESS_AGAIN).await,
            }
        };
        let (pages, stop) = (self.pages.clone(), over.clone());
        tasks.spawn(async move {
            let done = admin::serve_http(pages, http, stop).await;
            ("status server", done.map_err(anyhow::Error::from))
        });
        let (pages, stop) = (self.pages.clone(), over.clone());
        tasks.spawn(async move {
            let done = admin::serve_socket(pages, socket, stop).await;
            ("admin server", done.map_err(anyhow::Error::from))
        });
        let node = self.options.node_name.clone();
        let (client, offers) = (self.client.clone(), self.handle.offers());
        let (state, stop) = (self.published.clone(), over.clone());
        let (shown, shown_now) = watch::channel(None);
        let metrics = self.handle.metrics().clone();
        tasks.spawn(async move {
            dra::slices::run(client, node, offers, state, shown, metrics, stop).await;
            ("slice publisher", Ok(()))
        });
        tasks.spawn(feeds::feed(
            "slice feed",
            shown_now,
            |shown: &Option<BTreeSet<UnitId>>| shown.clone().map(Observation::Slice),
            self.handle.clone(),
            over.clone(),
        ));
        Ok(())
    }

    async fn addresses(&self) -> anyhow::Result<(tokio::net::TcpListener, uds::Socket)> {
        let http = admin::http_listener(self.options.http_addr).await?;
        Ok((http, uds::bind(&self.options.admin_socket)?))
    }

    /// Keeps the count of the own Node from now on: at 0 until the kubelet reads our list.
    pub(super) fn keep_count(&self, tasks: &mut Tasks, over: &CancellationToken) {
        let inputs = self.count_inputs();
        let (state, stop) = (self.node_status.clone(), over.clone());
        tasks.spawn(async move {
            let done = device_plugin::run_node_status(inputs, state, stop).await;
            ("node status", done.map_err(anyhow::Error::from))
        });
    }

    /// The same, but the count stays as it is until the kubelet reads our list, or has not come to it for a while.
    pub(super) fn keep_count_once_registered(&self, tasks: &mut Tasks, over: &CancellationToken) {
        let inputs = self.count_inputs();
        let mut registered = self.registered.clone();
        let (state, stop) = (self.node_status.clone(), over.clone());
        tasks.spawn(async move {
            let is_registered = registered.wait_for(RegistrationState::is_registered);
            let known = tokio::time::timeout(REGISTERED_LIMIT, is_registered);
            // Whatever came of it, from here on the count is kept.
            drop(stop.run_until_cancelled(known).await);
            let done = device_plugin::run_node_status(inputs, state, stop).await;
            ("node status", done.map_err(anyhow::Error::from))
        });
    }

    fn count_inputs(&self) -> device_plugin::NodeStatusInputs {
        let resources = self.resources.clone();
        let kubelet_dir = self.options.kubelet_dir.clone();
        device_plugin::NodeStatusInputs {
            client: self.client.clone(),
            node: self.options.node_name.clone(),
            handle: self.handle.clone(),
            registered: self.registered.clone(),
            kubelet_count: Arc::new(move || {
                let resources = resources.clone();
                let kubelet_dir = kubelet_dir.clone();
                Box::pin(async move {
                    if usage::is_starting(&kubelet_dir).await {
                        return Err("it has not heard of all its pods since its start".to_owned());
                    }
                    let counted = resources.allocatable().await;
                    counted.map_err(|error| error.to_string())
                })
            }),
            right_again: device_plugin::RIGHT_AGAIN,
        }
    }

    /// Owns the ledger until told to stop, but for the times in which a successor does. `tasks` are those of
    /// [`begin`](Self::begin) with `over`.
    pub(super) async fn run(
        self,
        mut tasks: Tasks,
        mut over: CancellationToken,
        mut requests: mpsc::Receiver<HandOver>,
        stop: CancellationToken,
    ) -> Ended {
        const NAME: &str = "owner's tasks";
        loop {
            let request = tokio::select! {
                () = stop.cancelled() => {
                    end(&mut tasks, &over).await;
                    return (NAME, Ok(()));
                }
                ended = tasks.join_next() => return (NAME, Err(why_it_ended(ended))),
                request = requests.recv() => match request {
                    Some(request) => request,
                    None => return (NAME, Err(anyhow::anyhow!("nobody is left who could ask"))),
                },
            };
            if request.reply.is_closed() {
                // The successor has gone meanwhile.
                continue;
            }
            end(&mut tasks, &over).await;
            if let Some(patience) = self.hand_over(request).await {
                match self.watch_successor(patience, &mut requests, &stop).await {
                    Ok(After::TakenBack) => {}
                    Ok(After::Stopped) => return (NAME, Ok(())),
                    Err(error) => return (NAME, Err(error)),
                }
            }
            over = stop.child_token();
            self.keep_count(&mut tasks, &over);
            if let Err(error) = self.begin(&mut tasks, &over).await {
                return (NAME, Err(error));
            }
        }
    }

    /// Hands over; `None` if nothing came of it, else how long the successor has to take the lock.
    async fn hand_over(&self, HandOver { to, reply }: HandOver) -> Option<Duration> {
        let outcome = self.handle.hand_over(to.clone()).await;
        if let Err(error) = &outcome {
            warn!(pod = %to, %error, "the ledger was not handed over; this daemon goes on");
        }
        let is_over = outcome.is_ok();
        let heard = reply.send(outcome.map_err(|error| error.to_string()));
        // One that does not hear the answer has gone while it was waiting.
        let patience = heard.map_or(Duration::ZERO, |()| TAKE_BACK_AFTER);
        is_over.then_some(patience)
    }

    /// Waits for the end, and takes the ledger back when nobody has it.
    ///
    /// # Errors
    /// A successor has changed the ledger and is gone: this daemon must start anew.
    async fn watch_successor(
        &self,
        patience: Duration,
        requests: &mut mpsc::Receiver<HandOver>,
        stop: &CancellationToken,
    ) -> anyhow::Result<After> {
        let mut complained = false;
        let mut next = tokio::time::Instant::now() + patience;
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(After::Stopped),
                Some(HandOver { to, reply }) = requests.recv() => {
                    // Says who has it.
                    let outcome = self.handle.hand_over(to).await;
                    drop(reply.send(outcome.map_err(|error| error.to_string())));
                    continue;
                }
                () = tokio::time::sleep_until(next) => next += TAKE_BACK_PERIOD,
            }
            match self.handle.take_back().await {
                Ok(TakenBack::Owned) => {}
                Ok(TakenBack::Unchanged) => return Ok(After::TakenBack),
                Ok(TakenBack::Changed) => {
                    return Err(anyhow::anyhow!(
                        "the successor has changed the ledger and is gone; a new start reads it"
                    ));
                }
                Err(error) if complained => {
                    tracing::debug!(%error, "the ledger can't be taken back")
                }
                Err(error) => {
                    complained = true;
                    warn!(%error, "the successor is gone, and the ledger can't be taken back; it is tried again");
                }
            }
        }
    }
}

/// Ends the owner's tasks. None waits for anything when it is told to.
async fn end(tasks: &mut Tasks, over: &CancellationToken) {
    over.cancel();
    while tasks.join_next().await.is_some() {}
}

/// Serves the pages on the socket that this pod has for itself, whoever owns the ledger.
///
/// # Errors
/// The socket can't be had.
pub(super) fn serve_own_socket(
    tasks: &mut Tasks,
    options: &RunOptions,
    pages: &Pages,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    match uds::sweep_admin_sockets(&options.admin_socket) {
        Ok(removed) => {
            for path in removed {
                info!(socket = %path.display(), "removed an admin socket that nobody listened on");
            }
        }
        Err(error) => warn!(%error, "could not look for old admin sockets"),
    }
    let Some(path) = options.own_admin_socket() else {
        return Ok(());
    };
    let socket = uds::bind(&path).context("this pod's admin socket can't be made")?;
    let (pages, stop) = (pages.clone(), stop.clone());
    tasks.spawn(async move {
        let done = admin::serve_socket(pages, socket, stop).await;
        ("the pod's admin server", done.map_err(anyhow::Error::from))
    });
    Ok(())
}
