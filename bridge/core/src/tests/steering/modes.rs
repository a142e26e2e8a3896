//! Modes and limits that change while pods come and go.

use std::collections::BTreeSet;
use std::time::Duration;

use expect_test::expect;
use proptest::prelude::*;

use super::super::kit::{allocated, in_flight, listing, live, unit};
use super::world::{Event, World, changes, limits, serve_all};
use super::{CALM, check, pass, resting, sides};
use crate::{Face, Health, Limits, Mode, Settings};

fn mode(mode: Mode) -> Settings {
    Settings {
        mode,
        ..Settings::default()
    }
}

#[test]
fn closing_the_counted_face_lowers_the_count_before_any_id_is_withdrawn() {
    let mut daemon = resting(4);
    daemon.act(|t| t.configure(mode(Mode::Dra)));
    check(&daemon, &expect!["yyyy count 0"]);
    let offers = daemon.pool.offers();
    assert!(
        offers.counted.iter().all(|it| it.health == Health::Healthy),
        "a pod that was bound on the count of before finds its id"
    );
    pass(&mut daemon, Duration::from_secs(1));
    check(&daemon, &expect!["DDDD count 0"]);
    let offers = daemon.pool.offers();
    assert!(
        offers
            .counted
            .iter()
            .all(|it| it.health == Health::Unhealthy)
    );
}

#[test]
fn a_pod_that_was_bound_before_the_counted_face_closed_is_served() {
    let mut daemon = resting(4);
    daemon.see_pods(&[in_flight("a", 2)]);
    daemon.act(|t| t.configure(mode(Mode::Drained)));
    pass(&mut daemon, Duration::from_secs(5));
    check(&daemon, &expect!["DDLL count 2"]);
    daemon.granted("GPU-3", &listing(&[]));
    daemon.granted("GPU-2", &listing(&[]));
    daemon.see_pods(&[live("a", 2)]);
    daemon.list(&listing(&[("a", &["GPU-3", "GPU-2"])]));
    pass(&mut daemon, Duration::from_secs(1));
    check(&daemon, &expect!["DDBB count 0"]);
}

#[test]
fn closing_the_claims_face_waits_until_no_claim_can_be_on_its_way() {
    let mut daemon = resting(4);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.prepare("claim-a", &["gpu-0"]);
    pass(&mut daemon, Duration::from_secs(1));
    daemon.act(|t| t.configure(mode(Mode::Legacy)));
    let closed = daemon.pool.offers().claims.unwrap();
    let open = closed.iter().filter(|it| it.taint.is_none());
    assert_eq!(open.count(), 1, "the device of the claim alone is open");
    pass(&mut daemon, Duration::from_secs(1));
    check(&daemon, &expect!["rLLL count 3"]);
}

#[test]
fn a_unit_stays_with_claims_for_as_long_as_the_slice_in_the_api_shows_it() {
    let mut daemon = resting(2);
    daemon.act(|t| t.configure(mode(Mode::Dra)));
    pass(&mut daemon, Duration::from_secs(1));
    daemon.act(|t| t.observe_slice(["GPU-0", "GPU-1"].map(unit).into()));
    daemon.act(|t| t.configure(mode(Mode::Legacy)));
    pass(&mut daemon, Duration::from_secs(60));
    check(&daemon, &expect!["dd count 0"]);
    daemon.act(|t| t.observe_slice(BTreeSet::new()));
    check(&daemon, &expect!["dd count 0"]);
    pass(&mut daemon, Duration::from_secs(1));
    check(&daemon, &expect!["LL count 2"]);
}

#[test]
fn counted_pods_are_given_what_stays_before_what_is_about_to_leave() {
    let daemon = resting(4);
    let mut offers = daemon.pool.offers();
    let available: Vec<String> = offers.counted.iter().map(|it| it.id.to_string()).collect();
    assert_eq!(offers.preferred(&available, &[], 1), ["GPU-3"]);
    offers.counted[3].leaving = true;
    assert_eq!(offers.preferred(&available, &[], 1), ["GPU-2"]);
    assert_eq!(offers.preferred(&available, &[], 4)[3], "GPU-3");

    let mut daemon = daemon;
    daemon.act(|t| t.configure(mode(Mode::Dra)));
    let counted = daemon.pool.offers().counted;
    assert!(counted.iter().all(|it| it.leaving), "{counted:?}");
}

#[test]
fn who_changes_a_mode_back_half_way_loses_nothing() {
    let mut daemon = resting(4);
    daemon.act(|t| t.configure(mode(Mode::Dra)));
    daemon.act(|t| t.configure(mode(Mode::Both)));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["RRRR count 4"]);
    daemon.act(|t| t.configure(mode(Mode::Legacy)));
    daemon.act(|t| t.configure(mode(Mode::Dra)));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DDDD count 0"]);
}

#[test]
fn a_lower_limit_lets_those_in_who_were_promised_a_unit_before() {
    let mut daemon = resting(4);
    let limited = Settings {
        limits: Limits {
            legacy: Some(1),
            dra: None,
        },
        ..Settings::default()
    };
    daemon.act(|t| t.configure(limited));
    check(&daemon, &expect!["yyyR count 1"]);
    let healthy = |daemon: &super::super::kit::Daemon| {
        let offers = daemon.pool.offers();
        let healthy = offers.counted.into_iter();
        healthy.filter(|it| it.health == Health::Healthy).count()
    };
    assert_eq!(healthy(&daemon), 4);
    // One that was bound on the count of before.
    daemon.see_pods(&[in_flight("a", 2)]);
    pass(&mut daemon, Duration::from_secs(1));
    assert!(healthy(&daemon) >= 2, "{}", sides(&daemon));
    daemon.granted("GPU-3", &listing(&[]));
    daemon.granted("GPU-2", &listing(&[]));
    daemon.see_pods(&[live("a", 2)]);
    daemon.list(&listing(&[("a", &["GPU-3", "GPU-2"])]));
    pass(&mut daemon, CALM);
    assert_eq!(
        healthy(&daemon),
        2,
        "those that are held: {}",
        sides(&daemon)
    );
}

#[test]
fn a_lower_limit_lets_those_in_who_were_promised_a_unit_that_a_claim_was_allocated_meanwhile() {
    let mut world = World::new(2, Limits::default());
    for event in [
        Event::Claim,
        Event::Claim,
        Event::Drop(0),
        Event::Bind(1),
        Event::Bind(1),
    ] {
        world.play(&event);
    }
    let limited = Settings {
        limits: Limits {
            legacy: Some(1),
            dra: None,
        },
        ..Settings::default()
    };
    world.daemon.act(|t| t.configure(limited));
    world.tell();
    serve_all(&mut world);
    assert_eq!(sides(&world.daemon), "BB");
}

fn settings() -> impl Strategy<Value = Settings> {
    (prop::sample::select(&Mode::ALL[..]), limits()).prop_map(|(mode, limits)| Settings {
        mode,
        limits,
        ..Settings::default()
    })
}

/// Ids and devices that each face shows of free units.
fn shown(world: &World) -> [usize; 2] {
    let pool = &world.daemon.pool;
    [Face::Legacy, Face::Dra].map(|face| pool.on_offer(face).len())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_mode_and_limits_change_to_nobody_who_was_promised_a_unit_fails(
        gpus in 1_u32..6,
        changes in changes(settings()),
        last in settings(),
    ) {
        let world = World::after(gpus, &changes, &last);
        let [counted, claimable] = shown(&world);
        let all = usize::try_from(gpus).unwrap();
        let sides = sides(&world.daemon);
        if !last.mode.opens(Face::Legacy) {
            prop_assert_eq!(counted, 0, "{}", sides);
        }
        if !last.mode.opens(Face::Dra) {
            prop_assert_eq!(claimable, 0, "{}", sides);
        }
        let unlimited = last.limits == Limits::default();
        if unlimited && last.mode == Mode::Legacy {
            prop_assert_eq!(counted, all, "{}", sides);
        }
        if unlimited && last.mode == Mode::Dra {
            prop_assert_eq!(claimable, all, "{}", sides);
        }
    }
}
