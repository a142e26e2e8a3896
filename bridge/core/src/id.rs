//! Names of things, each its own type, checked where they enter.

use std::fmt;
use std::sync::Arc;

/// A text from outside is not a usable identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not a valid {what}: {why}")]
pub struct InvalidId {
    what: &'static str,
    value: String,
    why: &'static str,
}

/// The longest id the kubelet takes for a device (`pkg/kubelet/apis/deviceplugin/v1beta1/api.proto`, `Device.ID`).
const DEVICE_ID_LIMIT: usize = 63;
/// The longest DNS label; device names in a ResourceSlice are labels (`resource.k8s.io/v1`, `Device.name`).
const DNS_LABEL_LIMIT: usize = 63;
/// UIDs of API objects are opaque; this only keeps nonsense out of file names and log lines.
const UID_LIMIT: usize = 128;
/// The most of a text from outside that a sentence or a log line repeats, in characters: two of them, of letters with two
/// bytes, leave half of an event's 1024 bytes to the sentence.
const SHOWN_LIMIT: usize = 128;
/// The longest name of an API object whose name is a DNS subdomain, in bytes.
pub const NAME_LIMIT: usize = 253;
/// Separates a unit from the number of its share in a kubelet device id, as NVIDIA's device plugin does.
const SHARE_SEPARATOR: &str = "::";

/// A text from outside as a sentence or a log line may repeat it: cut off where it makes no sense any more, and
/// without characters that a terminal obeys.
#[must_use]
pub fn shown(text: &str) -> String {
    let harmless = |c: char| {
        if c.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            c
        }
    };
    let mut shown: String = text.chars().take(SHOWN_LIMIT).map(harmless).collect();
    if text.chars().nth(SHOWN_LIMIT).is_some() {
        shown.push_str(&format!("… ({} bytes)", text.len()));
    }
    shown
}

/// Whether a text can be the name of an API object, such as a Node, a namespace or a claim: a DNS subdomain
/// (kubernetes v1.37.2, `staging/src/k8s.io/apimachinery/pkg/util/validation`, `IsDNS1123Subdomain`).
#[must_use]
pub fn is_object_name(text: &str) -> bool {
    let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let label = |label: &str| {
        label.starts_with(ends)
            && label.ends_with(ends)
            && label.chars().all(|c| ends(c) || c == '-')
    };
    text.len() <= NAME_LIMIT && text.split('.').all(label)
}

fn check(what: &'static str, value: &str, limit: usize) -> Result<(), InvalidId> {
    let fail = |why| {
        Err(InvalidId {
            what,
            value: shown(value),
            why,
        })
    };
    if value.is_empty() {
        return fail("it is empty");
    }
    if value.len() > limit {
        return fail("it is too long");
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !value.chars().all(allowed) {
        return fail("only letters, digits, '-', '_' and '.' are allowed");
    }
    Ok(())
}

/// Names are copied with every transition, so a copy is a count and no new text.
macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $what:literal, $limit:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Takes a text from outside.
            ///
            /// # Errors
            /// The text is empty, too long, or has a character that no such identifier has.
            pub fn new(value: impl Into<String>) -> Result<Self, InvalidId> {
                let value = value.into();
                check($what, &value, $limit)?;
                Ok(Self(value.into()))
            }

            /// The text itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

identifier!(
    /// The identity of a unit: the UUID of a GPU (`GPU-…`) or of a MIG instance (`MIG-…`), as NVML's
    /// `nvmlDeviceGetUUID` gives it. Never an index: indices move when a GPU drops out.
    UnitId, "unit UUID", DEVICE_ID_LIMIT
);
identifier!(
    /// The UID of a `ResourceClaim` (`metadata.uid`).
    ClaimUid, "claim UID", UID_LIMIT
);
identifier!(
    /// The UID of a `Pod` (`metadata.uid`).
    PodUid, "pod UID", UID_LIMIT
);
identifier!(
    /// The name of a device in a `ResourceSlice`: `gpu-<number>` for a whole GPU, as NVIDIA's DRA driver names them.
    DeviceName, "device name", DNS_LABEL_LIMIT
);

/// An id that the kubelet's device manager knows: the UUID of a unit, and the number of the share where a unit
/// has more than one (`UUID::k`). PodResources readers such as dcgm-exporter join on the UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    unit: UnitId,
    share: Option<u32>,
}

impl DeviceId {
    /// The id of a unit that is not shared.
    #[must_use]
    pub fn of_unit(unit: UnitId) -> Self {
        Self { unit, share: None }
    }

    /// Reads the text that the kubelet sends.
    ///
    /// # Errors
    /// The part before `::` is no unit UUID, or the part behind is no number.
    pub fn parse(text: &str) -> Result<Self, InvalidId> {
        let (unit, share) = match text.split_once(SHARE_SEPARATOR) {
            None => (text, None),
            Some((unit, share)) => {
                let number = share.parse().map_err(|_| InvalidId {
                    what: "device id",
                    value: shown(text),
                    why: "the share behind '::' is not a number",
                })?;
                (unit, Some(number))
            }
        };
        Ok(Self {
            unit: UnitId::new(unit)?,
            share,
        })
    }

    /// The unit whose UUID the id carries. Which unit stands behind the id is for the ledger to say: see
    /// [`Ledger::unit_behind`](crate::Ledger::unit_behind).
    #[must_use]
    pub fn named_unit(&self) -> &UnitId {
        &self.unit
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.share {
            None => write!(f, "{}", self.unit),
            Some(share) => write!(f, "{}{SHARE_SEPARATOR}{share}", self.unit),
        }
    }
}

/// A pod by name, as PodResources names it. Names come back: a StatefulSet gives its new pod the old one's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodName {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod that holds something. The UID is the identity; it is missing only while no pod list has named it yet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// Namespace and name.
    pub name: PodName,
    /// `metadata.uid`, once known.
    pub uid: Option<PodUid>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

/// A `ResourceClaim`: the UID is the identity, the names are for people.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimRef {
    /// `metadata.uid`.
    pub uid: ClaimUid,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A `ResourceClaim` by name, as pods name theirs. Another claim may have had the name before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimName {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl ClaimRef {
    /// The name without the identity.
    #[must_use]
    pub fn full_name(&self) -> ClaimName {
        ClaimName {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_id_survives_the_way_through_the_kubelet() {
        for text in ["GPU-1", "GPU-1::3"] {
            assert_eq!(DeviceId::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_id_that_could_leave_a_folder_is_not_taken() {
        assert!(ClaimUid::new("../x").is_err());
        assert!(UnitId::new("").is_err());
        assert!(DeviceId::parse("GPU-1::x").is_err());
        assert!(DeviceName::new("g".repeat(64)).is_err());
    }
}
