//! The kubelet's files as anybody may have written them. Here for the property tests below, and for `fuzz/`.

use std::path::Path;

use bridge_core::UnitId;

use super::checkpoint::{claims_in, devices_in};

/// Reads bytes as `kubelet_internal_checkpoint` and as `dra_manager_state`, and draws the conclusions that adoption
/// draws from the first.
///
/// # Panics
/// A pod is told to have ids that nobody was told to have, which is what this looks for, beside panics of others.
pub fn read_checkpoints(bytes: &[u8]) {
    let path = Path::new("checkpoint");
    let minors: Vec<_> = ["GPU-a", "GPU-b"].into_iter().zip(0..).collect();
    let minors: Vec<(UnitId, u32)> = minors
        .into_iter()
        .filter_map(|(unit, minor)| Some((UnitId::new(unit).ok()?, minor)))
        .collect();
    if let Ok(devices) = devices_in(path, bytes) {
        let ids = devices.ids(None);
        for entry in devices.entries() {
            let given = entry.for_pool(&minors);
            assert!(given.ids.iter().all(|id| ids.contains(id)));
        }
    }
    drop(claims_in(path, bytes));
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const CLAIMS: &str = include_str!("../../../tests/testkit/golden/dra_manager_state.json");

    /// A sentence of an error stays one, whatever the file says.
    const SENTENCE_BYTES: usize = 4096;

    /// JSON of every shape, with the keys that the readers look for.
    fn anything() -> impl Strategy<Value = Value> {
        let key = prop_oneof![
            2 => prop::sample::select(vec![
                "Data", "PodDeviceEntries", "RegisteredDevices", "PodUID", "ContainerName",
                "ResourceName", "DeviceIDs", "AllocResp", "Checksum", "ClaimInfoStateList",
                "ClaimUID", "Namespace", "ClaimName", "DriverState",
            ]).prop_map(str::to_owned),
            1 => any::<String>(),
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            prop::collection::vec(any::<u8>(), 0..64)
                .prop_map(|bytes| Value::from(STANDARD.encode(bytes))),
            Just(Value::from("nvidia.com/gpu")),
        ];
        leaf.prop_recursive(6, 64, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key.clone(), inner), 0..6)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    /// A book of the right shape with whatever ids and answers.
    fn book() -> impl Strategy<Value = Vec<u8>> {
        let entry = (
            any::<String>(),
            prop::collection::vec(any::<String>(), 0..4),
            prop::collection::vec(any::<u8>(), 0..200),
        );
        prop::collection::vec(entry, 0..4).prop_map(|entries| {
            let entries: Vec<Value> = entries
                .into_iter()
                .map(|(pod, ids, answer)| {
                    json!({"PodUID": pod, "ContainerName": "c", "ResourceName": "nvidia.com/gpu",
                        "DeviceIDs": {"-1": ids}, "AllocResp": STANDARD.encode(answer)})
                })
                .collect();
            json!({"Data": {"PodDeviceEntries": entries}, "Checksum": 0})
                .to_string()
                .into_bytes()
        })
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_checkpoint_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            read_checkpoints(&bytes);
        }

        #[test]
        fn no_json_makes_the_checkpoint_reader_panic(value in anything()) {
            read_checkpoints(value.to_string().as_bytes());
            // As the kubelet's DRA state has it: JSON in JSON, with a checksum over it.
            let inside = value.to_string();
            let checksum = crc32fast::hash(inside.as_bytes());
            read_checkpoints(json!({"Data": inside, "Checksum": checksum}).to_string().as_bytes());
        }

        #[test]
        fn no_book_makes_the_checkpoint_reader_panic(bytes in book()) {
            read_checkpoints(&bytes);
        }

        #[test]
        fn a_damaged_state_of_claims_is_read_as_it_was_or_not_at_all(
            place in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let path = Path::new("dra_manager_state");
            let whole = claims_in(path, CLAIMS.as_bytes()).unwrap();
            let mut bytes = CLAIMS.as_bytes().to_vec();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            if let Ok(read) = claims_in(path, &bytes) {
                prop_assert_eq!(read, whole);
            }
        }
    }

    #[test]
    fn a_file_that_nests_without_end_is_an_error_and_its_sentence_is_short() {
        let path = Path::new("checkpoint");
        let deep = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
        let deep = deep.as_bytes();
        devices_in(path, deep).unwrap_err();
        claims_in(path, deep).unwrap_err();
        let long = "x".repeat(1_000_000);
        for odd in [
            json!({"Data": {"PodDeviceEntries": [
                {"PodUID": long, "ResourceName": "nvidia.com/gpu"}]}}),
            json!({"Data": {"PodDeviceEntries": long}}),
        ] {
            let error = devices_in(path, odd.to_string().as_bytes()).unwrap_err();
            let told = crate::follow::chain(&error);
            assert!(told.len() < SENTENCE_BYTES, "{} bytes", told.len());
        }
    }
}
