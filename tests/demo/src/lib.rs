//! What gpu-bridge does, shown in a minute: no GPU, no cluster.
//!
//! The daemon is the real program in a process of its own. Around it are a driver library that knows eight GPUs
//! (`fake-nvml`), and a kubelet and an API server in Rust (`testkit`). Nothing is only told: each step looks at what the
//! kubelet, the API server and the containers' device files say, and the first thing that is not as it should be ends
//! the demo with its name.

mod node;
mod story;

use std::io::Write;
use std::path::Path;

pub use story::{Chapter, Shown};

/// Plays the whole demo with this `gpu-bridge`, and tells it to `out` as it goes on. Returns what was shown.
///
/// # Errors
///
/// The step that was not as it should be, what was expected, and the end of the daemon's log.
pub async fn play(program: &Path, out: &mut dyn Write) -> anyhow::Result<Vec<Shown>> {
    story::play(program, out).await
}
