//! The lost race: the pod of a claim that was allocated a unit of somebody else is got out of the way.
//!
//! Its Prepare was refused, so nothing of it runs; its pod would come back to the same unit for ever. While the taint
//! of the device has the effect `NoExecute`, the eviction controller deletes the pods of all claims that are allocated
//! to the device and do not tolerate that (kubernetes v1.37.2, `pkg/controller/devicetainteviction`), and whoever made
//! them makes new ones. So the effect is raised only while nobody can be hit who may run, and not for long.
//!
//! All of this is memory. After a restart the taint is `NoSchedule` again, and the next refusal raises it anew.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::evidence::{AllocatedClaim, AllocatedDevice, Claims};
use crate::hold::{ForeignCause, HoldKind};
use crate::id::{ClaimRef, ClaimUid, DeviceName, UnitId};
use crate::ledger::{Access, UnitRecord};
use crate::pool::{Pool, Transition};
use crate::refusal::Refusal;
use crate::report::Report;
use crate::settings::Face;
use crate::taint::{Taint, TaintReason};

/// How long a device evicts at most for one claim. The controller marks a pod within 60 ms, and one that never started
/// is gone within 2 s; a controller that has just become the leader must read the cluster first. What is not gone
/// after this is kept by something that the taint does not move.
pub(crate) const EVICTION_LIMIT: Duration = Duration::from_secs(60);

/// A process of a former holder that is still there after this is none that is just ending: a claim that waits for it
/// has been refused by then, and may go elsewhere.
pub(crate) const LINGER_LIMIT: Duration = Duration::from_secs(60);

/// After a device has evicted, it does not evict again for this long while its holder stays: a scheduler that passes
/// over taints would allocate it to the next pod at once, and that must not become a loop.
pub(crate) const EVICTION_PAUSE: Duration = Duration::from_secs(60);

/// Claims that lost a race, and what is done for them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct LostRaces {
    losers: BTreeMap<ClaimUid, Loser>,
    /// Since when a process of an ended holder is all that keeps a unit.
    lingering: BTreeMap<UnitId, Duration>,
    /// When a device stopped to evict, while somebody still keeps its unit from claims.
    lowered: BTreeMap<UnitId, Duration>,
    /// When the next step is due.
    pub(crate) wake_at: Option<Duration>,
}

/// A claim that is allocated here, and whose Prepare was refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Loser {
    claim: ClaimRef,
    stage: Stage,
}

/// How far it has come with a [`Loser`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Stage {
    /// Nobody is evicted for it, or not yet; with the reason that was told last.
    Waits { told: Option<NotEvicted> },
    /// The device of this unit evicts.
    Evicts {
        unit: UnitId,
        reason: TaintReason,
        since: Duration,
    },
    /// That is over, and comes not again as long as the claim stays allocated here.
    Spent,
}

/// Why the pod of a claim that lost a race is not evicted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NotEvicted {
    /// The claim tolerates the taint: it asked to stay.
    Tolerates,
    /// This claim looks on through `adminAccess` and does not tolerate the taint for ever: it would be hit too.
    Onlooker(ClaimRef),
    /// Something of this claim may run on the node, and it does not tolerate the taint for ever.
    InUse(ClaimRef),
    /// The taint was there for [`EVICTION_LIMIT`], and the claim still is.
    NoEffect,
}

/// What there is to do about a claim whose device evicts.
enum Verdict {
    GoesOn,
    /// The claim has left the device.
    Gone,
    /// It is over for another cause, which may have to be told.
    Over(Option<NotEvicted>),
}

impl NotEvicted {
    /// The word in logs.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Tolerates => "Tolerates",
            Self::Onlooker(_) => "Onlooker",
            Self::InUse(_) => "InUse",
            Self::NoEffect => "NoEffect",
        }
    }
}

impl Refusal {
    /// Whether the claim may be one that lost a race: somebody else has, or is to have, what it was allocated.
    fn is_lost_race(&self) -> bool {
        match self {
            Self::UnitHeld { .. } | Self::UnitBusy { .. } | Self::CountedPodsFirst { .. } => true,
            Self::UnknownDeviceId { .. }
            | Self::RepeatedDeviceId { .. }
            | Self::NoFreeUnit { .. }
            | Self::UnknownDevice { .. }
            | Self::UnitLost { .. }
            | Self::UnitFaulty { .. }
            | Self::DeviceNodeMissing { .. }
            | Self::WaitingForAdoption
            | Self::LedgerUnreadable
            | Self::OtherRegistrant { .. } => false,
        }
    }
}

impl AllocatedClaim {
    fn on<'a>(&'a self, device: &DeviceName) -> impl Iterator<Item = &'a AllocatedDevice> {
        self.devices
            .iter()
            .filter(move |allocated| allocated.device == *device)
    }
}

impl AllocatedDevice {
    fn asks_to_stay(&self, taint: Taint) -> bool {
        let mut tolerations = self.tolerations.iter();
        tolerations.any(|toleration| toleration.asks_to_stay(taint, EVICTION_LIMIT))
    }

    fn is_spared(&self, taint: Taint) -> bool {
        let mut tolerations = self.tolerations.iter();
        tolerations.any(|toleration| toleration.surely_spares(taint))
    }
}

impl Pool {
    /// Why the device of a unit evicts; `None`: it does not.
    pub(crate) fn evicts(&self, unit: &UnitId) -> Option<TaintReason> {
        let mut losers = self.seen.lost.losers.values();
        losers.find_map(|loser| match &loser.stage {
            Stage::Evicts {
                unit: evicting,
                reason,
                ..
            } if evicting == unit => Some(*reason),
            Stage::Evicts { .. } | Stage::Waits { .. } | Stage::Spent => None,
        })
    }

    /// Whether any device evicts: then there must be a slice, whatever the mode.
    pub(crate) fn evicts_any(&self) -> bool {
        let mut losers = self.seen.lost.losers.values();
        losers.any(|loser| matches!(loser.stage, Stage::Evicts { .. }))
    }

    /// Who keeps a unit from every claim, for as long as can be seen: a counted pod, or a process that does not end.
    fn blocked_by(&self, unit: &UnitId, now: Duration) -> Option<TaintReason> {
        if !self.is_present(unit) {
            return None;
        }
        let mut lingers = false;
        for (holder, hold) in self.ledger.holds_touching(unit) {
            match &hold.kind {
                HoldKind::Granted { .. } | HoldKind::Bound { .. } => {
                    return Some(TaintReason::Counted);
                }
                HoldKind::Foreign {
                    cause: ForeignCause::Lingering { .. },
                } => lingers |= self.seen.lost.has_lingered(holder, now),
                HoldKind::Foreign { .. }
                | HoldKind::Reserved { .. }
                | HoldKind::Prepared { .. } => {}
            }
        }
        lingers.then_some(TaintReason::Foreign)
    }

    /// Whether the device of a unit has evicted just now, and does not any more.
    fn pauses(&self, unit: &UnitId, now: Duration) -> bool {
        let lowered = self.seen.lost.lowered.get(unit);
        self.evicts(unit).is_none()
            && lowered.is_some_and(|lowered| now.saturating_sub(*lowered) < EVICTION_PAUSE)
    }

    /// Whether anybody but claims has the unit, whoever it is.
    fn is_kept_from_claims(&self, unit: &UnitId) -> bool {
        self.ledger
            .holds_touching(unit)
            .any(|(_, hold)| hold.face() != Some(Face::Dra))
    }

    /// Whether the device of a unit may evict for the claim: it does not ask to stay, and nobody else is hit who may
    /// run something.
    fn may_evict(
        &self,
        claims: &Claims,
        loser: &ClaimUid,
        unit: &UnitId,
        taint: Taint,
    ) -> Result<(), NotEvicted> {
        let Some(device) = self.ledger.units.get(unit).map(UnitRecord::device_name) else {
            return Ok(());
        };
        for claim in &claims.claims {
            let mut named = claim.on(&device).peekable();
            if named.peek().is_none() {
                continue;
            }
            let is_loser = claim.claim.uid == *loser;
            if is_loser && claim.on(&device).all(|device| device.asks_to_stay(taint)) {
                return Err(NotEvicted::Tolerates);
            }
            if named.all(|device| device.is_spared(taint)) {
                continue;
            }
            // What looks on is never refused, so it runs, or starts any moment.
            let looks_on = claim.on(&device).any(|it| it.access == Access::Admin);
            if looks_on && !is_loser {
                return Err(NotEvicted::Onlooker(claim.claim.clone()));
            }
            if self.may_run(&claim.claim) {
                return Err(NotEvicted::InUse(claim.claim.clone()));
            }
        }
        self.unseen_user(claims, unit)
            .map_or(Ok(()), |claim| Err(NotEvicted::InUse(claim.clone())))
    }

    /// A claim that is prepared with the unit and that the list of claims does not show with it.
    fn unseen_user(&self, claims: &Claims, unit: &UnitId) -> Option<&ClaimRef> {
        let mut prepared = self.ledger.prepared.values();
        let unseen = prepared.find(|preparation| {
            let mut devices = preparation.devices.iter();
            devices.any(|device| {
                device.unit == *unit && !claims.name(&preparation.claim.uid, &device.device)
            })
        });
        unseen.map(|preparation| &preparation.claim)
    }

    /// Whether something of a claim may run here: it was prepared and not given back, or the kubelet lists it so.
    fn may_run(&self, claim: &ClaimRef) -> bool {
        let listing = self.seen.listing.as_ref();
        self.ledger.prepared.contains_key(&claim.uid)
            || listing.is_none_or(|listing| listing.has_claim(claim))
    }
}

impl LostRaces {
    fn has_lingered(&self, unit: &UnitId, now: Duration) -> bool {
        let since = self.lingering.get(unit);
        since.is_some_and(|since| now.saturating_sub(*since) >= LINGER_LIMIT)
    }
}

impl Transition {
    /// Notes that a claim was refused and will not ask again for a while.
    pub(crate) fn note_refused(&mut self, claim: &ClaimRef, refusal: &Refusal) {
        if !refusal.is_lost_race() {
            return;
        }
        let losers = &mut self.pool.seen.lost.losers;
        losers.entry(claim.uid.clone()).or_insert_with(|| Loser {
            claim: claim.clone(),
            stage: Stage::Waits { told: None },
        });
        self.judge_lost_races();
    }

    /// Notes that a claim has got what it was allocated after all.
    pub(crate) fn note_prepared(&mut self, claim: &ClaimUid) {
        if let Some(Loser {
            claim,
            stage: Stage::Evicts { unit, .. },
        }) = self.pool.seen.lost.losers.remove(claim)
        {
            self.report(Report::EvictionOver { claim, unit });
        }
    }

    /// Raises and lowers the taints of devices as the last observations ask for.
    pub(crate) fn judge_lost_races(&mut self) {
        self.note_lingering();
        self.lower();
        self.raise();
        self.end_pauses();
        self.pool.seen.lost.wake_at = self.pool.next_judgement(self.now.uptime);
    }

    /// A pause is over after its time, or when its cause is.
    fn end_pauses(&mut self) {
        let now = self.now.uptime;
        let mut lowered = std::mem::take(&mut self.pool.seen.lost.lowered);
        lowered.retain(|unit, since| {
            now.saturating_sub(*since) < EVICTION_PAUSE && self.pool.is_kept_from_claims(unit)
        });
        self.pool.seen.lost.lowered = lowered;
    }

    /// Forgets claims that a new list shows as not allocated here; one whose device evicts is looked at by itself.
    pub(crate) fn forget_losers(&mut self) {
        let Some(claims) = &self.pool.seen.claims else {
            return;
        };
        let is_here = |uid: &ClaimUid| {
            !claims.knows(uid) || claims.claims.iter().any(|it| it.claim.uid == *uid)
        };
        self.pool
            .seen
            .lost
            .losers
            .retain(|uid, loser| is_here(uid) || matches!(loser.stage, Stage::Evicts { .. }));
    }

    fn note_lingering(&mut self) {
        let now = self.now.uptime;
        let Pool { ledger, seen, .. } = &mut self.pool;
        let lingers = |unit: &UnitId| {
            let mut holds = ledger.holds_on(unit).iter();
            holds.any(|hold| {
                matches!(
                    hold.kind,
                    HoldKind::Foreign {
                        cause: ForeignCause::Lingering { .. }
                    }
                )
            })
        };
        seen.lost.lingering.retain(|unit, _| lingers(unit));
        for unit in ledger.holds.keys().filter(|unit| lingers(unit)) {
            seen.lost.lingering.entry(unit.clone()).or_insert(now);
        }
    }

    /// Ends evictions that have done their work, or must not go on.
    fn lower(&mut self) {
        let losers: Vec<Loser> = self.pool.seen.lost.losers.values().cloned().collect();
        for Loser { claim, stage } in losers {
            let Stage::Evicts {
                unit,
                reason,
                since,
            } = stage
            else {
                continue;
            };
            match self.verdict(&claim.uid, &unit, reason, since) {
                Verdict::GoesOn => continue,
                Verdict::Gone => drop(self.pool.seen.lost.losers.remove(&claim.uid)),
                Verdict::Over(why) => {
                    self.set_stage(&claim.uid, Stage::Spent);
                    if let Some(why) = why {
                        self.report(Report::NotEvicted {
                            claim: claim.clone(),
                            unit: unit.clone(),
                            why,
                        });
                    }
                }
            }
            let now = self.now.uptime;
            self.pool.seen.lost.lowered.insert(unit.clone(), now);
            self.report(Report::EvictionOver { claim, unit });
        }
    }

    fn verdict(
        &self,
        loser: &ClaimUid,
        unit: &UnitId,
        reason: TaintReason,
        since: Duration,
    ) -> Verdict {
        let now = self.now.uptime;
        if self.pool.is_allocated(loser, unit) == Some(false) {
            return Verdict::Gone;
        }
        if now.saturating_sub(since) >= EVICTION_LIMIT {
            return Verdict::Over(Some(NotEvicted::NoEffect));
        }
        if self.pool.blocked_by(unit, now) != Some(reason) {
            return Verdict::Over(None);
        }
        // What can't be asked has not changed.
        let Some(claims) = &self.pool.seen.claims else {
            return Verdict::GoesOn;
        };
        match self
            .pool
            .may_evict(claims, loser, unit, Taint::evicting(reason))
        {
            Ok(()) => Verdict::GoesOn,
            Err(why) => Verdict::Over(Some(why)),
        }
    }

    /// Lets devices evict for the claims that lost them, each claim at one device.
    fn raise(&mut self) {
        let Pool { seen, .. } = &self.pool;
        let (Some(claims), Some(_)) = (seen.claims.clone(), &seen.listing) else {
            return;
        };
        let losers: Vec<Loser> = seen.lost.losers.values().cloned().collect();
        for Loser { claim, stage } in losers {
            let Stage::Waits { told } = stage else {
                continue;
            };
            let mut hindered = None;
            let mut pauses = false;
            for (unit, reason) in self.lost_units(&claim.uid) {
                let taint = Taint::evicting(reason);
                match self.pool.may_evict(&claims, &claim.uid, &unit, taint) {
                    Ok(()) if self.pool.pauses(&unit, self.now.uptime) => pauses = true,
                    Ok(()) => {
                        hindered = None;
                        self.evict(&claim, unit, reason);
                        break;
                    }
                    Err(why) => {
                        hindered.get_or_insert((unit, why));
                    }
                }
            }
            if let Some((unit, why)) = hindered
                && !pauses
                && told.as_ref() != Some(&why)
            {
                let told = Some(why.clone());
                self.set_stage(&claim.uid, Stage::Waits { told });
                self.report(Report::NotEvicted { claim, unit, why });
            }
        }
    }

    /// The units of a claim that somebody keeps from it, in order.
    fn lost_units(&self, claim: &ClaimUid) -> Vec<(UnitId, TaintReason)> {
        let now = self.now.uptime;
        let pool = &self.pool;
        pool.ledger
            .in_order()
            .into_iter()
            .map(|(unit, _)| unit)
            .filter(|unit| pool.is_allocated(claim, unit) == Some(true))
            .filter_map(|unit| Some((unit.clone(), pool.blocked_by(unit, now)?)))
            .collect()
    }

    fn evict(&mut self, claim: &ClaimRef, unit: UnitId, reason: TaintReason) {
        self.report(Report::EvictionAsked {
            claim: claim.clone(),
            unit: unit.clone(),
        });
        if reason == TaintReason::Counted {
            self.note_lost_race();
        }
        let since = self.now.uptime;
        let stage = Stage::Evicts {
            unit,
            reason,
            since,
        };
        self.set_stage(&claim.uid, stage);
    }

    fn set_stage(&mut self, claim: &ClaimUid, stage: Stage) {
        if let Some(loser) = self.pool.seen.lost.losers.get_mut(claim) {
            loser.stage = stage;
        }
    }
}

impl Pool {
    /// When something changes by time alone: an eviction has lasted long enough, a pause is over, a process has been
    /// there for too long.
    fn next_judgement(&self, now: Duration) -> Option<Duration> {
        let lost = &self.seen.lost;
        let mut times: Vec<Duration> = Vec::new();
        for (uid, loser) in &lost.losers {
            match &loser.stage {
                Stage::Evicts { since, .. } => times.push(*since + EVICTION_LIMIT),
                Stage::Waits { .. } => {
                    let allocated = |unit: &UnitId| self.is_allocated(uid, unit) == Some(true);
                    let lingering = lost.lingering.iter().filter(|(unit, _)| allocated(unit));
                    times.extend(lingering.map(|(_, since)| *since + LINGER_LIMIT));
                    let lowered = lost.lowered.iter().filter(|(unit, _)| allocated(unit));
                    times.extend(lowered.map(|(_, lowered)| *lowered + EVICTION_PAUSE));
                }
                Stage::Spent => {}
            }
        }
        times.into_iter().filter(|at| *at > now).min()
    }
}

#[cfg(any(test, feature = "model"))]
impl LostRaces {
    /// The canonical form on another clock; see `canonical.rs` of the crate.
    pub(crate) fn canonical(self, clocks: &crate::canonical::Clocks) -> Self {
        let Self {
            losers,
            lingering,
            lowered,
            wake_at: _, // found anew by each transition, for the arbiter alone
        } = self;
        let stage = |stage: Stage| match stage {
            // What was told is told again, and nothing else comes of it.
            Stage::Waits { told: _ } => Stage::Waits { told: None },
            Stage::Evicts {
                unit,
                reason,
                since,
            } => Stage::Evicts {
                unit,
                reason,
                since: clocks.past(since, EVICTION_LIMIT),
            },
            Stage::Spent => Stage::Spent,
        };
        let losers = losers.into_iter().map(|(uid, Loser { claim, stage: at })| {
            let stage = stage(at);
            (uid, Loser { claim, stage })
        });
        Self {
            losers: losers.collect(),
            lingering: clocks.all(lingering, |since| clocks.past(since, LINGER_LIMIT)),
            lowered: clocks.all(lowered, |at| clocks.past(at, EVICTION_PAUSE)),
            wake_at: None,
        }
    }
}
