//! `gpu-bridge probe`: what the kubelet runs in the container to learn how the daemon in it is.
//!
//! In a rolling update two daemons are on one node and its one network: an address cannot tell them apart, and a
//! successor that can't serve would pass for a good one. Each pod has an admin socket of its own.

use clap::{Args, ValueEnum};

use super::socket::SocketArgs;
use crate::admin::{self, ClientError, HEALTHZ, READYZ, own_admin_socket};

/// The flags of `probe`.
#[derive(Debug, Clone, Args)]
pub struct ProbeArgs {
    /// What is asked for.
    #[arg(value_enum)]
    page: Page,
    /// The daemon's --pod-uid: then the daemon of this pod is asked, and else the one that owns the ledger.
    #[arg(long, env = "GPU_BRIDGE_POD_UID", value_name = "UID")]
    pod_uid: Option<String>,
    #[command(flatten)]
    socket: SocketArgs,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Page {
    /// Whether the daemon is alive.
    Healthz,
    /// Whether every condition is met.
    Readyz,
}

impl ProbeArgs {
    /// Asks the daemon; returns the text to print.
    ///
    /// # Errors
    /// The daemon is not there, or says no.
    pub(super) async fn ask(self) -> Result<String, ClientError> {
        let owners = self.socket.path();
        let socket = match &self.pod_uid {
            Some(pod) => own_admin_socket(&owners, pod),
            None => owners,
        };
        let page = match self.page {
            Page::Healthz => HEALTHZ,
            Page::Readyz => READYZ,
        };
        admin::probe(&socket, page).await
    }
}
