//! The wall clock of the node jumps while the daemon runs, and while it is away.
//!
//! The daemon gets a library that stands between it and the C library's clock (`tests/fake-clock`), so the machine's
//! own clock is left alone.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use jiff::{SignedDuration, Timestamp};

use crate::process::{Daemon, gpu_bridge};
use crate::world::{SOON, World, pod_uid, until};

const DAY: SignedDuration = SignedDuration::from_hours(24);

/// A test takes less, on any machine.
const NEARLY: SignedDuration = SignedDuration::from_hours(1);

/// The clock of the daemons that are started with it.
struct Clock {
    library: PathBuf,
    path: PathBuf,
    file: File,
    offset: SignedDuration,
}

impl Clock {
    fn new(world: &World) -> Self {
        let path = world.path("clock");
        let file = File::create(&path).unwrap();
        let mut clock = Self {
            library: build(&world.path("libfake_clock.so")),
            path,
            file,
            offset: SignedDuration::ZERO,
        };
        clock.jump(SignedDuration::ZERO);
        clock
    }

    /// From now on it is off by this.
    fn jump(&mut self, offset: SignedDuration) {
        self.offset = offset;
        let bytes = offset.as_secs().to_ne_bytes();
        self.file.write_all_at(&bytes, 0).unwrap();
    }

    fn start_daemon(&self, world: &mut World) {
        let mut command = gpu_bridge();
        command
            .env("LD_PRELOAD", &self.library)
            .env("FAKE_CLOCK", &self.path);
        let daemon = Daemon::start(command, world.flags());
        world.adopt(daemon);
    }

    /// Sees to it that the daemon wrote a time down by this clock.
    fn assert_wrote(&self, time: &str) {
        let written: Timestamp = time.parse().unwrap();
        let off = written.duration_since(Timestamp::now());
        assert!(
            (off - self.offset).abs() < NEARLY,
            "the clock is off by {:?}, and the daemon wrote {written}",
            self.offset
        );
    }
}

/// Builds the library by the compiler that built this test.
fn build(library: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fake-clock");
    let built = Command::new("rustc")
        .current_dir(&folder)
        .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort"])
        .args(["-Dwarnings", "clock.rs", "-o"])
        .arg(library)
        .output()
        .expect("rustc starts, as it did for this test");
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    library.to_owned()
}

/// When a counted pod's hold began, as the status page has it.
async fn since(world: &World, pod: &str) -> String {
    let status = world.status().await;
    let units = status["units"].as_array().unwrap().iter();
    let mut holds = units.flat_map(|unit| unit["holds"].as_array().unwrap());
    let hold = holds.find(|hold| hold["pod"]["uid"] == pod_uid(pod).as_str());
    let hold = hold.unwrap_or_else(|| panic!("{pod} has nothing: {status}"));
    hold["since"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_wall_clock_that_jumps_by_decades_ends_no_hold_and_doubles_none_over_restarts_too() {
    let mut world = World::new(4).await;
    let mut clock = Clock::new(&world);
    world.start_kubelet().await;
    clock.start_daemon(&mut world);
    world.ready().await;
    world.run_counted("counted", 1).await;
    world
        .run_claimant("claimant", &world.free_device().await)
        .await;
    let held = world.wait_for_holds("Bound", 1).await;
    assert_eq!(held.len(), 2);

    let ten_years = DAY * 3_652;
    // A clock without a battery begins anew.
    let to_1970 = DAY - SignedDuration::from_secs(Timestamp::now().as_second());
    let jumps = [
        -ten_years,
        ten_years,
        to_1970,
        ten_years * 2,
        SignedDuration::ZERO,
        -ten_years,
    ];
    for (number, jump) in jumps.into_iter().enumerate() {
        // Every second time the daemon is away when the clock jumps.
        let is_away = number % 2 == 1;
        if is_away {
            world.kill_daemon();
        }
        clock.jump(jump);
        if is_away {
            clock.start_daemon(&mut world);
            world.ready().await;
            assert_eq!(world.holds().await, held, "after {jump:?} and a restart");
        }
        let (counted, claimant) = (format!("counted-{number}"), format!("claimant-{number}"));
        world.run_counted(&counted, 1).await;
        world
            .run_claimant(&claimant, &world.free_device().await)
            .await;
        let all = world.wait_for_holds("Bound", 2).await;
        clock.assert_wrote(&since(&world, &counted).await);
        let mut units: Vec<_> = all.iter().map(|(unit, ..)| unit).collect();
        units.dedup();
        assert_eq!(units.len(), 4, "everybody has one of his own: {all:?}");
        for hold in &held {
            assert!(all.contains(hold), "{hold:?} has ended after {jump:?}");
        }
        // And back, while the two are on their way out.
        clock.jump(SignedDuration::ZERO);
        world.end_pod(&counted).await;
        world.end_pod(&claimant).await;
        until("what has ended is free", SOON, async || {
            world.holds().await == held
        })
        .await;
        world.ready().await;
    }
    // What it wrote under all those clocks is still what it knows.
    world.stop_daemon().await;
    world.start_daemon();
    world.ready().await;
    assert_eq!(world.holds().await, held);
}
