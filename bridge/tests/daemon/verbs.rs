//! The verbs of `gpu-bridge` that ask a daemon or read what it has written, as an admin uses them.

use std::io::{BufRead as _, BufReader};
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::process::gpu_bridge;
use crate::world::{NODE, RESOURCE, SOON, World, pod_uid, until};

/// Runs a verb with these arguments to its end.
async fn verb(arguments: Vec<String>) -> Output {
    let mut command = gpu_bridge();
    command.args(arguments);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    output.await.unwrap()
}

/// What it has printed, and its error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

impl World {
    /// What the history tells, in one line.
    async fn history(&self) -> String {
        let folder = self.state_dir().display().to_string();
        let output = verb(
            ["ledger", "history", "--state-dir", &folder]
                .map(String::from)
                .into(),
        );
        let output = output.await;
        assert!(output.status.success(), "{}", said(&output));
        // However long its lines are.
        let words: Vec<String> = said(&output)
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        words.join(" ")
    }

    /// Waits until the history tells all of this.
    pub(crate) async fn history_tells(&self, parts: &[&str]) {
        until(&format!("the history tells {parts:?}"), SOON, async || {
            let history = self.history().await;
            parts.iter().all(|part| history.contains(part))
        })
        .await;
    }

    /// As an admin with a kubeconfig asks.
    async fn all_nodes(&self, more: &[&str]) -> Output {
        let file = self.path("admin.kubeconfig");
        self.api.kubeconfig(&file);
        let file = file.display().to_string();
        let line = ["status", "--all-nodes", "--kubeconfig", &file];
        let words = line.iter().chain(more);
        verb(words.map(|&word| word.to_owned()).collect()).await
    }

    pub(crate) async fn clear_fault(&self, unit: &str) -> Output {
        let socket = self.admin_socket().display().to_string();
        let line = ["ledger", "clear-fault", unit, "--reason", "seen by hand"];
        let words = line.into_iter().chain(["--admin-socket", &socket]);
        verb(words.map(str::to_owned).collect()).await
    }

    /// What `gpu-bridge status` says, in one line.
    pub(crate) async fn table(&self) -> String {
        let socket = self.admin_socket().display().to_string();
        let line = ["status", "--admin-socket", &socket];
        let told = said(&verb(line.map(str::to_owned).into()).await);
        told.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    async fn release(&self, unit: &str, force: bool) -> Output {
        let socket = self.admin_socket().display().to_string();
        let line = ["ledger", "release", unit, "--reason", "seen by hand"];
        let socket = ["--admin-socket", &socket];
        let force = force.then_some("--force");
        let words = line.into_iter().chain(socket).chain(force);
        verb(words.map(str::to_owned).collect()).await
    }
}

#[tokio::test]
async fn what_has_happened_is_told_over_a_kill_and_refusals_with_their_sentences() {
    let mut world = World::running(2).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    let unit = world.ids("a").remove(0);
    let refused = world.allocate(&[&unit]).await.unwrap_err();
    assert!(refused.contains("NoFreeUnit"), "{refused}");
    // What does not come as far as the pool is told too.
    world.admit_claimant("unknown").await;
    world.prepare("unknown").await.unwrap_err();
    world.allocate(&["no id"]).await.unwrap_err();
    world
        .history_tells(&[
            "Refused ClaimGone claim train/unknown",
            "Refused UnknownDeviceId ids no id",
            "Granted",
            "Bound",
            "pod train/a",
            "Prepared",
            "claim train/b",
            "Refused NoFreeUnit",
            "delete it",
        ])
        .await;
    world.kill_daemon();
    let before = world.history().await;
    world.start_daemon();
    world.ready().await;
    world.end_pod("a").await;
    world
        .history_tells(&["Ended PodEnded", before.lines().next().unwrap()])
        .await;
}

#[tokio::test]
async fn a_unit_is_released_only_when_nothing_shows_its_holder_and_that_is_told() {
    let world = World::running(2).await;
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    let held = world.ids("a").remove(0);
    for force in [false, true] {
        let output = world.release(&held, force).await;
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("still there"), "{}", said(&output));
    }
    let free = world.node.gpus().into_iter().find(|gpu| gpu.uuid != held);
    let free = free.unwrap().uuid;
    let output = world.release(&free, false).await;
    assert!(
        said(&output).contains("held by nobody"),
        "{}",
        said(&output)
    );
    let output = world.release("GPU-0", false).await;
    assert!(said(&output).contains("exact UUID"), "{}", said(&output));

    // A process of nobody: the hold can be ended, and the GPU still goes to nobody.
    world.start_process(&free, 4321, &pod_uid("nobody"));
    world.wait_for_holds("Foreign", 1).await;
    let output = world.release(&free, false).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("4321"), "{}", said(&output));
    let output = world.release(&free, true).await;
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("1 holds have ended"),
        "{}",
        said(&output)
    );
    assert!(world.log().has("an admin has released a unit"));
    world
        .history_tells(&["ReleasedByAdmin", "seen by hand", "Ended Released"])
        .await;
    let counted = "gpu_bridge_holds_ended_total{cause=\"Released\"} 1";
    until("it is counted", SOON, async || {
        let page = world.get("/metrics").await;
        page.is_some_and(|(_, page)| page.contains(counted))
    })
    .await;
    let refused = world.allocate(&[&free]).await.unwrap_err();
    assert!(refused.contains("NoFreeUnit"), "{refused}");
}

/// What `status --all-nodes` says of this node, as its held and free counted GPUs and those of claims; and what the
/// daemon says of what is free.
async fn beside_each_other(world: &World) -> ([u64; 4], [usize; 2]) {
    let output = world.all_nodes(&["-o", "json"]).await;
    assert!(output.status.success(), "{}", said(&output));
    let page: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nodes = page["nodes"].as_array().unwrap();
    let node = nodes.iter().find(|it| it["node"] == NODE).unwrap();
    let number = |kind: &str, what: &str| node[kind][what].as_u64().unwrap();
    let told = [
        number("counted", "held"),
        number("claims", "held"),
        number("counted", "free"),
        number("claims", "free"),
    ];
    let offers = world.status().await["offers"].clone();
    let count = |face: &str, is_free: &dyn Fn(&Value) -> bool| {
        let all = offers[face].as_array().unwrap();
        all.iter().filter(|it| is_free(it)).count()
    };
    let counted = count("legacy", &|it| {
        it["free"] == true && it["health"] == "Healthy"
    });
    let claims = count("dra", &|it| {
        it["taint"].is_null() && it["heldByClaim"] == false
    });
    (told, [counted, claims])
}

#[tokio::test]
async fn of_all_nodes_it_is_told_what_is_held_and_free_though_nobody_publishes_that() {
    let world = World::new(4).await;
    world.api.allow("patch", "nodes/status");
    let mut world = world.started().await;
    let gpus = |count: &str| json!({"status": {"capacity": {RESOURCE: count}}});
    world.api.patch("nodes", "", NODE, &gpus("4"));
    let mut other = gpus("2");
    other["metadata"] = json!({"name": "without-a-bridge"});
    world.api.put("nodes", other);
    world.run_counted("a", 1).await;
    until("one is for claims", SOON, async || {
        !world.open_devices().is_empty()
    })
    .await;
    let device = world.open_devices().remove(0);
    world.run_claimant("b", &device).await;
    until("both say the same is free", SOON, async || {
        let ([counted, claims, for_counted, for_claims], free) = beside_each_other(&world).await;
        let told = [for_counted, for_claims].map(|it| usize::try_from(it).unwrap());
        (counted, claims) == (1, 1) && told == free && free != [0, 0]
    })
    .await;
    let table = said(&world.all_nodes(&[]).await);
    for part in ["node-0", "without-a-bridge", "both", "of 6 GPUs on 2 nodes"] {
        assert!(table.contains(part), "{part:?} is missing in:\n{table}");
    }

    world.api.forbid("list", "pods");
    let output = world.all_nodes(&[]).await;
    assert_eq!(output.status.code(), Some(1));
    let why = said(&output);
    assert!(why.contains("kubectl auth can-i list pods"), "{why}");
    world.api.allow("list", "pods");
    world.stop_daemon().await;
    let output = world.all_nodes(&[]).await;
    assert!(
        output.status.success(),
        "no daemon is asked: {}",
        said(&output)
    );
}

#[tokio::test]
async fn a_watch_shows_each_change_and_a_restart_and_ends_well_when_it_is_interrupted() {
    let mut world = World::running(2).await;
    let mut command = gpu_bridge();
    command.args(["status", "--watch", "--admin-socket"]);
    let child = command
        .arg(world.admin_socket())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.unwrap();
    let shown = Arc::new(Mutex::new(String::new()));
    let to = Arc::clone(&shown);
    let answers = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in answers.lines().map_while(Result::ok) {
            to.lock().unwrap().push_str(&format!("{line}\n"));
        }
    });
    let shows = async |what: &str, times: usize| {
        until(
            &format!("{what:?} is shown {times} times"),
            SOON,
            async || shown.lock().unwrap().matches(what).count() >= times,
        )
        .await;
    };
    shows("free:", 1).await;
    world.run_counted("a", 1).await;
    shows("pod train/a", 1).await;
    world.kill_daemon();
    shows("no daemon answers", 1).await;
    world.start_daemon();
    world.ready().await;
    shows("pod train/a", 2).await;
    let text = shown.lock().unwrap().clone();
    assert!(!text.contains('\x1b'), "a pipe gets no codes: {text}");

    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = tokio::task::spawn_blocking(move || child.wait().unwrap());
    assert!(ended.await.unwrap().success(), "an interrupt is a good end");
    reader.join().unwrap();
}
