//! One socket with the service on it: what one registration names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use legacy_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use super::service::{Service, Streams};
use super::{ListNow, TellContainer};
use crate::arbiter::Handle;
use crate::uds::{self, SocketFile};

/// How long calls may take to finish when a socket is given up. None is held for longer than 5 s.
const FINISH_LIMIT: Duration = Duration::from_secs(5);

/// A socket that serves, under a name that was never registered before.
#[derive(Debug)]
pub(super) struct Endpoint {
    path: PathBuf,
    file: SocketFile,
    service: Service,
    streams: watch::Receiver<usize>,
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
        let streams = Streams::new();
        let subscribed = streams.subscribe();
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        let service = Service::new(folder, handle, list_now, tell, streams, stop.clone());
        let mut servers = JoinSet::new();
        let file = serve(path, &service, &stop, &mut servers)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            service,
            streams: subscribed,
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

    /// Removes the file, ends the streams, and lets calls finish.
    pub(super) async fn close(self) {
        let Self {
            path,
            file,
            service: _,
            streams: _,
            mut servers,
            stop,
        } = self;
        drop(file);
        stop.cancel();
        let finished = async { while servers.join_next().await.is_some() {} };
        if tokio::time::timeout(FINISH_LIMIT, finished).await.is_err() {
            tracing::warn!(socket = %path.display(), "cut off calls that did not finish");
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
