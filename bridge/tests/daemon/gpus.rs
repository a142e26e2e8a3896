//! GPUs and a driver in trouble.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use fake_nvml::{Fault, Scenario};

use crate::world::{RESOURCE, SOON, World, claim_uid, pod_uid, until};

/// Far longer than a test lasts; ends when the fault is cleared.
const FOR_EVER: Duration = Duration::from_secs(600);

/// The fault of a GPU that is asked for its processes.
const PROCESSES: &str = "nvmlDeviceGetComputeRunningProcesses_v3";

#[tokio::test]
async fn a_lost_gpu_is_withdrawn_on_both_faces_and_the_others_are_served_until_it_returns() {
    let world = World::running(8).await;
    let counted = world.gpu("gpu-7").uuid;
    let claimed = world.gpu("gpu-0").uuid;
    assert_eq!(world.open_devices(), ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]);
    world.node.lose(&counted).unwrap();
    world.node.lose(&claimed).unwrap();
    world.rescan();
    world.kubelet().wait_for_healthy(RESOURCE, 3, SOON).await;
    assert!(!world.kubelet().healthy(RESOURCE).contains(&counted));
    until("both devices are tainted", SOON, async || {
        [world.taint("gpu-0"), world.taint("gpu-7")]
            == [Some("Lost".to_owned()), Some("Lost".to_owned())]
    })
    .await;
    assert_eq!(world.open_devices(), ["gpu-1", "gpu-2", "gpu-3"]);
    let listed = world.kubelet().capacity(RESOURCE).unwrap().capacity;
    assert_eq!(listed, 8, "it stays listed");
    assert_eq!(world.slice().unwrap().len(), 8);
    world.run_counted("a", 3).await;
    world.run_claimant("b", "gpu-1").await;
    let log = world.log().text();
    assert!(log.contains(&counted) && log.contains(&claimed), "{log}");

    world.node.find_again(&counted).unwrap();
    world.node.find_again(&claimed).unwrap();
    world.rescan();
    world.kubelet().wait_for_healthy(RESOURCE, 4, SOON).await;
    until("it is offered again", SOON, async || {
        world.open_devices().contains(&"gpu-0".to_owned())
    })
    .await;
    world.run_counted("c", 1).await;
    world.run_claimant("d", "gpu-0").await;
}

#[tokio::test]
async fn a_gpu_that_is_lost_while_it_is_held_stays_held() {
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    let counted = world.ids("a").remove(0);
    world.node.lose(&counted).unwrap();
    world.node.lose(&world.gpu("gpu-0").uuid).unwrap();
    world.rescan();
    until("both are lost", SOON, async || {
        let seen = world.status().await;
        let units = seen["units"].as_array().unwrap();
        units.iter().filter(|unit| unit["present"] == false).count() == 2
    })
    .await;
    assert_eq!(world.holds().await, held);
    // A restart does not make it free either.
    world.kill_daemon();
    world.start_daemon();
    until("it is seen again", SOON, async || {
        world.standing().await.is_some()
    })
    .await;
    assert_eq!(world.holds().await, held);
    until("the claim can be given back", SOON, async || {
        world.kubelet().unprepare(&pod_uid("b")).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_lost_gpu_is_noticed_without_being_asked_for() {
    let world = World::running(2).await;
    let lost = world.gpu("gpu-1").uuid;
    world.node.lose(&lost).unwrap();
    let noticed = Instant::now();
    until("the id is unhealthy", SOON, async || {
        !world.kubelet().healthy(RESOURCE).contains(&lost)
    })
    .await;
    assert!(noticed.elapsed() < Duration::from_secs(15));
}

#[tokio::test]
async fn while_nvml_hangs_allocate_answers_in_time_and_the_rest_goes_on() {
    let world = World::running(4).await;
    world.run_claimant("b", "gpu-0").await;
    let healthy = world.kubelet().healthy(RESOURCE);
    world
        .node
        .set_fault(PROCESSES, &Fault::delay(FOR_EVER))
        .unwrap();

    let id = world.gpu("gpu-3").uuid;
    let asked = Instant::now();
    let refused = world.allocate(&[&id]).await.unwrap_err();
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}: {refused}");
    for part in [
        "NoFreeUnit",
        "of 4 GPUs, claims hold 1",
        "and 3 cannot be used",
    ] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert!(
        world.log().has("NVML does not answer process queries"),
        "the log has the reason"
    );
    let asked = Instant::now();
    world
        .kubelet()
        .unprepare(&pod_uid("b"))
        .await
        .expect("Unprepare needs no NVML");
    assert!(asked.elapsed() < Duration::from_secs(5));
    let (code, _) = world.get("/healthz").await.unwrap();
    assert_eq!(code, 200);
    assert_eq!(
        world.kubelet().healthy(RESOURCE),
        healthy,
        "one slow answer is no outage"
    );

    world.node.clear_fault(PROCESSES).unwrap();
    until("it gives out again", SOON, async || {
        world.allocate(&[&id]).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn while_library_and_kernel_module_differ_it_is_not_ready_and_says_so_and_recovers_by_itself()
{
    /// What NVML answers in the time between an upgrade of the driver and the load of its module.
    const LIB_RM_VERSION_MISMATCH: u32 = 18;
    const CALLS: [&str; 2] = ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"];
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    for call in CALLS {
        let fault = Fault::error(LIB_RM_VERSION_MISMATCH);
        world.node.set_fault(call, &fault).unwrap();
    }
    world.rescan();
    let words = ["driver was upgraded", "kernel module"];
    world.lacks("NvmlAnswering", &words).await;
    assert_eq!(world.get("/readyz").await.unwrap().0, 503);
    assert_eq!(world.get("/healthz").await.unwrap().0, 200);
    assert_eq!(world.holds().await, held, "who has something keeps it");
    for call in CALLS {
        world.node.clear_fault(call).unwrap();
    }
    // Nobody tells it.
    world.has("NvmlAnswering").await;
    world.ready().await;
    assert_eq!(world.holds().await, held);
    until("the kubelet has a free id again", SOON, async || {
        world.kubelet().healthy(RESOURCE).len() > 1
    })
    .await;
    world.run_counted("c", 1).await;
    world.run_claimant("d", "gpu-1").await;
}

#[tokio::test]
async fn an_odd_gpu_is_named_and_takes_no_other_down() {
    let odd = "driver: {version: 580.95.05, cuda: '13.0'}\n\
               gpus:\n- {model: h100-sxm5-80gb, count: 3}\n- {model: h100-sxm5-80gb, mig: true, uuid: GPU-odd}\n";
    let scenario = Scenario::parse(Path::new("odd.yaml"), odd).unwrap();
    let world = World::of(&scenario).await;
    let (ok, message) = world.condition("NvmlAnswering").await.unwrap();
    assert!(ok, "the others answer");
    for part in ["3 GPUs answer", "GPU-odd", "MIG", "nvidia-smi -mig 0"] {
        assert!(message.contains(part), "{part:?} is missing in: {message}");
    }
    assert_eq!(world.slice().unwrap().len(), 3);
    world.run_counted("a", 2).await;
    world.run_claimant("b", "gpu-0").await;
}

#[tokio::test]
async fn a_gpu_that_is_added_joins_the_pool_without_a_restart() {
    let mut world = World::running(2).await;
    let held = {
        world.run_counted("a", 1).await;
        world.wait_for_holds("Bound", 1).await
    };
    let more = Scenario::h100(2).and_one_more().and_one_more();
    world.node.replace_scenario(&more).unwrap();
    world.rescan();
    world.kubelet().wait_for_healthy(RESOURCE, 2, SOON).await;
    until("the slice has all four", SOON, async || {
        world.slice().is_some_and(|devices| devices.len() == 4)
    })
    .await;
    assert_eq!(world.holds().await, held);
    world.run_counted("b", 1).await;
    let device = world.free_device().await;
    world.run_claimant("c", &device).await;
    world.stop_daemon().await;
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await.len(), 3, "they are in the ledger");
}

#[tokio::test]
async fn a_gpu_without_its_device_node_is_refused_by_name_and_served_once_the_node_is_there() {
    let world = World::running(2).await;
    let node = world.node.dev_root().join("nvidia0");
    let aside = world.path("nvidia0");
    fs::hard_link(&node, &aside).unwrap();
    fs::remove_file(&node).unwrap();
    world.allocate_claim("a", "gpu-0", "a");
    world.admit_claimant("a").await;
    let refused = world.prepare("a").await.unwrap_err();
    let path = node.display().to_string();
    for part in [
        "DeviceNodeMissing: ",
        "train/a",
        &world.gpu("gpu-0").uuid,
        &path,
        "is missing",
        "--dev-root",
    ] {
        assert!(refused.contains(part), "{part:?} is missing in: {refused}");
    }
    assert!(!world.claim_spec(&claim_uid("a")).exists());
    world.run_counted("b", 1).await;
    fs::hard_link(&aside, &node).unwrap();
    world.prepare("a").await.unwrap();
}

#[tokio::test]
async fn a_strangers_process_closes_its_gpu_on_both_faces_unless_the_configuration_ignores_it() {
    let world = World::configured(4, "ignoreProcesses: [dcgm-exporter]\n").await;
    let gpus = ["gpu-0", "gpu-1", "gpu-3"].map(|device| world.gpu(device).uuid);
    for (gpu, pid, name) in [
        (&gpus[0], 100, "dcgm-exporter"),
        (&gpus[1], 101, "python"),
        (&gpus[2], 102, "python"),
    ] {
        world.start_process(gpu, pid, "");
        let comm = world.node.proc_root().join(format!("{pid}/comm"));
        fs::write(comm, format!("{name}\n")).unwrap();
    }
    until("both are closed", SOON, async || {
        world.taint("gpu-1") == Some("Foreign".to_owned())
            && !world.kubelet().healthy(RESOURCE).contains(&gpus[2])
    })
    .await;
    assert_eq!(world.taint("gpu-0"), None);
    world.run_claimant("a", "gpu-0").await;
    world.end_process(&gpus[1], 101);
    world.end_process(&gpus[2], 102);
    until("both are open again", SOON, async || {
        world.taint("gpu-1").is_none() && world.kubelet().healthy(RESOURCE).contains(&gpus[2])
    })
    .await;
}

#[tokio::test]
async fn without_the_drivers_device_nodes_nothing_is_given_and_the_reason_is_told() {
    let world = World::configured(2, "mode: legacy\n").await;
    let uvm = world.node.dev_root().join("nvidia-uvm");
    let aside = world.path("nvidia-uvm");
    fs::hard_link(&uvm, &aside).unwrap();
    fs::remove_file(&uvm).unwrap();
    let id = world.gpu("gpu-1").uuid;
    let refused = world.allocate(&[&id]).await.unwrap_err();
    assert!(
        refused.contains("DeviceNodeMissing: ") && refused.contains("nvidia-uvm is missing"),
        "{refused}"
    );
    // What was looked at for that call withdraws the ids as well.
    world.kubelet().wait_for_healthy(RESOURCE, 0, SOON).await;
    let status = world.status().await;
    let lacks = status["units"][0]["lacks"].as_str().unwrap();
    assert!(lacks.ends_with("nvidia-uvm is missing"), "{lacks}");

    fs::hard_link(&aside, &uvm).unwrap();
    world.kubelet().wait_for_healthy(RESOURCE, 2, SOON).await;
    world.run_counted("a", 1).await;
}
