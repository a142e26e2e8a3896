//! GPUs that the admin gives to one kind of pods or to nobody, and what counted pods keep.

use std::time::Duration;

use expect_test::expect;
use proptest::prelude::*;

use super::super::kit::{allocated, in_flight, listing, live};
use super::world::{Event, World, changes, event, invariant_sides, limits, serve_all};
use super::{CALM, check, end_pods, pass, resting, resting_with, sides};
use crate::{DeviceRule, Face, Faces, Health, Limits, Matcher, Mode, Settings, Weights};

const LEGACY: Faces = Faces {
    legacy: true,
    dra: false,
};
const DRA: Faces = Faces {
    legacy: false,
    dra: true,
};

/// A rule for each of the first GPUs.
fn rules(faces: &[Faces]) -> Settings {
    let rules = (0..).zip(faces).map(|(index, faces)| DeviceRule {
        matcher: Matcher::Index(index),
        faces: *faces,
    });
    Settings {
        devices: rules.collect(),
        ..Settings::default()
    }
}

fn keeping(min_legacy: u32) -> Settings {
    Settings {
        min_legacy,
        ..Settings::default()
    }
}

#[test]
fn what_is_given_to_one_face_is_on_its_side_alone_and_what_is_excluded_on_none() {
    let daemon = resting_with(5, rules(&[DRA, LEGACY, Faces::NONE]));
    check(&daemon, &expect!["DLDRR count 3"]);
    let offers = daemon.pool.offers();
    let open = |index: usize| offers.claims.as_ref().unwrap()[index].taint.is_none();
    assert_eq!([0, 1, 2, 3, 4].map(open), [true, false, false, true, true]);
    let counted: Vec<bool> = offers.counted.iter().map(|it| it.free).collect();
    assert_eq!(counted, [false, true, false, true, true]);
    assert_eq!(daemon.pool.wake_at(), None, "nothing is waited for");
}

#[test]
fn a_gpu_is_known_by_its_uuid_its_place_and_its_product_and_the_first_rule_counts() {
    let rule = |matcher, faces| DeviceRule { matcher, faces };
    let settings = Settings {
        devices: vec![
            rule(Matcher::Uuid("GPU-0".to_owned()), LEGACY),
            rule(Matcher::PciBusId("0000:01:00.0".to_owned()), DRA),
            rule(Matcher::Product("*h100*".to_owned()), Faces::NONE),
        ],
        ..Settings::default()
    };
    let daemon = resting_with(3, settings);
    check(&daemon, &expect!["LDD count 1"]);
    let offers = daemon.pool.offers();
    let open = offers
        .claims
        .unwrap()
        .into_iter()
        .filter(|it| it.taint.is_none());
    assert_eq!(open.count(), 1);
}

#[test]
fn a_rule_that_takes_a_gpu_from_counted_pods_lowers_the_count_before_its_id_is_withdrawn() {
    let mut daemon = resting(2);
    daemon.act(|t| t.configure(rules(&[Faces::NONE])));
    check(&daemon, &expect!["yR count 1"]);
    let healthy = |daemon: &super::super::kit::Daemon| {
        let counted = daemon.pool.offers().counted.into_iter();
        counted.filter(|it| it.health == Health::Healthy).count()
    };
    assert_eq!(healthy(&daemon), 2);
    // Bound on the count of before, and asks for the one that is taken away.
    daemon.see_pods(&[in_flight("a", 2)]);
    pass(&mut daemon, CALM);
    daemon.granted("GPU-0", &listing(&[]));
    daemon.granted("GPU-1", &listing(&[]));
    daemon.see_pods(&[live("a", 2)]);
    daemon.list(&listing(&[("a", &["GPU-0", "GPU-1"])]));
    pass(&mut daemon, CALM);
    // No pod that waits takes the place of the one that ends.
    check(&daemon, &expect!["BB count 1"]);
    end_pods(&mut daemon);
    pass(&mut daemon, Duration::from_secs(3));
    check(&daemon, &expect!["DR count 1"]);
    assert_eq!(healthy(&daemon), 1);
}

#[test]
fn a_claim_keeps_a_gpu_that_is_given_to_counted_pods_until_it_ends() {
    let mut daemon = resting(2);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.prepare("claim-a", &["gpu-0"]);
    pass(&mut daemon, CALM);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon.act(|t| t.configure(rules(&[LEGACY])));
    pass(&mut daemon, Duration::from_secs(3));
    check(&daemon, &expect!["PR count 1"]);
    daemon.act(|t| t.unprepare(&super::super::kit::claim_ref("claim-a").uid));
    daemon.see_claims(&[]);
    pass(&mut daemon, Duration::from_secs(3));
    check(&daemon, &expect!["LR count 2"]);
}

#[test]
fn a_mode_holds_for_what_is_given_to_a_face_too() {
    for (mode, expected) in [
        (Mode::Legacy, expect!["DLDLL count 3"]),
        (Mode::Dra, expect!["DDDDD count 0"]),
        (Mode::Drained, expect!["DDDDD count 0"]),
    ] {
        let mut daemon = resting_with(5, rules(&[DRA, LEGACY, Faces::NONE]));
        let settings = Settings {
            mode,
            ..rules(&[DRA, LEGACY, Faces::NONE])
        };
        daemon.act(|t| t.configure(settings));
        pass(&mut daemon, Duration::from_secs(2));
        check(&daemon, &expected);
        let claims = daemon.pool.offers().claims.unwrap_or_default();
        let open = claims.iter().filter(|it| it.taint.is_none()).count();
        assert_eq!(open, if mode == Mode::Dra { 3 } else { 0 }, "{mode:?}");
    }
}

#[test]
fn an_excluded_gpu_is_no_last_resort_of_a_counted_pod() {
    let mut daemon = resting_with(2, rules(&[Faces::NONE]));
    daemon.granted("GPU-1", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    let held = listing(&[("a", &["GPU-1"])]);
    daemon.list(&held);
    let outcome = daemon.allocate(&["GPU-1"], crate::Patience::LastCall, &held);
    assert!(
        matches!(outcome, crate::AllocateOutcome::Refused(_)),
        "{outcome:?}"
    );
}

#[test]
fn what_counted_pods_keep_is_never_on_the_claims_side() {
    let mut daemon = resting_with(4, keeping(1));
    check(&daemon, &expect!["RRRL count 4"]);
    let three = allocated("claim-a", &["gpu-0", "gpu-1", "gpu-2"], &["pod-a"]);
    daemon.see_claims(&[three]);
    pass(&mut daemon, Duration::from_secs(5));
    check(&daemon, &expect!["rrrL count 1"]);
}

#[test]
fn what_counted_pods_hold_counts_for_what_they_keep() {
    let mut daemon = resting_with(4, keeping(1));
    daemon.granted("GPU-3", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-3"])]));
    pass(&mut daemon, Duration::from_secs(5));
    check(&daemon, &expect!["RRRB count 4"]);
    // On its end the unit is kept again, whoever waits.
    end_pods(&mut daemon);
    pass(&mut daemon, Duration::from_secs(5));
    check(&daemon, &expect!["RRRL count 4"]);
}

#[test]
fn what_counted_pods_keep_comes_back_from_claims_when_it_is_asked_for() {
    let mut daemon = resting(3);
    let settings = Settings {
        mode: Mode::Dra,
        ..Settings::default()
    };
    daemon.act(|t| t.configure(settings));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DDD count 0"]);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon.act(|t| t.configure(keeping(3)));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["PLL count 2"]);
}

#[test]
fn without_the_right_to_lower_the_count_the_split_leaves_what_is_kept() {
    let mut daemon = super::super::kit::Daemon::with_gpus(
        4,
        Settings {
            weights: Weights { legacy: 0, dra: 1 },
            ..keeping(1)
        },
    );
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["DDDL count 1"]);
    let settings = rules(&[LEGACY, Faces::NONE]);
    daemon.act(|t| t.configure(settings));
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["LDDL count 2"]);
}

#[test]
fn without_the_right_to_lower_the_count_a_limit_and_a_rule_leave_what_pods_in_flight_were_promised()
{
    let mut world = World::new(4, Limits::default());
    world.play(&Event::Bind(2));
    world.play(&Event::LoseNode);
    let limited = Settings {
        mode: Mode::Legacy,
        limits: Limits {
            legacy: Some(0),
            dra: None,
        },
        ..rules(&[DRA, DRA])
    };
    for settings in [rules(&[Faces::BOTH, Faces::BOTH, DRA]), limited] {
        world.daemon.act(|t| t.configure(settings));
        world.tell();
        invariant_sides(&world);
    }
    serve_all(&mut world);
}

fn faces() -> impl Strategy<Value = Faces> {
    prop_oneof![
        2 => Just(Faces::BOTH),
        1 => Just(LEGACY),
        1 => Just(DRA),
        1 => Just(Faces::NONE),
    ]
}

fn confining() -> impl Strategy<Value = Settings> {
    let modes = vec![Mode::Both, Mode::Both, Mode::Legacy, Mode::Dra];
    (
        prop::sample::select(modes),
        limits(),
        0_u32..3,
        prop::collection::vec(faces(), 0..4),
    )
        .prop_map(|(mode, limits, min_legacy, faces)| Settings {
            mode,
            limits,
            min_legacy,
            ..rules(&faces)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_gpus_are_given_to_one_face_nobody_who_was_promised_one_fails(
        gpus in 1_u32..6,
        changes in changes(confining()),
        last in confining(),
    ) {
        let world = World::after(gpus, &changes, &last);
        let pool = &world.daemon.pool;
        for face in [Face::Legacy, Face::Dra] {
            let shown = pool.on_offer(face);
            for (unit, record) in pool.ledger().in_order() {
                let faces = last.faces_of(record);
                prop_assert!(
                    !shown.contains(&unit) || (faces.allows(face) && last.mode.opens(face)),
                    "{unit} is shown to {face:?}: {}", sides(&world.daemon)
                );
                let alone = faces != Faces::BOTH && faces.allows(face);
                let is_open = last.mode.opens(face) && last.limits.of(face).is_none();
                prop_assert!(
                    !alone || !is_open || shown.contains(&unit),
                    "{unit} is not shown to {face:?}: {}", sides(&world.daemon)
                );
            }
        }
    }

    #[test]
    fn the_count_never_falls_below_what_counted_pods_keep(
        gpus in 2_u32..6,
        least in 1_u32..3,
        weights in (0_u32..2, 1_u32..3),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let settings = Settings {
            weights: Weights { legacy: weights.0, dra: weights.1 },
            ..keeping(least)
        };
        let mut world = World::of(gpus, settings);
        for event in &events {
            world.play(event);
            invariant_sides(&world);
            let count = world.daemon.pool.offers().count;
            prop_assert!(count >= least, "the count is {count}: {}", sides(&world.daemon));
        }
        serve_all(&mut world);
        world.end_all();
        // Which units are kept is nobody's business.
        if world.daemon.pool.is_mobile() {
            let offers = world.daemon.pool.offers();
            let claims = offers.claims.unwrap_or_default().into_iter();
            let open = claims.filter(|it| it.taint.is_none()).count();
            prop_assert_eq!(offers.count, gpus, "{}", sides(&world.daemon));
            prop_assert_eq!(open, usize::try_from(gpus - least).unwrap(), "{}", sides(&world.daemon));
        }
    }
}
