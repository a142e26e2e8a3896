//! Names of our sockets in the kubelet's folders, and the sweep of those that a dead process left there.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::bind::{Stale, remove_if_stale};

/// What the name of a plugin's registration socket ends with. The kubelet dials it with the percent-encoded path
/// as `:authority`, which a strict HTTP/2 server refuses, except when an `@` makes all before it a user name.
const REGISTRATION_SUFFIX: &str = "@reg.sock";

/// What registration sockets of any implementation end with: upstream's `kubeletplugin` has `-reg.sock`.
const REGISTRATION_END: &str = "reg.sock";

/// What our sockets in the device plugin folder begin and end with.
const DEVICE_PLUGIN_PREFIX: &str = "gpu-bridge-";
const SOCKET_SUFFIX: &str = ".sock";

/// File name of the registration socket in the kubelet's `plugins_registry`. With `instance` (the pod's UID) two
/// daemons can be there at once, as in a rolling update: the kubelet takes several sockets of one driver.
#[must_use]
pub fn registration_socket_name(driver: &str, instance: Option<&str>) -> String {
    match instance {
        None => format!("{driver}{REGISTRATION_SUFFIX}"),
        Some(instance) => format!("{driver}-{instance}{REGISTRATION_SUFFIX}"),
    }
}

/// File name of a socket in the kubelet's device plugin folder. `instance` is the pod's UID, or `node`;
/// `started_unix_seconds` is the start of the daemon, and `serial` counts its registrations.
///
/// So no name is ever registered twice. A kubelet of 1.37 that is asked to register a socket whose last connection
/// it has not cleared away yet refuses, forgets to clear that one, and refuses the name from then on
/// (`pkg/kubelet/cm/devicemanager`: `connectClient`, `PluginConnected`).
#[must_use]
pub fn device_plugin_socket_name(instance: &str, started_unix_seconds: u64, serial: u32) -> String {
    format!("{DEVICE_PLUGIN_PREFIX}{instance}-{started_unix_seconds:x}-{serial}{SOCKET_SUFFIX}")
}

/// Whether a file of this name is a socket by its end.
#[must_use]
pub fn is_socket_name(name: &OsStr) -> bool {
    name.as_encoded_bytes().ends_with(SOCKET_SUFFIX.as_bytes())
}

/// Whether a name in the device plugin folder is of a gpu-bridge, whichever.
#[must_use]
pub fn is_device_plugin_socket_name(name: &str) -> bool {
    name.starts_with(DEVICE_PLUGIN_PREFIX) && name.ends_with(SOCKET_SUFFIX)
}

/// Whether a name in the registry is of a gpu-bridge that serves `driver`, whichever: no other daemon's has this end.
#[must_use]
pub fn is_registration_socket_name(driver: &str, name: &str) -> bool {
    name.starts_with(driver) && name.ends_with(REGISTRATION_SUFFIX)
}

/// The socket of `instance` in the kubelet's device plugin folder that was made last; `None` if there is none.
///
/// That is the one with the highest serial: those of a former start are swept before the first is made, and the time
/// of a file is that of a wall clock which may have been put back since.
///
/// # Errors
/// The folder can't be read. A folder that does not exist is empty.
pub fn newest_device_plugin_socket(folder: &Path, instance: &str) -> io::Result<Option<PathBuf>> {
    let prefix = format!("{DEVICE_PLUGIN_PREFIX}{instance}-");
    let serial = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        let (_, serial) = name.strip_suffix(SOCKET_SUFFIX)?.rsplit_once('-')?;
        serial.parse::<u32>().ok()
    };
    let found = entries(folder, |name| name.starts_with(&prefix))?.into_iter();
    let paths = found.map(|entry| entry.path());
    let newest = paths.filter_map(|path| Some((serial(&path)?, path))).max();
    Ok(newest.map(|(_, path)| path))
}

/// Removes registration sockets of `driver` on which nobody listens, whoever made them: the kubelet would go on
/// dialling them. Returns what was removed.
///
/// # Errors
/// The folder can't be read, or a stale socket can't be removed. A folder that does not exist is empty.
pub fn sweep_registration_sockets(folder: &Path, driver: &str) -> io::Result<Vec<PathBuf>> {
    sweep(folder, |name| {
        name.strip_prefix(driver)
            .is_some_and(|rest| rest.starts_with(['-', '@']) && rest.ends_with(REGISTRATION_END))
    })
}

/// File name of the admin socket of one of two daemons on a node, from the name of the one that the owner of the
/// ledger has: `admin.sock` and the pod's UID make `admin-<UID>.sock`.
#[must_use]
pub fn own_admin_socket(admin_socket: &Path, instance: &str) -> PathBuf {
    let name = admin_socket.file_stem().unwrap_or_default();
    let mut own = name.to_owned();
    own.push(format!("-{instance}{SOCKET_SUFFIX}"));
    admin_socket.with_file_name(own)
}

/// Removes what daemons left behind that had a socket of [`own_admin_socket`]. Returns what was removed.
///
/// # Errors
/// The folder can't be read, or a stale socket can't be removed. A folder that does not exist is empty.
pub fn sweep_admin_sockets(admin_socket: &Path) -> io::Result<Vec<PathBuf>> {
    let folder = admin_socket.parent().unwrap_or_else(|| Path::new("/"));
    let stem = admin_socket.file_stem().unwrap_or_default();
    let prefix = format!("{}-", stem.to_string_lossy());
    sweep(folder, |name| {
        name.starts_with(&prefix) && name.ends_with(SOCKET_SUFFIX)
    })
}

/// Removes our own sockets in the device plugin folder on which nobody listens. Returns what was removed.
///
/// # Errors
/// The folder can't be read, or a stale socket can't be removed. A folder that does not exist is empty.
pub fn sweep_device_plugin_sockets(folder: &Path) -> io::Result<Vec<PathBuf>> {
    sweep(folder, is_device_plugin_socket_name)
}

fn sweep(folder: &Path, is_ours: impl Fn(&str) -> bool) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for entry in entries(folder, is_ours)? {
        let path = entry.path();
        match remove_if_stale(&path)? {
            Stale::Removed => removed.push(path),
            Stale::Missing | Stale::Alive | Stale::NoSocket => {}
        }
    }
    removed.sort();
    Ok(removed)
}

/// What is in a folder under names of ours.
fn entries(folder: &Path, is_ours: impl Fn(&str) -> bool) -> io::Result<Vec<fs::DirEntry>> {
    let all = match fs::read_dir(folder) {
        Ok(all) => all,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in all {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&is_ours) {
            found.push(entry);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_registration_socket_has_an_at_sign_in_its_name() {
        assert_eq!(
            registration_socket_name("gpu.nvidia.com", None),
            "gpu.nvidia.com@reg.sock"
        );
        assert_eq!(
            registration_socket_name("gpu.nvidia.com", Some("4f2")),
            "gpu.nvidia.com-4f2@reg.sock"
        );
    }

    #[test]
    fn only_stale_sockets_of_the_driver_are_swept() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        for stale in [
            "gpu.nvidia.com@reg.sock",
            "gpu.nvidia.com-4f2@reg.sock",
            "gpu.nvidia.com-reg.sock",
            "compute-domain.nvidia.com-reg.sock",
            "gpu.nvidia.computer@reg.sock",
        ] {
            drop(UnixListener::bind(path(stale)).unwrap());
        }
        let _alive = UnixListener::bind(path("gpu.nvidia.com-9@reg.sock")).unwrap();
        fs::File::create(path("gpu.nvidia.com-7@reg.sock")).unwrap();

        let removed = sweep_registration_sockets(folder.path(), "gpu.nvidia.com").unwrap();
        let expected = [
            "gpu.nvidia.com-4f2@reg.sock",
            "gpu.nvidia.com-reg.sock",
            "gpu.nvidia.com@reg.sock",
        ];
        assert_eq!(removed, expected.map(path));
        for kept in [
            "compute-domain.nvidia.com-reg.sock",
            "gpu.nvidia.computer@reg.sock",
            "gpu.nvidia.com-9@reg.sock",
            "gpu.nvidia.com-7@reg.sock",
        ] {
            assert!(path(kept).exists(), "{kept}");
        }
    }

    #[test]
    fn only_our_stale_sockets_are_swept_from_the_device_plugin_folder() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let ours = folder
            .path()
            .join(device_plugin_socket_name("node", 1_700_000_000, 3));
        let other = folder.path().join("nvidia-gpu.sock");
        drop(UnixListener::bind(&ours).unwrap());
        drop(UnixListener::bind(&other).unwrap());
        let removed = sweep_device_plugin_sockets(folder.path()).unwrap();
        assert_eq!(removed, [ours]);
        assert!(other.exists());
    }

    #[test]
    fn the_newest_socket_of_an_instance_is_found_and_no_other_instances() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        assert_eq!(
            newest_device_plugin_socket(folder.path(), "a").unwrap(),
            None
        );
        // The wall clock was put back meanwhile, so the time of the last one may be the earliest.
        let names = ["gpu-bridge-a-9-10.sock", "gpu-bridge-a-9-9.sock"];
        for name in names.into_iter().chain(["gpu-bridge-b-9-11.sock"]) {
            drop(UnixListener::bind(path(name)).unwrap());
        }
        let newest = newest_device_plugin_socket(folder.path(), "a").unwrap();
        assert_eq!(newest, Some(path(names[0])));
    }

    #[test]
    fn admin_sockets_of_daemons_that_are_gone_are_swept_and_the_owners_is_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let owners = folder.path().join("admin.sock");
        let own = own_admin_socket(&owners, "4f2");
        assert_eq!(own, folder.path().join("admin-4f2.sock"));
        drop(UnixListener::bind(&owners).unwrap());
        drop(UnixListener::bind(&own).unwrap());
        assert_eq!(sweep_admin_sockets(&owners).unwrap(), [own]);
        assert!(owners.exists());
    }

    #[test]
    fn a_folder_that_is_missing_is_empty() {
        let removed = sweep_device_plugin_sockets(Path::new("/nowhere")).unwrap();
        assert!(removed.is_empty());
    }
}
