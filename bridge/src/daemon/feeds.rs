//! What tells the pool of claims and of pods that wait: each in the way that the configuration says.

use std::collections::BTreeSet;

use bridge_core::{Claims, NamedClaims, Standing};
use tokio::sync::watch;

use super::{Faces, Tasks, conditions};
use crate::admin::ConditionName;
use crate::config::{Demand, Notice};
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
        match self.config.notice {
            Notice::Allocation => {
                tasks.spawn(async move {
                    let done = dra::claims::run(client, node, handle, out, stop).await;
                    ("claim watch", done.map_err(anyhow::Error::from))
                });
            }
            Notice::Bind => {
                let kubelet_dir = self.options.kubelet_dir.clone();
                tasks.spawn(async move {
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
                    let done = dra::claims::run_bound(inputs, stop).await;
                    ("claim reader", done.map_err(anyhow::Error::from))
                });
            }
        }
    }

    /// Starts what knows the pods that wait, if free units are to move by them.
    pub(super) fn start_demand(&self, tasks: &mut Tasks) {
        match self.config.demand {
            Demand::Turns => self.conditions.set(
                ConditionName::DemandTended,
                true,
                "free GPUs move by turns: offers.demand is turns",
            ),
            Demand::Watch => {
                let (node, handle, stop) = self.own();
                let client = self.client.clone();
                let (state, seen) = watch::channel(usage::DemandState::default());
                tasks.spawn(async move {
                    let done = usage::run_pending(client, node, handle, state, stop).await;
                    ("watch of pods that wait", done.map_err(anyhow::Error::from))
                });
                tasks.spawn(conditions::demand(
                    seen,
                    self.conditions.clone(),
                    self.stop.clone(),
                ));
            }
        }
    }
}
