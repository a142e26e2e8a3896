//! Kubelet, node, etcd and API server start anew, while pods of both kinds run.

use std::fs;
use std::time::Duration;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// Everything of a cluster starts anew on two busy cores.
const ANEW: Duration = Duration::from_secs(90);

/// Waits until so many containers of a pod have started so far, and returns the GPUs of the last.
async fn wait_starts(world: &World, pod: &str, count: usize) -> Vec<String> {
    let starts = |world: &World| {
        let record = world.record();
        let starts = record.uses().into_iter().filter(|it| it.pod.name == pod);
        starts.map(|it| it.gpu).collect::<Vec<_>>()
    };
    let what = format!("{pod} has started {count} times");
    world
        .wait_for(&what, ANEW, async |world| starts(world).len() >= count)
        .await;
    let starts = starts(world);
    assert_eq!(starts.len(), count, "{pod}: {starts:?}");
    starts[count - 1..].to_vec()
}

/// The machine goes off and on: no process is left, nor what is on a tmpfs.
async fn reboot(world: &mut World) {
    world.control("stop kubelet KILL");
    world.kill_daemon();
    world.control("restart cri KILL");
    let cdi = world.state().join("cdi");
    for entry in fs::read_dir(cdi).expect("the CDI folder") {
        fs::remove_file(entry.expect("an entry").path()).expect("a CDI file");
    }
    let boot_id = world.state().join("proc/sys/kernel/random/boot_id");
    fs::write(boot_id, "0c1d4f8e-0000-4000-8000-00000000b007\n").expect("another boot id");
    world.spawn_daemon();
    world.control("start kubelet");
    world.wait_ready().await;
}

#[tokio::test]
async fn what_runs_outlasts_restarts_of_kubelet_node_and_etcd_and_is_never_doubled() {
    let Some(mut world) = World::start(Setup::shared(4).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    world
        .create(
            PodSpec::counted("counted", 1)
                .with_init(1, 300)
                .restarting(),
        )
        .await;
    world
        .create(PodSpec::from_template("claimant", "one", &["main"]).restarting())
        .await;
    let counted = world.gpus_of("counted").await;
    let claimed = world.gpus_of("claimant").await;

    // A kubelet that starts anew asks for nothing again, and ends nothing: init and app container have one id.
    world.control("restart kubelet");
    world.wait_ready().await;
    assert_eq!(world.held().await, 2);
    assert_eq!(wait_starts(&world, "counted", 2).await, counted);
    assert_eq!(wait_starts(&world, "claimant", 1).await, claimed);

    // After a reboot both get what they had, and the CDI files are there for it.
    reboot(&mut world).await;
    assert_eq!(wait_starts(&world, "counted", 4).await, counted);
    assert_eq!(wait_starts(&world, "claimant", 2).await, claimed);
    assert_eq!(world.held().await, 2);

    // etcd is put back to a state in which one claim is still there, and another is not yet.
    world.control("back-up");
    world.wait_ready().await;
    world.delete("claimant").await;
    world
        .create(PodSpec::from_template("vanishes", "one", &["main"]))
        .await;
    world.wait_running("vanishes").await;
    world.control("restore");
    assert_eq!(wait_starts(&world, "claimant", 3).await.len(), 1);
    world.wait_running("counted").await;
    world.wait_ready().await;
    for pod in ["counted", "claimant"] {
        world.delete(pod).await;
    }
    world.wait_all_free().await;
    assert!(world.record().doubles().is_empty());
}

/// The phases of all holds, in order.
async fn phases(world: &World) -> Vec<String> {
    let status = world.status().await;
    let units = status["units"].as_array().expect("/status has units");
    let holds = units
        .iter()
        .flat_map(|unit| unit["holds"].as_array().into_iter().flatten());
    let mut phases: Vec<String> = holds
        .map(|hold| hold["phase"].as_str().expect("a phase").to_owned())
        .collect();
    phases.sort();
    phases
}

async fn wait_phases(world: &World, expected: &[&str]) {
    let what = format!("the holds are {expected:?}");
    world
        .wait_for(&what, ANEW, async |world| {
            world.get("/status").await.is_some() && phases(world).await == expected
        })
        .await;
}

#[tokio::test]
async fn while_the_api_server_is_away_gpus_are_given_back_and_out_and_the_daemon_may_start_anew() {
    let Some(mut world) = World::start(Setup::split(2, 2).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let pods = |name: &str| {
        let counted = PodSpec::counted(&format!("counted-{name}"), 1);
        (
            counted,
            PodSpec::from_template(&format!("claim-{name}"), "one", &["main"]),
        )
    };
    let (counted, claimant) = pods("long");
    world.create(counted).await;
    world.create(claimant).await;
    let (counted, claimant) = pods("short");
    world.create(counted.env("FAKE_RUN_MS", "10000")).await;
    world.create(claimant.env("FAKE_RUN_MS", "10000")).await;
    for pod in ["counted-long", "claim-long", "counted-short", "claim-short"] {
        world.wait_running(pod).await;
    }
    let ended = world.gpus_of("counted-short").await.remove(0);
    wait_phases(&world, &["Bound", "Bound", "Prepared", "Prepared"]).await;
    world.control("stop kube-apiserver KILL");

    // The kubelet gives both back by itself; whether the claim is still allocated nobody can say.
    wait_phases(&world, &["Bound", "Prepared", "Reserved"]).await;
    world.kill_daemon();
    world.spawn_daemon();
    wait_phases(&world, &["Bound", "Prepared", "Reserved"]).await;
    world
        .wait_for(
            "a free GPU is given out from the ledger alone",
            ANEW,
            async |world| world.allocate(&ended).await.is_ok(),
        )
        .await;
    wait_phases(&world, &["Bound", "Granted", "Prepared", "Reserved"]).await;
    // No pod here can have asked, which the kubelet says.
    wait_phases(&world, &["Bound", "Prepared", "Reserved"]).await;

    world.bring_api_server_back();
    world.wait_ready().await;
    let (counted, claimant) = pods("late");
    world.create(counted).await;
    world.create(claimant).await;
    // The kubelet comes back by itself, as late as the others would have.
    world.wait_phase("counted-late", "Running", ANEW).await;
    world.wait_running("claim-late").await;
    assert!(world.record().doubles().is_empty());
    for pod in ["counted-long", "claim-long", "counted-late", "claim-late"] {
        world.delete(pod).await;
    }
    world.wait_all_free().await;
}
