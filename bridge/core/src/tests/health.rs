//! Faults of GPUs: what the scenarios can't say.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::kit::*;
use crate::{
    FaultEnd, Health, IGNORED_XIDS, Ledger, NotCleared, Pool, Recovery, Report, STEADY_FIRST,
    STEADY_LONGEST, Settings, Side, Standing, UnitHealth, UnitKind, UnitRecord, XIDS_OF_A_FAULT,
    Xid, XidAction, XidRules,
};

fn xids(daemon: &mut Daemon, name: &str, numbers: &[u32]) {
    let seen = numbers.iter().map(|xid| ((unit(name), Xid::new(*xid)), 1));
    let seen = seen.collect();
    daemon.act(|t| t.observe_xids(&seen));
}

fn recovery(daemon: &mut Daemon, name: &str, action: Recovery) {
    let (asked, actions) = (daemon.uptime, BTreeMap::from([(unit(name), action)]));
    daemon.act(|t| t.observe_recovery(asked, &actions));
}

fn is_closed(daemon: &Daemon, name: &str) -> bool {
    daemon.pool.fault_of(&unit(name)).is_some()
}

#[test]
fn without_a_choice_of_the_admin_faults_of_applications_and_contained_errors_close_nothing() {
    let rules = XidRules::default();
    for xid in IGNORED_XIDS {
        assert_eq!(rules.action(Xid::new(xid)), XidAction::Ignore, "{xid}");
    }
    for xid in [48, 61, 62, 64, 74, 79, 95, 119, 120, 1000] {
        assert_eq!(rules.action(Xid::new(xid)), XidAction::Fault, "{xid}");
    }
}

#[test]
fn a_fault_of_a_gpu_closes_its_instances() {
    let mut ledger = Ledger::default();
    let parent = unit("GPU-0");
    let kinds = [UnitKind::Gpu, UnitKind::Mig { parent }, UnitKind::Gpu];
    for ((number, name), kind) in (0..).zip(["GPU-0", "MIG-1", "GPU-2"]).zip(kinds) {
        let record = UnitRecord {
            number,
            kind,
            capacity: NonZeroU32::MIN,
            side: Side::Legacy,
            gpu: gpu(name, number).into(),
        };
        ledger.units.insert(unit(name), record);
    }
    let mut daemon = Daemon::on_ledger(ledger, all_legacy());
    xids(&mut daemon, "GPU-0", &[79]);
    let healthy = |daemon: &Daemon| -> Vec<bool> {
        let counted = daemon.pool.offers().counted;
        let healthy = counted.iter().map(|offer| offer.health == Health::Healthy);
        healthy.collect()
    };
    assert_eq!(healthy(&daemon), [false, false, true]);
}

#[test]
fn a_storm_of_xids_is_remembered_by_its_first_and_saved_once_for_each() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    let storm: Vec<u32> = (200..300).collect();
    xids(&mut daemon, "GPU-0", &storm);
    let fault = daemon.pool.fault_of(&unit("GPU-0")).unwrap();
    assert_eq!(fault.xids.len(), XIDS_OF_A_FAULT);
    assert!(daemon.saved);
    xids(&mut daemon, "GPU-0", &storm);
    assert!(!daemon.saved);
}

#[test]
fn the_time_without_an_error_grows_with_each_recovery_and_not_for_ever() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    let mut steady = STEADY_FIRST;
    for _ in 0..40 {
        xids(&mut daemon, "GPU-0", &[48]);
        daemon.uptime += steady.checked_sub(Duration::from_millis(1)).unwrap();
        recovery(&mut daemon, "GPU-0", Recovery::None);
        assert!(is_closed(&daemon, "GPU-0"), "{steady:?}");
        daemon.uptime += Duration::from_millis(1);
        recovery(&mut daemon, "GPU-0", Recovery::None);
        assert!(!is_closed(&daemon, "GPU-0"), "{steady:?}");
        steady = (steady * 2).min(STEADY_LONGEST);
    }
    // An admin who clears a fault has seen to the GPU.
    xids(&mut daemon, "GPU-0", &[48]);
    assert_eq!(daemon.act(|t| t.clear_fault(&unit("GPU-0"))), Ok(()));
    xids(&mut daemon, "GPU-0", &[48]);
    daemon.uptime += STEADY_FIRST;
    recovery(&mut daemon, "GPU-0", Recovery::None);
    assert!(!is_closed(&daemon, "GPU-0"));
}

#[test]
fn what_nvml_said_before_the_error_clears_nothing() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    let asked = daemon.uptime;
    daemon.uptime += Duration::from_secs(1);
    xids(&mut daemon, "GPU-0", &[48]);
    daemon.uptime += STEADY_LONGEST;
    let actions = BTreeMap::from([(unit("GPU-0"), Recovery::None)]);
    daemon.act(|t| t.observe_recovery(asked, &actions));
    assert!(is_closed(&daemon, "GPU-0"));
    let status = daemon.pool.status(steady(0));
    let fault = status.units[0].fault.as_ref().unwrap();
    assert_eq!(fault.recovery, None, "nor is it shown");
}

#[test]
fn the_status_says_which_error_it_was_and_what_to_do() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    xids(&mut daemon, "GPU-0", &[79, 48]);
    let says = |daemon: &Daemon| {
        let status = daemon.pool.status(steady(0));
        let UnitHealth::Faulty(fault) = status.units[0].health() else {
            panic!("it is well");
        };
        fault.to_string()
    };
    assert_eq!(
        says(&daemon),
        "the driver told of XID 48, 79; reset the GPU or boot the node anew, then `gpu-bridge ledger clear-fault`, which a new boot does not need"
    );
    recovery(&mut daemon, "GPU-0", Recovery::DrainAndReset);
    assert_eq!(
        says(&daemon),
        "the driver told of XID 48, 79; by NVML this has to be done: end what uses the GPU, and reset it"
    );
}

#[test]
fn only_a_fault_can_be_cleared() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    let gpu = unit("GPU-0");
    let no_fault = NotCleared::NoFault { unit: gpu.clone() };
    assert_eq!(daemon.act(|t| t.clear_fault(&gpu)), Err(no_fault));
    let unknown = NotCleared::UnknownUnit {
        unit: unit("GPU-9"),
    };
    assert_eq!(daemon.act(|t| t.clear_fault(&unit("GPU-9"))), Err(unknown));
    daemon.pool = Pool::waiting(Settings::default());
    assert_eq!(daemon.pool.standing(), Standing::WaitingForAdoption);
    assert_eq!(
        daemon.act(|t| t.clear_fault(&gpu)),
        Err(NotCleared::NotServing)
    );
}

#[test]
fn an_error_of_a_gpu_that_is_no_unit_is_told_and_closes_nothing() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    xids(&mut daemon, "GPU-split", &[79]);
    assert!(daemon.reported(|r| matches!(r, Report::XidSeen { .. })));
    assert!(!daemon.reported(|r| matches!(r, Report::UnitFaulty { .. })));
    assert!(!daemon.saved);
}

#[test]
fn a_fault_that_is_over_by_the_configuration_of_a_later_start_ends_then() {
    let mut daemon = Daemon::with_gpus(1, all_legacy());
    xids(&mut daemon, "GPU-0", &[48]);
    let mut settings = daemon.pool.settings().clone();
    settings.xids.ignore.insert(Xid::new(48));
    daemon.act(|t| t.configure(settings.clone()));
    let ended = |r: &Report| {
        matches!(
            r,
            Report::FaultEnded {
                cause: FaultEnd::Ignored,
                ..
            }
        )
    };
    assert!(daemon.reported(ended));
}
