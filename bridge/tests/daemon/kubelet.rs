//! A kubelet that starts anew, and one that loses what it knew.

use std::fs;
use std::time::Duration;

use crate::world::{DRIVER, NAMESPACE, RESOURCE, SOON, World, claim_uid, pod_uid, stays, until};

#[tokio::test]
async fn after_a_restart_of_the_kubelet_both_faces_register_and_running_pods_keep_their_ids() {
    let world = World::running(4).await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    let ids = world.ids("a");
    for _ in 0..2 {
        world.kubelet().restart().await.unwrap();
        world.kubelet().wait_for_driver(DRIVER, SOON).await;
        let count = healthy.len();
        world
            .kubelet()
            .wait_for_healthy(RESOURCE, count, SOON)
            .await;
        assert_eq!(world.kubelet().healthy(RESOURCE), healthy);
        assert!(ids.iter().all(|id| healthy.contains(id)));
        assert_eq!(world.ids("a"), ids);
    }
    stays("the holds", Duration::from_secs(2), async || {
        world.holds().await == held
    })
    .await;
    world.run_counted("c", 1).await;
    assert_ne!(world.counted_devices("c"), world.counted_devices("a"));
    world.prepare("b").await.expect("it is prepared once more");
}

#[tokio::test]
async fn a_kubelet_that_has_not_heard_of_its_pods_since_its_start_gets_no_counted_ones() {
    let world = World::new(4).await;
    world.api.allow("patch", "nodes/status");
    let world = world.started().await;
    let counts = async |count: u32| {
        let what = format!("the Node counts {count}");
        until(&what, SOON, async || world.count() == Some(count)).await;
    };
    counts(4).await;
    world.kubelet().stop().await;
    counts(0).await;
    world.kubelet().resume().await.unwrap();
    world.kubelet().hold_sources();
    world.has("DevicePluginRegistered").await;
    world.kubelet().wait_for_healthy(RESOURCE, 4, SOON).await;
    // It has the list, and would fail who comes by what its book of before says.
    stays("nothing is counted", Duration::from_secs(1), async || {
        world.count() == Some(0)
    })
    .await;
    world.kubelet().release_sources();
    counts(4).await;
}

#[tokio::test]
async fn a_kubelet_that_lost_its_book_gets_another_gpu_for_an_id_that_is_in_use() {
    let world = World::running(4).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let before = world.counted_devices("a");
    let id = world.ids("a").remove(0);
    let given = world.allocate(&[&id]).await.unwrap();
    assert_ne!(given, before, "never the same GPU again");
    // The log comes by a pipe, after the answer.
    until("it is reported", SOON, async || {
        world.log().has("KubeletLostItsBook") || world.log().has("lost its book")
    })
    .await;
    let bound = world.holds().await.into_iter();
    let bound: Vec<_> = bound.filter(|(_, phase, _, _)| phase == "Bound").collect();
    assert_eq!(bound[0].0, held[0].0, "the pod keeps its GPU");
}

#[tokio::test]
async fn a_removed_socket_is_made_again_and_registered() {
    let world = World::running(2).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    let ours = |name: &str| name.starts_with("gpu-bridge-") || name.ends_with("@reg.sock");
    let mut removed = 0;
    for folder in [world.device_plugin_dir(), world.registry()] {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if ours(entry.file_name().to_str().unwrap()) {
                fs::remove_file(entry.path()).unwrap();
                removed += 1;
            }
        }
    }
    assert_eq!(removed, 2);
    until("an Allocate reaches the daemon", SOON, async || {
        let id = healthy.iter().next().unwrap();
        world.allocate(&[id]).await.is_ok()
    })
    .await;
    until("the ids are healthy", SOON, async || {
        world.kubelet().healthy(RESOURCE) == healthy
    })
    .await;
    world.allocate_claim("b", "gpu-0", "b");
    world.admit_claimant("b").await;
    until("a Prepare reaches the daemon", SOON, async || {
        world.prepare("b").await.is_ok()
    })
    .await;
}

/// The process of the counted pod `a`, which is deleted by force while it runs.
const LEFT: u32 = 4321;

/// Runs the counted pod `a` and deletes it by force; its process stays. Returns the GPU.
async fn leave_a_process(world: &World) -> String {
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    let unit = world.ids("a").remove(0);
    world.start_process(&unit, LEFT, &pod_uid("a"));
    world.kubelet().force_delete(&pod_uid("a"));
    world.api.delete("pods", NAMESPACE, "a");
    world.wait_for_holds("Foreign", 1).await;
    unit
}

#[tokio::test]
async fn a_force_deleted_pod_gives_its_gpu_to_no_claim_while_its_process_runs() {
    let world = World::running(2).await;
    let unit = leave_a_process(&world).await;
    let device = world.unit(&unit).await["device"]
        .as_str()
        .unwrap()
        .to_owned();
    until("it is shown as in use", SOON, async || {
        world.taint(&device) == Some("Foreign".to_owned())
            && !world.kubelet().healthy(RESOURCE).contains(&unit)
    })
    .await;
    world.allocate_claim("b", &device, "b");
    world.admit_claimant("b").await;
    let ends = async {
        until("the call is in", SOON, async || {
            world.api.count("get", "resourceclaims") > 0
        })
        .await;
        stays("the claim waits", Duration::from_secs(1), async || {
            !world.claim_spec(&claim_uid("b")).exists()
        })
        .await;
        world.end_process(&unit, LEFT);
    };
    let (prepared, ()) = tokio::join!(world.prepare("b"), ends);
    prepared.unwrap();
    assert!(world.claim_spec(&claim_uid("b")).exists());
}

#[tokio::test]
async fn a_process_that_never_ends_closes_its_gpu_and_hangs_nobody_over_a_restart_too() {
    let mut world = World::running(4).await;
    let unit = leave_a_process(&world).await;
    let shown = world.unit(&unit).await;
    assert_eq!(shown["holds"][0]["cause"], "Lingering");
    assert_eq!(shown["holds"][0]["pod"]["name"], "a");
    let device = shown["device"].as_str().unwrap().to_owned();

    // Its own kind gets another GPU, and a claim that names it is told why within its call.
    world.run_counted("b", 1).await;
    assert_ne!(world.ids("b")[0], unit);
    world.allocate_claim("c", &device, "c");
    world.admit_claimant("c").await;
    let refused = world.prepare("c").await.unwrap_err();
    for part in ["UnitBusy", "4321", "end that process"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    world.end_pod("c").await;
    let other = world.free_device().await;
    world.run_claimant("d", &other).await;

    world.kill_daemon();
    world.start_daemon();
    world.wait_for_holds("Foreign", 1).await;
    until("it is shown as in use", SOON, async || {
        world.taint(&device) == Some("Foreign".to_owned())
            && !world.kubelet().healthy(RESOURCE).contains(&unit)
    })
    .await;
    world.end_process(&unit, LEFT);
    until("it is free again", SOON, async || {
        let holds = world.unit(&unit).await["holds"].clone();
        holds.as_array().is_some_and(Vec::is_empty)
    })
    .await;
}
