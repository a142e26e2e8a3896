//! NVIDIA's two daemons, or what stands for them, on the node of the bridge.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams};

use crate::objects::PodSpec;
use crate::standin::StandIns;
use crate::world::{Setup, World};

/// A rival must be gone for 30 s, and the kubelet takes some more to register.
const TAKEN_OVER: Duration = Duration::from_secs(60);

async fn wait_named(world: &World) {
    world
        .wait_for(
            "/readyz names both of the other daemons",
            Duration::from_secs(30),
            async |world| {
                world.get("/readyz").await.is_some_and(|(code, body)| {
                    let named = ["OtherRegistrant", "nvidia-gpu.sock", "standin@reg.sock"];
                    code == 503 && named.iter().all(|name| body.contains(name))
                })
            },
        )
        .await;
}

/// Devices that a scheduler may give to a claim, or has given to one.
async fn untainted(world: &World) -> usize {
    let api: Api<ResourceSlice> = Api::all(world.client.clone());
    let slices = api.list(&ListParams::default()).await;
    let slices = slices.expect("slices can be listed").items.into_iter();
    let devices = slices.flat_map(|slice| slice.spec.devices.unwrap_or_default());
    devices.filter(|device| device.taints.is_none()).count()
}

/// Pods of both kinds that nobody gives a GPU to, beside one of each kind that runs.
async fn create_waiting(world: &World, counted: &str, claimant: &str) {
    world.wait_count("1").await;
    world
        .wait_for("no device is offered", TAKEN_OVER, async |world| {
            untainted(world).await == 1
        })
        .await;
    world.create(PodSpec::counted(counted, 1)).await;
    world
        .create(PodSpec::from_template(claimant, "one", &["main"]))
        .await;
    world.wait_unschedulable(counted).await;
    world.wait_unschedulable(claimant).await;
}

async fn wait_ready_again(world: &World) {
    world
        .wait_for("the daemon serves", TAKEN_OVER, async |world| {
            matches!(world.get("/readyz").await, Some((200, _)))
        })
        .await;
}

#[tokio::test]
async fn a_node_of_other_daemons_is_taken_over_without_a_drain_once_they_are_gone() {
    let Some(mut world) = World::without_daemon(Setup::shared(4).impatient()).await else {
        return;
    };
    let stand_ins = StandIns::start(&world).await;
    world.create_template("one", 1).await;
    world.create(PodSpec::counted("counted-1", 1)).await;
    let counted = world.gpus_of("counted-1").await;
    // Nothing else keeps the two of them off one GPU.
    let mut gpus = world.node.gpus().into_iter();
    let other = gpus.find(|gpu| gpu.uuid != counted[0]).expect("a GPU");
    let device = format!("gpu-{}", other.minor);
    world.create_claim("of-other", 1).await;
    world
        .create(PodSpec::of_claim("claim-1", "of-other").on_node())
        .await;
    world.allocate_by_hand("of-other", &device, "claim-1").await;
    let claimed = world.gpus_of("claim-1").await;

    // First start, on a node that others serve: what runs is known, and nothing is given out.
    world.spawn_daemon();
    wait_named(&world).await;
    world
        .wait_for("what runs is taken over", TAKEN_OVER, async |world| {
            world.held().await == 2
        })
        .await;
    create_waiting(&world, "counted-2", "claim-2").await;
    assert_eq!(world.phase("counted-1").await.as_deref(), Some("Running"));

    stand_ins.end().await;
    wait_ready_again(&world).await;
    let mut used: BTreeSet<String> = counted.into_iter().chain(claimed).collect();
    for pod in ["counted-2", "claim-2"] {
        used.extend(world.gpus_of(pod).await);
    }
    assert_eq!(used.len(), 4, "four pods, four GPUs: {used:?}");

    // What the others had prepared is given back to the bridge.
    world.delete("claim-1").await;
    let claims = world.claims();
    let deleted = claims.delete("of-other", &DeleteParams::default()).await;
    deleted.expect("the claim is deleted");
    world.delete("counted-1").await;
    world
        .wait_for("both GPUs are free", TAKEN_OVER, async |world| {
            world.held().await == 2
        })
        .await;

    // They come back while the bridge serves: nothing more is offered, by nobody, and what is held can be given back.
    let stand_ins = StandIns::serve_on(&world).await;
    wait_named(&world).await;
    create_waiting(&world, "counted-3", "claim-3").await;
    world
        .wait_for("the calls come to the bridge", TAKEN_OVER, async |world| {
            let log = world.daemon_log();
            log.matches("the kubelet has registered the DRA driver")
                .count()
                == 2
        })
        .await;
    world.delete("claim-2").await;
    for pod in ["counted-3", "claim-3"] {
        assert_eq!(world.phase(pod).await.as_deref(), Some("Pending"), "{pod}");
    }
    // The API counts the GPU of a pod that has gone; the pod that comes for it is served by the bridge.
    world.delete("counted-2").await;
    world.wait_running("counted-3").await;
    assert!(
        world
            .daemon_log()
            .lines()
            .filter(|line| line.contains("granted"))
            .count()
            >= 2
    );
    stand_ins.end().await;
    assert!(world.record().doubles().is_empty());
}
