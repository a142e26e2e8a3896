//! Moments that periodic looks share: a daemon that has nothing to do wakes up once for all of them.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::Instant;

/// The next moment after `since` that all who look this often have in common; within `period` of it.
#[must_use]
pub fn next(since: Instant, period: Duration) -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    let gone = since.saturating_duration_since(start);
    let over = gone.as_nanos() % period.as_nanos().max(1);
    let over = Duration::from_nanos(u64::try_from(over).unwrap_or_default());
    since + (period - over)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_looks_as_often_looks_at_the_same_moment() {
        let (period, now) = (Duration::from_secs(10), Instant::now());
        let first = next(now, period);
        assert!(first > now && first <= now + period);
        let later = now + (first - now) / 2;
        assert_eq!(next(later, period), first);
        assert_eq!(next(first, period), first + period);
        // Who looks twice as often is there as well.
        let mut often = next(now, period / 2);
        if often != first {
            often = next(often, period / 2);
        }
        assert_eq!(often, first);
    }
}
