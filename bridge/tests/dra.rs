//! The DRA face over its real sockets and HTTP: testkit's kubelet and API server around it, and a scripted arbiter
//! behind it.

#![allow(
    clippy::unwrap_used,
    reason = "a test that meets what it does not expect shall panic"
)]

#[path = "dra/bound.rs"]
mod bound;
#[path = "dra/claims.rs"]
mod claims;
#[path = "dra/health.rs"]
mod health;
#[path = "dra/hostile.rs"]
mod hostile;
#[path = "dra/prepare.rs"]
mod prepare;
#[path = "dra/register.rs"]
mod register;
#[path = "dra/slices.rs"]
mod slices;
#[path = "dra/world.rs"]
mod world;
