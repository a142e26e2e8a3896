//! Whatever a ledger may hold comes back from the disk, and whatever happens to its bytes is noticed.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use bridge_core::{
    Access, ClaimRef, ClaimUid, DeviceId, DeviceName, Fault, ForeignCause, Former, Gpu, Hold,
    HoldKind, Ledger, PodName, PodRef, PodUid, Preparation, PreparedDevice, Side, UnitId, UnitKind,
    UnitRecord, Xid,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::super::format::{decode, encode};
use super::super::unknown::Unknown;

/// The most units of a generated ledger: enough for a GPU with MIG instances, a shared one and an idle one.
const UNITS: usize = 6;

fn id() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9_.-]{1,63}"
}

/// Names, as hostile as JSON can carry them.
fn text() -> impl Strategy<Value = String> {
    any::<String>()
}

fn pod() -> impl Strategy<Value = PodRef> {
    (text(), text(), option::of(id())).prop_map(|(namespace, name, uid)| PodRef {
        name: PodName { namespace, name },
        uid: uid.map(|uid| PodUid::new(uid).unwrap()),
    })
}

fn claim() -> impl Strategy<Value = ClaimRef> {
    (id(), text(), text()).prop_map(|(uid, namespace, name)| ClaimRef {
        uid: ClaimUid::new(uid).unwrap(),
        namespace,
        name,
    })
}

type MakeKind = fn(UnitId, usize, PodRef, ClaimRef) -> HoldKind;

/// A holder; what must be unique in a ledger is made so by `unit` and `place`.
fn kind() -> impl Strategy<Value = MakeKind> {
    let kinds: [MakeKind; 9] = [
        |unit, place, _, _| HoldKind::Granted {
            id: DeviceId::parse(&format!("{unit}::{place}")).unwrap(),
        },
        |unit, place, pod, _| HoldKind::Bound {
            id: DeviceId::parse(&format!("{unit}::{place}")).unwrap(),
            pod,
        },
        |_, _, _, claim| HoldKind::Reserved { claim },
        |_, _, _, claim| HoldKind::Prepared { claim },
        |_, _, _, _| HoldKind::Foreign {
            cause: ForeignCause::UnknownProcess,
        },
        |_, _, pod, _| HoldKind::Foreign {
            cause: ForeignCause::UnknownUnitOf { pod },
        },
        |_, _, pod, _| HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Counted(Some(pod)),
            },
        },
        |_, _, _, _| HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Counted(None),
            },
        },
        |_, _, _, claim| HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Claim(claim),
            },
        },
    ];
    prop::sample::select(kinds.to_vec())
}

/// Since when: on both sides of 1970, to the nanosecond.
fn since() -> impl Strategy<Value = SystemTime> {
    (any::<bool>(), 0..200_000_000_000_u64, 0..1_000_000_000_u32).prop_map(
        |(before, seconds, nanoseconds)| {
            let distance = Duration::new(seconds, nanoseconds);
            if before {
                SystemTime::UNIX_EPOCH - distance
            } else {
                SystemTime::UNIX_EPOCH + distance
            }
        },
    )
}

type AnyHold = (MakeKind, SystemTime, PodRef, ClaimRef);

fn gpu() -> impl Strategy<Value = Gpu> {
    let words = [text(), text(), text(), text(), text()];
    let numbers = (
        any::<u32>(),
        any::<(u32, u32)>(),
        any::<u64>(),
        any::<(u32, u32)>(),
    );
    let options = (
        option::of(any::<u32>()),
        option::of(text()),
        option::of(text()),
    );
    (id(), words, numbers, options).prop_map(|(uuid, words, numbers, options)| {
        let [
            pci_bus_id,
            product_name,
            brand,
            architecture,
            driver_version,
        ] = words;
        let (minor, compute_capability, memory_bytes, cuda_driver_version) = numbers;
        let (numa_node, pcie_root, addressing_mode) = options;
        Gpu {
            uuid: UnitId::new(uuid).unwrap(),
            pci_bus_id,
            minor,
            product_name,
            brand,
            architecture,
            compute_capability,
            memory_bytes,
            driver_version,
            cuda_driver_version,
            numa_node,
            pcie_root,
            addressing_mode,
        }
    })
}

fn ledger() -> impl Strategy<Value = Ledger> {
    let hold = (kind(), since(), pod(), claim());
    let unit = (
        any::<bool>(),
        1..4_u32,
        any::<bool>(),
        gpu(),
        vec(hold, 0..3),
    );
    let looked_on = (claim(), vec(text(), 0..3), text());
    (
        any::<u64>(),
        vec(unit, 0..UNITS),
        vec(looked_on, 0..2),
        any::<u32>(),
    )
        .prop_map(|(generation, units, looked_on, first)| {
            let mut ledger = Ledger {
                generation,
                ..Ledger::default()
            };
            for (index, (mig, capacity, legacy, gpu, holds)) in units.into_iter().enumerate() {
                let unit = UnitId::new(format!("GPU-{index}")).unwrap();
                let parent = UnitId::new("GPU-0").unwrap();
                let record = UnitRecord {
                    number: first.wrapping_add(index.try_into().unwrap()),
                    kind: if mig && index > 0 {
                        UnitKind::Mig { parent }
                    } else {
                        UnitKind::Gpu
                    },
                    capacity: NonZeroU32::new(capacity).unwrap(),
                    side: if legacy { Side::Legacy } else { Side::Dra },
                    gpu: gpu.into(),
                };
                ledger.units.insert(unit.clone(), record);
                if first & (1 << index) != 0 {
                    let fault = Fault {
                        xids: [Xid::new(first), Xid::new(79)].into(),
                        since: SystemTime::UNIX_EPOCH + Duration::from_secs(first.into()),
                    };
                    ledger.faults.insert(unit.clone(), fault);
                }
                hold_what_fits(&mut ledger, &unit, holds);
            }
            for (claim, requests, pool) in looked_on {
                look_on(&mut ledger, claim, requests, pool);
            }
            ledger
        })
}

/// Adds holds one by one, and takes back those with which the ledger would break its rules.
fn hold_what_fits(ledger: &mut Ledger, unit: &UnitId, holds: Vec<AnyHold>) {
    for (place, (kind, since, pod, claim)) in holds.into_iter().enumerate() {
        let before = ledger.clone();
        let kind = kind(unit.clone(), place, pod, claim);
        if let HoldKind::Prepared { claim } = &kind {
            let device = PreparedDevice {
                requests: vec![claim.name.clone()],
                pool: claim.namespace.clone(),
                device: ledger.units[unit].device_name(),
                unit: unit.clone(),
                access: Access::Owner,
            };
            let preparation = Preparation {
                claim: claim.clone(),
                devices: vec![device],
            };
            ledger.prepared.insert(claim.uid.clone(), preparation);
        }
        let shares = NonZeroU32::new(1 + u32::try_from(place).unwrap() % 2).unwrap();
        let hold = Hold {
            shares,
            since,
            kind,
        };
        ledger.holds.entry(unit.clone()).or_default().push(hold);
        if ledger.check().is_err() {
            *ledger = before;
        }
    }
}

fn look_on(ledger: &mut Ledger, claim: ClaimRef, requests: Vec<String>, pool: String) {
    let device = PreparedDevice {
        requests,
        pool,
        device: DeviceName::new("gpu-9").unwrap(),
        unit: UnitId::new("GPU-9").unwrap(),
        access: Access::Admin,
    };
    let fresh = Preparation {
        claim: claim.clone(),
        devices: Vec::new(),
    };
    let preparation = ledger.prepared.entry(claim.uid).or_insert(fresh);
    preparation.devices.push(device);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_ledger_comes_back_as_it_was(ledger in ledger()) {
        let bytes = encode(&ledger, &Unknown::default(), "0.1.0", "boot").unwrap();
        let decoded = decode(&bytes).unwrap();
        prop_assert_eq!(decoded.ledger, ledger);
        prop_assert_eq!(decoded.unknown, Unknown::default());
    }

    #[test]
    fn no_damaged_ledger_is_taken_for_one(
        ledger in ledger(),
        place in any::<prop::sample::Index>(),
        bit in 0..8_u8,
    ) {
        let mut bytes = encode(&ledger, &Unknown::default(), "0.1.0", "boot").unwrap();
        let place = place.index(bytes.len());
        prop_assert!(decode(&bytes[..place]).is_err());
        bytes[place] ^= 1 << bit;
        prop_assert!(decode(&bytes).is_err());
    }
}

#[test]
fn the_ledgers_generated_are_full_ones() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let ledgers: Vec<Ledger> = (0..100)
        .map(|_| ledger().new_tree(&mut runner).unwrap().current())
        .collect();
    let holds = || ledgers.iter().flat_map(|ledger| ledger.holds.values());
    assert!(ledgers.iter().any(|ledger| ledger.prepared.len() > 1));
    assert!(holds().any(|holds| holds.len() > 1));
    assert!(
        holds()
            .flatten()
            .any(|hold| matches!(hold.kind, HoldKind::Bound { .. }))
    );
    assert!(
        ledgers
            .iter()
            .flat_map(|ledger| ledger.units.values())
            .any(|record| matches!(record.kind, UnitKind::Mig { .. }))
    );
}
