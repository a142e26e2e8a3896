//! What tenants write into claims, as anybody may have written it. Here for the property tests below, and for `fuzz/`.

use serde_json::Value;

use super::opaque::{Config, Source, check};

/// The most of a sentence that a pod's event shows; the API server cuts the rest off.
const EVENT_BYTES: usize = 1024;

/// Checks bytes as the opaque parameters of a claim, in each of the places where they may stand.
///
/// # Panics
/// What is told of them does not fit into an event, which is what this looks for, beside panics of others.
pub fn check_parameters(bytes: &[u8]) {
    let Ok(parameters) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let named = ["gpu".to_owned()];
    for requests in [&[][..], &named] {
        for source in [Source::Class, Source::Claim] {
            let config = Config {
                source,
                requests,
                parameters: Some(&parameters),
            };
            if let Err(error) = check(&[config], &["gpu", "gpu/sub"]) {
                let told = error.to_string();
                assert!(told.len() <= EVENT_BYTES, "{} bytes: {told}", told.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::opaque::API_VERSION;
    use super::*;

    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            (0_usize..20_000).prop_map(|length| Value::from("ä".repeat(length))),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            let key = prop_oneof![
                prop::sample::select(vec!["sharing", "strategy", "iommu", "kind", "mpsConfig"])
                    .prop_map(str::to_owned),
                any::<String>(),
                (0_usize..20_000).prop_map(|length| "k".repeat(length)),
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_parameters_make_the_check_panic_or_talk_without_end(value in anything()) {
            check_parameters(value.to_string().as_bytes());
        }

        #[test]
        fn no_parameters_of_a_known_kind_make_the_check_panic_or_talk_without_end(
            kind in prop_oneof![
                prop::sample::select(vec!["GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"])
                    .prop_map(str::to_owned),
                any::<String>(),
            ],
            fields in prop::collection::vec((any::<String>(), anything()), 0..4),
            sharing in anything(),
        ) {
            let mut value = json!({"apiVersion": API_VERSION, "kind": kind, "sharing": sharing});
            for (name, field) in fields {
                value[name] = field;
            }
            check_parameters(value.to_string().as_bytes());
        }
    }
}
