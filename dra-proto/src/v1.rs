//! The DRA plugin service, v1 (Kubernetes 1.34 and later).
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/dra/v1/{api.proto,types.go}`.

/// The entry for this service in `PluginInfo.supported_versions`. It is not the gRPC service name.
///
/// Source: `dra/v1/types.go`, `DRAPluginService`.
pub const SERVICE: &str = "v1.DRAPlugin";

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
    include!("generated/dra-v1/k8s.io.kubelet.pkg.apis.dra.v1.rs");
}
