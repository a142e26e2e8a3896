//! The store's files as anybody may have written them. Here for the property tests below, and for `fuzz/`.

use super::{envelope, format};

/// Reads bytes as each of the store's files, and text as the content of one whose checksum is good. A ledger that is
/// understood keeps its own rules, and is written and read again as it is.
///
/// # Panics
/// It is not so, which is what this looks for.
pub fn read_files(bytes: &[u8]) {
    read_file(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        read_file(&envelope::seal(text));
    }
}

fn read_file(bytes: &[u8]) {
    drop(format::decode_unprepared(bytes));
    let Ok(read) = format::decode(bytes) else {
        return;
    };
    let written = format::encode(&read.ledger, &read.unknown, "any", &read.boot_id)
        .expect("a ledger that was read keeps its rules");
    let again = format::decode(&written).expect("what was written can be read");
    assert_eq!(again.ledger, read.ledger);
    assert_eq!(again.unknown, read.unknown);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    const GOLDEN: &str = include_str!("../../../tests/golden/ledger-v1-later-fields.json");

    fn golden() -> Value {
        let whole: Value = serde_json::from_str(GOLDEN).unwrap();
        whole["content"].clone()
    }

    /// Every place in a value, as a JSON pointer.
    fn places(value: &Value, here: &str, found: &mut Vec<String>) {
        found.push(here.to_owned());
        match value {
            Value::Array(members) => {
                for (index, member) in members.iter().enumerate() {
                    places(member, &format!("{here}/{index}"), found);
                }
            }
            Value::Object(fields) => {
                for (name, field) in fields {
                    places(field, &format!("{here}/{name}"), found);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    fn anything() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            Just(Value::from(u64::MAX)),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            Just(Value::from("GPU-0")),
            Just(Value::from("gpu-0")),
            Just(Value::from("legacy")),
            Just(Value::from("Prepared")),
            Just(Value::Array(Vec::new())),
            Just(Value::Object(serde_json::Map::new())),
        ]
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_ledger_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            read_files(&bytes);
        }

        #[test]
        fn no_content_with_a_good_checksum_makes_the_ledger_reader_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), anything()), 1..4),
        ) {
            let mut content = golden();
            for (place, value) in changes {
                let mut all = Vec::new();
                places(&content, "", &mut all);
                let place = &all[place.index(all.len())];
                if let Some(there) = content.pointer_mut(place) {
                    *there = value;
                }
            }
            read_files(content.to_string().as_bytes());
        }
    }

    #[test]
    fn a_file_that_nests_without_end_is_an_error() {
        let deep = format!("{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000));
        let error = format::decode(&envelope::seal(&deep)).unwrap_err();
        assert!(error.to_string().contains("recursion"), "{error}");
    }
}
