//! The mode of a node changes while pods of both kinds come, run and go.

use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams};

use crate::arrivals::{Arrivals, MANY, a_while};
use crate::objects::PodSpec;
use crate::world::{Setup, World};

/// From the change of a mounted file until the offers are as it says, on two busy cores.
const SOON: Duration = Duration::from_secs(30);

impl World {
    /// Whether the driver has a slice for this node.
    pub async fn has_slice(&self) -> bool {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        let slices = slices.list(&ListParams::default()).await;
        let mut slices = slices.expect("slices can be listed").into_iter();
        slices.any(|slice| slice.spec.node_name.as_deref() == Some(self.name()))
    }

    /// How often the kubelet was told of either face.
    fn registrations(&self) -> usize {
        let told = [
            "registered the device plugin",
            "the kubelet has registered the DRA driver",
        ];
        let log = self.daemon_log();
        let is_one = |line: &&str| told.iter().any(|words| line.contains(words));
        log.lines().filter(is_one).count()
    }

    /// Changes the configuration file, and waits until the daemon says that it is in force.
    pub async fn switch_to(&self, mode: &str) {
        let changed = Instant::now();
        self.configure(&format!("mode: {mode}\n"));
        self.wait_for(
            &format!("mode {mode} is in force"),
            SOON,
            async |world: &Self| world.status().await["mode"] == mode,
        )
        .await;
        println!(
            "mode {mode} in force after {} ms",
            changed.elapsed().as_millis()
        );
    }

    /// Waits until every unit that nobody holds is on one of these sides.
    async fn wait_free_on(&self, wanted: &[&str]) {
        self.wait_for(
            &format!("what is free is on {wanted:?}"),
            SOON,
            async |world: &Self| {
                let status = world.status().await;
                let units = status["units"].as_array().expect("/status has units");
                let mut free = units
                    .iter()
                    .filter(|unit| unit["holds"].as_array().is_none_or(Vec::is_empty));
                free.all(|unit| unit["side"].as_str().is_some_and(|it| wanted.contains(&it)))
            },
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modes_that_change_under_load_fail_no_counted_pod_and_double_nothing() {
    let Some(world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let arrivals = Arrivals::start(&world, MANY);
    for (mode, sides) in [
        ("dra", &["dra"][..]),
        ("legacy", &["legacy"]),
        ("drained", &["dra"]),
        ("both", &[]),
        ("dra", &["dra"]),
        ("both", &[]),
    ] {
        a_while().await;
        world.switch_to(mode).await;
        if !sides.is_empty() {
            world.wait_free_on(sides).await;
        }
        if mode != "legacy" && mode != "both" {
            world.wait_count("0").await;
        }
    }
    a_while().await;
    arrivals.end("modes switched", &world).await;
    assert!(
        world.forbidden().is_empty(),
        "no right was missing: {:?}",
        world.forbidden()
    );
}

#[tokio::test]
async fn a_node_that_goes_over_to_claims_lets_counted_pods_end_and_takes_no_new_ones() {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create(PodSpec::counted("old", 5)).await;
    world.wait_running("old").await;
    let registered = world.registrations();
    world.switch_to("dra").await;
    world.wait_count("0").await;
    world.create(PodSpec::counted("new", 1)).await;
    world.wait_unschedulable("new").await;
    world.create_template("three", 3).await;
    world.create_template("five", 5).await;
    for size in ["three", "five"] {
        world
            .create(PodSpec::from_template(size, size, &["main"]))
            .await;
    }
    world.wait_running("three").await;
    world.wait_unschedulable("five").await;

    world.delete("old").await;
    world.wait_running("five").await;
    world.wait_count("0").await;
    // Half-way back: what claims have stays theirs, and what they give back is for either kind again.
    world.switch_to("both").await;
    world.delete("three").await;
    world.wait_running("new").await;
    assert_eq!(world.gpus_of("five").await.len(), 5);
    // And all the way back: the slice is there until the last claim has ended.
    world.switch_to("legacy").await;
    world.wait_count("3").await;
    assert!(world.has_slice().await);
    world.delete("five").await;
    world
        .wait_for("the slice is gone", SOON, async |world: &World| {
            !world.has_slice().await
        })
        .await;
    world.wait_count("8").await;
    assert_eq!(world.registrations(), registered, "nobody registers anew");
    assert!(world.record().doubles().is_empty());
}
