//! A unit, a claim and pods for tests in which nothing depends on who they are.

use bridge_core::{ClaimRef, ClaimUid, PodName, PodRef, PodUid, UnitId};

pub(crate) fn unit(number: u32) -> UnitId {
    UnitId::new(format!("GPU-{number}")).unwrap()
}

pub(crate) fn claim() -> ClaimRef {
    ClaimRef {
        uid: ClaimUid::new("c-1").unwrap(),
        namespace: "train".to_owned(),
        name: "llm".to_owned(),
    }
}

pub(crate) fn pod(namespace: &str, name: &str) -> PodRef {
    PodRef {
        name: PodName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        },
        uid: Some(PodUid::new(format!("uid-{name}")).unwrap()),
    }
}
