//! A device of the slice: names, types and values as NVIDIA's DRA driver publishes them, so that claims and CEL
//! selectors written for it go on working.

use std::collections::BTreeMap;

use bridge_core::{ClaimOffer, Gpu, Taint, TaintEffect};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity, DeviceTaint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::TaintSupport;
use crate::dra::TAINT_KEY;

/// The longest string or version value of an attribute, in bytes (`DeviceAttributeMaxValueLength` in k8s.io/api
/// `resource/v1/types.go`). One longer value would make the server refuse the whole slice.
const VALUE_LIMIT: usize = 64;

/// The devices of a slice, in the order of the offers: it is the order in which the scheduler takes them.
pub(super) fn all(offers: &[ClaimOffer], taints: TaintSupport) -> Vec<Device> {
    offers
        .iter()
        .filter(|offer| match taints {
            TaintSupport::Unknown | TaintSupport::Kept => true,
            TaintSupport::Dropped => offer.taint.is_none() || offer.held_by_claim,
        })
        .map(|offer| Device {
            name: offer.device.to_string(),
            attributes: Some(attributes(&offer.gpu)),
            capacity: Some(capacity(&offer.gpu)),
            taints: match taints {
                TaintSupport::Unknown | TaintSupport::Kept => {
                    offer.taint.map(|taint| vec![self::taint(taint)])
                }
                TaintSupport::Dropped => None,
            },
            ..Device::default()
        })
        .collect()
}

/// Gives taints that were there before the time that they had: the server would write the present one.
pub(super) fn keep_times(before: &[Device], devices: &mut [Device]) {
    for device in devices {
        let Some(old) = before.iter().find(|old| old.name == device.name) else {
            continue;
        };
        for taint in device.taints.iter_mut().flatten() {
            let same = old.taints.iter().flatten().find(|old| {
                old.key == taint.key && old.value == taint.value && old.effect == taint.effect
            });
            taint.time_added = same.and_then(|old| old.time_added.clone());
        }
    }
}

/// Whether a device has no taint that keeps claims off.
pub(crate) fn is_open(device: &Device) -> bool {
    let effects = [TaintEffect::NoSchedule, TaintEffect::NoExecute].map(TaintEffect::as_str);
    let mut taints = device.taints.iter().flatten();
    !taints.any(|taint| effects.contains(&taint.effect.as_str()))
}

/// Takes the times out, to compare.
pub(super) fn forget_times(devices: &mut [Device]) {
    for taint in devices
        .iter_mut()
        .flat_map(|device| device.taints.iter_mut().flatten())
    {
        taint.time_added = None;
    }
}

fn taint(taint: Taint) -> DeviceTaint {
    DeviceTaint {
        key: TAINT_KEY.to_owned(),
        value: Some(taint.reason.as_str().to_owned()),
        effect: taint.effect.as_str().to_owned(),
        time_added: None,
    }
}

fn attributes(gpu: &Gpu) -> BTreeMap<String, DeviceAttribute> {
    let (cc_major, cc_minor) = gpu.compute_capability;
    let (cuda_major, cuda_minor) = gpu.cuda_driver_version;
    let strings = [
        ("type", Some("gpu".to_owned())),
        ("uuid", Some(gpu.uuid.to_string())),
        ("productName", Some(gpu.product_name.clone())),
        ("brand", Some(gpu.brand.clone())),
        ("architecture", Some(gpu.architecture.clone())),
        ("addressingMode", gpu.addressing_mode.clone()),
        (
            "resource.kubernetes.io/pciBusID",
            Some(gpu.pci_bus_id.to_lowercase()),
        ),
        ("resource.kubernetes.io/pcieRoot", gpu.pcie_root.clone()),
    ]
    .into_iter()
    .filter_map(|(name, value)| {
        let value = value.filter(|value| value.len() <= VALUE_LIMIT)?;
        Some((
            name,
            DeviceAttribute {
                string: Some(value),
                ..DeviceAttribute::default()
            },
        ))
    });
    let versions = [
        (
            "cudaComputeCapability",
            Some(format!("{cc_major}.{cc_minor}.0")),
        ),
        ("driverVersion", semver(&gpu.driver_version)),
        (
            "cudaDriverVersion",
            Some(format!("{cuda_major}.{cuda_minor}.0")),
        ),
    ]
    .into_iter()
    .filter_map(|(name, value)| {
        Some((
            name,
            DeviceAttribute {
                version: Some(value?),
                ..DeviceAttribute::default()
            },
        ))
    });
    let numa_node = gpu.numa_node.map(|node| {
        (
            "resource.kubernetes.io/numaNode",
            DeviceAttribute {
                int: Some(i64::from(node)),
                ..DeviceAttribute::default()
            },
        )
    });
    strings
        .chain(versions)
        .chain(numa_node)
        .map(|(name, attribute)| (name.to_owned(), attribute))
        .collect()
}

/// A driver version as a semantic version: three numbers without leading zeros (`550.54.05` is `550.54.5`,
/// `440.33` is `440.33.0`). `None` where it has more parts or other characters; the attribute is then left out.
fn semver(text: &str) -> Option<String> {
    let mut numbers = [0_u64; 3];
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() > numbers.len() {
        return None;
    }
    for (number, part) in numbers.iter_mut().zip(parts) {
        if !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *number = part.parse().ok()?;
    }
    let [major, minor, patch] = numbers;
    Some(format!("{major}.{minor}.{patch}"))
}

fn capacity(gpu: &Gpu) -> BTreeMap<String, DeviceCapacity> {
    let memory = DeviceCapacity {
        value: Quantity(binary_si(gpu.memory_bytes)),
        ..DeviceCapacity::default()
    };
    BTreeMap::from([("memory".to_owned(), memory)])
}

/// A number of bytes as Kubernetes writes a quantity of format BinarySI: the largest unit that leaves a whole
/// number (`Quantity.CanonicalizeBytes` in k8s.io/apimachinery `pkg/api/resource/quantity.go`).
fn binary_si(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut number, mut unit) = (bytes, 0);
    while number >= 1024 && number.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        number /= 1024;
        unit += 1;
    }
    format!("{number}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_version_becomes_a_semantic_version() {
        let cases = [
            ("580.126.20", Some("580.126.20")),
            ("535.104.05", Some("535.104.5")),
            ("440.33", Some("440.33.0")),
            ("580", Some("580.0.0")),
            ("1.2.3.4", None),
            ("580.12.a", None),
            ("", None),
            ("580..1", None),
        ];
        for (text, wanted) in cases {
            assert_eq!(semver(text).as_deref(), wanted, "{text}");
        }
    }

    #[test]
    fn memory_is_written_as_kubernetes_writes_it() {
        let cases = [
            (0, "0"),
            (1000, "1000"),
            (1024, "1Ki"),
            (81_559 << 20, "81559Mi"),
            (80 << 30, "80Gi"),
            (85_899_345_921, "85899345921"),
        ];
        for (bytes, wanted) in cases {
            assert_eq!(binary_si(bytes), wanted);
        }
    }
}
