//! How the GPUs are connected.

use std::path::Path;
use std::time::Duration;

use bridge_nvml::{CommonAncestor, GpuPair};
use fake_nvml::{Fault, Scenario};

use crate::{DEADLINE, Node};

fn shipped(name: &str) -> Node {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-nvml/scenarios");
    Node::new(&Scenario::load(&folder.join(name)).unwrap())
}

/// The pair of two GPUs, by their indices.
fn between<'a>(node: &Node, pairs: &'a [GpuPair], one: usize, other: usize) -> &'a GpuPair {
    let uuids = node.uuids();
    let both = [&uuids[one], &uuids[other]];
    let is_it = |pair: &&GpuPair| both.contains(&&pair.one) && both.contains(&&pair.other);
    pairs.iter().find(is_it).unwrap()
}

#[tokio::test]
async fn links_and_common_ancestors_are_those_of_the_machine() {
    let node = shipped("dgx-1v.yaml");
    let pairs = node.session().topology().await.unwrap();
    assert_eq!(pairs.len(), 28);
    for (one, other, nvlinks, ancestor) in [
        (0, 1, 1, CommonAncestor::Switch),
        (2, 3, 2, CommonAncestor::Switch),
        (0, 3, 2, CommonAncestor::HostBridge),
        (0, 4, 2, CommonAncestor::System),
        (0, 5, 0, CommonAncestor::System),
    ] {
        let pair = between(&node, &pairs, one, other);
        let told = (pair.nvlinks, pair.common_ancestor);
        assert_eq!(told, (nvlinks, Some(ancestor)), "{one} {other}");
    }
}

#[tokio::test]
async fn links_to_switches_connect_all_gpus_that_have_some() {
    let node = shipped("dgx-h100.yaml");
    let pairs = node.session().topology().await.unwrap();
    assert_eq!(pairs.len(), 28);
    assert!(pairs.iter().all(|pair| pair.nvlinks == 18), "{pairs:?}");
    let near = between(&node, &pairs, 4, 7).common_ancestor;
    assert_eq!(near, Some(CommonAncestor::Node));
    // A driver that does not know what is at the other end says no more than its bus id, which no GPU has.
    node.fault("nvmlDeviceGetNvLinkRemoteDeviceType", Fault::error(3));
    let pairs = node.session().topology().await.unwrap();
    assert!(pairs.iter().all(|pair| pair.nvlinks == 18), "{pairs:?}");
}

#[tokio::test]
async fn switches_of_both_kinds_are_told_on_a_machine_with_sixteen_gpus() {
    let node = shipped("dgx-2.yaml");
    let pairs = node.session().topology().await.unwrap();
    assert_eq!(pairs.len(), 120);
    assert!(pairs.iter().all(|pair| pair.nvlinks == 6), "{pairs:?}");
    for (one, other, ancestor) in [
        (14, 15, CommonAncestor::Switch),
        (13, 14, CommonAncestor::Switches),
        (8, 15, CommonAncestor::Node),
        (7, 8, CommonAncestor::System),
    ] {
        let near = between(&node, &pairs, one, other).common_ancestor;
        assert_eq!(near, Some(ancestor), "{one} {other}");
    }
}

#[tokio::test]
async fn what_nvml_does_not_say_is_no_connection_and_no_error() {
    for call in [
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
        "nvmlDeviceGetPciInfo_v3",
    ] {
        // Not supported, lost, unknown.
        for code in [3, 15, 999] {
            let node = shipped("dgx-1v.yaml");
            node.fault(call, Fault::error(code));
            let pairs = node.session().topology().await.unwrap();
            assert_eq!(pairs.len(), 28, "{call} {code}");
            let ancestors = pairs.iter().filter(|it| it.common_ancestor.is_some());
            let expected = if call.contains("Ancestor") { 0 } else { 28 };
            assert_eq!(ancestors.count(), expected, "{call} {code}");
        }
    }
    // GPUs that do not say who they are are in no pair.
    let node = shipped("dgx-1v.yaml");
    node.fault("nvmlDeviceGetUUID", Fault::error(15).times(2));
    assert_eq!(node.session().topology().await.unwrap().len(), 15);
    let node = Node::new(&Scenario::h100(1));
    assert_eq!(node.session().topology().await.unwrap(), []);
}

#[tokio::test]
async fn processes_are_told_while_the_topology_is_still_being_read() {
    let node = shipped("dgx-h100.yaml");
    let session = node.session();
    session.snapshot().await.unwrap();
    // A GPU takes two seconds, and all of them a quarter of a minute.
    let slow = Fault::delay(Duration::from_millis(100));
    node.fault("nvmlDeviceGetNvLinkState", slow);
    let reader = session.clone();
    let reading = tokio::spawn(async move { reader.topology().await });
    let begun = async {
        while node
            .fake
            .calls_that_met_the_fault("nvmlDeviceGetNvLinkState")
            == 0
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, begun).await.unwrap();
    assert_eq!(session.processes().await.unwrap().len(), 8);
    assert!(!reading.is_finished());
    node.fake.clear_fault("nvmlDeviceGetNvLinkState").unwrap();
    assert_eq!(reading.await.unwrap().unwrap().len(), 28);
}
