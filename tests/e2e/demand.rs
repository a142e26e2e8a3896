//! Free GPUs that go where pods wait, and claims that are noticed when their pods are bound.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, ListParams};

use crate::arrivals::a_while;
use crate::objects::PodSpec;
use crate::world::{Setup, World, client, tick};

/// The daemon's rights without list and watch of claims.
const BY_NAME: &str = "components/notice-bind/rbac.yaml";
/// From when a pod waits for GPUs of the other side until it runs: what is free dwells, moves for the settle time,
/// the kubelet counts it, and the scheduler looks again. Two busy cores take their time.
const PROMPT: Duration = Duration::from_secs(8);
/// A GPU of a claim that has ended is free for others once the claim was read again, and the scheduler looks again.
const NEXT: Duration = Duration::from_secs(30);

impl World {
    /// Waits until so many GPUs are offered on a side.
    async fn wait_sides(&self, side: &str, gpus: usize, limit: Duration) {
        let what = format!("{gpus} GPUs on the side {side}");
        self.wait_for(&what, limit, async |world: &Self| {
            let status = world.status().await;
            let units = status["units"].as_array().expect("/status has units");
            units.iter().filter(|unit| unit["side"] == side).count() == gpus
        })
        .await;
    }

    /// Waits until the condition of pods that wait says something.
    async fn wait_demand(&self, words: &str) {
        let what = format!("DemandTended says: {words}");
        self.wait_for(&what, NEXT, async |world: &Self| {
            let status = world.status().await;
            let all = status["conditions"].as_array().expect("conditions");
            let mut all = all.iter();
            all.any(|it| {
                let message = it["message"].as_str().unwrap_or_default();
                it["name"] == "DemandTended" && message.contains(words)
            })
        })
        .await;
    }

    async fn runs_within(&self, pod: &str, limit: Duration) {
        let since = Instant::now();
        self.wait_phase(pod, "Running", limit).await;
        println!("{pod} runs after {} ms", since.elapsed().as_millis());
    }

    /// Nothing was doubled, nobody was refused, and no right was missing.
    fn judge(&self) {
        assert!(self.record().doubles().is_empty());
        let forbidden = self.forbidden();
        assert!(forbidden.is_empty(), "{forbidden:?}");
    }
}

fn of_claims(name: &str, template: &str) -> PodSpec {
    PodSpec::from_template(name, template, &["main"])
}

#[tokio::test]
async fn eight_gpus_of_one_side_go_at_once_to_a_pod_of_the_other_that_waits_for_all() {
    // Nothing rests for half a minute after an arrival, so that only moves bring the GPUs over.
    let setup = Setup::offering(8, &["demand: watch", "quiet: 30s"]);
    let Some(world) = World::start(setup).await else {
        return;
    };
    world
        .wait_demand("by what the pods that wait ask for")
        .await;
    world.create_template("eight", 8).await;
    world.create(of_claims("claims", "eight")).await;
    world.runs_within("claims", PROMPT).await;

    // All eight are the claims' when it ends.
    world.create(PodSpec::counted("counted", 8)).await;
    world.wait_unschedulable("counted").await;
    world.delete("claims").await;
    world.wait_gone("claims").await;
    world.runs_within("counted", PROMPT).await;
    assert_eq!(world.gpus_of("counted").await.len(), 8);

    // And the other way round.
    world.create(of_claims("claims-again", "eight")).await;
    world.wait_unschedulable("claims-again").await;
    world.delete("counted").await;
    world.wait_gone("counted").await;
    world.runs_within("claims-again", PROMPT).await;
    world.judge();
}

#[tokio::test]
async fn a_pod_that_can_never_run_here_causes_no_write() {
    /// Two ticks of the kubelet.
    const REST: Duration = Duration::from_secs(22);
    let Some(world) = World::start(Setup::offering(8, &["demand: watch"])).await else {
        return;
    };
    world.create(PodSpec::counted("served", 1)).await;
    world.runs_within("served", PROMPT).await;
    world
        .wait_demand("by what the pods that wait ask for")
        .await;

    world.create_template("nine", 9).await;
    let elsewhere = PodSpec::counted("elsewhere", 1).selecting("zone", "none");
    for pod in [
        elsewhere,
        PodSpec::counted("too-large", 9),
        of_claims("too-large-claims", "nine"),
    ] {
        world.create(pod).await;
    }
    for pod in ["elsewhere", "too-large", "too-large-claims"] {
        world.wait_unschedulable(pod).await;
    }
    world.wait_sides("rest", 7, NEXT).await;
    // The slice that says so follows.
    world
        .wait_for(
            "nothing is written any more",
            NEXT,
            async |world: &World| {
                let before = world.writes();
                a_while().await;
                world.writes().len() == before.len()
            },
        )
        .await;
    let before = world.writes();
    let since = Instant::now();
    while since.elapsed() < REST {
        world.wait_sides("rest", 7, Duration::ZERO).await;
        tick().await;
    }
    let after = world.writes();
    assert_eq!(after.len(), before.len(), "{:?}", &after[before.len()..]);
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn pods_of_both_kinds_that_wait_for_the_same_gpus_run_one_after_the_other() {
    let Some(world) = World::start(Setup::offering(2, &["demand: watch"])).await else {
        return;
    };
    world
        .wait_demand("by what the pods that wait ask for")
        .await;
    world.create_template("two", 2).await;
    world.create(of_claims("first", "two")).await;
    world.runs_within("first", PROMPT).await;
    let mut waiting = vec!["counted", "claims"];
    world.create(PodSpec::counted("counted", 2)).await;
    world.create(of_claims("claims", "two")).await;
    for pod in &waiting {
        world.wait_unschedulable(pod).await;
    }
    let mut running = "first";
    while !waiting.is_empty() {
        world.delete(running).await;
        let since = Instant::now();
        running = loop {
            let mut found = None;
            for pod in &waiting {
                if world.phase(pod).await.as_deref() == Some("Running") {
                    found = Some(*pod);
                }
            }
            if let Some(found) = found {
                break found;
            }
            assert!(since.elapsed() < NEXT, "none of {waiting:?} runs");
            tick().await;
        };
        println!("{running} runs after {} ms", since.elapsed().as_millis());
        waiting.retain(|pod| *pod != running);
        for pod in &waiting {
            assert_eq!(world.phase(pod).await.as_deref(), Some("Pending"));
        }
    }
    world.judge();
    let log = world.daemon_log();
    assert!(!log.contains("ClaimLostRace"), "nobody had to lose a race");
}

#[tokio::test]
async fn claims_noticed_at_bind_are_served_as_well_without_list_and_watch_of_claims() {
    let setup = Setup::offering(8, &["notice: bind"]).applying(BY_NAME);
    let Some(world) = World::start(setup).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_sides("rest", 8, NEXT).await;
    let mut used = BTreeSet::new();
    for n in 0..3 {
        world
            .create(PodSpec::counted(&format!("counted-{n}"), 1))
            .await;
        world.create(of_claims(&format!("claim-{n}"), "one")).await;
    }
    for n in 0..3 {
        used.extend(world.gpus_of(&format!("counted-{n}")).await);
        used.extend(world.gpus_of(&format!("claim-{n}")).await);
    }
    assert_eq!(used.len(), 6, "six pods, six GPUs: {used:?}");

    // The node is filled, and the ninth of either kind waits for one of the other.
    for n in 3..5 {
        world
            .create(PodSpec::counted(&format!("counted-{n}"), 1))
            .await;
        world.wait_running(&format!("counted-{n}")).await;
    }
    world.create(PodSpec::counted("counted-next", 1)).await;
    world.wait_unschedulable("counted-next").await;
    world.delete("claim-0").await;
    world.runs_within("counted-next", NEXT).await;
    world.create(of_claims("claim-next", "one")).await;
    world.wait_unschedulable("claim-next").await;
    world.delete("counted-0").await;
    world.runs_within("claim-next", NEXT).await;

    // What is over is free, though no watch says so.
    for pod in ["claim-1", "claim-2", "claim-next"] {
        world.delete(pod).await;
    }
    world
        .wait_for("the claims' GPUs are free", NEXT, async |world: &World| {
            world.held().await == 5
        })
        .await;
    world.judge();
    let reads = |verb: &str| {
        let verb = verb.to_owned();
        let of_claims = move |event: &serde_json::Value| {
            event["verb"] == verb.as_str() && event["objectRef"]["resource"] == "resourceclaims"
        };
        world.requests(of_claims).len()
    };
    assert_eq!((reads("list"), reads("watch")), (0, 0));
    println!("{} reads of claims for 4 claim pods", reads("get"));
    let ours = client(&world.state().join("gpu-bridge.kubeconfig")).await;
    let claims: Api<ResourceClaim> = Api::all(ours);
    let listed = claims.list(&ListParams::default()).await;
    assert!(
        matches!(&listed, Err(kube::Error::Api(status)) if status.code == 403),
        "{listed:?}"
    );
}
