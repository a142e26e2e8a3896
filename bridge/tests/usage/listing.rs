//! Holds by what pod-resources shows.

use bridge_core::{DeviceId, HoldKind};
use futures::future::join_all;
use gpu_bridge::usage::PodResources;
use testkit::{Phase, Pod, eventually};

use crate::world::{DEADLINE, NODE, RESOURCE, World, in_api, uid, unit};

#[tokio::test]
async fn a_grant_is_bound_to_its_pod_once_the_kubelet_lists_it() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.run_bound_pod("b").await;
    let mut bound = world.arbiter.bound();
    bound.sort();
    let want = ["a", "b"].map(|name| (name.to_owned(), Some(uid(name))));
    assert_eq!(bound, want);
}

#[tokio::test]
async fn a_finished_pod_frees_its_unit() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world
        .kubelet
        .finish(&uid("a"), Phase::Succeeded)
        .await
        .unwrap();
    world.api.put("pods", in_api("a", 1, "Succeeded"));
    eventually("the unit is free", DEADLINE, || world.arbiter.is_idle()).await;
}

#[tokio::test]
async fn a_force_deleted_pod_keeps_its_unit_until_the_kubelet_unlists_it() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.api.delete("pods", "train", "a");
    world
        .wait_for_pods("the API server's view of the delete", |pods| {
            pods.is_some_and(|pods| pods.pods.is_empty())
        })
        .await;
    world.arbiter.more_listings(3).await;
    assert_eq!(world.arbiter.bound().len(), 1, "the kubelet still lists it");
    world.kubelet.force_delete(&uid("a"));
    eventually("the unit is free", DEADLINE, || world.arbiter.is_idle()).await;
}

#[tokio::test]
async fn a_pod_that_the_kubelet_does_not_list_keeps_its_unit_while_it_is_alive() {
    let world = World::serving().await;
    let pod = Pod::new("train", "a", &uid("a"))
        .init("load", RESOURCE, 1)
        .app("main", RESOURCE, 0);
    let mut shown = in_api("a", 0, "Pending");
    shown["spec"]["initContainers"] = serde_json::json!([{
        "name": "load",
        "resources": {"limits": {RESOURCE: "1"}},
    }]);
    world.api.put("pods", shown);
    world.kubelet.admit(pod).await.unwrap();
    world.arbiter.more_listings(3).await;
    let status = world.arbiter.status();
    let holds: Vec<_> = status.units.iter().flat_map(|it| &it.holds).collect();
    assert!(
        matches!(holds[..], [hold] if matches!(hold.kind, HoldKind::Granted { .. })),
        "{holds:?}"
    );
    let pods = world.pods.borrow().clone().unwrap();
    assert_eq!(pods.pods[0].may_own, 1);
}

#[tokio::test]
async fn a_kubelet_that_is_away_ends_nothing_and_is_heard_again() {
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    world.kubelet.restart().await.unwrap();
    world.arbiter.more_listings(3).await;
    assert_eq!(world.arbiter.bound().len(), 1);
}

#[tokio::test]
async fn questions_beyond_the_kubelets_rate_are_answered_a_little_later() {
    /// Three times what the kubelet serves at once.
    const QUESTIONS: usize = 30;
    let world = World::serving().await;
    world.run_bound_pod("a").await;
    let lists = join_all((0..QUESTIONS).map(|_| world.resources.list())).await;
    let turned_away: Vec<_> = lists
        .iter()
        .filter_map(|list| list.as_ref().err())
        .collect();
    assert!(turned_away.is_empty(), "{turned_away:?}");
    let (status, pods) = (world.arbiter.status(), world.pods.borrow().clone());
    let ids = [DeviceId::of_unit(unit(0)), DeviceId::of_unit(unit(1))];
    let about = || world.resources.about(&ids, &status, pods.as_ref());
    let answers = join_all((0..QUESTIONS).map(|_| about())).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}

#[tokio::test]
async fn without_a_kubelet_the_error_names_the_socket_and_what_to_look_at() {
    let folder = crate::world::folder();
    let resources = PodResources::new(folder.path(), NODE.to_owned());
    let error = resources.list().await.unwrap_err().to_string();
    assert!(error.contains("pod-resources/kubelet.sock"), "{error}");
    assert!(error.contains("No such file"), "{error}");
    assert!(error.contains("Is the kubelet running"), "{error}");
}
