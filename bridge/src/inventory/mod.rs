//! The GPUs of the node, as the pool wants to hear of them: scans on a timer and on demand, and process queries.
//!
//! It owns the rhythm and the translation; NVML itself is `bridge_nvml`'s, and what a missing GPU means is the
//! pool's to decide.

use std::collections::BTreeMap;
use std::time::Duration;

use bridge_core::{Gpu, Inventory, UnitId};
use bridge_nvml::{CallError, GpuInfo, MigMode, Session, Snapshot};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{Metrics, NvmlCall};

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
}

/// Scans for ever, and publishes each result. `on_demand` asks for a scan with NVML started anew.
pub async fn run(
    session: Session,
    scans: watch::Sender<Scan>,
    mut on_demand: mpsc::Receiver<()>,
    metrics: Metrics,
    cancel: CancellationToken,
) {
    let mut retry = RETRY_FIRST;
    let mut count: u32 = 0;
    let mut failures: u32 = 0;
    let mut anew = true;
    loop {
        let scan = scan(&session, anew, &metrics).await;
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
        count = (count + 1) % SCANS_PER_RESCAN;
        anew = count == 0;
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
            asked = on_demand.recv() => match asked {
                Some(()) => anew = true,
                None => tokio::select! {
                    () = cancel.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                },
            }
        }
    }
}

async fn scan(session: &Session, anew: bool, metrics: &Metrics) -> Scan {
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
            seen(snapshot)
        }
        Err(error) => {
            metrics.nvml_failed(NvmlCall::Scan);
            Scan::Unavailable(error.to_string())
        }
    }
}

/// Publishes a scan, and logs it where it says something new.
fn publish(scans: &watch::Sender<Scan>, scan: Scan) {
    scans.send_if_modified(|shown| {
        let changed = *shown != scan;
        if changed {
            match &scan {
                Scan::Pending => {}
                Scan::Seen { gpus, failed } => {
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

fn seen(snapshot: Snapshot) -> Scan {
    let mut gpus = Vec::with_capacity(snapshot.gpus.len());
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
        match described(gpu, &snapshot) {
            Ok(_) if gpu.mig == MigMode::Enabled => failed.push(format!(
                "{}: MIG is enabled, and this version serves whole GPUs only. Turn MIG off (nvidia-smi -mig 0) to have it served",
                gpu.uuid
            )),
            Ok(gpu) => gpus.push(gpu),
            Err(error) => failed.push(format!("index {}: {error}", gpu.index)),
        }
    }
    gpus.sort_by(|a, b| a.pci_bus_id.cmp(&b.pci_bus_id));
    Scan::Seen { gpus, failed }
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
