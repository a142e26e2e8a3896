//! The committed Rust under `src/generated` is what the `.proto` files make today.

#[path = "../../legacy-proto/tests/regenerate/mod.rs"]
mod regenerate;

use std::path::Path;

#[test]
fn the_committed_rust_is_what_the_protos_make() {
    regenerate::check(
        Path::new(env!("CARGO_MANIFEST_DIR")),
        &[
            ("dra-v1", "dra-v1"),
            ("dra-v1beta1", "dra-v1beta1"),
            ("pluginregistration-v1", "pluginregistration-v1"),
            ("dra-health-v1", "dra-health-v1"),
            ("dra-health-v1alpha1", "dra-health-v1alpha1"),
        ],
    );
}
