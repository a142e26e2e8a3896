//! Which list of pods is believed.

use bridge_core::{PodPhase, PodSource, Pods};
use testkit::{Phase, eventually};

use crate::world::{DEADLINE, NODE, World, in_api, pod, uid};

fn names(pods: Option<&Pods>) -> Vec<&str> {
    let pods = pods.into_iter().flat_map(|pods| &pods.pods);
    pods.map(|bound| bound.pod.name.as_str()).collect()
}

fn source(pods: Option<&Pods>) -> Option<PodSource> {
    pods.map(|pods| pods.source)
}

#[tokio::test]
async fn a_pod_that_is_bound_counts_before_the_kubelet_has_seen_it() {
    let world = World::serving().await;
    world.api.put("pods", in_api("a", 2, "Pending"));
    let mut elsewhere = in_api("b", 1, "Pending");
    elsewhere["spec"]["nodeName"] = format!("{NODE}-2").into();
    world.api.put("pods", elsewhere);
    world
        .wait_for_pods("the bound pod", |pods| {
            names(pods) == ["a"] && source(pods) == Some(PodSource::Api)
        })
        .await;
    let pods = world.pods.borrow().clone().unwrap();
    assert_eq!(pods.pods[0].may_own, 2);
    assert_eq!(pods.pods[0].phase, PodPhase::Live);
    assert!(!pods.pods[0].started);
}

#[tokio::test]
async fn a_pod_served_by_an_extended_resource_claim_owns_no_id() {
    let world = World::serving().await;
    let mut shown = in_api("a", 1, "Pending");
    shown["status"]["extendedResourceClaimStatus"] = serde_json::json!({
        "resourceClaimName": "a-extended-resources-x",
        "requestMappings": [{
            "containerName": "main",
            "resourceName": "nvidia.com/gpu",
            "requestName": "container-0-request-0",
        }],
    });
    world.api.put("pods", shown);
    world
        .wait_for_pods("the pod", |pods| {
            pods.is_some_and(|pods| pods.pods.iter().any(|bound| bound.may_own == 0))
        })
        .await;
}

#[tokio::test]
async fn the_claims_that_live_pods_name_are_told_and_generated_ones_once_they_exist() {
    let world = World::serving().await;
    let mut shown = in_api("a", 0, "Pending");
    shown["spec"]["resourceClaims"] = serde_json::json!([
        {"name": "own", "resourceClaimName": "shared"},
        {"name": "made", "resourceClaimTemplateName": "one-gpu"},
    ]);
    world.api.put("pods", shown.clone());
    world.wait_for_claims(&["train/shared"]).await;
    shown["status"]["resourceClaimStatuses"] =
        serde_json::json!([{"name": "made", "resourceClaimName": "a-made-x7"}]);
    world.api.put("pods", shown.clone());
    world
        .wait_for_claims(&["train/a-made-x7", "train/shared"])
        .await;
    shown["status"]["phase"] = "Succeeded".into();
    world.api.put("pods", shown);
    world.wait_for_claims(&[]).await;
}

#[tokio::test]
async fn a_pod_that_only_the_kubelet_knows_counts_as_alive() {
    let world = World::serving().await;
    world.kubelet.admit(pod("a", 1)).await.unwrap();
    world
        .wait_for_pods("the pod that the API server has not shown", |pods| {
            names(pods) == ["a"] && source(pods) == Some(PodSource::Api)
        })
        .await;
}

#[tokio::test]
async fn while_the_api_server_is_away_the_kubelets_list_ends_holds_and_nothing_else_does() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.run_bound_pod("b").await;
    world.api.go_away();
    world
        .wait_for_pods("the kubelet's list", |pods| {
            source(pods) == Some(PodSource::Kubelet)
        })
        .await;
    world.arbiter.more_listings(3).await;
    assert_eq!(world.arbiter.bound().len(), 2);

    world
        .kubelet
        .finish(&uid("a"), Phase::Succeeded)
        .await
        .unwrap();
    eventually("the end of the finished pod's hold", DEADLINE, || {
        world.arbiter.bound().len() == 1
    })
    .await;
    assert_eq!(world.arbiter.bound()[0].0, "b");

    world.api.come_back();
    world
        .wait_for_pods("the API server's list", |pods| {
            source(pods) == Some(PodSource::Api)
        })
        .await;
    assert_eq!(world.arbiter.bound().len(), 1);
}

#[tokio::test]
async fn without_any_source_the_pods_are_unknown_and_no_hold_ends() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.api.go_away();
    // As after a restart of the kubelet that can't ask the API server: its list of pods is empty.
    world.kubelet.hold_sources();
    world.kubelet.stop().await;
    world
        .wait_for_pods("that the pods are unknown", |pods| pods.is_none())
        .await;
    assert_eq!(world.arbiter.bound().len(), 1);
    world.api.come_back();
    world
        .wait_for_pods("the API server's list", |pods| names(pods) == ["a"])
        .await;
    assert_eq!(world.arbiter.bound().len(), 1);
}

#[tokio::test]
async fn a_watch_that_is_too_old_is_begun_anew() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.api.go_away();
    world
        .wait_for_pods("the kubelet's list", |pods| {
            source(pods) == Some(PodSource::Kubelet)
        })
        .await;
    world.api.put("pods", in_api("b", 1, "Pending"));
    world.api.compact();
    world.api.come_back();
    world
        .wait_for_pods("both pods from the API server", |pods| {
            names(pods) == ["a", "b"] && source(pods) == Some(PodSource::Api)
        })
        .await;
}
