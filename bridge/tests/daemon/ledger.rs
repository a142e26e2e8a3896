//! The ledger's file: what survives a kill, and what is done with a file that can't be trusted.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::world::{
    DRIVER, NAMESPACE, RESOURCE, SOON, World, claim, claim_uid, pod_uid, stays, until,
};

/// A node on which a counted pod `a` and a claim pod `b` run.
async fn with_pods_of_both_kinds(gpus: u32) -> World {
    let world = World::running(gpus).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    world.wait_for_holds("Prepared", 1).await;
    world
}

#[tokio::test]
async fn after_kill_9_the_same_holds_stand_and_the_same_questions_get_the_same_answers() {
    let mut world = with_pods_of_both_kinds(4).await;
    // Granted, and not seen in any pod: the kubelet calls again after its own crash.
    let id = world.kubelet().healthy(RESOURCE);
    let id = id
        .into_iter()
        .find(|id| !world.ids("a").contains(id))
        .unwrap();
    let granted = world.allocate(&[&id]).await.unwrap();
    let held = world.holds().await;
    assert_eq!(held.len(), 3);
    let prepared = world.kubelet().cdi_devices(&claim("b"));
    world.kill_daemon();
    // The runtime's folder is on a tmpfs: after a reboot it is empty.
    fs::remove_dir_all(world.cdi_dir()).unwrap();
    world.boot("6c5b3b0a-0000-4000-8000-000000000002");
    world.start_daemon();
    world.ready().await;

    assert_eq!(world.holds().await, held);
    assert_eq!(world.allocate(&[&id]).await.unwrap(), granted);
    assert_names_device(&world.counted_spec(), &granted[0]);
    assert_names_device(&world.claim_spec(&claim_uid("b")), &prepared[0]);
    // A kubelet that has started anew prepares the claims of running pods once more.
    world.kubelet().restart().await.unwrap();
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    fs::remove_file(world.claim_spec(&claim_uid("b"))).unwrap();
    world.prepare("b").await.unwrap();
    assert_eq!(world.kubelet().cdi_devices(&claim("b")), prepared);
    assert_names_device(&world.claim_spec(&claim_uid("b")), &prepared[0]);
}

/// A spec file is one of CDI and has the device of that fully qualified name.
fn assert_names_device(file: &PathBuf, name: &str) {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let spec: Value = serde_json::from_str(&text).unwrap();
    let (kind, device) = name.split_once('=').unwrap();
    assert_eq!(spec["kind"], kind);
    let devices = spec["devices"].as_array().unwrap();
    assert!(
        devices.iter().any(|it| it["name"] == device),
        "{name}: {text}"
    );
}

#[tokio::test]
async fn cdi_files_that_no_claim_explains_are_swept_at_the_start_and_those_of_others_are_left() {
    let mut world = with_pods_of_both_kinds(2).await;
    world.kill_daemon();
    let orphan = world.claim_spec("long-gone");
    let half = world.cdi_dir().join("gpu-bridge.dev-gpu.json.tmp");
    let others = [
        "nvidia.yaml",
        "k8s.gpu.nvidia.com-claim_x.json",
        "gpu-bridge.txt",
    ];
    fs::copy(world.claim_spec(&claim_uid("b")), &orphan).unwrap();
    fs::write(&half, "{").unwrap();
    for name in others {
        fs::write(world.cdi_dir().join(name), "not ours").unwrap();
    }
    world.start_daemon();
    world.ready().await;
    until("the orphans are swept", SOON, async || {
        !orphan.exists() && !half.exists()
    })
    .await;
    for name in others {
        let text = fs::read_to_string(world.cdi_dir().join(name)).unwrap();
        assert_eq!(text, "not ours");
    }
    assert!(world.claim_spec(&claim_uid("b")).exists());
    // The claim's file goes with the claim.
    world.end_pod("b").await;
    assert!(!world.claim_spec(&claim_uid("b")).exists());
}

/// What must hold with a ledger that can't be trusted, whatever the reason.
async fn nothing_is_given_out_until_an_admin_acts(mut world: World, bad: Vec<u8>, why: &str) {
    world.kill_daemon();
    fs::write(world.ledger(), &bad).unwrap();
    world.start_daemon();
    let path = world.ledger().display().to_string();
    world.wait_for_standing("LedgerUnreadable").await;
    world.lacks("LedgerServing", &[]).await;
    let log = world.log();
    for part in [
        why,
        &path,
        "Put a good copy in its place",
        "gpu-bridge ledger rebuild",
    ] {
        // The status can be faster than the pipe that the log comes through.
        until(part, SOON, async || log.has(part)).await;
    }

    // Both faces are registered, or pods that end would hang in Terminating.
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    world.has("DevicePluginRegistered").await;
    world.has("DraPluginRegistered").await;
    // Hidden from the kubelet, an id that a pod has would fail this pod when the kubelet starts anew.
    let has: BTreeSet<String> = world.ids("a").into_iter().collect();
    let nothing_is_offered =
        async || world.kubelet().healthy(RESOURCE) == has && world.open_devices().is_empty();
    until(
        "all but what a pod has is withdrawn",
        SOON,
        nothing_is_offered,
    )
    .await;
    stays(
        "nothing is offered",
        Duration::from_secs(1),
        nothing_is_offered,
    )
    .await;
    world.kubelet().restart().await.unwrap();
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    until(
        "the restarted kubelet is told the same",
        SOON,
        nothing_is_offered,
    )
    .await;
    let id = world.gpu("gpu-1").uuid;
    let refused = world.allocate(&[&id]).await.unwrap_err();
    assert!(refused.contains("LedgerUnreadable"), "{refused}");
    world.allocate_claim("c", "gpu-0", "c");
    world.admit_claimant("c").await;
    let refused = world.prepare("c").await.unwrap_err();
    assert!(
        refused.contains("UNAVAILABLE: LedgerUnreadable"),
        "{refused}"
    );
    world
        .kubelet()
        .unprepare(&pod_uid("b"))
        .await
        .expect("Unprepare is answered");
    assert_eq!(
        fs::read(world.ledger()).unwrap(),
        bad,
        "the file is kept as it is"
    );

    // The admin moves it away: the node is adopted, and what was unprepared meanwhile is free.
    world.stop_daemon().await;
    assert_eq!(
        fs::read(world.ledger()).unwrap(),
        bad,
        "the file is kept as it is"
    );
    fs::copy(world.ledger(), world.path("kept-for-the-report")).unwrap();
    fs::remove_file(world.ledger()).unwrap();
    world.start_daemon();
    world.ready().await;
    let holds = world.holds().await;
    let of = |uid: String| holds.iter().filter(|it| it.3 == uid).count();
    assert_eq!(of(pod_uid("a")), 1, "it runs: {holds:?}");
    assert_eq!(of(claim_uid("b")), 0, "it was unprepared: {holds:?}");
    // The kubelet has written down that it wants this one, before it was refused.
    assert_eq!(of(claim_uid("c")), 1, "it may be prepared: {holds:?}");
}

#[tokio::test]
async fn with_one_flipped_bit_in_the_ledger_nothing_is_given_out_until_an_admin_acts() {
    let world = with_pods_of_both_kinds(2).await;
    let mut bad = fs::read(world.ledger()).unwrap();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    nothing_is_given_out_until_an_admin_acts(world, bad, "checksum").await;
}

#[tokio::test]
async fn with_a_ledger_of_a_newer_version_nothing_is_given_out_until_an_admin_acts() {
    let world = with_pods_of_both_kinds(2).await;
    let good = fs::read(world.ledger()).unwrap();
    nothing_is_given_out_until_an_admin_acts(world, newer(&good), "has format 2").await;
}

/// The same ledger as a version to come may write it, in a format that this one does not know.
fn newer(good: &[u8]) -> Vec<u8> {
    let mut content = content(good);
    assert_eq!(content["format"], 1, "{content}");
    content["format"] = 2.into();
    sealed(&content)
}

fn content(file: &[u8]) -> Value {
    let whole: Value = serde_json::from_slice(file).unwrap();
    whole["content"].clone()
}

/// A file with this content and a good checksum.
fn sealed(content: &Value) -> Vec<u8> {
    let content = serde_json::to_string(content).unwrap();
    let crc = crc32fast::hash(content.as_bytes());
    let length = content.len();
    format!("{{\"crc32\":\"{crc:08x}\",\"length\":{length},\"content\":\n{content}\n}}\n")
        .into_bytes()
}

#[tokio::test]
async fn going_back_a_version_loses_no_hold_and_nothing_that_the_newer_one_has_added() {
    let mut world = with_pods_of_both_kinds(3).await;
    let held = world.holds().await;
    let unit_of_a = held
        .iter()
        .find(|hold| hold.1 == "Bound")
        .unwrap()
        .0
        .clone();
    world.stop_daemon().await;
    let mut newer = content(&fs::read(world.ledger()).unwrap());
    newer["writer"] = "9.9.9".into();
    newer["added"] = 1.into();
    for unit in newer["units"].as_array_mut().unwrap() {
        unit["added"] = unit["uuid"].clone();
        for hold in unit["holds"].as_array_mut().unwrap() {
            hold["added"] = hold["phase"].clone();
        }
    }
    fs::write(world.ledger(), sealed(&newer)).unwrap();
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await, held);
    // It writes the file itself now, and one of the things that were added belongs to a hold that ends.
    world.end_pod("b").await;
    until("the claim has nothing", SOON, async || {
        world.holds().await.len() == 1
    })
    .await;
    let device = world.free_device().await;
    world.run_claimant("c", &device).await;
    world.stop_daemon().await;

    let content = content(&fs::read(world.ledger()).unwrap());
    assert_ne!(content["writer"], "9.9.9");
    assert_eq!(content["added"], 1);
    for unit in content["units"].as_array().unwrap() {
        assert_eq!(unit["added"], unit["uuid"]);
        for hold in unit["holds"].as_array().unwrap() {
            let kept = unit["uuid"] == *unit_of_a;
            assert_eq!(hold.get("added").is_some(), kept, "{hold}");
        }
    }
}

#[tokio::test]
async fn a_ledger_that_was_cut_off_is_not_taken_for_an_empty_one() {
    let mut world = with_pods_of_both_kinds(2).await;
    world.kill_daemon();
    fs::write(world.ledger(), "").unwrap();
    world.start_daemon();
    world.wait_for_standing("LedgerUnreadable").await;
    assert!(world.log().has("it is empty"), "{}", world.log().text());
    assert_eq!(fs::read(world.ledger()).unwrap(), b"");
}

#[tokio::test]
async fn what_was_unprepared_without_a_ledger_is_not_held_when_a_good_copy_is_put_back() {
    let mut world = with_pods_of_both_kinds(2).await;
    world.stop_daemon().await;
    let good = fs::read(world.ledger()).unwrap();
    fs::write(world.ledger(), "{}").unwrap();
    world.start_daemon();
    world.wait_for_standing("LedgerUnreadable").await;
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    until("Unprepare is answered", SOON, async || {
        world.kubelet().unprepare(&pod_uid("b")).await.is_ok()
    })
    .await;
    world.api.delete("resourceclaims", NAMESPACE, "b");
    world.kill_daemon();
    fs::write(world.ledger(), good).unwrap();
    world.start_daemon();
    world.ready().await;
    // Reserved until the API server has said that the claim is gone.
    until("the claim has nothing", SOON, async || {
        world.holds().await.len() == 1
    })
    .await;
    assert_eq!(world.holds().await[0].3, pod_uid("a"));
    assert!(!world.claim_spec(&claim_uid("b")).exists());
}
