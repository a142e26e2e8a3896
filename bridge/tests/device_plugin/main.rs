//! The counted face against a kubelet: registration, the list, Allocate; who uses what, and adoption.

#![allow(
    clippy::unwrap_used,
    reason = "in the helpers of a test a panic is the failure to see, as in the tests themselves"
)]

mod adoption;
mod allocate;
#[path = "../common/h100.rs"]
mod h100;
mod hostile;
mod listing;
mod node_status;
#[path = "../common/nodes.rs"]
mod nodes;
mod registration;
mod support;
mod usage;
