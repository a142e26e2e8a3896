//! The HTTP server.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use axum::{Json, Router};
use bridge_core::{Face, RIVAL_GONE, Rival, Standing};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::conditions::{ConditionName, Conditions, Met};
use super::page::{ReadyPage, StatusPage};
use crate::arbiter::{Error as ArbiterError, Handle, Observation};
use crate::uds;

/// Connections at once on each listener: some probes, a scraper and a few admins. More of them must not take the
/// file descriptors that the ledger needs.
const CONNECTION_LIMIT: usize = 16;
/// How long a connection may live: a page is a few kilobytes, and an idle client must not keep one of the
/// [`CONNECTION_LIMIT`] places.
const CONNECTION_LIFETIME: Duration = Duration::from_secs(30);
/// How long the arbiter may take to answer `/healthz`. Its slowest step is a save, which waits for the disk.
const ARBITER_PATIENCE: Duration = Duration::from_secs(5);
/// For how long an answer of the arbiter counts, so that probes cost it next to nothing.
const ANSWER_LIFETIME: Duration = Duration::from_secs(1);

/// Path of the liveness page.
pub const HEALTHZ: &str = "/healthz";
/// Path of the readiness page.
pub const READYZ: &str = "/readyz";
/// Path of the status page.
pub const STATUS: &str = "/status";

/// What the pages are made of.
#[derive(Debug, Clone)]
pub struct Sources {
    /// Name of the node.
    pub node: String,
    /// The arbiter.
    pub handle: Handle,
    /// What the adapters report.
    pub conditions: Conditions,
    /// What adoption still waits for, in words.
    pub waiting_for: watch::Receiver<String>,
}

/// Where the server listens.
#[derive(Debug)]
pub struct Listeners {
    /// From [`http_listener`](super::http_listener).
    pub http: TcpListener,
    /// The admin socket: root and our own user may ask.
    pub socket: uds::Socket,
}

/// Serves until `stop`, and reports [`ConditionName::LedgerServing`] meanwhile. What is being answered at that
/// moment is cut off: no page is worth a wait of the daemon's end.
///
/// # Errors
/// A listener broke.
pub async fn run(
    sources: Sources,
    listeners: Listeners,
    stop: CancellationToken,
) -> io::Result<()> {
    let pages = Router::new()
        .route(HEALTHZ, get(healthz))
        .route(READYZ, get(readyz))
        .route(STATUS, get(status))
        .with_state(Arc::new(Server {
            sources: sources.clone(),
            answered: Mutex::new(None),
        }));
    // The file goes when this function ends.
    let (socket, _file) = listeners.socket.into_parts();
    let http = axum::serve(Limited::new(listeners.http), pages.clone());
    let socket = axum::serve(Limited::new(Callers(socket)), pages);
    tokio::select! {
        done = http.into_future() => done,
        done = socket.into_future() => done,
        () = report_ledger(&sources) => Ok(()),
        () = stop.cancelled() => Ok(()),
    }
}

#[derive(Debug)]
struct Server {
    sources: Sources,
    /// When the arbiter answered last. Locked while it is asked, so that many probes ask once.
    answered: Mutex<Option<Instant>>,
}

async fn healthz(State(server): State<Arc<Server>>) -> Response {
    match server.ask_arbiter().await {
        Ok(()) => "ok\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn readyz(State(server): State<Arc<Server>>) -> Response {
    let page = ReadyPage::new(&server.sources.conditions.snapshot());
    let code = if page.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (code, Json(page)).into_response()
}

async fn status(State(server): State<Arc<Server>>) -> Json<StatusPage> {
    let Sources {
        node,
        handle,
        conditions,
        ..
    } = &server.sources;
    let status = handle.status().borrow().clone();
    let offers = handle.offers().borrow().clone();
    Json(StatusPage::new(
        node,
        &status,
        &offers,
        &conditions.snapshot(),
    ))
}

impl Server {
    /// Whether the arbiter answers. That the disk is full does not make it sick: a restart would not help.
    async fn ask_arbiter(&self) -> Result<(), String> {
        let mut answered = self.answered.lock().await;
        if answered.is_some_and(|at| at.elapsed() < ANSWER_LIFETIME) {
            return Ok(());
        }
        let asked = self.sources.handle.observe(Observation::Processes);
        match timeout(ARBITER_PATIENCE, asked).await {
            Ok(Ok(()) | Err(ArbiterError::NotSaved(_) | ArbiterError::NoCdiFile(_))) => {
                *answered = Some(Instant::now());
                Ok(())
            }
            Ok(Err(error @ ArbiterError::Stopping)) => Err(error.to_string()),
            Err(_) => Err(format!(
                "the arbiter has not answered within {} s; it may be waiting for the disk of --state-dir or for NVML",
                ARBITER_PATIENCE.as_secs()
            )),
        }
    }
}

/// Turns the pool's standing into a condition; ends with the arbiter.
async fn report_ledger(sources: &Sources) {
    let mut status = sources.handle.status();
    let mut waiting_for = sources.waiting_for.clone();
    let mut may_change = true;
    loop {
        let (standing, rivals) = {
            let status = status.borrow_and_update();
            (status.standing, status.rivals.clone())
        };
        let missing = waiting_for.borrow_and_update().clone();
        let (met, message) = ledger_condition(standing, &missing);
        sources
            .conditions
            .set(ConditionName::LedgerServing, met, message);
        let (met, message) = rivals_condition(&rivals);
        sources
            .conditions
            .set(ConditionName::OnlyRegistrant, met, message);
        tokio::select! {
            changed = status.changed() => if changed.is_err() {
                return;
            },
            changed = waiting_for.changed(), if may_change => may_change = changed.is_ok(),
        }
    }
}

fn ledger_condition(standing: Standing, missing: &str) -> (Met, String) {
    match standing {
        Standing::Serving => (Met::Fully, "the ledger is in force".to_owned()),
        Standing::WaitingForAdoption => (
            Met::Not(Some("WaitingForAdoption")),
            format!(
                "WaitingForAdoption: the ledger is missing; still to be found out what runs here: {missing}"
            ),
        ),
        Standing::LedgerUnreadable => (
            Met::Not(Some("LedgerUnreadable")),
            "LedgerUnreadable: the ledger cannot be read; see migration-guide/reasons/LedgerUnreadable.md"
                .to_owned(),
        ),
    }
}

fn rivals_condition(rivals: &[Rival]) -> (Met, String) {
    if rivals.is_empty() {
        let names = [Face::Legacy, Face::Dra].map(Face::served_name);
        let message = format!("nobody else serves {} on this node", names.join(" or "));
        return (Met::Fully, message);
    }
    let shown: Vec<String> = rivals
        .iter()
        .map(|rival| format!("{} at {rival}", rival.face.served_name()))
        .collect();
    let message = format!(
        "OtherRegistrant: another daemon serves {}; nothing is offered until it is gone for {} s; see migration-guide/reasons/OtherRegistrant.md",
        shown.join("; "),
        RIVAL_GONE.as_secs()
    );
    (Met::Not(Some("OtherRegistrant")), message)
}

/// The admin socket as a listener.
struct Callers(uds::Incoming);

impl Listener for Callers {
    type Io = UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            // Never ends and never fails: see `uds::Incoming`.
            if let Some(Ok(stream)) = self.0.next().await {
                return (stream, ());
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(())
    }
}

/// A listener that takes at most [`CONNECTION_LIMIT`] connections at once, each for [`CONNECTION_LIFETIME`].
struct Limited<L> {
    inner: L,
    places: Arc<Semaphore>,
}

impl<L> Limited<L> {
    fn new(inner: L) -> Self {
        Self {
            inner,
            places: Arc::new(Semaphore::new(CONNECTION_LIMIT)),
        }
    }
}

impl<L: Listener> Listener for Limited<L> {
    type Io = Bounded<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let place = Arc::clone(&self.places)
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let (inner, address) = self.inner.accept().await;
        let connection = Bounded {
            inner,
            end: Box::pin(sleep(CONNECTION_LIFETIME)),
            _place: place,
        };
        (connection, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.inner.local_addr()
    }
}

/// A connection with an end.
struct Bounded<Io> {
    inner: Io,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl<Io> Bounded<Io> {
    fn check_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Bounded<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_end(context)?;
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Bounded<Io> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_end(context)?;
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_end(context)?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
