//! The health stream: what the kubelet hears of the devices.

use std::sync::Arc;
use std::time::Duration;

use bridge_core::{DeviceName, Presence, Side, Status, UnitState, UnitStatus};
use dra_proto::health_v1::NodeWatchResourcesRequest;
use dra_proto::health_v1::dra_resource_health_client::DraResourceHealthClient;
use gpu_bridge::dra::DRIVER;
use testkit::{dial, eventually};

use crate::world::{DEADLINE, NODE, Script, World, unit_of};

/// As many streams as the daemon serves at once.
const STREAMS: usize = 16;

fn unit(number: u32, presence: Presence, lacks: Option<&str>) -> UnitStatus {
    let device = DeviceName::new(format!("gpu-{number}")).unwrap();
    UnitStatus {
        unit: unit_of(&device),
        device,
        id: None,
        product_name: String::new(),
        side: Side::Dra,
        state: UnitState::FreeDra,
        presence,
        lacks: lacks.map(str::to_owned),
        fault: None,
        holds: Vec::new(),
    }
}

fn show(world: &World, units: Vec<UnitStatus>) {
    world.arbiter.status.send_modify(|status| {
        let mut changed = Status::clone(status);
        changed.units = units;
        *status = Arc::new(changed);
    });
}

/// What the kubelet has heard, as words: `gpu-0 Healthy`, and the message where there is one.
fn heard(world: &World) -> Vec<String> {
    let health = world.kubelet.device_health(DRIVER).unwrap_or_default();
    let words = health.into_iter().map(|((pool, device), it)| {
        assert_eq!(pool, NODE);
        let words = format!("{device} {}: {}", it.health, it.message);
        words.trim_end_matches(": ").to_owned()
    });
    words.collect()
}

async fn hears(world: &World, wanted: &[&str]) {
    let what = format!("the kubelet hears {wanted:?}");
    eventually(&what, DEADLINE, || {
        let heard = heard(world);
        let same = heard
            .iter()
            .zip(wanted)
            .all(|(heard, wanted)| heard.starts_with(wanted));
        same && heard.len() == wanted.len()
    })
    .await;
}

#[tokio::test]
async fn the_kubelet_hears_how_each_device_is_and_when_that_changes() {
    let world = World::start(Script::default()).await;
    let well = |number| unit(number, Presence::Present, None);
    show(
        &world,
        vec![well(0), well(1), unit(2, Presence::Unknown, None)],
    );
    hears(
        &world,
        &[
            "gpu-0 Healthy",
            "gpu-1 Healthy",
            "gpu-2 Unknown: NVML has not told of this GPU since gpu-bridge started",
        ],
    )
    .await;

    let lost = unit(1, Presence::Lost, None);
    let lacks = unit(2, Presence::Present, Some("/dev/nvidia2 is missing"));
    show(&world, vec![well(0), lost, lacks]);
    hears(
        &world,
        &[
            "gpu-0 Healthy",
            "gpu-1 Unhealthy: NVML does not see GPU GPU-gpu-1 any more",
            "gpu-2 Unhealthy: GPU GPU-gpu-2 cannot be used by a new container: /dev/nvidia2 is missing",
        ],
    )
    .await;

    show(&world, vec![well(0), well(1), well(2)]);
    hears(&world, &["gpu-0 Healthy", "gpu-1 Healthy", "gpu-2 Healthy"]).await;
}

#[tokio::test]
async fn what_does_not_change_is_told_again_before_the_kubelet_forgets_it() {
    let world = World::start(Script::default()).await;
    show(&world, vec![unit(0, Presence::Present, None)]);
    let channel = dial::localhost(&world.face.place.service_socket());
    let mut client = DraResourceHealthClient::new(channel);
    let opened = client.node_watch_resources(NodeWatchResourcesRequest {});
    let mut reports = opened.await.unwrap().into_inner();
    let first = reports.message().await.unwrap().unwrap();
    let forgets = dra_proto::health_v1::DEFAULT_TIMEOUT;
    let again = tokio::time::timeout(forgets, reports.message()).await;
    let again = again.expect("in time").unwrap().unwrap();
    let named = |report: &dra_proto::health_v1::NodeWatchResourcesResponse| {
        let devices = report.devices.iter().map(|it| it.device.clone());
        devices.collect::<Vec<_>>()
    };
    assert_eq!(named(&again), named(&first));
    assert!(again.devices[0].last_updated_time > first.devices[0].last_updated_time);
}

#[tokio::test]
async fn streams_end_with_the_daemon_and_are_no_more_than_a_kubelet_has() {
    let mut world = World::start(Script::default()).await;
    let channel = dial::localhost(&world.face.place.service_socket());
    let mut open = Vec::new();
    // One is the kubelet's own.
    assert_eq!(heard(&world), [""; 0]);
    let refused = loop {
        let mut client = DraResourceHealthClient::new(channel.clone());
        match client
            .node_watch_resources(NodeWatchResourcesRequest {})
            .await
        {
            Ok(stream) => open.push(stream.into_inner()),
            Err(status) => break status,
        }
        assert!(open.len() <= STREAMS, "there is a limit");
    };
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);

    world.face.shutdown.cancel();
    for mut stream in open {
        let end = async { while let Ok(Some(_)) = stream.message().await {} };
        tokio::time::timeout(DEADLINE, end).await.expect("it ends");
    }
    let task = &mut world.face.task;
    tokio::time::timeout(Duration::from_secs(20), task)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
}
