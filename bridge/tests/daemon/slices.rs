//! The ResourceSlice, over the life of a daemon.

use std::time::Duration;

use serde_json::{Value, json};

use crate::world::{DRIVER, NODE, RESOURCE, SOON, World, stays, until};

fn slice_name(world: &World) -> Option<String> {
    let slices = world.api.list("resourceslices");
    let first = slices.into_iter().next()?;
    Some(first["metadata"]["name"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_wiped_slice_is_made_again_and_an_idle_node_writes_nothing_and_logs_nothing() {
    let world = World::running(4).await;
    let before = world.slice().unwrap();
    let name = slice_name(&world).unwrap();
    world.api.delete("resourceslices", "", &name);
    until("it is there again", Duration::from_secs(5), async || {
        world.slice().as_ref() == Some(&before)
    })
    .await;
    let slice = world.api.list("resourceslices").remove(0);
    assert_eq!(slice["spec"]["driver"], DRIVER);
    assert_eq!(slice["spec"]["nodeName"], NODE);
    assert_eq!(slice["metadata"]["ownerReferences"][0]["name"], NODE);

    // The watch may still have to tell of the last write.
    stays("it runs on", Duration::from_millis(500), async || {
        world.standing().await.is_some()
    })
    .await;
    let (writes, log) = (world.writes(), world.log());
    let lines = log.lines().len();
    stays(
        "nothing is written, nor logged",
        Duration::from_secs(3),
        async || world.writes() == writes && log.lines().len() == lines,
    )
    .await;
    assert!(writes > 0, "the counter counts");
}

#[tokio::test]
async fn a_restart_of_the_daemon_writes_nothing_when_nothing_has_changed() {
    let mut world = World::running(2).await;
    let before = world.api.list("resourceslices");
    world.stop_daemon().await;
    let writes = world.writes();
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.api.list("resourceslices"), before);
    assert_eq!(world.writes(), writes);
}

#[tokio::test]
async fn where_the_server_drops_taints_closed_devices_are_left_out_of_the_slice() {
    let mut world = World::new(4).await;
    world.api.drop_taints();
    world.start_kubelet().await;
    world.start_daemon();
    until("only open devices are left", SOON, async || {
        let names = world.slice().unwrap_or_default().into_iter();
        names.map(|(name, _)| name).collect::<Vec<_>>() == ["gpu-0", "gpu-1"]
    })
    .await;
    world.readyz().await;
    world.run_claimant("a", "gpu-1").await;
}

#[tokio::test]
async fn without_the_right_to_write_slices_it_says_so_and_serves_counted_pods() {
    let mut world = World::new(2).await;
    world.api.forbid("create", "resourceslices");
    world.start_kubelet().await;
    world.start_daemon();
    world.lacks("SlicePublished", &["forbidden"]).await;
    world.has("DevicePluginRegistered").await;
    world.kubelet().wait_for_healthy(RESOURCE, 1, SOON).await;
    world.run_counted("a", 1).await;
    world.api.allow("create", "resourceslices");
    world.ready().await;
}

#[tokio::test]
async fn when_the_node_object_was_made_anew_the_slice_belongs_to_the_new_one() {
    let world = World::running(2).await;
    let slice = world.api.list("resourceslices").remove(0);
    world.api.delete("nodes", "", NODE);
    let node = world.api.put("nodes", json!({"metadata": {"name": NODE}}));
    // The garbage collector takes what belonged to the old one.
    let name = slice["metadata"]["name"].as_str().unwrap();
    world.api.delete("resourceslices", "", name);
    until("a slice of the new node is there", SOON, async || {
        let slices = world.api.list("resourceslices");
        let owner = |it: &Value| it["metadata"]["ownerReferences"][0]["uid"].clone();
        slices.first().map(owner) == Some(node["metadata"]["uid"].clone())
    })
    .await;
    assert_ne!(
        slice["metadata"]["ownerReferences"][0]["uid"],
        node["metadata"]["uid"]
    );
}
