//! The two places where the admin server listens.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, chmod, rename};
use tokio::net::{TcpListener, UnixListener};

/// Who may ask over the socket: the daemon's own user.
const SOCKET_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address of `--http-addr` is taken, or not one of this machine.
    #[error("cannot listen on --http-addr {address}; give a free address of this machine")]
    Http {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The socket of `--admin-socket` cannot be made.
    #[error("cannot listen on --admin-socket {}; its folder must exist and be writable", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// Listens for HTTP. An address that others can reach is told in the log: the pages name pods of every tenant.
///
/// # Errors
/// The address cannot be had.
pub async fn http_listener(address: SocketAddr) -> Result<TcpListener, ListenError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| ListenError::Http { address, source })?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "The status page is open to everybody who can reach this address");
    }
    Ok(listener)
}

/// Listens on the admin socket. A socket left behind by a daemon that died is replaced.
///
/// The socket is made beside its place and moved there, so that it is never reachable with wider rights, and
/// that nobody finds the place empty. The caller owns the ledger's lock, so no living daemon loses its socket.
///
/// # Errors
/// The socket cannot be made.
pub fn socket_listener(path: &Path) -> Result<UnixListener, ListenError> {
    let bind = || -> io::Result<UnixListener> {
        let beside = path.with_extension("new");
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(&beside)?;
        chmod(&beside, SOCKET_MODE)?;
        rename(&beside, path)?;
        Ok(listener)
    };
    bind().map_err(|source| ListenError::Socket {
        path: path.to_owned(),
        source,
    })
}
