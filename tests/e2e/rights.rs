//! What the daemon's own token can do in the cluster, and what a thief of it can't: RBAC and the admission policies as
//! they are shipped, judged by a real API server.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::world::{Setup, World, client};

/// An API server takes a new policy into use within a second or so.
const IN_FORCE: Duration = Duration::from_secs(30);

/// The node that the token is bound to.
const NODE: &str = "node-0";

fn assert_denied<T: std::fmt::Debug>(what: &str, answer: Result<T, kube::Error>, words: &str) {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let message = status.message;
            assert!(message.contains(words), "{what}: {message}");
        }
        other => panic!("{what} was not denied: {other:?}"),
    }
}

fn slice(name: &str, node: &str, driver: &str) -> ResourceSlice {
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {"driver": driver, "nodeName": node, "devices": [],
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}},
    });
    serde_json::from_value(slice).expect("a slice")
}

#[tokio::test]
async fn the_daemons_token_changes_the_slices_and_the_count_of_its_own_node_and_nothing_else() {
    let Some(world) = World::without_daemon(Setup::shared(2)).await else {
        return;
    };
    let other = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}});
    Api::<Node>::all(world.client.clone())
        .create(
            &PostParams::default(),
            &serde_json::from_value(other).expect("a node"),
        )
        .await
        .expect("another node");
    let ours = client(&world.state().join("gpu-bridge.kubeconfig")).await;
    let nodes: Api<Node> = Api::all(ours.clone());
    let patch = async |node: &str, change: &Value| {
        let patch = Patch::Merge(change);
        nodes
            .patch_status(node, &PatchParams::default(), &patch)
            .await
    };
    let count = json!({"status": {"allocatable": {"nvidia.com/gpu": "1"}}});
    patch(NODE, &count).await.expect("that is its work");
    world
        .wait_for("the policies are in force", IN_FORCE, async |_: &World| {
            patch("node-9", &count).await.is_err()
        })
        .await;
    assert_denied(
        "another node",
        patch("node-9", &count).await,
        "its own node alone",
    );

    let alone = "may change the count of GPUs in a node's status alone";
    for (change, words) in [
        (json!({"status": {"allocatable": {"cpu": "1000"}}}), alone),
        (json!({"status": {"allocatable": {"cpu": null}}}), alone),
        (
            json!({"status": {"allocatable": {"example.com/new": "1"}}}),
            alone,
        ),
        (
            json!({"status": {"capacity": {"nvidia.com/gpu": "64"}}}),
            alone,
        ),
        (
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}}),
            alone,
        ),
        (
            json!({"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}),
            alone,
        ),
        (json!({"status": {"conditions": []}}), alone),
        (
            json!({"status": {"nodeInfo": {"kubeletVersion": "v0"}}}),
            alone,
        ),
        (
            json!({"metadata": {"labels": {"node-restriction.kubernetes.io/trusted": "yes"}}}),
            "no label, annotation",
        ),
        (
            json!({"metadata": {"annotations": {"a": "b"}}}),
            "no label, annotation",
        ),
        (
            json!({"metadata": {"finalizers": ["example.com/stay"]}}),
            "no label, annotation",
        ),
    ] {
        assert_denied(&change.to_string(), patch(NODE, &change).await, words);
    }
    // The spec goes unchanged through this door, whatever is written.
    let taint = json!({"spec": {"unschedulable": true}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}});
    let node = patch(NODE, &taint).await.expect("the count may change");
    assert_eq!(node.spec.and_then(|spec| spec.unschedulable), None);
    let main = nodes
        .patch(NODE, &PatchParams::default(), &Patch::Merge(&taint))
        .await;
    assert_denied("the node itself", main, "cannot patch");

    let slices: Api<ResourceSlice> = Api::all(ours.clone());
    let create = async |slice: &ResourceSlice| slices.create(&PostParams::default(), slice).await;
    create(&slice("own", NODE, "gpu.nvidia.com"))
        .await
        .expect("that is its work");
    let of_another = slice("other-node", "node-9", "gpu.nvidia.com");
    assert_denied(
        "a slice of another node",
        create(&of_another).await,
        "its own node alone",
    );
    let of_another = slice("other-driver", NODE, "net.example.com");
    assert_denied(
        "a slice of another driver",
        create(&of_another).await,
        "gpu.nvidia.com alone",
    );
    Api::<ResourceSlice>::all(world.client.clone())
        .create(
            &PostParams::default(),
            &slice("theirs", "node-9", "gpu.nvidia.com"),
        )
        .await
        .expect("the admin may");
    let deleted = slices.delete("theirs", &DeleteParams::default()).await;
    assert_denied("the slice of another node", deleted, "its own node alone");
    slices
        .delete("own", &DeleteParams::default())
        .await
        .expect("that is its work");
    reads_what_it_needs_and_no_secret(ours).await;
}

async fn reads_what_it_needs_and_no_secret(ours: kube::Client) {
    let all = ListParams::default();
    let pods: Api<Pod> = Api::all(ours.clone());
    let claims: Api<ResourceClaim> = Api::all(ours.clone());
    pods.list(&all).await.expect("whether holders have ended");
    claims.list(&all).await.expect("which claims are allocated");
    let secrets: Api<Secret> = Api::all(ours.clone());
    assert_denied("secrets", secrets.list(&all).await, "cannot list");
    let pods: Api<Pod> = Api::namespaced(ours.clone(), "default");
    let delete = pods.delete("any", &DeleteParams::default()).await;
    assert_denied("a pod", delete, "cannot delete");
    let claims: Api<ResourceClaim> = Api::namespaced(ours, "default");
    let status = json!({"status": {"allocation": null}});
    let patched = claims
        .patch_status("any", &PatchParams::default(), &Patch::Merge(&status))
        .await;
    assert_denied("a claim's status", patched, "cannot patch");
}
