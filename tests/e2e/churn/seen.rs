//! Pods and events as the API shows them, each with the time at which it was told.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Resource;
use kube::api::{Api, ListParams};
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::life::{Life, Lives, Trouble, now};
use crate::world::World;

/// What waits to be looked at: more than a run has pods.
const BOUND: usize = 10_000;

/// Something that the API has told.
pub enum Told {
    Pod(Box<Pod>),
    Gone(String),
    /// Every pod that there is, after a watch began anew.
    AllOf(BTreeSet<String>),
    Event(Box<Event>),
}

/// Watches that run until they are dropped.
pub struct Watches {
    told: mpsc::Receiver<(Duration, Told)>,
    _tasks: JoinSet<()>,
}

impl Watches {
    pub fn start(world: &World) -> Self {
        let (say, told) = mpsc::channel(BOUND);
        let mut tasks = JoinSet::new();
        tasks.spawn(follow(
            world.pods(),
            watcher::Config::default(),
            say.clone(),
            |pod| Told::Pod(Box::new(pod)),
            |pod| Told::Gone(name(&pod)),
            Some(Told::AllOf),
        ));
        let refusals = watcher::Config::default().fields("reason=FailedPrepareDynamicResources");
        tasks.spawn(follow(
            world.pod_events(),
            refusals,
            say,
            |event| Told::Event(Box::new(event)),
            |event| Told::Event(Box::new(event)),
            None,
        ));
        Self {
            told,
            _tasks: tasks,
        }
    }

    /// Waits for the next word, and takes all that have come by then.
    pub async fn take(&mut self, lives: &mut Lives, at_most: Duration) {
        let Ok(first) = tokio::time::timeout(at_most, self.told.recv()).await else {
            return;
        };
        let (at, told) = first.expect("the watches run until the end");
        note(lives, at, told);
        while let Ok((at, told)) = self.told.try_recv() {
            note(lives, at, told);
        }
    }
}

impl World {
    /// Waits until both schedulers see every GPU: whoever serves the node has started, and has come to rest.
    pub async fn wait_offered_to_both(&self, gpus: u32) {
        const LIMIT: Duration = Duration::from_secs(60);
        let nodes: Api<Node> = Api::all(self.client.clone());
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        let offered = async |_: &Self| {
            let node = nodes.get("node-0").await.expect("the node exists");
            let allocatable = node.status.and_then(|status| status.allocatable);
            let counted = allocatable.and_then(|all| all.get("nvidia.com/gpu").cloned());
            let listed = slices.list(&ListParams::default()).await;
            let untainted = listed
                .expect("slices can be listed")
                .items
                .into_iter()
                .flat_map(|slice| slice.spec.devices.unwrap_or_default())
                .filter(|device| device.taints.as_ref().is_none_or(Vec::is_empty));
            let all = usize::try_from(gpus).expect("a small number");
            counted.is_some_and(|count| count.0 == gpus.to_string()) && untainted.count() == all
        };
        self.wait_for("every GPU is offered to both", LIMIT, offered)
            .await;
    }
}

fn name<K: Resource>(object: &K) -> String {
    object.meta().name.clone().unwrap_or_default()
}

/// Tells everything of one kind.
async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    say: mpsc::Sender<(Duration, Told)>,
    applied: impl Fn(K) -> Told,
    deleted: impl Fn(K) -> Told,
    all: Option<fn(BTreeSet<String>) -> Told>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = std::pin::pin!(watcher(api, config));
    let mut listed = BTreeSet::new();
    while let Some(event) = events.next().await {
        let told = match event {
            Ok(watcher::Event::Apply(object)) => Some(applied(object)),
            Ok(watcher::Event::Delete(object)) => Some(deleted(object)),
            Ok(watcher::Event::Init) => {
                listed.clear();
                None
            }
            Ok(watcher::Event::InitApply(object)) => {
                listed.insert(name(&object));
                Some(applied(object))
            }
            Ok(watcher::Event::InitDone) => all.map(|all| all(std::mem::take(&mut listed))),
            Err(error) => {
                eprintln!("a watch of the driver is interrupted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                None
            }
        };
        if let Some(told) = told
            && say.send((now(), told)).await.is_err()
        {
            return;
        }
    }
}

fn note(lives: &mut Lives, at: Duration, told: Told) {
    match told {
        Told::Pod(pod) => {
            if let Some(life) = lives.get_mut(&name(&*pod)) {
                note_pod(life, at, &pod);
            }
        }
        Told::Gone(pod) => {
            if let Some(life) = lives.get_mut(&pod) {
                note_gone(life, at);
            }
        }
        Told::AllOf(there) => {
            // A pod that is being created while the list is made is not in it, and not known by its UID yet.
            let lost = lives
                .iter_mut()
                .filter(|(pod, life)| life.uid.is_some() && !there.contains(*pod));
            for (_, life) in lost {
                note_gone(life, at);
            }
        }
        Told::Event(event) => {
            let pod = event.involved_object.name.unwrap_or_default();
            if let Some(life) = lives.get_mut(&pod) {
                life.refusals.push((at, event.message.unwrap_or_default()));
            }
        }
    }
}

fn note_gone(life: &mut Life, at: Duration) {
    life.gone.get_or_insert(at);
    if life.deleted.is_none() && life.failed.is_none() && life.evicted.is_none() {
        life.evicted = Some(Trouble {
            at,
            why: "deleted by somebody".to_owned(),
        });
    }
}

fn note_pod(life: &mut Life, at: Duration, pod: &Pod) {
    life.uid.clone_from(&pod.metadata.uid);
    let status = pod.status.clone().unwrap_or_default();
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    if node.is_some() {
        life.bound.get_or_insert(at);
    }
    let claims = status.resource_claim_statuses.unwrap_or_default();
    if let Some(claim) = claims.into_iter().find_map(|of| of.resource_claim_name) {
        life.claim = Some(claim);
    }
    if life.deleted.is_some() {
        return;
    }
    let conditions = status.conditions.unwrap_or_default();
    let disrupted = conditions
        .into_iter()
        .find(|condition| condition.type_ == "DisruptionTarget" && condition.status == "True")
        .map(|condition| {
            format!(
                "{}: {}",
                condition.reason.unwrap_or_default(),
                condition.message.unwrap_or_default()
            )
        });
    if disrupted.is_some() || pod.metadata.deletion_timestamp.is_some() {
        let why = disrupted.unwrap_or_else(|| "deleted by somebody".to_owned());
        life.evicted.get_or_insert(Trouble { at, why });
        return;
    }
    match status.phase.as_deref() {
        Some("Running") => {
            life.running.get_or_insert(at);
        }
        Some("Failed") => {
            let why = format!(
                "{}: {}",
                status.reason.unwrap_or_default(),
                status.message.unwrap_or_default()
            );
            life.failed.get_or_insert(Trouble { at, why });
        }
        _ => {}
    }
}
