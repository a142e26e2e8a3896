//! The GPUs of the node, as the pool wants to hear of them: scans on a timer and on demand, and process queries.
//!
//! It owns the rhythm and the translation; NVML itself is `bridge_nvml`'s, and what a missing GPU means is the
//! pool's to decide.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bridge_core::{Ancestor, Connection, Gpu, Inventory, Recovery, Topology, UnitId, Xid};
use bridge_nvml::{
    CallError, CommonAncestor, GpuInfo, GpuPair, MigMode, RecoveryAction, Session, Snapshot, Xids,
};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::metrics::{Metrics, NvmlCall};
use crate::ticks;

/// How often the GPUs are read again. A lost GPU is noticed within this time.
const SCAN_PERIOD: Duration = Duration::from_secs(10);
/// Every so many scans NVML is started anew, because it does not look for new GPUs by itself. Starting NVML can
/// take seconds on a node without persistence mode, so not at every scan.
const SCANS_PER_RESCAN: u32 = 30;
/// While NVML does not answer it is tried again after this time, doubling up to [`SCAN_PERIOD`].
const RETRY_FIRST: Duration = Duration::from_millis(500);
/// NVML must fail this many scans in a row before its GPUs stop being offered: one slow answer is no outage, and
/// an id that turns Unhealthy and back costs pods.
const FAILURES_TO_CLOSE: u32 = 3;

/// What the scans see, for readiness and for the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scan {
    /// No scan has ended yet.
    Pending,
    /// NVML answered.
    Seen {
        /// The GPUs that answered.
        gpus: Vec<Gpu>,
        /// NVML's index of each of them, which another has when one is gone.
        indices: BTreeMap<UnitId, u32>,
        /// How they are connected; empty until it is read, which is once for the same GPUs.
        topology: Arc<Topology>,
        /// GPUs that did not, each in words.
        failed: Vec<String>,
    },
    /// NVML did not answer; why, and what to do.
    Unavailable(String),
}

impl Scan {
    /// What the pool is told; `None` before the first scan.
    #[must_use]
    pub fn inventory(&self) -> Option<Inventory> {
        match self {
            Self::Pending => None,
            Self::Seen { gpus, .. } => Some(Inventory::Seen(gpus.clone())),
            Self::Unavailable(_) => Some(Inventory::Unavailable),
        }
    }

    /// What the pool is told of the connections; `None` before the first scan.
    #[must_use]
    pub fn topology(&self) -> Option<Arc<Topology>> {
        match self {
            Self::Pending | Self::Unavailable(_) => None,
            Self::Seen { topology, .. } => Some(Arc::clone(topology)),
        }
    }

    /// The GPU that a unit is, and NVML's index of it, if it answered.
    #[must_use]
    pub fn gpu(&self, unit: &UnitId) -> Option<(&Gpu, u32)> {
        match self {
            Self::Pending | Self::Unavailable(_) => None,
            Self::Seen { gpus, indices, .. } => {
                let gpu = gpus.iter().find(|gpu| gpu.uuid == *unit)?;
                Some((gpu, *indices.get(unit)?))
            }
        }
    }
}

/// What NVML says has to be done about GPUs, by each scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// When it was asked.
    pub asked: Instant,
    /// By GPU; one that is not named is one of which it does not say.
    pub actions: BTreeMap<UnitId, Recovery>,
}

/// Where the results of scans go.
#[derive(Debug)]
pub struct Results {
    /// What is seen, when that changes.
    pub scans: watch::Sender<Scan>,
    /// What has to be done, each time that it is asked; `None` before the first scan.
    pub looks: watch::Sender<Option<Look>>,
}

/// Scans for ever, and publishes each result. `on_demand` asks for a scan with NVML started anew.
pub async fn run(
    session: Session,
    Results { scans, looks }: Results,
    mut on_demand: mpsc::Receiver<()>,
    metrics: Metrics,
    cancel: CancellationToken,
) {
    let mut retry = RETRY_FIRST;
    let mut count: u32 = 0;
    let mut failures: u32 = 0;
    let mut anew = true;
    let mut wiring = Wiring::default();
    loop {
        let asked = Instant::now();
        let (scan, actions) = scan(&session, anew, &wiring, &metrics).await;
        looks.send_replace(Some(Look { asked, actions }));
        failures = match scan {
            Scan::Unavailable(_) => failures.saturating_add(1),
            Scan::Seen { .. } | Scan::Pending => 0,
        };
        let pause = match &scan {
            Scan::Unavailable(_) => {
                let pause = retry;
                retry = (retry * 2).min(SCAN_PERIOD);
                pause
            }
            Scan::Seen { .. } | Scan::Pending => {
                retry = RETRY_FIRST;
                SCAN_PERIOD
            }
        };
        let served_before = matches!(*scans.borrow(), Scan::Seen { .. });
        if failures == 0 || failures >= FAILURES_TO_CLOSE || !served_before {
            publish(&scans, scan);
        }
        // After the scan: GPUs are offered without it, and it takes some hundred calls.
        tokio::select! {
            () = cancel.cancelled() => return,
            () = wiring.read(&session, &scans) => {}
        }
        let due = ticks::after(tokio::time::Instant::now(), pause, SCAN_PERIOD);
        count = (count + 1) % SCANS_PER_RESCAN;
        anew = count == 0;
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep_until(due) => {}
            asked = on_demand.recv() => match asked {
                Some(()) => {
                    anew = true;
                    // What is known of the connections holds until they are read.
                    wiring.gpus.clear();
                }
                None => tokio::select! {
                    () = cancel.cancelled() => return,
                    () = tokio::time::sleep_until(due) => {}
                },
            }
        }
    }
}

/// The connections between GPUs, and for which GPUs they were read.
#[derive(Debug, Default)]
struct Wiring {
    gpus: BTreeSet<UnitId>,
    topology: Arc<Topology>,
}

impl Wiring {
    /// Reads the connections if a GPU is there that they were not read for, and publishes them.
    async fn read(&mut self, session: &Session, scans: &watch::Sender<Scan>) {
        let gpus: BTreeSet<UnitId> = match &*scans.borrow() {
            Scan::Pending | Scan::Unavailable(_) => return,
            Scan::Seen { gpus, .. } => gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        };
        if gpus.is_subset(&self.gpus) {
            return;
        }
        let pairs = match session.topology().await {
            Ok(pairs) => pairs,
            Err(error) => {
                debug!(%error, "the connections between the GPUs are not known yet");
                return;
            }
        };
        self.topology = Arc::new(Topology::new(pairs.iter().filter_map(connected)));
        self.gpus = gpus;
        info!(
            pairs = pairs.len(),
            "the connections between the GPUs are read"
        );
        scans.send_if_modified(|shown| match shown {
            Scan::Seen { topology, .. } if *topology != self.topology => {
                *topology = Arc::clone(&self.topology);
                true
            }
            Scan::Seen { .. } | Scan::Pending | Scan::Unavailable(_) => false,
        });
    }
}

fn connected(pair: &GpuPair) -> Option<(UnitId, UnitId, Connection)> {
    let ancestor = pair.common_ancestor.map(|ancestor| match ancestor {
        CommonAncestor::Board => Ancestor::Board,
        CommonAncestor::Switch => Ancestor::Switch,
        CommonAncestor::Switches => Ancestor::Switches,
        CommonAncestor::HostBridge => Ancestor::HostBridge,
        CommonAncestor::Node => Ancestor::Node,
        CommonAncestor::System => Ancestor::System,
    });
    let connection = Connection {
        ancestor,
        nvlinks: pair.nvlinks,
    };
    let unit = |uuid: &String| UnitId::new(uuid.clone()).ok();
    Some((unit(&pair.one)?, unit(&pair.other)?, connection))
}

async fn scan(
    session: &Session,
    anew: bool,
    wiring: &Wiring,
    metrics: &Metrics,
) -> (Scan, BTreeMap<UnitId, Recovery>) {
    let snapshot = if anew {
        session.rescan().await
    } else {
        session.snapshot().await
    };
    match snapshot {
        Ok(snapshot) => {
            for _ in &snapshot.failed {
                metrics.nvml_failed(NvmlCall::Gpu);
            }
            let scan = seen(&snapshot, Arc::clone(&wiring.topology));
            (scan, actions(&snapshot))
        }
        Err(error) => {
            metrics.nvml_failed(NvmlCall::Scan);
            (Scan::Unavailable(error.to_string()), BTreeMap::new())
        }
    }
}

fn actions(snapshot: &Snapshot) -> BTreeMap<UnitId, Recovery> {
    let told = snapshot.gpus.iter().filter_map(|gpu| {
        let action = match gpu.recovery? {
            RecoveryAction::None => Recovery::None,
            RecoveryAction::Reset => Recovery::Reset,
            RecoveryAction::Reboot => Recovery::Reboot,
            RecoveryAction::DrainP2p => Recovery::DrainP2p,
            RecoveryAction::DrainAndReset => Recovery::DrainAndReset,
            RecoveryAction::Other(number) => Recovery::Other(number),
        };
        Some((UnitId::new(gpu.uuid.clone()).ok()?, action))
    });
    told.collect()
}

/// What the driver has told of beyond what is known already, as the pool wants to hear it.
#[must_use]
pub fn new_xids(known: &Xids, seen: &Xids) -> BTreeMap<(UnitId, Xid), u64> {
    let news = seen.iter().filter_map(|(key, times)| {
        let more = times.checked_sub(known.get(key).copied().unwrap_or(0))?;
        let (gpu, xid) = key;
        let unit = UnitId::new(gpu.clone()).ok()?;
        // The driver's numbers have three digits.
        let xid = Xid::new(u32::try_from(*xid).unwrap_or(u32::MAX));
        (more > 0).then_some(((unit, xid), more))
    });
    news.collect()
}

/// Publishes a scan, and logs it where it says something new.
fn publish(scans: &watch::Sender<Scan>, scan: Scan) {
    scans.send_if_modified(|shown| {
        let changed = *shown != scan;
        if changed {
            match &scan {
                Scan::Pending => {}
                Scan::Seen { gpus, failed, .. } => {
                    info!(gpus = gpus.len(), failed = failed.len(), "NVML answers");
                    for gpu in failed {
                        warn!(gpu, "a GPU does not answer; the others are served");
                    }
                }
                Scan::Unavailable(error) => warn!(error, "NVML does not answer"),
            }
            *shown = scan;
        }
        changed
    });
}

fn seen(snapshot: &Snapshot, topology: Arc<Topology>) -> Scan {
    let mut gpus = Vec::with_capacity(snapshot.gpus.len());
    let mut indices = BTreeMap::new();
    let mut failed: Vec<String> = snapshot
        .failed
        .iter()
        .map(|gpu| {
            let name = gpu.uuid.clone().or_else(|| gpu.pci_bus_id.clone());
            let name = name.unwrap_or_else(|| format!("index {}", gpu.index));
            format!("{name}: {}", gpu.error)
        })
        .collect();
    for gpu in &snapshot.gpus {
        match described(gpu, snapshot) {
            Ok(_) if gpu.mig == MigMode::Enabled => failed.push(format!(
                "{}: MIG is enabled, and this version serves whole GPUs only. Turn MIG off (nvidia-smi -mig 0) to have it served",
                gpu.uuid
            )),
            Ok(described) => {
                indices.insert(described.uuid.clone(), gpu.index);
                gpus.push(described);
            }
            Err(error) => failed.push(format!("index {}: {error}", gpu.index)),
        }
    }
    gpus.sort_by(|a, b| a.pci_bus_id.cmp(&b.pci_bus_id));
    Scan::Seen {
        gpus,
        indices,
        topology,
        failed,
    }
}

fn described(gpu: &GpuInfo, snapshot: &Snapshot) -> Result<Gpu, bridge_core::InvalidId> {
    let cuda = snapshot.cuda_driver_version;
    Ok(Gpu {
        uuid: UnitId::new(gpu.uuid.clone())?,
        pci_bus_id: gpu.pci_bus_id.clone(),
        minor: gpu.minor,
        product_name: gpu.product_name.clone(),
        brand: gpu.brand.clone(),
        architecture: gpu.architecture.clone(),
        compute_capability: (
            gpu.cuda_compute_capability.major,
            gpu.cuda_compute_capability.minor,
        ),
        memory_bytes: gpu.memory_bytes.unwrap_or_default(),
        driver_version: snapshot.driver_version.clone(),
        cuda_driver_version: cuda.map_or((0, 0), |version| (version.major, version.minor)),
        numa_node: gpu.numa_node,
        pcie_root: gpu.pcie_root.clone(),
        addressing_mode: gpu.addressing_mode.clone(),
    })
}

/// Host PIDs on each GPU, or why NVML does not say. A GPU that is absent has not answered either.
///
/// # Errors
/// NVML as a whole does not answer.
pub async fn processes(
    session: &Session,
) -> Result<BTreeMap<UnitId, Result<Vec<u32>, CallError>>, bridge_nvml::Error> {
    let all = session.processes().await?;
    let mut units = BTreeMap::new();
    for gpu in all {
        // A UUID that is none was reported by the scan; its GPU is no unit.
        let Ok(unit) = UnitId::new(gpu.uuid) else {
            continue;
        };
        let pids = gpu
            .processes
            .map(|processes| processes.into_iter().map(|process| process.pid).collect());
        units.insert(unit, pids);
    }
    Ok(units)
}
