//! How a container is told which units it was given: the device list strategies of NVIDIA's device plugin, with its
//! names and values, so that a container runtime that was set up for that plugin understands this one.
//!
//! Source: NVIDIA k8s-device-plugin v0.20.0, `internal/plugin/server.go` and `api/config/v1`.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::UnitId;

/// The variable that NVIDIA's container runtime reads.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Where NVIDIA's container runtime looks for mounts that name devices.
const VOLUME_MOUNTS: &str = "/var/run/nvidia-container-devices";
/// What is mounted there: the name counts, and nothing is to be read.
const NOTHING: &str = "/dev/null";
/// Container runtimes read annotations that begin with this as lists of CDI devices.
const CDI_PREFIX: &str = "cdi.k8s.io/";
/// What follows the prefix: the plugin, and something that no other annotation of the container has.
const CDI_KEY: &str = "nvidia-device-plugin_";
/// The longest name behind the `/` of an annotation's key.
const ANNOTATION_NAME_LIMIT: usize = 63;
/// Names the units where the rest of an answer names indices alone, which move: a daemon that has lost its ledger
/// learns from the answers that the kubelet has stored who has what. No runtime reads it.
const OWN_ANNOTATION: &str = "gpu-bridge.dev/gpus";

/// A way to tell a container's runtime about devices (`deviceListStrategy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ListStrategy {
    /// CDI device names in the field that CRI has for them.
    CdiCri,
    /// CDI device names in an annotation, for runtimes from before that field.
    CdiAnnotations,
    /// The environment variable `NVIDIA_VISIBLE_DEVICES`, which NVIDIA's container runtime acts on.
    Envvar,
    /// Mounts below `/var/run/nvidia-container-devices`, which NVIDIA's container runtime acts on and which a pod's
    /// author can't set as easily as a variable.
    VolumeMounts,
}

impl ListStrategy {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::CdiCri,
        Self::CdiAnnotations,
        Self::Envvar,
        Self::VolumeMounts,
    ];

    /// The word in the configuration, NVIDIA's own.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CdiCri => "cdi-cri",
            Self::CdiAnnotations => "cdi-annotations",
            Self::Envvar => "envvar",
            Self::VolumeMounts => "volume-mounts",
        }
    }

    fn is_cdi(self) -> bool {
        match self {
            Self::CdiCri | Self::CdiAnnotations => true,
            Self::Envvar | Self::VolumeMounts => false,
        }
    }
}

/// How variable and mounts name a unit (`deviceIDStrategy`). CDI names have the UUID always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum IdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By NVML's index; by UUID where that is not known.
    Index,
}

impl IdStrategy {
    /// The word in the configuration, NVIDIA's own.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uuid => "uuid",
            Self::Index => "index",
        }
    }
}

/// Whether an answer names device nodes too (`passDeviceSpecs`): the kubelet then knows what the container may open, and
/// goes on allowing it when it writes the container's cgroup anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum DeviceSpecs {
    /// It does not.
    #[default]
    Omitted,
    /// It does, unless all strategies are CDI's, which names them itself.
    Passed,
}

/// How containers of counted pods are told of their units. Claims have CDI names always.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Handout {
    /// All of these at once; not empty.
    pub strategies: BTreeSet<ListStrategy>,
    /// How a unit is named.
    pub ids: IdStrategy,
    /// Whether device nodes are named.
    pub device_specs: DeviceSpecs,
    /// What the key of the annotation with CDI names begins with: a DNS subdomain and a `/`.
    pub cdi_annotation_prefix: String,
}

impl Default for Handout {
    fn default() -> Self {
        Self {
            strategies: BTreeSet::from([ListStrategy::CdiCri]),
            ids: IdStrategy::default(),
            device_specs: DeviceSpecs::default(),
            cdi_annotation_prefix: CDI_PREFIX.to_owned(),
        }
    }
}

/// A unit that a container was given, by all its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandedUnit {
    /// The unit.
    pub unit: UnitId,
    /// Its fully qualified CDI name.
    pub cdi_device: String,
    /// NVML's index now, where it is known.
    pub index: Option<u32>,
}

/// Something of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPath {
    /// Where the container finds it.
    pub container_path: String,
    /// Where the host has it.
    pub host_path: String,
}

/// What the kubelet does with a container (`ContainerAllocateResponse`, kubelet `deviceplugin/v1beta1/api.proto`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerEdits {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Annotations of the container, which its runtime sees.
    pub annotations: BTreeMap<String, String>,
    /// Bind mounts.
    pub mounts: Vec<HostPath>,
    /// Device nodes, to be read and written.
    pub device_nodes: Vec<HostPath>,
    /// Fully qualified CDI names.
    pub cdi_devices: Vec<String>,
}

impl Handout {
    /// Whether device nodes are named beside the list of devices.
    #[must_use]
    pub fn names_device_nodes(&self) -> bool {
        self.device_specs == DeviceSpecs::Passed && !self.strategies.iter().all(|it| it.is_cdi())
    }

    /// What a container is told that was given these units, in the order in which the kubelet asked. `nodes` are their
    /// device nodes, which [are named](Self::names_device_nodes) or not. The same units are told the same.
    #[must_use]
    pub fn edits(&self, units: &[HandedUnit], nodes: Vec<HostPath>) -> ContainerEdits {
        let mut edits = ContainerEdits::default();
        for strategy in &self.strategies {
            match strategy {
                ListStrategy::CdiCri => edits.cdi_devices = cdi_names(units),
                ListStrategy::CdiAnnotations => {
                    let key = format!("{}{}", self.cdi_annotation_prefix, annotation_name(units));
                    edits.annotations.insert(key, cdi_names(units).join(","));
                }
                ListStrategy::Envvar => {
                    let list = self.names(units).join(",");
                    edits.envs.insert(VISIBLE_DEVICES.to_owned(), list);
                }
                // After the other, whose variable it replaces: the runtime reads either the list or the mounts.
                ListStrategy::VolumeMounts => {
                    let place = VOLUME_MOUNTS.to_owned();
                    edits.envs.insert(VISIBLE_DEVICES.to_owned(), place);
                    edits.mounts = self.names(units).iter().map(mount_of).collect();
                }
            }
        }
        if self.names_device_nodes() {
            edits.device_nodes = nodes;
        }
        if self.ids == IdStrategy::Index && !self.strategies.iter().any(|it| it.is_cdi()) {
            let names = cdi_names(units).join(",");
            edits.annotations.insert(OWN_ANNOTATION.to_owned(), names);
        }
        edits
    }

    /// The units as variable and mounts name them, each once.
    fn names(&self, units: &[HandedUnit]) -> Vec<String> {
        let name = |unit: &HandedUnit| match (self.ids, unit.index) {
            (IdStrategy::Index, Some(index)) => index.to_string(),
            (IdStrategy::Index, None) | (IdStrategy::Uuid, _) => unit.unit.to_string(),
        };
        each_once(units.iter().map(name))
    }
}

fn cdi_names(units: &[HandedUnit]) -> Vec<String> {
    each_once(units.iter().map(|unit| unit.cdi_device.clone()))
}

fn each_once(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

fn mount_of(name: &String) -> HostPath {
    HostPath {
        container_path: format!("{VOLUME_MOUNTS}/{name}"),
        host_path: NOTHING.to_owned(),
    }
}

/// NVIDIA's plugin puts a random UUID behind its name. That of the first unit is as good, since no two containers that
/// run have it, and the same question gets the same answer.
fn annotation_name(units: &[HandedUnit]) -> String {
    let first = units.first().map_or("none", |unit| unit.unit.as_str());
    let uuid = first.split_once('-').map_or(first, |(_, uuid)| uuid);
    let mut name = format!("{CDI_KEY}{uuid}");
    name.truncate(ANNOTATION_NAME_LIMIT);
    let end = name.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    end.to_owned()
}

#[cfg(test)]
mod tests {
    use ListStrategy::{CdiAnnotations, CdiCri, Envvar, VolumeMounts};

    use super::*;

    const A: &str = "GPU-aaaaaaaa-0000-4000-8000-000000000000";
    const B: &str = "GPU-bbbbbbbb-0000-4000-8000-000000000000";

    fn handed(uuid: &str, index: Option<u32>) -> HandedUnit {
        HandedUnit {
            unit: UnitId::new(uuid).unwrap(),
            cdi_device: format!("gpu-bridge.dev/gpu={uuid}"),
            index,
        }
    }

    /// Two units, one of them twice, as replicas of it would be.
    fn units() -> Vec<HandedUnit> {
        vec![handed(B, Some(3)), handed(A, Some(0)), handed(B, Some(3))]
    }

    fn by(strategies: &[ListStrategy]) -> Handout {
        Handout {
            strategies: strategies.iter().copied().collect(),
            ..Handout::default()
        }
    }

    fn nodes() -> Vec<HostPath> {
        let node = |name: &str| HostPath {
            container_path: format!("/dev/{name}"),
            host_path: format!("/run/nvidia/driver/dev/{name}"),
        };
        ["nvidiactl", "nvidia3"].map(node).to_vec()
    }

    /// An answer in words, one thing a line.
    fn said(edits: &ContainerEdits) -> Vec<String> {
        let ContainerEdits {
            envs,
            annotations,
            mounts,
            device_nodes,
            cdi_devices,
        } = edits;
        let envs = envs.iter().map(|(key, value)| format!("env {key}={value}"));
        let annotations = annotations.iter();
        let annotations = annotations.map(|(key, value)| format!("annotation {key}: {value}"));
        let path = |kind: &str, path: &HostPath| {
            format!("{kind} {} at {}", path.host_path, path.container_path)
        };
        let mounts = mounts.iter().map(|it| path("mount", it));
        let nodes = device_nodes.iter().map(|it| path("node", it));
        let cdi = cdi_devices.iter().map(|name| format!("cdi {name}"));
        let first = envs.chain(annotations).chain(mounts);
        first.chain(nodes).chain(cdi).collect()
    }

    #[test]
    fn each_strategy_says_what_nvidias_plugin_says() {
        let cdi = format!("gpu-bridge.dev/gpu={B},gpu-bridge.dev/gpu={A}");
        let annotation = format!(
            "annotation cdi.k8s.io/nvidia-device-plugin_bbbbbbbb-0000-4000-8000-000000000000: {cdi}"
        );
        let cri = [
            format!("cdi gpu-bridge.dev/gpu={B}"),
            format!("cdi gpu-bridge.dev/gpu={A}"),
        ];
        let place = "/var/run/nvidia-container-devices";
        let mounts = [
            format!("env NVIDIA_VISIBLE_DEVICES={place}"),
            format!("mount /dev/null at {place}/{B}"),
            format!("mount /dev/null at {place}/{A}"),
        ];
        let env = format!("env NVIDIA_VISIBLE_DEVICES={B},{A}");
        let table: [(&[ListStrategy], Vec<String>); 6] = [
            (&[CdiCri], cri.to_vec()),
            (&[CdiAnnotations], vec![annotation.clone()]),
            (&[Envvar], vec![env.clone()]),
            (&[VolumeMounts], mounts.to_vec()),
            // The list of mounts is read in place of the variable.
            (&[Envvar, VolumeMounts], mounts.to_vec()),
            (
                &[Envvar, CdiCri, CdiAnnotations],
                [vec![env, annotation], cri.to_vec()].concat(),
            ),
        ];
        for (strategies, expected) in table {
            let edits = by(strategies).edits(&units(), nodes());
            assert_eq!(said(&edits), expected, "{strategies:?}");
        }
        assert_eq!(Handout::default(), by(&[CdiCri]));
    }

    #[test]
    fn an_index_stands_for_the_uuid_where_it_is_known_and_an_annotation_says_which_unit_that_was() {
        let handout = |strategy| Handout {
            ids: IdStrategy::Index,
            ..by(&[strategy])
        };
        let own = format!(
            "annotation gpu-bridge.dev/gpus: gpu-bridge.dev/gpu={B},gpu-bridge.dev/gpu={A}"
        );
        let edits = handout(Envvar).edits(&units(), Vec::new());
        let env = "env NVIDIA_VISIBLE_DEVICES=3,0".to_owned();
        assert_eq!(said(&edits), [env, own]);
        let edits = handout(VolumeMounts).edits(&units(), Vec::new());
        let mounts: Vec<&str> = edits.mounts.iter().map(|it| &*it.container_path).collect();
        assert_eq!(
            mounts,
            [
                "/var/run/nvidia-container-devices/3",
                "/var/run/nvidia-container-devices/0"
            ]
        );
        // A unit that NVML does not show just now, and names that carry the UUID anyway.
        let edits = handout(Envvar).edits(&[handed(A, None)], Vec::new());
        assert_eq!(edits.envs[VISIBLE_DEVICES], A);
        let edits = handout(CdiCri).edits(&units(), Vec::new());
        assert_eq!(edits, by(&[CdiCri]).edits(&units(), Vec::new()));
    }

    #[test]
    fn device_nodes_are_named_if_the_admin_wants_it_and_cdi_does_not_do_it() {
        for (strategies, specs, named) in [
            (vec![Envvar], DeviceSpecs::Omitted, false),
            (vec![Envvar], DeviceSpecs::Passed, true),
            (vec![VolumeMounts], DeviceSpecs::Passed, true),
            (vec![Envvar, CdiCri], DeviceSpecs::Passed, true),
            (vec![CdiCri, CdiAnnotations], DeviceSpecs::Passed, false),
        ] {
            let handout = Handout {
                device_specs: specs,
                ..by(&strategies)
            };
            let expected = if named { nodes() } else { Vec::new() };
            let edits = handout.edits(&units(), nodes());
            assert_eq!(edits.device_nodes, expected, "{strategies:?} {specs:?}");
            assert_eq!(handout.names_device_nodes(), named);
        }
    }

    #[test]
    fn the_key_of_an_annotation_is_one_whatever_the_unit_is_called() {
        let handout = Handout {
            cdi_annotation_prefix: "nvidia.cdi.k8s.io/".to_owned(),
            ..by(&[CdiAnnotations])
        };
        for uuid in ["GPU-0", "GPU-", "_", &"x".repeat(63), &"-".repeat(63)] {
            let edits = handout.edits(&[handed(uuid, None)], Vec::new());
            let key = edits.annotations.keys().next().unwrap();
            let name = key.strip_prefix("nvidia.cdi.k8s.io/").unwrap();
            let ends = |c: char| c.is_ascii_alphanumeric();
            assert!(name.len() <= 63, "{name}");
            assert!(name.starts_with(ends) && name.ends_with(ends), "{name}");
        }
    }
}
