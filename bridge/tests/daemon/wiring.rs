//! GPUs that are wired in different ways: which of them a pod gets.

use std::path::Path;

use fake_nvml::Scenario;
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{ContainerPreferredAllocationRequest, PreferredAllocationRequest};
use testkit::dial;

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
async fn preferred(world: &World, available: usize, size: i32) -> Vec<usize> {
    let gpus = world.node.gpus().into_iter().take(available);
    let ids = gpus.map(|gpu| gpu.uuid);
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_i_ds: ids.collect(),
            must_include_device_i_ds: Vec::new(),
            allocation_size: size,
        }],
    };
    let mut plugin =
        DevicePluginClient::new(dial::localhost(&world.device_plugin_socket().unwrap()));
    let answer = plugin.get_preferred_allocation(request).await.unwrap();
    numbers(
        world,
        &answer.into_inner().container_responses[0].device_i_ds,
    )
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
