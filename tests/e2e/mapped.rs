//! A DeviceClass with the name of the counted resource (KEP-5004), beside a node that changes its mode.

use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, PostParams};
use serde_json::json;

use crate::arrivals::{Arrivals, FEW, a_while};
use crate::objects::{PodSpec, RUNNING};
use crate::versions::{self, Feature};
use crate::world::{Setup, World};

impl World {
    /// By this class the scheduler makes claims for counted pods, on nodes whose count is 0.
    pub async fn create_mapped_class(&self) {
        let class: DeviceClass = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": "counts"},
            "spec": {
                "selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}],
                "extendedResourceName": "nvidia.com/gpu",
            },
        }))
        .expect("a class");
        let classes: Api<DeviceClass> = Api::all(self.client.clone());
        let created = classes.create(&PostParams::default(), &class).await;
        created.expect("the class is created");
    }

    /// Whether the scheduler has made a claim for a counted pod.
    pub async fn is_served_by_a_claim(&self, pod: &str) -> bool {
        let pod = self.pods().get(pod).await.expect("the pod exists");
        let status = pod.status.unwrap_or_default();
        status.extended_resource_claim_status.is_some()
    }

    /// Makes a pod with a claim to one GPU.
    async fn claim_one(&self, pod: &str) {
        self.create(PodSpec::from_template(pod, "one", &["main"]))
            .await;
    }

    /// Waits until a counted pod runs, and by the count.
    async fn runs_by_the_count(&self, pod: &str) {
        self.wait_running(pod).await;
        assert!(!self.is_served_by_a_claim(pod).await, "{pod} has a claim");
    }
}

#[tokio::test]
async fn beside_a_class_with_the_counts_name_no_counted_pod_gets_stuck_and_none_a_claim_where_one_gpu_is_kept()
 {
    if versions::lacks(Feature::ExtendedResources) {
        return;
    }
    let Some(world) = World::start(Setup::offering(4, &["minLegacy: 1"])).await else {
        return;
    };
    world.create_mapped_class().await;
    world.create_template("one", 1).await;
    for pod in ["claim-0", "claim-1", "claim-2"] {
        world.claim_one(pod).await;
        world.wait_running(pod).await;
    }
    // The kept GPU is for no claim, not even for one that Kubernetes would make.
    world.wait_count("1").await;
    world.claim_one("claim-3").await;
    world.wait_unschedulable("claim-3").await;
    world.create(PodSpec::counted("first", 1)).await;
    world.runs_by_the_count("first").await;
    world.create(PodSpec::counted("second", 1)).await;
    world.wait_unschedulable("second").await;
    world.delete("claim-3").await;
    world.delete("claim-0").await;
    world.runs_by_the_count("second").await;

    // Where none is kept the count can be 0, and the scheduler takes the other way. Nobody is lost by that, and the
    // class is told as soon as it matters.
    assert!(!world.daemon_log().contains("MappedClass"));
    world.configure("mode: both\n");
    world
        .wait_for("the class is told", RUNNING, async |world: &World| {
            world.daemon_log().contains("MappedClass")
        })
        .await;
    for (counted, claim) in [("first", "claim-4"), ("second", "claim-5")] {
        world.delete(counted).await;
        world.claim_one(claim).await;
        world.wait_running(claim).await;
    }
    world.wait_count("0").await;
    world.create(PodSpec::counted("third", 1)).await;
    world.wait_unschedulable("third").await;
    world.delete("claim-1").await;
    world.wait_running("third").await;

    if world.is_served_by_a_claim("third").await {
        world
            .wait_for("it is told", RUNNING, async |world: &World| {
                world.daemon_log().contains("CountMadeClaim")
            })
            .await;
    }

    // In mode dra that is the way of all counted pods, and back in mode legacy of none.
    world.switch_to("dra").await;
    for pod in ["claim-2", "claim-4", "claim-5"] {
        world.delete(pod).await;
    }
    world.wait_count("0").await;
    world.create(PodSpec::counted("fourth", 2)).await;
    world.wait_running("fourth").await;
    assert!(world.is_served_by_a_claim("fourth").await);
    assert_eq!(world.gpus_of("fourth").await.len(), 2);
    for pod in ["third", "fourth"] {
        world.delete(pod).await;
    }
    world.switch_to("legacy").await;
    world.wait_count("4").await;
    world.create(PodSpec::counted("fifth", 4)).await;
    world.runs_by_the_count("fifth").await;
    assert!(world.record().doubles().is_empty());
    assert!(world.forbidden().is_empty(), "{:?}", world.forbidden());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_such_a_class_no_counted_pod_of_many_fails_and_none_comes_by_a_claim() {
    if versions::lacks(Feature::ExtendedResources) {
        return;
    }
    let setup = Setup::offering(4, &["minLegacy: 1"]).impatient();
    let Some(world) = World::start(setup).await else {
        return;
    };
    world.create_mapped_class().await;
    world.create_template("one", 1).await;
    let arrivals = Arrivals::start(&world, FEW);
    for _ in 0..4 {
        a_while().await;
    }
    arrivals.end("a class with the count's name", &world).await;
    // The daemon says so of each claim that stands for a count.
    assert!(!world.daemon_log().contains("CountMadeClaim"));
    assert!(world.forbidden().is_empty(), "{:?}", world.forbidden());
}
