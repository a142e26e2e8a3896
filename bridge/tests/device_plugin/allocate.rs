//! The list, the preferred ids, and what an Allocate gets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bridge_core::{
    CountedOffer, DeviceId, DeviceSpecs, Handout, Health, ListStrategy, ListedDevice, ListedPod,
    Listing, Offers, Patience, PodName, Refusal, UnitId,
};
use gpu_bridge::arbiter::{AllocateReply, Error, GrantedDevice};
use gpu_bridge::device_plugin::{ListNow, RegistrationState};
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Empty, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use serde_json::json;
use testkit::{Kubelet, Pod};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::support::{Arbiter, DEADLINE, Plugin, RESOURCE, Script, listing, no_listing, sockets};

fn id(number: u32) -> DeviceId {
    DeviceId::of_unit(UnitId::new(format!("GPU-{number}")).unwrap())
}

fn offers(healthy: &[bool]) -> Offers {
    let offer = |(number, healthy): (usize, &bool)| CountedOffer {
        id: id(u32::try_from(number).unwrap()),
        unit: UnitId::new(format!("GPU-{number}")).unwrap(),
        health: if *healthy {
            Health::Healthy
        } else {
            Health::Unhealthy
        },
        numa_node: Some(1),
        free: *healthy,
        leaving: false,
        reserved: false,
    };
    Offers {
        counted: healthy.iter().enumerate().map(offer).collect(),
        ..Offers::default()
    }
}

fn granted(request: &bridge_core::AllocateRequest) -> AllocateReply {
    AllocateReply::Granted(
        request
            .ids
            .iter()
            .map(|id| GrantedDevice {
                grant: bridge_core::Grant {
                    id: id.clone(),
                    unit: id.named_unit().clone(),
                },
                cdi_device: format!("gpu-bridge.dev/gpu={}", id.named_unit()),
            })
            .collect(),
    )
}

/// A plugin on a scripted arbiter, registered with a kubelet, and a client of its own.
struct Scene {
    script: Script,
    client: DevicePluginClient<Channel>,
    kubelet: Kubelet,
    plugin: Plugin,
    _dir: tempfile::TempDir,
}

impl Scene {
    async fn new(
        answer: impl FnMut(
            &bridge_core::AllocateRequest,
            Option<&Listing>,
        ) -> Result<AllocateReply, Error>
        + Send
        + 'static,
        list_now: ListNow,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(dir.path()).await.unwrap();
        let script = Script::start(offers(&[true, true]), answer);
        let folder = dir.path().join("device-plugins");
        let mut plugin = Plugin::start(&folder, script.handle.clone(), list_now);
        plugin
            .wait("Registered", RegistrationState::is_registered)
            .await;
        kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
        let socket = folder.join(&sockets(&folder)[0]);
        Self {
            script,
            client: DevicePluginClient::new(testkit::dial::localhost(&socket)),
            kubelet,
            plugin,
            _dir: dir,
        }
    }

    /// The same where every unit is busy until the last call.
    async fn busy() -> Self {
        Self::new(
            |request, _| {
                Ok(match request.patience {
                    Patience::Waits => AllocateReply::Wait,
                    Patience::LastCall => granted(request),
                })
            },
            no_listing(),
        )
        .await
    }

    async fn allocate(&mut self, ids: &[&str]) -> Result<AllocateResponse, Status> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: ids.iter().map(ToString::to_string).collect(),
            }],
        };
        Ok(self.client.allocate(request).await?.into_inner())
    }
}

#[tokio::test]
async fn a_pod_gets_cdi_names_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(4).await;
    let folder = dir.path().join("device-plugins");
    let _plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 4, DEADLINE).await;
    let pod = Pod::new("a", "p", "uid-1").app("c", RESOURCE, 2);
    kubelet.admit(pod).await.unwrap();

    // Counted picks come from the tail of the list.
    let ids: Vec<String> = kubelet
        .devices("uid-1", "c", RESOURCE)
        .into_iter()
        .collect();
    assert_eq!(ids, ["GPU-2", "GPU-3"]);
    let answer = kubelet.answer("uid-1", "c", RESOURCE).unwrap();
    let mut names: Vec<&str> = answer
        .cdi_devices
        .iter()
        .map(|it| it.name.as_str())
        .collect();
    names.sort_unstable();
    assert_eq!(
        names,
        ["gpu-bridge.dev/gpu=GPU-2", "gpu-bridge.dev/gpu=GPU-3"]
    );
    assert!(answer.envs.is_empty() && answer.mounts.is_empty() && answer.devices.is_empty());
    assert!(answer.annotations.is_empty());
    assert_eq!(arbiter.held(), 2);
}

/// What the kubelet was answered for a pod of one GPU.
async fn answered(handout: Handout) -> ContainerAllocateResponse {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    let _plugin = Plugin::telling(&folder, arbiter.handle.clone(), no_listing(), handout);
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    let pod = Pod::new("a", "p", "uid-1").app("c", RESOURCE, 1);
    kubelet.admit(pod).await.unwrap();
    kubelet.answer("uid-1", "c", RESOURCE).unwrap()
}

/// The same in JSON, without what is empty.
fn json(answer: &ContainerAllocateResponse) -> serde_json::Value {
    let paths = |host: &str, container: &str| json!([host, container]);
    let cdi: Vec<&str> = answer.cdi_devices.iter().map(|it| &*it.name).collect();
    let mounts = answer.mounts.iter();
    let mounts: Vec<_> = mounts
        .map(|it| paths(&it.host_path, &it.container_path))
        .collect();
    let devices = answer.devices.iter();
    let devices: Vec<_> = devices
        .map(|it| json!([it.host_path, it.container_path, it.permissions]))
        .collect();
    let mut all = json!({
        "envs": answer.envs, "annotations": answer.annotations, "mounts": mounts, "devices": devices, "cdi": cdi,
    });
    let fields = all.as_object_mut().unwrap();
    fields.retain(|_, field| {
        !field.as_array().is_some_and(Vec::is_empty)
            && !field.as_object().is_some_and(serde_json::Map::is_empty)
    });
    all
}

#[tokio::test]
async fn each_device_list_strategy_reaches_the_kubelet_as_nvidias_plugin_writes_it() {
    let place = "/var/run/nvidia-container-devices";
    let devices = [
        ["/run/nvidia/driver/dev/nvidiactl", "/dev/nvidiactl", "rw"],
        ["/run/nvidia/driver/dev/nvidia0", "/dev/nvidia0", "rw"],
    ];
    let cdi = "gpu-bridge.dev/gpu=GPU-1";
    let table = [
        (ListStrategy::CdiCri, json!({"cdi": [cdi]})),
        (
            ListStrategy::CdiAnnotations,
            json!({"annotations": {"cdi.k8s.io/nvidia-device-plugin_1": cdi}}),
        ),
        (
            ListStrategy::Envvar,
            json!({"envs": {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, "devices": devices}),
        ),
        (
            ListStrategy::VolumeMounts,
            json!({
                "envs": {"NVIDIA_VISIBLE_DEVICES": place}, "devices": devices,
                "mounts": [["/dev/null", format!("{place}/GPU-1")]],
            }),
        ),
    ];
    for (strategy, expected) in table {
        let answer = answered(Handout {
            strategies: [strategy].into(),
            device_specs: DeviceSpecs::Passed,
            ..Handout::default()
        });
        assert_eq!(json(&answer.await), expected, "{strategy:?}");
    }
}

#[tokio::test]
async fn an_init_container_leaves_its_gpu_to_the_app_container() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    // pod-resources shows no pod that is still being admitted.
    let _plugin = Plugin::start(
        &folder,
        arbiter.handle.clone(),
        listing(Ok(Listing::default())),
    );
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    let pod = Pod::new("a", "p", "uid-1")
        .init("i", RESOURCE, 1)
        .app("c", RESOURCE, 1);
    kubelet.admit(pod).await.unwrap();
    assert_eq!(
        kubelet.answer("uid-1", "i", RESOURCE),
        kubelet.answer("uid-1", "c", RESOURCE)
    );
    assert_eq!(arbiter.held(), 1);
}

#[tokio::test]
async fn a_refusal_reaches_the_pod_as_a_sentence() {
    let refusal = Refusal::NoFreeUnit {
        id: id(0),
        units: 2,
        claims: 2,
        counted: 0,
        unusable: 0,
    };
    let answer = AllocateReply::Refused(refusal.clone());
    let scene = Scene::new(move |_, _| Ok(answer.clone()), no_listing()).await;
    let pod = Pod::new("a", "p", "uid-1").app("c", RESOURCE, 1);
    let rejection = scene.kubelet.admit(pod).await.unwrap_err();
    assert_eq!(rejection.reason, "UnexpectedAdmissionError");
    assert!(
        rejection.message.contains("code = FailedPrecondition")
            && rejection.message.contains(&refusal.to_string()),
        "{}",
        rejection.message
    );
}

#[tokio::test]
async fn a_daemon_that_can_not_decide_is_unavailable() {
    let mut scene = Scene::new(
        |_, _| Err(Error::NotSaved("no space left".to_owned())),
        no_listing(),
    )
    .await;
    let status = scene.allocate(&["GPU-0"]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("no space left"), "{status}");

    let mut scene = Scene::new(
        |_, _| Ok(AllocateReply::Refused(Refusal::WaitingForAdoption)),
        no_listing(),
    )
    .await;
    let status = scene.allocate(&["GPU-0"]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status.message().starts_with("WaitingForAdoption: "),
        "{status}"
    );
}

#[tokio::test]
async fn what_is_no_id_or_no_request_is_refused_without_asking() {
    let mut scene = Scene::new(|request, _| Ok(granted(request)), no_listing()).await;
    let status = scene.allocate(&["GPU-0", "no id"]).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(
        status.message().starts_with("UnknownDeviceId: "),
        "{status}"
    );
    let status = scene.allocate(&[]).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let nothing = AllocateRequest {
        container_requests: Vec::new(),
    };
    let status = scene.client.allocate(nothing).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(scene.script.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_unit_that_becomes_free_in_time_is_waited_for() {
    let mut asked = 0;
    let mut scene = Scene::new(
        move |request, _| {
            asked += 1;
            Ok(if asked < 4 {
                AllocateReply::Wait
            } else {
                granted(request)
            })
        },
        no_listing(),
    )
    .await;
    let answer = scene.allocate(&["GPU-1"]).await.unwrap();
    let container = &answer.container_responses[0];
    assert_eq!(container.cdi_devices[0].name, "gpu-bridge.dev/gpu=GPU-1");
    assert_eq!(scene.script.asked.lock().unwrap().len(), 4);
}

#[tokio::test]
async fn after_a_second_of_waiting_it_is_asked_a_last_time() {
    let mut scene = Scene::busy().await;
    let since = Instant::now();
    scene.allocate(&["GPU-1"]).await.unwrap();
    assert!(since.elapsed() >= Duration::from_secs(1));
    let asked = scene.script.asked.lock().unwrap();
    let last = asked
        .iter()
        .filter(|it| it.0.patience == Patience::LastCall);
    assert_eq!(last.count(), 1);
    assert!(asked.len() > 5, "{}", asked.len());
}

#[tokio::test]
async fn pod_resources_are_asked_once_and_only_when_needed() {
    let seen = Listing {
        pods: vec![ListedPod {
            pod: PodName {
                namespace: "a".to_owned(),
                name: "p".to_owned(),
            },
            devices: vec![ListedDevice {
                container: "c".to_owned(),
                id: id(1),
            }],
            claims: Vec::new(),
        }],
    };
    let expected = seen.clone();
    let mut waited = false;
    let mut scene = Scene::new(
        move |request, listing| {
            Ok(match listing {
                None => AllocateReply::NeedsListing,
                Some(listing) if !std::mem::replace(&mut waited, true) => {
                    assert_eq!(*listing, expected);
                    AllocateReply::Wait
                }
                Some(_) => granted(request),
            })
        },
        listing(Ok(seen)),
    )
    .await;
    scene.allocate(&["GPU-1"]).await.unwrap();
    let asked = scene.script.asked.lock().unwrap();
    let with_listing: Vec<bool> = asked.iter().map(|it| it.1.is_some()).collect();
    assert_eq!(with_listing, [false, true, true]);
}

#[tokio::test]
async fn without_pod_resources_a_used_id_is_not_given_again() {
    let mut scene = Scene::new(
        |_, _| Ok(AllocateReply::NeedsListing),
        listing(Err("pod-resources did not answer within 2s".to_owned())),
    )
    .await;
    let status = scene.allocate(&["GPU-1"]).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status.message().contains("did not answer within 2s"),
        "{status}"
    );
}

#[tokio::test]
async fn a_list_is_sent_when_it_differs_and_not_otherwise() {
    let mut scene = Scene::new(|request, _| Ok(granted(request)), no_listing()).await;
    let mut lists = scene
        .client
        .list_and_watch(Empty {})
        .await
        .unwrap()
        .into_inner();
    let health = |list: &legacy_proto::deviceplugin::ListAndWatchResponse| -> Vec<String> {
        list.devices.iter().map(|it| it.health.clone()).collect()
    };
    let first = lists.message().await.unwrap().unwrap();
    assert_eq!(health(&first), ["Healthy", "Healthy"]);
    let topology = first.devices[0].topology.as_ref().unwrap();
    assert_eq!(topology.nodes[0].id, 1);

    // The other face's offers are of no interest here.
    let mut same = offers(&[true, true]);
    same.claims = Some(Vec::new());
    scene.script.offers.send_replace(Arc::new(same));
    let nothing = tokio::time::timeout(Duration::from_millis(300), lists.message()).await;
    assert!(nothing.is_err(), "sent the same list again: {nothing:?}");

    scene
        .script
        .offers
        .send_replace(Arc::new(offers(&[false, true])));
    let second = tokio::time::timeout(DEADLINE, lists.message()).await;
    let second = second.expect("a list in time").unwrap().unwrap();
    assert_eq!(health(&second), ["Unhealthy", "Healthy"]);
    scene.kubelet.wait_for_healthy(RESOURCE, 1, DEADLINE).await;
}

#[tokio::test]
async fn preferred_ids_come_from_the_tail_and_are_never_an_error() {
    let mut scene = Scene::new(|request, _| Ok(granted(request)), no_listing()).await;
    let texts = |ids: &[&str]| -> Vec<String> { ids.iter().map(ToString::to_string).collect() };
    let container = |available: &[&str], size| ContainerPreferredAllocationRequest {
        available_device_i_ds: texts(available),
        must_include_device_i_ds: Vec::new(),
        allocation_size: size,
    };
    let request = PreferredAllocationRequest {
        container_requests: vec![
            container(&["GPU-0", "GPU-1"], 1),
            container(&["what is this", "GPU-0"], 2),
            container(&[], 1),
            container(&["GPU-0"], -1),
        ],
    };
    let answer = scene.client.get_preferred_allocation(request).await;
    let answer = answer.unwrap().into_inner();
    let picks: Vec<&[String]> = answer
        .container_responses
        .iter()
        .map(|it| it.device_i_ds.as_slice())
        .collect();
    assert_eq!(picks[0], texts(&["GPU-1"]));
    assert_eq!(picks[1], texts(&["GPU-0", "what is this"]));
    assert!(picks[2].is_empty() && picks[3].is_empty());

    let request = PreStartContainerRequest {
        devices_ids: texts(&["GPU-0"]),
    };
    scene.client.pre_start_container(request).await.unwrap();
}

#[tokio::test]
async fn a_call_that_is_open_when_serving_ends_is_answered_before_the_kubelet_loses_the_stream() {
    let mut scene = Scene::busy().await;
    let stream = scene.client.clone().list_and_watch(Empty {}).await;
    let mut stream = stream.unwrap().into_inner();
    let (stop, asked) = (scene.plugin.stop.clone(), Arc::clone(&scene.script.asked));
    // The kubelet closes the connection when its stream ends, and what is open on it fails.
    let stream_ends = async {
        while asked.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        while let Ok(Some(_)) = stream.message().await {}
    };
    tokio::select! {
        biased;
        answer = scene.allocate(&["GPU-1"]) => drop(answer.unwrap()),
        () = stream_ends => panic!("the stream has ended under the call"),
    }
}
