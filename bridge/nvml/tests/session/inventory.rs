//! What a snapshot says.

use bridge_nvml::{Snapshot, Version};
use fake_nvml::Scenario;

use crate::Node;

fn uuids(snapshot: &Snapshot) -> Vec<String> {
    snapshot.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

#[tokio::test]
async fn nodes_of_1_8_and_16_gpus_are_listed_in_full() {
    for count in [1, 8, 16] {
        let node = Node::new(&Scenario::h100(count));
        let snapshot = node.session().snapshot().await.unwrap();
        assert_eq!(snapshot.driver_version, "580.95.05");
        assert_eq!(
            snapshot.cuda_driver_version,
            Some(Version {
                major: 13,
                minor: 0
            })
        );
        assert_eq!(uuids(&snapshot), node.uuids());
        assert_eq!(snapshot.gpus.len(), count as usize);
        assert_eq!(snapshot.failed, []);
    }
}

#[tokio::test]
async fn a_gpu_is_described_as_nvidias_dra_driver_does() {
    let node = Node::new(&Scenario::h100(8));
    let snapshot = node.session().snapshot().await.unwrap();
    let gpu = &snapshot.gpus[4];
    assert_eq!(gpu.index, 4);
    assert_eq!(gpu.minor, 4);
    assert_eq!(gpu.pci_bus_id, "0000:40:00.0");
    assert_eq!(gpu.pcie_root.as_deref(), Some("pci0000:3f"));
    assert_eq!(gpu.numa_node, Some(1));
    assert_eq!(gpu.product_name, "NVIDIA H100 80GB HBM3");
    assert_eq!(gpu.brand, "Nvidia");
    assert_eq!(gpu.architecture, "Hopper");
    assert_eq!(gpu.cuda_compute_capability.to_string(), "9.0");
    assert_eq!(gpu.memory_bytes, Some(81559 << 20));
    assert_eq!(gpu.addressing_mode.as_deref(), Some("HMM"));
}
