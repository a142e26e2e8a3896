//! A GPU for tests in which nothing depends on what it is.

use bridge_core::{Gpu, UnitId};

/// An H100 without a NUMA node.
pub(crate) fn h100(number: u32, uuid: UnitId) -> Gpu {
    Gpu {
        uuid,
        pci_bus_id: format!("0000:{number:02x}:00.0"),
        minor: number,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory_bytes: 80 << 30,
        driver_version: "580.65.06".to_owned(),
        cuda_driver_version: (13, 0),
        numa_node: None,
        pcie_root: None,
        addressing_mode: None,
    }
}
