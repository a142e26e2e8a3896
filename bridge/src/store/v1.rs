//! Format 1 of the ledger's file. The types here are the file's, field for field; the ledger's own know no format.
//!
//! A field may be added without a new format if a version that does not know it may leave it as it is.

use std::num::NonZeroU32;
use std::time::SystemTime;

use bridge_core::{self as core, ClaimUid, DeviceId, DeviceName, InvalidId, PodUid, UnitId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The number of this format.
pub(super) const FORMAT: u32 = 1;

/// The content of `ledger.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct File {
    format: u32,
    pub(super) writer: String,
    pub(super) boot_id: String,
    generation: u64,
    /// In the order of their numbers.
    units: Vec<Unit>,
    prepared: Vec<Preparation>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Unit {
    uuid: String,
    number: u32,
    kind: UnitKind,
    /// The UUID of the whole GPU, for a MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    capacity: NonZeroU32,
    side: Side,
    holds: Vec<Hold>,
    /// Since 0.2; a version before it leaves it as it is, and serves the unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fault: Option<Fault>,
    gpu: Gpu,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fault {
    /// Numbers of errors, in their order.
    xids: Vec<u32>,
    /// RFC 3339.
    since: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum UnitKind {
    Gpu,
    Mig,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Side {
    Legacy,
    Dra,
    Rest,
    Lowering,
    Yielding,
    Dark,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Gpu {
    uuid: String,
    pci_bus_id: String,
    minor: u32,
    product_name: String,
    brand: String,
    architecture: String,
    compute_capability: (u32, u32),
    memory_bytes: u64,
    driver_version: String,
    cuda_driver_version: (u32, u32),
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pcie_root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    addressing_mode: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hold {
    #[serde(flatten)]
    kind: HoldKind,
    shares: NonZeroU32,
    /// RFC 3339.
    since: String,
}

/// The words are those of [`core::Phase::as_str`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "phase")]
enum HoldKind {
    Granted { id: String },
    Bound { id: String, pod: Pod },
    Reserved { claim: Claim },
    Prepared { claim: Claim },
    Foreign { cause: Cause },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Cause {
    UnknownProcess,
    Lingering { former: Former },
    UnknownUnitOf { pod: Pod },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Former {
    Counted {
        #[serde(skip_serializing_if = "Option::is_none")]
        pod: Option<Pod>,
    },
    Claim {
        claim: Claim,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct Pod {
    namespace: String,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
}

/// A claim, here and in the list of unprepared claims.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Claim {
    uid: String,
    namespace: String,
    name: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Preparation {
    claim: Claim,
    devices: Vec<Device>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Device {
    requests: Vec<String>,
    pool: String,
    device: String,
    unit: String,
    access: Access,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Access {
    Owner,
    Admin,
}

/// Why the content is no ledger.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error("a time in it is none: {0}")]
    Time(jiff::Error),
    #[error("{0} is there twice")]
    Twice(String),
    #[error("the MIG instance {0} names no parent")]
    NoParent(String),
}

impl File {
    pub(super) fn of(ledger: &core::Ledger, writer: &str, boot_id: &str) -> Self {
        Self {
            format: FORMAT,
            writer: writer.to_owned(),
            boot_id: boot_id.to_owned(),
            generation: ledger.generation,
            units: ledger
                .in_order()
                .into_iter()
                .map(|(unit, record)| Unit {
                    fault: ledger.faults.get(unit).map(Fault::of),
                    ..Unit::of(unit, record, ledger.holds_on(unit))
                })
                .collect(),
            prepared: ledger.prepared.values().map(Preparation::of).collect(),
        }
    }

    pub(super) fn into_ledger(self) -> Result<core::Ledger, Error> {
        let mut ledger = core::Ledger {
            generation: self.generation,
            ..core::Ledger::default()
        };
        for mut unit in self.units {
            let fault = unit.fault.take().map(Fault::into_core).transpose()?;
            let (unit, record, holds) = unit.into_core()?;
            if let Some(fault) = fault {
                ledger.faults.insert(unit.clone(), fault);
            }
            if !holds.is_empty() {
                ledger.holds.insert(unit.clone(), holds);
            }
            if ledger.units.insert(unit.clone(), record).is_some() {
                return Err(Error::Twice(format!("unit {unit}")));
            }
        }
        for preparation in self.prepared {
            let preparation = preparation.into_core()?;
            let uid = preparation.claim.uid.clone();
            if ledger.prepared.insert(uid.clone(), preparation).is_some() {
                return Err(Error::Twice(format!("prepared claim {uid}")));
            }
        }
        Ok(ledger)
    }
}

impl Unit {
    fn of(unit: &UnitId, record: &core::UnitRecord, holds: &[core::Hold]) -> Self {
        let (kind, parent) = match &record.kind {
            core::UnitKind::Gpu => (UnitKind::Gpu, None),
            core::UnitKind::Mig { parent } => (UnitKind::Mig, Some(parent.to_string())),
        };
        Self {
            uuid: unit.to_string(),
            number: record.number,
            kind,
            parent,
            capacity: record.capacity,
            side: match record.side {
                core::Side::Legacy => Side::Legacy,
                core::Side::Dra => Side::Dra,
                core::Side::Rest => Side::Rest,
                core::Side::Lowering => Side::Lowering,
                core::Side::Yielding => Side::Yielding,
                core::Side::Dark => Side::Dark,
            },
            holds: holds.iter().map(Hold::of).collect(),
            fault: None,
            gpu: Gpu::of(&record.gpu),
        }
    }

    fn into_core(self) -> Result<(UnitId, core::UnitRecord, Vec<core::Hold>), Error> {
        let kind = match (self.kind, self.parent) {
            (UnitKind::Gpu, _) => core::UnitKind::Gpu,
            (UnitKind::Mig, None) => return Err(Error::NoParent(self.uuid)),
            (UnitKind::Mig, Some(parent)) => core::UnitKind::Mig {
                parent: UnitId::new(parent)?,
            },
        };
        let record = core::UnitRecord {
            number: self.number,
            kind,
            capacity: self.capacity,
            side: match self.side {
                Side::Legacy => core::Side::Legacy,
                Side::Dra => core::Side::Dra,
                Side::Rest => core::Side::Rest,
                Side::Lowering => core::Side::Lowering,
                Side::Yielding => core::Side::Yielding,
                Side::Dark => core::Side::Dark,
            },
            gpu: self.gpu.into_core()?.into(),
        };
        let holds = self.holds.into_iter().map(Hold::into_core);
        Ok((
            UnitId::new(self.uuid)?,
            record,
            holds.collect::<Result<_, _>>()?,
        ))
    }
}

impl Fault {
    fn of(fault: &core::Fault) -> Self {
        Self {
            xids: fault.xids.iter().map(|xid| xid.number()).collect(),
            since: timestamp(fault.since).to_string(),
        }
    }

    fn into_core(self) -> Result<core::Fault, Error> {
        Ok(core::Fault {
            xids: self.xids.into_iter().map(core::Xid::new).collect(),
            since: self.since.parse::<Timestamp>().map_err(Error::Time)?.into(),
        })
    }
}

impl Gpu {
    fn of(gpu: &core::Gpu) -> Self {
        Self {
            uuid: gpu.uuid.to_string(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            minor: gpu.minor,
            product_name: gpu.product_name.clone(),
            brand: gpu.brand.clone(),
            architecture: gpu.architecture.clone(),
            compute_capability: gpu.compute_capability,
            memory_bytes: gpu.memory_bytes,
            driver_version: gpu.driver_version.clone(),
            cuda_driver_version: gpu.cuda_driver_version,
            numa_node: gpu.numa_node,
            pcie_root: gpu.pcie_root.clone(),
            addressing_mode: gpu.addressing_mode.clone(),
        }
    }

    fn into_core(self) -> Result<core::Gpu, Error> {
        Ok(core::Gpu {
            uuid: UnitId::new(self.uuid)?,
            pci_bus_id: self.pci_bus_id,
            minor: self.minor,
            product_name: self.product_name,
            brand: self.brand,
            architecture: self.architecture,
            compute_capability: self.compute_capability,
            memory_bytes: self.memory_bytes,
            driver_version: self.driver_version,
            cuda_driver_version: self.cuda_driver_version,
            numa_node: self.numa_node,
            pcie_root: self.pcie_root,
            addressing_mode: self.addressing_mode,
        })
    }
}

impl Hold {
    fn of(hold: &core::Hold) -> Self {
        let kind = match &hold.kind {
            core::HoldKind::Granted { id } => HoldKind::Granted { id: id.to_string() },
            core::HoldKind::Bound { id, pod } => HoldKind::Bound {
                id: id.to_string(),
                pod: Pod::of(pod),
            },
            core::HoldKind::Reserved { claim } => HoldKind::Reserved {
                claim: Claim::of(claim),
            },
            core::HoldKind::Prepared { claim } => HoldKind::Prepared {
                claim: Claim::of(claim),
            },
            core::HoldKind::Foreign { cause } => HoldKind::Foreign {
                cause: Cause::of(cause),
            },
        };
        Self {
            kind,
            shares: hold.shares,
            since: timestamp(hold.since).to_string(),
        }
    }

    fn into_core(self) -> Result<core::Hold, Error> {
        let kind = match self.kind {
            HoldKind::Granted { id } => core::HoldKind::Granted {
                id: DeviceId::parse(&id)?,
            },
            HoldKind::Bound { id, pod } => core::HoldKind::Bound {
                id: DeviceId::parse(&id)?,
                pod: pod.into_core()?,
            },
            HoldKind::Reserved { claim } => core::HoldKind::Reserved {
                claim: claim.into_core()?,
            },
            HoldKind::Prepared { claim } => core::HoldKind::Prepared {
                claim: claim.into_core()?,
            },
            HoldKind::Foreign { cause } => core::HoldKind::Foreign {
                cause: cause.into_core()?,
            },
        };
        Ok(core::Hold {
            shares: self.shares,
            since: self.since.parse::<Timestamp>().map_err(Error::Time)?.into(),
            kind,
        })
    }
}

impl Cause {
    fn of(cause: &core::ForeignCause) -> Self {
        match cause {
            core::ForeignCause::UnknownProcess => Self::UnknownProcess,
            core::ForeignCause::Lingering { former } => Self::Lingering {
                former: match former {
                    core::Former::Counted(pod) => Former::Counted {
                        pod: pod.as_ref().map(Pod::of),
                    },
                    core::Former::Claim(claim) => Former::Claim {
                        claim: Claim::of(claim),
                    },
                },
            },
            core::ForeignCause::UnknownUnitOf { pod } => Self::UnknownUnitOf { pod: Pod::of(pod) },
        }
    }

    fn into_core(self) -> Result<core::ForeignCause, Error> {
        Ok(match self {
            Self::UnknownProcess => core::ForeignCause::UnknownProcess,
            Self::Lingering { former } => core::ForeignCause::Lingering {
                former: match former {
                    Former::Counted { pod } => {
                        core::Former::Counted(pod.map(Pod::into_core).transpose()?)
                    }
                    Former::Claim { claim } => core::Former::Claim(claim.into_core()?),
                },
            },
            Self::UnknownUnitOf { pod } => core::ForeignCause::UnknownUnitOf {
                pod: pod.into_core()?,
            },
        })
    }
}

impl Pod {
    fn of(pod: &core::PodRef) -> Self {
        Self {
            namespace: pod.name.namespace.clone(),
            name: pod.name.name.clone(),
            uid: pod.uid.as_ref().map(ToString::to_string),
        }
    }

    fn into_core(self) -> Result<core::PodRef, Error> {
        Ok(core::PodRef {
            name: core::PodName {
                namespace: self.namespace,
                name: self.name,
            },
            uid: self.uid.map(PodUid::new).transpose()?,
        })
    }
}

impl Claim {
    pub(super) fn of(claim: &core::ClaimRef) -> Self {
        Self {
            uid: claim.uid.to_string(),
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
        }
    }

    pub(super) fn into_core(self) -> Result<core::ClaimRef, Error> {
        Ok(core::ClaimRef {
            uid: ClaimUid::new(self.uid)?,
            namespace: self.namespace,
            name: self.name,
        })
    }
}

impl Preparation {
    fn of(preparation: &core::Preparation) -> Self {
        let device = |device: &core::PreparedDevice| Device {
            requests: device.requests.clone(),
            pool: device.pool.clone(),
            device: device.device.to_string(),
            unit: device.unit.to_string(),
            access: match device.access {
                core::Access::Owner => Access::Owner,
                core::Access::Admin => Access::Admin,
            },
        };
        Self {
            claim: Claim::of(&preparation.claim),
            devices: preparation.devices.iter().map(device).collect(),
        }
    }

    fn into_core(self) -> Result<core::Preparation, Error> {
        let device = |device: Device| -> Result<core::PreparedDevice, Error> {
            Ok(core::PreparedDevice {
                requests: device.requests,
                pool: device.pool,
                device: DeviceName::new(device.device)?,
                unit: UnitId::new(device.unit)?,
                access: match device.access {
                    Access::Owner => core::Access::Owner,
                    Access::Admin => core::Access::Admin,
                },
            })
        };
        Ok(core::Preparation {
            claim: self.claim.into_core()?,
            devices: self
                .devices
                .into_iter()
                .map(device)
                .collect::<Result<_, _>>()?,
        })
    }
}

/// Times are for people, so one that no calendar has is no reason to refuse a save.
fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or_else(|_| {
        if time < SystemTime::UNIX_EPOCH {
            Timestamp::MIN
        } else {
            Timestamp::MAX
        }
    })
}
