//! Units that NVML sees and that no container could use, since the host lacks a device node.

use std::collections::BTreeMap;

use super::kit::*;
use crate::{
    AllocateOutcome, Health, Listing, Mode, Patience, PrepareOutcome, Refusal, Settings, UnitId,
};

const LACK: &str = "/dev/nvidia-uvm is missing";

fn unfit(units: &[&str]) -> BTreeMap<UnitId, String> {
    let lack = |name: &&str| (unit(name), LACK.to_owned());
    units.iter().map(lack).collect()
}

fn healthy(daemon: &Daemon) -> Vec<String> {
    let counted = daemon.pool.offers().counted.into_iter();
    let healthy = counted.filter(|offer| offer.health == Health::Healthy);
    healthy.map(|offer| offer.unit.to_string()).collect()
}

fn open(daemon: &Daemon) -> Vec<String> {
    let claims = daemon.pool.offers().claims.unwrap_or_default();
    let open = claims.into_iter().filter(|offer| offer.taint.is_none());
    open.map(|offer| offer.gpu.uuid.to_string()).collect()
}

#[test]
fn what_no_container_could_use_is_offered_to_nobody_until_it_can_be_used() {
    let all_dra = Settings {
        mode: Mode::Dra,
        ..Settings::default()
    };
    let legacy: fn(&Daemon) -> Vec<String> = healthy;
    for (settings, offered) in [(all_legacy(), legacy), (all_dra, open)] {
        let mut daemon = Daemon::with_gpus(2, settings);
        assert_eq!(offered(&daemon), ["GPU-0", "GPU-1"]);
        daemon.act(|t| t.observe_unfit(unfit(&["GPU-0", "GPU-1"])));
        assert_eq!(offered(&daemon), [""; 0]);
        daemon.act(|t| t.observe_unfit(unfit(&["GPU-1"])));
        assert_eq!(offered(&daemon), ["GPU-0"]);
        daemon.act(|t| t.observe_unfit(BTreeMap::new()));
        assert_eq!(offered(&daemon), ["GPU-0", "GPU-1"]);
    }
}

#[test]
fn who_has_such_a_unit_keeps_it() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.granted("GPU-1", &Listing::default());
    daemon.act(|t| t.observe_unfit(unfit(&["GPU-0", "GPU-1"])));
    assert_eq!(healthy(&daemon), ["GPU-1"]);
    assert!(daemon.holds("GPU-1").contains("Granted"));
}

#[test]
fn a_counted_pod_gets_another_unit_and_is_refused_by_name_if_there_is_none() {
    let mut daemon = Daemon::with_gpus(2, all_legacy());
    daemon.act(|t| t.observe_unfit(unfit(&["GPU-1"])));
    assert_eq!(daemon.granted("GPU-1", &Listing::default()), "GPU-0");
    let outcome = daemon.allocate(&["GPU-0"], Patience::LastCall, &Listing::default());
    let refusal = Refusal::DeviceNodeMissing {
        unit: unit("GPU-1"),
        lack: LACK.to_owned(),
        claim: None,
    };
    assert_eq!(outcome, AllocateOutcome::Refused(refusal));
}

#[test]
fn a_claim_waits_for_the_node_and_is_refused_by_name_when_its_time_is_up() {
    let mut daemon = Daemon::with_gpus(2, Settings::default());
    daemon.see_claims(&[allocated("llm", &["gpu-0"], &[])]);
    daemon.act(|t| t.observe_unfit(unfit(&["GPU-0"])));
    let refusal = Refusal::DeviceNodeMissing {
        unit: unit("GPU-0"),
        lack: LACK.to_owned(),
        claim: Some(claim_ref("llm")),
    };
    let waits = daemon.prepare("llm", &["gpu-0"]);
    assert_eq!(waits, PrepareOutcome::Wait(refusal.clone()));
    let refused = daemon.prepare_finally("llm", &["gpu-0"]);
    assert_eq!(refused, PrepareOutcome::Refused(refusal));
    daemon.act(|t| t.observe_unfit(BTreeMap::new()));
    let prepared = daemon.prepare("llm", &["gpu-0"]);
    assert!(
        matches!(prepared, PrepareOutcome::Prepared(_)),
        "{prepared:?}"
    );
}
