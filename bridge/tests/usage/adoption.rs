//! A node without a ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bridge_core::{
    Access, AllocatedClaim, AllocatedDevice, Asked, ClaimRef, ClaimUid, Claims, DeviceId,
    DeviceName, ForeignCause, Health, HoldKind, Offers, Phase, Pool, Standing, UnitId,
};
use gpu_bridge::arbiter::Observation;
use gpu_bridge::usage::{self, AdoptionInputs, PodResources};
use legacy_proto::deviceplugin::{CdiDevice, ContainerAllocateResponse, Mount};
use prost::Message as _;
use serde_json::json;
use testkit::eventually;
use tokio::sync::watch;

use crate::world::{Arbiter, DEADLINE, GPUS, NODE, RESOURCE, World, in_api, settings, uid, unit};

/// Units with their device minors.
type Minors = Vec<(UnitId, u32)>;

/// A node whose ledger is missing, and what its adoption looks at.
struct Waiting {
    world: World,
    /// The device plugin folder that adoption reads; the test's kubelet has one of its own.
    book: PathBuf,
    claims: watch::Sender<Option<Claims>>,
    minors: Arc<Mutex<Option<Minors>>>,
    waiting: watch::Receiver<String>,
}

/// What is different about a node.
struct Node {
    /// Counted pods that run here.
    pods: Vec<&'static str>,
    /// Whether their containers have a status.
    started: Started,
    /// Whether NVML has shown the GPUs.
    minors: Option<Minors>,
    claims: Option<Claims>,
    unprepared: BTreeSet<ClaimUid>,
    /// Content of `dra_manager_state`.
    prepared: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Started {
    Yes,
    No,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            pods: Vec::new(),
            started: Started::No,
            minors: Some(minors()),
            claims: Some(Claims::default()),
            unprepared: BTreeSet::new(),
            prepared: None,
        }
    }
}

impl Waiting {
    /// `book` is the content of `kubelet_internal_checkpoint`.
    async fn start(book: Option<&str>, node: Node) -> Self {
        Self::start_as(Pool::waiting(settings()), book, node).await
    }

    async fn start_as(pool: Pool, book: Option<&str>, node: Node) -> Self {
        let mut world = World::start(pool, |root| {
            if let Some(text) = &node.prepared {
                fs::write(root.join("dra_manager_state"), text).unwrap();
            }
        })
        .await;
        for pod in &node.pods {
            let mut shown = in_api(pod, 1, "Running");
            if node.started == Started::Yes {
                shown["status"]["containerStatuses"] = json!([{
                    "name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                }]);
            }
            world.api.put("pods", shown);
        }
        let count = node.pods.len();
        world
            .wait_for_pods("the running pods", |pods| {
                pods.is_some_and(|pods| pods.pods.len() == count)
            })
            .await;
        let folder = world.folder.path().join("book");
        fs::create_dir(&folder).unwrap();
        if let Some(text) = book {
            write_book(&folder, text);
        }
        let (claims, claims_seen) = watch::channel(node.claims);
        let (say, waiting) = watch::channel(String::new());
        let minors = Arc::new(Mutex::new(node.minors.clone()));
        let shown = Arc::clone(&minors);
        let inputs = AdoptionInputs {
            resources: PodResources::new(&world.root(), NODE.to_owned()),
            kubelet_dir: world.root(),
            device_plugin_dir: folder.clone(),
            pods: world.pods.clone(),
            claims: claims_seen,
            cdi_claims: Some(BTreeSet::new()),
            cdi_minors: BTreeMap::new(),
            unprepared: Arc::new(move || node.unprepared.clone()),
            minors: Arc::new(move || shown.lock().unwrap().clone()),
            waiting: say,
        };
        let adoption = usage::run_adoption(inputs, world.arbiter.handle.clone(), world.stop());
        world.spawn(async move { adoption.await.unwrap() });
        Self {
            world,
            book: folder,
            claims,
            minors,
            waiting,
        }
    }

    fn arbiter(&self) -> &Arbiter {
        &self.world.arbiter
    }

    async fn serves(&self) {
        eventually("the end of adoption", DEADLINE, || {
            self.arbiter().status().standing == Standing::Serving
        })
        .await;
        let waiting = self.waiting.clone();
        eventually("nothing to wait for", DEADLINE, || {
            waiting.borrow().is_empty()
        })
        .await;
    }

    async fn waits_for(&self, text: &str) {
        let waiting = self.waiting.clone();
        eventually(text, DEADLINE, || waiting.borrow().contains(text)).await;
        assert_eq!(
            self.arbiter().status().standing,
            Standing::WaitingForAdoption
        );
    }
}

fn minors() -> Minors {
    (0..GPUS).map(|number| (unit(number), number)).collect()
}

fn write_book(folder: &Path, text: &str) {
    fs::write(folder.join("kubelet_internal_checkpoint"), text).unwrap();
}

/// As the kubelet writes it; the checksum is not looked at.
fn book(entries: &[(&str, &str, ContainerAllocateResponse)]) -> String {
    let entries: Vec<_> = entries
        .iter()
        .map(|(pod, id, answer)| {
            json!({
                "PodUID": uid(pod),
                "ContainerName": "main",
                "ResourceName": RESOURCE,
                "DeviceIDs": {"-1": [id]},
                "AllocResp": STANDARD.encode(answer.encode_to_vec()),
            })
        })
        .collect();
    json!({
        "Data": {"PodDeviceEntries": entries, "RegisteredDevices": {RESOURCE: []}},
        "Checksum": 1,
    })
    .to_string()
}

fn cdi(name: &str) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        cdi_devices: vec![CdiDevice {
            name: name.to_owned(),
        }],
        ..ContainerAllocateResponse::default()
    }
}

fn env(value: &str) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), value.to_owned())]
            .into_iter()
            .collect(),
        ..ContainerAllocateResponse::default()
    }
}

#[tokio::test]
async fn running_pods_keep_what_our_answer_and_what_nvidias_answer_gave_them() {
    // Ours gave another unit than the id names.
    let text = book(&[
        ("a", "GPU-0", cdi("gpu-bridge.dev/gpu=GPU-1")),
        ("b", "GPU-1", env("GPU-0")),
        ("gone", "GPU-0", env("GPU-0")),
    ]);
    let node = Node {
        pods: vec!["a", "b"],
        ..Node::default()
    };
    let node = Waiting::start(Some(&text), node).await;
    node.serves().await;
    for (number, id, pod) in [(1, "GPU-0", "a"), (0, "GPU-1", "b")] {
        let hold = node.arbiter().hold(number).unwrap();
        assert_eq!(hold.phase(), Phase::Bound);
        assert_eq!(hold.device_id().unwrap().to_string(), id);
        let HoldKind::Bound { pod: holder, .. } = hold.kind else {
            unreachable!("the phase says so");
        };
        assert_eq!(holder.uid.unwrap().as_str(), uid(pod));
    }
}

#[tokio::test]
async fn the_kubelets_ids_are_told_before_everything_else_is_known() {
    let text = book(&[("a", "GPU-1", env("GPU-1"))]);
    let node = Node {
        pods: vec!["a"],
        minors: None,
        ..Node::default()
    };
    let node = Waiting::start(Some(&text), node).await;
    node.waits_for("NVML has not shown the GPUs yet").await;
    let ids = vec![DeviceId::of_unit(unit(1))].into_iter().collect();
    assert_eq!(
        *node.arbiter().seen.adoption.lock().unwrap(),
        [Observation::KubeletIds(ids)]
    );
    let offers = node.arbiter().handle.offers();
    assert_eq!(healthy_in(&offers.borrow()), ["GPU-1"]);
    *node.minors.lock().unwrap() = Some(minors());
    node.serves().await;
    assert_eq!(node.arbiter().bound()[0].0, "a");
}

#[tokio::test]
async fn with_an_unreadable_ledger_the_ids_of_running_pods_stay_healthy_until_they_end() {
    let text = book(&[
        ("a", "GPU-1", env("GPU-1")),
        ("gone", "GPU-0", env("GPU-0")),
    ]);
    let node = Node {
        pods: vec!["a"],
        ..Node::default()
    };
    let node = Waiting::start_as(Pool::unreadable(settings()), Some(&text), node).await;
    let healthy = |ids: &'static [&str]| {
        let offers = node.arbiter().handle.offers();
        eventually("the ids of running pods", DEADLINE, move || {
            healthy_in(&offers.borrow()) == ids
        })
    };
    healthy(&["GPU-1"]).await;
    // The kubelet leaves what has ended in its book, and schedulers would take it for free.
    node.world.api.put("pods", in_api("a", 1, "Succeeded"));
    healthy(&[]).await;
    assert_eq!(
        node.arbiter().status().standing,
        Standing::LedgerUnreadable,
        "nothing is adopted over a file that an admin must look at"
    );
}

fn healthy_in(offers: &Offers) -> Vec<String> {
    let healthy = offers.counted.iter();
    healthy
        .filter(|offer| offer.health == Health::Healthy)
        .map(|offer| offer.id.to_string())
        .collect()
}

#[tokio::test]
async fn what_nvidias_plugin_gave_is_taken_over_by_each_of_its_strategies() {
    let annotated = ContainerAllocateResponse {
        annotations: [(
            "cdi.k8s.io/nvidia-device-plugin_1".to_owned(),
            "k8s.device-plugin.nvidia.com/gpu=GPU-1".to_owned(),
        )]
        .into_iter()
        .collect(),
        ..ContainerAllocateResponse::default()
    };
    let mounted = ContainerAllocateResponse {
        mounts: vec![Mount {
            container_path: "/var/run/nvidia-container-devices/GPU-1".to_owned(),
            host_path: "/dev/null".to_owned(),
            ..Mount::default()
        }],
        ..env("/var/run/nvidia-container-devices")
    };
    for (id, answer) in [
        ("GPU-1", env("GPU-1")),
        ("GPU-1", env("1")),
        ("GPU-1::3", env("GPU-1")),
        ("GPU-1", cdi("k8s.device-plugin.nvidia.com/gpu=GPU-1")),
        ("GPU-1", cdi("k8s.device-plugin.nvidia.com/gpu=0")),
        ("GPU-1", annotated),
        ("GPU-1", mounted),
    ] {
        let text = book(&[("a", id, answer.clone())]);
        let node = Node {
            pods: vec!["a"],
            ..Node::default()
        };
        let node = Waiting::start(Some(&text), node).await;
        node.serves().await;
        let bound = node.arbiter().bound();
        assert_eq!(bound.len(), 1, "{id} {answer:?}");
        let hold = node.arbiter().hold(1).expect("GPU-1 is held");
        assert_eq!(hold.phase(), Phase::Bound, "{id} {answer:?}");
    }
}

#[tokio::test]
async fn an_answer_that_names_no_unit_makes_every_free_unit_foreign() {
    let text = book(&[("a", "GPU-0", env("GPU-0")), ("b", "GPU-1", env("all"))]);
    let node = Node {
        pods: vec!["a", "b"],
        ..Node::default()
    };
    let node = Waiting::start(Some(&text), node).await;
    node.serves().await;
    assert_eq!(node.arbiter().hold(0).unwrap().phase(), Phase::Bound);
    assert_foreign(&node, 1, "b");
}

fn assert_foreign(node: &Waiting, number: u32, name: &str) {
    let hold = node.arbiter().hold(number).unwrap();
    let HoldKind::Foreign {
        cause: ForeignCause::UnknownUnitOf { pod },
    } = &hold.kind
    else {
        panic!("{hold:?}");
    };
    assert_eq!(pod.name.name, name);
}

#[tokio::test]
async fn a_running_pod_of_which_the_kubelets_book_says_nothing_makes_every_free_unit_foreign() {
    for text in [None, Some(book(&[("a", "GPU-0", env("GPU-0"))]))] {
        let node = Node {
            pods: vec!["b"],
            ..Node::default()
        };
        let node = if text.is_none() {
            Waiting::start(None, node).await
        } else {
            // The book is there, so only a pod that has started can be missing from it.
            let node = Node {
                started: Started::Yes,
                ..node
            };
            Waiting::start(text.as_deref(), node).await
        };
        node.serves().await;
        for number in 0..GPUS {
            assert_foreign(&node, number, "b");
        }
    }
}

#[tokio::test]
async fn a_pod_that_has_not_asked_yet_holds_nothing() {
    let node = Node {
        pods: vec!["b"],
        ..Node::default()
    };
    let node = Waiting::start(Some(&book(&[])), node).await;
    node.serves().await;
    assert!(node.arbiter().is_idle());
}

#[tokio::test]
async fn an_unreadable_book_is_waited_for_and_named() {
    let node = Waiting::start(Some("{\"Data\": 7}"), Node::default()).await;
    node.waits_for("kubelet_internal_checkpoint is not a checkpoint that this version knows")
        .await;
    write_book(&node.book, &book(&[]));
    node.serves().await;
    assert!(node.arbiter().is_idle());
}

#[tokio::test]
async fn claims_that_are_not_known_are_waited_for() {
    let node = Node {
        claims: None,
        ..Node::default()
    };
    let node = Waiting::start(None, node).await;
    node.waits_for("the claims allocated here are not known")
        .await;
    node.claims.send_replace(Some(Claims::default()));
    node.serves().await;
}

fn allocated(name: &str, device: &str) -> AllocatedClaim {
    AllocatedClaim {
        claim: ClaimRef {
            uid: ClaimUid::new(uid(name)).unwrap(),
            namespace: "train".to_owned(),
            name: name.to_owned(),
        },
        devices: vec![AllocatedDevice {
            request: "gpu".to_owned(),
            pool: NODE.to_owned(),
            device: DeviceName::new(device).unwrap(),
            access: Access::Owner,
            tolerations: Vec::new(),
        }],
        reserved_for: BTreeSet::new(),
        asked: Asked::ByClaim,
    }
}

/// As the kubelet writes it.
fn prepared(claims: &[&str]) -> String {
    let list: Vec<_> = claims
        .iter()
        .map(|name| {
            json!({
                "ClaimUID": uid(name),
                "ClaimName": name,
                "Namespace": "train",
                "PodUIDs": {},
                "DriverState": {"gpu.nvidia.com": {"Devices": null}},
            })
        })
        .collect();
    let data = json!({
        "kind": "DRACheckpoint",
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": list,
    })
    .to_string();
    json!({"Checksum": crc32fast::hash(data.as_bytes()), "Data": data}).to_string()
}

async fn adopted_claims(prepared: String, unprepared: &[&str]) -> Vec<Phase> {
    let node = Node {
        claims: Some(Claims::all(vec![
            allocated("one", "gpu-0"),
            allocated("two", "gpu-1"),
        ])),
        prepared: Some(prepared),
        unprepared: unprepared
            .iter()
            .map(|name| ClaimUid::new(uid(name)).unwrap())
            .collect(),
        ..Node::default()
    };
    let node = Waiting::start(None, node).await;
    node.serves().await;
    let holds = (0..GPUS).map(|number| node.arbiter().hold(number).unwrap());
    holds.map(|hold| hold.phase()).collect()
}

#[tokio::test]
async fn of_the_allocated_claims_those_count_as_prepared_that_the_kubelet_names() {
    let phases = adopted_claims(prepared(&["two"]), &[]).await;
    assert_eq!(phases, [Phase::Reserved, Phase::Prepared]);
}

#[tokio::test]
async fn a_claim_that_was_unprepared_meanwhile_is_not_prepared() {
    let phases = adopted_claims(prepared(&["one", "two"]), &["one"]).await;
    assert_eq!(phases, [Phase::Reserved, Phase::Prepared]);
}
