//! The HTTP server.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::Listener;
use axum::{Json, Router};
use bridge_core::{Face, Insistence, PodUid, RIVAL_GONE, Rival, Standing, UnitId, shown};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::access::Access;
use super::conditions::{ConditionName, Conditions, Met};
use super::page::{ReadyPage, StatusPage};
use super::web;
use crate::arbiter::{ClearFault, Error as ArbiterError, Handle, Observation, Release};
use crate::metrics::{Format, Scene};
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
/// Path of the metrics.
pub const METRICS: &str = "/metrics";
/// Path of the status page.
pub const STATUS: &str = "/status";
/// Path to which a successor posts the UID of its pod to get the ledger; on the admin socket alone.
pub const HANDOVER: &str = "/handover";

/// Path to which an admin posts a [`ReleaseRequest`]; on the admin socket alone.
pub const RELEASE: &str = "/release";

/// Path to which an admin posts a [`ClearFaultRequest`]; on the admin socket alone.
pub const CLEAR_FAULT: &str = "/clear-fault";

/// What is posted to [`CLEAR_FAULT`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClearFaultRequest {
    /// Exact UUID of the GPU.
    pub unit: String,
    /// Why, in the admin's words.
    pub reason: String,
}

/// What is posted to [`RELEASE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReleaseRequest {
    /// Exact UUID of the unit.
    pub unit: String,
    /// Why, in the admin's words.
    pub reason: String,
    /// Whether the hold is to end though a process runs on the unit, or NVML does not say.
    #[serde(default)]
    pub force: bool,
}

/// A successor wants the ledger.
#[derive(Debug)]
pub struct HandOver {
    /// The successor's pod.
    pub to: PodUid,
    /// Told once the ledger's lock is free, or why it is not.
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// The pages, for any number of listeners. They are there before the daemon owns the ledger: then they say so.
#[derive(Debug, Clone)]
pub struct Pages(Arc<Server>);

impl Pages {
    /// The pages of a daemon that does not own the ledger yet.
    #[must_use]
    pub fn new(node: String, conditions: Conditions) -> Self {
        Self::with_access(node, conditions, None)
    }

    /// The same; beyond this node those may read what names pods whom the API server lets.
    #[must_use]
    pub fn guarded(node: String, conditions: Conditions, client: kube::Client) -> Self {
        Self::with_access(node, conditions, Some(Access::new(client)))
    }

    fn with_access(node: String, conditions: Conditions, access: Option<Access>) -> Self {
        Self(Arc::new(Server {
            node,
            conditions,
            access,
            owner: OnceLock::new(),
            answered: Mutex::new(None),
        }))
    }

    /// The daemon owns the ledger: from now on there is an arbiter, and a successor can ask for the ledger. Only the
    /// first call has an effect.
    pub fn open(&self, handle: Handle, requests: mpsc::Sender<HandOver>) {
        // A second arbiter would be a bug of the caller; the pages go on with the first.
        let _ = self.0.owner.set(Owner { handle, requests });
    }
}

/// Serves the pages over TCP until `stop`. On an address that others than this node can reach, pages that name pods are
/// for those alone whom the API server lets read them. What is being answered at the end is cut off: no page is worth a
/// wait of the daemon's end.
///
/// # Errors
/// The listener broke.
pub async fn serve_http(
    pages: Pages,
    listener: TcpListener,
    stop: CancellationToken,
) -> io::Result<()> {
    let routes = if listener.local_addr()?.ip().is_loopback() {
        pages.routes().merge(looks())
    } else {
        pages.routes_for_everybody()
    };
    let routes = routes.with_state(pages.0);
    let http = axum::serve(Limited::new(listener), routes);
    tokio::select! {
        done = http.into_future() => done,
        () = stop.cancelled() => Ok(()),
    }
}

/// Serves the pages over an admin socket until `stop`, and there alone what changes something: root and our own user
/// may ask. The socket's file goes when this ends.
///
/// # Errors
/// The listener broke.
pub async fn serve_socket(
    pages: Pages,
    socket: uds::Socket,
    stop: CancellationToken,
) -> io::Result<()> {
    let (socket, _file) = socket.into_parts();
    let all = pages
        .routes()
        .route(HANDOVER, post(hand_over))
        .route(RELEASE, post(release))
        .route(CLEAR_FAULT, post(clear_fault))
        .with_state(pages.0);
    tokio::select! {
        done = axum::serve(Limited::new(Callers(socket)), all).into_future() => done,
        () = stop.cancelled() => Ok(()),
    }
}

impl Pages {
    fn routes(&self) -> Router<Arc<Server>> {
        Router::new()
            .route(HEALTHZ, get(healthz))
            .route(READYZ, get(readyz))
            .route(METRICS, get(metrics))
            .route(STATUS, get(status))
    }

    /// Three pages are for anybody: nothing there names a pod or a claim. The others are for those who may.
    fn routes_for_everybody(&self) -> Router<Arc<Server>> {
        let named = looks().route(STATUS, get(status));
        let guard = middleware::from_fn_with_state(Arc::clone(&self.0), guard);
        Router::new()
            .route(HEALTHZ, get(healthz))
            .route(READYZ, get(readyz_in_brief))
            .route(METRICS, get(metrics))
            .merge(named.route_layer(guard))
    }
}

/// The page for a browser.
fn looks() -> Router<Arc<Server>> {
    Router::new()
        .route(web::PAGE, get(web::page))
        .route(web::SCRIPT, get(web::script))
        .route(web::STYLE, get(web::style))
}

/// Lets those through who may read what names pods.
async fn guard(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let Some(access) = &server.access else {
        return unavailable("this daemon has no API server to ask whether you may read this");
    };
    match access.check(request.headers()).await {
        Ok(()) => next.run(request).await,
        Err(answer) => answer,
    }
}

#[derive(Debug)]
struct Server {
    /// Name of the node.
    node: String,
    /// Who may read what names pods; `None`: it can't be told.
    access: Option<Access>,
    /// What the adapters report.
    conditions: Conditions,
    owner: OnceLock<Owner>,
    /// When the arbiter answered last. Locked while it is asked, so that many probes ask once.
    answered: Mutex<Option<Instant>>,
}

/// What there is once the daemon owns the ledger.
#[derive(Debug)]
struct Owner {
    handle: Handle,
    requests: mpsc::Sender<HandOver>,
}

async fn healthz(State(server): State<Arc<Server>>) -> Response {
    match server.ask_arbiter().await {
        Ok(()) => "ok\n".into_response(),
        Err(why) => unavailable(why),
    }
}

async fn readyz(State(server): State<Arc<Server>>) -> Response {
    ready(ReadyPage::new(&server.conditions.snapshot()))
}

async fn readyz_in_brief(State(server): State<Arc<Server>>) -> Response {
    ready(ReadyPage::in_brief(&server.conditions.snapshot()))
}

fn ready(page: ReadyPage) -> Response {
    let code = if page.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (code, Json(page)).into_response()
}

async fn status(State(server): State<Arc<Server>>) -> Response {
    let Some(Owner { handle, .. }) = server.owner.get() else {
        return unavailable(NOT_THE_OWNER);
    };
    let status = handle.status().borrow().clone();
    let offers = handle.offers().borrow().clone();
    let conditions = server.conditions.snapshot();
    Json(StatusPage::new(&server.node, &status, &offers, &conditions)).into_response()
}

/// Names nobody: see [`crate::metrics`].
async fn metrics(State(server): State<Arc<Server>>, headers: HeaderMap) -> Response {
    let Some(Owner { handle, .. }) = server.owner.get() else {
        return unavailable(NOT_THE_OWNER);
    };
    let accept = headers.get(header::ACCEPT);
    let accept = accept.and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept.unwrap_or_default());
    let conditions = server.conditions.snapshot().into_iter();
    let scene = Scene {
        status: &handle.status().borrow().clone(),
        offers: &handle.offers().borrow().clone(),
        conditions: conditions
            .map(|(name, condition)| (name.as_str(), condition.met.as_str()))
            .collect(),
    };
    let page = handle.metrics().page(&scene, format);
    ([(header::CONTENT_TYPE, format.content_type())], page).into_response()
}

/// The body is the UID of the successor's pod.
async fn hand_over(State(server): State<Arc<Server>>, body: String) -> Response {
    let to = match PodUid::new(body) {
        Ok(to) => to,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    let Some(Owner { requests, .. }) = server.owner.get() else {
        return unavailable(NOT_THE_OWNER);
    };
    let (reply, answer) = oneshot::channel();
    if requests.send(HandOver { to, reply }).await.is_err() {
        return unavailable("the daemon is stopping");
    }
    match answer.await {
        Ok(Ok(())) => "handed over\n".into_response(),
        Ok(Err(why)) => (StatusCode::CONFLICT, format!("{why}\n")).into_response(),
        Err(_) => unavailable("the daemon is stopping"),
    }
}

async fn release(
    State(server): State<Arc<Server>>,
    Json(wanted): Json<ReleaseRequest>,
) -> Response {
    let Some(Owner { handle, .. }) = server.owner.get() else {
        return unavailable(NOT_THE_OWNER);
    };
    let unit = match UnitId::new(wanted.unit) {
        Ok(unit) => unit,
        Err(error) => return (StatusCode::CONFLICT, format!("{error}\n")).into_response(),
    };
    let insistence = if wanted.force {
        Insistence::Forced
    } else {
        Insistence::None
    };
    let command = Release {
        unit: unit.clone(),
        insistence,
        reason: shown(&wanted.reason),
    };
    match handle.release(command).await {
        Ok(Ok(holds)) => format!("{unit} is released: {holds} holds have ended\n").into_response(),
        Ok(Err(why)) => (StatusCode::CONFLICT, format!("{why}\n")).into_response(),
        Err(error) => unavailable(error),
    }
}

async fn clear_fault(
    State(server): State<Arc<Server>>,
    Json(wanted): Json<ClearFaultRequest>,
) -> Response {
    let Some(Owner { handle, .. }) = server.owner.get() else {
        return unavailable(NOT_THE_OWNER);
    };
    let unit = match UnitId::new(wanted.unit) {
        Ok(unit) => unit,
        Err(error) => return (StatusCode::CONFLICT, format!("{error}\n")).into_response(),
    };
    let command = ClearFault {
        unit: unit.clone(),
        reason: shown(&wanted.reason),
    };
    match handle.clear_fault(command).await {
        Ok(Ok(())) => {
            format!("{unit} has no fault any more, and is offered again\n").into_response()
        }
        Ok(Err(why)) => (StatusCode::CONFLICT, format!("{why}\n")).into_response(),
        Err(error) => unavailable(error),
    }
}

/// What a daemon says that waits for the ledger.
const NOT_THE_OWNER: &str =
    "this daemon waits for another one on the node to hand the ledger over: ask that one";

fn unavailable(why: impl std::fmt::Display) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

impl Server {
    /// Whether the arbiter answers. That the disk is full does not make it sick: a restart would not help.
    async fn ask_arbiter(&self) -> Result<(), String> {
        let Some(Owner { handle, .. }) = self.owner.get() else {
            return Ok(());
        };
        let mut answered = self.answered.lock().await;
        if answered.is_some_and(|at| at.elapsed() < ANSWER_LIFETIME) {
            return Ok(());
        }
        let asked = handle.observe(Observation::Processes);
        match timeout(ARBITER_PATIENCE, asked).await {
            Ok(
                Ok(())
                | Err(
                    ArbiterError::NotSaved(_)
                    | ArbiterError::NoCdiFile(_)
                    | ArbiterError::NotOwner(_),
                ),
            ) => {
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

/// Reports [`ConditionName::LedgerServing`] until the arbiter ends. `waiting_for`: what adoption still waits for, in
/// words.
pub async fn report_ledger(
    handle: Handle,
    mut waiting_for: watch::Receiver<String>,
    conditions: Conditions,
) {
    let mut status = handle.status();
    let mut successor = handle.successor();
    let mut may_change = true;
    loop {
        let (standing, rivals) = {
            let status = status.borrow_and_update();
            (status.standing, status.rivals.clone())
        };
        let missing = waiting_for.borrow_and_update().clone();
        let (met, message) = match successor.borrow_and_update().as_ref() {
            None => ledger_condition(standing, &missing),
            Some(successor) => (
                Met::Fully,
                format!("the ledger was handed over to pod {successor}"),
            ),
        };
        conditions.set(ConditionName::LedgerServing, met, message);
        let (met, message) = rivals_condition(&rivals);
        conditions.set(ConditionName::OnlyRegistrant, met, message);
        tokio::select! {
            changed = status.changed() => if changed.is_err() {
                return;
            },
            changed = waiting_for.changed(), if may_change => may_change = changed.is_ok(),
            Ok(()) = successor.changed() => {}
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
