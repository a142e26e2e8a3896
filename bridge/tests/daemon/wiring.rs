//! GPUs that are wired in different ways: which of them a pod gets.

use std::path::Path;

use fake_nvml::{FakeNode, Scenario};

use crate::live::{config_says, registrations};
use crate::world::{RESOURCE, SOON, World, until};

/// The numbers of GPUs, by their ids.
fn numbers(world: &World, ids: &[String]) -> Vec<usize> {
    let gpus = world.node.gpus();
    let number = |id: &String| gpus.iter().position(|gpu| gpu.uuid == *id).unwrap();
    let mut numbers: Vec<usize> = ids.iter().map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// Which of the first GPUs the daemon prefers for a pod.
async fn preferred(world: &World, available: usize, size: usize) -> Vec<usize> {
    let gpus = world.node.gpus().into_iter().take(available);
    let ids = gpus.map(|gpu| gpu.uuid);
    let preferred = world.plugin().prefer(&ids.collect::<Vec<_>>(), size).await;
    numbers(world, &preferred.unwrap())
}

/// Eight GPUs of which the last two of the first seven are not the best connected.
fn hybrid_cube_mesh() -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fake-nvml/scenarios");
    Scenario::load(&folder.join("dgx-1v.yaml")).unwrap()
}

#[tokio::test]
async fn a_pod_gets_the_gpus_that_are_best_connected_and_no_call_asks_nvml_for_that() {
    let world = World::of_configured(&hybrid_cube_mesh(), "mode: legacy\n").await;
    // Two links and one switch, where the tail of the list has two links and two switches.
    until("the wiring is known", SOON, async || {
        preferred(&world, 7, 2).await == [2, 3]
    })
    .await;
    world.node.start_trace().unwrap();
    world.run_counted("one", 1).await;
    assert_eq!(numbers(&world, &world.ids("one")), [7]);
    world.run_counted("two", 2).await;
    assert_eq!(numbers(&world, &world.ids("two")), [2, 3]);
    let trace = world.node.trace();
    let about_wiring = |call: &&String| call.contains("Topology") || call.contains("NvLink");
    let asked: Vec<&String> = trace.iter().filter(about_wiring).collect();
    assert!(asked.is_empty() && !trace.is_empty(), "{asked:?}");
}

#[tokio::test]
async fn what_is_known_of_the_wiring_holds_while_it_is_read_anew() {
    const SEEN: &str = "NVML answers";
    const READ: &str = "the connections between the GPUs are read";
    let world = World::running(2).await;
    let times = |what: &str| world.log().text().matches(what).count();
    until("the wiring is read", SOON, async || times(READ) == 1).await;
    world.rescan();
    until("it is read anew", SOON, async || times(READ) == 2).await;
    assert_eq!(times(SEEN), 1, "nothing has changed");
}

/// Waits until both kinds are offered all eight GPUs.
async fn rests(world: &World) {
    world.counts("8").await;
    world.kubelet().wait_for_healthy(RESOURCE, 8, SOON).await;
    until("claims are offered all", SOON, async || {
        world.open_devices().len() == 8
    })
    .await;
}

/// What has been written at the API server about this node's GPUs.
fn writes(world: &World) -> Vec<u64> {
    let verbs = ["create", "update", "patch", "delete"].into_iter();
    let counts = verbs.flat_map(|verb| {
        ["resourceslices", "nodes", "nodes/status"].map(|what| world.api.count(verb, what))
    });
    counts.collect()
}

#[tokio::test]
async fn what_is_preferred_changes_with_the_file_and_nothing_registers_anew() {
    let mut world = World::with(&hybrid_cube_mesh(), FakeNode::create).await;
    world.api.allow("patch", "nodes/status");
    world.configure("mode: both\n");
    let mut world = world.started().await;
    until("the wiring is known", SOON, async || {
        preferred(&world, 7, 2).await == [2, 3]
    })
    .await;
    rests(&world).await;
    assert_eq!(world.status().await["allocation"]["prefer"], "wiring");
    let before = (registrations(&world), writes(&world));
    assert!(before.1.contains(&1), "the slice was made once: {before:?}");
    for (prefer, expected) in [("tail", [5, 6]), ("wiring", [2, 3]), ("tail", [5, 6])] {
        world.configure(&format!("mode: both\nallocation:\n  prefer: {prefer}\n"));
        until(&format!("{prefer} is preferred"), SOON, async || {
            let shown = world.status().await["allocation"]["prefer"] == prefer;
            shown && preferred(&world, 7, 2).await == expected
        })
        .await;
    }
    rests(&world).await;
    assert_eq!((registrations(&world), writes(&world)), before);
    world.configure("mode: both\nallocation:\n  prefer: packed\n");
    config_says(&world, &["allocation.prefer", "allowed: wiring, tail"]).await;
    assert_eq!(preferred(&world, 7, 2).await, [5, 6], "as it was");
}
