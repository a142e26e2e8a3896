//! Asks a running daemon over an admin socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use bridge_core::PodUid;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::page::StatusPage;
use super::server::{CLEAR_FAULT, ClearFaultRequest, HANDOVER, RELEASE, ReleaseRequest, STATUS};

/// How long a question may take: a page is made from memory, and a ledger that is handed over waits for the disk.
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
    /// It said no.
    #[error("the daemon on {} said no: {why}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// In its words.
        why: String,
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
    let (code, page) = ask(path, "GET", STATUS, Body::empty()).await?;
    if code != StatusCode::OK {
        return Err(refused(path, code, &page));
    }
    serde_json::from_slice(&page).map_err(|error| exchange(path, error))
}

/// Asks the daemon that owns the ledger to hand it over to a pod. Returns once its lock is free.
///
/// # Errors
/// The daemon is not there, does not know how ([`ClientError::Code`]), or does not want to
/// ([`ClientError::Refused`]).
pub async fn hand_over(path: &Path, to: &PodUid) -> Result<(), ClientError> {
    let (code, page) = ask(path, "POST", HANDOVER, Body::from(to.to_string())).await?;
    match code {
        StatusCode::OK => Ok(()),
        code => Err(refused(path, code, &page)),
    }
}

/// Ends what holds a unit; returns what the daemon says.
///
/// # Errors
/// The daemon is not there, or does not want to ([`ClientError::Refused`]).
pub async fn release(path: &Path, request: &ReleaseRequest) -> Result<String, ClientError> {
    let body = serde_json::to_vec(request).map_err(|error| exchange(path, error))?;
    let (code, text) = ask(path, "POST", RELEASE, Body::from(body)).await?;
    match code {
        StatusCode::OK => Ok(String::from_utf8_lossy(&text).into_owned()),
        code => Err(refused(path, code, &text)),
    }
}

/// Ends the fault of a unit; returns what the daemon says.
///
/// # Errors
/// The daemon is not there, or does not want to ([`ClientError::Refused`]).
pub async fn clear_fault(path: &Path, request: &ClearFaultRequest) -> Result<String, ClientError> {
    let body = serde_json::to_vec(request).map_err(|error| exchange(path, error))?;
    let (code, text) = ask(path, "POST", CLEAR_FAULT, Body::from(body)).await?;
    match code {
        StatusCode::OK => Ok(String::from_utf8_lossy(&text).into_owned()),
        code => Err(refused(path, code, &text)),
    }
}

/// Asks for a page that says yes or no: its text if it says yes.
///
/// # Errors
/// The daemon is not there, or says no ([`ClientError::Refused`]).
pub async fn probe(path: &Path, page: &str) -> Result<String, ClientError> {
    let (code, text) = ask(path, "GET", page, Body::empty()).await?;
    match code {
        StatusCode::OK => Ok(String::from_utf8_lossy(&text).into_owned()),
        code => Err(refused(path, code, &text)),
    }
}

fn refused(path: &Path, code: StatusCode, page: &[u8]) -> ClientError {
    let path = path.to_owned();
    match code {
        StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE => ClientError::Refused {
            path,
            why: String::from_utf8_lossy(page).trim_end().to_owned(),
        },
        code => ClientError::Code { path, code },
    }
}

async fn ask(
    path: &Path,
    method: &str,
    uri: &str,
    body: Body,
) -> Result<(StatusCode, Vec<u8>), ClientError> {
    timeout(PATIENCE, exchanged(path, method, uri, body))
        .await
        .map_err(|_| ClientError::Silent {
            path: path.to_owned(),
        })?
}

async fn exchanged(
    path: &Path,
    method: &str,
    uri: &str,
    body: Body,
) -> Result<(StatusCode, Vec<u8>), ClientError> {
    let stream = UnixStream::connect(path)
        .await
        .map_err(|source| ClientError::Connect {
            path: path.to_owned(),
            source,
        })?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| exchange(path, error))?;
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header(header::HOST, "gpu-bridge")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body)
        .map_err(|error| exchange(path, error))?;
    let answer = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| exchange(path, error))?;
        let code = response.status();
        let body = Body::new(response.into_body());
        let bytes = to_bytes(body, PAGE_LIMIT_BYTES)
            .await
            .map_err(|error| exchange(path, error))?;
        Ok((code, bytes.to_vec()))
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
