//! The node: folders, sockets, driver, ledger, configuration, and who else is there.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use bridge_core::Face;
use bridge_nvml::{Session, Snapshot};
use dra_proto::registration;
use legacy_proto::{deviceplugin, podresources};
use rustix::fs::{Access, access};
use tokio::time::timeout;

use super::Finding;
use crate::admin::{self, ClientError, StatusPage};
use crate::cli::RunOptions;
use crate::daemon::{NO_NVML_THREAD, nvml_options};
use crate::store::{self, Condition};
use crate::{rivals, uds};

/// How long NVML may take: without persistence mode it wakes each GPU, at a second or two apiece.
const NVML_PATIENCE: Duration = Duration::from_secs(30);
/// Old sockets that are named; the others are counted.
const NAMED_LIMIT: usize = 5;

pub(super) async fn examine(options: &RunOptions) -> Vec<Finding> {
    let daemon = admin::status(&options.admin_socket).await;
    let mut found = vec![config(options)];
    found.extend(folders(options));
    found.extend(kubelet_sockets(options));
    found.extend(driver(options).await);
    found.push(ledger(options));
    found.extend(self::daemon(options, &daemon));
    found.extend(others(options, daemon.as_ref().ok()).await);
    found.push(old_sockets(options));
    found
}

fn config(options: &RunOptions) -> Finding {
    let Some(source) = &options.config else {
        return Finding::ok("configuration", "no file: the defaults are in force");
    };
    let Some(path) = source.file() else {
        // The daemon reads it with its own rights, and says in ConfigInForce what comes of it.
        let what = format!("{} is read from the API server", source.origin().display());
        return Finding::ok("configuration", what);
    };
    match crate::config::load(path) {
        Ok(config) => Finding::ok(
            "configuration",
            format!(
                "{} is good: mode {}",
                path.display(),
                config.base.settings.mode.as_str()
            ),
        ),
        Err(error) => Finding::problem(
            "configuration",
            error.to_string(),
            "a daemon that starts with it and has no last good one does not serve",
            format!("gpu-bridge check-config {}", path.display()),
        ),
    }
}

// --- Folders and sockets ---

/// Where plugins show themselves to the kubelet.
fn registry(options: &RunOptions) -> PathBuf {
    options.kubelet_dir.join(registration::DIR)
}

fn folders(options: &RunOptions) -> Vec<Finding> {
    let theirs = [
        (
            "kubelet",
            &options.kubelet_dir,
            Access::READ_OK,
            "the kubelet's sockets and its list of prepared claims are below it",
            "--kubelet-dir is the kubelet's --root-dir; in the DaemonSet it is the volume `kubelet`",
        ),
        (
            "device plugins",
            &options.device_plugin_dir,
            Access::WRITE_OK,
            "counted pods are served by a socket in it",
            "give the kubelet's folder of device plugins as --device-plugin-dir, writable",
        ),
        (
            "registry",
            &registry(options),
            Access::WRITE_OK,
            "the kubelet finds the DRA driver by a socket in it",
            "give the kubelet's --root-dir as --kubelet-dir, and make plugins_registry in it writable",
        ),
    ];
    let ours = [
        (
            "CDI files",
            &options.cdi_dir,
            "a container gets the device files of its GPUs by a file in it",
            "make the folder, give it as --cdi-dir, and let the container runtime read it: cdi_spec_dirs of containerd",
        ),
        (
            "state",
            &options.state_dir,
            "the ledger is kept in it, and nothing is given out that is not saved",
            "make --state-dir writable for root, on a disk that outlasts a reboot",
        ),
    ];
    let theirs = theirs.map(
        |(about, path, wanted, why, to_do)| match usable(path, wanted) {
            Ok(()) => Finding::ok(about, path.display().to_string()),
            Err(what) => Finding::problem(about, what, why, to_do),
        },
    );
    let ours = ours.map(|(about, path, why, to_do)| {
        // The daemon makes it, with what is missing above it.
        let there = path.ancestors().find(|it| it.exists()).unwrap_or(path);
        match usable(there, Access::WRITE_OK) {
            Ok(()) if there == path => Finding::ok(about, path.display().to_string()),
            Ok(()) => {
                let what = format!("{} is made by the first start", path.display());
                Finding::ok(about, what)
            }
            Err(what) => Finding::problem(about, what, why, to_do),
        }
    });
    theirs.into_iter().chain(ours).collect()
}

/// Whether it is a folder with this access, or what is wrong with it.
fn usable(folder: &Path, wanted: Access) -> Result<(), String> {
    if !folder.is_dir() {
        return Err(format!("there is no folder {}", folder.display()));
    }
    access(folder, wanted).map_err(|errno| format!("{} can't be used: {errno}", folder.display()))
}

fn kubelet_sockets(options: &RunOptions) -> Vec<Finding> {
    let plugins = options.device_plugin_dir.join(deviceplugin::KUBELET_SOCKET);
    let resources = options.kubelet_dir.join(podresources::DIR);
    let resources = resources.join(podresources::SOCKET);
    [
        (
            "registration",
            plugins,
            "device plugins register there: without it no counted pod is served",
        ),
        (
            "pod-resources",
            resources,
            "it says which pod has which GPU: without it no hold of a counted pod ends",
        ),
    ]
    .map(|(about, path, why)| match uds::listener(&path) {
        uds::Listener::Somebody(_) => Finding::ok(about, format!("{} answers", path.display())),
        uds::Listener::Nobody => Finding::problem(
            about,
            format!("nobody listens on {}", path.display()),
            why,
            "look whether the kubelet runs, and whether this is its folder",
        ),
    })
    .into()
}

/// Sockets of this product that nobody listens on any more.
fn old_sockets(options: &RunOptions) -> Finding {
    let folders = [
        options.device_plugin_dir.clone(),
        registry(options),
        options.state_dir.clone(),
    ];
    let mut old: Vec<PathBuf> = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .filter(|entry| is_ours(&options.state_dir, &entry.path()))
        .map(|entry| entry.path())
        .filter(|path| uds::listener(path) == uds::Listener::Nobody)
        .collect();
    old.sort();
    if old.is_empty() {
        return Finding::ok("old sockets", "none");
    }
    let named = old
        .iter()
        .take(NAMED_LIMIT)
        .map(|it| it.display().to_string());
    let named = named.collect::<Vec<_>>().join(", ");
    let more = match old.len().saturating_sub(NAMED_LIMIT) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Finding::warning(
        "old sockets",
        format!("nobody listens on {named}{more}"),
        "a daemon that was killed left them behind; the kubelet may try them, and says so in its log",
        "nothing if gpu-bridge is about to start, since a start removes them; else delete them",
    )
}

fn is_ours(state_dir: &Path, path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.parent() == Some(state_dir)
        || uds::is_device_plugin_socket_name(&name)
        || uds::is_registration_socket_name(Face::Dra.served_name(), &name)
}

// --- The driver ---

async fn driver(options: &RunOptions) -> Vec<Finding> {
    let why = "without NVML no GPU is known, and none is offered";
    let to_do = "install the NVIDIA driver, and give the path of its libnvidia-ml.so.1 as --nvml-library; in the \
                 DaemonSet it is the volume `driver-libraries`";
    let session = match Session::spawn(nvml_options(options)).context(NO_NVML_THREAD) {
        Ok(session) => session,
        Err(error) => return vec![Finding::problem("NVML", format!("{error:#}"), why, to_do)],
    };
    let snapshot = timeout(NVML_PATIENCE, session.snapshot()).await;
    // A driver that hangs is left behind, and ends with this process.
    let _ = session.shutdown().await;
    match snapshot {
        Err(_) => vec![Finding::problem(
            "NVML",
            format!("it has not answered within {} s", NVML_PATIENCE.as_secs()),
            why,
            "look at `nvidia-smi` and at the kernel's log on the node; a driver that hangs needs a reboot as a rule",
        )],
        Ok(Err(error)) => vec![Finding::problem("NVML", error.to_string(), why, to_do)],
        Ok(Ok(snapshot)) => vec![gpus(&snapshot), device_files(options, &snapshot)],
    }
}

fn gpus(snapshot: &Snapshot) -> Finding {
    let what = format!(
        "{} GPUs, driver {}",
        snapshot.gpus.len(),
        snapshot.driver_version
    );
    match snapshot.failed.len() {
        0 if snapshot.gpus.is_empty() => Finding::problem(
            "NVML",
            "it knows no GPU",
            "there is nothing to offer",
            "look at `nvidia-smi -L`; on a node without GPUs the DaemonSet should not run: see its affinity",
        ),
        0 => Finding::ok("NVML", what),
        failed => Finding::warning(
            "NVML",
            format!("{what}; {failed} more do not answer"),
            "a GPU that does not answer is offered to nobody",
            "look at `nvidia-smi` and at the kernel's log for XID errors",
        ),
    }
}

fn device_files(options: &RunOptions, snapshot: &Snapshot) -> Finding {
    let dev = options.dev_root.join("dev");
    let gpus = snapshot.gpus.iter();
    let wanted = gpus
        .map(|gpu| format!("nvidia{}", gpu.minor))
        .chain(["nvidiactl", "nvidia-uvm"].map(str::to_owned));
    let missing: Vec<String> = wanted
        .map(|name| dev.join(name))
        .filter(|path| !path.exists())
        .map(|path| path.display().to_string())
        .collect();
    if missing.is_empty() {
        return Finding::ok("device files", format!("all are in {}", dev.display()));
    }
    Finding::problem(
        "device files",
        format!("missing: {}", missing.join(", ")),
        "containers get these files, and one that is missing keeps its pod from starting",
        "load the module nvidia-uvm, run `nvidia-modprobe -u -c 0`, or give the folder above dev as --dev-root",
    )
}

// --- The daemon and its ledger ---

fn ledger(options: &RunOptions) -> Finding {
    match store::condition(&options.state_dir) {
        Condition::Whole { generation } => {
            Finding::ok("ledger", format!("whole, generation {generation}"))
        }
        Condition::Missing => Finding::ok(
            "ledger",
            "there is none: the first start takes over what runs here",
        ),
        Condition::Unreadable { why } => Finding::problem(
            "ledger",
            format!("it {why}"),
            "nothing is given out until somebody has looked at it",
            "gpu-bridge ledger rebuild; migration-guide/ledger.md has the steps",
        ),
    }
}

fn daemon(options: &RunOptions, daemon: &Result<StatusPage, ClientError>) -> Vec<Finding> {
    let page = match daemon {
        Ok(page) => page,
        Err(error) => {
            return vec![Finding::warning(
                "daemon",
                error.to_string(),
                "nothing is served while no daemon runs; what runs goes on",
                format!(
                    "start gpu-bridge; one that runs on this node listens on {}",
                    options.admin_socket.display()
                ),
            )];
        }
    };
    let mut found = vec![Finding::ok(
        "daemon",
        format!(
            "version {} runs, mode {}, ledger {}",
            page.version, page.mode, page.standing
        ),
    )];
    let limiting = page.conditions.iter().filter(|it| it.limits || !it.ok);
    found.extend(limiting.map(|condition| {
        let word = condition.reason.as_ref().unwrap_or(&condition.name);
        let what = format!("{}: {}", condition.name, condition.message);
        let why = format!("the daemon says so since {}", condition.since);
        let to_do = match &condition.reason {
            Some(_) => format!("migration-guide/reasons/{word}.md"),
            None => "what the message says; migration-guide/status.md has the rest".to_owned(),
        };
        if condition.ok {
            Finding::warning("daemon", what, why, to_do)
        } else {
            Finding::problem("daemon", what, why, to_do)
        }
    }));
    found.extend(page.units.iter().filter_map(|unit| {
        let fault = unit.fault.as_ref()?;
        Some(Finding::warning(
            "GPU health",
            format!(
                "{} ({}) is closed: {}",
                unit.device, unit.unit, fault.message
            ),
            "no new pod gets a GPU with a fault; who has it keeps it",
            "migration-guide/gpu-health.md says how it comes back",
        ))
    }));
    found
}

/// Other daemons that serve our names. One that runs already has looked for longer than this can.
async fn others(options: &RunOptions, page: Option<&StatusPage>) -> Vec<Finding> {
    let seen = rivals::look_once(&options.device_plugin_dir, &registry(options)).await;
    let seen = seen
        .into_iter()
        .map(|(face, path)| (face.served_name().to_owned(), path.display().to_string()));
    let told = page.into_iter().flat_map(|page| &page.rivals);
    let told = told.map(|rival| {
        let mut faces = [Face::Legacy, Face::Dra].into_iter();
        let face = faces.find(|face| face.as_str() == rival.face);
        let name = face.map_or_else(|| rival.face.clone(), |face| face.served_name().to_owned());
        (name, rival.place.clone())
    });
    let mut all: Vec<(String, String)> = seen.chain(told).collect();
    all.sort();
    all.dedup();
    if all.is_empty() {
        return vec![Finding::ok(
            "other daemons",
            "nobody else serves nvidia.com/gpu or gpu.nvidia.com",
        )];
    }
    let finding = |(name, place)| {
        Finding::problem(
            "other daemons",
            format!("another daemon serves {name} at {place}"),
            "the kubelet asks whoever registered last, so one GPU could be given twice; nothing is offered meanwhile",
            "take it off this node: migration-guide/reasons/OtherRegistrant.md",
        )
    };
    all.into_iter().map(finding).collect()
}
