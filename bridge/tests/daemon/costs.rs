//! What the daemon costs others, in counts: saves for calls that come together, and requests and wake-ups of a node where
//! nothing happens. How long things take is not judged here; see `bench`.

use std::path::Path;
use std::time::Duration;

use fake_nvml::Fault;
use futures::future::join_all;

use crate::idle;
use crate::world::{SOON, World, calm, proof, stays, until};

/// GPUs of a kind, and calls at once.
const CALLS: usize = 8;
/// Saves that they may cost: the first call that comes is saved alone, the others meanwhile wait for the next.
const SAVES: u64 = 3;
/// How long each GPU takes to say which processes it has: so a call is not over before the others are there, and the
/// answer about all GPUs comes well within the half second that the daemon gives it.
const SLOWLY: Duration = Duration::from_millis(12);

/// Waits until nothing is saved any more.
async fn saved_all(world: &World) -> u64 {
    let second = Duration::from_secs(1);
    calm("all is saved", second, async || world.generation().await).await
}

#[tokio::test]
async fn eight_calls_of_a_kind_at_once_cost_three_saves_at_most() {
    let world = World::running(16).await;
    let claims: Vec<String> = (0..CALLS).map(|number| format!("gpu-{number}")).collect();
    for device in &claims {
        world.allocate_claim(device, device, device);
    }
    world.wait_for_holds("Reserved", CALLS).await;
    let (plugin, driver) = (world.plugin(), world.driver());
    let processes = "nvmlDeviceGetComputeRunningProcesses_v3";
    world
        .node
        .set_fault(processes, &Fault::delay(SLOWLY))
        .unwrap();

    let before = saved_all(&world).await;
    let prepared = join_all(claims.iter().map(|claim| driver.prepare(claim))).await;
    assert!(prepared.iter().all(Result::is_ok), "{prepared:?}");
    let cost = world.generation().await - before;
    assert!(
        (1..=SAVES).contains(&cost),
        "{cost} saves for {CALLS} claims"
    );

    let before = saved_all(&world).await;
    let unprepared = join_all(claims.iter().map(|claim| driver.unprepare(claim))).await;
    assert!(unprepared.iter().all(Result::is_ok), "{unprepared:?}");
    let cost = world.generation().await - before;
    assert!(
        (1..=SAVES).contains(&cost),
        "{cost} saves to give them back"
    );

    let before = saved_all(&world).await;
    let ids = (CALLS..2 * CALLS).map(|number| world.gpu(&format!("gpu-{number}")).uuid);
    let allocated = join_all(ids.map(async |id| plugin.allocate(&[&id]).await)).await;
    assert!(allocated.iter().all(Result::is_ok), "{allocated:?}");
    let cost = world.generation().await - before;
    assert!(
        (1..=SAVES).contains(&cost),
        "{cost} saves for {CALLS} containers"
    );
}

#[tokio::test]
async fn a_node_where_nothing_happens_asks_the_api_server_once_in_half_a_minute_at_most() {
    const PERIOD: Duration = Duration::from_secs(30);
    /// The list of the slices, or a watch that has run its time.
    const REQUESTS: u64 = 1;
    let world = World::new(4).await;
    world.api.allow("patch", "nodes/status");
    let mut world = world.started().await;
    until("everything rests", SOON, async || {
        let status = world.status().await;
        let units = status["units"].as_array().unwrap();
        units.iter().all(|unit| unit["side"] == "rest")
    })
    .await;
    world.readyz().await;
    // What follows on the last step is not the rest yet.
    let two_seconds = Duration::from_secs(2);
    calm("the last request is answered", two_seconds, async || {
        world.requests()
    })
    .await;

    let before = world.api.counts();
    let most = world.requests() + REQUESTS;
    stays("nobody asks", PERIOD, async || world.requests() <= most).await;
    let after = world.api.counts();
    assert!(
        after.values().sum::<u64>() <= most,
        "before {before:?}, after {after:?}"
    );
    assert!(world.requests() > 0, "the counter counts");
}

#[tokio::test]
async fn on_a_node_where_nothing_happens_the_daemon_wakes_up_rarely() {
    const WINDOW: Duration = Duration::from_secs(5);
    /// Of all threads together. Three a second are usual, and the thread that waits for XIDs is one of them.
    const WAKE_UPS: u64 = 60;
    let world = idle::node(4).await;
    let process = format!("/proc/{}", world.daemon().pid().as_raw_nonzero());
    let woken = || -> u64 {
        let threads = idle::threads(Path::new(&process));
        threads.values().map(|(woken, _)| woken).sum()
    };
    // What the last change has begun is over some ten seconds after it.
    until("it sleeps", 2 * SOON, async || {
        let before = woken();
        tokio::time::sleep(WINDOW).await;
        let times = woken() - before;
        proof(&format!("with eight GPUs held and nothing that happens the daemon woke up {times} times in {WINDOW:?}"));
        times <= WAKE_UPS
    })
    .await;
}
