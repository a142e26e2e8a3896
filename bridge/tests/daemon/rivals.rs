//! Other daemons of our names on the node.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use testkit::Phase;

use crate::toys::{DraDriver, DriverState, Plugin, PluginState};
use crate::world::{DRIVER, RESOURCE, SOON, World, claim_uid, pod_uid, stays, until};

/// Nothing that is free is offered on either face, and what is held stays as it is.
async fn nothing_is_offered_but_what_is_held(world: &World, ids: &[String], device: &str) {
    until("only what is held is healthy", SOON, async || {
        let healthy = world.kubelet().healthy(RESOURCE);
        healthy.iter().eq(ids.iter())
    })
    .await;
    until("only what is held is untainted", SOON, async || {
        world.open_devices() == [device]
    })
    .await;
}

#[tokio::test]
async fn another_device_plugin_closes_both_faces_and_is_named_and_what_runs_goes_on() {
    let world = World::running(4).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    let ids = world.ids("a");

    // The process behind the socket is this one; the node says that it is of a pod.
    world.own_process_is_of("plugin");
    let socket = world.device_plugin_dir().join("nvidia-gpu.sock");
    let _plugin = UnixListener::bind(&socket).unwrap();
    let place = socket.display().to_string();
    world
        .lacks("OnlyRegistrant", &["OtherRegistrant", RESOURCE, &place])
        .await;
    nothing_is_offered_but_what_is_held(&world, &ids, &device).await;
    // Each look tells the owner anew, so a pod that the daemon has not heard of yet is named later.
    until("it is named with its pod", SOON, async || {
        let status = world.status().await;
        let rival = &status["rivals"][0];
        rival["face"] == "legacy"
            && rival["place"] == place
            && rival["owner"] == "pod train/plugin"
            && status["standing"] == "Serving"
    })
    .await;
    until("the log names it", SOON, async || {
        world.log().has("OtherRegistrant")
    })
    .await;

    let claimed = world.gpu(&device).uuid;
    let refused = world.allocate(&[&claimed]).await.unwrap_err();
    assert!(refused.contains("OtherRegistrant"), "{refused}");
    assert!(refused.contains(&place), "{refused}");
    let held = [&ids[0], &claimed];
    let free = (0..4).map(|number| format!("gpu-{number}"));
    let mut free = free.filter(|name| !held.contains(&&world.gpu(name).uuid));
    world.allocate_claim("c", &free.next().expect("four GPUs, two of them held"), "c");
    world.admit_claimant("c").await;
    let refused = world.prepare("c").await.unwrap_err();
    for part in ["UNAVAILABLE", "OtherRegistrant", &place] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    world.prepare("b").await.expect("it is prepared already");
    world
        .kubelet()
        .finish(&pod_uid("b"), Phase::Succeeded)
        .await
        .expect("what is held can be given back");
    until("its CDI file is gone", SOON, async || {
        !world.claim_spec(&claim_uid("b")).exists()
    })
    .await;
    assert_eq!(world.ids("a"), ids);
}

#[tokio::test]
async fn a_daemon_that_starts_beside_another_driver_of_its_name_offers_nothing() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let state = DriverState::new(&["v1.DRAPlugin"]);
    let driver = DraDriver::serve(&world.path("k"), &state, "other@toy.sock");
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.start_daemon();
    world
        .lacks("OnlyRegistrant", &[DRIVER, "other@toy.sock"])
        .await;
    world.has("DraPluginRegistered").await;
    world.has("DevicePluginRegistered").await;
    world.has("LedgerServing").await;
    until(
        "all ids are listed, and none is healthy",
        SOON,
        async || {
            let capacity = world.kubelet().capacity(RESOURCE);
            capacity.is_some_and(|it| it.capacity == 2 && it.allocatable == 0)
        },
    )
    .await;
    // The kubelet asks whoever registered last, and that is refused.
    world.allocate_claim("a", "gpu-0", "a");
    world.admit_claimant("a").await;
    let refused = world.prepare("a").await.unwrap_err();
    assert!(refused.contains("OtherRegistrant"), "{refused}");
    assert!(state.prepares().is_empty(), "the other was not asked");
    driver.end().await;
    stays(
        "it is remembered for a while",
        Duration::from_secs(2),
        async || {
            world
                .condition("OnlyRegistrant")
                .await
                .is_some_and(|(ok, _)| !ok)
        },
    )
    .await;
}

#[tokio::test]
async fn a_plugin_of_an_unknown_name_is_found_by_its_list_at_the_kubelet_and_gets_no_calls() {
    let world = World::running(2).await;
    let ids = [world.gpu("gpu-0").uuid, world.gpu("gpu-1").uuid];
    let state = PluginState::new(&[&format!("{}::0", ids[0]), &format!("{}::1", ids[0])]);
    let plugin = Plugin::serve(&world.path("k"), &state);
    plugin.register().await.unwrap();
    // Now it is the one that the kubelet asks.
    world
        .lacks("OnlyRegistrant", &["device-plugins/toy.sock"])
        .await;
    until("the kubelet counts our list again", SOON, async || {
        let capacity = world.kubelet().capacity(RESOURCE);
        capacity.is_some_and(|it| it.capacity == 2 && it.allocatable == 0)
    })
    .await;
    let rejection = world.admit_counted("a", 1).await.unwrap_err();
    assert!(
        rejection.message.contains("no healthy devices"),
        "{rejection:?}"
    );
    assert!(state.allocates().is_empty());
    plugin.end().await;
}

#[tokio::test]
async fn a_kubelet_that_stops_counting_what_is_listed_is_registered_with_anew() {
    let world = World::running(4).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    assert!(!healthy.is_empty());
    // The end of another plugin's list is the last that the kubelet hears.
    let state = PluginState::new(&[]);
    let plugin = Plugin::serve(&world.path("k"), &state);
    plugin.register().await.unwrap();
    until("the kubelet counts nothing", SOON, async || {
        world.kubelet().healthy(RESOURCE).is_empty()
    })
    .await;
    until("the kubelet counts our list again", SOON, async || {
        world.kubelet().healthy(RESOURCE) == healthy
    })
    .await;
    assert!(world.log().has("does not count ids"));
    plugin.end().await;
}
