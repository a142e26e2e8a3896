//! A `libnvidia-ml.so.1` without hardware: it answers NVML calls from a YAML scenario.
//!
//! The crate has two sides.
//! The C library is what a daemon under test loads instead of the driver's.
//! It keeps no state of its own: the GPUs come from a [`Scenario`] file, everything that changes while a test
//! runs (processes, lost GPUs, faults, events) lies in the files described in [`layout`], so that two
//! processes that load the library see the same node.
//! The Rust library is for tests: [`FakeNode`] lays out a folder that looks like a node with a driver, and
//! changes it while the daemon runs.
//!
//! Nothing in here knows the product; whatever talks to NVML can be tested with it.
#![allow(
    unsafe_code,
    reason = "a C library is made of unsafe entry points; they are all in `exports` and `ffi`"
)]

mod driver;
mod event;
mod exports;
mod ffi;
pub mod layout;
pub mod model;
mod node;
pub mod scenario;
mod seen;
mod state;

pub use node::{Error, FakeNode, library_path};
pub use scenario::{Fault, Gpu, Scenario};
