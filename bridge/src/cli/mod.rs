//! The command line: flags, subcommands and exit codes.
//!
//! It knows how settings are written and which of them make no sense. What they mean is for the modules that
//! get them: `run` hands [`RunOptions`] to [`daemon`](crate::daemon), the other verbs ask a daemon that runs or
//! read one file.

mod doctor;
mod ledger;
mod nodes;
mod overview;
mod paint;
mod plan;
mod probe;
mod rebuild;
mod run;
mod socket;
mod status;
mod switch;
mod table;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kube::config::KubeconfigError;

pub use doctor::DoctorArgs;
pub use ledger::{ClearFaultArgs, HistoryArgs, LedgerArgs, LedgerCommand, ReleaseArgs};
pub use plan::PlanArgs;
pub use probe::ProbeArgs;
pub use rebuild::{RebuildArgs, RebuildError};
pub use run::{Mistake, Mistakes, RunArgs, RunOptions};
pub use status::StatusArgs;
pub use switch::SwitchArgs;

use crate::admin::ClientError;
use crate::client::{self, Wrong as WrongKubeconfig};
use crate::config;
use crate::migrate::SwitchError;
use crate::store::InspectError;

/// Exit code of a verb that failed while it ran.
const FAILURE: u8 = 1;
/// Exit code of a wrong flag, value or file: what `clap` uses for its own errors too.
const USAGE: u8 = 2;

/// Serves the GPUs of one node to counted pods and to ResourceClaims at once, from one pool.
#[derive(Debug, Parser)]
#[command(name = "gpu-bridge", version, about, max_term_width = 100)]
pub struct Cli {
    /// How log lines are written to standard error. What is logged: the filter in GPU_BRIDGE_LOG, for example
    /// `info` or `gpu_bridge=debug`.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "GPU_BRIDGE_LOG_FORMAT"
    )]
    pub log_format: LogFormat,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the daemon of this node until it is told to stop.
    Run(Box<RunArgs>),
    /// Shows who has which GPU on this node, and what the daemon still waits for; or what is free on all nodes.
    Status(StatusArgs),
    /// Looks for what is missing on this node and in its cluster, and says why it matters and what to do.
    ///
    /// It changes nothing, takes the flags of `run`, and works with a daemon or without; in the daemon's own container
    /// no flag is needed. Exit code: 0 when there is no problem (there may be warnings), 1 when there is one, 2 for
    /// wrong flags.
    Doctor(Box<DoctorArgs>),
    /// Asks the daemon of this pod whether it is alive or ready: for the probes of the DaemonSet.
    Probe(ProbeArgs),
    /// Looks at a ledger's file, or has a new one made.
    Ledger(LedgerArgs),
    /// Prints the completions of a shell.
    Completions {
        /// Which shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Says what a change of mode means for a node: who has to end first, and what changes for the pods that come next.
    /// Ends with 0 if it would be complete at once, with 3 if not.
    Plan(Box<PlanArgs>),
    /// Changes the mode, of all nodes or of one, and waits until that is complete. Ends with 0 then, with 3 if some have
    /// not ended yet, with 4 if a node does not show it, with 130 after Ctrl-C.
    Switch(Box<SwitchArgs>),
    /// Checks a configuration file and says what it means, without a daemon.
    CheckConfig {
        /// The file that --config would name, or a file of NVIDIA's device plugin.
        #[arg(value_name = "FILE", required_unless_present = "schema")]
        file: Option<PathBuf>,
        /// Writes the JSON Schema of the file instead, for an editor.
        #[arg(long, conflicts_with = "file")]
        schema: bool,
    },
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Why a verb did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Flags or values are wrong. Nothing was started.
    #[error(transparent)]
    Usage(#[from] Mistakes),
    /// The daemon ended with an error.
    #[error("the daemon ended")]
    Daemon(#[source] anyhow::Error),
    /// The daemon could not be asked.
    #[error("no status")]
    Status(#[from] ClientError),
    /// The daemon says no, or nothing.
    #[error("the probe failed")]
    Probe(#[source] ClientError),
    /// The doctor found problems, and has told them.
    #[error("problems were found: {0}")]
    Unwell(usize),
    /// The ledger's file could not be read.
    #[error("no ledger")]
    Ledger(#[from] InspectError),
    /// The history could not be read.
    #[error("the history in {} can't be read", folder.display())]
    History {
        /// The ledger's folder.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A unit was not released.
    #[error("nothing was released")]
    NotReleased(#[source] ClientError),
    /// A unit's fault was not cleared.
    #[error("no fault was cleared")]
    NotCleared(#[source] ClientError),
    /// The ledger stays as it is.
    #[error(transparent)]
    Rebuild(#[from] RebuildError),
    /// The configuration file is wrong.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The API server could not be asked.
    #[error(transparent)]
    Cluster(#[from] client::Error),
    /// Nothing was switched, or it can't be seen how far it is.
    #[error(transparent)]
    Switch(#[from] SwitchError),
    /// The answer could not be written.
    #[error("the answer could not be written to standard output")]
    Output(#[from] io::Error),
}

impl Error {
    /// The exit code that tells a script what kind of error it was.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_) | Self::Config(_) | Self::Rebuild(RebuildError::Usage(_)) => USAGE,
            Self::Daemon(error)
                if error.is::<config::Error>()
                    || error.is::<KubeconfigError>()
                    || error.is::<WrongKubeconfig>() =>
            {
                USAGE
            }
            Self::Daemon(_)
            | Self::Status(_)
            | Self::Probe(_)
            | Self::Unwell(_)
            | Self::Ledger(_)
            | Self::History { .. }
            | Self::NotReleased(_)
            | Self::NotCleared(_)
            | Self::Rebuild(_)
            | Self::Cluster(_)
            | Self::Switch(_)
            | Self::Output(_) => FAILURE,
        })
    }

    /// Writes the error and its causes to standard error.
    pub fn print(&self) {
        let mut text = format!("gpu-bridge: {self}");
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        // Nobody is left to tell when standard error is closed.
        let _ = writeln!(io::stderr(), "{text}");
    }
}

impl Cli {
    /// Does what the command line asks for.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn execute(self) -> Result<ExitCode, Error> {
        let done = match self.command {
            Command::Run(args) => {
                let options = args.check()?;
                crate::daemon::run(options).await.map_err(Error::Daemon)
            }
            Command::Status(args) => args.execute(&mut io::stdout()).await,
            Command::Doctor(args) => {
                let diagnosis = args.examine().await?;
                print(&diagnosis.text)?;
                match diagnosis.problems {
                    0 => Ok(()),
                    problems => Err(Error::Unwell(problems)),
                }
            }
            Command::Probe(args) => print(&args.ask().await.map_err(Error::Probe)?),
            Command::Ledger(args) => print(&args.execute().await?),
            Command::Completions { shell } => print(&completions(shell)),
            Command::Plan(args) => return args.execute().await,
            Command::Switch(args) => return args.execute().await,
            Command::CheckConfig {
                file: Some(file), ..
            } => print(&config::report(&file)?),
            Command::CheckConfig { file: None, .. } => {
                print(&format!("{:#}\n", config::json_schema()))
            }
        };
        done.map(|()| ExitCode::SUCCESS)
    }
}

/// The script that a shell reads once to complete what is typed.
fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpu-bridge", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

fn print(text: &str) -> Result<(), Error> {
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn completions_of_every_shell_name_every_verb() {
        for shell in Shell::value_variants() {
            let script = completions(*shell);
            for verb in Cli::command().get_subcommands() {
                let name = verb.get_name();
                assert!(script.contains(name), "{name} is missing for {shell}");
            }
        }
    }
}
