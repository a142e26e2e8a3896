//! Numbers about the daemon for Prometheus: what they are called, what moves them, and the page that shows them.
//!
//! What happens is counted where it happens; what the pool knows is taken from it when somebody looks. The value of a
//! label is a word of an enum, never the name of a pod, a claim, a GPU or a node: the page is open to whoever scrapes.
//! It must not know who that is. `migration-guide/metrics.md` describes each family, and a test compares.

mod families;
mod scene;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bridge_core::{Face, Report};
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;

pub use self::scene::Scene;

use self::families::{Families, call, cause, face, nvml, outcome, refusal, verb, xid};

/// All numbers of a daemon. A clone is another way to the same ones.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    families: Families,
    /// Locked while a page is made, so that each shows the pool as it was at one moment.
    registry: Mutex<Registry>,
}

/// A call of the kubelet whose answer takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// `Allocate`.
    Allocate,
    /// `NodePrepareResources`, for one claim.
    Prepare,
    /// `NodeUnprepareResources`, for one claim.
    Unprepare,
}

impl Answer {
    fn as_str(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::Prepare => "prepare",
            Self::Unprepare => "unprepare",
        }
    }
}

/// A write of the ResourceSlice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceWrite {
    /// There was none.
    Create,
    /// It says something else now.
    Update,
    /// It is not wanted, or another one is.
    Delete,
}

impl SliceWrite {
    fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
        }
    }
}

/// A question to NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvmlCall {
    /// For all GPUs.
    Scan,
    /// For one of them, within a scan.
    Gpu,
    /// For the processes of the GPUs.
    Processes,
}

impl NvmlCall {
    fn as_str(self) -> &'static str {
        match self {
            Self::Scan => "scan",
            Self::Gpu => "gpu",
            Self::Processes => "processes",
        }
    }
}

/// What became of a Kubernetes Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventOutcome {
    /// It was written, or counted in the first of its kind.
    Written,
    /// It was written a moment ago.
    Repeated,
    /// There were too many.
    Dropped,
    /// A role does not allow it.
    Forbidden,
    /// The API server did not take it.
    Failed,
}

impl EventOutcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Repeated => "repeated",
            Self::Dropped => "dropped",
            Self::Forbidden => "forbidden",
            Self::Failed => "failed",
        }
    }
}

/// How a page is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, 0.0.4.
    Text,
}

impl Format {
    /// The one that a client wants, by its header `Accept`.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// For the header `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let families = Families::default();
        let mut registry = Registry::with_prefix("gpu_bridge");
        families.register(&mut registry);
        families.start_at_zero();
        Self(Arc::new(Inner {
            families,
            registry: Mutex::new(registry),
        }))
    }

    /// The page, with the pool as it is now.
    ///
    /// # Panics
    /// Never: a `String` can be written to.
    #[must_use]
    pub fn page(&self, scene: &Scene<'_>, format: Format) -> String {
        let registry = self.0.registry.lock();
        let registry = registry.unwrap_or_else(PoisonError::into_inner);
        scene.show(&self.0.families);
        let mut page = String::new();
        match format {
            Format::OpenMetrics => text::encode(&mut page, &registry),
            Format::Text => prometheus_text::encode(&mut page, &registry),
        }
        .expect("a String can be written to");
        page
    }

    /// A call that is being answered: the time that it took is noted when what this returns is dropped.
    #[must_use]
    pub fn timed(&self, answer: Answer) -> Timed {
        Timed {
            metrics: self.clone(),
            answer,
            since: Instant::now(),
        }
    }

    /// Refusals that a face may give: what never happened is shown as 0, so that the first one is a change.
    pub fn may_refuse(&self, of: Face, reasons: impl IntoIterator<Item = &'static str>) {
        for reason in reasons {
            drop(self.families().refusals.get_or_create(&refusal(of, reason)));
        }
    }

    /// A call of the kubelet was answered with a no, or with no decision.
    pub fn refused(&self, by: Face, reason: &'static str) {
        self.families()
            .refusals
            .get_or_create(&refusal(by, reason))
            .inc();
    }

    /// A transition was committed.
    pub fn took_place(&self, reports: &[Report]) {
        for report in reports {
            self.count(report);
        }
    }

    fn count(&self, report: &Report) {
        let families = self.families();
        match report {
            Report::Granted { .. } => {
                families.grants.get_or_create(&face(Face::Legacy)).inc();
            }
            Report::Prepared { units, .. } => {
                let count = u64::try_from(units.len()).unwrap_or(u64::MAX);
                families
                    .grants
                    .get_or_create(&face(Face::Dra))
                    .inc_by(count);
            }
            Report::Substituted { .. } => {
                families.substitutions.inc();
            }
            Report::ClaimLostRace { .. } => {
                families.lost_races.inc();
            }
            Report::EvictionAsked { .. } => {
                families.evictions.inc();
            }
            Report::HandedOverBusy { .. } => {
                families.busy_handovers.inc();
            }
            Report::Ended { cause: why, .. } => {
                families.holds_ended.get_or_create(&cause(*why)).inc();
            }
            Report::XidSeen {
                xid: number,
                times,
                action,
                ..
            } => {
                let labels = xid(*number, *action);
                families.xids.get_or_create(&labels).inc_by(*times);
            }
            Report::KubeletLostItsBook { .. }
            | Report::EvictionOver { .. }
            | Report::NotEvicted { .. }
            | Report::Bound { .. }
            | Report::Reserved { .. }
            | Report::Lingering { .. }
            | Report::ForeignFound { .. }
            | Report::UnknownHolder { .. }
            | Report::UnitAdded { .. }
            | Report::UnitLost { .. }
            | Report::UnitReturned { .. }
            | Report::UnitFaulty { .. }
            | Report::FaultEnded { .. }
            | Report::ClaimTakenOver { .. }
            | Report::OtherRegistrant { .. }
            | Report::RivalsGone
            | Report::Adopted { .. } => {}
        }
    }

    /// The ledger was saved.
    pub fn saved(&self, took: Duration) {
        self.families().save_duration.observe(took.as_secs_f64());
    }

    /// It could not be saved.
    pub fn not_saved(&self) {
        self.families().save_failures.inc();
    }

    /// pod-resources has answered a List, now.
    pub fn pod_resources_answered(&self) {
        self.families().pod_resources_answer.set(unix_now());
    }

    /// A ResourceSlice was written.
    pub fn slice_written(&self, how: SliceWrite) {
        self.families()
            .slice_writes
            .get_or_create(&verb(how.as_str()))
            .inc();
    }

    /// A ResourceSlice could not be written, or not be read for that.
    pub fn slice_not_written(&self) {
        self.families().slice_failures.inc();
    }

    /// The API server keeps the taints of devices.
    pub fn taints_kept(&self) {
        self.families().taints_dropped.set(0);
    }

    /// The API server drops the taints of devices.
    pub fn taints_dropped(&self) {
        self.families().taints_dropped.set(1);
    }

    /// A good configuration file has come into force now. `generation`: how many there were since the start.
    pub fn configured(&self, generation: u64) {
        let families = self.families();
        families.config_generation.set(count(generation));
        families.config_loaded.set(unix_now());
    }

    /// NVML did not answer, or with an error.
    pub fn nvml_failed(&self, asked: NvmlCall) {
        self.families()
            .nvml_errors
            .get_or_create(&nvml(asked.as_str()))
            .inc();
    }

    /// A Kubernetes Event was to be written.
    pub fn event(&self, outcome: EventOutcome) {
        self.families()
            .events
            .get_or_create(&self::outcome(outcome.as_str()))
            .inc();
    }

    fn families(&self) -> &Families {
        &self.0.families
    }
}

/// A call that is being answered.
#[derive(Debug)]
pub struct Timed {
    metrics: Metrics,
    answer: Answer,
    since: Instant,
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.metrics
            .families()
            .call_duration
            .get_or_create(&call(self.answer.as_str()))
            .observe(self.since.elapsed().as_secs_f64());
    }
}

/// Seconds since 1970, as Prometheus has times.
fn unix_now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// A number as a gauge has it.
fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
