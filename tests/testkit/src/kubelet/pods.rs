//! The pods bound to this node, as the API server has them: a restart of the kubelet does not lose them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use legacy_proto::pods::{EventType, WatchPodsEvent};
use prost::Message as _;
use tokio::sync::broadcast;

use super::pod::{Entry, Pod};
use crate::lock;

/// Events that a slow watcher may be behind; upstream gives each watcher 100 and then drops it.
const WATCH_BACKLOG: usize = 100;

/// Whether the kubelet has heard from all its sources of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sources {
    Waiting,
    Ready,
}

/// The table of pods.
#[derive(Debug)]
pub(crate) struct Pods {
    table: Mutex<BTreeMap<String, Entry>>,
    events: broadcast::Sender<WatchPodsEvent>,
    sources: Mutex<Sources>,
}

impl Pods {
    pub(crate) fn new() -> Self {
        Self {
            table: Mutex::default(),
            events: broadcast::Sender::new(WATCH_BACKLOG),
            sources: Mutex::new(Sources::Waiting),
        }
    }

    pub(crate) fn hold_sources(&self) {
        *lock(&self.sources) = Sources::Waiting;
    }

    pub(crate) fn release_sources(&self) {
        *lock(&self.sources) = Sources::Ready;
    }

    pub(crate) fn sources_are_ready(&self) -> bool {
        *lock(&self.sources) == Sources::Ready
    }

    pub(crate) fn add(&self, pod: Pod) {
        let uid = pod.uid.clone();
        let entry = Entry::new(pod);
        let event = event(EventType::Added, &entry.to_proto());
        let before = lock(&self.table).insert(uid, entry);
        assert!(before.is_none(), "two pods with one uid: {before:?}");
        self.send(event);
    }

    /// Changes a pod, and tells the watchers.
    pub(crate) fn change(&self, uid: &str, change: impl FnOnce(&mut Entry)) {
        let mut table = lock(&self.table);
        let entry = table.get_mut(uid).unwrap_or_else(|| unknown(uid));
        change(entry);
        let event = event(EventType::Modified, &entry.to_proto());
        drop(table);
        self.send(event);
    }

    /// Writes down what a plugin is being asked for. It is nothing that anybody can watch.
    pub(crate) fn note_asked(&self, uid: &str, ids: &BTreeSet<String>) {
        if let Some(entry) = lock(&self.table).get_mut(uid) {
            entry.asked.extend(ids.iter().cloned());
        }
    }

    /// Forgets a pod, and tells the watchers.
    pub(crate) fn remove(&self, uid: &str) {
        let entry = lock(&self.table).remove(uid);
        let entry = entry.unwrap_or_else(|| unknown(uid));
        self.send(event(EventType::Deleted, &entry.to_deleted_proto()));
    }

    pub(crate) fn find(&self, uid: &str) -> Option<Entry> {
        lock(&self.table).get(uid).cloned()
    }

    /// As [`Pods::find`], for a pod that has to be there.
    pub(crate) fn get(&self, uid: &str) -> Entry {
        self.find(uid).unwrap_or_else(|| unknown(uid))
    }

    pub(crate) fn all(&self) -> Vec<Entry> {
        lock(&self.table).values().cloned().collect()
    }

    /// The pods that still own what they have (`GetActivePods`).
    pub(crate) fn active(&self) -> Vec<Entry> {
        let mut all = self.all();
        all.retain(Entry::is_active);
        all
    }

    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        self.active().into_iter().map(|it| it.pod.uid).collect()
    }

    /// All pods as ADDED events, the end of the list, and what comes after it.
    pub(crate) fn watch(&self) -> (Vec<WatchPodsEvent>, broadcast::Receiver<WatchPodsEvent>) {
        let table = lock(&self.table);
        let after = self.events.subscribe();
        let mut events: Vec<WatchPodsEvent> = table
            .values()
            .map(|entry| event(EventType::Added, &entry.to_proto()))
            .collect();
        events.push(WatchPodsEvent {
            r#type: EventType::InitialSyncComplete.into(),
            pod: Vec::new(),
        });
        (events, after)
    }

    fn send(&self, event: WatchPodsEvent) {
        // No watcher is no error.
        let _ = self.events.send(event);
    }
}

fn event(kind: EventType, pod: &legacy_proto::pod_subset::Pod) -> WatchPodsEvent {
    WatchPodsEvent {
        r#type: kind.into(),
        pod: pod.encode_to_vec(),
    }
}

fn unknown(uid: &str) -> ! {
    panic!("no pod with uid {uid} on this node: admit it first")
}
