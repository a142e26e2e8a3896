//! Kubernetes Events of a running daemon.

use serde_json::{Value, json};

use crate::disk::limited_and_configured;
use crate::live::{config_says, restarted_says};
use crate::world::{MAP, NAMESPACE, NODE, SOON, World, claim_uid, pod_uid, until};

/// Kind and name of the object, and reason of each event.
pub(crate) fn told(world: &World) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let events = world.api.events().into_iter();
    events
        .map(|event| {
            let object = &event["regarding"];
            let what = (text(&object["kind"]), text(&object["name"]));
            (what.0, what.1, text(&event["reason"]))
        })
        .collect()
}

pub(crate) async fn is_told(world: &World, kind: &str, name: &str, reason: &str) {
    let wanted = (kind.to_owned(), name.to_owned(), reason.to_owned());
    until(&format!("{wanted:?} is told"), SOON, async || {
        told(world).contains(&wanted)
    })
    .await;
}

#[tokio::test]
async fn a_lost_race_is_told_at_the_claim_and_at_its_pod_and_names_no_other_pod() {
    let world = World::running(2).await;
    world.run_counted("tenant-a", 1).await;
    world.allocate_claim("llm", "gpu-0", "llm");
    world.wait_for_holds("Reserved", 1).await;
    // The only GPU that is left is the claim's, and nothing of it runs.
    world
        .allocate(&[&world.gpu("gpu-0").uuid])
        .await
        .expect("the counted pod comes first");
    is_told(&world, "ResourceClaim", "llm", "ClaimLostRace").await;
    // Its pod is bound a moment later.
    world.admit_claimant("llm").await;
    is_told(&world, "Pod", "llm", "ClaimLostRace").await;
    let events = world.api.events();
    for event in &events {
        let note = event["note"].as_str().unwrap();
        assert_eq!(event["metadata"]["namespace"], NAMESPACE, "{event}");
        assert!(
            note.contains("a pod that asked for nvidia.com/gpu by count"),
            "{note}"
        );
        assert!(note.contains("delete the pod"), "{note}");
        for other in ["tenant-a", &pod_uid("tenant-a")] {
            assert!(!event.to_string().contains(other), "{event}");
        }
    }
    let uids = events
        .iter()
        .map(|event| event["regarding"]["uid"].as_str().unwrap());
    let mut uids: Vec<&str> = uids.collect();
    uids.sort_unstable();
    let mut expected = [claim_uid("llm"), pod_uid("llm")];
    expected.sort_unstable();
    assert_eq!(uids, expected);
}

#[tokio::test]
async fn what_changes_the_node_or_keeps_it_from_serving_is_told_at_the_node() {
    let mut world = limited_and_configured(2, "mode: both\n").await;
    assert!(told(&world).is_empty(), "a start is no news");
    world.configure("mode: legcy\n");
    is_told(&world, "Node", NODE, "ConfigFileRejected").await;
    world.configure("mode: legacy\n");
    is_told(&world, "Node", NODE, "ModeChanged").await;
    let lost = world.gpu("gpu-1").uuid;
    world.node.lose(&lost).unwrap();
    world.rescan();
    is_told(&world, "Node", NODE, "UnitLost").await;
    world.node.find_again(&lost).unwrap();
    world.rescan();
    is_told(&world, "Node", NODE, "UnitReturned").await;
    world.daemon().limit_files(Some(0));
    let refused = world.allocate(&[&world.gpu("gpu-0").uuid]).await;
    refused.unwrap_err();
    is_told(&world, "Node", NODE, "NotSaved").await;
    world.daemon().limit_files(None);
    world.run_counted("a", 1).await;
    is_told(&world, "Node", NODE, "LedgerSavedAgain").await;
    for event in world.api.events() {
        assert_eq!(event["metadata"]["namespace"], "default", "{event}");
    }
}

#[tokio::test]
async fn a_config_map_that_is_gone_is_told_at_the_node_and_a_label_that_every_start_has_to_read_is_not()
 {
    let mut world = World::of_map(1, "mode: legacy\nprofiles: {none: {mode: drained}}\n").await;
    restarted_says(&mut world, &["is in force"]).await;
    world.api.delete("configmaps", MAP.0, MAP.1);
    config_says(&world, &["there is no ConfigMap"]).await;
    is_told(&world, "Node", NODE, "ConfigUnread").await;
    assert_eq!(told(&world).len(), 1, "{:?}", told(&world));
}

#[tokio::test]
async fn a_claim_that_stands_for_a_count_is_told_at_the_node_while_counts_are_served() {
    let mut world = limited_and_configured(2, "mode: dra\n").await;
    world.allocate_claim("own", "gpu-0", "own");
    world.allocate_claim("made", "gpu-1", "made");
    let annotations = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
    let made = json!({"metadata": {"annotations": annotations}});
    world.api.patch("resourceclaims", NAMESPACE, "made", &made);
    world.wait_for_holds("Reserved", 2).await;
    // In mode dra that is how counted pods come; a mode that serves counts is another matter.
    world.configure("mode: both\n");
    is_told(&world, "Node", NODE, "CountMadeClaim").await;
    let node = told(&world)
        .into_iter()
        .filter(|(kind, _, _)| kind == "Node");
    let reasons: Vec<String> = node.map(|(_, _, reason)| reason).collect();
    assert_eq!(reasons, ["ModeChanged", "CountMadeClaim"]);
}

#[tokio::test]
async fn without_the_right_to_write_events_that_is_said_once_and_nothing_else_changes() {
    let mut world = World::new(2).await;
    world.api.forbid("create", "events");
    world.configure("mode: both\n");
    let mut world = world.started().await;
    for mode in ["legacy", "both", "dra", "both"] {
        world.configure(&format!("mode: {mode}\n"));
        until("the mode is in force", SOON, async || {
            world.status().await["mode"] == mode
        })
        .await;
    }
    let log = world.log();
    until("it is said", SOON, async || log.has("NoEventRight")).await;
    world.ready().await;
    world.run_counted("a", 1).await;
    let lines = log.lines();
    let said = lines.iter().filter(|line| line.contains("NoEventRight"));
    assert_eq!(said.count(), 1);
    assert_eq!(world.api.count("create", "events"), 1);
    assert!(told(&world).is_empty());
}
