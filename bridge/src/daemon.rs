//! Wiring.

use crate::cli::RunOptions;

/// Runs the daemon.
///
/// # Errors
/// Nothing can be run yet.
pub async fn run(options: RunOptions) -> anyhow::Result<()> {
    anyhow::bail!("this build has no adapters for node {}", options.node_name)
}
