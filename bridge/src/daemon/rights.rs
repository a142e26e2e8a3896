//! What the daemon asks of the API. One table: the manifests give these rights, and `gpu-bridge doctor` asks for them.

/// Rights to the resources of one kind: group, resource (with its subresource), verbs.
pub type Right = (&'static str, &'static str, &'static [&'static str]);

/// What it asks for always, by the module that asks. Nothing more is given.
pub const RIGHTS: [Right; 7] = [
    // dra::claims
    (
        "resource.k8s.io",
        "resourceclaims",
        &["get", "list", "watch"],
    ),
    // dra::slices
    (
        "resource.k8s.io",
        "resourceslices",
        &["get", "list", "watch", "create", "update", "delete"],
    ),
    // dra::slices: the owner of the slice; device_plugin::node_status: the own Node
    ("", "nodes", &["get", "list", "watch"]),
    // device_plugin::node_status
    ("", "nodes/status", &["patch"]),
    // usage::pods, usage::pending
    ("", "pods", &["get", "list", "watch"]),
    // daemon::classes; usage::pending with `offers.demand: watch`
    ("resource.k8s.io", "deviceclasses", &["list", "watch"]),
    // events
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// What of [`RIGHTS`] it does without with `offers.notice: bind`.
pub const WATCH_OF_CLAIMS: Right = ("resource.k8s.io", "resourceclaims", &["list", "watch"]);
