//! `make demo`.
//!
//! `demo [GPU-BRIDGE]`: the program to show; without it, the one beside this program.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    let beside = || Some(std::env::current_exe().ok()?.with_file_name("gpu-bridge"));
    let given = std::env::args_os().nth(1).map(PathBuf::from);
    let Some(program) = given.or_else(beside) else {
        // Nobody is left to tell when standard error is closed; the same below.
        let _ = writeln!(io::stderr(), "demo: give the path of gpu-bridge");
        return ExitCode::FAILURE;
    };
    match demo::play(&program, &mut io::stdout()).await {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "\ndemo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
