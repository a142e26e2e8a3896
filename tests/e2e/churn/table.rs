//! Rows for people, in Markdown.

use std::fmt::Write as _;

use super::row::{Row, Waits};

/// The columns, in order.
const COLUMNS: [&str; 17] = [
    "daemon",
    "load",
    "seed",
    "pods",
    "counted Failed (in gaps / of those that came in them)",
    "Prepare refused (+ forbidden)",
    "stuck > 15 s (+ Kubernetes' own)",
    "evicted",
    "claim to Running p50 / p90 / p99 s",
    "counted to Running p50 / p90 / p99 s",
    "occupancy %",
    "API requests (writes a pod)",
    "doubled: across kinds / claims / counted (+ handed over)",
    "largest claims: n, p50 / max s",
    "largest counted: n, p50 / max s",
    "successor after: n, p50 / max s",
    "machine's load",
];

/// The head of the table.
pub fn head() -> String {
    let rule = "|---".repeat(COLUMNS.len());
    format!("| {} |\n{rule}|", COLUMNS.join(" | "))
}

/// One row.
pub fn line(row: &Row) -> String {
    let doubled = &row.doubled;
    let cells = [
        row.daemon.clone(),
        if row.blows == 0 {
            row.load.clone()
        } else {
            format!("{} ({} blows)", row.load, row.blows)
        },
        row.seed.to_string(),
        row.pods.to_string(),
        failed(row),
        and_more(row.prepare_refused, row.prepare_forbidden),
        and_more(row.stuck, row.stuck_by_kubernetes),
        if row.rounds == 0 {
            row.evicted.to_string()
        } else {
            let (rounds, most) = (row.rounds, row.most_lost_in_a_round);
            format!("{} ({most} at most in one of {rounds} rounds)", row.evicted)
        },
        quantiles(&row.claim_wait_s),
        quantiles(&row.counted_wait_s),
        row.occupancy_percent.to_string(),
        format!("{} ({:.2})", row.requests, ratio(row.writes, row.pods)),
        format!(
            "{} / {} / {}",
            doubled.across_kinds,
            doubled.claim_to_claim,
            and_more(doubled.counted_to_counted, doubled.handed_over_busy)
        ),
        of_few(&row.largest_claim_wait_s),
        of_few(&row.largest_counted_wait_s),
        of_few(&row.successor_after_s),
        format!("{:.1}", row.load_average),
    ];
    format!("| {} |", cells.join(" | "))
}

/// Rows against the goal, in one sentence.
pub fn verdict(what: &str, rows: &[&Row]) -> String {
    let sum = |count: &dyn Fn(&Row) -> usize| rows.iter().map(|row| count(row)).sum::<usize>();
    let pods = sum(&|row| row.pods);
    let lost = sum(&|row| row.counted_failed + row.evicted);
    let stuck = sum(&|row| row.stuck);
    let doubled = sum(&|row| row.doubled.broken());
    let each = |count: usize| ratio(count * 1_000, pods);
    let mut text = String::new();
    let _ = write!(
        text,
        "{what}: {pods} pods, doubled {doubled}, failed or evicted {lost}, stuck by no fault of Kubernetes {stuck}; per 1,000 pods: {:.1}, {:.1}, {:.1}.",
        each(doubled),
        each(lost),
        each(stuck)
    );
    let times = sum(&|row| row.gaps.all.len());
    if times > 0 {
        let _ = write!(
            text,
            " The kubelet had no list {times} times: of {} counted pods that came meanwhile {} failed, and {} at any other time.",
            sum(&|row| row.gaps.on_their_way()),
            sum(&|row| row.gaps.failed()),
            sum(&|row| row.gaps.failed_outside.len())
        );
    }
    text
}

/// How many counted pods failed, and how many of them in a gap, where there was one.
fn failed(row: &Row) -> String {
    let gaps = &row.gaps;
    if gaps.all.is_empty() {
        return row.counted_failed.to_string();
    }
    format!(
        "{} ({} / {}, longest {:.1} s)",
        row.counted_failed,
        gaps.failed(),
        gaps.on_their_way(),
        gaps.longest_s()
    )
}

fn and_more(count: usize, more: usize) -> String {
    if more == 0 {
        count.to_string()
    } else {
        format!("{count} (+ {more})")
    }
}

fn quantiles(waits: &Waits) -> String {
    format!("{:.1} / {:.1} / {:.1}", waits.p50, waits.p90, waits.p99)
}

fn of_few(waits: &Waits) -> String {
    if waits.count == 0 {
        "-".to_owned()
    } else {
        format!("{}, {:.1} / {:.1}", waits.count, waits.p50, waits.max)
    }
}

fn ratio(part: usize, all: usize) -> f64 {
    let of = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    of(part) / of(all).max(1.0)
}
