//! The guide speaks of the metrics that there are, and of no others, and each alert leads to it.

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

/// Prometheus' own parser reads the queries of the dashboard, of the alerts and of the guide against this page: Go's part
/// of it is in `tests/queries`.
#[test]
fn the_page_that_queries_are_checked_against_is_the_golden_one() {
    let page = whole_page().replace(env!("CARGO_PKG_VERSION"), "VERSION");
    // Within a family the order changes from run to run.
    let mut lines: Vec<&str> = page.lines().collect();
    for samples in lines.split_mut(|line| line.starts_with('#')) {
        samples.sort_unstable();
    }
    let page = lines.join("\n") + "\n";
    expect_test::expect_file!["../../../../tests/golden/metrics.txt"].assert_eq(&page);
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
fn each_alert_leads_to_the_guide_and_says_what_it_means() {
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
