//! The kubelet's device manager, as a plugin sees it.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of tests are tests, which clippy does not see"
)]

mod toys;

use std::collections::BTreeSet;

use legacy_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use legacy_proto::podresources::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest, PodResources,
};
use testkit::{Capacity, Kubelet, Phase, Pod, eventually};
use tonic::Status;
use toys::{GPU, Plugin, PluginState, SOON};

struct Node {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
    state: std::sync::Arc<PluginState>,
    plugin: Plugin,
}

async fn node_with(ids: &[&str]) -> Node {
    node_of(PluginState::new(ids)).await
}

async fn node_of(state: std::sync::Arc<PluginState>) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let plugin = Plugin::serve(dir.path(), &state);
    plugin.register().await.unwrap();
    let count = state.devices.borrow().len();
    kubelet.wait_for_healthy(GPU, count, SOON).await;
    Node {
        dir,
        kubelet,
        state,
        plugin,
    }
}

fn set(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|&id| id.to_owned()).collect()
}

fn pod(name: &str) -> Pod {
    Pod::new("default", name, &format!("uid-{name}"))
}

async fn list(node: &Node) -> Vec<PodResources> {
    let answer = lister(node).list(ListPodResourcesRequest {}).await;
    answer.unwrap().into_inner().pod_resources
}

fn lister(node: &Node) -> PodResourcesListerClient<tonic::transport::Channel> {
    let socket = node.dir.path().join("pod-resources/kubelet.sock");
    PodResourcesListerClient::new(testkit::dial::localhost(&socket))
}

fn listed_ids(pod: &PodResources) -> BTreeSet<String> {
    let devices = pod.containers.iter().flat_map(|it| &it.devices);
    devices.flat_map(|it| it.device_ids.clone()).collect()
}

#[tokio::test]
async fn a_counted_pod_gets_devices_and_pod_resources_shows_them() {
    let node = node_with(&["GPU-a", "GPU-b", "GPU-c"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 2))
        .await
        .unwrap();
    let ids = node.kubelet.devices("uid-p", "main", GPU);
    assert_eq!(ids.len(), 2);
    assert_eq!(node.state.allocates().len(), 1);
    let answer = node.kubelet.answer("uid-p", "main", GPU).unwrap();
    assert_eq!(answer.cdi_devices.len(), 2);
    let listed = list(&node).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (listed[0].namespace.as_str(), listed[0].name.as_str()),
        ("default", "p")
    );
    assert_eq!(listed_ids(&listed[0]), ids);
    let topology = listed[0].containers[0].devices[0].topology.clone().unwrap();
    assert_eq!(topology.nodes[0].id, 0);
}

#[tokio::test]
async fn allocatable_resources_are_the_healthy_ones_also_when_they_are_taken() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 2))
        .await
        .unwrap();
    node.state.set_unhealthy("GPU-b");
    node.kubelet.wait_for_healthy(GPU, 1, SOON).await;
    let answer = lister(&node)
        .get_allocatable_resources(AllocatableResourcesRequest {})
        .await;
    let devices = answer.unwrap().into_inner().devices;
    let ids: Vec<&String> = devices.iter().flat_map(|it| &it.device_ids).collect();
    assert_eq!(ids, ["GPU-a"]);
    assert_eq!(
        node.kubelet.capacity(GPU),
        Some(Capacity {
            capacity: 2,
            allocatable: 1
        })
    );
}

#[tokio::test]
async fn the_app_container_uses_the_device_of_the_init_container_again() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    let both = pod("p").init("setup", GPU, 1).app("main", GPU, 1);
    node.kubelet.admit(both).await.unwrap();
    let ids = node.kubelet.devices("uid-p", "setup", GPU);
    assert_eq!(node.kubelet.devices("uid-p", "main", GPU), ids);
    // It is told twice, with the same id.
    let allocates = node.state.allocates();
    assert_eq!(allocates.len(), 2);
    assert_eq!(allocates[0], allocates[1]);
    assert_eq!(node.kubelet.allocated(GPU), ids);
}

#[tokio::test]
async fn a_sidecar_keeps_its_device() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    let both = pod("p").sidecar("proxy", GPU, 1).app("main", GPU, 1);
    node.kubelet.admit(both).await.unwrap();
    assert_ne!(
        node.kubelet.devices("uid-p", "proxy", GPU),
        node.kubelet.devices("uid-p", "main", GPU)
    );
    let containers: Vec<String> = list(&node).await[0]
        .containers
        .iter()
        .map(|it| it.name.clone())
        .collect();
    assert_eq!(containers, ["proxy", "main"]);
}

#[tokio::test]
async fn pod_resources_hides_what_only_an_init_container_has() {
    let node = node_with(&["GPU-a"]).await;
    let init_only = pod("p").init("setup", GPU, 1).app("main", GPU, 0);
    node.kubelet.admit(init_only).await.unwrap();
    assert_eq!(node.kubelet.devices("uid-p", "setup", GPU), set(&["GPU-a"]));
    assert_eq!(listed_ids(&list(&node).await[0]), set(&[]));
}

#[tokio::test]
async fn the_plugin_may_choose_and_is_told_what_it_must_include() {
    let state = PluginState::new(&["GPU-a", "GPU-b", "GPU-c", "GPU-d"]);
    *state.prefers.lock().unwrap() = vec!["GPU-c".to_owned(), "GPU-d".to_owned()];
    let node = node_of(state).await;
    let two = pod("p").init("setup", GPU, 1).app("main", GPU, 2);
    node.kubelet.admit(two).await.unwrap();
    let setup = node.kubelet.devices("uid-p", "setup", GPU);
    assert!(setup.is_subset(&set(&["GPU-c", "GPU-d"])), "{setup:?}");
    assert_eq!(
        node.kubelet.devices("uid-p", "main", GPU),
        set(&["GPU-c", "GPU-d"])
    );
    let questions = node.state.questions.lock().unwrap().clone();
    assert_eq!(questions.len(), 2);
    assert_eq!(questions[1].available_device_i_ds.len(), 4);
    let must_include = questions[1].must_include_device_i_ds.iter().cloned();
    assert_eq!(setup, must_include.collect());
    assert_eq!(questions[1].allocation_size, 2);
}

#[tokio::test]
async fn a_refused_allocate_fails_the_pod_for_good_and_gives_the_device_back() {
    let node = node_with(&["GPU-a"]).await;
    *node.state.refusal.lock().unwrap() = Some(Status::resource_exhausted("GPU-a is held"));
    let rejection = node.kubelet.admit(pod("p").app("main", GPU, 1)).await;
    let rejection = rejection.unwrap_err();
    assert_eq!(rejection.reason, "UnexpectedAdmissionError");
    assert_eq!(
        rejection.message,
        "Allocate failed due to rpc error: code = ResourceExhausted desc = GPU-a is held, which is unexpected"
    );
    assert_eq!(node.kubelet.phase("uid-p"), Some(Phase::Failed));
    assert_eq!(node.kubelet.allocated(GPU), set(&[]));
    assert!(list(&node).await.is_empty());
    *node.state.refusal.lock().unwrap() = None;
    node.kubelet
        .admit(pod("q").app("main", GPU, 1))
        .await
        .unwrap();
}

#[tokio::test]
async fn more_than_there_is_fails_without_a_call() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    let rejection = node.kubelet.admit(pod("q").app("main", GPU, 2)).await;
    assert_eq!(
        rejection.unwrap_err().message,
        "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 2, Available: 1, which is unexpected"
    );
    assert_eq!(node.state.allocates().len(), 1);
}

#[tokio::test]
async fn a_resource_that_nobody_registered_is_ignored() {
    let node = node_with(&["GPU-a"]).await;
    let other = pod("p").app("main", "example.com/fpga", 1);
    node.kubelet.admit(other).await.unwrap();
    assert!(node.state.allocates().is_empty());
}

#[tokio::test]
async fn the_end_of_the_stream_makes_all_devices_unhealthy_until_the_plugin_registers_again() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    node.plugin.end().await;
    node.kubelet.wait_for_healthy(GPU, 0, SOON).await;
    assert_eq!(node.kubelet.capacity(GPU).unwrap().capacity, 2);
    let rejection = node.kubelet.admit(pod("p").app("main", GPU, 1)).await;
    assert_eq!(
        rejection.unwrap_err().message,
        "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected"
    );
    let plugin = Plugin::serve(node.dir.path(), &node.state);
    plugin.register().await.unwrap();
    node.kubelet.wait_for_healthy(GPU, 2, SOON).await;
    node.kubelet
        .admit(pod("q").app("main", GPU, 1))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_second_register_of_an_open_socket_fails_and_blinds_the_kubelet() {
    let node = node_with(&["GPU-a"]).await;
    let again = node.plugin.register().await.unwrap_err();
    assert!(
        again
            .message()
            .starts_with("device plugin already connected: "),
        "{again}"
    );
    node.plugin.end().await;
    let plugin = Plugin::serve(node.dir.path(), &node.state);
    let still = plugin.register().await.unwrap_err();
    assert!(still.message().contains("already connected"), "{still}");
    assert_eq!(node.kubelet.capacity(GPU).unwrap().allocatable, 1);
    node.kubelet.restart().await.unwrap();
    let plugin = Plugin::serve(node.dir.path(), &node.state);
    plugin.register().await.unwrap();
    node.kubelet.wait_for_healthy(GPU, 1, SOON).await;
}

#[tokio::test]
async fn a_wrong_version_or_resource_name_is_refused() {
    let node = node_with(&["GPU-a"]).await;
    let version = node.plugin.register_as("v1", GPU).await.unwrap_err();
    assert_eq!(
        version.message(),
        "requested API version \"v1\" is not supported by kubelet. Supported version is [\"v1beta1\"]"
    );
    for name in ["gpu", "kubernetes.io/gpu", "/gpu", "nvidia.com/"] {
        let refused = node.plugin.register_as("v1beta1", name).await.unwrap_err();
        assert_eq!(
            refused.message(),
            format!("the ResourceName \"{name}\" is invalid")
        );
    }
}

#[tokio::test]
async fn what_a_pod_had_is_freed_by_the_next_list_and_by_the_next_allocate() {
    let node = node_with(&["GPU-a"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.request_deletion("uid-p");
    assert_eq!(list(&node).await.len(), 1, "a terminating pod is active");
    node.kubelet.terminate("uid-p").await.unwrap();
    assert_eq!(node.kubelet.allocated(GPU), set(&["GPU-a"]));
    assert!(list(&node).await.is_empty());
    assert_eq!(node.kubelet.allocated(GPU), set(&[]));

    node.kubelet
        .admit(pod("q").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.force_delete("uid-q");
    node.kubelet
        .admit(pod("r").app("main", GPU, 1))
        .await
        .unwrap();
    assert_eq!(node.kubelet.devices("uid-r", "main", GPU), set(&["GPU-a"]));
}

#[tokio::test]
async fn get_knows_active_pods_only() {
    let node = node_with(&["GPU-a"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    let request = || GetPodResourcesRequest {
        pod_name: "p".to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let answer = lister(&node).get(request()).await.unwrap().into_inner();
    assert_eq!(listed_ids(&answer.pod_resources.unwrap()), set(&["GPU-a"]));
    node.kubelet
        .finish("uid-p", Phase::Succeeded)
        .await
        .unwrap();
    let status = lister(&node).get(request()).await.unwrap_err();
    assert_eq!(status.message(), "pod p in namespace default not found");
}

#[tokio::test]
async fn a_restart_wipes_the_sockets_and_keeps_the_book() {
    let node = node_with(&["GPU-a", "GPU-b"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.run("uid-p").await.unwrap();
    let ids = node.kubelet.devices("uid-p", "main", GPU);
    let answer = node.kubelet.answer("uid-p", "main", GPU);
    let socket = node.dir.path().join("device-plugins/toy.sock");
    assert!(socket.exists());
    node.kubelet.restart().await.unwrap();
    assert!(!socket.exists());
    assert_eq!(node.kubelet.devices("uid-p", "main", GPU), ids);
    assert_eq!(node.kubelet.answer("uid-p", "main", GPU), answer);
    assert_eq!(node.kubelet.capacity(GPU).unwrap().capacity, 0);
    assert_eq!(node.state.allocates().len(), 1);

    let plugin = Plugin::serve(node.dir.path(), &node.state);
    plugin.register().await.unwrap();
    node.kubelet.wait_for_healthy(GPU, 2, SOON).await;
    node.kubelet
        .admit(pod("q").app("main", GPU, 1))
        .await
        .unwrap();
    assert!(ids.is_disjoint(&node.kubelet.devices("uid-q", "main", GPU)));
}

#[tokio::test]
async fn a_pod_that_does_not_run_yet_fails_when_the_kubelet_restarts() {
    let node = node_with(&["GPU-a"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.restart().await.unwrap();
    assert_eq!(node.kubelet.phase("uid-p"), Some(Phase::Failed));
}

#[tokio::test]
async fn a_kubelet_without_its_checkpoint_gives_away_what_a_running_pod_has() {
    let node = node_with(&["GPU-a"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.run("uid-p").await.unwrap();
    node.kubelet.stop().await;
    node.kubelet.forget_checkpoint();
    node.kubelet.resume().await.unwrap();
    let plugin = Plugin::serve(node.dir.path(), &node.state);
    plugin.register().await.unwrap();
    node.kubelet.wait_for_healthy(GPU, 1, SOON).await;
    assert_eq!(listed_ids(&list(&node).await[0]), set(&[]));
    node.kubelet
        .admit(pod("q").app("main", GPU, 1))
        .await
        .unwrap();
    assert_eq!(node.kubelet.devices("uid-q", "main", GPU), set(&["GPU-a"]));
    // A container of the first pod restarts: it is given devices anew, if there are any.
    let error = node.kubelet.run("uid-p").await.unwrap_err();
    assert!(error.contains("unavailable for nvidia.com/gpu"), "{error}");
    node.kubelet.terminate("uid-q").await.unwrap();
    node.kubelet.run("uid-p").await.unwrap();
    assert_eq!(node.kubelet.devices("uid-p", "main", GPU), set(&["GPU-a"]));
}

#[tokio::test]
async fn nothing_is_freed_before_the_kubelet_knows_all_its_pods() {
    let node = node_with(&["GPU-a"]).await;
    node.kubelet
        .admit(pod("p").app("main", GPU, 1))
        .await
        .unwrap();
    node.kubelet.hold_sources();
    node.kubelet.force_delete("uid-p");
    assert!(list(&node).await.is_empty());
    assert_eq!(node.kubelet.allocated(GPU), set(&["GPU-a"]));
    node.kubelet.release_sources();
    list(&node).await;
    assert_eq!(node.kubelet.allocated(GPU), set(&[]));
}

#[tokio::test]
async fn the_same_seed_picks_the_same_devices() {
    let mut picks = Vec::new();
    for seed in [7, 7, 8, 9, 10] {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start_seeded(dir.path(), seed).await.unwrap();
        let state = PluginState::new(&["a", "b", "c", "d", "e", "f", "g", "h"]);
        let plugin = Plugin::serve(dir.path(), &state);
        plugin.register().await.unwrap();
        kubelet.wait_for_healthy(GPU, 8, SOON).await;
        for name in ["p", "q", "r"] {
            kubelet.admit(pod(name).app("main", GPU, 1)).await.unwrap();
        }
        picks.push(state.allocates());
    }
    assert_eq!(picks[0], picks[1]);
    assert!(picks[1..].iter().any(|it| it != &picks[0]), "{picks:?}");
}

#[tokio::test]
async fn register_waits_for_a_plugin_that_listens_a_little_later() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let state = PluginState::new(&["GPU-a"]);
    let early = Plugin::serve(dir.path(), &state);
    std::fs::remove_file(dir.path().join("device-plugins/toy.sock")).unwrap();
    let (registered, _late) = tokio::join!(early.register(), async {
        tokio::task::yield_now().await;
        Plugin::serve(dir.path(), &state)
    });
    registered.unwrap();
    eventually("its device", SOON, || {
        kubelet.healthy(GPU) == set(&["GPU-a"])
    })
    .await;
}
