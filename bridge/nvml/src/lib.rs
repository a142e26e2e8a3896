//! What the daemon knows of a node's GPUs, read through NVML.
//!
//! One thread owns the NVML library ([`Session`]), and a second one waits in it for the errors of GPUs ([`Xids`]); what comes out are owned snapshots without a pointer in
//! them ([`Snapshot`], [`GpuProcesses`]), so that nobody else has to know that NVML can hang, vanish, be
//! replaced by a driver upgrade, or lose a GPU.
//! This crate decides nothing: whether a GPU may be offered or given away is the core's business.
//!
//! NVML is reached through the crate nvml-wrapper, and below it through its bindings where the wrapper turns
//! values that it does not know into errors (brand, architecture), has no fallback for an older driver
//! (memory), has no function at all (addressing mode), or loses the answer (the other end of an NVLink).
#![allow(
    unsafe_code,
    reason = "NVML is a C library; this is the only crate of the product that calls one"
)]

mod error;
mod events;
mod inventory;
mod library;
mod names;
mod processes;
mod raw;
mod session;
mod snapshot;
mod sysfs;
mod thread;
mod topology;

pub use error::{CallError, Code, Error};
pub use events::{EVENT_WAIT, Xids};
pub use session::{
    Options, PROCESSES_TIMEOUT, QUEUE, SHUTDOWN_TIMEOUT, SNAPSHOT_TIMEOUT, Session, Timeouts,
};
pub use snapshot::{
    CommonAncestor, FailedGpu, GpuInfo, GpuPair, GpuProcesses, MigMode, Process, RecoveryAction,
    Snapshot, Version,
};
