//! Numbers of the model as names of the core.

use bridge_core::{ClaimRef, ClaimUid, DeviceId, DeviceName, PodName, PodUid, UnitId};

/// The pool in every allocation result.
pub(crate) const POOL: &str = "n";

pub(crate) fn unit(number: usize) -> UnitId {
    UnitId::new(format!("U{number}")).expect("a letter and a digit are a UUID")
}

pub(crate) fn id(number: usize) -> DeviceId {
    DeviceId::of_unit(unit(number))
}

pub(crate) fn device(number: usize) -> DeviceName {
    DeviceName::new(format!("gpu-{number}")).expect("the name is a label")
}

/// The number of a unit.
pub(crate) fn number_of(unit: &UnitId) -> usize {
    let digit = unit.as_str().bytes().last();
    usize::from(digit.expect("no UUID is empty") - b'0')
}

pub(crate) fn pod_uid(number: usize) -> PodUid {
    PodUid::new(format!("p{number}")).expect("a letter and a digit are a UID")
}

pub(crate) fn pod_name(number: usize) -> PodName {
    PodName {
        namespace: String::new(),
        name: format!("p{number}"),
    }
}

pub(crate) fn claim_uid(number: usize) -> ClaimUid {
    ClaimUid::new(format!("k{number}")).expect("a letter and a digit are a UID")
}

pub(crate) fn claim_ref(number: usize) -> ClaimRef {
    ClaimRef {
        uid: claim_uid(number),
        namespace: String::new(),
        name: format!("k{number}"),
    }
}
