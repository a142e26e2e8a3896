//! The kubelet's node-local Pods API v1alpha1 (KEP-4188, on by default since Kubernetes 1.37).
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/pods/v1alpha1/api.proto`. The pods in it are bytes, made by
//! `v1.Pod#Marshal()`: decode them as [`crate::pod_subset::Pod`]. Until the kubelet has heard from all
//! its pod sources every call gets `FAILED_PRECONDITION`, so an empty answer before that does not exist.

/// Folder of the socket, below the kubelet's root directory.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/kubeletconfig/defaults.go`, `DefaultKubeletPodsAPIDirName`.
pub const DIR: &str = "pods-api";

/// File name of the socket in [`DIR`].
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/apis/pods/constants.go`, `Socket`.
pub const SOCKET: &str = "pods-api.sock";

/// The largest answer to accept, in bytes: a node's 110 pods at the API server's limit of 1.5 MiB would be
/// more, but real ones are some 10 KiB each. The kubelet's server sets no limit on what it sends.
pub const MAX_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

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
    include!("generated/pods/v1alpha1.rs");
}
