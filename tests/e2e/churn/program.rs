//! `make churn` and `make churn-long`: runs that people ask for. See tests/bench/README.md.

use std::fs;
use std::path::{Path, PathBuf};

use super::driver::Driver;
use super::load::{Blows, LOADS, Load};
use super::row::{Evidence, Row};
use super::{table, trace};
use crate::standin::StandIns;
use crate::world::{Setup, World, repository};

/// Whom the pods are driven against.
pub enum Daemon<'a> {
    Bridge,
    /// A device plugin and a DRA driver that know nothing of each other.
    StandIns(&'a mut StandIns),
}

/// As rows call them.
const BRIDGE: &str = "bridge";
const STAND_INS: &str = "stand-ins";

impl Daemon<'_> {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Bridge => BRIDGE,
            Self::StandIns(_) => STAND_INS,
        }
    }
}

/// What is asked for by environment variables.
struct Wish {
    seed: u64,
    pods: usize,
    load: Load,
    daemon: String,
    out: PathBuf,
}

fn variable(name: &str, otherwise: &str) -> String {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => text,
        Ok(_) | Err(_) => otherwise.to_owned(),
    }
}

impl Wish {
    fn read() -> Self {
        let number = |name: &str, otherwise: &str| {
            let text = variable(name, otherwise);
            text.parse::<u64>()
                .unwrap_or_else(|error| panic!("{name}={text} is no number: {error}"))
        };
        let wish = Self {
            seed: number("SEED", "1"),
            pods: usize::try_from(number("PODS", "200")).expect("not that many"),
            load: Load::named(&variable("LOAD", "high")),
            daemon: variable("DAEMON", BRIDGE),
            out: repository().join(variable("OUT", "target/churn")),
        };
        assert!(
            [BRIDGE, STAND_INS].contains(&wish.daemon.as_str()),
            "there is no daemon {:?}; there are {BRIDGE} and {STAND_INS}",
            wish.daemon
        );
        assert!(
            wish.daemon == BRIDGE || wish.load.blows != Blows::Updates,
            "nobody follows the stand-ins in an update: choose another load"
        );
        wish
    }

    fn file(&self, end: &str) -> PathBuf {
        let name = format!("{}-{}-{}.{end}", self.daemon, self.load.name, self.seed);
        self.out.join(name)
    }
}

/// One run against one daemon.
pub async fn run(
    world: &mut World,
    daemon: Daemon<'_>,
    load: Load,
    seed: u64,
    pods: usize,
) -> Evidence {
    let driver = Driver::new(world, daemon, load, seed, pods).await;
    let run = driver.run().await;
    Evidence::of(run, world)
}

#[tokio::test]
#[ignore = "a measurement for people: run it with `make churn`"]
async fn one_run() {
    let wish = Wish::read();
    let mut setup = Setup::shared(wish.load.gpus);
    setup.in_pods = wish.load.blows == Blows::Updates;
    let mut stand_ins = None;
    let started = if wish.daemon == BRIDGE {
        World::start(setup).await
    } else {
        World::without_daemon(setup).await
    };
    let Some(mut world) = started else {
        return;
    };
    if wish.daemon == STAND_INS {
        stand_ins = Some(StandIns::start(&world).await);
    }
    let daemon = stand_ins.as_mut().map_or(Daemon::Bridge, Daemon::StandIns);
    let evidence = run(&mut world, daemon, wish.load, wish.seed, wish.pods).await;
    let row = evidence.row(&wish.daemon);
    fs::create_dir_all(&wish.out).expect("the folder of results");
    let json = serde_json::to_string(&row).expect("a row is JSON");
    fs::write(wish.file("json"), json + "\n").expect("the row is written");
    println!("{}\n{}", table::head(), table::line(&row));
    for (words, count) in &row.words {
        println!("{count} x {words}");
    }
    print!("{}", row.gaps.told());
    let stories = trace::stories(&evidence);
    if !stories.is_empty() {
        fs::write(wish.file("txt"), &stories).expect("the stories are written");
        println!(
            "what happened to the pods that were lost: {}",
            wish.file("txt").display()
        );
    }
    println!("as JSON: {}", wish.file("json").display());
    if let Some(kept) = std::env::var_os("E2E_KEEP") {
        world.keep(Path::new(&kept));
    }
}

/// All rows of a folder.
fn rows(folder: &Path) -> Vec<Row> {
    let entries = fs::read_dir(folder).expect("the folder of results");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).expect("a result can be read");
            serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{} is no result: {error}", path.display()))
        })
        .collect()
}

/// Everything that is kept of many runs.
fn report(rows: &[Row]) -> String {
    let mut lines = vec![
        "# Churn: what was measured".to_owned(),
        String::new(),
        "Made by `make churn-long`; the loads and columns are explained in [../README.md](../README.md), and `runs.jsonl` has the same with more detail.".to_owned(),
        String::new(),
        table::head(),
    ];
    lines.extend(rows.iter().map(table::line));
    lines.push(String::new());
    let of = |daemon: &'static str| rows.iter().filter(move |row| row.daemon == daemon);
    let load_of = |row: &&Row| Load::named(&row.load);
    let has_goal = |row: &&Row| load_of(row).has_goal;
    let mut judge = |what: &str, its: Vec<&Row>| {
        if !its.is_empty() {
            lines.push(format!("- {}", table::verdict(what, &its)));
        }
    };
    judge("The bridge", of(BRIDGE).filter(has_goal).collect());
    for load in LOADS.iter().filter(|load| !load.has_goal) {
        let its = of(BRIDGE).filter(|row| row.load == load.name);
        judge(&format!("The bridge, `{}` alone", load.name), its.collect());
    }
    let has_blows = |row: &&Row| load_of(row).blows != Blows::None;
    let (struck, others) = of(STAND_INS).partition(has_blows);
    judge("Two stand-ins", others);
    judge("Two stand-ins, loads with blows alone", struck);
    lines.extend(rows.iter().filter_map(gaps));
    lines.join("\n") + "\n"
}

/// The gaps of a run, one by one.
fn gaps(row: &Row) -> Option<String> {
    let told = row.gaps.told();
    (!told.is_empty()).then(|| {
        format!(
            "\n{}, load `{}`, seed {}:\n\n```\n{told}```",
            row.daemon, row.load, row.seed
        )
    })
}

#[test]
#[ignore = "a part of `make churn-long`"]
fn all_runs_in_one_table() {
    let folder = repository().join(variable("OUT", "target/churn"));
    let report = report(&rows(&folder));
    println!("{report}");
    let kept = variable("KEPT", "");
    if !kept.is_empty() {
        fs::write(repository().join(kept), report).expect("the table is written");
    }
}
