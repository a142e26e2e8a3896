use std::time::SystemTime;

use bridge_core::{
    BoundPod, ClaimRef, ClaimUid, DeviceId, DeviceName, ListedClaim, ListedDevice, ListedPod,
    PodName, PodPhase, PodRef, PodSource, PodUid, Presence, Settings, Side, UnitState, UnitStatus,
};

use super::*;

fn name() -> PodName {
    PodName {
        namespace: "a".to_owned(),
        name: "p".to_owned(),
    }
}

fn bound_status() -> Status {
    let unit = UnitId::new("GPU-0").unwrap();
    let kind = HoldKind::Bound {
        id: DeviceId::of_unit(unit.clone()),
        pod: PodRef {
            name: name(),
            uid: Some(PodUid::new("uid-p").unwrap()),
        },
    };
    Status {
        standing: Standing::Serving,
        rivals: Vec::new(),
        generation: 1,
        settings: Settings::default(),
        at: SystemTime::UNIX_EPOCH,
        units: vec![UnitStatus {
            device: DeviceName::new("gpu-0").unwrap(),
            id: Some(DeviceId::of_unit(unit.clone())),
            unit,
            product_name: "NVIDIA H200".to_owned(),
            side: Side::Legacy,
            state: UnitState::Held,
            presence: Presence::Present,
            fault: None,
            lacks: None,
            holds: vec![Hold::exclusive(kind, SystemTime::UNIX_EPOCH)],
        }],
        claims: BTreeSet::new(),
    }
}

fn pods(phase: PodPhase) -> Pods {
    Pods {
        source: PodSource::Api,
        pods: vec![BoundPod {
            pod: name(),
            uid: PodUid::new("uid-p").unwrap(),
            phase,
            may_own: 1,
            started: true,
        }],
    }
}

/// The pod is listed with its unit.
fn listing() -> Listing {
    let device = ListedDevice {
        container: "main".to_owned(),
        id: DeviceId::of_unit(UnitId::new("GPU-0").unwrap()),
    };
    Listing {
        pods: vec![ListedPod {
            pod: name(),
            devices: vec![device],
            claims: Vec::new(),
        }],
    }
}

/// A rhythm of a node where nothing has changed for long, and the pool has been told what is listed.
fn calm(listing: &Listing) -> Rhythm {
    let mut rhythm = Rhythm::default();
    rhythm.has_answered(Some(listing));
    rhythm.changed = Instant::now() - CALM_AFTER;
    rhythm.told = TOLD_ENOUGH;
    rhythm
}

#[test]
fn the_end_of_a_pod_makes_lists_frequent_for_a_while_only() {
    let status = bound_status();
    let mut rhythm = Rhythm::default();
    let live = pods(PodPhase::Live);
    assert_eq!(rhythm.period(&status, None), PERIOD_HELD);
    assert_eq!(rhythm.period(&status, Some(&live)), PERIOD_HELD);
    let ended = pods(PodPhase::Terminal);
    let mut next = || rhythm.period(&status, Some(&ended));
    assert_eq!(next(), PERIOD_ENDING_FIRST);
    let mut passes = |left: Duration| {
        for until in rhythm.ending.values_mut() {
            *until = Instant::now() + left;
        }
        rhythm.period(&status, Some(&ended))
    };
    assert_eq!(passes(ENDING - PERIOD_ENDING), PERIOD_ENDING);
    assert_eq!(passes(Duration::ZERO), PERIOD_HELD);
}

#[test]
fn where_all_holders_are_listed_and_nothing_changes_lists_are_rare_and_are_not_told_again() {
    let status = bound_status();
    let (listing, live) = (listing(), pods(PodPhase::Live));
    let mut rhythm = calm(&listing);
    assert_eq!(rhythm.period(&status, Some(&live)), PERIOD_IDLE);
    assert!(!rhythm.is_news(&status, Some(&live)));
    rhythm.told = TOLD_ENOUGH - 1;
    assert!(
        rhythm.is_news(&status, Some(&live)),
        "what shows in two lists in a row has to be told twice"
    );
    rhythm.has_changed();
    assert_eq!(rhythm.period(&status, Some(&live)), PERIOD_HELD);
    let mut rhythm = calm(&listing);
    rhythm.was_told(false);
    assert!(rhythm.is_news(&status, Some(&live)), "it was not taken");
    let mut rhythm = calm(&listing);
    rhythm.has_answered(Some(&Listing::default()));
    assert!(rhythm.is_news(&status, Some(&live)), "it is another one");
    let mut rhythm = calm(&listing);
    rhythm.has_answered(None);
    rhythm.has_answered(Some(&listing));
    assert!(
        rhythm.is_news(&status, Some(&live)),
        "the kubelet has not answered meanwhile"
    );
}

#[test]
fn while_something_waits_for_a_list_they_come_each_second_and_are_told() {
    let (listed, live) = (listing(), pods(PodPhase::Live));
    let with = |kind: HoldKind| {
        let mut status = bound_status();
        status.units[0].holds = vec![Hold::exclusive(kind, SystemTime::UNIX_EPOCH)];
        status
    };
    let id = DeviceId::of_unit(UnitId::new("GPU-0").unwrap());
    let claim = ClaimRef {
        uid: ClaimUid::new("uid-c").unwrap(),
        namespace: "a".to_owned(),
        name: "c".to_owned(),
    };
    let listed_claim = ListedClaim {
        namespace: "a".to_owned(),
        name: "c".to_owned(),
        device: DeviceName::new("gpu-0").unwrap(),
    };
    let of_claim = |status: &Status| Status {
        claims: BTreeSet::from([claim.clone()]),
        ..status.clone()
    };
    let prepared = of_claim(&with(HoldKind::Prepared {
        claim: claim.clone(),
    }));
    let reserved = of_claim(&with(HoldKind::Reserved {
        claim: claim.clone(),
    }));
    let onlooker = of_claim(&bound_status());
    let without_uid = with(HoldKind::Bound {
        id: id.clone(),
        pod: PodRef {
            name: name(),
            uid: None,
        },
    });
    let mut lists_claim = listed.clone();
    lists_claim.pods[0].devices.clear();
    lists_claim.pods[0].claims.push(listed_claim);
    let mut alone = bound_status();
    alone.units[0].holds.clear();
    let waits = [
        (
            "granted",
            with(HoldKind::Granted { id }),
            Some(&live),
            &listed,
        ),
        ("no UID", without_uid, Some(&live), &listed),
        (
            "not listed",
            bound_status(),
            Some(&live),
            &Listing::default(),
        ),
        ("pods unknown", bound_status(), None, &listed),
        (
            "a claim that nobody lists",
            prepared.clone(),
            Some(&live),
            &listed,
        ),
        ("not prepared", reserved, Some(&live), &lists_claim),
        (
            "an onlooker that nobody lists",
            onlooker,
            Some(&live),
            &listed,
        ),
    ];
    for (what, status, pods, listing) in waits {
        let mut rhythm = calm(listing);
        let next = rhythm.period(&status, pods);
        assert!(next <= PERIOD_HELD, "{what}");
        assert!(rhythm.is_news(&status, pods), "{what}");
    }
    let mut rhythm = calm(&lists_claim);
    assert_eq!(rhythm.period(&prepared, Some(&live)), PERIOD_IDLE);
    assert!(!rhythm.is_news(&prepared, Some(&live)));
    for (what, listing) in [("an id", &listed), ("a claim", &lists_claim)] {
        assert!(
            calm(listing).is_news(&alone, Some(&live)),
            "{what} of nobody"
        );
    }
}
