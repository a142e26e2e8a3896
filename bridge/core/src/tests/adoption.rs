//! Rule 11: what runs on a node without a ledger is found out before anything is given.

use std::collections::{BTreeMap, BTreeSet};

use super::kit::*;
use crate::{HolderKind, Inventory, Pool, PrepareOutcome, Refusal, Report, Standing};

#[test]
fn a_daemon_that_dies_while_it_waits_for_adoption_leaves_no_ledger_that_says_all_is_free() {
    let mut daemon = without_ledger(2);
    daemon.act(|t| t.observe_pods(None));
    assert_eq!(daemon.pool.standing(), Standing::WaitingForAdoption);
    assert_eq!(daemon.disk, None);
}

#[test]
fn an_unreadable_ledger_is_never_written_over() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.pool = Pool::unreadable(all_legacy());
    daemon.disk = None;
    daemon.act(|t| t.observe_inventory(inventory(0..2)));
    assert_eq!(daemon.disk, None);
}

#[test]
fn an_adoption_that_finds_nothing_is_saved_all_the_same() {
    let mut daemon = without_ledger(2);
    daemon.act(|t| t.adopt(adoption(NOTHING, Vec::new())));
    assert_eq!(daemon.pool.standing(), Standing::Serving);
    assert_eq!(daemon.disk.as_ref(), Some(daemon.pool.ledger()));
}

#[test]
fn nothing_is_adopted_before_nvml_has_said_which_gpus_there_are() {
    let mut daemon = without_ledger(2);
    daemon.pool = Pool::waiting(all_legacy());
    let mut evidence = adoption(listing(&[("pod-a", &["GPU-0"])]), vec![live("pod-a", 1)]);
    evidence.checkpoint = vec![checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"]))];
    daemon.act(|t| t.adopt(evidence.clone()));
    assert_eq!(daemon.pool.standing(), Standing::WaitingForAdoption);
    daemon.act(|t| t.observe_inventory(inventory(0..2)));
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
}

#[test]
fn a_unit_that_may_be_a_lost_pods_is_not_called_busy_when_nothing_runs_on_it() {
    let mut daemon = without_ledger(2);
    daemon.act(|t| {
        t.adopt(adoption(
            listing(&[("pod-a", &["GPU-0"])]),
            vec![live("pod-a", 1)],
        ));
    });
    let outcome = daemon.prepare("claim-a", &["gpu-1"]);
    assert!(matches!(
        outcome,
        PrepareOutcome::Wait(Refusal::UnitHeld {
            holder: HolderKind::Unknown,
            ..
        })
    ));
}

#[test]
fn a_pod_whose_process_was_seen_before_adoption_is_adopted_and_no_stranger() {
    let mut daemon = without_ledger(2);
    daemon.run("GPU-0", &[(7, Some("pod-a"))]);
    daemon.run("GPU-1", &[(8, Some("pod-c"))]);
    for _ in 0..3 {
        daemon.act(crate::Transition::observe_processes);
    }
    let mut evidence = adoption(listing(&[("pod-a", &["GPU-0"])]), vec![live("pod-a", 1)]);
    evidence.checkpoint = vec![checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"]))];
    evidence.claims.claims = vec![allocated("claim-a", &["gpu-1"], &["pod-c"])];
    evidence.prepared = None;
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Prepared claim-a");
}

#[test]
fn two_pods_of_unknown_units_both_block_until_both_are_gone() {
    let mut daemon = without_ledger(3);
    let both = listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-1"])]);
    daemon.act(|t| {
        t.adopt(adoption(both, vec![live("pod-a", 1), live("pod-b", 1)]));
    });
    let only_b = listing(&[("pod-b", &["GPU-1"])]);
    daemon.see_pods(&[live("pod-b", 1)]);
    daemon.list(&only_b);
    for unit in ["GPU-0", "GPU-1", "GPU-2"] {
        assert!(daemon.holds(unit).starts_with("Foreign"), "{unit}");
    }
    daemon.see_pods(&[]);
    daemon.list(&NOTHING);
    for unit in ["GPU-0", "GPU-1", "GPU-2"] {
        assert_eq!(daemon.holds(unit), "free", "{unit}");
    }
}

#[test]
fn a_running_pod_of_which_neither_ledger_nor_checkpoint_knows_blocks_until_its_process_shows_its_unit()
 {
    let mut daemon = without_ledger(2);
    daemon.act(|t| t.adopt(adoption(listing(&[("pod-a", &[])]), vec![live("pod-a", 1)])));
    assert_eq!(daemon.holds("GPU-0"), "Foreign UnknownUnitOf pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Foreign UnknownUnitOf pod-a");
    daemon.run("GPU-1", &[(9, Some("pod-a"))]);
    daemon.act(crate::Transition::observe_processes);
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-1 pod-a");
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn the_process_of_a_pod_shows_which_unit_it_has_and_frees_the_others() {
    let mut daemon = without_ledger(3);
    daemon.act(|t| {
        t.adopt(adoption(
            listing(&[("pod-a", &["GPU-0"])]),
            vec![live("pod-a", 1)],
        ));
    });
    assert_eq!(daemon.holds("GPU-2"), "Foreign UnknownUnitOf pod-a");
    daemon.run("GPU-2", &[(9, Some("pod-a"))]);
    daemon.act(crate::Transition::observe_processes);
    assert_eq!(daemon.holds("GPU-2"), "Bound GPU-0 pod-a");
    assert_eq!(daemon.holds("GPU-0"), "free");
    assert_eq!(daemon.holds("GPU-1"), "free");
}

#[test]
fn init_and_app_container_of_one_pod_are_adopted_as_one_holder() {
    let mut daemon = without_ledger(1);
    let mut evidence = adoption(listing(&[("pod-a", &["GPU-0"])]), vec![live("pod-a", 1)]);
    evidence.checkpoint = vec![
        checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"])),
        checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"])),
    ];
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    assert!(!daemon.reported(|r| matches!(r, Report::UnknownHolder { .. })));
}

#[test]
fn a_unit_that_a_container_was_given_is_held_although_its_id_stands_for_another() {
    // The init container got GPU-0 for the id, the app container GPU-1 for the same id.
    let mut daemon = without_ledger(3);
    let mut evidence = adoption(listing(&[("pod-a", &["GPU-0"])]), vec![live("pod-a", 1)]);
    evidence.checkpoint = vec![
        checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"])),
        checkpointed("pod-a", &["GPU-0"], Some(&["GPU-1"])),
    ];
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-1 pod-a");
    assert_eq!(daemon.holds("GPU-2"), "free");
}

#[test]
fn pods_of_another_device_plugin_are_adopted_by_their_units_and_every_id_stays_listed() {
    let mut daemon = without_ledger(3);
    let mut evidence = adoption(
        listing(&[("by-index", &["1"]), ("shared", &["GPU-2::0"])]),
        vec![live("by-index", 1), live("shared", 1)],
    );
    evidence.checkpoint = vec![
        checkpointed("by-index", &["1"], Some(&["GPU-1"])),
        checkpointed("shared", &["GPU-2::0"], Some(&["GPU-2"])),
    ];
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-1 by-index");
    assert_eq!(daemon.holds("GPU-2"), "Bound GPU-2 shared");
    assert_eq!(daemon.pool.offers().counted.len(), 3);
}

#[test]
fn a_claim_that_lost_one_unit_to_a_counted_pod_keeps_its_others_when_it_is_adopted() {
    let mut daemon = without_ledger(2);
    let mut evidence = adoption(listing(&[("pod-a", &["GPU-0"])]), vec![live("pod-a", 1)]);
    evidence.checkpoint = vec![checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"]))];
    evidence.claims.claims = vec![allocated("claim-a", &["gpu-0", "gpu-1"], &["pod-c"])];
    evidence.prepared = None;
    daemon.run("GPU-1", &[(7, Some("pod-c"))]);
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Prepared claim-a");
}

#[test]
fn a_claim_that_was_refused_is_not_adopted_over_the_process_of_the_pod_that_has_the_unit() {
    // The kubelet has the claim in its state from the refused call; the pod was force-deleted and is in no list.
    let mut daemon = without_ledger(1);
    let mut evidence = adoption(NOTHING, Vec::new());
    evidence.claims.claims = vec![allocated("claim-a", &["gpu-0"], &["pod-c"])];
    evidence.prepared = Some(BTreeSet::from([claim_ref("claim-a").uid]));
    daemon.run("GPU-0", &[(7, Some("pod-a"))]);
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Foreign UnknownProcess");
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Wait(Refusal::UnitBusy { .. })
    ));
}

#[test]
fn a_claim_that_no_pod_is_listed_with_gives_way_to_a_pod_of_unknown_units() {
    let mut daemon = without_ledger(1);
    let mut evidence = adoption(listing(&[("pod-a", &[])]), vec![live("pod-a", 1)]);
    evidence.claims.claims = vec![allocated("claim-a", &["gpu-0"], &["pod-c"])];
    evidence.prepared = None;
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-0"), "Foreign UnknownUnitOf pod-a");
}

fn replaced() -> Inventory {
    Inventory::Seen(vec![gpu("GPU-0", 0), gpu("GPU-5", 1)])
}

/// The second GPU of a node died and was replaced: the new one has the same minor number and another name.
fn with_a_replaced_gpu() -> Daemon {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.act(|t| t.observe_inventory(inventory(0..1)));
    daemon.run("GPU-5", &[]);
    daemon.act(|t| t.observe_inventory(replaced()));
    daemon
}

#[test]
fn a_claim_on_a_replaced_gpu_is_adopted_there_although_the_names_are_given_anew() {
    let mut daemon = with_a_replaced_gpu();
    let name = daemon.pool.ledger().units[&unit("GPU-5")].device_name();
    assert_eq!(name.as_str(), "gpu-2");
    daemon.pool = Pool::waiting(all_legacy());
    daemon.act(|t| t.observe_inventory(replaced()));
    // Nothing but the claim's CDI file knows that this is gpu-2.
    daemon.act(|t| t.observe_names(&BTreeMap::from([(name, unit("GPU-5"))])));
    let mut evidence = adoption(NOTHING, Vec::new());
    evidence.claims.claims = vec![allocated("claim-a", &["gpu-2"], &["pod-a"])];
    evidence.prepared = None;
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-5"), "Prepared claim-a");
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_name_that_a_claim_has_is_taken_from_whoever_got_it_meanwhile() {
    let mut daemon = without_ledger(3);
    let names = BTreeMap::from([
        (device("gpu-0"), unit("GPU-1")),
        (device("gpu-7"), unit("GPU-2")),
        (device("gpu-8"), unit("GPU-2")),
        (device("gpu-01"), unit("GPU-0")),
        (device("mig-1"), unit("GPU-0")),
        (device("gpu-9"), unit("GPU-9")),
    ]);
    daemon.act(|t| t.observe_names(&names));
    let names = |daemon: &Daemon| {
        let order = daemon.pool.ledger().in_order().into_iter();
        order
            .map(|(unit, record)| format!("{}={unit}", record.device_name()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        names(&daemon),
        ["gpu-0=GPU-1", "gpu-1=GPU-0", "gpu-7=GPU-2"]
    );
    daemon.act(|t| t.adopt(adoption(NOTHING, Vec::new())));
    let swap = BTreeMap::from([(device("gpu-0"), unit("GPU-0"))]);
    daemon.act(|t| t.observe_names(&swap));
    assert_eq!(
        names(&daemon),
        ["gpu-0=GPU-1", "gpu-1=GPU-0", "gpu-7=GPU-2"],
        "a name in use is bound for good"
    );
}
