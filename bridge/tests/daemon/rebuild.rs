//! `gpu-bridge ledger rebuild`, on a node where pods run: what it tells, what it moves, and when it refuses.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;

use crate::process::gpu_bridge;
use crate::world::{DRIVER, SOON, World, claim_uid, pod_uid, until};

/// Runs the verb with the flags of the daemon, and some more: its exit code and all that it says.
async fn rebuild(world: &mut World, more: &[&str]) -> (Option<i32>, String) {
    let output = ledger(world, &["rebuild"], more).await;
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

async fn ledger(world: &mut World, verb: &[&str], more: &[&str]) -> Output {
    let mut command = gpu_bridge();
    command.arg("ledger").args(verb).args(more);
    for (flag, value) in world.flags() {
        command.arg(flag).arg(value);
    }
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    output.await.unwrap()
}

fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in: {said}");
    }
}

/// The ledgers that were set aside.
fn aside(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.state_dir()).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.display().to_string().contains("ledger.bad-"));
    paths.sort();
    paths
}

/// A node on which pod `a` runs by count and pod `b` by a claim.
async fn with_pods_of_both_kinds(gpus: u32) -> World {
    let world = World::running(gpus).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    world.wait_for_holds("Bound", 1).await;
    world.wait_for_holds("Prepared", 1).await;
    world
}

/// The same, and the daemon was started anew on a ledger that can't be read.
async fn with_an_unreadable_ledger(gpus: u32) -> World {
    let mut world = with_pods_of_both_kinds(gpus).await;
    world.stop_daemon().await;
    fs::write(world.ledger(), "{}").unwrap();
    world.start_daemon();
    world.wait_for_standing("LedgerUnreadable").await;
    world
}

#[tokio::test]
async fn a_bad_ledger_is_set_aside_under_the_daemon_and_its_restart_takes_over_what_runs() {
    let mut world = with_an_unreadable_ledger(3).await;
    let ids = world.ids("a");
    let (code, said) = rebuild(&mut world, &["--dry-run"]).await;
    assert_eq!(code, Some(0), "{said}");
    let device = world.ledger().display().to_string();
    assert_says(
        &said,
        &[
            &device,
            "is damaged: its first line is not that of a file of gpu-bridge",
            "Bound     pod train/a",
            "Prepared  claim train/b",
            "free      -",
            "What it can't know",
            "Since when",
            "Nothing was changed",
        ],
    );
    assert_eq!(fs::read(world.ledger()).unwrap(), b"{}");

    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    until("Unprepare is answered", SOON, async || {
        world.kubelet().unprepare(&pod_uid("b")).await.is_ok()
    })
    .await;
    world.end_pod("b").await;
    let (code, said) = rebuild(&mut world, &[]).await;
    assert_eq!(code, Some(0), "{said}");
    let moved = aside(&world);
    assert_eq!(moved.len(), 1, "{moved:?}");
    assert_says(
        &said,
        &[
            &moved[0].display().to_string(),
            "unprepared while there was no ledger: 1",
            "restart it if it runs",
        ],
    );
    assert_eq!(fs::read(&moved[0]).unwrap(), b"{}", "it is kept as it was");
    assert!(!world.ledger().exists());
    assert_eq!(
        world.standing().await.as_deref(),
        Some("LedgerUnreadable"),
        "the daemon gives nothing out before its restart"
    );

    world.kill_daemon();
    world.start_daemon();
    world.ready().await;
    let holds = world.holds().await;
    assert_eq!(holds.len(), 1, "{holds:?}");
    assert_eq!(holds[0].3, pod_uid("a"));
    assert_eq!(holds[0].2, ids[0]);
    assert_eq!(aside(&world), moved, "a start does not tidy it away");
}

#[tokio::test]
async fn what_was_unprepared_meanwhile_is_not_lost_when_the_ledger_is_rebuilt() {
    let mut world = with_an_unreadable_ledger(2).await;
    world.kubelet().wait_for_driver(DRIVER, SOON).await;
    until("Unprepare is answered", SOON, async || {
        world.kubelet().unprepare(&pod_uid("b")).await.is_ok()
    })
    .await;
    // The claim is still allocated, and its CDI file there, so both would say that it is prepared.
    assert!(world.claim_spec(&claim_uid("b")).exists());
    world.kill_daemon();
    let (code, said) = rebuild(&mut world, &[]).await;
    assert_eq!(code, Some(0), "{said}");
    world.start_daemon();
    world.ready().await;
    let holds = world.holds().await;
    assert!(
        holds.iter().all(|hold| hold.1 != "Prepared"),
        "it was given back: {holds:?}"
    );
}

#[tokio::test]
async fn a_ledger_that_a_daemon_serves_from_is_not_touched() {
    let mut world = with_pods_of_both_kinds(2).await;
    let before = fs::read(world.ledger()).unwrap();
    let pid = world.daemon().pid().as_raw_nonzero().to_string();
    for more in [&[][..], &["--even-if-whole"], &["--dry-run"]] {
        let (code, said) = rebuild(&mut world, more).await;
        assert_eq!(code, Some(1), "{said}");
        let process = format!("process {pid}");
        assert_says(&said, &[&process, "its ledger is Serving", "stop it first"]);
    }
    assert_eq!(fs::read(world.ledger()).unwrap(), before);
    assert_eq!(aside(&world), Vec::<PathBuf>::new());
    world.ready().await;
}

#[tokio::test]
async fn a_whole_ledger_is_set_aside_only_when_it_is_asked_for() {
    let mut world = with_pods_of_both_kinds(2).await;
    world.stop_daemon().await;
    let before = fs::read(world.ledger()).unwrap();
    let (code, said) = rebuild(&mut world, &[]).await;
    assert_eq!(code, Some(1), "{said}");
    assert_says(&said, &["is whole (generation", "--even-if-whole"]);
    assert_eq!(fs::read(world.ledger()).unwrap(), before);

    let (code, said) = rebuild(&mut world, &["--even-if-whole"]).await;
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(fs::read(&aside(&world)[0]).unwrap(), before);
    let (code, said) = rebuild(&mut world, &[]).await;
    assert_eq!(code, Some(1), "{said}");
    assert_says(&said, &["there is no ledger", "takes over what runs"]);
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await.len(), 2);
}

#[tokio::test]
async fn a_pod_of_which_nothing_says_what_it_has_is_told_with_the_gpus_that_stay_closed() {
    let mut world = with_an_unreadable_ledger(3).await;
    world.kill_daemon();
    // The kubelet's own book is lost too. While it runs it would write it again.
    world.kubelet().stop().await;
    world.kubelet().forget_checkpoint();
    world.kubelet().resume().await.unwrap();
    let (code, said) = rebuild(&mut world, &["--dry-run"]).await;
    assert_eq!(code, Some(0), "{said}");
    assert_says(
        &said,
        &[
            "Foreign   perhaps pod train/a",
            "nothing says which GPU it has",
            "until that pod has ended or its process shows its GPU",
        ],
    );
    assert!(!said.contains("free      -"), "{said}");
}

#[tokio::test]
async fn a_source_that_is_away_is_named_and_the_ledger_is_set_aside_all_the_same() {
    let mut world = with_an_unreadable_ledger(2).await;
    world.api.go_away();
    let (code, said) = rebuild(&mut world, &[]).await;
    assert_eq!(code, Some(0), "{said}");
    assert_says(
        &said,
        &[
            "can't be told now",
            "the claims allocated here are not known",
            "give nothing out meanwhile",
        ],
    );
    assert_eq!(aside(&world).len(), 1);
    world.kill_daemon();
    world.start_daemon();
    world.wait_for_standing("WaitingForAdoption").await;
    world.api.come_back();
    world.ready().await;
    assert_eq!(world.holds().await.len(), 2);
}

#[tokio::test]
async fn a_copy_of_a_ledger_is_shown_beside_the_daemon_that_writes_it() {
    let world = with_pods_of_both_kinds(2).await;
    let copy = world.path("copy-of-the-ledger");
    fs::copy(world.ledger(), &copy).unwrap();
    world.end_pod("b").await;
    until("the claim has nothing", SOON, async || {
        world.holds().await.len() == 1
    })
    .await;
    for (path, has_b) in [(&copy, true), (&world.state_dir(), false)] {
        let mut command = gpu_bridge();
        command.args(["ledger", "show"]).arg(path);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap());
        let output = output.await.unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        assert!(said.contains("pod train/a"), "{said}");
        assert_eq!(said.contains("claim train/b"), has_b, "{said}");
    }
    let shown = world.status().await;
    assert_eq!(shown["standing"], Value::from("Serving"));
    let device = world.free_device().await;
    world.run_claimant("c", &device).await;
}
