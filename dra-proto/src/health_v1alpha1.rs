//! The device health service, v1alpha1: for kubelets before 1.37, the same messages as v1.
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/dra-health/v1alpha1/{api.proto,types.go}`.

/// The entry for this service in `PluginInfo.supported_versions`.
///
/// Source: `dra-health/v1alpha1/types.go`, `DRAResourceHealthService`.
pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";

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
    include!("generated/dra-health-v1alpha1/v1alpha1.rs");
}
