//! Device plugin API v1beta1: `Registration` (served by the kubelet) and `DevicePlugin` (served by us).
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/deviceplugin/v1beta1/{api.proto,constants.go}`.

use std::time::Duration;

/// The API version to name in `RegisterRequest.version`; the only one that kubelets know.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `Version`.
pub const VERSION: &str = "v1beta1";

/// `Device.health` of a device that may be given out. Any other text counts as unhealthy.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `Healthy`.
pub const HEALTHY: &str = "Healthy";

/// `Device.health` of a device that must not be given out.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `Unhealthy`.
pub const UNHEALTHY: &str = "Unhealthy";

/// The folder of all device plugin sockets. It does not move with the kubelet's `--root-dir`.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `DevicePluginPath`.
pub const DEFAULT_DIR: &str = "/var/lib/kubelet/device-plugins";

/// File name, in the folder of the plugin sockets, of the socket with the kubelet's `Registration`.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `KubeletSocket`.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// File name, in the same folder, of the device manager's checkpoint (JSON).
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/types.go`, `kubeletDeviceManagerCheckpoint`.
pub const KUBELET_CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// The longest `Device.ID`, in characters, by the comment in `api.proto`; kubelets do not check it.
pub const DEVICE_ID_MAX_CHARS: usize = 63;

/// The largest message that either side accepts, in bytes: grpc-go's default, which neither the kubelet's
/// server nor its client changes (`pkg/kubelet/cm/devicemanager/plugin/v1beta1/{server,client}.go`).
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// How long the kubelet lets `PreStartContainer` take.
///
/// Source: `deviceplugin/v1beta1/constants.go`, `KubeletPreStartContainerRPCTimeoutInSecs`.
pub const PRE_START_CONTAINER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the kubelet tries to reach a plugin's socket inside `Register`.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go`, `dial`.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

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
    include!("generated/deviceplugin/v1beta1.rs");
}
