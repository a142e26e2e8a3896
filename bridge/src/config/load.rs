//! From the file to the settings, or to everything that is wrong with it.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::schema::{self, Mistake};
use super::{Config, device_plugin};

/// A ConfigMap has at most this many bytes, and this file comes out of one.
const FILE_LIMIT: u64 = 1024 * 1024;

/// Why a file is no configuration. Nothing of it is used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It can't be read.
    #[error("the configuration {} can't be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no YAML.
    #[error("the configuration {} is no valid YAML", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It says things that can't be done.
    #[error("{}", list(path, mistakes))]
    Mistakes {
        /// The file.
        path: PathBuf,
        /// All of them, in the order of the file as far as it is known.
        mistakes: Vec<Mistake>,
    },
}

/// Reads a configuration file.
///
/// # Errors
/// See [`Error`]; whatever held before goes on holding.
pub fn load(path: &Path) -> Result<Config, Error> {
    interpret(path, read(path))
}

/// What the text of a file means.
pub(super) fn interpret(path: &Path, text: io::Result<String>) -> Result<Config, Error> {
    let text = text.map_err(|source| Error::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let outcome = schema::parse(&text).map_err(|source| Error::Syntax {
        path: path.to_owned(),
        source: source.into(),
    })?;
    outcome.map_err(|mistakes| Error::Mistakes {
        path: path.to_owned(),
        mistakes,
    })
}

/// What a configuration file means, for an admin who checks it before it is rolled out.
///
/// # Errors
/// As for [`load`].
pub fn report(path: &Path) -> Result<String, Error> {
    let config = load(path)?;
    let settings = &config.settings;
    let limit = |limit: Option<u32>| match limit {
        Some(limit) => limit.to_string(),
        None => "no limit".to_owned(),
    };
    let ignored = match config.ignore_processes.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    Ok(format!(
        "{} is good. It means:\n\
         \x20 mode             {}\n\
         \x20 limits           legacy {}, dra {}\n\
         \x20 offers.weights   legacy {}, dra {}\n\
         \x20 offers           settle {} ms, dwell {} ms, quiet {} ms\n\
         \x20 offers.notice    {}\n\
         \x20 offers.demand    {}\n\
         \x20 ignoreProcesses  {ignored}\n\
         {}",
        path.display(),
        settings.mode.as_str(),
        limit(settings.limits.legacy),
        limit(settings.limits.dra),
        settings.weights.legacy,
        settings.weights.dra,
        settings.pace.settle.as_millis(),
        settings.pace.dwell.as_millis(),
        settings.pace.quiet.as_millis(),
        config.notice.as_str(),
        config.demand.as_str(),
        device_plugin::report(&config.handout),
    ))
}

pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(FILE_LIMIT + 1)
        .read_to_string(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|length| length > FILE_LIMIT) {
        let why = format!("it has more than {FILE_LIMIT} bytes, the most that a ConfigMap holds");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}

fn list(path: &Path, mistakes: &[Mistake]) -> String {
    let path = path.display();
    let mut text = match mistakes.len() {
        1 => format!("the configuration {path} has a mistake and is not used:"),
        count => format!("the configuration {path} has {count} mistakes and is not used:"),
    };
    for mistake in mistakes {
        let place = mistake
            .line
            .map_or(String::new(), |line| format!(":{line}"));
        // Writing into a string does not fail.
        let _ = write!(text, "\n  {path}{place}: {mistake}");
    }
    text
}
