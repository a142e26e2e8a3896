//! What an admin's command can end, and what it can't.

use super::kit::*;
use crate::{EndCause, Insistence, NotReleased, Report, Transition};

fn release(daemon: &mut Daemon, text: &str, insistence: Insistence) -> Result<usize, NotReleased> {
    daemon.act(|t| t.release(&unit(text), insistence))
}

/// A node whose ledger was lost: pod-a has GPU-0 for sure, and pod-b, which is live, one of the others.
fn with_an_unknown_pod() -> Daemon {
    let mut daemon = without_ledger(3);
    let listed = listing(&[("pod-a", &["GPU-0"]), ("pod-b", &["GPU-2"])]);
    let mut evidence = adoption(listed, vec![live("pod-a", 1), live("pod-b", 1)]);
    evidence.checkpoint = vec![
        checkpointed("pod-a", &["GPU-0"], Some(&["GPU-0"])),
        checkpointed("pod-b", &["GPU-2"], None),
    ];
    daemon.act(|t| t.adopt(evidence));
    assert_eq!(daemon.holds("GPU-1"), "Foreign UnknownUnitOf pod-b");
    daemon
}

#[test]
fn a_unit_that_an_admin_knows_to_be_free_is_given_back_and_the_cause_is_told() {
    let mut daemon = with_an_unknown_pod();
    assert_eq!(release(&mut daemon, "GPU-1", Insistence::None), Ok(1));
    assert_eq!(daemon.holds("GPU-1"), "free");
    let cause = EndCause::Released;
    assert!(daemon.reported(|it| *it
        == Report::Ended {
            unit: unit("GPU-1"),
            cause
        }));
    // The others are as they were.
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
}

#[test]
fn the_unit_whose_id_the_kubelet_lists_goes_to_the_pod_that_is_listed_with_it() {
    let mut daemon = with_an_unknown_pod();
    assert_eq!(release(&mut daemon, "GPU-2", Insistence::None), Ok(1));
    assert_eq!(daemon.holds("GPU-2"), "Bound GPU-2 pod-b");
}

#[test]
fn a_holder_that_is_there_keeps_its_unit_whoever_insists() {
    let mut daemon = with_an_unknown_pod();
    for insistence in [Insistence::None, Insistence::Forced] {
        assert_eq!(
            release(&mut daemon, "GPU-0", insistence),
            Err(NotReleased::HolderThere {
                unit: unit("GPU-0")
            })
        );
    }
    assert_eq!(daemon.holds("GPU-0"), "Bound GPU-0 pod-a");
}

#[test]
fn while_a_process_runs_the_hold_stays_and_when_it_is_forced_the_unit_still_goes_to_nobody() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.run("GPU-0", &[(1234, None)]);
    for _ in 0..2 {
        daemon.act(Transition::observe_processes);
    }
    assert_eq!(daemon.holds("GPU-0"), "Foreign UnknownProcess");
    assert_eq!(
        release(&mut daemon, "GPU-0", Insistence::None),
        Err(NotReleased::Busy {
            unit: unit("GPU-0"),
            pids: vec![1234]
        })
    );
    assert_eq!(release(&mut daemon, "GPU-0", Insistence::Forced), Ok(1));
    assert_eq!(daemon.holds("GPU-0"), "free");
    let outcome = daemon.prepare("claim-a", &["gpu-0"]);
    assert!(
        !matches!(outcome, crate::PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
}

#[test]
fn what_is_no_unit_or_held_by_nobody_is_told() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    assert_eq!(
        release(&mut daemon, "GPU-7", Insistence::None),
        Err(NotReleased::UnknownUnit {
            unit: unit("GPU-7")
        })
    );
    assert_eq!(
        release(&mut daemon, "GPU-0", Insistence::None),
        Err(NotReleased::Free {
            unit: unit("GPU-0")
        })
    );
    let mut waits = without_ledger(1);
    assert_eq!(
        release(&mut waits, "GPU-0", Insistence::Forced),
        Err(NotReleased::NotServing)
    );
}

#[test]
fn a_claim_that_is_allocated_or_may_be_keeps_its_unit() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.list(&listing(&[]));
    daemon.see_pods(&[]);
    assert_eq!(
        release(&mut daemon, "GPU-0", Insistence::Forced),
        Err(NotReleased::HolderThere {
            unit: unit("GPU-0")
        })
    );
}
