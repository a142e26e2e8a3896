//! `gpu-bridge switch`: changes the mode of all nodes or of one, and waits until that is complete.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bridge_core::Mode;
use clap::Args;

use super::plan::{NO_GO, mode};
use super::{Error, print};
use crate::config::MapName;
use crate::migrate::{Cluster, Outcome, Switch, Target};

/// Exit code: the time is up, and a node does not show the mode yet.
const NOT_IN_FORCE: u8 = 4;
/// Exit code of a program that SIGINT ended, as shells give it.
const INTERRUPTED: u8 = 130;

/// The flags of `switch`.
#[derive(Debug, Args)]
pub struct SwitchArgs {
    /// The mode to change to: legacy, both, dra or drained.
    #[arg(value_name = "MODE", value_parser = mode, required_unless_present = "rollback")]
    mode: Option<Mode>,
    /// Goes back to what was before the last switch.
    #[arg(long, conflicts_with = "mode")]
    rollback: bool,
    /// One node, by the label gpu-bridge.dev/profile; without it the mode in the ConfigMap is changed.
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The profile for that node, where more than one has the mode.
    #[arg(
        long,
        value_name = "NAME",
        requires = "node",
        conflicts_with = "rollback"
    )]
    profile: Option<String>,
    /// The ConfigMap with the configuration.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = map, default_value = "gpu-bridge/gpu-bridge")]
    config_map: MapName,
    /// How long the end is waited for, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u32,
    /// How to reach the API server [default: as kubectl does].
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

fn map(text: &str) -> Result<MapName, String> {
    MapName::parse(text)
        .ok_or_else(|| "write its namespace and its name, as in gpu-bridge/gpu-bridge".to_owned())
}

impl SwitchArgs {
    /// Makes the change, and prints each step. The exit code says how far it came.
    pub(super) async fn execute(self) -> Result<ExitCode, Error> {
        let cluster = Cluster::connect(self.kubeconfig.as_deref()).await?;
        let switch = Switch {
            map: self.config_map,
            node: self.node,
            profile: self.profile,
            target: self.mode.map_or(Target::Former, Target::Mode),
            limit: Duration::from_secs(self.timeout.into()),
        };
        // Nobody may be left to read it; the change goes on all the same.
        let mut is_written = false;
        let tell = |line: &str| {
            is_written = true;
            drop(print(&format!("{line}\n")));
        };
        let outcome = tokio::select! {
            outcome = switch.run(&cluster, tell) => outcome?,
            _ = tokio::signal::ctrl_c() => {
                print(if is_written {
                    "interrupted: the change stays written, and the nodes go on by themselves; \
                     `gpu-bridge switch --rollback` takes it back\n"
                } else {
                    "interrupted before it was known to be written; run it again, or look with `gpu-bridge plan`\n"
                })?;
                return Ok(ExitCode::from(INTERRUPTED));
            }
        };
        let (words, code) = match outcome {
            Outcome::Complete => ("complete\n", ExitCode::SUCCESS),
            Outcome::Waits => (
                "the time is up: the change is in force, and is complete when those have ended\n",
                ExitCode::from(NO_GO),
            ),
            Outcome::NotInForce => (
                "the time is up, and not every node shows the change; look at `gpu-bridge status` there\n",
                ExitCode::from(NOT_IN_FORCE),
            ),
        };
        print(words)?;
        Ok(code)
    }
}
