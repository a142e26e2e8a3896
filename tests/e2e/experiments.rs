//! The four classic DRA experiments.

use crate::objects::PodSpec;
use crate::world::{Setup, World};

#[tokio::test]
async fn two_pods_with_a_template_get_two_gpus() {
    let Some(world) = World::start(Setup::split(2, 6)).await else {
        return;
    };
    world.create_template("one", 1).await;
    for pod in ["a", "b"] {
        world
            .create(PodSpec::from_template(pod, "one", &["main"]))
            .await;
    }
    let (a, b) = (world.gpus_of("a").await, world.gpus_of("b").await);
    assert_eq!((a.len(), b.len()), (1, 1));
    assert_ne!(a, b);
}

#[tokio::test]
async fn two_containers_of_one_pod_share_one_claims_gpu() {
    let Some(world) = World::start(Setup::split(2, 6)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world
        .create(PodSpec::from_template("a", "one", &["first", "second"]))
        .await;
    let gpus = world.gpus_of("a").await;
    assert_eq!(gpus.len(), 1, "both containers see the same GPU: {gpus:?}");
    let uses = world.record().uses();
    assert_eq!(uses.len(), 2, "each of the two containers has it: {uses:?}");
}

#[tokio::test]
async fn two_pods_share_one_claims_gpu() {
    let Some(world) = World::start(Setup::split(2, 6)).await else {
        return;
    };
    world.create_claim("shared", 1).await;
    for pod in ["a", "b"] {
        world.create(PodSpec::of_claim(pod, "shared")).await;
    }
    let (a, b) = (world.gpus_of("a").await, world.gpus_of("b").await);
    assert_eq!(a.len(), 1);
    assert_eq!(a, b);
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn ten_cycles_of_pods_and_their_claims_leak_nothing() {
    let Some(world) = World::start(Setup::split(2, 6)).await else {
        return;
    };
    world.create_template("two", 2).await;
    for _ in 0..10 {
        for pod in ["a", "b"] {
            world
                .create(PodSpec::from_template(pod, "two", &["main"]))
                .await;
        }
        world.wait_running("a").await;
        world.wait_running("b").await;
        world.delete("a").await;
        world.delete("b").await;
        world.wait_no_claims().await;
    }
    world.wait_all_free().await;
    let left: Vec<_> = std::fs::read_dir(world.state().join("cdi"))
        .expect("the CDI folder")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.contains("claim"))
        .collect();
    assert!(left.is_empty(), "CDI files are left over: {left:?}");
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn a_container_sees_exactly_the_device_nodes_of_its_own_gpus() {
    let Some(world) = World::start(Setup::split(2, 2)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.create(PodSpec::counted("counted", 2)).await;
    world
        .create(PodSpec::from_template("claimed", "one", &["main"]))
        .await;
    for pod in ["counted", "claimed"] {
        let gpus = world.gpus_of(pod).await;
        let mut wanted: Vec<String> = world
            .node
            .gpus()
            .iter()
            .filter(|gpu| gpus.contains(&gpu.uuid))
            .map(|gpu| format!("/dev/nvidia{}", gpu.minor))
            .collect();
        wanted.sort();
        let record = world.record();
        let created = record
            .lines
            .iter()
            .find(|line| line.event == "created" && line.pod.name == pod)
            .expect("the container was created");
        let mut numbered: Vec<&str> = created
            .resolved
            .device_nodes
            .iter()
            .map(|node| node.path.as_str())
            .filter(|path| path.ends_with(|last: char| last.is_ascii_digit()))
            .collect();
        numbered.sort_unstable();
        assert_eq!(numbered, wanted, "{pod} has {gpus:?}");
        let visible = created.resolved.env.get("NVIDIA_VISIBLE_DEVICES");
        assert_eq!(
            visible.map(String::as_str),
            Some("void"),
            "an inherited NVIDIA_VISIBLE_DEVICES=all must not open the other GPUs"
        );
    }
}
