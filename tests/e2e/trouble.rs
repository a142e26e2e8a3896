//! Pods of both kinds keep arriving while the daemon, the kubelet or the API server goes away and comes back.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// Pause between two looks, each of which may create one pod of each kind.
const PERIOD: Duration = Duration::from_millis(150);
/// Counted pods that are there at once: more than GPUs, so that one is always waiting to be bound.
const COUNTED_AT_ONCE: usize = 10;
/// The same for pods with claims: some, so that GPUs move.
const CLAIMS_AT_ONCE: usize = 2;
/// How long each of them runs.
const LIFE_MS: &str = "500";
/// Between two blows: pods run, and units move.
const BETWEEN: Duration = Duration::from_millis(2_500);

/// What became of the pods of a run.
#[derive(Default)]
struct Tally {
    created: usize,
    ran: usize,
    /// Counted pods that failed, by the kubelet's words.
    failed: BTreeMap<String, usize>,
}

impl Tally {
    fn take(&mut self, name: &str, phase: &str, words: String) {
        if phase == "Succeeded" {
            self.ran += 1;
        } else if name.starts_with("counted") {
            *self.failed.entry(words).or_default() += 1;
        }
    }
}

/// Pods of one GPU each that come, run and end by themselves, until told to stop.
struct Arrivals {
    stop: CancellationToken,
    task: JoinHandle<Tally>,
}

impl Arrivals {
    fn start(world: &World, claims_at_once: usize) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(arrive(world.pods(), claims_at_once, stop.clone()));
        Self { stop, task }
    }

    /// No more arrivals; waits until the last one has ended, and judges.
    async fn end(self, name: &str, world: &World) {
        self.stop.cancel();
        let tally = self.task.await.expect("the arrivals do not panic");
        println!(
            "| {name} | pods {} | ran {} | counted failed {} |",
            tally.created,
            tally.ran,
            tally.failed.values().sum::<usize>()
        );
        assert!(tally.failed.is_empty(), "{:#?}", tally.failed);
        world.wait_all_free().await;
        assert!(world.record().doubles().is_empty());
    }
}

async fn arrive(pods: Api<Pod>, claims_at_once: usize, stop: CancellationToken) -> Tally {
    let mut tally = Tally::default();
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        // The API server may be away for a moment.
        let Ok(all) = pods.list(&ListParams::default()).await else {
            continue;
        };
        let (mut counted, mut claims) = (0, 0);
        for pod in all.items {
            let name = pod.metadata.name.expect("a pod has a name");
            let status = pod.status.unwrap_or_default();
            match status.phase.as_deref() {
                Some(phase @ ("Succeeded" | "Failed")) => {
                    let gone = pods.delete(&name, &DeleteParams::default()).await;
                    if gone.is_ok() && pod.metadata.deletion_timestamp.is_none() {
                        tally.take(&name, phase, status.message.unwrap_or_default());
                    }
                }
                _ if name.starts_with("counted") => counted += 1,
                _ => claims += 1,
            }
        }
        if stop.is_cancelled() {
            if counted + claims == 0 {
                return tally;
            }
            continue;
        }
        let number = tally.created;
        let mut due = Vec::new();
        if counted < COUNTED_AT_ONCE {
            due.push(PodSpec::counted(&format!("counted-{number}"), 1));
        }
        if claims < claims_at_once {
            let name = format!("claim-{number}");
            due.push(PodSpec::from_template(&name, "one", &["main"]));
        }
        for pod in due {
            let pod = pod.env("FAKE_RUN_MS", LIFE_MS).build();
            let created = pods.create(&PostParams::default(), &pod).await;
            tally.created += usize::from(created.is_ok());
        }
    }
}

/// Lets pods come and go for a while.
async fn a_while() {
    tokio::time::sleep(BETWEEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counted_pods_that_arrive_while_the_daemon_is_restarted_wait_and_run() {
    let Some(mut world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    let arrivals = Arrivals::start(&world, 0);
    for _ in 0..3 {
        a_while().await;
        world.terminate_daemon();
        // Long enough for running pods to end, and for others to be bound in their place.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(world.count().await.as_deref(), Some("0"));
        world.start_daemon().await;
    }
    arrivals.end("daemon restarted", &world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_kubelet_is_away_no_counted_pod_is_bound_to_its_node() {
    let Some(mut world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    for kubelets_end in ["KILL", "TERM"] {
        let arrivals = Arrivals::start(&world, CLAIMS_AT_ONCE);
        a_while().await;
        world.control(&format!("stop kubelet {kubelets_end}"));
        world.wait_count("0").await;
        world.create(PodSpec::counted("late", 1)).await;
        world.wait_unschedulable("late").await;
        world.control("start kubelet");
        world.wait_ready().await;
        world.wait_running("late").await;
        world.delete("late").await;
        a_while().await;
        arrivals.end("kubelet restarted", &world).await;
    }
}
