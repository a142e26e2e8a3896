//! Every family: its name, what it says in one sentence, and its labels.

use std::sync::atomic::AtomicU64;

use bridge_core::{EndCause, Face, Mode, Xid, XidAction};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::scene::PLACES;
use super::{Answer, EventOutcome, NvmlCall, SliceWrite};

/// Names and words of labels.
pub(super) type Labels<const N: usize> = [(&'static str, &'static str); N];

/// An error's number, and what it does.
pub(super) type XidLabels = [(&'static str, String); 2];

/// Numbers of errors beyond this are counted together, so that no driver makes series without end. NVIDIA's list ends
/// below it.
const XID_LARGEST: u32 = 255;

/// A time since 1970, in seconds.
type Timestamp = Gauge<f64, AtomicU64>;

/// A save is two flushes: some milliseconds on a good disk, seconds on a bad one.
const SAVE_BUCKETS: [f64; 12] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
];

/// `Allocate` waits up to a second for a unit, Prepare up to ten; the kubelet gives up after 45.
const CALL_BUCKETS: [f64; 13] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 45.0,
];

#[derive(Debug)]
pub(super) struct Families {
    pub(super) units: Family<Labels<2>, Gauge>,
    pub(super) allocated: Gauge,
    pub(super) offers: Family<Labels<1>, Gauge>,
    pub(super) node_allocatable: Gauge,
    pub(super) mode: Family<Labels<1>, Gauge>,
    pub(super) conditions: Family<Labels<2>, Gauge>,
    pub(super) generation: Gauge,
    pub(super) grants: Family<Labels<1>, Counter>,
    pub(super) refusals: Family<Labels<2>, Counter>,
    pub(super) holds_ended: Family<Labels<1>, Counter>,
    pub(super) substitutions: Counter,
    pub(super) lost_races: Counter,
    pub(super) evictions: Counter,
    pub(super) busy_handovers: Counter,
    pub(super) call_duration: Family<Labels<1>, Histogram, fn() -> Histogram>,
    pub(super) save_duration: Histogram,
    pub(super) save_failures: Counter,
    pub(super) pod_resources_answer: Timestamp,
    pub(super) slice_writes: Family<Labels<1>, Counter>,
    pub(super) slice_failures: Counter,
    pub(super) taints_dropped: Gauge,
    pub(super) config_generation: Gauge,
    pub(super) config_loaded: Timestamp,
    pub(super) xids: Family<XidLabels, Counter>,
    pub(super) faulty: Gauge,
    pub(super) nvml_errors: Family<Labels<1>, Counter>,
    pub(super) events: Family<Labels<1>, Counter>,
}

impl Default for Families {
    fn default() -> Self {
        Self {
            units: Family::default(),
            allocated: Gauge::default(),
            offers: Family::default(),
            node_allocatable: Gauge::default(),
            mode: Family::default(),
            conditions: Family::default(),
            generation: Gauge::default(),
            grants: Family::default(),
            refusals: Family::default(),
            holds_ended: Family::default(),
            substitutions: Counter::default(),
            lost_races: Counter::default(),
            evictions: Counter::default(),
            busy_handovers: Counter::default(),
            call_duration: Family::new_with_constructor(|| Histogram::new(CALL_BUCKETS)),
            save_duration: Histogram::new(SAVE_BUCKETS),
            save_failures: Counter::default(),
            pod_resources_answer: Timestamp::default(),
            slice_writes: Family::default(),
            slice_failures: Counter::default(),
            taints_dropped: Gauge::default(),
            config_generation: Gauge::default(),
            config_loaded: Timestamp::default(),
            xids: Family::default(),
            faulty: Gauge::default(),
            nvml_errors: Family::default(),
            events: Family::default(),
        }
    }
}

impl Families {
    /// Names each family.
    pub(super) fn register(&self, to: &mut Registry) {
        self.register_pool(to);
        self.register_decisions(to);
        self.register_surroundings(to);
    }

    fn register_pool(&self, to: &mut Registry) {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        to.register("build", "The version of the daemon", Info::new(version));
        to.register(
            "units",
            "GPUs of the node, each in one state and on one face",
            self.units.clone(),
        );
        to.register(
            "units_allocated",
            "GPUs that counted pods or claims have: one number through a whole migration",
            self.allocated.clone(),
        );
        to.register(
            "units_faulty",
            "GPUs that are closed by an error of theirs, held ones included",
            self.faulty.clone(),
        );
        to.register(
            "units_offered",
            "GPUs that a new pod can get through a face now",
            self.offers.clone(),
        );
        to.register(
            "node_allocatable_units",
            "The count of GPUs that the Node's status should show as allocatable",
            self.node_allocatable.clone(),
        );
        to.register(
            "mode",
            "1 for the mode in force, 0 for the others",
            self.mode.clone(),
        );
        to.register(
            "condition",
            "1 for the status that a condition of /readyz has, 0 for the others",
            self.conditions.clone(),
        );
        to.register(
            "ledger_generation",
            "Grows by one with every saved change of who holds what",
            self.generation.clone(),
        );
    }

    fn register_decisions(&self, to: &mut Registry) {
        to.register("grants", "GPUs given out", self.grants.clone());
        to.register(
            "refusals",
            "Calls of the kubelet that were refused or not decided; a refused Prepare comes again",
            self.refusals.clone(),
        );
        to.register(
            "holds_ended",
            "Holds that have ended, each for a cause",
            self.holds_ended.clone(),
        );
        to.register(
            "substitutions",
            "Counted pods that were given another GPU than the one their id names",
            self.substitutions.clone(),
        );
        to.register(
            "lost_races",
            "GPUs that a counted pod took from a claim that was allocated and not prepared",
            self.lost_races.clone(),
        );
        to.register(
            "evictions",
            "Devices that were tainted NoExecute for a claim that lost a race",
            self.evictions.clone(),
        );
        to.register(
            "busy_handovers",
            "GPUs given to a counted pod over a process of a force-deleted one",
            self.busy_handovers.clone(),
        );
        to.register_with_unit(
            "call_duration",
            "Time to answer a call of the kubelet, waits included",
            Unit::Seconds,
            self.call_duration.clone(),
        );
        to.register_with_unit(
            "ledger_save_duration",
            "Time to save the ledger",
            Unit::Seconds,
            self.save_duration.clone(),
        );
        to.register(
            "ledger_save_failures",
            "Saves of the ledger that failed; nothing is given out until one succeeds",
            self.save_failures.clone(),
        );
    }

    fn register_surroundings(&self, to: &mut Registry) {
        to.register_with_unit(
            "pod_resources_answer_timestamp",
            "When the kubelet's pod-resources answered last; 0 before that",
            Unit::Seconds,
            self.pod_resources_answer.clone(),
        );
        to.register(
            "slice_writes",
            "Writes of ResourceSlices that succeeded",
            self.slice_writes.clone(),
        );
        to.register(
            "slice_write_failures",
            "Writes of ResourceSlices that failed and are tried again",
            self.slice_failures.clone(),
        );
        to.register(
            "slice_taints_dropped",
            "1 while the API server drops the taints of devices, else 0",
            self.taints_dropped.clone(),
        );
        to.register(
            "config_generation",
            "Good configuration files since the start of the daemon",
            self.config_generation.clone(),
        );
        to.register_with_unit(
            "config_loaded_timestamp",
            "When the last good configuration file came into force; 0 without one",
            Unit::Seconds,
            self.config_loaded.clone(),
        );
        to.register(
            "xids",
            "Errors (XIDs) of GPUs that the driver has told of, by number, and what each does",
            self.xids.clone(),
        );
        to.register(
            "nvml_errors",
            "Questions to NVML that failed or timed out",
            self.nvml_errors.clone(),
        );
        to.register(
            "events",
            "Kubernetes Events that were to be written, by what became of them",
            self.events.clone(),
        );
    }

    /// What has not happened yet is 0 and not missing, so that the first time is a change. Refusals come from those who
    /// give them, and conditions with the page.
    pub(super) fn start_at_zero(&self) {
        for (state, face) in PLACES {
            drop(
                self.units
                    .get_or_create(&[("state", state), ("face", face)]),
            );
        }
        for each in [Face::Legacy, Face::Dra] {
            drop(self.offers.get_or_create(&face(each)));
            drop(self.grants.get_or_create(&face(each)));
        }
        for each in Mode::ALL {
            drop(self.mode.get_or_create(&mode(each)));
        }
        for each in XidAction::ALL {
            // Of all numbers the one that stands for those beyond the largest.
            drop(self.xids.get_or_create(&xid(Xid::new(u32::MAX), each)));
        }
        for each in EndCause::ALL {
            drop(self.holds_ended.get_or_create(&cause(each)));
        }
        for each in [Answer::Allocate, Answer::Prepare, Answer::Unprepare] {
            drop(self.call_duration.get_or_create(&call(each.as_str())));
        }
        for each in [SliceWrite::Create, SliceWrite::Update, SliceWrite::Delete] {
            drop(self.slice_writes.get_or_create(&verb(each.as_str())));
        }
        for each in [NvmlCall::Scan, NvmlCall::Gpu, NvmlCall::Processes] {
            drop(self.nvml_errors.get_or_create(&nvml(each.as_str())));
        }
        for each in [
            EventOutcome::Written,
            EventOutcome::Repeated,
            EventOutcome::Dropped,
            EventOutcome::Forbidden,
            EventOutcome::Failed,
        ] {
            drop(self.events.get_or_create(&outcome(each.as_str())));
        }
    }
}

pub(super) fn face(face: Face) -> Labels<1> {
    [("face", face.as_str())]
}

pub(super) fn refusal(face: Face, reason: &'static str) -> Labels<2> {
    [("face", face.as_str()), ("reason", reason)]
}

pub(super) fn cause(cause: EndCause) -> Labels<1> {
    [("cause", cause.as_str())]
}

pub(super) fn mode(mode: Mode) -> Labels<1> {
    [("mode", mode.as_str())]
}

pub(super) fn xid(xid: Xid, does: XidAction) -> XidLabels {
    let number = match xid.number() {
        number if number <= XID_LARGEST => number.to_string(),
        _ => "other".to_owned(),
    };
    [("xid", number), ("action", does.as_str().to_owned())]
}

pub(super) fn call(call: &'static str) -> Labels<1> {
    [("call", call)]
}

pub(super) fn verb(verb: &'static str) -> Labels<1> {
    [("verb", verb)]
}

pub(super) fn outcome(outcome: &'static str) -> Labels<1> {
    [("outcome", outcome)]
}

pub(super) fn nvml(call: &'static str) -> Labels<1> {
    [("call", call)]
}
