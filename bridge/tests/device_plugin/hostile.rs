//! Calls that no kubelet makes: whoever has its rights and is not it gets one clear answer, takes nothing that is
//! not free, and the next call is served as if nothing had been.

use std::time::{Duration, Instant};

use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    PreferredAllocationRequest,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use testkit::Kubelet;
use tonic::Code;
use tonic::transport::Channel;

use crate::support::{Arbiter, DEADLINE, Plugin, RESOURCE, no_listing, sockets};

/// Calls that are made up. Each is a round trip.
const CALLS: usize = 200;
/// A message of gRPC travels in a header, and what is larger than this is cut off on the way.
const MESSAGE_BYTES: usize = 4096;
/// A call on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// GPUs of the node.
const GPUS: u32 = 4;

fn id() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0..GPUS + 2).prop_map(|number| format!("GPU-{number}")),
        2 => any::<String>(),
        1 => (0..GPUS).prop_map(|number| format!("GPU-{number}::0")),
        1 => Just("GPU-0::99999999999999999999".to_owned()),
        1 => Just(String::new()),
        1 => Just("../../../etc/passwd".to_owned()),
        1 => Just("GPU-0\0\r\n\u{1b}[31m".to_owned()),
        1 => (1_usize..200_000).prop_map(|length| "x".repeat(length)),
    ]
}

fn ids() -> impl Strategy<Value = Vec<String>> {
    vec(id(), 0..8)
}

/// A plugin on the real arbiter.
struct Scene {
    arbiter: Arbiter,
    client: DevicePluginClient<Channel>,
    _plugin: Plugin,
    _kubelet: Kubelet,
    _dir: tempfile::TempDir,
}

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(dir.path()).await.unwrap();
        let arbiter = Arbiter::start(GPUS).await;
        let folder = dir.path().join("device-plugins");
        let plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
        let count = usize::try_from(GPUS).unwrap();
        kubelet.wait_for_healthy(RESOURCE, count, DEADLINE).await;
        let socket = folder.join(&sockets(&folder)[0]);
        Self {
            arbiter,
            client: DevicePluginClient::new(testkit::dial::localhost(&socket)),
            _plugin: plugin,
            _kubelet: kubelet,
            _dir: dir,
        }
    }

    async fn allocate(&mut self, containers: Vec<Vec<String>>) -> Result<usize, tonic::Status> {
        let container_requests = containers
            .into_iter()
            .map(|devices_ids| ContainerAllocateRequest { devices_ids });
        let request = AllocateRequest {
            container_requests: container_requests.collect(),
        };
        let answer = self.client.allocate(request).await?.into_inner();
        let containers = answer.container_responses.into_iter();
        Ok(containers.map(|it| it.cdi_devices.len()).sum())
    }
}

fn assert_clear(refused: &tonic::Status) {
    let message = refused.message();
    assert!(!message.is_empty(), "{refused:?}");
    assert!(message.len() <= MESSAGE_BYTES, "{} bytes", message.len());
    assert!(!message.chars().any(char::is_control), "{message:?}");
    assert_ne!(refused.code(), Code::Internal, "{message}");
    assert_ne!(refused.code(), Code::Unknown, "{message}");
}

#[tokio::test]
async fn whatever_is_asked_gets_one_clear_answer_and_takes_nothing_that_is_not_free() {
    let mut scene = Scene::new().await;
    let mut runner = TestRunner::deterministic();
    let mut granted = 0;
    for _ in 0..CALLS {
        let call = vec(ids(), 0..4).new_tree(&mut runner).unwrap().current();
        match scene.allocate(call).await {
            Ok(devices) => granted += devices,
            Err(refused) => assert_clear(&refused),
        }
        assert!(scene.arbiter.held() <= usize::try_from(GPUS).unwrap());
    }
    assert!(granted > 0, "some of it made sense");
}

#[tokio::test]
async fn preferred_ids_are_some_of_those_asked_about_whatever_the_question_is() {
    let mut scene = Scene::new().await;
    let mut runner = TestRunner::deterministic();
    let question = (ids(), ids(), any::<i32>());
    for _ in 0..CALLS {
        let (available, must, size) = question.new_tree(&mut runner).unwrap().current();
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_i_ds: available.clone(),
                must_include_device_i_ds: must.clone(),
                allocation_size: size,
            }],
        };
        let answer = scene.client.get_preferred_allocation(request).await;
        let containers = answer.unwrap().into_inner().container_responses;
        assert_eq!(containers.len(), 1);
        let picked = &containers[0].device_i_ds;
        assert!(picked.len() <= usize::try_from(size).unwrap_or(0));
        assert!(
            picked
                .iter()
                .all(|id| available.contains(id) || must.contains(id))
        );
    }
}

#[tokio::test]
async fn a_call_that_is_far_too_large_is_answered_at_once_and_the_next_one_is_served() {
    let mut scene = Scene::new().await;
    let started = Instant::now();
    let many: Vec<String> = (0..200_000).map(|number| format!("GPU-{number}")).collect();
    let refused = scene.allocate(vec![many.clone()]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_clear(&refused);
    let one = vec!["GPU-0".to_owned()];
    let refused = scene
        .allocate(vec![one.clone(); 100_000])
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_clear(&refused);
    assert_eq!(scene.arbiter.held(), 0);
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_i_ds: many[..100_000].to_vec(),
            must_include_device_i_ds: many[100_000..].to_vec(),
            allocation_size: i32::MAX,
        }],
    };
    let answer = scene.client.get_preferred_allocation(request).await;
    let answer = answer.unwrap().into_inner();
    assert_eq!(answer.container_responses.len(), 1);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    assert_eq!(scene.allocate(vec![one]).await.unwrap(), 1);
}
