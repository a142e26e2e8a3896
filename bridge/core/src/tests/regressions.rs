//! One test per bug that was found by reading or by a random history, named for what an admin would have seen.

use std::time::Duration;

use super::kit::*;
use crate::{
    Access, AllocateOutcome, EndCause, Former, HolderKind, Inventory, Limits, Listing, Patience,
    PrepareOutcome, Refusal, Report, Settings, Transition, UnitProcesses,
};

#[test]
fn a_lost_book_with_only_a_busy_unit_left_does_not_give_one_id_to_two_holds() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.granted("GPU-1", &NOTHING);
    let both = listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-1"])]);
    daemon.see_pods(&[live("pod-a", 1), live("pod-b", 1)]);
    daemon.list(&both);
    // pod-b is force-deleted and its process runs on.
    daemon.run("GPU-1", &[(7, Some("pod-b"))]);
    daemon.see_pods(&[live("pod-a", 1)]);
    let only_a = listing(&[("pod-a", &["GPU-0"])]);
    daemon.list(&only_a);
    daemon.list(&only_a);
    assert_eq!(daemon.holds("GPU-1"), "Foreign Lingering pod-b");
    assert_eq!(daemon.granted("GPU-0", &only_a), "GPU-1");
    assert!(daemon.reported(|r| matches!(r, Report::KubeletLostItsBook { .. })));
    assert!(daemon.reported(|r| matches!(r, Report::HandedOverBusy { .. })));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-1 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Granted GPU-0");
}

#[test]
fn a_kubelet_that_lists_one_id_under_two_pods_binds_each_unit_to_its_own_pod() {
    // A List while Allocate is under way makes the kubelet forget the id that it is just giving out, so that it
    // gives it a second time; both pods are listed with it from then on.
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1), in_flight("pod-b", 1)]);
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    assert_eq!(
        daemon.granted("GPU-0", &listing(&[("pod-a", &["GPU-0"])])),
        "GPU-1"
    );
    daemon.list(&listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-0"])]));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-1 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-0 pod-b");
    // When pod-a goes, its unit is free and pod-b's is not.
    daemon.see_pods(&[live("pod-b", 1)]);
    let only_b = listing(&[("pod-b", &["GPU-0"])]);
    for _ in 0..3 {
        daemon.list(&only_b);
    }
    assert_eq!(daemon.holds("GPU-0"), "free");
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-0 pod-b");
    // And the other way round no unit is taken for a pod that has its own already.
    daemon.see_pods(&[live("pod-b", 1), live("pod-c", 1)]);
    assert_eq!(daemon.granted("GPU-1", &only_b), "GPU-0");
}

#[test]
fn an_id_that_the_kubelet_forgets_at_once_is_not_given_to_two_pods() {
    // pod-a was admitted a moment ago; nobody has looked at pod-resources since, and nothing runs on the GPU yet.
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-1", &NOTHING);
    let just_listed = listing(&[("pod-a", &["GPU-1"]), ("pod-b", &[])]);
    assert_eq!(daemon.granted("GPU-1", &just_listed), "GPU-0");
    assert!(daemon.reported(|r| matches!(r, Report::KubeletLostItsBook { .. })));
    daemon.list(&listing(&[("pod-a", &["GPU-1"]), ("pod-b", &["GPU-1"])]));
    let holds = [daemon.holds("GPU-0"), daemon.holds("GPU-1")];
    assert!(
        holds.iter().any(|hold| hold.ends_with("pod-a")),
        "{holds:?}"
    );
    assert!(
        holds.iter().any(|hold| hold.ends_with("pod-b")),
        "{holds:?}"
    );
}

#[test]
fn a_call_that_finds_two_listed_ids_unbound_is_answered_the_same_twice() {
    let mut daemon = Daemon::with_gpus(3, all_legacy());
    daemon.granted("GPU-1", &NOTHING);
    daemon.granted("GPU-2", &NOTHING);
    let just_listed = listing(&[("pod-a", &["GPU-1", "GPU-2"]), ("pod-b", &[])]);
    assert_eq!(daemon.granted("GPU-1", &just_listed), "GPU-0");
    assert_eq!(daemon.granted("GPU-1", &just_listed), "GPU-0");
    daemon.list(&listing(&[
        ("pod-a", &["GPU-1", "GPU-2"]),
        ("pod-b", &["GPU-1"]),
    ]));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-1 pod-b");
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-0 pod-a");
    assert_eq!(daemon.holds("GPU-2"), "Bound GPU-2 pod-a");
}

#[test]
fn one_listing_without_a_pod_that_has_ended_does_not_free_its_unit() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1)]);
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    daemon.see_pods(&[]);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn the_pod_that_kept_running_does_not_get_the_unit_of_the_pod_that_shared_its_id() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1), in_flight("pod-b", 1)]);
    let only_a = listing(&[("pod-a", &["GPU-0"])]);
    daemon.list(&only_a);
    daemon.granted("GPU-0", &only_a);
    daemon.list(&listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-0"])]));
    daemon.see_pods(&[live("pod-a", 1)]);
    for _ in 0..3 {
        daemon.list(&only_a);
    }
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-1 pod-a");
    assert_eq!(daemon.holds("GPU-1"), "free");
}

#[test]
fn a_lingering_unit_becomes_free_although_another_pod_is_listed_with_the_id_that_stands_for_it() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1), in_flight("pod-b", 1)]);
    let only_a = listing(&[("pod-a", &["GPU-0"])]);
    daemon.list(&only_a);
    daemon.granted("GPU-0", &only_a);
    daemon.list(&listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-0"])]));
    daemon.run("GPU-1", &[(7, Some("pod-b"))]);
    daemon.see_pods(&[live("pod-a", 1)]);
    for _ in 0..2 {
        daemon.list(&only_a);
    }
    assert_eq!(daemon.holds("GPU-1"), "Foreign Lingering pod-b");
    daemon.run("GPU-1", &[]);
    daemon.list(&only_a);
    assert_eq!(daemon.holds("GPU-1"), "free");
}

#[test]
fn a_kubelet_without_its_checkpoint_gets_no_unit_of_a_pod_that_is_still_active() {
    // pod-a runs and has opened no GPU yet; the kubelet has lost its checkpoint and lists the pod without devices.
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1), in_flight("pod-b", 1)]);
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    let lost = listing(&[("pod-a", &[]), ("pod-b", &[])]);
    assert_eq!(
        daemon.allocate(&["GPU-0"], Patience::Waits, &lost),
        AllocateOutcome::Wait
    );
    let outcome = daemon.allocate(&["GPU-0"], Patience::LastCall, &lost);
    assert!(matches!(
        outcome,
        AllocateOutcome::Refused(Refusal::NoFreeUnit { .. })
    ));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
}

#[test]
fn a_kubelet_without_its_checkpoint_gets_no_unit_of_an_init_container_that_sleeps() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.pass(30);
    daemon.see_pods(&[live("init-pod", 1), in_flight("pod-b", 1)]);
    let lost = listing(&[("init-pod", &[]), ("pod-b", &[])]);
    daemon.list(&lost);
    let outcome = daemon.allocate(&["GPU-0"], Patience::LastCall, &lost);
    assert!(matches!(outcome, AllocateOutcome::Refused(_)));
    assert_eq!(daemon.holds("GPU-0"), "Granted GPU-0");
}

#[test]
fn two_ids_of_init_containers_in_one_call_give_neither_of_their_units() {
    let mut daemon = Daemon::with_gpus(4, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.granted("GPU-1", &NOTHING);
    daemon.see_pods(&[live("init-a", 1), live("init-b", 1), in_flight("pod-c", 2)]);
    let lost = listing(&[("init-a", &[]), ("init-b", &[]), ("pod-c", &[])]);
    let outcome = daemon.allocate(&["GPU-0", "GPU-1"], Patience::LastCall, &lost);
    let AllocateOutcome::Granted(grants) = outcome else {
        panic!("two units are free");
    };
    let mut units: Vec<_> = grants.iter().map(|g| g.unit.to_string()).collect();
    units.sort();
    assert_eq!(units, ["GPU-2", "GPU-3"]);
}

#[test]
fn a_kubelet_without_its_checkpoint_gets_nothing_of_an_init_container_while_the_api_is_away() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.pass(30);
    daemon.act(|t| t.observe_pods(None));
    let lost = listing(&[("init-pod", &[]), ("pod-b", &[])]);
    let outcome = daemon.allocate(&["GPU-0"], Patience::LastCall, &lost);
    assert!(matches!(outcome, AllocateOutcome::Refused(_)));
    assert_eq!(daemon.holds("GPU-0"), "Granted GPU-0");
}

#[test]
fn an_id_left_over_by_a_failed_admission_is_given_although_an_init_only_pod_runs() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING); // init-pod's, never listed
    daemon.granted("GPU-1", &NOTHING); // of a pod that failed after Allocate
    daemon.pass(30);
    daemon.see_pods(&[live("init-pod", 1), in_flight("pod-b", 1)]);
    daemon.list(&NOTHING);
    assert_eq!(daemon.granted("GPU-1", &NOTHING), "GPU-1");
    assert_eq!(daemon.holds("GPU-0"), "Granted GPU-0");
}

#[test]
fn the_old_hold_of_a_stateful_set_pod_ends_while_its_successor_of_the_same_name_is_listed() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("web-0", 1)]);
    daemon.list(&listing(&[("web-0", &["GPU-0"])]));
    let successor = crate::BoundPod {
        uid: pod_uid("web-0-second"),
        ..live("web-0", 1)
    };
    daemon.see_pods(std::slice::from_ref(&successor));
    daemon.granted("GPU-1", &NOTHING);
    for _ in 0..3 {
        daemon.list(&listing(&[("web-0", &["GPU-1"])]));
    }
    assert_eq!(daemon.holds("GPU-0"), "free");
    assert_eq!(daemon.holds("GPU-1"), "Bound GPU-1 web-0");
}

#[test]
fn an_empty_answer_of_a_restarted_kubelet_ends_nothing_while_a_pod_with_gpus_runs() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_pods(&[live("web-0", 1)]);
    daemon.granted("GPU-0", &NOTHING);
    // The listing is of the successor; the pod list is still the old one.
    daemon.list(&listing(&[("web-0", &["GPU-0"])]));
    let successor = crate::BoundPod {
        uid: pod_uid("web-0-second"),
        ..live("web-0", 1)
    };
    daemon.see_pods(&[successor]);
    for _ in 0..3 {
        daemon.list(&NOTHING);
    }
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 web-0");
    daemon.see_pods(&[]);
    for _ in 0..2 {
        daemon.list(&NOTHING);
    }
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_listing_that_was_overtaken_by_an_allocate_does_not_end_the_new_pods_hold() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_pods(&[live("pod-a", 1), live("pod-b", 1)]);
    daemon.granted("GPU-0", &NOTHING); // pod-b's
    // Asked before that Allocate, delivered after it: it still shows pod-a.
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    daemon.see_pods(&[live("pod-b", 1)]);
    for _ in 0..3 {
        daemon.list(&listing(&[("pod-b", &["GPU-0"])]));
        assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-b");
    }
}

#[test]
fn a_granted_unit_is_not_ended_on_a_listing_older_than_its_ten_seconds() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_pods(&[]);
    daemon.list(&NOTHING);
    daemon.granted("GPU-0", &NOTHING);
    // The kubelet does not answer any more; the pods' watch goes on.
    daemon.pass(30);
    daemon.see_pods(&[]);
    assert_eq!(daemon.holds("GPU-0"), "Granted GPU-0");
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_prepared_claim_without_a_cause_stays_while_the_kubelet_does_not_answer() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.list(&NOTHING);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Prepared(_)
    ));
    daemon.see_claims(&[]);
    daemon.pass(120);
    daemon.see_claims(&[]);
    assert_eq!(daemon.holds("GPU-0"), "Prepared claim-a");
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "Prepared claim-a");
    daemon.pass(60);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_claim_is_not_ended_a_minute_after_it_was_prepared_on_what_was_known_before() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[]);
    daemon.list(&NOTHING);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon.act(Transition::pass_time);
    // The watch of claims is behind and the kubelet is silent for a minute; then the claim's pod has just ended, and
    // the kubelet is about to give the claim back, or to start the next pod with what it was answered.
    daemon.pass(61);
    daemon.see_claims(&[]);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "Prepared claim-a");
    daemon.pass(59);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "Prepared claim-a");
    daemon.pass(1);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_prepared_claim_that_the_api_has_lost_stays_while_a_pod_is_listed_with_it() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[]);
    daemon.prepare("claim-a", &["gpu-0"]);
    let with_claim = Listing {
        pods: vec![listed_claim("pod-a", "claim-a", "gpu-0")],
    };
    for _ in 0..3 {
        daemon.list(&with_claim);
        daemon.pass(60);
    }
    assert_eq!(daemon.holds("GPU-0"), "Prepared claim-a");
    daemon.list(&NOTHING);
    daemon.pass(60);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_waiting_prepare_is_refused_at_once_also_when_the_counted_pod_is_already_listed() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.pass(5);
    let request = prepare_request("claim-a", &["gpu-0"], daemon.uptime);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-b"])]);
    daemon.granted("GPU-0", &NOTHING);
    daemon.see_pods(&[live("pod-a", 1)]);
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    let outcome = daemon.act(|t| t.prepare(&request));
    assert!(matches!(
        outcome,
        PrepareOutcome::Refused(Refusal::UnitHeld {
            holder: HolderKind::CountedPod,
            ..
        })
    ));
}

#[test]
fn a_claim_takes_nothing_from_a_bound_pod_before_the_kubelet_has_been_asked_for_its_list() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_pods(&[in_flight("pod-a", 1)]);
    assert!(matches!(
        daemon.prepare("claim-a", &["gpu-0"]),
        PrepareOutcome::Wait(Refusal::CountedPodsFirst { .. })
    ));
}

#[test]
fn a_unit_whose_last_process_has_gone_is_free_before_the_kubelet_has_been_asked_for_its_list() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[]);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon.run("GPU-0", &[(7, Some("pod-a"))]);
    daemon.act(|t| t.unprepare(&claim_ref("claim-a").uid));
    daemon.run("GPU-0", &[]);
    assert!(matches!(
        daemon.prepare("claim-b", &["gpu-0"]),
        PrepareOutcome::Prepared(_)
    ));
}

#[test]
fn a_gpu_that_was_lost_is_still_lost_after_nvml_was_away() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.act(|t| t.observe_inventory(inventory([0])));
    daemon.act(|t| t.observe_inventory(Inventory::Unavailable));
    daemon.act(|t| t.observe_inventory(inventory([0])));
    assert!(!daemon.reported(|r| matches!(r, Report::UnitLost { .. })));
    daemon.act(|t| t.observe_inventory(inventory([0, 1])));
    assert!(daemon.reported(|r| matches!(r, Report::UnitReturned { .. })));
}

#[test]
fn get_preferred_allocation_leaves_a_unit_alone_that_is_reserved_for_a_claim() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.see_claims(&[allocated("claim-a", &["gpu-1"], &["pod-b"])]);
    let offers = daemon.pool.offers();
    let available = ["GPU-0".to_owned(), "GPU-1".to_owned()];
    assert_eq!(offers.preferred(&available, &[], 1), ["GPU-0"]);
}

#[test]
fn get_preferred_allocation_takes_what_an_ended_pod_has_before_what_a_claim_was_allocated() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.see_pods(&[live("a", 1)]);
    daemon.granted("GPU-0", &NOTHING);
    daemon.list(&listing(&[("a", &["GPU-0"])]));
    daemon.see_claims(&[allocated("claim-a", &["gpu-1"], &["pod-b"])]);
    // The kubelet has given up pod a, or it would not ask whether GPU-0 should be given again.
    let offers = daemon.pool.offers();
    let available = ["GPU-0".to_owned(), "GPU-1".to_owned()];
    assert_eq!(offers.preferred(&available, &[], 1), ["GPU-0"]);
}

#[test]
fn an_id_that_its_pod_is_about_to_leave_is_waited_for_before_a_claim_loses_its_unit() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.see_pods(&[live("a", 1), in_flight("b", 1)]);
    daemon.granted("GPU-1", &NOTHING);
    daemon.list(&listing(&[("a", &["GPU-1"])]));
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-c"])]);
    // For the kubelet pod a has ended; the pod list does not say so yet.
    let given_up = listing(&[]);
    let outcome = daemon.allocate(&["GPU-1"], Patience::Waits, &given_up);
    assert_eq!(outcome, AllocateOutcome::Wait);
    daemon.see_pods(&[in_flight("b", 1)]);
    let outcome = daemon.allocate(&["GPU-1"], Patience::Waits, &given_up);
    assert!(
        matches!(outcome, AllocateOutcome::Granted(_)),
        "{outcome:?}"
    );
    assert_eq!(daemon.holds("GPU-0"), "Reserved claim-a");
}

#[test]
fn an_id_that_was_never_listed_is_unknown_although_it_names_a_unit() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    let outcome = daemon.allocate(&["GPU-0::1"], Patience::LastCall, &NOTHING);
    assert!(matches!(
        outcome,
        AllocateOutcome::Refused(Refusal::UnknownDeviceId { .. })
    ));
}

// ---- What was asked about in review, and holds ----

#[test]
fn one_container_gets_a_unit_for_each_id_and_no_unit_twice() {
    let mut daemon = Daemon::with_gpus(3, all_legacy());
    daemon.prepare("claim-a", &["gpu-0"]);
    let outcome = daemon.allocate(&["GPU-0", "GPU-2"], Patience::LastCall, &NOTHING);
    let AllocateOutcome::Granted(grants) = outcome else {
        panic!("two units are free");
    };
    let units: Vec<_> = grants.iter().map(|g| g.unit.to_string()).collect();
    assert_eq!(units, ["GPU-1", "GPU-2"]);
}

#[test]
fn a_container_is_given_all_its_ids_or_none() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.prepare("claim-a", &["gpu-0"]);
    let before = daemon.pool.ledger().clone();
    let outcome = daemon.allocate(&["GPU-0", "GPU-1"], Patience::LastCall, &NOTHING);
    assert!(matches!(outcome, AllocateOutcome::Refused(_)));
    assert_eq!(daemon.pool.ledger(), &before);
}

#[test]
fn a_new_limit_touches_no_hold_and_moves_only_free_units() {
    let mut daemon = Daemon::with_gpus(4, all_legacy());
    for unit in ["GPU-0", "GPU-1", "GPU-2"] {
        daemon.granted(unit, &NOTHING);
    }
    let before = daemon.pool.ledger().holds.clone();
    daemon.act(|t| {
        t.configure(Settings {
            limits: Limits {
                legacy: Some(1),
                dra: Some(3),
            },
            ..Settings::default()
        });
    });
    daemon.act(|t| t.observe_node(Some(1)));
    daemon.uptime += Duration::from_secs(1);
    daemon.act(Transition::pass_time);
    assert_eq!(daemon.pool.ledger().holds, before);
    let offers = daemon.pool.offers();
    assert!(offers.counted.iter().all(|offer| !offer.free));
    let claims = offers.claims.expect("the face is open");
    let untainted = claims.iter().filter(|offer| offer.taint.is_none()).count();
    assert_eq!(untainted, 1, "GPU-3 turned to the claims");
}

#[test]
fn an_api_that_cannot_be_asked_ends_nothing() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon.act(|t| t.observe_claims(None));
    daemon.act(|t| t.unprepare(&claim_ref("claim-a").uid));
    assert_eq!(daemon.holds("GPU-0"), "Reserved claim-a");
    daemon.pass(600);
    daemon.list(&NOTHING);
    daemon.act(|t| t.observe_claims(None));
    assert_eq!(daemon.holds("GPU-0"), "Reserved claim-a");
    daemon.see_claims(&[]);
    assert_eq!(daemon.holds("GPU-0"), "free");
}

#[test]
fn a_hold_that_ends_while_nvml_is_silent_leaves_its_unit_to_nobody() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[]);
    daemon.prepare("claim-a", &["gpu-0"]);
    daemon
        .processes
        .units
        .insert(unit("GPU-0"), UnitProcesses::Unknown);
    daemon.act(|t| t.unprepare(&claim_ref("claim-a").uid));
    assert!(daemon.reported(|r| matches!(
        r,
        Report::Ended {
            cause: EndCause::Unprepared,
            ..
        }
    )));
    assert!(daemon.reported(|r| matches!(
        r,
        Report::Lingering {
            former: Former::Claim(_),
            ..
        }
    )));
    assert!(matches!(
        daemon.prepare("claim-b", &["gpu-0"]),
        PrepareOutcome::Wait(Refusal::UnitBusy { .. })
    ));
}

#[test]
fn an_onlooker_of_a_device_never_keeps_its_owner_out() {
    let mut daemon = Daemon::with_gpus(1, Settings::default());
    daemon.see_claims(&[
        allocated("watch", &["gpu-0:admin"], &["monitor"]),
        allocated("claim-a", &["gpu-0"], &["pod-a"]),
    ]);
    assert!(matches!(
        daemon.prepare("watch", &["gpu-0:admin"]),
        PrepareOutcome::Prepared(_)
    ));
    daemon.run("GPU-0", &[(3, Some("monitor"))]);
    let PrepareOutcome::Prepared(preparation) = daemon.prepare("claim-a", &["gpu-0"]) else {
        panic!("the monitor owns nothing");
    };
    assert_eq!(preparation.devices[0].access, Access::Owner);
    daemon.pass(1);
    assert_eq!(daemon.uptime, Duration::from_secs(1));
}

#[test]
fn a_listing_from_before_the_answer_does_not_give_the_unit_to_the_pod_before() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_pods(&[live("pod-a", 1)]);
    daemon.granted("GPU-0", &listing(&[]));
    daemon.pass(1);
    daemon.list(&listing(&[("pod-a", &["GPU-0"])]));
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
    // pod-a has ended, and the kubelet gives its id to the init container of pod-b before it is listed again.
    daemon.pass(1);
    daemon.see_pods(&[in_flight("pod-b", 1)]);
    daemon.granted("GPU-0", &listing(&[]));
    daemon.act(Transition::pass_time);
    assert_eq!(daemon.holds("GPU-0"), "Granted GPU-0");
    for _ in 0..5 {
        daemon.pass(1);
        daemon.list(&listing(&[]));
    }
    assert_eq!(
        daemon.holds("GPU-0"),
        "Granted GPU-0",
        "pod-resources never lists an init container, and pod-b is there"
    );
}

#[test]
fn a_listing_that_was_under_way_does_not_give_the_unit_to_the_pod_that_has_ended() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.see_pods(&[live("pod-a", 1)]);
    daemon.granted("GPU-1", &listing(&[]));
    daemon.pass(1);
    daemon.list(&listing(&[("pod-a", &["GPU-1"])]));
    // pod-a has ended, and the kubelet gives its id to the init container of pod-b before the pod list says so.
    daemon.pass(1);
    assert_eq!(daemon.granted("GPU-1", &listing(&[])), "GPU-0");
    daemon.see_pods(&[live("pod-b", 1)]);
    // The kubelet had begun this answer before.
    daemon.list(&listing(&[("pod-a", &["GPU-1"])]));
    for _ in 0..3 {
        daemon.pass(1);
        daemon.list(&listing(&[]));
    }
    assert_eq!(
        daemon.holds("GPU-0"),
        "Granted GPU-1",
        "pod-b runs, and no list ever shows it"
    );
}
