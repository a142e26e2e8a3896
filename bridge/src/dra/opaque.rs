//! Opaque device configuration of our driver: what a claim or a DeviceClass asks for beside the device itself.
//!
//! Kinds and fields are those that NVIDIA's DRA driver reads, so that claims written for it mean the same here,
//! or are refused by name: a configuration is never ignored in silence. Pure; it knows no Kubernetes type.

mod kinds;

use bridge_core::shown;
use serde::Deserialize;
use serde_json::Value;

use self::kinds::Sharing;

/// The API version of every kind below.
pub(super) const API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// Where a configuration was written. Later sources win.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// By the admin, in the DeviceClass.
    Class,
    /// By the user, in the claim.
    Claim,
}

/// One configuration for our driver in an allocation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config<'a> {
    /// Who wrote it.
    pub(super) source: Source,
    /// The requests it is for; empty: all of them.
    pub(super) requests: &'a [String],
    /// The parameters; `None`: it is of another form than opaque parameters.
    pub(super) parameters: Option<&'a Value>,
}

/// Why a claim's configuration can't be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It does not decode.
    #[error("the {kind} for driver gpu.nvidia.com is not valid: {why}")]
    Invalid {
        /// Its kind, or a word for it where it has none.
        kind: String,
        /// The decoder's words.
        why: String,
    },
    /// No kind that we know.
    #[error(
        "the configuration for driver gpu.nvidia.com is of kind {kind} in {api_version}, which this version does not know; it knows GpuConfig in {API_VERSION}"
    )]
    UnknownKind {
        /// `apiVersion`.
        api_version: String,
        /// `kind`.
        kind: String,
    },
    /// A kind for other devices, given to a request that was answered with a whole GPU.
    #[error("request {request} was given a whole GPU, but a {kind} names it")]
    WrongKind {
        /// `kind`.
        kind: &'static str,
        /// The request.
        request: String,
    },
    /// Known, and not served yet.
    #[error("the {kind} asks for {field}, and sharing is not served by this version")]
    NotServed {
        /// `kind`.
        kind: &'static str,
        /// The field, with its value where that is a word.
        field: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gpu,
    Mig,
    Vfio,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "GpuConfig",
            Self::Mig => "MigDeviceConfig",
            Self::Vfio => "VfioDeviceConfig",
        }
    }
}

#[derive(Deserialize)]
struct Head {
    #[serde(rename = "apiVersion", default)]
    api_version: String,
    #[serde(default)]
    kind: String,
}

struct Decoded<'a> {
    source: Source,
    requests: &'a [String],
    kind: Kind,
    sharing: Option<Sharing>,
}

/// Checks that every result of an allocation can be served as configured. Every result is a whole GPU.
///
/// # Errors
/// A configuration does not decode, is of a kind that does not fit, or asks for what is not served.
pub(super) fn check(configs: &[Config<'_>], results: &[&str]) -> Result<(), Error> {
    let mut decoded = configs
        .iter()
        .map(decode)
        .collect::<Result<Vec<_>, Error>>()?;
    // A stable sort: within one source the later entry wins.
    decoded.sort_by_key(|config| config.source);
    for request in results {
        let Some(winner) = winner(&decoded, request)? else {
            continue;
        };
        if let Some(sharing) = &winner.sharing {
            return Err(not_served(winner.kind, sharing));
        }
    }
    Ok(())
}

fn decode<'a>(config: &Config<'a>) -> Result<Decoded<'a>, Error> {
    let invalid = |kind: &str, error: serde_json::Error| Error::Invalid {
        kind: kind.to_owned(),
        // The decoder repeats what it did not expect.
        why: shown(&error.to_string()),
    };
    let Some(parameters) = config.parameters.filter(|it| it.is_object()) else {
        return Err(Error::Invalid {
            kind: "configuration".to_owned(),
            why: "it has no opaque parameters, or they are not an object".to_owned(),
        });
    };
    let head = Head::deserialize(parameters).map_err(|error| invalid("configuration", error))?;
    let kind = match (head.api_version.as_str(), head.kind.as_str()) {
        (API_VERSION, "GpuConfig") => Kind::Gpu,
        (API_VERSION, "MigDeviceConfig") => Kind::Mig,
        (API_VERSION, "VfioDeviceConfig") => Kind::Vfio,
        (api_version, kind) => {
            let named = |text: &str| shown(if text.is_empty() { "(none)" } else { text });
            return Err(Error::UnknownKind {
                api_version: named(api_version),
                kind: named(kind),
            });
        }
    };
    let sharing = match kind {
        Kind::Gpu => kinds::GpuConfig::deserialize(parameters).map(|config| config.sharing),
        Kind::Mig => kinds::MigDeviceConfig::deserialize(parameters)
            .map(|config| config.sharing.map(Sharing::from)),
        Kind::Vfio => kinds::VfioDeviceConfig::deserialize(parameters).map(|_| None),
    };
    let sharing = sharing.map_err(|error| invalid(kind.as_str(), error))?;
    Ok(Decoded {
        source: config.source,
        requests: config.requests,
        kind,
        sharing,
    })
}

/// The last configuration that is for the request. One that names the request must fit; one for all requests is
/// passed over where its kind is for other devices.
fn winner<'a, 'b>(
    decoded: &'b [Decoded<'a>],
    request: &str,
) -> Result<Option<&'b Decoded<'a>>, Error> {
    for config in decoded.iter().rev() {
        let named = config
            .requests
            .iter()
            .any(|name| name == request || name == base_request(request));
        match config.kind {
            Kind::Gpu if named || config.requests.is_empty() => return Ok(Some(config)),
            Kind::Mig | Kind::Vfio if named => {
                return Err(Error::WrongKind {
                    kind: config.kind.as_str(),
                    request: request.to_owned(),
                });
            }
            Kind::Gpu | Kind::Mig | Kind::Vfio => {}
        }
    }
    Ok(None)
}

/// The name of a request without that of the sub-request that was chosen for it.
pub(super) fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Why the sharing that a device would get is not given to it: it is wrong, or it is right and not served.
fn not_served(kind: Kind, sharing: &Sharing) -> Error {
    match sharing.mistake() {
        Some(why) => Error::Invalid {
            kind: kind.as_str().to_owned(),
            why,
        },
        None => Error::NotServed {
            kind: kind.as_str(),
            field: format!("sharing (strategy {})", shown(sharing.strategy())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(parameters: Value) -> Result<(), Error> {
        check(
            &[Config {
                source: Source::Claim,
                requests: &[],
                parameters: Some(&parameters),
            }],
            &["gpu"],
        )
    }

    fn gpu_config(sharing: Option<&str>) -> Value {
        match sharing {
            None => json!({"apiVersion": API_VERSION, "kind": "GpuConfig"}),
            Some(strategy) => {
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy}})
            }
        }
    }

    #[test]
    fn a_gpu_config_without_sharing_is_served() {
        assert_eq!(one(gpu_config(None)), Ok(()));
        assert_eq!(
            one(json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": null})),
            Ok(())
        );
    }

    #[test]
    fn sharing_is_refused_by_kind_field_and_strategy() {
        let error = one(gpu_config(Some("MPS"))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the GpuConfig asks for sharing (strategy MPS), and sharing is not served by this version"
        );
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = one(json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "shraing": {}}))
            .unwrap_err();
        assert!(error.to_string().contains("shraing"), "{error}");
    }

    fn sharing(sharing: &Value) -> Error {
        one(json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": sharing}))
            .unwrap_err()
    }

    #[test]
    fn sharing_is_read_to_its_last_field() {
        let cases = [
            (json!("MPS"), "invalid type"),
            (
                json!({"strategy": "TimeSlicing", "interval": "Long"}),
                "unknown field `interval`",
            ),
            (
                json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"intervall": "Long"}}),
                "unknown field `intervall`",
            ),
            (
                json!({"strategy": "MPS", "mpsConfig": {"threads": 50}}),
                "unknown field `threads`",
            ),
            (
                json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": "50"}}),
                "invalid type",
            ),
            (
                json!({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "10GB"}}),
                "10GB",
            ),
            (
                json!({"strategy": "MPS", "mpsConfig": {"defaultPerDevicePinnedMemoryLimit": {"0": "ten"}}}),
                "ten",
            ),
        ];
        for (given, word) in cases {
            let error = sharing(&given);
            assert!(matches!(error, Error::Invalid { .. }), "{given}: {error}");
            assert!(error.to_string().contains(word), "{given}: {error}");
        }
    }

    #[test]
    fn sharing_with_a_wrong_value_is_told_from_sharing_that_is_not_served() {
        let wrong = [
            (json!({}), "sharing.strategy is \"\""),
            (
                json!({"strategy": "Fabric"}),
                "sharing.strategy is \"Fabric\"",
            ),
            (
                json!({"strategy": "TimeSlicing", "mpsConfig": {}}),
                "mpsConfig",
            ),
            (
                json!({"strategy": "MPS", "timeSlicingConfig": {}}),
                "timeSlicingConfig",
            ),
            (
                json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Longest"}}),
                "\"Longest\"",
            ),
            (
                json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 101}}),
                "101",
            ),
        ];
        for (given, word) in wrong {
            let error = sharing(&given);
            assert!(matches!(error, Error::Invalid { .. }), "{given}: {error}");
            assert!(error.to_string().contains(word), "{given}: {error}");
        }
        let right = [
            json!({"strategy": "TimeSlicing"}),
            json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}),
            json!({"strategy": "MPS", "mpsConfig": {
                "defaultActiveThreadPercentage": 50,
                "defaultPinnedDeviceMemoryLimit": "10Gi",
                "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi", "GPU-1": 1_073_741_824},
                "multiUser": true,
            }}),
        ];
        for given in right {
            let error = sharing(&given);
            assert!(matches!(error, Error::NotServed { .. }), "{given}: {error}");
        }
    }

    #[test]
    fn what_does_not_decode_is_refused_also_where_another_configuration_wins() {
        let typo =
            json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {"stratgy": "MPS"}});
        let vfio =
            json!({"apiVersion": API_VERSION, "kind": "VfioDeviceConfig", "iommu": {"backend": 1}});
        let plain = gpu_config(None);
        for wrong in [Some(&typo), Some(&vfio), None] {
            let entry = |source, parameters| Config {
                source,
                requests: &[],
                parameters,
            };
            let configs = [
                entry(Source::Class, wrong),
                entry(Source::Claim, Some(&plain)),
            ];
            let error = check(&configs, &["gpu"]).unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }), "{error}");
        }
    }

    #[test]
    fn a_field_of_the_wrong_case_is_unknown() {
        assert!(
            one(json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "Sharing": null})).is_err()
        );
    }

    #[test]
    fn an_unknown_kind_or_version_is_refused_by_name() {
        for parameters in [
            json!({"apiVersion": "gpu.nvidia.com/v1alpha1", "kind": "GpuConfig"}),
            json!({"apiVersion": API_VERSION, "kind": "NpuConfig"}),
            json!({}),
        ] {
            assert!(matches!(one(parameters), Err(Error::UnknownKind { .. })));
        }
        assert!(matches!(one(json!("text")), Err(Error::Invalid { .. })));
    }

    #[test]
    fn the_claim_wins_over_the_class_and_the_later_over_the_earlier() {
        let (mps, plain) = (gpu_config(Some("MPS")), gpu_config(None));
        let all: [String; 0] = [];
        let entry = |source, parameters| Config {
            source,
            requests: &all,
            parameters: Some(parameters),
        };
        let served = [
            vec![entry(Source::Claim, &plain), entry(Source::Class, &mps)],
            vec![entry(Source::Claim, &mps), entry(Source::Claim, &plain)],
        ];
        for configs in served {
            assert_eq!(check(&configs, &["gpu"]), Ok(()));
        }
        let refused = [
            vec![entry(Source::Claim, &mps), entry(Source::Class, &plain)],
            vec![entry(Source::Class, &plain), entry(Source::Class, &mps)],
        ];
        for configs in refused {
            assert!(check(&configs, &["gpu"]).is_err());
        }
    }

    #[test]
    fn a_config_counts_for_the_requests_it_names() {
        let mps = gpu_config(Some("MPS"));
        let named = ["big".to_owned()];
        let config = [Config {
            source: Source::Claim,
            requests: &named,
            parameters: Some(&mps),
        }];
        assert_eq!(check(&config, &["small"]), Ok(()));
        assert!(check(&config, &["small", "big"]).is_err());
        assert!(check(&config, &["big/first"]).is_err());
    }

    #[test]
    fn a_config_for_mig_is_passed_over_unless_it_names_the_request() {
        let mig = json!({"apiVersion": API_VERSION, "kind": "MigDeviceConfig", "sharing": {"strategy": "MPS"}});
        assert_eq!(one(mig.clone()), Ok(()));
        let named = ["gpu".to_owned()];
        let config = [Config {
            source: Source::Claim,
            requests: &named,
            parameters: Some(&mig),
        }];
        assert!(matches!(
            check(&config, &["gpu"]),
            Err(Error::WrongKind { .. })
        ));
    }
}
