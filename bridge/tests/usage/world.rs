//! What every test of usage stands on.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bridge_core::{
    ContainerEdits, Gpu, Hold, HoldKind, Inventory, Ledger, Mode, NamedClaims, Pods, Pool,
    Processes, Settings, Status, UnitId, UnitProcesses,
};
use gpu_bridge::arbiter::{self, Call, Handle, Observation};
use gpu_bridge::cdi::{CdiFiles, Roots};
use gpu_bridge::device_plugin::{self, RegistrationState, TellContainer};
use gpu_bridge::metrics::Metrics;
use gpu_bridge::store::{BootId, Store};
use gpu_bridge::usage::{self, PodResources, PodsOut};
use kube::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{ApiServer, Kubelet, Pod, eventually};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::h100::h100;
use crate::nodes::make_nodes;

/// No state in these tests takes this long to come.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// The node's name.
pub(crate) const NODE: &str = "node-a";
/// The resource of counted pods.
pub(crate) const RESOURCE: &str = "nvidia.com/gpu";
/// How many GPUs the node has.
pub(crate) const GPUS: u32 = 2;

pub(crate) fn unit(number: u32) -> UnitId {
    UnitId::new(format!("GPU-{number}")).unwrap()
}

pub(crate) fn gpu(number: u32) -> Gpu {
    h100(number, unit(number))
}

/// A client of the API server.
pub(crate) fn client(api: &ApiServer) -> Client {
    Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap()
}

/// A pod with one app container, as the kubelet gets it.
pub(crate) fn pod(name: &str, count: u32) -> Pod {
    Pod::new("train", name, &uid(name)).app("main", RESOURCE, count)
}

pub(crate) fn uid(name: &str) -> String {
    format!("uid-{name}")
}

/// The same pod, as the API server shows it.
pub(crate) fn in_api(name: &str, count: u32, phase: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "train", "name": name, "uid": uid(name)},
        "spec": {
            "nodeName": NODE,
            "containers": [{
                "name": "main",
                "resources": {"limits": {RESOURCE: count.to_string()}},
            }],
        },
        "status": {"phase": phase},
    })
}

/// What came by on the way to the arbiter.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    listings: AtomicUsize,
    pub(crate) adoption: Mutex<Vec<Observation>>,
}

/// The real arbiter, its files in a folder, on GPUs on which no process ever runs.
pub(crate) struct Arbiter {
    pub(crate) handle: Handle,
    pub(crate) seen: Arc<Seen>,
    _tasks: JoinSet<()>,
}

impl Arbiter {
    /// `folder` gets the ledger and the CDI files.
    pub(crate) async fn start(folder: &Path, pool: Pool) -> Self {
        let (store, _) = Store::open(&folder.join("state"), BootId::unknown()).unwrap();
        make_nodes(folder, GPUS);
        let cdi = CdiFiles::new(folder.join("cdi"), Roots::in_one(folder));
        let clean = |number| (unit(number), UnitProcesses::Known(Vec::new()));
        let processes = Processes {
            units: (0..GPUS).map(clean).collect::<BTreeMap<_, _>>(),
        };
        let probe: arbiter::ProcessProbe = Arc::new(move || {
            let processes = processes.clone();
            Box::pin(async move { processes })
        });
        let started = Instant::now();
        let (arbiter, inner) = arbiter::Arbiter::new(
            pool,
            Arc::new(store),
            Arc::new(cdi),
            probe,
            started,
            Metrics::new(),
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(arbiter.run());
        let seen = Arc::new(Seen::default());
        let (calls, queue) = mpsc::channel(32);
        let handle = Handle::new(calls, inner.offers(), inner.status(), started);
        tasks.spawn(tap(queue, inner, Arc::clone(&seen)));
        handle
            .observe(Observation::Inventory(Inventory::Seen(
                (0..GPUS).map(gpu).collect(),
            )))
            .await
            .unwrap();
        Self {
            handle,
            seen,
            _tasks: tasks,
        }
    }

    pub(crate) fn status(&self) -> Arc<Status> {
        Arc::clone(&self.handle.status().borrow())
    }

    /// The one hold of a unit.
    pub(crate) fn hold(&self, number: u32) -> Option<Hold> {
        let status = self.status();
        let found = status.units.iter().find(|it| it.unit == unit(number));
        found.and_then(|it| it.holds.first().cloned())
    }

    /// The pods that hold units, by name and UID.
    pub(crate) fn bound(&self) -> Vec<(String, Option<String>)> {
        let status = self.status();
        let holds = status.units.iter().flat_map(|it| &it.holds);
        let pods = holds.filter_map(|hold| match &hold.kind {
            HoldKind::Bound { pod, .. } => Some((
                pod.name.name.clone(),
                pod.uid.as_ref().map(|uid| uid.as_str().to_owned()),
            )),
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        });
        pods.collect()
    }

    /// Whether no unit is held.
    pub(crate) fn is_idle(&self) -> bool {
        self.status().units.iter().all(|it| it.holds.is_empty())
    }

    /// Waits until the pool has taken `count` more answers of pod-resources.
    pub(crate) async fn more_listings(&self, count: usize) {
        let before = self.seen.listings.load(Ordering::SeqCst);
        eventually("answers of pod-resources", DEADLINE, || {
            self.seen.listings.load(Ordering::SeqCst) >= before + count
        })
        .await;
    }
}

/// Passes every call on, and notes some.
async fn tap(mut queue: mpsc::Receiver<Call>, inner: Handle, seen: Arc<Seen>) {
    let mut calls = JoinSet::new();
    while let Some(call) = queue.recv().await {
        let (inner, seen) = (inner.clone(), Arc::clone(&seen));
        calls.spawn(async move {
            // Whoever asked may be gone.
            match call {
                Call::Allocate {
                    request,
                    listing,
                    reply,
                } => drop(reply.send(inner.allocate(request, listing).await)),
                Call::Prepare { request, reply } => {
                    drop(reply.send(inner.prepare(request).await));
                }
                Call::Unprepare { claim, reply } => {
                    drop(reply.send(inner.unprepare(claim).await));
                }
                Call::Observe { observation, reply } => {
                    let is_listing = matches!(observation, Observation::Listing(_));
                    if matches!(
                        observation,
                        Observation::KubeletIds(_) | Observation::Adoption(_)
                    ) {
                        seen.adoption.lock().unwrap().push(observation.clone());
                    }
                    let taken = inner.observe(observation).await;
                    if is_listing && taken.is_ok() {
                        seen.listings.fetch_add(1, Ordering::SeqCst);
                    }
                    drop(reply.send(taken));
                }
                Call::Release { .. }
                | Call::ClearFault { .. }
                | Call::HandOver { .. }
                | Call::TakeBack { .. } => {
                    panic!("what is seen gives no ledger away")
                }
            }
        });
    }
}

/// A kubelet, an API server, and between them the counted face, the arbiter, and usage.
pub(crate) struct World {
    pub(crate) kubelet: Kubelet,
    pub(crate) api: ApiServer,
    pub(crate) arbiter: Arbiter,
    pub(crate) pods: watch::Receiver<Option<Pods>>,
    pub(crate) named: watch::Receiver<Option<NamedClaims>>,
    pub(crate) resources: PodResources,
    pub(crate) folder: TempDir,
    _registration: watch::Receiver<RegistrationState>,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A folder with a short path, since sockets lie in it.
pub(crate) fn folder() -> TempDir {
    tempfile::Builder::new().prefix("use").tempdir().unwrap()
}

pub(crate) fn settings() -> Settings {
    Settings {
        mode: Mode::Legacy,
        ..Settings::default()
    }
}

impl World {
    /// A node that serves counted pods.
    pub(crate) async fn serving() -> Self {
        let pool = Pool::restored(Ledger::default(), settings());
        let world = Self::start(pool, |_| ()).await;
        let gpus = usize::try_from(GPUS).unwrap();
        world
            .kubelet
            .wait_for_healthy(RESOURCE, gpus, DEADLINE)
            .await;
        world
    }

    /// `before` may lay files into the kubelet's folder.
    pub(crate) async fn start(pool: Pool, before: impl FnOnce(&Path)) -> Self {
        let folder = folder();
        let root = folder.path().join("k");
        std::fs::create_dir(&root).unwrap();
        before(&root);
        let kubelet = Kubelet::start(&root).await.unwrap();
        let api = ApiServer::start().await.unwrap();
        let arbiter = Arbiter::start(folder.path(), pool).await;
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();

        let resources = PodResources::new(&root, NODE.to_owned());
        let (out, pods) = watch::channel(None);
        let (named_out, named) = watch::channel(None);
        let out = PodsOut {
            pods: out,
            claims: named_out,
        };
        let list_now = usage::ask_about(resources.clone(), arbiter.handle.status(), pods.clone());
        let (state, registration) = watch::channel(RegistrationState::default());
        let plugin = device_plugin::run(
            device_plugin::Settings {
                folder: root.join("device-plugins"),
                instance: "test".to_owned(),
                tell: TellContainer::new(|granted| ContainerEdits {
                    cdi_devices: granted.iter().map(|it| it.cdi_device.clone()).collect(),
                    ..ContainerEdits::default()
                }),
            },
            arbiter.handle.clone(),
            list_now,
            state,
            stop.clone(),
        );
        tasks.spawn(async move { plugin.await.unwrap() });

        let listing = usage::run_listing(
            resources.clone(),
            pods.clone(),
            arbiter.handle.clone(),
            stop.clone(),
        );
        tasks.spawn(async move { drop(listing.await) });
        let following = usage::run_pods(
            client(&api),
            NODE.to_owned(),
            root,
            arbiter.handle.clone(),
            out,
            stop.clone(),
        );
        tasks.spawn(async move { drop(following.await) });
        Self {
            kubelet,
            api,
            arbiter,
            pods,
            named,
            resources,
            folder,
            _registration: registration,
            tasks,
            stop,
        }
    }

    /// The kubelet's root folder.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("k")
    }

    /// Runs until the world ends.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    pub(crate) fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Waits until the live pods name these claims and no others.
    pub(crate) async fn wait_for_claims(&self, names: &[&str]) {
        let mut named = self.named.clone();
        let is_so = |named: &Option<NamedClaims>| {
            let all = named
                .iter()
                .flat_map(|named| named.by_pod.values().flatten());
            let all = all.map(|name| format!("{}/{}", name.namespace, name.name));
            named.is_some() && all.collect::<Vec<_>>() == names
        };
        let waited = tokio::time::timeout(DEADLINE, named.wait_for(is_so)).await;
        assert!(
            waited.is_ok(),
            "{names:?} never came: {:?}",
            self.named.borrow()
        );
    }

    /// Waits until the list of pods is as wanted.
    pub(crate) async fn wait_for_pods(&self, what: &str, wanted: impl Fn(Option<&Pods>) -> bool) {
        let pods = self.pods.clone();
        eventually(what, DEADLINE, || wanted(pods.borrow().as_ref())).await;
    }

    /// A counted pod is bound here and runs.
    pub(crate) async fn run_pod(&self, name: &str, count: u32) {
        self.api.put("pods", in_api(name, count, "Pending"));
        self.kubelet.admit(pod(name, count)).await.unwrap();
        self.kubelet.run(&uid(name)).await.unwrap();
        self.api.put("pods", in_api(name, count, "Running"));
    }

    /// A counted pod runs, and the pool knows that it has its GPU.
    pub(crate) async fn run_bound_pod(&self, name: &str) {
        self.run_pod(name, 1).await;
        let want = (name.to_owned(), Some(uid(name)));
        eventually("the grant is bound", DEADLINE, || {
            self.arbiter.bound().contains(&want)
        })
        .await;
    }
}
