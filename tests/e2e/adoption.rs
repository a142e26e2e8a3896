//! Starts on a node where pods run already and no ledger says so.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// Everybody who runs keeps what they have, and the next pods get other GPUs.
async fn nothing_is_doubled_by(world: &World) {
    world.create(PodSpec::counted("counted-2", 1)).await;
    world
        .create(PodSpec::from_template("claim-2", "one", &["main"]))
        .await;
    let mut used = BTreeSet::new();
    for pod in ["counted-1", "claim-1", "counted-2", "claim-2"] {
        used.extend(world.gpus_of(pod).await);
    }
    assert_eq!(used.len(), 4, "four pods, four GPUs: {used:?}");
    for pod in ["counted-1", "claim-1", "counted-2", "claim-2"] {
        world.delete(pod).await;
    }
    world.wait_all_free().await;
    assert!(world.record().doubles().is_empty());
}

async fn pods_of_both_kinds_run(world: &World) {
    world.create_template("one", 1).await;
    world.create(PodSpec::counted("counted-1", 1)).await;
    world
        .create(PodSpec::from_template("claim-1", "one", &["main"]))
        .await;
    world.wait_running("counted-1").await;
    world.wait_running("claim-1").await;
}

#[tokio::test]
async fn a_wiped_state_directory_doubles_nothing() {
    let Some(mut world) = World::start(Setup::split(4, 4)).await else {
        return;
    };
    pods_of_both_kinds_run(&world).await;
    world.kill_daemon();
    std::fs::remove_dir_all(world.ledger_dir()).expect("the state directory is wiped");
    world.start_daemon().await;
    assert_eq!(world.held().await, 2, "both pods are taken over");
    nothing_is_doubled_by(&world).await;
}

#[tokio::test]
async fn a_lost_ledger_while_the_api_server_is_away_gives_nothing_out_until_it_is_back() {
    let Some(mut world) = World::start(Setup::split(4, 4)).await else {
        return;
    };
    pods_of_both_kinds_run(&world).await;
    world.kill_daemon();
    std::fs::remove_dir_all(world.ledger_dir()).expect("the state directory is wiped");
    world.control("stop kube-apiserver KILL");
    world.spawn_daemon();
    world
        .wait_for(
            "the daemon says what it waits for",
            Duration::from_secs(30),
            async |world| {
                let answer = world.get("/readyz").await;
                answer
                    .is_some_and(|(code, body)| code == 503 && body.contains("WaitingForAdoption"))
            },
        )
        .await;
    let gpu = world.node.gpus()[7].uuid.clone();
    let told = world
        .allocate(&gpu)
        .await
        .expect_err("nothing is given out");
    assert!(told.contains("WaitingForAdoption"), "{told}");
    world.control("start kube-apiserver");
    world.wait_ready().await;
    nothing_is_doubled_by(&world).await;
}
