//! Pods of both kinds keep arriving while the daemon, the kubelet, the API server or a right goes away and comes back.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::objects::PodSpec;
use crate::world::{Setup, World, client, tick};

/// Pause between two looks, each of which may create one pod of each kind.
const PERIOD: Duration = Duration::from_millis(150);
/// More counted pods than GPUs, so that one is always waiting to be bound, and some with claims, so that GPUs move.
const MANY: AtOnce = AtOnce {
    counted: 10,
    claims: 2,
};
/// The same without claims.
const MANY_COUNTED: AtOnce = AtOnce {
    counted: 10,
    claims: 0,
};
/// So few that all have room, whatever a claim was allocated before.
const FEW: AtOnce = AtOnce {
    counted: 4,
    claims: 2,
};
/// How long each of them runs.
const LIFE_MS: &str = "500";
/// Between two blows: pods run, and units move.
const BETWEEN: Duration = Duration::from_millis(2_500);

/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(60);
/// By then the daemon has noticed that something is gone, or is back: a watch that broke is not taken for lost at once,
/// and a right is looked for again after 5 s, then 10 s.
const NOTICED: Duration = Duration::from_secs(20);
/// For so long nothing may move while the right is missing.
const STILL: Duration = Duration::from_secs(5);

/// How many pods of each kind there are at once.
#[derive(Clone, Copy)]
struct AtOnce {
    counted: usize,
    claims: usize,
}

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
    fn start(world: &World, at_once: AtOnce) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(arrive(world.pods(), at_once, stop.clone()));
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
async fn a_while() {
    tokio::time::sleep(BETWEEN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counted_pods_that_arrive_while_the_daemon_is_restarted_wait_and_run() {
    let Some(mut world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    let arrivals = Arrivals::start(&world, MANY_COUNTED);
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
        let arrivals = Arrivals::start(&world, MANY);
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

/// The sides of units that are on their way from one kind of pods to the other.
const ON_THE_WAY: [&str; 3] = ["lowering", "yielding", "dark"];

impl World {
    /// Waits until a unit is on its way.
    async fn wait_moving(&self) {
        self.wait_for("a unit moves", NOTICED, async |world: &Self| {
            let sides = world.sides().await;
            sides.iter().any(|side| ON_THE_WAY.contains(&side.as_str()))
        })
        .await;
    }

    /// How a condition stands on a page.
    async fn condition(&self, page: &str, name: &str) -> Option<Value> {
        let (_, body) = self.get(page).await?;
        let page: Value = serde_json::from_str(&body).expect("the page is JSON");
        let all = page["conditions"].as_array().expect("conditions");
        all.iter()
            .find(|condition| condition["name"] == name)
            .cloned()
    }

    /// Waits until both pages say whether a condition is met and whether it limits the node.
    async fn wait_told(&self, name: &str, ok: bool, limits: bool) {
        let what = format!("{name}: ok {ok}, limits {limits}");
        self.wait_for(&what, NOTICED, async |world: &Self| {
            for page in ["/readyz", "/status"] {
                let told = world.condition(page, name).await.unwrap_or_default();
                if told["ok"] != ok || told["limits"] != limits {
                    return false;
                }
            }
            true
        })
        .await;
    }

    /// What `gpu-bridge status` prints.
    fn printed_status(&self) -> String {
        let printed = Command::new(env!("CARGO_BIN_EXE_gpu-bridge"))
            .args(["status", "--admin-socket"])
            .arg(self.ledger_dir().join("admin.sock"))
            .output()
            .expect("the program starts");
        String::from_utf8(printed.stdout).expect("text")
    }

    /// Takes the right to change the count from the daemon.
    async fn withdraw_the_right(&self) {
        let roles: Api<ClusterRole> = Api::all(self.client.clone());
        let role = roles.get("gpu-bridge").await.expect("the daemon's role");
        let is_kept = |resources: &Option<Vec<String>>| {
            resources.iter().flatten().all(|one| one != "nodes/status")
        };
        let mut rules = role.rules.expect("it has rules");
        rules.retain(|rule| is_kept(&rule.resources));
        let patch = Patch::Merge(json!({"rules": rules}));
        roles
            .patch("gpu-bridge", &PatchParams::default(), &patch)
            .await
            .expect("the role is changed");
        let ours = client(&self.state().join("gpu-bridge.kubeconfig")).await;
        let nodes: Api<Node> = Api::all(ours);
        let dry_run = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        self.wait_for("the right is gone", NOTICED, async |_: &Self| {
            let nothing = Patch::Merge(json!({"status": {}}));
            let tried = nodes.patch_status("node-0", &dry_run, &nothing).await;
            matches!(tried, Err(kube::Error::Api(status)) if status.code == 403)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_api_server_is_away_for_a_minute_nothing_moves_and_afterwards_nobody_fails() {
    let Some(mut world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    // The first pods end the rest, and units set out.
    world.wait_at_rest(8).await;
    let arrivals = Arrivals::start(&world, MANY);
    world.wait_moving().await;
    world.control("stop kube-apiserver KILL");
    let since = Instant::now();
    world.wait_told("NodeCountTended", true, true).await;
    world.wait_told("ApiServerReachable", false, true).await;
    assert_eq!(world.get("/readyz").await.map(|(code, _)| code), Some(503));
    let told = world.printed_status();
    assert!(told.contains("what limits the node:"), "{told}");
    let sides = world.sides().await;
    println!("told after {} ms, {sides:?}", since.elapsed().as_millis());
    while since.elapsed() < AWAY {
        assert_eq!(world.sides().await, sides, "nothing moves");
        tick().await;
    }
    world.bring_api_server_back();
    world.wait_ready().await;
    world.wait_told("NodeCountTended", true, false).await;
    // Whoever waits is bound at once, and the kubelet hears of it up to a minute later.
    arrivals.end("API server away", &world).await;
    world.wait_at_rest(8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_change_the_count_nothing_is_on_its_way_and_the_node_is_ready() {
    let Some(world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_at_rest(8).await;
    world.withdraw_the_right().await;
    // The first pods end the rest, and the first unit that sets out has to be taken from the count.
    let arrivals = Arrivals::start(&world, FEW);
    world.wait_told("NodeCountTended", true, true).await;
    let told = world.printed_status();
    assert!(told.contains("NoStatusRight since"), "{told}");
    assert!(
        world
            .get("/readyz")
            .await
            .is_some_and(|(code, _)| code == 200)
    );
    println!("without the right: {:?}", world.sides().await);
    let started = world.record().lines.len();
    let since = Instant::now();
    while since.elapsed() < STILL {
        let sides = world.sides().await;
        let is_fixed = |side: &String| side == "legacy" || side == "dra";
        assert!(sides.iter().all(is_fixed), "{sides:?}");
        tick().await;
    }
    assert!(
        world.record().lines.len() > started,
        "pods run all the same"
    );
    world.apply("base/rbac.yaml");
    world.wait_told("NodeCountTended", true, false).await;
    a_while().await;
    arrivals.end("right withdrawn", &world).await;
    world.wait_at_rest(8).await;
}
