//! The verbs `plan` and `switch`, as an admin runs them beside a daemon that follows the ConfigMap.

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::live::mode_is;
use crate::process::gpu_bridge;
use crate::world::{MAP, NODE, SOON, World, until};

/// What a verb said, and its exit code.
type Said = (String, Option<i32>);

/// A verb that runs.
struct Verb {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    said: String,
}

impl Verb {
    /// Waits for a line with these words.
    async fn says(&mut self, words: &str) {
        let found = timeout(SOON, async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                self.said.push_str(&line);
                self.said.push('\n');
                if line.contains(words) {
                    return true;
                }
            }
            false
        });
        let found = found.await.unwrap_or(false);
        assert!(found, "{words:?} is not in {}", self.said);
    }

    async fn ends(mut self) -> Said {
        let ended = timeout(SOON, async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                self.said.push_str(&line);
                self.said.push('\n');
            }
            self.child.wait().await.unwrap()
        });
        let status = ended.await.expect("it ends");
        (self.said, status.code())
    }
}

impl World {
    /// A node whose count is kept, with a pod of the daemon in the API, and a ConfigMap that its daemon reads there.
    async fn of_admin(config: &str) -> Self {
        let mut world = Self::new(4).await;
        world.api.allow("patch", "nodes/status");
        let labels = json!({"app.kubernetes.io/name": "gpu-bridge"});
        let metadata = json!({"name": "gpu-bridge-0", "namespace": MAP.0, "labels": labels});
        let containers = json!([{"name": "gpu-bridge", "image": "any"}]);
        let spec = json!({"nodeName": NODE, "containers": containers});
        let status = json!({"phase": "Running"});
        world.api.put(
            "pods",
            json!({"metadata": metadata, "spec": spec, "status": status}),
        );
        world.configure_map(config);
        let world = world.started().await;
        world.counts("4").await;
        world
    }

    /// Waits until the Node shows this count.
    pub(crate) async fn counts(&self, count: &str) {
        until(&format!("the count is {count}"), SOON, async || {
            let node = self.api.get("nodes", "", NODE).unwrap();
            node["status"]["allocatable"]["nvidia.com/gpu"] == count
        })
        .await;
    }

    /// Starts a verb with the credentials of an admin.
    fn verb(&self, arguments: &[&str]) -> Verb {
        let kubeconfig: PathBuf = self.path("kubeconfig");
        let mut command = Command::from(gpu_bridge());
        command.args(arguments).arg("--kubeconfig").arg(kubeconfig);
        if arguments[0] == "switch" {
            command.args(["--config-map", "gpu-bridge/nodes"]);
        } else {
            command.arg("--admin-socket").arg(self.admin_socket());
        }
        let mut child = command
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Verb {
            child,
            lines,
            said: String::new(),
        }
    }

    async fn said(&self, arguments: &[&str]) -> Said {
        self.verb(arguments).ends().await
    }

    fn map_text(&self) -> String {
        let map = self.api.get("configmaps", MAP.0, MAP.1).unwrap();
        map["data"]["config.yaml"].as_str().unwrap().to_owned()
    }

    fn profile(&self) -> Value {
        let node = self.api.get("nodes", "", NODE).unwrap();
        node["metadata"]["labels"]["gpu-bridge.dev/profile"].clone()
    }
}

#[tokio::test]
async fn a_plan_says_who_has_to_end_first_whoever_is_asked() {
    let world = World::of_admin("mode: both\n").await;
    world.run_counted("old", 2).await;
    world.wait_for_holds("Bound", 2).await;
    for asked in [vec![], vec!["--node", NODE]] {
        let plan = |to: &'static str| [vec!["plan", "--to", to], asked.clone()].concat();
        let (said, code) = world.said(&plan("dra")).await;
        assert_eq!(code, Some(3), "{said}");
        assert!(
            said.contains("no-go") && said.contains("pod train/old (2 GPUs)"),
            "{said}"
        );
        for to in ["legacy", "both"] {
            let (said, code) = world.said(&plan(to)).await;
            assert_eq!(code, Some(0), "{said}");
        }
        let (said, _) = world
            .said(&[plan("drained"), vec!["-o", "json"]].concat())
            .await;
        let page: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((&page["go"], &page["node"]), (&json!(false), &json!(NODE)));
        assert_eq!(page["first"][0]["name"], "old");
    }
    let (_, code) = world.said(&["plan", "--to", "claims"]).await;
    assert_eq!(code, Some(2));
}

#[tokio::test]
async fn a_switch_is_written_and_waited_for_and_can_be_taken_back() {
    let world = World::of_admin("# Ours.\nmode: both\n").await;
    world.run_counted("old", 1).await;
    let mut switch = world.verb(&["switch", "dra"]);
    switch.says("mode both -> dra").await;
    switch.says("waits for the end of pod train/old").await;
    mode_is(&world, "dra").await;
    world.end_pod("old").await;
    let (said, code) = switch.ends().await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.ends_with("complete\n"), "{said}");
    let text = world.map_text();
    assert!(text.contains("# Ours.\nmode: dra\n"), "{text}");
    let (said, code) = world.said(&["switch", "--rollback"]).await;
    assert_eq!(code, Some(0), "{said}");
    mode_is(&world, "both").await;
    assert!(world.map_text().contains("# Ours.\nmode: both\n"));
}

#[tokio::test]
async fn one_node_is_switched_by_its_profile() {
    let world = World::of_admin("mode: both\nprofiles:\n  claims: {mode: dra}\n").await;
    let (said, code) = world.said(&["switch", "dra", "--node", NODE]).await;
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(world.profile(), "claims");
    mode_is(&world, "dra").await;
    let (said, code) = world.said(&["switch", "--rollback", "--node", NODE]).await;
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(world.profile(), Value::Null);
    mode_is(&world, "both").await;
    let (_, code) = world.said(&["switch", "legacy", "--node", NODE]).await;
    assert_eq!(code, Some(1), "no profile has that mode");
}

#[tokio::test]
async fn a_switch_that_is_interrupted_or_out_of_time_goes_on_and_says_so() {
    let world = World::of_admin("mode: both\n").await;
    world.run_counted("old", 1).await;
    world.wait_for_holds("Bound", 1).await;
    let mut switch = world.verb(&["switch", "dra"]);
    switch.says("waits for the end of pod train/old").await;
    let pid = rustix::process::Pid::from_raw(i32::try_from(switch.child.id().unwrap()).unwrap());
    rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::INT).unwrap();
    let (said, code) = switch.ends().await;
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("go on by themselves"), "{said}");
    let (said, code) = world.said(&["switch", "dra", "--timeout", "0"]).await;
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("is dra already"), "{said}");
    world.api.forbid("update", "configmaps");
    let (_, code) = world.said(&["switch", "both"]).await;
    assert_eq!(code, Some(1), "it may not be written");
    mode_is(&world, "dra").await;
}

#[tokio::test]
async fn a_plan_reads_the_taints_of_the_node_and_the_label_that_the_autoscaler_goes_by() {
    let world = World::of_admin("mode: both\n").await;
    let label = "cloud.google.com/gke-accelerator";
    let taints = json!([
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "other", "effect": "NoSchedule"},
    ]);
    let labels = json!({label: "nvidia-h100-80gb"});
    let marked = json!({"metadata": {"labels": labels}, "spec": {"taints": taints}});
    world.api.patch("nodes", "", NODE, &marked);
    let plan = ["plan", "--to", "dra", "--node", NODE];
    let (said, _) = world.said(&plan).await;
    let unready = format!("{label} cluster-autoscaler takes the node for an unready one");
    assert!(said.contains(&unready), "{said}");
    let tolerate = "have to tolerate nvidia.com/gpu=present:NoSchedule themselves";
    assert!(said.contains(tolerate), "{said}");
    // With this label it expects no count.
    let spared = json!({"metadata": {"labels": {"cloud.google.com/gke-gpu-dra-driver": "true"}}});
    world.api.patch("nodes", "", NODE, &spared);
    let (said, _) = world.said(&plan).await;
    assert!(!said.contains(label), "{said}");
}

#[tokio::test]
async fn a_class_that_makes_claims_of_counted_pods_is_told_with_the_nodes_where_that_can_happen() {
    let world = World::of_admin("mode: both\nprofiles:\n  legacy: {mode: legacy}\n").await;
    let (said, _) = world.said(&["plan", "--to", "both", "--node", NODE]).await;
    assert!(!said.contains("extendedResourceName"), "{said}");
    for (name, created) in [
        ("old", "2026-01-01T00:00:00Z"),
        ("new", "2026-02-01T00:00:00Z"),
    ] {
        let metadata = json!({"name": name, "creationTimestamp": created});
        let spec = json!({"extendedResourceName": "nvidia.com/gpu"});
        world
            .api
            .put("deviceclasses", json!({"metadata": metadata, "spec": spec}));
    }
    let class = "DeviceClass new (the newest that has the name, before old)";
    for (to, words) in [
        ("both", "while the count of this node is 0"),
        ("dra", "by claims"),
    ] {
        let (said, _) = world.said(&["plan", "--to", to, "--node", NODE]).await;
        assert!(said.contains(class) && said.contains(words), "{said}");
    }
    let told = "which it can be on node-0";
    let (said, code) = world.said(&["switch", "both"]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(class) && said.contains(told), "{said}");
    let switch = async |arguments: &[&str]| {
        let (said, code) = world.said(&[&["switch"], arguments].concat()).await;
        assert_eq!(code, Some(0), "{said}");
        said.contains(told)
    };
    // One of a version whose scheduler makes none, one without claims, and one that is never 0.
    world.api.call_itself(34);
    assert!(!switch(&["both"]).await);
    world.api.call_itself(37);
    assert!(switch(&["both"]).await);
    assert!(!switch(&["legacy", "--node", NODE]).await);
    assert!(switch(&["--rollback", "--node", NODE]).await);
    let text = "apiVersion: gpu-bridge.dev/v1alpha1\nmode: both\noffers: {minLegacy: 1}\n";
    let kept = json!({"data": {"config.yaml": text}});
    world.api.patch("configmaps", MAP.0, MAP.1, &kept);
    assert!(!switch(&["both"]).await);
}
