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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Daemon {
    Bridge,
    /// A device plugin and a DRA driver that know nothing of each other.
    StandIns,
}

impl Daemon {
    pub fn word(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::StandIns => "stand-ins",
        }
    }

    fn named(name: &str) -> Self {
        match name {
            "bridge" => Self::Bridge,
            "stand-ins" => Self::StandIns,
            other => panic!("there is no daemon {other:?}; there are bridge and stand-ins"),
        }
    }
}

/// What is asked for by environment variables.
struct Wish {
    seed: u64,
    pods: usize,
    load: Load,
    daemon: Daemon,
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
            daemon: Daemon::named(&variable("DAEMON", "bridge")),
            out: repository().join(variable("OUT", "target/churn")),
        };
        assert!(
            wish.daemon == Daemon::Bridge || wish.load.blows == Blows::None,
            "the stand-ins do not come back after a restart of the kubelet: choose another load"
        );
        wish
    }

    fn file(&self, end: &str) -> PathBuf {
        let name = format!(
            "{}-{}-{}.{end}",
            self.daemon.word(),
            self.load.name,
            self.seed
        );
        self.out.join(name)
    }
}

/// One run against one daemon.
pub async fn run(world: &mut World, load: Load, seed: u64, pods: usize) -> Evidence {
    let run = Driver::new(world, load, seed, pods).await.run().await;
    Evidence::of(run, world)
}

#[tokio::test]
#[ignore = "a measurement for people: run it with `make churn`"]
async fn one_run() {
    let wish = Wish::read();
    let mut setup = Setup::shared(wish.load.gpus);
    setup.in_pods = wish.load.blows == Blows::Updates;
    let mut world;
    let _stand_ins;
    match wish.daemon {
        Daemon::Bridge => {
            let Some(started) = World::start(setup).await else {
                return;
            };
            world = started;
        }
        Daemon::StandIns => {
            let Some(started) = World::without_daemon(setup).await else {
                return;
            };
            world = started;
            _stand_ins = StandIns::start(&world).await;
        }
    }
    let evidence = run(&mut world, wish.load, wish.seed, wish.pods).await;
    let row = evidence.row(wish.daemon.word());
    fs::create_dir_all(&wish.out).expect("the folder of results");
    let json = serde_json::to_string(&row).expect("a row is JSON");
    fs::write(wish.file("json"), json + "\n").expect("the row is written");
    println!("{}\n{}", table::head(), table::line(&row));
    for (words, count) in &row.words {
        println!("{count} x {words}");
    }
    let stories = trace::stories(&evidence, &world);
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
    let of = |daemon: Daemon| rows.iter().filter(move |row| row.daemon == daemon.word());
    let has_goal = |row: &&Row| Load::named(&row.load).has_goal;
    let judged: Vec<&Row> = of(Daemon::Bridge).filter(has_goal).collect();
    lines.push(format!("- {}", table::verdict("The bridge", &judged)));
    for load in LOADS.iter().filter(|load| !load.has_goal) {
        let its: Vec<&Row> = of(Daemon::Bridge)
            .filter(|row| row.load == load.name)
            .collect();
        if !its.is_empty() {
            let what = format!("The bridge, `{}` alone", load.name);
            lines.push(format!("- {}", table::verdict(&what, &its)));
        }
    }
    let others: Vec<&Row> = of(Daemon::StandIns).collect();
    lines.push(format!("- {}", table::verdict("Two stand-ins", &others)));
    lines.join("\n") + "\n"
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
