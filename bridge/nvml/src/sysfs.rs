//! What sysfs knows of a PCI device. Both facts are hints for placement, so what cannot be read is absent.

use std::fs;
use std::path::Path;

/// The NUMA node of a PCI device.
///
/// `Some(None)` when sysfs says that it has none (-1), `None` when sysfs does not say.
pub(crate) fn numa_node(sys_root: &Path, pci_bus_id: &str) -> Option<Option<u32>> {
    let file = sys_root
        .join("bus/pci/devices")
        .join(pci_bus_id)
        .join("numa_node");
    let node: i64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    Some(u32::try_from(node).ok())
}

/// The PCIe root complex of a PCI device, for example `pci0000:64`.
///
/// The entry in `bus/pci/devices` is a link to `../../../devices/pci0000:64/…/0000:65:00.0`, whose first part
/// below `devices` is the root complex: the rule of Kubernetes' `dynamic-resource-allocation/deviceattribute`,
/// so that the attribute agrees with that of other drivers on the node.
pub(crate) fn pcie_root(sys_root: &Path, pci_bus_id: &str) -> Option<String> {
    let link = fs::read_link(sys_root.join("bus/pci/devices").join(pci_bus_id)).ok()?;
    link.components()
        .skip_while(|component| component.as_os_str() != "devices")
        .nth(1)?
        .as_os_str()
        .to_str()
        .filter(|name| is_pcie_root(name))
        .map(str::to_owned)
}

/// `pci` with a domain of at least four and a bus of two hexadecimal digits.
fn is_pcie_root(name: &str) -> bool {
    let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| {
            domain.len() >= 4 && hexadecimal(domain) && bus.len() == 2 && hexadecimal(bus)
        })
}

/// An NVML bus id (`00000000:65:00.0`, in either case) as sysfs writes it (`0000:65:00.0`).
pub(crate) fn pci_bus_id(nvml_bus_id: &str) -> Option<String> {
    let (domain, rest) = nvml_bus_id.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_written_as_in_sysfs() {
        for (nvml, sysfs) in [
            ("00000000:65:00.0", "0000:65:00.0"),
            ("00000000:DF:00.0", "0000:df:00.0"),
            ("0000:0F:1C.3", "0000:0f:1c.3"),
            // A domain above ffff has five digits in sysfs.
            ("00010000:01:00.0", "10000:01:00.0"),
        ] {
            assert_eq!(pci_bus_id(nvml).as_deref(), Some(sysfs));
        }
        assert_eq!(pci_bus_id("65"), None);
        assert_eq!(pci_bus_id("xyz:65:00.0"), None);
    }

    #[test]
    fn only_root_complexes_are_taken_for_one() {
        assert!(is_pcie_root("pci0000:64"));
        assert!(is_pcie_root("pci10000:00"));
        assert!(!is_pcie_root("0000:64:01.0"));
        assert!(!is_pcie_root("pci0000:64:01.0"));
        assert!(!is_pcie_root("pci"));
        assert!(!is_pcie_root("platform"));
    }
}
