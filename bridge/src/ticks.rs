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

/// When a pause from now on is over: one of the whole period at the next moment that is shared, a shorter one by itself.
#[must_use]
pub fn after(now: Instant, pause: Duration, period: Duration) -> Instant {
    if pause == period {
        next(now, period)
    } else {
        now + pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_that_is_shorter_than_the_period_is_nobody_elses() {
        let (period, now) = (Duration::from_secs(10), Instant::now());
        assert_eq!(after(now, period, period), next(now, period));
        let short = Duration::from_secs(1);
        assert_eq!(after(now, short, period), now + short);
    }

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
