//! The DRA plugin service, v1beta1: as v1, without share ids.
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/dra/v1beta1/{api.proto,types.go}`.

/// The entry for this service in `PluginInfo.supported_versions`. It is not the gRPC service name.
///
/// Source: `dra/v1beta1/types.go`, `DRAPluginService`.
pub const SERVICE: &str = "v1beta1.DRAPlugin";

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
    include!("generated/dra-v1beta1/k8s.io.kubelet.pkg.apis.dra.v1beta1.rs");
}
