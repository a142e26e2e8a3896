//! Who uses what on this node: the kubelet's pod-resources, the pods bound here, and whose a process is; and, for a
//! node without a ledger, what the kubelet's own files say.
//!
//! Owns the reading of these sources, and when one of them is too old to be believed. It draws no conclusion: the
//! pool gets whole snapshots through [`Handle::observe`](crate::arbiter::Handle::observe), and none where a source
//! does not answer.
//! It must not know the faces, the ledger, CDI files or NVML.

mod adoption;
mod answer;
mod checkpoint;
#[cfg(any(test, fuzzing))]
mod hostile;
mod pending;
mod pod_resources;
mod pods;
mod processes;

use std::fmt::Write as _;
use std::time::Duration;

use bridge_core::Face;

pub use adoption::{AdoptionInputs, UnitMinors, UnpreparedClaims, run_adoption};
pub use checkpoint::checkpointed_claims;
pub use pending::{DemandState, run_pending};
pub use pod_resources::{AskAbout, Error, PodResources, ask_about, run_listing};
pub use pods::{PodsOut, counted, is_starting, run_pods};
pub use processes::{pod_of_process, process_name};

#[cfg(any(test, fuzzing))]
pub use hostile::read_checkpoints;

/// The extended resource of counted pods.
const RESOURCE: &str = Face::Legacy.served_name();

/// The DRA driver of claim pods.
const DRIVER: &str = Face::Dra.served_name();

/// Trouble that goes on is logged once in this time.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// When the arbiter could not save what it was told, it is told again after this. A full disk stays full for a while.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// A gRPC status in words. The transport's own reason, such as a socket that is missing, is only in its sources.
fn status_text(status: &tonic::Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        // Writing to a String can't fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}
