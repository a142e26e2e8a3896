//! The pods bound to this node, from two sources, and which of them is evidence.
//!
//! - The **API server** is the first to know of a bind and of a force delete. It is believed while its watch runs.
//! - The **kubelet's Pods API** (on by default from 1.37) is local and works while the API server is away; it hears
//!   of everything later. It is believed while the API server's watch does not run.
//!
//! A pod that ends a hold must really have ended, so a pod that the kubelet shows alive and the API server has never
//! shown counts as alive: then it is the API server's list that is behind. A pod that the API server has shown and
//! does not show any more is gone, whatever the kubelet still says.
//! Without a running source the last list counts for [`UNSYNCED_LIMIT`], then there is none.

mod api;
mod kubelet;
mod shape;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use bridge_core::{BoundPod, ClaimName, NamedClaims, PodPhase, PodSource, PodUid, Pods, Standing};
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use self::api::counted;
pub(super) use self::api::shown;
pub use self::kubelet::is_starting;
use self::shape::Shown;
use super::TELL_AGAIN;
use crate::arbiter::{self, Handle, Observation, Told};

/// The last list counts this long after its source was lost. It must stay well below the 10 s after which a grant
/// that nobody can own is ended: an older list may not know the pod.
const UNSYNCED_LIMIT: Duration = Duration::from_secs(5);
/// The list is told again after this time even if nothing has changed, until the pool serves: when it takes over a node
/// without a ledger it takes the pods as they were a moment before.
const TELL_PERIOD: Duration = Duration::from_secs(10);
/// What comes within this time goes into one list: events of a deployment come in bursts.
const COALESCE: Duration = Duration::from_millis(5);
/// Events that may wait; more of them wait in the connection.
const EVENT_BOUND: usize = 64;

/// What a source says.
#[derive(Debug)]
enum Event {
    /// All pods there are.
    Listed(Vec<Shown>),
    /// One was made or changed.
    Applied(Shown),
    /// One is gone.
    Gone(PodUid),
    /// The watch runs: what was missed comes now.
    Running,
    /// The watch does not run.
    Lost,
}

/// Where else the pods go than to the pool. `None` stands for "not known".
#[derive(Debug)]
pub struct PodsOut {
    /// The pods.
    pub pods: watch::Sender<Option<Pods>>,
    /// The claims that the live ones name.
    pub claims: watch::Sender<Option<NamedClaims>>,
}

/// Follows the pods bound to `node`, tells the pool, and puts them into `out`.
///
/// Needs the right to list and watch `pods`. `kubelet_dir` is the kubelet's root folder, with `pods-api/` in it.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. A source that is away is no error: it is waited for.
pub async fn run_pods(
    client: Client,
    node: String,
    kubelet_dir: PathBuf,
    handle: Handle,
    out: PodsOut,
    stop: CancellationToken,
) -> Result<(), arbiter::Error> {
    let (to_api, from_api) = mpsc::channel(EVENT_BOUND);
    let (to_kubelet, from_kubelet) = mpsc::channel(EVENT_BOUND);
    let book = Book {
        api: Source::default(),
        kubelet: Source::default(),
        seen_by_api: BTreeSet::new(),
        named: BTreeMap::new(),
        latest: None,
    };
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        () = api::follow(client, &node, to_api) => Ok(()),
        () = kubelet::follow(&kubelet_dir, &node, to_kubelet) => Ok(()),
        ended = tell_for_ever(book, from_api, from_kubelet, handle, out) => ended,
    }
}

async fn tell_for_ever(
    mut book: Book,
    mut from_api: mpsc::Receiver<Event>,
    mut from_kubelet: mpsc::Receiver<Event>,
    handle: Handle,
    out: PodsOut,
) -> Result<(), arbiter::Error> {
    let mut told: Option<Option<Pods>> = None;
    let mut due = Some(Instant::now() + TELL_PERIOD);
    loop {
        tokio::select! {
            Some(event) = from_api.recv() => {
                book.take_api(event);
                due = Some(soon(due));
            }
            Some(event) = from_kubelet.recv() => {
                book.take_kubelet(event);
                due = Some(soon(due));
            }
            () = at(due) => {
                let now = Instant::now();
                let pods = book.pods(now);
                due = book.end_of_latest().map(|end| end.max(now + COALESCE));
                let is_new = told.as_ref() != Some(&pods);
                if is_new {
                    say(told.as_ref(), pods.as_ref());
                    out.pods.send_replace(pods.clone());
                }
                book.name_claims(pods.as_ref(), &out.claims);
                let serves = handle.status().borrow().standing == Standing::Serving;
                if is_new || !serves {
                    let again = match handle.tell(Observation::Pods(pods.clone())).await? {
                        Told::Taken => {
                            told = Some(pods);
                            (!serves).then_some(TELL_PERIOD)
                        }
                        Told::NotTaken(_) => Some(TELL_AGAIN),
                    };
                    let again = again.map(|pause| now + pause);
                    due = due.into_iter().chain(again).min();
                }
            }
        }
    }
}

/// When what has come is told, if something else is to be told then.
fn soon(due: Option<Instant>) -> Instant {
    let soon = Instant::now() + COALESCE;
    due.map_or(soon, |due| due.min(soon))
}

/// Waits until then; for ever if there is no time.
async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn say(before: Option<&Option<Pods>>, now: Option<&Pods>) {
    let before = before.and_then(Option::as_ref).map(|pods| pods.source);
    match now {
        // At the start the sources themselves say what they wait for.
        None if before.is_none() => {}
        None => warn!(
            "which pods are bound here is not known: neither the API server nor the kubelet's Pods API can be followed; no counted hold ends meanwhile"
        ),
        Some(pods) if before != Some(pods.source) => {
            let source = match pods.source {
                PodSource::Api => "API server",
                PodSource::Kubelet => "kubelet",
            };
            info!(source, "the pods bound here are known");
        }
        Some(_) => {}
    }
}

/// The pods as one source shows them.
#[derive(Debug, Default)]
struct Source {
    pods: BTreeMap<PodUid, BoundPod>,
    sync: Sync,
}

/// Whether a source's pods are all there are.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Sync {
    /// No list yet, or no watch now.
    #[default]
    Out,
    /// Yes, give or take what is under way.
    In,
}

impl Source {
    fn take(&mut self, event: Event) {
        match event {
            Event::Listed(pods) => {
                self.pods = pods
                    .into_iter()
                    .map(|shown| (shown.bound.uid.clone(), shown.bound))
                    .collect();
            }
            Event::Applied(Shown { bound, .. }) => {
                self.pods.insert(bound.uid.clone(), bound);
            }
            Event::Gone(uid) => {
                self.pods.remove(&uid);
            }
            Event::Running => self.sync = Sync::In,
            Event::Lost => self.sync = Sync::Out,
        }
    }
}

/// Both sources, and what follows from them.
#[derive(Debug)]
struct Book {
    api: Source,
    kubelet: Source,
    /// Pods that the API server has shown, as long as one of the two shows them.
    seen_by_api: BTreeSet<PodUid>,
    /// The claims of each pod. The names that one source has shown stay while another, which may not have them all,
    /// shows the pod.
    named: BTreeMap<PodUid, BTreeSet<ClaimName>>,
    /// The last list from a running source, and when that was.
    latest: Option<(Pods, Instant)>,
}

impl Book {
    fn take_api(&mut self, event: Event) {
        self.keep_what_counts(&event);
        self.note_claims(&event);
        self.api.take(event);
        self.seen_by_api.extend(self.api.pods.keys().cloned());
    }

    /// Before a source is lost: what it has shown counts from now on for [`UNSYNCED_LIMIT`].
    fn keep_what_counts(&mut self, event: &Event) {
        match event {
            Event::Lost => drop(self.pods(Instant::now())),
            Event::Listed(_) | Event::Applied(_) | Event::Gone(_) | Event::Running => {}
        }
    }

    fn take_kubelet(&mut self, event: Event) {
        self.keep_what_counts(&event);
        self.note_claims(&event);
        self.kubelet.take(event);
    }

    fn note_claims(&mut self, event: &Event) {
        let shown = match event {
            Event::Listed(all) => all.as_slice(),
            Event::Applied(one) => std::slice::from_ref(one),
            Event::Gone(_) | Event::Running | Event::Lost => &[],
        };
        for shown in shown.iter().filter(|shown| !shown.claims.is_empty()) {
            let known = self.named.entry(shown.bound.uid.clone()).or_default();
            known.extend(shown.claims.iter().cloned());
        }
    }

    /// Puts the claims of these pods into `out`, if they are other ones than before.
    fn name_claims(&mut self, pods: Option<&Pods>, out: &watch::Sender<Option<NamedClaims>>) {
        let (api, kubelet) = (&self.api.pods, &self.kubelet.pods);
        self.named
            .retain(|uid, _| api.contains_key(uid) || kubelet.contains_key(uid));
        let now = pods.map(|pods| {
            let live = pods
                .pods
                .iter()
                .filter(|bound| bound.phase == PodPhase::Live);
            let named = live.filter_map(|bound| self.named.get_key_value(&bound.uid));
            NamedClaims {
                by_pod: named
                    .map(|(uid, names)| (uid.clone(), names.clone()))
                    .collect(),
            }
        });
        out.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }

    /// The pods to believe in; `None` when no source has run for [`UNSYNCED_LIMIT`].
    fn pods(&mut self, now: Instant) -> Option<Pods> {
        let (api, kubelet) = (&self.api.pods, &self.kubelet.pods);
        self.seen_by_api
            .retain(|uid| api.contains_key(uid) || kubelet.contains_key(uid));
        let running = match (self.api.sync, self.kubelet.sync) {
            (Sync::In, Sync::In) => Some(self.both()),
            (Sync::In, Sync::Out) => Some(Pods {
                source: PodSource::Api,
                pods: self.api.pods.values().cloned().collect(),
            }),
            (Sync::Out, Sync::In) => Some(Pods {
                source: PodSource::Kubelet,
                pods: self.kubelet.pods.values().cloned().collect(),
            }),
            (Sync::Out, Sync::Out) => None,
        };
        if let Some(pods) = running {
            self.latest = Some((pods, now));
        } else if self
            .latest
            .as_ref()
            .is_some_and(|(_, at)| now.duration_since(*at) >= UNSYNCED_LIMIT)
        {
            self.latest = None;
        }
        self.latest.as_ref().map(|(pods, _)| pods.clone())
    }

    /// The API server's list, and what only the kubelet knows so far.
    fn both(&self) -> Pods {
        let unseen = self
            .kubelet
            .pods
            .values()
            .filter(|bound| !self.seen_by_api.contains(&bound.uid));
        Pods {
            source: PodSource::Api,
            pods: self.api.pods.values().chain(unseen).cloned().collect(),
        }
    }

    /// When the last list stops to count, if no source runs.
    fn end_of_latest(&self) -> Option<Instant> {
        match (self.api.sync, self.kubelet.sync) {
            (Sync::Out, Sync::Out) => self.latest.as_ref().map(|(_, at)| *at + UNSYNCED_LIMIT),
            (Sync::In, Sync::In | Sync::Out) | (Sync::Out, Sync::In) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_list_counts_for_a_while_from_the_moment_in_which_its_source_is_lost() {
        let mut book = Book {
            api: Source::default(),
            kubelet: Source::default(),
            seen_by_api: BTreeSet::new(),
            named: BTreeMap::new(),
            latest: None,
        };
        for event in [Event::Listed(Vec::new()), Event::Running] {
            book.take_api(event);
        }
        let shown = book.pods(Instant::now());
        assert!(shown.is_some());
        // Nothing has changed for long, so nobody has looked.
        let long_ago = Instant::now() - 2 * UNSYNCED_LIMIT;
        if let Some((_, at)) = &mut book.latest {
            *at = long_ago;
        }
        book.take_api(Event::Lost);
        assert_eq!(book.pods(Instant::now()), shown);
        let end = book.end_of_latest().expect("it will not count for ever");
        assert_eq!(book.pods(end), None);
    }
}
