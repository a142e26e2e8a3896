//! A gRPC server on a unix socket that can be opened anew while the daemon runs.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::transport::Server;
use tower::Service;
use tracing::{info, warn};

use crate::uds::{self, SocketFile};

/// A socket with a server behind it, or the lack of one.
#[derive(Debug)]
pub(super) struct Listener {
    path: PathBuf,
    running: Option<Running>,
    /// Servers whose socket is gone, and which still have calls to answer.
    ending: JoinSet<()>,
}

#[derive(Debug)]
struct Running {
    file: SocketFile,
    stop: CancellationToken,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Listener {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            running: None,
            ending: JoinSet::new(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the socket and serves on it. A socket that was open before is closed first.
    ///
    /// # Errors
    /// The socket can't be made.
    pub(super) fn open<S>(&mut self, service: S) -> Result<(), uds::Error>
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        self.close();
        let (incoming, file) = uds::bind(&self.path)?.into_parts();
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let server = tokio::spawn(
            Server::builder().serve_with_incoming_shutdown(service, incoming, stopped),
        );
        info!(socket = %self.path.display(), "listening");
        self.running = Some(Running { file, stop, server });
        Ok(())
    }

    /// Whether somebody who dials the path reaches the server.
    pub(super) fn is_open(&self) -> bool {
        self.running
            .as_ref()
            .is_some_and(|running| running.file.is_in_place() && !running.server.is_finished())
    }

    /// Takes the socket away. Calls that are here are answered.
    pub(super) fn close(&mut self) {
        let Some(running) = self.running.take() else {
            return;
        };
        drop(running.file);
        running.stop.cancel();
        let path = self.path.clone();
        self.ending.spawn(async move {
            match running.server.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    warn!(socket = %path.display(), error = %super::chain(&error), "the server on a socket ended");
                }
                Err(error) => {
                    warn!(socket = %path.display(), error = %error, "the server on a socket ended");
                }
            }
        });
        // Those that have ended leave nothing to keep.
        while self.ending.try_join_next().is_some() {}
    }

    /// Waits until the calls on closed sockets are answered, at most this long.
    pub(super) async fn drain(&mut self, limit: Duration) {
        let ended = async { while self.ending.join_next().await.is_some() {} };
        if timeout(limit, ended).await.is_err() {
            warn!(socket = %self.path.display(), "stopping although a call is not answered yet");
        }
    }
}
