//! Which GPUs a container was given, from the answer that a device plugin gave for it: ours, or NVIDIA's with any of
//! its strategies.
//!
//! Source of the forms: NVIDIA k8s-device-plugin, `internal/plugin/server.go` and `internal/cdi`.

use std::collections::BTreeSet;

use bridge_core::UnitId;
use legacy_proto::deviceplugin::ContainerAllocateResponse;

/// Strategy `envvar`.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Strategy `volume-mounts`: a mount below for each GPU.
const VOLUME_MOUNTS: &str = "/var/run/nvidia-container-devices/";
/// Name of a GPU's device node before its minor.
const DEVICE_NODE: &str = "nvidia";
/// What the kinds of CDI devices that are GPUs end in: `gpu-bridge.dev/gpu`, `nvidia.com/gpu`,
/// `k8s.device-plugin.nvidia.com/gpu`, ... Other classes, such as `gds`, name no GPU.
const CDI_CLASS: &str = "/gpu";
/// What the UUIDs of GPUs and of MIG instances begin with. Such a name is exact even if this node has no such GPU now.
const UUID_PREFIXES: [&str; 2] = ["GPU-", "MIG-"];

/// The units that an answer names without doubt; `minors` are the units of this node with their device minors.
///
/// An index is no such name: indices move when a GPU drops out.
pub(super) fn units(
    answer: &ContainerAllocateResponse,
    minors: &[(UnitId, u32)],
) -> BTreeSet<UnitId> {
    let visible = answer.envs.get(VISIBLE_DEVICES);
    let from_env = visible.into_iter().flat_map(|value| value.split(','));
    let from_mounts = answer
        .mounts
        .iter()
        .filter_map(|mount| mount.container_path.strip_prefix(VOLUME_MOUNTS));
    let cdi = answer.cdi_devices.iter().map(|device| device.name.as_str());
    let annotated = answer
        .annotations
        .values()
        .flat_map(|value| value.split(','));
    let from_cdi = cdi.chain(annotated).filter_map(|name| {
        let (kind, device) = name.split_once('=')?;
        kind.ends_with(CDI_CLASS).then_some(device)
    });
    let named = from_env
        .chain(from_mounts)
        .chain(from_cdi)
        .filter_map(|name| exact(name.trim(), minors));
    let from_nodes = answer.devices.iter().filter_map(|device| {
        let (_, node) = device.host_path.rsplit_once('/')?;
        let minor: u32 = node.strip_prefix(DEVICE_NODE)?.parse().ok()?;
        let unit = minors.iter().find(|(_, known)| *known == minor);
        unit.map(|(unit, _)| unit.clone())
    });
    named.chain(from_nodes).collect()
}

/// How many GPUs an answer names by index, if it names all that it names so: `deviceIDStrategy: index` of NVIDIA's
/// plugin. Of a MIG instance it is `<GPU>:<instance>`.
pub(super) fn indices(answer: &ContainerAllocateResponse) -> usize {
    let visible = answer.envs.get(VISIBLE_DEVICES);
    let from_env: Vec<&str> = visible.into_iter().flat_map(|it| it.split(',')).collect();
    let cdi = answer.cdi_devices.iter().map(|it| it.name.as_str());
    let annotated = answer.annotations.values().flat_map(|it| it.split(','));
    let from_cdi = cdi.chain(annotated).filter_map(|name| {
        let (kind, device) = name.split_once('=')?;
        kind.ends_with(CDI_CLASS).then_some(device)
    });
    let from_cdi: Vec<&str> = from_cdi.collect();
    // With CDI the variable says `void`.
    let named = if from_cdi.is_empty() {
        from_env
    } else {
        from_cdi
    };
    let is_index = |name: &&str| name.split(':').all(|part| part.parse::<u32>().is_ok());
    if !named.iter().all(is_index) {
        return 0;
    }
    named.into_iter().collect::<BTreeSet<_>>().len()
}

fn exact(name: &str, minors: &[(UnitId, u32)]) -> Option<UnitId> {
    let unit = UnitId::new(name).ok()?;
    let is_uuid = UUID_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let known = minors.iter().any(|(known, _)| *known == unit);
    (is_uuid || known).then_some(unit)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use legacy_proto::deviceplugin::{CdiDevice, DeviceSpec, Mount};

    use super::*;

    fn named(answer: &ContainerAllocateResponse) -> Vec<String> {
        let minors = [
            (UnitId::new("GPU-a").unwrap(), 0),
            (UnitId::new("GPU-b").unwrap(), 3),
        ];
        let units = units(answer, &minors);
        units.iter().map(ToString::to_string).collect()
    }

    fn env(value: &str) -> ContainerAllocateResponse {
        ContainerAllocateResponse {
            envs: HashMap::from([(VISIBLE_DEVICES.to_owned(), value.to_owned())])
                .into_iter()
                .collect(),
            ..ContainerAllocateResponse::default()
        }
    }

    fn cdi(names: &[&str]) -> ContainerAllocateResponse {
        ContainerAllocateResponse {
            cdi_devices: names
                .iter()
                .map(|name| CdiDevice {
                    name: (*name).to_owned(),
                })
                .collect(),
            ..ContainerAllocateResponse::default()
        }
    }

    #[test]
    fn the_env_variable_names_uuids_and_nothing_else() {
        assert_eq!(named(&env("GPU-b,GPU-a")), ["GPU-a", "GPU-b"]);
        assert_eq!(named(&env("GPU-gone")), ["GPU-gone"]);
        assert_eq!(named(&env("MIG-1")), ["MIG-1"]);
        for none in [
            "0,1",
            "all",
            "void",
            "",
            "/var/run/nvidia-container-devices",
        ] {
            assert!(named(&env(none)).is_empty(), "{none}");
        }
    }

    #[test]
    fn indices_are_counted_where_nothing_else_is_named() {
        for (value, count) in [
            ("0", 1),
            ("3,1", 2),
            ("1,1", 1),
            ("0:1,0:2", 2),
            ("0,GPU-a", 0),
            ("all", 0),
            ("void", 0),
            ("", 0),
        ] {
            assert_eq!(indices(&env(value)), count, "{value}");
        }
        assert_eq!(indices(&ContainerAllocateResponse::default()), 0);
        let mut answer = cdi(&[
            "k8s.device-plugin.nvidia.com/gpu=2",
            "k8s.device-plugin.nvidia.com/gds=all",
        ]);
        answer.envs = env("void").envs;
        assert_eq!(indices(&answer), 1);
        assert_eq!(indices(&cdi(&["gpu-bridge.dev/gpu=GPU-a"])), 0);
    }

    #[test]
    fn cdi_names_of_both_plugins_name_units() {
        assert_eq!(named(&cdi(&["gpu-bridge.dev/gpu=GPU-a"])), ["GPU-a"]);
        let nvidia = [
            "k8s.device-plugin.nvidia.com/gpu=GPU-b",
            "k8s.device-plugin.nvidia.com/gds=all",
        ];
        assert_eq!(named(&cdi(&nvidia)), ["GPU-b"]);
        assert!(named(&cdi(&["nvidia.com/gpu=0", "nvidia.com/gpu=all"])).is_empty());
    }

    #[test]
    fn annotations_mounts_and_device_nodes_name_units() {
        let annotated = ContainerAllocateResponse {
            annotations: [(
                "cdi.k8s.io/nvidia-device-plugin_1".to_owned(),
                "k8s.device-plugin.nvidia.com/gpu=GPU-a,k8s.device-plugin.nvidia.com/gpu=GPU-b"
                    .to_owned(),
            )]
            .into_iter()
            .collect(),
            ..ContainerAllocateResponse::default()
        };
        assert_eq!(named(&annotated), ["GPU-a", "GPU-b"]);

        let mut mounted = env("/var/run/nvidia-container-devices");
        mounted.mounts = ["GPU-a", "imex/0"]
            .map(|name| Mount {
                container_path: format!("{VOLUME_MOUNTS}{name}"),
                host_path: "/dev/null".to_owned(),
                ..Mount::default()
            })
            .to_vec();
        assert_eq!(named(&mounted), ["GPU-a"]);

        let mut nodes = env("1");
        nodes.devices = ["nvidiactl", "nvidia-uvm", "nvidia3", "nvidia7"]
            .map(|name| DeviceSpec {
                host_path: format!("/run/nvidia/driver/dev/{name}"),
                ..DeviceSpec::default()
            })
            .to_vec();
        assert_eq!(named(&nodes), ["GPU-b"]);
    }
}
