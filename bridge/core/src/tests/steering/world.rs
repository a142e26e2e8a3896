//! A world of schedulers around the pool, for histories that nobody wrote down.

use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::super::kit::{Daemon, allocated, in_flight, listing, pod_uid};
use super::{CALM, pass, resting_with, sides};
use crate::{
    AllocatedClaim, BoundPod, Claimed, Demand, Face, Limits, Patience, Settings, Side, WaitingPod,
};

/// What can happen around the pool.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Bind(u8),
    Serve,
    End(u8),
    Claim,
    Prepare,
    Drop(u8),
    Wait(u16),
    Revert,
    LoseNode,
    /// Pods wait: whether each is counted, and how many units it asks for.
    Demand(Vec<(bool, u8)>),
    /// Who waits is not known.
    LoseDemand,
}

pub(super) fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1_u8..4).prop_map(Event::Bind),
        4 => Just(Event::Serve),
        3 => any::<u8>().prop_map(Event::End),
        3 => Just(Event::Claim),
        4 => Just(Event::Prepare),
        3 => any::<u8>().prop_map(Event::Drop),
        6 => (10_u16..900).prop_map(Event::Wait),
        1 => Just(Event::Revert),
        1 => Just(Event::LoseNode),
        3 => prop::collection::vec((any::<bool>(), 1_u8..6), 0..4).prop_map(Event::Demand),
        1 => Just(Event::LoseDemand),
    ]
}

/// What happens around the pool, and what the admin changes.
#[derive(Debug, Clone)]
pub(super) enum Change {
    World(Event),
    Configure(Settings),
}

/// Histories in which the admin chooses other settings now and then.
pub(super) fn changes(
    settings: impl Strategy<Value = Settings>,
) -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        6 => event().prop_map(Change::World),
        1 => settings.prop_map(Change::Configure),
    ];
    prop::collection::vec(change, 1..40)
}

/// A world of schedulers that believe what is shown: they place pods by the count and claims by the taints.
pub(super) struct World {
    pub(super) daemon: Daemon,
    pub(super) pods: Vec<(BoundPod, Vec<String>)>,
    claims: Vec<AllocatedClaim>,
    serial: u32,
    /// The count that the scheduler of counted pods has read last.
    read: u32,
}

impl World {
    pub(super) fn new(gpus: u32, limits: Limits) -> Self {
        Self::of(
            gpus,
            Settings {
                limits,
                ..Settings::default()
            },
        )
    }

    pub(super) fn of(gpus: u32, settings: Settings) -> Self {
        let daemon = resting_with(gpus, settings);
        let read = daemon.pool.offers().count;
        Self {
            daemon,
            pods: Vec::new(),
            claims: Vec::new(),
            serial: 0,
            read,
        }
    }

    /// One that all of this happened to, with these settings at last, and in which everything has ended. On the way
    /// nobody fails who was promised a unit.
    pub(super) fn after(gpus: u32, changes: &[Change], last: &Settings) -> Self {
        let mut world = Self::new(gpus, Limits::default());
        for change in changes.iter().chain([&Change::Configure(last.clone())]) {
            match change {
                Change::World(event) => world.play(event),
                Change::Configure(settings) => {
                    world.daemon.act(|t| t.configure(settings.clone()));
                    world.tell();
                }
            }
            invariant_sides(&world);
        }
        serve_all(&mut world);
        world.end_all();
        world
    }

    pub(super) fn tell(&mut self) {
        let pods: Vec<BoundPod> = self.pods.iter().map(|(pod, _)| pod.clone()).collect();
        self.daemon.see_pods(&pods);
        let listed: Vec<(String, Vec<String>)> = self
            .pods
            .iter()
            .filter(|(_, ids)| !ids.is_empty())
            .map(|(pod, ids)| (pod.pod.name.clone(), ids.clone()))
            .collect();
        let borrowed: Vec<(&str, Vec<&str>)> = listed
            .iter()
            .map(|(name, ids)| (name.as_str(), ids.iter().map(String::as_str).collect()))
            .collect();
        let shown: Vec<(&str, &[&str])> = borrowed
            .iter()
            .map(|(name, ids)| (*name, ids.as_slice()))
            .collect();
        self.daemon.list(&listing(&shown));
        let claims = self.claims.clone();
        self.daemon.see_claims(&claims);
    }

    pub(super) fn play(&mut self, event: &Event) {
        let offers = self.daemon.pool.offers();
        if !self.daemon.pool.can_move() {
            self.read = offers.count;
        }
        match event {
            Event::Bind(size) => {
                let used: u32 = self.pods.iter().map(|(pod, _)| pod.may_own).sum();
                if used + u32::from(*size) <= self.read {
                    self.serial += 1;
                    let pod = in_flight(&format!("pod-{}", self.serial), u32::from(*size));
                    self.pods.push((pod, Vec::new()));
                }
            }
            Event::Serve => self.serve_one(),
            Event::End(which) => {
                let served: Vec<usize> = (0..self.pods.len())
                    .filter(|at| !self.pods[*at].1.is_empty())
                    .collect();
                if !served.is_empty() {
                    self.pods.remove(served[usize::from(*which) % served.len()]);
                }
            }
            Event::Claim => {
                let named: Vec<String> = self
                    .claims
                    .iter()
                    .flat_map(|claim| claim.devices.iter().map(|d| d.device.to_string()))
                    .collect();
                let free = offers.claims.iter().flatten().find(|offer| {
                    offer.taint.is_none()
                        && !offer.held_by_claim
                        && !named.contains(&offer.device.to_string())
                });
                if let Some(offer) = free {
                    self.serial += 1;
                    let name = format!("claim-{}", self.serial);
                    self.claims
                        .push(allocated(&name, &[offer.device.as_str()], &["user"]));
                }
            }
            Event::Prepare => {
                for claim in self.claims.clone() {
                    let device = claim.devices[0].device.to_string();
                    self.daemon.prepare(&claim.claim.name, &[&device]);
                }
            }
            Event::Drop(which) => {
                if !self.claims.is_empty() {
                    let claim = self.claims.remove(usize::from(*which) % self.claims.len());
                    self.daemon.act(|t| t.unprepare(&claim.claim.uid));
                }
            }
            Event::Wait(ms) => {
                pass(&mut self.daemon, Duration::from_millis(u64::from(*ms)));
                self.read = self.daemon.pool.offers().count;
            }
            Event::Revert => {
                let healthy = offers
                    .counted
                    .iter()
                    .filter(|offer| offer.health == crate::Health::Healthy);
                let count = u32::try_from(healthy.count()).unwrap();
                self.read = count;
                self.daemon.act(|t| t.observe_node(Some(count)));
            }
            // Without the right to lower the count only the kubelet's own tick tells it, which this world takes for
            // immediate: a pod that is bound in between can fail, as with every device plugin.
            Event::LoseNode => {
                self.daemon.act(|t| t.observe_node(None));
            }
            Event::Demand(pods) => {
                let pods = pods.iter().map(|(counted, size)| {
                    self.serial += 1;
                    let size = u32::from(*size);
                    WaitingPod {
                        uid: pod_uid(&format!("waits-{}", self.serial)),
                        created: SystemTime::UNIX_EPOCH
                            + Duration::from_secs(u64::from(self.serial)),
                        counted: if *counted { size } else { 0 },
                        claimed: Claimed::Units(if *counted { 0 } else { size }),
                    }
                });
                let demand = Demand {
                    pods: pods.collect(),
                };
                self.daemon.act(|t| t.observe_demand(Some(demand)));
            }
            Event::LoseDemand => self.daemon.act(|t| t.observe_demand(None)),
        }
        self.tell();
    }

    /// Ends everything that runs, and lets time pass until nothing moves any more.
    pub(super) fn end_all(&mut self) {
        while !self.pods.is_empty() {
            self.play(&Event::End(0));
        }
        while !self.claims.is_empty() {
            self.play(&Event::Drop(0));
        }
        self.play(&Event::Demand(Vec::new()));
        // A race may have been lost, and then nothing rests for a while.
        self.daemon.uptime += APART;
        for _ in 0..3 {
            pass(&mut self.daemon, CALM);
            self.tell();
        }
    }

    /// The kubelet picks healthy ids that it has not given out, and asks for them.
    fn serve_one(&mut self) {
        let Some(at) = self.pods.iter().position(|(_, ids)| ids.is_empty()) else {
            return;
        };
        let given: Vec<String> = self.pods.iter().flat_map(|(_, ids)| ids.clone()).collect();
        let offers = self.daemon.pool.offers();
        let available: Vec<String> = offers
            .counted
            .iter()
            .filter(|offer| offer.health == crate::Health::Healthy)
            .map(|offer| offer.id.to_string())
            .filter(|id| !given.contains(id))
            .collect();
        let size = usize::try_from(self.pods[at].0.may_own).unwrap();
        assert!(
            available.len() >= size,
            "a pod that was bound on the count fails for want of healthy ids: {} has {available:?} for {size}",
            sides(&self.daemon)
        );
        let ids = offers.preferred(&available, &[], size);
        let asked: Vec<&str> = ids.iter().map(String::as_str).collect();
        let outcome = self
            .daemon
            .allocate(&asked, Patience::LastCall, &crate::Listing::default());
        assert!(
            matches!(outcome, crate::AllocateOutcome::Granted(_)),
            "a counted pod was refused: {outcome:?} on {}",
            sides(&self.daemon)
        );
        self.pods[at].1 = ids;
        self.pods[at].0.started = true;
    }
}

/// Never on both sides but at rest, and never a count below what is held and on its way.
pub(super) fn invariant_sides(world: &World) {
    let pool = &world.daemon.pool;
    let offers = pool.offers();
    let claims = offers.claims.clone().unwrap_or_default();
    let counted = offers.counted.iter().filter(|offer| offer.free);
    for offer in counted {
        let record = &pool.ledger().units[&offer.unit];
        let claimable = claims
            .iter()
            .any(|claim| claim.device == record.device_name() && claim.taint.is_none());
        assert!(
            !claimable || matches!(record.side, Side::Rest | Side::Yielding),
            "{} is on both sides: {}",
            offer.unit,
            sides(&world.daemon)
        );
    }
    let due: u32 = world.pods.iter().map(|(pod, _)| pod.may_own).sum();
    let settings = pool.settings();
    let in_flight = world.pods.iter().any(|(_, ids)| ids.is_empty());
    let is_capped = settings.limits.legacy.is_some()
        || !settings.mode.opens(Face::Legacy)
        || !settings.devices.is_empty();
    assert!(
        offers.count >= due || (is_capped && !in_flight),
        "the count {} is below {due}, held and in flight: {}",
        offers.count,
        sides(&world.daemon)
    );
}

/// Longer than nothing rests after any lost race.
const APART: Duration = Duration::from_secs(24 * 60 * 60);

/// No limits, one, or both.
pub(super) fn limits() -> impl Strategy<Value = Limits> {
    let limit = || prop_oneof![2 => Just(None), 1 => (0_u32..6).prop_map(Some)];
    (limit(), limit()).prop_map(|(legacy, dra)| Limits { legacy, dra })
}

/// Serves who is bound, so that nobody is in flight.
pub(super) fn serve_all(world: &mut World) {
    while world.pods.iter().any(|(_, ids)| ids.is_empty()) {
        world.play(&Event::Serve);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_no_counted_pod_fails_and_everything_comes_to_rest(
        gpus in 1_u32..6,
        limits in limits(),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut world = World::new(gpus, limits);
        for event in &events {
            world.play(event);
            invariant_sides(&world);
        }
        serve_all(&mut world);
        world.end_all();
        if world.daemon.pool.is_mobile() {
            prop_assert_eq!(sides(&world.daemon), "R".repeat(usize::try_from(gpus).unwrap()));
        }
    }
}
