//! What others forget, and what happens while the daemon or the API server is away.

use std::time::Duration;

use testkit::Phase;

use crate::world::{NAMESPACE, SOON, World, claim_uid, pod_uid, stays, until};

/// The holders of all units, by UID, in order.
async fn holders(world: &World) -> Vec<String> {
    let holds = world.holds().await.into_iter();
    let mut holders: Vec<String> = holds.map(|(_, _, _, holder)| holder).collect();
    holders.sort();
    holders
}

#[tokio::test]
async fn when_etcd_is_put_back_claims_that_come_back_and_vanish_are_followed_and_doubled_never() {
    let world = World::running(2).await;
    world.run_claimant("old", "gpu-0").await;
    let backup = world.api.back_up();
    world.end_pod("old").await;
    until("its GPU is free", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
    world.run_claimant("new", "gpu-0").await;

    world.api.restore(backup);
    // The claim of `new` has vanished while its pod runs, and that of `old` is allocated to the same GPU again.
    until("the claim that came back is known", SOON, async || {
        world.api.get("resourceclaims", NAMESPACE, "old").is_some()
            && world
                .condition("ApiServerReachable")
                .await
                .is_some_and(|(ok, _)| ok)
    })
    .await;
    world.admit_claimant("old").await;
    let refused = world.prepare("old").await.unwrap_err();
    assert!(refused.contains("UnitHeld"), "{refused}");
    assert_eq!(holders(&world).await, [claim_uid("new")]);
    // A kubelet ends pods that the API does not have.
    world.kubelet().terminate(&pod_uid("new")).await.unwrap();
    world.prepare("old").await.expect("the GPU is free for it");
    assert_eq!(holders(&world).await, [claim_uid("old")]);
    // And what is written from now on is seen, although its versions are lower than some that were seen before.
    world.end_pod("old").await;
    until("nothing is held", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
    world.run_counted("next", 1).await;
}

#[tokio::test]
async fn while_the_api_server_is_away_counted_pods_come_and_go_and_claims_are_given_back() {
    let mut world = World::running(4).await;
    let device = world.free_device().await;
    world.run_claimant("claimant", &device).await;
    world.run_counted("running", 1).await;
    world.wait_for_holds("Bound", 1).await;
    world.allocate_claim("late", "gpu-1", "late");
    world.api.go_away();
    world.lacks("ApiServerReachable", &[]).await;

    // A pod that was bound before comes to the kubelet late, and goes again.
    world.admit_unseen("unseen", 1).await.unwrap();
    world.kubelet().run(&pod_uid("unseen")).await.unwrap();
    world.wait_for_holds("Bound", 2).await;
    world.kubelet().terminate(&pod_uid("unseen")).await.unwrap();
    world.wait_for_holds("Bound", 1).await;
    world
        .kubelet()
        .admit(testkit::Pod::new(NAMESPACE, "late", &pod_uid("late")))
        .await
        .unwrap();
    let refused = world.prepare("late").await.unwrap_err();
    for part in ["UNAVAILABLE", "ClaimUnreadable", "tries again"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    world
        .kubelet()
        .finish(&pod_uid("claimant"), Phase::Succeeded)
        .await
        .expect("Unprepare needs no API server");
    // A restart in the middle of it changes nothing of that.
    world.kill_daemon();
    world.start_daemon();
    world.has("DevicePluginRegistered").await;
    world.has("DraPluginRegistered").await;
    world.admit_unseen("second", 1).await.unwrap();

    world.api.come_back();
    world.readyz().await;
    world.prepare("late").await.unwrap();
    assert_eq!(
        world
            .holds()
            .await
            .iter()
            .filter(|it| it.1 == "Prepared")
            .count(),
        1
    );
}

#[tokio::test]
async fn what_ends_while_the_daemon_is_away_is_given_back_when_it_is_there_again() {
    let mut world = World::running(4).await;
    world.run_counted("counted", 1).await;
    world.run_claimant("ended", "gpu-0").await;
    world.run_claimant("deleted", "gpu-1").await;
    world.wait_for_holds("Bound", 1).await;
    world.kill_daemon();
    // The counted pod goes; one claim's pod hangs, since nobody unprepares; the other's claim goes with its objects.
    world.end_pod("counted").await;
    let hangs = world.kubelet().terminate(&pod_uid("ended")).await;
    assert!(hangs.is_err(), "a kubelet unprepares with the driver alone");
    let hangs = world.kubelet().terminate(&pod_uid("deleted")).await;
    assert!(hangs.is_err());
    world.api.delete("pods", NAMESPACE, "deleted");
    world.api.delete("resourceclaims", NAMESPACE, "deleted");
    world.start_daemon();
    world.has("DraPluginRegistered").await;
    for pod in ["ended", "deleted"] {
        let ended = world.kubelet().terminate(&pod_uid(pod)).await;
        ended.unwrap_or_else(|error| panic!("{pod} hangs in Terminating: {error}"));
    }
    world.api.delete("pods", NAMESPACE, "ended");
    world.api.delete("resourceclaims", NAMESPACE, "ended");
    until("nothing is held", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
    for claim in ["ended", "deleted"] {
        assert!(!world.claim_spec(&claim_uid(claim)).exists(), "{claim}");
    }
    world.ready().await;
}

#[tokio::test]
async fn a_prepare_whose_caller_has_gone_takes_nothing_any_more() {
    let world = World::running(2).await;
    world.run_claimant("first", "gpu-0").await;
    world.allocate_claim("second", "gpu-0", "second");
    world.admit_claimant("second").await;
    let reads = world.api.count("get", "resourceclaims");
    tokio::select! {
        answer = world.prepare("second") => panic!("it waits for the GPU: {answer:?}"),
        () = until("the call is in", SOON, async || world.api.count("get", "resourceclaims") > reads) => {}
    }
    // Its pod is deleted meanwhile: the kubelet gives up the call, and unprepares.
    world.kubelet().terminate(&pod_uid("second")).await.unwrap();
    world.api.delete("pods", NAMESPACE, "second");
    world.api.delete("resourceclaims", NAMESPACE, "second");
    world.end_pod("first").await;
    until("nothing is held", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
    stays("it takes nothing", Duration::from_secs(2), async || {
        world.holds().await.is_empty()
    })
    .await;
    assert!(!world.claim_spec(&claim_uid("second")).exists());
}
