//! One run as one row of the table, and as one line of JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::audit::{Audit, Clock};
use super::driver::Run;
use super::gaps::{Gaps, Kubelet};
use super::life::{Life, is_forbidden};
use super::load::Kind;
use crate::record::{Double, Holder, Record};
use crate::world::World;

/// Quantiles of times in seconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct Waits {
    pub count: usize,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Waits {
    fn of(times: &[Duration]) -> Self {
        let at = |percent: usize| hundredths(quantile(times, percent));
        Self {
            count: times.len(),
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: at(100),
        }
    }
}

/// The time that so many of a hundred are not above; none of no times.
pub fn quantile(times: &[Duration], percent: usize) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    let place = (times.len() * percent).div_ceil(100).max(1) - 1;
    times.get(place).copied().unwrap_or_default()
}

fn hundredths(time: Duration) -> f64 {
    (time.as_secs_f64() * 100.0).round() / 100.0
}

/// Pairs of holders that had one GPU at the same time.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Doubled {
    pub across_kinds: usize,
    pub claim_to_claim: usize,
    /// Without those below.
    pub counted_to_counted: usize,
    /// Counted to counted after a force delete, which the daemon has reported as `HandedOverBusy`.
    pub handed_over_busy: usize,
    /// The longest of all of these.
    pub longest_ms: u64,
}

impl Doubled {
    /// Those that must not be.
    pub fn broken(&self) -> usize {
        self.across_kinds + self.claim_to_claim + self.counted_to_counted
    }
}

/// Everything that is told of a run.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Row {
    pub daemon: String,
    pub load: String,
    pub seed: u64,
    pub pods: usize,
    pub counted: usize,
    pub claims: usize,
    pub successors: usize,
    /// Bursts or rounds.
    pub rounds: u32,
    /// Pods that failed or were evicted in the round with the most of them.
    pub most_lost_in_a_round: usize,
    pub blows: u32,
    /// Times without the kubelet's list, after a blow.
    #[serde(default)]
    pub gaps: Gaps,
    /// From the first pod to the last that came.
    pub seconds: u64,
    pub counted_failed: usize,
    /// Claim pods that the daemon, or its absence, kept from starting at the first try.
    pub prepare_refused: usize,
    /// The same by the node authorizer, before any driver was asked.
    pub prepare_forbidden: usize,
    /// Bound for more than 15 s without running.
    pub stuck: usize,
    /// Of those, the ones whose claim the node authorizer kept from the kubelet: not counted above.
    pub stuck_by_kubernetes: usize,
    pub evicted: usize,
    pub never_ran: usize,
    pub claim_wait_s: Waits,
    pub counted_wait_s: Waits,
    /// GPUs of the largest pods.
    pub largest_gpus: u32,
    pub largest_claim_wait_s: Waits,
    pub largest_counted_wait_s: Waits,
    /// From the end of the round's last counted pod until the successor of an evicted or failed pod runs.
    pub successor_after_s: Waits,
    pub occupancy_percent: u64,
    pub requests: usize,
    pub writes: usize,
    pub requests_by_kind: BTreeMap<String, usize>,
    pub doubled: Doubled,
    /// What failed pods, refused claims and evicted pods were told, without names and numbers.
    pub words: BTreeMap<String, usize>,
    /// Of the machine, over a minute, at the end: waits of a busy machine are long.
    pub load_average: f64,
}

/// A run with what others recorded of it.
pub struct Evidence {
    pub run: Run,
    pub record: Record,
    pub audit: Audit,
    pub clock: Clock,
    pub daemon_log: String,
    pub kubelet_log: String,
}

impl Evidence {
    pub fn of(run: Run, world: &World) -> Self {
        let clock = Clock::now();
        Self {
            run,
            record: world.record(),
            audit: Audit::read(world, &clock),
            clock,
            daemon_log: world.daemon_log(),
            kubelet_log: std::fs::read_to_string(world.state().join("log/kubelet.log"))
                .unwrap_or_default(),
        }
    }

    /// Pods that were stuck by no fault of Kubernetes.
    pub fn stuck(&self) -> impl Iterator<Item = (&String, &Life)> {
        self.run
            .lives
            .iter()
            .filter(|(_, life)| life.stuck && !self.audit.forbade_claim_of(life))
    }

    pub fn row(&self, daemon: &str) -> Row {
        let run = &self.run;
        let lives: Vec<&Life> = run.lives.values().collect();
        let count = |is_so: &dyn Fn(&Life) -> bool| lives.iter().filter(|life| is_so(life)).count();
        let stuck = self.stuck().count();
        let requests_by_kind = self.audit.between(run.began, run.last_came);
        let span = run.began..=run.last_came;
        let in_time = self
            .audit
            .requests
            .iter()
            .filter(|one| span.contains(&one.at));
        let largest = run.load.largest();
        let is_largest = |life: &Life| life.fate.gpus == largest;
        Row {
            daemon: daemon.to_owned(),
            load: run.load.name.to_owned(),
            seed: run.seed,
            pods: lives.len(),
            counted: count(&|life| life.kind == Kind::Counted),
            claims: count(&|life| life.kind == Kind::Claim),
            successors: count(&|life| life.successor_of.is_some()),
            rounds: lives.iter().map(|life| life.round).max().unwrap_or(0),
            most_lost_in_a_round: most_lost_in_a_round(&lives),
            blows: u32::try_from(run.strikes.len()).expect("a few"),
            gaps: self.gaps(),
            seconds: run.last_came.saturating_sub(run.began).as_secs(),
            counted_failed: count(&|life| life.kind == Kind::Counted && life.failed.is_some()),
            prepare_refused: count(&|life| life.refusals.iter().any(|(_, why)| !is_forbidden(why))),
            prepare_forbidden: count(&Life::was_forbidden),
            stuck,
            stuck_by_kubernetes: count(&|life| life.stuck) - stuck,
            evicted: count(&|life| life.evicted.is_some()),
            never_ran: count(&Life::never_ran),
            claim_wait_s: waits(run, |life| life.kind == Kind::Claim),
            counted_wait_s: waits(run, |life| life.kind == Kind::Counted),
            largest_gpus: largest,
            largest_claim_wait_s: waits(run, |life| life.kind == Kind::Claim && is_largest(life)),
            largest_counted_wait_s: waits(run, |life| {
                life.kind == Kind::Counted && is_largest(life)
            }),
            successor_after_s: self.successors(),
            occupancy_percent: self.occupancy_percent(),
            requests: requests_by_kind.values().sum(),
            writes: in_time.filter(|one| one.writes).count(),
            requests_by_kind,
            doubled: self.doubled(),
            words: self.words(),
            load_average: load_average(),
        }
    }

    fn gaps(&self) -> Gaps {
        let run = &self.run;
        let kubelet = Kubelet::read(&self.kubelet_log, &self.clock);
        Gaps::of(&run.lives, &run.strikes, &kubelet, (run.began, run.ended))
    }

    /// GPU time in use, of all that there was while pods came.
    fn occupancy_percent(&self) -> u64 {
        /// Before that the node fills up.
        const FILLS: Duration = Duration::from_secs(5);
        let from = self.run.began + FILLS;
        let to = self.run.last_came;
        let all = to.saturating_sub(from) * self.run.load.gpus;
        let mut by_gpu: BTreeMap<&str, Vec<(Duration, Duration)>> = BTreeMap::new();
        let uses = self.record.uses();
        for used in &uses {
            let begin = Duration::from_nanos(used.from_ns).max(from);
            let end = used.to_ns.map_or(to, Duration::from_nanos).min(to);
            if begin < end {
                by_gpu.entry(&used.gpu).or_default().push((begin, end));
            }
        }
        let used: Duration = by_gpu.into_values().map(union).sum();
        percent(used, all)
    }

    fn successors(&self) -> Waits {
        let lives = &self.run.lives;
        let after = |life: &Life| {
            life.successor_of.as_ref()?;
            let counted_end = lives
                .values()
                .filter(|other| other.round == life.round && other.kind == Kind::Counted)
                .filter(|other| other.running.is_some())
                .filter_map(|other| other.gone)
                .max()?;
            Some(life.running?.saturating_sub(counted_end))
        };
        Waits::of(&lives.values().filter_map(after).collect::<Vec<_>>())
    }

    /// Double uses by kind.
    pub fn doubles(&self) -> Vec<(Double, Between)> {
        let doubles = self.record.doubles().into_iter();
        doubles
            .map(|double| {
                let between = match (&double.first.holder, &double.second.holder) {
                    (Holder::Claim(_), Holder::Claim(_)) => Between::Claims,
                    (Holder::Counted(_), Holder::Claim(_))
                    | (Holder::Claim(_), Holder::Counted(_)) => Between::Kinds,
                    (Holder::Counted(_), Holder::Counted(_)) => {
                        if self.was_forced(&double.first.pod.name) {
                            Between::CountedAfterForce
                        } else {
                            Between::Counted
                        }
                    }
                };
                (double, between)
            })
            .collect()
    }

    fn was_forced(&self, pod: &str) -> bool {
        let life = self.run.lives.get(pod);
        life.is_some_and(|life| life.deleted.is_some() && life.fate.forced)
    }

    fn doubled(&self) -> Doubled {
        let doubles = self.doubles();
        let count = |wanted: Between| doubles.iter().filter(|(_, is)| *is == wanted).count();
        let after_force = count(Between::CountedAfterForce);
        let reported = self.daemon_log.matches("HandedOverBusy").count();
        let handed_over_busy = after_force.min(reported);
        let longest = doubles.iter().map(|(double, _)| double.overlap).max();
        Doubled {
            longest_ms: u64::try_from(longest.unwrap_or_default().as_millis()).expect("short"),
            across_kinds: count(Between::Kinds),
            claim_to_claim: count(Between::Claims),
            counted_to_counted: count(Between::Counted) + after_force - handed_over_busy,
            handed_over_busy,
        }
    }

    fn words(&self) -> BTreeMap<String, usize> {
        let mut words = BTreeMap::new();
        for life in self.run.lives.values() {
            let failed = life.failed.iter().map(|it| ("failed", &it.why));
            let evicted = life.evicted.iter().map(|it| ("evicted", &it.why));
            let refused = life.refusals.first().map(|(_, why)| ("refused", why));
            for (what, why) in failed.chain(evicted).chain(refused) {
                let kind = life.kind.word();
                *words
                    .entry(format!("{kind} {what}: {}", nameless(why)))
                    .or_default() += 1;
            }
        }
        words
    }
}

/// Who had one GPU at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    Kinds,
    Claims,
    Counted,
    CountedAfterForce,
}

fn waits(run: &Run, is_meant: impl Fn(&Life) -> bool) -> Waits {
    let meant = run.lives.values().filter(|life| is_meant(life));
    // What never ran has waited until the end at least, and must not make the table look better.
    let wait = |life: &Life| {
        let never = || run.ended.saturating_sub(life.created);
        life.wait().or_else(|| life.never_ran().then(never))
    };
    Waits::of(&meant.filter_map(wait).collect::<Vec<_>>())
}

fn most_lost_in_a_round(lives: &[&Life]) -> usize {
    let mut lost: BTreeMap<u32, usize> = BTreeMap::new();
    for life in lives.iter().filter(|life| life.round > 0 && life.is_lost()) {
        *lost.entry(life.round).or_default() += 1;
    }
    lost.into_values().max().unwrap_or(0)
}

/// The sum of spans that may overlap.
fn union(mut spans: Vec<(Duration, Duration)>) -> Duration {
    spans.sort();
    let mut sum = Duration::ZERO;
    let mut until = Duration::ZERO;
    for (from, to) in spans {
        sum += to.saturating_sub(from.max(until));
        until = until.max(to);
    }
    sum
}

fn percent(part: Duration, all: Duration) -> u64 {
    let all = all.as_millis().max(1);
    u64::try_from(part.as_millis() * 100 / all).expect("a percentage")
}

/// The same for all pods: UUIDs, numbers and quoted names become `X`.
fn nameless(text: &str) -> String {
    /// Enough to know a sentence by.
    const LENGTH: usize = 160;
    let words = text.split_whitespace().map(|word| {
        if word.chars().any(|c| c.is_ascii_digit()) {
            "X"
        } else {
            word
        }
    });
    let mut short: String = words.collect::<Vec<_>>().join(" ");
    if let Some((at, _)) = short.char_indices().nth(LENGTH) {
        short.truncate(at);
    }
    short
}

fn load_average() -> f64 {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or_default()
}
