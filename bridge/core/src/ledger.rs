//! The durable truth: which units exist and who has them. Everything here is written to disk before it is said.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::gpu::Gpu;
use crate::health::Fault;
use crate::hold::{Hold, HoldKind};
use crate::id::{ClaimRef, ClaimUid, DeviceId, DeviceName, UnitId};
use crate::settings::Face;
use crate::units::Units;

/// The side on which a unit is offered while it is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// To counted requests: healthy id, tainted device.
    Legacy,
    /// To claims: unhealthy id, untainted device.
    Dra,
    /// To both, while nothing moves: healthy id, untainted device.
    Rest,
    /// On the way from `Legacy` to `Dra`: the count is lowered, the id still healthy for pods that are bound
    /// already, the device tainted.
    Lowering,
    /// On the way from `Rest` to `Dra`: as `Lowering`, with the device untainted as it was.
    Yielding,
    /// On the way from `Dra` to `Legacy`: unhealthy id, tainted device, until no claim can be on its way to it.
    Dark,
}

impl Side {
    /// Every side.
    pub const ALL: [Self; 6] = [
        Self::Legacy,
        Self::Dra,
        Self::Rest,
        Self::Lowering,
        Self::Yielding,
        Self::Dark,
    ];

    /// The side of a face.
    #[must_use]
    pub fn of(face: Face) -> Self {
        match face {
            Face::Legacy => Self::Legacy,
            Face::Dra => Self::Dra,
        }
    }

    /// Whether a free unit's id is healthy.
    #[must_use]
    pub fn is_healthy(self) -> bool {
        match self {
            Self::Legacy | Self::Rest | Self::Lowering | Self::Yielding => true,
            Self::Dra | Self::Dark => false,
        }
    }

    /// Whether a free unit is in the count that schedulers read from `node.status.allocatable`.
    #[must_use]
    pub fn is_counted(self) -> bool {
        match self {
            Self::Legacy | Self::Rest => true,
            Self::Lowering | Self::Yielding | Self::Dra | Self::Dark => false,
        }
    }

    /// Whether a free unit's device is untainted.
    #[must_use]
    pub fn is_claimable(self) -> bool {
        match self {
            Self::Dra | Self::Rest | Self::Yielding => true,
            Self::Legacy | Self::Lowering | Self::Dark => false,
        }
    }

    /// Whether a face shows a free unit as one to be had.
    #[must_use]
    pub fn shows(self, face: Face) -> bool {
        match face {
            Face::Legacy => self.is_healthy(),
            Face::Dra => self.is_claimable(),
        }
    }

    /// The word in status and in the ledger.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Dra => "dra",
            Self::Rest => "rest",
            Self::Lowering => "lowering",
            Self::Yielding => "yielding",
            Self::Dark => "dark",
        }
    }
}

/// What kind of hardware a unit is, and with which other units it overlaps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum UnitKind {
    /// A whole GPU.
    Gpu,
    /// A MIG instance of the GPU named.
    Mig {
        /// The GPU that it is a part of.
        parent: UnitId,
    },
}

/// A unit that the node has, or had and nobody has forgotten yet (rule 12).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UnitRecord {
    /// The number in the device's name and its place in every list. Bound to the UUID for good.
    pub number: u32,
    /// Hardware kind.
    pub kind: UnitKind,
    /// Equal shares of the unit; 1 is an exclusive unit.
    pub capacity: NonZeroU32,
    /// Where it is offered while free.
    pub side: Side,
    /// The last description that NVML gave.
    pub gpu: Arc<Gpu>,
}

impl UnitRecord {
    /// The name in the ResourceSlice.
    ///
    /// # Panics
    /// Never: `gpu-` and a number are a DNS label.
    #[must_use]
    pub fn device_name(&self) -> DeviceName {
        DeviceName::new(format!("gpu-{}", self.number)).expect("'gpu-N' is a DNS label")
    }

    /// The number in a name as [`device_name`](Self::device_name) makes it; `None`: it makes no such name.
    #[must_use]
    pub fn number_in(name: &DeviceName) -> Option<u32> {
        let number = name.as_str().strip_prefix("gpu-")?.parse().ok()?;
        (format!("gpu-{number}") == name.as_str()).then_some(number)
    }
}

/// In which role a claim has a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The claim holds the unit.
    Owner,
    /// `adminAccess`: it looks on, owns nothing and blocks nobody.
    Admin,
}

/// One device of a prepared claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PreparedDevice {
    /// The requests of the claim that it answers, without sub-request names.
    pub requests: Vec<String>,
    /// The pool in the allocation result.
    pub pool: String,
    /// The device name in the allocation result.
    pub device: DeviceName,
    /// The unit behind the name.
    pub unit: UnitId,
    /// Owner or onlooker.
    pub access: Access,
}

/// What was answered to `NodePrepareResources`; the same answer is given again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Preparation {
    /// The claim.
    pub claim: ClaimRef,
    /// Its devices, in the order of the allocation.
    pub devices: Vec<PreparedDevice>,
}

/// Units, holds and prepared claims of one node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Ledger {
    /// Grows by one with every saved change.
    pub generation: u64,
    /// Every unit that the node has or had.
    pub units: Units,
    /// Holds by unit. A unit without an entry is free; no entry is ever empty.
    pub holds: BTreeMap<UnitId, Vec<Hold>>,
    /// Answers given to `NodePrepareResources`.
    pub prepared: BTreeMap<ClaimUid, Preparation>,
    /// Units that are offered to nobody, each with why (rule 10).
    pub faults: BTreeMap<UnitId, Fault>,
}

impl Ledger {
    /// All units in the order of their numbers: the order of every list that leaves the daemon.
    #[must_use]
    pub fn in_order(&self) -> Vec<(&UnitId, &UnitRecord)> {
        let mut units: Vec<_> = self.units.iter().collect();
        units.sort_by_key(|(_, record)| record.number);
        units
    }

    /// The holds on a unit; empty if it is free or unknown.
    #[must_use]
    pub fn holds_on(&self, unit: &UnitId) -> &[Hold] {
        self.holds.get(unit).map_or(&[], Vec::as_slice)
    }

    /// The unit of a device name.
    #[must_use]
    pub fn unit_named(&self, name: &DeviceName) -> Option<&UnitId> {
        self.units
            .iter()
            .find(|(_, record)| record.device_name() == *name)
            .map(|(unit, _)| unit)
    }

    /// The holds on a unit and on all that overlaps it, `Foreign` ones included.
    pub fn holds_touching<'a>(
        &'a self,
        unit: &UnitId,
    ) -> impl Iterator<Item = (&'a UnitId, &'a Hold)> {
        let own = self.units.get_key_value(unit).map(|(own, _)| own);
        own.into_iter()
            .chain(self.units.overlapping(unit))
            .flat_map(|unit| self.holds_on(unit).iter().map(move |hold| (unit, hold)))
    }

    /// Whether an id is one of those that this node lists to the kubelet, not another device plugin's.
    #[must_use]
    pub fn lists(&self, id: &DeviceId) -> bool {
        self.units.contains_key(id.named_unit())
            && *id == DeviceId::of_unit(id.named_unit().clone())
    }

    /// The legacy hold that carries an id, and its unit.
    #[must_use]
    pub fn carrier_of(&self, id: &DeviceId) -> Option<(&UnitId, &Hold)> {
        fn carrying<'a>(
            id: &DeviceId,
            (unit, holds): (&'a UnitId, &'a Vec<Hold>),
        ) -> Option<(&'a UnitId, &'a Hold)> {
            let mut holds = holds.iter();
            let found = holds.find(|hold| hold.device_id() == Some(id));
            found.map(|hold| (unit, hold))
        }
        // As a rule an id is carried by the unit that it names.
        let named = self.holds.get_key_value(id.named_unit());
        let own = named.and_then(|held| carrying(id, held));
        own.or_else(|| self.holds.iter().find_map(|held| carrying(id, held)))
    }

    /// The unit that stands behind a kubelet id now (rule 4: ids and units are a bijection).
    ///
    /// A legacy hold that carries the id decides. For the other ids the substitutions are followed back: when Y
    /// was given for X, the id of Y stands for the unit of X until that hold ends.
    #[must_use]
    pub fn unit_behind(&self, id: &DeviceId) -> Option<&UnitId> {
        if let Some((unit, _)) = self.carrier_of(id) {
            return Some(unit);
        }
        if !self.lists(id) {
            return None;
        }
        let (mut unit, _) = self.units.get_key_value(id.named_unit())?;
        // Each step leaves a unit that a legacy hold carries under another id; there are at most as many
        // steps as units, because the ids carried are all different.
        for _ in 0..=self.units.len() {
            let carried = self.holds_on(unit).iter().find_map(|hold| hold.device_id());
            match carried {
                None => return Some(unit),
                Some(other) => (unit, _) = self.units.get_key_value(other.named_unit())?,
            }
        }
        None
    }

    /// The id that stands for a unit now: the inverse of [`unit_behind`](Self::unit_behind).
    #[must_use]
    pub fn id_before(&self, unit: &UnitId) -> Option<DeviceId> {
        if let Some(id) = self.holds_on(unit).iter().find_map(Hold::device_id) {
            return Some(id.clone());
        }
        // Whoever carries the id of a unit has left its own to stand for that unit, unless somebody carries it as well.
        let (mut stands, _) = self.units.get_key_value(unit)?;
        for _ in 0..=self.units.len() {
            let id = DeviceId::of_unit(stands.clone());
            match self.carrier_of(&id) {
                None => return Some(id),
                Some((carrier, _)) => stands = carrier,
            }
        }
        None
    }

    /// Units held by a counted pod under an id that names another unit.
    #[must_use]
    pub fn substitutions(&self) -> Vec<(&DeviceId, &UnitId)> {
        self.holds
            .iter()
            .flat_map(|(unit, holds)| holds.iter().map(move |hold| (unit, hold)))
            .filter_map(|(unit, hold)| hold.device_id().map(|id| (id, unit)))
            .filter(|(id, unit)| id.named_unit() != *unit)
            .collect()
    }

    /// Adds a hold.
    pub(crate) fn take(&mut self, unit: &UnitId, hold: Hold) {
        self.holds.entry(unit.clone()).or_default().push(hold);
    }

    /// Drops every hold on a unit and on all that overlaps it, and returns them with their units.
    pub(crate) fn clear(&mut self, unit: &UnitId) -> Vec<(UnitId, Hold)> {
        let mut units: Vec<UnitId> = self.units.overlapping(unit).cloned().collect();
        units.insert(0, unit.clone());
        let mut dropped = Vec::new();
        for unit in units {
            for hold in self.drop_holds(&unit, |_| true) {
                dropped.push((unit.clone(), hold));
            }
        }
        dropped
    }

    /// Drops the holds of a unit that `which` picks, and returns them.
    pub(crate) fn drop_holds(&mut self, unit: &UnitId, which: impl Fn(&Hold) -> bool) -> Vec<Hold> {
        let Some(holds) = self.holds.get_mut(unit) else {
            return Vec::new();
        };
        let (dropped, kept): (Vec<_>, Vec<_>) = holds.drain(..).partition(which);
        if kept.is_empty() {
            self.holds.remove(unit);
        } else {
            *holds = kept;
        }
        dropped
    }

    /// The rules that hold whatever happens. A breach is a bug, found here before it reaches the disk.
    ///
    /// # Errors
    /// The first rule broken, in words.
    pub fn check(&self) -> Result<(), String> {
        let mut ids = BTreeSet::new();
        let mut numbers = BTreeSet::new();
        for (unit, record) in &self.units {
            if !numbers.insert(record.number) {
                return Err(format!("two units have the number {}", record.number));
            }
            self.check_capacity(unit, record)?;
        }
        if let Some(unit) = self
            .faults
            .keys()
            .find(|unit| !self.units.contains_key(*unit))
        {
            return Err(format!("{unit} has a fault and is not a unit of this node"));
        }
        for (unit, holds) in &self.holds {
            if !self.units.contains_key(unit) {
                return Err(format!("{unit} is held but not a unit of this node"));
            }
            if holds.is_empty() {
                return Err(format!("{unit} has an empty list of holds"));
            }
            for hold in holds {
                if let Some(id) = hold.device_id()
                    && !ids.insert(id)
                {
                    return Err(format!("two holds carry the id {id}"));
                }
                if let HoldKind::Prepared { claim } = &hold.kind
                    && !self.owns(&claim.uid, unit)
                {
                    return Err(format!(
                        "{unit} is prepared for {claim} without an answer kept"
                    ));
                }
            }
        }
        for preparation in self.prepared.values() {
            for device in &preparation.devices {
                let held = |hold: &Hold| {
                    matches!(hold.kind, HoldKind::Prepared { .. })
                        && hold.is_of_claim(&preparation.claim.uid)
                };
                if device.access == Access::Owner && !self.holds_on(&device.unit).iter().any(held) {
                    return Err(format!(
                        "claim {} was answered with {}, which it does not hold",
                        preparation.claim, device.unit
                    ));
                }
            }
        }
        Ok(())
    }

    fn owns(&self, claim: &ClaimUid, unit: &UnitId) -> bool {
        self.prepared.get(claim).is_some_and(|preparation| {
            preparation
                .devices
                .iter()
                .any(|device| device.unit == *unit && device.access == Access::Owner)
        })
    }

    fn check_capacity(&self, unit: &UnitId, record: &UnitRecord) -> Result<(), String> {
        let own: u64 = self
            .holds_on(unit)
            .iter()
            .map(|hold| u64::from(hold.shares.get()))
            .sum();
        let all: u64 = self
            .holds_touching(unit)
            .map(|(_, hold)| u64::from(hold.shares.get()))
            .sum();
        if own > u64::from(record.capacity.get()) {
            return Err(format!(
                "{unit} has {own} shares held of {}",
                record.capacity
            ));
        }
        if own > 0 && all > own {
            return Err(format!("{unit} is held, and so is a unit that overlaps it"));
        }
        Ok(())
    }
}
