//! The main job on real Kubernetes, shown: `make demo-cluster`.

use std::time::Duration;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// Who has what, one line a GPU.
async fn show(world: &World) {
    let status = world.status().await;
    for unit in status["units"].as_array().expect("/status has units") {
        let text = |key: &str| unit[key].as_str().unwrap_or("-").to_owned();
        let hold = &unit["holds"][0];
        let holder = if hold.is_null() {
            String::from("free")
        } else {
            let of = if hold["pod"].is_null() {
                &hold["claim"]
            } else {
                &hold["pod"]
            };
            format!(
                "{} by {}/{}",
                hold["phase"].as_str().unwrap_or("-"),
                of["namespace"].as_str().unwrap_or("-"),
                of["name"].as_str().unwrap_or("-")
            )
        };
        println!(
            "  {:6} {} side {:7} {holder}",
            text("device"),
            text("unit"),
            text("side")
        );
    }
}

#[tokio::test]
#[ignore = "a demonstration for people: run it with `make demo-cluster`"]
async fn the_main_job() {
    println!(
        "1. Real Kubernetes 1.37 starts, on a fake NVML with 8 GPUs; 5 are for counted pods, 3 for claims."
    );
    let Some(world) = World::start(Setup::split(5, 3).impatient()).await else {
        return;
    };
    show(&world).await;

    println!("2. Five pods ask for nvidia.com/gpu: 1, three pods bring a ResourceClaim.");
    world.create_template("one-gpu", 1).await;
    for n in 0..5 {
        world
            .create(PodSpec::counted(&format!("counted-{n}"), 1))
            .await;
    }
    for n in 0..3 {
        world
            .create(PodSpec::from_template(
                &format!("claim-{n}"),
                "one-gpu",
                &["main"],
            ))
            .await;
    }
    for n in 0..5 {
        world.wait_running(&format!("counted-{n}")).await;
    }
    for n in 0..3 {
        world.wait_running(&format!("claim-{n}")).await;
    }
    show(&world).await;

    println!("3. The next of each kind waits for a GPU of its own kind.");
    world.create(PodSpec::counted("counted-next", 1)).await;
    world.wait_unschedulable("counted-next").await;
    println!("  counted-next is Pending; counted-0 ends ...");
    world.delete("counted-0").await;
    world.wait_running("counted-next").await;
    println!("  ... and counted-next is Running.");

    println!(
        "4. An allocation that names a GPU of a counted pod (written by hand) is refused on the node:"
    );
    let held = world.gpus_of("counted-next").await;
    let device = world.device_of(&held[0]).await;
    world.create_claim("forced", 1).await;
    world
        .create(PodSpec::of_claim("claimant", "forced").on_node())
        .await;
    world.allocate_by_hand("forced", &device, "claimant").await;
    let event = world
        .wait_event("claimant", "UnitHeld", Duration::from_secs(60))
        .await;
    println!("  {event}");
    world.wait_gone("claimant").await;
    println!("  ... and Kubernetes evicts the pod, which never started.");

    let doubles = world.record().doubles();
    println!(
        "5. The container runtime's record: {} GPUs were ever used by two holders at once.",
        doubles.len()
    );
    assert!(doubles.is_empty(), "{doubles:#?}");
}
