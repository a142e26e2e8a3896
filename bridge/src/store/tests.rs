//! The state folder as a daemon meets it: whole, damaged, newer, locked, full.

mod any_ledger;

use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bridge_core::{
    Access, DeviceId, DeviceName, Fault, ForeignCause, Former, Gpu, Hold, HoldKind, PodName,
    PodRef, PodUid, Preparation, PreparedDevice, Side, UnitId, UnitKind, UnitRecord, Xid,
};
use expect_test::expect_file;
use serde_json::json;

use super::*;

fn open(folder: &Path) -> (Store, Loaded) {
    Store::open(folder, BootId::unknown()).unwrap()
}

/// The ledger of a folder as the next daemon reads it.
fn reread(folder: &Path) -> Loaded {
    open(folder).1
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", chain(source)),
    }
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
        gpu: Arc::new(Gpu {
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
        }),
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
    let fault = Fault {
        xids: [Xid::new(79), Xid::new(48)].into(),
        since: SystemTime::UNIX_EPOCH + Duration::new(1_785_000_000, 250_000_000),
    };
    ledger.faults.insert(unit(1), fault);
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
fn a_file_of_a_later_version_with_the_same_format_is_read_and_written_back_whole() {
    let golden_file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/ledger-v1-later-fields.json"
    );
    let read = std::fs::read(golden_file).unwrap();
    let decoded = format::decode(&read).unwrap();
    assert_eq!(decoded.ledger, full());
    let written = format::encode(&decoded.ledger, &decoded.unknown, "0.9.0", "boot-1").unwrap();
    assert_eq!(
        String::from_utf8(written).unwrap(),
        String::from_utf8(read).unwrap()
    );
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
fn a_file_with_a_flipped_bit_is_unreadable() {
    let mut bytes = golden();
    let header = bytes.iter().position(|byte| *byte == b'\n').unwrap();
    for index in 0..bytes.len() {
        // Every bit of what is not under the checksum, and one of each byte that is.
        let around = index <= header || index > bytes.len() - 4;
        for bit in (0..8).filter(|bit| around || *bit == index % 8) {
            bytes[index] ^= 1 << bit;
            format::decode(&bytes).expect_err("a flipped bit never goes unnoticed");
            bytes[index] ^= 1 << bit;
        }
    }
    format::decode(&bytes).unwrap();
}

#[test]
fn fields_of_a_newer_version_are_still_there_after_a_save() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(folder.path());
    store.save(&full()).unwrap();
    drop(store);
    rewrite(folder.path(), |content| {
        content["new"] = json!({"a": 1});
        content["units"][1]["new"] = json!("unit");
        content["units"][1]["gpu"]["new"] = json!("gpu");
        content["units"][1]["holds"][0]["new"] = json!("hold");
        content["units"][1]["holds"][0]["pod"]["new"] = json!("pod");
        content["units"][3]["holds"][0]["new"] = json!("goes with its hold");
        content["prepared"][0]["new"] = json!("preparation");
        content["prepared"][0]["devices"][1]["new"] = json!("device");
    });
    let (store, loaded) = open(folder.path());
    assert_eq!(loaded, Loaded::Ledger(full()));
    let mut changed = full();
    changed.generation += 1;
    changed.holds.remove(&unit(0));
    changed.holds.get_mut(&unit(3)).unwrap()[0].kind = HoldKind::Foreign {
        cause: ForeignCause::UnknownProcess,
    };
    changed.prepared.get_mut(&claim("p").uid).unwrap().devices[0].access = Access::Admin;
    store.save(&changed).unwrap();

    let content = content(folder.path());
    assert_eq!(content["new"], json!({"a": 1}));
    assert_eq!(content["units"][1]["new"], "unit");
    assert_eq!(content["units"][1]["gpu"]["new"], "gpu");
    assert_eq!(content["units"][1]["holds"][0]["new"], "hold");
    assert_eq!(content["units"][1]["holds"][0]["pod"]["new"], "pod");
    assert_eq!(content["units"][3]["holds"][0].get("new"), None);
    assert_eq!(content["prepared"][0]["new"], "preparation");
    assert_eq!(content["prepared"][0]["devices"][1]["new"], "device");
    drop(store);
    assert_eq!(reread(folder.path()), Loaded::Ledger(changed));
}

type Spoil = fn(&mut serde_json::Value);

#[test]
fn a_ledger_that_can_not_be_used_is_kept_and_says_what_to_do() {
    let spoilers: [(&str, Spoil); 5] = [
        (
            "has format 2, written by gpu-bridge 9.9.9; this is gpu-bridge",
            |content| {
                content["format"] = json!(2);
                content["writer"] = json!("9.9.9");
                content["units"] = json!("something else");
            },
        ),
        ("wrote: unknown variant `moving`", |content| {
            content["units"][0]["side"] = json!("moving");
        }),
        ("\"../GPU\" is not a valid unit UUID", |content| {
            content["units"][0]["uuid"] = json!("../GPU");
        }),
        ("two units have the number 1", |content| {
            content["units"][0]["number"] = json!(1);
        }),
        ("does not say which format it has", |content| {
            content["format"] = json!("1");
        }),
    ];
    for (expected, spoil) in spoilers {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = open(folder.path());
        store.save(&full()).unwrap();
        drop(store);
        rewrite(folder.path(), spoil);
        stays_unreadable(folder.path(), expected);
    }
}

#[test]
fn damage_of_every_kind_keeps_the_file() {
    let text = |bytes: &[u8]| {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), bytes);
        folder
    };
    stays_unreadable(text(b"").path(), "is damaged: it is empty.");
    stays_unreadable(
        text(b"{}\n").path(),
        "its first line is not that of a file of gpu-bridge",
    );
    let mut damaged = golden();
    damaged[200] ^= 1;
    stays_unreadable(text(&damaged).path(), "has the checksum");
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(LEDGER_FILE)).unwrap();
    let (store, loaded) = open(folder.path());
    assert!(matches!(loaded, Loaded::Unreadable { .. }), "{loaded:?}");
    store.save(&full()).unwrap_err();
}

#[test]
fn a_file_too_large_to_be_ours_is_not_read_into_memory() {
    let folder = tempfile::tempdir().unwrap();
    let file = File::create(folder.path().join(LEDGER_FILE)).unwrap();
    file.set_len(own_file::FILE_LIMIT + 1).unwrap();
    let Loaded::Unreadable { why, .. } = reread(folder.path()) else {
        panic!("it must not be read");
    };
    assert!(why.contains("more than 16777216 bytes"), "{why}");
}

#[test]
fn a_ledger_that_others_can_have_written_is_not_believed_and_what_is_no_file_is_not_waited_for() {
    use std::os::unix::fs::symlink;

    type SpoilFile = fn(&Path);
    let spoilers: [(&str, SpoilFile); 5] = [
        ("others than its owner may write it (mode 666)", |file| {
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o666)).unwrap();
        }),
        ("others than its owner may write it (mode 660)", |file| {
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o660)).unwrap();
        }),
        ("it is a link", |file| {
            let elsewhere = file.with_extension("elsewhere");
            atomic::put_in_place(file, &elsewhere).unwrap();
            symlink(&elsewhere, file).unwrap();
        }),
        ("it is no file", |file| {
            std::fs::remove_file(file).unwrap();
            rustix::fs::mknodat(
                rustix::fs::CWD,
                file,
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::from_raw_mode(0o600),
                0,
            )
            .unwrap();
        }),
        (
            "it belongs to user 65534, and gpu-bridge runs as user 0",
            |file| {
                std::os::unix::fs::chown(file, Some(65_534), None).unwrap();
            },
        ),
    ];
    for (expected, spoil) in spoilers {
        if expected.contains("belongs") && !rustix::process::geteuid().is_root() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        open(folder.path()).0.save(&full()).unwrap();
        let file = folder.path().join(LEDGER_FILE);
        spoil(&file);
        let kind = file.symlink_metadata().unwrap().file_type();
        let (store, loaded) = open(folder.path());
        let Loaded::Unreadable { why, .. } = loaded else {
            panic!("{loaded:?} was read where '{expected}' was expected");
        };
        assert!(why.contains(expected), "{why}");
        store.save(&full()).unwrap_err();
        assert_eq!(file.symlink_metadata().unwrap().file_type(), kind);
    }
}

#[test]
fn a_state_folder_that_everybody_may_write_to_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let open_to_all = folder.path().join("open");
    std::fs::create_dir(&open_to_all).unwrap();
    std::fs::set_permissions(&open_to_all, PermissionsExt::from_mode(0o777)).unwrap();
    let text = Store::open(&open_to_all, BootId::unknown())
        .unwrap_err()
        .to_string();
    assert!(text.contains("chmod o-w"), "{text}");
    assert_eq!(std::fs::read_dir(&open_to_all).unwrap().count(), 0);
}

#[test]
fn ledgers_that_are_set_aside_never_replace_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_785_000_000);
    let mut names = Vec::new();
    for content in ["first", "second"] {
        put(folder.path(), content.as_bytes());
        let aside = set_aside(folder.path(), at).unwrap();
        assert_eq!(std::fs::read_to_string(&aside).unwrap(), content);
        names.push(aside.file_name().unwrap().to_str().unwrap().to_owned());
    }
    assert_eq!(
        names,
        [
            "ledger.bad-20260725T172000Z",
            "ledger.bad-20260725T172000Z-2"
        ]
    );
    let error = set_aside(folder.path(), at).unwrap_err();
    assert!(chain(&error).contains("ledger.json"), "{}", chain(&error));
    assert_eq!(reread(folder.path()), Loaded::Missing);
}

#[test]
fn while_a_ledger_is_set_aside_no_daemon_starts_and_beside_one_nothing_is() {
    let folder = tempfile::tempdir().unwrap();
    let kept_away = keep_daemons_away(folder.path()).unwrap();
    Store::open(folder.path(), BootId::unknown()).unwrap_err();
    drop(kept_away);
    let (daemon, _) = open(folder.path());
    let error = keep_daemons_away(folder.path()).unwrap_err();
    let text = chain(&error);
    assert!(
        text.contains(&format!("process {}", std::process::id())),
        "{text}"
    );
    drop(daemon);
    keep_daemons_away(folder.path()).unwrap();
}

#[test]
fn a_second_daemon_is_refused_and_told_who_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = open(folder.path());
    let error = Store::open(folder.path(), BootId::unknown()).unwrap_err();
    let text = chain(&error);
    let lock = folder.path().join("lock");
    assert!(text.contains(lock.to_str().unwrap()), "{text}");
    assert!(
        text.contains(&format!("process {}", std::process::id())),
        "{text}"
    );
    first.save(&full()).unwrap();
    drop(first);
    assert_eq!(reread(folder.path()), Loaded::Ledger(full()));
}

#[test]
fn a_lock_file_that_was_removed_is_taken_anew_and_one_that_changed_hands_stops_the_saves() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = open(folder.path());
    let lock = folder.path().join("lock");
    std::fs::remove_file(&lock).unwrap();
    first.save(&Ledger::default()).unwrap();
    Store::open(folder.path(), BootId::unknown()).expect_err("the first has the lock again");

    std::fs::remove_file(&lock).unwrap();
    let (second, _) = open(folder.path());
    let error = first.save(&full()).unwrap_err();
    assert!(matches!(error, SaveError::NotSaved { .. }), "{error:?}");
    assert!(
        chain(&error).contains("another gpu-bridge"),
        "{}",
        chain(&error)
    );
    first.remember_unprepared(&claim("a")).unwrap_err();
    drop(second);
    assert_eq!(reread(folder.path()), Loaded::Ledger(Ledger::default()));
}

#[test]
fn a_ledger_that_was_let_go_is_written_by_nobody_until_it_is_owned_again() {
    let folder = tempfile::tempdir().unwrap();
    let (old, _) = open(folder.path());
    let (first, second) = (PodUid::new("1").unwrap(), PodUid::new("2").unwrap());
    old.sign(first.clone());
    old.save(&full()).unwrap();
    assert_eq!(old.other_owner(), None);
    old.let_go();
    let error = old.save(&Ledger::default()).unwrap_err();
    assert!(chain(&error).contains("handed over"), "{}", chain(&error));

    let (new, found) = open(folder.path());
    new.sign(second.clone());
    assert_eq!(found, Loaded::Ledger(full()));
    assert_eq!(old.other_owner(), Some(second));
    assert!(matches!(old.take_back(), Err(Error::Owned { .. })));
    let mut changed = full();
    changed.generation += 1;
    new.save(&changed).unwrap();
    drop(new);

    assert_eq!(old.take_back().unwrap(), Loaded::Ledger(changed));
    assert_eq!(old.other_owner(), None);
    old.save(&full()).unwrap();
}

#[test]
fn a_state_folder_that_can_not_be_made_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    File::create(&path).unwrap();
    let error = Store::open(&path, BootId::unknown()).unwrap_err();
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
}

#[test]
fn a_ledger_that_turns_up_while_none_was_there_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let (store, loaded) = open(folder.path());
    assert_eq!(loaded, Loaded::Missing);
    put(folder.path(), &golden());
    let error = store.save(&Ledger::default()).unwrap_err();
    assert!(
        chain(&error).contains("restart gpu-bridge"),
        "{}",
        chain(&error)
    );
    drop(store);
    assert_eq!(reread(folder.path()), Loaded::Ledger(full()));
}

#[test]
fn a_save_that_fails_leaves_the_ledger_of_before_and_the_next_one_goes_through() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(folder.path());
    store.save(&Ledger::default()).unwrap();
    let before = content(folder.path());
    let obstacle = folder.path().join("ledger.json.tmp");
    std::fs::create_dir(&obstacle).unwrap();
    let error = store.save(&full()).unwrap_err();
    assert!(matches!(error, SaveError::NotSaved { .. }), "{error:?}");
    assert!(
        chain(&error).contains("ledger.json was not written"),
        "{}",
        chain(&error)
    );
    assert_eq!(content(folder.path()), before);
    std::fs::remove_dir(&obstacle).unwrap();
    store.save(&full()).unwrap();

    let away = folder.path().with_extension("away");
    atomic::put_in_place(folder.path(), &away).unwrap();
    assert!(matches!(
        store.save(&full()),
        Err(SaveError::NotSaved { .. })
    ));
    atomic::put_in_place(&away, folder.path()).unwrap();
    store.save(&full()).unwrap();
}

#[test]
fn a_ledger_that_breaks_its_own_rules_never_reaches_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(folder.path());
    store.save(&full()).unwrap();
    let mut broken = full();
    broken.units.remove(&unit(0));
    let error = store.save(&broken).unwrap_err();
    assert!(
        chain(&error).contains("GPU-0 is held but not a unit"),
        "{}",
        chain(&error)
    );
    drop(store);
    assert_eq!(reread(folder.path()), Loaded::Ledger(full()));
}

#[test]
fn a_folder_that_was_not_flushed_leaves_doubt() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(LEDGER_FILE);
    let outcome = atomic::replace_with(&path, b"new", 0o600, atomic::fail_for_folders);
    let error = told(&path, outcome).unwrap_err();
    assert!(matches!(error, SaveError::Doubtful { .. }), "{error:?}");
}

/// Set in the child process, in which no file may grow beyond a page.
const FULL_DISK: &str = "GPU_BRIDGE_TEST_FULL_DISK";

#[test]
fn a_full_disk_leaves_the_old_ledger() {
    if let Some(folder) = std::env::var_os(FULL_DISK) {
        let (store, loaded) = open(Path::new(&folder));
        assert_eq!(loaded, Loaded::Ledger(Ledger::default()));
        let limit = rustix::process::Rlimit {
            current: Some(4096),
            maximum: Some(4096),
        };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        let error = store.save(&full()).unwrap_err();
        assert!(matches!(error, SaveError::NotSaved { .. }), "{error:?}");
        assert!(
            chain(&error).contains("File too large"),
            "{}",
            chain(&error)
        );
        store
            .save(&Ledger::default())
            .expect("what has room is saved");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    open(folder.path()).0.save(&Ledger::default()).unwrap();
    // The limit is announced by a signal that ends the process unless its parent made it ignore it.
    let child = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "store::tests::a_full_disk_leaves_the_old_ledger"])
        .env(FULL_DISK, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}"
    );
    assert_eq!(reread(folder.path()), Loaded::Ledger(Ledger::default()));
    assert!(!folder.path().join("ledger.json.tmp").exists());
}

#[test]
fn unprepared_claims_are_remembered_until_the_ledger_says_so_itself() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), b"bad");
    let uids =
        |uids: &[&str]| -> BTreeSet<ClaimUid> { uids.iter().map(|uid| claim(uid).uid).collect() };
    let (store, _) = open(folder.path());
    for uid in ["a", "b", "a"] {
        store.remember_unprepared(&claim(uid)).unwrap();
    }
    drop(store);
    let (store, _) = open(folder.path());
    assert_eq!(store.unprepared(), uids(&["a", "b"]));
    store.save(&full()).expect_err("the ledger can't be read");
    assert_eq!(store.unprepared(), uids(&["a", "b"]));
    drop(store);

    // The admin moves the file away, and the daemon finds out who is there.
    std::fs::remove_file(folder.path().join(LEDGER_FILE)).unwrap();
    let (store, loaded) = open(folder.path());
    assert_eq!(loaded, Loaded::Missing);
    assert_eq!(store.unprepared(), uids(&["a", "b"]));
    store.save(&full()).unwrap();
    assert_eq!(store.unprepared(), uids(&[]));
    drop(store);
    let (store, _) = open(folder.path());
    assert_eq!(store.unprepared(), uids(&[]));
    assert!(!folder.path().join(UNPREPARED_FILE).exists());
}

#[test]
fn a_list_of_unprepared_claims_that_can_not_be_read_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    replace(&folder.path().join(UNPREPARED_FILE), b"bad", 0o600).unwrap();
    let (store, loaded) = open(folder.path());
    assert_eq!(loaded, Loaded::Missing);
    assert_eq!(store.unprepared(), BTreeSet::new());
    store.remember_unprepared(&claim("a")).unwrap();
    drop(store);
    assert_eq!(open(folder.path()).0.unprepared().len(), 1);
}

#[test]
fn a_list_of_unprepared_claims_has_an_end() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(folder.path());
    let many = (0..UNPREPARED_LIMIT).map(|index| claim(&index.to_string()));
    store.state().unprepared = many.map(|claim| (claim.uid.clone(), claim)).collect();
    let error = store.remember_unprepared(&claim("a")).unwrap_err();
    assert!(matches!(error, SaveError::NotSaved { .. }), "{error:?}");
    assert_eq!(store.unprepared().len(), UNPREPARED_LIMIT);
}

#[test]
fn the_boot_id_is_read_below_the_proc_root() {
    let proc_root = tempfile::tempdir().unwrap();
    BootId::read(proc_root.path()).unwrap_err();
    let folder = proc_root.path().join("sys/kernel/random");
    std::fs::create_dir_all(&folder).unwrap();
    replace(&folder.join("boot_id"), b"b-1\n", 0o600).unwrap();
    let boot_id = BootId::read(proc_root.path()).unwrap();
    let state = proc_root.path().join("state");
    Store::open(&state, boot_id)
        .unwrap()
        .0
        .save(&full())
        .unwrap();
    assert_eq!(content(&state)["bootId"], "b-1");
}

fn put(folder: &Path, bytes: &[u8]) {
    replace(&folder.join(LEDGER_FILE), bytes, 0o600).unwrap();
}

fn content(folder: &Path) -> serde_json::Value {
    let bytes = std::fs::read(folder.join(LEDGER_FILE)).unwrap();
    serde_json::from_slice(envelope::open(&bytes).unwrap()).unwrap()
}

/// Changes the ledger's file as another version would have written it.
fn rewrite(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut content = content(folder);
    change(&mut content);
    put(folder, &envelope::seal(&content.to_string()));
}

fn stays_unreadable(folder: &Path, expected: &str) {
    let file = folder.join(LEDGER_FILE);
    let before = std::fs::read(&file).unwrap();
    let (store, loaded) = open(folder);
    let Loaded::Unreadable { path, why } = loaded else {
        panic!("{loaded:?} was read where '{expected}' was expected");
    };
    assert_eq!(path, file);
    assert!(why.contains(expected), "{why}");
    assert!(
        why.contains(file.to_str().unwrap()) && why.contains("restart gpu-bridge"),
        "{why}"
    );
    let error = store.save(&full()).unwrap_err();
    assert!(matches!(error, SaveError::NotSaved { .. }), "{error:?}");
    assert_eq!(std::fs::read(&file).unwrap(), before);
}
