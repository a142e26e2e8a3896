//! The common part of the CDI spec that NVIDIA's toolkit keeps on the host: it knows the driver's files better than
//! anybody else. `serde_yaml` is in here because that spec is YAML.

use std::io;
use std::path::Path;

use serde::Deserialize;

use super::DriverFiles;
use crate::cdi::spec::{Hook, Mount};
use crate::store::read_trusted;

/// A spec of a node with 16 GPUs and their MIG instances has some 100 kB.
const FILE_LIMIT: u64 = 1024 * 1024;
/// Libraries whose names carry the driver's version; one of them is in every spec.
const VERSIONED: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];
/// The variable that is ours to set.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES=";
/// When a hook may run (CDI specification 0.5.0, `hookName`).
const HOOK_NAMES: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

/// Why a spec is not taken over. A runtime refuses a file with one wrong entry as a whole, so what is not understood
/// in full is not copied in part.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unused {
    /// There is none.
    #[error("it is not there")]
    Absent,
    /// It can't be read, or others can have written it.
    #[error("it can't be read: {0}")]
    Unreadable(io::Error),
    /// It is no spec, or has something that this version does not know.
    #[error("it is not understood: {0}")]
    Unknown(String),
    /// It does not say for which driver it was made.
    #[error("none of its mounts names the version of the driver")]
    NoVersion,
    /// It was made for another driver.
    #[error(
        "it was made for driver {made_for}, and {runs} runs: run nvidia-ctk cdi generate, or nvidia-cdi-refresh"
    )]
    OtherVersion {
        /// The one that it names.
        made_for: String,
        /// The one that runs.
        runs: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    container_edits: Edits,
}

/// The common part. Device nodes are this daemon's own business, and groups come with those.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Edits {
    env: Vec<String>,
    mounts: Vec<Mount>,
    hooks: Vec<Hook>,
    #[serde(rename = "deviceNodes")]
    _device_nodes: serde::de::IgnoredAny,
    #[serde(rename = "additionalGids")]
    _additional_gids: serde::de::IgnoredAny,
}

/// Reads the common part of a spec that was made for this driver.
pub(super) fn read(path: &Path, version: &str) -> Result<DriverFiles, Unused> {
    let text = read_trusted(path, FILE_LIMIT).map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            Unused::Absent
        } else {
            Unused::Unreadable(error)
        }
    })?;
    let spec: Spec =
        serde_yaml::from_slice(&text).map_err(|error| Unused::Unknown(error.to_string()))?;
    let edits = spec.container_edits;
    check(&edits)?;
    let made_for = edits.mounts.iter().find_map(version_in);
    match made_for {
        None => return Err(Unused::NoVersion),
        Some(made_for) if made_for != version => {
            return Err(Unused::OtherVersion {
                made_for: made_for.to_owned(),
                runs: version.to_owned(),
            });
        }
        Some(_) => {}
    }
    let mut env = edits.env;
    env.retain(|variable| !variable.starts_with(VISIBLE_DEVICES));
    Ok(DriverFiles {
        env,
        mounts: edits.mounts,
        hooks: edits.hooks,
    })
}

/// What a runtime would check.
fn check(edits: &Edits) -> Result<(), Unused> {
    let wrong = |what: String| Err(Unused::Unknown(what));
    for variable in &edits.env {
        if !variable.contains('=') {
            return wrong(format!("the variable {variable:?} has no value"));
        }
    }
    for mount in &edits.mounts {
        if !mount.host_path.starts_with('/') || !mount.container_path.starts_with('/') {
            return wrong(format!("the mount {:?} has no path", mount.container_path));
        }
    }
    for hook in &edits.hooks {
        if !HOOK_NAMES.contains(&&*hook.hook_name) || !hook.path.starts_with('/') {
            return wrong(format!("no runtime knows the hook {:?}", hook.hook_name));
        }
    }
    Ok(())
}

/// The version of the driver in the name of a library.
fn version_in(mount: &Mount) -> Option<&str> {
    let (_, name) = mount.host_path.rsplit_once('/')?;
    let version = VERSIONED.iter().find_map(|it| name.strip_prefix(it))?;
    // `libcuda.so.1` is a link.
    version.contains('.').then_some(version)
}
