//! What happened around the pods that were lost, from everybody's log, in the order of time.

use std::fmt::Write as _;
use std::time::Duration;

use super::audit::{Audit, Clock};
use super::life::{Life, Lives};
use super::row::Evidence;
use crate::record::Record;

/// Pods whose story is told; more of them have the same reasons.
const TOLD: usize = 20;
/// What leads to a refusal happens within this time before the pod was bound.
const BEFORE: Duration = Duration::from_secs(2);
/// And what follows from it, after it was told.
const AFTER: Duration = Duration::from_millis(200);
/// A line of the daemon's log is cut after this.
const WIDTH: usize = 260;

/// Something that happened.
struct Moment {
    at: Duration,
    who: &'static str,
    what: String,
}

/// The stories of all pods that failed, were evicted, refused or stuck without Kubernetes' fault; empty if there are
/// none.
pub fn stories(evidence: &Evidence) -> String {
    let lives = &evidence.run.lives;
    let mut lost: Vec<(&String, &Life, Duration, String)> = lives
        .iter()
        .filter_map(|(name, life)| {
            let (until, why) = trouble(life, &evidence.audit)?;
            Some((name, life, until, why))
        })
        .collect();
    // Those that are lost for good come first.
    lost.sort_by_key(|(_, life, ..)| life.failed.is_none());
    lost.truncate(TOLD);
    if lost.is_empty() {
        return String::new();
    }
    let moments = moments(evidence);
    let mut text = String::new();
    for (name, life, until, why) in lost {
        let zero = life.bound.unwrap_or(life.created);
        let _ = writeln!(text, "\n{name} ({} GPUs) {why}", life.fate.gpus);
        let span = zero.saturating_sub(BEFORE)..=until + AFTER;
        for moment in moments.iter().filter(|moment| span.contains(&moment.at)) {
            let _ = writeln!(
                text,
                "{:>9.3} s  {:8} {}",
                moment.at.as_secs_f64() - zero.as_secs_f64(),
                moment.who,
                moment.what
            );
        }
    }
    text
}

/// When and how a pod was lost.
fn trouble(life: &Life, audit: &Audit) -> Option<(Duration, String)> {
    if let Some(failed) = &life.failed {
        return Some((failed.at, format!("failed: {}", failed.why)));
    }
    if let Some(evicted) = &life.evicted {
        return Some((evicted.at, format!("was evicted: {}", evicted.why)));
    }
    if audit.forbade_claim_of(life) {
        return None;
    }
    if let Some((at, why)) = life.refusals.first() {
        return Some((*at, format!("was refused: {why}")));
    }
    let end = life.running.or(life.deleted)?;
    life.stuck.then(|| (end, "was stuck".to_owned()))
}

/// Everything that anybody noted, sorted.
fn moments(evidence: &Evidence) -> Vec<Moment> {
    let clock = &evidence.clock;
    let mut all = Vec::new();
    of_lives(&evidence.run.lives, &mut all);
    of_record(&evidence.record, &mut all);
    for request in evidence.audit.requests.iter().filter(|one| one.writes) {
        all.push(Moment {
            at: request.at,
            who: "API",
            what: format!("{} by the daemon", request.what),
        });
    }
    of_daemon(&evidence.daemon_log, clock, &mut all);
    of_kubelet(&evidence.kubelet_log, clock, &mut all);
    all.sort_by_key(|moment| moment.at);
    all
}

fn of_lives(lives: &Lives, all: &mut Vec<Moment>) {
    for (name, life) in lives {
        let failed = life.failed.as_ref().map(|it| it.at);
        let evicted = life.evicted.as_ref().map(|it| it.at);
        let steps = [
            (Some(life.created), "created"),
            (life.bound, "bound"),
            (life.running, "Running"),
            (life.deleted, "deleted"),
            (life.gone, "gone"),
            (failed, "Failed"),
            (evicted, "evicted"),
        ];
        let forced = if life.fate.forced { " by force" } else { "" };
        for (at, what) in steps {
            let Some(at) = at else { continue };
            let how = if what == "deleted" { forced } else { "" };
            let what = format!("{name} ({} GPUs) {what}{how}", life.fate.gpus);
            all.push(Moment {
                at,
                who: "driver",
                what,
            });
        }
    }
}

fn of_record(record: &Record, all: &mut Vec<Moment>) {
    for line in &record.lines {
        if ["started", "process_gone"].contains(&line.event.as_str()) && !line.gpus.is_empty() {
            all.push(Moment {
                at: Duration::from_nanos(line.mono_ns),
                who: "runtime",
                what: format!(
                    "{} {} {}",
                    line.pod.name,
                    line.event,
                    short(&line.gpus.join(" "))
                ),
            });
        }
    }
}

fn of_daemon(log: &str, clock: &Clock, all: &mut Vec<Moment>) {
    for line in log.lines() {
        if let Some((time, what)) = line.split_once(' ') {
            let at = clock.monotonic(time);
            let what = cut(&short(&what.replace("gpu_bridge::", "")), WIDTH);
            all.push(Moment {
                at,
                who: "daemon",
                what,
            });
        }
    }
}

/// The kubelet's lines about devices and the admission of pods.
fn of_kubelet(log: &str, clock: &Clock, all: &mut Vec<Moment>) {
    const WORDS: [&str; 9] = [
        "SyncLoop ADD",
        "SyncLoop DELETE",
        "SyncLoop REMOVE",
        "device",
        "Device",
        "admit",
        "Allocate",
        "allocate",
        "ResourceClaim",
    ];
    for line in log.lines() {
        let Some((at, what)) = clock.klog(line) else {
            continue;
        };
        if WORDS.iter().any(|word| what.contains(word)) {
            all.push(Moment {
                at,
                who: "kubelet",
                what: cut(what.trim_start(), WIDTH),
            });
        }
    }
}

/// UUIDs of GPUs by their first letters, which are enough among eight.
fn short(text: &str) -> String {
    /// `GPU-` and eight letters stay, the 28 behind them go.
    const KEPT: usize = 12;
    const WHOLE: usize = 40;
    let mut shorter = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("GPU-") {
        let (before, uuid) = rest.split_at(at);
        shorter.push_str(before);
        let whole = uuid.get(..WHOLE).unwrap_or(uuid);
        shorter.push_str(uuid.get(..KEPT).unwrap_or(whole));
        rest = &uuid[whole.len()..];
    }
    shorter.push_str(rest);
    shorter
}

fn cut(text: &str, length: usize) -> String {
    text.chars().take(length).collect()
}
