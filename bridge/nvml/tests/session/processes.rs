//! Who computes on which GPU.

use bridge_nvml::{Code, GpuProcesses, Process};
use fake_nvml::{Fault, Scenario};

use crate::Node;

const LIB_RM_VERSION_MISMATCH: u32 = 18;
const UNKNOWN: u32 = 999;

fn pids(gpu: &GpuProcesses) -> Vec<u32> {
    let processes = gpu.processes.as_ref().unwrap();
    processes.iter().map(|process| process.pid).collect()
}

#[tokio::test]
async fn processes_are_seen_when_they_come_and_go() {
    let node = Node::new(&Scenario::h100(8));
    let uuids = node.uuids();
    let session = node.session();
    // No snapshot was taken before: the processes alone are enough of a question.
    let idle = session.processes().await.unwrap();
    let listed: Vec<_> = idle.iter().map(|gpu| gpu.uuid.clone()).collect();
    assert_eq!(listed, uuids);
    assert!(idle.iter().all(|gpu| gpu.processes == Ok(vec![])));

    node.fake.add_process(&uuids[3], 4711).unwrap();
    node.fake
        .add_process_with_memory(&uuids[3], 12, 5 << 20)
        .unwrap();
    node.fake.add_process(&uuids[4], 4711).unwrap();
    let busy = session.processes().await.unwrap();
    assert_eq!(
        busy[3].processes,
        Ok(vec![
            Process {
                pid: 12,
                used_memory_bytes: Some(5 << 20)
            },
            Process {
                pid: 4711,
                used_memory_bytes: None
            },
        ])
    );
    assert_eq!(pids(&busy[4]), [4711]);
    assert_eq!(pids(&busy[0]), [0; 0]);

    node.fake.remove_process(&uuids[3], 4711).unwrap();
    assert_eq!(pids(&session.processes().await.unwrap()[3]), [12]);
}

#[tokio::test]
async fn more_processes_than_there_is_room_for_at_first_are_all_listed() {
    let node = Node::new(&Scenario::h100(1));
    let uuid = &node.uuids()[0];
    for pid in 1..=200 {
        node.fake.add_process(uuid, pid).unwrap();
    }
    let gpus = node.session().processes().await.unwrap();
    assert_eq!(pids(&gpus[0]), (1..=200).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_processes_cost_one_call_a_gpu() {
    let node = Node::new(&Scenario::h100(8));
    let session = node.session();
    session.processes().await.unwrap();
    node.fake.add_process(&node.uuids()[0], 1).unwrap();
    node.fake.start_trace().unwrap();
    session.processes().await.unwrap();
    assert_eq!(
        node.fake.trace(),
        ["nvmlDeviceGetComputeRunningProcesses_v3"; 8]
    );
}

#[tokio::test]
async fn a_gpu_that_does_not_tell_its_processes_has_an_error_and_the_others_do_not() {
    let node = Node::new(&Scenario::h100(3));
    node.fault(
        "nvmlDeviceGetComputeRunningProcesses_v3",
        Fault::error(UNKNOWN).skip(1).times(1),
    );
    let gpus = node.session().processes().await.unwrap();
    assert_eq!(gpus[0].processes, Ok(vec![]));
    assert_eq!(
        gpus[1].processes.as_ref().unwrap_err().code(),
        Some(Code::Unknown)
    );
    assert_eq!(gpus[2].processes, Ok(vec![]));
}

#[tokio::test]
async fn a_driver_with_the_older_function_alone_is_asked_by_that() {
    let mut scenario = Scenario::h100(2);
    let newer = "nvmlDeviceGetComputeRunningProcesses_v3".to_owned();
    scenario.driver.without = vec![newer.try_into().unwrap()];
    let node = Node::new(&scenario);
    let uuid = &node.uuids()[1];
    for pid in 1..=200 {
        node.fake.add_process(uuid, pid).unwrap();
    }
    let gpus = node.session().processes().await.unwrap();
    assert_eq!(pids(&gpus[0]), [0; 0]);
    assert_eq!(pids(&gpus[1]), (1..=200).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_driver_without_the_function_says_so_for_each_gpu() {
    let node = Node::new(&Scenario::h100(2));
    for version in ["v3", "v2"] {
        let call = format!("nvmlDeviceGetComputeRunningProcesses_{version}");
        node.fake.hide_function(&call).unwrap();
    }
    for gpu in node.session().processes().await.unwrap() {
        let text = gpu.processes.unwrap_err().to_string();
        assert!(text.contains("missing from this driver"), "{text}");
    }
}

#[tokio::test]
async fn a_driver_that_was_replaced_is_opened_anew_by_the_next_request() {
    let node = Node::new(&Scenario::h100(2));
    let session = node.session();
    session.processes().await.unwrap();
    node.fault(
        "nvmlDeviceGetComputeRunningProcesses_v3",
        Fault::error(LIB_RM_VERSION_MISMATCH).times(2),
    );
    let gpus = session.processes().await.unwrap();
    assert!(gpus.iter().all(|gpu| gpu.processes.is_err()));
    node.fake.start_trace().unwrap();
    let gpus = session.processes().await.unwrap();
    assert!(gpus.iter().all(|gpu| gpu.processes.is_ok()));
    assert!(node.fake.trace().contains(&"nvmlInitWithFlags".to_owned()));
}
