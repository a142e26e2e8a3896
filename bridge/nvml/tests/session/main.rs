//! The session against a fake driver: the library that is loaded is a real one, only the GPUs are not.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot set up its node has to fail"
)]

mod events;
mod inventory;
mod processes;
mod topology;
mod trouble;

use std::time::Duration;

use bridge_nvml::{Options, Session, Timeouts};
use fake_nvml::{FakeNode, Fault, Scenario};
use tempfile::TempDir;

/// Long enough for a busy machine, short enough for a test that fails.
const DEADLINE: Duration = Duration::from_secs(30);

/// A fake node in a folder that goes when the value does.
struct Node {
    fake: FakeNode,
    _folder: TempDir,
}

impl Node {
    fn new(scenario: &Scenario) -> Self {
        let folder = TempDir::new().unwrap();
        let fake = FakeNode::create(folder.path(), scenario).unwrap();
        Self {
            fake,
            _folder: folder,
        }
    }

    fn without_library(scenario: &Scenario) -> Self {
        let folder = TempDir::new().unwrap();
        let fake = FakeNode::without_library(folder.path(), scenario).unwrap();
        Self {
            fake,
            _folder: folder,
        }
    }

    fn options(&self) -> Options {
        Options {
            library: Some(self.fake.library()),
            sys_root: self.fake.sys_root(),
            timeouts: Timeouts {
                snapshot: DEADLINE,
                processes: DEADLINE,
                shutdown: DEADLINE,
            },
        }
    }

    fn session(&self) -> Session {
        Session::spawn(self.options()).unwrap()
    }

    fn fault(&self, call: &str, fault: Fault) {
        self.fake.set_fault(call, &fault).unwrap();
    }

    fn uuids(&self) -> Vec<String> {
        self.fake.gpus().into_iter().map(|gpu| gpu.uuid).collect()
    }
}
