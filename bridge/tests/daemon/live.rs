//! The configuration changes while the daemon runs: by an editor, or as a ConfigMap's volume does.

use std::fs;
use std::path::Path;

use crate::modes::shows;
use crate::world::{RESOURCE, SOON, World, pod_uid, until};

/// Waits until a condition says all of this, and keeps nobody from serving.
pub(crate) async fn condition_says(world: &World, name: &str, words: &[&str]) {
    until(&format!("{name} says {words:?}"), SOON, async || {
        let condition = world.condition(name).await;
        condition.is_some_and(|(ok, message)| ok && words.iter().all(|word| message.contains(word)))
    })
    .await;
}

/// Waits until the condition of the configuration says all of this.
pub(crate) async fn config_says(world: &World, words: &[&str]) {
    condition_says(world, "ConfigInForce", words).await;
}

/// Starts the daemon anew, and waits until the condition says all of this again.
pub(crate) async fn restarted_says(world: &mut World, words: &[&str]) {
    world.stop_daemon().await;
    world.start_daemon();
    world.ready().await;
    config_says(world, words).await;
}

pub(crate) async fn mode_is(world: &World, mode: &str) {
    until(&format!("the mode is {mode}"), SOON, async || {
        world.status().await["mode"] == mode
    })
    .await;
}

#[tokio::test]
async fn a_mode_that_changes_while_the_daemon_runs_opens_and_closes_offers_and_touches_nobody() {
    let mut world = World::configured(4, "mode: both\n").await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    let registered = registrations(&world);
    assert_eq!(registered, 2, "both faces");
    // Each change takes the one before back half-way: it waits for one of the two, who stays.
    for (mode, healthy, open) in [
        ("dra", 1, vec!["gpu-0", "gpu-1", "gpu-2"]),
        ("legacy", 3, vec!["gpu-0"]),
        ("dra", 1, vec!["gpu-0", "gpu-1", "gpu-2"]),
        ("drained", 1, vec!["gpu-0"]),
        ("legacy", 3, vec!["gpu-0"]),
    ] {
        world.configure(&format!("mode: {mode}\n"));
        mode_is(&world, mode).await;
        shows(&world, healthy, &open).await;
        assert_eq!(world.holds().await, held, "{mode}");
    }
    // Those who hold something through a closed face are served to the end.
    world.end_pod("b").await;
    shows(&world, 4, &[]).await;
    until("there is no slice", SOON, async || world.slice().is_none()).await;
    // Of a closed face that nobody has anything through the kubelet knows only what can't be had.
    world.configure("mode: dra\n");
    shows(&world, 1, &["gpu-0", "gpu-1", "gpu-2"]).await;
    world.end_pod("a").await;
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    world.configure("mode: legacy\n");
    shows(&world, 4, &[]).await;
    world.run_counted("c", 4).await;
    assert_eq!(registrations(&world), registered, "nobody registers anew");
}

/// Puts a text where a volume of a ConfigMap has it: kubelet `pkg/volume/util/atomic_writer.go`.
#[allow(
    clippy::disallowed_methods,
    reason = "the kubelet swaps the link with a plain rename"
)]
fn project(folder: &Path, version: &str, text: &str) {
    let data = folder.join(version);
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("config.yaml"), text).unwrap();
    let link = folder.join("..data_tmp");
    std::os::unix::fs::symlink(version, &link).unwrap();
    fs::rename(link, folder.join("..data")).unwrap();
}

/// How often the kubelet was told of either face.
pub(crate) fn registrations(world: &World) -> usize {
    let told = [
        "registered the device plugin",
        "the kubelet has registered the DRA driver",
    ];
    let is_one = |line: &String| told.iter().any(|words| line.contains(words));
    world.log().lines().into_iter().filter(is_one).count()
}

#[tokio::test]
async fn a_config_map_that_changes_is_in_force_without_a_restart() {
    const HEAD: &str = "apiVersion: gpu-bridge.dev/v1alpha1\n";
    let mut world = World::new(4).await;
    let folder = world.path("volume");
    project(&folder, "..first", &format!("{HEAD}mode: legacy\n"));
    let file = folder.join("config.yaml");
    std::os::unix::fs::symlink("..data/config.yaml", &file).unwrap();
    world.flags().insert("--config", file.into());
    let mut world = world.started().await;
    shows(&world, 4, &[]).await;
    let before = registrations(&world);
    project(&folder, "..second", &format!("{HEAD}mode: dra\n"));
    shows(&world, 0, &["gpu-0", "gpu-1", "gpu-2", "gpu-3"]).await;
    assert_eq!(
        registrations(&world),
        before,
        "nobody registers anew for it"
    );
    world.ready().await;
}

#[tokio::test]
async fn a_file_with_mistakes_changes_nothing_and_says_all_of_them_until_it_is_mended() {
    let mut world = World::configured(4, "limits:\n  legacy: 3\n  dra: 1\n").await;
    shows(&world, 3, &["gpu-0"]).await;
    world.configure("mode: drianed\nlimits:\n  legcy: 3\n");
    let told = [
        "config.yaml",
        "2 mistakes",
        "did you mean drained?",
        "limits.legcy",
        "The last good configuration stays in force",
    ];
    config_says(&world, &told).await;
    shows(&world, 3, &["gpu-0"]).await;
    // Not even a restart makes the node lose its GPUs over it.
    restarted_says(&mut world, &told).await;
    shows(&world, 3, &["gpu-0"]).await;
    world.configure("mode: legacy\n");
    config_says(&world, &["config.yaml is in force"]).await;
    shows(&world, 4, &[]).await;
}

#[tokio::test]
async fn what_is_watched_follows_the_configuration_too() {
    let mut world = World::configured(1, "").await;
    let demand = async |world: &World, word| condition_says(world, "DemandTended", &[word]).await;
    demand(&world, "offers.demand is turns").await;
    world.configure("offers:\n  demand: watch\n  notice: bind\n");
    demand(&world, "by what the pods that wait").await;
    world.run_counted("a", 1).await;
    world.end_pod("a").await;
    world.configure("");
    demand(&world, "offers.demand is turns").await;
    world.has("ApiServerReachable").await;
    world.run_counted("b", 1).await;
}

#[tokio::test]
async fn whose_processes_count_and_what_containers_are_told_follow_the_configuration_too() {
    let mut world = World::configured(4, "mode: legacy\n").await;
    let gpu = world.gpu("gpu-0").uuid;
    world.run_counted("a", 1).await;
    assert_eq!(world.counted_devices("a").len(), 1);
    world.end_pod("a").await;
    world.start_process(&gpu, 100, "");
    shows(&world, 3, &[]).await;
    world.configure(
        "mode: legacy\nignoreProcesses: [python]\ndevicePlugin: {deviceListStrategy: envvar}\n",
    );
    shows(&world, 4, &[]).await;
    world.run_counted("b", 1).await;
    assert!(world.counted_devices("b").is_empty());
    let told = world.kubelet().answer(&pod_uid("b"), "main", RESOURCE);
    assert_eq!(
        told.unwrap().envs["NVIDIA_VISIBLE_DEVICES"],
        world.ids("b")[0]
    );
}
