//! How many of our devices a claim asks for.
//!
//! CEL is not evaluated: a request is ours unless its DeviceClass or its own selectors name another driver. What the
//! attributes of this node's GPUs rule out is therefore counted all the same, and given up after a while.

use std::collections::BTreeMap;

use bridge_core::Claimed;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceRequest, DeviceSelector, DeviceSubRequest, ExactDeviceRequest, ResourceClaim,
};

use crate::usage::DRIVER;

/// How a selector asks for a driver.
const DRIVER_FIELD: &str = "device.driver";
/// NVIDIA's classes for what this version does not offer: they name our driver, and none of our devices is theirs.
const OTHER_KINDS: [&str; 2] = ["mig.nvidia.com", "vfio.gpu.nvidia.com"];
/// `allocationMode` of a request for every device that matches.
const ALL: &str = "All";

/// Whether devices of ours may be meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Ours,
    Others,
}

/// A DeviceClass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) name: String,
    pub(super) whose: Whose,
}

impl Class {
    pub(super) fn of(class: &DeviceClass) -> Self {
        let name = class.metadata.name.clone().unwrap_or_default();
        let spec = class.spec.as_ref();
        let whose = if OTHER_KINDS.contains(&name.as_str()) {
            Whose::Others
        } else {
            whose(spec.and_then(|spec| spec.selectors.as_deref()))
        };
        Self { name, whose }
    }
}

/// What counts of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ClaimSpec {
    /// It is allocated: it asks for nothing more, and its pods run only where its devices are.
    Allocated {
        /// The pools of our devices among them.
        pools: Vec<String>,
    },
    /// Each of its requests, with its alternatives.
    Open(Vec<Vec<Request>>),
}

/// One way to answer a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    class: String,
    whose: Whose,
    wants: Claimed,
}

/// What a claim asks of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaimAsks {
    /// So much.
    Here(Claimed),
    /// Its pods can't run here.
    Elsewhere,
}

impl ClaimSpec {
    pub(super) fn of(claim: &ResourceClaim) -> Self {
        let status = claim.status.as_ref();
        if let Some(allocation) = status.and_then(|status| status.allocation.as_ref()) {
            let devices = allocation.devices.iter();
            let results = devices.flat_map(|devices| devices.results.iter().flatten());
            let ours = results.filter(|result| result.driver == DRIVER);
            return Self::Allocated {
                pools: ours.map(|result| result.pool.clone()).collect(),
            };
        }
        let devices = claim.spec.iter().filter_map(|spec| spec.devices.as_ref());
        let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
        Self::Open(requests.map(alternatives).collect())
    }

    pub(super) fn asks(&self, classes: &BTreeMap<String, Whose>, node: &str) -> ClaimAsks {
        match self {
            Self::Allocated { pools } if pools.iter().any(|pool| pool != node) => {
                ClaimAsks::Elsewhere
            }
            Self::Allocated { .. } => ClaimAsks::Here(Claimed::Units(0)),
            Self::Open(requests) => {
                let each = requests.iter().map(|request| smallest(request, classes));
                ClaimAsks::Here(each.fold(Claimed::Units(0), plus))
            }
        }
    }
}

/// The scheduler takes the first alternative that it can; the smallest is what the pod could do with.
fn smallest(alternatives: &[Request], classes: &BTreeMap<String, Whose>) -> Claimed {
    let wanted = alternatives.iter().map(|request| {
        let is_ours = classes.get(&request.class) == Some(&Whose::Ours);
        match request.whose {
            Whose::Ours if is_ours => request.wants,
            Whose::Ours | Whose::Others => Claimed::Units(0),
        }
    });
    let smallest = wanted.min_by_key(|wants| match wants {
        Claimed::Units(units) => u64::from(*units),
        Claimed::All => u64::MAX,
    });
    smallest.unwrap_or(Claimed::Units(0))
}

/// Both together.
pub(super) fn plus(one: Claimed, other: Claimed) -> Claimed {
    match (one, other) {
        (Claimed::Units(one), Claimed::Units(other)) => Claimed::Units(one.saturating_add(other)),
        (Claimed::All, Claimed::Units(_) | Claimed::All) | (Claimed::Units(_), Claimed::All) => {
            Claimed::All
        }
    }
}

fn alternatives(request: &DeviceRequest) -> Vec<Request> {
    match &request.exactly {
        Some(exactly) => vec![exact(exactly)],
        None => request.first_available.iter().flatten().map(sub).collect(),
    }
}

fn exact(request: &ExactDeviceRequest) -> Request {
    // Who looks on takes nothing.
    let wants = if request.admin_access == Some(true) {
        Claimed::Units(0)
    } else {
        wants(request.allocation_mode.as_deref(), request.count)
    };
    Request {
        class: request.device_class_name.clone(),
        whose: whose(request.selectors.as_deref()),
        wants,
    }
}

fn sub(request: &DeviceSubRequest) -> Request {
    Request {
        class: request.device_class_name.clone(),
        whose: whose(request.selectors.as_deref()),
        wants: wants(request.allocation_mode.as_deref(), request.count),
    }
}

fn wants(mode: Option<&str>, count: Option<i64>) -> Claimed {
    if mode == Some(ALL) {
        return Claimed::All;
    }
    Claimed::Units(u32::try_from(count.unwrap_or(1)).unwrap_or(u32::MAX))
}

fn whose(selectors: Option<&[DeviceSelector]>) -> Whose {
    let mut expressions = selectors
        .into_iter()
        .flatten()
        .filter_map(|selector| selector.cel.as_ref())
        .map(|cel| cel.expression.as_str());
    let names_another =
        |expression: &str| expression.contains(DRIVER_FIELD) && !expression.contains(DRIVER);
    if expressions.any(names_another) {
        Whose::Others
    } else {
        Whose::Ours
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn classes() -> BTreeMap<String, Whose> {
        let class = |name: &str, expression: &str| {
            let class = json!({
                "metadata": {"name": name},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            });
            let class = Class::of(&serde_json::from_value(class).unwrap());
            (class.name, class.whose)
        };
        [
            class(DRIVER, "device.driver == \"gpu.nvidia.com\""),
            class(
                "big",
                "device.attributes[\"gpu.nvidia.com\"].productName == \"H200\"",
            ),
            class("mig.nvidia.com", "device.driver == \"gpu.nvidia.com\""),
            class("nic", "device.driver == 'dra.net'"),
        ]
        .into()
    }

    fn asks(requests: Value, status: Value) -> ClaimAsks {
        let claim = json!({
            "metadata": {"name": "c"},
            "spec": {"devices": {"requests": requests}},
            "status": status,
        });
        let claim: ResourceClaim = serde_json::from_value(claim).unwrap();
        ClaimSpec::of(&claim).asks(&classes(), "node-1")
    }

    fn exactly(class: &str, more: Value) -> Value {
        let mut request = more;
        request["deviceClassName"] = json!(class);
        json!({"name": "r", "exactly": request})
    }

    #[test]
    fn requests_for_our_devices_are_added_up() {
        let units = |count| ClaimAsks::Here(Claimed::Units(count));
        for (requests, want) in [
            (json!([exactly(DRIVER, json!({}))]), units(1)),
            (json!([exactly(DRIVER, json!({"count": 3}))]), units(3)),
            (
                json!([
                    exactly(DRIVER, json!({"count": 2})),
                    exactly("nic", json!({"count": 4})),
                    exactly("big", json!({})),
                ]),
                units(3),
            ),
            (json!([exactly("mig.nvidia.com", json!({}))]), units(0)),
            (json!([exactly("unheard-of", json!({}))]), units(0)),
            (
                json!([exactly(
                    DRIVER,
                    json!({"adminAccess": true, "allocationMode": "All"})
                )]),
                units(0),
            ),
            (
                json!([
                    exactly(DRIVER, json!({"allocationMode": "All"})),
                    exactly(DRIVER, json!({})),
                ]),
                ClaimAsks::Here(Claimed::All),
            ),
            (
                json!([exactly(
                    DRIVER,
                    json!({"selectors": [{"cel": {"expression": "device.driver == 'x'"}}]})
                )]),
                units(0),
            ),
        ] {
            assert_eq!(asks(requests.clone(), json!({})), want, "{requests}");
        }
    }

    #[test]
    fn of_alternatives_the_smallest_counts() {
        let first = |counts: &[Value]| {
            let each = counts.iter().map(|count| {
                let mut request = count.clone();
                request["name"] = json!("s");
                request["deviceClassName"] = json!(DRIVER);
                request
            });
            json!([{"name": "r", "firstAvailable": each.collect::<Vec<_>>()}])
        };
        let of = |requests| asks(requests, json!({}));
        let either = first(&[json!({"count": 4}), json!({"count": 2})]);
        assert_eq!(of(either), ClaimAsks::Here(Claimed::Units(2)));
        let either = first(&[json!({"allocationMode": "All"}), json!({"count": 8})]);
        assert_eq!(of(either), ClaimAsks::Here(Claimed::Units(8)));
        let all = first(&[json!({"allocationMode": "All"})]);
        assert_eq!(of(all), ClaimAsks::Here(Claimed::All));
    }

    #[test]
    fn an_allocated_claim_asks_for_nothing_and_ties_its_pods_to_its_node() {
        let allocated = |driver: &str, pool: &str| {
            let result = json!({
                "request": "r", "driver": driver, "pool": pool, "device": "gpu-0",
            });
            asks(
                json!([exactly(DRIVER, json!({}))]),
                json!({"allocation": {"devices": {"results": [result]}}}),
            )
        };
        let nothing = ClaimAsks::Here(Claimed::Units(0));
        assert_eq!(allocated(DRIVER, "node-1"), nothing);
        assert_eq!(allocated("dra.net", "somewhere"), nothing);
        assert_eq!(allocated(DRIVER, "node-2"), ClaimAsks::Elsewhere);
    }
}
