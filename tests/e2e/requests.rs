//! What a claim may ask for, in the words of claims that were written for NVIDIA's DRA driver: selectors on the
//! attributes, alternatives, constraints, a look at everything, configuration. Real Kubernetes allocates; the runtime's
//! record and the kubelet's pod-resources say who got what.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::dcgm::{self, Label};
use crate::objects::PodSpec;
use crate::versions::{self, Feature};
use crate::world::{Setup, World};

/// Models that differ, and of one model two on one PCIe root, behind a third that is first in the list.
const NODE: &str = r#"
driver: { version: "580.95.05", cuda: "13.0" }
gpus:
  - { model: l40s, pcieRoot: "pci0000:10" }
  - { model: h100-sxm5-80gb, pcieRoot: "pci0000:20" }
  - { model: a100-sxm4-40gb, pcieRoot: "pci0000:20" }
  - { model: h100-sxm5-80gb, pcieRoot: "pci0000:30" }
  - { model: h100-sxm5-80gb, pcieRoot: "pci0000:30" }
  - { model: l40s, pcieRoot: "pci0000:40" }
"#;

const GPU_CONFIG: &str = "resource.nvidia.com/v1beta1";

/// A request to one device, or as many as `count` says, by a CEL expression.
fn exactly(count: u32, expression: &str) -> Value {
    json!({
        "deviceClassName": "gpu.nvidia.com",
        "count": count,
        "selectors": [{"cel": {"expression": expression}}],
    })
}

fn one(request: &Value) -> Value {
    json!({"requests": [{"name": "gpu", "exactly": request}]})
}

/// An expression about an attribute of NVIDIA's domain.
fn nvidias(rest: &str) -> String {
    format!("device.attributes['gpu.nvidia.com'].{rest}")
}

/// An entry of `config` for our driver.
fn configured(sharing: Option<&str>) -> Value {
    let mut parameters = json!({"apiVersion": GPU_CONFIG, "kind": "GpuConfig"});
    if let Some(strategy) = sharing {
        parameters["sharing"] = json!({"strategy": strategy});
    }
    json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}])
}

impl World {
    /// Makes a claim and a pod of the same name that uses it.
    async fn ask(&self, name: &str, devices: Value) {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name}, "spec": {"devices": devices},
        }))
        .expect("a claim");
        let created = self.claims().create(&PostParams::default(), &claim).await;
        created.expect("the claim is created");
        self.create(PodSpec::of_claim(name, name)).await;
    }

    /// The same, and which devices the claim was answered with, once the pod runs with just these.
    async fn obtain(&self, name: &str, devices: Value) -> Vec<String> {
        self.ask(name, devices).await;
        let seen = self.gpus_of(name).await;
        let results = self.results(name).await;
        let mut allocated = Vec::new();
        for (_, device) in &results {
            let gpu = self.node.gpus();
            let gpu = gpu
                .iter()
                .find(|gpu| format!("gpu-{}", gpu.minor) == *device);
            allocated.push(gpu.expect("a GPU of the node").uuid.clone());
        }
        allocated.sort();
        assert_eq!(
            seen, allocated,
            "the container of {name} sees what was allocated"
        );
        results.into_iter().map(|(_, device)| device).collect()
    }

    /// Request and device of each result of a claim.
    async fn results(&self, claim: &str) -> Vec<(String, String)> {
        let claim = self.claims().get(claim).await.expect("the claim exists");
        let allocation = claim.status.and_then(|status| status.allocation);
        let devices = allocation.and_then(|allocation| allocation.devices);
        let results = devices.and_then(|devices| devices.results);
        let results = results.unwrap_or_default().into_iter();
        results
            .map(|result| (result.request, result.device))
            .collect()
    }

    async fn create_configured_class(&self, name: &str, config: Value) {
        let class: DeviceClass = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": name},
            "spec": {"config": config, "selectors": [{"cel": {"expression":
                "device.driver == 'gpu.nvidia.com'"}}]},
        }))
        .expect("a class");
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let created = api.create(&PostParams::default(), &class).await;
        created.expect("the class is created");
    }

    /// UUID of each device by pool and name, as the slices have it.
    async fn uuids(&self) -> BTreeMap<(String, String), String> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let slices = api.list(&ListParams::default()).await;
        let slices = slices.expect("the slices can be listed").items.into_iter();
        let mut uuids = BTreeMap::new();
        for spec in slices.map(|slice| slice.spec) {
            for device in spec.devices.unwrap_or_default() {
                let attributes = device.attributes.unwrap_or_default();
                let uuid = attributes.get("uuid").and_then(|it| it.string.clone());
                let key = (spec.pool.name.clone(), device.name);
                uuids.insert(key, uuid.expect("a device has a UUID"));
            }
        }
        uuids
    }
}

#[tokio::test]
async fn claims_written_for_nvidias_driver_get_what_they_ask_for() {
    // The one at the end is for counted pods.
    let setup = Setup::split(1, 5).on(NODE).impatient();
    let Some(world) = World::start(setup).await else {
        return;
    };

    // One of these two is not the first of its model: without the constraint it would be gpu-1 and gpu-3.
    let mut pair = one(&exactly(2, &nvidias("productName.contains('H100')")));
    pair["constraints"] = json!([{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]);
    assert_eq!(world.obtain("pair", pair).await, ["gpu-3", "gpu-4"]);

    let small = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('42Gi')) < 0";
    let small = world.obtain("small", one(&exactly(1, small))).await;
    assert_eq!(small, ["gpu-2"]);

    let root = "device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0000:20'";
    let product = nvidias("productName.lowerAscii().matches('^.*h100.*$')");
    let product = exactly(1, &format!("{root} && {product}"));
    assert_eq!(world.obtain("product", one(&product)).await, ["gpu-1"]);

    // The first alternative is nowhere.
    let driver = nvidias("driverVersion.compareTo(semver('580.0.0')) >= 0");
    let capability = nvidias("cudaComputeCapability.isLessThan(semver('9.0.0'))");
    let alternative = |name: &str, expression: &str| {
        let mut request = exactly(1, expression);
        request["name"] = json!(name);
        request
    };
    let either = json!({"requests": [{"name": "gpu", "firstAvailable": [
        alternative("h300", &nvidias("productName.contains('H300')")),
        alternative("older", &format!("{driver} && {capability}")),
    ]}]});
    assert_eq!(world.obtain("either", either).await, ["gpu-0"]);
    let results = world.results("either").await;
    assert_eq!(results, [("gpu/older".to_owned(), "gpu-0".to_owned())]);

    let nowhere = one(&exactly(1, &nvidias("productName.contains('H300')")));
    world.ask("nowhere", nowhere).await;
    world.wait_unschedulable("nowhere").await;

    the_exporter_finds_who_has_what(&world).await;
    who_looks_on_sees_all_and_keeps_nobody_out(&world).await;
    the_claims_configuration_comes_before_that_of_its_class(&world).await;
}

/// The real kubelet says who has what, to one that knows UUIDs.
async fn the_exporter_finds_who_has_what(world: &World) {
    world.create(PodSpec::counted("counted", 1)).await;
    let counted = world.gpus_of("counted").await;
    let uuids = world.uuids().await;
    let of = |device: &str| uuids[&("node-0".to_owned(), device.to_owned())].clone();
    let mut wanted: BTreeMap<String, Label> = [
        ("gpu-0", "either"),
        ("gpu-1", "product"),
        ("gpu-2", "small"),
        ("gpu-3", "pair"),
        ("gpu-4", "pair"),
    ]
    .map(|(device, pod)| (of(device), Label::of(pod, Some(pod))))
    .into();
    wanted.insert(counted[0].clone(), Label::of("counted", None));
    let labels = dcgm::labels(&world.state().join("kubelet"), &uuids).await;
    assert_eq!(labels, wanted);
}

/// All devices are in use, and whoever administers the node sees them.
async fn who_looks_on_sees_all_and_keeps_nobody_out(world: &World) {
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    let label = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    let patch = Patch::Merge(&label);
    let labelled = namespaces
        .patch("default", &PatchParams::default(), &patch)
        .await;
    labelled.expect("the namespace is labelled");
    let everything = json!({
        "deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": true,
        "tolerations": [{"operator": "Exists"}],
    });
    let devices: BTreeSet<String> = world
        .obtain("admin", one(&everything))
        .await
        .into_iter()
        .collect();
    // Without taints the counted pod's is left out of the slice.
    let shown = if versions::has(Feature::DeviceTaints) {
        6
    } else {
        5
    };
    let all = (0..shown).map(|number| format!("gpu-{number}")).collect();
    assert_eq!(devices, all);
    // A GPU goes from one claim to the next beside it.
    world.delete("small").await;
    world
        .create(PodSpec::of_claim("small-again", "small"))
        .await;
    let again = world.gpus_of("small-again").await;
    assert_eq!(again.len(), 1);
}

async fn the_claims_configuration_comes_before_that_of_its_class(world: &World) {
    world.delete("either").await;
    world.delete("product").await;
    world
        .create_configured_class("shared.example.com", configured(Some("TimeSlicing")))
        .await;
    let of_class = |config: Option<Value>| {
        let request = json!({"deviceClassName": "shared.example.com"});
        let mut devices = one(&request);
        if let Some(config) = config {
            devices["config"] = config;
        }
        devices
    };
    let plain = world
        .obtain("plain", of_class(Some(configured(None))))
        .await;
    assert_eq!(plain.len(), 1, "the claim's own word counts");
    world.ask("sharing", of_class(None)).await;
    let event = world
        .wait_event("sharing", "ConfigNotServed", Duration::from_secs(60))
        .await;
    assert!(event.contains("TimeSlicing"), "{event}");
}
