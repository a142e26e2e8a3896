//! What the daemon costs in time, memory and CPU, beside what nobody could do without: `make bench`.
//!
//! Each figure of a call stands beside its floor, measured in the same run on the same file system: an empty call on the
//! same socket, one save of a file as large as the ledger, one GET of a claim, one question about the processes of all
//! GPUs. Nothing is judged, since a machine may be busy; a round in every run of the tests shows that it runs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use bridge_core::Ledger;
use bridge_nvml::{Options, Session};
use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use crate::calls::Plugin;
use crate::idle::{self, LISTED};
use crate::process::gpu_bridge;
use crate::restart_time;
use crate::world::{NAMESPACE, RESOURCE, SOON, World, from_environment};

/// GPUs of a usual node.
const GPUS: u32 = 8;
/// GPUs of a large one.
const MANY: u32 = 16;
/// Questions for a preference in each round.
const QUESTIONS: u64 = 20;
/// Changes of the configuration in each round.
const CHANGES: u64 = 4;
/// What a call may take beyond its floor.
const BEYOND: Duration = Duration::from_micros(500);
/// How often is looked for the first list: short beside a start of some ten milliseconds.
const LOOK: Duration = Duration::from_micros(500);

// --- Figures ---

/// Times of one thing.
#[derive(Debug, Default)]
struct Times(Vec<Duration>);

impl Times {
    /// Measures one of them.
    async fn take<T>(&mut self, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let done = work.await;
        self.0.push(start.elapsed());
        done
    }

    /// The time that so many in a hundred don't exceed.
    fn percentile(&self, percent: usize) -> Duration {
        let mut times = self.0.clone();
        times.sort();
        let last = times.len().saturating_sub(1);
        times.get(last * percent / 100).copied().unwrap_or_default()
    }

    fn middle(&self) -> Duration {
        self.percentile(50)
    }
}

fn ms(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64() * 1000.0)
}

/// What is told at the end.
#[derive(Debug, Default)]
struct Page(String);

impl Page {
    fn line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    /// A row about times, its floor and its goal, which half of the times have to be within.
    fn row(&mut self, what: &str, times: &Times, floor: Duration, goal: Duration) {
        self.judge(what, times, floor, (50, goal));
    }

    /// The same with a goal for so many in a hundred.
    fn judge(&mut self, what: &str, times: &Times, floor: Duration, goal: (usize, Duration)) {
        let (middle, worst) = (times.middle(), times.percentile(99));
        let (percent, goal) = goal;
        let judged = times.percentile(percent);
        let verdict = if judged <= goal { "within" } else { "over" };
        writeln!(
            self.0,
            "| {what} | {} | {} | {} | {} | p{percent} {} {verdict} |",
            times.0.len(),
            ms(middle),
            ms(worst),
            ms(floor),
            ms(goal),
        )
        .expect("a text can be written to");
    }
}

/// What a call can't do without.
#[derive(Debug, Default)]
struct Floors {
    call: Times,
    save: Times,
    get: Times,
    processes: Times,
}

impl Floors {
    fn of_allocate(&self) -> Duration {
        self.call.middle() + self.save.middle() + self.processes.middle()
    }

    fn of_prepare(&self) -> Duration {
        self.of_allocate() + self.get.middle()
    }

    /// So many of each, on the node as it is. `claim` is one that the API server has.
    async fn measure(&mut self, world: &World, plugin: &Plugin, claim: &str) {
        let api = world.api.url().parse().expect("an address");
        let client = Client::try_from(kube::Config::new(api)).expect("a client");
        let claims: Api<ResourceClaim> = Api::namespaced(client, NAMESPACE);
        let options = Options {
            library: Some(world.node.library()),
            sys_root: world.node.sys_root(),
            ..Options::default()
        };
        let nvml = Session::spawn(options).expect("a thread");
        nvml.snapshot().await.expect("the fake NVML answers");
        claims.get(claim).await.expect("the claim is there");
        plugin.nothing().await.expect("the plugin answers");
        let ledger = fs::read(world.ledger()).expect("there is a ledger");
        for _ in 0..GPUS {
            self.call.take(plugin.nothing()).await.expect("it answers");
            let saved = async { save(&world.state_dir(), &ledger) };
            self.save.take(saved).await.expect("there is room");
            let read = self.get.take(claims.get(claim)).await;
            read.expect("the claim is there");
            let seen = self.processes.take(nvml.processes()).await;
            seen.expect("the fake NVML answers");
        }
        nvml.shutdown().await.expect("it ends");
    }
}

/// Replaces a file so that it lasts: what a save is at the least.
fn save(folder: &Path, content: &[u8]) -> std::io::Result<()> {
    let (temporary, file) = (folder.join("bench.tmp"), folder.join("bench"));
    let mut written = File::create(&temporary)?;
    written.write_all(content)?;
    written.sync_all()?;
    rustix::fs::rename(&temporary, &file)?;
    File::open(folder)?.sync_all()
}

// --- Parts ---

/// From the start of the process until the kubelet has been told of all GPUs, and until the slice is there.
async fn starts(page: &mut Page, rounds: u64) {
    let (mut nothing, mut first, mut again, mut slice) = (
        Times::default(),
        Times::default(),
        Times::default(),
        Times::default(),
    );
    for _ in 0..rounds {
        let version = async { gpu_bridge().arg("--version").output() };
        nothing.take(version).await.expect("the program runs");
        let mut world = World::new(GPUS).await;
        world.start_kubelet().await;
        let start = Instant::now();
        world.start_daemon();
        first.0.push(listed(&world, start).await);
        let has_slice = || world.slice().is_some_and(|it| it.len() == GPUS as usize);
        slice.0.push(since(start, has_slice).await);
        world.ready().await;
        world.kill_daemon();
        world
            .kubelet()
            .restart()
            .await
            .expect("the kubelet restarts");
        let start = Instant::now();
        world.start_daemon();
        again.0.push(listed(&world, start).await);
    }
    let floor = nothing.middle();
    let goal = Duration::from_millis(25);
    page.row("first start to all ids listed", &first, floor, goal);
    page.row("start on a ledger to all ids listed", &again, floor, goal);
    let goal = Duration::from_millis(100);
    page.row("first start to the slice", &slice, floor, goal);

    let rounds = usize::try_from(rounds).expect("some rounds");
    let mut world = restart_time::large().await;
    let (holds, goal) = (restart_time::HOLDS, Duration::from_millis(50));
    for (ledger, holds) in [(Ledger::default(), 0), (restart_time::full(&world), holds)] {
        let times = restart_time::restarts(&mut world, &ledger, rounds).await;
        let what = format!("restart with {holds} holds until it serves, 64 GPUs");
        page.row(&what, &Times(times), floor, goal);
    }
}

/// From a change of the configuration until the kubelet has the list that it means: of a file, and of a ConfigMap.
async fn changes(page: &mut Page, rounds: u64) {
    let mut by_file = World::configured(GPUS, "mode: legacy\n").await;
    let mut by_map = World::of_map(GPUS, "mode: legacy\n").await;
    let (mut file, mut map) = (Times::default(), Times::default());
    let offers = |world: &World, ids: usize| {
        let list = world.kubelet().capacity(RESOURCE);
        list.is_some_and(|it| it.allocatable == ids)
    };
    let all = GPUS as usize;
    for world in [&by_file, &by_map] {
        since(Instant::now(), || offers(world, all)).await;
    }
    for change in 0..rounds * CHANGES {
        let (mode, ids) = if change % 2 == 0 {
            ("mode: drained\n", 0)
        } else {
            ("mode: legacy\n", all)
        };
        let start = Instant::now();
        by_file.configure(mode);
        file.0.push(since(start, || offers(&by_file, ids)).await);
        let start = Instant::now();
        by_map.configure_map(mode);
        map.0.push(since(start, || offers(&by_map, ids)).await);
    }
    let floor = Duration::ZERO;
    let goal = (99, Duration::from_millis(200));
    page.judge("changed file to changed offers", &file, floor, goal);
    let goal = (99, Duration::from_secs(1));
    page.judge("changed ConfigMap to changed offers", &map, floor, goal);
}

async fn listed(world: &World, start: Instant) -> Duration {
    let all = || {
        let capacity = world.kubelet().capacity(RESOURCE);
        capacity.is_some_and(|it| it.capacity == GPUS as usize)
    };
    since(start, all).await
}

/// How long it takes until something is so.
async fn since(start: Instant, is_so: impl Fn() -> bool) -> Duration {
    while !is_so() {
        assert!(start.elapsed() < SOON, "it does not come");
        tokio::time::sleep(LOOK).await;
    }
    start.elapsed()
}

/// Which devices the kubelet should take: a question that it waits for with every pod.
async fn preferences(page: &mut Page, rounds: u64) {
    let goals = [
        (GPUS, Duration::from_micros(200)),
        (MANY, Duration::from_millis(1)),
    ];
    for (gpus, goal) in goals {
        let world = World::configured(gpus, "mode: legacy\n").await;
        let plugin = world.plugin();
        let ids: Vec<String> = world.node.gpus().into_iter().map(|gpu| gpu.uuid).collect();
        let mut floor = Times::default();
        let mut worst: Option<(usize, Times)> = None;
        plugin.nothing().await.expect("the plugin answers");
        for size in 1..=ids.len() {
            let mut times = Times::default();
            for _ in 0..rounds * QUESTIONS {
                floor.take(plugin.nothing()).await.expect("it answers");
                let answer = times.take(plugin.prefer(&ids, size)).await;
                let preferred = answer.expect("it prefers some");
                assert_eq!(preferred.len(), size, "as many as were asked for");
            }
            if worst
                .as_ref()
                .is_none_or(|(_, it)| it.middle() < times.middle())
            {
                worst = Some((size, times));
            }
        }
        let (size, times) = worst.expect("there are sizes");
        let what = format!("GetPreferredAllocation, the slowest size of {gpus}: {size}");
        let floor = floor.middle();
        page.row(&what, &times, floor, floor + goal);
    }
}

/// One call after the other, and eight at once.
async fn calls(page: &mut Page, rounds: u64) {
    let mut floors = Floors::default();
    let (mut allocate, mut prepare, mut unprepare) =
        (Times::default(), Times::default(), Times::default());
    let mut at_once = (Times::default(), Times::default());
    let mut saves = (0, 0);
    for round in 0..rounds {
        let world = World::configured(MANY, "mode: both\n").await;
        let (plugin, driver) = (world.plugin(), world.driver());
        let claims: Vec<String> = (0..GPUS).map(|number| format!("gpu-{number}")).collect();
        for device in &claims {
            world.allocate_claim(device, device, device);
        }
        world.wait_for_holds("Reserved", claims.len()).await;
        floors.measure(&world, &plugin, &claims[0]).await;
        for claim in &claims {
            prepare
                .take(driver.prepare(claim))
                .await
                .expect("it is free");
        }
        for claim in &claims {
            unprepare
                .take(driver.unprepare(claim))
                .await
                .expect("it is known");
        }
        let before = world.generation().await;
        let all = join_all(claims.iter().map(|claim| driver.prepare(claim)));
        let all = at_once.1.take(all).await;
        assert!(all.iter().all(Result::is_ok), "{all:?}");
        saves.1 = saves.1.max(world.generation().await - before);

        let ids: Vec<String> = (GPUS..MANY)
            .map(|number| world.gpu(&format!("gpu-{number}")).uuid)
            .collect();
        if round % 2 == 0 {
            for id in ids {
                let given = allocate.take(plugin.allocate(&[&id])).await;
                given.expect("it is free");
            }
        } else {
            let before = world.generation().await;
            let all = join_all(ids.iter().map(async |id| plugin.allocate(&[id]).await));
            let all = at_once.0.take(all).await;
            assert!(all.iter().all(Result::is_ok), "{all:?}");
            saves.0 = saves.0.max(world.generation().await - before);
        }
    }
    let floor = floors.of_allocate();
    let goal = floor + BEYOND;
    page.row("Allocate", &allocate, floor, goal);
    page.row("NodeUnprepareResources", &unprepare, floor, goal);
    if rounds > 1 {
        let what = "8 Allocates at once, the last answer";
        page.row(what, &at_once.0, floor, goal * 3);
    }
    let floor = floors.of_prepare();
    let goal = floor + BEYOND;
    page.row("NodePrepareResources", &prepare, floor, goal);
    let what = "8 Prepares at once, the last answer";
    page.row(what, &at_once.1, floor, goal * 3);
    page.line("");
    page.line(&format!(
        "Floors, p50: an empty call {} ms, a save {} ms, a GET {} ms, the processes of {MANY} GPUs {} ms.",
        ms(floors.call.middle()),
        ms(floors.save.middle()),
        ms(floors.get.middle()),
        ms(floors.processes.middle()),
    ));
    page.line(&format!(
        "Saves for 8 at once, the most of all rounds: {} for Allocates, {} for Prepares; 3 are the goal.",
        saves.0, saves.1
    ));
}

/// Memory, CPU and requests of a node where nothing happens, with pods that hold GPUs and with none that does.
async fn idle(page: &mut Page, seconds: u64) {
    for holding in [0, GPUS / 2] {
        let world = idle::node(holding).await;
        let process = format!("/proc/{}", world.daemon().pid().as_raw_nonzero());
        let process = Path::new(&process);
        let (cpu, before) = (cpu(process), world.api.counts());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let minutes = Duration::from_secs(seconds).as_secs_f64() / 60.0;
        let cpu = (self::cpu(process) - cpu).as_secs_f64() * 1000.0 / minutes;
        let status = fs::read_to_string(process.join("status")).expect("it runs");
        let mib = |key: &str| number(&status, key) as f64 / 1024.0;
        let asked = since_then(&world, &before);
        let requests = asked.values().sum::<u64>() as f64 / minutes;
        page.line(&format!(
            "Idle for {seconds} s, {LISTED} pods listed, {} of them with GPUs: {cpu:.1} ms of CPU a minute, \
             {requests:.1} API requests a minute, {:.1} MiB resident ({:.1} anonymous), {} threads.",
            2 * holding,
            mib("VmRSS:"),
            mib("RssAnon:"),
            number(&status, "Threads:"),
        ));
        page.line(&format!("These requests were {asked:?}."));
    }
}

/// The requests since an earlier look, by verb and resource.
fn since_then(world: &World, before: &BTreeMap<(String, String), u64>) -> BTreeMap<String, u64> {
    let more = |(key, count): (&(String, String), &u64)| {
        let more = count - before.get(key).copied().unwrap_or(0);
        (more > 0).then(|| (format!("{} {}", key.0, key.1), more))
    };
    world.api.counts().iter().filter_map(more).collect()
}

/// The time that all threads of a process have run.
fn cpu(process: &Path) -> Duration {
    idle::threads(process).values().map(|(_, ran)| *ran).sum()
}

/// The number behind a key of `/proc/…/status`.
fn number(status: &str, key: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    let number = number.and_then(|it| it.parse().ok());
    number.unwrap_or_else(|| panic!("no {key} in {status}"))
}

// --- The program ---

/// The parts, in their order.
const PARTS: &str = "starts preferences calls changes idle";

async fn run(parts: &str, rounds: u64, idle_seconds: u64) -> Page {
    let mut page = Page::default();
    page.line("| what | measured | p50 ms | p99 ms | floor, p50 ms | goal ms |");
    page.line("|---|---|---|---|---|---|");
    for part in parts.split_whitespace() {
        match part {
            "starts" => starts(&mut page, rounds).await,
            "preferences" => preferences(&mut page, rounds).await,
            "calls" => calls(&mut page, rounds).await,
            "changes" => changes(&mut page, rounds).await,
            "idle" => idle(&mut page, idle_seconds).await,
            unknown => panic!("BENCH_PARTS has {unknown}, and there are {PARTS}"),
        }
    }
    page
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_round_of_the_bench_measures_everything() {
    let page = run(PARTS, 1, 1).await.0;
    for part in [
        "first start to all ids listed",
        "restart with 200 holds",
        "the slowest size of 16",
        "NodePrepareResources",
        "Saves for 8 at once",
        "changed file to changed offers",
        "p99 200.00 ",
        "changed ConfigMap to changed offers",
        "p99 1000.00 ",
        "8 of them with GPUs",
    ] {
        assert!(page.contains(part), "{part:?} is missing in: {page}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it takes many minutes of a quiet machine: run it with `make bench`"]
async fn what_the_daemon_costs() {
    let rounds = from_environment("BENCH_ROUNDS", 20);
    let seconds = from_environment("BENCH_IDLE_SECONDS", 600);
    let parts = std::env::var("BENCH_PARTS").unwrap_or_else(|_| PARTS.to_owned());
    let page = run(&parts, rounds, seconds).await.0;
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench.md");
    fs::write(&out, &page).expect("target is there");
    eprintln!("{page}\nThe same is in {}.", out.display());
}
