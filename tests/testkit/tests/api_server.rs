//! The test API server, as the client that the product uses sees it.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of tests are tests, which clippy does not see"
)]

use std::pin::pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{
    DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams, Preconditions,
    WatchParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::WatchEvent;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use testkit::ApiServer;

/// Far more than anything here takes, even on a busy machine.
const SOON: Duration = Duration::from_secs(20);

async fn client(server: &ApiServer) -> Client {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    server.kubeconfig(&path);
    let kubeconfig = Kubeconfig::read_from(path).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
    Client::try_from(config.unwrap()).unwrap()
}

fn pod(name: &str, node: &str) -> Value {
    json!({
        "metadata": {"namespace": "default", "name": name},
        "spec": {"nodeName": node, "containers": []},
    })
}

fn claim(name: &str) -> ResourceClaim {
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": []}}});
    serde_json::from_value(claim).unwrap()
}

fn slice(taints: &Value) -> ResourceSlice {
    let slice = json!({
        "metadata": {"generateName": "node-1-gpu-"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "node-1",
            "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "taints": taints}],
        },
    });
    serde_json::from_value(slice).unwrap()
}

fn code(error: kube::Error) -> u16 {
    let kube::Error::Api(status) = error else {
        panic!("no answer of the server: {error}");
    };
    status.code
}

async fn next<T>(events: &mut (impl Stream<Item = T> + Unpin)) -> T {
    let event = tokio::time::timeout(SOON, events.next()).await;
    event.expect("an event in time").expect("an open watch")
}

#[tokio::test]
async fn a_node_s_status_is_patched_by_its_subresource_alone() {
    let server = ApiServer::start().await.unwrap();
    let allocatable = json!({"allocatable": {"cpu": "4", "nvidia.com/gpu": "8"}});
    server.put(
        "nodes",
        json!({"metadata": {"name": "node-1"}, "status": allocatable}),
    );
    let nodes: Api<Node> = Api::all(client(&server).await);
    let patch = json!({
        "metadata": {"labels": {"a": "b"}},
        "status": {"allocatable": {"nvidia.com/gpu": "5"}},
    });
    let params = PatchParams::default();
    nodes
        .patch("node-1", &params, &Patch::Merge(&patch))
        .await
        .unwrap();
    let seen = server.get("nodes", "", "node-1").unwrap();
    assert_eq!(seen["metadata"]["labels"]["a"], "b");
    assert_eq!(seen["status"]["allocatable"]["nvidia.com/gpu"], "8");
    for patch in [Patch::Merge(&patch), Patch::Strategic(&patch)] {
        nodes.patch_status("node-1", &params, &patch).await.unwrap();
    }
    let seen = nodes
        .get("node-1")
        .await
        .unwrap()
        .status
        .unwrap()
        .allocatable
        .unwrap();
    assert_eq!(
        (seen["nvidia.com/gpu"].0.as_str(), seen["cpu"].0.as_str()),
        ("5", "4")
    );
    assert_eq!(server.count("patch", "nodes/status"), 2);
    assert_eq!(server.count("patch", "nodes"), 1);
    assert_eq!(server.count("get", "nodes"), 1);
}

#[tokio::test]
async fn a_write_on_a_stale_version_is_a_conflict() {
    let server = ApiServer::start().await.unwrap();
    let claims: Api<ResourceClaim> = Api::namespaced(client(&server).await, "default");
    let first = claims
        .create(&PostParams::default(), &claim("c"))
        .await
        .unwrap();
    assert!(first.metadata.uid.is_some());
    let again = claims.create(&PostParams::default(), &claim("c")).await;
    assert_eq!(code(again.unwrap_err()), 409);
    let mut changed = first.clone();
    changed.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    let params = PostParams::default();
    let second = claims.replace("c", &params, &changed).await.unwrap();
    assert_ne!(
        second.metadata.resource_version,
        first.metadata.resource_version
    );
    changed.metadata.labels = None;
    let stale = claims.replace("c", &params, &changed).await.unwrap_err();
    assert_eq!(code(stale), 409);
    let same = claims.replace("c", &params, &second).await.unwrap();
    assert_eq!(
        same.metadata.resource_version,
        second.metadata.resource_version
    );
    assert_eq!(code(claims.get("other").await.unwrap_err()), 404);
}

#[tokio::test]
async fn lists_and_collections_follow_field_selectors() {
    let server = ApiServer::start().await.unwrap();
    for (name, node) in [("a", "node-1"), ("b", "node-2"), ("c", "node-1")] {
        server.put("pods", pod(name, node));
    }
    let client = client(&server).await;
    let pods: Api<Pod> = Api::all(client.clone());
    let names = async |selector: &str| {
        let list = pods
            .list(&ListParams::default().fields(selector))
            .await
            .unwrap();
        let names = list.items.into_iter().map(|it| it.metadata.name.unwrap());
        names.collect::<Vec<String>>()
    };
    assert_eq!(names("spec.nodeName=node-1").await, ["a", "c"]);
    assert_eq!(names("spec.nodeName=node-1,metadata.name!=a").await, ["c"]);
    assert_eq!(names("").await, ["a", "b", "c"]);
    let slices: Api<ResourceSlice> = Api::all(client);
    slices
        .create(&PostParams::default(), &slice(&json!([])))
        .await
        .unwrap();
    let of_driver = |driver: &str| {
        ListParams::default().fields(&format!("spec.driver={driver},spec.nodeName=node-1"))
    };
    let wiped = slices
        .delete_collection(&DeleteParams::default(), &of_driver("other"))
        .await;
    wiped.unwrap();
    assert_eq!(server.list("resourceslices").len(), 1);
    let wiped = slices
        .delete_collection(&DeleteParams::default(), &of_driver("gpu.nvidia.com"))
        .await;
    wiped.unwrap();
    assert!(server.list("resourceslices").is_empty());
}

#[tokio::test]
async fn a_watch_replays_from_its_version_and_sees_objects_enter_and_leave_its_selector() {
    let server = ApiServer::start().await.unwrap();
    let pods: Api<Pod> = Api::all(client(&server).await);
    let listed = pods.list(&ListParams::default()).await.unwrap();
    server.put("pods", pod("a", "node-1"));
    server.put("pods", pod("b", ""));
    let params = WatchParams::default().fields("spec.nodeName=node-1");
    let version = listed.metadata.resource_version.unwrap();
    let mut events = Box::pin(pods.watch(&params, &version).await.unwrap());
    let mut seen = async || match next(&mut events).await.unwrap() {
        WatchEvent::Added(pod) => ("added", pod.metadata.name.unwrap()),
        WatchEvent::Modified(pod) => ("modified", pod.metadata.name.unwrap()),
        WatchEvent::Deleted(pod) => ("deleted", pod.metadata.name.unwrap()),
        other @ (WatchEvent::Bookmark(_) | WatchEvent::Error(_)) => panic!("{other:?}"),
    };
    assert_eq!(seen().await, ("added", "a".to_owned()));
    server.patch(
        "pods",
        "default",
        "b",
        &json!({"spec": {"nodeName": "node-1"}}),
    );
    assert_eq!(seen().await, ("added", "b".to_owned()));
    server.patch(
        "pods",
        "default",
        "a",
        &json!({"status": {"phase": "Running"}}),
    );
    assert_eq!(seen().await, ("modified", "a".to_owned()));
    server.delete("pods", "default", "a");
    assert_eq!(seen().await, ("deleted", "a".to_owned()));
    assert_eq!(server.count("watch", "pods"), 1);
}

#[tokio::test]
async fn an_expired_watch_lists_anew() {
    let server = ApiServer::start().await.unwrap();
    server.put("pods", pod("a", "node-1"));
    server.compact();
    let pods: Api<Pod> = Api::all(client(&server).await);
    let mut events = Box::pin(pods.watch(&WatchParams::default(), "0").await.unwrap());
    assert!(matches!(
        next(&mut events).await.unwrap(),
        WatchEvent::Added(_)
    ));
    server.put("pods", pod("b", "node-1"));
    server.compact();
    let expired = pods.watch(&WatchParams::default(), "1").await;
    let mut expired = Box::pin(expired.unwrap());
    let WatchEvent::Error(status) = next(&mut expired).await.unwrap() else {
        panic!("an event that was forgotten");
    };
    assert_eq!(status.code, 410);
    assert!(expired.next().await.is_none());
}

#[tokio::test]
async fn the_client_s_watcher_survives_an_absence() {
    let server = ApiServer::start().await.unwrap();
    server.put("pods", pod("a", "node-1"));
    for config in [
        watcher::Config::default(),
        watcher::Config::default().streaming_lists(),
    ] {
        let pods: Api<Pod> = Api::all(client(&server).await);
        let mut applied = pin!(
            watcher(pods, config)
                .default_backoff()
                .applied_objects()
                .filter_map(async |it| it.ok())
        );
        assert_eq!(next(&mut applied).await.metadata.name.as_deref(), Some("a"));
        server.go_away();
        let other = client(&server).await;
        let nodes: Api<Node> = Api::all(other);
        nodes.get("node-1").await.unwrap_err();
        server.put("pods", pod("late", "node-1"));
        server.come_back();
        while next(&mut applied).await.metadata.name.as_deref() != Some("late") {}
        server.delete("pods", "default", "late");
    }
}

#[tokio::test]
async fn taints_are_kept_or_dropped() {
    let server = ApiServer::start().await.unwrap();
    let slices: Api<ResourceSlice> = Api::all(client(&server).await);
    let tainted = slice(&json!([{"key": "gpu-bridge.dev/held", "effect": "NoSchedule"}]));
    let taints = |slice: &ResourceSlice| {
        let devices = slice.spec.devices.clone().unwrap();
        devices[0].taints.clone().unwrap_or_default().len()
    };
    let mut kept = slices
        .create(&PostParams::default(), &tainted)
        .await
        .unwrap();
    assert_eq!(taints(&kept), 1);
    server.drop_taints();
    kept.spec.pool.generation = 2;
    let name = kept.metadata.name.clone().unwrap();
    let dropped = slices
        .replace(&name, &PostParams::default(), &kept)
        .await
        .unwrap();
    assert_eq!(taints(&dropped), 0);
    let other = slices
        .create(&PostParams::default(), &tainted)
        .await
        .unwrap();
    assert_eq!(taints(&other), 0);
    assert_ne!(other.metadata.name, dropped.metadata.name);
}

#[tokio::test]
async fn a_dry_run_answers_as_a_write_does_and_stores_nothing() {
    let server = ApiServer::start().await.unwrap();
    let slices: Api<ResourceSlice> = Api::all(client(&server).await);
    let dry = PostParams {
        dry_run: true,
        field_manager: None,
    };
    server.drop_taints();
    let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
    let made = slices.create(&dry, &slice(&taints)).await.unwrap();
    assert_eq!(made.spec.devices.unwrap()[0].taints, None);
    assert_eq!(server.list("resourceslices"), Vec::<Value>::new());
    assert_eq!(server.count("create", "resourceslices"), 0);
    assert_eq!(server.count("dry-run create", "resourceslices"), 1);

    let made = slices.create(&PostParams::default(), &slice(&taints)).await;
    let name = made.unwrap().metadata.name.unwrap();
    let delete = DeleteParams {
        dry_run: true,
        ..DeleteParams::default()
    };
    slices.delete(&name, &delete).await.unwrap();
    assert_eq!(server.list("resourceslices").len(), 1);
    server.forbid("create", "resourceslices");
    let refused = slices.create(&dry, &slice(&taints)).await.unwrap_err();
    assert_eq!(code(refused), 403);
}

#[tokio::test]
async fn what_is_forbidden_gets_403_until_it_is_allowed() {
    let server = ApiServer::start().await.unwrap();
    server.put("nodes", json!({"metadata": {"name": "node-1"}}));
    server.forbid("patch", "nodes/status");
    let nodes: Api<Node> = Api::all(client(&server).await);
    let patch = Patch::Merge(json!({"status": {"allocatable": {"cpu": "1"}}}));
    let params = PatchParams::default();
    let forbidden = nodes
        .patch_status("node-1", &params, &patch)
        .await
        .unwrap_err();
    assert_eq!(code(forbidden), 403);
    nodes.get("node-1").await.unwrap();
    server.allow("patch", "nodes/status");
    nodes.patch_status("node-1", &params, &patch).await.unwrap();
    assert_eq!(server.count("patch", "nodes/status"), 2);
}

#[tokio::test]
async fn a_delete_minds_its_preconditions_and_an_eviction_deletes() {
    let server = ApiServer::start().await.unwrap();
    server.put("pods", pod("a", "node-1"));
    server.put("pods", pod("b", "node-1"));
    let pods: Api<Pod> = Api::namespaced(client(&server).await, "default");
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some("another".to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    assert_eq!(code(pods.delete("a", &params).await.unwrap_err()), 409);
    pods.delete("a", &DeleteParams::default()).await.unwrap();
    pods.evict("b", &EvictParams::default()).await.unwrap();
    assert!(server.list("pods").is_empty());
    assert_eq!(server.count("create", "pods/eviction"), 1);
}

#[tokio::test]
async fn what_the_server_does_not_know_it_says() {
    let server = ApiServer::start().await.unwrap();
    let client = client(&server).await;
    assert_eq!(client.apiserver_version().await.unwrap().minor, "37");
    let pods: Api<Pod> = Api::all(client.clone());
    let labels = pods.list(&ListParams::default().labels("a=b")).await;
    assert_eq!(code(labels.unwrap_err()), 400);
    server.put("nodes", json!({"metadata": {"name": "node-1"}}));
    let nodes: Api<Node> = Api::all(client);
    let apply = Patch::Apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {}}));
    let refused = nodes
        .patch("node-1", &PatchParams::apply("test"), &apply)
        .await;
    assert_eq!(code(refused.unwrap_err()), 415);
}

#[tokio::test]
async fn a_watch_ends_with_the_server() {
    let server = ApiServer::start().await.unwrap();
    let pods: Api<Pod> = Api::all(client(&server).await);
    let events = pods.watch(&WatchParams::default(), "0").await.unwrap();
    drop(server);
    let rest = tokio::time::timeout(SOON, events.try_collect::<Vec<_>>()).await;
    assert!(rest.expect("an end in time").is_ok_and(|it| it.is_empty()));
    pods.list(&ListParams::default()).await.unwrap_err();
}
