//! What a newer version has written into a file of the same format, so that it is still there after this version
//! has rewritten the file.
//!
//! Fields belong to a thing, not to a place in a list: list members are recognised by their identity, and what is
//! known of a thing goes when the thing goes.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Fields of one JSON object, and of all below it, that this version has no name for.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Unknown {
    fields: Map<String, Value>,
    below: BTreeMap<String, Self>,
    members: BTreeMap<String, Self>,
}

impl Unknown {
    /// What is in `read` and not in `understood`, which is `read` after it was understood and written again.
    pub(super) fn between(read: &Value, understood: &Value) -> Self {
        let mut unknown = Self::default();
        if let (Value::Object(read), Value::Object(understood)) = (read, understood) {
            for (name, value) in read {
                match understood.get(name) {
                    None => drop(unknown.fields.insert(name.clone(), value.clone())),
                    Some(same) => keep(&mut unknown.below, name, Self::between(value, same)),
                }
            }
        }
        if let (Value::Array(read), Value::Array(understood)) = (read, understood) {
            // Written again, a list has the same members in the same order.
            for (member, same) in read.iter().zip(understood) {
                let unknown_there = Self::between(member, same);
                keep(&mut unknown.members, &identity(same), unknown_there);
            }
        }
        unknown
    }

    /// Puts the fields back where the things that they belong to still are.
    pub(super) fn put_back(&self, into: &mut Value) {
        if let Value::Object(object) = into {
            for (name, value) in &self.fields {
                object.entry(name).or_insert_with(|| value.clone());
            }
            for (name, below) in &self.below {
                if let Some(value) = object.get_mut(name) {
                    below.put_back(value);
                }
            }
        }
        if let Value::Array(array) = into {
            for member in array {
                if let Some(unknown) = self.members.get(&identity(member)) {
                    unknown.put_back(member);
                }
            }
        }
    }
}

fn keep(children: &mut BTreeMap<String, Unknown>, name: &str, child: Unknown) {
    if child != Unknown::default() {
        children.insert(name.to_owned(), child);
    }
}

/// What makes a list member itself: the UUID of a unit, the id or claim of a hold, the claim of a preparation, the
/// device of a prepared device; else all that is known of it, which for a `Foreign` hold never changes.
fn identity(member: &Value) -> String {
    ["/uuid", "/id", "/claim/uid", "/device"]
        .iter()
        .find_map(|path| member.pointer(path)?.as_str())
        .map_or_else(|| member.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_stays_with_its_thing_and_goes_with_it() {
        let read = json!({
            "new": 1,
            "claim": {"uid": "a", "new": 2},
            "units": [
                {"uuid": "GPU-1", "new": [3]},
                {"uuid": "GPU-2", "new": 4, "gpu": {"new": 5}},
            ],
        });
        let understood = json!({
            "claim": {"uid": "a"},
            "units": [{"uuid": "GPU-1"}, {"uuid": "GPU-2", "gpu": {}}],
        });
        let unknown = Unknown::between(&read, &understood);
        // GPU-1 and the claim are gone, GPU-3 is new, and the order is another one.
        let mut rewritten = json!({
            "units": [{"uuid": "GPU-3"}, {"uuid": "GPU-2", "gpu": {}}],
        });
        unknown.put_back(&mut rewritten);
        assert_eq!(
            rewritten,
            json!({
                "new": 1,
                "units": [{"uuid": "GPU-3"}, {"uuid": "GPU-2", "gpu": {"new": 5}, "new": 4}],
            })
        );
    }
}
