//! Wiring: what is started in which order, and what ends the process.
//!
//! Ledger and lock first, then the inventory, then the sockets, then the kubelet, and the API server last: a node
//! with a good ledger answers the kubelet while the API server is away. A task that ends takes the process with
//! it, saying why: half a daemon that looks alive is worse than a restart.

mod client;
mod conditions;
mod feeds;
mod lookout;
mod preview;

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bridge_core::{
    ClaimUid, Claims, Pods, Pool, Process, Processes, Settings, UnitId, UnitProcesses,
};
use bridge_nvml::Session;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::admin::{self, Conditions};
use crate::arbiter::{Arbiter, Handle, Observation, ProcessProbe};
use crate::cdi::{CdiFiles, ClaimMinors, Roots};
use crate::cli::RunOptions;
use crate::config::{self, Config};
use crate::inventory::{self, Scan};
use crate::store::{BootId, Loaded, Store};
use crate::{device_plugin, dra, uds, usage};

pub use self::client::Wrong as WrongKubeconfig;
use self::client::client;
pub use self::preview::{Foresight, Preview, preview};

/// How often the processes are looked at for strangers on free units.
const STRANGER_PERIOD: Duration = Duration::from_secs(5);
/// How long the first scan may take before the sockets are opened without it.
const FIRST_SCAN_LIMIT: Duration = Duration::from_secs(5);
/// How long tasks may take to end after SIGTERM: calls in progress finish well within it.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long the counted pods that are on their way may take after SIGTERM. As a rule they are served within half a
/// second; one that hangs in the kubelet must not keep the daemon.
const LEAVE_LIMIT: Duration = Duration::from_secs(3);

/// A background task: its name, and why it ended.
type Ended = (&'static str, anyhow::Result<()>);
type Tasks = JoinSet<Ended>;

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Something that the daemon can't do without is missing at the start, or one of its tasks ended.
pub async fn run(options: RunOptions) -> anyhow::Result<()> {
    let started = Instant::now();
    let config = match &options.config {
        Some(path) => config::load(path)?,
        None => Config::default(),
    };
    let client = client(options.kubeconfig.as_deref()).await?;
    let (store, pool) = open_store(&options, &config.settings)?;
    let nvml = start_nvml(&options)?;
    let cdi = Arc::new(CdiFiles::new(
        options.cdi_dir.clone(),
        Roots {
            dev_root: options.dev_root.clone(),
        },
    ));
    // Read before the arbiter sweeps what the ledger does not name: on a node without a ledger it is evidence.
    let on_disk = OnDisk::of(&cdi);
    let probe = process_probe(nvml.clone(), &options, &config);
    let (arbiter, handle) = Arbiter::new(pool, Arc::clone(&store), cdi, probe, started);
    let stop = CancellationToken::new();
    let conditions = Conditions::new();
    let mut tasks = Tasks::new();
    tasks.spawn(async move {
        arbiter.run().await;
        ("arbiter", Ok(()))
    });
    let faces = Faces {
        options: &options,
        config: &config,
        handle: &handle,
        conditions: &conditions,
        client,
        resources: usage::PodResources::new(&options.kubelet_dir, options.node_name.clone()),
        stop: &stop,
    };
    // Before the inventory, which takes seconds on a large node: until the kubelet reads our list, no counted pod
    // should come.
    let registration = faces.start_node_status(&mut tasks);
    let scans = start_inventory(&mut tasks, nvml, &handle, &conditions, &stop).await;
    let (waiting, waiting_for) = watch::channel(String::new());
    let sources = admin::Sources {
        node: options.node_name.clone(),
        handle: handle.clone(),
        conditions: conditions.clone(),
        waiting_for,
    };
    // Before the faces: a daemon that can't have its address must not come and go at the kubelet.
    start_admin(&mut tasks, &options, sources, &stop).await?;
    let started = Started {
        store,
        on_disk,
        scans,
        registration,
        waiting,
    };
    faces.start(&mut tasks, started).await?;
    info!(
        node = options.node_name,
        mode = config.settings.mode.as_str(),
        "gpu-bridge runs"
    );
    wait_for_the_end(tasks, handle, stop).await
}

/// Opens the ledger and says what a start without a good one means.
fn open_store(options: &RunOptions, settings: &Settings) -> anyhow::Result<(Arc<Store>, Pool)> {
    let boot_id = BootId::read(&options.proc_root).unwrap_or_else(|error| {
        warn!(%error, "the boot id can't be read; a reboot will not be noticed by it");
        BootId::unknown()
    });
    let (store, loaded) = Store::open(&options.state_dir, boot_id)?;
    let settings = settings.clone();
    let pool = match loaded {
        Loaded::Ledger(ledger) => {
            info!(
                generation = ledger.generation,
                units = ledger.units.len(),
                "the ledger is read"
            );
            Pool::restored(ledger, settings)
        }
        Loaded::Missing => {
            warn!("there is no ledger: nothing is given out until what runs on this node is known");
            Pool::waiting(settings)
        }
        Loaded::Unreadable { path, why } => {
            error!(path = %path.display(), error = why, "the ledger can't be read: nothing is given out");
            Pool::unreadable(settings)
        }
    };
    Ok((Arc::new(store), pool))
}

fn start_nvml(options: &RunOptions) -> anyhow::Result<Session> {
    Session::spawn(bridge_nvml::Options {
        library: options.nvml_library.clone(),
        sys_root: options.sys_root.clone(),
        timeouts: bridge_nvml::Timeouts::default(),
    })
    .context("the NVML thread could not be started")
}

/// NVML's processes, each with the pod of its cgroup, without those that the configuration ignores.
fn process_probe(nvml: Session, options: &RunOptions, config: &Config) -> ProcessProbe {
    let proc_root: Arc<Path> = options.proc_root.clone().into();
    let config = Arc::new(config.clone());
    Arc::new(move || {
        let (nvml, proc_root, config) = (nvml.clone(), Arc::clone(&proc_root), Arc::clone(&config));
        let answer: Pin<Box<dyn Future<Output = Processes> + Send>> =
            Box::pin(async move { probe(&nvml, &proc_root, &config).await });
        answer
    })
}

async fn probe(nvml: &Session, proc_root: &Path, config: &Config) -> Processes {
    let mut processes = Processes::default();
    let counts = |pid: &u32| {
        config.ignore_processes.is_empty()
            || usage::process_name(proc_root, *pid).is_none_or(|name| !config.ignores(&name))
    };
    // What NVML does not say is unknown, and nothing unknown changes hands.
    for (unit, pids) in inventory::processes(nvml).await.unwrap_or_default() {
        let known = match pids {
            Err(_) => UnitProcesses::Unknown,
            Ok(pids) => UnitProcesses::Known(
                pids.into_iter()
                    .filter(counts)
                    .map(|pid| Process {
                        pid,
                        pod: usage::pod_of_process(proc_root, pid),
                    })
                    .collect(),
            ),
        };
        processes.units.insert(unit, known);
    }
    processes
}

/// Starts the scans, and waits a moment for the first, so that the sockets open with a known inventory.
async fn start_inventory(
    tasks: &mut Tasks,
    nvml: Session,
    handle: &Handle,
    conditions: &Conditions,
    stop: &CancellationToken,
) -> watch::Receiver<Scan> {
    let (scans, mut seen) = watch::channel(Scan::Pending);
    let (ask, on_demand) = mpsc::channel(1);
    let (session, cancel) = (nvml.clone(), stop.clone());
    tasks.spawn(async move {
        inventory::run(session, scans, on_demand, cancel).await;
        ("inventory", Ok(()))
    });
    tasks.spawn(rescan_on_hangup(ask, stop.clone()));
    tasks.spawn(feed_scans(seen.clone(), handle.clone(), stop.clone()));
    tasks.spawn(look_for_strangers(handle.clone(), stop.clone()));
    tasks.spawn(conditions::nvml(
        seen.clone(),
        conditions.clone(),
        stop.clone(),
    ));
    let cancel = stop.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = nvml.ended() => ("NVML thread", Err(anyhow::anyhow!("it ended by itself"))),
            () = cancel.cancelled() => ("NVML thread", Ok(())),
        }
    });
    let first = seen.wait_for(|scan| *scan != Scan::Pending);
    match tokio::time::timeout(FIRST_SCAN_LIMIT, first).await {
        Ok(Ok(scan)) => {
            let inventory = scan.inventory();
            drop(scan);
            // The sockets must not open with a list that changes a moment later.
            if let Some(inventory) = inventory
                && let Err(failure) = handle.observe(Observation::Inventory(inventory)).await
            {
                warn!(error = %failure, "the first inventory could not be taken; it is told again");
            }
        }
        Ok(Err(_)) | Err(_) => warn!("NVML has not answered yet; the start goes on without it"),
    }
    seen
}

/// SIGHUP asks for a scan with NVML started anew, as after a driver upgrade or a new GPU.
async fn rescan_on_hangup(ask: mpsc::Sender<()>, stop: CancellationToken) -> Ended {
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => return ("rescan on SIGHUP", Err(error.into())),
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => return ("rescan on SIGHUP", Ok(())),
            _ = hangup.recv() => {
                info!("SIGHUP: the GPUs are read anew");
                // A scan that waits already is as good as another.
                let _ = ask.try_send(());
            }
        }
    }
}

async fn feed_scans(
    mut scans: watch::Receiver<Scan>,
    handle: Handle,
    stop: CancellationToken,
) -> Ended {
    loop {
        let inventory = scans.borrow_and_update().inventory();
        if let Some(inventory) = inventory
            && let Err(failure) = handle.observe(Observation::Inventory(inventory)).await
        {
            warn!(error = %failure, "what NVML says could not be taken; it is told again");
            tokio::select! {
                () = stop.cancelled() => return ("inventory feed", Ok(())),
                () = tokio::time::sleep(STRANGER_PERIOD) => continue,
            }
        }
        tokio::select! {
            () = stop.cancelled() => return ("inventory feed", Ok(())),
            changed = scans.changed() => if changed.is_err() {
                return ("inventory feed", Ok(()));
            }
        }
    }
}

async fn look_for_strangers(handle: Handle, stop: CancellationToken) -> Ended {
    let mut ticks = tokio::time::interval(STRANGER_PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return ("process watch", Ok(())),
            _ = ticks.tick() => {}
        }
        if let Err(failure) = handle.observe(Observation::Processes).await {
            warn!(error = %failure, "a look at the processes had no effect");
        }
    }
}

async fn start_admin(
    tasks: &mut Tasks,
    options: &RunOptions,
    sources: admin::Sources,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let listeners = admin::Listeners {
        http: admin::http_listener(options.http_addr).await?,
        socket: uds::bind(&options.admin_socket)?,
    };
    let cancel = stop.clone();
    tasks.spawn(async move {
        let done = admin::run(sources, listeners, cancel).await;
        ("admin server", done.map_err(anyhow::Error::from))
    });
    Ok(())
}

/// The claims allocated here and the pods bound here, `None` while they are not known.
type Followed = (
    watch::Receiver<Option<Claims>>,
    watch::Receiver<Option<Pods>>,
);

/// The CDI files of claims that a former daemon has left behind.
struct OnDisk {
    claims: Option<BTreeSet<ClaimUid>>,
    minors: ClaimMinors,
}

impl OnDisk {
    fn of(cdi: &CdiFiles) -> Self {
        Self {
            claims: cdi.claims_on_disk().ok(),
            minors: cdi.minors_on_disk(),
        }
    }
}

/// What a former daemon has left behind, and the GPUs that are there.
struct Leftovers {
    on_disk: OnDisk,
    unprepared: usage::UnpreparedClaims,
    scans: watch::Receiver<Scan>,
}

/// The two faces and what feeds them.
struct Faces<'a> {
    options: &'a RunOptions,
    config: &'a Config,
    handle: &'a Handle,
    conditions: &'a Conditions,
    client: kube::Client,
    resources: usage::PodResources,
    stop: &'a CancellationToken,
}

/// What the faces need of what was started before them.
struct Started {
    store: Arc<Store>,
    on_disk: OnDisk,
    scans: watch::Receiver<Scan>,
    registration: watch::Sender<device_plugin::RegistrationState>,
    waiting: watch::Sender<String>,
}

impl Faces<'_> {
    async fn start(&self, tasks: &mut Tasks, started: Started) -> anyhow::Result<()> {
        let Started {
            store,
            on_disk,
            scans,
            registration,
            waiting,
        } = started;
        let (claims, pods) = self.follow(tasks);
        let (_, handle, stop) = self.own();
        let mut lookout = lookout::new(
            self.options,
            self.resources.clone(),
            pods.clone(),
            registration.subscribe(),
            handle,
        );
        // Before the faces: nothing is offered beside another daemon that was there first.
        lookout.look().await?;
        tasks.spawn(lookout::run(lookout, stop));
        self.start_device_plugin(tasks, registration, pods.clone());
        self.start_dra(tasks);
        self.start_demand(tasks);
        let (_, handle, stop) = self.own();
        let (listing, bound) = (self.resources.clone(), pods.clone());
        tasks.spawn(async move {
            let done = usage::run_listing(listing, bound, handle, stop).await;
            ("pod-resources watch", done.map_err(anyhow::Error::from))
        });
        tasks.spawn(conditions::api(
            claims.clone(),
            pods.clone(),
            self.conditions.clone(),
            self.stop.clone(),
        ));
        let leftovers = Leftovers {
            on_disk,
            unprepared: Arc::new(move || store.unprepared()),
            scans,
        };
        self.adopt(tasks, leftovers, (claims, pods), waiting);
        Ok(())
    }

    /// Follows the claims allocated here and the pods bound here.
    fn follow(&self, tasks: &mut Tasks) -> Followed {
        let (claims_out, claims) = watch::channel(None);
        let (pods_out, pods) = watch::channel(None);
        let (named_out, named) = watch::channel(None);
        self.start_claims(tasks, named, claims_out);
        let (node, handle, stop) = self.own();
        let (client, kubelet_dir) = (self.client.clone(), self.options.kubelet_dir.clone());
        let out = usage::PodsOut {
            pods: pods_out,
            claims: named_out,
        };
        tasks.spawn(async move {
            let done = usage::run_pods(client, node, kubelet_dir, handle, out, stop).await;
            ("pod watch", done.map_err(anyhow::Error::from))
        });
        (claims, pods)
    }

    /// Takes over what runs here, if the pool waits for that.
    fn adopt(
        &self,
        tasks: &mut Tasks,
        leftovers: Leftovers,
        (claims, pods): Followed,
        waiting: watch::Sender<String>,
    ) {
        let (_, handle, stop) = self.own();
        let scans = leftovers.scans;
        let inputs = usage::AdoptionInputs {
            resources: self.resources.clone(),
            kubelet_dir: self.options.kubelet_dir.clone(),
            device_plugin_dir: self.options.device_plugin_dir.clone(),
            pods,
            claims,
            cdi_claims: leftovers.on_disk.claims,
            cdi_minors: leftovers.on_disk.minors,
            unprepared: leftovers.unprepared,
            minors: Arc::new(move || minors(&scans.borrow())),
            waiting,
        };
        tasks.spawn(async move {
            let done = usage::run_adoption(inputs, handle, stop).await;
            ("adoption", done.map_err(anyhow::Error::from))
        });
    }

    fn own(&self) -> (String, Handle, CancellationToken) {
        (
            self.options.node_name.clone(),
            self.handle.clone(),
            self.stop.clone(),
        )
    }

    fn start_device_plugin(
        &self,
        tasks: &mut Tasks,
        state: watch::Sender<device_plugin::RegistrationState>,
        pods: watch::Receiver<Option<Pods>>,
    ) {
        let settings = device_plugin::Settings {
            folder: self.options.device_plugin_dir.clone(),
            instance: self
                .options
                .pod_uid
                .as_ref()
                .map_or_else(|| "node".to_owned(), ToString::to_string),
        };
        let list_now = usage::ask_about(self.resources.clone(), self.handle.status(), pods);
        let seen = state.subscribe();
        let (_, handle, stop) = self.own();
        tasks.spawn(async move {
            let done = device_plugin::run(settings, handle, list_now, state, stop).await;
            ("device plugin", done.map_err(anyhow::Error::from))
        });
        tasks.spawn(conditions::device_plugin(
            seen,
            self.conditions.clone(),
            self.stop.clone(),
        ));
    }

    /// Also returns where the device plugin says how far its registration is.
    fn start_node_status(
        &self,
        tasks: &mut Tasks,
    ) -> watch::Sender<device_plugin::RegistrationState> {
        let (registration, registered) =
            watch::channel(device_plugin::RegistrationState::default());
        let resources = self.resources.clone();
        let (node, handle, stop) = self.own();
        let inputs = device_plugin::NodeStatusInputs {
            client: self.client.clone(),
            node,
            handle,
            registered,
            kubelet_count: Arc::new(move || {
                let resources = resources.clone();
                Box::pin(async move {
                    let counted = resources.allocatable().await;
                    counted.map_err(|error| error.to_string())
                })
            }),
            right_again: device_plugin::RIGHT_AGAIN,
        };
        let (state, seen) = watch::channel(device_plugin::NodeStatusState::default());
        tasks.spawn(async move {
            let done = device_plugin::run_node_status(inputs, state, stop).await;
            ("node status", done.map_err(anyhow::Error::from))
        });
        tasks.spawn(conditions::node_status(
            seen,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        registration
    }

    fn start_dra(&self, tasks: &mut Tasks) {
        let place = dra::Place {
            kubelet_dir: self.options.kubelet_dir.clone(),
            pod: self.options.pod_uid.clone(),
        };
        let (state, registered) = watch::channel(dra::RegistrationState::Starting);
        let (node, handle, stop) = self.own();
        let client = self.client.clone();
        tasks.spawn(async move {
            let done = dra::register::run(client, node, place, handle, state, stop).await;
            ("DRA plugin", done.map_err(anyhow::Error::from))
        });
        let (state, published) = watch::channel(dra::PublishState::Waiting);
        let (node, handle, stop) = self.own();
        let client = self.client.clone();
        tasks.spawn(async move {
            dra::slices::run(client, node, handle.offers(), state, stop).await;
            ("slice publisher", Ok(()))
        });
        tasks.spawn(conditions::dra(
            registered,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        tasks.spawn(conditions::slice(
            published,
            self.conditions.clone(),
            self.stop.clone(),
        ));
    }
}

fn minors(scan: &Scan) -> Option<Vec<(UnitId, u32)>> {
    match scan {
        Scan::Seen { gpus, .. } => Some(
            gpus.iter()
                .map(|gpu| (gpu.uuid.clone(), gpu.minor))
                .collect(),
        ),
        Scan::Pending | Scan::Unavailable(_) => None,
    }
}

/// Waits for a signal or for a task that ends, tells all others to stop, and gives them a moment.
async fn wait_for_the_end(
    mut tasks: Tasks,
    handle: Handle,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM can't be waited for")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT can't be waited for")?;
    let end = tokio::select! {
        _ = terminate.recv() => { info!("SIGTERM: gpu-bridge stops"); Ok(()) }
        _ = interrupt.recv() => { info!("SIGINT: gpu-bridge stops"); Ok(()) }
        ended = tasks.join_next() => Err(why_it_ended(ended)),
    };
    if end.is_ok() {
        tokio::select! {
            () = leave(&handle) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    drop(handle);
    stop.cancel();
    let rest = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_LIMIT, rest).await.is_err() {
        warn!("some tasks did not end in time and are left behind");
    }
    end
}

/// Waits until no counted pod is on its way to this node any more: without a daemon the kubelet fails it for good.
async fn leave(handle: &Handle) {
    if let Err(failure) = handle.observe(Observation::Leaving).await {
        warn!(error = %failure, "the count in the own Node stays as it is");
        return;
    }
    let mut offers = handle.offers();
    let clear = offers.wait_for(|offers| offers.clear);
    if tokio::time::timeout(LEAVE_LIMIT, clear).await.is_err() {
        warn!("counted pods may still be on their way here; the kubelet fails them");
    }
}

fn why_it_ended(ended: Option<Result<Ended, tokio::task::JoinError>>) -> anyhow::Error {
    match ended {
        Some(Ok((name, Err(error)))) => error.context(format!("{name} can't go on")),
        Some(Ok((name, Ok(())))) => anyhow::anyhow!("{name} ended by itself, which is a bug"),
        Some(Err(panic)) => anyhow::anyhow!("a task panicked: {panic}"),
        None => anyhow::anyhow!("no task is left"),
    }
}
