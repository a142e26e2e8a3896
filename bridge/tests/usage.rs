//! Who uses what, with the real arbiter behind it: testkit's kubelet and API server around it, and the device
//! plugin that gives the GPUs out.

#![allow(
    clippy::unwrap_used,
    reason = "a test that meets what it does not expect shall panic"
)]

#[path = "usage/adoption.rs"]
mod adoption;
#[path = "common/h100.rs"]
mod h100;
#[path = "usage/listing.rs"]
mod listing;
#[path = "common/nodes.rs"]
mod nodes;
#[path = "usage/pending.rs"]
mod pending;
#[path = "usage/pods.rs"]
mod pods;
#[path = "usage/world.rs"]
mod world;
