//! What the tests of the counted face stand on: the arbiter, one that follows a script, and one that only listens.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    AllocateRequest, Gpu, HandedUnit, Handout, HostPath, Inventory, Listing, Mode, Offers, Phase,
    Pods, Pool, Process, Processes, Settings, Status, UnitId, UnitProcesses,
};
use futures::FutureExt as _;
use gpu_bridge::arbiter::{self, AllocateReply, Call, Error, Handle, Observation};
use gpu_bridge::cdi::{CdiFiles, Roots};
use gpu_bridge::device_plugin::{self, ListNow, RegistrationState, TellContainer};
use gpu_bridge::metrics::Metrics;
use gpu_bridge::store::{BootId, Store};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::h100::h100;
use crate::nodes::make_nodes;

pub(crate) const RESOURCE: &str = device_plugin::RESOURCE;

/// The name of the node, and so of its pool.
pub(crate) const NODE: &str = "node-1";

/// Far more than anything here takes, on a machine that is busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn gpu(number: u32) -> Gpu {
    Gpu {
        numa_node: Some(number % 2),
        ..h100(number, UnitId::new(format!("GPU-{number}")).unwrap())
    }
}

/// Processes by unit, as a test sets them.
pub(crate) type Running = Arc<Mutex<BTreeMap<UnitId, Vec<Process>>>>;

/// The real arbiter, with a ledger in a folder of its own, on GPUs whose processes a test sets.
pub(crate) struct Arbiter {
    pub(crate) handle: Handle,
    pub(crate) running: Running,
    task: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Arbiter {
    /// A node in mode `legacy` with GPU-0, GPU-1, ...
    pub(crate) async fn start(gpus: u32) -> Self {
        let settings = Settings {
            mode: Mode::Legacy,
            ..Settings::default()
        };
        let pool = Pool::restored(bridge_core::Ledger::default(), settings);
        Self::with(pool, gpus).await
    }

    /// A node whose ledger is lost, in mode `both`.
    pub(crate) async fn waiting(gpus: u32) -> Self {
        Self::with(Pool::waiting(Settings::default()), gpus).await
    }

    async fn with(pool: Pool, gpus: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let (store, _) = Store::open(&state, BootId::unknown()).unwrap();
        let cdi = folder.path().join("cdi");
        std::fs::create_dir(&cdi).unwrap();
        let root = folder.path().join("root");
        make_nodes(&root, gpus);
        let roots = Roots::in_one(&root);
        let running = Running::default();
        let probed = Arc::clone(&running);
        let (arbiter, handle) = arbiter::Arbiter::new(
            pool,
            Arc::new(store),
            Arc::new(CdiFiles::new(cdi, roots)),
            Arc::new(move || {
                let processes = processes(gpus, &probed.lock().unwrap());
                Box::pin(async move { processes })
            }),
            Instant::now(),
            Metrics::new(),
        );
        let task = tokio::spawn(arbiter.run());
        let inventory = Inventory::Seen((0..gpus).map(gpu).collect());
        handle
            .observe(Observation::Inventory(inventory))
            .await
            .unwrap();
        Self {
            handle,
            running,
            task,
            _folder: folder,
        }
    }

    pub(crate) fn status(&self) -> Arc<Status> {
        Arc::clone(&self.handle.status().borrow())
    }

    /// The phases of all holds, in the order of the units.
    pub(crate) fn phases(&self) -> Vec<(String, Phase)> {
        let status = self.status();
        let holds = status.units.iter().flat_map(|unit| {
            let holds = unit.holds.iter();
            holds.map(|hold| (unit.unit.to_string(), hold.phase()))
        });
        holds.collect()
    }

    /// How many units are held.
    pub(crate) fn held(&self) -> usize {
        self.phases().len()
    }
}

fn processes(gpus: u32, running: &BTreeMap<UnitId, Vec<Process>>) -> Processes {
    let of = |number| {
        let unit = gpu(number).uuid;
        let processes = running.get(&unit).cloned().unwrap_or_default();
        (unit, UnitProcesses::Known(processes))
    };
    Processes {
        units: (0..gpus).map(of).collect(),
    }
}

/// An arbiter that takes every observation, and decides nothing.
pub(crate) struct Log {
    pub(crate) handle: Handle,
    seen: Arc<Mutex<Vec<Observation>>>,
    task: JoinHandle<()>,
    _offers: watch::Sender<Arc<Offers>>,
    _status: watch::Sender<Arc<Status>>,
}

impl Drop for Log {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Log {
    pub(crate) fn start() -> Self {
        let (calls, mut queue) = mpsc::channel(32);
        let offers = watch::Sender::new(Arc::new(Offers::default()));
        let pool = Pool::restored(bridge_core::Ledger::default(), Settings::default());
        let status = watch::Sender::new(Arc::new(pool.status(SystemTime::now())));
        let handle = Handle::new(
            calls,
            offers.subscribe(),
            status.subscribe(),
            Instant::now(),
        );
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Some(call) = queue.recv().await {
                if let Call::Observe { observation, reply } = call {
                    log.lock().unwrap().push(observation);
                    drop(reply.send(Ok(())));
                }
            }
        });
        Self {
            handle,
            seen,
            task,
            _offers: offers,
            _status: status,
        }
    }

    /// The last pods that were told; `None` before the first.
    pub(crate) fn pods(&self) -> Option<Option<Pods>> {
        let seen = self.seen.lock().unwrap();
        seen.iter().rev().find_map(|observation| {
            if let Observation::Pods(pods) = observation {
                Some(pods.clone())
            } else {
                None
            }
        })
    }

    /// How many listings were told.
    pub(crate) fn listings(&self) -> usize {
        let seen = self.seen.lock().unwrap();
        let listings = seen
            .iter()
            .filter(|observation| matches!(observation, Observation::Listing(_)));
        listings.count()
    }
}

/// An `Allocate`, and what it brought along.
pub(crate) type Asked = (AllocateRequest, Option<Listing>);

/// An arbiter whose offers a test sets, and whose answers to `Allocate` it gives.
pub(crate) struct Script {
    pub(crate) handle: Handle,
    pub(crate) offers: watch::Sender<Arc<Offers>>,
    /// What was asked, in order.
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
    _status: watch::Sender<Arc<Status>>,
}

impl Drop for Script {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Script {
    pub(crate) fn start(
        offers: Offers,
        mut answer: impl FnMut(&AllocateRequest, Option<&Listing>) -> Result<AllocateReply, Error>
        + Send
        + 'static,
    ) -> Self {
        let (calls, mut queue) = mpsc::channel(32);
        let offers = watch::Sender::new(Arc::new(offers));
        let pool = Pool::restored(bridge_core::Ledger::default(), Settings::default());
        let status = watch::Sender::new(Arc::new(pool.status(SystemTime::now())));
        let handle = Handle::new(
            calls,
            offers.subscribe(),
            status.subscribe(),
            Instant::now(),
        );
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let task = tokio::spawn(async move {
            while let Some(call) = queue.recv().await {
                if let Call::Allocate {
                    request,
                    listing,
                    reply,
                } = call
                {
                    let outcome = answer(&request, listing.as_ref());
                    log.lock().unwrap().push((request, listing));
                    drop(reply.send(outcome));
                }
            }
        });
        Self {
            handle,
            offers,
            asked,
            task,
            _status: status,
        }
    }
}

/// What containers are told with these settings; the index of a unit is the number in its name.
pub(crate) fn by(handout: Handout) -> TellContainer {
    TellContainer::new(move |granted| {
        let units: Vec<HandedUnit> = granted
            .iter()
            .map(|device| HandedUnit {
                unit: device.grant.unit.clone(),
                cdi_device: device.cdi_device.clone(),
                index: device
                    .grant
                    .unit
                    .as_str()
                    .strip_prefix("GPU-")
                    .and_then(|it| it.parse().ok()),
            })
            .collect();
        let nodes = ["nvidiactl", "nvidia0"].map(|name| HostPath {
            container_path: format!("/dev/{name}"),
            host_path: format!("/run/nvidia/driver/dev/{name}"),
        });
        handout.edits(&units, nodes.to_vec())
    })
}

/// A running device plugin.
pub(crate) struct Plugin {
    pub(crate) state: watch::Receiver<RegistrationState>,
    pub(crate) stop: CancellationToken,
    pub(crate) task: JoinHandle<Result<(), device_plugin::Error>>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Plugin {
    pub(crate) fn start(folder: &Path, handle: Handle, list_now: ListNow) -> Self {
        Self::telling(folder, handle, list_now, Handout::default())
    }

    pub(crate) fn telling(
        folder: &Path,
        handle: Handle,
        list_now: ListNow,
        handout: Handout,
    ) -> Self {
        let state = watch::Sender::new(RegistrationState::default());
        let receiver = state.subscribe();
        let stop = CancellationToken::new();
        let settings = device_plugin::Settings {
            folder: folder.to_owned(),
            instance: "node".to_owned(),
            tell: by(handout),
        };
        let run = device_plugin::run(settings, handle, list_now, state, stop.clone());
        Self {
            state: receiver,
            stop,
            task: tokio::spawn(run),
        }
    }

    /// Waits for a state.
    pub(crate) async fn wait(&mut self, what: &str, is: impl FnMut(&RegistrationState) -> bool) {
        let reached = tokio::time::timeout(DEADLINE, self.state.wait_for(is)).await;
        assert!(
            reached.is_ok_and(|it| it.is_ok()),
            "waited {DEADLINE:?} in vain for: {what}; the state is {:?}",
            *self.state.borrow()
        );
    }
}

/// pod-resources that a test answers for.
pub(crate) fn listing(answer: Result<Listing, String>) -> ListNow {
    Arc::new(move |_| {
        let answer = answer.clone();
        async move { answer }.boxed()
    })
}

pub(crate) fn no_listing() -> ListNow {
    listing(Err("nobody expected the question".to_owned()))
}

/// File names of our sockets in a folder.
pub(crate) fn sockets(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("gpu-bridge-"))
        .collect();
    names.sort();
    names
}
