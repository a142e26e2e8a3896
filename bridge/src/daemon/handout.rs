//! What a container is told of the units that it was given: the configuration in force, what NVML says of the GPUs, and
//! where their device nodes are, brought together for the counted face.

use bridge_core::{ContainerEdits, HandedUnit};
use tokio::sync::watch;

use crate::arbiter::GrantedDevice;
use crate::cdi::Roots;
use crate::config::live::Current;
use crate::device_plugin::TellContainer;
use crate::inventory::Scan;

/// Goes by the newest configuration and scan at each answer.
pub(super) fn tell(
    config: watch::Receiver<Current>,
    scans: watch::Receiver<Scan>,
    roots: Roots,
) -> TellContainer {
    TellContainer::new(move |granted| {
        let config = config.borrow().config.clone();
        edits(&config.handout, &scans.borrow(), &roots, granted)
    })
}

fn edits(
    handout: &bridge_core::Handout,
    scan: &Scan,
    roots: &Roots,
    granted: &[GrantedDevice],
) -> ContainerEdits {
    let mut minors = Vec::new();
    let units: Vec<HandedUnit> = granted
        .iter()
        .map(|device| {
            let unit = &device.grant.unit;
            let seen = scan.gpu(unit);
            minors.extend(seen.map(|(gpu, _)| gpu.minor));
            HandedUnit {
                unit: unit.clone(),
                cdi_device: device.cdi_device.clone(),
                index: seen.map(|(_, index)| index),
            }
        })
        .collect();
    let nodes = if handout.names_device_nodes() {
        roots.host_nodes(&minors)
    } else {
        Vec::new()
    };
    handout.edits(&units, nodes)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;

    use bridge_core::{
        DeviceId, DeviceSpecs, Gpu, Grant, Handout, IdStrategy, ListStrategy, UnitId,
    };

    use super::*;

    fn gpu(unit: &UnitId, minor: u32) -> Gpu {
        Gpu {
            uuid: unit.clone(),
            pci_bus_id: "0000:65:00.0".to_owned(),
            minor,
            product_name: String::new(),
            brand: String::new(),
            architecture: String::new(),
            compute_capability: (9, 0),
            memory_bytes: 0,
            driver_version: String::new(),
            cuda_driver_version: (13, 0),
            numa_node: None,
            pcie_root: None,
            addressing_mode: None,
        }
    }

    #[test]
    fn index_and_nodes_are_those_of_the_unit_that_was_given_and_not_of_the_id() {
        let (unit, other) = (UnitId::new("GPU-b").unwrap(), UnitId::new("GPU-a").unwrap());
        let scan = Scan::Seen {
            gpus: vec![gpu(&other, 0), gpu(&unit, 3)],
            indices: BTreeMap::from([(other.clone(), 0), (unit.clone(), 1)]),
            topology: Arc::default(),
            failed: Vec::new(),
        };
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots::in_one(folder.path());
        let handout = Handout {
            strategies: BTreeSet::from([ListStrategy::Envvar]),
            ids: IdStrategy::Index,
            device_specs: DeviceSpecs::Passed,
            ..Handout::default()
        };
        let granted = GrantedDevice {
            grant: Grant {
                id: DeviceId::of_unit(other),
                unit,
            },
            cdi_device: "gpu-bridge.dev/gpu=GPU-b".to_owned(),
        };
        let edits = edits(&handout, &scan, &roots, std::slice::from_ref(&granted));
        assert_eq!(edits.envs["NVIDIA_VISIBLE_DEVICES"], "1");
        let nodes: Vec<(&str, &str)> = edits
            .device_nodes
            .iter()
            .map(|it| (&*it.container_path, &*it.host_path))
            .collect();
        let host = |name: &str| format!("{}/dev/{name}", folder.path().display());
        let names = ["nvidiactl", "nvidia-uvm", "nvidia3"];
        let wanted = names.map(|name| (format!("/dev/{name}"), host(name)));
        let wanted = wanted.each_ref().map(|(path, host)| (&**path, &**host));
        assert_eq!(nodes, wanted);
        // While NVML does not answer the UUID is all that is known.
        let edits = super::edits(&handout, &Scan::Pending, &roots, &[granted]);
        assert_eq!(edits.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-b");
    }
}
