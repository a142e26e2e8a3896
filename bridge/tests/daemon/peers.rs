//! Who may call on the unix sockets.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use crate::process::gpu_bridge;
use crate::world::{SOON, World, skipped, until};

/// A user that is neither root nor the daemon's: `nobody` by custom.
const STRANGER: u32 = 65534;

fn sockets_of_the_daemon(world: &World) -> Vec<PathBuf> {
    let service = world.path("k/plugins/gpu.nvidia.com");
    let folders = [world.device_plugin_dir(), world.registry(), service];
    let mut found = vec![world.admin_socket()];
    for folder in folders {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let is_socket = entry.file_type().unwrap().is_socket();
            if is_socket && entry.file_name() != "kubelet.sock" {
                found.push(entry.path());
            }
        }
    }
    found
}

#[tokio::test]
async fn all_sockets_and_the_ledger_are_for_their_owner_only() {
    let world = World::running(2).await;
    world.run_claimant("a", "gpu-0").await;
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let sockets = sockets_of_the_daemon(&world);
    assert_eq!(sockets.len(), 4, "{sockets:?}");
    for path in sockets.iter().chain([&world.ledger()]) {
        assert_eq!(mode(path), 0o600, "{}", path.display());
    }
    for entry in fs::read_dir(world.cdi_dir()).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o644, "{}", path.display());
    }
}

#[tokio::test]
async fn a_caller_that_is_neither_root_nor_the_own_user_gets_no_answer() {
    if !geteuid().is_root() {
        skipped("only root can call as another user");
        return;
    }
    let world = World::running(2).await;
    let program = world.path("status");
    fs::copy(gpu_bridge().get_program(), &program).unwrap();
    // Even if somebody opens the way to the sockets, as a careless mount would.
    for path in [
        "",
        "k",
        "k/device-plugins",
        "k/plugins_registry",
        "k/plugins",
        "k/plugins/gpu.nvidia.com",
        "status",
    ] {
        let path = world.path(path);
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    let log = world.log();
    for socket in sockets_of_the_daemon(&world) {
        fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
        let mut command = std::process::Command::new(&program);
        command.env_clear().uid(STRANGER).gid(STRANGER);
        command.args(["status", "--admin-socket"]).arg(&socket);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap());
        let output = output.await.unwrap();
        assert!(!output.status.success(), "{}", socket.display());
        assert!(output.stdout.is_empty(), "{}", socket.display());
        let name = socket.display().to_string();
        until("the caller is told of in the log", SOON, async || {
            let mut lines = log.lines().into_iter();
            lines.any(|line| line.contains(&name) && line.contains("refused a caller"))
        })
        .await;
    }
    let mut command = gpu_bridge();
    command
        .args(["status", "--admin-socket"])
        .arg(world.admin_socket());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = output.await.unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("gpu-1"), "root is answered: {table}");
}
