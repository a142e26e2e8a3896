//! Claims noticed at bind: those that a pod bound here or the ledger names are read one by one.
//!
//! No watch of claims, and no right to list them: a cluster with thousands of nodes can't have one watch of all its
//! claims for each. What is not read is unknown and never counts as gone, so a claim is read whenever something has
//! happened to it here, then again at growing intervals until nothing is expected to change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use bridge_core::{
    AllocatedClaim, ClaimName, ClaimScope, ClaimUid, Claims, NamedClaims, Phase, PodUid, Standing,
    Status, is_object_name,
};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::teller::Teller;
use super::{READ_TIMEOUT, allocated_here, allocation, at};
use crate::arbiter::{self, Handle};
use crate::dra::chain;
use crate::follow::{Complaints, UNKNOWN_AFTER};

/// How soon a claim is read again after something has happened to it; the pause doubles with each reading that shows
/// nothing new. The controller that deallocates a claim takes some 100 ms after the end of its pod.
const AGAIN_FIRST: Duration = Duration::from_millis(250);
/// The longest pause while a change is expected: a unit whose claim has ended is of no use to anybody until then.
const AGAIN_LAST: Duration = Duration::from_secs(5);
/// The pause while none is: the claim is prepared and its pod is here. It is only a net below the events.
const CALM: Duration = Duration::from_secs(300);
/// Readings under way at once. A node has 110 pods by default, and the API server answers in milliseconds.
const READS_AT_ONCE: usize = 8;

/// What the claims are known by.
pub struct BoundInputs {
    /// Of the API server.
    pub client: Client,
    /// The name of the node, and so of its pool.
    pub node: String,
    /// Whose ledger names claims, and who is told.
    pub handle: Handle,
    /// The claims that pods bound here name.
    pub named: watch::Receiver<Option<NamedClaims>>,
    /// Claims that the kubelet may have prepared before the ledger was lost; they are read until the pool serves.
    pub earlier: BTreeSet<ClaimName>,
    /// Where else the claims go; `None` stands for "not known".
    pub out: watch::Sender<Option<Claims>>,
}

impl fmt::Debug for BoundInputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundInputs")
            .field("node", &self.node)
            .field("earlier", &self.earlier)
            .finish_non_exhaustive()
    }
}

/// Reads the claims that pods bound here name, and tells the arbiter which are allocated to this node's pool whenever
/// that has changed.
///
/// Needs the right to get `resourceclaims` in `resource.k8s.io`.
///
/// # Errors
/// [`arbiter::Error::Stopping`]: the arbiter has ended. The API server being away is no error: it is waited for.
pub async fn run_bound(
    inputs: BoundInputs,
    shutdown: CancellationToken,
) -> Result<(), arbiter::Error> {
    let mut named = inputs.named;
    let mut status = inputs.handle.status();
    let mut teller = Teller::new(inputs.handle, inputs.out);
    let mut book = Book::new(inputs.earlier);
    let mut reads: FuturesUnordered<BoxFuture<'static, Read>> = FuturesUnordered::new();
    loop {
        {
            let named = named.borrow_and_update();
            book.collect(named.as_ref(), &status.borrow_and_update(), Instant::now());
        }
        book.judge(Instant::now());
        teller.tell(book.known()).await?;
        while reads.len() < READS_AT_ONCE
            && let Some(name) = book.next_read(Instant::now())
        {
            let (client, node) = (inputs.client.clone(), inputs.node.clone());
            reads.push(Box::pin(read(client, node, name)));
        }
        let waits_for_a_place = reads.len() >= READS_AT_ONCE;
        let due = book.due().filter(|_| !waits_for_a_place);
        let next = due.into_iter().chain(teller.retry_at).min();
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            changed = named.changed() => if changed.is_err() {
                // The pod watch has ended, and says so itself.
                shutdown.cancelled().await;
                return Ok(());
            },
            changed = status.changed() => changed.map_err(|_| arbiter::Error::Stopping)?,
            Some(read) = reads.next() => book.take(read, Instant::now()),
            () = at(next) => {}
        }
    }
}

/// An answer, or why there is none.
struct Read {
    name: ClaimName,
    asked: Instant,
    answer: Result<Reading, String>,
}

/// What a claim was like.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reading {
    /// `None`: there is no claim of that name.
    uid: Option<ClaimUid>,
    allocation: Allocation,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Allocation {
    /// None.
    None,
    /// Of devices that are not this node's.
    Elsewhere,
    Here(AllocatedClaim),
}

impl Reading {
    fn of(claim: Option<&ResourceClaim>, node: &str) -> Self {
        let allocation = match claim {
            Some(claim) if allocation(claim).is_some() => {
                allocated_here(claim, node).map_or(Allocation::Elsewhere, Allocation::Here)
            }
            Some(_) | None => Allocation::None,
        };
        let uid = claim.and_then(|claim| claim.metadata.uid.as_deref());
        Self {
            uid: uid.and_then(|uid| ClaimUid::new(uid).ok()),
            allocation,
        }
    }
}

/// Why a claim is read: who names it, and what it has here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Causes {
    pods: BTreeSet<PodUid>,
    ledger: BTreeMap<ClaimUid, Phase>,
    /// The kubelet's state from before the ledger was lost.
    earlier: bool,
}

#[derive(Debug)]
struct Entry {
    causes: Causes,
    /// When they last changed.
    caused: Instant,
    /// The last answer, and when it was asked for.
    reading: Option<(Reading, Instant)>,
    /// Since when there is no answer.
    failing: Option<Instant>,
    due: Instant,
    pause: Duration,
    under_way: bool,
}

impl Entry {
    /// Whether nothing is expected to change before something happens here.
    fn is_calm(&self) -> bool {
        match self
            .reading
            .as_ref()
            .map(|(reading, _)| &reading.allocation)
        {
            None | Some(Allocation::None) => false,
            Some(Allocation::Elsewhere) => {
                !self.causes.pods.is_empty() && self.causes.ledger.is_empty()
            }
            Some(Allocation::Here(claim)) => {
                let mut phases = self.causes.ledger.values();
                phases.all(|phase| *phase == Phase::Prepared)
                    && self.causes.ledger.contains_key(&claim.claim.uid)
                    && !claim.reserved_for.is_disjoint(&self.causes.pods)
            }
        }
    }

    /// The claim, if it was allocated here when it was last read.
    fn allocated(&self) -> Option<&AllocatedClaim> {
        match &self.reading.as_ref()?.0.allocation {
            Allocation::Here(claim) => Some(claim),
            Allocation::None | Allocation::Elsewhere => None,
        }
    }

    /// The claims of this name that something is known of. That one is not allocated here, or not there, counts only
    /// if it was read after the last thing that happened to it here: it may have been allocated in between.
    fn known(&self) -> Vec<ClaimUid> {
        let Some((reading, asked)) = &self.reading else {
            return Vec::new();
        };
        if *asked < self.caused {
            return self
                .allocated()
                .map(|it| it.claim.uid.clone())
                .into_iter()
                .collect();
        }
        // Where the name is gone, or another claim's, those that the ledger has under it are gone.
        let earlier = self.causes.ledger.keys().cloned();
        earlier.chain(reading.uid.clone()).collect()
    }
}

/// The claims that are read, and when. It asks nobody.
struct Book {
    earlier: BTreeSet<ClaimName>,
    entries: BTreeMap<ClaimName, Entry>,
    /// What pods name, as last known: while the pods are unknown nothing is dropped.
    named: Option<BTreeMap<ClaimName, BTreeSet<PodUid>>>,
    /// Whether everything that is named has been read, and can be.
    complete: bool,
    complaints: Complaints,
}

impl Book {
    fn new(earlier: BTreeSet<ClaimName>) -> Self {
        Self {
            earlier,
            entries: BTreeMap::new(),
            named: None,
            complete: false,
            complaints: Complaints::new("resourceclaims"),
        }
    }

    /// Takes who names which claims now.
    fn collect(&mut self, named: Option<&NamedClaims>, status: &Status, now: Instant) {
        if let Some(named) = named {
            self.named = Some(by_claim(named));
        }
        if status.standing == Standing::Serving {
            self.earlier.clear();
        }
        let mut causes: BTreeMap<ClaimName, Causes> = BTreeMap::new();
        for (name, pods) in self.named.iter().flatten() {
            causes
                .entry(name.clone())
                .or_default()
                .pods
                .clone_from(pods);
        }
        for (claim, phase) in phases(status) {
            let ledger = &mut causes.entry(claim.full_name()).or_default().ledger;
            ledger.insert(claim.uid, phase);
        }
        for name in &self.earlier {
            causes.entry(name.clone()).or_default().earlier = true;
        }
        self.entries.retain(|name, _| causes.contains_key(name));
        for (name, causes) in causes {
            let entry = self.entries.entry(name).or_insert_with(|| Entry {
                causes: Causes::default(),
                caused: now,
                reading: None,
                failing: None,
                due: now,
                pause: AGAIN_FIRST,
                under_way: false,
            });
            if entry.causes != causes {
                entry.causes = causes;
                entry.caused = now;
                entry.due = now;
                entry.pause = AGAIN_FIRST;
            }
        }
    }

    fn take(&mut self, read: Read, now: Instant) {
        let Some(entry) = self.entries.get_mut(&read.name) else {
            return;
        };
        entry.under_way = false;
        let is_old = read.asked < entry.caused;
        match read.answer {
            Ok(reading) => {
                entry.failing = None;
                let known = entry.reading.as_ref().map(|(known, _)| known);
                let is_news = known != Some(&reading);
                entry.reading = Some((reading, read.asked));
                entry.pause = if is_news {
                    AGAIN_FIRST
                } else {
                    (entry.pause * 2).min(AGAIN_LAST)
                };
                self.complaints.none();
            }
            Err(error) => {
                entry.failing.get_or_insert(read.asked);
                entry.pause = (entry.pause * 2).min(AGAIN_LAST);
                self.complaints.about(&error);
            }
        }
        // What has happened meanwhile is due already.
        if !is_old {
            let pause = if entry.is_calm() && entry.failing.is_none() {
                CALM
            } else {
                entry.pause
            };
            entry.due = now + pause;
        }
    }

    /// Whether all is known: everything was read once, and nothing has failed for too long.
    fn judge(&mut self, now: Instant) {
        let failed = |entry: &Entry| {
            let since = entry.failing.map(|since| now.duration_since(since));
            since.is_some_and(|time| time >= UNKNOWN_AFTER)
        };
        if self.complete {
            if self.entries.values().any(failed) {
                warn!(
                    "which claims are allocated to this node is not known until the API server answers"
                );
                self.complete = false;
            }
        } else {
            let is_read = |entry: &Entry| entry.reading.is_some() && entry.failing.is_none();
            self.complete = self.named.is_some() && self.entries.values().all(is_read);
        }
    }

    fn known(&self) -> Option<Claims> {
        if !self.complete {
            return None;
        }
        let entries = self.entries.values();
        let allocated = entries.clone().filter_map(Entry::allocated);
        Some(Claims {
            claims: allocated.cloned().collect(),
            scope: ClaimScope::Read(entries.flat_map(Entry::known).collect()),
        })
    }

    /// When the next reading is due.
    fn due(&self) -> Option<Instant> {
        let idle = self.entries.values().filter(|entry| !entry.under_way);
        let due = idle.map(|entry| entry.due);
        // A claim that can't be read makes all unknown in time, whether it is being read then or not.
        let failing = self.entries.values().filter(|_| self.complete);
        let unknown = failing.filter_map(|entry| Some(entry.failing? + UNKNOWN_AFTER));
        due.chain(unknown).min()
    }

    /// The claim that is due first; it counts as being read from now on.
    fn next_read(&mut self, now: Instant) -> Option<ClaimName> {
        let entries = self.entries.iter_mut();
        let idle = entries.filter(|(_, entry)| !entry.under_way && entry.due <= now);
        let (name, entry) = idle.min_by_key(|(_, entry)| entry.due)?;
        entry.under_way = true;
        Some(name.clone())
    }
}

async fn read(client: Client, node: String, name: ClaimName) -> Read {
    let asked = Instant::now();
    if !is_object_name(&name.namespace) || !is_object_name(&name.name) {
        // There is no such claim, and the name must not become a path to something else.
        let answer = Ok(Reading::of(None, &node));
        return Read {
            name,
            asked,
            answer,
        };
    }
    let claims: Api<ResourceClaim> = Api::namespaced(client, &name.namespace);
    let answer = match timeout(READ_TIMEOUT, claims.get_opt(&name.name)).await {
        Err(_) => Err(format!("no answer within {} s", READ_TIMEOUT.as_secs())),
        Ok(Err(error)) => Err(chain(&error)),
        Ok(Ok(claim)) => Ok(Reading::of(claim.as_ref(), &node)),
    };
    Read {
        name,
        asked,
        answer,
    }
}

fn by_claim(named: &NamedClaims) -> BTreeMap<ClaimName, BTreeSet<PodUid>> {
    let mut pods: BTreeMap<ClaimName, BTreeSet<PodUid>> = BTreeMap::new();
    for (pod, names) in &named.by_pod {
        for name in names {
            pods.entry(name.clone()).or_default().insert(pod.clone());
        }
    }
    pods
}

/// The claims that the ledger names, each with what it has: an onlooker has nothing and is prepared.
fn phases(status: &Status) -> BTreeMap<bridge_core::ClaimRef, Phase> {
    let onlookers = status.claims.iter().cloned();
    let mut phases: BTreeMap<_, _> = onlookers.map(|claim| (claim, Phase::Prepared)).collect();
    for hold in status.units.iter().flat_map(|unit| &unit.holds) {
        if let Some(claim) = hold.claim() {
            phases.insert(claim.clone(), hold.phase());
        }
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> ClaimName {
        ClaimName {
            namespace: "train".to_owned(),
            name: name.to_owned(),
        }
    }

    fn uid(name: &str) -> ClaimUid {
        ClaimUid::new(format!("uid-{name}")).unwrap()
    }

    fn pod(name: &str) -> PodUid {
        PodUid::new(format!("pod-{name}")).unwrap()
    }

    fn here(claim: &str, pods: &[&str]) -> Reading {
        let claim_ref = bridge_core::ClaimRef {
            uid: uid(claim),
            namespace: "train".to_owned(),
            name: claim.to_owned(),
        };
        Reading {
            uid: Some(uid(claim)),
            allocation: Allocation::Here(AllocatedClaim {
                claim: claim_ref,
                devices: Vec::new(),
                reserved_for: pods.iter().map(|name| pod(name)).collect(),
                asked: bridge_core::Asked::ByClaim,
            }),
        }
    }

    /// A book without a ledger behind it, and the clock of its test.
    struct Desk {
        book: Book,
        now: Instant,
        status: Status,
    }

    impl Desk {
        fn new() -> Self {
            let pool = bridge_core::Pool::restored(
                bridge_core::Ledger::default(),
                bridge_core::Settings::default(),
            );
            Self {
                book: Book::new(BTreeSet::new()),
                now: Instant::now(),
                status: pool.status(std::time::SystemTime::UNIX_EPOCH),
            }
        }

        /// One pod that names one claim, or nobody.
        fn named(&mut self, of: &[(&str, &str)]) {
            let mut named = NamedClaims::default();
            for (pod_name, claim) in of {
                let names = named.by_pod.entry(pod(pod_name)).or_default();
                names.insert(name(claim));
            }
            self.book.collect(Some(&named), &self.status, self.now);
            self.book.judge(self.now);
        }

        /// The ledger has the claim prepared, or nothing.
        fn prepared(&mut self, claims: &[&str]) {
            let claims = claims.iter().map(|claim| bridge_core::ClaimRef {
                uid: uid(claim),
                namespace: "train".to_owned(),
                name: (*claim).to_owned(),
            });
            self.status.claims = claims.collect();
            self.book.collect(None, &self.status, self.now);
        }

        /// The next claim is read now, and answered.
        fn answer(&mut self, answer: Result<Reading, &str>) -> ClaimName {
            let name = self.book.next_read(self.now).expect("a reading is due");
            let read = Read {
                name: name.clone(),
                asked: self.now,
                answer: answer.map_err(str::to_owned),
            };
            self.book.take(read, self.now);
            self.book.judge(self.now);
            name
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
            self.book.judge(self.now);
        }

        fn knows(&self, claim: &str) -> bool {
            self.book.known().unwrap().knows(&uid(claim))
        }
    }

    #[test]
    fn nothing_is_known_before_the_pods_are_and_all_that_they_name_was_read() {
        let mut desk = Desk::new();
        desk.book.judge(desk.now);
        assert_eq!(desk.book.known(), None);
        desk.named(&[("a", "one"), ("a", "two")]);
        assert_eq!(desk.book.known(), None);
        desk.answer(Ok(here("one", &["a"])));
        assert_eq!(desk.book.known(), None);
        desk.answer(Ok(here("two", &["a"])));
        assert_eq!(desk.book.known().unwrap().claims.len(), 2);
        // One more later is unknown by itself.
        desk.named(&[("a", "one"), ("a", "two"), ("b", "three")]);
        assert!(desk.knows("one") && !desk.knows("three"));
    }

    #[test]
    fn a_claim_that_is_prepared_for_a_pod_here_is_left_alone_until_the_pod_ends() {
        let mut desk = Desk::new();
        desk.named(&[("a", "one")]);
        desk.answer(Ok(here("one", &["a"])));
        desk.prepared(&["one"]);
        desk.answer(Ok(here("one", &["a"])));
        assert_eq!(desk.book.due(), Some(desk.now + CALM));
        desk.pass(Duration::from_secs(60));
        desk.named(&[]);
        assert_eq!(desk.answer(Ok(here("one", &["a"]))), name("one"));
        // From now on it is read until it is deallocated and nobody names it any more.
        let mut readings = 0;
        let ended = desk.now;
        while desk.now - ended < Duration::from_secs(30) {
            let due = desk.book.due().unwrap();
            assert!(due - desk.now <= AGAIN_LAST);
            desk.now = due;
            desk.answer(Ok(here("one", &["a"])));
            readings += 1;
        }
        assert!(readings < 15, "{readings} readings in half a minute");
        desk.prepared(&[]);
        assert_eq!(desk.book.due(), None);
    }

    #[test]
    fn that_a_claim_is_not_allocated_counts_only_if_it_was_read_after_the_last_event() {
        let mut desk = Desk::new();
        let unallocated = Reading {
            uid: Some(uid("one")),
            allocation: Allocation::None,
        };
        desk.named(&[("a", "one")]);
        desk.answer(Ok(unallocated.clone()));
        assert!(desk.knows("one"));
        desk.pass(Duration::from_millis(10));
        desk.prepared(&["one"]);
        assert!(!desk.knows("one"), "it was read before it was prepared");
        desk.answer(Ok(unallocated));
        assert!(desk.knows("one"));
    }

    #[test]
    fn what_was_allocated_stays_known_while_it_is_read_again() {
        let mut desk = Desk::new();
        desk.named(&[("a", "one")]);
        desk.answer(Ok(here("one", &["a"])));
        desk.pass(Duration::from_millis(10));
        desk.prepared(&["one"]);
        assert!(desk.knows("one"));
        assert_eq!(desk.book.known().unwrap().claims.len(), 1);
    }

    #[test]
    fn a_name_that_is_gone_ends_the_claim_that_the_ledger_has_under_it() {
        let mut desk = Desk::new();
        desk.prepared(&["one"]);
        desk.named(&[]);
        let gone = Reading {
            uid: None,
            allocation: Allocation::None,
        };
        desk.answer(Ok(gone));
        assert!(desk.knows("one"));
        assert!(desk.book.known().unwrap().claims.is_empty());
    }

    #[test]
    fn a_claim_that_cannot_be_read_for_ten_seconds_makes_all_unknown_and_none_gone() {
        let mut desk = Desk::new();
        desk.named(&[("a", "one")]);
        desk.answer(Ok(here("one", &["a"])));
        let lost = desk.now;
        while desk.now - lost < UNKNOWN_AFTER {
            desk.now = desk.book.due().unwrap();
            desk.book.judge(desk.now);
            if desk.book.next_read(desk.now).is_some() {
                let read = Read {
                    name: name("one"),
                    asked: desk.now,
                    answer: Err("away".to_owned()),
                };
                desk.book.take(read, desk.now);
            }
            let known = desk.book.known();
            assert!(known.is_none_or(|known| known.claims.len() == 1));
        }
        desk.pass(UNKNOWN_AFTER);
        assert_eq!(desk.book.known(), None);
        desk.now = desk.now.max(desk.book.due().unwrap());
        desk.answer(Ok(here("one", &["a"])));
        assert_eq!(desk.book.known().unwrap().claims.len(), 1);
    }

    #[test]
    fn while_the_pods_are_unknown_no_claim_is_dropped() {
        let mut desk = Desk::new();
        desk.named(&[("a", "one")]);
        desk.answer(Ok(here("one", &["a"])));
        desk.book.collect(None, &desk.status, desk.now);
        assert_eq!(desk.book.known().unwrap().claims.len(), 1);
    }
}
