//! What is different on Kubernetes before 1.37, shown on the older programs themselves: `make test-versions`.

use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use kube::api::{Api, ListParams};

use crate::objects::PodSpec;
use crate::versions::{self, Feature};
use crate::world::{Setup, World};

/// On two busy cores.
const SOON: Duration = Duration::from_secs(60);

impl World {
    /// Devices in the slice of this node, and whether one of them has a taint.
    async fn devices(&self) -> (usize, bool) {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        let slices = slices.list(&ListParams::default()).await;
        let slices = slices.expect("slices can be listed").into_iter();
        let devices: Vec<_> = slices
            .flat_map(|slice| slice.spec.devices.unwrap_or_default())
            .collect();
        let tainted = devices.iter().any(|device| device.taints.is_some());
        (devices.len(), tainted)
    }

    async fn wait_devices(&self, count: usize) {
        self.wait_for(
            &format!("the slice has {count} devices"),
            SOON,
            async |world: &Self| world.devices().await == (count, false),
        )
        .await;
    }
}

#[tokio::test]
#[ignore = "needs an older Kubernetes: make test-versions"]
async fn where_the_server_keeps_no_taints_what_counted_pods_have_is_in_no_slice_and_nobody_gets_it_twice()
 {
    if versions::is_new(Feature::DeviceTaints) {
        return;
    }
    let Some(world) = World::start(Setup::shared(4)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_devices(4).await;
    let limits = world.status().await["conditions"].to_string();
    assert!(
        limits.contains("the API server drops the taints"),
        "{limits}"
    );

    // Claims are led away from what counted pods have by what is not there.
    for pod in ["counted-0", "counted-1", "counted-2"] {
        world.create(PodSpec::counted(pod, 1)).await;
        world.wait_running(pod).await;
    }
    let claims = ["claim-0", "claim-1"];
    for pod in claims {
        let pod = PodSpec::from_template(pod, "one", &["main"]);
        world.create(pod).await;
    }
    // One of the two has the fourth; which one, the scheduler says.
    let running = async |world: &World| {
        let mut running = Vec::new();
        for pod in claims {
            if world.phase(pod).await.as_deref() == Some("Running") {
                running.push(pod);
            }
        }
        running
    };
    world
        .wait_for("one claim pod runs", SOON, async |world| {
            running(world).await.len() == 1
        })
        .await;
    let first = running(&world).await[0];
    let second = if first == claims[0] {
        claims[1]
    } else {
        claims[0]
    };
    world.wait_unschedulable(second).await;
    world.wait_devices(1).await;
    world.delete("counted-1").await;
    world.wait_running(second).await;
    for pod in ["counted-0", "counted-2", first, second] {
        world.delete(pod).await;
    }
    world.wait_all_free().await;
    world.wait_devices(4).await;
    assert!(world.record().doubles().is_empty());
    assert!(world.forbidden().is_empty(), "{:?}", world.forbidden());

    // It asks for more than the daemon does, with the daemon's rights.
    let told = world.doctor();
    for words in [
        "the API server drops them (DRADeviceTaints is off)",
        "keeps no extendedResourceName of a DeviceClass (KEP-5004): before 1.36 that needs the feature gate",
    ] {
        assert!(told.contains(words), "{words:?} is missing in: {told}");
    }
}

#[tokio::test]
#[ignore = "needs an older Kubernetes: make test-versions"]
async fn a_class_with_the_counts_name_is_dropped_and_plan_says_so() {
    if versions::is_new(Feature::ExtendedResources) {
        return;
    }
    let Some(world) = World::start(Setup::shared(2)).await else {
        return;
    };
    world.create_mapped_class().await;
    let classes: Api<DeviceClass> = Api::all(world.client.clone());
    let class = classes.get("counts").await.expect("the class is there");
    let kept = class.spec.and_then(|spec| spec.extended_resource_name);
    assert_eq!(kept, None, "the API server keeps the name");
    let (said, _) = world.verb(&["plan", "--to", "dra", "--node", "node-0"]);
    assert!(
        said.contains("Kubernetes before 1.36 keeps no extendedResourceName"),
        "{said}"
    );

    world.switch_to("dra").await;
    world.wait_count("0").await;
    world.create(PodSpec::counted("counted", 1)).await;
    world.wait_unschedulable("counted").await;
    world.switch_to("both").await;
    world.wait_running("counted").await;
}

#[tokio::test]
#[ignore = "needs an older Kubernetes: make test-versions"]
async fn with_the_alpha_gate_counted_pods_claim_in_mode_dra_from_1_35_on_and_before_wait_as_plan_says()
 {
    if versions::is_new(Feature::ExtendedResources) {
        return;
    }
    let mut setup = Setup::shared(2);
    let gate = "--feature-gates=DRAExtendedResource=true";
    for program in ["apiserver", "controller-manager", "scheduler", "kubelet"] {
        setup.cluster_flags.push(format!("--{program}-flag={gate}"));
    }
    let Some(world) = World::start(setup).await else {
        return;
    };
    world.create_mapped_class().await;
    let (said, _) = world.verb(&["plan", "--to", "dra", "--node", "node-0"]);
    world.switch_to("dra").await;
    world.wait_count("0").await;
    world.create(PodSpec::counted("counted", 1)).await;
    if versions::minor() < 35 {
        assert!(said.contains("the scheduler of Kubernetes 1.34"), "{said}");
        world.wait_unschedulable("counted").await;
    } else {
        let words = "by claims that Kubernetes makes for them";
        assert!(said.contains(words), "{said}");
        world.wait_running("counted").await;
        assert!(world.is_served_by_a_claim("counted").await);
    }
    world.switch_to("legacy").await;
    world.delete("counted").await;
    world.create(PodSpec::counted("next", 2)).await;
    world.wait_running("next").await;
    assert!(!world.is_served_by_a_claim("next").await);
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
#[ignore = "needs an older Kubernetes: make test-versions"]
async fn an_update_costs_counted_pods_a_wait_and_harms_nobody_where_the_kubelet_knows_one_plugin() {
    if versions::is_new(Feature::TwoPlugins) {
        return;
    }
    let Some(mut world) = World::start(Setup::shared(4).in_pods().impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.create(PodSpec::counted("counted", 1)).await;
    let claimant = PodSpec::from_template("claimant", "one", &["main"]);
    world.create(claimant).await;
    let had = [
        world.gpus_of("counted").await,
        world.gpus_of("claimant").await,
    ];
    let began = Instant::now();
    world.begin_update();
    world
        .wait_for("the new daemon is ready", SOON, async |world: &World| {
            world.probe()
        })
        .await;
    world.end_former();
    let deadline = Instant::now() + SOON;
    while !world.former_has_left() {
        assert!(Instant::now() < deadline, "the former daemon has not left");
        crate::world::tick().await;
    }
    world.wait_ready().await;
    // Whoever comes now waits for the count, and is served by the new daemon.
    world.create(PodSpec::counted("next", 1)).await;
    let next = PodSpec::from_template("next-claim", "one", &["main"]);
    world.create(next).await;
    world.wait_running("next").await;
    world.wait_running("next-claim").await;
    println!(
        "FIGURE an update under 1.{}: a counted pod that came right after it ran {} ms after it had begun",
        versions::minor(),
        began.elapsed().as_millis()
    );
    assert_eq!(
        had,
        [
            world.gpus_of("counted").await,
            world.gpus_of("claimant").await
        ]
    );
    for pod in ["counted", "claimant"] {
        let starts = world.record().uses().into_iter();
        assert_eq!(starts.filter(|it| it.pod.name == pod).count(), 1, "{pod}");
    }
    assert!(world.record().doubles().is_empty());
}
