//! The configuration in a ConfigMap of a real API server, and the verbs that change a node's mode by it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::objects::PodSpec;
use crate::world::{MAP, Setup, World};

/// The daemon's right to read this one ConfigMap.
const RIGHT: &str = "components/config-map/rbac.yaml";
/// Far more than a watch takes.
const SOON: Duration = Duration::from_secs(30);

impl World {
    /// Makes the ConfigMap, or changes it: what follows the `apiVersion`.
    pub async fn configure_map(&self, rest: &str) {
        let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\n{rest}");
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": MAP},
            "data": {"config.yaml": text},
        });
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), MAP);
        let parameters = PatchParams::apply("test").force();
        let applied = maps.patch(MAP, &parameters, &Patch::Apply(&map)).await;
        applied.expect("the ConfigMap is written");
    }

    /// Runs a verb with an admin's credentials: what it says, and its exit code.
    pub fn verb(&self, arguments: &[&str]) -> (String, Option<i32>) {
        verb(&self.state(), arguments)
    }

    pub async fn mode_is(&self, mode: &str) {
        let what = format!("mode {mode} is in force");
        self.wait_for(&what, SOON, async |world: &Self| {
            world.status().await["mode"] == mode
        })
        .await;
    }
}

/// Runs a verb with the credentials of the admin of a cluster, by its folder: what it says, and its exit code.
pub fn verb(state: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let done = Command::new(env!("CARGO_BIN_EXE_gpu-bridge"))
        .args(arguments)
        .arg("--kubeconfig")
        .arg(state.join("admin.kubeconfig"))
        .stdin(Stdio::null())
        .output();
    let done = done.expect("the verb starts");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    (said.into_owned(), done.status.code())
}

#[tokio::test]
async fn a_node_goes_over_by_its_label_and_back_with_the_right_to_one_config_map() {
    const PROFILES: &str = "mode: both\nprofiles:\n  claims: {mode: dra}\n";
    let Some(mut world) = World::without_daemon(Setup::shared(4).by_map()).await else {
        return;
    };
    world.apply(RIGHT);
    world.configure_map("mode: legacy\n").await;
    world.start_daemon().await;
    world.mode_is("legacy").await;
    let changed = Instant::now();
    world.configure_map(PROFILES).await;
    world.mode_is("both").await;
    println!(
        "PROOF a changed ConfigMap is in force after {} ms",
        changed.elapsed().as_millis()
    );
    world.create(PodSpec::counted("old", 1)).await;
    world.wait_running("old").await;

    let (said, code) = world.verb(&["plan", "--to", "dra", "--node", "node-0"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("pod default/old (1 GPU)"), "{said}");
    let switch = ["switch", "dra", "--node", "node-0", "--timeout"];
    let (said, code) = world.verb(&[&switch[..], &["5"]].concat());
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains("waits for the end of pod default/old"),
        "{said}"
    );
    world.mode_is("dra").await;
    world.delete("old").await;
    let (said, code) = world.verb(&[&switch[..], &["60"]].concat());
    assert_eq!(code, Some(0), "{said}");
    world.wait_count("0").await;
    let (said, code) = world.verb(&[
        "switch",
        "--rollback",
        "--node",
        "node-0",
        "--timeout",
        "60",
    ]);
    assert_eq!(code, Some(0), "{said}");
    world.mode_is("both").await;
    world.wait_count("4").await;
    assert!(world.forbidden().is_empty(), "{:?}", world.forbidden());
}
