//! Libraries that are missing, GPUs that are lost, drivers that hang.

use bridge_nvml::{Code, Error};
use fake_nvml::Scenario;

use crate::Node;

#[tokio::test]
async fn a_library_that_is_missing_is_named_and_found_when_it_appears() {
    let node = Node::without_library(&Scenario::h100(8));
    let session = node.session();
    let error = session.snapshot().await.unwrap_err();
    assert!(matches!(error, Error::LibraryNotLoaded { .. }), "{error:?}");
    let text = error.to_string();
    let path = node.fake.library().display().to_string();
    assert!(text.contains(&path), "{text}");
    assert!(text.contains("--nvml-library"), "{text}");

    node.fake.install_library().unwrap();
    assert_eq!(session.snapshot().await.unwrap().gpus.len(), 8);
}

#[tokio::test]
async fn a_lost_gpu_is_reported_and_the_others_work() {
    let node = Node::new(&Scenario::h100(8));
    let session = node.session();
    let lost = &node.fake.gpus()[2];
    assert_eq!(session.snapshot().await.unwrap().gpus.len(), 8);

    node.fake.lose(&lost.uuid).unwrap();
    // The second snapshot starts NVML anew, so that the GPU has not even a handle.
    for _ in 0..2 {
        let snapshot = session.snapshot().await.unwrap();
        assert_eq!(snapshot.gpus.len(), 7);
        assert_eq!(snapshot.failed.len(), 1);
        assert_eq!(snapshot.failed[0].index, 2);
        assert_eq!(snapshot.failed[0].uuid.as_ref(), Some(&lost.uuid));
        assert_eq!(
            snapshot.failed[0].pci_bus_id.as_ref(),
            Some(&lost.pci_bus_id)
        );
        assert_eq!(snapshot.failed[0].error.code(), Some(Code::GpuIsLost));
    }

    node.fake.find_again(&lost.uuid).unwrap();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.gpus.len(), 8);
    assert_eq!(snapshot.failed, []);
}
