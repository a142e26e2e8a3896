//! A rolling update: the old daemon and its successor are there at once, and the ledger goes from one to the other.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use testkit::Phase;

use crate::calls::{Driver, Plugin};
use crate::process::Daemon;
use crate::world::{
    DRIVER, NODE, RESOURCE, SOON, World, ask, claim_uid, pod_uid, proof, stays, until,
};

/// The time in which a call is answered at the latest when nobody decides: 5 s, and a busy machine.
const HELD: Duration = Duration::from_secs(8);

/// A hold that only a list of the kubelet's has made, from the moment before an Unprepare was answered, ends after a
/// minute.
const FREE_AGAIN: Duration = Duration::from_secs(120);

const OLD: &str = "aaaaaaaa-0000-4000-8000-000000000001";
const NEW: &str = "bbbbbbbb-0000-4000-8000-000000000002";
const NEWER: &str = "cccccccc-0000-4000-8000-000000000003";

// --- Two daemons ---

impl World {
    /// A node with a daemon that a successor can follow.
    async fn with_pod_uid(gpus: u32) -> Self {
        Self::new(gpus).await.with_pod().await
    }

    /// The same with the right to change the count in the Node; all GPUs rest, and are in it.
    async fn that_counts(gpus: u32) -> Self {
        let world = Self::new(gpus).await;
        world.api.allow("patch", "nodes/status");
        let world = world.with_pod().await;
        world.rests(gpus, gpus).await;
        world
    }

    /// Waits until the successor is ready, and has asked for the ledger in vain, for a reason with these words.
    async fn waits_in_vain(&self, successor: &Daemon, why: &str) {
        until("the successor is ready", SOON, async || {
            self.is_ready(NEW).await
        })
        .await;
        until("it has asked in vain", SOON, async || {
            successor.log().has(why)
        })
        .await;
    }

    /// Waits until all GPUs are in the count, and those that are free untainted as well.
    async fn rests(&self, gpus: u32, free: u32) {
        until("what is free rests", SOON, async || {
            let slice = self.slice().unwrap_or_default().into_iter();
            let open = slice.filter(|(_, taint)| taint.is_none()).count();
            self.count() == Some(gpus) && u32::try_from(open) == Ok(free)
        })
        .await;
    }

    async fn with_pod(mut self) -> Self {
        self.flags().insert("--pod-uid", OLD.into());
        self.start_kubelet().await;
        self.start_daemon();
        self.ready().await;
        self
    }

    /// The count in the own Node; `None` where nobody has written one.
    pub(crate) fn count(&self) -> Option<u32> {
        let node = self.api.get("nodes", "", NODE).expect("the node is there");
        let count = node["status"]["allocatable"][RESOURCE].as_str()?;
        Some(count.parse().expect("a number"))
    }

    /// The admin socket of one pod's daemon.
    fn own_socket(&self, pod: &str) -> PathBuf {
        self.path(&format!("admin-{pod}.sock"))
    }

    /// Whether the daemon of a pod has decided last who gets what; of two it is the one that answers the owner's
    /// socket, and the other one says so.
    async fn is_ready(&self, pod: &str) -> bool {
        let answer = ask(&self.own_socket(pod), "GET /readyz", "").await;
        answer.is_some_and(|(code, _)| code == 200)
    }

    /// Waits until the daemon of a pod owns the ledger and both faces are registered.
    async fn until_owner(&self, pod: &str) {
        until(&format!("{pod} serves"), SOON, async || {
            let drivers = self.kubelet().drivers(DRIVER);
            let registered = drivers
                .iter()
                .any(|it| it.endpoint.to_string_lossy().contains(pod));
            registered && self.owns(pod).await && self.is_ready(pod).await
        })
        .await;
    }

    async fn owns(&self, pod: &str) -> bool {
        let (own, owners) = (self.own_socket(pod), self.admin_socket());
        let page = ask(&own, "GET /status", "").await;
        let serves = page.is_some_and(|(code, _)| code == 200);
        let condition = ask(&own, "GET /readyz", "").await.unwrap_or_default().1;
        serves && owners.exists() && !condition.contains("was handed over to pod")
    }

    /// The socket of a pod's daemon for counted pods.
    fn counted_socket(&self, pod: &str) -> Option<PathBuf> {
        let entries = std::fs::read_dir(self.device_plugin_dir()).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        paths.find(|path| path.to_string_lossy().contains(pod))
    }

    /// Calls the `Allocate` of a pod's daemon, whoever the kubelet would call.
    async fn allocate_from(&self, pod: &str, id: &str) -> Result<Vec<String>, String> {
        let socket = self.counted_socket(pod).expect("its socket is there");
        Plugin::at(&socket).allocate(&[id]).await
    }

    fn claims_socket(&self, pod: &str) -> PathBuf {
        self.path(&format!("k/plugins/{DRIVER}/dra-{pod}.sock"))
    }

    /// A connection to the DRA driver of a pod's daemon.
    fn driver_of(&self, pod: &str) -> Driver {
        Driver::at(&self.claims_socket(pod))
    }

    /// An id that nobody has, and that the kubelet could give.
    async fn free_id(&self) -> String {
        let status = self.status().await;
        let ids = status["offers"]["legacy"].as_array().unwrap().iter();
        let mut free = ids.filter(|it| it["free"] == true);
        free.next().unwrap()["id"].as_str().unwrap().to_owned()
    }

    /// Asks the owner for the ledger in the name of a pod.
    async fn ask_for_the_ledger(&self, pod: &str) -> Option<(u16, String)> {
        ask(&self.admin_socket(), "POST /handover", pod).await
    }

    /// Takes the ledger's lock, as a successor does; waits until it is free.
    async fn take_the_lock(&self) -> File {
        let path = self.state_dir().join("lock");
        let file = File::options().read(true).write(true).open(path).unwrap();
        until("the lock is free", SOON, async || {
            flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        })
        .await;
        file
    }
}

/// SIGTERM, and a good end.
async fn terminate(daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, said) = daemon.ended().await;
    assert!(status.success(), "{status}: {said}");
}

// --- The good case ---

#[tokio::test]
async fn a_successor_takes_over_and_the_end_of_the_old_one_changes_nothing() {
    let mut world = World::with_pod_uid(4).await;
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let healthy = world.kubelet().healthy(RESOURCE);

    let successor = world.start_successor(NEW);
    world.until_owner(NEW).await;
    assert!(successor.log().has(r#""way":"HandedOver""#));
    assert_eq!(world.holds().await, held);
    let old = world.succeed(successor);
    world.ready().await;
    let (slice, writes) = (world.slice(), world.writes());
    terminate(old).await;
    stays("what there was", Duration::from_secs(1), async || {
        world.kubelet().healthy(RESOURCE) == healthy
            && world.holds().await == held
            && world.slice() == slice
            && world.writes() == writes
            && world.counted_spec().exists()
            && world.claim_spec(&claim_uid("b")).exists()
    })
    .await;
    for gone in [
        world.own_socket(OLD),
        world.claims_socket(OLD),
        world.registry().join(format!("{DRIVER}-{OLD}@reg.sock")),
    ] {
        assert!(!gone.exists(), "{}", gone.display());
    }
    assert_eq!(world.counted_socket(OLD), None);

    world.run_counted("c", 1).await;
    let device = world.free_device().await;
    world.run_claimant("d", &device).await;
    world.end_pod("a").await;
    world.end_pod("b").await;
    world.wait_for_holds("Bound", 1).await;
}

#[tokio::test]
async fn ten_updates_lose_no_call_and_no_hold() {
    let mut world = World::with_pod_uid(8).await;
    world.run_counted("stays", 1).await;
    let device = world.free_device().await;
    world.run_claimant("stays-too", &device).await;
    let kept: BTreeSet<_> = world.wait_for_holds("Bound", 1).await.into_iter().collect();
    for round in 0..10 {
        let pod = format!("dddddddd-0000-4000-8000-{round:012}");
        let successor = world.start_successor(&pod);
        let is_over = Arc::new(AtomicBool::new(false));
        let update = async {
            world.until_owner(&pod).await;
            is_over.store(true, Ordering::SeqCst);
        };
        // Pods come and go all the while, and none may fail.
        let counted = async {
            let mut number = 0;
            while !is_over.load(Ordering::SeqCst) || number == 0 {
                let name = format!("counted-{round}-{number}");
                world.run_counted(&name, 1).await;
                world.wait_for_holds("Bound", 2).await;
                world.end_pod(&name).await;
                // Faster than holds end, counted pods would need the claims' GPUs.
                until("its GPU is free again", SOON, async || {
                    let holds = world.holds().await.into_iter();
                    let counted =
                        holds.filter(|(_, phase, _, _)| phase == "Granted" || phase == "Bound");
                    counted.count() == 1
                })
                .await;
                number += 1;
            }
        };
        let claimed = async {
            let mut number = 0;
            while !is_over.load(Ordering::SeqCst) || number == 0 {
                let name = format!("claim-{round}-{number}");
                let device = world.open_devices().pop().expect("claims have free GPUs");
                world.run_claimant(&name, &device).await;
                world.end_pod(&name).await;
                number += 1;
            }
        };
        tokio::join!(update, counted, claimed);
        let old = world.succeed(successor);
        terminate(old).await;
    }
    until("only what stays is held", FREE_AGAIN, async || {
        let held: BTreeSet<_> = world.holds().await.into_iter().collect();
        held == kept
    })
    .await;
    assert_eq!(
        world.kubelet().phase(&pod_uid("stays")),
        Some(Phase::Running)
    );
}

#[tokio::test]
async fn calls_that_still_come_to_the_old_daemon_are_answered_by_its_successor() {
    let mut world = World::with_pod_uid(4).await;
    let before = world.free_id().await;
    let given = world.allocate_from(OLD, &before).await.unwrap();
    let _successor = world.start_successor(NEW);
    world.until_owner(NEW).await;

    // The same question gets the same answer, at both.
    assert_eq!(world.allocate_from(OLD, &before).await.unwrap(), given);
    assert_eq!(world.allocate_from(NEW, &before).await.unwrap(), given);
    let id = world.free_id().await;
    let given = world.allocate_from(OLD, &id).await.unwrap();
    assert_eq!(world.allocate_from(NEW, &id).await.unwrap(), given);
    let refused = world.allocate_from(OLD, "GPU-unknown").await.unwrap_err();
    assert!(refused.contains("UnknownDeviceId"), "{refused}");

    let device = world.free_device().await;
    world.allocate_claim("b", &device, "b");
    world.admit_claimant("b").await;
    let prepared = world.driver_of(OLD).prepare("b").await.unwrap();
    assert_eq!(prepared[0].device_name, device);
    assert_eq!(world.driver_of(NEW).prepare("b").await.unwrap(), prepared);
    assert!(world.claim_spec(&claim_uid("b")).exists());
    world.wait_for_holds("Prepared", 1).await;
    let refused = world.driver_of(OLD).prepare("nobodys").await.unwrap_err();
    assert!(refused.contains("ClaimGone"), "{refused}");
    world.driver_of(OLD).unprepare("b").await.unwrap();
    world.wait_for_holds("Prepared", 0).await;
}

#[tokio::test]
async fn a_kubelet_that_restarts_between_the_two_finds_the_successor_whichever_it_calls() {
    let mut world = World::with_pod_uid(4).await;
    let successor = world.start_successor(NEW);
    world.until_owner(NEW).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    world.kubelet().restart().await.unwrap();
    until("both drivers are registered", SOON, async || {
        world.kubelet().drivers(DRIVER).len() == 2
    })
    .await;
    until("the ids are healthy", SOON, async || {
        world.kubelet().healthy(RESOURCE) == healthy
    })
    .await;
    assert_eq!(world.counted_socket(OLD), None, "only the owner registers");
    world.run_counted("a", 1).await;
    let device = world.free_device().await;
    world.run_claimant("b", &device).await;
    let old = world.succeed(successor);
    terminate(old).await;
    world.run_counted("c", 1).await;
    world.end_pod("b").await;
}

#[tokio::test]
async fn an_old_daemon_told_to_stop_too_soon_waits_for_its_successor_and_the_count_stays() {
    let mut world = World::that_counts(4).await;
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
    world.rests(4, 3).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    let is_over = AtomicBool::new(false);
    let successor = world.start_successor(NEW);
    let watched = async {
        while !is_over.load(Ordering::SeqCst) {
            assert_eq!(world.count(), Some(4), "pods would be kept away");
            assert_eq!(world.kubelet().healthy(RESOURCE), healthy);
            assert!(world.slice().is_some(), "the slice is gone");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let updated = async {
        // Kubernetes ends the old pod as soon as the new one is ready, and that is before it owns anything.
        until("the successor is ready", SOON, async || {
            world.is_ready(NEW).await
        })
        .await;
        until("it was handed over", SOON, async || {
            world.log().has("handing the ledger over")
        })
        .await;
        world.daemon().signal(Signal::TERM);
        world.until_owner(NEW).await;
        until("the old one knows that it may end", SOON, async || {
            world.log().has("the successor serves")
        })
        .await;
        is_over.store(true, Ordering::SeqCst);
    };
    tokio::join!(watched, updated);
    let log = successor.log().clone();
    let old = world.succeed(successor);
    let (status, said) = old.ended().await;
    assert!(status.success(), "{status}: {said}");
    // Nor does its end change anything.
    stays("what there was", Duration::from_secs(1), async || {
        world.count() == Some(4) && world.kubelet().healthy(RESOURCE) == healthy
    })
    .await;
    assert!(!log.has("the count is 0"), "{}", log.text());
    world.run_counted("b", 1).await;
}

#[tokio::test]
async fn a_daemon_that_is_leaving_still_hands_over_and_then_waits_no_longer_than_five_seconds() {
    let mut world = World::that_counts(4).await;
    // Bound here and not admitted yet: the daemon stays for it.
    world.bind_counted("on-its-way", 1);
    until("it is noticed", SOON, async || world.count() != Some(4)).await;
    world.daemon().signal(Signal::TERM);
    let (code, said) = world.ask_for_the_ledger(NEW).await.expect("an answer");
    assert_eq!(code, 200, "{said}");
    let count = world.count();
    let lock = world.take_the_lock().await;
    let told = Instant::now();
    stays("the old one is there", Duration::from_secs(4), async || {
        world.daemon_mut().status().is_none() && world.count() == count
    })
    .await;
    let (status, said) = world.daemon_ended().await;
    assert!(status.success(), "{status}: {said}");
    assert!(told.elapsed() < HELD, "{:?}", told.elapsed());
    assert!(said.contains("does not serve yet"), "{said}");
    drop(lock);
    world.flags().insert("--pod-uid", NEW.into());
    world.start_daemon();
    world.ready().await;
    world.admit_unseen("on-its-way", 1).await.unwrap();
}

#[tokio::test]
async fn before_kubernetes_1_37_the_end_of_the_old_daemon_is_a_gap_of_a_second_or_two() {
    /// A second until the successor believes that its stream has ended, and a busy machine.
    const GAP: Duration = Duration::from_secs(5);
    let mut world = World::new(4).await;
    world.flags().insert("--pod-uid", OLD.into());
    world.start_kubelet().await;
    world.kubelet().know_one_plugin_of_each();
    world.start_daemon();
    world.ready().await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let healthy = world.kubelet().healthy(RESOURCE);
    let successor = world.start_successor(NEW);
    world.until_owner(NEW).await;
    // Until here nothing is missing.
    assert_eq!(world.kubelet().healthy(RESOURCE), healthy);
    world.run_counted("b", 1).await;
    world.end_pod("b").await;

    let old = world.succeed(successor);
    old.signal(Signal::TERM);
    until("the kubelet has lost the list", SOON, async || {
        world.kubelet().healthy(RESOURCE).is_empty()
    })
    .await;
    let since = Instant::now();
    let device = world.free_device().await;
    world.run_claimant("c", &device).await;
    until("the successor is registered again", SOON, async || {
        world.kubelet().healthy(RESOURCE) == healthy
    })
    .await;
    let gap = since.elapsed();
    proof(&format!(
        "updates: before Kubernetes 1.37 no GPU for counted pods for {} ms after the end of the old daemon",
        gap.as_millis()
    ));
    assert!(gap < GAP, "{gap:?}");
    let (status, said) = old.ended().await;
    assert!(status.success(), "{status}: {said}");
    let holds = world.holds().await;
    assert!(held.iter().all(|hold| holds.contains(hold)), "{holds:?}");
    world.run_counted("d", 1).await;
}

// --- When it goes wrong ---

#[tokio::test]
async fn a_successor_that_never_serves_costs_calls_five_seconds_and_the_old_one_goes_on() {
    let mut world = World::with_pod_uid(4).await;
    let id = world.free_id().await;
    let device = world.free_device().await;
    world.allocate_claim("b", &device, "b");
    world.admit_claimant("b").await;
    let (code, said) = world.ask_for_the_ledger(NEW).await.expect("an answer");
    assert_eq!(code, 200, "{said}");
    let lock = world.take_the_lock().await;

    let asked = Instant::now();
    let driver = world.driver_of(OLD);
    let (refused, unavailable) = tokio::join!(world.allocate_from(OLD, &id), driver.prepare("b"));
    let refused = refused.unwrap_err();
    assert!(refused.contains("NotOwnerYet: "), "{refused}");
    assert!(refused.contains("delete it"), "{refused}");
    let unavailable = unavailable.unwrap_err();
    let begin = "UNAVAILABLE: NotOwnerYet: ";
    assert!(unavailable.starts_with(begin), "{unavailable}");
    assert!(asked.elapsed() < HELD, "{:?}", asked.elapsed());
    // It is alive, its stream stays, and the kubelet's list.
    assert_eq!(world.kubelet().healthy(RESOURCE).len(), 2);
    let alive = ask(&world.own_socket(OLD), "GET /healthz", "").await;
    assert_eq!(alive.expect("an answer").0, 200);

    drop(lock);
    until("the old one owns the ledger again", SOON, async || {
        world.owns(OLD).await
    })
    .await;
    world.allocate_from(OLD, &id).await.unwrap();
    world.driver_of(OLD).prepare("b").await.unwrap();
    world.ready().await;
    // And can be followed by another one.
    let _successor = world.start_successor(NEWER);
    world.until_owner(NEWER).await;
}

#[tokio::test]
async fn a_successor_that_dies_in_the_middle_loses_no_call() {
    let mut world = World::with_pod_uid(4).await;
    let id = world.free_id().await;
    // It asks, and does not come for the lock.
    let (code, said) = world.ask_for_the_ledger(NEW).await.expect("an answer");
    assert_eq!(code, 200, "{said}");
    let asked = Instant::now();
    until("the old one owns the ledger again", SOON, async || {
        world.owns(OLD).await
    })
    .await;
    assert!(asked.elapsed() < HELD, "{:?}", asked.elapsed());
    world.allocate_from(OLD, &id).await.unwrap();
    world.ready().await;
    // What was seen meanwhile is not forgotten: this pod is gone from the kubelet's list.
    world.run_counted("a", 1).await;
    world.wait_for_holds("Bound", 1).await;
}

#[tokio::test]
async fn after_a_successor_that_changed_the_ledger_and_died_the_old_one_starts_anew() {
    let mut world = World::with_pod_uid(4).await;
    let successor = world.start_successor(NEW);
    world.until_owner(NEW).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    drop(successor);
    let (status, said) = {
        let old = world.daemon_mut();
        until("the old one ends", SOON, async || old.status().is_some()).await;
        (old.status().unwrap(), old.log().text())
    };
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains("a successor has changed the ledger"),
        "{said}"
    );
    // As the kubelet does with the container.
    world.kill_daemon();
    world.flags().insert("--pod-uid", OLD.into());
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await, held);
}

#[tokio::test]
async fn an_owner_that_hangs_is_waited_for_and_followed_when_it_is_killed() {
    let mut world = World::with_pod_uid(4).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    world.daemon().signal(Signal::STOP);
    let successor = world.start_successor(NEW);
    // Kubernetes ends the old pod only once the new one is ready.
    world
        .waits_in_vain(&successor, "has not answered within")
        .await;
    assert_eq!(world.counted_socket(NEW), None);
    drop(world.succeed(successor));
    world.ready().await;
    assert_eq!(world.holds().await, held);
    world.run_counted("b", 1).await;
}

#[tokio::test]
async fn a_version_that_can_not_hand_over_is_waited_for() {
    let mut world = World::new(4).await;
    world.start_kubelet().await;
    // What such a version has: the lock, and an admin socket that does not know the question.
    std::fs::create_dir_all(world.state_dir()).unwrap();
    File::create(world.state_dir().join("lock")).unwrap();
    let lock = world.take_the_lock().await;
    let socket = UnixListener::bind(world.admin_socket()).unwrap();
    let answers = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        // Until it is told that it is gone.
        while let Ok((mut stream, _)) = socket.accept() {
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            if request[..length].starts_with(b"end") {
                return;
            }
            let answer =
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(answer).unwrap();
        }
    });
    let successor = world.start_successor(NEW);
    world
        .waits_in_vain(&successor, "a version that can't hand over")
        .await;
    {
        use std::io::Write as _;
        let mut end = std::os::unix::net::UnixStream::connect(world.admin_socket()).unwrap();
        end.write_all(b"end").unwrap();
    }
    answers.join().unwrap();
    drop(lock);
    world.adopt(successor);
    world.ready().await;
}

#[tokio::test]
async fn of_two_successors_one_at_a_time_owns_the_ledger() {
    let mut world = World::with_pod_uid(4).await;
    world.run_counted("a", 1).await;
    let held = world.wait_for_holds("Bound", 1).await;
    let second = world.start_successor(NEW);
    let third = world.start_successor(NEWER);
    // Whoever comes first hands it to the other, who asks the owner that it finds.
    until("both got it", SOON, async || {
        let got = |daemon: &Daemon| daemon.log().has("gpu-bridge runs");
        got(&second) && got(&third)
    })
    .await;
    let mut owner = None;
    until("one of them owns the ledger", SOON, async || {
        let (new, newer) = (world.owns(NEW).await, world.owns(NEWER).await);
        assert!(!(new && newer), "two owners");
        owner = [(new, NEW), (newer, NEWER)]
            .into_iter()
            .find_map(|(owns, pod)| owns.then_some(pod));
        owner.is_some()
    })
    .await;
    let owner = owner.unwrap();
    world.until_owner(owner).await;
    assert_eq!(world.holds().await, held);
    // Every one of the three has an answer.
    let id = world.free_id().await;
    let given = world.allocate_from(owner, &id).await.unwrap();
    for pod in [OLD, NEW, NEWER] {
        assert_eq!(world.allocate_from(pod, &id).await.unwrap(), given);
    }
}

#[tokio::test]
async fn a_successor_that_could_not_serve_does_not_ask() {
    let mut world = World::with_pod_uid(4).await;
    let library = world.flags()["--nvml-library"].clone();
    let none = world.path("none.so");
    world.flags().insert("--nvml-library", none.into());
    let broken = world.start_successor(NEW);
    until("it waits", SOON, async || {
        broken.log().has("waiting for the ledger")
    })
    .await;
    stays(
        "the old one owns the ledger",
        Duration::from_secs(2),
        async || world.owns(OLD).await && !world.is_ready(NEW).await,
    )
    .await;
    world.run_counted("a", 1).await;
    terminate(broken).await;
    world.flags().insert("--nvml-library", library);
    let _good = world.start_successor(NEW);
    world.until_owner(NEW).await;
}
