//! The committed Rust under `src/generated` is what the `.proto` files make today.

mod regenerate;

use std::path::Path;

#[test]
fn the_committed_rust_is_what_the_protos_make() {
    regenerate::check(
        Path::new(env!("CARGO_MANIFEST_DIR")),
        &[
            ("deviceplugin-v1beta1", "deviceplugin"),
            ("podresources-v1", "podresources"),
            ("pods-v1alpha1", "pods"),
            ("pod-subset", "pod-subset"),
        ],
    );
}
