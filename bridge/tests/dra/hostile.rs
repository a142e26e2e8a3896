//! Calls that no kubelet makes: whoever has its rights and is not it gets one clear answer for each claim, and the
//! next call is served as if nothing had been.

use std::time::{Duration, Instant};

use dra_proto::v1;
use dra_proto::v1::dra_plugin_client::DraPluginClient;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use testkit::dial;
use tonic::Code;
use tonic::transport::Channel;

use crate::world::{Asked, Script, World, claim, result};

/// Calls that are made up. Each is a round trip or two.
const CALLS: usize = 150;
/// No answer to a person is longer than this, whatever the question was.
const ANSWER_BYTES: usize = 4096;
/// A call, with all its claims, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// Texts as they are, as they must not be, and as somebody would make them who wants to get somewhere else.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        2 => "[a-z0-9-]{1,20}",
        2 => any::<String>(),
        1 => Just(String::new()),
        1 => Just("llm".to_owned()),
        1 => Just("u1".to_owned()),
        1 => Just("../../../../../api/v1/namespaces/kube-system/secrets/any".to_owned()),
        1 => Just("..".to_owned()),
        1 => Just("llm?watch=true".to_owned()),
        1 => Just("llm/status".to_owned()),
        1 => Just("a\0b\r\nc\u{1b}[31m\u{202e}".to_owned()),
        1 => (1_usize..100_000).prop_map(|length| "x".repeat(length)),
    ]
}

fn claims() -> impl Strategy<Value = Vec<v1::Claim>> {
    let one = (text(), text(), text()).prop_map(|(namespace, name, uid)| v1::Claim {
        namespace,
        name,
        uid,
    });
    let some = vec(one, 0..20);
    (some, 0_usize..3).prop_map(|(mut claims, repeated)| {
        // The same claim again, as it is.
        let again: Vec<_> = claims.iter().take(repeated).cloned().collect();
        claims.extend(again);
        claims
    })
}

fn client(world: &World) -> DraPluginClient<Channel> {
    DraPluginClient::new(dial::localhost(&world.face.place.service_socket()))
        .max_decoding_message_size(usize::MAX)
}

/// A face on a claim `train/llm`, UID `u1`, that can be prepared.
async fn with_a_claim() -> World {
    let world = World::start(Script::default()).await;
    let object = claim("llm", "u1", &[result("gpu", "gpu-0")], &[]);
    world.api.put("resourceclaims", object);
    world
}

async fn is_served(world: &World) {
    let request = v1::NodePrepareResourcesRequest {
        claims: vec![v1::Claim {
            namespace: "train".to_owned(),
            name: "llm".to_owned(),
            uid: "u1".to_owned(),
        }],
    };
    let answer = client(world).node_prepare_resources(request).await;
    let answer = answer.unwrap().into_inner();
    assert_eq!(answer.claims["u1"].error, "");
}

#[tokio::test]
async fn whatever_is_asked_gets_one_clear_answer_for_each_claim_and_the_next_call_is_served() {
    let world = with_a_claim().await;
    let mut runner = TestRunner::deterministic();
    for _ in 0..CALLS {
        let claims = claims().new_tree(&mut runner).unwrap().current();
        let mut uids: Vec<_> = claims.iter().map(|it| it.uid.clone()).collect();
        uids.sort();
        uids.dedup();
        let started = Instant::now();
        let request = v1::NodePrepareResourcesRequest {
            claims: claims.clone(),
        };
        let answer = client(&world).node_prepare_resources(request).await;
        let answer = answer.unwrap().into_inner();
        let mut answered: Vec<_> = answer.claims.keys().cloned().collect();
        answered.sort();
        assert_eq!(answered, uids);
        for (uid, one) in &answer.claims {
            assert_eq!(one.devices.is_empty(), !one.error.is_empty(), "{uid:?}");
            assert!(one.error.len() <= ANSWER_BYTES, "{} bytes", one.error.len());
            let told = one.error.chars().any(char::is_control);
            assert!(!told, "control characters in {:?}", one.error);
        }
        let request = v1::NodeUnprepareResourcesRequest { claims };
        let answer = client(&world).node_unprepare_resources(request).await;
        let answer = answer.unwrap().into_inner();
        assert!(answer.claims.values().all(|one| one.error.is_empty()));
        assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    }
    for asked in world.arbiter.asked() {
        let (Asked::Prepare(bridge_core::PrepareRequest { claim, .. }) | Asked::Unprepare(claim)) =
            asked
        else {
            continue;
        };
        let longest = claim.namespace.len().max(claim.name.len());
        assert!(longest <= ANSWER_BYTES, "{longest} bytes are remembered");
    }
    is_served(&world).await;
}

#[tokio::test]
async fn a_name_that_leads_elsewhere_in_the_api_is_never_asked_for() {
    let world = with_a_claim().await;
    let before = world.api.count("get", "resourceclaims");
    for (namespace, name) in [
        ("train", "../../../../../api/v1/namespaces/train/pods/llm-0"),
        ("../train", "llm"),
        ("train", ".."),
        ("train", "llm/status"),
        ("train", "llm?limit=1"),
        ("train", "llm%2fstatus"),
        ("train", ""),
        ("", "llm"),
        ("train", "Llm"),
    ] {
        let request = v1::NodePrepareResourcesRequest {
            claims: vec![v1::Claim {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                uid: "u1".to_owned(),
            }],
        };
        let answer = client(&world).node_prepare_resources(request).await;
        let error = answer.unwrap().into_inner().claims["u1"].error.clone();
        assert!(error.starts_with("InvalidClaimName: "), "{error}");
    }
    let after = world.api.count("get", "resourceclaims");
    assert_eq!(after, before, "the API server hears nothing");
    is_served(&world).await;
}

#[tokio::test]
async fn the_longest_name_that_a_claim_can_have_is_asked_for_as_it_is() {
    let world = World::start(Script::default()).await;
    let longest = [
        &*"a".repeat(63),
        &"b".repeat(63),
        &"c".repeat(63),
        &"d".repeat(61),
    ]
    .join(".");
    let object = claim(&longest, "u1", &[result("gpu", "gpu-0")], &[]);
    world.api.put("resourceclaims", object);
    let request = v1::NodePrepareResourcesRequest {
        claims: vec![v1::Claim {
            namespace: "train".to_owned(),
            name: longest.clone(),
            uid: "u1".to_owned(),
        }],
    };
    let answer = client(&world).node_prepare_resources(request).await;
    let answer = answer.unwrap().into_inner();
    assert_eq!(answer.claims["u1"].error, "");
    assert_eq!(world.arbiter.prepares()[0].claim.name, longest);
}

#[tokio::test]
async fn more_claims_than_a_pod_can_have_are_refused_as_a_whole_and_at_once() {
    let world = with_a_claim().await;
    let one = |number: usize| v1::Claim {
        namespace: "train".to_owned(),
        name: "llm".to_owned(),
        uid: format!("u{number}"),
    };
    let claims: Vec<_> = (0..50_000).map(one).collect();
    let started = Instant::now();
    let request = v1::NodePrepareResourcesRequest {
        claims: claims.clone(),
    };
    let refused = client(&world).node_prepare_resources(request).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("50000"), "{refused}");
    let request = v1::NodeUnprepareResourcesRequest { claims };
    let refused = client(&world).node_unprepare_resources(request).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    assert_eq!(world.arbiter.prepares(), []);
    is_served(&world).await;
}
