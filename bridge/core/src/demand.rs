//! The pods that wait for GPUs: what an adapter that watches unscheduled pods knows of them.

#[cfg(any(test, feature = "model"))]
use std::collections::BTreeSet;
#[cfg(any(test, feature = "model"))]
use std::time::Duration;
use std::time::SystemTime;

use crate::id::PodUid;

/// The pods that no node has been found for, and that this node could run, from a watch in sync.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Demand {
    /// Each of them, in any order.
    pub pods: Vec<WaitingPod>,
}

/// A pod that waits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WaitingPod {
    /// `metadata.uid`.
    pub uid: PodUid,
    /// `metadata.creationTimestamp`: who has waited longest. It is compared with those of other pods and with nothing
    /// else.
    pub created: SystemTime,
    /// How many units it asks for by count.
    pub counted: u32,
    /// What its claims ask for that are not allocated yet.
    pub claimed: Claimed,
}

/// What the claims of a pod ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Claimed {
    /// So many units; none for a pod without claims of our driver.
    Units(u32),
    /// Every unit of the node (`allocationMode: All`).
    All,
}

#[cfg(any(test, feature = "model"))]
impl Demand {
    /// The canonical form, the oldest pod first; see `canonical.rs` of the crate. Of the times only the order is left.
    pub(crate) fn canonical(self) -> Self {
        let Self { mut pods } = self;
        pods.sort_by_key(|pod| (pod.created, pod.uid.clone()));
        let times: BTreeSet<SystemTime> = pods.iter().map(|pod| pod.created).collect();
        for pod in &mut pods {
            let older = times.range(..pod.created).count();
            let place = Duration::from_secs(u64::try_from(older).unwrap_or(u64::MAX));
            pod.created = SystemTime::UNIX_EPOCH + place;
        }
        Self { pods }
    }
}
