//! Objects, their versions, and what happened to them. No HTTP.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// A kind of object that the server holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) api_version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) scope: Scope,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Namespaced,
    Cluster,
}

const fn resource(
    api_version: &'static str,
    plural: &'static str,
    kind: &'static str,
    scope: Scope,
) -> Resource {
    Resource {
        api_version,
        plural,
        kind,
        scope,
    }
}

/// All kinds that the bridge uses.
const RESOURCES: [Resource; 11] = [
    resource("v1", "pods", "Pod", Scope::Namespaced),
    resource("v1", "nodes", "Node", Scope::Cluster),
    resource("v1", "configmaps", "ConfigMap", Scope::Namespaced),
    resource("v1", "events", "Event", Scope::Namespaced),
    resource("events.k8s.io/v1", "events", "Event", Scope::Namespaced),
    resource(
        "resource.k8s.io/v1",
        "resourceclaims",
        "ResourceClaim",
        Scope::Namespaced,
    ),
    resource(
        "resource.k8s.io/v1",
        "resourceslices",
        "ResourceSlice",
        Scope::Cluster,
    ),
    resource(
        "resource.k8s.io/v1",
        "deviceclasses",
        "DeviceClass",
        Scope::Cluster,
    ),
    // Questions: what is created is the answer, and nothing is stored.
    resource(
        "authentication.k8s.io/v1",
        "tokenreviews",
        "TokenReview",
        Scope::Cluster,
    ),
    resource(
        "authorization.k8s.io/v1",
        "subjectaccessreviews",
        "SubjectAccessReview",
        Scope::Cluster,
    ),
    resource(
        "authorization.k8s.io/v1",
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
        Scope::Cluster,
    ),
];

/// The kind of an API version and a plural name.
pub(crate) fn find(api_version: &str, plural: &str) -> Option<&'static Resource> {
    RESOURCES
        .iter()
        .find(|it| it.api_version == api_version && it.plural == plural)
}

/// All kinds of an API version.
pub(crate) fn of_version(api_version: &str) -> Vec<&'static Resource> {
    let kinds = RESOURCES.iter();
    kinds.filter(|it| it.api_version == api_version).collect()
}

/// The first kind of a plural name.
pub(crate) fn by_plural(plural: &str) -> &'static Resource {
    RESOURCES
        .iter()
        .find(|it| it.plural == plural)
        .unwrap_or_else(|| panic!("the test API server holds no {plural}"))
}

/// An error as the API server shows it: code, reason, message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

pub(crate) fn failure(code: u16, reason: &'static str, message: impl Into<String>) -> Failure {
    Failure {
        code,
        reason,
        message: message.into(),
    }
}

/// Which part of an object a write is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All but the status.
    Main,
    /// The status alone.
    Status,
    /// Everything: a test that sets up a state.
    Whole,
}

/// Namespace (empty for a cluster-wide kind) and name.
pub(crate) type Key = (String, String);

/// A change of one object.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) resource: &'static Resource,
    pub(crate) before: Option<Value>,
    pub(crate) after: Option<Value>,
}

/// Everything that the server holds.
#[derive(Debug, Default, Clone)]
pub(crate) struct Store {
    version: u64,
    /// By API version and plural name.
    objects: BTreeMap<(&'static str, &'static str), BTreeMap<Key, Value>>,
    log: Vec<Change>,
    /// Changes up to this version are forgotten.
    compacted: u64,
}

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, resource: &Resource, key: &Key) -> Result<Value, Failure> {
        let found = self.all(resource).and_then(|objects| objects.get(key));
        found.cloned().ok_or_else(|| {
            let message = format!("{} \"{}\" not found", resource.plural, key.1);
            failure(404, "NotFound", message)
        })
    }

    pub(crate) fn list(&self, resource: &Resource) -> Vec<Value> {
        let objects = self.all(resource).into_iter().flatten();
        objects.map(|(_, object)| object.clone()).collect()
    }

    fn all(&self, resource: &Resource) -> Option<&BTreeMap<Key, Value>> {
        self.objects.get(&(resource.api_version, resource.plural))
    }

    /// Creates an object; one without a name gets its `generateName` with a number behind it.
    pub(crate) fn create(
        &mut self,
        resource: &'static Resource,
        namespace: &str,
        mut object: Value,
    ) -> Result<Value, Failure> {
        let number = self.version + 1;
        let meta = metadata(&mut object)?;
        let text = |meta: &Map<String, Value>, field: &str| {
            let value = meta.get(field).and_then(Value::as_str);
            value.unwrap_or_default().to_owned()
        };
        let mut name = text(meta, "name");
        if name.is_empty() {
            name = format!("{}{number:05}", text(meta, "generateName"));
        }
        let key = (namespace.to_owned(), name.clone());
        meta.insert("name".to_owned(), json!(name));
        if resource.scope == Scope::Namespaced {
            meta.insert("namespace".to_owned(), json!(namespace));
        }
        meta.entry("uid")
            .or_insert_with(|| json!(format!("00000000-0000-4000-8000-{number:012}")));
        // Any time will do.
        meta.entry("creationTimestamp")
            .or_insert_with(|| json!("2026-01-01T00:00:00Z"));
        if self.get(resource, &key).is_ok() {
            let message = format!("{} \"{}\" already exists", resource.plural, key.1);
            return Err(failure(409, "AlreadyExists", message));
        }
        Ok(self.put(resource, key, object))
    }

    /// Replaces an object, or a part of it. A `resourceVersion` in `new` has to be the present one.
    pub(crate) fn update(
        &mut self,
        resource: &'static Resource,
        key: Key,
        part: Part,
        mut new: Value,
    ) -> Result<Value, Failure> {
        let old = self.get(resource, &key)?;
        for field in ["resourceVersion", "uid"] {
            let wanted = &new["metadata"][field];
            let given = wanted.as_str().is_some_and(|it| !it.is_empty());
            if given && wanted != &old["metadata"][field] {
                return Err(conflict(resource, &key, field));
            }
        }
        let merged = match part {
            Part::Whole => new,
            Part::Main => {
                copy(&old, &mut new, "status");
                new
            }
            Part::Status => {
                let mut merged = old.clone();
                copy(&new, &mut merged, "status");
                merged
            }
        };
        let mut merged = merged;
        let meta = metadata(&mut merged)?;
        for field in [
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "resourceVersion",
        ] {
            if let Some(value) = old["metadata"].get(field) {
                meta.insert(field.to_owned(), value.clone());
            }
        }
        if merged == old {
            // As the real server: a write that changes nothing is no change.
            return Ok(old);
        }
        Ok(self.put(resource, key, merged))
    }

    /// Deletes an object, at once.
    pub(crate) fn delete(
        &mut self,
        resource: &'static Resource,
        key: &Key,
        preconditions: &Value,
    ) -> Result<Value, Failure> {
        let old = self.get(resource, key)?;
        for field in ["resourceVersion", "uid"] {
            let wanted = &preconditions[field];
            if wanted.is_string() && wanted != &old["metadata"][field] {
                return Err(conflict(resource, key, field));
            }
        }
        self.version += 1;
        if let Some(objects) = self
            .objects
            .get_mut(&(resource.api_version, resource.plural))
        {
            objects.remove(key);
        }
        let mut last = old.clone();
        last["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push(Change {
            version: self.version,
            resource,
            before: Some(last.clone()),
            after: None,
        });
        Ok(last)
    }

    fn put(&mut self, resource: &'static Resource, key: Key, mut object: Value) -> Value {
        self.version += 1;
        object["apiVersion"] = json!(resource.api_version);
        object["kind"] = json!(resource.kind);
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let objects = self.objects.entry((resource.api_version, resource.plural));
        let before = objects.or_default().insert(key, object.clone());
        self.log.push(Change {
            version: self.version,
            resource,
            before,
            after: Some(object.clone()),
        });
        object
    }

    /// Forgets what happened so far: who watches from an older version gets 410 Gone.
    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.compacted = self.version;
    }

    /// The changes of a kind after a version; `None` when some of them are forgotten.
    pub(crate) fn since(&self, version: u64, resource: &Resource) -> Option<Vec<Change>> {
        if version < self.compacted {
            return None;
        }
        let first = self.log.partition_point(|change| change.version <= version);
        let changes = self.log[first..].iter();
        Some(
            changes
                .filter(|it| it.resource == resource)
                .cloned()
                .collect(),
        )
    }
}

fn conflict(resource: &Resource, key: &Key, field: &str) -> Failure {
    let message = format!(
        "Operation cannot be fulfilled on {} \"{}\": the {field} is another by now",
        resource.plural, key.1
    );
    failure(409, "Conflict", message)
}

fn metadata(object: &mut Value) -> Result<&mut Map<String, Value>, Failure> {
    let meta = object.get_mut("metadata").and_then(Value::as_object_mut);
    meta.ok_or_else(|| failure(422, "Invalid", "metadata: Required value"))
}

fn copy(from: &Value, to: &mut Value, field: &str) {
    let Some(fields) = to.as_object_mut() else {
        return;
    };
    match from.get(field) {
        Some(value) => fields.insert(field.to_owned(), value.clone()),
        None => fields.remove(field),
    };
}

/// RFC 7386: a null removes, an object is merged, all else replaces.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        patch.clone_into(target);
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, value) in patch {
        if value.is_null() {
            if let Some(fields) = target.as_object_mut() {
                fields.remove(field);
            }
        } else {
            merge(&mut target[field.as_str()], value);
        }
    }
    // What merging made null on the way was not there before.
    if let Some(fields) = target.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
}

/// A field selector: all its terms hold.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selector(Vec<Term>);

#[derive(Debug, Clone)]
struct Term {
    /// A JSON pointer.
    field: String,
    value: String,
    negated: bool,
}

impl Selector {
    /// Reads `spec.nodeName=a,status.phase!=Failed`. Any field will do, not only those of the real server.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let terms = text.split(',').filter(|term| !term.is_empty());
        let parsed = terms.map(|term| {
            let split = term
                .split_once("!=")
                .map(|(field, value)| (field, value, true))
                .or_else(|| {
                    term.split_once("==")
                        .map(|(field, value)| (field, value, false))
                })
                .or_else(|| {
                    term.split_once('=')
                        .map(|(field, value)| (field, value, false))
                });
            let (field, value, negated) = split
                .ok_or_else(|| failure(400, "BadRequest", format!("no field selector: {term}")))?;
            Ok(Term {
                field: format!("/{}", field.replace('.', "/")),
                value: value.to_owned(),
                negated,
            })
        });
        Ok(Self(parsed.collect::<Result<_, _>>()?))
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|term| {
            let value = object.pointer(&term.field).and_then(Value::as_str);
            (value.unwrap_or_default() == term.value) != term.negated
        })
    }
}
