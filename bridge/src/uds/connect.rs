//! Calling a server on a unix socket.

use std::error::Error as _;
use std::io;
use std::path::Path;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// Whether a status came back over the wire: what has a source went wrong on this side of it.
#[must_use]
pub fn is_answer(status: &Status) -> bool {
    status.source().is_none()
}

/// A gRPC client of the server on `path`. It connects with the first call and again after a loss, so a server that
/// is away fails calls and nothing else. The `:authority` is `localhost`, as the kubelet and its plugins have it.
///
/// Calls have no time limit of their own: the caller sets one.
#[must_use]
pub fn channel(path: &Path) -> Channel {
    let path = path.to_owned();
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(service_fn(move |_| {
        let path = path.clone();
        async move {
            let stream = UnixStream::connect(&path).await.map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    }))
}
