//! The kinds of `resource.nvidia.com/v1beta1`, field by field: what NVIDIA's DRA driver decodes is decoded here, and
//! nothing else is. A value that decodes and makes no sense is a mistake only of the configuration that counts.

use std::collections::BTreeMap;

use bridge_core::shown;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, de};
use serde_json::Value;

/// Sharing by turns.
const TIME_SLICING: &str = "TimeSlicing";
/// Sharing through NVIDIA's MPS.
const MPS: &str = "MPS";
/// How long a turn of time-slicing may be.
const INTERVALS: [&str; 4] = ["Default", "Short", "Medium", "Long"];
/// What a client of MPS may have of a GPU's threads, in percent.
const PERCENT: std::ops::RangeInclusive<i64> = 0..=100;

/// Of a whole GPU.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GpuConfig {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    pub(super) sharing: Option<Sharing>,
}

/// Of a MIG instance.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MigDeviceConfig {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    pub(super) sharing: Option<MigSharing>,
}

/// Of a GPU that is given to a virtual machine.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VfioDeviceConfig {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(rename = "iommu")]
    _iommu: Option<Iommu>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Iommu {
    #[serde(rename = "backendPolicy")]
    _backend_policy: Option<String>,
    #[serde(rename = "enableAPIDevice")]
    _enable_api_device: Option<bool>,
}

/// How several users of one claim share its GPU.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Sharing {
    strategy: Option<String>,
    time_slicing_config: Option<TimeSlicing>,
    mps_config: Option<Mps>,
}

/// The same for a MIG instance, which has no turns of its own.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct MigSharing {
    strategy: Option<String>,
    mps_config: Option<Mps>,
}

impl From<MigSharing> for Sharing {
    fn from(sharing: MigSharing) -> Self {
        Self {
            strategy: sharing.strategy,
            time_slicing_config: None,
            mps_config: sharing.mps_config,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeSlicing {
    interval: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Mps {
    default_active_thread_percentage: Option<i64>,
    #[serde(rename = "defaultPinnedDeviceMemoryLimit")]
    _default_pinned_device_memory_limit: Option<Quantity>,
    #[serde(rename = "defaultPerDevicePinnedMemoryLimit")]
    _default_per_device_pinned_memory_limit: Option<BTreeMap<String, Quantity>>,
    #[serde(rename = "multiUser")]
    _multi_user: Option<bool>,
}

impl Sharing {
    /// The strategy as it was written; empty if it was not.
    pub(super) fn strategy(&self) -> &str {
        self.strategy.as_deref().unwrap_or_default()
    }

    /// What is wrong with the values, if anything is.
    pub(super) fn mistake(&self) -> Option<String> {
        match self.strategy() {
            TIME_SLICING if self.mps_config.is_some() => {
                Some(other_strategys("mpsConfig", TIME_SLICING))
            }
            TIME_SLICING => self.time_slicing_config.as_ref()?.mistake(),
            MPS if self.time_slicing_config.is_some() => {
                Some(other_strategys("timeSlicingConfig", MPS))
            }
            MPS => self.mps_config.as_ref()?.mistake(),
            unknown => Some(format!(
                "sharing.strategy is \"{}\", and the strategies are {TIME_SLICING} and {MPS}",
                shown(unknown)
            )),
        }
    }
}

fn other_strategys(field: &str, strategy: &str) -> String {
    format!("sharing.{field} is not for the strategy {strategy}")
}

impl TimeSlicing {
    fn mistake(&self) -> Option<String> {
        let interval = self.interval.as_deref()?;
        (!INTERVALS.contains(&interval)).then(|| {
            format!(
                "sharing.timeSlicingConfig.interval is \"{}\", and the intervals are {}",
                shown(interval),
                INTERVALS.join(", ")
            )
        })
    }
}

impl Mps {
    fn mistake(&self) -> Option<String> {
        let percent = self.default_active_thread_percentage?;
        (!PERCENT.contains(&percent)).then(|| {
            format!(
                "sharing.mpsConfig.defaultActiveThreadPercentage is {percent}, and may be {} to {}",
                PERCENT.start(),
                PERCENT.end()
            )
        })
    }
}

/// A quantity of Kubernetes: a number, or one with a suffix (`Quantity` in k8s.io/apimachinery `pkg/api/resource`).
#[derive(Debug)]
struct Quantity;

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = match &value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => {
                return Err(D::Error::invalid_type(
                    de::Unexpected::Other("something else"),
                    &"a quantity such as 10Gi",
                ));
            }
        };
        if is_quantity(&text) {
            Ok(Self)
        } else {
            Err(D::Error::custom(format_args!(
                "\"{}\" is not a quantity such as 10Gi",
                shown(&text)
            )))
        }
    }
}

fn is_quantity(text: &str) -> bool {
    const SUFFIXES: [&str; 16] = [
        "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
    ];
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let is_number = number.bytes().any(|byte| byte.is_ascii_digit())
        && number.bytes().filter(|byte| *byte == b'.').count() <= 1;
    let exponent = suffix
        .strip_prefix(['e', 'E'])
        .map(|it| it.strip_prefix(['+', '-']).unwrap_or(it));
    let is_exponent =
        exponent.is_some_and(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()));
    is_number && (SUFFIXES.contains(&suffix) || is_exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantity_is_what_kubernetes_takes_for_one() {
        for good in [
            "0", "10", "1.5Gi", "-3", "+.5", "10M", "1e3", "1E-3", "4E", "100m",
        ] {
            assert!(is_quantity(good), "{good}");
        }
        for bad in ["", "Gi", "10GB", "1.2.3", "1e", "ten", "10 Gi", ".", "1-"] {
            assert!(!is_quantity(bad), "{bad}");
        }
    }
}
