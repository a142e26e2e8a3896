//! Who may call on the unix sockets.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use crate::process::{Daemon, gpu_bridge};
use crate::world::{SOON, World, claim_uid, skipped, until};

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

#[tokio::test]
async fn links_in_shared_folders_are_replaced_or_named_and_never_followed() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    let victim = world.path("victim");
    fs::write(&victim, "untouched").unwrap();
    let link = |path: PathBuf| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(&victim, &path).unwrap();
        path
    };
    // Whatever is written to a temporary name and renamed.
    fs::DirBuilder::new()
        .mode(0o700)
        .create(world.state_dir())
        .unwrap();
    let counted = link(world.counted_spec());
    link(world.cdi_dir().join("gpu-bridge.dev-gpu.json.tmp"));
    link(world.state_dir().join("ledger.json.tmp"));
    let spec = link(world.claim_spec(&claim_uid("b")));
    // A socket can't be renamed into its place.
    let registration = link(world.registry().join("gpu.nvidia.com@reg.sock"));
    world.start_daemon();
    world
        .lacks(
            "DraPluginRegistered",
            &["gpu.nvidia.com@reg.sock", "is no socket", "move it away"],
        )
        .await;
    fs::remove_file(&registration).unwrap();
    world.ready().await;
    world.run_counted("a", 1).await;
    world.allocate_claim("b", &world.free_device().await, "b");
    world.admit_claimant("b").await;
    world.prepare("b").await.unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    for path in [world.ledger(), counted, spec] {
        let kind = path.symlink_metadata().unwrap().file_type();
        assert!(kind.is_file(), "{}", path.display());
    }
}

#[tokio::test]
async fn a_link_for_a_lock_or_for_the_admin_socket_ends_the_start_with_its_name() {
    let mut world = World::new(1).await;
    let victim = world.path("victim");
    fs::write(&victim, "untouched").unwrap();
    let lock = world.state_dir().join("lock");
    fs::create_dir(world.state_dir()).unwrap();
    for path in [lock, world.admin_socket()] {
        symlink(&victim, &path).unwrap();
        let (status, said) = Daemon::spawn(world.flags()).ended().await;
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(path.to_str().unwrap()), "{said}");
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
}
