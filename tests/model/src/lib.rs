//! Every state that a small node can come into, with the real [`bridge_core::Pool`] in its middle, each checked against
//! the promises of gpu-bridge.
//!
//! Around the pool stands what the arbiter does with it (`daemon`, `decide`), and around that the truth: what
//! containers were given and what they run on (`node`), of which the daemon sees what is shown (`shown`). What can
//! happen is in `actions`, what comes of it in `play` and `events`, what must be so in `properties` and `rest`. How
//! much of it one walk includes is its [`Scope`]; [`Broken`] breaks one rule, so that it can be seen that the walk
//! would find that.

mod actions;
mod broken;
mod daemon;
mod decide;
mod decided;
mod events;
mod keyed;
mod names;
mod node;
mod play;
mod properties;
mod reach;
mod rest;
mod scope;
mod scopes;
mod set;
mod shown;
mod view;
mod walk;

pub use broken::Broken;
pub use scope::Scope;
pub use scopes::{scope_that_finds, scopes};
pub use walk::{Effort, Findings, PROMISES, walk, walk_each};
