//! How long nobody is served after the daemon was killed, with many holds and with none.

use std::num::NonZeroU32;
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    Access, ClaimRef, ClaimUid, DeviceId, Hold, HoldKind, Ledger, PodName, PodRef, PodUid,
    Preparation, PreparedDevice, Side, UnitId, UnitKind, UnitRecord,
};
use fake_nvml::Scenario;
use gpu_bridge::store::{BootId, Store};

use crate::calls::Plugin;
use crate::h100::h100;
use crate::world::{NAMESPACE, NODE, SOON, World, claim_uid, pod_uid, proof, until};

/// Holds that the ledger has: more than any node has pods with GPUs.
pub(crate) const HOLDS: u32 = 200;
/// GPUs that are there; those of the other holds are lost.
const GPUS: u32 = 64;
/// How often is looked whether the daemon serves: short beside a start.
const LOOK: Duration = Duration::from_millis(1);
/// Starts of each kind. The middle one counts.
const STARTS: usize = 5;
/// How much longer a start with all these holds may take than one with none, in percent. This build does not optimize,
/// so what is measured is mostly its computing, six times that of an empty ledger; a start that asked the disk, the
/// kubelet or the API server something for each hold would take another second or more.
const MOST: u128 = 1200;

#[tokio::test]
async fn a_restart_with_two_hundred_holds_waits_for_nothing_of_each_of_them() {
    let mut world = large().await;
    let without = middle(&mut world, &Ledger::default()).await;
    let full = full(&world);
    let with = middle(&mut world, &full).await;
    proof(&format!(
        "restart: from the start of the process until it serves {without} ms with no hold, {with} ms with {HOLDS} \
         (middle of {STARTS}, this build)"
    ));
    assert!(
        with * 100 <= without * MOST,
        "{with} ms instead of {without} ms"
    );
}

/// A node with as many GPUs as any has.
pub(crate) async fn large() -> World {
    World::of(&Scenario::h100(GPUS)).await
}

/// A ledger with all these holds, and the claims that some of them are of.
pub(crate) fn full(world: &World) -> Ledger {
    let full = ledger(world);
    for preparation in full.prepared.values() {
        let (claim, device) = (&preparation.claim, &preparation.devices[0].device);
        world.allocate_claim(&claim.name, device.as_str(), &claim.name);
    }
    full
}

/// How long a start on this ledger takes as a rule, in milliseconds.
async fn middle(world: &mut World, ledger: &Ledger) -> u128 {
    let mut times = restarts(world, ledger, STARTS).await;
    times.sort();
    times[STARTS / 2].as_millis()
}

/// So many starts on this ledger after a kill, each from the start of the process until it serves. One more goes
/// before: the first one is not like a restart, as it may have files to write that the others find.
pub(crate) async fn restarts(world: &mut World, ledger: &Ledger, starts: usize) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..=starts {
        world.kill_daemon();
        save(world, ledger);
        times.push(start(world, ledger.holds.len()).await);
    }
    times.split_off(1)
}

/// Starts a daemon on a ledger with so many holds, and measures until it answers the kubelet's calls. It is asked for
/// nothing large meanwhile: a page of its state would have to be made beside the start.
async fn start(world: &mut World, holds: usize) -> Duration {
    let started = Instant::now();
    world.start_daemon();
    // Nobody listens on what the killed one has left.
    let answers = async |world: &World| match world.device_plugin_socket() {
        Some(socket) => Plugin::at(&socket).nothing().await.is_ok(),
        None => false,
    };
    while !answers(world).await {
        assert!(started.elapsed() < SOON, "the daemon does not serve");
        tokio::time::sleep(LOOK).await;
    }
    let took = started.elapsed();
    until("the whole ledger is served", SOON, async || {
        let status = world.status().await;
        let known = status["units"].as_array().map_or(0, Vec::len);
        let there = usize::try_from(GPUS).expect("some");
        status["standing"] == "Serving" && known == holds.max(there)
    })
    .await;
    took
}

fn save(world: &World, ledger: &Ledger) {
    let (store, _) = Store::open(&world.state_dir(), BootId::unknown()).unwrap();
    store.save(ledger).unwrap();
}

/// Every second hold is a counted pod's, the others are claims'.
fn ledger(world: &World) -> Ledger {
    let mut ledger = Ledger::default();
    let there = world.node.gpus();
    for number in 0..HOLDS {
        let found = there.iter().find(|gpu| gpu.minor == number);
        let unit = found.map_or_else(|| format!("GPU-lost-{number}"), |gpu| gpu.uuid.clone());
        let unit = UnitId::new(unit).unwrap();
        let name = format!("p{number}");
        let (side, kind) = if number % 2 == 0 {
            let pod = PodRef {
                uid: Some(PodUid::new(pod_uid(&name)).unwrap()),
                name: PodName {
                    namespace: NAMESPACE.to_owned(),
                    name,
                },
            };
            let id = DeviceId::of_unit(unit.clone());
            (Side::Legacy, HoldKind::Bound { id, pod })
        } else {
            let claim = ClaimRef {
                uid: ClaimUid::new(claim_uid(&name)).unwrap(),
                namespace: NAMESPACE.to_owned(),
                name,
            };
            (Side::Dra, HoldKind::Prepared { claim })
        };
        let record = record(number, &unit, side);
        if let HoldKind::Prepared { claim } = &kind {
            let device = PreparedDevice {
                requests: vec!["gpu".to_owned()],
                pool: NODE.to_owned(),
                device: record.device_name(),
                unit: unit.clone(),
                access: Access::Owner,
            };
            let preparation = Preparation {
                claim: claim.clone(),
                devices: vec![device],
            };
            ledger.prepared.insert(claim.uid.clone(), preparation);
        }
        ledger.units.insert(unit.clone(), record);
        let hold = Hold::exclusive(kind, SystemTime::now());
        ledger.holds.insert(unit, vec![hold]);
    }
    ledger
}

fn record(number: u32, unit: &UnitId, side: Side) -> UnitRecord {
    UnitRecord {
        number,
        kind: UnitKind::Gpu,
        capacity: NonZeroU32::MIN,
        side,
        gpu: h100(number, unit.clone()).into(),
    }
}
