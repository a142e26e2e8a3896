//! What each face shows in each mode, from the start on.

use crate::world::{NAMESPACE, RESOURCE, SOON, World, until};

/// Healthy ids at the kubelet, and devices that claims can get.
pub(crate) async fn shows(world: &World, healthy: usize, open: &[&str]) {
    world
        .kubelet()
        .wait_for_healthy(RESOURCE, healthy, SOON)
        .await;
    until("the devices are as expected", SOON, async || {
        world.open_devices() == open
    })
    .await;
    let listed = world.kubelet().capacity(RESOURCE).unwrap().capacity;
    assert_eq!(listed, 4, "every id is listed in every mode");
}

#[tokio::test]
async fn mode_legacy_shows_all_ids_and_no_slice() {
    let world = World::configured(4, "mode: legacy\n").await;
    shows(&world, 4, &[]).await;
    assert_eq!(world.slice(), None);
    world.run_counted("a", 4).await;
    // Not even for a moment: schedulers read each write.
    assert_eq!(world.api.count("create", "resourceslices"), 0);
}

#[tokio::test]
async fn mode_dra_shows_all_devices_and_no_healthy_id() {
    let world = World::configured(4, "mode: dra\n").await;
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    world.run_claimant("a", "gpu-3").await;
}

#[tokio::test]
async fn mode_drained_offers_nothing_new() {
    let world = World::configured(4, "mode: drained\n").await;
    shows(&world, 0, &[]).await;
}

#[tokio::test]
async fn limits_split_the_node() {
    let world = World::configured(4, "limits:\n  legacy: 3\n  dra: 1\n").await;
    shows(&world, 3, &["gpu-0"]).await;
    world.run_counted("a", 3).await;
    world.run_claimant("b", "gpu-0").await;
    let status = world.status().await;
    assert_eq!(status["limits"]["legacy"], 3);
    assert_eq!(status["limits"]["dra"], 1);
}

#[tokio::test]
async fn a_change_of_mode_never_touches_who_holds_a_gpu() {
    let mut world = World::configured(4, "mode: both\n").await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    for (mode, healthy, open) in [
        ("legacy", 3, vec!["gpu-0"]),
        ("dra", 1, vec!["gpu-0", "gpu-1", "gpu-2"]),
        ("drained", 1, vec!["gpu-0"]),
    ] {
        world.stop_daemon().await;
        world.configure(&format!("mode: {mode}\n"));
        world.start_daemon();
        world.ready().await;
        assert_eq!(world.status().await["mode"], mode);
        // The held device has no taint: its claim may be shared by more pods. The held id stays healthy.
        shows(&world, healthy, &open).await;
        assert_eq!(world.holds().await, held, "{mode}");
    }
    world.end_pod("a").await;
    world.end_pod("b").await;
    assert!(world.api.get("pods", NAMESPACE, "a").is_none());
    shows(&world, 0, &[]).await;
}
