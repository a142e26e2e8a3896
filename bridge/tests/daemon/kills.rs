//! `kill -9` of the daemon at every named step of a transition and at moments thrown from a seed, and of the kubelet,
//! again and again on one node under load. Fifty in every run of the tests, as many as wanted by hand (`make kills`).
//!
//! After each kill the ledger's file is judged, then the daemon starts on what was left, and everything is judged
//! again: what the kubelet was told is held, nothing is held that nobody asked for, the same question gets the same
//! answer, CDI files, slice and list are there again, and the kubelet's book agrees.

mod book;
mod load;
mod table;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpu_bridge::steps::{KILL_AT, Operation, Step};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::dice::Dice;
use crate::process::{Daemon, gpu_bridge};
use crate::world::{
    DRIVER, NAMESPACE, RESOURCE, SOON, World, claim, claim_uid, from_environment, pod_uid, proof,
    until,
};

use self::book::{Book, Hold, Of, Told, Wrong};
use self::table::{Failed, Table};

/// GPUs of the node: more than twice what the load uses, since a unit whose Allocate was never answered stays held for
/// a minute, and a fast machine kills often in a minute.
const GPUS: usize = 32;
/// A step that the load does not come to in this time is not tested.
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// The latest random moment under load.
const LATEST: Duration = Duration::from_millis(400);
/// Random kills of the daemon and of the kubelet for each time that all named steps had their turn.
const RANDOM: (usize, usize) = (5, 3);
/// Up to so many volleys come before each kill, without the last.
const VOLLEYS_BEFORE: u64 = 3;
/// One kill in so many also takes the CDI folder and the slice.
const WIPE_EVERY: u64 = 4;
/// What is told of the history after a kill that something was wrong with: some kills back.
const HISTORY: usize = 60;
/// The last hold has ended by then: one of which nobody says what it is for is kept for a minute.
const LAST_HOLD: Duration = Duration::from_secs(90);
/// How often it is looked at.
const TICK: Duration = Duration::from_millis(50);
/// Short times of a move, so that units change sides often.
const CONFIG: &str = "offers: {settle: 50ms, dwell: 50ms, quiet: 100ms}\n";

/// Who is killed, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kill {
    /// The daemon at a step of a transition with this operation in it.
    At(Operation, Step),
    /// The daemon at the moment at which the kubelet has the answer.
    Received(Operation),
    /// The daemon at a random moment.
    Daemon,
    /// The kubelet at a random moment.
    Kubelet,
}

impl Kill {
    /// Every named step once, and some random moments.
    fn round() -> Vec<Self> {
        let steps = Operation::ALL.into_iter().flat_map(|operation| {
            let steps = Step::ALL.into_iter().filter(move |it| it.is_of(operation));
            steps.map(move |step| Self::At(operation, step))
        });
        let calls = [
            Operation::Allocate,
            Operation::Prepare,
            Operation::Unprepare,
        ];
        let (daemon, kubelet) = RANDOM;
        steps
            .chain(calls.map(Self::Received))
            .chain(std::iter::repeat_n(Self::Daemon, daemon))
            .chain(std::iter::repeat_n(Self::Kubelet, kubelet))
            .collect()
    }

    /// What the load has to do so that it comes to this.
    fn operation(self) -> Option<Operation> {
        match self {
            Self::At(operation, _) | Self::Received(operation) => Some(operation),
            Self::Daemon | Self::Kubelet => None,
        }
    }

    fn name(self) -> String {
        match self {
            Self::At(operation, step) => format!("{} {}", operation.as_str(), step.as_str()),
            Self::Received(operation) => format!("{} answer received", operation.as_str()),
            Self::Daemon => "daemon, random moment".to_owned(),
            Self::Kubelet => "kubelet, random moment".to_owned(),
        }
    }
}

/// The node, what its kubelet was told, and what came of the kills so far.
struct Kills {
    world: World,
    dice: RefCell<Dice>,
    book: RefCell<Book>,
    names: RefCell<u64>,
    failed: RefCell<Failed>,
    /// What has happened to each pod and to the daemon, for the reader of a fault.
    history: RefCell<Vec<String>>,
    /// The daemon is killed as soon as the kubelet has an answer to this.
    at_answer: RefCell<Option<Operation>>,
    table: Table,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_at_every_step_and_at_random_moments_lose_no_hold_and_invent_none() {
    kills(50, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "as long as one wants: make kills"]
async fn as_many_kills_as_wanted_lose_no_hold_and_invent_none() {
    let count = from_environment("KILLS", 500);
    kills(
        usize::try_from(count).expect("some"),
        from_environment("SEED", 1),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_judge_of_the_kills_sees_what_was_said_and_not_saved_and_what_nobody_asked_for() {
    let mut kills = Kills::new(1).await;
    kills.start().await;
    let empty = fs::read(kills.world.ledger()).unwrap();
    until("a pod of each kind has its GPU", SOON, async || {
        let has = |is_kind: fn(&Of) -> bool| !kills.book.borrow().granted(is_kind).is_empty();
        let (counted, claim) = (has(|of| *of == Of::Counted), has(|of| *of != Of::Counted));
        if !counted {
            kills.start_counted().await;
        }
        if !claim {
            kills.start_claim(0).await;
        }
        counted && claim
    })
    .await;
    let full = fs::read(kills.world.ledger()).unwrap();
    kills.world.kill_daemon();
    assert_eq!(kills.judge_file().1, Wrong::default());
    // So the file is if a grant is answered before it is saved.
    fs::write(kills.world.ledger(), empty).unwrap();
    let (held, wrong) = kills.judge_file();
    assert_eq!(held, []);
    assert!(
        wrong.lost.len() >= 2 && wrong.invented.is_empty(),
        "{wrong:?}"
    );
    // So it is if an Unprepare is answered before it is saved, or a hold that has ended is there again.
    fs::write(kills.world.ledger(), &full).unwrap();
    kills.start().await;
    assert_eq!(kills.rest().await, []);
    kills.book.borrow_mut().forget_all_but(&[]);
    kills.world.kill_daemon();
    assert_eq!(kills.judge_file().1, Wrong::default());
    fs::write(kills.world.ledger(), full).unwrap();
    let (_, wrong) = kills.judge_file();
    assert!(
        wrong.lost.is_empty() && wrong.invented.len() >= 2,
        "{wrong:?}"
    );
}

async fn kills(count: usize, seed: u64) {
    let mut kills = Kills::new(seed).await;
    let started = Instant::now();
    let mut round = Vec::new();
    let mut missed = Vec::new();
    kills.start().await;
    for _ in 0..count {
        if round.is_empty() {
            round = Kill::round();
            kills.dice.borrow_mut().shuffle(&mut round);
        }
        let kill = round.pop().expect("a round has kills");
        if !kills.once(kill).await {
            missed.push(kill);
        }
    }
    for kill in missed {
        kills.once(kill).await;
    }
    let left = kills.rest().await;
    let table = &kills.table;
    proof(&format!(
        "kills: {} in {} s, seed {seed}; {}; {}; holds left at the end {}\n{table}",
        count,
        started.elapsed().as_secs(),
        table.sum(),
        kills.failed.borrow(),
        left.len(),
    ));
    assert!(table.is_good(), "{}", table.faults());
    assert_eq!(left, Vec::new(), "all pods have ended");
}

// --- One kill ---

impl Kills {
    async fn new(seed: u64) -> Self {
        let mut world = World::new(u32::try_from(GPUS).expect("few")).await;
        world.api.allow("patch", "nodes/status");
        world.configure(CONFIG);
        world.start_kubelet().await;
        Self {
            world,
            dice: RefCell::new(Dice::new(seed, 0)),
            book: RefCell::default(),
            names: RefCell::default(),
            failed: RefCell::default(),
            history: RefCell::default(),
            at_answer: RefCell::default(),
            table: Table::default(),
        }
    }

    /// Kills the daemon or the kubelet, brings it back, and judges what is there then. False: the kill did not fall where
    /// it was to fall.
    async fn once(&mut self, kill: Kill) -> bool {
        let before = self.dice.borrow_mut().below(VOLLEYS_BEFORE);
        for _ in 0..before {
            self.volley(None).await;
        }
        let reached = match kill {
            Kill::Kubelet => {
                self.kill_kubelet().await;
                true
            }
            Kill::At(..) | Kill::Received(_) | Kill::Daemon => self.until_killed(kill).await,
        };
        let killed = Instant::now();
        self.note(format!("killed: {}", kill.name()));
        let mut wrong = Wrong::default();
        let held = match kill {
            Kill::Kubelet => {
                self.registered().await;
                self.holds().await
            }
            Kill::At(..) | Kill::Received(_) | Kill::Daemon => {
                let (held, found) = self.judge_file();
                wrong.add(found);
                self.wipe();
                self.start().await;
                held
            }
        };
        let took = killed.elapsed();
        wrong.add(self.ask_again(&held).await);
        if kill == Kill::Kubelet {
            wrong.lost.extend(self.prepare_all_again().await);
        }
        wrong.add(self.judge().await);
        if !wrong.is_none() {
            let history = self.history.borrow();
            let last = history.len().saturating_sub(HISTORY);
            eprintln!("{wrong:#?}\n{}", history[last..].join("\n"));
        }
        self.table.add(&kill.name(), reached, wrong, took);
        reached
    }

    async fn start(&mut self) {
        let mut command = gpu_bridge();
        command
            .env("GPU_BRIDGE_LOG", "warn")
            .env(KILL_AT, self.kill_at());
        let daemon = Daemon::start(command, self.world.flags());
        self.world.adopt(daemon);
        self.world.ready().await;
    }

    /// Writes down what has happened.
    fn note(&self, what: String) {
        self.history.borrow_mut().push(what);
    }

    /// The file that tells the daemon where to end.
    fn kill_at(&self) -> PathBuf {
        self.world.path("kill-at")
    }

    /// From now on the daemon ends where it is to end.
    fn arm(&self, kill: Kill) {
        match kill {
            Kill::At(operation, step) => {
                let at = format!("{}/{}", operation.as_str(), step.as_str());
                fs::write(self.kill_at(), at).expect("it can be written");
            }
            Kill::Received(operation) => *self.at_answer.borrow_mut() = Some(operation),
            Kill::Daemon => {
                let at = self.dice.borrow_mut().between((Duration::ZERO, LATEST));
                let pid = self.world.daemon().pid();
                // The process is not waited for before this has happened, so the number is its own.
                tokio::spawn(async move {
                    tokio::time::sleep(at).await;
                    kill_process(pid, Signal::KILL).expect("it is our child");
                });
            }
            Kill::Kubelet => {}
        }
    }

    /// Loads the node until the daemon has ended. False: it did not come to the step, and was killed from outside.
    async fn until_killed(&mut self, kill: Kill) -> bool {
        self.arm(kill);
        let started = Instant::now();
        while self.world.daemon_mut().status().is_none() && started.elapsed() < STEP_LIMIT {
            self.volley(kill.operation()).await;
        }
        let reached = self.world.daemon_mut().status().is_some();
        self.world.kill_daemon();
        drop(fs::remove_file(self.kill_at()));
        *self.at_answer.borrow_mut() = None;
        reached
    }

    /// Loads the node for a random time, drops every call of the kubelet in the middle, and starts it again.
    async fn kill_kubelet(&self) {
        let at = self.dice.borrow_mut().between((Duration::ZERO, LATEST));
        let load = async {
            loop {
                self.volley(None).await;
            }
        };
        // A kill falls on a random moment, and on no state.
        drop(tokio::time::timeout(at, load).await);
        let restarted = self.world.kubelet().restart().await;
        restarted.expect("it starts again");
    }

    async fn registered(&mut self) {
        let kubelet = self.world.kubelet();
        kubelet.wait_for_driver(DRIVER, SOON).await;
        until("the kubelet has the list", SOON, async || {
            kubelet.capacity(RESOURCE).is_some()
        })
        .await;
        self.world.ready().await;
    }

    /// A kubelet that was started again has forgotten what is prepared, and asks for it; returns who was told otherwise
    /// than before.
    async fn prepare_all_again(&self) -> Vec<String> {
        let claims = self.book.borrow().granted(|of| *of != Of::Counted);
        let mut faults = Vec::new();
        for name in claims {
            let again = self.world.prepare(&name).await;
            if again.is_err() || self.prepared(&name) != self.told(&name) {
                faults.push(format!("{name} was prepared, and is told {again:?} now"));
            }
        }
        faults
    }
}

// --- What is judged ---

impl Kills {
    /// What `gpu-bridge ledger show` says of the file, and what is wrong with it.
    fn judge_file(&self) -> (Vec<Hold>, Wrong) {
        let mut command = gpu_bridge();
        command.args(["ledger", "show"]).arg(self.world.state_dir());
        let output = command.output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("it writes text");
        if !output.status.success() && !self.world.ledger().exists() {
            return Default::default();
        }
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the ledger is not whole: {why}");
        let holds = shown(&text);
        let wrong = self.book.borrow().judge(&holds);
        (holds, wrong)
    }

    async fn holds(&self) -> Vec<Hold> {
        let status = self.world.status().await;
        let units = status["units"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let holds = units.iter().flat_map(|unit| {
            let holds = unit["holds"].as_array().cloned().unwrap_or_default();
            holds.into_iter().map(move |hold| Hold {
                unit: text(&unit["unit"]),
                phase: text(&hold["phase"]),
                id: text(&hold["id"]),
                holder: text(if hold["claim"].is_object() {
                    &hold["claim"]["name"]
                } else {
                    &hold["pod"]["name"]
                }),
            })
        });
        holds.collect()
    }

    /// What is wrong with a daemon that serves again, and with what others see of it.
    async fn judge(&mut self) -> Wrong {
        self.world.ready().await;
        let holds = self.holds().await;
        let mut book = self.book.borrow_mut();
        let mut wrong = book.judge(&holds);
        book.forget_all_but(&holds);
        let pods = book.pods.clone();
        drop(book);
        for (name, pod) in &pods {
            let Told::Granted { ids, units } = &pod.told else {
                continue;
            };
            match &pod.of {
                Of::Counted => {
                    let has: BTreeSet<_> = self.world.ids(name).into_iter().collect();
                    if has != *ids {
                        let fault = format!("the kubelet's book has {has:?} for {name}");
                        wrong.lost.push(fault);
                    }
                    self.assert_spec(&self.world.counted_spec(), units.iter());
                }
                Of::Claim(_) => {
                    let names = self.world.kubelet().cdi_devices(&claim(name));
                    let names: Vec<_> = names.iter().map(|it| device_in(it)).collect();
                    let spec = self.world.claim_spec(&claim_uid(name));
                    self.assert_spec(&spec, names.iter());
                }
            }
        }
        wrong.files.extend(self.left_over());
        wrong
    }

    fn assert_spec(&self, path: &Path, names: impl Iterator<Item = impl AsRef<str>>) {
        let text = fs::read_to_string(path);
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for name in names {
            let name = name.as_ref();
            assert!(text.contains(name), "no {name} in {}", path.display());
        }
    }

    /// Files of the CDI folder that are no spec of a claim that is there, or are unfinished.
    fn left_over(&self) -> Vec<String> {
        let book = self.book.borrow();
        let claims = book.pods.keys();
        let claims = claims.map(|name| self.world.claim_spec(&claim_uid(name)));
        let mut known: BTreeSet<_> = claims.collect();
        known.insert(self.world.counted_spec());
        let entries = fs::read_dir(self.world.cdi_dir()).expect("it is there");
        let paths = entries.map(|entry| entry.expect("it is there").path());
        let unknown = paths.filter(|path| !known.contains(path));
        unknown
            .map(|path| format!("{} is left over", path.display()))
            .collect()
    }

    /// Takes what is not durable away, now and then.
    fn wipe(&self) {
        if self.dice.borrow_mut().below(WIPE_EVERY) > 0 {
            return;
        }
        drop(fs::remove_dir_all(self.world.cdi_dir()));
        for slice in self.world.api.list("resourceslices") {
            let name = slice["metadata"]["name"].as_str().expect("it has a name");
            self.world.api.delete("resourceslices", "", name);
        }
    }

    /// Asks what was not answered once more, twice: what was on disk is the answer, and the answer stays.
    async fn ask_again(&mut self, held: &[Hold]) -> Wrong {
        let mut wrong = Wrong::default();
        let pods = self.book.borrow().pods.clone();
        for (name, pod) in pods {
            if self.world.kubelet().phase(&pod_uid(&name)).is_none() {
                // The kubelet was killed before it had seen the pod.
                self.note(format!("{name} is not known"));
                self.book.borrow_mut().gone(&name, []);
                self.delete(&name);
                continue;
            }
            match (pod.told, pod.of) {
                (Told::Asking(_), Of::Counted) => {
                    wrong.lost.extend(self.allocate_again(&name, held).await);
                }
                (Told::Asking(_), Of::Claim(unit)) => {
                    wrong
                        .lost
                        .extend(self.prepare_again(&name, &unit, held).await);
                }
                (Told::Granted { .. }, Of::Counted) => self.run_or_bury(&name).await,
                (Told::Granted { .. }, Of::Claim(_)) => self.world.runs(&name).await,
                (Told::Ending, _) => self.end(&name).await,
            }
        }
        wrong
    }

    /// The pod whose Allocate was not answered has failed for good; another pod may come with its ids.
    async fn allocate_again(&self, name: &str, held: &[Hold]) -> Option<String> {
        let ids = self.world.kubelet().asked(&pod_uid(name));
        let texts: Vec<&str> = ids.iter().map(String::as_str).collect();
        let mut fault = None;
        if !ids.is_empty() {
            let first = self.world.allocate(&texts).await;
            let second = self.world.allocate(&texts).await;
            let on_disk: BTreeSet<_> = held
                .iter()
                .filter(|it| ids.contains(&it.id))
                .map(|it| &it.unit)
                .collect();
            let is_right = match &first {
                Ok(names) => self.is_kept(&on_disk, names),
                Err(why) => why.contains("NoFreeUnit") && self.is_full(&on_disk, ids.len()).await,
            };
            // What is refused may be free a moment later.
            let stays = first.is_err() || first == second;
            if !stays || !is_right {
                fault = Some(format!(
                    "{name}: {ids:?} is {on_disk:?} on disk; asked again {first:?}, then {second:?}"
                ));
            }
        }
        self.bury(name, ids).await;
        fault
    }

    /// What a pod that is dead had on disk is what is given in its name again. A claim that was allocated it may have it
    /// instead, and another unit is given then.
    fn is_kept(&self, on_disk: &BTreeSet<&String>, names: &[String]) -> bool {
        let answer: BTreeSet<_> = names.iter().map(|it| device_in(it)).collect();
        let claimed = self.claimed();
        let mut units = on_disk.iter();
        units.all(|unit| answer.contains(unit.as_str()) || claimed.contains(*unit))
    }

    /// The node has less left than what these ids want beside what is on disk, which is held by somebody still.
    async fn is_full(&self, on_disk: &BTreeSet<&String>, ids: usize) -> bool {
        let mut taken = self.claimed();
        taken.extend(self.holds().await.into_iter().map(|hold| hold.unit));
        let free = GPUS.saturating_sub(taken.len());
        free < ids.saturating_sub(on_disk.len()) && on_disk.iter().all(|it| taken.contains(*it))
    }

    /// The units that claims are allocated.
    fn claimed(&self) -> BTreeSet<String> {
        let book = self.book.borrow();
        let pods = book.pods.values();
        pods.filter_map(|pod| match &pod.of {
            Of::Claim(unit) => Some(unit.clone()),
            Of::Counted => None,
        })
        .collect()
    }

    async fn prepare_again(&self, name: &str, unit: &str, held: &[Hold]) -> Option<String> {
        let first = self.world.prepare(name).await;
        self.note(format!("{name} is prepared again: {first:?}"));
        let is_held = held
            .iter()
            .any(|it| it.unit == unit && it.phase == "Prepared");
        if first.is_ok() {
            let told = self.prepared(name);
            self.book.borrow_mut().tell(name, told);
            self.world.runs(name).await;
            return None;
        }
        self.end(name).await;
        is_held.then(|| format!("{name} has {unit} on disk, and is told {first:?}"))
    }

    /// A pod that was granted its devices runs on, unless a restarted kubelet has failed it.
    async fn run_or_bury(&self, name: &str) {
        match self.world.kubelet().phase(&pod_uid(name)) {
            Some(testkit::Phase::Failed) => self.bury(name, BTreeSet::new()).await,
            Some(_) | None => self.world.runs(name).await,
        }
    }

    /// Ends everything, and returns the holds that are left in the end.
    async fn rest(&mut self) -> Vec<Hold> {
        let names: Vec<String> = self.book.borrow().pods.keys().cloned().collect();
        for name in names {
            self.end(&name).await;
        }
        let ended = async {
            while !self.holds().await.is_empty() {
                tokio::time::sleep(TICK).await;
            }
        };
        drop(tokio::time::timeout(LAST_HOLD, ended).await);
        assert_eq!(self.left_over(), Vec::<String>::new());
        self.holds().await
    }
}

/// The holds in the table of `gpu-bridge ledger show`.
fn shown(text: &str) -> Vec<Hold> {
    let units = text.split("PREPARED CLAIM").next().unwrap_or_default();
    let rows = units.lines().map(|line| {
        let cells = line.split("  ").map(str::trim);
        cells.filter(|it| !it.is_empty()).collect::<Vec<_>>()
    });
    let hold = |cells: Vec<&str>| match cells[..] {
        [_, unit, _, phase, holder, id, _] if phase != "-" && phase != "PHASE" => Some(Hold {
            unit: unit.to_owned(),
            phase: phase.to_owned(),
            id: id.to_owned(),
            holder: holder_name(holder),
        }),
        _ => None,
    };
    rows.filter_map(hold).collect()
}

/// The name of the pod or claim that the table names.
fn holder_name(words: &str) -> String {
    let name = words.split_once(&format!(" {NAMESPACE}/"));
    name.map_or("-", |(_, name)| name).to_owned()
}

/// The device in a CDI name.
fn device_in(name: &str) -> &str {
    name.split_once('=').map_or(name, |(_, device)| device)
}
