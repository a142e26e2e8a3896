//! The count of a daemon that gives nothing out, and of one on the way out.

use std::time::Duration;

use expect_test::expect;

use super::kit::{Daemon, id, in_flight, listing, live, without_ledger};
use super::steering::{CALM, check, obedient, pass, resting, show_count};
use crate::{Health, Mode, Settings, Transition};

/// A little less than the settle time, and a little more.
const SHORT: Duration = Duration::from_millis(250);
const LONG: Duration = Duration::from_millis(350);

/// Two pods run, and one that needs two units is on its way.
fn busy() -> Daemon {
    let mut daemon = resting(8);
    daemon.see_pods(&[in_flight("a", 1), in_flight("b", 1)]);
    daemon.granted("GPU-7", &listing(&[]));
    daemon.granted("GPU-6", &listing(&[]));
    daemon.see_pods(&[live("a", 1), live("b", 1)]);
    daemon.list(&listing(&[("a", &["GPU-7"]), ("b", &["GPU-6"])]));
    pass(&mut daemon, CALM);
    daemon.see_pods(&[live("a", 1), live("b", 1), in_flight("c", 2)]);
    show_count(&mut daemon);
    daemon
}

#[test]
fn a_daemon_that_leaves_is_clear_once_the_lowered_count_has_settled() {
    let mut daemon = resting(4);
    daemon.act(Transition::leave);
    check(&daemon, &expect!["RRRR count 0"]);
    daemon.uptime += LONG;
    daemon.act(Transition::pass_time);
    assert!(!daemon.pool.offers().clear, "the node still shows 4");
    show_count(&mut daemon);
    daemon.uptime += SHORT;
    daemon.act(Transition::pass_time);
    assert!(!daemon.pool.offers().clear);
    let due = daemon.pool.wake_at().expect("it looks again");
    daemon.uptime = due;
    daemon.act(Transition::pass_time);
    assert!(daemon.pool.offers().clear);
    assert_eq!(daemon.pool.wake_at(), None, "nothing is waited for");
}

#[test]
fn a_daemon_that_leaves_serves_the_pods_that_are_on_their_way_first() {
    let mut daemon = busy();
    check(&daemon, &expect!["LLLLLLBB count 8"]);
    daemon.act(Transition::leave);
    assert_eq!(
        daemon.pool.offers().count,
        4,
        "two run, two are on their way"
    );
    show_count(&mut daemon);
    pass(&mut daemon, CALM);
    assert!(!daemon.pool.offers().clear);
    // One ends, and the next has been bound in its place: no room is made for it.
    let pods = [live("a", 1), in_flight("c", 2), in_flight("d", 1)];
    daemon.see_pods(&pods[..2]);
    daemon.list(&listing(&[("a", &["GPU-7"])]));
    daemon.list(&listing(&[("a", &["GPU-7"])]));
    assert_eq!(daemon.pool.offers().count, 3);
    daemon.see_pods(&pods);
    assert_eq!(daemon.pool.offers().count, 3);
    daemon.granted("GPU-5", &listing(&[]));
    daemon.granted("GPU-4", &listing(&[]));
    daemon.granted("GPU-3", &listing(&[]));
    daemon.see_pods(&[live("a", 1), live("c", 2), live("d", 1)]);
    show_count(&mut daemon);
    pass(&mut daemon, LONG);
    let offers = daemon.pool.offers();
    assert_eq!((offers.count, offers.clear), (0, true));
}

#[test]
fn a_count_that_somebody_raises_again_is_not_clear() {
    let mut daemon = resting(2);
    daemon.act(Transition::leave);
    for _ in 0..10 {
        daemon.act(|t| t.observe_node(Some(0)));
        daemon.uptime += SHORT;
        daemon.act(|t| t.observe_node(Some(2)));
        assert!(!daemon.pool.offers().clear);
    }
}

#[test]
fn where_the_count_can_not_be_lowered_nothing_is_waited_for() {
    let mut daemon = obedient(2, Settings::default());
    daemon.act(|t| t.observe_node(None));
    daemon.act(Transition::leave);
    assert!(daemon.pool.offers().clear);
}

#[test]
fn a_daemon_without_a_ledger_wants_no_counted_pod_and_leaves_at_once() {
    let mut daemon = without_ledger(2);
    daemon.act(|t| t.observe_kubelet_ids([id("GPU-1")].into()));
    let offers = daemon.pool.offers();
    let healthy = offers
        .counted
        .iter()
        .filter(|offer| offer.health == Health::Healthy);
    assert_eq!((healthy.count(), offers.count), (1, 0));
    daemon.act(|t| t.observe_node(Some(0)));
    daemon.act(Transition::leave);
    assert!(daemon.pool.offers().clear);
}

#[test]
fn leaving_lowers_the_count_where_nothing_moves_too() {
    let settings = Settings {
        mode: Mode::Legacy,
        ..Settings::default()
    };
    let mut daemon = Daemon::with_gpus(2, settings);
    daemon.see_pods(&[]);
    daemon.act(|t| t.observe_node(Some(2)));
    daemon.act(Transition::leave);
    check(&daemon, &expect!["LL count 0"]);
    pass(&mut daemon, LONG + LONG);
    assert!(daemon.pool.offers().clear);
}
