//! Lost races: the claim's pod is got out of the way by Kubernetes itself, and nobody else is.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::objects::{NUDGE_PERIOD, PodSpec};
use crate::versions::{self, Feature};
use crate::world::{Setup, World, tick};

/// Prepare waits for 10 s before it refuses; an eviction takes some two seconds on two idle cores.
const SOON: Duration = Duration::from_secs(40);

/// What a request tolerates so as to get devices that counted pods have.
const NO_SCHEDULE: &str = "NoSchedule";
/// What it tolerates so as to stay.
const NO_EXECUTE: &str = "NoExecute";

/// A claim to one device, wherever it is, that tolerates our taint with these effects.
fn claim(name: &str, gpu: &str, effects: &[&str]) -> Value {
    let tolerations: Vec<Value> = effects
        .iter()
        .map(|effect| json!({"key": "gpu-bridge.dev/unit", "operator": "Exists", "effect": effect}))
        .collect();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1,
            "tolerations": tolerations,
            "selectors": [{"cel": {"expression":
                format!("device.attributes['gpu.nvidia.com'].uuid == '{gpu}'")}}],
        }}]}},
    })
}

/// The same, as one that only looks on.
fn onlooker(name: &str, gpu: &str, effects: &[&str]) -> Value {
    let mut claim = claim(name, gpu, effects);
    claim["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = json!(true);
    claim
}

impl World {
    /// Creates a claim and a pod of the same name that uses it.
    async fn create_user(&self, claim: &Value) {
        let claim: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
        let name = claim.metadata.name.clone().expect("the claim has a name");
        self.claims()
            .create(&PostParams::default(), &claim)
            .await
            .expect("the claim is created");
        self.create(PodSpec::of_claim(&name, &name)).await;
    }

    async fn allow_admin_access(&self) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let label =
            json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
        namespaces
            .patch("default", &PatchParams::default(), &Patch::Merge(&label))
            .await
            .expect("the namespace is labelled");
    }

    /// Waits until a deployment has a pod, other than this one, and returns its name.
    async fn wait_pod_of(&self, deployment: &str, other_than: &str) -> String {
        let deadline = Instant::now() + SOON;
        let mut look = Instant::now() + NUDGE_PERIOD;
        loop {
            let mut names = self.pods_of(deployment).await.into_keys();
            if let Some(name) = names.find(|name| name != other_than) {
                return name;
            }
            if !other_than.is_empty() {
                self.nudge_forbidden(other_than, &mut look).await;
            }
            assert!(
                Instant::now() < deadline,
                "deployment {deployment} has no pod but {other_than:?}"
            );
            tick().await;
        }
    }

    async fn wait_bound(&self, pod: &str) {
        self.wait_for("the pod is bound", SOON, async |world: &Self| {
            let pod = world.pods().get(pod).await.expect("the pod exists");
            pod.spec.is_some_and(|spec| spec.node_name.is_some())
        })
        .await;
    }

    /// The taint of each device in the slice, as `value:effect`.
    async fn taints(&self) -> BTreeMap<String, String> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let slices = api
            .list(&ListParams::default())
            .await
            .expect("slices can be listed");
        let devices = slices
            .into_iter()
            .flat_map(|slice| slice.spec.devices.unwrap_or_default());
        devices
            .map(|device| {
                let taints = device.taints.unwrap_or_default().into_iter();
                let words: Vec<String> = taints
                    .map(|taint| format!("{}:{}", taint.value.unwrap_or_default(), taint.effect))
                    .collect();
                (device.name, words.join(" "))
            })
            .collect()
    }

    async fn wait_taint(&self, device: &str, taint: &str) {
        self.wait_for("the device's taint", SOON, async |world: &Self| {
            world.taints().await.get(device).map(String::as_str) == Some(taint)
        })
        .await;
    }

    /// Waits until the daemon's log has a line with all of these words.
    async fn wait_log(&self, words: &[&str]) {
        self.wait_for(
            &format!("a line of the log with {words:?}"),
            SOON,
            async |world: &Self| {
                let log = world.daemon_log();
                log.lines()
                    .any(|line| words.iter().all(|word| line.contains(word)))
            },
        )
        .await;
    }

    async fn wait_rests(&self) {
        self.wait_for("the GPU is offered to both", SOON, async |world: &Self| {
            world.status().await["units"][0]["side"] == "rest"
        })
        .await;
    }

    /// A pod that runs, and that nobody has told to end.
    async fn is_unharmed(&self, pod: &str) -> bool {
        let pod = self.pods().get(pod).await.expect("the pod exists");
        let phase = pod.status.and_then(|status| status.phase);
        phase.as_deref() == Some("Running") && pod.metadata.deletion_timestamp.is_none()
    }

    /// No right was missing.
    fn judge_rights(&self) {
        let forbidden = self.forbidden();
        assert!(
            forbidden.is_empty(),
            "the rights in manifests/base/rbac.yaml are all that the daemon needs: {forbidden:?}"
        );
    }
}

#[tokio::test]
async fn the_loser_of_a_race_is_evicted_and_its_successor_runs_once_there_is_room() {
    if versions::lacks(Feature::DeviceTaints) {
        return;
    }
    let Some(world) = World::start(Setup::shared(1)).await else {
        return;
    };
    world.create_template("one", 1).await;
    world.wait_rests().await;
    // Neither scheduler hears of what the other does: the count and the slice stay as they are.
    world.signal_daemon("STOP");
    world.create(PodSpec::counted("counted", 1)).await;
    world.wait_bound("counted").await;
    let claimant = PodSpec::from_template("claims", "one", &["main"]);
    world.create_deployment("claims", 1, claimant).await;
    let loser = world.wait_pod_of("claims", "").await;
    world.wait_bound(&loser).await;
    world.signal_daemon("CONT");
    let raced = Instant::now();

    let successor = world.wait_pod_of("claims", &loser).await;
    println!("evicted {} ms after the race", raced.elapsed().as_millis());
    world.wait_gone(&loser).await;
    println!("gone {} ms after the race", raced.elapsed().as_millis());
    let told = world.events(&loser).await;
    for part in ["UnitHeld", "DeviceTaintManagerEviction"] {
        assert!(told.iter().any(|event| event.contains(part)), "{told:#?}");
    }
    world.wait_event(&loser, "ClaimPodEvicted", SOON).await;
    // Whether the daemon heard of the claim before it granted the unit, and so said `ClaimLostRace` too, is up to the
    // order in which a process that was stopped finds its messages.
    world.wait_log(&["ClaimPodEvicted"]).await;
    world.wait_taint("gpu-0", "Counted:NoSchedule").await;
    assert!(world.is_unharmed("counted").await);
    world.wait_unschedulable(&successor).await;

    world.delete("counted").await;
    world.wait_running(&successor).await;
    assert_eq!(world.gpus_of(&successor).await.len(), 1);
    assert_eq!(
        world
            .pods_of("claims")
            .await
            .into_keys()
            .collect::<Vec<_>>(),
        [successor],
        "one eviction was enough"
    );
    assert!(world.record().doubles().is_empty());
    world.judge_rights();
}

#[tokio::test]
async fn of_the_pods_on_a_device_the_loser_alone_is_evicted() {
    if versions::lacks(Feature::DeviceTaints) {
        return;
    }
    let Some(world) = World::start(Setup::split(2, 0).impatient()).await else {
        return;
    };
    world.allow_admin_access().await;
    world.create(PodSpec::counted("counted", 2)).await;
    let gpus = world.gpus_of("counted").await;
    let (plain, watched) = (gpus[0].as_str(), gpus[1].as_str());
    let devices = [world.device_of(plain).await, world.device_of(watched).await];
    for claim in [
        onlooker("spared", plain, &[NO_SCHEDULE, NO_EXECUTE]),
        onlooker("exposed", watched, &[NO_SCHEDULE]),
    ] {
        world.create_user(&claim).await;
    }
    world.wait_running("spared").await;
    world.wait_running("exposed").await;

    // Claims that tolerate NoSchedule are allocated what counted pods have: a race that is always lost.
    for claim in [
        claim("hit", plain, &[NO_SCHEDULE]),
        claim("kept", watched, &[NO_SCHEDULE]),
    ] {
        world.create_user(&claim).await;
    }
    world
        .wait_event("hit", "DeviceTaintManagerEviction", SOON)
        .await;
    world.wait_gone("hit").await;
    world.wait_event("kept", "UnitHeld", SOON).await;
    let onlooks = [
        "ClaimPodNotEvicted",
        "Onlooker",
        "default/kept",
        "default/exposed",
    ];
    world.wait_log(&onlooks).await;
    world.wait_taint(&devices[0], "Counted:NoSchedule").await;

    // One that tolerates the eviction has asked to wait.
    let stays = claim("stays", plain, &[NO_SCHEDULE, NO_EXECUTE]);
    world.create_user(&stays).await;
    world.wait_event("stays", "UnitHeld", SOON).await;
    world
        .wait_log(&["ClaimPodNotEvicted", "Tolerates", "default/stays"])
        .await;
    assert_eq!(
        world.taints().await[&devices[1]],
        "Counted:NoSchedule",
        "the pod that looks on would be hit"
    );
    for pod in ["counted", "spared", "exposed"] {
        assert!(world.is_unharmed(pod).await, "{pod} does not run on");
    }

    world.delete("exposed").await;
    world
        .wait_event("kept", "DeviceTaintManagerEviction", SOON)
        .await;
    world.wait_gone("kept").await;
    for pod in ["counted", "spared"] {
        assert!(world.is_unharmed(pod).await, "{pod} does not run on");
    }
    world.delete("counted").await;
    assert_eq!(
        world.gpus_of("stays").await,
        [plain],
        "who waits is served at last"
    );
    world.judge_rights();
}

#[tokio::test]
async fn where_the_server_drops_taints_the_loser_waits_and_the_log_says_so() {
    let mut setup = Setup::split(1, 1).impatient();
    if versions::has(Feature::DeviceTaints) {
        for program in ["apiserver", "controller-manager", "scheduler"] {
            setup.cluster_flags.push(format!(
                "--{program}-flag=--feature-gates=DRADeviceTaints=false,DRADeviceTaintRules=false"
            ));
        }
    }
    let Some(world) = World::start(setup).await else {
        return;
    };
    world.create(PodSpec::counted("counted", 1)).await;
    let held = world.gpus_of("counted").await;
    let device = world.device_of(&held[0]).await;
    world.create_claim("forced", 1).await;
    world
        .create(PodSpec::of_claim("claimant", "forced").on_node())
        .await;
    world.allocate_by_hand("forced", &device, "claimant").await;
    world.wait_event("claimant", "UnitHeld", SOON).await;
    world
        .wait_log(&["ClaimPodNotEvicted", "TaintsDropped", &device])
        .await;
    assert_eq!(
        world.taints().await.len(),
        1,
        "what counted pods have is left out of the slice instead"
    );
    world.delete("counted").await;
    assert_eq!(world.gpus_of("claimant").await, held);
    assert!(world.record().doubles().is_empty());
}
