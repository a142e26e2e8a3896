//! Waiting for the ledger while another daemon on this node owns it: a rolling update, seen from the new pod.
//!
//! It is ready before it owns anything, because that is what makes Kubernetes end the old pod, should that one not
//! hand over by itself. It asks only once it could serve, so that a version that can't leaves the old one at work.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use bridge_core::PodUid;
use kube::Client;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::admin::{self, ClientError, ConditionName, Conditions};
use crate::cli::RunOptions;
use crate::follow::chain;
use crate::inventory::Scan;
use crate::store::{BootId, Error as StoreError, Loaded, Store};

/// How often the lock is tried. The kernel frees it in the moment in which the old process ends, however it does;
/// a try is three system calls.
const TRY_LOCK: Duration = Duration::from_millis(20);

/// Pause between two questions to an owner that said no, or nothing. It does so while it can't save, for one.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// Pause between two looks at whether the API server answers.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How long the API server may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How long the answer of the owner is waited for once the lock is free: it is on its way then.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a successor can report on before it owns the ledger: what it needs to serve.
const BEFORE: [ConditionName; 2] = [
    ConditionName::NvmlAnswering,
    ConditionName::ApiServerReachable,
];

/// The ledger, and how it came to be ours.
pub(super) struct Owned {
    pub(super) store: Store,
    pub(super) loaded: Loaded,
    pub(super) way: Way,
}

impl Owned {
    fn new((store, loaded): (Store, Loaded), way: Way) -> Self {
        Self { store, loaded, way }
    }
}

/// How the ledger came to be ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nobody had it.
    Free,
    /// A daemon gave it away that is still there, and passes on the calls that come to it.
    HandedOver,
}

/// How far the question for the ledger is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    /// Not asked, or answered with no.
    NotAsked,
    /// There is no answer yet.
    Asked,
    /// Answered with yes, if it was not taken back since.
    HandedOver,
}

/// What a successor knows while it waits.
pub(super) struct Waiting<'a> {
    pub(super) options: &'a RunOptions,
    pub(super) client: &'a Client,
    pub(super) conditions: &'a Conditions,
    pub(super) scans: watch::Receiver<Scan>,
}

impl Waiting<'_> {
    /// Opens the ledger; with a pod UID, as soon as nobody else owns it.
    ///
    /// # Errors
    /// The state folder can't be used, or another daemon owns it and there is no pod UID to keep the two apart.
    pub(super) async fn own(self) -> Result<Owned, StoreError> {
        let boot_id = BootId::read(&self.options.proc_root).unwrap_or_else(|error| {
            warn!(%error, "the boot id can't be read; a reboot will not be noticed by it");
            BootId::unknown()
        });
        let folder = &self.options.state_dir;
        let owned = match (Store::open(folder, boot_id.clone()), &self.options.pod_uid) {
            (Err(error @ StoreError::Owned { .. }), Some(_)) => error,
            (done, _) => return done.map(|opened| Owned::new(opened, Way::Free)),
        };
        info!(error = chain(&owned), "waiting for the ledger");
        self.say_of_later(
            true,
            "another daemon on this node owns the ledger and serves; this one waits for it",
        );
        let since = Instant::now();
        let question = watch::Sender::new(Question::NotAsked);
        let asking = self.ask_for_it(&question);
        tokio::pin!(asking);
        let opened = tokio::select! {
            opened = when_free(folder, boot_id) => opened,
            never = &mut asking => match never {},
        };
        let way = tokio::select! {
            way = way(&question) => way,
            never = &mut asking => match never {},
        };
        let waited_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        info!(waited_ms, ?way, "the ledger is free");
        // The former owner asks whether this one serves, and must not hear what was true of itself.
        self.say_of_later(
            false,
            "this daemon has just got the ledger and begins to serve",
        );
        opened.map(|opened| Owned::new(opened, way))
    }

    /// Reports on what only the owner of the ledger does.
    fn say_of_later(&self, ok: bool, message: &str) {
        let later = ConditionName::ALL.into_iter();
        for name in later.filter(|name| !BEFORE.contains(name)) {
            self.conditions.set(name, ok, message);
        }
    }

    async fn ask_for_it(&self, question: &watch::Sender<Question>) -> std::convert::Infallible {
        self.until_it_could_serve().await;
        let Some(pod) = &self.options.pod_uid else {
            return std::future::pending().await;
        };
        let mut told = BTreeSet::new();
        loop {
            question.send_replace(Question::Asked);
            let is_handed_over = ask(&self.options.admin_socket, pod, &mut told).await;
            question.send_replace(if is_handed_over {
                Question::HandedOver
            } else {
                Question::NotAsked
            });
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    /// Waits until NVML answers and this daemon's rights let it read its Node.
    async fn until_it_could_serve(&self) {
        let mut scans = self.scans.clone();
        let seen = scans
            .wait_for(|scan| matches!(scan, Scan::Seen { .. }))
            .await
            .is_ok();
        if !seen {
            // The inventory has ended, and the daemon with it.
            return std::future::pending().await;
        }
        let name = ConditionName::ApiServerReachable;
        let path = format!("/api/v1/nodes/{}", self.options.node_name);
        loop {
            let request = http::Request::get(&path)
                .body(Vec::new())
                .expect("the name of a node can stand in a path");
            let why = match timeout(ANSWER_LIMIT, self.client.request_text(request)).await {
                Ok(Ok(_)) => {
                    self.conditions.set(name, true, "the own Node can be read");
                    return;
                }
                Ok(Err(error)) => chain(&error),
                Err(_) => format!("no answer within {} s", ANSWER_LIMIT.as_secs()),
            };
            let message =
                format!("the own Node can't be read, so the ledger is not asked for: {why}");
            self.conditions.set(name, false, message);
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

/// How the ledger came to be free. An owner lets the lock go before it answers, and one that dies answers nothing.
async fn way(question: &watch::Sender<Question>) -> Way {
    let mut answer = question.subscribe();
    let answered = answer.wait_for(|question| *question != Question::Asked);
    match timeout(LAST_WORDS, answered).await {
        Ok(Ok(question)) if *question == Question::HandedOver => Way::HandedOver,
        Ok(Ok(_) | Err(_)) | Err(_) => Way::Free,
    }
}

/// Opens the ledger in the moment in which its lock is free.
async fn when_free(folder: &Path, boot_id: BootId) -> Result<(Store, Loaded), StoreError> {
    loop {
        match Store::open(folder, boot_id.clone()) {
            Err(StoreError::Owned { .. }) => tokio::time::sleep(TRY_LOCK).await,
            done => return done,
        }
    }
}

/// Asks the owner once, whether it hands over, and says in the log what came of it, each thing once.
async fn ask(admin_socket: &Path, pod: &PodUid, told: &mut BTreeSet<String>) -> bool {
    let why = match admin::hand_over(admin_socket, pod).await {
        Ok(()) => {
            info!("the owner of the ledger has handed it over");
            return true;
        }
        Err(error @ ClientError::Code { .. }) => format!(
            "{}: it is a version that can't hand over, and is waited for until it ends",
            chain(&error)
        ),
        Err(
            error @ (ClientError::Connect { .. }
            | ClientError::Exchange { .. }
            | ClientError::Refused { .. }
            | ClientError::Silent { .. }),
        ) => chain(&error),
    };
    if told.insert(why.clone()) {
        warn!(
            error = why,
            "the owner of the ledger did not hand it over; it is asked again, and waited for"
        );
    }
    false
}
