//! The loop: takes what is waiting, decides it on one private copy of the pool, saves once, commits, writes CDI
//! files, answers, and publishes what has changed.

mod handover;
mod look;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    AllocateOutcome, ClaimRef, ClaimUid, DeviceId, Evidence, Grant, Ledger, Moment, NotCleared,
    NotReleased, Offers, PodUid, Pool, Preparation, PrepareOutcome, Processes, Report, Standing,
    Status, Transition, UnitId,
};
use futures::future::{OptionFuture, join_all};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tracing::{debug, error, info, warn};

use self::look::Looked;
use super::handle::{
    AllocateReply, Call, ClearFault, Error, GrantedDevice, Handle, NEWS_LIMIT, News, Observation,
    PrepareReply, PreparedReply, Release,
};
use super::history;
use super::reports;
use crate::cdi::{self, CdiFiles};
use crate::metrics::Metrics;
use crate::steps::{self, Operation, Step};
use crate::store::{Event, SaveError, Store};

/// Calls that may wait for the arbiter. The kubelet admits pods one by one and prepares a handful at once; beyond
/// this the callers wait in their own tasks.
const QUEUE_LIMIT: usize = 32;

/// How long a step of a move waits after a save that failed: a full disk is not emptied by asking it.
const SAVE_PAUSE: Duration = Duration::from_secs(1);

/// Asks NVML for the processes of every unit, each with the pod that its cgroup names.
pub type ProcessProbe =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Processes> + Send>> + Send + Sync>;

/// The only owner of the pool.
pub struct Arbiter {
    pool: Pool,
    store: Arc<Store>,
    cdi: Arc<CdiFiles>,
    probe: ProcessProbe,
    calls: mpsc::Receiver<Call>,
    offers: watch::Sender<Arc<Offers>>,
    status: watch::Sender<Arc<Status>>,
    started: Instant,
    /// The last save may or may not be on disk: nothing is granted until another has succeeded.
    disk_in_doubt: bool,
    /// No step of a move is tried again before this.
    not_before: Option<Instant>,
    disk: Trouble,
    nvml: Trouble,
    looked: Option<Looked>,
    /// The units that no container could use, as they were told in the log.
    unfit: BTreeMap<UnitId, String>,
    /// The units and minors that the CDI files were made of.
    written_minors: Vec<(UnitId, u32)>,
    /// Who has the ledger, if it is not ours any more.
    successor: watch::Sender<Option<PodUid>>,
    /// What was seen since then.
    kept: Vec<Call>,
    metrics: Metrics,
    news: broadcast::Sender<News>,
}

impl fmt::Debug for Arbiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arbiter")
            .field("generation", &self.pool.ledger().generation)
            .finish_non_exhaustive()
    }
}

/// Whether something that goes wrong with every batch has been logged: once when it begins, once when it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    Told,
}

/// What a call gets once the batch is on disk, or not.
enum Answer {
    Allocate(
        oneshot::Sender<Result<AllocateReply, Error>>,
        AllocateOutcome,
        Vec<DeviceId>,
    ),
    Prepare(
        oneshot::Sender<Result<PrepareReply, Error>>,
        PrepareOutcome,
        ClaimRef,
    ),
    Unprepare(oneshot::Sender<Result<(), Error>>, ClaimRef),
    Release(
        oneshot::Sender<Result<Result<usize, NotReleased>, Error>>,
        Release,
        Result<usize, NotReleased>,
    ),
    ClearFault(
        oneshot::Sender<Result<Result<(), NotCleared>, Error>>,
        ClearFault,
        Result<(), NotCleared>,
    ),
    Observe(oneshot::Sender<Result<(), Error>>),
}

impl Arbiter {
    /// An arbiter of a pool, and the way to it.
    #[must_use]
    pub fn new(
        pool: Pool,
        store: Arc<Store>,
        cdi: Arc<CdiFiles>,
        probe: ProcessProbe,
        started: Instant,
        metrics: Metrics,
    ) -> (Self, Handle) {
        let pool = without_early_unprepared(pool, &store);
        let pool = after_boot(pool, &store);
        let (sender, calls) = mpsc::channel(QUEUE_LIMIT);
        let (offers, offers_seen) = watch::channel(Arc::new(pool.offers()));
        let (status, status_seen) = watch::channel(Arc::new(pool.status(SystemTime::now())));
        let (successor, successor_seen) = watch::channel(None);
        let news = broadcast::channel(NEWS_LIMIT).0;
        let arbiter = Self {
            pool,
            store,
            cdi,
            probe,
            calls,
            offers,
            status,
            started,
            disk_in_doubt: false,
            not_before: None,
            disk: Trouble::None,
            nvml: Trouble::None,
            looked: None,
            unfit: BTreeMap::new(),
            written_minors: Vec::new(),
            successor,
            kept: Vec::new(),
            metrics: metrics.clone(),
            news: news.clone(),
        };
        let handle = Handle::new(sender, offers_seen, status_seen, started)
            .with_successor(successor_seen)
            .with_metrics(metrics)
            .with_news(news)
            .with_history(&arbiter.store);
        (arbiter, handle)
    }

    /// Serves until every [`Handle`] is gone.
    pub async fn run(mut self) {
        let mut batch = Vec::with_capacity(QUEUE_LIMIT);
        loop {
            let wake = self.time_to_wake();
            tokio::select! {
                received = self.calls.recv_many(&mut batch, QUEUE_LIMIT) => if received == 0 {
                    return;
                },
                () = wake => {}
            }
            self.take(std::mem::take(&mut batch)).await;
        }
    }

    /// Ends when the pool wants to be looked at again; never, if it waits for nothing. After a save that failed the
    /// pool is as it was, and what was due then is still due: it waits for [`SAVE_PAUSE`].
    fn time_to_wake(&self) -> impl Future<Output = ()> + use<> {
        let due = self.pool.wake_at().filter(|_| self.owns());
        let due = due.map(|uptime| self.started + uptime);
        let at = due.map(|due| self.not_before.map_or(due, |earliest| due.max(earliest)));
        async move {
            match at {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        }
    }

    async fn serve(&mut self, batch: Vec<Call>) {
        let minors = self.minors();
        let (processes, unfit) = self.look(&batch, &minors).await;
        let now = Moment {
            wall: SystemTime::now(),
            uptime: self.started.elapsed(),
        };
        let mut transition = self.pool.begin(now, processes);
        transition.observe_unfit(unfit);
        let (answers, seen_now) = self.decide_all(&mut transition, batch, minors).await;
        transition.pass_time();
        let operations = answers.iter().filter_map(Answer::operation);
        steps::planned(self.pool.ledger(), transition.pool().ledger(), operations);
        // The file of the counted side is made of what there is, not of who has it: it needs no ledger on disk.
        let granted = answers.iter().any(Answer::is_granted);
        let counted = OptionFuture::from(granted.then(|| self.write_counted()));
        let (saved, _) = tokio::join!(self.save(&mut transition), counted);
        self.not_before = saved.is_err().then(|| Instant::now() + SAVE_PAUSE);
        if let Err(failure) = saved {
            for answer in answers {
                answer.fail(&failure);
            }
            return;
        }
        let before: BTreeSet<_> = self.pool.ledger().prepared.keys().cloned().collect();
        let stood = self.pool.standing();
        let reports = self.pool.commit(transition);
        steps::reached(Step::Committed);
        reports::tell(&reports);
        for answer in &answers {
            answer.tell();
        }
        self.note(&reports, &answers);
        self.metrics.took_place(&reports);
        for report in reports {
            self.tell(News::Happened(report));
        }
        let adopted = stood != Standing::Serving && self.pool.standing() == Standing::Serving;
        if adopted || seen_now != self.written_minors {
            self.restore_cdi().await;
        }
        for gone in before
            .iter()
            .filter(|uid| !self.pool.ledger().prepared.contains_key(*uid))
        {
            let uid = gone.clone();
            self.with_cdi("a claim's CDI file could not be removed", move |cdi| {
                cdi.remove_claim(&uid)
            })
            .await;
            steps::reached(Step::SpecRemoved);
        }
        // The faces' views go out before the answers, so that an answered caller never reads an older one.
        self.publish();
        steps::reached(Step::Published);
        self.answer_all(answers).await;
    }

    /// Answers to different claims go beside each other, as each of them writes a file; those to one claim one after the
    /// other, as they write the same.
    async fn answer_all(&self, answers: Vec<Answer>) {
        let mut queues: BTreeMap<Option<ClaimUid>, Vec<Answer>> = BTreeMap::new();
        for answer in answers {
            queues.entry(answer.prepared()).or_default().push(answer);
        }
        let queues = queues.into_values().map(async |queue| {
            for answer in queue {
                self.answer(answer).await;
                steps::reached(Step::Answered);
            }
        });
        join_all(queues).await;
    }

    /// Decides calls one after the other; which units there are then comes with the answers. What a call brings is looked
    /// at before the next one: nothing is given or offered that was not.
    async fn decide_all(
        &mut self,
        transition: &mut Transition,
        batch: Vec<Call>,
        mut known: Vec<(UnitId, u32)>,
    ) -> (Vec<Answer>, Vec<(UnitId, u32)>) {
        let mut answers = Vec::with_capacity(batch.len());
        for call in batch {
            answers.push(decide(transition, call));
            let minors = minors_of(transition.pool());
            if minors != known {
                let unfit = self.unfit(&minors).await;
                transition.observe_unfit(unfit);
                known = minors;
            }
        }
        (answers, known)
    }

    /// Tells whoever listens, which may be nobody.
    fn tell(&self, news: News) {
        let _ = self.news.send(news);
    }

    /// Logs that saving has begun to fail, or is over it: what each caller hears is in its own answer.
    fn tell_saving(&mut self, outcome: &Result<(), Error>) {
        match (outcome, self.disk) {
            (Err(failure), Trouble::None) => {
                self.disk = Trouble::Told;
                error!(error = %failure, "the ledger can't be saved; nothing is granted until it can");
                self.tell(News::NotSaved(failure.to_string()));
            }
            (Ok(()), Trouble::Told) => {
                self.disk = Trouble::None;
                info!("the ledger is saved again");
                self.tell(News::SavedAgain);
            }
            (Ok(()), Trouble::None) | (Err(_), Trouble::Told) => {}
        }
    }

    /// Saves what a transition changed. After a save in doubt everything is saved anew before anything is granted.
    async fn save(&mut self, transition: &mut Transition) -> Result<(), Error> {
        let Some(ledger) = self.unsaved(transition) else {
            return Ok(());
        };
        let outcome = self.write(ledger).await;
        self.tell_saving(&outcome);
        outcome
    }

    fn unsaved(&self, transition: &mut Transition) -> Option<Ledger> {
        let changed = transition.ledger_to_save().cloned();
        // Without adoption there is no truth to write; memory holds what was seen of the hardware.
        let serves = transition.pool().standing() == Standing::Serving;
        let in_doubt = self.disk_in_doubt.then(|| self.pool.ledger().clone());
        changed.or(in_doubt).filter(|_| serves)
    }

    async fn write(&mut self, ledger: Ledger) -> Result<(), Error> {
        let store = Arc::clone(&self.store);
        let since = Instant::now();
        let saved = tokio::task::spawn_blocking(move || store.save(&ledger))
            .await
            .map_err(|_| Error::Stopping)?;
        match saved {
            Ok(()) => {
                self.metrics.saved(since.elapsed());
                self.disk_in_doubt = false;
                Ok(())
            }
            Err(failure) => {
                self.metrics.not_saved();
                self.disk_in_doubt |= matches!(failure, SaveError::Doubtful { .. });
                Err(Error::NotSaved(reports::chain(&failure)))
            }
        }
    }

    async fn answer(&self, answer: Answer) {
        match answer {
            Answer::Allocate(reply, outcome, _) => {
                let answer = match outcome {
                    AllocateOutcome::Granted(grants) => {
                        AllocateReply::Granted(grants.into_iter().map(granted).collect())
                    }
                    AllocateOutcome::NeedsListing => AllocateReply::NeedsListing,
                    AllocateOutcome::Wait => AllocateReply::Wait,
                    AllocateOutcome::Refused(refusal) => AllocateReply::Refused(refusal),
                };
                drop(reply.send(Ok(answer)));
            }
            Answer::Prepare(reply, outcome, _) => {
                let answer = match outcome {
                    PrepareOutcome::Prepared(preparation) => self.put_on_disk(preparation).await,
                    PrepareOutcome::Wait(refusal) => Ok(PrepareReply::Wait(refusal)),
                    PrepareOutcome::Refused(refusal) => Ok(PrepareReply::Refused(refusal)),
                };
                drop(reply.send(answer));
            }
            Answer::Unprepare(reply, claim) => {
                drop(reply.send(self.remember_unprepared(claim).await));
            }
            Answer::Release(reply, _, outcome) => drop(reply.send(Ok(outcome))),
            Answer::ClearFault(reply, _, outcome) => drop(reply.send(Ok(outcome))),
            Answer::Observe(reply) => drop(reply.send(Ok(()))),
        }
    }

    /// Writes into the history what was done and refused.
    fn note(&self, reports: &[Report], answers: &[Answer]) {
        let generation = self.pool.ledger().generation;
        // An admin's command stands before what it led to.
        let (commands, refusals): (Vec<_>, Vec<_>) = answers
            .iter()
            .filter_map(|answer| answer.event(generation))
            .partition(|event| event.reason.is_none());
        let reported = reports
            .iter()
            .filter_map(|report| history::of_report(report, generation));
        for event in commands.into_iter().chain(reported).chain(refusals) {
            self.store.note(event);
        }
    }

    /// Writes the claim's CDI file on every Prepare: it lives on a tmpfs, and a runtime without it starts nothing.
    async fn put_on_disk(&self, preparation: Preparation) -> Result<PrepareReply, Error> {
        let minors = self.minors();
        let cdi = Arc::clone(&self.cdi);
        let wanted = preparation.clone();
        let driver = self.driver_version();
        tokio::task::spawn_blocking(move || {
            for device in &wanted.devices {
                if let Some(minor) = minor_of(&minors, &device.unit) {
                    cdi.check_nodes(&device.unit, minor)?;
                }
            }
            cdi.write_claim(&wanted, |unit| minor_of(&minors, unit), driver.as_deref())
        })
        .await
        .map_err(|_| Error::Stopping)?
        .map_err(|failure| Error::NoCdiFile(reports::chain(&failure)))?;
        let uid = preparation.claim.uid;
        Ok(PrepareReply::Prepared(
            preparation
                .devices
                .into_iter()
                .map(|device| PreparedReply {
                    cdi_device: cdi::claim_device(&uid, &device.device),
                    device,
                })
                .collect(),
        ))
    }

    /// An Unprepare that comes before the pool serves is kept beside the ledger that is not there.
    async fn remember_unprepared(&self, claim: ClaimRef) -> Result<(), Error> {
        if self.pool.standing() == Standing::Serving {
            return Ok(());
        }
        let store = Arc::clone(&self.store);
        tokio::task::spawn_blocking(move || store.remember_unprepared(&claim))
            .await
            .map_err(|_| Error::Stopping)?
            .map_err(|failure| Error::NotSaved(reports::chain(&failure)))
    }

    /// CDI files are a function of ledger and inventory: whatever is missing or left over is put right. Without an
    /// inventory nothing is known about device nodes, and the files stay as they are.
    async fn restore_cdi(&mut self) {
        let minors = self.minors();
        if minors.is_empty() {
            return;
        }
        if self.pool.standing() == Standing::Serving {
            self.restore_claims().await;
        }
        if self.write_counted().await {
            self.written_minors = minors;
        }
    }

    async fn restore_claims(&self) {
        let minors = self.minors();
        let prepared = self.pool.ledger().prepared.clone();
        let driver = self.driver_version();
        self.with_cdi("the CDI files could not be restored", move |cdi| {
            for preparation in prepared.values() {
                let minor_of = |unit: &UnitId| minor_of(&minors, unit);
                if let Err(failure) = cdi.write_claim(preparation, minor_of, driver.as_deref()) {
                    warn!(claim = %preparation.claim, error = reports::chain(&failure), "a claim's CDI file could not be restored");
                }
            }
            cdi.sweep(&prepared.keys().cloned().collect()).map(drop)
        })
        .await;
    }

    /// Writes the file of the counted side, unless it is as it should be.
    fn write_counted(&self) -> impl Future<Output = bool> + use<> {
        let minors = self.minors();
        let driver = self.driver_version();
        self.with_cdi(
            "the CDI file of the counted side could not be written",
            move |cdi| cdi.write_counted(&minors, driver.as_deref()),
        )
    }

    /// The driver that runs: NVML tells it with each GPU that it sees.
    fn driver_version(&self) -> Option<String> {
        let ledger = self.pool.ledger();
        let mut present = ledger.units.iter();
        let seen = present.find(|(unit, _)| self.pool.is_present(unit));
        seen.map(|(_, record)| record.gpu.driver_version.clone())
    }

    fn minors(&self) -> Vec<(UnitId, u32)> {
        minors_of(&self.pool)
    }

    fn with_cdi<E: std::error::Error + Send + 'static, W>(
        &self,
        failed: &'static str,
        work: W,
    ) -> impl Future<Output = bool> + use<E, W>
    where
        W: FnOnce(&CdiFiles) -> Result<(), E> + Send + 'static,
    {
        let cdi = Arc::clone(&self.cdi);
        async move {
            match tokio::task::spawn_blocking(move || work(&cdi)).await {
                Ok(Ok(())) => true,
                Ok(Err(failure)) => {
                    warn!(error = reports::chain(&failure), "{failed}");
                    false
                }
                Err(_) => false,
            }
        }
    }

    fn publish(&self) {
        let offers = self.pool.offers();
        let is_news = self.offers.send_if_modified(|shown| {
            let changed = **shown != offers;
            if changed {
                *shown = Arc::new(offers);
            }
            changed
        });
        let status = self.pool.status(SystemTime::now());
        if is_news {
            let sides = reports::sides(&status.units);
            debug!(sides, "what is offered has changed");
        }
        self.status.send_if_modified(|shown| {
            let changed = shown.units != status.units
                || shown.generation != status.generation
                || shown.standing != status.standing
                || shown.rivals != status.rivals
                || shown.settings != status.settings;
            if changed {
                *shown = Arc::new(status);
            }
            changed
        });
    }
}

/// Applies the Unprepare calls that came while an earlier start had no ledger to write them to. The next save puts
/// that on disk; until then the list of these claims stays there too.
fn without_early_unprepared(mut pool: Pool, store: &Store) -> Pool {
    if pool.standing() == Standing::Serving {
        let mut transition = pool.begin(Moment::default(), Processes::default());
        for claim in store.unprepared() {
            transition.unprepare(&claim);
        }
        reports::tell(&pool.commit(transition));
    }
    pool
}

/// Ends the faults of before the node was booted. The next save puts that on disk; until then the file says of itself that
/// it is from before.
fn after_boot(mut pool: Pool, store: &Store) -> Pool {
    if store.is_from_before_the_boot() {
        let mut transition = pool.begin(Moment::default(), Processes::default());
        transition.observe_boot();
        let reports = pool.commit(transition);
        reports::tell(&reports);
        let generation = pool.ledger().generation;
        let reports = reports.iter();
        for event in reports.filter_map(|report| history::of_report(report, generation)) {
            store.note(event);
        }
    }
    pool
}

fn decide(transition: &mut Transition, call: Call) -> Answer {
    match call {
        Call::Allocate {
            request,
            listing,
            reply,
        } => {
            let evidence = Evidence { listing };
            let outcome = transition.allocate(&request, &evidence);
            Answer::Allocate(reply, outcome, request.ids)
        }
        Call::Prepare { request, reply } => {
            let outcome = transition.prepare(&request);
            Answer::Prepare(reply, outcome, request.claim)
        }
        Call::Unprepare { claim, reply } => {
            transition.unprepare(&claim.uid);
            Answer::Unprepare(reply, claim)
        }
        Call::Release { release, reply } => {
            let outcome = transition.release(&release.unit, release.insistence);
            Answer::Release(reply, release, outcome)
        }
        Call::ClearFault { clear, reply } => {
            let outcome = transition.clear_fault(&clear.unit);
            Answer::ClearFault(reply, clear, outcome)
        }
        Call::Observe { observation, reply } => {
            observe(transition, observation);
            Answer::Observe(reply)
        }
        Call::HandOver { .. } | Call::TakeBack { .. } => {
            unreachable!("these are taken out of each batch before it is decided")
        }
    }
}

pub(super) fn observe(transition: &mut Transition, observation: Observation) {
    match observation {
        Observation::Listing(listing) => transition.observe_listing(listing),
        Observation::Pods(pods) => transition.observe_pods(pods),
        Observation::Claims(claims) => transition.observe_claims(claims),
        Observation::Inventory(inventory) => transition.observe_inventory(inventory),
        Observation::Topology(topology) => transition.observe_topology(topology),
        Observation::Xids(xids) => transition.observe_xids(&xids),
        Observation::Recovery { asked, actions } => transition.observe_recovery(asked, &actions),
        Observation::KubeletIds(ids) => transition.observe_kubelet_ids(ids),
        Observation::Names(names) => transition.observe_names(&names),
        Observation::Adoption(adoption) => transition.adopt(*adoption),
        Observation::Processes => transition.observe_processes(),
        Observation::Node(count) => transition.observe_node(count),
        Observation::NodeAway => transition.observe_node_away(),
        Observation::Rivals(rivals) => transition.observe_rivals(rivals),
        Observation::Leaving => transition.leave(),
        Observation::Demand(demand) => transition.observe_demand(demand),
        Observation::Slice(open) => transition.observe_slice(open),
        Observation::Settings(settings) => transition.configure(settings),
    }
}

fn granted(grant: Grant) -> GrantedDevice {
    GrantedDevice {
        cdi_device: cdi::counted_device(&grant.unit),
        grant,
    }
}

/// The units that NVML sees, with the minors of their GPUs.
fn minors_of(pool: &Pool) -> Vec<(UnitId, u32)> {
    let units = pool.ledger().units.iter();
    units
        .filter(|(unit, _)| pool.is_present(unit))
        .map(|(unit, record)| (unit.clone(), record.gpu.minor))
        .collect()
}

fn minor_of(minors: &[(UnitId, u32)], unit: &UnitId) -> Option<u32> {
    minors
        .iter()
        .find(|(known, _)| known == unit)
        .map(|(_, minor)| *minor)
}

impl Answer {
    /// The claim whose file is written for it.
    fn prepared(&self) -> Option<ClaimUid> {
        let Self::Prepare(_, PrepareOutcome::Prepared(_), claim) = self else {
            return None;
        };
        Some(claim.uid.clone())
    }

    fn is_granted(&self) -> bool {
        matches!(self, Self::Allocate(_, AllocateOutcome::Granted(_), _))
    }

    /// What it is in the history: a refusal, or an admin's command.
    fn event(&self, generation: u64) -> Option<Event> {
        match self {
            Self::Allocate(_, AllocateOutcome::Refused(refusal), ids) => {
                let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
                let who = format!("ids {}", ids.join(", "));
                Some(history::of_refusal(refusal, who, generation))
            }
            Self::Prepare(_, PrepareOutcome::Refused(refusal), claim) => Some(history::of_refusal(
                refusal,
                format!("claim {claim}"),
                generation,
            )),
            Self::Release(_, release, Ok(_)) => Some(history::of_command(
                "ReleasedByAdmin",
                &release.unit,
                &release.reason,
                generation,
            )),
            Self::ClearFault(_, clear, Ok(())) => Some(history::of_command(
                "FaultClearedByAdmin",
                &clear.unit,
                &clear.reason,
                generation,
            )),
            Self::Allocate(..)
            | Self::Prepare(..)
            | Self::Unprepare(..)
            | Self::Release(..)
            | Self::ClearFault(..)
            | Self::Observe(_) => None,
        }
    }

    /// What a transition with this answer is about; `None`: nobody asked for anything.
    fn operation(&self) -> Option<Operation> {
        match self {
            Self::Allocate(..) => Some(Operation::Allocate),
            Self::Prepare(..) => Some(Operation::Prepare),
            Self::Unprepare(..) => Some(Operation::Unprepare),
            Self::Release(..) | Self::ClearFault(..) | Self::Observe(_) => None,
        }
    }

    /// Logs what an admin has commanded.
    fn tell(&self) {
        if let Self::Release(_, release, Ok(holds)) = self {
            warn!(unit = %release.unit, holds, why = release.reason, "an admin has released a unit");
        }
        if let Self::ClearFault(_, clear, Ok(())) = self {
            warn!(unit = %clear.unit, why = clear.reason, "an admin has cleared the fault of a GPU");
        }
    }

    fn fail(self, failure: &Error) {
        match self {
            Self::Allocate(reply, ..) => drop(reply.send(Err(failure.clone()))),
            Self::Prepare(reply, ..) => drop(reply.send(Err(failure.clone()))),
            Self::Release(reply, ..) => drop(reply.send(Err(failure.clone()))),
            Self::ClearFault(reply, ..) => drop(reply.send(Err(failure.clone()))),
            Self::Unprepare(reply, _) | Self::Observe(reply) => {
                drop(reply.send(Err(failure.clone())));
            }
        }
    }
}
