//! What a snapshot says.

use bridge_nvml::{Session, Snapshot, Version};
use expect_test::expect;
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

#[tokio::test]
async fn on_an_old_driver_everything_is_known_that_the_driver_knows() {
    let scenario = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fake-nvml/scenarios/a100x4-old-driver.yaml"
    );
    let node = Node::new(&Scenario::load(scenario.as_ref()).unwrap());
    let session = node.session();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.driver_version, "470.256.02");
    assert_eq!(uuids(&snapshot), node.uuids());
    assert_eq!(snapshot.failed, []);
    let gpu = &snapshot.gpus[0];
    assert_eq!(gpu.memory_bytes, Some(40_960 << 20));
    assert_eq!(gpu.addressing_mode, None);
    let idle = session.processes().await.unwrap();
    assert!(idle.iter().all(|gpu| gpu.processes == Ok(vec![])));
}

#[tokio::test]
async fn gpus_that_differ_are_told_apart() {
    let scenario = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fake-nvml/scenarios/mixed.yaml"
    );
    let node = Node::new(&Scenario::load(scenario.as_ref()).unwrap());
    let snapshot = node.session().snapshot().await.unwrap();
    assert_eq!(snapshot.failed, []);
    let lines: Vec<_> = snapshot
        .gpus
        .iter()
        .map(|gpu| {
            format!(
                "{} minor {} {} {} {} {} {} numa {:?} root {} memory {:?} addressing {:?} mig {:?}",
                gpu.index,
                gpu.minor,
                gpu.pci_bus_id,
                gpu.product_name,
                gpu.brand,
                gpu.architecture,
                gpu.cuda_compute_capability,
                gpu.numa_node,
                gpu.pcie_root.as_deref().unwrap_or("-"),
                gpu.memory_bytes.map(|bytes| bytes >> 20),
                gpu.addressing_mode.as_deref(),
                gpu.mig,
            )
        })
        .collect();
    expect![[r#"
        0 minor 0 0000:10:00.0 NVIDIA A100-SXM4-40GB Nvidia Ampere 8.0 numa Some(0) root pci0000:0f memory Some(40960) addressing Some("None") mig Disabled
        1 minor 1 0000:1c:00.0 NVIDIA A100-SXM4-40GB Nvidia Ampere 8.0 numa Some(0) root pci0000:1b memory Some(40960) addressing Some("None") mig Enabled
        2 minor 7 0000:28:00.0 NVIDIA L40S Nvidia Ada Lovelace 8.9 numa None root pci0000:27 memory Some(46068) addressing None mig NotSupported
        3 minor 3 10000:01:00.0 NVIDIA GeForce RTX 4090 GeForceRTX Ada Lovelace 8.9 numa Some(1) root pci10000:00 memory Some(24564) addressing None mig NotSupported
        4 minor 4 0000:40:00.0 NVIDIA GB10 Nvidia Blackwell 12.1 numa Some(1) root pci0000:3f memory None addressing Some("ATS") mig NotSupported
        5 minor 5 0000:4c:00.0 NVIDIA Future GPU Unknown(17) Unknown(13) 10.0 numa Some(1) root pci0000:4b memory Some(189471) addressing Some("ATS") mig Disabled"#]].assert_eq(&lines.join("\n"));
}

#[tokio::test]
async fn without_sysfs_the_numa_node_is_nvmls_and_the_root_is_absent() {
    let node = Node::new(&Scenario::h100(2));
    let mut options = node.options();
    options.sys_root = node.fake.folder().join("nothing");
    let snapshot = Session::spawn(options).unwrap().snapshot().await.unwrap();
    assert_eq!(snapshot.gpus[1].numa_node, Some(1));
    assert_eq!(snapshot.gpus[1].pcie_root, None);
}

#[tokio::test]
async fn a_node_without_gpus_is_empty_and_not_broken() {
    let node = Node::new(&Scenario::h100(0));
    let snapshot = node.session().snapshot().await.unwrap();
    assert_eq!(snapshot.gpus, []);
    assert_eq!(snapshot.failed, []);
}

#[tokio::test]
async fn a_rescan_finds_an_added_gpu_and_a_snapshot_does_not() {
    let mut node = Node::new(&Scenario::h100(7));
    let session = node.session();
    let before = uuids(&session.snapshot().await.unwrap());
    node.fake
        .replace_scenario(&Scenario::h100(7).and_one_more())
        .unwrap();
    assert_eq!(uuids(&session.snapshot().await.unwrap()), before);
    let after = uuids(&session.rescan().await.unwrap());
    assert_eq!(after.len(), 8);
    assert_eq!(after[..7], before);
    assert_eq!(after, node.uuids());
}

#[tokio::test]
async fn a_rescan_finds_a_new_driver() {
    let mut node = Node::new(&Scenario::h100(1));
    let session = node.session();
    session.snapshot().await.unwrap();
    let mut upgraded = Scenario::h100(1);
    upgraded.driver.version = "590.10.01".to_owned();
    node.fake.replace_scenario(&upgraded).unwrap();
    node.fake.install_library().unwrap();
    let snapshot = session.rescan().await.unwrap();
    assert_eq!(snapshot.driver_version, "590.10.01");
}

#[tokio::test]
async fn a_snapshot_asks_each_gpu_each_question_once() {
    let node = Node::new(&Scenario::h100(2));
    let session = node.session();
    session.snapshot().await.unwrap();
    node.fake.start_trace().unwrap();
    session.snapshot().await.unwrap();
    let mut calls = node.fake.trace();
    calls.sort_unstable();
    let lines: Vec<_> = calls
        .chunk_by(|a, b| a == b)
        .map(|same| format!("{} {}", same.len(), same[0]))
        .collect();
    expect![[r#"
        2 nvmlDeviceGetAddressingMode
        2 nvmlDeviceGetArchitecture
        2 nvmlDeviceGetBrand
        2 nvmlDeviceGetCudaComputeCapability
        2 nvmlDeviceGetFieldValues
        2 nvmlDeviceGetMemoryInfo_v2
        2 nvmlDeviceGetMigMode
        2 nvmlDeviceGetMinorNumber
        2 nvmlDeviceGetName
        2 nvmlDeviceGetPciInfo_v3
        2 nvmlDeviceGetUUID
        1 nvmlSystemGetCudaDriverVersion_v2
        1 nvmlSystemGetDriverVersion"#]]
    .assert_eq(&lines.join("\n"));
}

#[tokio::test]
async fn nodes_in_one_process_do_not_see_each_other() {
    let nodes = [1, 2, 3].map(|count| {
        let mut scenario = Scenario::h100(count);
        scenario.seed = format!("node {count}");
        Node::new(&scenario)
    });
    let sessions: Vec<_> = nodes.iter().map(Node::session).collect();
    for (node, session) in nodes.iter().zip(&sessions) {
        assert_eq!(uuids(&session.snapshot().await.unwrap()), node.uuids());
    }
    assert_ne!(nodes[0].uuids()[0], nodes[1].uuids()[0]);
}
