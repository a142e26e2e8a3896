//! What is looked at before a batch is decided: the processes on the units, and the nodes that containers need.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bridge_core::{Processes, UnitId};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::error::Elapsed;
use tracing::{info, warn};

use super::super::handle::{Call, Observation};
use super::{Arbiter, Trouble};
use crate::metrics::NvmlCall;

/// NVML answers a process query in well under a millisecond; a driver that hangs must not hang the kubelet.
const PROBE_LIMIT: Duration = Duration::from_millis(500);

/// How long the last look does for news that let no unit change hands. Such news follow on each grant, and the next call
/// would wait for a look that nobody needs.
const FRESH: Duration = Duration::from_secs(1);

/// The last look at the processes.
#[derive(Debug)]
pub(super) struct Looked {
    at: Instant,
    processes: Processes,
}

impl Arbiter {
    /// Looks at the processes and, at the same time, whether containers could use the units. Without an answer all
    /// processes are unknown. For a batch that no unit changes hands by a look of a moment ago does.
    pub(super) async fn look(
        &mut self,
        batch: &[Call],
        minors: &[(UnitId, u32)],
    ) -> (Processes, BTreeMap<UnitId, String>) {
        let looked = self.looked.as_ref().filter(|it| it.at.elapsed() < FRESH);
        if let Some(looked) = looked
            && !needs_look(batch)
        {
            return (looked.processes.clone(), self.unfit.clone());
        }
        let at = Instant::now();
        let probe = tokio::time::timeout(PROBE_LIMIT, (self.probe)());
        let (answer, unfit) = tokio::join!(probe, self.look_at_nodes(minors));
        let unfit = self.note_unfit(unfit);
        let is_answer = answer.is_ok();
        let processes = self.note_processes(answer);
        self.looked = is_answer.then(|| Looked {
            at,
            processes: processes.clone(),
        });
        (processes, unfit)
    }

    fn note_processes(&mut self, answer: Result<Processes, Elapsed>) -> Processes {
        match (&answer, self.nvml) {
            (Err(_), Trouble::None) => {
                self.nvml = Trouble::Told;
                warn!(
                    "NVML does not answer process queries in time; no unit changes hands until it does"
                );
            }
            (Ok(_), Trouble::Told) => {
                self.nvml = Trouble::None;
                info!("NVML answers process queries again");
            }
            (Ok(_), Trouble::None) | (Err(_), Trouble::Told) => {}
        }
        if answer.is_err() {
            self.metrics.nvml_failed(NvmlCall::Processes);
        }
        answer.unwrap_or_default()
    }

    /// Looks whether containers could use the units: on hosts of which the driver's modules are not loaded they could not.
    pub(super) async fn unfit(&mut self, minors: &[(UnitId, u32)]) -> BTreeMap<UnitId, String> {
        let looked = self.look_at_nodes(minors).await;
        self.note_unfit(looked)
    }

    fn look_at_nodes(
        &self,
        minors: &[(UnitId, u32)],
    ) -> impl Future<Output = Result<BTreeMap<UnitId, String>, JoinError>> + use<> {
        let (minors, cdi) = (minors.to_vec(), Arc::clone(&self.cdi));
        spawn_blocking(move || cdi.unfit(&minors))
    }

    fn note_unfit(
        &mut self,
        looked: Result<BTreeMap<UnitId, String>, JoinError>,
    ) -> BTreeMap<UnitId, String> {
        let Ok(unfit) = looked else {
            return self.unfit.clone();
        };
        if unfit == self.unfit {
            return unfit;
        }
        for (unit, lack) in &unfit {
            if self.unfit.get(unit) != Some(lack) {
                warn!(
                    reason = "DeviceNodeMissing",
                    %unit,
                    lack,
                    "no container could use the GPU, so it is offered to nobody"
                );
            }
        }
        if unfit.is_empty() {
            info!("the device nodes of all GPUs are there");
        }
        self.unfit.clone_from(&unfit);
        unfit
    }
}

/// Whether a unit may change hands, or something else is decided by what runs on it. A batch without calls is one: time
/// has passed that something waited for.
///
/// Each batch draws all conclusions, whatever it brought. Those by which a hold ends go by a listing, the pods or the
/// claims, and what brings these looks anew; one that went by the time alone would have to be among them.
fn needs_look(batch: &[Call]) -> bool {
    batch.is_empty() || !batch.iter().all(is_of_no_unit)
}

fn is_of_no_unit(call: &Call) -> bool {
    let Call::Observe { observation, .. } = call else {
        return false;
    };
    match observation {
        Observation::Node(_)
        | Observation::NodeAway
        | Observation::Slice(_)
        | Observation::KubeletIds(_)
        | Observation::Demand(_)
        | Observation::Topology(_) => true,
        Observation::Listing(_)
        | Observation::Pods(_)
        | Observation::Claims(_)
        | Observation::Inventory(_)
        | Observation::Xids(_)
        | Observation::Recovery { .. }
        | Observation::Names(_)
        | Observation::Adoption(_)
        | Observation::Processes
        | Observation::Rivals(_)
        | Observation::Leaving
        | Observation::Settings(_) => false,
    }
}
