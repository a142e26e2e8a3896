//! Errors of GPUs (XIDs), as the driver tells of them.

use std::collections::BTreeMap;

use bridge_nvml::{EVENT_WAIT, RecoveryAction, Session, Xids};
use fake_nvml::{Fault, Scenario};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::{DEADLINE, Node};

const NOT_SUPPORTED: u32 = 3;
const UNKNOWN: u32 = 999;

/// A session that listens: its first request has been answered.
async fn listening(node: &Node) -> (Session, watch::Receiver<Xids>) {
    let trace = node.fake.state_dir().join("trace.log");
    std::fs::write(&trace, "").unwrap();
    let (session, xids) = Session::spawn_listening(node.options()).unwrap();
    session.snapshot().await.unwrap();
    waits(node, 1).await;
    (session, xids)
}

/// How often a call was made.
fn calls(node: &Node, name: &str) -> usize {
    let trace = std::fs::read_to_string(node.fake.state_dir().join("trace.log")).unwrap();
    trace.lines().filter(|call| *call == name).count()
}

/// Until somebody has begun to wait for events so many times.
async fn waits(node: &Node, times: usize) {
    let deadline = Instant::now() + DEADLINE;
    while calls(node, "nvmlEventSetWait_v2") < times {
        assert!(Instant::now() < deadline, "nobody waits for events");
        tokio::task::yield_now().await;
    }
}

/// Until this is all that was heard.
async fn heard(xids: &mut watch::Receiver<Xids>, wanted: &[(&str, u64, u64)]) {
    let wanted: Xids = wanted
        .iter()
        .map(|(gpu, xid, times)| (((*gpu).to_owned(), *xid), *times))
        .collect();
    let heard = tokio::time::timeout(DEADLINE, xids.wait_for(|seen| *seen == wanted)).await;
    let is_heard = heard.is_ok();
    drop(heard);
    assert!(is_heard, "{:?} instead of {wanted:?}", *xids.borrow());
}

#[tokio::test]
async fn each_error_of_each_gpu_is_counted() {
    let node = Node::new(&Scenario::h100(2));
    let (_session, mut xids) = listening(&node).await;
    let uuids = node.uuids();
    node.fake.report_xid(&uuids[1], 79).unwrap();
    node.fake.report_xid(&uuids[0], 31).unwrap();
    node.fake.report_xid(&uuids[0], 31).unwrap();
    let wanted = [(&*uuids[0], 31, 2), (&*uuids[1], 79, 1)];
    heard(&mut xids, &wanted).await;
}

#[tokio::test]
async fn nobody_who_does_not_ask_for_errors_has_the_driver_wait_for_them() {
    let node = Node::new(&Scenario::h100(1));
    std::fs::write(node.fake.state_dir().join("trace.log"), "").unwrap();
    let session = node.session();
    session.snapshot().await.unwrap();
    session.shutdown().await.unwrap();
    assert_eq!(calls(&node, "nvmlEventSetCreate"), 0);
}

#[tokio::test]
async fn after_nvml_was_started_anew_errors_are_heard_as_before() {
    let node = Node::new(&Scenario::h100(2));
    let (session, mut xids) = listening(&node).await;
    let gpu = &node.uuids()[0];
    node.fake.report_xid(gpu, 48).unwrap();
    heard(&mut xids, &[(gpu, 48, 1)]).await;
    session.rescan().await.unwrap();
    // Nothing of it was held while NVML was closed.
    assert_eq!(calls(&node, "nvmlEventSetFree"), 1);
    let before = calls(&node, "nvmlEventSetWait_v2");
    waits(&node, before + 1).await;
    node.fake.report_xid(gpu, 48).unwrap();
    heard(&mut xids, &[(gpu, 48, 2)]).await;
}

#[tokio::test]
async fn a_gpu_that_tells_of_no_errors_does_not_stop_the_others() {
    for answer in [NOT_SUPPORTED, UNKNOWN] {
        let node = Node::new(&Scenario::h100(3));
        node.fault(
            "nvmlDeviceRegisterEvents",
            Fault::error(answer).skip(1).times(1),
        );
        let (session, mut xids) = listening(&node).await;
        let uuids = node.uuids();
        for gpu in [0, 1, 2] {
            node.fake.report_xid(&uuids[gpu], 79).unwrap();
        }
        heard(&mut xids, &[(&uuids[0], 79, 1), (&uuids[2], 79, 1)]).await;
        assert_eq!(session.snapshot().await.unwrap().gpus.len(), 3);
    }
}

#[tokio::test]
async fn a_gpu_that_is_lost_does_not_stop_the_others() {
    let node = Node::new(&Scenario::h100(2));
    let uuids = node.uuids();
    node.fake.lose(&uuids[0]).unwrap();
    let (session, mut xids) = listening(&node).await;
    node.fake.report_xid(&uuids[1], 79).unwrap();
    heard(&mut xids, &[(&uuids[1], 79, 1)]).await;
    // Each snapshot starts NVML anew as long as a GPU is lost.
    assert_eq!(session.snapshot().await.unwrap().gpus.len(), 1);
    let before = calls(&node, "nvmlEventSetWait_v2");
    waits(&node, before + 1).await;
    node.fake.report_xid(&uuids[1], 79).unwrap();
    heard(&mut xids, &[(&uuids[1], 79, 2)]).await;
}

#[tokio::test]
async fn a_driver_that_lets_nobody_wait_is_asked_again() {
    for call in ["nvmlEventSetCreate", "nvmlEventSetWait_v2"] {
        let node = Node::new(&Scenario::h100(1));
        node.fault(call, Fault::error(UNKNOWN).times(1));
        let (_session, mut xids) = listening(&node).await;
        let gpu = &node.uuids()[0];
        waits(&node, calls(&node, "nvmlEventSetWait_v2") + 1).await;
        node.fake.report_xid(gpu, 79).unwrap();
        heard(&mut xids, &[(gpu, 79, 1)]).await;
    }
}

#[tokio::test]
async fn an_old_driver_without_events_is_served_all_the_same() {
    let node = Node::new(&Scenario::h100(1));
    node.fake.hide_function("nvmlEventSetWait_v2").unwrap();
    node.fake.hide_function("nvmlDeviceGetFieldValues").unwrap();
    let (session, _xids) = Session::spawn_listening(node.options()).unwrap();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.gpus[0].recovery, None);
    session.rescan().await.unwrap();
    session.shutdown().await.unwrap();
}

#[tokio::test]
async fn while_nothing_happens_the_driver_is_hardly_asked() {
    let node = Node::new(&Scenario::h100(1));
    let (_session, _xids) = listening(&node).await;
    let begun = Instant::now();
    waits(&node, 4).await;
    // Three waits have ended by themselves since, each after its time.
    assert!(begun.elapsed() >= EVENT_WAIT * 2, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn while_errors_are_waited_for_and_nvml_is_started_anew_processes_are_told_at_once() {
    let node = Node::new(&Scenario::h100(1));
    let (session, _xids) = listening(&node).await;
    let again = tokio::spawn({
        let session = session.clone();
        async move { session.rescan().await }
    });
    let mut longest = BTreeMap::new();
    while !again.is_finished() {
        let begun = Instant::now();
        session.processes().await.unwrap();
        longest.insert(begun.elapsed(), ());
    }
    again.await.unwrap().unwrap();
    let (longest, ()) = longest.pop_last().unwrap();
    assert!(longest < EVENT_WAIT / 2, "{longest:?}");
}

#[tokio::test]
async fn what_has_to_be_done_about_a_gpu_is_in_the_snapshot() {
    let node = Node::new(&Scenario::h100(6));
    for (action, gpu) in (0..).zip(node.uuids()) {
        node.fake.set_recovery(&gpu, action).unwrap();
    }
    let snapshot = node.session().snapshot().await.unwrap();
    let actions: Vec<_> = snapshot.gpus.iter().map(|gpu| gpu.recovery).collect();
    let wanted = [
        RecoveryAction::None,
        RecoveryAction::Reset,
        RecoveryAction::Reboot,
        RecoveryAction::DrainP2p,
        RecoveryAction::DrainAndReset,
        RecoveryAction::Other(5),
    ];
    assert_eq!(actions, wanted.map(Some));
}
