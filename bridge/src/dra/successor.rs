//! Calls that come to this daemon after it has given the ledger to its successor.
//!
//! The kubelet calls the newest socket that it knows and that answers; until the successor's is registered, and in
//! any order after a restart of the kubelet, that can be the old one. The kubelet comes back to a claim that was not
//! prepared only after 77 to 89 s, so each claim is passed on, and the successor's answer is the answer.

use std::path::PathBuf;

use bridge_core::{ClaimRef, PodUid};
use tonic::Status;
use tracing::debug;

use super::register::Place;
use super::service::Asked;
use super::wire::{self, PreparedDevice};
use crate::uds;

/// What the successor answered, its refusal as text for the pod's event; `None` if it does not serve yet.
type Answer<T> = Option<Result<T, String>>;

/// Finds successors.
#[derive(Debug)]
pub(super) struct Successors {
    /// The kubelet's root directory.
    pub(super) kubelet_dir: PathBuf,
}

impl Successors {
    pub(super) async fn prepare(
        &self,
        successor: &PodUid,
        claim: &ClaimRef,
    ) -> Answer<Vec<PreparedDevice>> {
        let channel = uds::channel(&self.socket(successor));
        said(wire::ask_to_prepare(channel, claim.into()).await)
    }

    pub(super) async fn unprepare(&self, successor: &PodUid, claim: &ClaimRef) -> Answer<()> {
        let channel = uds::channel(&self.socket(successor));
        said(wire::ask_to_unprepare(channel, claim.into()).await)
    }

    fn socket(&self, successor: &PodUid) -> PathBuf {
        Place {
            kubelet_dir: self.kubelet_dir.clone(),
            pod: Some(successor.clone()),
        }
        .service_socket()
    }
}

fn said<T>(answer: Result<Result<T, String>, Status>) -> Answer<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(status) if uds::is_answer(&status) => Some(Err(status.message().to_owned())),
        Err(status) => {
            debug!(error = %status, "the successor does not answer yet");
            None
        }
    }
}

impl From<&ClaimRef> for Asked {
    fn from(claim: &ClaimRef) -> Self {
        Self {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: claim.uid.to_string(),
        }
    }
}
