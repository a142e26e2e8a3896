//! Kubernetes Events: what the owner of a pod, or an admin, should hear without having looked for it.
//!
//! Owns how events are written: bounded, never twice the same within some minutes, and never so that anything waits
//! for it. Nothing depends on an event: one that can't be written is gone. What is worth one is for others to say.
//!
//! Source: k8s.io/api `events/v1/types.go`, kubernetes v1.37.2 `pkg/apis/core/validation/events.go`.

mod bucket;
mod writer;

use bridge_core::{ClaimRef, PodName, PodUid};
use tokio::sync::mpsc;

use crate::metrics::{EventOutcome, Metrics};

pub use self::writer::run;

/// Events that may wait to be written: more come only when a whole node is in trouble, and then the first say it.
pub const QUEUE_LIMIT: usize = 64;

/// What an event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum About {
    /// The own Node.
    Node,
    /// A pod.
    Pod {
        /// Its name.
        pod: PodName,
        /// Its UID.
        uid: PodUid,
    },
    /// A claim.
    Claim(ClaimRef),
}

/// Whether somebody should do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// No.
    Normal,
    /// Yes.
    Warning,
}

/// An event that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What it is about.
    pub about: About,
    /// Whether somebody should do something.
    pub severity: Severity,
    /// Stable and `PascalCase`; a warning's has a page in `migration-guide/reasons`.
    pub reason: &'static str,
    /// What was being done, `PascalCase`.
    pub action: &'static str,
    /// What happened, why, and what to do. What is longer than [`NOTE_LIMIT`] bytes is cut.
    pub note: String,
}

/// The API takes 1024 bytes.
pub const NOTE_LIMIT: usize = 1000;

/// A way to the writer.
#[derive(Debug, Clone)]
pub struct Recorder {
    events: mpsc::Sender<Event>,
    metrics: Metrics,
}

impl Recorder {
    /// A way, and what [`run`] takes from it.
    #[must_use]
    pub fn new(metrics: Metrics) -> (Self, mpsc::Receiver<Event>) {
        let (events, queue) = mpsc::channel(QUEUE_LIMIT);
        (Self { events, metrics }, queue)
    }

    /// Has an event written, if there is room.
    pub fn record(&self, event: Event) {
        if self.events.try_send(event).is_err() {
            self.metrics.event(EventOutcome::Dropped);
        }
    }
}
