//! Ends, and two daemons at once.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use fake_nvml::Fault;
use rustix::process::Signal;

use crate::process::Daemon;
use crate::world::{RESOURCE, SOON, World, claim_uid, stays, until};

/// The sockets below a folder, but for those of the kubelet itself.
fn sockets(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.unwrap();
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let name = entry.file_name().into_string().unwrap();
        if kind.is_dir() {
            found.extend(sockets(&path));
        } else if kind.is_socket() && !name.starts_with("kubelet") && !name.starts_with("pods") {
            found.push(name);
        }
    }
    found.sort();
    found
}

#[tokio::test]
async fn at_sigterm_the_sockets_go_and_the_files_stay_and_the_exit_code_is_0() {
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let open = sockets(&world.path("k"));
    assert_eq!(
        open.len(),
        3,
        "one of each face, and a registration: {open:?}"
    );

    world.stop_daemon().await;
    assert_eq!(sockets(&world.path("k")), Vec::<String>::new());
    assert!(!world.admin_socket().exists());
    for kept in [
        world.ledger(),
        world.counted_spec(),
        world.claim_spec(&claim_uid("b")),
    ] {
        assert!(kept.exists(), "{} is gone", kept.display());
    }
    assert!(world.slice().is_some(), "the slice stays for the next one");

    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await, held);
}

#[tokio::test]
async fn a_prepare_that_waits_does_not_hold_up_the_end() {
    let mut world = World::running(2).await;
    // The counted pod takes gpu-1, and a claim that nobody would make wants it as well.
    world.run_counted("a", 1).await;
    world.allocate_claim("b", "gpu-1", "b");
    world.admit_claimant("b").await;
    let log = world.log();
    let started = Instant::now();
    let end = async {
        until("the call is in", SOON, async || {
            world.api.count("get", "resourceclaims") > 0
        })
        .await;
        world.daemon().signal(Signal::TERM);
    };
    let (answer, ()) = tokio::join!(world.prepare("b"), end);
    let refused = answer.unwrap_err();
    assert!(
        refused.contains("UnitHeld") || refused.contains("UNAVAILABLE"),
        "an answer with a reason, and not a broken call: {refused}"
    );
    until("the daemon ends", SOON, async || {
        world.daemon_mut().status().is_some()
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(8), "{}", log.text());
    let status = world.daemon_mut().status().unwrap();
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn it_ends_while_everything_is_away_and_the_driver_hangs() {
    let mut world = World::running(2).await;
    world.run_counted("a", 1).await;
    let hang = Fault::delay(Duration::from_secs(600));
    let call = "nvmlDeviceGetComputeRunningProcesses_v3";
    world.node.set_fault(call, &hang).unwrap();
    until("the driver hangs", SOON, async || {
        world.node.calls_that_met_the_fault(call) > 0
    })
    .await;
    world.api.go_away();
    world.kubelet().stop().await;
    let started = Instant::now();
    world.stop_daemon().await;
    assert!(started.elapsed() < Duration::from_secs(8));
    assert_eq!(sockets(&world.path("k")), Vec::<String>::new());
}

#[tokio::test]
async fn a_second_daemon_on_the_same_state_is_refused_and_the_first_goes_on() {
    let mut world = World::running(2).await;
    let first = world.daemon().pid().as_raw_nonzero().to_string();
    let open = sockets(&world.path("k"));
    let (status, said) = Daemon::spawn(world.flags()).ended().await;
    assert_eq!(status.code(), Some(1), "{said}");
    let lock = world.state_dir().join("lock").display().to_string();
    for part in [&lock, &first, "another gpu-bridge", "stop it"] {
        assert!(said.contains(part), "{part:?} is missing in: {said}");
    }

    assert_eq!(sockets(&world.path("k")), open, "its sockets are untouched");
    let healthy = world.kubelet().healthy(RESOURCE);
    stays(
        "the first is registered",
        Duration::from_secs(1),
        async || world.kubelet().healthy(RESOURCE) == healthy,
    )
    .await;
    world.run_counted("a", 1).await;
    world.ready().await;
}

#[tokio::test]
async fn what_a_killed_daemon_leaves_behind_does_not_hinder_the_next() {
    let mut world = World::running(2).await;
    world.kill_daemon();
    assert_eq!(sockets(&world.path("k")).len(), 3, "nobody tidied up");
    world.start_daemon();
    world.ready().await;
    let open = sockets(&world.path("k"));
    assert_eq!(open.len(), 3, "only those of the new one: {open:?}");
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
}

#[tokio::test]
async fn what_is_running_while_nobody_serves_is_seen_by_the_next_daemon() {
    let mut world = World::running(2).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    world.stop_daemon().await;
    // Meanwhile the pod ends.
    world.end_pod("a").await;
    world.start_daemon();
    world.ready().await;
    until("the hold has ended", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
    assert_eq!(held.len(), 1);
    world.run_counted("b", 1).await;
}
