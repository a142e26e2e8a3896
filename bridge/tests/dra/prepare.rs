//! Prepare and Unprepare, from the kubelet's call to the arbiter and back.

use std::time::Instant;

use bridge_core::{Access, ClaimRef, HolderKind, Patience, Refusal};
use dra_proto::v1::dra_plugin_client::DraPluginClient;
use dra_proto::{v1, v1beta1};
use gpu_bridge::arbiter::{Error, PrepareReply};
use gpu_bridge::dra::WAIT_LIMIT;
use serde_json::json;
use testkit::{Claim, Pod, dial, eventually};
use tonic::transport::Channel;

use crate::world::{
    Asked, DEADLINE, NODE, Script, World, claim, config, prepared, result, unit_of,
};

const DRIVER: &str = "gpu.nvidia.com";

fn client(world: &World) -> DraPluginClient<Channel> {
    DraPluginClient::new(dial::localhost(&world.face.place.service_socket()))
}

fn asked(name: &str, uid: &str) -> v1::Claim {
    v1::Claim {
        namespace: "train".to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
    }
}

/// Asks for claims, and returns the entry of each in the order asked.
async fn prepare(world: &World, claims: &[v1::Claim]) -> Vec<v1::NodePrepareResourceResponse> {
    let request = v1::NodePrepareResourcesRequest {
        claims: claims.to_vec(),
    };
    let mut answer = client(world)
        .node_prepare_resources(request)
        .await
        .expect("an answer, whatever becomes of the claims")
        .into_inner();
    assert_eq!(
        answer.claims.len(),
        claims.len(),
        "an entry for every claim"
    );
    claims
        .iter()
        .map(|claim| answer.claims.remove(&claim.uid).expect("the claim's entry"))
        .collect()
}

/// The text of the refusal that a claim in the API gets.
async fn refusal(object: serde_json::Value) -> String {
    let world = World::start(Script::default()).await;
    world.api.put("resourceclaims", object);
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    assert_eq!(answer.devices, []);
    assert_eq!(
        world.arbiter.prepares(),
        [],
        "the arbiter hears of no such claim"
    );
    answer.error
}

fn held(request: &bridge_core::PrepareRequest) -> Refusal {
    Refusal::UnitHeld {
        unit: unit_of(&request.devices[0].device),
        device: request.devices[0].device.clone(),
        holder: HolderKind::CountedPod,
        claim: request.claim.clone(),
    }
}

#[tokio::test]
async fn the_kubelet_gets_the_devices_of_a_claim() {
    let world = World::start(Script::default()).await;
    let results = [result("gpus", "gpu-0"), result("gpus", "gpu-3")];
    world
        .api
        .put("resourceclaims", claim("llm", "u1", &results, &[]));
    world
        .kubelet
        .admit(Pod::new("train", "llm-0", "pod-1"))
        .await
        .unwrap();
    let claim = Claim::new("train", "llm", "u1", DRIVER);

    world
        .kubelet
        .prepare("pod-1", std::slice::from_ref(&claim))
        .await
        .unwrap();

    assert_eq!(
        world.kubelet.cdi_devices(&claim),
        [
            "gpu-bridge.dev/claim=u1-gpu-0",
            "gpu-bridge.dev/claim=u1-gpu-3"
        ]
    );
    world.kubelet.terminate("pod-1").await.unwrap();
    assert!(
        matches!(world.arbiter.asked().last(), Some(Asked::Unprepare(claim)) if claim.uid.as_str() == "u1")
    );
}

#[tokio::test]
async fn the_arbiter_gets_what_of_the_claim_is_ours() {
    let world = World::start(Script::default()).await;
    let mut other = result("nic", "nic-0");
    other["driver"] = json!("nic.example.com");
    let mut watching = result("watch", "gpu-0");
    watching["adminAccess"] = json!(true);
    let results = [
        other,
        result("gpu/large", "gpu-0"),
        watching,
        result("more", "gpu-0"),
    ];
    let foreign_config = config("nic.example.com", &json!({"anything": "goes"}));
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &results, &[foreign_config]),
    );

    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);

    assert_eq!(answer.error, "");
    let requests: Vec<_> = answer
        .devices
        .iter()
        .map(|it| it.request_names.clone())
        .collect();
    assert_eq!(requests, [vec!["gpu", "more"], vec!["watch"]]);
    let device = &answer.devices[0];
    assert_eq!(
        (device.pool_name.as_str(), device.device_name.as_str()),
        (NODE, "gpu-0")
    );
    let request = world.arbiter.prepares().remove(0);
    let given: Vec<_> = request
        .devices
        .iter()
        .map(|it| (it.device.as_str(), it.access))
        .collect();
    assert_eq!(given, [("gpu-0", Access::Owner), ("gpu-0", Access::Admin)]);
    assert_eq!(request.devices[0].pool, NODE);
}

#[tokio::test]
async fn kubelets_before_1_34_are_served_too() {
    let world = World::start(Script::default()).await;
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let channel = dial::localhost(&world.face.place.service_socket());
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let claims = vec![v1beta1::Claim {
        namespace: "train".to_owned(),
        name: "llm".to_owned(),
        uid: "u1".to_owned(),
    }];
    let request = v1beta1::NodePrepareResourcesRequest {
        claims: claims.clone(),
    };
    let answer = client.node_prepare_resources(request).await.unwrap();
    let entry = answer.into_inner().claims.remove("u1").unwrap();
    assert_eq!(entry.error, "");
    assert_eq!(
        entry.devices[0].cdi_device_ids,
        ["gpu-bridge.dev/claim=u1-gpu-0"]
    );
    let request = v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = client.node_unprepare_resources(request).await.unwrap();
    assert_eq!(answer.into_inner().claims["u1"].error, "");
}

#[tokio::test]
async fn a_claim_that_was_replaced_is_refused() {
    let text = refusal(claim("llm", "u2", &[result("gpu", "gpu-0")], &[])).await;
    assert_eq!(
        text,
        "ClaimReplaced: claim train/llm was replaced: the pod was started for UID u1, and the API server has UID u2. Delete the pod, so that it is scheduled with the new claim."
    );
}

#[tokio::test]
async fn a_claim_that_is_gone_or_not_allocated_is_refused() {
    let text = refusal(claim("other", "u1", &[], &[])).await;
    assert!(
        text.contains("claim train/llm does not exist any more"),
        "{text}"
    );
    let mut unallocated = claim("llm", "u1", &[], &[]);
    unallocated["status"] = json!({});
    let text = refusal(unallocated).await;
    assert!(text.contains("claim train/llm is not allocated"), "{text}");
    let text = refusal(claim("llm", "u1", &[], &[])).await;
    assert!(
        text.contains("has no device of driver gpu.nvidia.com"),
        "{text}"
    );
}

#[tokio::test]
async fn a_device_that_this_node_has_not_to_give_is_refused() {
    let mut elsewhere = result("gpu", "gpu-0");
    elsewhere["pool"] = json!("node-b");
    let text = refusal(claim("llm", "u1", &[elsewhere], &[])).await;
    assert!(
        text.contains("device gpu-0 of pool node-b, but the pool of this node is node-a"),
        "{text}"
    );
    let mut shared = result("gpu", "gpu-0");
    shared["shareID"] = json!("a671734a-e8e5-11e4-8fde-42010af09327");
    let text = refusal(claim("llm", "u1", &[shared], &[])).await;
    assert!(
        text.contains("share a671734a-e8e5-11e4-8fde-42010af09327 of device gpu-0"),
        "{text}"
    );
    let text = refusal(claim("llm", "u1", &[result("gpu", "../gpu")], &[])).await;
    assert!(
        text.contains("\"../gpu\" is not a valid device name"),
        "{text}"
    );
}

#[tokio::test]
async fn configuration_that_is_not_served_is_refused_by_name() {
    let sharing = json!({
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": "TimeSlicing"},
    });
    let text = refusal(claim(
        "llm",
        "u1",
        &[result("gpu", "gpu-0")],
        &[config(DRIVER, &sharing)],
    ))
    .await;
    assert_eq!(
        text,
        "ConfigNotServed: claim train/llm cannot be prepared as configured: the GpuConfig asks for sharing (strategy TimeSlicing), and sharing is not served by this version. \
         Change spec.devices.config of the claim or its template, or spec.config of the DeviceClass, then delete the pod and the claim."
    );
}

#[tokio::test]
async fn a_plain_gpu_config_is_served() {
    let world = World::start(Script::default()).await;
    let plain = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"});
    world.api.put(
        "resourceclaims",
        claim(
            "llm",
            "u1",
            &[result("gpu", "gpu-0")],
            &[config(DRIVER, &plain)],
        ),
    );
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    assert_eq!((answer.error.as_str(), answer.devices.len()), ("", 1));
}

#[tokio::test]
async fn claims_of_one_call_have_each_their_own_fate() {
    let world = World::start(Script {
        prepare: Box::new(|request, _| match request.claim.name.as_str() {
            "held" => Ok(PrepareReply::Refused(held(request))),
            "full" => Err(Error::NotSaved("no space left on device".to_owned())),
            _ => Ok(prepared(request)),
        }),
        ..Script::default()
    })
    .await;
    for (name, uid) in [("good", "u1"), ("held", "u2"), ("full", "u3")] {
        world.api.put(
            "resourceclaims",
            claim(name, uid, &[result("gpu", "gpu-0")], &[]),
        );
    }
    let answers = prepare(
        &world,
        &[
            asked("good", "u1"),
            asked("held", "u2"),
            asked("full", "u3"),
            asked("no/uid", "../u4"),
        ],
    )
    .await;
    assert_eq!(
        (answers[0].error.as_str(), answers[0].devices.len()),
        ("", 1)
    );
    let held = "UnitHeld: gpu-0 (GPU-gpu-0) cannot be prepared for claim train/held: it is held by a pod that asked for nvidia.com/gpu by count. \
                The kubelet tries again by itself; to get another GPU now, delete the pod, so that it is scheduled anew.";
    assert_eq!(answers[1].error, held);
    assert_eq!(
        answers[2].error,
        "UNAVAILABLE: NotSaved: claim train/full was not prepared: the ledger could not be saved, so nothing was given out: no space left on device. \
         The kubelet tries again by itself; make room on the file system of gpu-bridge's state directory, or look at its errors."
    );
    assert!(
        answers[3].error.contains("unusable UID"),
        "{}",
        answers[3].error
    );
}

#[tokio::test]
async fn a_pool_that_does_not_serve_yet_is_told_as_unavailable() {
    let world = World::start(Script {
        prepare: Box::new(|_, _| Ok(PrepareReply::Refused(Refusal::WaitingForAdoption))),
        ..Script::default()
    })
    .await;
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    assert!(
        answer
            .error
            .starts_with("UNAVAILABLE: WaitingForAdoption: the ledger of this node is missing"),
        "{}",
        answer.error
    );
}

#[tokio::test]
async fn an_api_server_that_is_away_is_told_as_unavailable() {
    let world = World::start(Script::default()).await;
    world.api.go_away();
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    let start =
        "UNAVAILABLE: ClaimUnreadable: claim train/llm could not be read from the API server: ";
    assert!(answer.error.starts_with(start), "{}", answer.error);
    world.api.come_back();
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    assert_eq!(answer.error, "");
}

#[tokio::test]
async fn prepare_asks_again_when_the_pool_changes() {
    let world = World::start(Script {
        prepare: Box::new(|request, before| {
            if before == 0 {
                Ok(PrepareReply::Wait(held(request)))
            } else {
                Ok(prepared(request))
            }
        }),
        ..Script::default()
    })
    .await;
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let claims = [asked("llm", "u1")];
    let (answer, ()) = tokio::join!(prepare(&world, &claims), async {
        eventually("the first question", DEADLINE, || {
            !world.arbiter.prepares().is_empty()
        })
        .await;
        world.arbiter.touch_status();
    });
    assert_eq!(answer[0].error, "");
    let asked = world.arbiter.prepares();
    assert_eq!(asked.len(), 2);
    assert_eq!(
        asked[0], asked[1],
        "the same question, with the same time of arrival"
    );
}

#[tokio::test]
async fn prepare_refuses_with_the_last_word_when_its_time_is_up() {
    let world = World::start(Script {
        prepare: Box::new(|request, _| Ok(PrepareReply::Wait(held(request)))),
        ..Script::default()
    })
    .await;
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let start = Instant::now();
    let answer = prepare(&world, &[asked("llm", "u1")]).await.remove(0);
    assert!(
        answer
            .error
            .starts_with("UnitHeld: gpu-0 (GPU-gpu-0) cannot be prepared"),
        "{}",
        answer.error
    );
    assert!(start.elapsed() >= WAIT_LIMIT);
    let mut asked = world.arbiter.prepares();
    assert!(asked.len() > 10, "it was asked all the while");
    let last = asked.pop().map(|request| request.patience);
    assert_eq!(
        last,
        Some(Patience::LastCall),
        "the arbiter hears that the kubelet is told no"
    );
    assert!(asked.iter().all(|it| it.patience == Patience::Waits));
}

#[tokio::test]
async fn a_stop_answers_the_prepares_that_wait() {
    let mut world = World::start(Script {
        prepare: Box::new(|request, _| Ok(PrepareReply::Wait(held(request)))),
        ..Script::default()
    })
    .await;
    world.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let claims = [asked("llm", "u1")];
    let start = Instant::now();
    let (answer, ()) = tokio::join!(prepare(&world, &claims), async {
        eventually("the first question", DEADLINE, || {
            !world.arbiter.prepares().is_empty()
        })
        .await;
        world.face.shutdown.cancel();
    });
    assert!(
        answer[0].error.contains("it is held by"),
        "{}",
        answer[0].error
    );
    assert!(start.elapsed() < WAIT_LIMIT);
    let mut asked = world.arbiter.prepares().into_iter();
    assert!(
        asked.all(|request| request.patience == Patience::Waits),
        "nobody has lost anything because a daemon stops"
    );
    (&mut world.face.task).await.unwrap().unwrap();
    assert!(!world.face.place.service_socket().exists());
    assert!(!world.face.place.registration_socket().exists());
}

#[tokio::test]
async fn unprepare_of_an_unknown_claim_succeeds_without_the_api_server() {
    let world = World::start(Script {
        unprepare: Box::new(|claim| {
            if claim.name == "full" {
                Err(Error::NotSaved("no space left on device".to_owned()))
            } else {
                Ok(())
            }
        }),
        ..Script::default()
    })
    .await;
    world.api.go_away();
    let request = v1::NodeUnprepareResourcesRequest {
        claims: vec![
            asked("never-seen", "u9"),
            asked("full", "u8"),
            asked("odd", "../u7"),
        ],
    };
    let answer = client(&world)
        .node_unprepare_resources(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.claims["u9"].error, "");
    assert_eq!(answer.claims["../u7"].error, "");
    let text = &answer.claims["u8"].error;
    assert!(
        text.starts_with("UNAVAILABLE: NotSaved: claim train/full was not unprepared"),
        "{text}"
    );
    let gone = ClaimRef {
        uid: bridge_core::ClaimUid::new("u9").unwrap(),
        namespace: "train".to_owned(),
        name: "never-seen".to_owned(),
    };
    assert!(world.arbiter.asked().contains(&Asked::Unprepare(gone)));
}
