//! Errors of GPUs (XIDs): what they close on both faces, and how that ends.

use std::time::Duration;

use crate::doctor::{examine, flat};
use crate::events::is_told;
use crate::verbs::said;
use crate::world::{DRIVER, NODE, RESOURCE, SOON, World, pod_uid, stays, until};

/// A moment in which something that must not happen would have.
const A_WHILE: Duration = Duration::from_millis(1500);

// Numbers of `nvmlDeviceGpuRecoveryAction_t`.
const NOTHING: u32 = 0;
const RESET: u32 = 1;

/// The driver tells of an error of a device, and waits until it is known.
async fn fails(world: &World, device: &str, xid: u64) {
    let gpu = world.gpu(device).uuid;
    let counted = format!("gpu_bridge_xids_total{{xid=\"{xid}\"");
    let before = sample(world, &counted).await;
    world.node.report_xid(&gpu, xid).unwrap();
    until("the error is counted", SOON, async || {
        sample(world, &counted).await > before
    })
    .await;
}

/// The sum of the samples whose line begins so.
async fn sample(world: &World, begin: &str) -> u64 {
    let (_, page) = world.get("/metrics").await.unwrap_or_default();
    let lines = page.lines().filter(|line| line.starts_with(begin));
    let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    values.sum()
}

/// Whether a device is open to claims, and its id healthy: a free one that rests is both.
fn shown(world: &World, device: &str) -> (bool, bool) {
    let gpu = world.gpu(device).uuid;
    let open = world.open_devices().contains(&device.to_owned());
    (open, world.kubelet().healthy(RESOURCE).contains(&gpu))
}

async fn is_closed(world: &World, device: &str) {
    until(
        &format!("{device} is closed on both faces"),
        SOON,
        async || {
            world.taint(device).as_deref() == Some("Faulty")
                && shown(world, device) == (false, false)
        },
    )
    .await;
}

/// Waits until a pod of one kind could get it again.
async fn is_open(world: &World, device: &str) {
    until(&format!("{device} is offered"), SOON, async || {
        let (open, healthy) = shown(world, device);
        open || healthy
    })
    .await;
}

/// What the status says of the fault of a device.
async fn fault(world: &World, device: &str) -> Option<String> {
    let unit = world.unit(&world.gpu(device).uuid).await;
    unit["fault"]["message"].as_str().map(str::to_owned)
}

#[tokio::test]
async fn an_error_closes_its_gpu_on_both_faces_and_who_has_it_keeps_it_over_a_restart_too() {
    let mut world = World::running(4).await;
    world.run_counted("a", 1).await;
    world.run_claimant("b", "gpu-0").await;
    let held = world.wait_for_holds("Bound", 1).await;
    let counted = world.ids("a").remove(0);
    let counted = world
        .node
        .gpus()
        .into_iter()
        .find(|gpu| gpu.uuid == counted);
    let counted = format!("gpu-{}", counted.unwrap().minor);
    for (device, xid) in [(&*counted, 79), ("gpu-0", 48), ("gpu-1", 119)] {
        fails(&world, device, xid).await;
        is_closed(&world, device).await;
    }
    assert_eq!(world.holds().await, held);
    // The pod of the claim hears of it from the kubelet.
    until("the kubelet knows", SOON, async || {
        let health = world.kubelet().device_health(DRIVER).unwrap_or_default();
        let of = health.get(&(NODE.to_owned(), "gpu-0".to_owned()));
        of.is_some_and(|it| it.health == "Unhealthy" && it.message.contains("XID 48"))
    })
    .await;
    // Nobody new gets one of the three.
    world.allocate_claim("c", "gpu-1", "c");
    world.admit_claimant("c").await;
    let refused = world.prepare("c").await.unwrap_err();
    assert!(
        refused.contains("UnitFaulty: ") && refused.contains("XID 119"),
        "{refused}"
    );
    world.run_counted("d", 1).await;
    assert_eq!(sample(&world, "gpu_bridge_units_faulty ").await, 3);
    let held = world.wait_for_holds("Bound", 2).await;

    world.kill_daemon();
    world.start_daemon();
    world.ready().await;
    for device in [&*counted, "gpu-0", "gpu-1"] {
        is_closed(&world, device).await;
    }
    assert_eq!(world.holds().await, held);
    until("the claim can be given back", SOON, async || {
        world.kubelet().unprepare(&pod_uid("b")).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn an_error_of_an_application_closes_nothing() {
    let world = World::running(2).await;
    let generation = world.generation().await;
    for xid in [13, 31, 43, 45, 63, 68, 94, 109] {
        fails(&world, "gpu-1", xid).await;
    }
    assert_eq!(fault(&world, "gpu-1").await, None);
    assert_ne!(world.taint("gpu-1").as_deref(), Some("Faulty"));
    assert_eq!(
        world.generation().await,
        generation,
        "nothing was saved for it"
    );
}

#[tokio::test]
async fn a_gpu_is_served_again_once_the_driver_says_that_nothing_has_to_be_done() {
    let world = World::running(2).await;
    let gpu = world.gpu("gpu-1").uuid;
    world.node.set_recovery(&gpu, RESET).unwrap();
    fails(&world, "gpu-1", 79).await;
    is_closed(&world, "gpu-1").await;
    until("the status says what to do", SOON, async || {
        let fault = fault(&world, "gpu-1").await.unwrap_or_default();
        fault.contains("XID 79") && fault.contains("reset the GPU")
    })
    .await;
    world.node.set_recovery(&gpu, NOTHING).unwrap();
    is_open(&world, "gpu-1").await;
    assert_eq!(fault(&world, "gpu-1").await, None);
}

#[tokio::test]
async fn with_an_old_driver_a_boot_ends_a_fault_and_nothing_else_by_itself() {
    let world = World::new(2).await;
    let values = "nvmlDeviceGetFieldValues";
    world.node.hide_function(values).unwrap();
    let mut world = world.started().await;
    fails(&world, "gpu-1", 79).await;
    is_closed(&world, "gpu-1").await;
    world.rescan();
    stays("it is closed", A_WHILE, async || {
        world.taint("gpu-1").as_deref() == Some("Faulty")
    })
    .await;
    world.stop_daemon().await;
    world.boot("6c5b3b0a-0000-4000-8000-000000000003");
    world.start_daemon();
    world.ready().await;
    is_open(&world, "gpu-1").await;
    assert!(world.log().has("the fault of a GPU has ended"));
}

#[tokio::test]
async fn a_changed_configuration_ends_a_fault_and_so_does_an_admin() {
    let mut world = World::configured(2, "health: {xids: {fault: [94]}}\n").await;
    for device in ["gpu-0", "gpu-1"] {
        // So that it does not end by itself meanwhile.
        let gpu = world.gpu(device).uuid;
        world.node.set_recovery(&gpu, RESET).unwrap();
        fails(&world, device, 94).await;
        is_closed(&world, device).await;
    }
    fails(&world, "gpu-1", 48).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    assert_eq!(healthy.len(), 0);
    world.configure("mode: both\n");
    is_open(&world, "gpu-0").await;
    is_closed(&world, "gpu-1").await;

    let gpu = world.gpu("gpu-1").uuid;
    let told = world.clear_fault(&gpu).await;
    assert!(told.status.success(), "{}", said(&told));
    is_open(&world, "gpu-1").await;
    world
        .history_tells(&[
            &format!("UnitFaulty {gpu} XID 48"),
            &format!("FaultClearedByAdmin {gpu} seen by hand"),
            &format!("FaultEnded Cleared {gpu}"),
            "FaultEnded Ignored",
        ])
        .await;
    assert!(world.log().has("an admin has cleared the fault of a GPU"));
    let told = world.clear_fault(&gpu).await;
    assert!(said(&told).contains("has no fault"), "{}", said(&told));
    assert_eq!(told.status.code(), Some(1));
}

#[tokio::test]
async fn the_events_of_the_node_and_doctor_and_status_tell_of_a_fault() {
    let mut world = World::running(2).await;
    let gpu = world.gpu("gpu-1").uuid;
    world.node.set_recovery(&gpu, RESET).unwrap();
    fails(&world, "gpu-1", 79).await;
    is_told(&world, "Node", NODE, "UnitFaulty").await;
    let (_, page) = examine(&mut world).await;
    let page = flat(&page);
    assert!(
        page.contains("XID 79") && page.contains("gpu-health.md"),
        "{page}"
    );
    let told = world.table().await;
    assert!(
        told.contains("UnitFaulty since") && told.contains("faulty"),
        "{told}"
    );
    world.node.set_recovery(&gpu, NOTHING).unwrap();
    is_told(&world, "Node", NODE, "FaultEnded").await;
}
