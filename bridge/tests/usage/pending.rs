//! Which pods that wait the pool is told of, and when it is told that nobody knows.

use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use bridge_core::{Claimed, Demand, Offers, Pool, Settings};
use gpu_bridge::arbiter::{Call, Handle, Observation};
use gpu_bridge::usage::{self, DemandState};
use serde_json::{Value, json};
use testkit::{ApiServer, eventually};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::world::{DEADLINE, NODE, client, uid};

struct Waiting {
    api: ApiServer,
    /// What was told, in order.
    told: Arc<Mutex<Vec<Option<Demand>>>>,
    state: watch::Receiver<DemandState>,
    stop: CancellationToken,
    _tasks: JoinSet<()>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A server with the own Node and NVIDIA's class.
async fn server() -> ApiServer {
    let api = ApiServer::start().await.unwrap();
    api.put(
        "nodes",
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE, "labels": {"zone": "a"}},
            "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "0"}},
        }),
    );
    api.put("deviceclasses", class("gpu.nvidia.com", "gpu.nvidia.com"));
    api.put("deviceclasses", class("nic", "dra.net"));
    api
}

fn class(name: &str, driver: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == '{driver}'")}}]},
    })
}

/// A pod that no node was found for.
fn pending(name: &str, spec: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": "train", "name": name, "uid": uid(name),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "containers": [{"name": "main"}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "status": {
            "phase": "Pending",
            "conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            }],
        },
    });
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn counted(name: &str, count: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": count.to_string(), "cpu": "1"});
    let resources = json!({"limits": limits, "requests": limits});
    pending(
        name,
        &json!({"containers": [{"name": "main", "resources": resources}]}),
    )
}

fn with_claim(name: &str, claim: &str) -> Value {
    let claims = json!([{"name": "gpu", "resourceClaimName": claim}]);
    pending(name, &json!({"resourceClaims": claims}))
}

fn claim(name: &str, class: &str, count: u32) -> Value {
    let request = json!({"name": "r", "exactly": {"deviceClassName": class, "count": count}});
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "train", "name": name},
        "spec": {"devices": {"requests": [request]}},
    })
}

impl Waiting {
    fn start(api: ApiServer) -> Self {
        let (calls, mut queue) = mpsc::channel(8);
        let pool = Pool::waiting(Settings::default());
        let status = watch::channel(Arc::new(pool.status(SystemTime::UNIX_EPOCH))).1;
        let offers = watch::channel(Arc::new(Offers::default())).1;
        let handle = Handle::new(calls, offers, status, Instant::now());
        let told = Arc::new(Mutex::new(Vec::new()));
        let (log, mut tasks) = (Arc::clone(&told), JoinSet::new());
        tasks.spawn(async move {
            while let Some(call) = queue.recv().await {
                let Call::Observe {
                    observation: Observation::Demand(demand),
                    reply,
                } = call
                else {
                    panic!("it tells of pods that wait, and nothing else: {call:?}");
                };
                log.lock().unwrap().push(demand);
                // Whoever told it may be gone.
                drop(reply.send(Ok(())));
            }
        });
        let (state, seen) = watch::channel(DemandState::default());
        let stop = CancellationToken::new();
        let pending =
            usage::run_pending(client(&api), NODE.to_owned(), handle, state, stop.clone());
        tasks.spawn(async move { pending.await.unwrap() });
        Self {
            api,
            told,
            state: seen,
            stop,
            _tasks: tasks,
        }
    }

    fn last(&self) -> Option<Option<Demand>> {
        self.told.lock().unwrap().last().cloned()
    }

    /// The pods told of last, each with what it asks for by count and by claim; `None`: nothing is known.
    fn known(&self) -> Option<Vec<(String, u32, Claimed)>> {
        let pods = self.last()??.pods.into_iter();
        Some(
            pods.map(|pod| (pod.uid.as_str().to_owned(), pod.counted, pod.claimed))
                .collect(),
        )
    }

    async fn until(&self, wanted: &[(&str, u32, Claimed)]) {
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(name, counted, claimed)| (uid(name), *counted, *claimed))
            .collect();
        eventually(&format!("{wanted:?} wait"), DEADLINE, || {
            self.known().as_ref() == Some(&wanted)
        })
        .await;
    }

    async fn until_unknown(&mut self, state: impl Fn(&DemandState) -> bool) {
        let waited = tokio::time::timeout(DEADLINE, self.state.wait_for(|it| state(it))).await;
        waited.unwrap().unwrap();
        eventually("the pool is told that nothing is known", DEADLINE, || {
            self.last() == Some(None)
        })
        .await;
    }
}

const NONE: Claimed = Claimed::Units(0);

#[tokio::test]
async fn pods_that_wait_are_told_the_oldest_first_until_they_have_a_node() {
    let api = server().await;
    api.put("pods", counted("young", 2));
    let mut old = counted("old", 8);
    old["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
    api.put("pods", old);
    let waiting = Waiting::start(api);
    waiting.until(&[("old", 8, NONE), ("young", 2, NONE)]).await;
    let bound = json!({"spec": {"nodeName": NODE}});
    waiting.api.patch("pods", "train", "old", &bound);
    waiting.until(&[("young", 2, NONE)]).await;
    waiting.api.delete("pods", "train", "young");
    waiting.until(&[]).await;
}

#[tokio::test]
async fn a_pod_that_this_node_could_never_run_is_not_told() {
    let api = server().await;
    let mut elsewhere = counted("other-zone", 1);
    elsewhere["spec"]["nodeSelector"] = json!({"zone": "b"});
    let mut named = counted("other-node", 1);
    named["spec"]["affinity"] = json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-z"]}]},
        ]},
    }});
    let mut tainted = counted("untolerated", 1);
    tainted["spec"]["tolerations"] = json!([{"key": "gpu", "operator": "Equal", "value": "no"}]);
    let mut large = counted("too-large", 1);
    large["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("8001m");
    let mut gated = counted("gated", 1);
    gated["spec"]["schedulingGates"] = json!([{"name": "later"}]);
    let mut ending = counted("ending", 1);
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut fresh = counted("not-looked-at-yet", 1);
    fresh["status"]["conditions"] = json!([]);
    let mut nominated = counted("nominated-elsewhere", 1);
    nominated["status"]["nominatedNodeName"] = json!("node-z");
    let nothing = pending("asks-for-nothing", &json!({}));
    for pod in [
        elsewhere, named, tainted, large, gated, ending, fresh, nominated, nothing,
    ] {
        api.put("pods", pod);
    }
    api.put("pods", counted("could-run", 1));
    let waiting = Waiting::start(api);
    waiting.until(&[("could-run", 1, NONE)]).await;
    // A node that changes may run others.
    let zone = json!({"metadata": {"labels": {"zone": "b"}}});
    waiting.api.patch("nodes", "", NODE, &zone);
    waiting
        .until(&[("could-run", 1, NONE), ("other-zone", 1, NONE)])
        .await;
}

#[tokio::test]
async fn what_a_claim_pod_asks_for_stands_in_its_claims() {
    let api = server().await;
    api.put("resourceclaims", claim("three", "gpu.nvidia.com", 3));
    api.put("resourceclaims", claim("nic", "nic", 2));
    let mut all = claim("all", "gpu.nvidia.com", 1);
    all["spec"]["devices"]["requests"][0]["exactly"] =
        json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"});
    api.put("resourceclaims", all);
    api.put("pods", with_claim("a", "three"));
    api.put("pods", with_claim("b", "all"));
    api.put("pods", with_claim("c", "nic"));
    api.put("pods", with_claim("d", "not-there"));
    let waiting = Waiting::start(api);
    let three = Claimed::Units(3);
    waiting
        .until(&[("a", 0, three), ("b", 0, Claimed::All)])
        .await;
    waiting
        .api
        .put("resourceclaims", claim("not-there", "gpu.nvidia.com", 1));
    waiting
        .until(&[
            ("a", 0, three),
            ("b", 0, Claimed::All),
            ("d", 0, Claimed::Units(1)),
        ])
        .await;
}

#[tokio::test]
async fn a_generated_claim_counts_once_it_exists_and_no_longer_than_it_is_open() {
    let api = server().await;
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "one"}]);
    let mut pod = pending("a", &json!({"resourceClaims": claims}));
    api.put("pods", pod.clone());
    api.put("pods", counted("b", 1));
    let waiting = Waiting::start(api);
    waiting.until(&[("b", 1, NONE)]).await;
    waiting
        .api
        .put("resourceclaims", claim("a-gpu-x", "gpu.nvidia.com", 1));
    pod["status"]["resourceClaimStatuses"] =
        json!([{"name": "gpu", "resourceClaimName": "a-gpu-x"}]);
    waiting.api.put("pods", pod.clone());
    waiting
        .until(&[("a", 0, Claimed::Units(1)), ("b", 1, NONE)])
        .await;
    // It is allocated, and the pod hears of it.
    let device = json!({
        "request": "r", "driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-0",
    });
    let allocated = json!({"status": {"allocation": {"devices": {"results": [device]}}}});
    waiting
        .api
        .patch("resourceclaims", "train", "a-gpu-x", &allocated);
    pod["status"]["conditions"][0]["message"] = json!("it was looked at again");
    waiting.api.put("pods", pod);
    waiting.until(&[("b", 1, NONE)]).await;
}

#[tokio::test]
async fn a_missing_right_is_told_at_once_and_its_return_is_noticed() {
    for (verb, resource) in [
        ("list", "pods"),
        ("list", "deviceclasses"),
        ("get", "resourceclaims"),
    ] {
        let api = server().await;
        api.put("resourceclaims", claim("one", "gpu.nvidia.com", 1));
        api.put("pods", with_claim("a", "one"));
        api.forbid(verb, resource);
        let mut waiting = Waiting::start(api);
        waiting
            .until_unknown(|state| matches!(state, DemandState::NoDemandRight { .. }))
            .await;
        let said = waiting.state.borrow().to_string();
        assert!(
            said.starts_with("NoDemandRight: ") && said.contains("manifests/base/rbac.yaml"),
            "{said}"
        );
        waiting.api.allow(verb, resource);
        waiting.until(&[("a", 0, Claimed::Units(1))]).await;
    }
}

#[tokio::test]
async fn while_the_api_server_is_away_nothing_is_known() {
    let api = server().await;
    api.put("pods", counted("a", 1));
    let mut waiting = Waiting::start(api);
    waiting.until(&[("a", 1, NONE)]).await;
    waiting.api.go_away();
    waiting
        .until_unknown(|state| matches!(state, DemandState::Unseen { .. }))
        .await;
    waiting.api.come_back();
    waiting.until(&[("a", 1, NONE)]).await;
}
