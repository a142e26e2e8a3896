//! What a dashboard stands on: from the UUID of a GPU to its pod, for both kinds, and names that stay.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fake_nvml::{Gpu, Scenario};
use serde_json::Value;

use crate::dcgm::{self, Label};
use crate::world::{NODE, World, claim_uid};

/// The devices of the slice, by name.
fn devices(world: &World) -> BTreeMap<String, Value> {
    let slices = world.api.list("resourceslices").into_iter();
    let devices = slices.flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap());
    let named = devices.map(|device| (device["name"].as_str().unwrap().to_owned(), device));
    named.collect()
}

/// A text among the attributes of a device.
fn attribute(device: &Value, name: &str) -> String {
    let text = device["attributes"][name]["string"].as_str();
    text.unwrap_or_else(|| panic!("{name} is missing in {device}"))
        .to_owned()
}

/// UUIDs by the names of devices.
fn named(world: &World) -> BTreeMap<String, String> {
    let devices = devices(world).into_iter();
    devices
        .map(|(name, device)| (name, attribute(&device, "uuid")))
        .collect()
}

async fn labels(world: &World) -> BTreeMap<String, Label> {
    let uuids = named(world).into_iter();
    let uuids = uuids.map(|(name, uuid)| ((NODE.to_owned(), name), uuid));
    dcgm::labels(&world.path("k"), &uuids.collect()).await
}

/// The GPUs whose device nodes a CDI file gives to one of its devices.
fn opened(world: &World, file: &Path, device: &str) -> Vec<String> {
    let spec: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let all = spec["devices"].as_array().unwrap().iter();
    let mut found = all.filter(|it| it["name"] == device);
    let found = found
        .next()
        .unwrap_or_else(|| panic!("no {device}: {spec}"));
    let nodes = found["containerEdits"]["deviceNodes"].as_array().unwrap();
    let paths = nodes.iter().map(|node| node["path"].as_str().unwrap());
    let minors = paths.filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok());
    let uuid = |minor: u32| {
        let mut gpus = world.node.gpus().into_iter();
        gpus.find(|gpu| gpu.minor == minor).unwrap().uuid
    };
    minors.map(uuid).collect()
}

/// A name of a CDI device without its kind.
fn bare(name: &str) -> &str {
    name.split_once('=').unwrap().1
}

#[tokio::test]
async fn from_a_gpus_uuid_its_pod_is_found_whichever_way_it_asked() {
    let world = World::running(4).await;
    world.run_counted("counted", 2).await;
    world.run_claimant("claimed", "gpu-1").await;
    let labels = labels(&world).await;

    let spec = world.claim_spec(&claim_uid("claimed"));
    let name = format!("{}-gpu-1", claim_uid("claimed"));
    let claimed = opened(&world, &spec, &name);
    assert_eq!(claimed, [world.gpu("gpu-1").uuid]);
    let counted = world.counted_devices("counted");
    let counted = counted.iter();
    let counted: Vec<String> = counted
        .flat_map(|name| opened(&world, &world.counted_spec(), bare(name)))
        .collect();
    assert_eq!(counted.len(), 2);
    let wanted = counted
        .iter()
        .map(|gpu| (gpu.clone(), Label::of("counted", None)))
        .chain([(claimed[0].clone(), Label::of("claimed", Some("claimed")))]);
    assert_eq!(labels, wanted.collect());
}

#[tokio::test]
async fn every_device_of_the_slice_says_which_gpu_it_is() {
    let world = World::running(3).await;
    let devices = devices(&world);
    let gpus = world.node.gpus();
    assert_eq!(devices.len(), gpus.len());
    for gpu in gpus {
        let device = &devices[&format!("gpu-{}", gpu.minor)];
        assert_eq!(attribute(device, "uuid"), gpu.uuid);
        let bus_id = attribute(device, "resource.kubernetes.io/pciBusID");
        assert_eq!(bus_id, gpu.pci_bus_id);
    }
}

/// The node after a reboot in which its first GPU was not there: what is left has other indices and minor numbers.
fn without_the_first(gpus: &[Gpu]) -> Scenario {
    let mut scenario = Scenario::h100(0);
    for gpu in &gpus[1..] {
        let mut one = Scenario::h100(1).gpus.remove(0);
        one.uuid = Some(gpu.uuid.clone());
        one.pci_bus_id = Some(gpu.pci_bus_id.clone());
        scenario.gpus.push(one);
    }
    scenario.gpus.retain(|group| group.count > 0);
    scenario
}

#[tokio::test]
async fn names_stay_with_their_gpus_when_one_is_gone_after_a_restart_and_when_another_takes_its_place()
 {
    let mut world = World::running(4).await;
    world.run_counted("counted", 1).await;
    world.run_claimant("claimed", "gpu-1").await;
    let before = labels(&world).await;
    let names = named(&world);
    let gpus = world.node.gpus();

    world.kill_daemon();
    let mut scenario = without_the_first(&gpus);
    world.node.replace_scenario(&scenario).unwrap();
    let minor = |world: &World| {
        let now = world.node.gpus();
        now.iter()
            .find(|gpu| gpu.uuid == gpus[1].uuid)
            .unwrap()
            .minor
    };
    assert_eq!(minor(&world), 0, "the numbers have moved");
    world.start_daemon();
    world.ready().await;
    assert_eq!(named(&world), names);
    assert_eq!(labels(&world).await, before);

    // Another GPU in its slot.
    world.kill_daemon();
    let mut other = Scenario::h100(1).gpus.remove(0);
    other.uuid = Some("GPU-00000000-0000-4000-8000-00000000abcd".to_owned());
    scenario.gpus.insert(0, other);
    world.node.replace_scenario(&scenario).unwrap();
    world.start_daemon();
    world.ready().await;
    let now = named(&world);
    for (name, uuid) in &names {
        assert_eq!(
            now.get(name),
            Some(uuid),
            "{name} is the same GPU as before"
        );
    }
    assert_eq!(
        now.len(),
        names.len() + 1,
        "the new one has a name of its own"
    );
    assert_eq!(labels(&world).await, before);
}
