//! How the devices are, as the kubelet's health stream tells it to the pods that have them.
//!
//! The kubelet writes it into `allocatedResourcesStatus` of the pod's containers (KEP-4680, gate `ResourceHealthStatus`,
//! on from Kubernetes 1.36). It opens the stream anew 5 s after it has ended, forgets everything at its end, and takes
//! what it has not been told again in time as unknown (kubernetes v1.37.2, `pkg/kubelet/cm/dra`); so each report has all
//! devices, and comes again while nothing changes.

use std::sync::Arc;
use std::time::Duration;

use bridge_core::{Status, UnitHealth, UnitStatus, shown};
use futures::Stream;
use futures::stream::unfold;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::ticks;

/// How often a report comes at least: three times in the 30 s after which the kubelet no longer believes the last
/// (`dra_proto::health_v1::DEFAULT_TIMEOUT`).
pub(super) const HEARTBEAT: Duration = Duration::from_secs(10);

/// Streams at once. The kubelet has one, and for a moment two when it comes back.
pub(super) const STREAMS_LIMIT: usize = 16;

/// How one device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceHealth {
    /// Its name in the pool.
    pub(super) device: String,
    pub(super) health: Health,
    /// Why, and what to do; empty where all is well.
    pub(super) message: String,
}

/// The three words of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Unknown,
    Healthy,
    Unhealthy,
}

impl From<&UnitStatus> for DeviceHealth {
    fn from(unit: &UnitStatus) -> Self {
        let (health, message) = match unit.health() {
            UnitHealth::Well => (Health::Healthy, String::new()),
            UnitHealth::Unknown => (
                Health::Unknown,
                "NVML has not told of this GPU since gpu-bridge started; see gpu-bridge's log"
                    .to_owned(),
            ),
            UnitHealth::Lost => (
                Health::Unhealthy,
                format!(
                    "NVML does not see GPU {} any more: it has failed, or was taken out; look for Xid errors in the node's kernel log",
                    unit.unit
                ),
            ),
            UnitHealth::Faulty(fault) => (
                Health::Unhealthy,
                format!("GPU {} is closed: {fault}", unit.unit),
            ),
            UnitHealth::Lacks(what) => (
                Health::Unhealthy,
                format!(
                    "GPU {} cannot be used by a new container: {}",
                    unit.unit,
                    shown(what)
                ),
            ),
        };
        Self {
            device: unit.device.to_string(),
            health,
            message,
        }
    }
}

/// Reports for one stream: at once, when a device changes, and again after each [`HEARTBEAT`]; until the daemon stops.
pub(super) fn reports(
    status: watch::Receiver<Arc<Status>>,
    shutdown: CancellationToken,
    permit: OwnedSemaphorePermit,
) -> impl Stream<Item = Vec<DeviceHealth>> + Send + 'static {
    let reports = Reports {
        status,
        shutdown,
        sent: None,
        _permit: permit,
    };
    unfold(reports, |mut reports| async move {
        let report = reports.next().await?;
        Some((report, reports))
    })
}

struct Reports {
    status: watch::Receiver<Arc<Status>>,
    shutdown: CancellationToken,
    /// The last report, and when the next is due though it be the same.
    sent: Option<(Vec<DeviceHealth>, Instant)>,
    _permit: OwnedSemaphorePermit,
}

impl Reports {
    async fn next(&mut self) -> Option<Vec<DeviceHealth>> {
        loop {
            let units = Arc::clone(&self.status.borrow_and_update());
            let report: Vec<_> = units.units.iter().map(DeviceHealth::from).collect();
            let due = match &self.sent {
                Some((sent, due)) if *sent == report && Instant::now() < *due => *due,
                Some(_) | None => {
                    self.sent = Some((report.clone(), ticks::next(Instant::now(), HEARTBEAT)));
                    return Some(report);
                }
            };
            tokio::select! {
                () = self.shutdown.cancelled() => return None,
                changed = self.status.changed() => changed.ok()?,
                () = sleep_until(due) => {}
            }
        }
    }
}
