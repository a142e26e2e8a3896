//! Why not. A refusal is an outcome, not a failure; its reason is stable in logs, events, metrics and the guide.

use std::fmt;

use crate::health::Fault;
use crate::hold::{ForeignCause, Former, Hold, HoldKind};
use crate::id::{ClaimRef, DeviceId, DeviceName, UnitId};
use crate::rival::{RIVAL_GONE, Rival};

/// Why a call was not granted. `Display` is the sentence for the pod's event: what failed, why, what to do next.
/// It names the kind of the holder, never another tenant's pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The kubelet asked for an id that this daemon never listed.
    UnknownDeviceId {
        /// What it asked for.
        id: String,
    },
    /// One call names an id twice.
    RepeatedDeviceId {
        /// The id.
        id: DeviceId,
    },
    /// No unit is left that may be given to a counted pod.
    NoFreeUnit {
        /// The id asked for.
        id: DeviceId,
        /// Units of the node.
        units: usize,
        /// Of these, held by claims.
        claims: usize,
        /// Of these, held by counted pods.
        counted: usize,
        /// Of these, in use by something unknown, or not usable.
        unusable: usize,
    },
    /// The claim names a device that is not in this node's pool.
    UnknownDevice {
        /// The claim.
        claim: ClaimRef,
        /// The device it names.
        device: DeviceName,
    },
    /// The unit is held by somebody else, or a unit that overlaps it is.
    UnitHeld {
        /// The unit asked for.
        unit: UnitId,
        /// Its device name.
        device: DeviceName,
        /// Who holds it, as words.
        holder: HolderKind,
        /// The claim that asked.
        claim: ClaimRef,
    },
    /// A process of a former or unknown holder still runs on the unit.
    UnitBusy {
        /// The unit asked for.
        unit: UnitId,
        /// Its device name.
        device: DeviceName,
        /// The claim that asked.
        claim: ClaimRef,
        /// The processes, by host PID; empty when NVML gives no list.
        pids: Vec<u32>,
    },
    /// The GPU does not answer any more.
    UnitLost {
        /// The unit asked for.
        unit: UnitId,
        /// Its device name.
        device: DeviceName,
        /// The claim that asked.
        claim: ClaimRef,
    },
    /// The driver told of an error of the GPU, which is closed for it.
    UnitFaulty {
        /// The unit asked for.
        unit: UnitId,
        /// Its device name.
        device: DeviceName,
        /// The claim that asked.
        claim: ClaimRef,
        /// The error.
        fault: Fault,
    },
    /// The host lacks a device node that a container with the unit would need.
    DeviceNodeMissing {
        /// The unit asked for, or the first that is free but for this.
        unit: UnitId,
        /// The node, and what is wrong with it.
        lack: String,
        /// The claim that asked; `None`: a counted pod.
        claim: Option<ClaimRef>,
    },
    /// Counted pods that are bound to the node, and not served yet, need the unit.
    CountedPodsFirst {
        /// The unit asked for.
        unit: UnitId,
        /// Its device name.
        device: DeviceName,
        /// The claim that asked.
        claim: ClaimRef,
    },
    /// The ledger is missing, and what runs on the node is not known yet.
    WaitingForAdoption,
    /// The ledger is there and can't be read.
    LedgerUnreadable,
    /// Another daemon on this node serves the resource or the driver too.
    OtherRegistrant {
        /// Who.
        rival: Rival,
    },
}

/// What kind of holder stands in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HolderKind {
    /// A pod that asked by count.
    CountedPod,
    /// A claim that is prepared.
    PreparedClaim,
    /// A claim that is allocated and not prepared yet.
    AllocatedClaim,
    /// Something the daemon can't name.
    Unknown,
}

impl HolderKind {
    /// The kind of a hold's holder.
    #[must_use]
    pub fn of(hold: &Hold) -> Self {
        match &hold.kind {
            HoldKind::Granted { .. } | HoldKind::Bound { .. } => Self::CountedPod,
            HoldKind::Reserved { .. } => Self::AllocatedClaim,
            HoldKind::Prepared { .. } => Self::PreparedClaim,
            HoldKind::Foreign { cause } => match cause {
                ForeignCause::Lingering {
                    former: Former::Counted(_),
                } => Self::CountedPod,
                ForeignCause::Lingering {
                    former: Former::Claim(_),
                } => Self::PreparedClaim,
                ForeignCause::UnknownProcess | ForeignCause::UnknownUnitOf { .. } => Self::Unknown,
            },
        }
    }
}

impl fmt::Display for HolderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CountedPod => "a pod that asked for nvidia.com/gpu by count",
            Self::PreparedClaim => "another ResourceClaim, prepared on this node",
            Self::AllocatedClaim => "another ResourceClaim, allocated to the same device",
            Self::Unknown => "something that gpu-bridge does not know",
        })
    }
}

impl Refusal {
    /// The stable name of the reason: the same in events, logs, metrics and `migration-guide/reasons/`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::UnknownDeviceId { .. } => "UnknownDeviceId",
            Self::RepeatedDeviceId { .. } => "RepeatedDeviceId",
            Self::NoFreeUnit { .. } => "NoFreeUnit",
            Self::UnknownDevice { .. } => "UnknownDevice",
            Self::UnitHeld { .. } => "UnitHeld",
            Self::UnitBusy { .. } => "UnitBusy",
            Self::UnitLost { .. } => "UnitLost",
            Self::UnitFaulty { .. } => "UnitFaulty",
            Self::DeviceNodeMissing { .. } => "DeviceNodeMissing",
            Self::CountedPodsFirst { .. } => "CountedPodsFirst",
            Self::WaitingForAdoption => "WaitingForAdoption",
            Self::LedgerUnreadable => "LedgerUnreadable",
            Self::OtherRegistrant { .. } => "OtherRegistrant",
        }
    }

    /// Every reason, for metrics that start at zero and for the guide's test.
    pub const REASONS: [&'static str; 13] = [
        "UnknownDeviceId",
        "RepeatedDeviceId",
        "NoFreeUnit",
        "UnknownDevice",
        "UnitHeld",
        "UnitBusy",
        "UnitLost",
        "UnitFaulty",
        "DeviceNodeMissing",
        "CountedPodsFirst",
        "WaitingForAdoption",
        "LedgerUnreadable",
        "OtherRegistrant",
    ];

    /// Whether the daemon itself is not ready, so that the caller should hear `UNAVAILABLE`.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::WaitingForAdoption | Self::LedgerUnreadable | Self::OtherRegistrant { .. } => {
                true
            }
            Self::UnknownDeviceId { .. }
            | Self::RepeatedDeviceId { .. }
            | Self::NoFreeUnit { .. }
            | Self::UnknownDevice { .. }
            | Self::UnitHeld { .. }
            | Self::UnitBusy { .. }
            | Self::UnitLost { .. }
            | Self::UnitFaulty { .. }
            | Self::DeviceNodeMissing { .. }
            | Self::CountedPodsFirst { .. } => false,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.reason())?;
        match self {
            Self::UnknownDeviceId { id } => write!(
                f,
                "the kubelet asked for device {id:?}, which gpu-bridge never listed on this node. \
                 Restart the kubelet, so that it reads the list anew; if this stays, look for a second device plugin of nvidia.com/gpu."
            ),
            Self::RepeatedDeviceId { id } => write!(
                f,
                "the kubelet asked for device {id} twice in one call, so the call was refused whole. Delete the pod, so that it is scheduled anew."
            ),
            Self::NoFreeUnit {
                id,
                units,
                claims,
                counted,
                unusable,
            } => write!(
                f,
                "device {id} cannot be given to this pod: of {units} GPUs, claims hold {claims}, counted pods hold {counted}, and {unusable} cannot be used. \
                 The kubelet does not try this pod again: delete it, so that it is scheduled anew."
            ),
            Self::UnknownDevice { claim, device } => write!(
                f,
                "claim {claim} is allocated to device {device}, which is not in this node's pool. \
                 Delete the pod and the claim, so that the scheduler picks a device from the current ResourceSlice."
            ),
            Self::UnitHeld {
                unit,
                device,
                holder,
                claim,
            } => write!(
                f,
                "{device} ({unit}) cannot be prepared for claim {claim}: it is held by {holder}. \
                 The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew."
            ),
            Self::UnitBusy {
                unit,
                device,
                claim,
                pids,
            } => write!(
                f,
                "{device} ({unit}) cannot be prepared for claim {claim}: {}. \
                 The kubelet tries again by itself; if this stays, {}.",
                Busy(pids),
                if pids.is_empty() {
                    "look at the driver on the node with nvidia-smi"
                } else {
                    "end that process on the node"
                }
            ),
            Self::UnitLost {
                unit,
                device,
                claim,
            } => write!(
                f,
                "{device} ({unit}) cannot be prepared for claim {claim}: the GPU does not answer NVML any more. \
                 Delete the pod and the claim to get another GPU, and have this one looked at."
            ),
            Self::UnitFaulty {
                unit,
                device,
                claim,
                fault,
            } => write!(
                f,
                "{device} ({unit}) cannot be prepared for claim {claim}: the driver told of XID {}, so the GPU is offered to nobody. \
                 Delete the pod and the claim to get another GPU; what has to be done about this one `gpu-bridge status` says on the node.",
                fault.numbers()
            ),
            Self::DeviceNodeMissing { unit, lack, claim } => {
                write!(f, "{unit} cannot be given to ")?;
                match claim {
                    Some(claim) => write!(f, "claim {claim}")?,
                    None => f.write_str("this pod")?,
                }
                write!(f, ", because no container could use it: {lack}. Load the driver's modules on the node, ")?;
                f.write_str("as nvidia-modprobe -c 0 -u does, or correct --dev-root; ")?;
                f.write_str(match claim {
                    Some(_) => "the kubelet tries again by itself.",
                    None => "the kubelet does not try this pod again: delete it, so that it is scheduled anew.",
                })
            }
            Self::CountedPodsFirst {
                unit,
                device,
                claim,
            } => write!(
                f,
                "{device} ({unit}) is not prepared for claim {claim} yet: counted pods that are bound to this node need it first. \
                 The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew."
            ),
            Self::WaitingForAdoption => f.write_str(
                "the ledger of this node is missing, and what runs here is not known yet, so no GPU is given out. \
                 It goes on by itself once pod-resources, the kubelet's checkpoints and the API server have answered; gpu-bridge's /readyz says which it waits for.",
            ),
            Self::LedgerUnreadable => f.write_str(
                "the ledger of this node cannot be read, so no GPU is given out. The file is kept; gpu-bridge's log and /readyz say what to do.",
            ),
            Self::OtherRegistrant { rival } => write!(
                f,
                "another daemon serves {} on this node too, at {}, so gpu-bridge offers no GPU. \
                 Remove that daemon from the node, or gpu-bridge; once it is gone for {} s GPUs are offered again.",
                rival.face.served_name(), rival.place, RIVAL_GONE.as_secs()
            ),
        }
    }
}

struct Busy<'a>(&'a [u32]);

impl fmt::Display for Busy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// More process ids than this make no sentence.
        const SHOWN: usize = 5;
        if self.0.is_empty() {
            return f.write_str(
                "NVML does not say whether a process of a former holder still runs on it",
            );
        }
        f.write_str("a process of a former or unknown holder runs on it (host PID ")?;
        for (position, pid) in self.0.iter().take(SHOWN).enumerate() {
            if position > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{pid}")?;
        }
        if self.0.len() > SHOWN {
            write!(f, " and {} more", self.0.len() - SHOWN)?;
        }
        f.write_str(")")
    }
}
