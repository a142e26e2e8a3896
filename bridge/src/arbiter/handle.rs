//! What the adapters may ask of the arbiter.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bridge_core::{
    Adoption, AllocateRequest, ClaimRef, Claims, Demand, DeviceId, DeviceName, Face, Grant,
    Insistence, Inventory, Listing, NotCleared, NotReleased, Offers, PodUid, Pods, PrepareRequest,
    PreparedDevice, Recovery, Refusal, Report, Rival, Settings, Status, Topology, UnitId, Xid,
};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::gate::{Gate, OpenAllocate};
use super::history;
use crate::metrics::Metrics;
use crate::store::Store;

/// How long a call may be held from the moment in which this daemon could not decide it any more: a successor serves
/// after some ten milliseconds, and then its own limits hold.
pub const HOLD_LIMIT: Duration = Duration::from_secs(5);

/// Pause before the successor of a call that is held is looked for again.
pub const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why a call got no decision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The ledger could not be written, so nothing was granted (rule 2). The caller should hear `UNAVAILABLE`.
    #[error("the ledger could not be saved, so nothing was given out: {0}")]
    NotSaved(String),
    /// The claim's CDI file could not be written; the hold stays, and the call may be repeated.
    #[error("the CDI file could not be written: {0}")]
    NoCdiFile(String),
    /// Another daemon on this node owns the ledger by now, and decides: see [`Handle::hand_over`].
    #[error(
        "gpu-bridge is being updated, and this call came to the pod that gave the ledger to its successor {0}"
    )]
    NotOwner(PodUid),
    /// The arbiter has ended, and the daemon with it.
    #[error("the daemon is stopping")]
    Stopping,
}

impl Error {
    /// The stable name of the reason, as of a refusal's: the same in events, logs and `migration-guide/reasons/`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotSaved(_) => "NotSaved",
            Self::NoCdiFile(_) => "NoCdiFile",
            Self::NotOwner(_) => "NotOwnerYet",
            Self::Stopping => "Stopping",
        }
    }

    /// The pod that decides in the place of this daemon.
    #[must_use]
    pub fn successor(&self) -> Option<&PodUid> {
        match self {
            Self::NotOwner(successor) => Some(successor),
            Self::NotSaved(_) | Self::NoCdiFile(_) | Self::Stopping => None,
        }
    }
}

/// Whether the pool has taken what was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// It has.
    Taken,
    /// It could not, and nothing has changed: what is seen then is told later. The arbiter has said so in the log.
    NotTaken(Error),
}

/// A unit given to a counted pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedDevice {
    /// Id and unit.
    pub grant: Grant,
    /// Fully qualified CDI device name.
    pub cdi_device: String,
}

/// What became of an `Allocate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllocateReply {
    /// In the order of the request.
    Granted(Vec<GrantedDevice>),
    /// Ask pod-resources, then ask again with the answer.
    NeedsListing,
    /// Ask again in a moment.
    Wait,
    /// No.
    Refused(Refusal),
}

/// A device prepared for a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedReply {
    /// The device.
    pub device: PreparedDevice,
    /// Fully qualified CDI device name.
    pub cdi_device: String,
}

/// What became of a `NodePrepareResources` for one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrepareReply {
    /// The claim has its devices, and its CDI file is on disk.
    Prepared(Vec<PreparedReply>),
    /// Ask again when the status changes, and refuse with this when the time is up.
    Wait(Refusal),
    /// No.
    Refused(Refusal),
}

/// Something that an adapter saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// An answer of pod-resources.
    Listing(Listing),
    /// The pods bound here; `None` while the source is out of sync.
    Pods(Option<Pods>),
    /// The claims allocated here; `None` while the API can't be asked.
    Claims(Option<Claims>),
    /// What NVML says.
    Inventory(Inventory),
    /// How the GPUs are connected.
    Topology(Arc<Topology>),
    /// Errors of GPUs that the driver has told of, each with how often.
    Xids(BTreeMap<(UnitId, Xid), u64>),
    /// What NVML says has to be done about GPUs.
    Recovery {
        /// [`Handle::uptime_at`] when it was asked.
        asked: Duration,
        /// By GPU; one that is not named is one of which it does not say.
        actions: BTreeMap<UnitId, Recovery>,
    },
    /// The ids that the kubelet's checkpoint names, while adoption is waited for.
    KubeletIds(BTreeSet<DeviceId>),
    /// By which names claims know their units, while adoption is waited for.
    Names(BTreeMap<DeviceName, UnitId>),
    /// All that is needed to take over a node without a ledger.
    Adoption(Box<Adoption>),
    /// Time to look at the processes.
    Processes,
    /// Who else serves our names on this node now.
    Rivals(BTreeSet<Rival>),
    /// The count of the resource in the own Node's status; `None` while this daemon may not see or not change it.
    Node(Option<u32>),
    /// The server that shows the own Node can't be reached.
    NodeAway,
    /// The daemon was told to stop.
    Leaving,
    /// The pods that wait and that this node could run; `None` while nobody may or can look.
    Demand(Option<Demand>),
    /// The units whose devices the published slice shows to claims.
    Slice(BTreeSet<UnitId>),
    /// The admin has changed what is offered.
    Settings(Settings),
}

/// What those want to hear who tell people about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A committed transition did this.
    Happened(Report),
    /// The ledger can't be saved; in words why.
    NotSaved(String),
    /// It can be saved again.
    SavedAgain,
}

/// News that may wait for one who listens; older ones are lost to it. A transition rarely makes more than ten.
pub(super) const NEWS_LIMIT: usize = 256;

/// An admin's command to end what holds a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The unit.
    pub unit: UnitId,
    /// Whether a process on it matters.
    pub insistence: Insistence,
    /// Why, in the admin's words; for the log and the history.
    pub reason: String,
}

/// An admin's command to end the fault of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClearFault {
    /// The unit.
    pub unit: UnitId,
    /// Why, in the admin's words; for the log and the history.
    pub reason: String,
}

/// What was found when the ledger was taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakenBack {
    /// It is as it was left, and this arbiter decides again.
    Unchanged,
    /// Another daemon has written it. What this one knows is out of date: it must start anew.
    Changed,
    /// Another daemon has it.
    Owned,
}

/// A message to the arbiter.
#[derive(Debug)]
pub enum Call {
    /// `Allocate`.
    Allocate {
        /// The request.
        request: AllocateRequest,
        /// pod-resources, asked after the call arrived.
        listing: Option<Listing>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<AllocateReply, Error>>,
    },
    /// `NodePrepareResources` for one claim.
    Prepare {
        /// The request.
        request: PrepareRequest,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<PrepareReply, Error>>,
    },
    /// `NodeUnprepareResources` for one claim.
    Unprepare {
        /// The claim.
        claim: ClaimRef,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// Something was seen.
    Observe {
        /// What.
        observation: Observation,
        /// Told once the pool has taken it.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// An admin says that nobody has a unit any more.
    Release {
        /// What.
        release: Release,
        /// Told how many holds have ended, or why none has.
        reply: oneshot::Sender<Result<Result<usize, NotReleased>, Error>>,
    },
    /// An admin says that a GPU is well again.
    ClearFault {
        /// Which.
        clear: ClearFault,
        /// Told that its fault has ended, or why not.
        reply: oneshot::Sender<Result<Result<(), NotCleared>, Error>>,
    },
    /// A successor asks for the ledger.
    HandOver {
        /// The successor's pod.
        to: PodUid,
        /// Told once the ledger's lock is free.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// The successor may be gone.
    TakeBack {
        /// Told what was found.
        reply: oneshot::Sender<Result<TakenBack, Error>>,
    },
}

/// A way to the arbiter, cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    calls: mpsc::Sender<Call>,
    offers: watch::Receiver<Arc<Offers>>,
    status: watch::Receiver<Arc<Status>>,
    started: Instant,
    gate: Gate,
    anew: Anew,
    successor: watch::Receiver<Option<PodUid>>,
    metrics: Metrics,
    news: broadcast::Sender<News>,
    /// Where the history is, as long as there is an arbiter.
    store: Weak<Store>,
}

/// Counts how often each face was asked to register anew.
#[derive(Debug, Clone)]
struct Anew {
    legacy: Arc<watch::Sender<u64>>,
    dra: Arc<watch::Sender<u64>>,
}

impl Handle {
    /// For the arbiter, and for tests that play it.
    #[must_use]
    pub fn new(
        calls: mpsc::Sender<Call>,
        offers: watch::Receiver<Arc<Offers>>,
        status: watch::Receiver<Arc<Status>>,
        started: Instant,
    ) -> Self {
        Self {
            calls,
            offers,
            status,
            started,
            gate: Gate::new(),
            anew: Anew {
                legacy: Arc::new(watch::Sender::new(0)),
                dra: Arc::new(watch::Sender::new(0)),
            },
            successor: watch::channel(None).1,
            metrics: Metrics::new(),
            news: broadcast::channel(1).0,
            store: Weak::new(),
        }
    }

    /// With the history of the arbiter.
    pub(super) fn with_history(self, store: &Arc<Store>) -> Self {
        let store = Arc::downgrade(store);
        Self { store, ..self }
    }

    /// With the numbers in which the arbiter counts.
    pub(super) fn with_metrics(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    /// With the news of the arbiter.
    pub(super) fn with_news(self, news: broadcast::Sender<News>) -> Self {
        Self { news, ..self }
    }

    /// Writes into the history that a call was refused before the pool was asked, or got no decision; what the pool refuses
    /// is there already. `who` is the claim, or the kubelet's ids. Whoever has let the ledger go writes nothing.
    pub fn note_refused(&self, reason: &'static str, who: String, why: String) {
        let owned = self.successor.borrow().is_none();
        if let Some(store) = self.store.upgrade().filter(|_| owned) {
            let generation = self.status.borrow().generation;
            store.note(history::refused(reason, who, why, generation));
        }
    }

    /// What happens from now on.
    #[must_use]
    pub fn news(&self) -> broadcast::Receiver<News> {
        self.news.subscribe()
    }

    /// Where those who use the arbiter count what happens.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// With a way to see who got the ledger.
    pub(super) fn with_successor(self, successor: watch::Receiver<Option<PodUid>>) -> Self {
        Self { successor, ..self }
    }

    /// Rule 5.
    ///
    /// # Errors
    /// The ledger could not be saved, or the daemon is stopping.
    pub async fn allocate(
        &self,
        request: AllocateRequest,
        listing: Option<Listing>,
    ) -> Result<AllocateReply, Error> {
        self.ask(|reply| Call::Allocate {
            request,
            listing,
            reply,
        })
        .await
    }

    /// Rule 6.
    ///
    /// # Errors
    /// The ledger or the CDI file could not be written, or the daemon is stopping.
    pub async fn prepare(&self, request: PrepareRequest) -> Result<PrepareReply, Error> {
        self.ask(|reply| Call::Prepare { request, reply }).await
    }

    /// Rule 7, *Unprepare*. Succeeds for a claim that is not known.
    ///
    /// # Errors
    /// The ledger could not be saved, or the daemon is stopping.
    pub async fn unprepare(&self, claim: ClaimRef) -> Result<(), Error> {
        self.ask(|reply| Call::Unprepare { claim, reply }).await
    }

    /// Rule 7, *an admin's command*: how many holds have ended, or why none has.
    ///
    /// # Errors
    /// The ledger could not be saved, somebody else owns it, or the daemon is stopping.
    pub async fn release(&self, release: Release) -> Result<Result<usize, NotReleased>, Error> {
        self.ask(|reply| Call::Release { release, reply }).await
    }

    /// Rule 10, *an admin's command*: the fault has ended, or why not.
    ///
    /// # Errors
    /// The ledger could not be saved, somebody else owns it, or the daemon is stopping.
    pub async fn clear_fault(&self, clear: ClearFault) -> Result<Result<(), NotCleared>, Error> {
        self.ask(|reply| Call::ClearFault { clear, reply }).await
    }

    /// Tells what was seen; returns when the pool has taken it.
    ///
    /// # Errors
    /// The ledger could not be saved, or the daemon is stopping.
    pub async fn observe(&self, observation: Observation) -> Result<(), Error> {
        self.ask(|reply| Call::Observe { observation, reply }).await
    }

    /// The same for those who go on seeing, and tell again what was not taken.
    ///
    /// # Errors
    /// [`Error::Stopping`] only.
    pub async fn tell(&self, observation: Observation) -> Result<Told, Error> {
        match self.observe(observation).await {
            Ok(()) => Ok(Told::Taken),
            Err(error @ (Error::NotSaved(_) | Error::NoCdiFile(_) | Error::NotOwner(_))) => {
                Ok(Told::NotTaken(error))
            }
            Err(Error::Stopping) => Err(Error::Stopping),
        }
    }

    /// Gives the ledger to a successor: the calls that are here are decided and saved, and then the lock is let go.
    /// From then on calls get [`Error::NotOwner`], and what is seen is kept until the ledger is
    /// [taken back](Self::take_back).
    ///
    /// # Errors
    /// Nothing was handed over: what is in doubt could not be saved, another successor has it already
    /// ([`Error::NotOwner`]), or the daemon is stopping.
    pub async fn hand_over(&self, to: PodUid) -> Result<(), Error> {
        self.ask(|reply| Call::HandOver { to, reply }).await
    }

    /// Takes the ledger back after [`hand_over`](Self::hand_over), if nobody has it.
    ///
    /// # Errors
    /// The folder of the ledger can't be used, or the daemon is stopping.
    pub async fn take_back(&self) -> Result<TakenBack, Error> {
        self.ask(|reply| Call::TakeBack { reply }).await
    }

    /// The pod that the ledger was handed over to; `None` while this daemon owns it.
    #[must_use]
    pub fn successor(&self) -> watch::Receiver<Option<PodUid>> {
        self.successor.clone()
    }

    /// What both faces show; changes only when something to be shown has changed.
    #[must_use]
    pub fn offers(&self) -> watch::Receiver<Arc<Offers>> {
        self.offers.clone()
    }

    /// The pool as people see it; changes with every commit.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Arc<Status>> {
        self.status.clone()
    }

    /// Time since the daemon started: the clock of [`PrepareRequest::arrived`].
    #[must_use]
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The same clock at a moment since then.
    #[must_use]
    pub fn uptime_at(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.started)
    }

    /// The kubelet is about to pick ids: an `Allocate` follows within milliseconds, if at all.
    pub fn announce_allocate(&self) {
        self.gate.announce();
    }

    /// An `Allocate` has come in; it counts as in progress until the answer is dropped.
    #[must_use]
    pub fn open_allocate(&self) -> OpenAllocate {
        self.gate.open()
    }

    /// Waits until no `Allocate` is in progress or about to come, and the last answer is stored by the kubelet: until
    /// a `List` of pod-resources does no harm. It may take for ever.
    pub async fn no_allocate(&self) {
        self.gate.quiet().await;
    }

    /// Asks a face to register anew: the kubelet may listen to another daemon of the same name.
    pub fn register_anew(&self, face: Face) {
        self.anew(face).send_modify(|times| *times += 1);
    }

    /// Changes each time the face is asked to register anew.
    #[must_use]
    pub fn registers_anew(&self, face: Face) -> watch::Receiver<u64> {
        self.anew(face).subscribe()
    }

    fn anew(&self, face: Face) -> &watch::Sender<u64> {
        match face {
            Face::Legacy => &self.anew.legacy,
            Face::Dra => &self.anew.dra,
        }
    }

    async fn ask<T>(
        &self,
        call: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Call,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.calls
            .send(call(reply))
            .await
            .map_err(|_| Error::Stopping)?;
        answer.await.map_err(|_| Error::Stopping)?
    }
}
