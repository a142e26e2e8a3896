//! Log lines about trouble that goes on.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets one log line through per interval, so that a peer that is away for an hour does not fill the log.
///
/// ```
/// use std::time::Duration;
/// let throttle = gpu_bridge::uds::Throttle::new(Duration::from_secs(30));
/// assert_eq!(throttle.pass(), Some(0));
/// assert_eq!(throttle.pass(), None);
/// ```
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    withheld: u64,
}

impl Throttle {
    /// One line per `interval`; the first passes at once.
    #[must_use]
    pub const fn new(interval: Duration) -> Self {
        Self {
            interval,
            state: Mutex::new(State {
                last: None,
                withheld: 0,
            }),
        }
    }

    /// Whether a line may be written now: `Some` with the number of lines that were withheld since the last one.
    pub fn pass(&self) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let due = state
            .last
            .is_none_or(|last| last.elapsed() >= self.interval);
        if !due {
            state.withheld += 1;
            return None;
        }
        state.last = Some(Instant::now());
        Some(std::mem::take(&mut state.withheld))
    }

    /// The trouble is over: the next line passes at once.
    pub fn reset(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = State::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_within_the_interval_are_withheld_and_counted() {
        let throttle = Throttle::new(Duration::from_secs(3600));
        assert_eq!(throttle.pass(), Some(0));
        assert_eq!(throttle.pass(), None);
        assert_eq!(throttle.pass(), None);
        throttle.reset();
        assert_eq!(throttle.pass(), Some(0));

        let always = Throttle::new(Duration::ZERO);
        assert_eq!(always.pass(), Some(0));
        assert_eq!(always.pass(), Some(0));
    }
}
