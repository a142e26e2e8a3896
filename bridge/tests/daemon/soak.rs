//! Churn on one daemon that lives on: what it uses at the end is what it used at the beginning, and every call is
//! answered. A minute of it in every run of the tests, an hour by hand (`make soak`).
//!
//! It is judged at rests, when every pod has ended and nobody holds anything: file descriptors must be back at the
//! number of the first rest, but for [`DESCRIPTORS`], memory must not have grown by more than [`GROWTH`], and no file may be
//! left.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::timeout;

use crate::dice::Dice;
use crate::process::{Daemon, gpu_bridge};
use crate::world::{
    DRIVER, NAMESPACE, NODE, RESOURCE, SOON, World, from_environment, pod_uid, proof, until,
};

/// GPUs of the node.
const GPUS: u32 = 8;
/// Longer than any answer may take: the kubelet gives a Prepare 45 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(45);
/// The last hold has ended by then: one of which nobody says what it is for is kept for a minute.
const LAST_HOLD: Duration = Duration::from_secs(90);
/// How often it is looked at.
const TICK: Duration = Duration::from_millis(50);
/// The first rest comes after this: caches are filled and the allocator has what it keeps.
const WARM_UP: Duration = Duration::from_secs(10);
/// How much more memory than at the first rest the daemon may have at the last, in percent. What the allocator keeps
/// varies by one; ten kilobytes lost with every pod are more in a minute, and some hundred bytes in an hour.
const GROWTH: u64 = 5;
/// Connections to the API server that are kept for the next request may be some more than at the first rest; one that
/// is lost with every pod, call or restart of the kubelet is soon more.
const DESCRIPTORS: usize = 4;
/// Threads for work that blocks come and go; a thread that is lost with every pod is soon more.
const THREADS: u64 = 16;
/// Fewer operations than this in a second, and little is shown.
const LEAST_PACE: u64 = 3;
/// Short times of a move, so that units change sides often.
const CONFIG: &str = "offers: {settle: 50ms, dwell: 50ms, quiet: 100ms}\n";

/// What may happen next.
#[derive(Debug, Clone, Copy)]
enum Step {
    StartCounted,
    StartClaim,
    StartBoth,
    End,
    ForceDelete,
    PrepareAgain,
    Nonsense,
    Look,
    Rescan,
    Compact,
    ApiBlip,
    RestartKubelet,
}

/// How often, in parts of the sum.
const STEPS: [(Step, u64); 12] = [
    (Step::StartCounted, 200),
    (Step::StartClaim, 200),
    (Step::StartBoth, 60),
    (Step::End, 320),
    (Step::ForceDelete, 60),
    (Step::PrepareAgain, 60),
    (Step::Nonsense, 40),
    (Step::Look, 40),
    (Step::Rescan, 4),
    (Step::Compact, 6),
    (Step::ApiBlip, 2),
    (Step::RestartKubelet, 4),
];

/// Which pods arrive for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wave {
    Counted,
    Claims,
    Both,
}

/// Waves in turn: while counted pods keep arriving, no unit may ever come over to claims.
const WAVES: [(Wave, u64); 3] = [(Wave::Counted, 1), (Wave::Claims, 1), (Wave::Both, 1)];
/// How long a wave lasts: several times as long as units need to come over to claims, on any machine.
const WAVE: Duration = Duration::from_secs(3);
/// Between two steps, many of which find nothing to do.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Use {
    Counted(usize),
    Claim(String),
}

#[derive(Debug, Clone)]
struct Running {
    name: String,
    of: Use,
}

#[derive(Debug, Default)]
struct Counts {
    steps: u64,
    counted: u64,
    counted_refused: u64,
    claims: u64,
    claims_refused: u64,
    kubelet_restarts: u64,
    rests: u64,
    unanswered: u64,
    doubled: u64,
}

impl Counts {
    /// Waits for the answer to a call; `None`: there was none in time.
    async fn answer<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        let answer = timeout(ANSWER_LIMIT, call).await.ok();
        self.unanswered += u64::from(answer.is_none());
        answer
    }
}

/// What the daemon's process has.
#[derive(Debug, Clone, Copy)]
struct Usage {
    memory_kib: u64,
    descriptors: usize,
    threads: u64,
}

struct Soak {
    world: World,
    dice: Dice,
    wave: Wave,
    wave_ends: Instant,
    running: Vec<Running>,
    counts: Counts,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minute_of_churn_leaves_memory_and_descriptors_as_they_were_and_no_call_unanswered() {
    soak(Duration::from_secs(50), Duration::from_secs(40), 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it takes an hour: make soak"]
async fn an_hour_of_churn_leaves_memory_and_descriptors_as_they_were_and_no_call_unanswered() {
    let length = Duration::from_secs(from_environment("SOAK_SECONDS", 3600));
    soak(length, Duration::from_secs(60), from_environment("SEED", 1)).await;
}

async fn soak(length: Duration, between_rests: Duration, seed: u64) {
    let mut soak = Soak::new(seed).await;
    let started = Instant::now();
    soak.churn(WARM_UP).await;
    let first = soak.rest().await;
    let mut last = first;
    let mut most = first.memory_kib;
    while started.elapsed() < length {
        soak.churn(between_rests).await;
        soak.rest().await;
        last = soak.back_at(first.descriptors).await;
        most = most.max(last.memory_kib);
    }
    let counts = &soak.counts;
    let line = format!(
        "soak: {} s, seed {seed}, {} steps, {} counted pods ({} refused), {} claims ({} refused), \
         {} kubelet restarts, {} rests; memory {} KiB at the first rest, {} at the last, {most} at most; \
         descriptors {} and {}, threads {} and {}; doubled {}, unanswered {}",
        started.elapsed().as_secs(),
        counts.steps,
        counts.counted,
        counts.counted_refused,
        counts.claims,
        counts.claims_refused,
        counts.kubelet_restarts,
        counts.rests,
        first.memory_kib,
        last.memory_kib,
        first.descriptors,
        last.descriptors,
        first.threads,
        last.threads,
        counts.doubled,
        counts.unanswered,
    );
    proof(&line);
    assert_eq!((counts.doubled, counts.unanswered), (0, 0), "{line}");
    assert!(
        last.memory_kib * 100 <= first.memory_kib * (100 + GROWTH),
        "{line}"
    );
    assert!(last.threads <= first.threads + THREADS, "{line}");
    assert!(counts.steps >= length.as_secs() * LEAST_PACE, "{line}");
    let least = counts
        .counted
        .min(counts.claims)
        .min(counts.kubelet_restarts);
    assert!(least > 0, "{line}");
}

impl Soak {
    async fn new(seed: u64) -> Self {
        let mut world = World::new(GPUS).await;
        world.api.allow("patch", "nodes/status");
        world.configure(CONFIG);
        world.start_kubelet().await;
        let mut command = gpu_bridge();
        // What goes well is not worth the test's own memory.
        command.env("GPU_BRIDGE_LOG", "off");
        let daemon = Daemon::start(command, world.flags());
        world.adopt(daemon);
        world.readyz().await;
        Self {
            world,
            dice: Dice::new(seed, 0),
            wave: Wave::Claims,
            wave_ends: Instant::now() + WAVE,
            running: Vec::new(),
            counts: Counts::default(),
        }
    }

    async fn churn(&mut self, length: Duration) {
        let end = Instant::now() + length;
        while Instant::now() < end {
            self.counts.steps += 1;
            if Instant::now() >= self.wave_ends {
                self.wave = self.dice.weighted(&WAVES);
                self.wave_ends = Instant::now() + WAVE;
            }
            let step = self.dice.weighted(&STEPS);
            self.step(step).await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::StartCounted => self.start_counted().await,
            Step::StartClaim => self.start_claims(1).await,
            Step::StartBoth => {
                self.start_claims(2).await;
                self.start_counted().await;
            }
            Step::End => self.end_one().await,
            Step::ForceDelete => self.force_delete_one().await,
            Step::PrepareAgain => self.prepare_all_again().await,
            Step::Nonsense => {
                let call = self.world.allocate(&["GPU-nobody-has-this"]);
                if let Some(answer) = self.counts.answer(call).await {
                    drop(answer.expect_err("nobody has it"));
                }
            }
            Step::Look => self.look().await,
            Step::Rescan => self.world.rescan(),
            Step::Compact => self.world.api.compact(),
            Step::ApiBlip => {
                self.world.api.go_away();
                self.look().await;
                self.world.api.come_back();
            }
            Step::RestartKubelet => self.restart_kubelet().await,
        }
    }

    // --- What pods do ---

    fn next_name(&self) -> String {
        format!(
            "p{}",
            self.counts.counted
                + self.counts.counted_refused
                + self.counts.claims
                + self.counts.claims_refused
        )
    }

    /// What the scheduler of counted pods has left to give: it goes by the Node.
    fn counted_left(&self) -> usize {
        let node = self
            .world
            .api
            .get("nodes", "", NODE)
            .expect("the node is there");
        let count = node["status"]["allocatable"][RESOURCE].as_str();
        let count: usize = count.map_or(0, |it| it.parse().expect("a number"));
        let used = self.running.iter().map(|it| match &it.of {
            Use::Counted(gpus) => *gpus,
            Use::Claim(_) => 0,
        });
        count.saturating_sub(used.sum())
    }

    async fn start_counted(&mut self) {
        if self.wave == Wave::Claims {
            return;
        }
        let wanted = 1 + usize::from(self.dice.per_mille(200));
        if self.counted_left() < wanted {
            return;
        }
        let name = self.next_name();
        let gpus = u32::try_from(wanted).expect("one or two");
        let admitted = self.world.admit_counted(&name, gpus);
        let Some(admitted) = self.counts.answer(admitted).await else {
            return;
        };
        if admitted.is_err() {
            self.counts.counted_refused += 1;
            self.world.end_pod(&name).await;
            return;
        }
        self.counts.counted += 1;
        self.world.runs(&name).await;
        let of = Use::Counted(wanted);
        self.running.push(Running { name, of });
    }

    /// Some claims at once, each on a device that the scheduler finds free.
    async fn start_claims(&mut self, count: usize) {
        if self.wave == Wave::Counted {
            return;
        }
        let taken = |device: &String| {
            self.running
                .iter()
                .any(|it| it.of == Use::Claim(device.clone()))
        };
        let open = self.world.open_devices().into_iter();
        let devices: Vec<_> = open.filter(|device| !taken(device)).take(count).collect();
        let mut started = Vec::new();
        for device in devices {
            let name = format!("{}-{}", self.next_name(), started.len());
            self.world.allocate_claim(&name, &device, &name);
            self.world.admit_claimant(&name).await;
            started.push(Running {
                name,
                of: Use::Claim(device),
            });
        }
        let answers = started
            .iter()
            .map(|pod| timeout(ANSWER_LIMIT, self.world.prepare(&pod.name)));
        let answers = futures::future::join_all(answers).await;
        for (pod, answer) in started.into_iter().zip(answers) {
            match answer {
                Ok(Ok(())) => {
                    self.counts.claims += 1;
                    self.world.runs(&pod.name).await;
                    self.running.push(pod);
                }
                Ok(Err(_)) => {
                    self.counts.claims_refused += 1;
                    self.end(&pod.name).await;
                }
                Err(_) => self.counts.unanswered += 1,
            }
        }
    }

    fn take_one(&mut self) -> Option<Running> {
        let count = u64::try_from(self.running.len()).expect("a few");
        if count == 0 {
            return None;
        }
        let at = usize::try_from(self.dice.below(count)).expect("a few");
        Some(self.running.swap_remove(at))
    }

    async fn end(&mut self, name: &str) {
        self.counts.answer(self.world.end_pod(name)).await;
    }

    async fn end_one(&mut self) {
        if let Some(pod) = self.take_one() {
            self.end(&pod.name).await;
        }
    }

    /// A pod is gone at once, and what it had is given back a moment later.
    async fn force_delete_one(&mut self) {
        let Some(pod) = self.take_one() else {
            return;
        };
        self.world.kubelet().force_delete(&pod_uid(&pod.name));
        self.world.api.delete("pods", NAMESPACE, &pod.name);
        let given_back = self.world.kubelet().reconcile_claims();
        if let Some(answer) = self.counts.answer(given_back).await {
            answer.expect("an Unprepare is never refused");
        }
        if matches!(pod.of, Use::Claim(_)) {
            self.world
                .api
                .delete("resourceclaims", NAMESPACE, &pod.name);
        }
    }

    async fn prepare_all_again(&mut self) {
        let claims = self
            .running
            .iter()
            .filter(|it| matches!(it.of, Use::Claim(_)));
        let again = claims.map(|pod| timeout(ANSWER_LIMIT, self.world.prepare(&pod.name)));
        for answer in futures::future::join_all(again).await {
            match answer {
                Ok(answer) => answer.expect("what is prepared is prepared again"),
                Err(_) => self.counts.unanswered += 1,
            }
        }
    }

    async fn restart_kubelet(&mut self) {
        self.counts.kubelet_restarts += 1;
        self.world
            .kubelet()
            .restart()
            .await
            .expect("it starts again");
        self.registered().await;
        // The kubelet has forgotten what is prepared, and asks for it again.
        self.prepare_all_again().await;
    }

    async fn registered(&self) {
        self.world.kubelet().wait_for_driver(DRIVER, SOON).await;
        until("the kubelet has the list", SOON, async || {
            self.world.kubelet().capacity(RESOURCE).is_some()
        })
        .await;
    }

    // --- What is judged ---

    /// Asks for the status, and looks whether anybody shares a unit.
    async fn look(&mut self) {
        let Some(status) = self.counts.answer(self.world.status()).await else {
            return;
        };
        let units = status["units"].as_array().cloned().unwrap_or_default();
        assert_eq!(
            units.len(),
            usize::try_from(GPUS).expect("a few"),
            "{status}"
        );
        let shared = |unit: &&Value| unit["holds"].as_array().is_some_and(|it| it.len() > 1);
        let shared = units.iter().filter(shared).count();
        self.counts.doubled += u64::try_from(shared).expect("a few");
    }

    /// Ends every pod, waits until nothing is left of them, and says what the daemon uses then.
    async fn rest(&mut self) -> Usage {
        while !self.running.is_empty() {
            self.end_one().await;
        }
        let free = timeout(LAST_HOLD, async {
            while !self.world.holds().await.is_empty() {
                tokio::time::sleep(TICK).await;
            }
        });
        if free.await.is_err() {
            let held = self.world.holds().await;
            panic!("all pods have ended, and after {LAST_HOLD:?} there are still holds: {held:?}");
        }
        self.look().await;
        self.counts.rests += 1;
        let left = |folder: PathBuf, known: &[&str]| {
            let entries = fs::read_dir(folder).expect("it is there");
            let names = entries.map(|entry| entry.expect("it is there").file_name());
            let mut names = names.map(|name| name.into_string().expect("our names are text"));
            names.any(|name| !known.contains(&&*name))
        };
        until("no file is left", SOON, async || {
            !left(self.world.cdi_dir(), &["gpu-bridge.dev-gpu.json"])
                && !left(
                    self.world.state_dir(),
                    &[
                        "config.last-good.yaml",
                        "history.jsonl",
                        "history.older.jsonl",
                        "ledger.json",
                        "lock",
                        "unprepared.json",
                    ],
                )
        })
        .await;
        self.usage()
    }

    /// Waits until there are no more open files than at the first rest, and says what the daemon uses then: connections
    /// that are closed need a moment.
    async fn back_at(&self, descriptors: usize) -> Usage {
        until(
            "the open files are those of the first rest",
            SOON,
            async || self.usage().descriptors <= descriptors + DESCRIPTORS,
        )
        .await;
        self.usage()
    }

    fn usage(&self) -> Usage {
        let pid = self.world.daemon().pid().as_raw_nonzero();
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(folder.join("status")).expect("the daemon runs");
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|it| it.parse().ok())
                .unwrap_or_else(|| panic!("no {key} in {status}"))
        };
        Usage {
            memory_kib: number("VmRSS:"),
            threads: number("Threads:"),
            descriptors: fs::read_dir(folder.join("fd"))
                .expect("the daemon is ours")
                .count(),
        }
    }
}
