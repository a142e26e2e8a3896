//! The kubelet APIs of the DRA face: the DRA plugin service v1 and v1beta1, plugin registration v1, and
//! the device health service v1 and v1alpha1.
//!
//! This crate owns the wire types and the constants of these protocols, as upstream defines them, and
//! nothing else: it knows no rule of the bridge. The Rust under `src/generated` comes from the `.proto`
//! files under `proto/` (their source and version are in `proto/README.md`) and is committed, so that
//! it can be read and so that no build needs `protoc`; `tests/bootstrap.rs` makes it anew and compares.

pub mod health_v1;
pub mod health_v1alpha1;
pub mod registration;
pub mod v1;
pub mod v1beta1;

use std::time::Duration;

/// How long the kubelet waits for `NodePrepareResources` and `NodeUnprepareResources`, each call.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/cm/dra/plugin/dra_plugin.go`, `defaultClientCallTimeout`.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// The largest message that either side accepts, in bytes: grpc-go's default, which the kubelet's client
/// does not change (`pkg/kubelet/cm/dra/plugin/dra_plugin_manager.go`, `add`).
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// File name, in the kubelet's root directory, of the DRA manager's checkpoint.
///
/// Source: kubernetes v1.37.2, `pkg/kubelet/cm/dra/manager.go`, `draManagerStateFileName`.
pub const KUBELET_STATE_FILE: &str = "dra_manager_state";
