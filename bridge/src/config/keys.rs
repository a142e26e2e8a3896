//! Every key of the configuration: its place, what may stand behind it, and what it is for. The reader, the JSON Schema
//! and the guide go by this table.

use bridge_core::{IdStrategy, ListStrategy, Mode, Prefer, XidAction};
use serde_json::{Map, Value, json};

use super::values::API_VERSION;
use super::{Demand, Notice};

/// The most units that a limit can name: no node has more GPUs or MIG instances.
pub(super) const LIMIT_MAX: u32 = 128;
/// Weights are shares of a whole, and no share is finer than a unit of the largest node.
pub(super) const WEIGHT_MAX: u32 = 1000;
/// Names in `ignoreProcesses`: each is compared with every process on every GPU.
pub(super) const NAMES_MAX: usize = 64;
/// The largest number of an error (XID): NVIDIA's list ends far below.
pub(super) const XID_MAX: u32 = 9999;
/// Numbers in a list of errors: more than NVIDIA has given out.
pub(super) const XIDS_MAX: usize = 256;
/// Rules in `devices`: one for each unit of the largest node.
pub(super) const RULES_MAX: usize = 128;
/// Profiles: somebody has to know them apart, and each is checked with every change of the file.
pub(super) const PROFILES_MAX: usize = 64;
/// The longest value that a label of Kubernetes can have.
pub(super) const LABEL_MAX: usize = 63;

/// What may stand behind a key.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// Further keys.
    Group,
    /// The version of the file.
    Version,
    /// One of the modes.
    Mode,
    /// A whole number up to this.
    Number(u32),
    /// A time such as `300ms`.
    Pause,
    /// When claims are noticed.
    Notice,
    /// By what free units move.
    Demand,
    /// Which free GPUs counted pods get.
    Prefer,
    /// A list of process names.
    Names,
    /// One device list strategy of NVIDIA's plugin, or a list of them.
    ListStrategies,
    /// How GPUs are named to containers.
    IdStrategy,
    /// Yes or no.
    Flag,
    /// A domain and a slash.
    Prefix,
    /// A list of numbers of errors.
    Xids,
    /// What errors do that are in no list.
    XidAction,
    /// A list of rules for GPUs.
    Devices,
    /// Names, each with keys of its own that override the others.
    Profiles,
}

/// One key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key {
    /// With dots between its parts.
    pub(super) name: &'static str,
    pub(super) shape: Shape,
    /// What it is for, in a sentence.
    pub(super) about: &'static str,
}

const fn key(name: &'static str, shape: Shape, about: &'static str) -> Key {
    Key { name, shape, about }
}

/// Every key, groups before what is in them.
pub(super) const KEYS: [Key; 30] = [
    key("apiVersion", Shape::Version, "The version of the file."),
    key(
        "mode",
        Shape::Mode,
        "Which kinds of pods get free GPUs: counted ones, claims, both or none.",
    ),
    key(
        "limits",
        Shape::Group,
        "The most GPUs that each kind may have, free ones that are offered to it included.",
    ),
    key(
        "limits.legacy",
        Shape::Number(LIMIT_MAX),
        "The most GPUs of counted pods.",
    ),
    key(
        "limits.dra",
        Shape::Number(LIMIT_MAX),
        "The most GPUs of claims.",
    ),
    key(
        "offers",
        Shape::Group,
        "How free GPUs move between the two kinds.",
    ),
    key(
        "offers.minLegacy",
        Shape::Number(LIMIT_MAX),
        "So many GPUs stay with counted pods, those that they hold included, so that the Node's count is never 0.",
    ),
    key(
        "offers.weights",
        Shape::Group,
        "How free GPUs are shared out while both kinds come.",
    ),
    key(
        "offers.weights.legacy",
        Shape::Number(WEIGHT_MAX),
        "The weight of counted pods.",
    ),
    key(
        "offers.weights.dra",
        Shape::Number(WEIGHT_MAX),
        "The weight of claims.",
    ),
    key(
        "offers.settle",
        Shape::Pause,
        "How long the Node must show a lowered count before claims are offered the GPU.",
    ),
    key(
        "offers.dwell",
        Shape::Pause,
        "How long a GPU that has become free stays with the kind that had it.",
    ),
    key(
        "offers.quiet",
        Shape::Pause,
        "How long nobody must come before free GPUs are offered to both kinds.",
    ),
    key(
        "offers.notice",
        Shape::Notice,
        "When a claim is noticed: at its allocation, or when its pod is bound.",
    ),
    key(
        "offers.demand",
        Shape::Demand,
        "By what free GPUs move while pods come: in turns, or by the pods that wait.",
    ),
    key(
        "allocation",
        Shape::Group,
        "Which free GPUs counted pods get.",
    ),
    key(
        "allocation.prefer",
        Shape::Prefer,
        "Those that are connected best, or the last of the list.",
    ),
    key(
        "ignoreProcesses",
        Shape::Names,
        "Names of processes that may run on any GPU without holding it.",
    ),
    key(
        "devicePlugin",
        Shape::Group,
        "How containers of counted pods are told of their GPUs, in the words of NVIDIA's device plugin.",
    ),
    key(
        "devicePlugin.deviceListStrategy",
        Shape::ListStrategies,
        "By what containers get their GPUs; one way or several.",
    ),
    key(
        "devicePlugin.deviceIDStrategy",
        Shape::IdStrategy,
        "How GPUs are named to containers.",
    ),
    key(
        "devicePlugin.passDeviceSpecs",
        Shape::Flag,
        "Whether device nodes are passed beside that.",
    ),
    key(
        "devicePlugin.cdiAnnotationPrefix",
        Shape::Prefix,
        "The prefix of the annotations of cdi-annotations.",
    ),
    key(
        "health",
        Shape::Group,
        "What closes a GPU to new pods of both kinds.",
    ),
    key(
        "health.xids",
        Shape::Group,
        "Errors (XIDs) that the driver tells of, by number.",
    ),
    key(
        "health.xids.ignore",
        Shape::Xids,
        "These close no GPU, beside those that close none by default.",
    ),
    key(
        "health.xids.fault",
        Shape::Xids,
        "These close their GPU until the fault has ended.",
    ),
    key(
        "health.xids.others",
        Shape::XidAction,
        "What all others do, but for those that close no GPU by default.",
    ),
    key(
        "devices",
        Shape::Devices,
        "GPUs that are for one kind of pods alone, or for none; the first rule that is for a GPU counts.",
    ),
    key(
        "profiles",
        Shape::Profiles,
        "Names, each with keys that override the others on the nodes whose label gpu-bridge.dev/profile has that name.",
    ),
];

/// The keys of a rule in `devices`, and what each is.
pub(super) const RULE_KEYS: [(&str, &str); 5] = [
    ("uuid", "The GPU with this UUID."),
    (
        "index",
        "The GPU that is called gpu-N in the ResourceSlice and in `gpu-bridge status`.",
    ),
    ("pciBusId", "The GPU at this place on the PCI bus."),
    (
        "product",
        "Every GPU whose product name is like this; * stands for anything, ? for one character.",
    ),
    (
        "faces",
        "Who may be offered the GPU: legacy for counted pods, dra for claims, or nobody.",
    ),
];

/// The key of that name.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Every name, of groups too.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|key| key.name)
}

/// The JSON Schema of the file (draft 2020-12), for editors and for checks before a file is rolled out. It allows all
/// that the reader allows, and a little more: what concerns two keys, and how long a time is, the reader alone knows.
#[must_use]
pub fn json_schema() -> Value {
    let mut file = group_schema("", |_| true);
    file["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    file["title"] = json!("Configuration of gpu-bridge");
    file["type"] = json!("object");
    file["required"] = json!(["apiVersion"]);
    let is_in_profile = |key: &Key| !matches!(key.shape, Shape::Version | Shape::Profiles);
    file["$defs"] = json!({
        "rule": rule_schema(),
        "profile": group_schema("", is_in_profile),
    });
    file
}

/// The schema of the keys below a path.
fn group_schema(path: &str, is_in: impl Fn(&Key) -> bool + Copy) -> Value {
    let mut properties = Map::new();
    for key in KEYS.iter().filter(|key| is_in(key)) {
        let (parent, last) = key.name.rsplit_once('.').unwrap_or(("", key.name));
        if parent == path {
            let mut schema = shape_schema(key, is_in);
            schema["description"] = json!(key.about);
            properties.insert(last.to_owned(), schema);
        }
    }
    json!({"type": ["object", "null"], "additionalProperties": false, "properties": properties})
}

fn shape_schema(key: &Key, is_in: impl Fn(&Key) -> bool + Copy) -> Value {
    match key.shape {
        Shape::Group => group_schema(key.name, is_in),
        Shape::Version => json!({"const": API_VERSION}),
        Shape::Mode => json!({"enum": Mode::ALL.map(Mode::as_str)}),
        Shape::Number(most) => json!({"type": "integer", "minimum": 0, "maximum": most}),
        Shape::Pause => json!({"type": "string", "pattern": "^[0-9]+(ms|s)$"}),
        Shape::Notice => json!({"enum": Notice::ALL.map(Notice::as_str)}),
        Shape::Demand => json!({"enum": Demand::ALL.map(Demand::as_str)}),
        Shape::Prefer => json!({"enum": Prefer::ALL.map(Prefer::as_str)}),
        Shape::Names => json!({
            "type": "array",
            "maxItems": NAMES_MAX,
            "items": {"type": "string", "pattern": "^[^/]*[^/ ][^/]*$"},
        }),
        Shape::ListStrategies => {
            let words = ListStrategy::ALL.map(ListStrategy::as_str);
            json!({"anyOf": [
                {"enum": words},
                {"type": "array", "minItems": 1, "items": {"enum": words}},
            ]})
        }
        Shape::IdStrategy => {
            let words = [IdStrategy::Uuid, IdStrategy::Index].map(IdStrategy::as_str);
            json!({"enum": words})
        }
        Shape::Flag => json!({"type": "boolean"}),
        Shape::Prefix => json!({"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/$"}),
        Shape::Xids => json!({
            "type": "array",
            "maxItems": XIDS_MAX,
            "items": {"type": "integer", "minimum": 1, "maximum": XID_MAX},
        }),
        Shape::XidAction => json!({"enum": XidAction::ALL.map(XidAction::as_str)}),
        Shape::Devices => json!({
            "type": "array",
            "maxItems": RULES_MAX,
            "items": {"$ref": "#/$defs/rule"},
        }),
        Shape::Profiles => json!({
            "type": ["object", "null"],
            "maxProperties": PROFILES_MAX,
            "propertyNames": {
                "maxLength": LABEL_MAX,
                "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            },
            "additionalProperties": {"$ref": "#/$defs/profile"},
        }),
    }
}

fn rule_schema() -> Value {
    let matchers = ["uuid", "index", "pciBusId", "product"];
    let one_of = matchers.map(|matcher| json!({"required": [matcher]}));
    let mut schema = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["faces"],
        "oneOf": one_of,
        "properties": {
            "uuid": {"type": "string", "pattern": "^GPU-"},
            "index": {"type": "integer", "minimum": 0},
            "pciBusId": {
                "type": "string",
                "pattern": "^([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\\.[0-7]$",
            },
            "product": {"type": "string", "minLength": 1},
            "faces": {
                "type": "array",
                "uniqueItems": true,
                "items": {"enum": ["legacy", "dra"]},
            },
        },
    });
    for (key, about) in RULE_KEYS {
        schema["properties"][key]["description"] = json!(about);
    }
    schema
}
