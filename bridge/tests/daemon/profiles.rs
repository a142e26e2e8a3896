//! What the configuration says for some nodes and for some GPUs alone.

use serde_json::{Value, json};

use crate::live::{config_says, mode_is};
use crate::modes::shows;
use crate::world::{NODE, World};

const PROFILES: &str = "mode: legacy\nprofiles:\n  claims: {mode: dra}\n  split: {mode: both, limits: {legacy: 3, dra: 1}}\n";

impl World {
    /// Somebody labels the node; `null` takes the label away.
    fn label(&self, profile: &Value) {
        let labels = json!({"metadata": {"labels": {"gpu-bridge.dev/profile": profile}}});
        self.api.patch("nodes", "", NODE, &labels);
    }
}

#[tokio::test]
async fn the_label_of_the_node_chooses_a_profile_and_is_followed() {
    let world = World::configured(4, PROFILES).await;
    shows(&world, 4, &[]).await;
    world.label(&json!("claims"));
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    config_says(&world, &["with its profile claims"]).await;
    world.label(&json!("split"));
    shows(&world, 3, &["gpu-0"]).await;
    // A profile that is not there is a mistake, and changes nothing.
    world.label(&json!("other"));
    let told = ["no profile \"other\"", "claims, split", "stays in force"];
    config_says(&world, &told).await;
    shows(&world, 3, &["gpu-0"]).await;
    world.label(&Value::Null);
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn a_profile_stays_in_force_over_a_restart_without_an_api_server() {
    let mut world = World::new(4).await;
    world.label(&json!("claims"));
    world.configure_map(PROFILES);
    let mut world = world.started().await;
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    config_says(&world, &["with its profile claims"]).await;
    world.kill_daemon();
    world.api.go_away();
    world.start_daemon();
    world.wait_for_standing("Serving").await;
    mode_is(&world, "dra").await;
    config_says(&world, &["stays in force"]).await;
    world.api.come_back();
    config_says(&world, &["is in force, with its profile claims"]).await;
}

#[tokio::test]
async fn profiles_that_come_while_the_daemon_runs_are_chosen_by_the_label_that_is_there() {
    let mut world = World::new(4).await;
    world.label(&json!("claims"));
    world.configure("mode: legacy\n");
    let mut world = world.started().await;
    shows(&world, 4, &[]).await;
    world.configure(PROFILES);
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    world.configure("mode: legacy\n");
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn a_gpu_is_given_to_one_kind_of_pods_or_to_nobody_and_its_holder_keeps_it() {
    let mut world = World::configured(4, "mode: legacy\n").await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    assert_eq!(held[0].0, world.gpu("gpu-3").uuid);
    world.configure(
        "devices:\n- {index: 3, faces: []}\n- {index: 2, faces: [legacy]}\n\
         - {product: \"*h100*\", faces: [dra]}\n",
    );
    shows(&world, 2, &["gpu-0", "gpu-1"]).await;
    assert_eq!(world.holds().await, held);
    world.end_pod("a").await;
    shows(&world, 1, &["gpu-0", "gpu-1"]).await;
    world.configure("mode: legacy\n");
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn a_file_of_nvidias_plugin_serves_counted_pods_and_says_what_is_not_done() {
    let mut world = World::new(4).await;
    let path = world.path("nvidia.yaml");
    let text = "version: v1\nsharing:\n  timeSlicing:\n    resources: [{name: nvidia.com/gpu, replicas: 4}]\n";
    std::fs::write(&path, text).unwrap();
    world.flags().insert("--config", path.into());
    let world = world.started().await;
    shows(&world, 4, &[]).await;
    let told = [
        "is in force",
        "the mode is legacy",
        "sharing.timeSlicing.resources",
    ];
    config_says(&world, &told).await;
}
