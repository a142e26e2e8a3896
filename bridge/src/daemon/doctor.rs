//! What is missing on this node or in its cluster, found out without changing anything.
//!
//! It looks at what the daemon would use, with the daemon's own flags and credentials, and at what stands in its way. It
//! works beside a daemon that runs, and without one.

mod cluster;
mod node;

use crate::cli::RunOptions;

/// How a thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Ok,
    /// The node serves, and less than it could; or it could not be found out.
    Warning,
    /// The node does not serve as long as it is so.
    Problem,
}

impl Level {
    /// The word on the page.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How it stands.
    pub level: Level,
    /// What was looked at, in a word or two.
    pub about: &'static str,
    /// How it is.
    pub what: String,
    /// Of what is not as it should be: why that matters, and what to do.
    pub advice: Option<Advice>,
}

/// Why something matters, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// What depends on it.
    pub why: String,
    /// What to do.
    pub to_do: String,
}

impl Finding {
    fn ok(about: &'static str, what: impl Into<String>) -> Self {
        Self {
            level: Level::Ok,
            about,
            what: what.into(),
            advice: None,
        }
    }

    fn warning(
        about: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        to_do: impl Into<String>,
    ) -> Self {
        Self {
            level: Level::Warning,
            about,
            what: what.into(),
            advice: Some(Advice {
                why: why.into(),
                to_do: to_do.into(),
            }),
        }
    }

    fn problem(
        about: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        to_do: impl Into<String>,
    ) -> Self {
        Self {
            level: Level::Problem,
            ..Self::warning(about, what, why, to_do)
        }
    }
}

/// Looks at everything. It takes seconds, and up to a minute where something hangs.
pub async fn examine(options: &RunOptions) -> Vec<Finding> {
    let mut found = node::examine(options).await;
    found.extend(cluster::examine(options).await);
    found
}
