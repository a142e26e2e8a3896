//! The counted face: the kubelet's device plugin API v1beta1 for `nvidia.com/gpu`.
//!
//! It owns the socket in the kubelet's device plugin folder, the registration and when to repeat it, and the
//! translation between the protocol and the core; and the resource's count in the own Node's status. It decides nothing: the list comes from
//! [`Handle::offers`](crate::arbiter::Handle::offers), and what an `Allocate` gets from
//! [`Handle::allocate`](crate::arbiter::Handle::allocate). It must not know the other face, the ledger, CDI files or NVML.
//!
//! Source of the protocol: kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager`.

mod endpoint;
mod node_status;
mod register;
mod service;
mod successor;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;

use bridge_core::{ContainerEdits, DeviceId, Face, Listing};
use futures::future::BoxFuture;

use crate::arbiter::GrantedDevice;

pub use node_status::{
    KubeletCount, NodeStatusInputs, NodeStatusState, RIGHT_AGAIN, run_node_status,
};
pub use register::{Error, RegistrationState, run};

/// The extended resource that is served. Its name is NVIDIA's, so that existing pods need no change.
pub const RESOURCE: &str = Face::Legacy.served_name();

/// Asks pod-resources now for the pods that may have the ids of an `Allocate`; the error says in words why there is no
/// answer. Rule 5 needs it inside `Allocate`, so it must not be a `List`, see [`Handle::no_allocate`].
///
/// [`Handle::no_allocate`]: crate::arbiter::Handle::no_allocate
pub type ListNow =
    Arc<dyn Fn(Vec<DeviceId>) -> BoxFuture<'static, Result<Listing, String>> + Send + Sync>;

/// How a container is told of the units that it was given, by the configuration that is in force at that moment.
#[derive(Clone)]
pub struct TellContainer(Arc<Tell>);

type Tell = dyn Fn(&[GrantedDevice]) -> ContainerEdits + Send + Sync;

impl TellContainer {
    /// By a function that makes the answer of what was granted, in the order of the request.
    pub fn new(tell: impl Fn(&[GrantedDevice]) -> ContainerEdits + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    fn edits(&self, granted: &[GrantedDevice]) -> ContainerEdits {
        (self.0)(granted)
    }
}

impl std::fmt::Debug for TellContainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TellContainer").finish_non_exhaustive()
    }
}

/// Where and as whom to serve.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The kubelet's device plugin folder, with its `kubelet.sock` (`--device-plugin-dir`).
    pub folder: PathBuf,
    /// The part of the socket's name that tells two daemons on one node apart: the pod's UID (`--pod-uid`), or `node`.
    pub instance: String,
    /// What containers are told.
    pub tell: TellContainer,
}
