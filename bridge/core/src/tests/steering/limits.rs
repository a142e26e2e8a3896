//! One limit alone, or two that leave room: who may not show a unit does not keep it.

use std::time::Duration;

use expect_test::expect;
use proptest::prelude::*;

use super::super::kit::{allocated, in_flight, listing, live};
use super::world::{Event, World, event, limits, serve_all};
use super::{check, pass, resting_with, sides};
use crate::{Face, Limits, Settings, Side};

fn only_legacy(limit: u32) -> Settings {
    Settings {
        limits: Limits {
            legacy: Some(limit),
            dra: None,
        },
        ..Settings::default()
    }
}

fn only_dra(limit: u32) -> Settings {
    Settings {
        limits: Limits {
            legacy: None,
            dra: Some(limit),
        },
        ..Settings::default()
    }
}

#[test]
fn at_rest_a_limit_caps_what_is_shown_and_the_others_are_for_the_other_face() {
    let daemon = resting_with(8, only_legacy(3));
    check(&daemon, &expect!["RRRRRRRR count 3"]);
    let claims = daemon.pool.offers().claims.unwrap();
    assert_eq!(claims.iter().filter(|it| it.taint.is_none()).count(), 8);
}

#[test]
fn a_split_leaves_no_face_more_than_its_limit_lets_it_show() {
    let mut daemon = resting_with(8, only_legacy(2));
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["ryyyyyLL count 2"]);

    let mut daemon = resting_with(8, only_dra(2));
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["ryLLLLLL count 6"]);
    daemon.see_pods(&[in_flight("a", 1)]);
    check(&daemon, &expect!["ryLLLLLL count 6"]);
}

#[test]
fn in_the_turn_that_gathers_everything_a_limit_holds_too() {
    let mut daemon = resting_with(4, only_legacy(1));
    let mut seen = std::collections::BTreeSet::new();
    for number in 0_u32..100 {
        daemon.see_pods(&[live(&format!("pod-{number}"), 1)]);
        pass(&mut daemon, Duration::from_millis(100));
        seen.insert(sides(&daemon));
    }
    assert!(seen.contains("DDDL") && seen.contains("DDDD"), "{seen:?}");
    let lost = |sides: &&String| sides.matches('L').count() > 1;
    assert_eq!(seen.iter().find(lost), None, "of {seen:?}");
}

#[test]
fn a_unit_over_the_limit_does_not_wait_for_a_turn() {
    // Units that were given out from the other side come back to this one, more of them than the limit.
    let mut daemon = resting_with(4, only_legacy(1));
    let free = daemon.pool.ledger().clone();
    let mut ledger = free;
    for record in ledger.units.values_mut() {
        record.side = Side::Legacy;
    }
    daemon.pool = crate::Pool::restored(ledger, only_legacy(1));
    daemon.act(|t| t.observe_inventory(super::super::kit::inventory(0..4)));
    daemon.act(|t| t.observe_node(Some(1)));
    for number in 0_u32..14 {
        daemon.see_pods(&[live(&format!("pod-{number}"), 1)]);
        daemon.list(&listing(&[]));
        pass(&mut daemon, Duration::from_millis(100));
    }
    check(&daemon, &expect!["DDDL count 1"]);
}

/// Free units on the side of a face alone that this face may not show, where the other could.
fn stranded(world: &World) -> usize {
    let pool = &world.daemon.pool;
    let on = |side: Side| {
        let ledger = pool.ledger();
        let free = ledger.units.iter().filter(|(unit, record)| {
            record.side == side && ledger.holds_touching(unit).next().is_none()
        });
        free.count()
    };
    let over = |face: Face| on(Side::of(face)).saturating_sub(pool.room(face));
    let under = |face: Face| pool.room(face).saturating_sub(on(Side::of(face)));
    let of_counted = over(Face::Legacy).min(under(Face::Dra));
    of_counted + over(Face::Dra).min(under(Face::Legacy))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn no_unit_is_left_with_a_face_that_may_not_show_it_while_the_other_may(
        gpus in 1_u32..6,
        limits in limits(),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut world = World::new(gpus, limits);
        for event in &events {
            world.play(event);
        }
        serve_all(&mut world);
        world.play(&Event::Prepare);
        // So busy that nothing rests, for longer than a dwell time and two moves take, and shorter than a turn.
        for number in 0..14 {
            let mut bound = world.pods.iter().map(|(pod, _)| pod.clone()).collect::<Vec<_>>();
            bound.push(live(&format!("busy-{number}"), 1));
            world.daemon.see_pods(&bound);
            pass(&mut world.daemon, Duration::from_millis(100));
        }
        prop_assert_eq!(stranded(&world), 0, "{} with {:?}", sides(&world.daemon), limits);
    }
}
