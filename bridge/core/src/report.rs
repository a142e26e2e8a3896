//! What a transition did that somebody may want to know. The arbiter logs and counts these after the commit.

use crate::health::{FaultEnd, Xid, XidAction};
use crate::hold::Former;
use crate::id::{ClaimRef, DeviceId, PodRef, UnitId};
use crate::lost_race::NotEvicted;
use crate::rival::Rival;

/// The named causes for which a hold may end (rule 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndCause {
    /// No pod bound here can own what was granted, and 10 s have passed.
    NeverUsed,
    /// The pod is gone from pod-resources, and terminal or gone.
    PodEnded,
    /// The kubelet gave the id to a new pod, which proves that it gave up the old one.
    IdGivenAgain,
    /// `NodeUnprepareResources`.
    Unprepared,
    /// The claim is gone, deallocated or allocated elsewhere.
    ClaimEnded,
    /// `Allocate` took a unit that was only reserved.
    TakenByAllocate,
    /// Shown to be free.
    ShownFree,
    /// An admin's command.
    Released,
}

impl EndCause {
    /// Every cause, for metrics that start at zero.
    pub const ALL: [Self; 8] = [
        Self::NeverUsed,
        Self::PodEnded,
        Self::IdGivenAgain,
        Self::Unprepared,
        Self::ClaimEnded,
        Self::TakenByAllocate,
        Self::ShownFree,
        Self::Released,
    ];

    /// The word in logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NeverUsed => "NeverUsed",
            Self::PodEnded => "PodEnded",
            Self::IdGivenAgain => "IdGivenAgain",
            Self::Unprepared => "Unprepared",
            Self::ClaimEnded => "ClaimEnded",
            Self::TakenByAllocate => "TakenByAllocate",
            Self::ShownFree => "ShownFree",
            Self::Released => "Released",
        }
    }
}

/// Something that happened to the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A counted pod got a unit.
    Granted {
        /// The kubelet's id.
        id: DeviceId,
        /// The unit behind it.
        unit: UnitId,
    },
    /// Another unit was given than the id names.
    Substituted {
        /// The kubelet's id.
        id: DeviceId,
        /// The unit given.
        unit: UnitId,
    },
    /// The kubelet asked for an id again while the pod that has it is still there.
    KubeletLostItsBook {
        /// The id.
        id: DeviceId,
        /// The pod that has it.
        pod: PodRef,
    },
    /// A unit went to a counted pod while a process of the former counted pod still ran on it.
    HandedOverBusy {
        /// The kubelet's id.
        id: DeviceId,
        /// The unit.
        unit: UnitId,
        /// Host PIDs on it and on all that overlaps it.
        pids: Vec<u32>,
    },
    /// `Allocate` took a unit from a claim that was allocated and not prepared.
    ClaimLostRace {
        /// The claim.
        claim: ClaimRef,
        /// The unit.
        unit: UnitId,
    },
    /// The device of a unit evicts from now on, for a claim that lost the unit.
    EvictionAsked {
        /// The claim.
        claim: ClaimRef,
        /// The unit.
        unit: UnitId,
    },
    /// The device of a unit does not evict any more for this claim.
    EvictionOver {
        /// The claim.
        claim: ClaimRef,
        /// The unit.
        unit: UnitId,
    },
    /// The pod of a claim that lost a unit is not evicted.
    NotEvicted {
        /// The claim.
        claim: ClaimRef,
        /// The unit.
        unit: UnitId,
        /// Why not.
        why: NotEvicted,
    },
    /// A granted unit was seen with its pod.
    Bound {
        /// The unit.
        unit: UnitId,
        /// The pod.
        pod: PodRef,
    },
    /// An allocation in the API took a unit.
    Reserved {
        /// The unit.
        unit: UnitId,
        /// The claim.
        claim: ClaimRef,
    },
    /// A claim got its units.
    Prepared {
        /// The claim.
        claim: ClaimRef,
        /// The units it owns.
        units: Vec<UnitId>,
    },
    /// A hold ended.
    Ended {
        /// The unit.
        unit: UnitId,
        /// Why.
        cause: EndCause,
    },
    /// A hold ended while a process was still on the unit: nobody gets it until NVML shows it free.
    Lingering {
        /// The unit.
        unit: UnitId,
        /// Whose it was.
        former: Former,
    },
    /// A process of no known holder runs on a free unit.
    ForeignFound {
        /// The unit.
        unit: UnitId,
    },
    /// pod-resources lists an id that no hold carries, and the unit behind it is not free.
    UnknownHolder {
        /// The id.
        id: DeviceId,
        /// The pod that is listed with it.
        pod: PodRef,
    },
    /// A GPU appeared.
    UnitAdded {
        /// The unit.
        unit: UnitId,
    },
    /// A GPU stopped answering.
    UnitLost {
        /// The unit.
        unit: UnitId,
    },
    /// A GPU answers again.
    UnitReturned {
        /// The unit.
        unit: UnitId,
    },
    /// The driver told of an error.
    XidSeen {
        /// The GPU, which need not be a unit.
        unit: UnitId,
        /// Its number.
        xid: Xid,
        /// How often since the last look.
        times: u64,
        /// What it does.
        action: XidAction,
    },
    /// A GPU is offered to nobody because of an error, or because of one more.
    UnitFaulty {
        /// The unit.
        unit: UnitId,
        /// The error.
        xid: Xid,
    },
    /// A GPU is not closed by a fault any more.
    FaultEnded {
        /// The unit.
        unit: UnitId,
        /// Why.
        cause: FaultEnd,
    },
    /// A claim that the kubelet has from somebody else is held from now on.
    ClaimTakenOver {
        /// The claim.
        claim: ClaimRef,
    },
    /// Another daemon serves our resource or our driver on this node: nothing is offered.
    OtherRegistrant {
        /// Who.
        rival: Rival,
    },
    /// No other daemon has been seen for a while: what is free is offered again.
    RivalsGone,
    /// The pool serves from now on: what ran on the node was taken over.
    Adopted {
        /// Counted holds taken over.
        counted: usize,
        /// Claims taken over.
        claims: usize,
        /// Units that nobody can be named for.
        foreign: usize,
    },
}
