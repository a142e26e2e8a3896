//! From the file to the settings, or to everything that is wrong with it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use bridge_core::{DeviceRule, IGNORED_XIDS, Matcher, Xid, XidRules};

use super::schema::{self, Mistake};
use super::{Config, Document, device_plugin};

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
    /// The node's label names a profile that is not in it.
    #[error(
        "the configuration {} has no profile {profile:?}, which the label {} of this node names; it has {known}: \
         correct the label, or add the profile",
        path.display(), super::profile::LABEL
    )]
    NoProfile {
        /// The file.
        path: PathBuf,
        /// What the label says.
        profile: String,
        /// The profiles that there are.
        known: String,
    },
}

/// Reads a configuration file.
///
/// # Errors
/// See [`Error`]; whatever held before goes on holding.
pub fn load(path: &Path) -> Result<Document, Error> {
    interpret(path, read(path))
}

/// What the text of a file means.
pub(super) fn interpret(path: &Path, text: io::Result<String>) -> Result<Document, Error> {
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
    let document = load(path)?;
    let mut text = format!("{} is good. It means:\n", path.display());
    text.push_str(&lines_of(&document.base, "  "));
    for (name, config) in &document.profiles {
        // Writing into a string does not fail.
        let _ = writeln!(text, "  with {}={name}:", super::profile::LABEL);
        let base = lines_of(&document.base, "    ");
        let base: Vec<&str> = base.lines().collect();
        for line in lines_of(config, "    ").lines() {
            if !base.contains(&line) {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    if !document.remarks.is_empty() {
        text.push_str("Not done:\n");
        for remark in &document.remarks {
            let _ = writeln!(text, "  {remark}");
        }
    }
    Ok(text)
}

fn lines_of(config: &Config, indent: &str) -> String {
    let settings = &config.settings;
    let limit = |limit: Option<u32>| match limit {
        Some(limit) => limit.to_string(),
        None => "no limit".to_owned(),
    };
    let list = |names: Vec<String>| match names.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let lines = [
        ("mode", settings.mode.as_str().to_owned()),
        (
            "limits",
            format!(
                "legacy {}, dra {}",
                limit(settings.limits.legacy),
                limit(settings.limits.dra)
            ),
        ),
        (
            "offers.weights",
            format!(
                "legacy {}, dra {}",
                settings.weights.legacy, settings.weights.dra
            ),
        ),
        (
            "offers",
            format!(
                "settle {} ms, dwell {} ms, quiet {} ms, minLegacy {}",
                settings.pace.settle.as_millis(),
                settings.pace.dwell.as_millis(),
                settings.pace.quiet.as_millis(),
                settings.min_legacy
            ),
        ),
        ("offers.notice", config.notice.as_str().to_owned()),
        ("offers.demand", config.demand.as_str().to_owned()),
        ("allocation", format!("prefer {}", settings.prefer.as_str())),
        ("ignoreProcesses", list(config.ignore_processes.clone())),
        ("devicePlugin", device_plugin::report(&config.handout)),
        ("health.xids", xids(&settings.xids)),
        ("devices", list(settings.devices.iter().map(rule).collect())),
    ];
    let line = |(key, value): (&str, String)| format!("{indent}{key:<16} {value}\n");
    lines.into_iter().map(line).collect()
}

/// What closes a GPU, in words.
fn xids(rules: &XidRules) -> String {
    let numbers = |xids: &BTreeSet<Xid>| xids.iter().map(Xid::to_string).collect::<Vec<_>>();
    let defaults = IGNORED_XIDS.map(Xid::new).into();
    let ignored: BTreeSet<Xid> = rules.ignore.union(&defaults).copied().collect();
    let ignored = ignored.difference(&rules.fault).copied().collect();
    let others = rules.others.as_str();
    let mut text = format!("ignore {}", numbers(&ignored).join(" "));
    if !rules.fault.is_empty() {
        text.push_str(&format!(", fault {}", numbers(&rules.fault).join(" ")));
    }
    text.push_str(&format!(", others {others}"));
    text
}

/// A rule for GPUs, in words.
fn rule(rule: &DeviceRule) -> String {
    let gpu = match &rule.matcher {
        Matcher::Uuid(uuid) => uuid.clone(),
        Matcher::Index(index) => format!("gpu-{index}"),
        Matcher::PciBusId(place) => place.clone(),
        Matcher::Product(pattern) => format!("{pattern:?}"),
    };
    let whose = match (rule.faces.legacy, rule.faces.dra) {
        (true, true) => "both",
        (true, false) => "legacy alone",
        (false, true) => "dra alone",
        (false, false) => "nobody",
    };
    format!("{gpu} for {whose}")
}

pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(FILE_LIMIT + 1)
        .read_to_string(&mut text)?;
    check_size(text)
}

/// The text, if it is no longer than a ConfigMap can be.
pub(super) fn check_size(text: String) -> io::Result<String> {
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
