//! Reads the rules in `devices`: which GPUs are for one kind of pods alone, or for none.

use bridge_core::{DeviceRule, Faces, Matcher};
use serde_yaml::Value;

use super::hint::meant;
use super::keys::RULE_KEYS;
use super::values::{number, shown};

/// The highest index that a GPU can have: minor numbers of the kernel have 20 bits.
const INDEX_MAX: u32 = (1 << 20) - 1;

/// A mistake in a rule: below which of its keys, and what is wrong. `None`: the rule as a whole.
pub(super) type Wrong = (Option<String>, String);

/// Reads one rule, or says all that is wrong with it.
pub(super) fn rule(value: &Value) -> Result<DeviceRule, Vec<Wrong>> {
    let Value::Mapping(keys) = value else {
        let why = "a rule has a key that says which GPU, and faces, as in {index: 0, faces: [dra]}";
        return Err(vec![(None, why.to_owned())]);
    };
    let mut wrong: Vec<Wrong> = Vec::new();
    let mut matchers: Vec<Matcher> = Vec::new();
    let mut named = 0;
    let mut faces = None;
    for (key, value) in keys {
        let name = key.as_str().map_or_else(|| shown(key), str::to_owned);
        let read = match name.as_str() {
            "faces" => {
                let read = faces_of(value);
                faces = Some(Faces::NONE);
                read.map(|read| faces = Some(read))
            }
            "uuid" | "index" | "pciBusId" | "product" => {
                named += 1;
                matcher(&name, value).map(|matcher| matchers.push(matcher))
            }
            _ => Err(unknown(&name)),
        };
        if let Err(why) = read {
            wrong.push((Some(name), why));
        }
    }
    if named != 1 {
        let why =
            format!("has {named} of uuid, index, pciBusId and product, and needs exactly one");
        wrong.push((None, why));
    }
    if faces.is_none() {
        let why = "has no faces; write [legacy] for counted pods, [dra] for claims, [] for nobody";
        wrong.push((None, why.to_owned()));
    }
    match (matchers.pop(), faces) {
        (Some(matcher), Some(faces)) if wrong.is_empty() => Ok(DeviceRule { matcher, faces }),
        _ => Err(wrong),
    }
}

fn unknown(name: &str) -> String {
    if name.to_lowercase().starts_with("mig") {
        return "MIG instances are not served yet, so there is nothing to choose among them"
            .to_owned();
    }
    let known = RULE_KEYS.map(|(key, _)| key);
    let hint = meant(name, &known).map_or_else(
        || format!("known keys: {}", known.join(", ")),
        |meant| format!("did you mean {meant}?"),
    );
    format!("there is no such key in a rule; {hint}")
}

fn faces_of(value: &Value) -> Result<Faces, String> {
    const ALLOWED: &str =
        "allowed: a list of legacy and dra, each once at most; [] excludes the GPU";
    let Value::Sequence(words) = value else {
        return Err(ALLOWED.to_owned());
    };
    let mut faces = Faces::NONE;
    for word in words {
        let face = match word.as_str() {
            Some("legacy") => &mut faces.legacy,
            Some("dra") => &mut faces.dra,
            Some(_) | None => return Err(format!("{} is no face; {ALLOWED}", shown(word))),
        };
        if std::mem::replace(face, true) {
            return Err(ALLOWED.to_owned());
        }
    }
    Ok(faces)
}

fn matcher(name: &str, value: &Value) -> Result<Matcher, String> {
    if name == "index" {
        return number(value, INDEX_MAX).map(Matcher::Index);
    }
    let text = value.as_str().filter(|text| !text.is_empty());
    let text = text.ok_or_else(|| "text is expected here; put it in quotes".to_owned())?;
    match name {
        "uuid" if text.starts_with("GPU-") => Ok(Matcher::Uuid(text.to_owned())),
        "uuid" if text.starts_with("MIG-") => Err(unknown("mig")),
        "uuid" => Err("a GPU's UUID begins with GPU-, as `nvidia-smi -L` shows it".to_owned()),
        "pciBusId" => pci_bus_id(text).map(Matcher::PciBusId),
        _ => Ok(Matcher::Product(text.to_owned())),
    }
}

/// A place on the PCI bus as sysfs writes it, from there or from `nvidia-smi`, which has longer domains.
fn pci_bus_id(text: &str) -> Result<String, String> {
    let wrong = || "a place on the PCI bus is written as 0000:65:00.0".to_owned();
    let is_hex = |part: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&part.len()) && part.chars().all(|c| c.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = text.split(':').collect();
    let (domain, bus, rest) = match parts.as_slice() {
        [bus, rest] => ("0", *bus, *rest),
        [domain, bus, rest] if is_hex(domain, 4..=8) => (*domain, *bus, *rest),
        _ => return Err(wrong()),
    };
    let (device, function) = rest.split_once('.').ok_or_else(wrong)?;
    let is_function = function.len() == 1 && function.chars().all(|c| ('0'..='7').contains(&c));
    if !is_hex(bus, 2..=2) || !is_hex(device, 2..=2) || !is_function {
        return Err(wrong());
    }
    let domain = u32::from_str_radix(domain, 16).map_err(|_| wrong())?;
    Ok(format!("{domain:04x}:{bus}:{device}.{function}").to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_on_the_bus_is_read_as_people_and_tools_write_it() {
        for (text, expected) in [
            ("0000:65:00.0", Some("0000:65:00.0")),
            ("00000000:C1:00.0", Some("0000:c1:00.0")),
            ("65:00.1", Some("0000:65:00.1")),
            ("0001:65:00.0", Some("0001:65:00.0")),
            ("65:00", None),
            ("000:65:00.0", None),
            ("0000:65:00.8", None),
            ("0000:6:00.0", None),
            ("", None),
        ] {
            assert_eq!(pci_bus_id(text).ok().as_deref(), expected, "{text}");
        }
    }
}
