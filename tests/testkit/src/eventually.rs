//! Waiting for a state, with a deadline: what a test does instead of sleeping.

use std::time::{Duration, Instant};

/// How often a condition is looked at. Short, since a test waits half of it on average; not shorter, since
/// a condition may read files or call a server.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `condition` holds.
///
/// # Panics
///
/// When it does not hold by `deadline` (counted from now); the message names `what` was waited for.
pub async fn eventually(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, deadline, async || condition().then_some(())).await;
}

/// Waits until `poll` gives a value, and returns it.
///
/// # Panics
///
/// When it gives none by `deadline` (counted from now); the message names `what` was waited for. A `poll`
/// that hangs is cut off at the deadline.
pub async fn wait_for<T>(
    what: &str,
    deadline: Duration,
    mut poll: impl AsyncFnMut() -> Option<T>,
) -> T {
    let until_some = async {
        loop {
            if let Some(value) = poll().await {
                return value;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    match tokio::time::timeout(deadline, until_some).await {
        Ok(value) => value,
        Err(_) => panic!("waited {deadline:?} in vain for: {what}"),
    }
}

/// As [`eventually`], for a test without an async runtime.
///
/// # Panics
///
/// When `condition` does not hold by `deadline` (counted from now); the message names `what` was waited for.
pub fn eventually_blocking(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < deadline,
            "waited {deadline:?} in vain for: {what}"
        );
        std::thread::sleep(POLL_INTERVAL);
    }
}
