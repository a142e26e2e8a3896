//! Keeps `List` of pod-resources out of the time in which the kubelet gives out counted ids.
//!
//! A `List` makes the kubelet tidy its book, and an id that it has picked for an `Allocate` and not yet stored is
//! swept away with what ended pods had: it gives that id again
//! (kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/manager.go`, `UpdateAllocatedDevices`).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// After `GetPreferredAllocation` the kubelet picks ids and calls `Allocate` with nothing in between: some milliseconds.
const ANNOUNCED: Duration = Duration::from_millis(100);

/// After the answer of an `Allocate` the kubelet stores it as soon as it has read it.
const STORED: Duration = Duration::from_millis(50);

/// Who is inside, shared by all clones.
#[derive(Debug, Clone)]
pub(super) struct Gate(Arc<watch::Sender<State>>);

#[derive(Debug, Clone, Copy)]
struct State {
    /// `Allocate` calls in progress.
    open: usize,
    /// Until then one may be on its way here, or its answer on the way back.
    quiet_until: Instant,
}

/// An `Allocate` in progress; it ends when this is dropped.
#[derive(Debug)]
pub struct OpenAllocate(Gate);

impl Drop for OpenAllocate {
    fn drop(&mut self) {
        self.0.0.send_modify(|state| {
            state.open = state.open.saturating_sub(1);
            state.quiet_until = state.quiet_until.max(Instant::now() + STORED);
        });
    }
}

impl Gate {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(State {
            open: 0,
            quiet_until: Instant::now(),
        })))
    }

    pub(super) fn announce(&self) {
        self.0.send_modify(|state| {
            state.quiet_until = state.quiet_until.max(Instant::now() + ANNOUNCED);
        });
    }

    pub(super) fn open(&self) -> OpenAllocate {
        self.0.send_modify(|state| state.open += 1);
        OpenAllocate(self.clone())
    }

    pub(super) async fn quiet(&self) {
        let mut seen = self.0.subscribe();
        loop {
            let state = *seen.borrow_and_update();
            if state.open == 0 && state.quiet_until <= Instant::now() {
                return;
            }
            // The sender lives as long as `self`.
            tokio::select! {
                _ = seen.changed() => {}
                () = sleep_until(state.quiet_until), if state.open == 0 => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_gate_that_nobody_uses_is_quiet_at_once() {
        assert!(Gate::new().quiet().now_or_never().is_some());
    }

    #[tokio::test]
    async fn it_is_quiet_some_time_after_the_last_allocate_has_ended() {
        let gate = Gate::new();
        let (first, second) = (gate.open(), gate.open());
        let mut quiet = pin!(gate.quiet());
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(first);
        assert!(quiet.as_mut().now_or_never().is_none());
        let ended = Instant::now();
        drop(second);
        quiet.await;
        assert!(ended.elapsed() >= STORED);
    }

    #[tokio::test]
    async fn an_announced_allocate_that_never_comes_is_not_waited_for_long() {
        let gate = Gate::new();
        let announced = Instant::now();
        gate.announce();
        assert!(gate.quiet().now_or_never().is_none());
        gate.quiet().await;
        assert!(announced.elapsed() >= ANNOUNCED);
    }
}
