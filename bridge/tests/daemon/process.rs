//! The daemon as a child process: its command line, its log, signals, its end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::world::{SOON, until};

/// Flags of `gpu-bridge run`, each with its value.
pub(crate) type Flags = BTreeMap<&'static str, OsString>;

/// A running daemon. It is killed when this goes, by its own process id.
pub(crate) struct Daemon {
    child: Child,
    log: Log,
    reader: Option<JoinHandle<()>>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What the daemon has written to standard error so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn text(&self) -> String {
        self.lines().join("\n")
    }

    pub(crate) fn has(&self, part: &str) -> bool {
        self.lines().iter().any(|line| line.contains(part))
    }
}

/// The command line of `gpu-bridge`, in an environment that has nothing to say.
pub(crate) fn gpu_bridge() -> Command {
    quiet(Command::new(env!("CARGO_BIN_EXE_gpu-bridge")))
}

pub(crate) fn quiet(mut command: Command) -> Command {
    command.env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

impl Daemon {
    /// Starts `gpu-bridge run` with these flags.
    pub(crate) fn spawn(flags: &Flags) -> Self {
        Self::start(gpu_bridge(), flags)
    }

    /// The same for a daemon that gets an error, and no signal, when it writes past the limit of
    /// [`Daemon::limit_files`].
    pub(crate) fn spawn_to_be_limited(flags: &Flags) -> Self {
        let mut shell = Command::new("sh");
        // What is ignored stays so in the program that follows.
        shell
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_gpu-bridge"));
        Self::start(quiet(shell), flags)
    }

    /// Starts a command to which `run` and the flags are added.
    pub(crate) fn start(mut command: Command, flags: &Flags) -> Self {
        command.args(["--log-format", "json", "run"]);
        for (flag, value) in flags {
            command.arg(flag).arg(value);
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the daemon starts");
        let errors = child.stderr.take().expect("standard error is a pipe");
        let log = Log::default();
        let to = log.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                to.0.lock().unwrap().push(line);
            }
        });
        Self {
            child,
            log,
            reader: Some(reader),
        }
    }

    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it is our child");
    }

    /// `None` while it runs.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// From now on it can't write a file beyond so many bytes; pipes and sockets are not concerned.
    pub(crate) fn limit_files(&self, bytes: Option<u64>) {
        let limit = Rlimit {
            current: bytes,
            maximum: None,
        };
        prlimit(Some(self.pid()), Resource::Fsize, limit).expect("it is our child");
    }

    /// Waits until it has ended by itself; returns how, with everything that it has written.
    pub(crate) async fn ended(mut self) -> (ExitStatus, String) {
        self.wait_for_the_end(SOON).await;
        let status = self.status().expect("it has ended");
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader ends with the pipe");
        }
        (status, self.log.text())
    }

    async fn wait_for_the_end(&mut self, limit: Duration) {
        until("the daemon ends", limit, async || {
            self.child.try_wait().expect("it is our child").is_some()
        })
        .await;
    }
}
