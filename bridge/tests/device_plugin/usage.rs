//! Holds follow what the kubelet and the API server tell.

use std::path::Path;
use std::time::Duration;

use bridge_core::{Handout, Phase, PodPhase, PodSource, Pods, Process};
use gpu_bridge::arbiter::Handle;
use gpu_bridge::usage::{self, PodResources, PodsOut};
use serde_json::json;
use testkit::{ApiServer, Kubelet, Pod, eventually};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::{Arbiter, DEADLINE, Log, NODE, Plugin, RESOURCE, gpu};

/// The readers of `usage`, as the daemon runs them.
pub(crate) struct Usage {
    pub(crate) resources: PodResources,
    pub(crate) pods: watch::Receiver<Option<Pods>>,
    _tasks: JoinSet<()>,
}

impl Usage {
    pub(crate) fn start(kubelet_dir: &Path, api: &ApiServer, handle: &Handle) -> Self {
        let resources = PodResources::new(kubelet_dir, NODE.to_owned());
        let config = kube::Config::new(api.url().parse().unwrap());
        let client = kube::Client::try_from(config).unwrap();
        let (out, pods) = watch::channel(None);
        let (named_out, _) = watch::channel(None);
        let out = PodsOut {
            pods: out,
            claims: named_out,
        };
        let mut tasks = JoinSet::new();
        let (listing, for_listing) = (resources.clone(), handle.clone());
        let bound = pods.clone();
        tasks.spawn(async move {
            let stop = CancellationToken::new();
            drop(usage::run_listing(listing, bound, for_listing, stop).await);
        });
        let (dir, for_pods) = (kubelet_dir.to_owned(), handle.clone());
        tasks.spawn(async move {
            let stop = CancellationToken::new();
            let node = NODE.to_owned();
            drop(usage::run_pods(client, node, dir, for_pods, out, stop).await);
        });
        Self {
            resources,
            pods,
            _tasks: tasks,
        }
    }

    /// The plugin that asks these pod-resources.
    pub(crate) fn plugin(&self, folder: &Path, handle: &Handle, handout: Handout) -> Plugin {
        let resources = self.resources.clone();
        let ask = usage::ask_about(resources, handle.status(), self.pods.clone());
        Plugin::telling(folder, handle.clone(), ask, handout)
    }
}

/// The pod as the API server has it once it is bound.
pub(crate) fn bind(api: &ApiServer, name: &str, uid: &str) {
    api.put(
        "pods",
        json!({
            "metadata": {"namespace": "a", "name": name, "uid": uid},
            "spec": {
                "nodeName": NODE,
                "containers": [{"name": "c", "resources": {"limits": {RESOURCE: "1"}}}],
            },
            "status": {"phase": "Pending"},
        }),
    );
}

struct Scene {
    kubelet: Kubelet,
    api: ApiServer,
    arbiter: Arbiter,
    _usage: Usage,
    _plugin: Plugin,
    _dir: tempfile::TempDir,
}

impl Scene {
    async fn new(gpus: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(dir.path()).await.unwrap();
        let api = ApiServer::start().await.unwrap();
        let arbiter = Arbiter::start(gpus).await;
        let usage = Usage::start(dir.path(), &api, &arbiter.handle);
        let plugin = usage.plugin(
            &dir.path().join("device-plugins"),
            &arbiter.handle,
            Handout::default(),
        );
        kubelet
            .wait_for_healthy(RESOURCE, usize::try_from(gpus).unwrap(), DEADLINE)
            .await;
        Self {
            kubelet,
            api,
            arbiter,
            _usage: usage,
            _plugin: plugin,
            _dir: dir,
        }
    }

    /// Binds and runs a pod of one GPU, and waits until its hold is its own.
    async fn run(&self, name: &str, uid: &str) {
        bind(&self.api, name, uid);
        let pod = Pod::new("a", name, uid).app("c", RESOURCE, 1);
        self.kubelet.admit(pod).await.unwrap();
        self.kubelet.run(uid).await.unwrap();
        eventually("a bound hold", DEADLINE, || {
            let phases = self.arbiter.phases();
            phases.iter().any(|(_, phase)| *phase == Phase::Bound)
        })
        .await;
    }
}

#[tokio::test]
async fn a_hold_is_bound_to_its_pod_and_ends_with_it() {
    let scene = Scene::new(2).await;
    scene.run("p", "uid-1").await;
    scene.kubelet.terminate("uid-1").await.unwrap();
    scene.api.delete("pods", "a", "p");
    eventually("the end of the hold", DEADLINE, || {
        scene.arbiter.held() == 0
    })
    .await;
}

#[tokio::test]
async fn a_hold_ends_while_the_api_server_is_away() {
    let scene = Scene::new(2).await;
    scene.run("p", "uid-1").await;
    scene.api.go_away();
    scene.kubelet.terminate("uid-1").await.unwrap();
    eventually("the end of the hold", DEADLINE, || {
        scene.arbiter.held() == 0
    })
    .await;
}

#[tokio::test]
async fn a_force_deleted_pod_whose_process_lives_on_keeps_its_gpu_from_others() {
    let scene = Scene::new(2).await;
    scene.run("p", "uid-1").await;
    let (unit, _) = scene.arbiter.phases().remove(0);
    let held = [gpu(0), gpu(1)]
        .into_iter()
        .find(|gpu| gpu.uuid.as_str() == unit)
        .unwrap()
        .uuid;
    let process = Process { pid: 42, pod: None };
    let running = || scene.arbiter.running.lock().unwrap();
    running().insert(held.clone(), vec![process]);
    scene.kubelet.force_delete("uid-1");
    scene.api.delete("pods", "a", "p");
    eventually("a foreign hold", DEADLINE, || {
        scene.arbiter.phases() == [(unit.clone(), Phase::Foreign)]
    })
    .await;
    scene.kubelet.wait_for_healthy(RESOURCE, 1, DEADLINE).await;
    running().remove(&held);
    eventually("the end of the hold", DEADLINE, || {
        scene.arbiter.held() == 0
    })
    .await;
}

#[tokio::test]
async fn a_hold_outlasts_a_restart_of_the_kubelet() {
    let scene = Scene::new(2).await;
    scene.run("p", "uid-1").await;
    let before = scene.arbiter.phases();
    scene.kubelet.restart().await.unwrap();
    scene.kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    assert_eq!(scene.arbiter.phases(), before);
}

#[tokio::test]
async fn a_pod_that_is_bound_is_known_before_the_kubelet_admits_it() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let api = ApiServer::start().await.unwrap();
    let log = Log::start();
    let _usage = Usage::start(dir.path(), &api, &log.handle);
    eventually("an empty list", DEADLINE, || {
        log.pods()
            .flatten()
            .is_some_and(|pods| pods.pods.is_empty())
    })
    .await;
    bind(&api, "p", "uid-1");
    eventually("the pod", DEADLINE, || {
        log.pods().flatten().is_some_and(|pods| {
            pods.pods.len() == 1 && pods.pods[0].may_own == 1 && !pods.pods[0].started
        })
    })
    .await;
    assert!(kubelet.phase("uid-1").is_none());
}

#[tokio::test]
async fn without_any_source_the_pods_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let api = ApiServer::start().await.unwrap();
    bind(&api, "p", "uid-1");
    let log = Log::start();
    let _usage = Usage::start(dir.path(), &api, &log.handle);
    eventually("the API server's pods", DEADLINE, || {
        log.pods().flatten().is_some_and(|pods| {
            pods.source == PodSource::Api && pods.pods[0].phase == PodPhase::Live
        })
    })
    .await;
    api.go_away();
    eventually("that nothing is known", DEADLINE, || {
        log.pods() == Some(None)
    })
    .await;
    api.come_back();
    eventually("the API server's pods again", DEADLINE * 2, || {
        log.pods().is_some_and(|pods| pods.is_some())
    })
    .await;
}

#[tokio::test]
async fn a_kubelet_that_has_not_heard_from_its_sources_is_no_source() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    kubelet.hold_sources();
    let api = ApiServer::start().await.unwrap();
    api.go_away();
    let log = Log::start();
    let _usage = Usage::start(dir.path(), &api, &log.handle);
    eventually("a listing", DEADLINE, || log.listings() > 0).await;
    assert!(log.pods().flatten().is_none());
    kubelet.release_sources();
    eventually("the kubelet's pods", DEADLINE, || {
        log.pods()
            .flatten()
            .is_some_and(|pods| pods.source == PodSource::Kubelet)
    })
    .await;
}

#[tokio::test]
async fn without_a_kubelet_a_listing_fails_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let resources = PodResources::new(dir.path(), NODE.to_owned());
    let answer = tokio::time::timeout(Duration::from_secs(5), resources.list()).await;
    let text = answer.expect("an answer in time").unwrap_err().to_string();
    assert!(text.contains("pod-resources/kubelet.sock"), "{text}");
}
