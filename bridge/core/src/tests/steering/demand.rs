//! Pods that wait decide where free units are offered, where it is known which do.

use std::time::{Duration, SystemTime};

use expect_test::expect;
use proptest::prelude::*;

use super::super::kit::{Daemon, allocated, in_flight, listing, live, pod_uid};
use super::world::{Event, World, event, limits, serve_all};
use super::{CALM, check, pass, resting, sides};
use crate::{Claimed, Demand, Face, Limits, WaitingPod};

/// `c2` asks for two units by count, `d1` for one by claim, `da` for all of the node by claim.
fn waiting(name: &str, wants: &str, age: u64) -> WaitingPod {
    let (kind, size) = wants.split_at(1);
    let (counted, claimed) = match (kind, size) {
        ("c", size) => (size.parse().unwrap(), Claimed::Units(0)),
        ("d", "a") => (0, Claimed::All),
        ("d", size) => (0, Claimed::Units(size.parse().unwrap())),
        other => panic!("{other:?}"),
    };
    WaitingPod {
        uid: pod_uid(name),
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(1_000 - age),
        counted,
        claimed,
    }
}

fn see_waiting(daemon: &mut Daemon, pods: &[WaitingPod]) {
    let demand = Demand {
        pods: pods.to_vec(),
    };
    daemon.act(|t| t.observe_demand(Some(demand)));
}

/// For so long a counted pod is bound and served each 100 ms, one after the other, so that nothing rests.
fn busy(daemon: &mut Daemon, time: Duration) {
    let end = daemon.uptime + time;
    while daemon.uptime < end {
        let name = format!("busy-{}", daemon.uptime.as_millis());
        daemon.see_pods(&[live(&name, 1)]);
        pass(daemon, Duration::from_millis(100));
    }
}

/// Counted pods have these units for good; pod-resources lists them.
fn hold(daemon: &mut Daemon, ids: &[&str]) {
    daemon.see_pods(&[in_flight("holder", u32::try_from(ids.len()).unwrap())]);
    for id in ids {
        daemon.granted(id, &listing(&[]));
    }
    daemon.list(&listing(&[("holder", ids)]));
    daemon.see_pods(&[live("holder", u32::try_from(ids.len()).unwrap())]);
    pass(daemon, CALM);
}

#[test]
fn nothing_moves_while_nobody_waits() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[]);
    busy(&mut daemon, CALM);
    check(&daemon, &expect!["LLLL count 4"]);
    let ledger = daemon.pool.ledger().clone();
    busy(&mut daemon, Duration::from_secs(20));
    assert_eq!(*daemon.pool.ledger(), ledger, "no turn comes");
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["RRRR count 4"]);
}

#[test]
fn a_counted_pod_that_waits_gets_what_it_lacks_from_the_claims_side_at_once() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[]);
    busy(&mut daemon, CALM);
    see_waiting(&mut daemon, &[waiting("a", "c3", 0)]);
    busy(&mut daemon, Duration::from_millis(500));
    check(&daemon, &expect!["LLLL count 4"]);
}

#[test]
fn a_claim_pod_that_waits_gets_what_it_lacks_from_the_counted_side_at_once() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[]);
    busy(&mut daemon, CALM);
    see_waiting(&mut daemon, &[waiting("a", "da", 0)]);
    busy(&mut daemon, Duration::from_millis(500));
    check(&daemon, &expect!["DDDD count 0"]);
}

#[test]
fn pods_that_leave_something_to_spare_leave_everything_at_rest() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[waiting("a", "c2", 5), waiting("b", "d1", 1)]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["RRRR count 4"]);
}

#[test]
fn pods_that_ask_for_all_there_is_have_it_each_on_their_side() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[waiting("a", "c3", 5), waiting("b", "d1", 1)]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DLLL count 3"]);
}

#[test]
fn when_both_kinds_wait_for_one_unit_it_is_on_the_side_of_the_oldest_alone() {
    let mut daemon = resting(1);
    see_waiting(&mut daemon, &[waiting("a", "c1", 1), waiting("b", "d1", 5)]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["D count 0"]);
    // It is placed, and its claim is prepared.
    daemon.see_claims(&[allocated("claim-b", &["gpu-0"], &["b"])]);
    daemon.prepare("claim-b", &["gpu-0"]);
    see_waiting(&mut daemon, &[waiting("a", "c1", 1)]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["P count 0"]);
    // It ends: what it had goes over to the pod that still waits.
    daemon.see_claims(&[]);
    daemon.act(|t| t.unprepare(&super::super::kit::claim_ref("claim-b").uid));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["L count 1"]);
}

#[test]
fn pods_of_one_kind_do_not_contend_with_each_other() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[waiting("a", "c3", 5), waiting("b", "c2", 1)]);
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(60));
    assert_eq!(*daemon.pool.ledger(), ledger);
}

#[test]
fn a_pod_that_can_never_run_here_draws_nothing() {
    let mut daemon = resting(4);
    hold(&mut daemon, &["GPU-3"]);
    let never = [
        waiting("too-many", "c5", 9),
        waiting("too-many-claims", "d5", 9),
        waiting("nothing", "c0", 9),
    ];
    see_waiting(&mut daemon, &never);
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(120));
    assert_eq!(*daemon.pool.ledger(), ledger);
    // Not in a lost GPU either, nor beyond a limit.
    let seen = super::super::kit::inventory([0, 1, 3]);
    daemon.act(|t| t.observe_inventory(seen));
    pass(&mut daemon, CALM);
    see_waiting(
        &mut daemon,
        &[waiting("all", "da", 9), waiting("four", "c4", 9)],
    );
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(120));
    assert_eq!(*daemon.pool.ledger(), ledger);
}

#[test]
fn a_pod_larger_than_what_a_limit_allows_draws_nothing() {
    let settings = crate::Settings {
        limits: Limits {
            legacy: Some(2),
            dra: None,
        },
        ..crate::Settings::default()
    };
    let mut daemon = super::resting_with(4, settings);
    see_waiting(&mut daemon, &[waiting("a", "c3", 0)]);
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(60));
    assert_eq!(*daemon.pool.ledger(), ledger);
}

#[test]
fn a_pod_that_asks_for_all_that_is_free_has_it_for_itself_and_not_for_ever() {
    let mut daemon = resting(4);
    hold(&mut daemon, &["GPU-3"]);
    see_waiting(
        &mut daemon,
        &[waiting("large", "d3", 9), waiting("small", "c1", 1)],
    );
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DDDB count 1"]);
    pass(&mut daemon, Duration::from_secs(27));
    check(&daemon, &expect!["DDDB count 1"]);
    // Its time is up: the others have theirs, and nobody keeps anything from anybody.
    pass(&mut daemon, Duration::from_secs(4));
    check(&daemon, &expect!["RRRB count 4"]);
    pass(&mut daemon, Duration::from_secs(120));
    check(&daemon, &expect!["RRRB count 4"]);
}

#[test]
fn for_a_pod_that_cannot_start_yet_nothing_is_kept_from_one_that_can() {
    let mut daemon = resting(4);
    hold(&mut daemon, &["GPU-3"]);
    see_waiting(&mut daemon, &[waiting("large", "d4", 9)]);
    let ledger = daemon.pool.ledger().clone();
    pass(&mut daemon, Duration::from_secs(60));
    assert_eq!(*daemon.pool.ledger(), ledger);
    see_waiting(
        &mut daemon,
        &[waiting("large", "d4", 9), waiting("small", "c3", 1)],
    );
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["LLLB count 4"]);
}

#[test]
fn gathers_that_are_given_up_come_more_and_more_rarely() {
    let mut daemon = resting(2);
    let backlog: Vec<WaitingPod> = (0..40)
        .map(|n| waiting(&format!("large-{n}"), "d2", 100 - n))
        .collect();
    see_waiting(&mut daemon, &backlog);
    let mut kept = Duration::ZERO;
    const STEP: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3_600);
    let start = daemon.uptime;
    while daemon.uptime - start < HOUR {
        daemon.uptime += STEP;
        daemon.act(crate::Transition::pass_time);
        super::show_count(&mut daemon);
        if !sides(&daemon).starts_with('R') {
            kept += STEP;
        }
    }
    assert!(kept > Duration::from_secs(120), "{kept:?}");
    assert!(kept < HOUR / 10, "{kept:?} of an hour");
}

#[test]
fn a_pod_that_is_placed_makes_the_pauses_short_again() {
    let mut daemon = resting(1);
    let blocked = || waiting("blocked", "d1", 100);
    // Two that nobody places: 30 s each, and pauses of 30 and 60 s.
    see_waiting(&mut daemon, &[blocked(), waiting("too", "d1", 90)]);
    pass(&mut daemon, Duration::from_secs(92));
    check(&daemon, &expect!["R count 1"]);
    see_waiting(&mut daemon, &[blocked(), waiting("placed", "c1", 50)]);
    pass(&mut daemon, Duration::from_secs(61));
    check(&daemon, &expect!["L count 1"]);
    see_waiting(&mut daemon, &[blocked(), waiting("third", "d1", 40)]);
    pass(&mut daemon, Duration::from_secs(34));
    check(&daemon, &expect!["R count 1"]);
    see_waiting(&mut daemon, &[blocked(), waiting("fourth", "c1", 30)]);
    pass(&mut daemon, Duration::from_secs(30));
    check(&daemon, &expect!["L count 1"]);
}

#[test]
fn a_pod_that_is_on_its_way_here_is_not_counted_again() {
    let mut daemon = resting(2);
    see_waiting(&mut daemon, &[waiting("a", "c1", 0), waiting("b", "d1", 1)]);
    // The watch of pods that wait has not heard yet that both are placed.
    daemon.see_pods(&[in_flight("a", 1)]);
    daemon.see_claims(&[allocated("claim-b", &["gpu-0"], &["b"])]);
    daemon.granted("GPU-1", &listing(&[]));
    daemon.list(&listing(&[("a", &["GPU-1"])]));
    daemon.see_pods(&[live("a", 1)]);
    pass(&mut daemon, CALM);
    daemon.prepare("claim-b", &["gpu-0"]);
    check(&daemon, &expect!["PB count 1"]);
    daemon.see_claims(&[]);
    daemon.act(|t| t.unprepare(&super::super::kit::claim_ref("claim-b").uid));
    daemon.see_claims(&[allocated("claim-c", &["gpu-0"], &["b"])]);
    assert_eq!(daemon.holds("GPU-0"), "Reserved claim-c");
}

#[test]
fn when_nobody_may_watch_the_pods_turns_come_back() {
    let mut daemon = resting(4);
    see_waiting(&mut daemon, &[]);
    busy(&mut daemon, CALM);
    daemon.act(|t| t.observe_demand(None));
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        busy(&mut daemon, Duration::from_millis(100));
        seen.insert(sides(&daemon));
    }
    for all in ["LLLL", "DDDD"] {
        assert!(seen.contains(all), "{all} never came: {seen:?}");
    }
}

/// Some pods that wait.
fn demand() -> impl Strategy<Value = Vec<WaitingPod>> {
    let pod = (any::<bool>(), 1_u32..6, 0_u64..20);
    prop::collection::vec(pod, 0..5).prop_map(|pods| {
        let each = pods.into_iter().enumerate();
        let each = each.map(|(number, (counted, size, age))| {
            let kind = if counted { 'c' } else { 'd' };
            waiting(&format!("waits-{number}"), &format!("{kind}{size}"), age)
        });
        each.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_oldest_pod_that_fits_soon_finds_what_it_asks_for_on_its_side(
        gpus in 1_u32..6,
        limits in limits(),
        events in prop::collection::vec(event(), 0..30),
        pods in demand(),
        rests in any::<bool>(),
    ) {
        let mut world = World::new(gpus, limits);
        for event in &events {
            world.play(event);
        }
        serve_all(&mut world);
        world.play(&Event::Prepare);
        see_waiting(&mut world.daemon, &pods);
        for number in 0..15 {
            let mut bound = world.pods.iter().map(|(pod, _)| pod.clone()).collect::<Vec<_>>();
            if !rests {
                bound.push(live(&format!("busy-{number}"), 1));
            }
            world.daemon.see_pods(&bound);
            pass(&mut world.daemon, Duration::from_millis(100));
        }
        let pool = &world.daemon.pool;
        let units = usize::try_from(gpus).unwrap();
        let ledger = pool.ledger();
        let free = ledger.units.keys().filter(|unit| ledger.holds_touching(unit).next().is_none());
        let free = free.count();
        let size = |pod: &WaitingPod| match pod.claimed {
            Claimed::Units(0) => (Face::Legacy, usize::try_from(pod.counted).unwrap()),
            Claimed::Units(units) => (Face::Dra, usize::try_from(units).unwrap()),
            Claimed::All => (Face::Dra, units),
        };
        let most = |face: Face| limits.of(face).map_or(units, |it| usize::try_from(it).unwrap());
        let mut able: Vec<&WaitingPod> = pods
            .iter()
            .filter(|pod| size(pod).1 <= units.min(most(size(pod).0)))
            .collect();
        able.sort_by_key(|pod| (pod.created, pod.uid.clone()));
        let fits = |pod: &&&WaitingPod| size(pod).1 <= free.min(pool.room(size(pod).0));
        if let Some(oldest) = able.iter().find(fits) && pool.is_mobile() {
            let (face, due) = size(oldest);
            let offered = match face {
                Face::Legacy => pool.on_offer(face).iter()
                    .filter(|unit| ledger.holds_touching(unit).next().is_none()).count(),
                Face::Dra => pool.on_offer(face).len(),
            };
            prop_assert!(offered >= due, "{offered} of {due} {face:?} on {} for {pods:?}", sides(&world.daemon));
        }
    }
}
