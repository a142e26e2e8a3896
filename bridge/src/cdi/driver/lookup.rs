//! The driver's files on a host without NVIDIA's toolkit, by their names: every library that carries the driver's
//! version, under the names by which programs look for it, and the tools.
//!
//! Source of the names: NVIDIA/nvidia-container-toolkit v1.20, `pkg/nvcdi` and `internal/discover`.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use super::{DriverFiles, DriverRoot};
use crate::cdi::spec::{Hook, Mount};

/// Where distributions have the driver's libraries, below the driver's root.
const LIBRARY_FOLDERS: [&str; 10] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
];
/// A folder of libraries below some of these.
const VDPAU: &str = "vdpau";
/// The library without which nothing computes: the first folder that has it is the one.
const CUDA: &str = "libcuda.so.";
/// Programs of the driver, and where they are.
const PROGRAMS: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
const PROGRAM_FOLDERS: [&str; 3] = ["usr/bin", "usr/sbin", "usr/local/nvidia/bin"];
/// The program of NVIDIA's toolkit that tells a container's loader about new libraries.
const CDI_HOOK: &str = "usr/bin/nvidia-cdi-hook";
/// Folders with sockets of the driver's daemons. Not to be written, though a socket can be connected to.
const SOCKETS: [&str; 2] = [
    "run/nvidia-persistenced/socket",
    "run/nvidia-fabricmanager/socket",
];
/// Entries of a folder that are looked at: a folder of libraries has some thousand.
const ENTRIES_LIMIT: usize = 20_000;
/// Links that are followed one after the other: `libcuda.so` to `libcuda.so.1` to the library, and one more.
const LINKS_LIMIT: usize = 3;

/// Everything that is there; nothing, if the driver's libraries are not.
pub(super) fn find(root: &DriverRoot, version: &str) -> DriverFiles {
    let has_cuda = |folder: &&str| {
        let library = root.here.join(folder).join(format!("{CUDA}{version}"));
        library.symlink_metadata().is_ok_and(|it| it.is_file())
    };
    let Some(folder) = LIBRARY_FOLDERS.into_iter().find(has_cuda) else {
        return DriverFiles::default();
    };
    let mut mounts = Vec::new();
    for folder in [folder, &format!("{folder}/{VDPAU}")] {
        let names = libraries(&root.here.join(folder), version).into_iter();
        let mount = |(name, library)| {
            let (from, to) = (format!("{folder}/{library}"), format!("{folder}/{name}"));
            file(root, &from, &to)
        };
        mounts.extend(names.filter_map(mount));
    }
    for program in PROGRAMS {
        let paths = PROGRAM_FOLDERS
            .iter()
            .map(|folder| format!("{folder}/{program}"));
        let path = paths
            .into_iter()
            .find(|path| root.here.join(path).is_file());
        mounts.extend(path.and_then(|path| file(root, &path, &path)));
    }
    for socket in SOCKETS {
        if root.here.join(socket).exists() {
            mounts.extend(file(root, socket, socket).map(Mount::without_programs));
        }
    }
    DriverFiles {
        env: Vec::new(),
        mounts,
        hooks: hooks(root, folder),
    }
}

/// The libraries of this version in a folder, by all names that lead to them: their own, and the links that programs
/// are linked with or open, which no hook has to make then.
fn libraries(folder: &Path, version: &str) -> BTreeMap<String, String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return BTreeMap::new();
    };
    let end = format!(".so.{version}");
    let mut names = BTreeMap::new();
    let mut links = BTreeMap::new();
    for entry in entries.take(ENTRIES_LIMIT).filter_map(Result::ok) {
        let (Ok(kind), Ok(name)) = (entry.file_type(), entry.file_name().into_string()) else {
            continue;
        };
        if kind.is_file() && name.ends_with(&end) {
            names.insert(name.clone(), name);
        } else if kind.is_symlink()
            && name.contains(".so")
            && let Some(target) = beside(&entry.path())
        {
            links.insert(name, target);
        }
    }
    // A link may lead to a link.
    for _ in 0..LINKS_LIMIT {
        for (name, target) in &links {
            if let Some(library) = names.get(target).cloned() {
                names.insert(name.clone(), library);
            }
        }
    }
    names
}

/// The name that a link leads to, if that is in the same folder.
fn beside(link: &Path) -> Option<String> {
    let target = link.read_link().ok()?;
    let mut parts = target.components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) => name.to_str().map(str::to_owned),
        (None | Some(_), _) => None,
    }
}

/// A file of the driver, under a path of the container.
fn file(root: &DriverRoot, from: &str, to: &str) -> Option<Mount> {
    let host_path = root.on_host.join(from).to_str()?.to_owned();
    Some(Mount::read_only(host_path, format!("/{to}")))
}

/// What has to be done for a container whose loader does not look into the folder by itself.
fn hooks(root: &DriverRoot, folder: &str) -> Vec<Hook> {
    let path = root.on_host.join(CDI_HOOK);
    let Some(path) = path.to_str().filter(|_| root.here.join(CDI_HOOK).is_file()) else {
        return Vec::new();
    };
    let args = ["nvidia-cdi-hook", "update-ldcache", "--folder"].map(str::to_owned);
    let folder = format!("/{folder}");
    vec![Hook {
        hook_name: "createContainer".to_owned(),
        path: path.to_owned(),
        args: args.into_iter().chain([folder]).collect(),
        env: Vec::new(),
        timeout: None,
    }]
}
