//! Libraries that are missing, GPUs that are lost, drivers that hang.

use std::time::Duration;

use bridge_nvml::{Code, Error, MigMode, QUEUE, Session, Snapshot, Timeouts};
use fake_nvml::{Fault, Scenario};

use crate::{DEADLINE, Node};

// Answers of `nvmlReturn_t` in nvml.h.
const NOT_SUPPORTED: u32 = 3;
const DRIVER_NOT_LOADED: u32 = 9;
const LIBRARY_NOT_FOUND: u32 = 12;
const LIB_RM_VERSION_MISMATCH: u32 = 18;
const GPU_NOT_FOUND: u32 = 28;
const UNKNOWN: u32 = 999;
/// Longer than any test: a call with this delay hangs.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

/// Asks again until NVML answers, each time no longer than the session's own timeout.
async fn snapshot_when_it_answers(session: &Session) -> Snapshot {
    let answer = async {
        loop {
            match session.snapshot().await {
                Ok(snapshot) => return snapshot,
                Err(Error::TimedOut { .. } | Error::QueueFull { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, answer).await.unwrap()
}

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
    assert_eq!(session.processes().await.unwrap_err(), error);

    node.fake.install_library().unwrap();
    assert_eq!(session.snapshot().await.unwrap().gpus.len(), 8);
}

#[tokio::test]
async fn a_file_that_is_no_library_is_named() {
    let node = Node::without_library(&Scenario::h100(1));
    let mut options = node.options();
    options.library = Some(node.fake.proc_root().join("devices"));
    let error = Session::spawn(options)
        .unwrap()
        .snapshot()
        .await
        .unwrap_err();
    assert!(error.to_string().contains("proc/devices"), "{error}");
}

#[tokio::test]
async fn a_driver_that_is_not_loaded_yet_is_waited_for() {
    let node = Node::new(&Scenario::h100(8));
    node.fault(
        "nvmlInitWithFlags",
        Fault::error(DRIVER_NOT_LOADED).times(2),
    );
    let session = node.session();
    for _ in 0..2 {
        let error = session.snapshot().await.unwrap_err();
        let Error::NotInitialized {
            error: ref call, ..
        } = error
        else {
            panic!("{error:?}");
        };
        assert_eq!(call.code(), Some(Code::DriverNotLoaded));
        assert!(error.to_string().contains("kernel module"), "{error}");
    }
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
        let processes = session.processes().await.unwrap();
        assert_eq!(processes.len(), 8);
        for gpu in processes {
            assert_eq!(gpu.processes.is_err(), gpu.uuid == lost.uuid);
        }
    }

    node.fake.find_again(&lost.uuid).unwrap();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.gpus.len(), 8);
    assert_eq!(snapshot.failed, []);
}

#[tokio::test]
async fn a_gpu_that_was_lost_before_the_start_has_no_name() {
    let node = Node::new(&Scenario::h100(8));
    node.fake.lose(&node.uuids()[7]).unwrap();
    let session = node.session();
    let snapshot = session.snapshot().await.unwrap();
    assert_eq!(snapshot.gpus.len(), 7);
    assert_eq!(snapshot.failed[0].index, 7);
    assert_eq!(snapshot.failed[0].uuid, None);
    // Nothing can be said of its processes either, not even that it has none.
    assert_eq!(session.processes().await.unwrap().len(), 7);
}

#[tokio::test]
async fn a_failed_gpu_does_not_get_the_name_of_one_that_moved() {
    let node = Node::new(&Scenario::h100(3));
    let session = node.session();
    let before = session.snapshot().await.unwrap();
    // GPU 0 is taken out, so that the others move down, and what is GPU 1 now is lost.
    let mut smaller = Scenario::h100(1);
    smaller.gpus[0].uuid = Some(before.gpus[1].uuid.clone());
    let mut last = smaller.gpus[0].clone();
    last.uuid = Some(before.gpus[2].uuid.clone());
    smaller.gpus.push(last);
    let mut node = node;
    node.fake.replace_scenario(&smaller).unwrap();
    node.fake.lose(&before.gpus[2].uuid).unwrap();

    let snapshot = session.rescan().await.unwrap();
    assert_eq!(snapshot.gpus.len(), 1);
    assert_eq!(snapshot.failed.len(), 1);
    assert_eq!(snapshot.failed[0].uuid, None, "{:?}", snapshot.failed);
}

#[tokio::test]
async fn every_call_about_one_gpu_may_fail_without_harm_to_the_others() {
    for call in [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetName",
        "nvmlDeviceGetBrand",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetAddressingMode",
        "nvmlDeviceGetMigMode",
    ] {
        let node = Node::new(&Scenario::h100(3));
        node.fault(call, Fault::error(UNKNOWN).skip(1).times(1));
        let session = node.session();
        let snapshot = session.snapshot().await.unwrap();
        let good: Vec<_> = snapshot.gpus.iter().map(|gpu| gpu.index).collect();
        assert_eq!(good, [0, 2], "{call}");
        let text = snapshot.failed[0].error.to_string();
        assert!(text.contains(call), "{text}");
        assert_eq!(session.snapshot().await.unwrap().gpus.len(), 3, "{call}");
    }
}

#[tokio::test]
async fn a_call_about_the_node_that_fails_starts_nvml_anew() {
    for call in ["nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"] {
        let node = Node::new(&Scenario::h100(2));
        let session = node.session();
        assert_eq!(session.snapshot().await.unwrap().gpus.len(), 2);
        node.fault(call, Fault::error(LIB_RM_VERSION_MISMATCH));
        let error = session.rescan().await.unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        node.fake.clear_fault(call).unwrap();
        node.fake.start_trace().unwrap();
        assert_eq!(session.snapshot().await.unwrap().gpus.len(), 2);
        assert!(node.fake.trace().contains(&"nvmlInitWithFlags".to_owned()));
    }
}

#[tokio::test]
async fn what_a_gpu_does_not_support_is_absent() {
    let node = Node::new(&Scenario::h100(1));
    node.fault("nvmlDeviceGetMemoryInfo_v2", Fault::error(NOT_SUPPORTED));
    node.fault("nvmlDeviceGetAddressingMode", Fault::error(NOT_SUPPORTED));
    node.fault(
        "nvmlSystemGetCudaDriverVersion_v2",
        Fault::error(LIBRARY_NOT_FOUND),
    );
    let snapshot = node.session().snapshot().await.unwrap();
    assert_eq!(snapshot.gpus[0].memory_bytes, None);
    assert_eq!(snapshot.gpus[0].addressing_mode, None);
    assert_eq!(snapshot.cuda_driver_version, None);
}

#[tokio::test]
async fn codes_that_the_wrapper_does_not_know_are_told_by_their_name() {
    let node = Node::new(&Scenario::h100(1));
    node.fault("nvmlDeviceGetUUID", Fault::error(GPU_NOT_FOUND));
    let snapshot = node.session().snapshot().await.unwrap();
    let error = &snapshot.failed[0].error;
    assert_eq!(error.code(), Some(Code::GpuNotFound));
    assert!(error.to_string().contains("NVML error 28"), "{error}");
}

#[tokio::test]
async fn a_driver_without_the_newer_functions_is_enough() {
    let node = Node::new(&Scenario::h100(2));
    for call in [
        "nvmlInitWithFlags",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetAddressingMode",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetMigMode",
        // Without it the wrapper would panic when NVML is closed.
        "nvmlShutdown",
    ] {
        node.fake.hide_function(call).unwrap();
    }
    let session = node.session();
    for _ in 0..2 {
        let snapshot = session.rescan().await.unwrap();
        assert_eq!(snapshot.gpus.len(), 2);
        assert_eq!(snapshot.gpus[0].memory_bytes, Some(81559 << 20));
        assert_eq!(snapshot.gpus[0].addressing_mode, None);
        assert_eq!(snapshot.gpus[0].mig, MigMode::NotSupported);
        assert_eq!(snapshot.cuda_driver_version, None);
    }
}

#[tokio::test]
async fn a_library_that_is_not_nvml_says_which_function_it_lacks() {
    let node = Node::new(&Scenario::h100(2));
    node.fake.hide_function("nvmlInitWithFlags").unwrap();
    node.fake.hide_function("nvmlInit_v2").unwrap();
    let error = node.session().snapshot().await.unwrap_err();
    assert!(
        error.to_string().contains("nvmlInit_v2 is missing"),
        "{error}"
    );
}

#[tokio::test]
async fn a_driver_that_hangs_does_not_hang_its_callers() {
    let node = Node::new(&Scenario::h100(2));
    node.fault("nvmlDeviceGetUUID", Fault::delay(FOR_EVER));
    let mut options = node.options();
    options.timeouts = Timeouts {
        snapshot: Duration::from_millis(50),
        processes: Duration::from_millis(50),
        shutdown: Duration::from_millis(50),
    };
    let session = Session::spawn(options).unwrap();
    let error = session.snapshot().await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    let error = session.processes().await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");

    // When as many wait as may, the next is told so at once.
    let crowd = (0..=QUEUE).map(|_| session.processes());
    let answers = futures_of(crowd).await;
    assert!(answers.contains(&Err(Error::QueueFull { waiting: QUEUE })));

    // Once the driver answers, so does the session, and it does not work off what nobody waits for.
    node.fake.clear_fault("nvmlDeviceGetUUID").unwrap();
    node.fake.start_trace().unwrap();
    assert_eq!(snapshot_when_it_answers(&session).await.gpus.len(), 2);
    let process_calls = node
        .fake
        .trace()
        .iter()
        .filter(|call| call.contains("RunningProcesses"))
        .count();
    assert_eq!(process_calls, 0);
}

/// All at once, in one task.
async fn futures_of<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut waiting: Vec<_> = futures.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, place) in waiting.iter_mut().zip(&mut done) {
            if place.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *place = Some(value);
            }
        }
        if done.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_shutdown_of_a_driver_that_hangs_is_not_waited_for() {
    let node = Node::new(&Scenario::h100(1));
    node.fault("nvmlDeviceGetUUID", Fault::delay(FOR_EVER));
    let mut options = node.options();
    options.timeouts.snapshot = Duration::from_millis(50);
    options.timeouts.shutdown = Duration::from_millis(50);
    let session = Session::spawn(options).unwrap();
    session.snapshot().await.unwrap_err();
    let error = session.shutdown().await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    // It stops all the same as soon as it can.
    node.fake.clear_fault("nvmlDeviceGetUUID").unwrap();
    tokio::time::timeout(DEADLINE, session.ended())
        .await
        .unwrap();
}

#[tokio::test]
async fn after_a_shutdown_every_request_says_so() {
    let node = Node::new(&Scenario::h100(1));
    let session = node.session();
    session.snapshot().await.unwrap();
    node.fake.start_trace().unwrap();
    session.shutdown().await.unwrap();
    assert_eq!(node.fake.trace(), ["nvmlShutdown"]);
    tokio::time::timeout(DEADLINE, session.ended())
        .await
        .unwrap();
    assert_eq!(session.snapshot().await, Err(Error::Ended));
    assert_eq!(session.processes().await, Err(Error::Ended));
    assert_eq!(session.shutdown().await, Err(Error::Ended));
}

#[tokio::test]
async fn a_wrong_scenario_is_an_error_and_not_a_node_without_gpus() {
    let node = Node::new(&Scenario::h100(1));
    let file = node.fake.folder().join("scenario.yaml");
    std::fs::write(&file, "gpus: [{ model: h1000 }]\n").unwrap();
    let session = node.session();
    let error = session.snapshot().await.unwrap_err();
    assert!(matches!(error, Error::NotInitialized { .. }), "{error:?}");
    std::fs::write(&file, Scenario::h100(1).to_yaml().unwrap()).unwrap();
    assert_eq!(session.snapshot().await.unwrap().gpus.len(), 1);
}
