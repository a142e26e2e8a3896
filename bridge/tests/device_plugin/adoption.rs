//! A lost ledger is not an empty one: what runs on the node is found out first.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bridge_core::{
    Access, AllocatedClaim, AllocatedDevice, Asked, ClaimRef, ClaimUid, Claims, DeviceName,
    Handout, Health, IdStrategy, ListStrategy, Phase, Standing,
};
use gpu_bridge::usage::{AdoptionInputs, run_adoption};
use serde_json::json;
use testkit::{ApiServer, Kubelet, Pod, eventually};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{Arbiter, DEADLINE, NODE, Plugin, RESOURCE, gpu};
use crate::usage::{Usage, bind};

/// A node with a kubelet and running pods, whose first daemon is gone with its ledger.
struct Wreck {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
    api: ApiServer,
}

impl Wreck {
    /// Runs pods of one GPU each, by their UIDs, and then loses the daemon and its ledger.
    async fn new(gpus: u32, pods: &[&str]) -> Self {
        Self::told(gpus, pods, Handout::default()).await
    }

    /// The same, with containers that are told of their GPUs in another way.
    async fn told(gpus: u32, pods: &[&str], handout: Handout) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(dir.path()).await.unwrap();
        let api = ApiServer::start().await.unwrap();
        let before = Arbiter::start(gpus).await;
        let usage = Usage::start(dir.path(), &api, &before.handle);
        let mut plugin = usage.plugin(&dir.path().join("device-plugins"), &before.handle, handout);
        kubelet
            .wait_for_healthy(RESOURCE, usize::try_from(gpus).unwrap(), DEADLINE)
            .await;
        for uid in pods {
            let name = format!("pod-{uid}");
            bind(&api, &name, uid);
            let pod = Pod::new("a", &name, uid).app("c", RESOURCE, 1);
            kubelet.admit(pod).await.unwrap();
            kubelet.run(uid).await.unwrap();
            let running = json!({"status": {"phase": "Running", "containerStatuses": [{
                "name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}},
            }]}});
            api.patch("pods", "a", &name, &running);
        }
        plugin.stop.cancel();
        (&mut plugin.task).await.unwrap().unwrap();
        kubelet.wait_for_healthy(RESOURCE, 0, DEADLINE).await;
        Self { dir, kubelet, api }
    }

    fn device_checkpoint(&self) -> PathBuf {
        let folder = self.dir.path().join("device-plugins");
        folder.join("kubelet_internal_checkpoint")
    }

    /// The unit that a pod really has, by what it was answered.
    fn unit_of(&self, uid: &str) -> String {
        let answer = self.kubelet.answer(uid, "c", RESOURCE).unwrap();
        let (_, unit) = answer.cdi_devices[0].name.split_once('=').unwrap();
        unit.to_owned()
    }
}

/// What the daemon gives to adoption, with GPUs whose minors are their numbers.
fn inputs(
    dir: &Path,
    usage: &Usage,
    gpus: u32,
    claims: watch::Receiver<Option<Claims>>,
    waiting: watch::Sender<String>,
) -> AdoptionInputs {
    AdoptionInputs {
        resources: usage.resources.clone(),
        kubelet_dir: dir.to_owned(),
        device_plugin_dir: dir.join("device-plugins"),
        pods: usage.pods.clone(),
        claims,
        cdi_claims: Some(BTreeSet::new()),
        cdi_minors: BTreeMap::new(),
        unprepared: Arc::new(BTreeSet::new),
        minors: Arc::new(move || {
            Some((0..gpus).map(|number| (gpu(number).uuid, number)).collect())
        }),
        waiting,
    }
}

/// A daemon that starts without a ledger.
struct Successor {
    arbiter: Arbiter,
    claims: watch::Sender<Option<Claims>>,
    waiting: watch::Receiver<String>,
    adoption: JoinHandle<()>,
    _usage: Usage,
    _plugin: Plugin,
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.adoption.abort();
    }
}

impl Successor {
    async fn start(wreck: &Wreck, gpus: u32) -> Self {
        Self::with(wreck, gpus, Some(BTreeSet::new()), BTreeSet::new()).await
    }

    async fn with(
        wreck: &Wreck,
        gpus: u32,
        cdi_claims: Option<BTreeSet<ClaimUid>>,
        unprepared: BTreeSet<ClaimUid>,
    ) -> Self {
        let dir: &Path = wreck.dir.path();
        let arbiter = Arbiter::waiting(gpus).await;
        let usage = Usage::start(dir, &wreck.api, &arbiter.handle);
        let plugin = usage.plugin(
            &dir.join("device-plugins"),
            &arbiter.handle,
            Handout::default(),
        );
        let (claims, seen) = watch::channel(None);
        let (told, waiting) = watch::channel(String::new());
        let inputs = AdoptionInputs {
            cdi_claims,
            unprepared: Arc::new(move || unprepared.clone()),
            ..inputs(dir, &usage, gpus, seen, told)
        };
        let stop = CancellationToken::new();
        let run = run_adoption(inputs, arbiter.handle.clone(), stop);
        let adoption = tokio::spawn(async move { drop(run.await) });
        Self {
            arbiter,
            claims,
            waiting,
            adoption,
            _usage: usage,
            _plugin: plugin,
        }
    }

    async fn waits_for(&self, what: &str) {
        eventually(what, DEADLINE, || self.waiting.borrow().contains(what)).await;
        assert_eq!(self.arbiter.status().standing, Standing::WaitingForAdoption);
    }

    async fn serves(&self) {
        eventually("a pool that serves", DEADLINE, || {
            self.arbiter.status().standing == Standing::Serving
        })
        .await;
        eventually("nothing to wait for", DEADLINE, || {
            self.waiting.borrow().is_empty()
        })
        .await;
    }

    fn healthy(&self) -> Vec<String> {
        let offers = Arc::clone(&self.arbiter.handle.offers().borrow());
        let healthy = offers
            .counted
            .iter()
            .filter(|it| it.health == Health::Healthy);
        healthy.map(|it| it.id.to_string()).collect()
    }
}

#[tokio::test]
async fn running_pods_are_adopted_by_what_they_were_answered() {
    let wreck = Wreck::new(4, &["uid-1", "uid-2"]).await;
    let successor = Successor::start(&wreck, 4).await;
    successor.waits_for("the claims allocated here").await;
    // What the kubelet has given out stays healthy meanwhile, and nothing else is offered.
    let mut expected = vec![wreck.unit_of("uid-1"), wreck.unit_of("uid-2")];
    expected.sort();
    eventually("the ids of the pods alone", DEADLINE, || {
        successor.healthy() == expected
    })
    .await;

    successor.claims.send_replace(Some(Claims::default()));
    successor.serves().await;
    let bound: Vec<_> = expected
        .iter()
        .map(|unit| (unit.clone(), Phase::Bound))
        .collect();
    assert_eq!(successor.arbiter.phases(), bound);
}

#[tokio::test]
async fn running_pods_are_adopted_whichever_strategy_told_them_of_their_gpus() {
    let ways = ListStrategy::ALL.into_iter().flat_map(|strategy| {
        [IdStrategy::Uuid, IdStrategy::Index].map(|ids| Handout {
            strategies: [strategy].into(),
            ids,
            ..Handout::default()
        })
    });
    for handout in ways {
        let wreck = Wreck::told(3, &["uid-1"], handout.clone()).await;
        let successor = Successor::start(&wreck, 3).await;
        successor.claims.send_replace(Some(Claims::default()));
        successor.serves().await;
        // Counted pods get the last of the list.
        let bound = [("GPU-2".to_owned(), Phase::Bound)];
        assert_eq!(successor.arbiter.phases(), bound, "{handout:?}");
    }
}

#[tokio::test]
async fn a_pod_of_which_nothing_says_what_it_has_closes_the_node() {
    let wreck = Wreck::new(2, &["uid-1"]).await;
    wreck.kubelet.stop().await;
    wreck.kubelet.forget_checkpoint();
    wreck.kubelet.resume().await.unwrap();
    let successor = Successor::start(&wreck, 2).await;
    successor.claims.send_replace(Some(Claims::default()));
    successor.serves().await;
    let phases = successor.arbiter.phases();
    assert!(
        phases.len() == 2 && phases.iter().all(|(_, phase)| *phase == Phase::Foreign),
        "{phases:?}"
    );
    // Once the pod is gone everything is free again.
    wreck.kubelet.terminate("uid-1").await.unwrap();
    wreck.api.delete("pods", "a", "pod-uid-1");
    eventually("free GPUs", DEADLINE, || successor.arbiter.held() == 0).await;
}

#[tokio::test]
async fn an_unreadable_checkpoint_is_waited_for() {
    let wreck = Wreck::new(2, &["uid-1"]).await;
    let good = std::fs::read(wreck.device_checkpoint()).unwrap();
    std::fs::write(wreck.device_checkpoint(), "{").unwrap();
    // No plugin: its list would make the kubelet write the file anew.
    let arbiter = Arbiter::waiting(2).await;
    let usage = Usage::start(wreck.dir.path(), &wreck.api, &arbiter.handle);
    let (told, waiting) = watch::channel(String::new());
    let (_claims, seen) = watch::channel(Some(Claims::default()));
    let stop = CancellationToken::new();
    let adoption = tokio::spawn(run_adoption(
        inputs(wreck.dir.path(), &usage, 2, seen, told),
        arbiter.handle.clone(),
        stop.clone(),
    ));
    eventually("the checkpoint named", DEADLINE, || {
        waiting.borrow().contains("kubelet_internal_checkpoint")
    })
    .await;
    assert_eq!(arbiter.status().standing, Standing::WaitingForAdoption);
    std::fs::write(wreck.device_checkpoint(), good).unwrap();
    eventually("a pool that serves", DEADLINE, || {
        arbiter.status().standing == Standing::Serving
    })
    .await;
    assert_eq!(arbiter.phases(), [(wreck.unit_of("uid-1"), Phase::Bound)]);
    stop.cancel();
    adoption.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_kubelet_that_has_not_heard_from_its_sources_hides_no_running_pod() {
    let wreck = Wreck::new(2, &["uid-1"]).await;
    wreck.kubelet.hold_sources();
    let successor = Successor::start(&wreck, 2).await;
    successor.claims.send_replace(Some(Claims::default()));
    successor.serves().await;
    assert_eq!(
        successor.arbiter.phases(),
        [(wreck.unit_of("uid-1"), Phase::Bound)]
    );
}

#[tokio::test]
async fn without_any_list_of_pods_nothing_is_adopted() {
    let wreck = Wreck::new(2, &["uid-1"]).await;
    wreck.kubelet.hold_sources();
    wreck.api.go_away();
    let successor = Successor::start(&wreck, 2).await;
    successor.claims.send_replace(Some(Claims::default()));
    successor.waits_for("the pods bound here").await;
    wreck.kubelet.release_sources();
    successor.serves().await;
    assert_eq!(
        successor.arbiter.phases(),
        [(wreck.unit_of("uid-1"), Phase::Bound)]
    );
}

fn claim(uid: &str) -> AllocatedClaim {
    AllocatedClaim {
        claim: ClaimRef {
            uid: ClaimUid::new(uid).unwrap(),
            namespace: "a".to_owned(),
            name: format!("claim-{uid}"),
        },
        devices: vec![AllocatedDevice {
            request: "gpu".to_owned(),
            pool: NODE.to_owned(),
            device: DeviceName::new("gpu-0").unwrap(),
            access: Access::Owner,
            tolerations: Vec::new(),
        }],
        reserved_for: BTreeSet::new(),
        asked: Asked::ByClaim,
    }
}

/// The phase in which a claim that is allocated to GPU-0 is taken over.
async fn adopted_as(
    claim_checkpoint: &str,
    cdi_claims: Option<BTreeSet<ClaimUid>>,
    unprepared: BTreeSet<ClaimUid>,
) -> Phase {
    let wreck = Wreck::new(1, &[]).await;
    let path = wreck.dir.path().join(dra_proto::KUBELET_STATE_FILE);
    match claim_checkpoint {
        "" => drop(std::fs::remove_file(&path)),
        text => std::fs::write(&path, text).unwrap(),
    }
    let successor = Successor::with(&wreck, 1, cdi_claims, unprepared).await;
    let claims = Claims::all(vec![claim("claim-1")]);
    successor.claims.send_replace(Some(claims));
    successor.serves().await;
    let phases = successor.arbiter.phases();
    assert_eq!(phases.len(), 1, "{phases:?}");
    phases[0].1
}

/// A claim checkpoint of the kubelet without any claim: its checksum is the CRC-32 of the text in it.
const NO_CLAIMS: &str = r#"{"Data":"{\"ClaimInfoStateList\":null}","Checksum":237854392}"#;

#[tokio::test]
async fn a_claim_counts_as_prepared_unless_everything_was_read_and_nothing_names_it() {
    let uid = ClaimUid::new("claim-1").unwrap();
    let none = || Some(BTreeSet::new());
    let named = || Some(BTreeSet::from([uid.clone()]));
    let nothing = BTreeSet::new;
    assert_eq!(
        adopted_as(NO_CLAIMS, none(), nothing()).await,
        Phase::Reserved
    );
    assert_eq!(
        adopted_as(NO_CLAIMS, named(), nothing()).await,
        Phase::Prepared
    );
    assert_eq!(
        adopted_as(NO_CLAIMS, None, nothing()).await,
        Phase::Prepared
    );
    assert_eq!(adopted_as("", none(), nothing()).await, Phase::Prepared);
    assert_eq!(adopted_as("{", none(), nothing()).await, Phase::Prepared);
    let unprepared = BTreeSet::from([uid.clone()]);
    assert_eq!(
        adopted_as(NO_CLAIMS, named(), unprepared).await,
        Phase::Reserved
    );
}
