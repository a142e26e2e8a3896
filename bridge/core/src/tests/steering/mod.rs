//! Where free units are offered: rest, splits, moves and turns.

mod confine;
mod demand;
mod limits;
mod modes;
mod world;

use std::time::Duration;

use expect_test::{Expect, expect};

use super::kit::{Daemon, allocated, in_flight, listing, live, prepare_request};
use crate::{HoldKind, Limits, Mode, PrepareOutcome, Settings, Side};

/// Longer than any settle, dwell or quiet time.
pub(super) const CALM: Duration = Duration::from_secs(1);
/// Longer than the quiet time where few units are free, or both kinds compete.
const LONG_CALM: Duration = Duration::from_secs(3);

/// A node whose status shows at once what the daemon wants it to.
pub(super) fn obedient(count: u32, settings: Settings) -> Daemon {
    let mut daemon = Daemon::with_gpus(count, settings);
    daemon.act(|t| t.observe_claims(Some(crate::Claims::default())));
    daemon.see_pods(&[]);
    daemon.list(&listing(&[]));
    show_count(&mut daemon);
    daemon
}

pub(super) fn show_count(daemon: &mut Daemon) {
    let count = daemon.pool.offers().count;
    daemon.act(|t| t.observe_node(Some(count)));
}

/// Lets time pass in small steps; the node follows the count at once.
pub(super) fn pass(daemon: &mut Daemon, time: Duration) {
    const STEP: Duration = Duration::from_millis(50);
    let end = daemon.uptime + time;
    while daemon.uptime < end {
        daemon.uptime += STEP;
        daemon.act(crate::Transition::pass_time);
        show_count(daemon);
    }
}

/// All counted pods have ended. Two listings in a row are without them: one alone is no atomic snapshot.
pub(super) fn end_pods(daemon: &mut Daemon) {
    daemon.see_pods(&[]);
    for _ in 0..2 {
        daemon.list(&listing(&[]));
    }
}

/// The server can't be reached for so long.
fn stay_away(daemon: &mut Daemon, time: Duration) {
    const STEP: Duration = Duration::from_millis(500);
    daemon.act(crate::Transition::observe_node_away);
    let end = daemon.uptime + time;
    while daemon.uptime < end {
        daemon.uptime += STEP;
        daemon.act(crate::Transition::pass_time);
    }
}

pub(super) fn resting(count: u32) -> Daemon {
    resting_with(count, Settings::default())
}

pub(super) fn resting_with(count: u32, settings: Settings) -> Daemon {
    let mut daemon = obedient(count, settings);
    pass(&mut daemon, CALM);
    daemon
}

/// One letter a unit: R(est), L(egacy), D(ra), l(owering), y(ielding), d(ark); held ones: G, B, r(eserved), P, F.
pub(super) fn sides(daemon: &Daemon) -> String {
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

pub(super) fn check(daemon: &Daemon, expected: &Expect) {
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
fn the_first_counted_pod_keeps_all_that_rests_from_claims() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 1)]);
    check(&daemon, &expect!["LLLLLLLL count 8"]);
    daemon.granted("GPU-7", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-7"])]));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["RRRRRRRB count 8"]);
}

#[test]
fn what_a_burst_of_counted_pods_left_is_shared_as_soon_as_all_of_it_is_bound() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 4)]);
    for unit in ["GPU-7", "GPU-6", "GPU-5", "GPU-4"] {
        daemon.granted(unit, &listing(&[]));
    }
    daemon.list(&listing(&[("a", &["GPU-4", "GPU-5", "GPU-6", "GPU-7"])]));
    daemon.see_pods(&[live("a", 4)]);
    check(&daemon, &expect!["LLLLBBBB count 8"]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DDLLBBBB count 6"]);
}

#[test]
fn a_burst_of_counted_pods_that_stops_short_does_not_let_the_waiting_claims_in() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 1)]);
    daemon.granted("GPU-7", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-7"])]));
    // The quiet time alone is over.
    pass(&mut daemon, Duration::from_millis(500));
    check(&daemon, &expect!["LLLLLLLB count 8"]);
    pass(&mut daemon, Duration::from_millis(200));
    check(&daemon, &expect!["RRRRRRRB count 8"]);
}

#[test]
fn a_claim_in_a_burst_of_counted_pods_keeps_back_what_none_of_them_is_bound_for() {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 2)]);
    daemon.uptime += Duration::from_millis(50);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["rlllllLL count 2"]);
    // One that was scheduled before is bound, and gets its unit.
    daemon.see_pods(&[in_flight("a", 2), in_flight("b", 1)]);
    check(&daemon, &expect!["rllllLLL count 3"]);
    // Later ones share.
    show_count(&mut daemon);
    for unit in ["GPU-7", "GPU-6", "GPU-5"] {
        daemon.granted(unit, &listing(&[]));
    }
    daemon.list(&listing(&[("a", &["GPU-6", "GPU-7"]), ("b", &["GPU-5"])]));
    daemon.see_pods(&[live("a", 2), live("b", 1)]);
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["rDDLLBBB count 5"]);
}

/// Counted pods took all GPUs of two claims.
fn lost_race(daemon: &mut Daemon) {
    daemon.see_claims(&[
        allocated("claim-a", &["gpu-0"], &["pod-a"]),
        allocated("claim-b", &["gpu-1"], &["pod-b"]),
    ]);
    daemon.see_pods(&[in_flight("c", 2)]);
    daemon.granted("GPU-0", &listing(&[]));
    daemon.granted("GPU-1", &listing(&[]));
    daemon.list(&listing(&[("c", &["GPU-0", "GPU-1"])]));
    daemon.see_pods(&[live("c", 2)]);
    daemon.see_claims(&[]);
    end_pods(daemon);
}

#[test]
fn after_a_lost_race_nothing_is_on_both_sides_for_a_while_and_after_the_next_for_longer() {
    const QUARTER: Duration = Duration::from_secs(15 * 60);
    let mut daemon = resting(2);
    for apart in [QUARTER, QUARTER * 2] {
        lost_race(&mut daemon);
        pass(&mut daemon, LONG_CALM);
        daemon.uptime += apart - LONG_CALM * 2;
        pass(&mut daemon, CALM);
        let shown = sides(&daemon);
        assert!(!shown.contains('R'), "{shown} before {apart:?} are over");
        pass(&mut daemon, LONG_CALM * 2);
        check(&daemon, &expect!["RR count 2"]);
    }
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
fn a_count_that_was_about_to_rise_settles_anew() {
    let mut daemon = resting(1);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    pass(&mut daemon, LONG_CALM);
    check(&daemon, &expect!["r count 0"]);
    daemon.see_claims(&[]);
    daemon.uptime += LONG_CALM;
    daemon.act(crate::Transition::pass_time);
    check(&daemon, &expect!["R count 1"]);
    // The higher count is being written, by the daemon or by the kubelet, and the watch does not show it yet.
    daemon.see_claims(&[allocated("claim-b", &["gpu-0"], &["pod-b"])]);
    check(&daemon, &expect!["r count 0"]);
    assert_eq!(
        daemon.pool.ledger().in_order()[0].1.side,
        Side::Yielding,
        "a counted pod may be bound on the count of 1"
    );
    pass(&mut daemon, Duration::from_millis(350));
    assert_eq!(daemon.pool.ledger().in_order()[0].1.side, Side::Dra);
}

#[test]
fn a_pod_that_was_given_its_unit_does_not_count_twice_until_it_is_listed() {
    let mut daemon = resting(3);
    daemon.see_pods(&[in_flight("a", 1)]);
    daemon.granted("GPU-2", &listing(&[]));
    daemon.see_claims(&[allocated("claim-a", &["gpu-0", "gpu-1"], &["pod-a"])]);
    check(&daemon, &expect!["rrG count 1"]);
    // A second one is on its way, bound on the count of before.
    daemon.uptime += Duration::from_millis(1);
    daemon.see_pods(&[in_flight("a", 1), in_flight("b", 1)]);
    check(&daemon, &expect!["rrG count 2"]);
    let side = |at: usize| daemon.pool.ledger().in_order()[at].1.side;
    assert_eq!((side(0), side(1)), (Side::Lowering, Side::Legacy));
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
fn where_the_node_could_never_be_changed_everything_stands_still_on_the_fixed_split() {
    let mut daemon = Daemon::with_gpus(4, Settings::default());
    daemon.act(|t| t.observe_claims(Some(crate::Claims::default())));
    daemon.see_pods(&[]);
    daemon.list(&listing(&[]));
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
fn when_the_node_cannot_be_changed_any_more_counted_pods_keep_what_the_count_promised() {
    let mut daemon = resting(4);
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["LLLL count 4"]);
    // The Node goes on showing four until the kubelet writes another count, and the scheduler binds by it.
    daemon.see_pods(&[in_flight("a", 4)]);
    for gpu in ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] {
        assert_eq!(daemon.granted(gpu, &listing(&[])), gpu);
    }
}

#[test]
fn while_the_server_is_away_every_unit_that_the_count_promised_stays_healthy() {
    let mut daemon = resting(4);
    stay_away(&mut daemon, Duration::from_secs(60));
    check(&daemon, &expect!["RRRR count 4"]);
    // The scheduler was not cut off, and has bound pods for all that the Node went on showing.
    daemon.see_pods(&[in_flight("a", 4)]);
    check(&daemon, &expect!["RRRR count 4"]);
    for gpu in ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] {
        assert_eq!(daemon.granted(gpu, &listing(&[])), gpu);
    }
}

#[test]
fn a_move_that_the_server_left_half_done_settles_anew_when_it_is_back() {
    let mut daemon = resting(2);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    check(&daemon, &expect!["ry count 0"]);
    daemon.act(|t| t.observe_node(Some(0)));
    stay_away(&mut daemon, Duration::from_secs(60));
    let outcome = daemon.prepare("claim-a", &["gpu-0"]);
    assert!(matches!(outcome, PrepareOutcome::Wait(_)), "{outcome:?}");
    check(&daemon, &expect!["ry count 0"]);
    daemon.act(|t| t.observe_node(Some(0)));
    let outcome = daemon.prepare("claim-a", &["gpu-0"]);
    assert!(matches!(outcome, PrepareOutcome::Wait(_)), "{outcome:?}");
    pass(&mut daemon, CALM);
    let outcome = daemon.prepare("claim-a", &["gpu-0"]);
    assert!(
        matches!(outcome, PrepareOutcome::Prepared(_)),
        "{outcome:?}"
    );
}

#[test]
fn a_restart_leaves_what_rests_at_rest() {
    let before = resting(4);
    let mut daemon = Daemon::on_ledger(before.pool.ledger().clone(), Settings::default());
    check(&daemon, &expect!["RRRR count 4"]);
    daemon.act(|t| t.observe_node(Some(0)));
    check(&daemon, &expect!["RRRR count 4"]);
    // A right that was withdrawn meanwhile is no reason to wait for ever.
    let mut daemon = Daemon::on_ledger(before.pool.ledger().clone(), Settings::default());
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["DDLL count 2"]);
}

#[test]
fn after_a_restart_what_becomes_free_stays_counted_until_the_node_is_seen() {
    let mut before = resting(2);
    before.see_pods(&[in_flight("a", 2)]);
    before.granted("GPU-0", &listing(&[]));
    before.granted("GPU-1", &listing(&[]));
    before.see_pods(&[live("a", 2)]);
    before.list(&listing(&[("a", &["GPU-0", "GPU-1"])]));
    let mut daemon = Daemon::on_ledger(before.pool.ledger().clone(), Settings::default());
    // The pod has ended while there was no daemon, and the next may be bound already.
    daemon.see_pods(&[]);
    for _ in 0..3 {
        daemon.list(&listing(&[]));
    }
    check(&daemon, &expect!["LL count 2"]);
    daemon.act(|t| t.observe_node(None));
    check(&daemon, &expect!["DL count 1"]);
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
    pass(&mut daemon, LONG_CALM);
    end_pods(&mut daemon);
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

/// Lets a counted pod and a claim come and go again within `apart`, so that nothing is taken.
fn both_come(daemon: &mut Daemon, apart: Duration) {
    daemon.see_pods(&[live("a", 1)]);
    pass(daemon, apart);
    daemon.see_claims(&[allocated("claim-a", &["gpu-0"], &["pod-a"])]);
    daemon.see_pods(&[]);
    daemon.see_claims(&[]);
}

/// How long it takes from now until everything rests.
fn until_rest(daemon: &mut Daemon) -> Duration {
    let since = daemon.uptime;
    while sides(daemon).contains(|side| side != 'R') {
        assert!(daemon.uptime - since < Duration::from_mins(1), "no rest");
        pass(daemon, Duration::from_millis(50));
    }
    daemon.uptime - since
}

#[test]
fn where_both_kinds_compete_free_units_rest_only_after_a_longer_quiet() {
    let mut daemon = resting(4);
    both_come(&mut daemon, Duration::from_millis(500));
    let contested = until_rest(&mut daemon);
    assert!(contested >= Duration::from_secs(2), "{contested:?}");

    let mut daemon = resting(4);
    both_come(&mut daemon, Duration::from_secs(5));
    let alone = until_rest(&mut daemon);
    assert!(alone < Duration::from_secs(1), "{alone:?}");
}

#[test]
fn a_contest_is_forgotten_when_one_kind_comes_alone_for_long() {
    let mut daemon = resting(4);
    both_come(&mut daemon, Duration::from_millis(500));
    until_rest(&mut daemon);
    pass(&mut daemon, Duration::from_secs(11));
    daemon.see_pods(&[live("b", 1)]);
    daemon.see_pods(&[]);
    let alone = until_rest(&mut daemon);
    assert!(alone < Duration::from_secs(1), "{alone:?}");
}

/// Lets so many pods of each kind come at the same moment, and go again.
fn crowds_come(daemon: &mut Daemon, pods: usize) {
    let counted: Vec<_> = (0..pods).map(|n| live(&format!("pod-{n}"), 1)).collect();
    let claims: Vec<_> = (0..pods)
        .map(|n| {
            let (claim, pod) = (format!("claim-{n}"), format!("claimant-{n}"));
            allocated(&claim, &[&format!("gpu-{n}")], &[&pod])
        })
        .collect();
    daemon.see_pods(&counted);
    daemon.see_claims(&claims);
    daemon.see_pods(&[]);
    daemon.see_claims(&[]);
}

#[test]
fn after_bursts_of_both_kinds_nothing_is_on_both_sides_until_a_minute_has_passed_without_one() {
    let mut daemon = resting(8);
    for _ in 0..4 {
        crowds_come(&mut daemon, 2);
        for _ in 0..30 {
            pass(&mut daemon, CALM);
            assert!(!sides(&daemon).contains('R'), "{}", sides(&daemon));
        }
        daemon.uptime += Duration::from_secs(25);
        pass(&mut daemon, CALM);
        assert!(!sides(&daemon).contains('R'), "{}", sides(&daemon));
    }
    daemon.uptime += Duration::from_mins(1);
    until_rest(&mut daemon);

    crowds_come(&mut daemon, 1);
    let few = until_rest(&mut daemon);
    assert!(few < Duration::from_secs(5), "{few:?}");
}

#[test]
fn bursts_that_get_one_unit_of_a_kind_while_the_sides_are_apart_keep_them_apart() {
    let mut daemon = resting(8);
    crowds_come(&mut daemon, 2);
    for _ in 0..6 {
        daemon.uptime += Duration::from_secs(25);
        pass(&mut daemon, CALM);
        assert!(!sides(&daemon).contains('R'), "{}", sides(&daemon));
        crowds_come(&mut daemon, 1);
    }
    daemon.uptime += Duration::from_mins(1);
    until_rest(&mut daemon);

    crowds_come(&mut daemon, 1);
    let calm = until_rest(&mut daemon);
    assert!(calm < Duration::from_secs(5), "{calm:?}");
}

#[test]
fn half_of_a_node_or_less_rests_only_after_a_longer_quiet() {
    let mut daemon = resting(2);
    daemon.see_pods(&[in_flight("a", 1)]);
    daemon.granted("GPU-1", &listing(&[]));
    daemon.see_pods(&[live("a", 1)]);
    daemon.list(&listing(&[("a", &["GPU-1"])]));
    pass(&mut daemon, CALM);
    check(&daemon, &expect!["DB count 1"]);
    pass(&mut daemon, Duration::from_secs(2));
    check(&daemon, &expect!["RB count 2"]);
}

#[test]
fn one_free_unit_is_for_either_kind_in_its_turn() {
    let mut daemon = resting(1);
    let mut rounds = [Vec::new(), Vec::new()];
    for number in 0_u32..120 {
        let name = format!("pod-{number}");
        daemon.see_pods(&[live(&name, 1)]);
        pass(&mut daemon, Duration::from_millis(100));
        let now = sides(&daemon);
        rounds[usize::from(now == "D")].push(number);
    }
    let [counted, claims] = rounds.map(|rounds| rounds.len());
    assert!(
        counted >= 40 && claims >= 40,
        "counted {counted}, claims {claims}"
    );
}
