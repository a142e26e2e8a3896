//! What may stand behind a key, and how a wrong value is told.

use std::ops::RangeInclusive;
use std::time::Duration;

use bridge_core::{Mode, Prefer, Xid, XidAction};
use serde_yaml::Value;

use super::hint::meant;
use super::keys::XID_MAX;
use super::{Demand, Notice};

/// What `apiVersion` must be.
pub(super) const API_VERSION: &str = "gpu-bridge.dev/v1alpha1";
/// The times of a move: shorter ones are overtaken by the watch of the own Node, longer ones by every pod.
const PAUSES: RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(30);
/// Letters of a wrong key or value that are repeated in the message.
const SHOWN: usize = 60;

pub(super) fn api_version(value: &Value) -> Result<(), String> {
    if value.as_str() == Some(API_VERSION) {
        return Ok(());
    }
    Err(format!("this version reads {API_VERSION} only"))
}

pub(super) fn mode(value: &Value) -> Result<Mode, String> {
    one_of(value, Mode::ALL, Mode::as_str).map_err(|allowed| format!("is no mode; {allowed}"))
}

pub(super) fn notice(value: &Value) -> Result<Notice, String> {
    one_of(value, Notice::ALL, Notice::as_str)
}

pub(super) fn demand(value: &Value) -> Result<Demand, String> {
    one_of(value, Demand::ALL, Demand::as_str)
}

pub(super) fn prefer(value: &Value) -> Result<Prefer, String> {
    one_of(value, Prefer::ALL, Prefer::as_str)
}

pub(super) fn xid_action(value: &Value) -> Result<XidAction, String> {
    one_of(value, XidAction::ALL, XidAction::as_str)
}

/// The number of an error.
pub(super) fn xid(value: &Value) -> Result<Xid, String> {
    match number(value, XID_MAX) {
        Ok(0) => Err(format!("allowed: a whole number from 1 to {XID_MAX}")),
        read => read.map(Xid::new),
    }
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

pub(super) fn number(value: &Value, most: u32) -> Result<u32, String> {
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
pub(super) fn pause(value: &Value) -> Result<Duration, String> {
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

pub(super) fn process_name(value: &Value) -> Result<String, String> {
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
pub(super) fn shown(value: &Value) -> String {
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

pub(super) fn cut(text: &str) -> String {
    if text.chars().nth(SHOWN).is_none() {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}
