//! Pods that want the whole node.

use std::time::{Duration, Instant};

use kube::runtime::wait::{await_condition, conditions};

use crate::churn::{now, quantile};
use crate::objects::{NUDGE_PERIOD, PodSpec, RUNNING};
use crate::world::{Setup, World, tick};

/// A pod for an idle node runs so soon after it was created: as the API shows it, which is up to a second after its
/// container has started.
const SOON: Duration = Duration::from_secs(2);
/// Rounds of a run in CI: enough to see that one is slow.
const FEW_ROUNDS: usize = 2;
/// Rounds of a run by hand.
const ROUNDS: usize = 20;
/// Longer than a tick of the kubelet, which judges the Node's count again each 10 s.
const LONG: Duration = Duration::from_secs(12);
/// When two pods wait for all GPUs, the second runs this soon after the first has ended: what is free dwells where it
/// was, moves at the end of a turn, and the scheduler looks again.
const TURN: Duration = Duration::from_secs(20);

/// How soon one kind of pod came up.
struct Starts {
    kind: &'static str,
    /// Until the runtime has started its container.
    started: Vec<Duration>,
    /// Until the API shows it Running.
    running: Vec<Duration>,
    /// Pods that count in neither, since the API server's node authorizer was late for their claim.
    forbidden: usize,
}

impl Starts {
    fn new(kind: &'static str) -> Self {
        Self {
            kind,
            started: Vec::new(),
            running: Vec::new(),
            forbidden: 0,
        }
    }

    /// One row for each of the two.
    fn rows(&self) -> [String; 2] {
        let row = |what: &str, times: &[Duration]| {
            format!(
                "| {}, {what} | {} | {} | {} | {} |",
                self.kind,
                times.len(),
                quantile(times, 50).as_millis(),
                quantile(times, 95).as_millis(),
                quantile(times, 100).as_millis()
            )
        };
        [
            row("container", &self.started),
            row("Running", &self.running),
        ]
    }
}

/// A pod for all GPUs, whichever way it asks; it ends at once when it is told to.
fn whole_node(name: &str, template: Option<&str>) -> PodSpec {
    let pod = match template {
        None => PodSpec::counted(name, 8),
        Some(template) => PodSpec::from_template(name, template, &["main"]),
    };
    pod.env("FAKE_EXIT_DELAY_MS", "50")
}

impl World {
    /// Creates a pod that fits, and notes how soon it runs, by watch and record and not by looking again and again.
    async fn time(&self, name: &str, pod: PodSpec, starts: &mut Starts) {
        let created = now();
        let running = async {
            let runs = await_condition(self.pods(), name, conditions::is_pod_running());
            // Some milliseconds later the node authorizer has forbidden the claim, and the kubelet comes again after
            // more than a minute: that is no time of ours, and looked at below.
            let soon = tokio::time::timeout(NUDGE_PERIOD, runs).await;
            soon.ok().map(|ran| {
                ran.expect("pods can be watched");
                now()
            })
        };
        let ((), running) = tokio::join!(self.create(pod), running);
        assert_eq!(self.wait_started(name, "main").await.len(), 8);
        if self.was_forbidden(name).await {
            starts.forbidden += 1;
            return;
        }
        // Later than anybody should wait, but it did run.
        let running = running.unwrap_or_else(now);
        let record = self.record();
        let started = record.lines.iter();
        let started = started.filter(|line| line.event == "started" && line.pod.name == name);
        let started = started.map(|line| Duration::from_nanos(line.mono_ns));
        let started = started.min().expect("it has started");
        starts.started.push(started.saturating_sub(created));
        starts.running.push(running.saturating_sub(created));
    }

    /// Which of two pods runs first, and the other. Neither may fail.
    async fn first_running<'a>(&self, one: &'a str, other: &'a str) -> (&'a str, &'a str) {
        let deadline = Instant::now() + RUNNING;
        loop {
            for (pod, left) in [(one, other), (other, one)] {
                match self.phase(pod).await.as_deref() {
                    Some("Running") => return (pod, left),
                    Some("Failed") => panic!("pod {pod} failed: {:?}", self.events(pod).await),
                    _ => {}
                }
            }
            assert!(Instant::now() < deadline, "neither {one} nor {other} runs");
            tick().await;
        }
    }

    /// These pods wait, all the time, and the daemon has nothing to write meanwhile.
    async fn wait_in_vain(&self, pods: &[&str], time: Duration) {
        for pod in pods {
            self.wait_unschedulable(pod).await;
        }
        let before = self.writes();
        let since = Instant::now();
        while since.elapsed() < time {
            for pod in pods {
                let phase = self.phase(pod).await;
                assert_eq!(phase.as_deref(), Some("Pending"), "{pod}");
            }
            tick().await;
        }
        let after = self.writes();
        assert_eq!(after.len(), before.len(), "{:?}", &after[before.len()..]);
    }
}

async fn rounds(rounds: usize) {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("eight", 8).await;
    world.create_template_of_all("all").await;
    let mut kinds = [
        (Starts::new("8 counted"), None),
        (Starts::new("a claim for 8"), Some("eight")),
        (Starts::new("a claim for all"), Some("all")),
    ];
    for round in 0..rounds * 2 {
        for (starts, template) in &mut kinds {
            if starts.running.len() == rounds {
                continue;
            }
            let name = format!("pod-{round}-{}", template.unwrap_or("counted"));
            world.wait_at_rest(8).await;
            world.wait_count("8").await;
            let pod = whole_node(&name, *template);
            world.time(&name, pod, starts).await;
            world.delete(&name).await;
            world.wait_all_free().await;
        }
    }
    println!("| kind | n | p50 ms | p95 ms | max ms |\n|---|---|---|---|---|");
    for (starts, _) in &kinds {
        println!("{}", starts.rows().join("\n"));
        println!(
            "{}: {} more were forbidden by the node authorizer",
            starts.kind, starts.forbidden
        );
        assert_eq!(starts.running.len(), rounds, "{}", starts.kind);
    }
    for (starts, _) in &kinds {
        let slow = quantile(&starts.running, 95);
        assert!(slow <= SOON, "{}: {:?}", starts.kind, starts.running);
    }
    assert!(world.record().doubles().is_empty());
}

#[tokio::test]
async fn on_an_idle_node_a_pod_for_all_of_it_starts_at_once_whichever_way_it_asks() {
    rounds(FEW_ROUNDS).await;
}

#[tokio::test]
#[ignore = "figures for people: some minutes on a quiet machine"]
async fn twenty_rounds_of_pods_for_the_whole_node() {
    rounds(ROUNDS).await;
}

/// First claims have everything, then counted pods; one pod of each kind wants all of it next.
#[tokio::test]
async fn while_one_kind_has_all_gpus_no_pod_starts_and_none_fails_and_two_for_all_run_in_turn() {
    let Some(world) = World::start(Setup::shared(8)).await else {
        return;
    };
    world.create_template("eight", 8).await;
    for (round, held_by) in [Some("eight"), None].into_iter().enumerate() {
        let first = format!("first-{round}");
        world.wait_at_rest(8).await;
        world.create(whole_node(&first, held_by)).await;
        world.wait_running(&first).await;
        let (counted, claimed) = (format!("counted-{round}"), format!("claim-{round}"));
        world.create(whole_node(&counted, None)).await;
        world.create(whole_node(&claimed, Some("eight"))).await;
        if held_by.is_some() {
            world.create(PodSpec::counted("small", 1)).await;
            let waiting = ["small", &counted, &claimed];
            world.wait_in_vain(&waiting, LONG).await;
            world.delete("small").await;
        } else {
            let waiting = [counted.as_str(), &claimed];
            world.wait_in_vain(&waiting, Duration::ZERO).await;
        }
        world.delete(&first).await;
        let (next, last) = world.first_running(&counted, &claimed).await;
        world.delete(next).await;
        let ended = Instant::now();
        world.wait_running(last).await;
        let waited = ended.elapsed();
        println!(
            "{first}, {next}, {last}: the last {} ms after the one before",
            waited.as_millis()
        );
        assert!(waited <= TURN, "{last} waited {waited:?}");
        world.delete(last).await;
        world.wait_all_free().await;
    }
    assert!(world.record().doubles().is_empty());
    let log = world.daemon_log();
    assert!(!log.contains("ClaimLostRace"), "nobody had to lose a race");
}
