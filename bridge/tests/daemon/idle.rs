//! A node where nothing happens, and what its daemon does all the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use testkit::Pod;

use crate::world::{NAMESPACE, RESOURCE, World, calm, from_environment};

/// GPUs of a usual node.
const GPUS: u32 = 8;
/// Pods that the kubelet lists on a node in use.
pub(crate) const LISTED: u32 = 30;

/// A node at rest. So many pods of each kind hold a GPU, and others hold none.
pub(crate) async fn node(holding: u32) -> World {
    let mut world = World::new(GPUS).await;
    // With the right to change the count, as a node has it, and limits, so that nothing moves.
    world.api.allow("patch", "nodes/status");
    world.configure("mode: both\nlimits: {legacy: 4, dra: 4}\n");
    let mut world = world.started().await;
    for number in 0..holding {
        world.run_counted(&format!("counted-{number}"), 1).await;
        let device = format!("gpu-{number}");
        world.run_claimant(&device, &device).await;
    }
    for number in 2 * holding..LISTED {
        let (name, uid) = (format!("other-{number}"), format!("uid-{number}"));
        let pod = Pod::new(NAMESPACE, &name, &uid).app("main", RESOURCE, 0);
        world
            .kubelet()
            .admit(pod)
            .await
            .expect("it asks for nothing");
        world.kubelet().run(&uid).await.expect("it runs");
    }
    world.readyz().await;
    let two_seconds = Duration::from_secs(2);
    calm("the last request is answered", two_seconds, async || {
        world.requests()
    })
    .await;
    world
}

/// How often each thread of a process was woken, and how long it has run, by the thread's id and name.
pub(crate) fn threads(process: &Path) -> BTreeMap<(u32, String), (u64, Duration)> {
    let folder = fs::read_dir(process.join("task")).expect("the process runs");
    let of_thread = |folder: &Path| {
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let id = folder.file_name()?.to_str()?.parse().ok()?;
        let name = read("comm")?.trim().to_owned();
        let ran = read("schedstat")?.split_whitespace().next()?.parse().ok()?;
        let status = read("status")?;
        let woken = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some((
            (id, name),
            (woken.trim().parse().ok()?, Duration::from_nanos(ran)),
        ))
    };
    folder
        .filter_map(Result::ok)
        .filter_map(|entry| of_thread(&entry.path()))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it shows who wakes the daemon, and judges nothing"]
async fn who_wakes_an_idle_daemon() {
    let seconds = from_environment("IDLE_SECONDS", 60);
    for holding in [0, GPUS / 2] {
        let world = node(holding).await;
        let pid = world.daemon().pid().as_raw_nonzero();
        let process = format!("/proc/{pid}");
        let process = Path::new(&process);
        eprintln!("the daemon with {holding} pods of each kind is process {pid}");
        let before = threads(process);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        for (thread, (woken, ran)) in threads(process) {
            let (earlier, had_run) = before.get(&thread).copied().unwrap_or_default();
            eprintln!(
                "{:>8} {:<24} {:>6} wake-ups {:>8.2} ms",
                thread.0,
                thread.1,
                woken - earlier,
                (ran - had_run).as_secs_f64() * 1000.0
            );
        }
    }
}
