//! What the tests of the bridge stand on, where no real Kubernetes is: a kubelet, an API server, and
//! waiting with a deadline.
//!
//! Nothing in here may know the product, except for the kubelet's protocols.

mod api;
pub mod dial;
mod eventually;
mod kubelet;
mod rng;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use api::{ApiServer, Backup};
pub use eventually::{eventually, eventually_blocking, wait_for};
pub use kubelet::{
    Capacity, Claim, Container, ContainerKind, DeviceHealth, Driver, Kubelet, Phase, Pod,
    Rejection, Service,
};

/// Locks, also after another thread panicked: in a test the first panic is the one to see.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
