//! Wiring: what is started in which order, and what ends the process.
//!
//! Ledger and lock first, then the inventory, then the sockets, then the kubelet, and the API server last: a node
//! with a good ledger answers the kubelet while the API server is away. A task that ends takes the process with
//! it, saying why: half a daemon that looks alive is worse than a restart.
//!
//! While another daemon on the node owns the ledger, this one waits for it (`succession`), and gives it to the next
//! one (`reign`).

mod classes;
mod conditions;
mod doctor;
mod events;
mod feeds;
mod handout;
mod leave;
mod lookout;
mod nodes;
mod preview;
mod reign;
mod rights;
mod settings;
mod succession;

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
use bridge_nvml::{Session, Xids};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::reign::Reign;
use self::succession::{Owned, Waiting, Way};
use crate::admin::{self, Conditions, Pages};
use crate::arbiter::{Arbiter, Handle, Observation, ProcessProbe};
use crate::cdi::{CdiFiles, ClaimMinors, DriverRoot, Roots};
use crate::cli::RunOptions;
use crate::config::Config;
use crate::config::live::Current;
use crate::inventory::{self, Look, Scan};
use crate::metrics::{Metrics, NvmlCall};
use crate::store::{self, Loaded, Store};
use crate::{client, device_plugin, dra, ticks, usage};

pub use self::doctor::{Advice, Finding, Level, examine};
pub use self::nodes::{NodePage, NodeState, Share, all_nodes};
pub use self::preview::{Foresight, Preview, preview};
pub use self::rights::{RIGHTS, Right, WATCH_OF_CLAIMS};

/// How often the processes are looked at for strangers on free units.
const STRANGER_PERIOD: Duration = Duration::from_secs(5);
/// How long the first scan may take before the sockets are opened without it.
const FIRST_SCAN_LIMIT: Duration = Duration::from_secs(5);
/// How long tasks may take to end after SIGTERM: calls in progress finish well within it.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A background task: its name, and why it ended.
type Ended = (&'static str, anyhow::Result<()>);
type Tasks = JoinSet<Ended>;

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Something that the daemon can't do without is missing at the start, or one of its tasks ended.
pub async fn run(options: RunOptions) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut signals = Signals::new()?;
    let client = client::of_daemon(options.kubeconfig.as_deref()).await?;
    let (current, config) = watch::channel(settings::read(&options, &client).await?);
    store::make_folder(&options.state_dir)?;
    let nvml = Session::spawn_listening(nvml_options(&options));
    let (nvml, xids) = nvml.context(NO_NVML_THREAD)?;
    let stop = CancellationToken::new();
    let conditions = Conditions::new();
    let metrics = Metrics::new();
    let mut tasks = Tasks::new();
    let (scans, looks) = start_scans(&mut tasks, nvml.clone(), &conditions, &metrics, &stop);
    let node = options.node_name.clone();
    let pages = Pages::guarded(node, conditions.clone(), client.clone());
    reign::serve_own_socket(&mut tasks, &options, &pages, &stop)?;
    let waiting = Waiting {
        options: &options,
        client: &client,
        conditions: &conditions,
        scans: scans.clone(),
    };
    let opened = tokio::select! {
        opened = waiting.own() => opened,
        () = signals.told() => return end(tasks, &stop).await,
        ended = tasks.join_next() => return Err(why_it_ended(ended)),
    };
    let Owned { store, loaded, way } = opened?;
    if let Some(pod) = &options.pod_uid {
        store.sign(pod.clone());
    }
    let admin_socket = options.admin_socket.clone();
    let parts = Parts {
        options,
        current,
        config,
        client,
        store: Arc::new(store),
        way,
        nvml,
        scans,
        errors: Errors { xids, looks },
        pages,
        conditions,
        metrics,
        stop: stop.clone(),
        started,
    };
    let handle = parts.serve(loaded, &mut tasks).await?;
    let why = tokio::select! {
        () = signals.told() => None,
        ended = tasks.join_next() => Some(why_it_ended(ended)),
    };
    if why.is_none() {
        tokio::select! {
            () = leave::leave(&handle, &admin_socket) => {}
            () = signals.told() => {}
        }
    }
    drop(handle);
    end(tasks, &stop).await?;
    why.map_or(Ok(()), Err)
}

/// What the owner of the ledger is made of.
struct Parts {
    options: RunOptions,
    current: watch::Sender<Current>,
    config: watch::Receiver<Current>,
    client: kube::Client,
    store: Arc<Store>,
    way: Way,
    nvml: Session,
    scans: watch::Receiver<Scan>,
    errors: Errors,
    pages: Pages,
    conditions: Conditions,
    metrics: Metrics,
    stop: CancellationToken,
    started: Instant,
}

/// What the driver tells of errors of GPUs, and what has to be done about them.
struct Errors {
    xids: watch::Receiver<Xids>,
    looks: watch::Receiver<Option<Look>>,
}

impl Parts {
    /// Starts to decide and to serve: the ledger is ours.
    async fn serve(self, loaded: Loaded, tasks: &mut Tasks) -> anyhow::Result<Handle> {
        let pool = pool_of(loaded, &self.config.borrow().config.settings);
        let roots = roots(&self.options);
        let cdi = CdiFiles::new(self.options.cdi_dir.clone(), roots.clone());
        // Read before the arbiter sweeps what the ledger does not name: on a node without a ledger it is evidence.
        let on_disk = OnDisk::of(&cdi);
        let metrics = self.metrics;
        let counted = metrics.clone();
        let probe = process_probe(self.nvml, &self.options, self.config.clone(), counted);
        let store = Arc::clone(&self.store);
        let (arbiter, handle) =
            Arbiter::new(pool, store, Arc::new(cdi), probe, self.started, metrics);
        tasks.spawn(async move {
            arbiter.run().await;
            ("arbiter", Ok(()))
        });
        let (ask, requests) = mpsc::channel(reign::REQUEST_LIMIT);
        self.pages.open(handle.clone(), ask);
        let mode = self.config.borrow().config.settings.mode.as_str();
        let node = self.options.node_name.clone();
        let faces = Faces {
            options: &self.options,
            tell: handout::tell(self.config.clone(), self.scans.clone(), roots),
            config: self.config.clone(),
            handle: &handle,
            conditions: &self.conditions,
            client: self.client,
            resources: usage::PodResources::new(&self.options.kubelet_dir, node.clone()),
            stop: &self.stop,
        };
        let (registration, registered) =
            watch::channel(device_plugin::RegistrationState::default());
        let reign = faces.reign(tasks, self.pages, registered.clone());
        let over = self.stop.child_token();
        let mut owners = Tasks::new();
        // Before the inventory, which takes seconds on a large node: until the kubelet reads our list, no counted pod
        // should come. Where a former owner has handed over, its list is read, and it passes on what comes.
        if self.way == Way::Free {
            reign.keep_count(&mut owners, &over);
        }
        start_feeds(tasks, self.scans.clone(), &handle, &self.stop).await;
        // The units are known.
        feeds::start_errors(tasks, self.errors, &handle, &self.stop);
        settings::start(tasks, self.current, &faces);
        let waiting = faces.report_ledger(tasks);
        let followed = faces.follow(tasks);
        let pods = followed.1.clone();
        // Before anything is offered: not beside another daemon that was there first.
        faces.look_out(tasks, pods, registered.clone()).await?;
        // Before the faces: a daemon that can't have its address must not come and go at the kubelet.
        reign.begin(&mut owners, &over).await?;
        let store = self.store;
        let leftovers = Leftovers {
            on_disk,
            unprepared: Arc::new(move || store.unprepared()),
            scans: self.scans,
        };
        let evidence = Evidence {
            leftovers,
            waiting,
            followed,
        };
        faces.start(tasks, evidence, registration, registered);
        if self.way == Way::HandedOver {
            reign.keep_count_once_registered(&mut owners, &over);
        }
        tasks.spawn(reign.run(owners, over, requests, self.stop.clone()));
        info!(node, mode, "gpu-bridge runs");
        Ok(handle)
    }
}

/// Says what a start without a good ledger means.
fn pool_of(loaded: Loaded, settings: &Settings) -> Pool {
    let settings = settings.clone();
    match loaded {
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
    }
}

/// Where the driver's things are, by the flags.
fn roots(options: &RunOptions) -> Roots {
    Roots {
        dev_root: options.dev_root.clone(),
        driver: DriverRoot {
            on_host: options.driver_root.clone(),
            here: options.driver_root_ctr_path.clone(),
        },
    }
}

const NO_NVML_THREAD: &str = "the NVML thread could not be started";

fn nvml_options(options: &RunOptions) -> bridge_nvml::Options {
    bridge_nvml::Options {
        library: options.nvml_library.clone(),
        sys_root: options.sys_root.clone(),
        timeouts: bridge_nvml::Timeouts::default(),
    }
}

/// NVML's processes, each with the pod of its cgroup, without those that the configuration ignores.
fn process_probe(
    nvml: Session,
    options: &RunOptions,
    current: watch::Receiver<Current>,
    metrics: Metrics,
) -> ProcessProbe {
    let proc_root: Arc<Path> = options.proc_root.clone().into();
    Arc::new(move || {
        let (nvml, proc_root) = (nvml.clone(), Arc::clone(&proc_root));
        let metrics = metrics.clone();
        let config = Arc::clone(&current.borrow().config);
        let answer: Pin<Box<dyn Future<Output = Processes> + Send>> =
            Box::pin(async move { probe(&nvml, &proc_root, &config, &metrics).await });
        answer
    })
}

async fn probe(nvml: &Session, proc_root: &Path, config: &Config, metrics: &Metrics) -> Processes {
    let mut processes = Processes::default();
    let counts = |pid: &u32| {
        config.ignore_processes.is_empty()
            || usage::process_name(proc_root, *pid).is_none_or(|name| !config.ignores(&name))
    };
    // What NVML does not say is unknown, and nothing unknown changes hands.
    let answer = inventory::processes(nvml).await;
    if answer.is_err() {
        metrics.nvml_failed(NvmlCall::Processes);
    }
    for (unit, pids) in answer.unwrap_or_default() {
        let known = match pids {
            Err(_) => {
                metrics.nvml_failed(NvmlCall::Processes);
                UnitProcesses::Unknown
            }
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

/// Starts the scans. They need no ledger.
fn start_scans(
    tasks: &mut Tasks,
    nvml: Session,
    conditions: &Conditions,
    metrics: &Metrics,
    stop: &CancellationToken,
) -> (watch::Receiver<Scan>, watch::Receiver<Option<Look>>) {
    let (scans, seen) = watch::channel(Scan::Pending);
    let (looks, looked) = watch::channel(None);
    let results = inventory::Results { scans, looks };
    let (ask, on_demand) = mpsc::channel(1);
    let (session, cancel) = (nvml.clone(), stop.clone());
    let metrics = metrics.clone();
    tasks.spawn(async move {
        inventory::run(session, results, on_demand, metrics, cancel).await;
        ("inventory", Ok(()))
    });
    tasks.spawn(rescan_on_hangup(ask, stop.clone()));
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
    (seen, looked)
}

/// Feeds the arbiter with what NVML says, and waits a moment for the first, so that the sockets open with a known
/// inventory.
async fn start_feeds(
    tasks: &mut Tasks,
    mut seen: watch::Receiver<Scan>,
    handle: &Handle,
    stop: &CancellationToken,
) {
    tasks.spawn(feeds::feed(
        "inventory feed",
        seen.clone(),
        |scan: &Scan| scan.inventory().map(Observation::Inventory),
        handle.clone(),
        stop.clone(),
    ));
    tasks.spawn(feeds::feed(
        "topology feed",
        seen.clone(),
        |scan: &Scan| {
            let known = scan.topology().filter(|topology| !topology.is_empty());
            known.map(Observation::Topology)
        },
        handle.clone(),
        stop.clone(),
    ));
    tasks.spawn(look_for_strangers(handle.clone(), stop.clone()));
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

async fn look_for_strangers(handle: Handle, stop: CancellationToken) -> Ended {
    let mut due = tokio::time::Instant::now();
    loop {
        tokio::select! {
            () = stop.cancelled() => return ("process watch", Ok(())),
            () = tokio::time::sleep_until(due) => {}
        }
        if let Err(failure) = handle.observe(Observation::Processes).await {
            warn!(error = %failure, "a look at the processes had no effect");
        }
        due = ticks::next(tokio::time::Instant::now(), STRANGER_PERIOD);
    }
}

/// What is known besides the ledger, and where it is told what a node without one still waits for.
struct Evidence {
    leftovers: Leftovers,
    waiting: watch::Sender<String>,
    followed: Followed,
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
    config: watch::Receiver<Current>,
    tell: device_plugin::TellContainer,
    handle: &'a Handle,
    conditions: &'a Conditions,
    client: kube::Client,
    resources: usage::PodResources,
    stop: &'a CancellationToken,
}

impl Faces<'_> {
    fn start(
        &self,
        tasks: &mut Tasks,
        evidence: Evidence,
        registration: watch::Sender<device_plugin::RegistrationState>,
        registered: watch::Receiver<device_plugin::RegistrationState>,
    ) {
        let Evidence {
            leftovers,
            waiting,
            followed: (claims, pods),
        } = evidence;
        self.start_device_plugin(tasks, pods.clone(), registration);
        tasks.spawn(conditions::device_plugin(
            registered,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        self.start_dra(tasks);
        self.start_demand(tasks);
        self.start_classes(tasks);
        self.start_events(tasks, (claims.clone(), pods.clone()));
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
        self.adopt(tasks, leftovers, (claims, pods), waiting);
    }

    /// Reports how the ledger stands; returns where adoption says what it waits for.
    fn report_ledger(&self, tasks: &mut Tasks) -> watch::Sender<String> {
        let (waiting, waiting_for) = watch::channel(String::new());
        let (_, handle, stop) = self.own();
        let conditions = self.conditions.clone();
        tasks.spawn(async move {
            let reported = admin::report_ledger(handle, waiting_for, conditions);
            stop.run_until_cancelled(reported).await;
            ("ledger condition", Ok(()))
        });
        waiting
    }

    /// Looks for other daemons of our names, once before this returns.
    async fn look_out(
        &self,
        tasks: &mut Tasks,
        pods: watch::Receiver<Option<Pods>>,
        registered: watch::Receiver<device_plugin::RegistrationState>,
    ) -> anyhow::Result<()> {
        let (_, handle, stop) = self.own();
        let resources = self.resources.clone();
        let mut lookout = lookout::new(self.options, resources, pods, registered, handle);
        lookout.look().await?;
        tasks.spawn(lookout::run(lookout, stop));
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
        pods: watch::Receiver<Option<Pods>>,
        state: watch::Sender<device_plugin::RegistrationState>,
    ) {
        let settings = device_plugin::Settings {
            folder: self.options.device_plugin_dir.clone(),
            instance: self
                .options
                .pod_uid
                .as_ref()
                .map_or_else(|| "node".to_owned(), ToString::to_string),
            tell: self.tell.clone(),
        };
        let list_now = usage::ask_about(self.resources.clone(), self.handle.status(), pods);
        let (_, handle, stop) = self.own();
        tasks.spawn(async move {
            let done = device_plugin::run(settings, handle, list_now, state, stop).await;
            ("device plugin", done.map_err(anyhow::Error::from))
        });
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
        tasks.spawn(conditions::dra(
            registered,
            self.conditions.clone(),
            self.stop.clone(),
        ));
    }

    /// What only the owner of the ledger does, and the conditions that tell how that goes.
    fn reign(
        &self,
        tasks: &mut Tasks,
        pages: Pages,
        registered: watch::Receiver<device_plugin::RegistrationState>,
    ) -> Reign {
        let (published, slice) = watch::channel(dra::PublishState::Waiting);
        let (node_status, count) = watch::channel(device_plugin::NodeStatusState::default());
        let (conditions, stop) = (self.conditions.clone(), self.stop.clone());
        tasks.spawn(conditions::slice(slice, conditions, stop));
        let (conditions, stop) = (self.conditions.clone(), self.stop.clone());
        tasks.spawn(conditions::node_status(count, conditions, stop));
        Reign {
            options: self.options.clone(),
            handle: self.handle.clone(),
            client: self.client.clone(),
            pages,
            resources: self.resources.clone(),
            registered,
            node_status,
            published,
        }
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

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let waited =
            |kind, name| signal(kind).with_context(|| format!("{name} can't be waited for"));
        Ok(Self {
            terminate: waited(SignalKind::terminate(), "SIGTERM")?,
            interrupt: waited(SignalKind::interrupt(), "SIGINT")?,
        })
    }

    /// Returns when the daemon is told to stop.
    async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => info!("SIGTERM: gpu-bridge stops"),
            _ = self.interrupt.recv() => info!("SIGINT: gpu-bridge stops"),
        }
    }
}

/// Tells all tasks to stop, and gives them a moment.
async fn end(mut tasks: Tasks, stop: &CancellationToken) -> anyhow::Result<()> {
    stop.cancel();
    let rest = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_LIMIT, rest).await.is_err() {
        warn!("some tasks did not end in time and are left behind");
    }
    Ok(())
}

fn why_it_ended(ended: Option<Result<Ended, tokio::task::JoinError>>) -> anyhow::Error {
    match ended {
        Some(Ok((name, Err(error)))) => error.context(format!("{name} can't go on")),
        Some(Ok((name, Ok(())))) => anyhow::anyhow!("{name} ended by itself, which is a bug"),
        Some(Err(panic)) => anyhow::anyhow!("a task panicked: {panic}"),
        None => anyhow::anyhow!("no task is left"),
    }
}
