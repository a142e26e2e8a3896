//! Wrong flags and files: one message with names, an exit code for scripts, and nothing is touched.

use std::fs;
use std::net::TcpListener;

use crate::process::Daemon;
use crate::world::{DRIVER, RESOURCE, World};

/// What a wrong command line or file ends with.
const USAGE: i32 = 2;

/// Starts the daemon, which must end by itself with this code; returns what it has written.
async fn refused(world: &mut World, code: i32) -> String {
    let (status, said) = Daemon::spawn(world.flags()).ended().await;
    assert_eq!(status.code(), Some(code), "{said}");
    said
}

fn assert_says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing in: {said}");
    }
}

/// Neither the node's folders nor the API were written to.
fn assert_nothing_was_touched(world: &World) {
    for path in [world.state_dir(), world.cdi_dir(), world.path("k")] {
        assert!(!path.exists(), "{} was made", path.display());
    }
    assert_eq!(world.writes(), 0);
}

#[tokio::test]
async fn every_wrong_flag_is_named_in_one_message_and_nothing_is_touched() {
    let mut world = World::new(1).await;
    for (flag, value) in [
        ("--node-name", "Node_0"),
        ("--cdi-dir", "cdi"),
        ("--http-addr", "localhost"),
        ("--pod-uid", "../x"),
    ] {
        world.flags().insert(flag, value.into());
    }
    let said = refused(&mut world, USAGE).await;
    assert_says(
        &said,
        &[
            "nothing was started",
            "--node-name \"Node_0\"",
            "--cdi-dir \"cdi\"",
            "--http-addr \"localhost\"",
            "--pod-uid",
        ],
    );
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_flag_that_does_not_exist_is_named() {
    let mut world = World::new(1).await;
    world.flags().insert("--kubelt-dir", "/k".into());
    let said = refused(&mut world, USAGE).await;
    assert_says(&said, &["--kubelt-dir", "--kubelet-dir"]);
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_missing_node_name_is_told_with_where_to_take_it_from() {
    let mut world = World::new(1).await;
    world.flags().remove("--node-name");
    let said = refused(&mut world, USAGE).await;
    assert_says(&said, &["--node-name", "NODE_NAME", "spec.nodeName"]);
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_wrong_configuration_is_told_whole_and_nothing_is_touched() {
    let mut world = World::new(1).await;
    world.configure("mode: bouth\nlimits:\n  legcy: 4\n  dra: -1\n");
    let said = refused(&mut world, USAGE).await;
    assert_says(
        &said,
        &[
            "config.yaml",
            "3 mistakes",
            "mode: \"bouth\"",
            "did you mean both?",
            "limits.legcy",
            "limits.dra: -1",
        ],
    );
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_configuration_that_is_not_there_is_named_and_not_taken_for_an_empty_one() {
    let mut world = World::new(1).await;
    let path = world.path("nowhere.yaml");
    world.flags().insert("--config", path.into());
    let said = refused(&mut world, USAGE).await;
    assert_says(&said, &["nowhere.yaml", "can't be read", "No such file"]);
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_wrong_kubeconfig_is_named_and_nothing_is_touched() {
    let mut world = World::new(1).await;
    let path = world.path("wrong.kubeconfig");
    fs::write(
        &path,
        "apiVersion: v1\nkind: Config\ncurrent-context: none\n",
    )
    .unwrap();
    world.flags().insert("--kubeconfig", path.into());
    let said = refused(&mut world, USAGE).await;
    assert_says(&said, &["--kubeconfig", "wrong.kubeconfig"]);
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn a_state_folder_that_can_not_be_made_is_named_with_its_flag() {
    let mut world = World::new(1).await;
    let file = world.path("file");
    fs::write(&file, "not a folder").unwrap();
    world
        .flags()
        .insert("--state-dir", file.join("state").into());
    let said = refused(&mut world, 1).await;
    assert_says(&said, &["file/state", "--state-dir", "Not a directory"]);
    assert_nothing_was_touched(&world);
}

#[tokio::test]
async fn an_address_that_is_taken_is_named_and_the_ledger_is_kept() {
    let mut world = World::running(2).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    world.stop_daemon().await;
    let ledger = fs::read(world.ledger()).unwrap();

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let before = world.flags()["--http-addr"].clone();
    world.flags().insert("--http-addr", (&address).into());
    let said = refused(&mut world, 1).await;
    assert_says(&said, &[&address, "in use"]);
    assert_eq!(fs::read(world.ledger()).unwrap(), ledger);

    world.flags().insert("--http-addr", before);
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await, held);
}

#[tokio::test]
async fn with_an_address_that_is_taken_the_kubelet_never_hears_of_the_daemon() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    world.flags().insert("--http-addr", address.into());
    refused(&mut world, 1).await;
    assert_eq!(world.kubelet().capacity(RESOURCE), None);
    assert!(world.kubelet().drivers(DRIVER).is_empty());
    assert_eq!(world.writes(), 0);
    assert_eq!(fs::read_dir(world.registry()).unwrap().count(), 0);
}
