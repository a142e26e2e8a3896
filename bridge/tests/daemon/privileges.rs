//! How little the daemon can do with: no capability at all. What it is `privileged` for in the DaemonSet is to open
//! device nodes, which a container is otherwise not given.

use std::fs;
use std::process::Command;

use crate::process::{Daemon, quiet};
use crate::world::{SOON, World, until};

/// The command line of `gpu-bridge` without a capability, and without a way to get one.
fn without_capabilities() -> Command {
    let program = env!("CARGO_BIN_EXE_gpu-bridge");
    if !rustix::process::geteuid().is_root() {
        return quiet(Command::new(program));
    }
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"])
        .args(["--securebits=+noroot,+noroot_locked", "--", program]);
    quiet(command)
}

/// A line of `/proc/<pid>/status`, without its name.
fn status_line(daemon: &Daemon, name: &str) -> String {
    let pid = daemon.pid().as_raw_nonzero();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name));
    let (_, value) = line.expect("the kernel tells it").split_once(':').unwrap();
    value.trim().to_owned()
}

#[tokio::test]
async fn without_any_capability_it_serves_both_faces_before_and_after_a_kill() {
    let mut world = World::new(4).await;
    world.start_kubelet().await;
    for round in ["first", "second"] {
        let daemon = Daemon::start(without_capabilities(), world.flags());
        world.adopt(daemon);
        world.ready().await;
        assert_eq!(
            status_line(world.daemon(), "CapEff"),
            "0000000000000000",
            "it runs without any"
        );
        let (counted, claimant) = (format!("counted-{round}"), format!("claimant-{round}"));
        world.run_counted(&counted, 1).await;
        let device = if round == "first" { "gpu-0" } else { "gpu-1" };
        world.run_claimant(&claimant, device).await;
        let holds = world.wait_for_holds("Bound", if round == "first" { 1 } else { 2 });
        drop(holds.await);
        world.kill_daemon();
    }
    let daemon = Daemon::start(without_capabilities(), world.flags());
    world.adopt(daemon);
    world.ready().await;
    for pod in [
        "counted-first",
        "claimant-first",
        "counted-second",
        "claimant-second",
    ] {
        world.end_pod(pod).await;
    }
    until("all is given back", SOON, async || {
        world.holds().await.is_empty()
    })
    .await;
}
