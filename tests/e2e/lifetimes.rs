//! Who has a GPU while pods come and go in unusual ways.

use std::time::Duration;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

#[tokio::test]
async fn the_gpu_of_a_long_init_container_is_given_to_nobody_else() {
    let Some(world) = World::start(Setup::split(1, 1)).await else {
        return;
    };
    // pod-resources does not list ordinary init containers, so nothing but the pod itself shows the use.
    let init = PodSpec::counted("a", 1)
        .without_request()
        .with_init(1, 60_000);
    world.create(init).await;
    let used = world.wait_started("a", "init").await;
    world.create(PodSpec::counted("b", 1)).await;
    world.wait_unschedulable("b").await;
    // Far beyond the 10 s after which a granted id that nobody can own would end.
    world
        .wait_for(
            "the init container has run for 25 s",
            Duration::from_secs(60),
            async |world| world.pod_age("a").await > Duration::from_secs(25),
        )
        .await;
    assert_eq!(
        world.held().await,
        1,
        "the init container's GPU is still held"
    );
    assert_eq!(world.phase("b").await.as_deref(), Some("Pending"));
    world.force_delete("a").await;
    assert_eq!(used.len(), 1);
    world.wait_running("b").await;
    let doubles = world.record().doubles();
    assert!(
        doubles.iter().all(|double| double.is_counted_to_counted()),
        "only the force delete may overlap, and only counted to counted: {doubles:?}"
    );
}

#[tokio::test]
async fn an_init_container_and_the_app_container_use_one_id() {
    let Some(world) = World::start(Setup::split(1, 1)).await else {
        return;
    };
    world
        .create(PodSpec::counted("a", 1).with_init(1, 500))
        .await;
    let gpus = world.gpus_of("a").await;
    assert_eq!(gpus.len(), 1, "both containers have the same GPU: {gpus:?}");
    assert_eq!(world.record().uses().len(), 2);
    world.delete("a").await;
    world.wait_all_free().await;
}

#[tokio::test]
async fn a_standalone_claim_goes_from_one_pod_to_the_next() {
    let Some(world) = World::start(Setup::split(1, 2)).await else {
        return;
    };
    world.create_claim("handed", 1).await;
    world
        .create(PodSpec::of_claim("a", "handed").env("FAKE_RUN_MS", "1500"))
        .await;
    world
        .wait_phase("a", "Succeeded", Duration::from_secs(30))
        .await;
    world.create(PodSpec::of_claim("b", "handed")).await;
    assert_eq!(world.gpus_of("b").await.len(), 1);
    world.delete("b").await;
    world.delete("a").await;
    world.wait_all_free().await;
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn a_claim_waits_for_the_process_of_a_force_deleted_claim_pod() {
    let Some(world) = World::start(Setup::split(1, 1)).await else {
        return;
    };
    world.create_template("one", 1).await;
    let lingers = PodSpec::from_template("a", "one", &["main"]).env("FAKE_EXIT_DELAY_MS", "1500");
    world.create(lingers.env("FAKE_LINGER_MS", "3000")).await;
    world.wait_running("a").await;
    world.force_delete("a").await;
    world
        .create(PodSpec::from_template("b", "one", &["main"]))
        .await;
    world.wait_running("b").await;
    let doubles = world.record().doubles();
    assert!(
        doubles.is_empty(),
        "the old process must be gone first: {doubles:?}"
    );
}

#[tokio::test]
async fn a_counted_pod_gets_another_gpu_than_the_one_with_a_force_deleted_pods_process() {
    let Some(world) = World::start(Setup::split(2, 1)).await else {
        return;
    };
    world
        .create(PodSpec::counted("a", 1).env("FAKE_EXIT_DELAY_MS", "1500"))
        .await;
    let first = world.gpus_of("a").await;
    world.force_delete("a").await;
    world.create(PodSpec::counted("b", 1)).await;
    let second = world.gpus_of("b").await;
    assert_ne!(first, second);
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn the_only_counted_gpu_goes_over_a_force_deleted_pods_process_and_that_is_reported() {
    let Some(world) = World::start(Setup::split(1, 0)).await else {
        return;
    };
    let lingers = PodSpec::counted("a", 1).env("FAKE_EXIT_DELAY_MS", "1800");
    world.create(lingers.env("FAKE_LINGER_MS", "4000")).await;
    world.wait_running("a").await;
    world.force_delete("a").await;
    world.create(PodSpec::counted("b", 1)).await;
    world.wait_running("b").await;
    let doubles = world.record().doubles();
    assert_eq!(
        doubles.len(),
        1,
        "the process outlives the second's wait: {doubles:?}"
    );
    assert!(doubles[0].is_counted_to_counted());
    assert!(world.daemon_log().contains("HandedOverBusy"));
}
