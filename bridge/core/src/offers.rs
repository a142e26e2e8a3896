//! What each face shows now: a function of the pool, and of nothing else.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::gpu::Gpu;
use crate::hold::Hold;
use crate::id::{ClaimRef, ClaimUid, DeviceId, DeviceName, UnitId};
use crate::ledger::Side;
use crate::pool::{Pool, Presence, Standing};
use crate::settings::{Face, Mode, Prefer};
use crate::taint::{Taint, TaintReason};
use crate::topology::Topology;

/// What the kubelet hears about an id (`Device.health`, kubelet `deviceplugin/v1beta1/api.proto`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It may be given out, or a counted pod has it.
    Healthy,
    /// It must not be given out.
    Unhealthy,
}

/// One line of `ListAndWatch`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedOffer {
    /// The kubelet's id.
    pub id: DeviceId,
    /// The unit behind it now.
    pub unit: UnitId,
    /// May it be given out?
    pub health: Health,
    /// NUMA node of the unit, for the kubelet's Topology Manager.
    pub numa_node: Option<u32>,
    /// On offer and not reserved for a claim either: what `GetPreferredAllocation` picks from, last first.
    pub free: bool,
    /// About to leave the counted side: picked after those that stay, or it would be missed on the other side.
    pub leaving: bool,
    /// A claim was allocated the unit: picked last of all.
    pub reserved: bool,
}

/// One device of the ResourceSlice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimOffer {
    /// Its name.
    pub device: DeviceName,
    /// What it is.
    pub gpu: Arc<Gpu>,
    /// Why no new claim may get it, and whether claims that have it are evicted; `None`: on offer, or held by a claim.
    pub taint: Option<Taint>,
    /// Free and on offer: where a server drops taints, a device that is neither this nor held by a claim is left out.
    pub held_by_claim: bool,
}

/// What becomes of the devices where there is no slice yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SliceWanted {
    /// One is made.
    #[default]
    Made,
    /// None is made: the face is closed, and while it is not known who has what a slice of before is tainted and kept,
    /// since its claims may be in use.
    Kept,
}

/// What both faces show.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offers {
    /// The mode in force.
    pub mode: Mode,
    /// What `node.status.allocatable` should say: healthy ids without those that are about to be withdrawn; 0 while
    /// nothing is given out.
    pub count: u32,
    /// Whether a daemon that was told to stop may do so: the count is lowered, and no counted pod is on its way.
    pub clear: bool,
    /// All ids, always, in the order of the device numbers.
    pub counted: Vec<CountedOffer>,
    /// All devices, in the same order; `None`: no slice at all, because the face is closed, nothing holds it
    /// and nobody is evicted.
    pub claims: Option<Vec<ClaimOffer>>,
    /// What becomes of them where there is no slice yet.
    pub slice: SliceWanted,
    /// How the units are connected, as far as it is known: what is asked for together is picked by it.
    pub topology: Arc<Topology>,
    /// Whether it is.
    pub prefer: Prefer,
}

impl Pool {
    /// What both faces show now.
    #[must_use]
    pub fn offers(&self) -> Offers {
        Offers {
            mode: self.settings.mode,
            count: self.count(),
            clear: self.seen.motion.clear,
            counted: self.counted_offers(),
            claims: self.claim_offers(),
            slice: self.slice_wanted(),
            topology: Arc::clone(&self.seen.topology),
            prefer: self.settings.prefer,
        }
    }

    pub(crate) fn counted_offers(&self) -> Vec<CountedOffer> {
        let on_offer = self.on_offer(Face::Legacy);
        self.ledger
            .in_order()
            .into_iter()
            .map(|(named, _)| DeviceId::of_unit(named.clone()))
            .filter_map(|id| {
                let unit = self.ledger.unit_behind(&id)?;
                let record = self.ledger.units.get(unit)?;
                let offered = on_offer.contains(&unit);
                // A unit that a claim was allocated stays healthy, but is picked last.
                let mut holds = self.ledger.holds_touching(unit).peekable();
                let free = offered && holds.peek().is_none();
                let reserved = holds.any(|(_, hold)| hold.face() == Some(Face::Dra));
                let healthy = offered || self.keeps_healthy(&id, unit);
                Some(CountedOffer {
                    unit: unit.clone(),
                    health: if healthy {
                        Health::Healthy
                    } else {
                        Health::Unhealthy
                    },
                    numa_node: record.gpu.numa_node,
                    free,
                    leaving: self.side_of(unit).is_some_and(|side| !side.is_counted()),
                    reserved,
                    id,
                })
            })
            .collect()
    }

    /// What the kubelet has allocated is never hidden from it, or it fails the pod when it starts anew.
    fn keeps_healthy(&self, id: &DeviceId, unit: &UnitId) -> bool {
        let is_well = self.presence(unit) != Presence::Lost && self.fault_of(unit).is_none();
        let carried = is_well && self.ledger.carrier_of(id).is_some();
        let known = self.standing != Standing::Serving && self.seen.kubelet_ids.contains(id);
        carried || known
    }

    /// Whether the slice is for nobody, as far as the ledger knows.
    fn is_slice_idle(&self) -> bool {
        let closed = !self.settings.mode.opens(Face::Dra);
        let used = self.held_through(Face::Dra) > 0 || !self.ledger.prepared.is_empty();
        closed && !used && !self.evicts_any()
    }

    fn slice_wanted(&self) -> SliceWanted {
        if self.is_slice_idle() {
            SliceWanted::Kept
        } else {
            SliceWanted::Made
        }
    }

    fn claim_offers(&self) -> Option<Vec<ClaimOffer>> {
        if self.is_slice_idle() && self.standing == Standing::Serving {
            return None;
        }
        let on_offer = self.on_offer(Face::Dra);
        let offers = self
            .ledger
            .in_order()
            .into_iter()
            .map(|(unit, record)| ClaimOffer {
                device: record.device_name(),
                gpu: Arc::clone(&record.gpu),
                taint: self.taint(unit, on_offer.contains(&unit)),
                held_by_claim: self.claim_on(unit).is_some(),
            })
            .collect();
        Some(offers)
    }

    fn claim_on(&self, unit: &UnitId) -> Option<&ClaimRef> {
        self.ledger.holds_on(unit).iter().find_map(Hold::claim)
    }

    fn taint(&self, unit: &UnitId, on_offer: bool) -> Option<Taint> {
        let reason = self.taint_reason(unit, on_offer)?;
        Some(match self.evicts(unit) {
            // What has a reason of another kind is on its way back to one that does not evict.
            Some(evicting) if evicting == reason => Taint::evicting(reason),
            Some(_) | None => Taint::keeping_out(reason),
        })
    }

    fn taint_reason(&self, unit: &UnitId, on_offer: bool) -> Option<TaintReason> {
        if self.standing != Standing::Serving {
            return Some(TaintReason::Closed);
        }
        if self.presence(unit) != Presence::Present {
            return Some(TaintReason::Lost);
        }
        if self.fault_of(unit).is_some() {
            return Some(TaintReason::Faulty);
        }
        if let Some(claim) = self.claim_on(unit) {
            let in_use = self.is_in_use(&claim.uid, unit);
            return (!in_use).then_some(TaintReason::Unpreparing);
        }
        if let Some((_, hold)) = self.ledger.holds_touching(unit).next() {
            return Some(match hold.face() {
                Some(Face::Legacy) => TaintReason::Counted,
                Some(Face::Dra) => TaintReason::Closed,
                None => TaintReason::Foreign,
            });
        }
        if on_offer {
            return None;
        }
        if !self.is_open() {
            return Some(TaintReason::Closed);
        }
        match self.side_of(unit) {
            Some(Side::Legacy | Side::Lowering | Side::Dark) => Some(TaintReason::Counted),
            Some(Side::Dra | Side::Rest | Side::Yielding) | None => Some(TaintReason::Closed),
        }
    }

    /// Whether the claim is still allocated to the unit and somebody may use it; yes while the API can't be asked.
    fn is_in_use(&self, claim: &ClaimUid, unit: &UnitId) -> bool {
        let known = self.seen.claims.as_ref();
        let Some(claims) = known.filter(|claims| claims.knows(claim)) else {
            return true;
        };
        claims
            .claims
            .iter()
            .find(|allocated| allocated.claim.uid == *claim)
            .is_some_and(|allocated| {
                !allocated.reserved_for.is_empty() && self.is_allocated(claim, unit) == Some(true)
            })
    }
}

impl Offers {
    /// Picks for `GetPreferredAllocation`: what must be in, then free ids, those that are about to leave after those that
    /// stay, then ids of counted pods, which the kubelet has given up if it offers them, then those whose unit a claim was
    /// allocated. Of ids that are alike in this those whose units go best together, from the tail of the list where that is
    /// the same, or where the admin prefers the tail.
    /// Deterministic, and never an error: an error here fails the pod for good.
    #[must_use]
    pub fn preferred(
        &self,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Vec<String> {
        let places: BTreeMap<String, (usize, &CountedOffer)> = self
            .counted
            .iter()
            .enumerate()
            .map(|(place, offer)| (offer.id.to_string(), (place, offer)))
            .collect();
        let unit = |id: &String| places.get(id).map(|(_, offer)| &offer.unit);
        let must: BTreeSet<&String> = must_include.iter().collect();
        // In each rank from the tail of the list.
        let mut ranks: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for id in available.iter().filter(|id| !must.contains(id)) {
            let known = places.get(id);
            let free = known.is_some_and(|(_, offer)| offer.free);
            let leaving = known.is_some_and(|(_, offer)| offer.leaving);
            let reserved = known.is_some_and(|(_, offer)| offer.reserved);
            let rank = (reserved, !free, leaving);
            let last = Reverse(known.map(|(place, _)| *place));
            ranks.entry(rank).or_default().insert((last, id));
        }
        let wiring = match self.prefer {
            Prefer::Wiring => Arc::clone(&self.topology),
            Prefer::Tail => Arc::default(),
        };
        let mut chosen: Vec<&String> = must_include.iter().take(size).collect();
        let mut chosen_units: Vec<Option<&UnitId>> = chosen.iter().map(|id| unit(id)).collect();
        for ids in ranks.into_values() {
            let ids: Vec<&String> = ids.into_iter().map(|(_, id)| id).collect();
            let units: Vec<Option<&UnitId>> = ids.iter().map(|id| unit(id)).collect();
            let room = size - chosen.len();
            for place in wiring.choose(room, &units, &chosen_units) {
                chosen.push(ids[place]);
                chosen_units.push(units[place]);
            }
        }
        chosen.into_iter().cloned().collect()
    }
}
