//! The pool: inventory, ledger, sides, mode and limits, and the only way to change them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::evidence::{Claims, Listing, Moment, Pods, Processes, UnitProcesses};
use crate::health::Faults;
use crate::hold::{ForeignCause, Former, Hold, HoldKind};
use crate::id::{ClaimRef, ClaimUid, DeviceId, UnitId};
use crate::ledger::{Access, Ledger, Side, UnitKind};
use crate::lost_race::LostRaces;
use crate::report::{EndCause, Report};
use crate::rival::Rivalry;
use crate::settings::{Face, Settings};
use crate::steer::Motion;
use crate::topology::Topology;

/// How long the id of a unit stays healthy while only a process of its former counted pod is left on it. The API
/// counts that unit as free already; a pod that is bound on that count would fail for good without a healthy id,
/// while its `Allocate` can wait for the process. Processes outlive a force delete by half a second as a rule.
pub(crate) const LINGER_COUNTED: Duration = Duration::from_secs(10);

/// How much later than the kubelet the pool may hear of a pod: a grant so long before a pod was known may be its own.
const POD_LAG: Duration = Duration::from_millis(500);

/// Whether the pool gives anything out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It does.
    Serving,
    /// The ledger was missing; what runs here must be found out first (rule 11).
    WaitingForAdoption,
    /// The ledger is there and can't be read; an admin must act.
    LedgerUnreadable,
}

/// Whether NVML sees a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Presence {
    /// It has not said anything since the start, or does not answer at all.
    Unknown,
    /// It does.
    Present,
    /// It did once, and does not now.
    Lost,
}

/// What was seen, kept in memory only: all of it comes back after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub(crate) struct Seen {
    pub(crate) motion: Motion,
    pub(crate) lost: LostRaces,
    pub(crate) rivalry: Option<Rivalry>,
    pub(crate) presence: BTreeMap<UnitId, Presence>,
    pub(crate) listing: Option<Listing>,
    /// Uptime at which that listing was taken.
    pub(crate) listed_at: Option<Duration>,
    pub(crate) pods: Option<Pods>,
    pub(crate) claims: Option<Claims>,
    pub(crate) processes: Processes,
    /// Uptime of the last `Allocate` answer for a granted unit; units granted before the start count from it.
    pub(crate) answered: BTreeMap<UnitId, Duration>,
    /// Listings in a row without the pod of a bound unit.
    pub(crate) unlisted: BTreeMap<UnitId, u32>,
    /// Listings in a row with a claim that is allocated here and that was not prepared here; below 0 after an Unprepare.
    pub(crate) listed_claims: BTreeMap<ClaimUid, i32>,
    /// Observations in a row of a process on a free unit.
    pub(crate) suspects: BTreeMap<UnitId, u32>,
    /// Since when a prepared claim has had no cause to be.
    pub(crate) causeless: BTreeMap<ClaimUid, Duration>,
    /// Ids that the kubelet's checkpoint names, while adoption is waited for.
    pub(crate) kubelet_ids: BTreeSet<DeviceId>,
    /// Since when a process of an ended counted pod keeps a unit: for [`LINGER_COUNTED`] its id stays healthy.
    pub(crate) lingering: BTreeMap<UnitId, Duration>,
    /// Ids already reported as listed without a hold.
    pub(crate) strangers: BTreeSet<DeviceId>,
    /// How the units are connected.
    pub(crate) topology: Arc<Topology>,
    /// Units that no container could use, each with what it lacks on the host, in words.
    pub(crate) unfit: BTreeMap<UnitId, String>,
    /// What is remembered of the faults in the ledger.
    pub(crate) faults: Faults,
}

/// All units of a node, who has them, and what is offered. Changed only through a [`Transition`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    pub(crate) ledger: Ledger,
    pub(crate) settings: Settings,
    pub(crate) standing: Standing,
    pub(crate) seen: Seen,
}

/// A planned change of the pool: made on a private copy, so that nothing is changed before it is saved.
#[must_use = "a transition changes nothing until it is saved and committed"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    base: u64,
    before: Ledger,
    standing_before: Standing,
    pub(crate) pool: Pool,
    pub(crate) now: Moment,
    pub(crate) reports: Vec<Report>,
}

impl Pool {
    /// A pool whose ledger was read from disk.
    #[must_use]
    pub fn restored(ledger: Ledger, settings: Settings) -> Self {
        Self::new(ledger, settings, Standing::Serving)
    }

    /// A pool without a ledger: it gives nothing out until [`Transition::adopt`].
    #[must_use]
    pub fn waiting(settings: Settings) -> Self {
        Self::new(Ledger::default(), settings, Standing::WaitingForAdoption)
    }

    /// A pool whose ledger can't be read: it gives nothing out until an admin has acted and it is started again.
    #[must_use]
    pub fn unreadable(settings: Settings) -> Self {
        Self::new(Ledger::default(), settings, Standing::LedgerUnreadable)
    }

    fn new(ledger: Ledger, settings: Settings, standing: Standing) -> Self {
        Self {
            ledger,
            settings,
            standing,
            seen: Seen::default(),
        }
    }

    /// Starts a transition with what NVML says about processes now.
    pub fn begin(&self, now: Moment, processes: Processes) -> Transition {
        let mut pool = self.clone();
        pool.seen.processes = processes;
        Transition {
            base: self.ledger.generation,
            before: self.ledger.clone(),
            standing_before: self.standing,
            pool,
            now,
            reports: Vec::new(),
        }
    }

    /// Puts a transition in force, after its ledger was saved. Returns what it did.
    ///
    /// # Panics
    /// The transition was begun on another state of the ledger, or breaks a rule of it: both are bugs, and going
    /// on would double-book.
    pub fn commit(&mut self, transition: Transition) -> Vec<Report> {
        assert_eq!(
            transition.base, self.ledger.generation,
            "a transition is committed to the pool that it was begun on"
        );
        if let Err(breach) = transition.pool.ledger.check() {
            panic!("the ledger's rules are broken: {breach}");
        }
        *self = transition.pool;
        transition.reports
    }

    /// The durable part.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether it gives anything out.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether NVML sees a unit.
    #[must_use]
    pub fn is_present(&self, unit: &UnitId) -> bool {
        self.presence(unit) == Presence::Present
    }

    /// Whether NVML sees a unit, the host has what a container needs of it, and it has no fault.
    pub(crate) fn is_fit(&self, unit: &UnitId) -> bool {
        self.is_present(unit) && self.lack_of(unit).is_none() && self.fault_of(unit).is_none()
    }

    /// What a container that is given the unit would miss on the host.
    pub(crate) fn lack_of(&self, unit: &UnitId) -> Option<&String> {
        self.seen.unfit.get(unit)
    }

    pub(crate) fn presence(&self, unit: &UnitId) -> Presence {
        *self.seen.presence.get(unit).unwrap_or(&Presence::Unknown)
    }

    /// The claims that own the unit by their allocation in the API, as far as is known.
    pub(crate) fn allocated_to<'a>(&'a self, unit: &UnitId) -> impl Iterator<Item = &'a ClaimRef> {
        let name = self
            .ledger
            .units
            .get(unit)
            .map(crate::ledger::UnitRecord::device_name);
        self.seen
            .claims
            .iter()
            .flat_map(|claims| &claims.claims)
            .filter(move |allocated| {
                allocated.devices.iter().any(|device| {
                    Some(&device.device) == name.as_ref() && device.access == Access::Owner
                })
            })
            .map(|allocated| &allocated.claim)
    }

    /// Whether the API shows this claim as allocated to the unit; `None` while it can't be asked, or was not asked
    /// for this claim.
    pub(crate) fn is_allocated(&self, claim: &ClaimUid, unit: &UnitId) -> Option<bool> {
        let claims = self.seen.claims.as_ref()?;
        if !claims.knows(claim) {
            return None;
        }
        Some(self.allocated_to(unit).any(|other| other.uid == *claim))
    }

    /// Host PIDs of processes that keep the unit from changing hands; `None` where NVML does not say.
    ///
    /// Processes of pods that look on through `adminAccess` don't count.
    pub(crate) fn busy(&self, unit: &UnitId) -> Option<Vec<u32>> {
        match self.seen.processes.on(unit) {
            UnitProcesses::Unknown => None,
            UnitProcesses::Known(processes) => Some(
                processes
                    .iter()
                    .filter(|process| {
                        !process
                            .pod
                            .as_ref()
                            .is_some_and(|pod| self.looks_on(pod, unit))
                    })
                    .map(|process| process.pid)
                    .collect(),
            ),
        }
    }

    fn looks_on(&self, pod: &crate::id::PodUid, unit: &UnitId) -> bool {
        let Some(record) = self.ledger.units.get(unit) else {
            return false;
        };
        let name = record.device_name();
        let claims = self.seen.claims.iter().flat_map(|claims| &claims.claims);
        let mut onlooker = false;
        for allocated in claims.filter(|allocated| allocated.reserved_for.contains(pod)) {
            for device in allocated
                .devices
                .iter()
                .filter(|device| device.device == name)
            {
                match device.access {
                    Access::Owner => return false,
                    Access::Admin => onlooker = true,
                }
            }
        }
        onlooker
    }

    pub(crate) fn is_clean(&self, unit: &UnitId) -> bool {
        self.busy(unit).is_some_and(|pids| pids.is_empty())
    }

    /// Whether nothing runs on a unit and on all that overlaps it: only then it may change hands. A process in an
    /// instance is expected to be told of the instance alone: told of its parent too, it keeps the other instances.
    pub(crate) fn is_idle(&self, unit: &UnitId) -> bool {
        self.hardware(unit).all(|unit| self.is_clean(unit))
    }

    /// A unit and all that overlaps it.
    pub(crate) fn hardware<'a>(&'a self, unit: &'a UnitId) -> impl Iterator<Item = &'a UnitId> {
        let overlapping = self.ledger.units.overlapping(unit);
        std::iter::once(unit).chain(overlapping)
    }

    /// Units asked for by counted pods that are bound here and whose `Allocate` is still to come.
    ///
    /// A granted unit that is not listed yet is one that a pod has got, of those that were known about then: one that
    /// has started, or else the one that waits the longest.
    pub(crate) fn counted_in_flight(&self) -> u32 {
        let listing = self.seen.listing.as_ref();
        let is_listed = |pod| listing.is_some_and(|listing| listing.counts(pod));
        let pods = self.seen.pods.iter().flat_map(|pods| &pods.pods);
        let mut unlisted: Vec<(bool, Duration, u32)> = pods
            .filter(|bound| bound.phase == crate::evidence::PodPhase::Live)
            .filter(|bound| !is_listed(&bound.pod))
            .map(|bound| {
                let since = self.seen.motion.known_since(&bound.uid);
                (!bound.started, since, bound.may_own)
            })
            .collect();
        unlisted.sort_unstable();
        for granted in self.granted_at() {
            let was_known = |since: Duration| since <= granted.saturating_add(POD_LAG);
            let mut owners = unlisted.iter_mut();
            let owner = owners.find(|(_, since, lacks)| was_known(*since) && *lacks > 0);
            if let Some((_, _, lacks)) = owner {
                *lacks -= 1;
            }
        }
        let in_flight = unlisted.into_iter().filter(|(waits, _, _)| *waits);
        in_flight.map(|(_, _, lacks)| lacks).sum()
    }

    /// The same as a number of units: counted pods that are bound already find what they were bound on.
    pub(crate) fn due(&self) -> usize {
        usize::try_from(self.counted_in_flight()).unwrap_or(usize::MAX)
    }

    /// When the units were given out that no listing has shown yet.
    fn granted_at(&self) -> Vec<Duration> {
        let mut times: Vec<Duration> = self
            .ledger
            .holds
            .iter()
            .filter(|(_, holds)| {
                let mut holds = holds.iter();
                holds.any(|hold| matches!(hold.kind, HoldKind::Granted { .. }))
            })
            .filter_map(|(unit, _)| self.seen.answered.get(unit).copied())
            .collect();
        times.sort_unstable();
        times
    }

    /// The free units of a side that its face may show now, in order: present, unheld, and within mode and limit.
    pub(crate) fn on_offer(&self, face: Face) -> Vec<&UnitId> {
        // A mode that closes the counted face lets it go by moves, since a pod that is bound already must find its id.
        let is_closed = face == Face::Dra && !self.settings.mode.opens(face);
        if !self.is_open() || is_closed {
            return Vec::new();
        }
        let mut free: Vec<&UnitId> = self
            .ledger
            .in_order()
            .into_iter()
            .map(|(unit, _)| unit)
            .filter(|unit| self.side_of(unit).is_some_and(|side| side.shows(face)))
            .filter(|unit| self.is_fit(unit) && self.is_free_for(unit, face))
            // What counted pods may not have any more leaves them by moves, too.
            .filter(|unit| face == Face::Legacy || self.may_show(unit, face))
            .collect();
        let room = self.room(face);
        // Counted picks come from the tail of the list and claims from its head: each keeps its own end.
        match face {
            Face::Legacy => {
                let rest = free.split_off(free.len().saturating_sub(room));
                free.retain(|unit| self.seen.motion.is_outgoing(unit));
                free.extend(rest);
            }
            Face::Dra => free.truncate(room),
        }
        free
    }

    /// How many units a face may show beside those that are held through it, by its limit.
    pub(crate) fn room(&self, face: Face) -> usize {
        self.settings.limits.of(face).map_or(usize::MAX, |limit| {
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            limit.saturating_sub(self.held_through(face))
        })
    }

    /// The side on which a unit is offered. A MIG instance goes with its parent, so that no piece of hardware is
    /// ever on both.
    pub(crate) fn side_of(&self, unit: &UnitId) -> Option<Side> {
        let record = self.ledger.units.get(unit)?;
        let parent = match &record.kind {
            UnitKind::Gpu => None,
            UnitKind::Mig { parent } => self.ledger.units.get(parent),
        };
        Some(parent.map_or(record.side, |parent| parent.side))
    }

    /// Free, or for the counted side only reserved: nothing of that claim runs, and it yields (rule 4).
    pub(crate) fn is_free_for(&self, unit: &UnitId, face: Face) -> bool {
        self.ledger
            .holds_touching(unit)
            .all(|(_, hold)| match hold.kind {
                HoldKind::Reserved { .. } => face == Face::Legacy,
                HoldKind::Foreign { .. } => {
                    face == Face::Legacy && self.seen.lingering.contains_key(unit)
                }
                HoldKind::Granted { .. } | HoldKind::Bound { .. } | HoldKind::Prepared { .. } => {
                    false
                }
            })
    }

    pub(crate) fn held_through(&self, face: Face) -> usize {
        self.ledger
            .holds
            .values()
            .filter(|holds| holds.iter().any(|hold| hold.face() == Some(face)))
            .count()
    }
}

impl Transition {
    /// The ledger as it must be saved before the commit; `None` if nothing durable has changed.
    ///
    /// Nothing is saved before the pool serves: a file without holds would say after the next start that every
    /// unit is free, and an unreadable file must stay as it is.
    ///
    /// # Panics
    /// The ledger breaks a rule of its own: a bug, which must not reach the disk.
    pub fn ledger_to_save(&mut self) -> Option<&Ledger> {
        self.pool.ledger.generation = self.base;
        if self.pool.standing != Standing::Serving {
            return None;
        }
        if self.pool.ledger == self.before && self.standing_before == Standing::Serving {
            return None;
        }
        if let Err(breach) = self.pool.ledger.check() {
            panic!("the ledger's rules are broken, so it is not saved: {breach}");
        }
        self.pool.ledger.generation = self.base + 1;
        Some(&self.pool.ledger)
    }

    /// The pool as this transition leaves it: what to answer and to publish once it is committed.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Takes new settings. They open and close offers, and touch no hold (rule 9).
    pub fn configure(&mut self, settings: Settings) {
        self.keeping_promises(|transition| transition.pool.settings = settings);
        self.end_ignored_faults();
        self.settle();
    }

    /// Makes a change. What a limit keeps counted pods from since leaves their side as in any move: it was promised to
    /// them by the count, and one that is bound already must find it.
    pub(crate) fn keeping_promises(&mut self, change: impl FnOnce(&mut Self)) {
        let shown = |pool: &Pool| -> BTreeSet<UnitId> {
            pool.on_offer(Face::Legacy).into_iter().cloned().collect()
        };
        let before = shown(&self.pool);
        change(self);
        for unit in before.difference(&shown(&self.pool)) {
            if self.pool.is_free_for(unit, Face::Legacy) {
                self.send_out(unit);
            }
        }
    }

    pub(crate) fn report(&mut self, report: Report) {
        self.reports.push(report);
    }

    /// Ends the holds of a unit that `which` picks, for a named cause. A unit on which a process is still seen, or
    /// for which NVML does not say, goes to nobody (rule 8); one that an allocation names is reserved at once.
    pub(crate) fn end(&mut self, unit: &UnitId, cause: EndCause, which: impl Fn(&Hold) -> bool) {
        let ended = self.pool.ledger.drop_holds(unit, which);
        let was_counted = ended.iter().any(|hold| hold.face() == Some(Face::Legacy));
        if was_counted && !self.pool.on_offer(Face::Legacy).contains(&unit) {
            // Over the limit: the count goes down first, as the next pod may be bound in the place of this one.
            self.send_out(unit);
        }
        self.pool.seen.answered.remove(unit);
        self.pool.seen.unlisted.remove(unit);
        for hold in ended {
            let former = match hold.kind {
                HoldKind::Granted { .. } => Some(Former::Counted(None)),
                HoldKind::Bound { pod, .. } => Some(Former::Counted(Some(pod))),
                // A reserved unit may have been prepared before: what is left running on it counts too.
                HoldKind::Prepared { claim } | HoldKind::Reserved { claim } => {
                    Some(Former::Claim(claim))
                }
                HoldKind::Foreign { .. } => None,
            };
            self.report(Report::Ended {
                unit: unit.clone(),
                cause,
            });
            if let Some(former) = former
                && !self.pool.is_clean(unit)
            {
                self.report(Report::Lingering {
                    unit: unit.clone(),
                    former: former.clone(),
                });
                if matches!(former, Former::Counted(_)) {
                    self.pool
                        .seen
                        .lingering
                        .insert(unit.clone(), self.now.uptime);
                }
                let kind = HoldKind::Foreign {
                    cause: ForeignCause::Lingering { former },
                };
                let hold = Hold::exclusive(kind, self.now.wall);
                self.pool.ledger.take(unit, hold);
            }
        }
        self.reserve(unit);
    }

    /// Reserves a free unit for the claim whose allocation names it.
    pub(crate) fn reserve(&mut self, unit: &UnitId) {
        if self.pool.ledger.holds_touching(unit).next().is_some() {
            return;
        }
        let Some(claim) = self.pool.allocated_to(unit).next().cloned() else {
            return;
        };
        self.report(Report::Reserved {
            unit: unit.clone(),
            claim: claim.clone(),
        });
        let hold = Hold::exclusive(HoldKind::Reserved { claim }, self.now.wall);
        self.pool.ledger.take(unit, hold);
    }
}
