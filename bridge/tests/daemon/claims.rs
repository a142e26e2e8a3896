//! Claims that can't be prepared: the sentence in the pod's event says what to do, and nothing is lost.

use std::time::Duration;

use serde_json::json;

use crate::world::{NAMESPACE, NODE, SOON, World, claim_uid, pod_uid, stays, until};

fn assert_says(refused: &str, parts: &[&str]) {
    for part in parts {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
}

/// The claim's allocation with a configuration for our driver.
fn configure(world: &World, claim: &str, parameters: serde_json::Value) {
    let opaque = json!({"driver": "gpu.nvidia.com", "parameters": parameters});
    let config = json!([{"source": "FromClaim", "requests": [], "opaque": opaque}]);
    let patch = json!({"status": {"allocation": {"devices": {"config": config}}}});
    world.api.patch("resourceclaims", NAMESPACE, claim, &patch);
}

#[tokio::test]
async fn every_claim_that_can_not_be_prepared_is_refused_by_name_with_what_to_do() {
    let world = World::running(4).await;
    let held = world.holds().await;
    for (name, device) in [
        ("sharing", "gpu-0"),
        ("typo", "gpu-0"),
        ("replaced", "gpu-0"),
        ("gone", "gpu-0"),
        ("elsewhere", "gpu-0"),
        ("unknown", "gpu-77"),
        ("pending", "gpu-0"),
    ] {
        world.allocate_claim(name, device, name);
        world.admit_claimant(name).await;
    }
    let gpu_config = "resource.nvidia.com/v1beta1";
    let sharing =
        json!({"apiVersion": gpu_config, "kind": "GpuConfig", "sharing": {"strategy": "MPS"}});
    configure(&world, "sharing", sharing);
    configure(
        &world,
        "typo",
        json!({"apiVersion": gpu_config, "kind": "GpuConfg"}),
    );
    world.api.delete("resourceclaims", NAMESPACE, "replaced");
    let mut other = world.api.get("resourceclaims", NAMESPACE, "typo").unwrap();
    other["metadata"] = json!({"name": "replaced", "namespace": NAMESPACE, "uid": "another-uid"});
    world.api.put("resourceclaims", other);
    world.api.delete("resourceclaims", NAMESPACE, "gone");
    let results = json!([{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-9", "device": "gpu-0"}]);
    let patch = json!({"status": {"allocation": {"devices": {"results": results}}}});
    world
        .api
        .patch("resourceclaims", NAMESPACE, "elsewhere", &patch);
    let patch = json!({"status": {"allocation": null}});
    world
        .api
        .patch("resourceclaims", NAMESPACE, "pending", &patch);

    let replaced = claim_uid("replaced");
    for (name, parts) in [
        (
            "sharing",
            vec![
                "ConfigNotServed",
                "GpuConfig",
                "MPS",
                "Change spec.devices.config",
            ],
        ),
        (
            "typo",
            vec!["ConfigInvalid", "GpuConfg", "Change spec.devices.config"],
        ),
        (
            "replaced",
            vec!["ClaimReplaced", &replaced, "another-uid", "Delete the pod"],
        ),
        (
            "gone",
            vec!["ClaimGone", "does not exist", "Delete the pod"],
        ),
        (
            "elsewhere",
            vec!["OtherPool", "node-9", NODE, "Delete the pod and the claim"],
        ),
        (
            "unknown",
            vec!["UnknownDevice", "gpu-77", "current ResourceSlice"],
        ),
        ("pending", vec!["ClaimNotAllocated", "Delete the pod"]),
    ] {
        let refused = world.prepare(name).await.unwrap_err();
        assert_says(&refused, &[&format!("{NAMESPACE}/{name}")]);
        assert_says(&refused, &parts);
        assert!(!world.claim_spec(&claim_uid(name)).exists());
    }
    let owned = world.holds().await;
    let prepared = owned.iter().filter(|(_, phase, _, _)| phase == "Prepared");
    assert_eq!(prepared.count(), held.len(), "nothing was given: {owned:?}");

    // Once it is put right, the same pod gets its device.
    configure(
        &world,
        "typo",
        json!({"apiVersion": gpu_config, "kind": "GpuConfig"}),
    );
    for other in ["sharing", "replaced", "elsewhere"] {
        world.api.delete("resourceclaims", NAMESPACE, other);
    }
    world.prepare("typo").await.unwrap();
}

#[tokio::test]
async fn a_claim_for_a_held_gpu_is_refused_with_the_kind_of_its_holder_and_waits_its_turn() {
    let world = World::running(4).await;
    world.run_counted("counted", 1).await;
    world.run_claimant("first", "gpu-0").await;
    let unit = world.ids("counted").remove(0);
    let device = world.unit(&unit).await["device"]
        .as_str()
        .unwrap()
        .to_owned();
    // Nobody knows this process, and nobody has this GPU.
    let stranger = world.gpu("gpu-1");
    world.start_process(&stranger.uuid, 4321, &pod_uid("nobody"));
    for (name, device) in [
        ("on-counted", device.as_str()),
        ("on-claim", "gpu-0"),
        ("on-busy", "gpu-1"),
    ] {
        world.allocate_claim(name, device, name);
        world.admit_claimant(name).await;
    }
    let (on_counted, on_claim, on_busy) = tokio::join!(
        world.prepare("on-counted"),
        world.prepare("on-claim"),
        world.prepare("on-busy")
    );
    let refused = on_counted.unwrap_err();
    assert_says(
        &refused,
        &[
            "UnitHeld",
            &unit,
            "by count",
            "tries again",
            "delete the pod",
        ],
    );
    assert!(
        !refused.contains("train/counted"),
        "another tenant's pod: {refused}"
    );
    let refused = on_claim.unwrap_err();
    assert_says(
        &refused,
        &["UnitHeld", "another ResourceClaim", "tries again"],
    );
    assert!(
        !refused.contains("train/first"),
        "another tenant's claim: {refused}"
    );
    let refused = on_busy.unwrap_err();
    assert_says(
        &refused,
        &["UnitBusy", &stranger.uuid, "4321", "end that process"],
    );
    world.end_process(&stranger.uuid, 4321);
    world.prepare("on-busy").await.unwrap();

    // A counted pod for which nothing is left fails for good, and says so.
    world.run_counted("last", 1).await;
    let unit = world.ids("last").remove(0);
    let refused = world.allocate(&[&unit]).await.unwrap_err();
    assert_says(&refused, &["NoFreeUnit", "of 4 GPUs", "delete it"]);

    // The wait is worth it: the holder goes while the claim waits.
    let ends = async { world.end_pod("counted").await };
    let (on_counted, ()) = tokio::join!(world.prepare("on-counted"), ends);
    on_counted.unwrap();
}

#[tokio::test]
async fn of_two_claims_that_want_one_gpu_at_once_one_gets_it_and_the_other_when_it_is_free() {
    let world = World::running(2).await;
    for name in ["a", "b"] {
        world.allocate_claim(name, "gpu-0", name);
        world.admit_claimant(name).await;
    }
    let hand_over = async {
        let held = world.wait_for_holds("Prepared", 1).await;
        let winner = if held[0].3 == claim_uid("a") {
            "a"
        } else {
            "b"
        };
        let only_one_has_it = async || {
            let specs = ["a", "b"].map(|name| world.claim_spec(&claim_uid(name)).exists());
            specs == [winner == "a", winner == "b"]
        };
        until("one has it", SOON, only_one_has_it).await;
        stays("only one has it", Duration::from_secs(1), only_one_has_it).await;
        world.end_pod(winner).await;
        winner
    };
    let (a, b, winner) = tokio::join!(world.prepare("a"), world.prepare("b"), hand_over);
    a.unwrap();
    b.unwrap();
    let held = world.wait_for_holds("Prepared", 1).await;
    assert_ne!(held[0].3, claim_uid(winner));
}
