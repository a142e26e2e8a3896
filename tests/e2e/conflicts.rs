//! Allocations that no scheduler would make: two kinds of holders want one GPU.

use std::time::Duration;

use crate::objects::PodSpec;
use crate::versions::{self, Feature};
use crate::world::{Setup, World};

/// The kubelet comes back every 2 s in these tests, and Prepare waits for 10 s.
const REFUSED: Duration = Duration::from_secs(40);

#[tokio::test]
async fn a_claim_on_a_gpu_of_a_counted_pod_is_refused_and_told_why() {
    let Some(world) = World::start(Setup::split(2, 2).impatient()).await else {
        return;
    };
    world.create(PodSpec::counted("counted", 1)).await;
    let held = world.gpus_of("counted").await;
    let device = world.device_of(&held[0]).await;
    world.create_claim("forced", 1).await;
    world
        .create(PodSpec::of_claim("claimant", "forced").on_node())
        .await;
    world.allocate_by_hand("forced", &device, "claimant").await;
    let event = world.wait_event("claimant", "UnitHeld", REFUSED).await;
    for part in [
        &held[0],
        "default/forced",
        "a pod that asked for nvidia.com/gpu by count",
        "delete the pod",
    ] {
        assert!(event.contains(part), "{part:?} is missing in: {event}");
    }
    assert!(
        !event.contains("default/counted"),
        "another tenant's pod is not named: {event}"
    );
    if versions::has(Feature::DeviceTaints) {
        // It never started, and makes room for a successor, if anybody makes one.
        world.wait_gone("claimant").await;
    }
    assert_eq!(world.gpus_of("counted").await, held);
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn an_allocate_for_a_prepared_gpu_gets_another_one_and_is_refused_when_none_is_left() {
    let Some(world) = World::start(Setup::split(2, 0).impatient()).await else {
        return;
    };
    // The counted side has both GPUs; a hand-made allocation prepares one of them all the same.
    world.create_claim("forced", 1).await;
    world
        .create(PodSpec::of_claim("claimant", "forced").on_node())
        .await;
    world.allocate_by_hand("forced", "gpu-1", "claimant").await;
    let claimed = world.gpus_of("claimant").await;
    // A kubelet that has not heard of it yet asks for the id of the prepared GPU.
    let first = world
        .allocate(&claimed[0])
        .await
        .expect("another GPU is free");
    assert_eq!(first.len(), 1);
    assert!(
        !first[0].contains(&claimed[0]),
        "{first:?} is the GPU of the claim"
    );
    let other = world.other_gpu(&claimed[0]);
    let told = world.allocate(&other).await.expect_err("no GPU is left");
    for part in ["NoFreeUnit", &other, "of 2 GPUs", "delete it"] {
        assert!(told.contains(part), "{part:?} is missing in: {told}");
    }
}
