//! Where free units are offered: rest, splits, moves and turns.

use std::time::Duration;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::kit::{Daemon, allocated, in_flight, listing, live, prepare_request};
use crate::{
    AllocatedClaim, BoundPod, HoldKind, Limits, Mode, Patience, PrepareOutcome, Settings, Side,
};

/// Longer than any settle, dwell or quiet time.
const CALM: Duration = Duration::from_secs(1);

/// A node whose status shows at once what the daemon wants it to.
fn obedient(count: u32) -> Daemon {
    let mut daemon = Daemon::with_gpus(count, Settings::default());
    daemon.act(|t| t.observe_claims(Some(crate::Claims::default())));
    daemon.see_pods(&[]);
    daemon.list(&listing(&[]));
    show_count(&mut daemon);
    daemon
}

fn show_count(daemon: &mut Daemon) {
    let count = daemon.pool.offers().count;
    daemon.act(|t| t.observe_node(Some(count)));
}

/// Lets time pass in small steps; the node follows the count at once.
fn pass(daemon: &mut Daemon, time: Duration) {
    const STEP: Duration = Duration::from_millis(50);
    let end = daemon.uptime + time;
    while daemon.uptime < end {
        daemon.uptime += STEP;
        daemon.act(crate::Transition::pass_time);
        show_count(daemon);
    }
}

fn resting(count: u32) -> Daemon {
    let mut daemon = obedient(count);
    pass(&mut daemon, CALM);
    daemon
}

/// One letter a unit: R(est), L(egacy), D(ra), l(owering), y(ielding), d(ark); held ones: G, B, r(eserved), P, F.
fn sides(daemon: &Daemon) -> String {
    let ledger = daemon.pool.ledger();
    let letters = ledger.in_order().into_iter().map(|(unit, record)| {
        match ledger.holds_on(unit).first().map(|hold| &hold.kind) {
            Some(HoldKind::Granted { .. }) => 'G',
            Some(HoldKind::Bound { .. }) => 'B',
            Some(HoldKind::Reserved { .. }) => 'r',
            Some(HoldKind::Prepared { .. }) => 'P',
            Some(HoldKind::Foreign { .. }) => 'F',
            None => match record.side {
                Side::Rest => 'R',
                Side::Legacy => 'L',
                Side::Dra => 'D',
                Side::Lowering => 'l',
                Side::Yielding => 'y',
                Side::Dark => 'd',
            },
        }
    });
    letters.collect()
}

fn check(daemon: &Daemon, expected: &Expect) {
    let offers = daemon.pool.offers();
    expected.assert_eq(&format!("{} count {}", sides(daemon), offers.count));
}

#[test]
fn what_is_idle_rests_on_both_sides_and_then_nothing_is_written() {
    let mut daemon = resting(8);
    check(&daemon, &expect!["RRRRRRRR count 8"]);
    let offers = daemon.pool.offers();
    assert!(offers.counted.iter().all(|offer| offer.free));
    assert!(
        offers
            .claims
            .iter()
            .flatten()
            .all(|offer| offer.taint.is_none())
    );
    assert_eq!(daemon.pool.wake_at(), None, "nothing is waited for");
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(60));
    assert_eq!(*daemon.pool.ledger(), ledger);
}

#[test]
fn the_first_counted_pod_ends_the_rest_and_the_odd_unit_is_counted() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 1)]);
    // One stays for the pod, from the tail; of the seven others four are counted.
    check(&daemon, &expect!["yyyLLLLL count 5"]);
    show_count(&mut daemon);
    daemon.granted("GPU-7", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-7"])]));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["RRRRRRRB count 8"]);
}

#[test]
fn a_large_counted_pod_gets_all_that_rests() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 8)]);
    check(&daemon, &expect!["LLLLLLLL count 8"]);
}

#[test]
fn a_claim_on_a_resting_unit_is_prepared_once_the_lowered_count_has_settled() {
    let mut daemon = resting(8);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["ryyyyLLL count 3"]);
    let request = prepare_request("claim-a", &["gpu-0"], daemon.uptime);
    let early = daemon.act(|t| t.prepare(&request));
    assert!(matches!(early, PrepareOutcome::Wait(_)), "{early:?}");
    show_count(&mut daemon);
    pass(&mut daemon, Duration::from_millis(350));
    let outcome = daemon.act(|t| t.prepare(&request));
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["PRRRRRRR count 7"]);
}

#[test]
fn a_prepare_that_comes_before_the_claim_is_noticed_starts_the_move_itself() {
    let mut daemon = resting(2);
    let request = prepare_request("claim-a", &["gpu-0"], daemon.uptime);
    let early = daemon.act(|t| t.prepare(&request));
    assert!(matches!(early, PrepareOutcome::Wait(_)), "{early:?}");
    assert_eq!(daemon.holds("GPU-0"), "Reserved claim-a");
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    pass(&mut daemon, Duration::from_millis(350));
    let outcome = daemon.act(|t| t.prepare(&request));
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
}

#[test]
fn a_count_that_the_kubelet_writes_back_stops_the_settling() {
    let mut daemon = resting(2);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    for _ in 0..20 {
        // 200 ms of the lowered count, then the kubelet's tick.
        daemon.act(|t| t.observe_node(Some(1)));
        daemon.uptime += Duration::from_millis(200);
        daemon.act(crate::Transition::pass_time);
        daemon.act(|t| t.observe_node(Some(2)));
    }
    assert_eq!(daemon.pool.ledger().in_order()[0].1.side, Side::Yielding);
    pass(&mut daemon, Duration::from_millis(350));
    assert_eq!(daemon.pool.ledger().in_order()[0].1.side, Side::Dra);
}

#[test]
fn a_counted_pod_bound_on_the_old_count_gets_its_unit_back() {
    let mut daemon = resting(2);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["ry count 0"]);
    // The scheduler had not seen the lowered count yet.
    daemon.see_pods(&[in_flight("b", 1)]);
    check(&daemon, &expect!["rL count 1"]);
    assert_eq!(daemon.granted("GPU-1", &listing(&[])), "GPU-1");
}

#[test]
fn counted_pods_in_flight_come_before_a_claim_that_is_not_prepared() {
    let mut daemon = resting(2);
    daemon.see_claims(&[allocated("claim-a", &["gpu-1"], &["pod-a"])]);
    daemon.see_pods(&[in_flight("b", 2)]);
    check(&daemon, &expect!["Lr count 2"]);
    assert_eq!(daemon.pool.ledger().in_order()[1].1.side, Side::Legacy);
}

#[test]
fn when_the_node_cannot_be_changed_everything_stands_still_on_the_fixed_split() {
    let mut daemon = resting(4);
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["DDLL count 2"]);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    let outcome = daemon.prepare("claim-a", &["gpu-0"]);
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
    show_count(&mut daemon);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["PRRR count 3"]);
}

#[test]
fn a_restart_leaves_what_rests_at_rest() {
    let before = resting(4);
    let mut daemon = Daemon::on_ledger(before.pool.ledger().clone(), Settings::default());
    check(&daemon, &expect!["RRRR count 4"]);
    daemon.act(|t| t.observe_node(Some(0)));
    check(&daemon, &expect!["RRRR count 4"]);
    // A right that was withdrawn meanwhile is no reason to wait for ever.
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["DDLL count 2"]);
}

#[test]
fn limits_that_add_up_to_the_node_are_never_moved() {
    let settings = Settings {
        mode: Mode::Both,
        limits: Limits {
            legacy: Some(3),
            dra: Some(1),
        },
        ..Settings::default()
    };
    let mut daemon = Daemon::with_gpus(4, settings);
    daemon.act(|t| t.observe_node(Some(3)));
    pass(&mut daemon, Duration::from_secs(5));
    check(&daemon, &expect!["DLLL count 3"]);
}

#[test]
fn what_has_become_free_stays_on_its_side_for_the_dwell_time() {
    let mut daemon = resting(1);
    daemon.see_pods(&[in_flight("a", 1)]);
    daemon.granted("GPU-0", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-0"])]));
    pass(&mut daemon, CALM);
    daemon.see_pods(&[]);
    daemon.list(&listing(&[]));
    daemon.list(&listing(&[]));
    check(&daemon, &expect!["L count 1"]);
    pass(&mut daemon, Duration::from_millis(450));
    check(&daemon, &expect!["L count 1"]);
    pass(&mut daemon, Duration::from_millis(100));
    check(&daemon, &expect!["R count 1"]);
}

#[test]
fn while_things_keep_arriving_each_side_gets_everything_in_its_turn() {
    let mut daemon = resting(4);
    let mut seen = std::collections::BTreeSet::new();
    for number in 0_u32..400 {
        // A pod that is bound and gone again, so that nothing rests and nothing is taken.
        let name = format!("pod-{number}");
        daemon.see_pods(&[live(&name, 1)]);
        pass(&mut daemon, Duration::from_millis(100));
        seen.insert(sides(&daemon));
    }
    for all in ["LLLL", "DDDD"] {
        assert!(seen.contains(all), "{all} never came: {seen:?}");
    }
    assert!(
        !seen.contains("RRRR"),
        "nothing rests while pods arrive: {seen:?}"
    );
}

/// What can happen around the pool.
#[derive(Debug, Clone)]
enum Event {
    Bind(u8),
    Serve,
    End(u8),
    Claim,
    Prepare,
    Drop(u8),
    Wait(u16),
    Revert,
    LoseNode,
}

fn event() -> impl Strategy<Value = Event> {
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
    ]
}

/// A world of schedulers that believe what is shown: they place pods by the count and claims by the taints.
struct World {
    daemon: Daemon,
    pods: Vec<(BoundPod, Vec<String>)>,
    claims: Vec<AllocatedClaim>,
    serial: u32,
    /// The count that the scheduler of counted pods has read last.
    read: u32,
}

impl World {
    fn tell(&mut self) {
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

    fn play(&mut self, event: &Event) {
        let offers = self.daemon.pool.offers();
        if !self.daemon.pool.is_mobile() {
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
        }
        self.tell();
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
fn invariant_sides(world: &World) {
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
    assert!(
        offers.count >= due,
        "the count {} is below {due}, held and in flight: {}",
        offers.count,
        sides(&world.daemon)
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_no_counted_pod_fails_and_everything_comes_to_rest(
        gpus in 1_u32..6,
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut world = World { daemon: resting(gpus), pods: Vec::new(), claims: Vec::new(), serial: 0, read: gpus };
        for event in &events {
            world.play(event);
            invariant_sides(&world);
        }
        while world.pods.iter().any(|(_, ids)| ids.is_empty()) {
            world.play(&Event::Serve);
        }
        while !world.pods.is_empty() {
            world.play(&Event::End(0));
        }
        while !world.claims.is_empty() {
            world.play(&Event::Drop(0));
        }
        for _ in 0..3 {
            pass(&mut world.daemon, CALM);
            world.tell();
        }
        prop_assert_eq!(sides(&world.daemon), "R".repeat(usize::try_from(gpus).unwrap()));
    }
}
