//! What came of the kills, by the step at which they fell.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::book::Wrong;

/// So many of a hundred kills may not come to their step,
const MISSED_PERCENT: usize = 1;
/// or so many of them.
const MISSED: usize = 2;

/// A line.
#[derive(Debug, Default)]
struct Row {
    kills: usize,
    missed: usize,
    survived: usize,
    lost: usize,
    invented: usize,
    doubled: usize,
}

/// All lines, and what was wrong in words.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: BTreeMap<String, Row>,
    faults: Vec<String>,
    longest: Duration,
}

impl Table {
    /// A kill is judged: whether it fell where it was to fall, what was wrong after it, and how long it took until
    /// everything was there again.
    pub(super) fn add(&mut self, at: &str, reached: bool, wrong: Wrong, took: Duration) {
        let row = self.rows.entry(at.to_owned()).or_default();
        row.kills += 1;
        row.missed += usize::from(!reached);
        row.survived += usize::from(wrong.is_none());
        row.lost += wrong.lost.len();
        row.invented += wrong.invented.len();
        row.doubled += wrong.doubled.len();
        let faults = [wrong.lost, wrong.invented, wrong.doubled, wrong.files].concat();
        let faults = faults.into_iter().map(|fault| format!("{at}: {fault}"));
        self.faults.extend(faults);
        self.longest = self.longest.max(took);
    }

    /// Nothing was wrong, and the kills fell where they were to fall: at each step at least once, and all but
    /// [`MISSED_PERCENT`] or [`MISSED`] of them. A step may not be come to in time where no GPU is free for it.
    pub(super) fn is_good(&self) -> bool {
        let mut rows = self.rows.values();
        let kills: usize = self.rows.values().map(|row| row.kills).sum();
        let missed: usize = self.rows.values().map(|row| row.missed).sum();
        let is_missed = missed > MISSED.max(kills * MISSED_PERCENT / 100);
        !is_missed && rows.all(|row| row.survived == row.kills && row.missed < row.kills)
    }

    /// What was wrong, and the table.
    pub(super) fn faults(&self) -> String {
        format!("{self}\n{}", self.faults.join("\n"))
    }

    /// One line of it.
    pub(super) fn sum(&self) -> String {
        let sum = |of: fn(&Row) -> usize| self.rows.values().map(of).sum::<usize>();
        format!(
            "survived {}, holds lost {}, invented {}, doubled {}, steps not come to {}, all there again after {} ms at most",
            sum(|row| row.survived),
            sum(|row| row.lost),
            sum(|row| row.invented),
            sum(|row| row.doubled),
            sum(|row| row.missed),
            self.longest.as_millis(),
        )
    }
}

/// Counted pods that the kubelet has failed.
#[derive(Debug, Default)]
pub(super) struct Failed {
    refused: usize,
    unasked: usize,
    unanswered: usize,
}

impl Failed {
    /// One more, refused by the daemon, not asked for because there was no stream, or without an answer to the call.
    pub(super) fn add(&mut self, cause: Cause) {
        *match cause {
            Cause::Refused => &mut self.refused,
            Cause::NotAsked => &mut self.unasked,
            Cause::NotAnswered => &mut self.unanswered,
        } += 1;
    }
}

/// Why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The daemon said no.
    Refused,
    /// The kubelet had no stream or no id to give.
    NotAsked,
    /// The call broke off with a process.
    NotAnswered,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            refused,
            unasked,
            unanswered,
        } = self;
        write!(
            f,
            "counted pods failed: {unanswered} whose Allocate broke off, {unasked} that came without a stream, \
             {refused} refused"
        )
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["kills", "survived", "lost", "invented", "doubled", "missed"];
        write!(f, "{:<28}", "killed at")?;
        for name in head {
            write!(f, "{name:>10}")?;
        }
        for (at, row) in &self.rows {
            write!(f, "\n{at:<28}")?;
            for number in [
                row.kills,
                row.survived,
                row.lost,
                row.invented,
                row.doubled,
                row.missed,
            ] {
                write!(f, "{number:>10}")?;
            }
        }
        Ok(())
    }
}
