//! A reader's subset of the Kubernetes core/v1 Pod: the payload of [`crate::pods`].
//!
//! Own file (`proto/pod-subset.proto`) with upstream's names and field numbers; unknown fields are skipped.

pub use generated::*;

#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    clippy::nursery,
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    elided_lifetimes_in_paths,
    rustdoc::all,
    reason = "made by tonic-prost-build; the comments are upstream's"
)]
mod generated {
    include!("generated/pod-subset/pod_subset.rs");
}
