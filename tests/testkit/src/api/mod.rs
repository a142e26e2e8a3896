//! An API server for fast tests: pods, nodes, events, ConfigMaps, claims, slices and classes, over HTTP on loopback.
//!
//! It owns what a client can see of the real one: versions and conflicts, the status subresource, field
//! selectors, watches that replay and that expire, errors as `Status` objects; and switches for trouble: to
//! be away, to forbid, to drop taints. It must not know the product.
//!
//! Not imitated: schemas and validation, label selectors, finalizers and graceful deletion (a DELETE takes
//! effect at once), JSON patch and server-side apply, paging. A strategic merge patch is taken for a merge
//! patch, so lists are replaced.

mod about;
mod request;
mod serve;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::lock;
use store::{Key, Part, Resource, Scope, Store};

/// A running server. Ends when it is dropped.
///
/// Objects are JSON; `plural` is as in a URL: `pods`, `nodes`, `configmaps`, `events`, `resourceclaims`,
/// `resourceslices`, `deviceclasses`. Of `events` the methods here mean those of the core API, but for
/// [`ApiServer::events`]; clients may use both. TokenReviews and SubjectAccessReviews are answered as the test says, and a
/// SelfSubjectAccessReview with what is not forbidden.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: CancellationToken,
}

/// What the server and its tasks share.
#[derive(Debug)]
pub(crate) struct Shared {
    store: Mutex<Store>,
    /// Changes with each write and each switch, so that watches look again.
    changed: watch::Sender<u64>,
    switches: Mutex<Switches>,
    counts: Mutex<BTreeMap<(String, String), u64>>,
}

#[derive(Debug, Default)]
struct Switches {
    /// How often the server was started anew; watches of before have ended.
    starts: u64,
    reach: Reach,
    taints: Taints,
    /// The minor version that it says it has, if another than [`about::MINOR`].
    minor: Option<u32>,
    /// Verb and resource.
    forbidden: BTreeSet<(String, String)>,
    /// User and audience of each token that is known.
    tokens: BTreeMap<String, (String, String)>,
    /// Users, and the non-resource URLs that they may get.
    readers: BTreeSet<(String, String)>,
}

/// Whether the server can be reached.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Reach {
    #[default]
    There,
    Away,
}

/// The state of an API server at a moment.
#[derive(Debug, Clone)]
pub struct Backup(Store);

/// What becomes of device taints in slices.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Taints {
    #[default]
    Kept,
    Dropped,
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        // Ends the watches, which hold their connections open.
        self.go_away();
        self.stop.cancel();
    }
}

impl ApiServer {
    /// Starts an empty server on a free port of 127.0.0.1.
    ///
    /// # Errors
    ///
    /// When no port can be had.
    pub async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            changed: watch::Sender::new(0),
            switches: Mutex::default(),
            counts: Mutex::default(),
        });
        let stop = CancellationToken::new();
        tokio::spawn(serve::run(listener, Arc::clone(&shared), stop.clone()));
        Ok(Self {
            shared,
            address,
            stop,
        })
    }

    /// `http://127.0.0.1:<port>`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig for this server.
    ///
    /// # Panics
    ///
    /// When the file can't be written.
    pub fn kubeconfig(&self, path: &Path) {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters:\n- name: test\n  cluster:\n    server: {}\n\
             users:\n- name: test\n  user: {{}}\n\
             contexts:\n- name: test\n  context:\n    cluster: test\n    user: test\n",
            self.url()
        );
        fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    // --- Objects ---

    /// Creates an object, or replaces it, status included. Returns it as it is stored.
    ///
    /// # Panics
    ///
    /// When the object has no `metadata.name`, or an object of a namespaced kind no `metadata.namespace`.
    pub fn put(&self, plural: &str, object: Value) -> Value {
        let resource = store::by_plural(plural);
        let text = |field: &str| {
            let value = object["metadata"][field].as_str();
            let value = value.unwrap_or_else(|| panic!("no metadata.{field} in {object}"));
            value.to_owned()
        };
        let namespace = match resource.scope {
            Scope::Namespaced => text("namespace"),
            Scope::Cluster => String::new(),
        };
        let key = (namespace.clone(), text("name"));
        self.write(|store| match store.get(resource, &key) {
            Ok(_) => store.update(resource, key, Part::Whole, object),
            Err(_) => store.create(resource, &namespace, object),
        })
    }

    /// The object, if there is one. `namespace` is empty for a cluster-wide kind.
    #[must_use]
    pub fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let key = (namespace.to_owned(), name.to_owned());
        let resource = store::by_plural(plural);
        lock(&self.shared.store).get(resource, &key).ok()
    }

    /// All objects of a kind, by namespace and name.
    #[must_use]
    pub fn list(&self, plural: &str) -> Vec<Value> {
        lock(&self.shared.store).list(store::by_plural(plural))
    }

    /// All events of the API `events.k8s.io/v1`, by namespace and name.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        let events = store::find("events.k8s.io/v1", "events");
        events.map_or_else(Vec::new, |events| lock(&self.shared.store).list(events))
    }

    /// Merges a patch (RFC 7386) into an object, status included. Returns it as it is stored.
    ///
    /// # Panics
    ///
    /// When there is no such object.
    pub fn patch(&self, plural: &str, namespace: &str, name: &str, patch: &Value) -> Value {
        let resource = store::by_plural(plural);
        let key: Key = (namespace.to_owned(), name.to_owned());
        self.write(|store| {
            let mut object = store.get(resource, &key)?;
            store::merge(&mut object, patch);
            store.update(resource, key, Part::Whole, object)
        })
    }

    /// Deletes an object.
    ///
    /// # Panics
    ///
    /// When there is no such object.
    pub fn delete(&self, plural: &str, namespace: &str, name: &str) {
        let resource: &'static Resource = store::by_plural(plural);
        let key = (namespace.to_owned(), name.to_owned());
        self.write(|store| store.delete(resource, &key, &Value::Null));
    }

    fn write(&self, write: impl FnOnce(&mut Store) -> Result<Value, store::Failure>) -> Value {
        let written = write(&mut lock(&self.shared.store));
        self.shared.announce();
        written.unwrap_or_else(|error| panic!("the test's own write failed: {error:?}"))
    }

    // --- Trouble ---

    /// From now on connections are closed at once, requests on open ones get 503, and watches end.
    pub fn go_away(&self) {
        lock(&self.shared.switches).reach = Reach::Away;
        self.shared.announce();
    }

    /// Ends [`ApiServer::go_away`].
    pub fn come_back(&self) {
        lock(&self.shared.switches).reach = Reach::There;
    }

    /// What is stored now, for [`ApiServer::restore`].
    #[must_use]
    pub fn back_up(&self) -> Backup {
        Backup(lock(&self.shared.store).clone())
    }

    /// Puts everything back to a backup, as a restore of etcd does: objects that were deleted since are there again,
    /// newer ones are gone, versions count on from then, and all watches end.
    pub fn restore(&self, backup: Backup) {
        let mut store = lock(&self.shared.store);
        *store = backup.0;
        // A server that was started anew has no history.
        store.compact();
        drop(store);
        lock(&self.shared.switches).starts += 1;
        self.shared.announce();
    }

    /// From now on taints in slices are dropped from what clients write, as a 1.34 server does whose
    /// `DRADeviceTaints` gate is off.
    pub fn drop_taints(&self) {
        lock(&self.shared.switches).taints = Taints::Dropped;
    }

    /// From now on this is what the server says that it is: 34 for Kubernetes 1.34. Nothing else changes.
    pub fn call_itself(&self, minor: u32) {
        lock(&self.shared.switches).minor = Some(minor);
    }

    /// From now on requests of that verb (`get`, `list`, `watch`, `create`, `update`, `patch`, `delete`,
    /// `deletecollection`) and resource (`nodes/status`, for example) get 403.
    pub fn forbid(&self, verb: &str, resource: &str) {
        let rule = (verb.to_owned(), resource.to_owned());
        lock(&self.shared.switches).forbidden.insert(rule);
    }

    /// Ends [`ApiServer::forbid`].
    pub fn allow(&self, verb: &str, resource: &str) {
        let rule = (verb.to_owned(), resource.to_owned());
        lock(&self.shared.switches).forbidden.remove(&rule);
    }

    /// From now on a TokenReview knows this token, if it asks for that audience.
    pub fn know_token(&self, token: &str, user: &str, audience: &str) {
        let known = (user.to_owned(), audience.to_owned());
        let mut switches = lock(&self.shared.switches);
        switches.tokens.insert(token.to_owned(), known);
    }

    /// From now on a SubjectAccessReview lets this user get that non-resource URL.
    pub fn let_read(&self, user: &str, path: &str) {
        let reader = (user.to_owned(), path.to_owned());
        lock(&self.shared.switches).readers.insert(reader);
    }

    /// Ends [`ApiServer::let_read`].
    pub fn let_read_no_more(&self, user: &str, path: &str) {
        let reader = (user.to_owned(), path.to_owned());
        lock(&self.shared.switches).readers.remove(&reader);
    }

    /// Forgets what happened so far: a watch from an older version gets 410 Gone and has to list anew.
    pub fn compact(&self) {
        lock(&self.shared.store).compact();
    }

    /// How many requests of a verb and resource came, refused ones included; see [`ApiServer::forbid`] for
    /// the words. Dry runs are counted apart, as `dry-run create` and so on.
    #[must_use]
    pub fn count(&self, verb: &str, resource: &str) -> u64 {
        let key = (verb.to_owned(), resource.to_owned());
        lock(&self.shared.counts).get(&key).copied().unwrap_or(0)
    }

    /// The same for every verb and resource that was asked for.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<(String, String), u64> {
        lock(&self.shared.counts).clone()
    }
}

impl Shared {
    fn announce(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn is_away(&self) -> bool {
        lock(&self.switches).reach == Reach::Away
    }
}
