//! The `gpu-bridge` program: logging, and an exit code for what the command line asked for.

use std::env::VarError;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use gpu_bridge::cli::{Cli, Command, Error, LogFormat, Mistake, Mistakes};
use tracing_subscriber::EnvFilter;

/// The variable that says which log lines are written, and what holds without it: the Kubernetes client writes a
/// line for every request that fails, and whoever asked tells of the same, with the reason and not each time.
const LOG_FILTER: (&str, &str) = ("GPU_BRIDGE_LOG", "info,kube_client=off");

/// The same for a verb that answers whoever called it: its answer says what it has to say.
const LOG_OF_A_VERB: &str = "off";

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match start_logging(&cli) {
        Ok(()) => cli.execute().await,
        Err(mistake) => Err(Error::from(Mistakes(vec![mistake]))),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            error.print();
            error.exit_code()
        }
    }
}

fn start_logging(cli: &Cli) -> Result<(), Mistake> {
    let (variable, default) = match cli.command {
        Command::Run(_) => LOG_FILTER,
        Command::Status(_)
        | Command::Doctor(_)
        | Command::Probe(_)
        | Command::Plan(_)
        | Command::Switch(_)
        | Command::Ledger(_)
        | Command::Completions { .. }
        | Command::CheckConfig { .. } => (LOG_FILTER.0, LOG_OF_A_VERB),
    };
    let wrong = |value: String, why: String| Mistake {
        flag: variable,
        value: Some(value),
        why: format!("is no log filter ({why}); write a level, as in info, or gpu_bridge=debug"),
    };
    let filter = match std::env::var(variable) {
        Err(VarError::NotPresent) => EnvFilter::new(default),
        Err(VarError::NotUnicode(value)) => {
            return Err(wrong(
                value.to_string_lossy().into_owned(),
                "not UTF-8".to_owned(),
            ));
        }
        Ok(value) => EnvFilter::try_new(&value).map_err(|error| wrong(value, error.to_string()))?,
    };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match cli.log_format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Ok(())
}
