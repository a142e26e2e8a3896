//! A node without a ledger on which pods run already.

use std::fs;

use fake_nvml::Scenario;

use crate::world::{DRIVER, RESOURCE, SOON, World, claim, claim_uid, until};

/// Who has what, without the moments that an adoption can't know.
async fn holders(world: &World) -> Vec<(String, String, String, String)> {
    let mut holds = world.holds().await;
    holds.sort();
    holds
}

#[tokio::test]
async fn when_the_ledger_is_lost_running_pods_of_both_kinds_are_adopted_without_a_blip() {
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    let held = holders(&world).await;
    assert_eq!(held.len(), 2);
    let ids = world.ids("a");
    world.kill_daemon();
    fs::remove_dir_all(world.state_dir()).unwrap();
    // While the API server is away the claims are not known, and adoption has to wait.
    world.api.go_away();
    world.start_daemon();
    world.wait_for_standing("WaitingForAdoption").await;
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.kubelet().wait_for_healthy(RESOURCE, 1, SOON).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    assert_eq!(
        healthy.iter().collect::<Vec<_>>(),
        ids.iter().collect::<Vec<_>>(),
        "what runs stays healthy, and nothing else is"
    );
    let other = world.gpu("gpu-2").uuid;
    let refused = world.allocate(&[&other]).await.unwrap_err();
    assert!(refused.contains("WaitingForAdoption"), "{refused}");

    world.api.come_back();
    until("the pool serves, without a blip", SOON, async || {
        let healthy = world.kubelet().healthy(RESOURCE);
        assert!(ids.iter().all(|id| healthy.contains(id)), "{healthy:?}");
        world.standing().await.as_deref() == Some("Serving")
    })
    .await;
    world.ready().await;
    assert_eq!(holders(&world).await, held);
    assert!(world.claim_spec(&claim_uid("b")).exists());

    world.run_counted("c", 1).await;
    assert_ne!(world.counted_devices("c"), world.counted_devices("a"));
    assert!(!world.kubelet().cdi_devices(&claim("b")).is_empty());
}

#[tokio::test]
async fn when_the_ledger_is_lost_on_an_idle_node_everything_is_offered_again() {
    let mut world = World::running(4).await;
    let offered = world.open_devices();
    let healthy = world.kubelet().healthy(RESOURCE);
    world.kill_daemon();
    fs::remove_dir_all(world.state_dir()).unwrap();
    world.start_daemon();
    world.ready().await;
    let count = healthy.len();
    world
        .kubelet()
        .wait_for_healthy(RESOURCE, count, SOON)
        .await;
    assert_eq!(world.kubelet().healthy(RESOURCE), healthy);
    until("the slice is as before", SOON, async || {
        world.open_devices() == offered
    })
    .await;
}

/// A node whose second GPU was replaced: the new one has the minor number of the old one, and a name of its own.
async fn with_a_replaced_gpu() -> (World, String) {
    let mut world = World::running(2).await;
    let new = "GPU-aaaaaaaa-0000-4000-8000-000000000001";
    let mut scenario = Scenario::h100(1).and_one_more();
    scenario.gpus[1].uuid = Some(new.to_owned());
    world.node.replace_scenario(&scenario).unwrap();
    world.rescan();
    until("the new GPU has a name of its own", SOON, async || {
        let slice = world.slice().unwrap_or_default();
        slice.iter().any(|(name, _)| name == "gpu-2")
    })
    .await;
    (world, new.to_owned())
}

#[tokio::test]
async fn a_claim_on_a_replaced_gpu_keeps_it_when_the_ledger_is_lost() {
    let (mut world, new) = with_a_replaced_gpu().await;
    world.run_claimant("b", "gpu-2").await;
    let prepared = world.wait_for_holds("Prepared", 1).await;
    assert_eq!(prepared[0].0, new);
    let devices = world.kubelet().cdi_devices(&claim("b"));
    let spec = fs::read(world.claim_spec(&claim_uid("b"))).unwrap();
    world.kill_daemon();
    fs::remove_dir_all(world.state_dir()).unwrap();
    world.start_daemon();
    world.ready().await;
    let held = world.holds().await;
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((&held[0].0, &held[0].3), (&new, &claim_uid("b")));
    let names: Vec<String> = world.slice().unwrap().into_iter().map(|it| it.0).collect();
    assert_eq!(names, ["gpu-0", "gpu-2"], "the old one is forgotten");
    world.prepare("b").await.unwrap();
    assert_eq!(world.kubelet().cdi_devices(&claim("b")), devices);
    assert_eq!(fs::read(world.claim_spec(&claim_uid("b"))).unwrap(), spec);
}
