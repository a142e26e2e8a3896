//! The part `devicePlugin` of the file: how containers of counted pods are told of their GPUs. Keys and words are those
//! of NVIDIA's device plugin (`flags.plugin` in its own file).

use std::collections::BTreeSet;

use bridge_core::{DeviceSpecs, Handout, IdStrategy, ListStrategy, is_object_name};
use serde_yaml::Value;

use super::Config;
use super::values::one_of;

/// Takes the value of a key of this part, or says what is wrong with it.
pub(super) fn take(config: &mut Config, key: &str, value: &Value) -> Result<(), String> {
    let handout = &mut config.handout;
    match key {
        "devicePlugin.deviceListStrategy" => {
            strategies(value).map(|strategies| handout.strategies = strategies)
        }
        "devicePlugin.deviceIDStrategy" => {
            let known = [IdStrategy::Uuid, IdStrategy::Index];
            one_of(value, known, IdStrategy::as_str).map(|ids| handout.ids = ids)
        }
        "devicePlugin.passDeviceSpecs" => {
            let passed = value.as_bool().ok_or("allowed: true, false")?;
            handout.device_specs = if passed {
                DeviceSpecs::Passed
            } else {
                DeviceSpecs::Omitted
            };
            Ok(())
        }
        "devicePlugin.cdiAnnotationPrefix" => {
            prefix(value).map(|prefix| handout.cdi_annotation_prefix = prefix)
        }
        _ => unreachable!("every key is handled; the tests set each of them"),
    }
}

/// One strategy, or a list of them.
fn strategies(value: &Value) -> Result<BTreeSet<ListStrategy>, String> {
    let strategy = |value: &Value| one_of(value, ListStrategy::ALL, ListStrategy::as_str);
    let Value::Sequence(values) = value else {
        return strategy(value).map(|strategy| BTreeSet::from([strategy]));
    };
    if values.is_empty() {
        return Err("at least one is needed; leave the key out for cdi-cri".to_owned());
    }
    values.iter().map(strategy).collect()
}

fn prefix(value: &Value) -> Result<String, String> {
    let text = value.as_str().unwrap_or_default();
    let domain = text.strip_suffix('/');
    if domain.is_some_and(is_object_name) {
        Ok(text.to_owned())
    } else {
        Err("allowed: a domain and a slash, such as cdi.k8s.io/".to_owned())
    }
}

/// What the part means, for an admin who checks a file.
pub(super) fn report(handout: &Handout) -> String {
    let strategies: Vec<&str> = handout.strategies.iter().map(|it| it.as_str()).collect();
    let nodes = if handout.names_device_nodes() {
        ", device nodes passed"
    } else {
        ""
    };
    format!(
        "{} by {}{nodes}",
        strategies.join(", "),
        handout.ids.as_str()
    )
}
