//! HTTP: requests in, objects, lists, watches and errors out.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Json, Response};
use axum::serve::Listener;
use axum::{Router, serve};
use futures::stream;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::request::Target;
use super::store::{self, Failure, Part, Resource, Selector, Store, failure};
use super::{Shared, Taints, about};
use crate::lock;

/// The largest body that is read, in bytes: the real server's limit for one object is half of it.
const MAX_BODY: usize = 3 * 1024 * 1024;

/// How long a watch lasts that names no `timeoutSeconds`; the real server takes 30 to 60 minutes.
const WATCH_SECONDS: u64 = 1800;

/// Serves until the token is cancelled; then watches and connections end.
pub(crate) async fn run(listener: TcpListener, shared: Arc<Shared>, stop: CancellationToken) {
    let gate = Gate {
        listener,
        shared: Arc::clone(&shared),
    };
    let app = Router::new().fallback(answer).with_state(shared);
    tokio::select! {
        served = serve(gate, app).into_future() => {
            served.expect("a server on a bound port does not end by itself");
        }
        () = stop.cancelled() => {}
    }
}

/// Closes connections at once while the server is away.
struct Gate {
    listener: TcpListener,
    shared: Arc<Shared>,
}

impl Listener for Gate {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let accepted = Listener::accept(&mut self.listener).await;
            if !self.shared.is_away() {
                return accepted;
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = match to_bytes(body, MAX_BODY).await {
        Ok(body) => body,
        Err(error) => {
            return refuse(&failure(413, "RequestEntityTooLarge", error.to_string()));
        }
    };
    if shared.is_away() {
        let mut response = refuse(&failure(503, "ServiceUnavailable", "the server is away"));
        let close = header::HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
        return response;
    }
    let minor = lock(&shared.switches).minor.unwrap_or(about::MINOR);
    if let Some(answer) = about::answer(&parts.uri, minor) {
        return answer;
    }
    let outcome = Target::parse(&parts.uri).and_then(|target| {
        let verb = target.verb(&parts.method);
        let target = if verb.starts_with("delete") {
            target.with_delete_options(&body)
        } else {
            target
        };
        admit(&shared, verb, &target)?;
        dispatch(&shared, &parts.method, &parts.headers, target, &body)
    });
    outcome.unwrap_or_else(|failure| refuse(&failure))
}

/// Counts the request, and refuses it if it is forbidden.
fn admit(shared: &Shared, verb: &str, target: &Target) -> Result<(), Failure> {
    let resource = target.rbac_resource();
    let counted = if target.is_dry_run() {
        format!("dry-run {verb}")
    } else {
        verb.to_owned()
    };
    *lock(&shared.counts)
        .entry((counted, resource.clone()))
        .or_default() += 1;
    let rule = (verb.to_owned(), resource.clone());
    if lock(&shared.switches).forbidden.contains(&rule) {
        let message = format!("{resource} is forbidden: User \"test\" cannot {verb} it");
        return Err(failure(403, "Forbidden", message));
    }
    Ok(())
}

fn dispatch(
    shared: &Arc<Shared>,
    method: &Method,
    headers: &HeaderMap,
    target: Target,
    body: &Bytes,
) -> Result<Response, Failure> {
    let wrong = |what: &str| failure(405, "MethodNotAllowed", what);
    match method.as_str() {
        "GET" if target.is_watch() => watch_response(Arc::clone(shared), &target),
        "GET" if target.name.is_none() => list(shared, &target),
        "GET" => Ok(ok(lock(&shared.store).get(target.resource, &target.key())?)),
        "POST" => create(shared, &target, read(body)?),
        "PUT" => {
            let object = cleaned(shared, target.resource, read(body)?);
            write(shared, &target, |_| Ok(object))
        }
        "PATCH" => {
            let kind = headers.get(header::CONTENT_TYPE);
            let kind = kind.and_then(|it| it.to_str().ok()).unwrap_or_default();
            if !kind.ends_with("merge-patch+json") {
                let message = format!("the test API server takes merge patches, not {kind}");
                return Err(failure(415, "UnsupportedMediaType", message));
            }
            let patch = read(body)?;
            write(shared, &target, |mut object| {
                store::merge(&mut object, &patch);
                Ok(cleaned(shared, target.resource, object))
            })
        }
        "DELETE" => delete(shared, &target, body),
        other => Err(wrong(other)),
    }
}

fn list(shared: &Shared, target: &Target) -> Result<Response, Failure> {
    let filter = Filter::of(target)?;
    let store = lock(&shared.store);
    let mut items = store.list(target.resource);
    items.retain(|it| filter.matches(it));
    Ok(ok(json!({
        "apiVersion": target.resource.api_version,
        "kind": format!("{}List", target.resource.kind),
        "metadata": {"resourceVersion": store.version().to_string()},
        "items": items,
    })))
}

fn create(shared: &Shared, target: &Target, object: Value) -> Result<Response, Failure> {
    if target.subresource.as_deref() == Some("eviction") {
        change(shared, target, |store| {
            store.delete(target.resource, &target.key(), &Value::Null)
        })?;
        return Ok(ok(
            json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}),
        ));
    }
    if let Some(answer) = reviewed(shared, target.resource.plural, &object) {
        return Ok((StatusCode::CREATED, Json(answer)).into_response());
    }
    let object = cleaned(shared, target.resource, object);
    let namespace = target.namespace.as_deref().unwrap_or_default();
    let created = change(shared, target, |store| {
        store.create(target.resource, namespace, object)
    });
    Ok((StatusCode::CREATED, Json(created?)).into_response())
}

/// The answer to a question about a token or a right; `None`: it is none.
fn reviewed(shared: &Shared, plural: &str, question: &Value) -> Option<Value> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let spec = &question["spec"];
    let switches = lock(&shared.switches);
    let status = match plural {
        "tokenreviews" => {
            let audiences = spec["audiences"].as_array().cloned().unwrap_or_default();
            match switches.tokens.get(&text(&spec["token"])) {
                Some((user, audience)) if audiences.contains(&json!(audience)) => json!({
                    "authenticated": true,
                    "user": {"username": user},
                    "audiences": [audience],
                }),
                Some(_) | None => json!({"authenticated": false}),
            }
        }
        "subjectaccessreviews" => {
            let path = text(&spec["nonResourceAttributes"]["path"]);
            let asked = (text(&spec["user"]), path);
            json!({"allowed": switches.readers.contains(&asked)})
        }
        "selfsubjectaccessreviews" => {
            let asked = &spec["resourceAttributes"];
            let mut resource = text(&asked["resource"]);
            if let Some(part) = asked["subresource"].as_str().filter(|it| !it.is_empty()) {
                resource = format!("{resource}/{part}");
            }
            let rule = (text(&asked["verb"]), resource);
            json!({"allowed": !switches.forbidden.contains(&rule)})
        }
        _ => return None,
    };
    let mut answer = question.clone();
    answer["status"] = status;
    Some(answer)
}

/// Changes an object, or its status. `new` gets it as it is.
fn write(
    shared: &Shared,
    target: &Target,
    new: impl FnOnce(Value) -> Result<Value, Failure>,
) -> Result<Response, Failure> {
    let part = match target.subresource.as_deref() {
        None => Part::Main,
        Some("status") => Part::Status,
        Some(other) => return Err(failure(404, "NotFound", format!("no subresource {other}"))),
    };
    let written = change(shared, target, |store| {
        let old = store.get(target.resource, &target.key())?;
        store.update(target.resource, target.key(), part, new(old)?)
    });
    Ok(ok(written?))
}

/// Changes what is stored, and tells the watchers; a dry run changes a copy that nobody sees.
fn change<T>(shared: &Shared, target: &Target, change: impl FnOnce(&mut Store) -> T) -> T {
    if target.is_dry_run() {
        let mut copy = lock(&shared.store).clone();
        return change(&mut copy);
    }
    let changed = change(&mut lock(&shared.store));
    shared.announce();
    changed
}

fn delete(shared: &Shared, target: &Target, body: &Bytes) -> Result<Response, Failure> {
    let options = if body.is_empty() {
        Value::Null
    } else {
        read(body)?
    };
    let preconditions = &options["preconditions"];
    let deleted = change(shared, target, |store| {
        if target.name.is_some() {
            return store.delete(target.resource, &target.key(), preconditions);
        }
        let filter = Filter::of(target)?;
        for object in store.list(target.resource) {
            if filter.matches(&object) {
                let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
                let key = (text("namespace").to_owned(), text("name").to_owned());
                store.delete(target.resource, &key, preconditions)?;
            }
        }
        Ok(json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
    });
    Ok(ok(deleted?))
}

/// Takes away what the server is told not to know.
fn cleaned(shared: &Shared, resource: &Resource, mut object: Value) -> Value {
    if resource.plural == "resourceslices" && lock(&shared.switches).taints == Taints::Dropped {
        let devices = object["spec"]["devices"].as_array_mut();
        for device in devices.into_iter().flatten() {
            if let Some(fields) = device.as_object_mut() {
                fields.remove("taints");
            }
        }
    }
    object
}

/// What a list or a watch is limited to.
struct Filter {
    namespace: Option<String>,
    fields: Selector,
}

impl Filter {
    fn of(target: &Target) -> Result<Self, Failure> {
        if target
            .query
            .get("labelSelector")
            .is_some_and(|it| !it.is_empty())
        {
            let message = "the test API server has no label selectors";
            return Err(failure(400, "BadRequest", message));
        }
        let fields = target.query.get("fieldSelector");
        Ok(Self {
            namespace: target.namespace.clone(),
            fields: Selector::parse(fields.map_or("", String::as_str))?,
        })
    }

    fn matches(&self, object: &Value) -> bool {
        let namespace = self.namespace.as_deref();
        namespace.is_none_or(|it| object["metadata"]["namespace"] == it)
            && self.fields.matches(object)
    }
}

/// In [`Watch::version`]: the reader was told to list anew, and nothing comes after that.
const EXPIRED: u64 = u64::MAX;

/// A watch under way.
struct Watch {
    shared: Arc<Shared>,
    changed: watch::Receiver<u64>,
    resource: &'static Resource,
    filter: Filter,
    /// The start of the server that it belongs to.
    start: u64,
    /// The version up to which everything was sent.
    version: u64,
    /// Sent before anything else.
    first: Vec<Value>,
}

fn watch_response(shared: Arc<Shared>, target: &Target) -> Result<Response, Failure> {
    let filter = Filter::of(target)?;
    let from = target
        .query
        .get("resourceVersion")
        .map_or("", String::as_str);
    let store = lock(&shared.store);
    let (version, mut first) = if from.is_empty() || from == "0" || target.flag("sendInitialEvents")
    {
        let objects = store.list(target.resource).into_iter();
        let matching = objects.filter(|it| filter.matches(it));
        let added = matching.map(|object| json!({"type": "ADDED", "object": object}));
        (store.version(), added.collect())
    } else {
        let invalid = |_| failure(400, "BadRequest", format!("no resourceVersion: {from}"));
        (from.parse().map_err(invalid)?, Vec::new())
    };
    drop(store);
    if target.flag("sendInitialEvents") {
        first.push(json!({"type": "BOOKMARK", "object": {
            "apiVersion": target.resource.api_version,
            "kind": target.resource.kind,
            "metadata": {
                "resourceVersion": version.to_string(),
                "annotations": {"k8s.io/initial-events-end": "true"},
            },
        }}));
    }
    let start = lock(&shared.switches).starts;
    let watch = Watch {
        changed: shared.changed.subscribe(),
        start,
        shared,
        resource: target.resource,
        filter,
        version,
        first,
    };
    let seconds = target
        .query
        .get("timeoutSeconds")
        .and_then(|it| it.parse().ok());
    let end = tokio::time::sleep(Duration::from_secs(seconds.unwrap_or(WATCH_SECONDS)));
    let lines = stream::unfold(watch, Watch::next);
    let lines = futures::StreamExt::take_until(lines, end);
    let body = Body::from_stream(lines);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

impl Watch {
    /// The next events, one a line.
    async fn next(mut self) -> Option<(Result<String, io::Error>, Self)> {
        loop {
            self.changed.mark_unchanged();
            let is_over = lock(&self.shared.switches).starts != self.start;
            if self.shared.is_away() || is_over || self.version == EXPIRED {
                return None;
            }
            let mut events = std::mem::take(&mut self.first);
            let changes = lock(&self.shared.store).since(self.version, self.resource);
            match changes {
                None => {
                    let gone = failure(410, "Expired", "too old resource version");
                    let line = json!({"type": "ERROR", "object": status(&gone)});
                    self.version = EXPIRED;
                    return Some((Ok(format!("{line}\n")), self));
                }
                Some(changes) => {
                    for change in changes {
                        self.version = change.version;
                        events.extend(self.event(change));
                    }
                }
            }
            if !events.is_empty() {
                let lines: String = events.iter().map(|it| format!("{it}\n")).collect();
                return Some((Ok(lines), self));
            }
            self.changed.changed().await.ok()?;
        }
    }

    /// What a change is for this watcher: an object that comes to match its selector was added.
    fn event(&self, change: store::Change) -> Option<Value> {
        let matches = |it: &Value| self.filter.matches(it);
        let before = change.before.filter(|it| matches(it));
        let after = change.after.filter(|it| matches(it));
        let (kind, object) = match (before, after) {
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(mut before), None) => {
                before["metadata"]["resourceVersion"] = json!(change.version.to_string());
                ("DELETED", before)
            }
            (None, None) => return None,
        };
        Some(json!({"type": kind, "object": object}))
    }
}

fn read(body: &Bytes) -> Result<Value, Failure> {
    serde_json::from_slice(body)
        .map_err(|error| failure(400, "BadRequest", format!("the body is no JSON: {error}")))
}

fn ok(object: Value) -> Response {
    Json(object).into_response()
}

fn refuse(failure: &Failure) -> Response {
    let code = StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (code, Json(status(failure))).into_response()
}

fn status(failure: &Failure) -> Value {
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": failure.message,
        "reason": failure.reason,
        "code": failure.code,
    })
}
