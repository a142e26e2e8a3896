//! What the tests of the counted face stand on: an arbiter without a disk, and one that follows a script.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    AllocateOutcome, AllocateRequest, Evidence, Gpu, Inventory, Listing, Mode, Moment, Offers,
    Pool, Processes, Settings, Status, Transition, UnitId, UnitProcesses,
};
use futures::FutureExt as _;
use gpu_bridge::arbiter::{AllocateReply, Call, Error, GrantedDevice, Handle, Observation};
use gpu_bridge::device_plugin::{self, ListNow, RegistrationState};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const RESOURCE: &str = device_plugin::RESOURCE;

/// Far more than anything here takes, on a machine that is busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn gpu(number: u32) -> Gpu {
    Gpu {
        uuid: UnitId::new(format!("GPU-{number}")).unwrap(),
        pci_bus_id: format!("0000:{number:02x}:00.0"),
        minor: number,
        product_name: "NVIDIA H200".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory_bytes: 1 << 37,
        driver_version: "580.1".to_owned(),
        cuda_driver_version: (13, 0),
        numa_node: Some(number % 2),
        pcie_root: None,
        addressing_mode: None,
    }
}

/// The real decisions, on a pool that is never saved, with GPUs on which no process ever runs.
pub(crate) struct Arbiter {
    pub(crate) handle: Handle,
    task: JoinHandle<()>,
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Arbiter {
    /// A node in mode `legacy` with GPU-0, GPU-1, ...
    pub(crate) fn start(gpus: u32) -> Self {
        let settings = Settings {
            mode: Mode::Legacy,
            ..Settings::default()
        };
        Self::with(
            Pool::restored(bridge_core::Ledger::default(), settings),
            gpus,
        )
    }

    pub(crate) fn with(pool: Pool, gpus: u32) -> Self {
        let (calls, mut queue) = mpsc::channel(32);
        let started = Instant::now();
        let offers = watch::Sender::new(Arc::new(Offers::default()));
        let status = watch::Sender::new(Arc::new(pool.status(SystemTime::now())));
        let handle = Handle::new(calls, offers.subscribe(), status.subscribe(), started);
        let board = Board {
            pool: Mutex::new(pool),
            offers,
            status,
            started,
            gpus,
        };
        let inventory = Inventory::Seen((0..gpus).map(gpu).collect());
        board.change(|transition| transition.observe_inventory(inventory));
        let task = tokio::spawn(async move {
            while let Some(call) = queue.recv().await {
                board.answer(call);
            }
        });
        Self { handle, task }
    }

    pub(crate) fn status(&self) -> Arc<Status> {
        Arc::clone(&self.handle.status().borrow())
    }

    /// How many units are held.
    pub(crate) fn held(&self) -> usize {
        let status = self.status();
        status
            .units
            .iter()
            .filter(|it| !it.holds.is_empty())
            .count()
    }
}

struct Board {
    pool: Mutex<Pool>,
    offers: watch::Sender<Arc<Offers>>,
    status: watch::Sender<Arc<Status>>,
    started: Instant,
    gpus: u32,
}

impl Board {
    fn change<T>(&self, decide: impl FnOnce(&mut Transition) -> T) -> T {
        let mut pool = self.pool.lock().unwrap();
        let now = Moment {
            wall: SystemTime::now(),
            uptime: self.started.elapsed(),
        };
        let mut transition = pool.begin(now, self.processes());
        let outcome = decide(&mut transition);
        let _ = transition.ledger_to_save();
        pool.commit(transition);
        let offers = Arc::new(pool.offers());
        self.offers.send_if_modified(|shown| {
            let news = *shown != offers;
            *shown = offers;
            news
        });
        self.status.send_replace(Arc::new(pool.status(now.wall)));
        outcome
    }

    fn processes(&self) -> Processes {
        let clean = |number| (gpu(number).uuid, UnitProcesses::Known(Vec::new()));
        Processes {
            units: (0..self.gpus).map(clean).collect(),
        }
    }

    fn answer(&self, call: Call) {
        match call {
            Call::Allocate {
                request,
                listing,
                reply,
            } => {
                let evidence = Evidence { listing };
                let outcome = self.change(|transition| transition.allocate(&request, &evidence));
                drop(reply.send(Ok(to_reply(outcome))));
            }
            Call::Observe { observation, reply } => {
                self.change(|transition| observe(transition, observation));
                drop(reply.send(Ok(())));
            }
            Call::Prepare { reply, .. } => drop(reply.send(Err(Error::Stopping))),
            Call::Unprepare { reply, .. } => drop(reply.send(Ok(()))),
        }
    }
}

fn observe(transition: &mut Transition, observation: Observation) {
    match observation {
        Observation::Listing(listing) => transition.observe_listing(listing),
        Observation::Pods(pods) => transition.observe_pods(pods),
        Observation::Claims(claims) => transition.observe_claims(claims),
        Observation::Inventory(inventory) => transition.observe_inventory(inventory),
        Observation::KubeletIds(ids) => transition.observe_kubelet_ids(ids),
        Observation::Adoption(adoption) => transition.adopt(*adoption),
        Observation::Processes => transition.observe_processes(),
    }
}

fn to_reply(outcome: AllocateOutcome) -> AllocateReply {
    match outcome {
        AllocateOutcome::Granted(grants) => AllocateReply::Granted(
            grants
                .into_iter()
                .map(|grant| GrantedDevice {
                    cdi_device: format!("gpu-bridge.dev/gpu={}", grant.unit),
                    grant,
                })
                .collect(),
        ),
        AllocateOutcome::NeedsListing => AllocateReply::NeedsListing,
        AllocateOutcome::Wait => AllocateReply::Wait,
        AllocateOutcome::Refused(refusal) => AllocateReply::Refused(refusal),
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
        let state = watch::Sender::new(RegistrationState::default());
        let receiver = state.subscribe();
        let stop = CancellationToken::new();
        let settings = device_plugin::Settings {
            folder: folder.to_owned(),
            instance: "node".to_owned(),
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
    Arc::new(move || {
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
