//! The keys of `gpu-bridge.dev/v1alpha1` and what may stand behind them.
//!
//! The text is read into plain YAML values first and checked by hand, because the library's own checks stop at the
//! first mistake.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use bridge_core::Mode;
use serde_yaml::Value;

use super::device_plugin;
use super::hint::meant;
use super::lines::line_of;
use super::{Config, Demand, Notice};

/// What `apiVersion` must be.
const API_VERSION: &str = "gpu-bridge.dev/v1alpha1";
/// Every key with a value of its own.
const KEYS: [&str; 12] = [
    "apiVersion",
    "mode",
    "limits.legacy",
    "limits.dra",
    "offers.weights.legacy",
    "offers.weights.dra",
    "offers.settle",
    "offers.dwell",
    "offers.quiet",
    "offers.notice",
    "offers.demand",
    "ignoreProcesses",
];
/// Keys that only group others.
const GROUPS: [&str; 4] = ["limits", "offers", "offers.weights", device_plugin::GROUP];
/// The most units that a limit can name: no node has more GPUs or MIG instances.
const LIMIT_MAX: u32 = 128;
/// Weights are shares of a whole, and no share is finer than a unit of the largest node.
const WEIGHT_MAX: u32 = 1000;
/// The times of a move: shorter ones are overtaken by the watch of the own Node, longer ones by every pod.
const PAUSES: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(30);
/// Names in `ignoreProcesses`: each is compared with every process on every GPU.
const NAMES_MAX: usize = 64;
/// Letters of a wrong key or value that are repeated in the message.
const SHOWN: usize = 60;
/// Mistakes that are told of one file. Finding the line of each takes a walk through the file, and nobody reads more.
const MISTAKES_MAX: usize = 100;
/// Opening brackets in a file. A configuration has a handful, and for each that is open the YAML library does some more
/// work with every further word, so a file of a megabyte could keep it busy for hours. Those in comments and quotes
/// count too: telling them apart is the library's work.
const BRACKETS_MAX: usize = 200;

/// One thing in the file that can't be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The line, counted from 1, where it is known.
    pub line: Option<usize>,
    /// The key, with dots between its parts.
    pub key: String,
    /// The value as it is in the file; `None` if there is none.
    pub value: Option<String>,
    /// What is wrong with it, and what may be done instead.
    pub why: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}: {value}: {}", self.key, self.why),
            None => write!(f, "{}: {}", self.key, self.why),
        }
    }
}

/// Reads the text of a configuration file.
///
/// The outer error: it is no YAML. The inner one: all that is wrong in it.
pub(super) fn parse(text: &str) -> Result<Result<Config, Vec<Mistake>>, serde_yaml::Error> {
    if let Some(mistake) = too_many_brackets(text) {
        return Ok(Err(vec![mistake]));
    }
    let value: Value = serde_yaml::from_str(text)?;
    let mut reader = Reader {
        text,
        config: Config::default(),
        versioned: Versioned::No,
        mistakes: Vec::new(),
        untold: 0,
    };
    reader.group(&[], &value);
    reader.check_whole();
    if reader.mistakes.is_empty() {
        return Ok(Ok(reader.config));
    }
    // Those without a line are about the file as a whole.
    reader.mistakes.sort_by_key(|mistake| mistake.line);
    if reader.untold > 0 {
        let why = format!(
            "has {} mistakes more, which are told once these are gone",
            reader.untold
        );
        reader.mistakes.push(of_the_file(None, why));
    }
    Ok(Err(reader.mistakes))
}

fn too_many_brackets(text: &str) -> Option<Mistake> {
    let mut opening = text.match_indices(['[', '{']).map(|(place, _)| place);
    let place = opening.nth(BRACKETS_MAX)?;
    let line = text[..place].matches('\n').count() + 1;
    let why = format!(
        "has more than {BRACKETS_MAX} opening brackets ([ or {{), comments included, and is not read any further; \
         the configuration needs hardly any, so look what has got into the file"
    );
    Some(of_the_file(Some(line), why))
}

fn of_the_file(line: Option<usize>, why: String) -> Mistake {
    Mistake {
        line,
        key: "the file".to_owned(),
        value: None,
        why,
    }
}

struct Reader<'a> {
    text: &'a str,
    config: Config,
    versioned: Versioned,
    mistakes: Vec<Mistake>,
    /// Mistakes beyond those that are told.
    untold: usize,
}

/// Every key with a value of its own.
pub(super) fn all_keys() -> impl Iterator<Item = &'static str> {
    KEYS.into_iter().chain(device_plugin::KEYS)
}

/// Whether the file said which version it is written for.
enum Versioned {
    Yes,
    No,
}

impl Reader<'_> {
    /// Takes a value behind which further keys are expected. Nothing at all is as good as no keys.
    fn group(&mut self, path: &[String], value: &Value) {
        let keys = match value {
            Value::Null => return,
            Value::Mapping(keys) => keys,
            Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Sequence(_)
            | Value::Tagged(_) => {
                return self.mistake(path, value, "keys and values are expected here".to_owned());
            }
        };
        for (key, value) in keys {
            let mut path = path.to_vec();
            path.push(key.as_str().map_or_else(|| shown(key), cut));
            let name = path.join(".");
            if GROUPS.contains(&&*name) {
                self.group(&path, value);
            } else if all_keys().any(|key| key == name) {
                self.value(&name, &path, value);
            } else {
                self.unknown(&name, &path, value);
            }
        }
    }

    fn unknown(&mut self, name: &str, path: &[String], value: &Value) {
        let keys: Vec<&str> = all_keys().collect();
        let known = [GROUPS.as_slice(), &keys].concat();
        let hint = meant(name, &known).map_or_else(
            || format!("known keys: {}", keys.join(", ")),
            |meant| format!("did you mean {meant}?"),
        );
        self.mistake(path, value, format!("there is no such key; {hint}"));
    }

    fn value(&mut self, name: &str, path: &[String], value: &Value) {
        let settings = &mut self.config.settings;
        let outcome = match name {
            "apiVersion" => {
                self.versioned = Versioned::Yes;
                api_version(value)
            }
            "mode" => mode(value).map(|mode| settings.mode = mode),
            "limits.legacy" => {
                number(value, LIMIT_MAX).map(|limit| settings.limits.legacy = Some(limit))
            }
            "limits.dra" => number(value, LIMIT_MAX).map(|limit| settings.limits.dra = Some(limit)),
            "offers.weights.legacy" => {
                number(value, WEIGHT_MAX).map(|weight| settings.weights.legacy = weight)
            }
            "offers.weights.dra" => {
                number(value, WEIGHT_MAX).map(|weight| settings.weights.dra = weight)
            }
            "offers.settle" => pause(value).map(|pause| settings.pace.settle = pause),
            "offers.dwell" => pause(value).map(|pause| settings.pace.dwell = pause),
            "offers.quiet" => pause(value).map(|pause| settings.pace.quiet = pause),
            "offers.notice" => notice(value).map(|notice| self.config.notice = notice),
            "offers.demand" => demand(value).map(|demand| self.config.demand = demand),
            "ignoreProcesses" => return self.names(path, value),
            _ => device_plugin::take(&mut self.config, name, value),
        };
        if let Err(why) = outcome {
            self.mistake(path, value, why);
        }
    }

    fn names(&mut self, path: &[String], value: &Value) {
        let Value::Sequence(names) = value else {
            let why = "a list of process names is expected, such as [dcgm-exporter]";
            return self.mistake(path, value, why.to_owned());
        };
        if names.len() > NAMES_MAX {
            let why = format!(
                "{} names are more than the {NAMES_MAX} allowed",
                names.len()
            );
            self.mistake(path, value, why);
        }
        for (index, name) in names.iter().enumerate() {
            match process_name(name) {
                Ok(name) => self.config.ignore_processes.push(name),
                Err(why) => {
                    let mut path = path.to_vec();
                    path.push(index.to_string());
                    self.mistake(&path, name, why);
                }
            }
        }
    }

    /// What no single key is to blame for.
    fn check_whole(&mut self) {
        if matches!(self.versioned, Versioned::No) {
            self.mistakes.push(Mistake {
                line: None,
                key: "apiVersion".to_owned(),
                value: None,
                why: format!("is missing; write apiVersion: {API_VERSION}"),
            });
        }
        let weights = self.config.settings.weights;
        if weights.legacy == 0 && weights.dra == 0 {
            let path = ["offers".to_owned(), "weights".to_owned()];
            self.mistakes.push(Mistake {
                line: line_of(self.text, &path),
                key: path.join("."),
                value: Some("legacy 0, dra 0".to_owned()),
                why: "nothing would be offered anywhere; use mode: drained for that".to_owned(),
            });
        }
    }

    fn mistake(&mut self, path: &[String], value: &Value, why: String) {
        if self.mistakes.len() >= MISTAKES_MAX {
            self.untold += 1;
            return;
        }
        let key = match path.split_first() {
            None => "the file".to_owned(),
            Some((first, rest)) => rest.iter().fold(first.clone(), |key, part| {
                if part.parse::<usize>().is_ok() {
                    format!("{key}[{part}]")
                } else {
                    format!("{key}.{part}")
                }
            }),
        };
        self.mistakes.push(Mistake {
            line: line_of(self.text, path),
            key,
            value: Some(shown(value)),
            why,
        });
    }
}

fn api_version(value: &Value) -> Result<(), String> {
    if value.as_str() == Some(API_VERSION) {
        return Ok(());
    }
    Err(format!("this version reads {API_VERSION} only"))
}

fn mode(value: &Value) -> Result<Mode, String> {
    one_of(value, Mode::ALL, Mode::as_str).map_err(|allowed| format!("is no mode; {allowed}"))
}

fn notice(value: &Value) -> Result<Notice, String> {
    let known = [Notice::Allocation, Notice::Bind];
    one_of(value, known, Notice::as_str)
}

fn demand(value: &Value) -> Result<Demand, String> {
    one_of(value, [Demand::Turns, Demand::Watch], Demand::as_str)
}

/// The value that a word stands for, or which words do.
pub(super) fn one_of<T: Copy, const N: usize>(
    value: &Value,
    known: [T; N],
    word_of: impl Fn(T) -> &'static str,
) -> Result<T, String> {
    let word = value.as_str().unwrap_or_default();
    if let Some(meant) = known.into_iter().find(|known| word_of(*known) == word) {
        return Ok(meant);
    }
    let words = known.map(word_of);
    let hint =
        meant(word, &words).map_or_else(String::new, |word| format!("; did you mean {word}?"));
    Err(format!("allowed: {}{hint}", words.join(", ")))
}

fn number(value: &Value, most: u32) -> Result<u32, String> {
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    match number {
        Some(number) if number <= most => Ok(number),
        Some(_) | None => {
            let quoted = value
                .as_str()
                .is_some_and(|text| text.parse::<u32>().is_ok());
            let hint = if quoted { ", without quotes" } else { "" };
            Err(format!("allowed: a whole number from 0 to {most}{hint}"))
        }
    }
}

/// A step of a move, as in `300ms` or `1s`.
fn pause(value: &Value) -> Result<Duration, String> {
    let text = value.as_str().unwrap_or_default();
    let milliseconds = match text.strip_suffix("ms") {
        Some(number) => number.parse::<u64>().ok(),
        None => text
            .strip_suffix('s')
            .and_then(|number| number.parse::<u64>().ok())
            .and_then(|seconds| seconds.checked_mul(1_000)),
    };
    match milliseconds.map(Duration::from_millis) {
        Some(pause) if PAUSES.contains(&pause) => Ok(pause),
        Some(_) | None => Err(format!(
            "allowed: a time from {}ms to {}s, written as 300ms or 1s",
            PAUSES.start().as_millis(),
            PAUSES.end().as_secs()
        )),
    }
}

fn process_name(value: &Value) -> Result<String, String> {
    match value.as_str() {
        None => Err("a process name is text; put it in quotes".to_owned()),
        Some(name) if name.trim().is_empty() => Err("a process name is not empty".to_owned()),
        Some(name) if name.contains('/') => {
            Err("a process name has no path; give what /proc/<pid>/comm shows".to_owned())
        }
        Some(name) if name.chars().any(char::is_control) => {
            Err("a process name has no control characters".to_owned())
        }
        Some(name) => Ok(name.to_owned()),
    }
}

/// A value in a message: as in the file if it is short, else its begin or its kind.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::String(value) => format!("{value:?}"),
        Value::Sequence(_) => "a list".to_owned(),
        Value::Mapping(_) => "keys and values".to_owned(),
        Value::Tagged(value) => format!("a value with the tag {}", value.tag),
    };
    cut(&text)
}

fn cut(text: &str) -> String {
    if text.chars().nth(SHOWN).is_none() {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}
