//! The device health service, v1 (Kubernetes 1.37 and later).
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/dra-health/v1/{api.proto,types.go}`.

use std::time::Duration;

/// The entry for this service in `PluginInfo.supported_versions`.
///
/// Source: `dra-health/v1/types.go`, `DRAResourceHealthService`.
pub const SERVICE: &str = "v1.DRAResourceHealth";

/// The longest `DeviceHealth.message`, in characters; the kubelet cuts what is longer.
///
/// Source: the comment in `dra-health/v1/api.proto`.
pub const MESSAGE_MAX_CHARS: usize = 1024;

/// After this time without a new report the kubelet takes a device's health as unknown, unless the
/// report named another time.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/cm/dra/healthinfo.go`, `DefaultHealthTimeout`.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

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
    include!("generated/dra-health-v1/v1.rs");
}
