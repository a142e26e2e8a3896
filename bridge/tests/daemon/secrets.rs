//! What must never be read in a log, in a status or in an error: the credentials of the daemon.

use std::fs;

use crate::process::{Daemon, gpu_bridge};
use crate::world::{SOON, World, until};

/// What a kubeconfig may carry, each with a text of its own.
const TOKEN: &str = "token-b2f0c4d1e9";
const PASSWORD: &str = "password-5a7d90c3aa";
const KEY: &str = "key-77e1f0ab12";

/// A node whose kubeconfig has a token.
async fn with_a_token(user: &str) -> World {
    let world = World::new(2).await;
    let path = world.path("kubeconfig");
    let text = fs::read_to_string(&path).unwrap();
    let with = text.replace("user: {}", user);
    assert_ne!(text, with);
    fs::write(&path, with).unwrap();
    world
}

fn assert_no_secret(said: &str) {
    for secret in [TOKEN, PASSWORD, KEY] {
        if let Some(line) = said.lines().find(|line| line.contains(secret)) {
            panic!("{secret} is told: {line}");
        }
    }
}

#[tokio::test]
async fn the_token_of_the_daemon_is_in_no_log_and_on_no_page_at_any_level() {
    let mut world = with_a_token(&format!("user: {{token: {TOKEN}}}")).await;
    world.start_kubelet().await;
    let mut command = gpu_bridge();
    command.env("GPU_BRIDGE_LOG", "trace");
    let daemon = Daemon::start(command, world.flags());
    world.adopt(daemon);
    world.ready().await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    // Requests that fail are told of with their reasons.
    world.api.forbid("get", "resourceclaims");
    world.allocate_claim("c", "gpu-0", "c");
    world.admit_claimant("c").await;
    world.prepare("c").await.unwrap_err();
    world.api.go_away();
    let log = world.log();
    until("the outage is told", SOON, async || {
        !world.condition("ApiServerReachable").await.unwrap().0
    })
    .await;
    world.api.come_back();
    assert!(log.has("TRACE"), "the log is as talkative as can be");
    assert!(log.has("hyper"), "the client's libraries talk too");
    assert_no_secret(&log.text());
    for page in ["/healthz", "/readyz", "/status"] {
        assert_no_secret(&world.get(page).await.unwrap().1);
    }
    let command_line = format!("/proc/{}/cmdline", world.daemon().pid().as_raw_nonzero());
    assert_no_secret(&String::from_utf8_lossy(&fs::read(command_line).unwrap()));
}

#[tokio::test]
async fn a_wrong_kubeconfig_is_told_without_what_is_in_it() {
    for user in [
        // A token where a mapping should be, and the other way round.
        TOKEN.to_owned(),
        format!("[{TOKEN}]"),
        format!("{{token: {{{TOKEN}: x}}}}"),
        format!("{{token: [{TOKEN}]}}"),
        format!("{{username: a, password: [{PASSWORD}]}}"),
        format!("{{client-certificate-data: {KEY}, client-key-data: {KEY}}}"),
        format!("{{token: {TOKEN}"),
        format!("{{exec: {TOKEN}}}"),
        format!("{{auth-provider: {TOKEN}}}"),
        // A plugin that has written the token, and fails then.
        format!(
            "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, interactiveMode: Never, \
             args: [-c, \"echo {TOKEN}; echo {PASSWORD} >&2; exit 1\"]}}}}"
        ),
    ] {
        let mut world = with_a_token(&format!("user: {user}")).await;
        let mut command = gpu_bridge();
        command.env("GPU_BRIDGE_LOG", "trace");
        let (status, said) = Daemon::start(command, world.flags()).ended().await;
        assert_eq!(status.code(), Some(2), "{said}");
        assert!(said.contains("--kubeconfig"), "{said}");
        assert_no_secret(&said);
    }
}
