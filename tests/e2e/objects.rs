//! Pods, claims and templates, and waiting for what becomes of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::record::now_ns;
use crate::world::{World, tick};

/// The namespace of every test object.
const NAMESPACE: &str = "default";
/// A pod on an idle machine runs within a second; two busy cores are another matter.
pub const RUNNING: Duration = Duration::from_secs(30);
/// So long a pod may wait before it is looked at whether the API server forbade the kubelet its claim.
pub const NUDGE_PERIOD: Duration = Duration::from_secs(3);
/// What the node authorizer says of a claim that it has not seen allocated yet.
const LATE_AUTHORIZER: &str = "no relationship found between node";

/// A pod to be created.
pub struct PodSpec(Value);

impl PodSpec {
    fn new(name: &str, containers: Value) -> Self {
        Self(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "hostNetwork": true,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 2,
                "restartPolicy": "Never",
                "containers": containers,
            },
        }))
    }

    /// A pod that asks for GPUs by count.
    pub fn counted(name: &str, gpus: u32) -> Self {
        Self::new(name, json!([container("main", &counted(gpus))]))
    }

    /// A pod whose containers all use one claim made from a template.
    pub fn from_template(name: &str, template: &str, containers: &[&str]) -> Self {
        Self::with_claims(
            name,
            &json!([{"name": "gpu", "resourceClaimTemplateName": template}]),
            containers,
        )
    }

    /// A pod that uses a claim that exists by itself.
    pub fn of_claim(name: &str, claim: &str) -> Self {
        Self::with_claims(
            name,
            &json!([{"name": "gpu", "resourceClaimName": claim}]),
            &["main"],
        )
    }

    fn with_claims(name: &str, claims: &Value, containers: &[&str]) -> Self {
        let uses = json!({"claims": [{"name": "gpu"}]});
        let list: Vec<Value> = containers
            .iter()
            .map(|name| container(name, &uses))
            .collect();
        let mut pod = Self::new(name, Value::Array(list));
        pod.0["spec"]["resourceClaims"] = claims.clone();
        pod
    }

    /// With an init container that asks for GPUs and runs for a while.
    pub fn with_init(mut self, gpus: u32, run_ms: u32) -> Self {
        let mut init = container("init", &counted(gpus));
        init["env"] = json!([{"name": "FAKE_RUN_MS", "value": run_ms.to_string()}]);
        self.0["spec"]["initContainers"] = json!([init]);
        self
    }

    /// With containers that are started again when they are gone, as those of a Deployment.
    pub fn restarting(mut self) -> Self {
        self.0["spec"]["restartPolicy"] = json!("Always");
        self
    }

    /// Without a request in the first app container.
    pub fn without_request(mut self) -> Self {
        self.0["spec"]["containers"][0]["resources"] = json!({});
        self
    }

    /// With an environment variable in every app container, such as the fake runtime's `FAKE_…`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        let containers = self.0["spec"]["containers"]
            .as_array_mut()
            .expect("a pod has containers");
        for container in containers {
            let env = &mut container["env"];
            if env.is_null() {
                *env = json!([]);
            }
            env.as_array_mut()
                .expect("env is a list")
                .push(json!({"name": name, "value": value}));
        }
        self
    }

    /// With another image in every app container than the one that the fake runtime takes.
    pub fn image(mut self, image: &str) -> Self {
        let containers = self.0["spec"]["containers"].as_array_mut();
        for container in containers.expect("a pod has containers") {
            container["image"] = json!(image);
        }
        self
    }

    /// As JSON, for what makes pods.
    pub fn into_json(self) -> Value {
        self.0
    }

    /// What the API server is sent.
    pub fn build(self) -> Pod {
        serde_json::from_value(self.0).expect("a pod")
    }

    /// For nodes with a label alone.
    pub fn selecting(mut self, label: &str, value: &str) -> Self {
        self.0["spec"]["nodeSelector"] = json!({label: value});
        self
    }

    /// Bound to the node without the scheduler.
    pub fn on_node(mut self) -> Self {
        self.0["spec"]["nodeName"] = json!("node-0");
        self
    }
}

fn counted(gpus: u32) -> Value {
    json!({"limits": {"nvidia.com/gpu": gpus.to_string()}})
}

fn container(name: &str, resources: &Value) -> Value {
    json!({"name": name, "image": "test.example/app:1", "imagePullPolicy": "IfNotPresent", "resources": resources})
}

/// For a claim to so many GPUs; `None`: to all.
fn claim_spec(count: Option<u32>) -> Value {
    let mut request = json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"});
    if let Some(count) = count {
        request["allocationMode"] = json!("ExactCount");
        request["count"] = json!(count);
    }
    json!({"devices": {"requests": [{"name": "gpu", "exactly": request}]}})
}

impl World {
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub async fn create_class(&self) {
        let class: DeviceClass = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
            "metadata": {"name": "gpu.nvidia.com"},
            "spec": {"selectors": [{"cel": {"expression":
                "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"}}]},
        }))
        .expect("a class");
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        api.create(&PostParams::default(), &class)
            .await
            .expect("the class is created");
    }

    pub async fn create_template(&self, name: &str, count: u32) {
        self.create_template_for(name, Some(count)).await;
    }

    pub async fn create_template_of_all(&self, name: &str) {
        self.create_template_for(name, None).await;
    }

    async fn create_template_for(&self, name: &str, count: Option<u32>) {
        let template: ResourceClaimTemplate = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"name": name}, "spec": {"spec": claim_spec(count)},
        }))
        .expect("a template");
        let api: Api<ResourceClaimTemplate> = Api::namespaced(self.client.clone(), NAMESPACE);
        api.create(&PostParams::default(), &template)
            .await
            .expect("the template is created");
    }

    pub async fn create_claim(&self, name: &str, count: u32) {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name}, "spec": claim_spec(Some(count)),
        }))
        .expect("a claim");
        self.claims()
            .create(&PostParams::default(), &claim)
            .await
            .expect("the claim is created");
    }

    pub async fn create(&self, pod: PodSpec) {
        self.pods()
            .create(&PostParams::default(), &pod.build())
            .await
            .expect("the pod is created");
    }

    /// So many pods that are alike, and their successors.
    pub async fn create_deployment(&self, name: &str, replicas: u32, pod: PodSpec) {
        let labels = json!({"app": name});
        let mut pod = pod.restarting().into_json();
        pod["metadata"] = json!({"labels": labels});
        let deployment: Deployment = serde_json::from_value(json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": {
                "metadata": pod["metadata"], "spec": pod["spec"]}},
        }))
        .expect("a deployment");
        self.deployments()
            .create(&PostParams::default(), &deployment)
            .await
            .expect("the deployment is created");
    }

    pub fn deployments(&self) -> Api<Deployment> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The pods of a deployment that nobody has deleted, by name.
    pub async fn pods_of(&self, deployment: &str) -> BTreeMap<String, Pod> {
        let list = ListParams::default().labels(&format!("app={deployment}"));
        let pods = self.pods().list(&list).await.expect("pods can be listed");
        pods.into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter_map(|pod| Some((pod.metadata.name.clone()?, pod)))
            .collect()
    }

    pub async fn phase(&self, pod: &str) -> Option<String> {
        let pod = self
            .pods()
            .get_opt(pod)
            .await
            .expect("the API server answers")?;
        pod.status?.phase
    }

    /// Waits until a pod is Running; a pod that fails first fails the test with its message.
    pub async fn wait_running(&self, pod: &str) {
        let deadline = Instant::now() + RUNNING;
        let mut look = Instant::now() + NUDGE_PERIOD;
        loop {
            match self.phase(pod).await.as_deref() {
                Some("Running") => return,
                Some("Failed") => panic!("pod {pod} failed: {:?}", self.message(pod).await),
                _ => {}
            }
            self.nudge_forbidden(pod, &mut look).await;
            assert!(
                Instant::now() < deadline,
                "pod {pod} is not Running: {:?}, events {:?}",
                self.phase(pod).await,
                self.events(pod).await
            );
            tick().await;
        }
    }

    /// Makes the kubelet try again at once where the API server's node authorizer was late: a claim that was allocated
    /// a moment ago is forbidden to the kubelet then, which comes back after 77 to 89 s by itself, and at once where
    /// the pod changes. No driver can do anything about it, so it is nothing that a test of ours should fail for.
    pub async fn nudge_forbidden(&self, pod: &str, look: &mut Instant) {
        if Instant::now() < *look {
            return;
        }
        *look = Instant::now() + NUDGE_PERIOD;
        self.nudge_if_forbidden(pod).await;
    }

    /// Whether the kubelet was forbidden to read a claim of the pod.
    pub async fn was_forbidden(&self, pod: &str) -> bool {
        let events = self.events(pod).await;
        events.iter().any(|event| event.contains(LATE_AUTHORIZER))
    }

    /// The same, if it is so now.
    pub async fn nudge_if_forbidden(&self, pod: &str) {
        if !self.was_forbidden(pod).await {
            return;
        }
        println!("pod {pod} is changed, so that the kubelet asks for its claim again");
        let now = format!("{:?}", Instant::now());
        let change = json!({"metadata": {"annotations": {"test.example/nudged": now}}});
        self.pods()
            .patch(pod, &PatchParams::default(), &Patch::Merge(&change))
            .await
            .expect("the pod is changed");
    }

    /// Waits until a pod has a phase.
    pub async fn wait_phase(&self, pod: &str, phase: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.phase(pod).await.as_deref() != Some(phase) {
            assert!(
                Instant::now() < deadline,
                "pod {pod} is not {phase}: {:?}, events {:?}",
                self.phase(pod).await,
                self.events(pod).await
            );
            tick().await;
        }
    }

    /// Waits until the scheduler has looked at a pod and found no place for it.
    pub async fn wait_unschedulable(&self, pod: &str) {
        let deadline = Instant::now() + RUNNING;
        loop {
            let found = self
                .pods()
                .get_opt(pod)
                .await
                .expect("the API server answers");
            let status = found.and_then(|pod| pod.status).unwrap_or_default();
            let told = status
                .conditions
                .unwrap_or_default()
                .into_iter()
                .any(|condition| {
                    condition.type_ == "PodScheduled"
                        && condition.reason.as_deref() == Some("Unschedulable")
                });
            if told {
                return;
            }
            assert_ne!(
                status.phase.as_deref(),
                Some("Running"),
                "pod {pod} runs, and should not"
            );
            assert!(
                Instant::now() < deadline,
                "pod {pod} is neither running nor unschedulable"
            );
            tick().await;
        }
    }

    /// Events of pods.
    pub fn pod_events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn message(&self, pod: &str) -> Option<String> {
        self.pods().get_opt(pod).await.ok()??.status?.message
    }

    /// Reason and message of every event of a pod.
    pub async fn events(&self, pod: &str) -> Vec<String> {
        let list = ListParams::default().fields(&format!("involvedObject.name={pod}"));
        let events = self
            .pod_events()
            .list(&list)
            .await
            .expect("events can be listed");
        events
            .items
            .into_iter()
            .map(|event| {
                format!(
                    "{}: {}",
                    event.reason.unwrap_or_default(),
                    event.message.unwrap_or_default()
                )
            })
            .collect()
    }

    /// Waits until an event of a pod has a text in it, and returns the event.
    pub async fn wait_event(&self, pod: &str, text: &str, limit: Duration) -> String {
        let deadline = Instant::now() + limit;
        let mut look = Instant::now() + NUDGE_PERIOD;
        loop {
            let events = self.events(pod).await;
            if let Some(event) = events.iter().find(|event| event.contains(text)) {
                return event.clone();
            }
            self.nudge_forbidden(pod, &mut look).await;
            assert!(
                Instant::now() < deadline,
                "no event of pod {pod} has {text:?}: {events:#?}"
            );
            tick().await;
        }
    }

    /// Deletes a pod and waits until it is gone.
    pub async fn delete(&self, pod: &str) {
        self.pods()
            .delete(pod, &DeleteParams::default())
            .await
            .expect("the pod is deleted");
        self.wait_gone(pod).await;
    }

    pub async fn wait_gone(&self, pod: &str) {
        let deadline = Instant::now() + RUNNING;
        while self
            .pods()
            .get_opt(pod)
            .await
            .expect("the API server answers")
            .is_some()
        {
            assert!(
                Instant::now() < deadline,
                "pod {pod} is not gone: {:?}",
                self.events(pod).await
            );
            tick().await;
        }
    }

    /// Deletes a pod with grace 0: it is gone from the API at once, whatever still runs.
    pub async fn force_delete(&self, pod: &str) {
        let parameters = DeleteParams::default().grace_period(0);
        self.pods()
            .delete(pod, &parameters)
            .await
            .expect("the pod is deleted");
    }

    /// The names of all claims.
    pub async fn claim_names(&self) -> Vec<String> {
        let claims = self
            .claims()
            .list(&ListParams::default())
            .await
            .expect("claims can be listed");
        claims
            .items
            .into_iter()
            .filter_map(|claim| claim.metadata.name)
            .collect()
    }

    /// Waits until no claim is left.
    pub async fn wait_no_claims(&self) {
        let deadline = Instant::now() + RUNNING;
        loop {
            let names = self.claim_names().await;
            if names.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "claims are left over: {names:?}");
            tick().await;
        }
    }

    /// The GPUs of a running pod, as the runtime started it.
    pub async fn gpus_of(&self, pod: &str) -> Vec<String> {
        self.wait_running(pod).await;
        self.record().gpus_of(pod)
    }

    /// Waits until a container of a pod has started, and returns its GPUs.
    pub async fn wait_started(&self, pod: &str, container: &str) -> Vec<String> {
        let deadline = Instant::now() + RUNNING;
        let mut look = Instant::now() + NUDGE_PERIOD;
        loop {
            let record = self.record();
            let started = record.lines.iter().find(|line| {
                line.event == "started" && line.pod.name == pod && line.name == container
            });
            if let Some(line) = started {
                return line.gpus.clone();
            }
            self.nudge_forbidden(pod, &mut look).await;
            assert!(
                Instant::now() < deadline,
                "container {container} of {pod} has not started"
            );
            tick().await;
        }
    }

    /// Time since the first container of a pod started, by the runtime's clock.
    pub async fn pod_age(&self, pod: &str) -> Duration {
        let record = self.record();
        let first = record
            .lines
            .iter()
            .find(|line| line.event == "started" && line.pod.name == pod)
            .map_or(u64::MAX, |line| line.mono_ns);
        Duration::from_nanos(now_ns().saturating_sub(first))
    }

    /// Waits until something is so.
    pub async fn wait_for(&self, what: &str, limit: Duration, is_so: impl AsyncFn(&Self) -> bool) {
        let deadline = Instant::now() + limit;
        while !is_so(self).await {
            assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
            tick().await;
        }
    }

    /// The device name of a GPU, as /status tells it.
    pub async fn device_of(&self, gpu: &str) -> String {
        let status = self.status().await;
        let units = status["units"]
            .as_array()
            .expect("/status has units")
            .clone();
        let unit = units
            .iter()
            .find(|unit| unit["unit"] == gpu)
            .expect("the GPU is a unit");
        unit["device"]
            .as_str()
            .expect("a unit has a device name")
            .to_owned()
    }

    /// Another GPU of the node than this one.
    pub fn other_gpu(&self, gpu: &str) -> String {
        let gpus = self.node.gpus();
        gpus.iter()
            .find(|other| other.uuid != gpu)
            .expect("the node has two")
            .uuid
            .clone()
    }

    /// Writes an allocation as a scheduler would, without asking anybody.
    pub async fn allocate_by_hand(&self, claim: &str, device: &str, pod: &str) {
        let pod = self.pods().get(pod).await.expect("the pod exists");
        let status = json!({"status": {
            "allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.nvidia.com", "pool": self.name(), "device": device}]}},
            "reservedFor": [{"resource": "pods", "name": pod.metadata.name, "uid": pod.metadata.uid}],
        }});
        self.claims()
            .patch_status(claim, &PatchParams::default(), &Patch::Merge(&status))
            .await
            .expect("the allocation is written");
    }

    /// Calls the daemon's `Allocate` as the kubelet does: CDI device names, or the refusal's text.
    pub async fn allocate(&self, id: &str) -> Result<Vec<String>, String> {
        use legacy_proto::deviceplugin as v1beta1;
        let folder = self.state().join("kubelet/device-plugins");
        let socket = std::fs::read_dir(&folder)
            .expect("the device plugin folder")
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                let name = path
                    .file_name()
                    .and_then(|name| name.to_str())
                    .unwrap_or_default();
                name.ends_with(".sock") && name != "kubelet.sock"
            })
            .expect("the daemon serves the device plugin API");
        let channel = testkit::dial::localhost(&socket);
        let mut plugin = v1beta1::device_plugin_client::DevicePluginClient::new(channel);
        let request = v1beta1::AllocateRequest {
            container_requests: vec![v1beta1::ContainerAllocateRequest {
                devices_ids: vec![id.to_owned()],
            }],
        };
        match plugin.allocate(request).await {
            Ok(answer) => Ok(answer
                .into_inner()
                .container_responses
                .into_iter()
                .flat_map(|response| response.cdi_devices)
                .map(|device| device.name)
                .collect()),
            Err(status) => Err(status.message().to_owned()),
        }
    }
}
