//! Many pods of both kinds, force deletes among them, judged by the runtime's record.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kube::api::{DeleteParams, ListParams};

use crate::objects::PodSpec;
use crate::record::Double;
use crate::standin::StandIns;
use crate::world::{Setup, World, tick};

/// Pods of one run.
const PODS: usize = 400;
/// One pod in this many is deleted with grace 0.
const FORCED_ONE_IN: u64 = 5;
/// Pods that are there at once, of each kind: one more than GPUs, so that the next one always waits.
const AT_ONCE: (usize, usize) = (6, 4);
/// The same where each kind believes that all eight GPUs are its own.
const AT_ONCE_TWICE: (usize, usize) = (8, 8);
/// Counted pods of a run that may fail: the kubelet refuses a pod by itself, without asking any plugin, when it is
/// admitted in the moment between two lists of devices. One in a hundred is the bound, most runs have none.
const COUNTED_FAILED_LIMIT: usize = PODS / 100;
/// No run takes longer unless something hangs.
const RUN_LIMIT: Duration = Duration::from_secs(600);

/// Numbers from a seed, the same on every machine (SplitMix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Counted,
    Claim,
}

/// A pod that was created and is not gone yet.
struct Alive {
    kind: Kind,
    /// When to delete it, once it runs.
    life: Duration,
    forced: bool,
    ends: Option<Instant>,
    deleted: bool,
}

/// What happened in a run.
#[derive(Default)]
pub struct Tally {
    created: usize,
    ran: usize,
    pub counted_failed: Vec<String>,
    forced: BTreeSet<String>,
}

/// Drives one run: pods come as others go.
pub struct Churn<'a> {
    world: &'a World,
    dice: Dice,
    at_once: (usize, usize),
    alive: BTreeMap<String, Alive>,
    pub tally: Tally,
}

impl<'a> Churn<'a> {
    /// `at_once`: pods that are there at once, counted ones and those with claims.
    pub fn new(world: &'a World, seed: u64, at_once: (usize, usize)) -> Self {
        Self {
            world,
            dice: Dice::new(seed),
            at_once,
            alive: BTreeMap::new(),
            tally: Tally::default(),
        }
    }

    /// Whether every pod was created and is gone.
    pub fn is_over(&self, pods: usize) -> bool {
        self.tally.created == pods && self.alive.is_empty()
    }

    /// Creates what fits, looks at all pods once, and deletes whose time is up.
    pub async fn step(&mut self, pods: usize) {
        self.fill(pods).await;
        let listed = self
            .world
            .pods()
            .list(&ListParams::default())
            .await
            .expect("pods can be listed");
        let phases: BTreeMap<String, String> = listed
            .items
            .into_iter()
            .filter_map(|pod| Some((pod.metadata.name?, pod.status?.phase?)))
            .collect();
        self.alive
            .retain(|name, pod| !pod.deleted || phases.contains_key(name));
        let names: Vec<String> = self.alive.keys().cloned().collect();
        for name in names {
            self.look_at(&name, phases.get(&name).map(String::as_str))
                .await;
        }
    }

    async fn fill(&mut self, pods: usize) {
        for (kind, at_once) in [
            (Kind::Counted, self.at_once.0),
            (Kind::Claim, self.at_once.1),
        ] {
            let mut there = self.alive.values().filter(|pod| pod.kind == kind).count();
            while there < at_once && self.tally.created < pods {
                let number = self.tally.created;
                let (name, spec) = match kind {
                    Kind::Counted => {
                        let name = format!("counted-{number}");
                        let spec = PodSpec::counted(&name, 1);
                        (name, spec)
                    }
                    Kind::Claim => {
                        let name = format!("claim-{number}");
                        let spec = PodSpec::from_template(&name, "one", &["main"]);
                        (name, spec)
                    }
                };
                self.world.create(spec).await;
                let pod = Alive {
                    kind,
                    life: Duration::from_millis(1_000 + self.dice.below(3_000)),
                    forced: self.dice.below(FORCED_ONE_IN) == 0,
                    ends: None,
                    deleted: false,
                };
                self.alive.insert(name, pod);
                self.tally.created += 1;
                there += 1;
            }
        }
    }

    async fn look_at(&mut self, name: &str, phase: Option<&str>) {
        let pod = self.alive.get_mut(name).expect("it was there a moment ago");
        if pod.deleted {
            return;
        }
        match phase {
            Some("Running") if pod.ends.is_none() => {
                pod.ends = Some(Instant::now() + pod.life);
                self.tally.ran += 1;
            }
            Some("Running") if pod.ends.is_some_and(|ends| ends <= Instant::now()) => {
                pod.deleted = true;
                let mut parameters = DeleteParams::default();
                if pod.forced {
                    parameters = parameters.grace_period(0);
                    self.tally.forced.insert(name.to_owned());
                }
                self.remove(name, &parameters).await;
            }
            Some("Failed") => {
                pod.deleted = true;
                if pod.kind == Kind::Counted {
                    let why = self.world.events(name).await;
                    self.tally.counted_failed.push(format!("{name}: {why:?}"));
                }
                self.remove(name, &DeleteParams::default()).await;
            }
            _ => {}
        }
    }

    async fn remove(&self, name: &str, parameters: &DeleteParams) {
        match self.world.pods().delete(name, parameters).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => panic!("pod {name} could not be deleted: {error}"),
        }
    }
}

/// Double uses by kind.
pub struct Doubles {
    pub cross: Vec<Double>,
    pub claim_to_claim: Vec<Double>,
    pub counted_to_counted: Vec<Double>,
}

pub fn doubles(world: &World) -> Doubles {
    use crate::record::Holder;
    let mut sorted = Doubles {
        cross: Vec::new(),
        claim_to_claim: Vec::new(),
        counted_to_counted: Vec::new(),
    };
    for double in world.record().doubles() {
        match (&double.first.holder, &double.second.holder) {
            (Holder::Counted(_), Holder::Counted(_)) => sorted.counted_to_counted.push(double),
            (Holder::Claim(_), Holder::Claim(_)) => sorted.claim_to_claim.push(double),
            (Holder::Counted(_), Holder::Claim(_)) | (Holder::Claim(_), Holder::Counted(_)) => {
                sorted.cross.push(double);
            }
        }
    }
    sorted
}

/// The table of a run, as facts an admin can compare.
fn print_table(name: &str, tally: &Tally, doubles: &Doubles, took: Duration) {
    let longest = doubles
        .counted_to_counted
        .iter()
        .map(|double| double.overlap)
        .max()
        .unwrap_or_default();
    println!(
        "| {name} | pods {} | ran {} | doubled across kinds {} | claim to claim {} | counted to counted after force {} (longest {} ms) | counted failed {} | {} s |",
        tally.created,
        tally.ran,
        doubles.cross.len(),
        doubles.claim_to_claim.len(),
        doubles.counted_to_counted.len(),
        longest.as_millis(),
        tally.counted_failed.len(),
        took.as_secs(),
    );
}

/// The promise, whatever else happened in the run.
fn assert_nothing_doubled(world: &World, tally: &Tally, doubles: &Doubles) {
    assert!(
        doubles.cross.is_empty(),
        "across kinds: {:#?}",
        doubles.cross
    );
    assert!(
        doubles.claim_to_claim.is_empty(),
        "claim to claim: {:#?}",
        doubles.claim_to_claim
    );
    let log = world.daemon_log();
    let reported = log.matches("HandedOverBusy").count();
    for double in &doubles.counted_to_counted {
        assert!(
            tally.forced.contains(&double.first.pod.name),
            "counted to counted without a force delete: {double:#?}"
        );
    }
    assert!(
        doubles.counted_to_counted.len() <= reported,
        "{} double uses after force deletes, {reported} reported",
        doubles.counted_to_counted.len()
    );
}

/// Runs a churn to its end; also tells how long it took.
async fn run(mut churn: Churn<'_>, pods: usize) -> (Tally, Duration) {
    let began = Instant::now();
    while !churn.is_over(pods) {
        assert!(began.elapsed() < RUN_LIMIT, "the run hangs");
        churn.step(pods).await;
        tick().await;
    }
    (churn.tally, began.elapsed())
}

#[tokio::test]
async fn four_hundred_pods_of_both_kinds_double_nothing_and_leave_nothing() {
    let Some(world) = World::start(Setup::split(5, 3).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let (tally, took) = run(Churn::new(&world, 1, AT_ONCE), PODS).await;
    let doubles = doubles(&world);
    print_table("gpu-bridge", &tally, &doubles, took);
    assert_nothing_doubled(&world, &tally, &doubles);
    assert!(
        tally.counted_failed.len() <= COUNTED_FAILED_LIMIT,
        "{:#?}",
        tally.counted_failed
    );
    world.wait_no_claims().await;
    world.wait_all_free().await;
}

#[tokio::test]
async fn the_same_churn_doubles_nothing_while_both_kinds_draw_from_all_gpus() {
    /// Enough for several rounds of turns.
    const SHARED: usize = 200;
    let Some(world) = World::start(Setup::shared(8).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let (tally, took) = run(Churn::new(&world, 2, AT_ONCE), SHARED).await;
    let doubles = doubles(&world);
    print_table("gpu-bridge, shared", &tally, &doubles, took);
    assert_nothing_doubled(&world, &tally, &doubles);
    assert!(
        tally.counted_failed.len() <= COUNTED_FAILED_LIMIT,
        "{:#?}",
        tally.counted_failed
    );
    world.wait_no_claims().await;
    world.wait_all_free().await;
}

#[tokio::test]
async fn the_same_churn_on_two_unarbitrated_stand_ins_doubles() {
    /// Enough to compare.
    const COMPARED: usize = 120;
    /// Far less than there are: some 800 for each 1,000 pods.
    const MANY: usize = 20;
    let Some(world) = World::without_daemon(Setup::split(5, 3).impatient()).await else {
        return;
    };
    let _stand_ins = StandIns::start(&world).await;
    world.create_template("one", 1).await;
    let (tally, took) = run(Churn::new(&world, 1, AT_ONCE_TWICE), COMPARED).await;
    let doubles = doubles(&world);
    print_table("two stand-ins", &tally, &doubles, took);
    assert!(
        doubles.cross.len() >= MANY,
        "two daemons that know nothing of each other must double, and the judge must see it: {} across kinds",
        doubles.cross.len()
    );
    world.wait_no_claims().await;
}

#[tokio::test]
async fn kills_of_the_daemon_and_restarts_of_the_kubelet_under_churn_double_and_lose_nothing() {
    /// Moments of each kind.
    const BLOWS: usize = 10;
    /// Pods of this run: long enough for all the blows.
    const UNDER_BLOWS: usize = 200;
    let Some(mut world) = World::start(Setup::split(5, 3).impatient()).await else {
        return;
    };
    world.create_template("one", 1).await;
    let mut dice = Dice::new(7);
    let began = Instant::now();
    let mut tally = Tally::default();
    let mut alive = BTreeMap::new();
    let mut blows: Vec<bool> = (0..2 * BLOWS).map(|n| n % 2 == 0).collect();
    for at in (1..blows.len()).rev() {
        let other = usize::try_from(dice.below(at as u64 + 1)).expect("small");
        blows.swap(at, other);
    }
    while !(tally.created == UNDER_BLOWS && alive.is_empty() && blows.is_empty()) {
        assert!(began.elapsed() < RUN_LIMIT, "the run hangs");
        let mut churn = Churn {
            world: &world,
            dice: Dice::new(dice.below(u64::MAX)),
            at_once: AT_ONCE,
            alive,
            tally,
        };
        let until = Instant::now() + Duration::from_millis(1_000 + dice.below(5_000));
        while Instant::now() < until && !churn.is_over(UNDER_BLOWS) {
            churn.step(UNDER_BLOWS).await;
            tick().await;
        }
        Churn { alive, tally, .. } = churn;
        match blows.pop() {
            Some(true) => {
                world.kill_daemon();
                world.start_daemon().await;
            }
            Some(false) => {
                world.control("restart kubelet KILL");
                world.wait_ready().await;
            }
            None => {}
        }
    }
    let doubles = doubles(&world);
    print_table("gpu-bridge under blows", &tally, &doubles, began.elapsed());
    for failed in &tally.counted_failed {
        println!("counted pod failed: {failed}");
    }
    assert_nothing_doubled(&world, &tally, &doubles);
    world.wait_no_claims().await;
    world.wait_all_free().await;
}
