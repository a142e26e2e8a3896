//! Pods of both kinds that keep coming, each for half a second, while something else happens.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::objects::PodSpec;
use crate::world::World;

/// Pause between two looks, each of which may create one pod of each kind.
const PERIOD: Duration = Duration::from_millis(150);
/// More counted pods than GPUs, so that one is always waiting to be bound, and some with claims, so that GPUs move.
pub const MANY: AtOnce = AtOnce {
    counted: 10,
    claims: 2,
};
/// The same without claims.
pub const MANY_COUNTED: AtOnce = AtOnce {
    counted: 10,
    claims: 0,
};
/// So few that all have room, whatever a claim was allocated before.
pub const FEW: AtOnce = AtOnce {
    counted: 4,
    claims: 2,
};
/// How long each of them runs.
const LIFE_MS: &str = "500";
/// Between two blows: pods run, and units move.
const BETWEEN: Duration = Duration::from_millis(2_500);

/// From the last arrival until the last end. A kubelet that was forbidden its claim comes back after 90 s.
const LAST_ENDED: Duration = Duration::from_secs(180);

/// How many pods of each kind there are at once.
#[derive(Clone, Copy)]
pub struct AtOnce {
    pub counted: usize,
    pub claims: usize,
}

/// What became of the pods of a run.
#[derive(Default)]
struct Tally {
    created: usize,
    ran: usize,
    /// Pods that failed, those of claims that arrived aside, by the kubelet's words.
    failed: BTreeMap<String, usize>,
}

impl Tally {
    fn take(&mut self, name: &str, phase: &str, words: String) {
        if phase == "Succeeded" {
            self.ran += 1;
        } else if !name.starts_with("claim") {
            *self.failed.entry(words).or_default() += 1;
        }
    }
}

/// Pods of one GPU each that come, run and end by themselves, until told to stop.
pub struct Arrivals {
    stop: CancellationToken,
    task: JoinHandle<Tally>,
}

impl Arrivals {
    pub fn start(world: &World, at_once: AtOnce) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(arrive(world.pods(), at_once, stop.clone()));
        Self { stop, task }
    }

    /// No more arrivals; waits until the last one has ended, and judges what became of them.
    pub async fn finish(self, name: &str, nodes: &[&World]) {
        self.stop.cancel();
        let tally = tokio::time::timeout(LAST_ENDED, self.task).await;
        let tally = tally.unwrap_or_else(|_| panic!("{name}: a pod is stuck for {LAST_ENDED:?}"));
        let tally = tally.expect("the arrivals do not panic");
        let doubles = nodes.iter().flat_map(|node| node.record().doubles());
        let doubles: Vec<_> = doubles.collect();
        println!(
            "PROOF {name} under load: {} pods, {} ran, counted failed {}, doubled {}",
            tally.created,
            tally.ran,
            tally.failed.values().sum::<usize>(),
            doubles.len()
        );
        assert!(tally.failed.is_empty(), "{:#?}", tally.failed);
        assert!(doubles.is_empty(), "{doubles:#?}");
    }

    /// The same on one node, where nothing is left over.
    pub async fn end(self, name: &str, world: &World) {
        self.finish(name, &[world]).await;
        world.wait_all_free().await;
    }
}

async fn arrive(pods: Api<Pod>, at_once: AtOnce, stop: CancellationToken) -> Tally {
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
                _ if name.starts_with("claim") => claims += 1,
                _ => {}
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
        if counted < at_once.counted {
            due.push(PodSpec::counted(&format!("counted-{number}"), 1));
        }
        if claims < at_once.claims {
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
pub async fn a_while() {
    tokio::time::sleep(BETWEEN).await;
}
