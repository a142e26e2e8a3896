//! The DRA face: the kubelet's DRA plugin API, the claims behind it, and the ResourceSlice.
//!
//! Three long tasks, which the daemon starts on their own:
//!
//! - [`register::run`] serves `NodePrepareResources` and `NodeUnprepareResources`, v1 and v1beta1, tells how the devices
//!   are, and registers the driver with the kubelet;
//! - [`claims::run`] watches which claims are allocated to this node's pool;
//! - [`slices::run`] keeps the node's ResourceSlice as the offers want it.
//!
//! The face decides nothing: it translates, waits and writes. It must not know the device plugin face, nor `store`,
//! `cdi` or `inventory`. Protobuf types stop in `wire`, Kubernetes types in `claims` and `slices`.

pub mod claims;
mod health;
#[cfg(any(test, fuzzing))]
mod hostile;
mod listener;
mod opaque;
pub mod register;
mod service;
pub mod slices;
mod successor;
mod wire;

use bridge_core::Face;

use crate::follow::chain;

pub use bridge_core::TAINT_KEY;
#[cfg(any(test, fuzzing))]
pub use hostile::check_parameters;
pub use opaque::Error as ConfigError;
pub use register::{Place, RegistrationState};
pub use service::{ASK_AGAIN, CALL_LIMIT, WAIT_LIMIT};
pub use slices::{PublishState, TaintSupport};

/// The driver's name: in claims, slices, DeviceClasses and socket paths. Users have written it into their claims.
pub const DRIVER: &str = Face::Dra.served_name();
