//! The arbiter by itself: a real ledger folder, and a probe that counts how often it is asked.

#![allow(
    clippy::unwrap_used,
    reason = "a test that meets what it does not expect shall panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bridge_core::{
    Access, AllocateRequest, ClaimRef, ClaimUid, ClaimedDevice, Claims, DeviceId, DeviceName, Gpu,
    Inventory, Ledger, Listing, Mode, Patience, PodSource, Pods, Pool, PrepareRequest, Processes,
    Settings, Side, UnitId, UnitProcesses,
};
use gpu_bridge::arbiter::{
    AllocateReply, Arbiter, Handle, Observation, PrepareReply, ProcessProbe,
};
use gpu_bridge::cdi::{CdiFiles, Roots};
use gpu_bridge::metrics::Metrics;
use gpu_bridge::store::{BootId, Store};
use testkit::eventually;

#[path = "common/h100.rs"]
mod h100;
#[path = "common/nodes.rs"]
mod nodes;
use h100::h100;
use nodes::make_nodes;

fn gpu(number: u32) -> Gpu {
    h100(number, UnitId::new(format!("GPU-{number}")).unwrap())
}

fn counted_alone() -> Settings {
    Settings {
        mode: Mode::Legacy,
        ..Settings::default()
    }
}

/// An arbiter of an empty ledger in `state`, which asks for the processes of up to eight GPUs and finds none.
fn arbiter(folder: &Path, settings: Settings, asked: &Arc<AtomicUsize>) -> (Arbiter, Handle) {
    let (store, _) = Store::open(&folder.join("state"), BootId::unknown()).unwrap();
    make_nodes(folder, 8);
    let cdi = CdiFiles::new(folder.join("cdi"), Roots::in_one(folder));
    let counter = Arc::clone(asked);
    let probe: ProcessProbe = Arc::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let units: BTreeMap<_, _> = (0..8)
            .map(|number| (gpu(number).uuid, UnitProcesses::Known(Vec::new())))
            .collect();
        Box::pin(async move { Processes { units } })
    });
    let pool = Pool::restored(Ledger::default(), settings);
    let (store, cdi) = (Arc::new(store), Arc::new(cdi));
    Arbiter::new(pool, store, cdi, probe, Instant::now(), Metrics::new())
}

/// So many idle GPUs that nobody holds, on a node whose count can be changed: they will rest in half a second, where
/// they may.
async fn about_to_rest(handle: &Handle, gpus: u32) {
    let idle = [
        Observation::Inventory(Inventory::Seen((0..gpus).map(gpu).collect())),
        Observation::Pods(Some(Pods {
            source: PodSource::Api,
            pods: Vec::new(),
        })),
        Observation::Claims(Some(Claims::default())),
        Observation::Listing(Listing::default()),
        Observation::Node(Some(1)),
    ];
    for observation in idle {
        handle.observe(observation).await.unwrap();
    }
}

#[tokio::test]
async fn a_move_that_can_not_be_saved_is_tried_again_at_leisure_and_made_in_the_end() {
    /// What a second of trying may cost; without a pause there are hundreds.
    const LEISURE: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let asked = Arc::new(AtomicUsize::new(0));
    let (arbiter, handle) = arbiter(folder.path(), Settings::default(), &asked);
    let running = tokio::spawn(arbiter.run());
    about_to_rest(&handle, 2).await;

    // The folder can't be written any more: a file has taken its place.
    let aside = folder.path().join("aside");
    rustix::fs::rename(&state, &aside).unwrap();
    fs::write(&state, b"").unwrap();
    let before = asked.load(Ordering::Relaxed);
    eventually("the move is due", Duration::from_secs(5), || {
        asked.load(Ordering::Relaxed) > before
    })
    .await;
    let first = asked.load(Ordering::Relaxed);
    let second = tokio::time::timeout(Duration::from_secs(1), std::future::pending::<()>());
    assert!(second.await.is_err(), "nothing but time passes");
    let tried = asked.load(Ordering::Relaxed) - first;
    assert!(tried <= LEISURE, "tried {tried} times in a second");

    fs::remove_file(&state).unwrap();
    rustix::fs::rename(&aside, &state).unwrap();
    eventually("both GPUs rest", Duration::from_secs(5), || {
        let status = handle.status();
        let status = status.borrow();
        status.units.iter().all(|unit| unit.side == Side::Rest)
    })
    .await;
    drop(handle);
    running.await.unwrap();
}

#[tokio::test]
async fn news_by_which_no_gpu_changes_hands_do_not_make_a_call_wait_for_another_look_at_processes()
{
    let folder = tempfile::tempdir().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let (arbiter, handle) = arbiter(folder.path(), counted_alone(), &asked);
    let running = tokio::spawn(arbiter.run());
    about_to_rest(&handle, 2).await;

    let looks = async |observation: Observation| {
        // One that is certain to be of this moment goes before.
        handle.observe(Observation::Processes).await.unwrap();
        let before = asked.load(Ordering::Relaxed);
        handle.observe(observation).await.unwrap();
        asked.load(Ordering::Relaxed) - before
    };
    assert_eq!(looks(Observation::Node(Some(2))).await, 0, "the count");
    let slice = Observation::Slice(BTreeSet::new());
    assert_eq!(looks(slice).await, 0, "the slice is published");
    // These can end a hold, which depends on what runs.
    let listing = Observation::Listing(Listing::default());
    assert_eq!(looks(listing).await, 1, "a listing");
    let pods = Observation::Pods(None);
    assert_eq!(looks(pods).await, 1, "the pods");
    drop(handle);
    running.await.unwrap();
}

#[tokio::test]
async fn calls_for_one_claim_at_once_all_find_its_cdi_file_whole() {
    const CALLS: usize = 16;
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        mode: Mode::Dra,
        ..Settings::default()
    };
    let (arbiter, handle) = arbiter(folder.path(), settings, &Arc::default());
    let running = tokio::spawn(arbiter.run());
    about_to_rest(&handle, 2).await;
    let claim = ClaimRef {
        uid: ClaimUid::new("claim-1").unwrap(),
        namespace: "a".to_owned(),
        name: "c".to_owned(),
    };
    let file = folder.path().join("cdi/gpu-bridge.dev-claim_claim-1.json");
    let prepare = async || {
        let request = PrepareRequest {
            claim: claim.clone(),
            devices: vec![ClaimedDevice {
                requests: vec!["gpu".to_owned()],
                pool: "node".to_owned(),
                device: DeviceName::new("gpu-0").unwrap(),
                access: Access::Owner,
            }],
            arrived: handle.uptime(),
            patience: Patience::LastCall,
        };
        let reply = handle.prepare(request).await;
        assert!(matches!(reply, Ok(PrepareReply::Prepared(_))), "{reply:?}");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.ends_with('}') || text.ends_with("}\n"), "{text:?}");
    };
    // Each round is one batch, and writes a file that is not there yet.
    for _ in 0..20 {
        futures::future::join_all((0..CALLS).map(|_| prepare())).await;
        handle.unprepare(claim.clone()).await.unwrap();
    }
    drop(handle);
    running.await.unwrap();
}

#[tokio::test]
async fn calls_that_wait_together_are_saved_together() {
    let folder = tempfile::tempdir().unwrap();
    let (arbiter, handle) = arbiter(folder.path(), counted_alone(), &Arc::default());
    let running = tokio::spawn(arbiter.run());
    about_to_rest(&handle, 8).await;
    // Each save has the next generation, and a save is one file and two flushes.
    let saves = || handle.status().borrow().generation;
    let allocate = async |number: u32| {
        let request = AllocateRequest {
            ids: vec![DeviceId::parse(&format!("GPU-{number}")).unwrap()],
            patience: Patience::Waits,
        };
        let answer = handle.allocate(request, None).await.unwrap();
        assert!(matches!(answer, AllocateReply::Granted(_)), "{answer:?}");
    };

    let before = saves();
    // On one thread all of them have been asked before the arbiter takes the first.
    futures::future::join_all((0..6).map(&allocate)).await;
    assert_eq!(saves() - before, 1, "six calls at once");

    let before = saves();
    allocate(6).await;
    allocate(7).await;
    assert_eq!(saves() - before, 2, "two calls, one after the other");
    let on_disk = fs::read_to_string(folder.path().join("state/ledger.json")).unwrap();
    let on_disk: serde_json::Value = serde_json::from_str(&on_disk).unwrap();
    assert_eq!(on_disk["content"]["generation"], saves());
    drop(handle);
    running.await.unwrap();
}

#[tokio::test]
async fn a_gpu_without_its_device_node_is_not_given_in_the_moment_in_which_it_is_first_seen() {
    let folder = tempfile::tempdir().unwrap();
    let (arbiter, handle) = arbiter(folder.path(), counted_alone(), &Arc::default());
    fs::remove_file(folder.path().join("dev/nvidia0")).unwrap();
    let running = tokio::spawn(arbiter.run());
    let request = AllocateRequest {
        ids: vec![DeviceId::parse("GPU-0").unwrap()],
        patience: Patience::LastCall,
    };
    // On one thread both have been asked, in this order, before the arbiter takes the first.
    let (seen, answer) = futures::future::join(
        handle.observe(Observation::Inventory(Inventory::Seen(vec![gpu(0)]))),
        handle.allocate(request, None),
    )
    .await;
    seen.unwrap();
    let answer = answer.unwrap();
    let AllocateReply::Refused(refusal) = &answer else {
        panic!("{answer:?}");
    };
    assert_eq!(refusal.reason(), "DeviceNodeMissing", "{refusal}");
    drop(handle);
    running.await.unwrap();
}
