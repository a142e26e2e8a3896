//! The handle to the NVML thread.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::error::Error;
use crate::events::{Events, Xids};
use crate::snapshot::{GpuPair, GpuProcesses, Snapshot};
use crate::thread::{self, Answer, Request};

/// How many requests may wait for the thread. The daemon has three callers (inventory, usage, the arbiter's
/// look before a hand-over), so that a fuller queue means that the driver hangs.
pub const QUEUE: usize = 16;
/// How long a caller waits for a snapshot: without persistence mode NVML wakes each GPU, at a second or two
/// apiece, and a node may have 16.
pub const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a caller waits for the processes: milliseconds in good health, and not over the 5 s that a call
/// of the kubelet may be held.
pub const PROCESSES_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a shutdown waits for the driver: it ends with the process anyway.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Where NVML is, and how long to wait for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The library to load; without it, `libnvidia-ml.so.1` as the dynamic loader finds it.
    pub library: Option<PathBuf>,
    /// Where sysfs is mounted: `/sys`.
    pub sys_root: PathBuf,
    /// How long callers wait.
    pub timeouts: Timeouts,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            library: None,
            sys_root: PathBuf::from("/sys"),
            timeouts: Timeouts::default(),
        }
    }
}

/// How long callers wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// [`SNAPSHOT_TIMEOUT`].
    pub snapshot: Duration,
    /// [`PROCESSES_TIMEOUT`].
    pub processes: Duration,
    /// [`SHUTDOWN_TIMEOUT`].
    pub shutdown: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            snapshot: SNAPSHOT_TIMEOUT,
            processes: PROCESSES_TIMEOUT,
            shutdown: SHUTDOWN_TIMEOUT,
        }
    }
}

/// The NVML of this node. Clones share the one thread, which ends with the last of them.
#[derive(Debug, Clone)]
pub struct Session {
    requests: mpsc::Sender<Request>,
    timeouts: Timeouts,
}

impl Session {
    /// Starts the thread. NVML itself is loaded by the first request, so that a node without a driver is a
    /// matter of the requests.
    ///
    /// # Errors
    ///
    /// [`Error::NoThread`].
    pub fn spawn(options: Options) -> Result<Self, Error> {
        Self::start(options, None)
    }

    /// The same with a second thread, which waits for the errors of GPUs while NVML is open: from the first request on.
    /// What the driver tells of while NVML is started anew is not heard.
    ///
    /// # Errors
    ///
    /// [`Error::NoThread`].
    pub fn spawn_listening(options: Options) -> Result<(Self, watch::Receiver<Xids>), Error> {
        let (seen, xids) = watch::channel(Xids::new());
        let session = Self::start(options, Some(Events::new(seen)))?;
        Ok((session, xids))
    }

    fn start(options: Options, events: Option<Events>) -> Result<Self, Error> {
        let (requests, queue) = mpsc::channel(QUEUE);
        let timeouts = options.timeouts;
        std::thread::Builder::new()
            .name("nvml".to_owned())
            .spawn(move || thread::run(queue, &options, events.as_ref()))
            .map_err(|error| Error::NoThread {
                reason: error.to_string(),
            })?;
        Ok(Self { requests, timeouts })
    }

    /// The driver and the GPUs.
    ///
    /// NVML is started anew first if it is not open, or if at the last snapshot a GPU did not answer.
    /// Otherwise GPUs that were added since do not show: NVML does not look for them, see [`Session::rescan`].
    ///
    /// # Errors
    ///
    /// Any [`Error`] but [`Error::NoThread`]; a GPU that does not answer is none, see [`Snapshot::failed`].
    pub async fn snapshot(&self) -> Result<Snapshot, Error> {
        self.ask("the inventory", self.timeouts.snapshot, Request::Snapshot)
            .await?
    }

    /// As [`Session::snapshot`], with NVML started anew: finds GPUs that were added, and a new driver.
    ///
    /// # Errors
    ///
    /// As [`Session::snapshot`].
    pub async fn rescan(&self) -> Result<Snapshot, Error> {
        self.ask("the inventory", self.timeouts.snapshot, Request::Rescan)
            .await?
    }

    /// The compute processes of each GPU (`nvmlDeviceGetComputeRunningProcesses_v3`, one call a GPU).
    ///
    /// A GPU that is not listed has not answered since NVML was started: nothing is known of its processes.
    ///
    /// # Errors
    ///
    /// Any [`Error`] but [`Error::NoThread`]; a GPU that does not answer has its own, see [`GpuProcesses`].
    pub async fn processes(&self) -> Result<Vec<GpuProcesses>, Error> {
        self.ask("the processes", self.timeouts.processes, Request::Processes)
            .await?
    }

    /// How the GPUs are connected: one entry for each two that answer. Some hundred calls, between which other requests are
    /// answered; what a GPU does not say counts as no connection.
    ///
    /// # Errors
    ///
    /// Any [`Error`] but [`Error::NoThread`]; [`Error::Interrupted`] if NVML was started anew meanwhile.
    pub async fn topology(&self) -> Result<Vec<GpuPair>, Error> {
        self.ask("the topology", self.timeouts.snapshot, Request::Topology)
            .await?
    }

    /// Leaves NVML and ends the thread. Requests that wait get [`Error::Ended`], and so do all later ones.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] when the driver hangs; the thread is left behind then and ends with the process.
    /// [`Error::Ended`] when it has ended before.
    pub async fn shutdown(&self) -> Result<(), Error> {
        self.ask("the shutdown", self.timeouts.shutdown, Request::Shutdown)
            .await
    }

    /// Ends when the thread has: after [`Session::shutdown`], or through a bug, which should end the daemon.
    pub async fn ended(&self) {
        self.requests.closed().await;
    }

    async fn ask<T>(
        &self,
        what: &'static str,
        timeout: Duration,
        request: impl FnOnce(Answer<T>) -> Request,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        self.requests
            .try_send(request(answer))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => Error::QueueFull { waiting: QUEUE },
                mpsc::error::TrySendError::Closed(_) => Error::Ended,
            })?;
        match tokio::time::timeout(timeout, answered).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(_dropped)) => Err(Error::Ended),
            Err(_elapsed) => Err(Error::TimedOut {
                what,
                after: timeout,
            }),
        }
    }
}
