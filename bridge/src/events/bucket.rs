//! How many events may be written.

use std::time::Duration;

use tokio::time::Instant;

/// So many at once: a claim of a whole node that loses its race is some ten.
pub(super) const BURST: u32 = 20;

/// After that one in this time. An API server keeps each for an hour, so a node has 240 of them at most.
pub(super) const ONE_MORE: Duration = Duration::from_secs(15);

/// Tokens, one for each write.
#[derive(Debug)]
pub(super) struct Bucket {
    left: u32,
    /// Since when the next token grows.
    since: Instant,
}

impl Bucket {
    pub(super) fn full(now: Instant) -> Self {
        Self {
            left: BURST,
            since: now,
        }
    }

    /// Whether one more may be written.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        let grown = now.duration_since(self.since).as_secs() / ONE_MORE.as_secs();
        let grown = u32::try_from(grown).unwrap_or(BURST).min(BURST);
        self.left = (self.left + grown).min(BURST);
        self.since = if self.left == BURST {
            now
        } else {
            self.since + ONE_MORE * grown
        };
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_in_a_while() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        assert!((0..BURST).all(|_| bucket.take(start)));
        assert!(!bucket.take(start));
        assert!(!bucket.take(start + ONE_MORE / 2));
        assert!(bucket.take(start + ONE_MORE));
        assert!(!bucket.take(start + ONE_MORE));
        assert!(bucket.take(start + ONE_MORE * 2));
    }

    #[test]
    fn what_nobody_used_for_long_is_a_burst_and_no_more() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let later = start + ONE_MORE * 1000;
        assert!((0..BURST).all(|_| bucket.take(later)));
        assert!(!bucket.take(later));
    }
}
