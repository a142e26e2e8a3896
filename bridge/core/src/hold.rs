//! Who has a unit, through which face, in which phase, since when.

use std::num::NonZeroU32;
use std::time::SystemTime;

use crate::id::{ClaimRef, ClaimUid, DeviceId, PodRef};
use crate::settings::Face;

/// One holder's part of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Hold {
    /// How many of the unit's equal shares it takes. An exclusive unit has one.
    pub shares: NonZeroU32,
    /// Wall-clock time of the first grant, for people. Decisions never compare it.
    pub since: SystemTime,
    /// Holder and phase.
    pub kind: HoldKind,
}

/// Holder and phase of a hold.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HoldKind {
    /// `Allocate` was answered; which pod got the id is not known yet.
    Granted {
        /// The id that the kubelet chose.
        id: DeviceId,
    },
    /// A counted pod, seen in the kubelet's pod-resources with the id.
    Bound {
        /// The id that the kubelet chose.
        id: DeviceId,
        /// The pod that has it.
        pod: PodRef,
    },
    /// An allocation in the API names the unit; nothing of the claim is prepared on this node.
    Reserved {
        /// The claim that was allocated.
        claim: ClaimRef,
    },
    /// `NodePrepareResources` was answered with the unit.
    Prepared {
        /// The claim that was prepared.
        claim: ClaimRef,
    },
    /// In use by something that is no known holder: offered to nobody until shown to be free.
    Foreign {
        /// How it came to be so.
        cause: ForeignCause,
    },
}

/// Why a unit is `Foreign`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ForeignCause {
    /// A process that belongs to no known holder runs on it.
    UnknownProcess,
    /// Its hold has ended, but a process is still there (rule 8).
    Lingering {
        /// Whose process it most likely is.
        former: Former,
    },
    /// The ledger was lost while this counted pod had some unit, and nothing says which (rule 11).
    UnknownUnitOf {
        /// The pod.
        pod: PodRef,
    },
}

/// The holder before a unit became [`ForeignCause::Lingering`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Former {
    /// A counted pod, by name where it was known.
    Counted(Option<PodRef>),
    /// A claim.
    Claim(ClaimRef),
}

/// The phase of a hold, without its holder: for status, metrics and messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// See [`HoldKind::Granted`].
    Granted,
    /// See [`HoldKind::Bound`].
    Bound,
    /// See [`HoldKind::Reserved`].
    Reserved,
    /// See [`HoldKind::Prepared`].
    Prepared,
    /// See [`HoldKind::Foreign`].
    Foreign,
}

impl Phase {
    /// The word in status, metrics and messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "Granted",
            Self::Bound => "Bound",
            Self::Reserved => "Reserved",
            Self::Prepared => "Prepared",
            Self::Foreign => "Foreign",
        }
    }
}

impl Hold {
    /// A hold of one share.
    #[must_use]
    pub fn exclusive(kind: HoldKind, since: SystemTime) -> Self {
        Self {
            shares: NonZeroU32::MIN,
            since,
            kind,
        }
    }

    /// The face it came through; `Foreign` came through none.
    #[must_use]
    pub fn face(&self) -> Option<Face> {
        match self.kind {
            HoldKind::Granted { .. } | HoldKind::Bound { .. } => Some(Face::Legacy),
            HoldKind::Reserved { .. } | HoldKind::Prepared { .. } => Some(Face::Dra),
            HoldKind::Foreign { .. } => None,
        }
    }

    /// Its phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.kind {
            HoldKind::Granted { .. } => Phase::Granted,
            HoldKind::Bound { .. } => Phase::Bound,
            HoldKind::Reserved { .. } => Phase::Reserved,
            HoldKind::Prepared { .. } => Phase::Prepared,
            HoldKind::Foreign { .. } => Phase::Foreign,
        }
    }

    /// The kubelet's id, if a counted pod holds it.
    #[must_use]
    pub fn device_id(&self) -> Option<&DeviceId> {
        match &self.kind {
            HoldKind::Granted { id } | HoldKind::Bound { id, .. } => Some(id),
            HoldKind::Reserved { .. } | HoldKind::Prepared { .. } | HoldKind::Foreign { .. } => {
                None
            }
        }
    }

    /// The claim, if a claim holds it.
    #[must_use]
    pub fn claim(&self) -> Option<&ClaimRef> {
        match &self.kind {
            HoldKind::Reserved { claim } | HoldKind::Prepared { claim } => Some(claim),
            HoldKind::Granted { .. } | HoldKind::Bound { .. } | HoldKind::Foreign { .. } => None,
        }
    }

    /// Whether this claim holds it.
    #[must_use]
    pub fn is_of_claim(&self, uid: &ClaimUid) -> bool {
        self.claim().is_some_and(|claim| claim.uid == *uid)
    }
}
