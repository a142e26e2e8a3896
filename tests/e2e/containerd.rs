//! On containerd and runc: what a real container sees of the node's GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use serde::Deserialize;

use crate::objects::PodSpec;
use crate::world::{Setup, World, tick};

/// The only image there is: its program prints what it sees, and waits.
const IMAGE: &str = "gpu-bridge.test/sleeper:1";
/// The major number of NVIDIA's GPUs.
const NVIDIA_MAJOR: u32 = 195;
/// What every container with a GPU needs besides it.
const COMMON: [&str; 3] = ["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"];
/// A program that has started prints at once.
const PRINTED: Duration = Duration::from_secs(30);

/// The line that the program prints.
#[derive(Debug, Deserialize)]
struct Sight {
    devices: Vec<Device>,
    env: BTreeMap<String, String>,
}

/// A device node whose name begins with `nvidia`.
#[derive(Debug, Deserialize)]
struct Device {
    name: String,
    major: u32,
    minor: u32,
}

impl Sight {
    /// The numbers of its GPUs, each once.
    fn gpus(&self) -> BTreeSet<u32> {
        let numbered = self.devices.iter().filter_map(|device| {
            let minor: u32 = device.name.strip_prefix("nvidia")?.parse().ok()?;
            assert_eq!(
                (device.major, device.minor),
                (NVIDIA_MAJOR, minor),
                "{} leads to another device",
                device.name
            );
            Some(minor)
        });
        numbered.collect()
    }

    /// Everything else.
    fn others(&self) -> BTreeSet<&str> {
        let names = self.devices.iter().map(|device| device.name.as_str());
        names
            .filter(|name| {
                name.strip_prefix("nvidia")
                    .is_none_or(|rest| rest.parse::<u32>().is_err())
            })
            .collect()
    }
}

/// Waits for what the program in a pod printed.
async fn sight(world: &World, pod: &str) -> Sight {
    world.wait_running(pod).await;
    let object = world.pods().get(pod).await.expect("the pod exists");
    let uid = object.uid().expect("it has a UID");
    let log: PathBuf = world
        .state()
        .join(format!("pod-logs/default_{pod}_{uid}/main/0.log"));
    let deadline = Instant::now() + PRINTED;
    loop {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        // The runtime writes time, stream and "F" (the line is whole) before each line.
        if let Some((_, line)) = text
            .split_once('\n')
            .and_then(|(line, _)| line.split_once(" stdout F "))
        {
            return serde_json::from_str(line).expect("the program prints JSON");
        }
        assert!(
            Instant::now() < deadline,
            "the container of {pod} has printed nothing to {}: {text:?}",
            log.display()
        );
        tick().await;
    }
}

/// The numbers of the GPUs that are held through a face.
async fn held_through(world: &World, face: &str) -> BTreeSet<u32> {
    let status = world.status().await;
    let units = status["units"].as_array().expect("/status has units");
    let held = units.iter().filter(|unit| {
        unit["holds"]
            .as_array()
            .is_some_and(|holds| holds.iter().any(|hold| hold["face"] == face))
    });
    let gpus = world.node.gpus();
    held.map(|unit| {
        let gpu = gpus.iter().find(|gpu| unit["unit"] == gpu.uuid.as_str());
        gpu.expect("every unit is a GPU of the node").minor
    })
    .collect()
}

#[tokio::test]
#[ignore = "needs root, a C compiler and minutes: make e2e-containerd"]
async fn a_real_container_sees_exactly_the_gpus_that_it_was_given() {
    let Some(world) = World::start(Setup::split(4, 2).on_containerd()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let plain = PodSpec::counted("plain", 1).without_request();
    let counted = PodSpec::counted("counted", 2);
    let claimed = PodSpec::from_template("claimed", "one", &["main"]);
    for pod in [plain, counted, claimed] {
        world.create(pod.image(IMAGE)).await;
    }

    let seen = sight(&world, "plain").await;
    assert!(
        seen.devices.is_empty(),
        "a pod that asked for no GPU sees none: {seen:?}"
    );

    let mut given = BTreeSet::new();
    for (pod, face, count) in [("counted", "legacy", 2), ("claimed", "dra", 1)] {
        let seen = sight(&world, pod).await;
        let gpus = seen.gpus();
        assert_eq!(gpus.len(), count, "{pod} asked for {count}: {seen:?}");
        assert_eq!(
            gpus,
            held_through(&world, face).await,
            "{pod} sees what the ledger says that it has"
        );
        assert_eq!(seen.others(), BTreeSet::from(COMMON), "{pod}");
        assert_eq!(
            seen.env.get("NVIDIA_VISIBLE_DEVICES").map(String::as_str),
            Some("void"),
            "an inherited NVIDIA_VISIBLE_DEVICES=all must not open the other GPUs"
        );
        given.extend(gpus);
    }
    assert_eq!(given.len(), 3, "nothing is given twice: {given:?}");

    for pod in ["plain", "counted", "claimed"] {
        world.delete(pod).await;
    }
    world.wait_no_claims().await;
    world.wait_all_free().await;
}
