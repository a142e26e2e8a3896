//! What is published, and when it is written.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bridge_core::{
    ClaimOffer, DeviceName, Gpu, Mode, Offers, SliceWanted, Taint, TaintReason, UnitId,
};
use expect_test::expect;
use gpu_bridge::dra::{PublishState, TaintSupport, slices};
use gpu_bridge::metrics::Metrics;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use testkit::{ApiServer, eventually};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::world::{DEADLINE, NODE, client};

const SLICES: &str = "resourceslices";
const NAME: &str = "00000-gpu.nvidia.com-node-a";

struct Publishing {
    api: Server,
    offers: watch::Sender<Arc<Offers>>,
    state: watch::Receiver<PublishState>,
    shown: watch::Receiver<Option<BTreeSet<UnitId>>>,
    shutdown: CancellationToken,
    _task: JoinHandle<()>,
}

impl Drop for Publishing {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// The API server, with dry runs, which testkit's does not know: a dry run is answered as a write would be, and not
/// sent on.
struct Server {
    api: ApiServer,
    dry_runs: Arc<DryRuns>,
}

#[derive(Default)]
struct DryRuns {
    denied: AtomicBool,
    drops_taints: AtomicBool,
    count: AtomicU64,
}

impl Deref for Server {
    type Target = ApiServer;

    fn deref(&self) -> &ApiServer {
        &self.api
    }
}

impl Server {
    fn drop_taints(&self) {
        self.api.drop_taints();
        self.dry_runs.drops_taints.store(true, Ordering::SeqCst);
    }

    fn client(&self) -> Client {
        let (inner, dry_runs) = (client(&self.api), Arc::clone(&self.dry_runs));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (inner, dry_runs) = (inner.clone(), Arc::clone(&dry_runs));
            async move {
                let query = request.uri().query().unwrap_or_default();
                if query.contains("dryRun=All") {
                    dry_runs.answer(request).await
                } else {
                    inner.send(request).await
                }
            }
        });
        Client::new(service, "default")
    }
}

impl DryRuns {
    async fn answer(&self, request: http::Request<Body>) -> kube::Result<http::Response<Body>> {
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.denied.load(Ordering::SeqCst) {
            let status = json!({"kind": "Status", "status": "Failure", "code": 400, "reason": "BadRequest",
                "message": "an admission webhook does not support dry run"});
            let body = Body::from(serde_json::to_vec(&status).unwrap());
            return Ok(http::Response::builder().status(400).body(body).unwrap());
        }
        let body = request.into_body().collect_bytes().await?;
        let mut object: Value = serde_json::from_slice(&body).unwrap();
        object["metadata"]["name"] = json!("dry-run");
        if self.drops_taints.load(Ordering::SeqCst) {
            for device in object["spec"]["devices"].as_array_mut().unwrap() {
                device.as_object_mut().unwrap().remove("taints");
            }
        }
        let body = Body::from(serde_json::to_vec(&object).unwrap());
        Ok(http::Response::builder().status(201).body(body).unwrap())
    }
}

async fn api() -> Server {
    let api = ApiServer::start().await.unwrap();
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "uid": "node-uid"}});
    api.put("nodes", node);
    Server {
        api,
        dry_runs: Arc::default(),
    }
}

impl Publishing {
    fn start(api: Server, offers: Option<Vec<ClaimOffer>>) -> Self {
        let (offers, seen) = watch::channel(Arc::new(self::offers(offers)));
        let (sender, state) = watch::channel(PublishState::Waiting);
        let (shown, shown_now) = watch::channel(None);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(slices::run(
            api.client(),
            NODE.to_owned(),
            seen,
            sender,
            shown,
            Metrics::new(),
            shutdown.clone(),
        ));
        Self {
            api,
            offers,
            state,
            shown: shown_now,
            shutdown,
            _task: task,
        }
    }

    fn offer(&self, offers: Option<Vec<ClaimOffer>>) {
        self.offers.send_replace(Arc::new(self::offers(offers)));
    }

    async fn until(&mut self, wanted: impl Fn(&PublishState) -> bool) -> PublishState {
        let waited = tokio::time::timeout(DEADLINE, self.state.wait_for(|state| wanted(state)));
        let state = waited.await.expect("the state is reached in time");
        state.expect("the task runs").clone()
    }

    async fn until_published(&mut self) -> PublishState {
        self.until(|state| matches!(state, PublishState::Published { .. }))
            .await
    }

    /// Waits until it is told that the slice shows these GPUs to claims, and no others.
    async fn until_shown(&mut self, numbers: &[u32]) {
        let wanted: BTreeSet<UnitId> = numbers.iter().map(|number| gpu(*number).uuid).collect();
        let waited = self.shown.wait_for(|shown| shown.as_ref() == Some(&wanted));
        let shown = tokio::time::timeout(DEADLINE, waited).await;
        drop(shown.expect("it is told in time").expect("the task runs"));
    }

    /// Waits until the slice has these devices with these taints.
    async fn until_devices(&self, wanted: &[(&str, Option<&str>)]) {
        let what = format!("the slice has {wanted:?}");
        eventually(&what, DEADLINE, || {
            let slices = self.api.list(SLICES);
            slices.len() == 1 && devices(&slices[0]) == wanted_devices(wanted)
        })
        .await;
    }

    fn writes(&self) -> [u64; 3] {
        ["create", "update", "delete"].map(|verb| self.api.count(verb, SLICES))
    }
}

fn wanted_devices(wanted: &[(&str, Option<&str>)]) -> Vec<(String, Option<String>)> {
    let own = |text: &str| text.to_owned();
    wanted
        .iter()
        .map(|(name, taint)| (own(name), taint.map(own)))
        .collect()
}

/// Names and taint values of a slice.
fn devices(slice: &Value) -> Vec<(String, Option<String>)> {
    let devices = slice["spec"]["devices"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let device = |device: Value| {
        let taint = device["taints"][0]["value"].as_str().map(str::to_owned);
        (device["name"].as_str().unwrap().to_owned(), taint)
    };
    devices.into_iter().map(device).collect()
}

fn offers(claims: Option<Vec<ClaimOffer>>) -> Offers {
    Offers {
        claims,
        ..Offers::default()
    }
}

fn gpu(number: u32) -> Gpu {
    Gpu {
        uuid: UnitId::new(format!("GPU-0000000{number}-0000-4000-8000-000000000000")).unwrap(),
        pci_bus_id: format!("0000:6{number}:00.0"),
        minor: number,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory_bytes: 81_559 << 20,
        driver_version: "580.126.05".to_owned(),
        cuda_driver_version: (13, 0),
        numa_node: Some(1),
        pcie_root: Some("pci0000:64".to_owned()),
        addressing_mode: Some("None".to_owned()),
    }
}

fn offer(number: u32, taint: Option<TaintReason>) -> ClaimOffer {
    ClaimOffer {
        device: DeviceName::new(format!("gpu-{number}")).unwrap(),
        gpu: gpu(number).into(),
        taint: taint.map(Taint::keeping_out),
        held_by_claim: false,
    }
}

/// A device that a claim lost to a counted pod.
fn evicting(number: u32) -> ClaimOffer {
    ClaimOffer {
        taint: Some(Taint::evicting(TaintReason::Counted)),
        ..offer(number, None)
    }
}

fn held(number: u32, taint: Option<TaintReason>) -> ClaimOffer {
    ClaimOffer {
        held_by_claim: true,
        ..offer(number, taint)
    }
}

#[tokio::test]
async fn the_slice_says_the_mode_of_its_node_and_is_written_when_that_changes() {
    let publishing = Publishing::start(api().await, Some(vec![offer(0, None)]));
    let says = async |mode: &str| {
        eventually(&format!("the slice says {mode}"), DEADLINE, || {
            let slices = publishing.api.list(SLICES);
            slices.len() == 1
                && slices[0]["metadata"]["annotations"][slices::MODE_ANNOTATION] == mode
        })
        .await;
    };
    says("both").await;
    publishing.offers.send_replace(Arc::new(Offers {
        mode: Mode::Dra,
        ..offers(Some(vec![offer(0, None)]))
    }));
    says("dra").await;
    assert_eq!(publishing.writes(), [1, 1, 0]);
}

#[tokio::test]
async fn the_slice_is_what_nvidias_driver_would_publish() {
    let mut plain = offer(1, None);
    let gpu = Arc::make_mut(&mut plain.gpu);
    gpu.numa_node = None;
    gpu.pcie_root = None;
    gpu.addressing_mode = None;
    gpu.driver_version = "not a version".to_owned();
    gpu.product_name = "x".repeat(65);
    let tainted = offer(0, Some(TaintReason::Counted));
    let mut publishing = Publishing::start(api().await, Some(vec![tainted, plain]));
    publishing.until_published().await;

    let mut slice = publishing.api.get(SLICES, "", NAME).unwrap();
    for field in [
        "creationTimestamp",
        "resourceVersion",
        "uid",
        "generation",
        "managedFields",
    ] {
        slice["metadata"].as_object_mut().unwrap().remove(field);
    }
    let text = serde_json::to_string_pretty(&slice).unwrap();
    expect![[r#"
        {
          "apiVersion": "resource.k8s.io/v1",
          "kind": "ResourceSlice",
          "metadata": {
            "annotations": {
              "gpu-bridge.dev/mode": "both"
            },
            "name": "00000-gpu.nvidia.com-node-a",
            "ownerReferences": [
              {
                "apiVersion": "v1",
                "controller": true,
                "kind": "Node",
                "name": "node-a",
                "uid": "node-uid"
              }
            ]
          },
          "spec": {
            "devices": [
              {
                "attributes": {
                  "addressingMode": {
                    "string": "None"
                  },
                  "architecture": {
                    "string": "Hopper"
                  },
                  "brand": {
                    "string": "Nvidia"
                  },
                  "cudaComputeCapability": {
                    "version": "9.0.0"
                  },
                  "cudaDriverVersion": {
                    "version": "13.0.0"
                  },
                  "driverVersion": {
                    "version": "580.126.5"
                  },
                  "productName": {
                    "string": "NVIDIA H100 80GB HBM3"
                  },
                  "resource.kubernetes.io/numaNode": {
                    "int": 1
                  },
                  "resource.kubernetes.io/pciBusID": {
                    "string": "0000:60:00.0"
                  },
                  "resource.kubernetes.io/pcieRoot": {
                    "string": "pci0000:64"
                  },
                  "type": {
                    "string": "gpu"
                  },
                  "uuid": {
                    "string": "GPU-00000000-0000-4000-8000-000000000000"
                  }
                },
                "capacity": {
                  "memory": {
                    "value": "81559Mi"
                  }
                },
                "name": "gpu-0",
                "taints": [
                  {
                    "effect": "NoSchedule",
                    "key": "gpu-bridge.dev/unit",
                    "value": "Counted"
                  }
                ]
              },
              {
                "attributes": {
                  "architecture": {
                    "string": "Hopper"
                  },
                  "brand": {
                    "string": "Nvidia"
                  },
                  "cudaComputeCapability": {
                    "version": "9.0.0"
                  },
                  "cudaDriverVersion": {
                    "version": "13.0.0"
                  },
                  "resource.kubernetes.io/pciBusID": {
                    "string": "0000:61:00.0"
                  },
                  "type": {
                    "string": "gpu"
                  },
                  "uuid": {
                    "string": "GPU-00000001-0000-4000-8000-000000000000"
                  }
                },
                "capacity": {
                  "memory": {
                    "value": "81559Mi"
                  }
                },
                "name": "gpu-1"
              }
            ],
            "driver": "gpu.nvidia.com",
            "nodeName": "node-a",
            "pool": {
              "generation": 1,
              "name": "node-a",
              "resourceSliceCount": 1
            }
          }
        }"#]]
    .assert_eq(&text);
}

#[tokio::test]
async fn a_change_of_the_offers_is_one_write() {
    let mut publishing = Publishing::start(api().await, Some(vec![offer(0, None), offer(1, None)]));
    publishing.until_published().await;
    assert_eq!(publishing.writes(), [1, 0, 0]);
    let before = publishing.api.get(SLICES, "", NAME).unwrap();

    publishing.offer(Some(vec![
        offer(0, None),
        offer(1, Some(TaintReason::Counted)),
    ]));
    publishing
        .until_devices(&[("gpu-0", None), ("gpu-1", Some("Counted"))])
        .await;
    publishing.until_shown(&[0]).await;
    publishing.offer(Some(vec![
        offer(0, None),
        offer(1, Some(TaintReason::Lost)),
    ]));
    publishing
        .until_devices(&[("gpu-0", None), ("gpu-1", Some("Lost"))])
        .await;

    let after = publishing.api.get(SLICES, "", NAME).unwrap();
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(
        after["spec"]["pool"], before["spec"]["pool"],
        "one slice needs no new generation"
    );
    assert_eq!(publishing.writes(), [1, 2, 0], "the slice, and two changes");
}

#[tokio::test]
async fn nothing_is_written_while_nothing_changes() {
    let tainted = || {
        Some(vec![
            offer(0, None),
            offer(1, Some(TaintReason::Counted)),
            held(2, None),
        ])
    };
    let mut publishing = Publishing::start(api().await, tainted());
    publishing.until_published().await;
    for round in 0..4 {
        publishing.offer(tainted());
        // It is deleted by a publisher that has seen all that was before.
        let stray = format!("stray-{round}");
        publishing.api.put(SLICES, foreign(&stray, "pool-b", 1));
        eventually("the stray slice is deleted", DEADLINE, || {
            publishing.api.get(SLICES, "", &stray).is_none()
        })
        .await;
    }
    assert_eq!(publishing.writes(), [1, 0, 4]);
}

/// What every write raises by one.
fn version(slice: &Value) -> u64 {
    let version = slice["metadata"]["resourceVersion"].as_str().unwrap();
    version.parse().unwrap()
}

#[tokio::test]
async fn the_time_of_a_taint_is_the_servers_and_stays() {
    let tainted = || offer(0, Some(TaintReason::Counted));
    let mut publishing = Publishing::start(api().await, Some(vec![tainted(), offer(1, None)]));
    publishing.until_published().await;
    let mut slice = publishing.api.get(SLICES, "", NAME).unwrap();
    slice["spec"]["devices"][0]["taints"][0]["timeAdded"] = json!("2026-11-29T10:00:00Z");
    let put = version(&publishing.api.put(SLICES, slice));

    publishing.offer(Some(vec![tainted(), offer(1, Some(TaintReason::Lost))]));
    publishing
        .until_devices(&[("gpu-0", Some("Counted")), ("gpu-1", Some("Lost"))])
        .await;

    let slice = publishing.api.get(SLICES, "", NAME).unwrap();
    let time = &slice["spec"]["devices"][0]["taints"][0]["timeAdded"];
    assert_eq!(*time, json!("2026-11-29T10:00:00Z"));
    assert_eq!(
        version(&slice),
        put + 1,
        "the time alone was no reason to write"
    );
}

#[tokio::test]
async fn a_device_evicts_by_one_write_and_ends_by_another() {
    let tainted = || offer(0, Some(TaintReason::Counted));
    let mut publishing = Publishing::start(api().await, Some(vec![tainted(), offer(1, None)]));
    publishing.until_published().await;
    let mut slice = publishing.api.get(SLICES, "", NAME).unwrap();
    slice["spec"]["devices"][0]["taints"][0]["timeAdded"] = json!("2026-11-29T10:00:00Z");
    let mut written = version(&publishing.api.put(SLICES, slice));
    let until_effect = async |publishing: &Publishing, effect: &str| {
        eventually("the taint has the effect", DEADLINE, || {
            let slice = publishing.api.get(SLICES, "", NAME).unwrap();
            slice["spec"]["devices"][0]["taints"][0]["effect"] == effect
        })
        .await;
        publishing.api.get(SLICES, "", NAME).unwrap()
    };

    publishing.offer(Some(vec![evicting(0), offer(1, None)]));
    let mut raised = until_effect(&publishing, "NoExecute").await;
    assert_eq!(version(&raised), written + 1);
    let taint = &raised["spec"]["devices"][0]["taints"];
    assert_eq!(
        *taint,
        json!([{"key": "gpu-bridge.dev/unit", "value": "Counted", "effect": "NoExecute"}]),
        "one taint, and its time is the server's to set: pods are evicted by it"
    );
    // What else changes meanwhile leaves the time, or the eviction would count anew.
    raised["spec"]["devices"][0]["taints"][0]["timeAdded"] = json!("2026-11-29T10:05:00Z");
    written = version(&publishing.api.put(SLICES, raised));
    publishing.offer(Some(vec![evicting(0), offer(1, Some(TaintReason::Lost))]));
    publishing
        .until_devices(&[("gpu-0", Some("Counted")), ("gpu-1", Some("Lost"))])
        .await;
    let slice = publishing.api.get(SLICES, "", NAME).unwrap();
    let time = &slice["spec"]["devices"][0]["taints"][0]["timeAdded"];
    assert_eq!(*time, json!("2026-11-29T10:05:00Z"));

    publishing.offer(Some(vec![tainted(), offer(1, Some(TaintReason::Lost))]));
    let lowered = until_effect(&publishing, "NoSchedule").await;
    assert_eq!(version(&lowered), written + 2, "the other device, and down");
}

#[tokio::test]
async fn where_the_server_drops_taints_nothing_is_written_to_evict() {
    let api = api().await;
    api.drop_taints();
    let tainted = offer(1, Some(TaintReason::Counted));
    let mut publishing = Publishing::start(api, Some(vec![offer(0, None), tainted]));
    publishing.until_published().await;
    publishing.offer(Some(vec![offer(0, None), evicting(1)]));
    publishing.offer(Some(vec![offer(0, Some(TaintReason::Lost)), evicting(1)]));
    publishing.until_devices(&[]).await;
    assert_eq!(
        publishing.writes(),
        [1, 1, 0],
        "the slice, and the device that was lost"
    );
}

#[tokio::test]
async fn where_the_server_drops_taints_devices_that_nobody_may_take_are_left_out() {
    let api = api().await;
    api.drop_taints();
    let offers = || {
        vec![
            offer(0, None),
            offer(1, Some(TaintReason::Counted)),
            held(2, Some(TaintReason::Unpreparing)),
        ]
    };
    let mut publishing = Publishing::start(api, Some(offers()));
    let state = publishing.until_published().await;
    let wanted = PublishState::Published {
        slice: NAME.to_owned(),
        devices: 2,
        taints: TaintSupport::Dropped,
    };
    assert_eq!(state, wanted);
    publishing
        .until_devices(&[("gpu-0", None), ("gpu-2", None)])
        .await;
    assert_eq!(
        publishing.writes(),
        [1, 0, 0],
        "no device ever stood there without its taint"
    );

    publishing.offer(Some(vec![
        offer(0, Some(TaintReason::Counted)),
        offer(1, None),
        held(2, None),
    ]));
    publishing
        .until_devices(&[("gpu-1", None), ("gpu-2", None)])
        .await;
}

#[tokio::test]
async fn where_no_dry_run_is_allowed_the_write_tells() {
    let api = api().await;
    api.drop_taints();
    api.dry_runs.denied.store(true, Ordering::SeqCst);
    let tainted = offer(1, Some(TaintReason::Counted));
    let mut publishing = Publishing::start(api, Some(vec![offer(0, None), tainted]));
    publishing
        .until(|state| matches!(state, PublishState::Published { devices: 1, .. }))
        .await;
    publishing.until_devices(&[("gpu-0", None)]).await;
    assert_eq!(publishing.writes(), [1, 1, 0]);
    assert_eq!(publishing.api.dry_runs.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_server_that_begins_to_drop_taints_is_noticed() {
    let tainted = |reason| Some(vec![offer(0, None), offer(1, Some(reason))]);
    let mut publishing = Publishing::start(api().await, tainted(TaintReason::Counted));
    publishing.until_published().await;
    publishing.api.drop_taints();
    publishing.offer(tainted(TaintReason::Lost));
    publishing.until_devices(&[("gpu-0", None)]).await;
    publishing
        .until(|state| {
            matches!(
                state,
                PublishState::Published {
                    taints: TaintSupport::Dropped,
                    ..
                }
            )
        })
        .await;
}

#[tokio::test]
async fn a_slice_that_a_kubelet_wiped_is_made_again() {
    let mut publishing = Publishing::start(api().await, Some(vec![offer(0, None)]));
    publishing.until_published().await;
    for _ in 0..2 {
        publishing.api.delete(SLICES, "", NAME);
        publishing.until_devices(&[("gpu-0", None)]).await;
    }
}

#[tokio::test]
async fn a_slice_is_owned_by_the_node_that_is_there_now() {
    let mut publishing = Publishing::start(api().await, Some(vec![offer(0, None)]));
    publishing.until_published().await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "uid": "second-uid"}});
    publishing.api.delete("nodes", "", NODE);
    publishing.api.put("nodes", node);
    publishing.api.delete(SLICES, "", NAME);
    publishing.until_devices(&[("gpu-0", None)]).await;
    let slice = publishing.api.get(SLICES, "", NAME).unwrap();
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "second-uid");
}

/// A slice as another publisher made it.
fn foreign(name: &str, pool: &str, generation: i64) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": NODE,
            "pool": {"name": pool, "generation": generation, "resourceSliceCount": 2},
            "devices": [{"name": "gpu-0"}],
        },
    })
}

#[tokio::test]
async fn slices_of_another_publisher_are_taken_over() {
    let api = api().await;
    api.put(
        SLICES,
        foreign("00000-gpu.nvidia.com-node-a-abcde", NODE, 7),
    );
    api.put(
        SLICES,
        foreign("00001-gpu.nvidia.com-node-a-fghij", NODE, 7),
    );
    api.put(SLICES, foreign("stray", "pool-b", 9));
    let mut elsewhere = foreign("other-node", "node-b", 1);
    elsewhere["spec"]["nodeName"] = json!("node-b");
    api.put(SLICES, elsewhere);
    let mut publishing = Publishing::start(api, Some(vec![offer(0, None)]));
    publishing.until_published().await;

    let names: Vec<_> = publishing
        .api
        .list(SLICES)
        .iter()
        .map(|it| it["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["00000-gpu.nvidia.com-node-a-abcde", "other-node"]);
    let kept = publishing.api.get(SLICES, "", &names[0]).unwrap();
    assert_eq!(
        kept["spec"]["pool"],
        json!({"name": NODE, "generation": 7, "resourceSliceCount": 1})
    );
    assert_eq!(kept["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(publishing.writes(), [0, 1, 2]);
}

#[tokio::test]
async fn a_closed_face_has_no_slice() {
    let mut publishing = Publishing::start(api().await, Some(vec![offer(0, None)]));
    publishing.until_published().await;
    publishing.offer(None);
    publishing
        .until(|state| *state == PublishState::Withdrawn)
        .await;
    assert_eq!(publishing.api.list(SLICES), Vec::<Value>::new());
    publishing.offer(Some(Vec::new()));
    publishing.until_published().await;
    publishing.until_devices(&[]).await;
}

#[tokio::test]
async fn while_nobody_knows_who_has_what_a_closed_face_makes_no_slice_and_taints_the_one_of_before()
{
    let unknown = Offers {
        slice: SliceWanted::Kept,
        ..offers(Some(vec![offer(0, Some(TaintReason::Closed))]))
    };
    let mut publishing = Publishing::start(api().await, None);
    let withdrawn = |state: &PublishState| *state == PublishState::Withdrawn;
    publishing.until(withdrawn).await;
    publishing.offers.send_replace(Arc::new(unknown.clone()));
    publishing.until_shown(&[]).await;
    assert_eq!(publishing.writes(), [0, 0, 0]);
    publishing.offer(Some(vec![offer(0, None)]));
    publishing.until_devices(&[("gpu-0", None)]).await;
    publishing.offers.send_replace(Arc::new(unknown));
    let tainted = [("gpu-0", Some("Closed"))];
    publishing.until_devices(&tainted).await;
    publishing.offer(None);
    publishing.until(withdrawn).await;
    assert_eq!(publishing.writes(), [1, 1, 1]);
}

#[tokio::test]
async fn a_refused_write_is_told_and_tried_again() {
    let api = api().await;
    api.forbid("create", SLICES);
    let mut publishing = Publishing::start(api, Some(vec![offer(0, None)]));
    let state = publishing
        .until(|state| matches!(state, PublishState::Failed { .. }))
        .await;
    let PublishState::Failed { error } = state else {
        unreachable!("it was waited for")
    };
    assert!(
        error.starts_with("could not create the ResourceSlice: "),
        "{error}"
    );
    assert!(error.contains("forbidden"), "{error}");
    assert_eq!(
        *publishing.shown.borrow(),
        None,
        "nothing is said to be shown that is not"
    );
    publishing.api.allow("create", SLICES);
    publishing.until_published().await;
    publishing.until_shown(&[0]).await;
}

#[tokio::test]
async fn somebody_elses_write_is_put_right() {
    let mut publishing = Publishing::start(api().await, Some(vec![offer(0, None)]));
    publishing.until_published().await;
    let change = json!({"spec": {"devices": [{"name": "gpu-9"}]}});
    publishing.api.patch(SLICES, "", NAME, &change);
    publishing.until_devices(&[("gpu-0", None)]).await;
}

#[tokio::test]
async fn more_devices_than_a_slice_holds_are_an_error_that_says_so() {
    let many = (0..65).map(|number| offer(number % 10, None)).collect();
    let mut publishing = Publishing::start(api().await, Some(many));
    let state = publishing
        .until(|state| matches!(state, PublishState::Failed { .. }))
        .await;
    let PublishState::Failed { error } = state else {
        unreachable!("it was waited for")
    };
    assert!(error.starts_with("the node has 65 devices"), "{error}");
    assert_eq!(publishing.api.list(SLICES), Vec::<Value>::new());
}
