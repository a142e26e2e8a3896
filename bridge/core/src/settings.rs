//! What an admin chooses.

use std::time::Duration;

use crate::devices::DeviceRule;
use crate::health::XidRules;

/// The side that units are offered on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Face {
    /// The device plugin API: counted requests.
    Legacy,
    /// The DRA kubelet plugin API: ResourceClaims.
    Dra,
}

impl Face {
    /// The word in configuration, status, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Dra => "dra",
        }
    }

    /// What users ask for through it: the resource, or the driver.
    #[must_use]
    pub const fn served_name(self) -> &'static str {
        match self {
            Self::Legacy => "nvidia.com/gpu",
            Self::Dra => "gpu.nvidia.com",
        }
    }
}

/// Which faces are open for new holders. A mode never touches who holds a unit already (rule 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Mode {
    /// Counted requests only.
    Legacy,
    /// Both at once.
    #[default]
    Both,
    /// Claims only.
    Dra,
    /// Nothing new.
    Drained,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Legacy, Self::Both, Self::Dra, Self::Drained];

    /// Whether the face offers free units in this mode.
    #[must_use]
    pub fn opens(self, face: Face) -> bool {
        match (self, face) {
            (Self::Both, Face::Legacy | Face::Dra)
            | (Self::Legacy, Face::Legacy)
            | (Self::Dra, Face::Dra) => true,
            (Self::Legacy, Face::Dra)
            | (Self::Dra, Face::Legacy)
            | (Self::Drained, Face::Legacy | Face::Dra) => false,
        }
    }

    /// The word in configuration, status, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Both => "both",
            Self::Dra => "dra",
            Self::Drained => "drained",
        }
    }
}

/// The most units that each face may hold, free ones that it offers included. `None`: no cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Limits {
    /// Cap of the device plugin face.
    pub legacy: Option<u32>,
    /// Cap of the DRA face.
    pub dra: Option<u32>,
}

impl Limits {
    /// The cap of a face.
    #[must_use]
    pub fn of(&self, face: Face) -> Option<u32> {
        match face {
            Face::Legacy => self.legacy,
            Face::Dra => self.dra,
        }
    }
}

/// How the units are shared out between the faces where the limits leave room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Weights {
    /// Weight of the device plugin face.
    pub legacy: u32,
    /// Weight of the DRA face.
    pub dra: u32,
}

impl Default for Weights {
    fn default() -> Self {
        Self { legacy: 1, dra: 1 }
    }
}

/// Which free units counted pods get of those that are alike otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Prefer {
    /// Those that are connected best, and the last of the list where that is the same.
    #[default]
    Wiring,
    /// The last of the list, however they are connected: for nodes that report a wiring which is wrong or does not matter.
    Tail,
}

impl Prefer {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Wiring, Self::Tail];

    /// The word in configuration and status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wiring => "wiring",
            Self::Tail => "tail",
        }
    }
}

/// How long the steps of a move take. The defaults are measured on a busy node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pace {
    /// How long the own Node must show a lowered count before anybody else is offered the unit: a pod that was bound
    /// on the higher count has been seen by then.
    pub settle: Duration,
    /// How long what has become free stays on its side: the kubelet may still be admitting a pod to it.
    pub dwell: Duration,
    /// How long nothing must arrive before free units rest on both sides.
    pub quiet: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(300),
            dwell: Duration::from_millis(500),
            quiet: Duration::from_millis(300),
        }
    }
}

/// The settings that decisions depend on.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Settings {
    /// Which faces are open.
    pub mode: Mode,
    /// Caps.
    pub limits: Limits,
    /// Shares of the split.
    pub weights: Weights,
    /// How long the steps of a move take.
    pub pace: Pace,
    /// So many units stay with counted pods where units are shared out, those that they hold included: the Node's count
    /// does not say 0 then, which autoscalers take for a node that is broken.
    pub min_legacy: u32,
    /// Which free units counted pods get of those that are alike otherwise.
    pub prefer: Prefer,
    /// Units that only one face may offer, or none; for each unit the first rule that is for it counts.
    pub devices: Vec<DeviceRule>,
    /// Which errors close a GPU.
    pub xids: XidRules,
}

impl Settings {
    /// Whether the node's count can be 0 while free units are offered to claims. There a scheduler makes claims of
    /// counted pods, if a class has their resource's name (KEP-5004).
    #[must_use]
    pub fn can_count_be_0_beside_claims(&self) -> bool {
        self.mode == Mode::Both && self.min_legacy == 0
    }
}
