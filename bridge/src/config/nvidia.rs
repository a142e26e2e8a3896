//! The configuration file of NVIDIA's device plugin, version v1: read so that a node can be taken over with the file
//! that it has. What can't be done is said, key by key; nothing is left out in silence.
//!
//! Source: NVIDIA/k8s-device-plugin v0.20.0, `api/config/v1`.

use bridge_core::Mode;
use serde_yaml::{Mapping, Value};

use super::values::shown;
use super::{Config, device_plugin};

/// Groups of keys, by their place.
const GROUPS: [&str; 8] = [
    "flags",
    "flags.plugin",
    "flags.gfd",
    "resources",
    "sharing",
    "sharing.timeSlicing",
    "sharing.mps",
    "imex",
];

/// Keys of `flags.plugin` that are keys of `devicePlugin` here.
const HANDOUT: [&str; 4] = [
    "deviceListStrategy",
    "deviceIDStrategy",
    "passDeviceSpecs",
    "cdiAnnotationPrefix",
];

/// Further remarks are not made: a file of that plugin has some thirty keys.
const REMARKS_MAX: usize = 100;

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) config: Config,
    /// What is not done, one key each.
    pub(super) remarks: Vec<String>,
    /// Key, value and what is wrong.
    pub(super) mistakes: Vec<(String, Value, String)>,
}

/// Whether this is such a file: it has no `apiVersion`, and a key that only such a file has at its top.
pub(super) fn is_file(value: &Value) -> bool {
    let Value::Mapping(keys) = value else {
        return false;
    };
    let has = |key: &str| keys.contains_key(key);
    !has("apiVersion")
        && ["version", "flags", "resources", "sharing", "imex"]
            .into_iter()
            .any(has)
}

/// Reads such a file. It is about counted pods alone, so the mode is `legacy`.
pub(super) fn read(value: &Value) -> Read {
    let mut read = Read::default();
    read.config.settings.mode = Mode::Legacy;
    read.remarks.push(
        "this is a file of NVIDIA's device plugin, which knows counted pods alone, so the mode is legacy".to_owned(),
    );
    if let Value::Mapping(keys) = value {
        read.group("", keys);
    }
    read
}

impl Read {
    fn group(&mut self, path: &str, keys: &Mapping) {
        for (key, value) in keys {
            let key = key.as_str().map_or_else(|| shown(key), str::to_owned);
            let name = if path.is_empty() {
                key
            } else {
                format!("{path}.{key}")
            };
            if value.is_null() {
                continue;
            }
            if let Value::Mapping(keys) = value
                && GROUPS.contains(&name.as_str())
            {
                self.group(&name, keys);
            } else if name == "version" {
                self.version(value);
            } else if let Some(key) = name.strip_prefix("flags.plugin.")
                && HANDOUT.contains(&key)
            {
                let key = format!("devicePlugin.{key}");
                if let Err(why) = device_plugin::take(&mut self.config, &key, value) {
                    self.mistakes.push((name, value.clone(), why));
                }
            } else if let Some(why) = undone(&name, value) {
                self.remark(&name, value, why);
            }
        }
    }

    fn version(&mut self, value: &Value) {
        if !matches!(value.as_str(), Some("v1" | "")) {
            let why = "of NVIDIA's files this version reads v1 only".to_owned();
            self.mistakes
                .push(("version".to_owned(), value.clone(), why));
        }
    }

    fn remark(&mut self, name: &str, value: &Value, why: &str) {
        if self.remarks.len() < REMARKS_MAX {
            self.remarks
                .push(format!("{name}: {}: {why}", shown(value)));
        }
    }
}

/// Why what a key asks for is not done; `None`: it is done, or asks for nothing.
fn undone(name: &str, value: &Value) -> Option<&'static str> {
    let is = |word: &str| value.as_str() == Some(word);
    let asks_nothing = match value {
        Value::Bool(asked) => !asked,
        Value::String(text) => text.is_empty(),
        Value::Sequence(list) => list.is_empty(),
        Value::Mapping(keys) => keys.is_empty(),
        Value::Null | Value::Number(_) | Value::Tagged(_) => false,
    };
    let (done, why) = match name {
        "flags.migStrategy" => (
            is("none"),
            "MIG instances are not served yet; a GPU is served as a whole",
        ),
        "flags.failOnInitError" => (true, "the daemon waits for the driver, whichever this says"),
        "flags.nvidiaDriverRoot" => (is("/"), "give --driver-root to `gpu-bridge run`"),
        "flags.nvidiaDevRoot" => (is("/"), "give --dev-root to `gpu-bridge run`"),
        "flags.mpsRoot" | "sharing.mps.resources" => (false, "MPS is not served yet"),
        "flags.gdrcopyEnabled" | "flags.gdsEnabled" | "flags.mofedEnabled" => {
            (false, "these devices are not given to containers yet")
        }
        "flags.deviceDiscoveryStrategy" => {
            (is("auto") || is("nvml"), "GPUs are found by NVML alone")
        }
        "flags.useNodeFeatureAPI" => (false, "the daemon does not label nodes"),
        "flags.plugin.nvidiaCTKPath" | "flags.plugin.containerDriverRoot" => {
            (true, "nothing here needs it")
        }
        "flags.plugin.sharedDevicesAllocationPolicy" | "sharing.timeSlicing.resources" => (
            false,
            "sharing a GPU between pods is not served yet: a pod gets whole ones",
        ),
        "resources.gpus" | "resources.mig" => (
            false,
            "the resource is nvidia.com/gpu; NVIDIA's plugin does not rename it either",
        ),
        "imex.channelIDs" | "imex.required" => (false, "IMEX channels are not served yet"),
        name if name.starts_with("flags.gfd") => (false, "the daemon does not label nodes"),
        name if name.starts_with("sharing.") => (
            false,
            "sharing a GPU between pods is not served yet: a pod gets whole ones",
        ),
        _ => return Some("is no key of NVIDIA's file, and means nothing"),
    };
    (!done && !asks_nothing).then_some(why)
}
