//! Asks a running daemon over its admin socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::page::StatusPage;
use super::server::STATUS;

/// How long a question may take: a page is made from memory.
const PATIENCE: Duration = Duration::from_secs(5);
/// The largest page taken. A unit with its hold is some 700 bytes; a node has at most a few hundred units.
const PAGE_LIMIT_BYTES: usize = 4 << 20;

/// The daemon could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no daemon answers on {}; is gpu-bridge running on this node, and may you read the socket? \
         Another path: --admin-socket", path.display()
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("the daemon on {} broke off", path.display())]
    Exchange {
        /// The socket.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It answered with an HTTP error.
    #[error("the daemon on {} answered {code}", path.display())]
    Code {
        /// The socket.
        path: PathBuf,
        /// The code.
        code: StatusCode,
    },
    /// It did not answer in time.
    #[error("the daemon on {} has not answered within {} s", path.display(), PATIENCE.as_secs())]
    Silent {
        /// The socket.
        path: PathBuf,
    },
}

/// Asks for [`StatusPage`].
///
/// # Errors
/// The daemon is not there, or does not answer with a status page.
pub async fn status(path: &Path) -> Result<StatusPage, ClientError> {
    let page = timeout(PATIENCE, get(path, STATUS))
        .await
        .map_err(|_| ClientError::Silent {
            path: path.to_owned(),
        })??;
    serde_json::from_slice(&page).map_err(|error| exchange(path, error))
}

async fn get(path: &Path, uri: &str) -> Result<Vec<u8>, ClientError> {
    let stream = UnixStream::connect(path)
        .await
        .map_err(|source| ClientError::Connect {
            path: path.to_owned(),
            source,
        })?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| exchange(path, error))?;
    let request = Request::get(uri)
        .header(header::HOST, "gpu-bridge")
        .body(Body::empty())
        .map_err(|error| exchange(path, error))?;
    let answer = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| exchange(path, error))?;
        let code = response.status();
        if code != StatusCode::OK {
            return Err(ClientError::Code {
                path: path.to_owned(),
                code,
            });
        }
        let body = Body::new(response.into_body());
        let bytes = to_bytes(body, PAGE_LIMIT_BYTES)
            .await
            .map_err(|error| exchange(path, error))?;
        Ok(bytes.to_vec())
    };
    tokio::pin!(answer, connection);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        // The connection ends first when the daemon closes it behind its answer, or breaks off.
        ended = &mut connection => match ended {
            Ok(()) => answer.await,
            Err(error) => Err(exchange(path, error)),
        },
    }
}

fn exchange(
    path: &Path,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> ClientError {
    ClientError::Exchange {
        path: path.to_owned(),
        source: source.into(),
    }
}
