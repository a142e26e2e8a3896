//! The log: how much of it there is when everything is away, and that it can be read by a machine.

use std::time::Duration;

use serde_json::Value;

use crate::process::Daemon;
use crate::world::{World, stays};

/// Each of NVML, API server and kubelet may say a few things about its own absence: watches of pods, claims and
/// slices, two faces, pod-resources, the Pods API, conditions.
const LINES_OF_AN_OUTAGE: usize = 30;

/// One for each thing that does not work meanwhile.
const LINES_OF_A_HANG: usize = 3;

/// The call that asks a GPU for its processes.
const PROCESSES: &str = "nvmlDeviceGetComputeRunningProcesses_v3";

#[tokio::test]
async fn an_outage_of_everything_fills_no_log() {
    let mut world = World::running(2).await;
    let log = world.log();
    let before = log.lines().len();
    world.api.go_away();
    world.kubelet().stop().await;
    for call in ["nvmlDeviceGetCount_v2", PROCESSES] {
        let gone = fake_nvml::Fault::error(999);
        world.node.set_fault(call, &gone).unwrap();
    }
    world.rescan();
    stays("it runs on", Duration::from_secs(5), async || {
        world.daemon_mut().status().is_none()
    })
    .await;
    let lines = log.lines();
    let said = &lines[before..];
    assert!(!said.is_empty(), "an outage is told");
    assert!(
        said.len() <= LINES_OF_AN_OUTAGE,
        "{} lines: {said:#?}",
        said.len()
    );
    for line in &lines {
        let parsed: Result<Value, _> = serde_json::from_str(line);
        assert!(parsed.is_ok(), "no JSON: {line}");
    }
    world.api.come_back();
    world.kubelet().resume().await.unwrap();
    for call in ["nvmlDeviceGetCount_v2", PROCESSES] {
        world.node.clear_fault(call).unwrap();
    }
    world.rescan();
    world.ready().await;
}

#[tokio::test]
async fn a_driver_that_hangs_fills_no_log() {
    let world = World::running(2).await;
    world.run_counted("a", 1).await;
    let log = world.log();
    let before = log.lines().len();
    let hang = fake_nvml::Fault::delay(Duration::from_secs(600));
    world.node.set_fault(PROCESSES, &hang).unwrap();
    stays("the hold", Duration::from_secs(5), async || {
        world.holds().await.len() == 1
    })
    .await;
    let lines = log.lines();
    // What is told of the pod's own start may come after the fault.
    let is_trouble = |line: &&String| !line.contains(r#""level":"INFO""#);
    let said: Vec<&String> = lines[before..].iter().filter(is_trouble).collect();
    assert!(!said.is_empty(), "a hang is told");
    assert!(lines.len() - before <= LINES_OF_AN_OUTAGE, "{lines:#?}");
    assert!(
        said.len() <= LINES_OF_A_HANG,
        "{} lines: {said:#?}",
        said.len()
    );
}

#[tokio::test]
async fn a_full_disk_fills_no_log() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let daemon = Daemon::spawn_to_be_limited(world.flags());
    world.adopt(daemon);
    world.ready().await;
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    world.daemon().limit_files(Some(0));
    let log = world.log();
    let before = log.lines().len();
    world.end_pod("a").await;
    stays(
        "the hold, which can't be ended",
        Duration::from_secs(5),
        async || world.holds().await.len() == 1,
    )
    .await;
    let lines = log.lines();
    let said = &lines[before..];
    assert!(!said.is_empty(), "a full disk is told");
    assert!(
        said.len() <= LINES_OF_A_HANG,
        "{} lines: {said:#?}",
        said.len()
    );
}
