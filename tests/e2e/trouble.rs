//! Pods of both kinds keep arriving while the daemon, the kubelet, the API server or a right goes away and comes back.

use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::arrivals::{Arrivals, FEW, MANY, MANY_COUNTED, a_while};
use crate::objects::PodSpec;
use crate::world::{Setup, World, client, tick};

/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(60);
/// By then the daemon has noticed that something is gone, or is back: a watch that broke is not taken for lost at once,
/// and a right is looked for again after 5 s, then 10 s.
const NOTICED: Duration = Duration::from_secs(20);
/// From the last pod's end until a unit sets out: a turn in which nobody takes anything lasts up to 30 s.
const AGAIN: Duration = Duration::from_secs(90);
/// For so long nothing may move while the right is missing.
const STILL: Duration = Duration::from_secs(5);

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

    /// Waits until units are free to move again: by turns where both kinds have come in bursts or lost a race, at rest
    /// otherwise.
    async fn wait_free_to_move(&self) {
        self.wait_for("units move again, or rest", AGAIN, async |world: &Self| {
            let sides = world.sides().await;
            let is_moving = sides.iter().any(|side| ON_THE_WAY.contains(&side.as_str()));
            is_moving || world.at_rest().await == sides.len()
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
    world.wait_free_to_move().await;
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
    world.wait_free_to_move().await;
}
