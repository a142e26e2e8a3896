//! What an admin asks before a node changes its mode, and does then: who has to end first, what changes for the pods that
//! come next, the change itself, and how far it is.
//!
//! It asks a daemon, or the API server with the caller's own credentials; the daemon takes no part in it.

mod cluster;
mod plan;
mod progress;
mod switch;

pub use cluster::Cluster;
pub(crate) use cluster::{Candidate, NAMES_KEPT_SINCE, minor_of, minor_version, what_comes_of};
pub use plan::{Holder, Mapped, MappedClass, Marks, NodeView, Plan, plan, view_of_page};
pub(crate) use switch::mode_of;
pub use switch::{Error as SwitchError, Outcome, Switch, Target};
