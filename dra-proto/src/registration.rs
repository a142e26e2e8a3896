//! Plugin registration v1: served by the plugin on a socket that the kubelet finds in [`DIR`].
//!
//! Source: k8s.io/kubelet v0.37.2, `pkg/apis/pluginregistration/v1/{api.proto,constants.go}`.

use std::time::Duration;

/// `PluginInfo.type` of a DRA driver.
///
/// Source: `pluginregistration/v1/constants.go`, `DRAPlugin`.
pub const DRA_PLUGIN: &str = "DRAPlugin";

/// `PluginInfo.type` of a device plugin that registers by socket (this bridge uses `Register` instead).
///
/// Source: `pluginregistration/v1/constants.go`, `DevicePlugin`.
pub const DEVICE_PLUGIN: &str = "DevicePlugin";

/// Folder, below the kubelet's root directory, that the kubelet watches for registration sockets.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/kubeletconfig/defaults.go`, `DefaultKubeletPluginsRegistrationDirName`.
pub const DIR: &str = "plugins_registry";

/// Folder, below the kubelet's root directory, with a folder per driver for its service sockets.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/kubeletconfig/defaults.go`, `DefaultKubeletPluginsDirName`.
pub const PLUGINS_DIR: &str = "plugins";

/// How long the kubelet waits for `GetInfo`.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/pluginmanager/operationexecutor/operation_generator.go`.
pub const GET_INFO_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the kubelet waits for `NotifyRegistrationStatus`.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/pluginmanager/operationexecutor/operation_generator.go`.
pub const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest path of a unix socket, in bytes, with the closing NUL (`sun_path` on Linux). The kubelet
/// refuses a longer `PluginInfo.endpoint`.
pub const SOCKET_PATH_MAX_BYTES: usize = 108;

/// The longest driver name, in characters.
///
/// Source: k8s.io/api v0.37.2, `resource/v1/types.go`, `DriverNameMaxLength`.
pub const DRIVER_NAME_MAX_CHARS: usize = 63;

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
    include!("generated/pluginregistration-v1/pluginregistration.rs");
}
