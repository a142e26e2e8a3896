//! Starts on a node where something is missing: the daemon waits for it, says so, and goes on by itself.

use testkit::Phase;

use crate::world::{DRIVER, RESOURCE, SOON, World, pod_uid, until};

/// Lines about the same thing that may be written while a test waits for some seconds.
const FEW: usize = 4;

#[tokio::test]
async fn without_the_nvml_library_it_waits_and_serves_when_the_library_appears() {
    let mut world = World::without_library(4).await;
    world.start_kubelet().await;
    world.start_daemon();
    let library = world.node.library().display().to_string();
    world
        .lacks("NvmlAnswering", &[&library, "Install the NVIDIA driver"])
        .await;
    let (code, _) = world.get("/healthz").await.unwrap();
    assert_eq!(code, 200, "it waits, and is not sick");
    let lines = world.log().lines();
    let about = lines.iter().filter(|line| line.contains(&library));
    assert!(about.count() <= FEW, "{lines:#?}");

    world.node.install_library().unwrap();
    world.ready().await;
    world.kubelet().wait_for_healthy(RESOURCE, 2, SOON).await;
    world.run_counted("a", 2).await;
    assert_eq!(world.counted_devices("a").len(), 2);
}

#[tokio::test]
async fn without_a_kubelet_it_waits_and_registers_when_the_kubelet_appears() {
    let mut world = World::new(2).await;
    world.start_daemon();
    let socket = world.device_plugin_dir().join("kubelet.sock");
    let socket = socket.display().to_string();
    world.lacks("DevicePluginRegistered", &[&socket]).await;
    world.lacks("DraPluginRegistered", &[]).await;
    // Whether pods run here is not known without it, so nothing may be given out.
    world.lacks("LedgerServing", &[]).await;
    world.start_kubelet().await;
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.kubelet().wait_for_healthy(RESOURCE, 1, SOON).await;
    world.ready().await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
}

#[tokio::test]
async fn with_a_good_ledger_it_serves_before_the_api_server_answers() {
    let mut world = World::running(4).await;
    world.run_counted("old", 1).await;
    let device = world.free_device().await;
    world.run_claimant("claimant", &device).await;
    world.wait_for_holds("Bound", 1).await;
    world.stop_daemon().await;
    world.api.delete(
        "resourceslices",
        "",
        world.api.list("resourceslices")[0]["metadata"]["name"]
            .as_str()
            .unwrap(),
    );
    world.api.go_away();
    world.start_daemon();

    // One of the two healthy ids is allocated to the old pod.
    world.kubelet().wait_for_healthy(RESOURCE, 2, SOON).await;
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.run_counted("new", 1).await;
    assert_ne!(world.counted_devices("new"), world.counted_devices("old"));

    world.allocate_claim("late", "gpu-1", "late");
    world.admit_claimant("late").await;
    let refused = world.prepare("late").await.unwrap_err();
    for part in ["UNAVAILABLE", "train/late", "API server", "tries again"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    world
        .kubelet()
        .finish(&pod_uid("claimant"), Phase::Succeeded)
        .await
        .expect("Unprepare needs no API server");
    world.lacks("ApiServerReachable", &[]).await;

    world.api.come_back();
    world.ready().await;
    assert_eq!(world.slice().map(|devices| devices.len()), Some(4));
    world.prepare("late").await.unwrap();
}

#[tokio::test]
async fn without_a_ledger_it_gives_nothing_out_until_the_api_server_answers() {
    let mut world = World::new(2).await;
    world.api.go_away();
    world.start_kubelet().await;
    world.start_daemon();
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.wait_for_standing("WaitingForAdoption").await;
    world.lacks("LedgerServing", &[]).await;
    let registered = || world.kubelet().capacity(RESOURCE).map(|it| it.capacity);
    until("the ids are listed", SOON, async || registered() == Some(2)).await;
    assert!(world.kubelet().healthy(RESOURCE).is_empty());
    let rejection = world.admit_counted("early", 1).await.unwrap_err();
    let message = rejection.message;
    assert!(message.contains("no healthy devices"), "{message}");

    world.api.come_back();
    world.ready().await;
    world.run_counted("late", 1).await;
}
