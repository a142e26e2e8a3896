//! Pod-resources API v1: what the kubelet has assigned to which pod and container.
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/podresources/v1/api.proto`. It names pods by namespace and
//! name, never by UID; lists only active pods, and of these app containers and sidecars.

/// Folder of the socket, below the kubelet's root directory.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/kubeletconfig/defaults.go`, `DefaultKubeletPodResourcesDirName`.
pub const DIR: &str = "pod-resources";

/// File name of the socket in [`DIR`].
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/apis/podresources/constants.go`, `Socket`.
pub const SOCKET: &str = "kubelet.sock";

/// Calls per second, over all clients, that the kubelet answers; more get `RESOURCE_EXHAUSTED`.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/apis/podresources/constants.go`, `DefaultQPS`.
pub const CALLS_PER_SECOND: u32 = 100;

/// Calls beyond that rate that the kubelet lets through at once.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/apis/podresources/constants.go`, `DefaultBurstTokens`.
pub const BURST_CALLS: u32 = 10;

/// The largest answer to accept, in bytes. The kubelet's server sets no limit on what it sends; upstream's
/// own clients (`test/e2e_node/util.go`, `defaultPodResourcesMaxSize`) take 16 MiB.
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
    include!("generated/podresources/v1.rs");
}
