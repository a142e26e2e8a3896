//! GPUs that are wired in different ways: which of them a pod gets.

use std::path::Path;

use fake_nvml::Scenario;

use crate::world::{SOON, World, until};

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

#[tokio::test]
async fn a_pod_gets_the_gpus_that_are_best_connected_and_no_call_asks_nvml_for_that() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fake-nvml/scenarios");
    let scenario = Scenario::load(&folder.join("dgx-1v.yaml")).unwrap();
    let world = World::of_configured(&scenario, "mode: legacy\n").await;
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
