//! The configuration file: what an admin may choose, read strictly.
//!
//! Owns the file's format (`serde_yaml` stays in here) and turns it into settings of the core. A mistake never
//! turns into a default: all of them are told at once, each with its place, and nothing of the file is used.

mod device_plugin;
mod devices;
mod document;
mod edit;
mod hint;
#[cfg(any(test, fuzzing))]
mod hostile;
mod keys;
mod lines;
pub mod live;
mod load;
pub mod map;
mod nvidia;
pub mod profile;
mod schema;
mod source;
#[cfg(test)]
mod tests;
mod values;

use bridge_core::{Handout, Settings};

pub use self::document::Document;
pub use self::edit::{read_text, with_mode};
#[cfg(any(test, fuzzing))]
pub use self::hostile::read_config;
pub use self::keys::json_schema;
pub use self::load::{Error, load, report};
pub use self::schema::Mistake;
pub use self::source::{KEY, MapName, Source};

/// The kernel keeps this many bytes of a process's name (`TASK_COMM_LEN` less the end, `include/linux/sched.h`).
const COMM_LENGTH: usize = 15;

/// What the daemon is configured to do. The default is what holds without a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// What decisions depend on.
    pub settings: Settings,
    /// When claims are noticed.
    pub notice: Notice,
    /// By what free units move while things keep arriving.
    pub demand: Demand,
    /// Names of processes that may run on any GPU without holding it, such as monitoring agents.
    pub ignore_processes: Vec<String>,
    /// How containers of counted pods are told of their units.
    pub handout: Handout,
}

/// When claims are noticed, and by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Notice {
    /// At their allocation, by a watch of all claims of the cluster.
    #[default]
    Allocation,
    /// When a pod that uses them is bound to the node, by reading each.
    Bind,
}

/// By what free units move while things keep arriving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Demand {
    /// By turns: nobody looks at pods that wait.
    #[default]
    Turns,
    /// By what the pods that wait for a node ask for.
    Watch,
}

impl Demand {
    pub(crate) const ALL: [Self; 2] = [Self::Turns, Self::Watch];

    /// The word in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Turns => "turns",
            Self::Watch => "watch",
        }
    }
}

impl Notice {
    pub(crate) const ALL: [Self; 2] = [Self::Allocation, Self::Bind];

    /// The word in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allocation => "allocation",
            Self::Bind => "bind",
        }
    }
}

impl Config {
    /// Whether a process is to be left out of account, by its name in `/proc/<pid>/comm`, which the kernel cuts to 15
    /// bytes.
    #[must_use]
    pub fn ignores(&self, comm: &str) -> bool {
        self.ignore_processes
            .iter()
            .any(|name| name.as_bytes().iter().take(COMM_LENGTH).eq(comm.as_bytes()))
    }
}
