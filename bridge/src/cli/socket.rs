//! Where a verb finds the daemon that it asks.

use std::path::PathBuf;

use clap::Args;

use super::run::{default_admin_socket, default_state_dir};

/// The flags that lead to the admin socket.
#[derive(Debug, Clone, Args)]
pub(super) struct SocketArgs {
    /// Socket of the daemon [default: <state-dir>/admin.sock].
    #[arg(long, env = "GPU_BRIDGE_ADMIN_SOCKET", value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    #[command(flatten)]
    state: StateArgs,
}

/// The flags that lead to the ledger's folder.
#[derive(Debug, Clone, Args)]
pub(super) struct StateArgs {
    /// The daemon's --state-dir [default: <kubelet-dir>/plugins/gpu.nvidia.com].
    #[arg(long, env = "GPU_BRIDGE_STATE_DIR", value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The daemon's --kubelet-dir.
    #[arg(
        long,
        env = "GPU_BRIDGE_KUBELET_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet"
    )]
    kubelet_dir: PathBuf,
}

impl StateArgs {
    /// The folder of the ledger.
    pub(super) fn path(self) -> PathBuf {
        self.state_dir
            .unwrap_or_else(|| default_state_dir(&self.kubelet_dir))
    }
}

impl SocketArgs {
    /// The socket of the daemon that owns the ledger.
    pub(super) fn path(self) -> PathBuf {
        self.admin_socket
            .unwrap_or_else(|| default_admin_socket(&self.state.path()))
    }
}
