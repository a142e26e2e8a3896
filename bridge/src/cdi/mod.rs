//! How containers get their GPUs: Container Device Interface specs, and the names that point into them.
//!
//! Owns the spec files of this daemon and what is in them. Knows nothing of who holds what: it is told.
//!
//! Two kinds of specs: one file with all units for counted pods, and one file for each prepared claim. The driver's
//! libraries are in them as far as they are found (`driver`).

mod driver;
mod files;
mod spec;
#[cfg(test)]
mod tests;

use bridge_core::{ClaimUid, DeviceName, UnitId};

pub use self::driver::DriverRoot;
pub use self::files::{CdiFiles, ClaimMinors, Error, Roots};

/// The vendor in the kind of every spec, and the begin of every file name.
const VENDOR: &str = "gpu-bridge.dev";
/// The class of the spec for counted pods.
const COUNTED_CLASS: &str = "gpu";
/// The class of the specs of claims.
const CLAIM_CLASS: &str = "claim";

fn kind(class: &str) -> String {
    format!("{VENDOR}/{class}")
}

/// The fully qualified CDI name with which `Allocate` hands out a unit.
#[must_use]
pub fn counted_device(unit: &UnitId) -> String {
    format!("{}={unit}", kind(COUNTED_CLASS))
}

/// The fully qualified CDI name with which `NodePrepareResources` hands out a device of a claim.
#[must_use]
pub fn claim_device(claim: &ClaimUid, device: &DeviceName) -> String {
    format!("{}={}", kind(CLAIM_CLASS), claim_device_name(claim, device))
}

/// A name is unique among all specs of its kind, so that of a claim's device carries the claim.
fn claim_device_name(claim: &ClaimUid, device: &DeviceName) -> String {
    format!("{claim}-{device}")
}

/// The device in a name that [`claim_device_name`] has made for this claim.
fn device_in(name: &str, claim: &ClaimUid) -> Option<DeviceName> {
    let device = name.strip_prefix(claim.as_str())?.strip_prefix('-')?;
    DeviceName::new(device).ok()
}
