//! The state folder as a daemon meets it: whole, damaged, newer, locked, full.

use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use bridge_core::{
    Access, DeviceId, DeviceName, ForeignCause, Former, Gpu, Hold, HoldKind, PodName, PodRef,
    PodUid, Preparation, PreparedDevice, Side, UnitId, UnitKind, UnitRecord,
};
use expect_test::expect_file;

use super::*;

fn open(folder: &Path) -> (Store, Loaded) {
    Store::open(folder, BootId::unknown()).unwrap()
}

/// The ledger of a folder as the next daemon reads it.
fn reread(folder: &Path) -> Loaded {
    open(folder).1
}

fn unit(index: usize) -> UnitId {
    UnitId::new(format!("GPU-{index}")).unwrap()
}

fn claim(uid: &str) -> ClaimRef {
    ClaimRef {
        uid: ClaimUid::new(uid).unwrap(),
        namespace: "train".to_owned(),
        name: format!("claim-{uid}"),
    }
}

fn pod(name: &str, uid: Option<&str>) -> PodRef {
    PodRef {
        name: PodName {
            namespace: "train".to_owned(),
            name: name.to_owned(),
        },
        uid: uid.map(|uid| PodUid::new(uid).unwrap()),
    }
}

fn record(number: u32) -> UnitRecord {
    UnitRecord {
        number,
        kind: UnitKind::Gpu,
        capacity: NonZeroU32::MIN,
        side: Side::Legacy,
        gpu: Gpu {
            uuid: unit(number.try_into().unwrap()),
            pci_bus_id: format!("0000:0{number}:00.0"),
            minor: number,
            product_name: "NVIDIA H100 80GB HBM3".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Hopper".to_owned(),
            compute_capability: (9, 0),
            memory_bytes: 85_520_809_984,
            driver_version: "580.95.05".to_owned(),
            cuda_driver_version: (13, 0),
            numa_node: Some(0),
            pcie_root: Some("pci0000:00".to_owned()),
            addressing_mode: None,
        },
    }
}

/// One of everything.
fn full() -> Ledger {
    let holders = [
        HoldKind::Granted {
            id: DeviceId::of_unit(unit(0)),
        },
        // A substitution: the id of one unit, given another.
        HoldKind::Bound {
            id: DeviceId::of_unit(unit(2)),
            pod: pod("a", Some("pod-a")),
        },
        HoldKind::Reserved { claim: claim("r") },
        HoldKind::Prepared { claim: claim("p") },
        HoldKind::Foreign {
            cause: ForeignCause::UnknownProcess,
        },
        HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Counted(Some(pod("b", None))),
            },
        },
        HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Counted(None),
            },
        },
        HoldKind::Foreign {
            cause: ForeignCause::Lingering {
                former: Former::Claim(claim("f")),
            },
        },
        HoldKind::Foreign {
            cause: ForeignCause::UnknownUnitOf {
                pod: pod("c", Some("pod-c")),
            },
        },
    ];
    let mut ledger = Ledger {
        generation: 42,
        ..Ledger::default()
    };
    for (index, kind) in holders.into_iter().enumerate() {
        let since = SystemTime::UNIX_EPOCH + Duration::new(1_785_000_000, 250_000_000);
        ledger
            .units
            .insert(unit(index), record(index.try_into().unwrap()));
        ledger
            .holds
            .insert(unit(index), vec![Hold::exclusive(kind, since)]);
    }
    let mut mig = record(9);
    mig.kind = UnitKind::Mig { parent: unit(10) };
    mig.side = Side::Dra;
    ledger.units.insert(UnitId::new("MIG-9").unwrap(), mig);
    ledger.units.insert(unit(10), record(10));
    let device = |name: &str, index, access| PreparedDevice {
        requests: vec!["gpus".to_owned()],
        pool: "node-1".to_owned(),
        device: DeviceName::new(name).unwrap(),
        unit: unit(index),
        access,
    };
    let preparation = Preparation {
        claim: claim("p"),
        devices: vec![
            device("gpu-3", 3, Access::Owner),
            device("gpu-0", 0, Access::Admin),
        ],
    };
    ledger.prepared.insert(claim("p").uid, preparation);
    ledger
}

fn golden() -> Vec<u8> {
    format::encode(&full(), &Unknown::default(), "0.1.0", "boot-1").unwrap()
}

#[test]
fn the_ledgers_file_is_what_it_was_last_year() {
    let golden_file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/ledger-v1.json"
    );
    expect_file![golden_file].assert_eq(std::str::from_utf8(&golden()).unwrap());
    let read = std::fs::read(golden_file).unwrap();
    let decoded = format::decode(&read).unwrap();
    assert_eq!(decoded.ledger, full());
    assert_eq!(decoded.boot_id, "boot-1");
    assert_eq!(decoded.unknown, Unknown::default());
    let _any_json_tool: serde_json::Value = serde_json::from_slice(&read).unwrap();
}

#[test]
fn a_ledger_comes_back_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("plugins/gpu.nvidia.com");
    let (store, loaded) = open(&state);
    assert_eq!(loaded, Loaded::Missing);
    store.save(&Ledger::default()).unwrap();
    store.save(&full()).unwrap();
    drop(store);
    assert_eq!(reread(&state), Loaded::Ledger(full()));
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&state), 0o700);
    assert_eq!(mode(&state.join(LEDGER_FILE)), 0o600);
    assert_eq!(mode(&state.join("lock")), 0o600);
}

#[test]
fn a_file_cut_short_anywhere_is_unreadable() {
    let whole = golden();
    for length in 0..whole.len() {
        format::decode(&whole[..length]).expect_err("a part is never taken for a ledger");
    }
}

#[test]
fn a_file_with_any_bit_flipped_is_unreadable() {
    let mut bytes = golden();
    for index in 0..bytes.len() {
        for bit in 0..8 {
            bytes[index] ^= 1 << bit;
            format::decode(&bytes).expect_err("a flipped bit never goes unnoticed");
            bytes[index] ^= 1 << bit;
        }
    }
    format::decode(&bytes).unwrap();
}
