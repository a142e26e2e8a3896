//! A List of pod-resources and an Allocate keep out of each other's way.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bridge_core::Listing;
use futures::future::BoxFuture;
use gpu_bridge::device_plugin::ListNow;
use gpu_bridge::usage;
use testkit::{ApiServer, Kubelet, Pod, eventually};
use tokio::sync::Notify;

use crate::support::{Arbiter, DEADLINE, Plugin, RESOURCE};
use crate::usage::{Usage, bind};

/// Longer than the time between two Lists while a pod that has ended holds a unit; shorter than the two seconds after
/// which a List does not wait any more.
const SOME_LISTS: Duration = Duration::from_millis(700);

/// Pods `p` and `q` have the two GPUs.
struct Scene {
    kubelet: Arc<Kubelet>,
    api: ApiServer,
    arbiter: Arbiter,
    usage: Usage,
    dir: tempfile::TempDir,
}

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Arc::new(Kubelet::start(dir.path()).await.unwrap());
        let api = ApiServer::start().await.unwrap();
        let arbiter = Arbiter::start(2).await;
        let usage = Usage::start(dir.path(), &api, &arbiter.handle);
        Self {
            kubelet,
            api,
            arbiter,
            usage,
            dir,
        }
    }

    fn plugins(&self) -> std::path::PathBuf {
        Path::join(self.dir.path(), "device-plugins")
    }

    async fn fill(&self) {
        self.kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
        for name in ["p", "q"] {
            bind(&self.api, name, name);
            self.kubelet.admit(pod(name)).await.unwrap();
            self.kubelet.run(name).await.unwrap();
        }
        eventually("two bound holds", DEADLINE, || {
            let phases = self.arbiter.phases();
            let bound = phases
                .iter()
                .filter(|(_, phase)| *phase == bridge_core::Phase::Bound);
            bound.count() == 2
        })
        .await;
    }

    async fn end(&self, name: &str) {
        self.kubelet.terminate(name).await.unwrap();
        self.api.delete("pods", "a", name);
    }

    fn ids(&self, name: &str) -> BTreeSet<String> {
        self.kubelet.devices(name, "c", RESOURCE)
    }
}

fn pod(name: &str) -> Pod {
    Pod::new("a", name, name).app("c", RESOURCE, 1)
}

/// Asks once `go` says so, and tells when it was asked.
fn held_back(ask: ListNow, asked: &Arc<Notify>, go: &Arc<Notify>) -> ListNow {
    let (asked, go) = (Arc::clone(asked), Arc::clone(go));
    Arc::new(move |ids| -> BoxFuture<'static, Result<Listing, String>> {
        let (asked, go, ask) = (Arc::clone(&asked), Arc::clone(&go), Arc::clone(&ask));
        Box::pin(async move {
            asked.notify_one();
            go.notified().await;
            ask(ids).await
        })
    })
}

#[tokio::test]
async fn an_id_in_flight_is_not_forgotten_since_no_list_comes_meanwhile() {
    let scene = Scene::new().await;
    let (asked, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let ask = usage::ask_about(
        scene.usage.resources.clone(),
        scene.arbiter.handle.status(),
        scene.usage.pods.clone(),
    );
    let ask = held_back(ask, &asked, &go);
    let _plugin = Plugin::start(&scene.plugins(), scene.arbiter.handle.clone(), ask);
    scene.fill().await;

    // The API server shows it alive, so its hold stays, and the next Allocate has to ask about it.
    scene.kubelet.terminate("q").await.unwrap();
    bind(&scene.api, "r", "r");
    let kubelet = Arc::clone(&scene.kubelet);
    let admission = tokio::spawn(async move { kubelet.admit(pod("r")).await });
    asked.notified().await;
    scene.end("p").await;
    scene.api.delete("pods", "a", "q");
    let forgotten = tokio::time::timeout(SOME_LISTS, async {
        while scene.kubelet.allocated(RESOURCE).len() == 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(forgotten.await.is_err(), "a List came within an Allocate");
    go.notify_one();
    admission.await.unwrap().unwrap();

    let of_r = scene.ids("r");
    assert!(scene.kubelet.allocated(RESOURCE).is_superset(&of_r));
    // Nobody has to be asked: the hold of `p` ends by the Lists that come now.
    eventually("the end of p's hold", DEADLINE, || {
        scene.arbiter.held() == 1
    })
    .await;
    bind(&scene.api, "s", "s");
    scene.kubelet.admit(pod("s")).await.unwrap();
    assert!(of_r.is_disjoint(&scene.ids("s")), "one id for two pods");
}

#[tokio::test]
async fn a_list_within_an_allocate_makes_the_kubelet_forget_the_id() {
    let scene = Scene::new().await;
    let resources = scene.usage.resources.clone();
    let list: ListNow = Arc::new(move |_| {
        let resources = resources.clone();
        Box::pin(async move { resources.list().await.map_err(|error| error.to_string()) })
    });
    let (asked, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let ask = held_back(list, &asked, &go);
    let _plugin = Plugin::start(&scene.plugins(), scene.arbiter.handle.clone(), ask);
    scene.fill().await;

    scene.kubelet.terminate("q").await.unwrap();
    bind(&scene.api, "r", "r");
    let kubelet = Arc::clone(&scene.kubelet);
    let admission = tokio::spawn(async move { kubelet.admit(pod("r")).await });
    asked.notified().await;
    scene.end("p").await;
    scene.api.delete("pods", "a", "q");
    go.notify_one();
    admission.await.unwrap().unwrap();
    let (of_r, allocated) = (scene.ids("r"), scene.kubelet.allocated(RESOURCE));
    assert!(allocated.is_disjoint(&of_r), "{of_r:?} in {allocated:?}");
}

#[tokio::test]
async fn pods_are_asked_about_one_by_one_and_those_that_are_gone_are_not_listed() {
    let scene = Scene::new().await;
    let resources = scene.usage.resources.clone();
    let ask = usage::ask_about(
        resources.clone(),
        scene.arbiter.handle.status(),
        scene.usage.pods.clone(),
    );
    let _plugin = Plugin::start(
        &scene.plugins(),
        scene.arbiter.handle.clone(),
        Arc::clone(&ask),
    );
    scene.fill().await;
    let status = scene.arbiter.status();
    let holds = status.units.iter().flat_map(|unit| &unit.holds);
    let ids: Vec<_> = holds.filter_map(|hold| hold.device_id().cloned()).collect();
    scene.kubelet.force_delete("q");
    let answer = ask(ids).await.unwrap();
    let names: Vec<&str> = answer.pods.iter().map(|it| it.pod.name.as_str()).collect();
    assert_eq!(names, ["p"]);
    assert_eq!(answer.pods[0].devices.len(), 1);
}
