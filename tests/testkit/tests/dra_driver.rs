//! The kubelet's DRA manager, as a driver sees it.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of tests are tests, which clippy does not see"
)]

mod toys;

use std::sync::Arc;

use legacy_proto::podresources::ListPodResourcesRequest;
use legacy_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use testkit::{Claim, Kubelet, Pod, Service, eventually};
use toys::{DRIVER, DraDriver, DriverState, SOON};

const REG_SOCKET: &str = "gpu.nvidia.com@reg.sock";

struct Node {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
    state: Arc<DriverState>,
    driver: DraDriver,
}

async fn node() -> Node {
    node_with(&["v1.DRAPlugin", "v1beta1.DRAPlugin"]).await
}

async fn node_with(versions: &[&str]) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let state = DriverState::new(versions);
    let driver = DraDriver::serve(dir.path(), &state, REG_SOCKET);
    kubelet.wait_for_driver(DRIVER, SOON).await;
    Node {
        dir,
        kubelet,
        state,
        driver,
    }
}

fn claim(name: &str) -> Claim {
    Claim::new("default", name, &format!("uid-{name}"), DRIVER)
}

async fn admit(node: &Node, name: &str) -> String {
    let uid = format!("uid-{name}");
    let pod = Pod::new("default", name, &uid).app("main", "", 0);
    node.kubelet.admit(pod).await.unwrap();
    uid
}

#[tokio::test]
async fn a_driver_is_registered_over_a_connection_with_the_socket_path_as_authority() {
    let node = node().await;
    eventually("the status", SOON, || {
        !node.state.statuses.lock().unwrap().is_empty()
    })
    .await;
    let statuses = node.state.statuses.lock().unwrap().clone();
    assert!(statuses[0].plugin_registered && statuses[0].error.is_empty());
    let socket = node.dir.path().join("plugins_registry").join(REG_SOCKET);
    let encoded = socket.to_string_lossy().replace('/', "%2F");
    assert_eq!(
        *node.state.authorities.lock().unwrap(),
        [encoded.clone(), encoded]
    );
    let registered = &node.kubelet.drivers(DRIVER)[0];
    assert_eq!(registered.service, Service::V1);
    assert_eq!(registered.health_service, None);
    assert_eq!(
        registered.endpoint,
        node.dir.path().join("plugins/toy-dra.sock")
    );
}

#[tokio::test]
async fn a_driver_whose_services_the_kubelet_does_not_know_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let state = DriverState::new(&["v9.DRAPlugin"]);
    let _driver = DraDriver::serve(dir.path(), &state, REG_SOCKET);
    eventually("the status", SOON, || {
        !state.statuses.lock().unwrap().is_empty()
    })
    .await;
    let status = state.statuses.lock().unwrap()[0].clone();
    assert!(!status.plugin_registered);
    assert!(
        status
            .error
            .contains("none of services supported by the plugin"),
        "{}",
        status.error
    );
    assert!(kubelet.drivers(DRIVER).is_empty());
    // The driver is told before the kubelet has noted it.
    eventually("the failure is noted", SOON, || {
        kubelet.registration_failures() == [status.error.clone()]
    })
    .await;
}

#[tokio::test]
async fn a_registration_socket_without_an_at_sign_never_registers() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let state = DriverState::new(&["v1.DRAPlugin"]);
    let _driver = DraDriver::serve(dir.path(), &state, "gpu.nvidia.com-reg.sock");
    eventually("the failure", SOON, || {
        !kubelet.registration_failures().is_empty()
    })
    .await;
    let failure = kubelet.registration_failures()[0].clone();
    assert!(failure.contains("name the socket with an @"), "{failure}");
    assert!(kubelet.drivers(DRIVER).is_empty());
}

#[tokio::test]
async fn a_driver_goes_with_its_registration_socket_and_comes_back_with_a_new_one() {
    let node = node().await;
    node.driver.end().await;
    eventually("the driver's going", SOON, || {
        node.kubelet.drivers(DRIVER).is_empty()
    })
    .await;
    let _driver = DraDriver::serve(node.dir.path(), &node.state, REG_SOCKET);
    node.kubelet.wait_for_driver(DRIVER, SOON).await;
}

#[tokio::test]
async fn the_claims_of_a_pod_are_prepared_in_one_call_and_once() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    let claims = [claim("one"), claim("two")];
    node.kubelet.prepare(&pod, &claims).await.unwrap();
    node.kubelet.prepare(&pod, &claims).await.unwrap();
    assert_eq!(node.state.prepares(), [["uid-one", "uid-two"]]);
    assert_eq!(
        node.kubelet.cdi_devices(&claims[0]),
        ["k8s.gpu.nvidia.com/claim=uid-one"]
    );
    let socket = node.dir.path().join("pod-resources/kubelet.sock");
    let mut lister = PodResourcesListerClient::new(testkit::dial::localhost(&socket));
    let answer = lister.list(ListPodResourcesRequest {}).await.unwrap();
    let pods = answer.into_inner().pod_resources;
    let shown = &pods[0].containers[0].dynamic_resources;
    assert_eq!(shown.len(), 2);
    assert_eq!(shown[0].claim_name, "one");
    let device = &shown[0].claim_resources[0];
    assert_eq!(
        (
            device.driver_name.as_str(),
            device.pool_name.as_str(),
            device.device_name.as_str()
        ),
        (DRIVER, "node-1", "gpu-0")
    );
}

#[tokio::test]
async fn pods_that_share_a_claim_prepare_it_once_and_the_last_one_unprepares_it() {
    let node = node().await;
    let (first, second) = (admit(&node, "p").await, admit(&node, "q").await);
    let shared = [claim("shared")];
    node.kubelet.prepare(&first, &shared).await.unwrap();
    node.kubelet.prepare(&second, &shared).await.unwrap();
    assert_eq!(node.state.prepares().len(), 1);
    node.kubelet.terminate(&first).await.unwrap();
    assert!(node.state.unprepares().is_empty());
    node.kubelet.terminate(&second).await.unwrap();
    assert_eq!(node.state.unprepares(), [["uid-shared"]]);
    // Nothing is left to unprepare.
    node.kubelet.unprepare(&second).await.unwrap();
    assert_eq!(node.state.unprepares().len(), 1);
}

#[tokio::test]
async fn a_failed_prepare_is_shown_with_the_driver_s_text_and_tried_again() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    let why = "GPU-a is held by pod default/q".to_owned();
    node.state
        .broken
        .lock()
        .unwrap()
        .insert("uid-one".to_owned(), why);
    let error = node.kubelet.prepare(&pod, &[claim("one")]).await;
    assert_eq!(
        error.unwrap_err(),
        "prepare dynamic resources: NodePrepareResources failed for ResourceClaim one: GPU-a is held by pod default/q"
    );
    node.state.broken.lock().unwrap().clear();
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    assert_eq!(node.state.prepares().len(), 2);
}

#[tokio::test]
async fn a_driver_that_is_not_registered_leaves_nothing_to_unprepare() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let pod = Pod::new("default", "p", "uid-p").app("main", "", 0);
    kubelet.admit(pod).await.unwrap();
    let error = kubelet.prepare("uid-p", &[claim("one")]).await;
    assert_eq!(
        error.unwrap_err(),
        "prepare dynamic resources: DRA driver gpu.nvidia.com is not registered"
    );
    kubelet.terminate("uid-p").await.unwrap();
    assert_eq!(kubelet.phase("uid-p"), None);
}

#[tokio::test]
async fn a_pod_hangs_in_terminating_while_the_driver_is_away() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    node.driver.end().await;
    eventually("the driver's going", SOON, || {
        node.kubelet.drivers(DRIVER).is_empty()
    })
    .await;
    let error = node.kubelet.terminate(&pod).await.unwrap_err();
    assert!(error.ends_with("is not registered"), "{error}");
    assert!(node.kubelet.phase(&pod).is_some());
    let _driver = DraDriver::serve(node.dir.path(), &node.state, REG_SOCKET);
    node.kubelet.wait_for_driver(DRIVER, SOON).await;
    node.kubelet.terminate(&pod).await.unwrap();
    assert_eq!(node.state.unprepares(), [["uid-one"]]);
}

#[tokio::test]
async fn after_a_restart_a_prepared_claim_is_prepared_again_and_still_unprepared_at_its_end() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    node.kubelet.run(&pod).await.unwrap();
    node.kubelet.restart().await.unwrap();
    node.kubelet.wait_for_driver(DRIVER, SOON).await;
    assert_eq!(
        node.kubelet.cdi_devices(&claim("one")),
        ["k8s.gpu.nvidia.com/claim=uid-one"]
    );
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    assert_eq!(node.state.prepares().len(), 2);
    node.kubelet.restart().await.unwrap();
    node.kubelet.wait_for_driver(DRIVER, SOON).await;
    node.kubelet.terminate(&pod).await.unwrap();
    assert_eq!(node.state.unprepares(), [["uid-one"]]);
}

#[tokio::test]
async fn a_force_deleted_pod_is_unprepared_later_and_its_claim_s_name_is_taken_until_then() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    node.kubelet.force_delete(&pod);
    let successor = admit(&node, "q").await;
    let renewed = Claim::new("default", "one", "uid-renewed", DRIVER);
    let error = node
        .kubelet
        .prepare(&successor, std::slice::from_ref(&renewed))
        .await;
    assert_eq!(
        error.unwrap_err(),
        "prepare dynamic resources: old ResourceClaim with same name one and different UID uid-one still exists (previous pod force-deleted?!)"
    );
    node.kubelet.reconcile_claims().await.unwrap();
    assert_eq!(node.state.unprepares(), [["uid-one"]]);
    node.kubelet.prepare(&successor, &[renewed]).await.unwrap();
}

#[tokio::test]
async fn a_kubelet_that_lost_its_claim_checkpoint_unprepares_nothing() {
    let node = node().await;
    let pod = admit(&node, "p").await;
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    node.kubelet.run(&pod).await.unwrap();
    node.kubelet.stop().await;
    node.kubelet.forget_claim_checkpoint();
    node.kubelet.resume().await.unwrap();
    node.kubelet.wait_for_driver(DRIVER, SOON).await;
    node.kubelet.terminate(&pod).await.unwrap();
    assert!(node.state.unprepares().is_empty());
}

#[tokio::test]
async fn a_driver_of_the_older_service_works_as_well() {
    let node = node_with(&["v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth"]).await;
    let registered = node.kubelet.drivers(DRIVER);
    assert_eq!(registered[0].service, Service::V1beta1);
    assert_eq!(
        registered[0].health_service,
        Some("v1alpha1.DRAResourceHealth")
    );
    let pod = admit(&node, "p").await;
    node.kubelet.prepare(&pod, &[claim("one")]).await.unwrap();
    assert_eq!(
        node.kubelet.cdi_devices(&claim("one")),
        ["k8s.gpu.nvidia.com/claim=uid-one"]
    );
    node.kubelet.terminate(&pod).await.unwrap();
    assert_eq!(node.state.unprepares(), [["uid-one"]]);
}
