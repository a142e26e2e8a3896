//! What pod-resources proves about the holds, and what it does not.
//!
//! The kubelet's list has no UIDs, no ordinary init containers, and may show one id under two pods: a `List` that
//! falls into an `Allocate` can make the kubelet forget the id that it is just giving out, and give it again
//! (`pkg/kubelet/cm/devicemanager`, `UpdateAllocatedDevices`). So an id alone names no holder: a pod whose hold carries
//! another id than it is listed with has its unit already, and the unit behind the listed id is another pod's.

use std::collections::BTreeSet;

use crate::evidence::{BoundPod, ListedPod, Listing, PodPhase};
use crate::hold::{Hold, HoldKind};
use crate::id::{DeviceId, PodName, PodRef, PodUid, UnitId};
use crate::pool::Pool;

/// Who has an id that the kubelet gives a second time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This pod.
    Known(PodRef),
    /// Some pod whose init container is never listed, perhaps this one.
    Perhaps(PodRef),
    /// Nobody can say, for want of a list of pods.
    Unknown,
}

impl Pool {
    /// The UID of the live pod of a name, where a list of pods is known and names one.
    pub(crate) fn live_uid(&self, name: &PodName) -> Option<PodUid> {
        let pods = self.seen.pods.as_ref()?;
        pods.live(name).map(|bound| bound.uid.clone())
    }

    /// Whether a list of pods shows that a pod is terminal or gone.
    pub(crate) fn has_ended(&self, pod: &PodRef) -> bool {
        self.seen
            .pods
            .as_ref()
            .is_some_and(|pods| pods.has_ended(&pod.name, pod.uid.as_ref()))
    }

    /// The same, for sure: a pod without a UID may only be too new for the list.
    pub(crate) fn has_surely_ended(&self, pod: &PodRef) -> bool {
        pod.uid.is_some() && self.has_ended(pod)
    }

    /// Units bound to pods of a name, those of predecessors that have ended left out.
    pub(crate) fn bound_to(&self, name: &PodName) -> usize {
        self.bound_as(name).count()
    }

    /// The unit that a listed id means: the one behind it, or for a share of NVIDIA's plugin, which is no id of ours,
    /// the GPU that it names.
    pub(crate) fn unit_meant(&self, id: &DeviceId) -> Option<UnitId> {
        let named = || {
            let unit = id.named_unit();
            self.ledger.units.contains_key(unit).then_some(unit)
        };
        self.ledger.unit_behind(id).or_else(named).cloned()
    }

    /// Whether a listed pod has no unit yet for one of its ids.
    ///
    /// It has, if one of its holds carries the id, or lies on the id's own unit under another id. Else its ids without
    /// a hold, other granted ones left out, must outnumber its holds whose ids it is not listed with.
    pub(crate) fn is_owed(&self, listed: &ListedPod, id: &DeviceId) -> bool {
        let ids = listed.ids();
        let mut open = ids.clone();
        let mut swapped = 0;
        for (unit, carried) in self.bound_as(&listed.pod) {
            let of_unit = DeviceId::of_unit(unit.clone());
            if !ids.contains(carried) && !open.remove(&of_unit) {
                swapped += 1;
            }
            open.remove(carried);
        }
        let is_granted = |id: &DeviceId| {
            let carrier = self.ledger.carrier_of(id);
            carrier.is_some_and(|(_, hold)| matches!(hold.kind, HoldKind::Granted { .. }))
        };
        open.contains(id)
            && open
                .iter()
                .filter(|other| **other == id || !is_granted(other))
                .count()
                > swapped
    }

    /// The units bound to pods of a name, each with the id that it is held under; predecessors that have ended left out.
    fn bound_as<'a>(
        &'a self,
        name: &'a PodName,
    ) -> impl Iterator<Item = (&'a UnitId, &'a DeviceId)> {
        let holds = self.ledger.holds.iter();
        holds
            .flat_map(|(unit, holds)| holds.iter().map(move |hold| (unit, hold)))
            .filter_map(move |(unit, hold)| match &hold.kind {
                HoldKind::Bound { id, pod } if pod.name == *name && !self.has_surely_ended(pod) => {
                    Some((unit, id))
                }
                HoldKind::Bound { .. }
                | HoldKind::Granted { .. }
                | HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. }
                | HoldKind::Foreign { .. } => None,
            })
    }

    /// The pod that still has a carried id although the kubelet gives it again, if there is one.
    ///
    /// `holder` is the pod that the hold is bound to; a granted hold has none yet.
    pub(crate) fn still_has(
        &self,
        id: &DeviceId,
        unit: &UnitId,
        holder: Option<&PodRef>,
        spoken_for: &BTreeSet<UnitId>,
        listing: &Listing,
    ) -> Option<Owner> {
        if let Some(pod) = holder
            && listing.shows(&pod.name)
            && !self.has_surely_ended(pod)
        {
            // Active, with the id or without it: its containers may run, so the kubelet's book is wrong.
            return Some(Owner::Known(pod.clone()));
        }
        let listed = listing.pods.iter().find(|listed| self.is_owed(listed, id));
        if let Some(listed) = listed {
            return Some(Owner::Known(PodRef {
                name: listed.pod.clone(),
                uid: self.live_uid(&listed.pod),
            }));
        }
        if holder.is_none() {
            return self.needs_every_granted_unit(unit, spoken_for, listing);
        }
        None
    }

    /// A pod that may be the owner of a granted unit, if the started pods may own as many unlisted ids as there are
    /// such units: then each of them is spoken for. With more units than that some are left over from failed
    /// admissions, or are another container's of the pod that asks, and the kubelet knows which.
    ///
    /// A unit granted long ago is compared with its like: what was granted just now is of pods that have not started.
    /// The other units of the call (`spoken_for`) explain nobody's.
    fn needs_every_granted_unit(
        &self,
        unit: &UnitId,
        spoken_for: &BTreeSet<UnitId>,
        listing: &Listing,
    ) -> Option<Owner> {
        let pods = self.seen.pods.as_ref()?;
        let candidates = || {
            pods.pods
                .iter()
                .filter(|bound| bound.phase == PodPhase::Live && bound.started)
                .filter(|bound| listing.shows(&bound.pod))
                .map(|bound| (bound, self.unlisted_ids(bound, listing)))
                .filter(|(_, unlisted)| *unlisted > 0)
        };
        let unlisted: usize = candidates().map(|(_, unlisted)| unlisted).sum();
        let now = self.seen.listed_at.unwrap_or_default();
        let granted = || {
            self.ledger.holds.iter().filter(|(unit, holds)| {
                let granted = |hold: &Hold| matches!(hold.kind, HoldKind::Granted { .. });
                !spoken_for.contains(*unit) && holds.iter().any(granted)
            })
        };
        let alike = granted()
            .filter(|(other, _)| self.has_aged(other, now) || !self.has_aged(unit, now))
            .count();
        if unlisted < alike {
            return None;
        }
        let (bound, _) = candidates().next()?;
        let pod = PodRef {
            name: bound.pod.clone(),
            uid: Some(bound.uid.clone()),
        };
        let no_other = candidates().count() == 1 && unlisted >= granted().count();
        Some(if no_other {
            Owner::Known(pod)
        } else {
            Owner::Perhaps(pod)
        })
    }

    /// Whether some live pod here may own an id that pod-resources does not show: an ordinary init container's.
    /// Without a list of pods: yes.
    pub(crate) fn can_be_owned(&self, listing: &Listing) -> bool {
        self.seen.pods.as_ref().is_none_or(|pods| {
            pods.pods
                .iter()
                .any(|bound| bound.phase == PodPhase::Live && self.unlisted_ids(bound, listing) > 0)
        })
    }

    /// How many ids a pod may own beyond those that it is listed with, or has a unit for all the same.
    fn unlisted_ids(&self, bound: &BoundPod, listing: &Listing) -> usize {
        let listed = listing
            .pods
            .iter()
            .find(|listed| listed.pod == bound.pod)
            .map_or(0, |listed| listed.ids().len());
        usize::try_from(bound.may_own)
            .unwrap_or(usize::MAX)
            .saturating_sub(listed.max(self.bound_to(&bound.pod)))
    }

    /// Whether a listing is an empty answer of a kubelet whose sources are not ready yet: pods with GPUs run here, and
    /// it names no pod at all.
    pub(crate) fn says_nothing(&self, listing: &Listing) -> bool {
        let running =
            |bound: &BoundPod| bound.phase == PodPhase::Live && bound.started && bound.may_own > 0;
        listing.pods.is_empty()
            && self
                .seen
                .pods
                .as_ref()
                .is_none_or(|pods| pods.pods.iter().any(running))
    }

    /// Whether a bound hold shows in a listing: by its id, or by an id of its pod that no other unit of that pod
    /// accounts for.
    pub(crate) fn is_shown(&self, id: &DeviceId, pod: &PodRef, listing: &Listing) -> bool {
        let listed = listing.pods.iter().find(|listed| listed.pod == pod.name);
        listed.is_some_and(|listed| {
            let ids = listed.ids();
            let carried: BTreeSet<&DeviceId> = self
                .ledger
                .holds
                .values()
                .flatten()
                .filter_map(|hold| match &hold.kind {
                    HoldKind::Bound { id, pod } if pod.name == listed.pod => Some(id),
                    HoldKind::Bound { .. }
                    | HoldKind::Granted { .. }
                    | HoldKind::Reserved { .. }
                    | HoldKind::Prepared { .. }
                    | HoldKind::Foreign { .. } => None,
                })
                .collect();
            ids.contains(id) || ids.iter().any(|id| !carried.contains(id))
        })
    }
}
