//! What is counted, and what the page says of a pool.

use std::collections::{BTreeMap, BTreeSet};

use bridge_core::{
    CountedOffer, DeviceId, DeviceName, EndCause, ForeignCause, Health, Hold, HoldKind, Mode,
    Offers, Presence, Settings, Side, Standing, Status, UnitState, UnitStatus,
};

use super::scene::PLACES;
use super::*;

#[path = "../../tests/common/names.rs"]
mod names;
use names::{claim, pod, unit};

/// A unit in every state, and one for every kind of hold.
fn everything() -> Status {
    let id = |number| DeviceId::of_unit(unit(number));
    let states = [
        UnitState::FreeLegacy,
        UnitState::FreeDra,
        UnitState::FreeRest,
        UnitState::Moving,
        UnitState::Lost,
        UnitState::Faulty,
        UnitState::Unseen,
    ];
    let kinds = [
        HoldKind::Granted { id: id(6) },
        HoldKind::Bound {
            id: id(7),
            pod: pod("tenant", "secretive"),
        },
        HoldKind::Reserved { claim: claim() },
        HoldKind::Prepared { claim: claim() },
        HoldKind::Foreign {
            cause: ForeignCause::UnknownProcess,
        },
    ];
    let free = states.into_iter().map(|state| (state, Vec::new()));
    let held = kinds.into_iter().map(|kind| {
        let hold = Hold::exclusive(kind, SystemTime::UNIX_EPOCH);
        (UnitState::Held, vec![hold])
    });
    let units = (0..).zip(free.chain(held));
    let units = units.map(|(number, (state, holds))| UnitStatus {
        unit: unit(number),
        device: DeviceName::new(format!("gpu-{number}")).unwrap(),
        id: Some(id(number)),
        product_name: "NVIDIA H200".to_owned(),
        side: Side::Legacy,
        state,
        presence: Presence::Present,
        lacks: None,
        fault: None,
        holds,
    });
    Status {
        standing: Standing::Serving,
        rivals: Vec::new(),
        generation: 12,
        settings: Settings {
            mode: Mode::Dra,
            ..Settings::default()
        },
        at: SystemTime::UNIX_EPOCH,
        units: units.collect(),
        claims: BTreeSet::new(),
    }
}

fn offers() -> Offers {
    let counted = |number, health, free| CountedOffer {
        id: DeviceId::of_unit(unit(number)),
        unit: unit(number),
        health,
        numa_node: None,
        free,
        leaving: false,
        reserved: false,
    };
    Offers {
        count: 3,
        counted: vec![
            counted(0, Health::Healthy, true),
            counted(2, Health::Healthy, true),
            counted(1, Health::Unhealthy, false),
            counted(7, Health::Healthy, false),
        ],
        ..Offers::default()
    }
}

/// The samples of a page: name with labels, and value.
fn samples(metrics: &Metrics, status: &Status) -> BTreeMap<String, f64> {
    let scene = Scene {
        status,
        offers: &offers(),
        conditions: vec![("LedgerServing", "met"), ("ConfigInForce", "limited")],
    };
    let page = metrics.page(&scene, Format::Text);
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[track_caller]
fn check(samples: &BTreeMap<String, f64>, sample: &str, value: f64) {
    let found = samples.get(sample);
    assert_eq!(found, Some(&value), "{sample} in {samples:#?}");
}

mod documents;

#[test]
fn each_unit_is_counted_once_under_words_of_the_status_page() {
    let status = everything();
    let samples = samples(&Metrics::new(), &status);
    for (state, face) in PLACES {
        let sample = format!("gpu_bridge_units{{state=\"{state}\",face=\"{face}\"}}");
        check(&samples, &sample, 1.0);
    }
    let of_units = samples
        .iter()
        .filter(|(name, _)| name.starts_with("gpu_bridge_units{"));
    let sum: f64 = of_units.map(|(_, value)| value).sum();
    assert_eq!(sum, f64::from(u32::try_from(status.units.len()).unwrap()));
    check(&samples, "gpu_bridge_units_allocated", 4.0);
}

#[test]
fn what_faces_offer_mode_conditions_and_generation_are_those_of_the_pool() {
    let samples = samples(&Metrics::new(), &everything());
    for (sample, value) in [
        ("gpu_bridge_units_offered{face=\"legacy\"}", 2.0),
        ("gpu_bridge_units_offered{face=\"dra\"}", 0.0),
        ("gpu_bridge_node_allocatable_units", 3.0),
        ("gpu_bridge_mode{mode=\"dra\"}", 1.0),
        ("gpu_bridge_mode{mode=\"both\"}", 0.0),
        ("gpu_bridge_ledger_generation", 12.0),
        (
            "gpu_bridge_condition{condition=\"ConfigInForce\",status=\"limited\"}",
            1.0,
        ),
        (
            "gpu_bridge_condition{condition=\"ConfigInForce\",status=\"met\"}",
            0.0,
        ),
        (
            "gpu_bridge_condition{condition=\"LedgerServing\",status=\"met\"}",
            1.0,
        ),
    ] {
        check(&samples, sample, value);
    }
}

#[test]
fn a_pool_that_shrinks_leaves_no_number_of_before() {
    let metrics = Metrics::new();
    drop(samples(&metrics, &everything()));
    let empty = Status {
        units: Vec::new(),
        ..everything()
    };
    let samples = samples(&metrics, &empty);
    check(&samples, "gpu_bridge_units_allocated", 0.0);
    check(
        &samples,
        "gpu_bridge_units{state=\"Bound\",face=\"legacy\"}",
        0.0,
    );
}

#[test]
fn what_happens_is_counted_and_what_never_did_is_0() {
    let metrics = Metrics::new();
    metrics.may_refuse(Face::Dra, ["UnitHeld", "UnitBusy"]);
    let grant = |number| Report::Granted {
        id: DeviceId::of_unit(unit(number)),
        unit: unit(number),
    };
    metrics.took_place(&[
        grant(1),
        Report::Substituted {
            id: DeviceId::of_unit(unit(1)),
            unit: unit(2),
        },
        Report::ClaimLostRace {
            claim: claim(),
            unit: unit(2),
        },
        Report::EvictionAsked {
            claim: claim(),
            unit: unit(2),
        },
        Report::HandedOverBusy {
            id: DeviceId::of_unit(unit(3)),
            unit: unit(3),
            pids: vec![7],
        },
        Report::Prepared {
            claim: claim(),
            units: vec![unit(4), unit(5)],
        },
        Report::Ended {
            unit: unit(1),
            cause: EndCause::PodEnded,
        },
    ]);
    metrics.refused(Face::Dra, "UnitHeld");
    metrics.not_saved();
    metrics.saved(Duration::from_millis(3));
    metrics.slice_written(SliceWrite::Delete);
    metrics.slice_not_written();
    metrics.taints_dropped();
    metrics.nvml_failed(NvmlCall::Gpu);
    metrics.configured(2);
    metrics.pod_resources_answered();
    drop(metrics.timed(Answer::Unprepare));
    let samples = samples(&metrics, &everything());
    for (sample, value) in [
        ("gpu_bridge_grants_total{face=\"legacy\"}", 1.0),
        ("gpu_bridge_grants_total{face=\"dra\"}", 2.0),
        (
            "gpu_bridge_refusals_total{face=\"dra\",reason=\"UnitHeld\"}",
            1.0,
        ),
        (
            "gpu_bridge_refusals_total{face=\"dra\",reason=\"UnitBusy\"}",
            0.0,
        ),
        ("gpu_bridge_substitutions_total", 1.0),
        ("gpu_bridge_lost_races_total", 1.0),
        ("gpu_bridge_evictions_total", 1.0),
        ("gpu_bridge_busy_handovers_total", 1.0),
        ("gpu_bridge_holds_ended_total{cause=\"PodEnded\"}", 1.0),
        ("gpu_bridge_holds_ended_total{cause=\"Unprepared\"}", 0.0),
        ("gpu_bridge_ledger_save_failures_total", 1.0),
        ("gpu_bridge_ledger_save_duration_seconds_count", 1.0),
        ("gpu_bridge_slice_writes_total{verb=\"delete\"}", 1.0),
        ("gpu_bridge_slice_writes_total{verb=\"create\"}", 0.0),
        ("gpu_bridge_slice_write_failures_total", 1.0),
        ("gpu_bridge_slice_taints_dropped", 1.0),
        ("gpu_bridge_nvml_errors_total{call=\"gpu\"}", 1.0),
        ("gpu_bridge_config_generation", 2.0),
        (
            "gpu_bridge_call_duration_seconds_count{call=\"unprepare\"}",
            1.0,
        ),
    ] {
        check(&samples, sample, value);
    }
    for sample in [
        "gpu_bridge_pod_resources_answer_timestamp_seconds",
        "gpu_bridge_config_loaded_timestamp_seconds",
    ] {
        assert!(samples[sample] > 1.7e9, "{sample} in {samples:#?}");
    }
    metrics.taints_kept();
    check(
        &self::samples(&metrics, &everything()),
        "gpu_bridge_slice_taints_dropped",
        0.0,
    );
}

#[test]
fn no_page_names_a_pod_or_a_claim_or_a_gpu() {
    let status = everything();
    let scene = Scene {
        status: &status,
        offers: &offers(),
        conditions: Vec::new(),
    };
    for format in [Format::Text, Format::OpenMetrics] {
        let page = Metrics::new().page(&scene, format);
        for name in [
            "tenant",
            "secretive",
            "train",
            "llm",
            "GPU-",
            "gpu-",
            "H200",
        ] {
            assert!(!page.contains(name), "{name} is on {page}");
        }
    }
}

#[test]
fn the_version_is_the_only_text_that_no_enum_has() {
    let page = Metrics::new().page(
        &Scene {
            status: &everything(),
            offers: &offers(),
            conditions: vec![("LedgerServing", "met")],
        },
        Format::Text,
    );
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    let labels = samples.filter_map(|line| {
        let (_, labels) = line.split_once('{')?;
        labels.split_once('}').map(|(labels, _)| labels)
    });
    let mut others = BTreeSet::new();
    for (name, value) in labels
        .flat_map(|labels| labels.split(','))
        .filter_map(|label| label.split_once('='))
    {
        let word = value.trim_matches('"');
        if name != "le" && !word.chars().all(|c| c.is_ascii_alphabetic()) {
            others.insert((name, word));
        }
    }
    let version = ("version", env!("CARGO_PKG_VERSION"));
    assert_eq!(others, BTreeSet::from([version]));
}

#[test]
fn who_asks_for_openmetrics_gets_it_to_its_end_mark() {
    let prometheus =
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
    assert_eq!(Format::accepted(prometheus), Format::OpenMetrics);
    assert_eq!(Format::accepted("text/plain"), Format::Text);
    assert_eq!(Format::accepted(""), Format::Text);
    let scene = Scene {
        status: &everything(),
        offers: &offers(),
        conditions: Vec::new(),
    };
    let page = Metrics::new().page(&scene, Format::OpenMetrics);
    assert!(page.ends_with("# EOF\n"));
}
