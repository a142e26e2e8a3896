//! The pods that wait for GPUs: what an adapter that watches unscheduled pods knows of them.

use std::time::SystemTime;

use crate::id::PodUid;

/// The pods that no node has been found for, and that this node could run, from a watch in sync.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Demand {
    /// Each of them, in any order.
    pub pods: Vec<WaitingPod>,
}

/// A pod that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimed {
    /// So many units; none for a pod without claims of our driver.
    Units(u32),
    /// Every unit of the node (`allocationMode: All`).
    All,
}
