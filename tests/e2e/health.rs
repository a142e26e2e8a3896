//! What a pod's status says of the devices of its claims.

use std::time::Duration;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// The kubelet hears of a change at once, and writes the pod's status with its next sync, which may take a minute.
const TOLD: Duration = Duration::from_mins(3);

impl World {
    /// `Healthy` or another word, with the message: of the only device of a pod's only claim.
    async fn device_health(&self, pod: &str) -> Option<(String, String)> {
        let pod = self.pods().get(pod).await.ok()?;
        let containers = pod.status?.container_statuses?;
        let resources = containers.into_iter().next()?.allocated_resources_status?;
        let health = resources
            .into_iter()
            .next()?
            .resources?
            .into_iter()
            .next()?;
        Some((health.health?, health.message.unwrap_or_default()))
    }
}

#[tokio::test]
async fn the_pod_of_a_claim_says_that_its_gpu_is_healthy_and_why_it_is_not_when_it_is_lost() {
    let Some(world) = World::start(Setup::split(2, 6)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world
        .create(PodSpec::from_template("a", "one", &["main"]))
        .await;
    let gpu = world.gpus_of("a").await.remove(0);
    world
        .wait_for(
            "the pod says that its GPU is healthy",
            TOLD,
            async |world| {
                let told = world.device_health("a").await;
                told.is_some_and(|(health, _)| health == "Healthy")
            },
        )
        .await;

    world.node.lose(&gpu).expect("a GPU of the scenario");
    world
        .wait_for("the pod says that its GPU is lost", TOLD, async |world| {
            let told = world.device_health("a").await;
            told.is_some_and(|(health, why)| {
                health == "Unhealthy" && why.contains("NVML does not see") && why.contains(&gpu)
            })
        })
        .await;
    assert_eq!(world.phase("a").await.as_deref(), Some("Running"));
}

#[tokio::test]
async fn a_gpu_with_an_error_stays_with_its_pod_and_goes_to_nobody_until_the_driver_is_content() {
    /// Numbers of `nvmlDeviceGpuRecoveryAction_t`.
    const RESET: u32 = 1;
    const NOTHING: u32 = 0;
    let Some(world) = World::start(Setup::split(1, 1)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world
        .create(PodSpec::from_template("a", "one", &["main"]))
        .await;
    let claimed = world.gpus_of("a").await.remove(0);
    let gpus = world.node.gpus().into_iter().map(|gpu| gpu.uuid);
    let counted = gpus.into_iter().find(|gpu| *gpu != claimed);
    let counted = counted.expect("there are two");
    for gpu in [&claimed, &counted] {
        world
            .node
            .set_recovery(gpu, RESET)
            .expect("a GPU of the scenario");
        world
            .node
            .report_xid(gpu, 79)
            .expect("a GPU of the scenario");
    }
    world
        .wait_for("the pod says which error it was", TOLD, async |world| {
            let told = world.device_health("a").await;
            told.is_some_and(|(health, why)| {
                health == "Unhealthy" && why.contains("XID 79") && why.contains("reset the GPU")
            })
        })
        .await;
    // Neither kind gets the free one, nor the one that is held.
    world.create(PodSpec::counted("b", 1)).await;
    world
        .create(PodSpec::from_template("c", "one", &["main"]))
        .await;
    for pod in ["b", "c"] {
        world.wait_unschedulable(pod).await;
    }
    assert_eq!(world.phase("a").await.as_deref(), Some("Running"));

    world
        .node
        .set_recovery(&counted, NOTHING)
        .expect("a GPU of the scenario");
    assert_eq!(world.gpus_of("b").await, [counted]);
    assert_eq!(world.phase("a").await.as_deref(), Some("Running"));
    assert_eq!(world.phase("c").await.as_deref(), Some("Pending"));
}
