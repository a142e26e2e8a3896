//! Kubelet, node and etcd start anew, while pods of both kinds run.

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
