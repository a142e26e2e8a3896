//! Whose pods are evicted after a lost race, from when to when. The plain cases are scripts in `tests/scenarios`.

use std::time::Duration;

use super::kit::*;
use super::scenarios::taints;
use crate::lost_race::{EVICTION_LIMIT, EVICTION_PAUSE, LINGER_LIMIT};
use crate::{
    AllocateOutcome, AllocatedClaim, Limits, Mode, NotEvicted, Patience, PrepareOutcome, Report,
    Settings, TaintEffect, Toleration, Transition,
};

/// Everything is on the counted side.
fn counted_only() -> Settings {
    Settings {
        limits: Limits {
            legacy: Some(4),
            dra: Some(0),
        },
        ..Settings::default()
    }
}

/// A node on which a counted pod of its own has each of these GPUs.
fn with_counted(count: u32, held: &[&str]) -> Daemon {
    let mut daemon = Daemon::with_gpus(count, counted_only());
    let pods: Vec<String> = held.iter().map(|unit| format!("pod-of-{unit}")).collect();
    for unit in held {
        daemon.granted(unit, &NOTHING);
    }
    let ids: Vec<[&str; 1]> = held.iter().map(|unit| [*unit]).collect();
    let listed: Vec<(&str, &[&str])> = pods
        .iter()
        .zip(&ids)
        .map(|(pod, ids)| (pod.as_str(), ids.as_slice()))
        .collect();
    let live: Vec<_> = pods.iter().map(|pod| live(pod, 1)).collect();
    daemon.see_pods(&live);
    daemon.list(&listing(&listed));
    daemon
}

fn lose(daemon: &mut Daemon, claim: &str, devices: &[&str]) {
    let outcome = daemon.prepare_finally(claim, devices);
    assert!(
        matches!(outcome, PrepareOutcome::Refused(_)),
        "{claim} got what it wanted: {outcome:?}"
    );
}

fn look(daemon: &mut Daemon) {
    daemon.act(Transition::pass_time);
}

fn not_evicted(daemon: &Daemon) -> Vec<NotEvicted> {
    let mut told = Vec::new();
    for report in &daemon.reports {
        if let Report::NotEvicted { why, .. } = report {
            told.push(why.clone());
        }
    }
    told
}

fn is_over(daemon: &Daemon) -> bool {
    daemon.reported(|report| matches!(report, Report::EvictionOver { .. }))
}

fn tolerates(claim: &mut AllocatedClaim, toleration: &Toleration) {
    for device in &mut claim.devices {
        device.tolerations = vec![toleration.clone()];
    }
}

#[test]
fn nobody_is_evicted_while_prepare_still_waits() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.pass(1);
    let outcome = daemon.prepare("claim", &["gpu-0"]);
    assert!(matches!(outcome, PrepareOutcome::Wait(_)), "{outcome:?}");
    daemon.pass(300);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted");
}

#[test]
fn a_claim_whose_gpu_is_taken_while_it_waits_is_evicted_at_once() {
    let mut daemon = Daemon::with_gpus(1, counted_only());
    daemon.list(&NOTHING);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.see_pods(&[in_flight("counted", 1)]);
    let request = prepare_request("claim", &["gpu-0"], daemon.uptime);
    let first = daemon.act(|t| t.prepare(&request));
    assert!(matches!(first, PrepareOutcome::Wait(_)), "{first:?}");
    daemon.granted("GPU-0", &NOTHING);
    let second = daemon.act(|t| t.prepare(&request));
    assert!(matches!(second, PrepareOutcome::Refused(_)), "{second:?}");
    assert_eq!(taints(&daemon), "Counted:NoExecute");
}

#[test]
fn a_claim_that_was_refused_before_a_counted_pod_took_its_gpu_is_evicted_then() {
    let mut daemon = Daemon::with_gpus(1, counted_only());
    daemon.list(&NOTHING);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.see_pods(&[in_flight("counted", 1)]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(
        taints(&daemon),
        "on",
        "the GPU is only wanted by a counted pod, not held by one"
    );
    daemon.granted("GPU-0", &NOTHING);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
}

#[test]
fn of_a_claim_with_several_devices_one_that_was_lost_evicts() {
    let mut daemon = with_counted(4, &["GPU-1", "GPU-3"]);
    let devices = ["gpu-0", "gpu-1", "gpu-3"];
    daemon.see_claims(&[allocated("claim", &devices, &["pod"])]);
    lose(&mut daemon, "claim", &devices);
    assert_eq!(
        taints(&daemon),
        "on Counted:NoExecute Counted Counted",
        "one device is enough, and no other claim is to be hit"
    );
    daemon.see_claims(&[]);
    assert_eq!(taints(&daemon), "Counted Counted Counted Counted");
}

#[test]
fn a_device_that_must_not_evict_leaves_it_to_another_one_of_the_claim() {
    let mut daemon = with_counted(2, &["GPU-0", "GPU-1"]);
    let devices = ["gpu-0", "gpu-1"];
    daemon.see_claims(&[
        allocated("claim", &devices, &["pod"]),
        allocated("monitor", &["gpu-0:admin"], &["visitor"]),
    ]);
    lose(&mut daemon, "claim", &devices);
    assert_eq!(taints(&daemon), "Counted Counted:NoExecute");
    assert_eq!(not_evicted(&daemon), []);
}

#[test]
fn a_device_evicts_until_the_last_of_its_losers_is_gone() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    let first = || allocated("first", &["gpu-0"], &["pod-a"]);
    let second = || allocated("second", &["gpu-0"], &["pod-b"]);
    daemon.see_claims(&[first(), second()]);
    lose(&mut daemon, "first", &["gpu-0"]);
    daemon.pass(40);
    lose(&mut daemon, "second", &["gpu-0"]);
    daemon.see_claims(&[second()]);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
    daemon.pass(30);
    look(&mut daemon);
    assert_eq!(
        taints(&daemon),
        "Counted:NoExecute",
        "each loser has its own minute"
    );
    daemon.pass(30);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(not_evicted(&daemon), [NotEvicted::NoEffect]);
}

#[test]
fn a_claim_that_went_and_came_back_is_another_race() {
    let mut daemon = with_counted(2, &["GPU-0", "GPU-1"]);
    daemon.see_claims(&[allocated("standing", &["gpu-0"], &["pod-a"])]);
    lose(&mut daemon, "standing", &["gpu-0"]);
    daemon.see_claims(&[]);
    // The claim stays an object of its own; its next pod is allocated another GPU.
    daemon.see_claims(&[allocated("standing", &["gpu-1"], &["pod-b"])]);
    assert_eq!(taints(&daemon), "Counted Counted");
    lose(&mut daemon, "standing", &["gpu-1"]);
    assert_eq!(taints(&daemon), "Counted Counted:NoExecute");
}

#[test]
fn a_scheduler_that_passes_over_taints_makes_no_loop() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    let mut raised = 0;
    for round in 0..30 {
        let claim = format!("claim-{round}");
        daemon.see_claims(&[allocated(&claim, &["gpu-0"], &["pod"])]);
        daemon.pass(10);
        lose(&mut daemon, &claim, &["gpu-0"]);
        raised += u32::from(taints(&daemon) == "Counted:NoExecute");
    }
    // 300 s, and each eviction is followed by a pause.
    let most = Duration::from_secs(300).as_secs() / EVICTION_PAUSE.as_secs();
    assert!(raised > 1, "it goes on after the pause");
    assert!(u64::from(raised) <= most, "{raised} times in 300 s");
}

#[test]
fn a_pause_ends_by_itself_and_with_the_holder() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("first", &["gpu-0"], &["pod-a"])]);
    lose(&mut daemon, "first", &["gpu-0"]);
    daemon.see_claims(&[allocated("second", &["gpu-0"], &["pod-b"])]);
    lose(&mut daemon, "second", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(
        daemon.pool.wake_at(),
        Some(daemon.uptime + EVICTION_PAUSE),
        "nobody has to look for it"
    );
    let mut later = daemon.clone();
    later.uptime += EVICTION_PAUSE;
    look(&mut later);
    assert_eq!(taints(&later), "Counted:NoExecute");

    // The counted pod ends, and the next one takes the GPU while the claim still waits for it.
    daemon.see_pods(&[in_flight("next", 1)]);
    daemon.list(&NOTHING);
    daemon.list(&NOTHING);
    assert_eq!(daemon.holds("GPU-0"), "Reserved second");
    daemon.granted("GPU-0", &NOTHING);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
}

#[test]
fn what_stands_in_the_way_is_told_in_a_pause_too() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("first", &["gpu-0"], &["pod-a"])]);
    lose(&mut daemon, "first", &["gpu-0"]);
    daemon.see_claims(&[allocated("second", &["gpu-0:tolerates"], &["pod-b"])]);
    lose(&mut daemon, "second", &["gpu-0"]);
    assert_eq!(not_evicted(&daemon), [NotEvicted::Tolerates]);
}

#[test]
fn the_effect_goes_when_the_counted_pod_does_and_the_claim_gets_its_gpu() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
    daemon.see_pods(&[]);
    daemon.list(&NOTHING);
    daemon.list(&NOTHING);
    assert!(is_over(&daemon));
    assert_eq!(taints(&daemon), "on");
    let mut other = daemon.clone();
    let outcome = daemon.prepare("claim", &["gpu-0"]);
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
    // Had the next counted pod been faster: the claim had its turn.
    other.granted("GPU-0", &NOTHING);
    look(&mut other);
    assert_eq!(taints(&other), "Counted");
}

#[test]
fn a_gpu_that_is_lost_evicts_nobody() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    daemon.act(|t| t.observe_inventory(inventory([])));
    assert!(is_over(&daemon));
    assert_eq!(taints(&daemon), "Lost");
}

#[test]
fn a_claim_that_was_refused_and_is_allocated_anew_has_lost_nothing_yet() {
    let mut daemon = with_counted(2, &["GPU-1"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.see_pods(&[live("pod-of-GPU-1", 1), in_flight("counted", 1)]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    daemon.see_claims(&[]);
    daemon.see_claims(&[allocated("claim", &["gpu-1"], &["pod"])]);
    assert_eq!(taints(&daemon), "Counted Counted");
}

#[test]
fn a_claim_that_is_still_prepared_elsewhere_is_not_evicted() {
    // It was deallocated under a pod that was force-deleted, and allocated again before the kubelet gave it back.
    let mut daemon = with_counted(2, &["GPU-1"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod-a"])]);
    let outcome = daemon.prepare("claim", &["gpu-0"]);
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
    daemon.see_claims(&[allocated("claim", &["gpu-1"], &["pod-b"])]);
    lose(&mut daemon, "claim", &["gpu-1"]);
    assert_eq!(
        not_evicted(&daemon),
        [NotEvicted::InUse(claim_ref("claim"))]
    );
}

#[test]
fn a_minute_is_over_by_itself() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.pass(5);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(daemon.pool.wake_at(), Some(daemon.uptime + EVICTION_LIMIT));
    daemon.uptime += EVICTION_LIMIT;
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(daemon.pool.wake_at(), None, "nothing is left to wait for");
}

#[test]
fn a_process_that_does_not_end_is_waited_for_without_anybody_looking() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.run("GPU-0", &[(7, Some("pod-of-GPU-0"))]);
    daemon.see_pods(&[]);
    daemon.list(&NOTHING);
    daemon.list(&NOTHING);
    let lingers_since = daemon.uptime;
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.pass(20);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Foreign");
    assert_eq!(daemon.pool.wake_at(), Some(lingers_since + LINGER_LIMIT));
    daemon.uptime = lingers_since + LINGER_LIMIT;
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Foreign:NoExecute");
}

#[test]
fn a_process_of_nobody_known_evicts_nobody() {
    let mut daemon = with_counted(1, &[]);
    daemon.list(&NOTHING);
    daemon.run("GPU-0", &[(7, None)]);
    daemon.act(Transition::observe_processes);
    daemon.act(Transition::observe_processes);
    assert_eq!(daemon.holds("GPU-0"), "Foreign UnknownProcess");
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    daemon.pass(300);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Foreign");
}

#[test]
fn a_claim_that_lost_to_another_claim_is_not_evicted() {
    let mut daemon = with_counted(1, &[]);
    daemon.list(&NOTHING);
    daemon.see_claims(&[
        allocated("first", &["gpu-0"], &["pod-a"]),
        allocated("second", &["gpu-0"], &["pod-b"]),
    ]);
    let first = daemon.prepare("first", &["gpu-0"]);
    assert!(matches!(first, PrepareOutcome::Prepared(_)), "{first:?}");
    lose(&mut daemon, "second", &["gpu-0"]);
    daemon.pass(300);
    look(&mut daemon);
    assert_eq!(taints(&daemon), "on", "the pod of the first claim runs");
}

#[test]
fn a_claim_of_which_the_kubelet_lists_a_pod_is_not_evicted() {
    // The node was shared without a bridge before: a counted pod and a claim's pod run on one GPU.
    let mut daemon = with_counted(1, &["GPU-0"]);
    let mut listing = listing(&[("pod-of-GPU-0", &["GPU-0"])]);
    listing.pods.push(listed_claim("pod-a", "claim", "gpu-0"));
    daemon.list(&listing);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod-a", "pod-b"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(
        not_evicted(&daemon),
        [NotEvicted::InUse(claim_ref("claim"))]
    );
}

#[test]
fn a_claim_that_looks_on_and_runs_on_another_gpu_is_not_hit() {
    // It owns gpu-1, and looks on at gpu-0, where another claim loses.
    let mut daemon = with_counted(2, &["GPU-0"]);
    daemon.see_claims(&[
        allocated("both", &["gpu-1", "gpu-0:admin"], &["pod-a"]),
        allocated("claim", &["gpu-0"], &["pod-b"]),
    ]);
    let both = daemon.prepare("both", &["gpu-1", "gpu-0:admin"]);
    assert!(matches!(both, PrepareOutcome::Prepared(_)), "{both:?}");
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted on");
    assert_eq!(
        not_evicted(&daemon),
        [NotEvicted::Onlooker(claim_ref("both"))]
    );
}

#[test]
fn what_is_prepared_with_a_device_is_not_hit_even_if_the_api_does_not_show_it() {
    // The monitor's pod was force-deleted, and has not been unprepared yet.
    let mut daemon = with_counted(1, &["GPU-0"]);
    let outcome = daemon.prepare("monitor", &["gpu-0:admin"]);
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(
        not_evicted(&daemon),
        [NotEvicted::InUse(claim_ref("monitor"))]
    );
    daemon.act(|t| t.unprepare(&claim_ref("monitor").uid));
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
}

#[test]
fn an_onlooker_is_spared_by_a_toleration_of_the_effect_for_ever_and_by_no_other() {
    let cases = [
        (tolerating(), "Counted:NoExecute"),
        (
            Toleration {
                effect: None,
                ..tolerating()
            },
            "Counted",
        ),
        (
            Toleration {
                effect: Some(TaintEffect::NoSchedule),
                ..tolerating()
            },
            "Counted",
        ),
        (
            Toleration {
                lasts: Some(Duration::from_secs(3600)),
                ..tolerating()
            },
            "Counted",
        ),
    ];
    for (toleration, wanted) in cases {
        let mut daemon = with_counted(1, &["GPU-0"]);
        let mut monitor = allocated("monitor", &["gpu-0:admin"], &["visitor"]);
        tolerates(&mut monitor, &toleration);
        daemon.see_claims(&[monitor, allocated("claim", &["gpu-0"], &["pod"])]);
        lose(&mut daemon, "claim", &["gpu-0"]);
        assert_eq!(taints(&daemon), wanted, "{toleration:?}");
    }
}

#[test]
fn a_loser_stays_if_it_asks_to_and_the_limit_is_not_shorter() {
    let lasting = |lasts| Toleration {
        lasts: Some(lasts),
        ..tolerating()
    };
    let any_effect = Toleration {
        effect: None,
        ..tolerating()
    };
    let cases = [
        (tolerating(), "Counted"),
        (any_effect, "Counted"),
        (lasting(EVICTION_LIMIT), "Counted"),
        (lasting(Duration::from_secs(5)), "Counted:NoExecute"),
    ];
    for (toleration, wanted) in cases {
        let mut daemon = with_counted(1, &["GPU-0"]);
        let mut claim = allocated("claim", &["gpu-0"], &["pod"]);
        tolerates(&mut claim, &toleration);
        daemon.see_claims(&[claim]);
        lose(&mut daemon, "claim", &["gpu-0"]);
        assert_eq!(taints(&daemon), wanted, "{toleration:?}");
    }
}

#[test]
fn what_stands_in_the_way_is_told_once() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[
        allocated("monitor", &["gpu-0:admin"], &["visitor"]),
        allocated("claim", &["gpu-0"], &["pod"]),
    ]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    let told = [NotEvicted::Onlooker(claim_ref("monitor"))];
    assert_eq!(not_evicted(&daemon), told);
    for _ in 0..3 {
        daemon.pass(80);
        lose(&mut daemon, "claim", &["gpu-0"]);
        assert_eq!(not_evicted(&daemon), []);
        look(&mut daemon);
        assert_eq!(not_evicted(&daemon), []);
    }
}

#[test]
fn nobody_is_evicted_while_the_api_can_not_be_asked() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.act(|t| t.observe_claims(None));
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted");
    assert_eq!(not_evicted(&daemon), []);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
    // What was asked for goes on, and ends after its minute.
    daemon.act(|t| t.observe_claims(None));
    assert_eq!(taints(&daemon), "Counted:NoExecute");
    daemon.uptime += EVICTION_LIMIT;
    look(&mut daemon);
    assert_eq!(taints(&daemon), "Counted");
}

#[test]
fn a_closed_face_has_a_slice_while_it_evicts() {
    let mut daemon = with_counted(1, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    daemon.act(|t| {
        t.configure(Settings {
            mode: Mode::Legacy,
            ..Settings::default()
        });
    });
    assert_eq!(taints(&daemon), "none");
    lose(&mut daemon, "claim", &["gpu-0"]);
    assert_eq!(taints(&daemon), "Counted:NoExecute");
    daemon.see_claims(&[]);
    assert_eq!(taints(&daemon), "none");
}

#[test]
fn an_allocate_is_served_while_the_device_evicts() {
    let mut daemon = with_counted(2, &["GPU-0"]);
    daemon.see_claims(&[allocated("claim", &["gpu-0"], &["pod"])]);
    lose(&mut daemon, "claim", &["gpu-0"]);
    let listed = listing(&[("pod-of-GPU-0", &["GPU-0"])]);
    let outcome = daemon.allocate(&["GPU-1"], Patience::Waits, &listed);
    assert!(
        matches!(outcome, AllocateOutcome::Granted(_)),
        "{outcome:?}"
    );
    assert_eq!(taints(&daemon), "Counted:NoExecute Counted");
}
