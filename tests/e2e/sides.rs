//! Eight GPUs that both kinds of pods draw from, without any configuration.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use serde_json::Value;

use crate::objects::PodSpec;
use crate::world::{Setup, World, tick};

/// From the creation of a pod that fits, with everything else idle, until it runs.
const SOON: Duration = Duration::from_secs(5);
/// From the end of one pod until a pod of the other kind runs that waits for its GPU: what is free dwells on its
/// side, is moved at the end of a turn, and the scheduler looks again.
const NEXT: Duration = Duration::from_secs(20);

impl World {
    /// Waits until both schedulers see all GPUs: the count in the node's status, and devices without taints.
    pub async fn wait_at_rest(&self, gpus: usize) {
        self.wait_for("everything rests", NEXT, async |world: &Self| {
            world.at_rest().await == gpus
        })
        .await;
    }

    /// How many units are offered to both.
    pub async fn at_rest(&self) -> usize {
        let sides = self.sides().await;
        sides.iter().filter(|side| *side == "rest").count()
    }

    /// The side of each unit.
    pub async fn sides(&self) -> Vec<String> {
        let status = self.status().await;
        let units = status["units"].as_array().expect("/status has units");
        let side = |unit: &Value| unit["side"].as_str().map(str::to_owned);
        units.iter().filter_map(side).collect()
    }

    /// The count in the node's status.
    pub async fn count(&self) -> Option<String> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = nodes
            .get(self.name())
            .await
            .expect("the API server answers");
        let count = node.status?.allocatable?.remove("nvidia.com/gpu")?;
        Some(count.0)
    }

    pub async fn wait_count(&self, count: &str) {
        self.wait_for(
            "the count in the node's status",
            NEXT,
            async |world: &Self| world.count().await.as_deref() == Some(count),
        )
        .await;
    }

    async fn wait_running_within(&self, pod: &str, limit: Duration) {
        let since = Instant::now();
        self.wait_running(pod).await;
        let took = since.elapsed();
        println!("{pod} runs after {} ms", took.as_millis());
        assert!(took <= limit, "pod {pod} took {took:?}");
    }
}

fn of_claims(name: &str, template: &str) -> PodSpec {
    PodSpec::from_template(name, template, &["main"])
}

#[tokio::test]
async fn each_kind_gets_all_eight_gpus_while_the_other_wants_none() {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("eight", 8).await;
    world.wait_at_rest(8).await;
    world.create(PodSpec::counted("counted", 8)).await;
    world.wait_running_within("counted", SOON).await;
    assert_eq!(world.gpus_of("counted").await.len(), 8);
    world.delete("counted").await;
    world.wait_all_free().await;
    world.create(of_claims("claims", "eight")).await;
    world.wait_running_within("claims", SOON).await;
    assert_eq!(world.gpus_of("claims").await.len(), 8);
    world.delete("claims").await;
    world.wait_all_free().await;
    world.wait_at_rest(8).await;
    world.create(PodSpec::counted("counted-again", 8)).await;
    world.wait_running_within("counted-again", SOON).await;
    judge(&world);
}

#[tokio::test]
async fn five_and_three_run_beside_each_other_without_configuration() {
    five_and_three(5, 3).await;
}

#[tokio::test]
async fn three_and_five_run_beside_each_other_without_configuration() {
    five_and_three(3, 5).await;
}

async fn five_and_three(counted: usize, claims: usize) {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_at_rest(8).await;
    let counted: Vec<String> = (0..counted).map(|n| format!("counted-{n}")).collect();
    let claims: Vec<String> = (0..claims).map(|n| format!("claim-{n}")).collect();
    let since = Instant::now();
    for pod in &counted {
        world.create(PodSpec::counted(pod, 1)).await;
    }
    for pod in &claims {
        world.create(of_claims(pod, "one")).await;
    }
    let mut used = BTreeSet::new();
    for pod in counted.iter().chain(&claims) {
        used.extend(world.gpus_of(pod).await);
    }
    println!("all eight run after {} ms", since.elapsed().as_millis());
    assert_eq!(used.len(), 8, "eight pods, eight GPUs: {used:?}");
    judge(&world);
}

#[tokio::test]
async fn the_ninth_of_either_kind_starts_when_one_of_the_other_kind_ends() {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_at_rest(8).await;
    for n in 0..8 {
        world
            .create(PodSpec::counted(&format!("counted-{n}"), 1))
            .await;
    }
    for n in 0..8 {
        world.wait_running(&format!("counted-{n}")).await;
    }
    world.create(of_claims("claim-next", "one")).await;
    world.wait_unschedulable("claim-next").await;
    world.delete("counted-0").await;
    world.wait_running_within("claim-next", NEXT).await;

    world.create(PodSpec::counted("counted-next", 1)).await;
    world.wait_unschedulable("counted-next").await;
    world.delete("claim-next").await;
    world.wait_running_within("counted-next", NEXT).await;
    judge(&world);
}

#[tokio::test]
async fn at_rest_nothing_is_written_though_pods_wait_that_can_never_run_here() {
    /// Two ticks of the kubelet, which writes the count by itself each 10 s where it believes another.
    const REST: Duration = Duration::from_secs(22);
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.create_template("nine", 9).await;
    world.wait_at_rest(8).await;
    // The slice is written a moment after the daemon has decided.
    world.wait_offered_to_both(8).await;
    let before = world.writes();
    assert!(!before.is_empty(), "the slice was written before");
    let elsewhere = |pod: PodSpec| pod.selecting("zone", "none");
    for pod in [
        PodSpec::counted("counted-too-large", 9),
        of_claims("claims-too-large", "nine"),
        elsewhere(PodSpec::counted("counted-elsewhere", 1)),
        elsewhere(of_claims("claim-elsewhere", "one")),
    ] {
        world.create(pod).await;
    }
    let waiting = [
        "counted-too-large",
        "claims-too-large",
        "counted-elsewhere",
        "claim-elsewhere",
    ];
    for pod in waiting {
        world.wait_unschedulable(pod).await;
    }
    let since = Instant::now();
    while since.elapsed() < REST {
        assert_eq!(world.count().await.as_deref(), Some("8"));
        assert_eq!(world.at_rest().await, 8);
        tick().await;
    }
    for pod in waiting {
        assert_eq!(world.phase(pod).await.as_deref(), Some("Pending"), "{pod}");
    }
    let after = world.writes();
    assert_eq!(after.len(), before.len(), "{:?}", &after[before.len()..]);
}

/// Nothing was doubled, nothing failed, and no right was missing.
fn judge(world: &World) {
    assert!(world.record().doubles().is_empty());
    let forbidden = world.forbidden();
    assert!(
        forbidden.is_empty(),
        "the rights in manifests/base/rbac.yaml are all that the daemon needs: {forbidden:?}"
    );
}
