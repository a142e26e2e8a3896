//! MIG instances and their parent: no two overlapping units are ever held, whoever asks.
//!
//! The inventory knows whole GPUs only, so the ledgers here are made by hand.

use std::num::NonZeroU32;

use super::kit::*;
use crate::{
    Adoption, AllocateOutcome, Claims, Health, Hold, HoldKind, Ledger, Listing, Mode, Patience,
    PodSource, Pods, PrepareOutcome, Refusal, Report, Settings, Side, UnitKind, UnitRecord,
};

const NOTHING: Listing = Listing { pods: Vec::new() };

/// `GPU-0` with its instances `MIG-1` and `MIG-2`, and `GPU-3` beside them, all on one side.
fn mig_node(side: Side) -> Ledger {
    let mut ledger = Ledger::default();
    let units = [
        ("GPU-0", UnitKind::Gpu),
        (
            "MIG-1",
            UnitKind::Mig {
                parent: unit("GPU-0"),
            },
        ),
        (
            "MIG-2",
            UnitKind::Mig {
                parent: unit("GPU-0"),
            },
        ),
        ("GPU-3", UnitKind::Gpu),
    ];
    for (number, (name, kind)) in (0..).zip(units) {
        ledger.units.insert(
            unit(name),
            UnitRecord {
                number,
                kind,
                capacity: NonZeroU32::MIN,
                side,
                gpu: gpu(name, number).into(),
            },
        );
    }
    ledger
}

#[test]
fn instances_overlap_with_their_gpu_alone_and_no_longer_than_they_are_there() {
    let mut units = mig_node(Side::Legacy).units;
    let overlapping = |units: &crate::Units, name: &str| -> Vec<String> {
        let found = units.overlapping(&unit(name));
        found.map(ToString::to_string).collect()
    };
    assert_eq!(overlapping(&units, "GPU-0"), ["MIG-1", "MIG-2"]);
    assert_eq!(overlapping(&units, "MIG-1"), ["GPU-0"]);
    assert!(overlapping(&units, "GPU-3").is_empty());

    // An instance that comes again under its UUID can be another GPU's.
    let mut moved = units[&unit("MIG-1")].clone();
    moved.kind = UnitKind::Mig {
        parent: unit("GPU-3"),
    };
    units.insert(unit("MIG-1"), moved);
    assert_eq!(overlapping(&units, "GPU-0"), ["MIG-2"]);
    assert_eq!(overlapping(&units, "GPU-3"), ["MIG-1"]);

    for gone in ["GPU-0", "MIG-1"] {
        units.remove(&unit(gone));
    }
    assert!(overlapping(&units, "MIG-2").is_empty());
    assert!(overlapping(&units, "GPU-3").is_empty());
}

fn on_side(side: Side) -> Daemon {
    let mode = match side {
        Side::Legacy | Side::Rest | Side::Lowering | Side::Yielding => Mode::Legacy,
        Side::Dra | Side::Dark => Mode::Dra,
    };
    let settings = Settings {
        mode,
        ..Settings::default()
    };
    Daemon::on_ledger(mig_node(side), settings)
}

#[test]
fn an_instance_is_refused_while_a_claim_has_its_parent() {
    let mut daemon = on_side(Side::Dra);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Prepared(_)
    ));
    assert!(matches!(
        daemon.prepare("claim-b", &["gpu-1"]),
        PrepareOutcome::Wait(Refusal::UnitHeld { .. })
    ));
}

#[test]
fn a_parent_is_refused_while_a_claim_has_one_of_its_instances() {
    let mut daemon = on_side(Side::Dra);
    daemon.prepare("claim-a", &["gpu-1"]);
    assert!(matches!(
        daemon.prepare("claim-b", &["gpu-0"]),
        PrepareOutcome::Wait(Refusal::UnitHeld { .. })
    ));
    assert!(matches!(
        daemon.prepare("claim-b", &["gpu-2"]),
        PrepareOutcome::Prepared(_)
    ));
}

#[test]
fn a_claim_that_names_an_instance_and_its_parent_is_refused() {
    let mut daemon = on_side(Side::Dra);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0", "gpu-1"]),
        PrepareOutcome::Refused(Refusal::UnitHeld { .. })
    ));
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_claim_that_moves_from_an_instance_to_its_parent_waits_until_it_has_left_the_instance() {
    let mut daemon = on_side(Side::Dra);
    daemon.see_claims(&[allocated("claim-a", &["gpu-1"], &["pod-a"])]);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Wait(Refusal::UnitHeld { .. })
    ));
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Prepared(_)
    ));
}

#[test]
fn a_counted_pod_takes_a_parent_from_the_claim_that_is_only_allocated_to_an_instance() {
    let mut daemon = on_side(Side::Legacy);
    daemon.see_claims(&[
        allocated("claim-a", &["gpu-1"], &["pod-a"]),
        allocated("claim-b", &["gpu-3"], &["pod-b"]),
    ]);
    assert_eq!(daemon.holds("MIG-1"), "Reserved claim-a");
    // MIG-2 is free and does not touch MIG-1; it is the first choice, then what is only reserved.
    assert_eq!(daemon.granted("GPU-0", &NOTHING), "MIG-2");
    let outcome = daemon.allocate(&["GPU-3", "MIG-1"], Patience::LastCall, &NOTHING);
    assert!(matches!(outcome, AllocateOutcome::Granted(_)));
    assert_eq!(daemon.holds("MIG-1"), "Granted MIG-1");
}

#[test]
fn a_counted_pod_that_is_given_a_parent_leaves_no_hold_on_its_instances() {
    let mut ledger = mig_node(Side::Legacy);
    for name in ["MIG-1", "MIG-2"] {
        let kind = HoldKind::Reserved {
            claim: claim_ref(&format!("claim-{name}")),
        };
        let hold = Hold::exclusive(kind, std::time::SystemTime::UNIX_EPOCH);
        ledger.holds.insert(unit(name), vec![hold]);
    }
    let kind = HoldKind::Bound {
        id: id("GPU-3"),
        pod: pod_ref("pod-a"),
    };
    let hold = Hold::exclusive(kind, std::time::SystemTime::UNIX_EPOCH);
    ledger.holds.insert(unit("GPU-3"), vec![hold]);
    let settings = Settings {
        mode: Mode::Legacy,
        ..Settings::default()
    };
    let mut daemon = Daemon::on_ledger(ledger, settings);
    assert_eq!(daemon.granted("GPU-0", &NOTHING), "GPU-0");
    assert_eq!(daemon.holds("MIG-1"), "free");
    assert_eq!(daemon.holds("MIG-2"), "free");
}

#[test]
fn a_listed_pod_on_a_parent_ends_the_reservation_of_an_instance() {
    let mut daemon = on_side(Side::Legacy);
    daemon.see_claims(&[allocated("claim-a", &["gpu-1"], &["pod-a"])]);
    daemon.list(&listing(&[("pod-b", &["GPU-0"])]));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-b");
    assert_eq!(daemon.holds("MIG-1"), "free");
}

#[test]
fn a_process_seen_on_an_instance_and_on_its_parent_makes_one_of_them_foreign() {
    let mut daemon = on_side(Side::Legacy);
    daemon.run("GPU-0", &[(5, None)]);
    daemon.run("MIG-1", &[(5, None)]);
    for _ in 0..3 {
        daemon.act(crate::Transition::observe_processes);
    }
    let foreign = ["GPU-0", "MIG-1", "MIG-2"]
        .iter()
        .filter(|name| daemon.holds(name).starts_with("Foreign"))
        .count();
    assert_eq!(foreign, 1);
}

#[test]
fn an_instance_is_given_to_nobody_while_a_process_runs_on_its_parent() {
    let mut counted = on_side(Side::Legacy);
    counted.granted("GPU-3", &NOTHING);
    counted.run("GPU-0", &[(5, None)]);
    for patience in [Patience::Waits, Patience::LastCall] {
        let outcome = counted.allocate(&["MIG-1"], patience, &NOTHING);
        assert!(
            !matches!(outcome, AllocateOutcome::Granted(_)),
            "{outcome:?}"
        );
    }
    let mut claims = on_side(Side::Dra);
    claims.run("GPU-0", &[(5, None)]);
    assert!(matches!(
        claims.prepare("claim-a", &["gpu-1"]),
        PrepareOutcome::Wait(Refusal::UnitBusy { .. })
    ));
    claims.run("GPU-0", &[]);
    assert!(matches!(
        claims.prepare("claim-a", &["gpu-1"]),
        PrepareOutcome::Prepared(_)
    ));
}

#[test]
fn an_instance_that_goes_over_a_process_on_its_parent_is_reported_with_that_process() {
    let mut daemon = on_side(Side::Legacy);
    daemon.granted("GPU-3", &NOTHING);
    daemon.granted("GPU-0", &NOTHING);
    let pods = [live("pod-a", 1), live("pod-b", 1)];
    daemon.see_pods(&pods);
    daemon.list(&listing(&[("pod-a", &["GPU-3"]), ("pod-b", &["GPU-0"])]));
    // pod-b is force-deleted and its process runs on.
    daemon.run("GPU-0", &[(7, Some("pod-b"))]);
    daemon.see_pods(&pods[..1]);
    let only_a = listing(&[("pod-a", &["GPU-3"])]);
    daemon.list(&only_a);
    daemon.list(&only_a);
    assert_eq!(daemon.holds("GPU-0"), "Foreign Lingering pod-b");
    assert_eq!(daemon.granted("MIG-1", &only_a), "MIG-1");
    assert!(
        daemon.reported(|r| matches!(r, Report::HandedOverBusy { pids, .. } if pids == &[7])),
        "nobody learns what runs on the parent"
    );
}

#[test]
fn a_node_with_instances_is_adopted_without_overlapping_holds() {
    let mut daemon = on_side(Side::Legacy);
    daemon.pool = crate::Pool::waiting(Settings::default());
    let gpus = mig_node(Side::Legacy)
        .in_order()
        .into_iter()
        .map(|(_, record)| crate::Gpu::clone(&record.gpu))
        .collect();
    daemon.act(|t| t.observe_inventory(crate::Inventory::Seen(gpus)));
    for (name, number) in [("GPU-0", 0), ("MIG-1", 1), ("MIG-2", 2), ("GPU-3", 3)] {
        assert_eq!(daemon.pool.ledger().units[&unit(name)].number, number);
    }
    daemon.act(|t| {
        t.adopt(Adoption {
            listing: listing(&[("pod-a", &["GPU-0"])]),
            pods: Pods {
                source: PodSource::Api,
                pods: vec![live("pod-a", 1)],
            },
            checkpoint: Vec::new(),
            claims: Claims::default(),
            prepared: None,
            unprepared: std::collections::BTreeSet::new(),
        });
    });
    assert!(daemon.holds("GPU-0").starts_with("Foreign"));
}

#[test]
fn an_instance_is_offered_on_no_other_side_than_its_parent() {
    let mut ledger = mig_node(Side::Legacy);
    ledger
        .units
        .get_mut(&unit("MIG-1"))
        .expect("the node has it")
        .side = Side::Dra;
    let daemon = Daemon::on_ledger(ledger, Settings::default());
    let offers = daemon.pool.offers();
    let claims = offers.claims.expect("the face is open");
    let to_claims = |name: &str| {
        claims
            .iter()
            .any(|offer| offer.gpu.uuid == unit(name) && offer.taint.is_none())
    };
    let to_pods = |name: &str| {
        offers
            .counted
            .iter()
            .any(|offer| offer.unit == unit(name) && offer.health == Health::Healthy)
    };
    for instance in ["MIG-1", "MIG-2"] {
        assert!(!(to_pods("GPU-0") && to_claims(instance)), "{instance}");
        assert!(!(to_claims("GPU-0") && to_pods(instance)), "{instance}");
    }
}
