//! What tells the pool: of claims and of pods that wait, each in the way that the configuration says, and of whatever
//! else changes now and then.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use bridge_core::{Claims, NamedClaims, Standing, UnitStatus};
use bridge_nvml::Xids;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Ended, Errors, Faces, Tasks, conditions};
use crate::arbiter::{Handle, Observation};
use crate::config::live::Current;
use crate::config::{Config, Demand, Notice};
use crate::inventory::{Look, new_xids};
use crate::{dra, usage};

impl Faces<'_> {
    /// Starts what knows the claims allocated here.
    pub(super) fn start_claims(
        &self,
        tasks: &mut Tasks,
        named: watch::Receiver<Option<NamedClaims>>,
        out: watch::Sender<Option<Claims>>,
    ) {
        let (node, handle, stop) = self.own();
        let client = self.client.clone();
        let kubelet_dir = self.options.kubelet_dir.clone();
        tasks.spawn(while_chosen(
            "claim watch",
            self.config.clone(),
            |config| config.notice,
            stop.clone(),
            move |notice| {
                let (client, node, handle) = (client.clone(), node.clone(), handle.clone());
                let (named, out, stop) = (named.clone(), out.clone(), stop.clone());
                let kubelet_dir = kubelet_dir.clone();
                async move {
                    let done = match notice {
                        Notice::Allocation => {
                            dra::claims::run(client, node, handle, out, stop).await
                        }
                        Notice::Bind => {
                            let serves = handle.status().borrow().standing == Standing::Serving;
                            let inputs = dra::claims::BoundInputs {
                                client,
                                node,
                                named,
                                earlier: if serves {
                                    BTreeSet::new()
                                } else {
                                    usage::checkpointed_claims(&kubelet_dir).await
                                },
                                handle,
                                out,
                            };
                            dra::claims::run_bound(inputs, stop).await
                        }
                    };
                    done.map_err(anyhow::Error::from)
                }
            },
        ));
    }

    /// Starts what knows the pods that wait, while free units are to move by them.
    pub(super) fn start_demand(&self, tasks: &mut Tasks) {
        let (node, handle, stop) = self.own();
        let client = self.client.clone();
        let (state, seen) = watch::channel(usage::DemandState::default());
        tasks.spawn(conditions::demand(
            seen,
            self.config.clone(),
            self.conditions.clone(),
            self.stop.clone(),
        ));
        tasks.spawn(while_chosen(
            "watch of pods that wait",
            self.config.clone(),
            |config| config.demand,
            stop.clone(),
            move |demand| {
                let (client, node, handle) = (client.clone(), node.clone(), handle.clone());
                let (state, stop) = (state.clone(), stop.clone());
                async move {
                    match demand {
                        Demand::Watch => usage::run_pending(client, node, handle, state, stop)
                            .await
                            .map_err(anyhow::Error::from),
                        Demand::Turns => {
                            let (_, nobody_looks) = watch::channel(());
                            let unknown = |&(): &()| Some(Observation::Demand(None));
                            feed("demand", nobody_looks, unknown, handle, stop).await.1
                        }
                    }
                }
            },
        ));
    }
}

/// Tells the pool of errors of GPUs, and of what has to be done about those that have a fault.
pub(super) fn start_errors(
    tasks: &mut Tasks,
    errors: Errors,
    handle: &Handle,
    stop: &CancellationToken,
) {
    tasks.spawn(xids(errors.xids, handle.clone(), stop.clone()));
    let status = handle.clone();
    tasks.spawn(feed(
        "recovery feed",
        errors.looks,
        move |look: &Option<Look>| {
            let look = look.as_ref()?;
            // Otherwise nobody wants to know.
            let has_fault = |unit: &UnitStatus| unit.fault.is_some();
            let wanted = status.status().borrow().units.iter().any(has_fault);
            wanted.then(|| Observation::Recovery {
                asked: status.uptime_at(look.asked),
                actions: look.actions.clone(),
            })
        },
        handle.clone(),
        stop.clone(),
    ));
}

/// Tells the pool of each error once.
async fn xids(mut seen: watch::Receiver<Xids>, handle: Handle, stop: CancellationToken) -> Ended {
    const NAME: &str = "XID feed";
    let mut told = Xids::new();
    loop {
        let now = seen.borrow_and_update().clone();
        let news = new_xids(&told, &now);
        if !news.is_empty() {
            if let Err(failure) = handle.observe(Observation::Xids(news)).await {
                warn!(error = %failure, feed = NAME, "news could not be taken; it is told again");
                tokio::select! {
                    () = stop.cancelled() => return (NAME, Ok(())),
                    () = tokio::time::sleep(AGAIN) => continue,
                }
            }
            told = now;
        }
        tokio::select! {
            () = stop.cancelled() => return (NAME, Ok(())),
            changed = seen.changed() => if changed.is_err() {
                // The NVML thread has ended, and says so itself.
                stop.cancelled().await;
                return (NAME, Ok(()));
            }
        }
    }
}

/// How long news that could not be taken waits: a full disk is not emptied by asking it.
const AGAIN: Duration = Duration::from_secs(5);

/// Tells the pool what a watch shows, each time that it changes, until it is taken.
pub(super) async fn feed<T>(
    name: &'static str,
    mut seen: watch::Receiver<T>,
    observation: impl Fn(&T) -> Option<Observation>,
    handle: Handle,
    stop: CancellationToken,
) -> Ended {
    loop {
        let news = observation(&seen.borrow_and_update());
        if let Some(news) = news
            && let Err(failure) = handle.observe(news).await
        {
            warn!(error = %failure, feed = name, "news could not be taken; it is told again");
            tokio::select! {
                () = stop.cancelled() => return (name, Ok(())),
                () = tokio::time::sleep(AGAIN) => continue,
            }
        }
        tokio::select! {
            () = stop.cancelled() => return (name, Ok(())),
            changed = seen.changed() => if changed.is_err() {
                // Who told it has ended, and says so itself.
                stop.cancelled().await;
                return (name, Ok(()));
            }
        }
    }
}

/// Runs what belongs to a choice of the configuration, and another in its place when that changes.
pub(super) async fn while_chosen<
    C: Copy + PartialEq,
    F: Future<Output = anyhow::Result<()>> + Send,
>(
    name: &'static str,
    mut config: watch::Receiver<Current>,
    choice: impl Fn(&Config) -> C,
    stop: CancellationToken,
    run: impl Fn(C) -> F,
) -> Ended {
    loop {
        let chosen = choice(&config.borrow_and_update().config);
        let changes = async {
            let other = |current: &Current| choice(&current.config) != chosen;
            config.wait_for(other).await.map(drop)
        };
        tokio::select! {
            done = run(chosen) => return (name, done),
            changed = changes => if changed.is_err() {
                stop.cancelled().await;
                return (name, Ok(()));
            },
        }
    }
}
