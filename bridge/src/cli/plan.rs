//! `gpu-bridge plan`: what a change of mode means for a node, before anybody makes it.

use std::path::PathBuf;
use std::process::ExitCode;

use bridge_core::Mode;
use clap::Args;

use super::socket::SocketArgs;
use super::status::Output;
use super::{Error, print};
use crate::admin;
use crate::migrate::{Cluster, mode_of, plan, view_of_page};

/// Exit code: somebody has to end first, or something is in doubt.
pub(super) const NO_GO: u8 = 3;

/// The flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The mode to change to: legacy, both, dra or drained.
    #[arg(long, value_name = "MODE", value_parser = mode)]
    to: Mode,
    /// A node, asked about at the API server with your own credentials; without it the daemon of this node is asked.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// How to reach the API server [default: as kubectl does].
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArgs,
    /// How the answer is written.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

/// Reads the name of a mode.
pub(super) fn mode(word: &str) -> Result<Mode, String> {
    mode_of(word).ok_or_else(|| format!("allowed: {}", Mode::ALL.map(Mode::as_str).join(", ")))
}

impl PlanArgs {
    /// Prints the plan. The exit code says whether the change would be complete at once.
    pub(super) async fn execute(self) -> Result<ExitCode, Error> {
        let view = match &self.node {
            Some(node) => {
                let cluster = Cluster::connect(self.kubeconfig.as_deref()).await?;
                cluster.view(node).await?
            }
            None => view_of_page(&admin::status(&self.socket.path()).await?),
        };
        let plan = plan(&view, self.to);
        print(&match self.output {
            Output::Table | Output::Wide => plan.to_string(),
            Output::Json => {
                serde_json::to_string_pretty(&plan).expect("a plan of texts and numbers is JSON")
                    + "\n"
            }
        })?;
        Ok(if plan.go {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(NO_GO)
        })
    }
}
