//! One socket with the service on it: what one registration names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use legacy_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use super::service::{Open, Service};
use super::{ListNow, TellContainer};
use crate::arbiter::Handle;
use crate::uds::{self, SocketFile};

/// How long calls may take to finish when a socket is given up. None is held for longer than 5 s.
const FINISH_LIMIT: Duration = Duration::from_secs(5);

/// For so long a call may be on its way from a kubelet that has learnt of another socket: it asks which one to call
/// right before it calls.
const LAST_CALL: Duration = Duration::from_millis(200);

/// A socket that serves, under a name that was never registered before.
#[derive(Debug)]
pub(super) struct Endpoint {
    path: PathBuf,
    file: SocketFile,
    service: Service,
    streams: watch::Receiver<usize>,
    calls: watch::Receiver<usize>,
    servers: JoinSet<Result<(), tonic::transport::Error>>,
    stop: CancellationToken,
}

impl Endpoint {
    pub(super) fn open(
        path: &Path,
        handle: Handle,
        list_now: ListNow,
        tell: TellContainer,
    ) -> Result<Self, uds::Error> {
        let stop = CancellationToken::new();
        let (streams, calls) = (Open::new(), Open::new());
        let counts = (streams.subscribe(), calls.subscribe());
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        let open = (streams, calls);
        let service = Service::new(folder, handle, list_now, tell, open, stop.clone());
        let mut servers = JoinSet::new();
        let file = serve(path, &service, &stop, &mut servers)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            service,
            streams: counts.0,
            calls: counts.1,
            servers,
            stop,
        })
    }

    /// The name to register.
    pub(super) fn name(&self) -> String {
        self.path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Counts the open `ListAndWatch` streams.
    pub(super) fn streams(&self) -> watch::Receiver<usize> {
        self.streams.clone()
    }

    /// Whether the kubelet would still find the socket.
    pub(super) fn is_in_place(&self) -> bool {
        self.file.is_in_place()
    }

    /// Makes the file anew after somebody has removed it. Open connections, and so the registration, stay as they are.
    pub(super) fn reopen(&mut self) -> Result<(), uds::Error> {
        self.file = serve(&self.path, &self.service, &self.stop, &mut self.servers)?;
        Ok(())
    }

    /// Removes the file, lets calls finish, and ends the streams then: the end of its stream makes the kubelet close the
    /// connection, and a pod whose `Allocate` was on it fails for good.
    pub(super) async fn close(self) {
        let Self {
            path,
            file,
            service: _,
            streams: _,
            mut calls,
            mut servers,
            stop,
        } = self;
        drop(file);
        let finished = async {
            until_quiet(&mut calls).await;
            stop.cancel();
            while servers.join_next().await.is_some() {}
        };
        if tokio::time::timeout(FINISH_LIMIT, finished).await.is_err() {
            stop.cancel();
            tracing::warn!(socket = %path.display(), "cut off calls that did not finish");
        }
    }
}

/// Returns when nobody has called for [`LAST_CALL`].
async fn until_quiet(calls: &mut watch::Receiver<usize>) {
    loop {
        drop(calls.wait_for(|open| *open == 0).await);
        calls.mark_unchanged();
        let next = tokio::time::timeout(LAST_CALL, calls.changed()).await;
        if !matches!(next, Ok(Ok(()))) {
            return;
        }
    }
}

fn serve(
    path: &Path,
    service: &Service,
    stop: &CancellationToken,
    servers: &mut JoinSet<Result<(), tonic::transport::Error>>,
) -> Result<SocketFile, uds::Error> {
    let (incoming, file) = uds::bind(path)?.into_parts();
    servers.spawn(Server::builder().serve_with_incoming_shutdown(
        DevicePluginServer::new(service.clone()),
        incoming,
        stop.clone().cancelled_owned(),
    ));
    Ok(file)
}
