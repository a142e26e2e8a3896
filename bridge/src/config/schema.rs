//! The keys of `gpu-bridge.dev/v1alpha1` and what may stand behind them.
//!
//! The text is read into plain YAML values first and checked by hand, because the library's own checks stop at the
//! first mistake.

use std::collections::BTreeSet;
use std::fmt;

use serde_yaml::{Mapping, Value};

use super::hint::meant;
use super::keys::{
    self, LABEL_MAX, LIMIT_MAX, NAMES_MAX, PROFILES_MAX, RULES_MAX, Shape, WEIGHT_MAX, XIDS_MAX,
};
use super::lines::line_of;
use super::values::{
    API_VERSION, api_version, cut, demand, mode, notice, number, pause, prefer, process_name,
    shown, xid, xid_action,
};
use super::{Config, Document, device_plugin, devices, nvidia};

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
pub(super) fn parse(text: &str) -> Result<Result<Document, Vec<Mistake>>, serde_yaml::Error> {
    if let Some(mistake) = too_many_brackets(text) {
        return Ok(Err(vec![mistake]));
    }
    let value: Value = serde_yaml::from_str(text)?;
    let mut reader = Reader {
        text,
        config: Config::default(),
        top: Vec::new(),
        profiles: None,
        versioned: Versioned::No,
        mistakes: Vec::new(),
        untold: 0,
    };
    let document = if nvidia::is_file(&value) {
        reader.nvidia(&value)
    } else {
        reader.file(&value)
    };
    if reader.mistakes.is_empty() {
        return Ok(Ok(document));
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
    /// What the keys are put into: what holds everywhere, or one profile.
    config: Config,
    /// Where that begins: nothing, or `profiles` and the name of one.
    top: Vec<String>,
    /// What stands behind `profiles`, once it was come to.
    profiles: Option<&'a Value>,
    versioned: Versioned,
    mistakes: Vec<Mistake>,
    /// Mistakes beyond those that are told.
    untold: usize,
}

/// Whether the file said which version it is written for.
enum Versioned {
    Yes,
    No,
}

impl<'a> Reader<'a> {
    /// Reads a file of our own.
    fn file(&mut self, value: &'a Value) -> Document {
        self.group(&[], value);
        if matches!(self.versioned, Versioned::No) {
            self.mistakes.push(Mistake {
                line: None,
                key: "apiVersion".to_owned(),
                value: None,
                why: format!("is missing; write apiVersion: {API_VERSION}"),
            });
        }
        let base = self.config.clone();
        let whole = amiss(&base);
        for wrong in &whole {
            self.amiss(wrong);
        }
        let mut document = Document {
            base,
            ..Document::default()
        };
        if let Some(profiles) = self.profiles.take() {
            self.profiles(profiles, &whole, &mut document);
        }
        document
    }

    /// Reads a file of NVIDIA's device plugin.
    fn nvidia(&mut self, value: &Value) -> Document {
        let read = nvidia::read(value);
        for (path, value, why) in read.mistakes {
            let path: Vec<String> = path.split('.').map(str::to_owned).collect();
            self.mistake(&path, &value, why);
        }
        Document {
            base: read.config,
            remarks: read.remarks,
            ..Document::default()
        }
    }

    /// Takes what stands behind `profiles`: each is what holds everywhere, with its own keys over it. What is amiss with
    /// the keys that hold everywhere is not told again.
    fn profiles(&mut self, value: &'a Value, told: &[Amiss], document: &mut Document) {
        let path = ["profiles".to_owned()];
        let expected = "names of profiles are expected here, each with keys below it";
        let Some(profiles) = self.mapping(&path, value, expected) else {
            return;
        };
        if self.is_too_long(&path, value, profiles.len(), (PROFILES_MAX, "profiles")) {
            return;
        }
        for (name, keys) in profiles {
            let shown = name.as_str().map_or_else(|| shown(name), cut);
            self.top = vec!["profiles".to_owned(), shown];
            let Some(name) = name.as_str().filter(|name| is_label(name)) else {
                let why = "a profile is named as a label's value can be: up to 63 letters, digits, '-', '_' and '.', \
                           the first and the last of them a letter or a digit; put a number in quotes";
                let top = self.top.clone();
                self.mistake(&top, keys, why.to_owned());
                continue;
            };
            self.config = document.base.clone();
            let top = self.top.clone();
            self.group(&top, keys);
            for wrong in amiss(&self.config) {
                if !told.contains(&wrong) {
                    self.amiss(&wrong);
                }
            }
            let profile = self.config.clone();
            document.profiles.insert(name.to_owned(), profile);
        }
    }

    /// Takes a value behind which further keys are expected. Nothing at all is as good as no keys.
    fn group(&mut self, path: &[String], value: &'a Value) {
        let expected = "keys and values are expected here";
        let Some(keys) = self.mapping(path, value, expected) else {
            return;
        };
        for (key, value) in keys {
            let path = below(path, key.as_str().map_or_else(|| shown(key), cut));
            let name = path[self.top.len()..].join(".");
            match keys::find(&name).map(|key| key.shape) {
                None => self.unknown(&name, &path, value),
                Some(Shape::Version | Shape::Profiles) if !self.top.is_empty() => {
                    let why = "holds for the whole file, and stands at its top".to_owned();
                    self.mistake(&path, value, why);
                }
                Some(Shape::Group) => self.group(&path, value),
                Some(Shape::Profiles) => self.profiles = Some(value),
                Some(Shape::Names) => self.names(&path, value),
                Some(Shape::Devices) => self.devices(&path, value),
                Some(Shape::Xids) => self.xids(&name, &path, value),
                Some(_) => self.value(&name, &path, value),
            }
        }
    }

    fn unknown(&mut self, name: &str, path: &[String], value: &Value) {
        let known: Vec<&str> = keys::names().collect();
        let hint = meant(name, &known).map_or_else(
            || {
                let is_group = |key: &&keys::Key| matches!(key.shape, Shape::Group);
                let keys = keys::KEYS.iter().filter(|key| !is_group(key));
                let names: Vec<&str> = keys.map(|key| key.name).collect();
                format!("known keys: {}", names.join(", "))
            },
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
            "offers.minLegacy" => number(value, LIMIT_MAX).map(|units| settings.min_legacy = units),
            "offers.settle" => pause(value).map(|pause| settings.pace.settle = pause),
            "offers.dwell" => pause(value).map(|pause| settings.pace.dwell = pause),
            "offers.quiet" => pause(value).map(|pause| settings.pace.quiet = pause),
            "offers.notice" => notice(value).map(|notice| self.config.notice = notice),
            "offers.demand" => demand(value).map(|demand| self.config.demand = demand),
            "allocation.prefer" => prefer(value).map(|prefer| settings.prefer = prefer),
            "health.xids.others" => xid_action(value).map(|action| settings.xids.others = action),
            _ => device_plugin::take(&mut self.config, name, value),
        };
        if let Err(why) = outcome {
            self.mistake(path, value, why);
        }
    }

    fn names(&mut self, path: &[String], value: &Value) {
        let expected = "a list of process names is expected, such as [dcgm-exporter]";
        let names = self.members(path, value, expected, (NAMES_MAX, "names"));
        // A profile's list takes the place of the other.
        self.config.ignore_processes.clear();
        for (index, name) in names.iter().enumerate() {
            match process_name(name) {
                Ok(name) => self.config.ignore_processes.push(name),
                Err(why) => self.mistake(&below(path, index.to_string()), name, why),
            }
        }
    }

    fn xids(&mut self, name: &str, path: &[String], value: &Value) {
        let expected = "a list of numbers of errors (XIDs) is expected, such as [94]";
        let numbers = self.members(path, value, expected, (XIDS_MAX, "numbers"));
        let mut xids = BTreeSet::new();
        for (index, number) in numbers.iter().enumerate() {
            match xid(number) {
                Ok(xid) => drop(xids.insert(xid)),
                Err(why) => self.mistake(&below(path, index.to_string()), number, why),
            }
        }
        // A profile's list takes the place of the other.
        let rules = &mut self.config.settings.xids;
        if name == "health.xids.ignore" {
            rules.ignore = xids;
        } else {
            rules.fault = xids;
        }
    }

    fn devices(&mut self, path: &[String], value: &Value) {
        let expected = "a list of rules is expected, such as [{index: 0, faces: [dra]}]";
        let rules = self.members(path, value, expected, (RULES_MAX, "rules"));
        self.config.settings.devices.clear();
        for (index, rule) in rules.iter().enumerate() {
            let wrong = match devices::rule(rule) {
                Ok(rule) => {
                    self.config.settings.devices.push(rule);
                    continue;
                }
                Err(wrong) => wrong,
            };
            for (key, why) in wrong {
                let mut path = below(path, index.to_string());
                let value = key.as_ref().and_then(|key| rule.get(key));
                path.extend(key);
                self.mistake(&path, value.unwrap_or(rule), why);
            }
        }
    }

    /// Keys with what is behind each; `None`: there is nothing, or something else.
    fn mapping(
        &mut self,
        path: &[String],
        value: &'a Value,
        expected: &str,
    ) -> Option<&'a Mapping> {
        match value {
            Value::Mapping(keys) => Some(keys),
            Value::Null => None,
            Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Sequence(_)
            | Value::Tagged(_) => {
                self.mistake(path, value, expected.to_owned());
                None
            }
        }
    }

    /// The members of a list, too many or not; none of what is no list.
    fn members<'v>(
        &mut self,
        path: &[String],
        value: &'v Value,
        expected: &str,
        most: (usize, &str),
    ) -> &'v [Value] {
        let Value::Sequence(members) = value else {
            self.mistake(path, value, expected.to_owned());
            return &[];
        };
        self.is_too_long(path, value, members.len(), most);
        members
    }

    /// Whether there are more than may be, which is a mistake. `most`: how many may be, and of what.
    fn is_too_long(
        &mut self,
        path: &[String],
        value: &Value,
        length: usize,
        (most, what): (usize, &str),
    ) -> bool {
        let is_too_long = length > most;
        if is_too_long {
            let why = format!("{length} {what} are more than the {most} allowed");
            self.mistake(path, value, why);
        }
        is_too_long
    }

    fn amiss(&mut self, amiss: &Amiss) {
        let mut path = self.top.clone();
        path.extend(amiss.key.split('.').map(str::to_owned));
        self.mistakes.push(Mistake {
            line: line_of(self.text, &path),
            key: path.join("."),
            value: Some(amiss.value.clone()),
            why: amiss.why.to_owned(),
        });
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

/// The place of a key or a member.
fn below(path: &[String], part: String) -> Vec<String> {
    let mut path = path.to_vec();
    path.push(part);
    path
}

/// What no single key is to blame for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Amiss {
    key: &'static str,
    value: String,
    why: &'static str,
}

fn amiss(config: &Config) -> Vec<Amiss> {
    let settings = &config.settings;
    let mut found = Vec::new();
    if settings.weights.legacy == 0 && settings.weights.dra == 0 {
        found.push(Amiss {
            key: "offers.weights",
            value: "legacy 0, dra 0".to_owned(),
            why: "nothing would be offered anywhere; use mode: drained for that",
        });
    }
    if let Some(limit) = settings.limits.legacy
        && settings.min_legacy > limit
    {
        found.push(Amiss {
            key: "offers.minLegacy",
            value: settings.min_legacy.to_string(),
            why: "is more than limits.legacy lets counted pods have",
        });
    }
    let both: Vec<String> = settings
        .xids
        .ignore
        .intersection(&settings.xids.fault)
        .map(ToString::to_string)
        .collect();
    if !both.is_empty() {
        found.push(Amiss {
            key: "health.xids.ignore",
            value: both.join(", "),
            why: "is in health.xids.fault too; leave it in one of the two",
        });
    }
    found
}

/// Whether a text can be the value of a label.
fn is_label(text: &str) -> bool {
    let ends = |c: char| c.is_ascii_alphanumeric();
    let inside = |c: char| ends(c) || matches!(c, '-' | '_' | '.');
    text.len() <= LABEL_MAX
        && text.starts_with(ends)
        && text.ends_with(ends)
        && text.chars().all(inside)
}
