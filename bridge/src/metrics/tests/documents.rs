//! The guide, the dashboard and the alerts speak of the metrics that there are, and of no others.

use std::path::PathBuf;

use serde_json::Value;

use super::*;
use crate::admin::ConditionName;
use crate::dra::claims;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A page with all that a daemon may show.
fn whole_page() -> String {
    let metrics = Metrics::new();
    for face in [Face::Legacy, Face::Dra] {
        metrics.may_refuse(face, bridge_core::Refusal::REASONS);
    }
    metrics.may_refuse(Face::Dra, claims::Error::REASONS);
    let standings = ["met", "limited", "unmet"].into_iter().cycle();
    let names = ConditionName::ALL.into_iter().map(ConditionName::as_str);
    let scene = Scene {
        status: &everything(),
        offers: &offers(),
        conditions: names.zip(standings).collect(),
    };
    metrics.page(&scene, Format::Text)
}

/// Name and type of every family.
fn families(page: &str) -> BTreeMap<String, String> {
    let lines = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    lines
        .map(|line| {
            let (name, kind) = line.split_once(' ').unwrap();
            (name.to_owned(), kind.to_owned())
        })
        .collect()
}

/// Name of each sample, with the names and words of its labels.
fn known_samples(page: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (sample, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        let labels = labels.trim_end_matches('}').split(',').map(str::to_owned);
        known.entry(name.to_owned()).or_default().extend(labels);
    }
    known
}

/// What the expression of a query asks for: names of ours, each with what stands in braces behind it.
fn asked(expression: &str) -> Vec<(String, Vec<String>)> {
    let mut asked = Vec::new();
    for (at, _) in expression.match_indices("gpu_bridge_") {
        let rest = &expression[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        let braces = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let labels = braces.map_or("", |(labels, _)| labels).split(',');
        let labels = labels.filter(|label| !label.trim().is_empty());
        let labels = labels.map(|label| label.trim().to_owned()).collect();
        asked.push((name.to_owned(), labels));
    }
    asked
}

/// Labels that the scrape adds: manifests/monitoring/podmonitor.yaml.
const OF_THE_SCRAPE: [&str; 1] = ["instance"];

#[track_caller]
fn assert_is_there(expression: &str, known: &BTreeMap<String, BTreeSet<String>>) {
    let asked = asked(expression);
    assert!(!asked.is_empty(), "no metric of ours in {expression}");
    for (name, labels) in asked {
        let Some(has) = known.get(&name) else {
            panic!("{name} is no metric: {expression}");
        };
        for label in labels {
            let (key, words) = label.split_once('=').unwrap();
            let key = key.trim_end_matches('!');
            if OF_THE_SCRAPE.contains(&key) {
                continue;
            }
            let words = words.trim_start_matches('~').trim_matches('"');
            for word in words.split('|') {
                let wanted = format!("{key}=\"{word}\"");
                assert!(has.contains(&wanted), "{name} has no {wanted}: {has:?}");
            }
        }
    }
}

#[test]
fn the_check_of_queries_sees_wrong_names_and_wrong_labels() {
    let known = known_samples(&whole_page());
    for wrong in [
        "sum(gpu_bridge_unit)",
        "gpu_bridge_units{state=\"Free\"}",
        "gpu_bridge_units{pod=\"FreeDra\"}",
        "gpu_bridge_units{state=~\"FreeDra|Freed\"}",
        "up",
    ] {
        let checked = std::panic::catch_unwind(|| assert_is_there(wrong, &known));
        assert!(checked.is_err(), "{wrong}");
    }
    assert_is_there(
        "gpu_bridge_units{state=~\"FreeDra|FreeRest\",instance=~\"$node\"} > 0",
        &known,
    );
}

#[test]
fn the_guide_has_each_family_with_its_type_and_labels() {
    let page = whole_page();
    let guide = text("migration-guide/metrics.md");
    let rows = guide
        .lines()
        .filter(|line| line.starts_with("| `gpu_bridge_"));
    let cells = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect());
    let described: BTreeMap<String, (String, BTreeSet<String>)> = cells
        .map(|cells: Vec<&str>| {
            let [name, kind, labels, meaning] = cells[..] else {
                panic!("{cells:?}");
            };
            assert!(meaning.len() > 10, "{name}: {meaning}");
            let labels = labels.split('`').skip(1).step_by(2).map(str::to_owned);
            (
                name.trim_matches('`').to_owned(),
                (kind.to_owned(), labels.collect()),
            )
        })
        .collect();
    let known = known_samples(&page);
    let shown: BTreeMap<String, (String, BTreeSet<String>)> = families(&page)
        .into_iter()
        .map(|(name, kind)| {
            let sample = if kind == "histogram" {
                format!("{name}_count")
            } else {
                name.clone()
            };
            let labels = known[&sample]
                .iter()
                .filter_map(|label| label.split_once('='));
            let labels = labels.map(|(key, _)| key.to_owned()).collect();
            (name, (kind, labels))
        })
        .collect();
    assert_eq!(described, shown);
}

#[test]
fn the_dashboard_asks_for_metrics_that_there_are() {
    let known = known_samples(&whole_page());
    let dashboard: Value =
        serde_json::from_str(&text("manifests/grafana/gpu-bridge.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut used = BTreeSet::new();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array();
        let targets = targets.unwrap_or_else(|| panic!("{title} has no query"));
        assert!(!targets.is_empty(), "{title} has no query");
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            assert_is_there(expression, &known);
            assert!(
                expression.contains("instance=~\"$node\""),
                "{title} is of all nodes"
            );
            used.extend(asked(expression).into_iter().map(|(name, _)| name));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if variable["type"] == "query" {
            assert_is_there(variable["definition"].as_str().unwrap(), &known);
        }
    }
    assert!(used.len() > 15, "the dashboard shows little: {used:?}");
}

#[test]
fn the_alerts_ask_for_metrics_that_there_are_and_each_leads_to_the_guide() {
    let known = known_samples(&whole_page());
    let guide = text("migration-guide/metrics.md");
    let rules: Value =
        serde_yaml::from_str(&text("manifests/monitoring/prometheusrule.yaml")).unwrap();
    let groups = rules["spec"]["groups"].as_array().unwrap();
    let alerts: Vec<&Value> = groups
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .collect();
    assert!(alerts.len() >= 5, "{alerts:?}");
    for alert in alerts {
        let name = alert["alert"].as_str().unwrap();
        assert_is_there(alert["expr"].as_str().unwrap(), &known);
        assert!(
            guide.contains(&format!("| `{name}` |")),
            "{name} is not in the guide"
        );
        for field in ["summary", "description"] {
            let words = alert["annotations"][field].as_str().unwrap_or_default();
            assert!(words.len() > 20, "{name}: {field} says nothing");
        }
        assert!(alert["labels"]["severity"].is_string(), "{name}");
    }
}
