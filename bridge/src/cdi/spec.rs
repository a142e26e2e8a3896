//! What a container gets when it is given a unit, as a CDI spec. Pure: paths and numbers in, JSON out.
//!
//! Written by the Go types of the CDI specification (`specs-go/config.go`, v1.1.0), which a runtime decodes
//! strictly: no field more than it knows, and no version lower than the fields need.

use serde::{Deserialize, Serialize};

use super::driver::DriverFiles;

/// The lowest version that has all that is used: 0.5.0 brought `hostPath` and device names that begin with a digit,
/// as claim UIDs may. A runtime refuses versions that are newer than itself.
const VERSION: &str = "0.5.0";

/// Without it CUDA images, which set `all`, get every GPU of a node whose default runtime is NVIDIA's.
const HIDE_FROM_NVIDIA_RUNTIME: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// One spec file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Spec {
    cdi_version: &'static str,
    kind: String,
    devices: Vec<Device>,
    container_edits: Edits,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<Hook>,
}

/// Something of the host that the container finds at a path of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    /// Where the host has it.
    pub(super) host_path: String,
    /// Where the container finds it.
    pub(super) container_path: String,
    /// As `mount` has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) options: Vec<String>,
    /// As `mount` has it; a bind mount needs none.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<String>,
}

impl Mount {
    /// A file or folder that the container can't change.
    pub(super) fn read_only(host_path: String, container_path: String) -> Self {
        let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
        Self {
            host_path,
            container_path,
            options: options.map(str::to_owned).to_vec(),
            kind: None,
        }
    }

    /// The same, and nothing of it can be run.
    pub(super) fn without_programs(mut self) -> Self {
        self.options.push("noexec".to_owned());
        self
    }
}

/// A program that the runtime runs for the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Hook {
    /// When.
    pub(super) hook_name: String,
    /// The program on the host.
    pub(super) path: String,
    /// Its arguments, its name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) args: Vec<String>,
    /// Its variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) env: Vec<String>,
    /// How many seconds it may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) timeout: Option<u32>,
}

/// A device node. Type and numbers are left to the runtime, which reads them when the container starts: the numbers
/// of `nvidia-uvm` change when its module is loaded again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Node {
    /// Where the container finds it.
    pub(super) path: String,
    /// Where the host has it, if elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) host_path: Option<String>,
}

impl Spec {
    /// A spec of named devices with a node each, and of the nodes and the driver's files that every container with one of
    /// them needs.
    pub(super) fn new(
        kind: String,
        common: Vec<Node>,
        driver: &DriverFiles,
        devices: Vec<(String, Node)>,
    ) -> Self {
        let device = |(name, node)| Device {
            name,
            container_edits: Edits {
                device_nodes: vec![node],
                ..Edits::default()
            },
        };
        Self {
            cdi_version: VERSION,
            kind,
            devices: devices.into_iter().map(device).collect(),
            container_edits: Edits {
                env: std::iter::once(HIDE_FROM_NVIDIA_RUNTIME.to_owned())
                    .chain(driver.env.iter().cloned())
                    .collect(),
                device_nodes: common,
                mounts: driver.mounts.clone(),
                hooks: driver.hooks.clone(),
            },
        }
    }

    /// The text of the file.
    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

/// The part of a spec that [`devices`] reads.
#[derive(Deserialize)]
struct ReadSpec {
    devices: Vec<ReadDevice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReadDevice {
    name: String,
    container_edits: ReadEdits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReadEdits {
    device_nodes: Vec<ReadNode>,
}

#[derive(Deserialize)]
struct ReadNode {
    path: String,
}

/// The devices of a spec of ours: name, and where the container finds its node. `None`: it is no such spec.
pub(super) fn devices(text: &[u8]) -> Option<Vec<(String, String)>> {
    let spec: ReadSpec = serde_json::from_slice(text).ok()?;
    let devices = spec.devices.into_iter().filter_map(|device| {
        let node = device.container_edits.device_nodes.into_iter().next()?;
        Some((device.name, node.path))
    });
    Some(devices.collect())
}
