//! The sockets, and the kubelet that finds them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;

use bridge_core::PodUid;
use dra_proto::registration::registration_client::RegistrationClient;
use dra_proto::registration::{InfoRequest, RegistrationStatus};
use gpu_bridge::dra::{Place, RegistrationState};
use testkit::{ApiServer, Claim, Kubelet, Pod, Service, dial, eventually};

use crate::world::{Arbiter, Asked, DEADLINE, Face, Script, World, claim, folder, result};

const DRIVER: &str = "gpu.nvidia.com";

#[tokio::test]
async fn a_kubelet_registers_the_driver_and_takes_v1() {
    let mut world = World::start(Script::default()).await;
    world
        .face
        .wait_for(|state| *state == RegistrationState::Registered)
        .await;
    let driver = world.kubelet.drivers(DRIVER).remove(0);
    assert_eq!(driver.service, Service::V1);
    assert_eq!(driver.health_service, Some("v1.DRAResourceHealth"));
    assert_eq!(driver.endpoint, world.face.place.service_socket());
    assert!(driver.endpoint.ends_with("plugins/gpu.nvidia.com/dra.sock"));
}

#[tokio::test]
async fn a_kubelet_before_1_34_registers_the_driver_for_v1beta1_and_is_served() {
    let world = World::start(Script::default()).await;
    world.kubelet.know_dra_v1beta1_alone();
    fs::remove_file(world.face.place.registration_socket()).unwrap();
    eventually("the kubelet takes v1beta1", DEADLINE, || {
        let drivers = world.kubelet.drivers(DRIVER);
        drivers.iter().map(|it| it.service).eq([Service::V1beta1])
    })
    .await;

    let object = claim("llm", "u1", &[result("gpu", "gpu-0")], &[]);
    world.api.put("resourceclaims", object);
    let pod = Pod::new("train", "llm-0", "pod-1");
    world.kubelet.admit(pod).await.unwrap();
    let claim = Claim::new("train", "llm", "u1", DRIVER);
    let claims = std::slice::from_ref(&claim);
    world.kubelet.prepare("pod-1", claims).await.unwrap();
    let devices = world.kubelet.cdi_devices(&claim);
    assert_eq!(devices, ["gpu-bridge.dev/claim=u1-gpu-0"]);
    world.kubelet.terminate("pod-1").await.unwrap();
    assert!(matches!(
        world.arbiter.asked().last(),
        Some(Asked::Unprepare(claim)) if claim.uid.as_str() == "u1"
    ));
}

#[tokio::test]
async fn a_kubelet_that_restarts_finds_the_driver_again() {
    let world = World::start(Script::default()).await;
    world.kubelet.restart().await.unwrap();
    world.kubelet.wait_for_driver(DRIVER, DEADLINE).await;
}

#[tokio::test]
async fn a_registration_socket_that_somebody_removed_is_made_again() {
    let world = World::start(Script::default()).await;
    let socket = world.face.place.registration_socket();
    fs::remove_file(&socket).unwrap();
    // The kubelet may find the new one before it has missed the old one.
    eventually("the socket is back", DEADLINE, || socket.exists()).await;
    world.kubelet.wait_for_driver(DRIVER, DEADLINE).await;
}

#[tokio::test]
async fn a_service_socket_that_somebody_removed_is_made_again() {
    let world = World::start(Script::default()).await;
    let socket = world.face.place.service_socket();
    fs::remove_file(&socket).unwrap();
    eventually("the socket is back", DEADLINE, || socket.exists()).await;
}

#[tokio::test]
async fn a_kubelet_that_says_no_is_asked_again() {
    let folder = folder();
    fs::create_dir_all(folder.path().join("plugins_registry")).unwrap();
    let api = ApiServer::start().await.unwrap();
    let arbiter = Arbiter::start(Script::default());
    let mut face = Face::start(folder.path(), &api, &arbiter);
    face.wait_for(|state| *state == RegistrationState::Waiting)
        .await;
    let socket = face.place.registration_socket();
    eventually("the socket", DEADLINE, || socket.exists()).await;
    let before = fs::metadata(&socket).unwrap();

    let channel = dial::as_kubelet_registers(&socket).unwrap();
    let mut client = RegistrationClient::new(channel);
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (info.r#type.as_str(), info.name.as_str()),
        ("DRAPlugin", DRIVER)
    );
    assert_eq!(
        info.supported_versions,
        [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth"
        ]
    );
    let no = RegistrationStatus {
        plugin_registered: false,
        error: "no such plugin".to_owned(),
    };
    client.notify_registration_status(no).await.unwrap();

    let refused = RegistrationState::Refused {
        error: "no such plugin".to_owned(),
    };
    face.wait_for(|state| *state == refused).await;
    face.wait_for(|state| *state == RegistrationState::Waiting)
        .await;
    eventually("a new socket", DEADLINE, || {
        fs::metadata(&socket).is_ok_and(|now| {
            (now.ino(), now.mtime(), now.mtime_nsec())
                != (before.ino(), before.mtime(), before.mtime_nsec())
        })
    })
    .await;
    let kubelet = Kubelet::start(folder.path()).await.unwrap();
    kubelet.wait_for_driver(DRIVER, DEADLINE).await;
    face.wait_for(|state| *state == RegistrationState::Registered)
        .await;
}

#[tokio::test]
async fn sockets_that_a_dead_daemon_left_are_swept() {
    let folder = folder();
    let registry = folder.path().join("plugins_registry");
    fs::create_dir_all(&registry).unwrap();
    let stale = registry.join("gpu.nvidia.com-0a1b@reg.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let own = registry.join("gpu.nvidia.com@reg.sock");
    drop(UnixListener::bind(&own).unwrap());
    let api = ApiServer::start().await.unwrap();
    let arbiter = Arbiter::start(Script::default());
    let _face = Face::start(folder.path(), &api, &arbiter);
    let kubelet = Kubelet::start(folder.path()).await.unwrap();
    kubelet.wait_for_driver(DRIVER, DEADLINE).await;
    assert!(!stale.exists());
}

#[tokio::test]
async fn two_daemons_of_a_rolling_update_are_registered_side_by_side() {
    let folder = folder();
    let kubelet = Kubelet::start(folder.path()).await.unwrap();
    let api = ApiServer::start().await.unwrap();
    let arbiter = Arbiter::start(Script::default());
    let place = |pod: &str| Place {
        kubelet_dir: folder.path().to_owned(),
        pod: Some(PodUid::new(pod).unwrap()),
    };
    let mut old = Face::start_at(place("0a"), &api, &arbiter);
    let new = Face::start_at(place("0b"), &api, &arbiter);
    eventually("both are registered", DEADLINE, || {
        kubelet.drivers(DRIVER).len() == 2
    })
    .await;
    old.shutdown.cancel();
    (&mut old.task).await.unwrap().unwrap();
    eventually("only the new one is", DEADLINE, || {
        let drivers = kubelet.drivers(DRIVER);
        drivers.len() == 1 && drivers[0].endpoint == new.place.service_socket()
    })
    .await;
}

#[tokio::test]
async fn a_kubelet_folder_that_comes_late_is_waited_for() {
    let folder = folder();
    let api = ApiServer::start().await.unwrap();
    let arbiter = Arbiter::start(Script::default());
    let mut face = Face::start(folder.path(), &api, &arbiter);
    face.wait_for(|state| matches!(state, RegistrationState::NoSocket { error } if error.contains("plugins_registry")))
        .await;
    let kubelet = Kubelet::start(folder.path()).await.unwrap();
    kubelet.wait_for_driver(DRIVER, DEADLINE).await;
}

#[tokio::test]
async fn a_path_that_no_socket_can_have_ends_the_face() {
    let folder = folder();
    let api = ApiServer::start().await.unwrap();
    let arbiter = Arbiter::start(Script::default());
    let deep = folder.path().join("d".repeat(100));
    let mut face = Face::start(&deep, &api, &arbiter);
    let error = (&mut face.task).await.unwrap().unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("choose a shorter folder"), "{source}");
}
