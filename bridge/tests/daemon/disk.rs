//! A disk that takes nothing any more.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use testkit::Phase;

use crate::process::Daemon;
use crate::world::{RESOURCE, SOON, World, claim_uid, pod_uid, skipped, until};

/// A node whose daemon can be kept from writing files.
async fn limited(gpus: u32) -> World {
    limited_and_configured(gpus, "").await
}

/// The same with a configuration file.
pub(crate) async fn limited_and_configured(gpus: u32, config: &str) -> World {
    let mut world = World::new(gpus).await;
    world.configure(config);
    world.start_kubelet().await;
    let daemon = Daemon::spawn_to_be_limited(world.flags());
    world.adopt(daemon);
    world.ready().await;
    world
}

#[tokio::test]
async fn on_a_full_disk_new_grants_are_refused_and_what_is_held_stays_until_there_is_room() {
    let world = limited(8).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    let held = world.holds().await;
    let healthy = world.kubelet().healthy(RESOURCE);
    let ledger = fs::read(world.ledger()).unwrap();
    world.daemon().limit_files(Some(0));

    let id = healthy
        .iter()
        .find(|id| !world.ids("a").contains(id))
        .unwrap();
    let refused = world.allocate(&[id]).await.unwrap_err();
    for part in [
        "Unavailable",
        "ledger could not be saved",
        "ledger.json",
        "too large",
    ] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    let device = world.free_device().await;
    world.allocate_claim("c", &device, "c");
    world.admit_claimant("c").await;
    let refused = world.prepare("c").await.unwrap_err();
    for part in ["UNAVAILABLE", "train/c", "state directory", "tries again"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert_eq!(
        fs::read(world.ledger()).unwrap(),
        ledger,
        "the file is as it was"
    );
    assert_eq!(world.holds().await, held, "and so is what is held");
    assert_eq!(world.kubelet().healthy(RESOURCE), healthy);
    assert!(world.claim_spec(&claim_uid("b")).exists());
    let (code, _) = world.get("/healthz").await.unwrap();
    assert_eq!(code, 200, "a restart would not help");

    world.daemon().limit_files(None);
    world.prepare("c").await.unwrap();
    world.run_counted("d", 1).await;
    assert_ne!(world.counted_devices("d"), world.counted_devices("a"));
    world.end_pod("a").await;
    world.end_pod("b").await;
    until("the ends are noticed", SOON, async || {
        world.holds().await.len() == 2
    })
    .await;
}

#[tokio::test]
async fn a_pod_that_ends_while_the_disk_is_full_gives_its_gpu_back_when_there_is_room() {
    let world = limited(2).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    world.daemon().limit_files(Some(0));
    let refused = world
        .kubelet()
        .finish(&pod_uid("b"), Phase::Succeeded)
        .await
        .unwrap_err();
    for part in ["train/b", "unprepared", "state directory", "tries again"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    world.end_pod("a").await;
    assert_eq!(
        world.holds().await.len(),
        2,
        "nothing ends that is not saved"
    );

    world.daemon().limit_files(None);
    world.end_pod("b").await;
    until("both are free", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_configuration_that_changes_while_the_disk_is_full_is_in_force_when_there_is_room() {
    let mut world = limited_and_configured(2, "offers: {demand: watch}\n").await;
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    world.daemon().limit_files(Some(0));
    world.end_pod("a").await;
    world.configure("mode: legacy\n");
    let log = world.log();
    until("the change could not be taken", SOON, async || {
        log.has("news could not be taken")
    })
    .await;
    assert!(world.daemon_mut().status().is_none(), "it runs on");
    assert_eq!(world.status().await["mode"], "both");

    world.daemon().limit_files(None);
    until("the new mode is in force", SOON, async || {
        world.status().await["mode"] == "legacy" && world.holds().await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_state_folder_that_is_removed_stops_new_grants_and_is_filled_again_when_it_is_back() {
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    fs::remove_dir_all(world.state_dir()).unwrap();
    let id = world.gpu("gpu-2").uuid;
    let refused = world.allocate(&[&id]).await.unwrap_err();
    let folder = world.state_dir().display().to_string();
    for part in ["Unavailable", &folder, "No such file"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert_eq!(world.holds().await, held);
    fs::create_dir(world.state_dir()).unwrap();
    world.run_claimant("c", "gpu-1").await;
    world.kill_daemon();
    world.start_daemon();
    world.ready().await;
    let now = world.holds().await;
    assert!(held.iter().all(|hold| now.contains(hold)), "{now:?}");
    assert_eq!(now.len(), 3);
}

#[tokio::test]
async fn a_cdi_folder_that_can_not_be_written_refuses_the_claim_by_name_and_recovers() {
    let world = World::running(2).await;
    fs::remove_dir_all(world.cdi_dir()).unwrap();
    fs::write(world.cdi_dir(), "a file in the way").unwrap();
    let device = world.free_device().await;
    world.allocate_claim("a", &device, "a");
    world.admit_claimant("a").await;
    let refused = world.prepare("a").await.unwrap_err();
    let folder = world.cdi_dir().display().to_string();
    for part in [
        "UNAVAILABLE",
        "train/a",
        &folder,
        "--cdi-dir",
        "tries again",
    ] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    fs::remove_file(world.cdi_dir()).unwrap();
    world.prepare("a").await.unwrap();
    assert!(world.claim_spec(&claim_uid("a")).exists());
    world.run_counted("b", 1).await;
    until("the counted spec is there again", SOON, async || {
        world.counted_spec().exists()
    })
    .await;
}

/// Runs the daemon in a mount namespace of its own, where the state folder is a file system of 64 KiB.
const SMALL_DISK: &str =
    "mount -t tmpfs -o size=64k,mode=0700 small \"$STATE\" && exec \"$0\" \"$@\"";

/// How to get a mount namespace here: as root, or as the root of a user namespace.
async fn way_to_mount() -> Option<Vec<&'static str>> {
    for flags in [
        vec!["--mount"],
        vec!["--user", "--map-root-user", "--mount"],
    ] {
        let mut command = Command::new("unshare");
        command
            .args(&flags)
            .args(["mount", "-t", "tmpfs", "probe", "/mnt"]);
        let output = tokio::task::spawn_blocking(move || command.output());
        if matches!(output.await.unwrap(), Ok(output) if output.status.success()) {
            return Some(flags);
        }
    }
    None
}

#[tokio::test]
async fn a_file_system_without_space_is_named_in_the_refusal_and_serves_again_with_space() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let Some(daemon) = on_its_own_disk(&mut world, SMALL_DISK).await else {
        return;
    };
    world.adopt(daemon);
    world.ready().await;
    assert!(!world.ledger().exists(), "it is on the other file system");

    let root = format!("/proc/{}/root", world.daemon().pid().as_raw_nonzero());
    let inside = world.state_dir();
    let filler = Path::new(&root)
        .join(inside.strip_prefix("/").unwrap())
        .join("filler");
    let full = fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    let id = world.gpu("gpu-1").uuid;
    let refused = world.allocate(&[&id]).await.unwrap_err();
    for part in ["Unavailable", "ledger.json", "No space left on device"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert_eq!(world.holds().await, []);
    fs::remove_file(filler).unwrap();
    world.run_counted("a", 1).await;
}

/// The same with a folder that can only be read.
const READ_ONLY_DISK: &str =
    "mount -t tmpfs -o ro,size=64k,mode=0700 read-only \"$STATE\" && exec \"$0\" \"$@\"";

/// A daemon on a file system of its own at the state folder, mounted by `script`; `None` where nothing can be mounted.
async fn on_its_own_disk(world: &mut World, script: &str) -> Option<Daemon> {
    let Some(flags) = way_to_mount().await else {
        skipped("no file system can be mounted here, not even in a user namespace");
        return None;
    };
    fs::create_dir(world.state_dir()).unwrap();
    let mut command = Command::new("unshare");
    command
        .args(flags)
        .args(["sh", "-c", script, env!("CARGO_BIN_EXE_gpu-bridge")])
        .env("STATE", world.state_dir());
    Some(Daemon::start(command, world.flags()))
}

#[tokio::test]
async fn a_state_folder_that_can_only_be_read_is_named_and_the_kubelet_never_hears_of_the_daemon() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let Some(daemon) = on_its_own_disk(&mut world, READ_ONLY_DISK).await else {
        return;
    };
    let (status, said) = daemon.ended().await;
    assert_eq!(status.code(), Some(1), "{said}");
    let lock = world.state_dir().join("lock").display().to_string();
    for part in [&lock, "Read-only file system", "writable"] {
        assert!(said.contains(part), "{part:?} is missing in: {said}");
    }
    assert_eq!(world.kubelet().capacity(RESOURCE), None);
}

#[tokio::test]
async fn a_disk_that_turns_read_only_refuses_new_grants_and_serves_again_when_it_is_mounted_anew() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let Some(daemon) = on_its_own_disk(&mut world, SMALL_DISK).await else {
        return;
    };
    let pid = daemon.pid().as_raw_nonzero().to_string();
    world.adopt(daemon);
    world.ready().await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let state = world.state_dir();
    // The daemon's lock keeps the file system itself writable, so the folder is covered by a view that is not.
    let inside = |script: &str| {
        let done = Command::new("nsenter")
            .args(["--target", &pid, "--mount", "sh", "-c", script, "sh"])
            .arg(&state)
            .status();
        done.is_ok_and(|status| status.success())
    };
    if !inside("mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\"") {
        skipped("the daemon's mount namespace can't be entered here");
        return;
    }
    let id = world.gpu("gpu-0").uuid;
    let refused = world.allocate(&[&id]).await.unwrap_err();
    for part in ["Unavailable", "ledger.json", "Read-only file system"] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert_eq!(world.holds().await, held);
    assert!(inside("umount \"$1\""));
    world.allocate(&[&id]).await.unwrap();
}
