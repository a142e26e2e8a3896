//! The configuration from a ConfigMap at the API server: `--config-map`.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::live::{config_says, mode_is, restarted_says};
use crate::modes::shows;
use crate::world::{MAP, SOON, World, calm, proof, until};

/// A daemon that has written nothing for so long after its start has nothing more to write: it writes at once.
const AT_REST: Duration = Duration::from_secs(2);

impl World {
    /// A node whose daemon reads the ConfigMap from the API server.
    pub(crate) async fn of_map(gpus: u32, config: &str) -> Self {
        let mut world = Self::new(gpus).await;
        world.configure_map(config);
        world.started().await
    }

    /// Waits until the log has a line with these words.
    async fn logs(&self, words: &str) {
        until(&format!("the log has {words:?}"), SOON, async || {
            self.log().has(words)
        })
        .await;
    }

    /// Waits until a daemon that has just started has written all that it has to: the count, and the slice that the mode
    /// `legacy` has not, and that it may have shown until it knew what runs here.
    async fn is_at_rest(&self) {
        self.counts("4").await;
        until("there is no slice", SOON, async || {
            let what = "nothing is written any more";
            calm(what, AT_REST, async || self.writes()).await;
            self.slice().is_none()
        })
        .await;
    }
}

#[tokio::test]
async fn a_config_map_at_the_api_server_is_in_force_as_soon_as_it_changes() {
    let mut world = World::of_map(4, "mode: legacy\n").await;
    shows(&world, 4, &[]).await;
    let mut mounted = World::configured(4, "mode: legacy\n").await;
    for mode in ["dra", "legacy", "dra"] {
        let changed = Instant::now();
        world.configure_map(&format!("mode: {mode}\n"));
        mode_is(&world, mode).await;
        let by_api = changed.elapsed();
        let changed = Instant::now();
        mounted.configure(&format!("mode: {mode}\n"));
        mode_is(&mounted, mode).await;
        proof(&format!(
            "mode {mode} in force {} ms after the ConfigMap at the API server was changed, {} ms after a file was",
            by_api.as_millis(),
            changed.elapsed().as_millis()
        ));
    }
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    config_says(&world, &["ConfigMap gpu-bridge/nodes", "is in force"]).await;
}

#[tokio::test]
async fn a_config_map_with_mistakes_or_without_the_key_or_gone_changes_nothing() {
    let mut world = World::of_map(4, "limits: {legacy: 3, dra: 1}\n").await;
    shows(&world, 3, &["gpu-0"]).await;
    let last_good = "The last good configuration stays in force";
    world.configure_map("mode: drianed\nlimits: {legcy: 3}\n");
    config_says(
        &world,
        &["2 mistakes", "did you mean drained?", "legcy", last_good],
    )
    .await;
    world.put_map(&json!({"other.yaml": ""}));
    config_says(&world, &["only other.yaml", "config.yaml", last_good]).await;
    world.api.delete("configmaps", MAP.0, MAP.1);
    config_says(&world, &["there is no ConfigMap", last_good]).await;
    shows(&world, 3, &["gpu-0"]).await;
    // Nor does a restart.
    restarted_says(&mut world, &["there is no ConfigMap", last_good]).await;
    shows(&world, 3, &["gpu-0"]).await;
    world.configure_map("mode: legacy\n");
    config_says(&world, &["is in force"]).await;
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn a_config_map_that_nobody_may_read_or_a_server_that_is_away_changes_nothing() {
    let mut world = World::of_map(4, "limits: {legacy: 3, dra: 1}\n").await;
    shows(&world, 3, &["gpu-0"]).await;
    world.api.go_away();
    config_says(&world, &["can't be read", "stays in force"]).await;
    world
        .kubelet()
        .wait_for_healthy(crate::world::RESOURCE, 3, SOON)
        .await;
    for verb in ["list", "watch"] {
        world.api.forbid(verb, "configmaps");
    }
    world.api.come_back();
    config_says(&world, &["can't be read", "forbidden", "stays in force"]).await;
    world.configure_map("mode: legacy\n");
    for verb in ["list", "watch"] {
        world.api.allow(verb, "configmaps");
    }
    config_says(&world, &["is in force"]).await;
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn an_edit_that_means_the_same_writes_nothing() {
    let same = "means what is in force already";
    let mut world = World::new(4).await;
    // Without this right the daemon would try to write the count again and again.
    world.api.allow("patch", "nodes/status");
    world.configure_map("mode: legacy\n");
    let mut world = world.started().await;
    world.is_at_rest().await;
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    shows(&world, 4, &[]).await;
    let before = async |world: &World| {
        let generation = world.status().await["generation"].clone();
        let kept = std::fs::metadata(world.state_dir().join("config.last-good.yaml"));
        (
            world.writes(),
            generation,
            kept.unwrap().modified().unwrap(),
        )
    };
    let written = before(&world).await;
    world.configure_map("# Said otherwise.\nmode: legacy\noffers: {settle: 300ms}\n");
    world.logs(same).await;
    world.status().await;
    assert_eq!(before(&world).await, written);

    let mut world = World::new(4).await;
    world.api.allow("patch", "nodes/status");
    world.configure("mode: legacy\n");
    let mut world = world.started().await;
    world.is_at_rest().await;
    shows(&world, 4, &[]).await;
    let written = before(&world).await;
    world.configure("mode: legacy\nlimits: {}\n");
    world.logs(same).await;
    world.status().await;
    assert_eq!(before(&world).await, written);
}

#[tokio::test]
async fn without_a_config_map_at_the_first_start_nothing_is_offered_until_there_is_one() {
    let mut world = World::new(4).await;
    world.read_map();
    world.start_kubelet().await;
    world.start_daemon();
    let told = ["there is no ConfigMap", "Nothing is offered"];
    world.lacks("ConfigInForce", &told).await;
    world.wait_for_standing("Serving").await;
    shows(&world, 0, &[]).await;
    // Neither is anything when it is made with a mistake.
    world.configure_map("mode: any\n");
    world
        .lacks("ConfigInForce", &["is no mode", "Nothing is offered"])
        .await;
    world.configure_map("mode: legacy\n");
    shows(&world, 4, &[]).await;
    world.ready().await;
}
