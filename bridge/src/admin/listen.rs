//! Where the HTTP server listens. The admin socket is made by [`uds`](crate::uds).

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpListener;

/// The server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on --http-addr {address}; give a free address of this machine")]
pub struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

/// Listens for HTTP. An address that others can reach is told in the log.
///
/// # Errors
/// The address cannot be had.
pub async fn http_listener(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| ListenError { address, source })?;
    if !address.ip().is_loopback() {
        tracing::info!(%address, "/healthz, /readyz and /metrics are open to everybody who can reach this address");
    }
    Ok(listener)
}
