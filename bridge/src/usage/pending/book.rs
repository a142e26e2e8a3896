//! What is known of the pods that wait, of their claims and of the node, and what follows. It asks nobody.

use std::collections::BTreeMap;
use std::time::Duration;

use bridge_core::{ClaimName, Claimed, Demand, NodeShape, PodUid, WaitingPod};
use tokio::time::Instant;
use tracing::debug;

use super::DemandState;
use super::claims::{ClaimAsks, ClaimSpec, Class, Whose, plus};
use super::shape::{Pending, Seen};
use crate::follow::{Event, Trouble};

/// The most pods that the pool is told of, the oldest first: a node can serve only so many at a time, and each of
/// them costs a look at every decision. As many may wait for their claims to be read.
const PODS_TOLD: usize = 64;
/// When a claim that could not be read, or is not there, is read again.
const READ_AGAIN: Duration = Duration::from_secs(1);
/// After a 403 the right is looked for at this pace: somebody has to change a role first.
const RIGHT_AGAIN: Duration = Duration::from_secs(15);

/// What came of reading a claim.
#[derive(Debug)]
pub(super) enum Answer {
    Read(ClaimSpec),
    Gone,
    Forbidden(String),
    Failed(String),
}

/// A claim that a pod names which may come into question.
#[derive(Debug)]
struct Entry {
    /// `None`: nothing is known of it yet.
    spec: Option<ClaimSpec>,
    /// Why it may not be read.
    forbidden: Option<String>,
    /// When it is to be read; `None`: it need not be.
    due: Option<Instant>,
    under_way: bool,
}

/// Everything that was seen.
#[derive(Debug)]
pub(super) struct Book {
    node_name: String,
    node: Option<NodeShape>,
    classes: Option<BTreeMap<String, Whose>>,
    pods: Option<BTreeMap<PodUid, Pending>>,
    claims: BTreeMap<ClaimName, Entry>,
}

impl Book {
    pub(super) fn new(node_name: String) -> Self {
        Self {
            node_name,
            node: None,
            classes: None,
            pods: None,
            claims: BTreeMap::new(),
        }
    }

    pub(super) fn take_node(&mut self, event: Event<NodeShape>) {
        match event {
            Event::Listed(all) => self.node = all.into_iter().next(),
            Event::Applied(node) => self.node = Some(node),
            Event::Deleted(_) | Event::Unknown => self.node = None,
            Event::Running => {}
        }
    }

    pub(super) fn take_class(&mut self, event: Event<Class>) {
        match event {
            Event::Listed(all) => {
                let all = all.into_iter().map(|class| (class.name, class.whose));
                self.classes = Some(all.collect());
            }
            Event::Applied(class) => {
                let classes = self.classes.get_or_insert_default();
                classes.insert(class.name, class.whose);
            }
            Event::Deleted(class) => {
                self.classes.get_or_insert_default().remove(&class.name);
            }
            Event::Running => {}
            Event::Unknown => self.classes = None,
        }
    }

    pub(super) fn take_pod(&mut self, event: Event<Seen>, now: Instant) {
        match event {
            Event::Listed(all) => {
                let waiting = all.into_iter().filter_map(|seen| seen.pending);
                self.pods = Some(waiting.map(|pod| (pod.uid.clone(), pod)).collect());
            }
            Event::Applied(seen) => {
                let pods = self.pods.get_or_insert_default();
                match seen.pending {
                    Some(pod) => {
                        // Whatever has happened to it may have happened to its claims.
                        for name in pod.claims.iter().flatten() {
                            if let Some(entry) = self.claims.get_mut(name) {
                                entry.due = Some(now);
                            }
                        }
                        pods.insert(pod.uid.clone(), pod);
                    }
                    None => pods.retain(|uid, _| uid.as_str() != seen.uid),
                }
            }
            Event::Deleted(seen) => {
                let pods = self.pods.get_or_insert_default();
                pods.retain(|uid, _| uid.as_str() != seen.uid);
            }
            Event::Running => {}
            Event::Unknown => self.pods = None,
        }
        let named = |name: &ClaimName| {
            let mut pods = self.pods.iter().flat_map(BTreeMap::values);
            pods.any(|pod| pod.claims.as_ref().is_some_and(|it| it.contains(name)))
        };
        self.claims.retain(|name, _| named(name));
    }

    pub(super) fn take_read(&mut self, name: &ClaimName, answer: Answer, now: Instant) {
        let Some(entry) = self.claims.get_mut(name) else {
            return;
        };
        entry.under_way = false;
        entry.forbidden = None;
        match answer {
            Answer::Read(spec) => {
                entry.spec = Some(spec);
                entry.due = None;
            }
            // The controller makes it anew, or the pod goes too.
            Answer::Gone => {
                entry.spec = None;
                entry.due = Some(now + READ_AGAIN);
            }
            Answer::Failed(error) => {
                debug!(
                    namespace = name.namespace,
                    claim = name.name,
                    error,
                    "a claim of a pod that waits could not be read"
                );
                entry.due = Some(now + READ_AGAIN);
            }
            Answer::Forbidden(why) => {
                entry.forbidden = Some(why);
                entry.due = Some(now + RIGHT_AGAIN);
            }
        }
    }

    /// Whether all is known that decisions need.
    pub(super) fn state(&self, troubles: [Trouble; 3]) -> DemandState {
        let forbidden = troubles.iter().find_map(|trouble| match trouble {
            Trouble::Forbidden(why) => Some(why),
            Trouble::None | Trouble::Other(_) => None,
        });
        let mut claims = self.claims.values();
        let unread = || claims.find_map(|entry| entry.forbidden.as_ref());
        if let Some(why) = forbidden.or_else(unread) {
            return DemandState::NoDemandRight { why: why.clone() };
        }
        if self.node.is_some() && self.classes.is_some() && self.pods.is_some() {
            return DemandState::Known;
        }
        let why = troubles.into_iter().find_map(|trouble| match trouble {
            Trouble::Other(why) => Some(why),
            Trouble::None | Trouble::Forbidden(_) => None,
        });
        why.map_or(DemandState::Starting, |why| DemandState::Unseen { why })
    }

    /// The pods that wait and that this node could run, as far as their claims were read; claims that were not are
    /// due from now on.
    pub(super) fn demand(&mut self, now: Instant) -> Demand {
        let mut demand = Demand::default();
        let (Some(node), Some(classes)) = (&self.node, &self.classes) else {
            return demand;
        };
        let pods = self.pods.iter().flat_map(BTreeMap::values);
        let mut fitting: Vec<&Pending> = pods.filter(|pod| pod.shape.could_run_on(node)).collect();
        fitting.sort_by_key(|pod| (pod.created, pod.uid.clone()));
        let mut unread = 0;
        for pod in fitting {
            if demand.pods.len() >= PODS_TOLD || unread >= PODS_TOLD {
                break;
            }
            match asks(pod, &mut self.claims, classes, &self.node_name, now) {
                Asks::Unread => unread += 1,
                Asks::Nothing => {}
                Asks::Claimed(claimed) => demand.pods.push(WaitingPod {
                    uid: pod.uid.clone(),
                    created: pod.created,
                    counted: pod.counted,
                    claimed,
                }),
            }
        }
        demand
    }

    /// When a claim is to be read.
    pub(super) fn next_read(&self) -> Option<Instant> {
        let idle = self.claims.values().filter(|entry| !entry.under_way);
        idle.filter_map(|entry| entry.due).min()
    }

    /// The claim that is due first; it counts as being read from now on.
    pub(super) fn begin_read(&mut self, now: Instant) -> Option<ClaimName> {
        let idle = self.claims.iter_mut().filter(|(_, entry)| !entry.under_way);
        let due = idle.filter(|(_, entry)| entry.due.is_some_and(|due| due <= now));
        let (name, entry) = due.min_by_key(|(_, entry)| entry.due)?;
        entry.under_way = true;
        entry.due = None;
        Some(name.clone())
    }
}

/// What a pod asks of this node.
enum Asks {
    /// Its claims have to be read, or to be made, first.
    Unread,
    /// Nothing that this node could give.
    Nothing,
    Claimed(Claimed),
}

fn asks(
    pod: &Pending,
    known: &mut BTreeMap<ClaimName, Entry>,
    classes: &BTreeMap<String, Whose>,
    node: &str,
    now: Instant,
) -> Asks {
    // One that is not made yet comes with a change of the pod.
    let Some(names) = &pod.claims else {
        return Asks::Nothing;
    };
    let mut claimed = Claimed::Units(0);
    let mut unread = false;
    for name in names {
        let entry = known.entry(name.clone()).or_insert_with(|| Entry {
            spec: None,
            forbidden: None,
            due: Some(now),
            under_way: false,
        });
        match entry.spec.as_ref().map(|spec| spec.asks(classes, node)) {
            None => unread = true,
            Some(ClaimAsks::Elsewhere) => return Asks::Nothing,
            Some(ClaimAsks::Here(more)) => claimed = plus(claimed, more),
        }
    }
    match claimed {
        _ if unread => Asks::Unread,
        Claimed::Units(0) if pod.counted == 0 => Asks::Nothing,
        Claimed::Units(_) | Claimed::All => Asks::Claimed(claimed),
    }
}
