//! Which Kubernetes the tests run on, and what an older one lacks.
//!
//! `E2E_KUBERNETES=1.34` takes the programs of `tests/cluster/build.sh 1.34`; without it, those of the newest.

use std::path::PathBuf;
use std::process::Command;

use crate::world::repository;

/// The variable with the version.
const VARIABLE: &str = "E2E_KUBERNETES";
/// The minor version of what `tests/cluster/go.mod` names.
const NEWEST: u32 = 37;

/// What not every version has, as its upstream defaults are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Devices have taints, and pods are evicted by them (KEP-5055).
    DeviceTaints,
    /// The scheduler makes claims for counted pods where a class says so (KEP-5004).
    ExtendedResources,
    /// The kubelet knows two sockets for one resource, and stays with the newer when the older one goes.
    TwoPlugins,
}

impl Feature {
    /// The first minor version that has it without a feature gate.
    fn since(self) -> u32 {
        match self {
            Self::DeviceTaints | Self::ExtendedResources => 36,
            Self::TwoPlugins => 37,
        }
    }
}

/// The minor version that is tested.
pub fn minor() -> u32 {
    let Ok(version) = std::env::var(VARIABLE) else {
        return NEWEST;
    };
    let minor = version.strip_prefix("1.").and_then(|it| it.parse().ok());
    minor.unwrap_or_else(|| panic!("{VARIABLE} is {version}, and not one like 1.34"))
}

/// Whether the version that is tested has it.
pub fn has(feature: Feature) -> bool {
    minor() >= feature.since()
}

/// Whether a test has nothing to show on the version that is tested; it is said which, and why.
pub fn lacks(feature: Feature) -> bool {
    if has(feature) {
        return false;
    }
    let since = format!("{feature:?} are there from 1.{} on", feature.since());
    leave_out(&since);
    true
}

/// Whether a test of what older versions lack has nothing to show, since this one has it; that is said too.
pub fn is_new(feature: Feature) -> bool {
    if has(feature) {
        leave_out(&format!("{feature:?} are there"));
    }
    has(feature)
}

/// Says that a test is left out.
fn leave_out(why: &str) {
    let test = std::thread::current();
    let name = test.name().unwrap_or("a test");
    println!("LEFT OUT on Kubernetes 1.{}: {name}: {why}", minor());
}

/// One of the programs of the cluster.
pub fn program(name: &str) -> PathBuf {
    let mut folder = repository().join("tests/cluster/bin");
    if minor() != NEWEST {
        folder.push(format!("1.{}", minor()));
    }
    let program = folder.join(name);
    assert!(
        program.exists(),
        "{} is missing: build the cluster with tests/cluster/build.sh",
        program.display()
    );
    program
}

/// A command of the program that runs the cluster.
pub fn cluster(command: &str) -> Command {
    let mut cluster = Command::new(program("cluster"));
    cluster.arg(command);
    cluster
}
