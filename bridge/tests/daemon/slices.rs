//! The ResourceSlice, over the life of a daemon.

use std::time::Duration;

use crate::world::{DRIVER, NODE, RESOURCE, SOON, World, stays, until};

fn slice_name(world: &World) -> Option<String> {
    let slices = world.api.list("resourceslices");
    let first = slices.into_iter().next()?;
    Some(first["metadata"]["name"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_wiped_slice_is_made_again_and_an_idle_node_writes_nothing() {
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

    let writes = world.writes();
    stays("nothing is written", Duration::from_secs(3), async || {
        world.writes() == writes
    })
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
