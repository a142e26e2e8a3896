//! Giving the ledger to a successor in a rolling update, and taking it back when there is none after all.

use bridge_core::{PodUid, Standing};
use tokio::sync::oneshot;
use tracing::{error, info};

use super::super::handle::{Call, Error, Observation, TakenBack};
use super::{Arbiter, reports};
use crate::store::{Error as StoreError, Loaded};

impl Arbiter {
    /// Serves a batch. What came before a change of owner is decided before it, what came after is not.
    pub(super) async fn take(&mut self, batch: Vec<Call>) {
        let mut calls = Vec::with_capacity(batch.len());
        for call in batch {
            match call {
                Call::HandOver { to, reply } => {
                    self.decide_or_turn_away(std::mem::take(&mut calls)).await;
                    let outcome = self.hand_over(to).await;
                    drop(reply.send(outcome));
                }
                Call::TakeBack { reply } => {
                    self.decide_or_turn_away(std::mem::take(&mut calls)).await;
                    let outcome = self.take_back().await;
                    drop(reply.send(outcome));
                }
                Call::Allocate { .. }
                | Call::Prepare { .. }
                | Call::Unprepare { .. }
                | Call::Release { .. }
                | Call::ClearFault { .. }
                | Call::Observe { .. } => calls.push(call),
            }
        }
        self.decide_or_turn_away(calls).await;
    }

    /// Whether this daemon decides.
    pub(super) fn owns(&self) -> bool {
        self.successor.borrow().is_none()
    }

    async fn decide_or_turn_away(&mut self, calls: Vec<Call>) {
        let successor = self.successor.borrow().clone();
        match successor {
            None => self.serve(calls).await,
            Some(successor) if calls.is_empty() => drop(successor),
            Some(successor) => {
                // As a rule the one that asked; of two successors another one may have been quicker.
                let successor = self.store.other_owner().unwrap_or(successor);
                for call in calls {
                    self.turn_away(call, &successor);
                }
            }
        }
    }

    /// Answers a call that somebody else has to decide, and keeps what was seen: each watch waits with one
    /// observation at most until it is taken, so they are few.
    fn turn_away(&mut self, call: Call, successor: &PodUid) {
        fn no<T>(reply: oneshot::Sender<Result<T, Error>>, successor: &PodUid) {
            drop(reply.send(Err(Error::NotOwner(successor.clone()))));
        }
        match call {
            Call::Allocate { reply, .. } => no(reply, successor),
            Call::Prepare { reply, .. } => no(reply, successor),
            Call::Unprepare { reply, .. } => no(reply, successor),
            Call::Release { reply, .. } => no(reply, successor),
            Call::ClearFault { reply, .. } => no(reply, successor),
            Call::HandOver { reply, .. } => no(reply, successor),
            Call::TakeBack { reply } => no(reply, successor),
            // A look at what is there; so `/healthz` is answered as well.
            Call::Observe {
                observation: Observation::Processes,
                reply,
            } => drop(reply.send(Ok(()))),
            Call::Observe { observation, reply } => {
                self.kept.push(Call::Observe { observation, reply });
            }
        }
    }

    async fn hand_over(&mut self, to: PodUid) -> Result<(), Error> {
        if let Some(successor) = self.successor.borrow().clone() {
            return Err(Error::NotOwner(successor));
        }
        if self.disk_in_doubt && self.pool.standing() == Standing::Serving {
            let ledger = self.pool.ledger().clone();
            self.write(ledger).await?;
        }
        // Before the lock is free, so that no call is decided here and there.
        info!(pod = %to, generation = self.pool.ledger().generation, "handing the ledger over to a successor");
        self.successor.send_replace(Some(to));
        self.store.let_go();
        Ok(())
    }

    async fn take_back(&mut self) -> Result<TakenBack, Error> {
        if self.owns() {
            return Ok(TakenBack::Unchanged);
        }
        let store = std::sync::Arc::clone(&self.store);
        let taken = tokio::task::spawn_blocking(move || store.take_back())
            .await
            .map_err(|_| Error::Stopping)?;
        let loaded = match taken {
            Ok(loaded) => loaded,
            Err(StoreError::Owned { .. }) => return Ok(TakenBack::Owned),
            Err(
                failure @ (StoreError::Lock { .. }
                | StoreError::Folder { .. }
                | StoreError::OpenToAll { .. }
                | StoreError::Flush { .. }),
            ) => return Err(Error::NotSaved(reports::chain(&failure))),
        };
        if !self.is_as_it_was(&loaded) {
            error!(
                "a successor has changed the ledger and is gone: starting anew with what it says"
            );
            return Ok(TakenBack::Changed);
        }
        info!(
            generation = self.pool.ledger().generation,
            "the successor is gone, and the ledger as it was left: this daemon owns it again"
        );
        self.successor.send_replace(None);
        // What was seen meanwhile, in the order in which it was.
        let kept = std::mem::take(&mut self.kept);
        self.serve(kept).await;
        Ok(TakenBack::Unchanged)
    }

    fn is_as_it_was(&self, loaded: &Loaded) -> bool {
        match (self.pool.standing(), loaded) {
            (Standing::Serving, Loaded::Ledger(ledger)) => ledger == self.pool.ledger(),
            (Standing::WaitingForAdoption, Loaded::Missing)
            | (Standing::LedgerUnreadable, Loaded::Unreadable { .. }) => true,
            (Standing::Serving, Loaded::Missing | Loaded::Unreadable { .. })
            | (Standing::WaitingForAdoption, Loaded::Ledger(_) | Loaded::Unreadable { .. })
            | (Standing::LedgerUnreadable, Loaded::Ledger(_) | Loaded::Missing) => false,
        }
    }
}
