//! `gpu-bridge`: one GPU pool behind the kubelet's two APIs.
//!
//! This package holds the adapters and the wiring; every decision is in `bridge_core`. Start reading at
//! [`daemon`], which starts everything in order, and at [`arbiter`], through which every request flows.

#![allow(
    clippy::error_impl_error,
    reason = "an error is named by its module, as in arbiter::Error"
)]

pub mod admin;
pub mod arbiter;
pub mod cdi;
pub mod cli;
pub mod client;
pub mod config;
pub mod daemon;
pub mod device_plugin;
pub mod dra;
pub mod events;
pub mod folders;
pub mod follow;
pub mod inventory;
pub mod metrics;
pub mod migrate;
pub mod rivals;
pub mod steps;
pub mod store;
pub mod ticks;
pub mod uds;
pub mod usage;
