//! `/metrics` of a running daemon: every family moves when what it is about happens.

use std::collections::{BTreeMap, BTreeSet};

use crate::disk::limited_and_configured;
use crate::world::{SOON, World, until};

/// Families that nothing of what happens here moves, each with the unit test that does.
const MOVED_ELSEWHERE: [(&str, &str); 3] = [
    (
        "gpu_bridge_build_info",
        "the_version_is_the_only_text_that_no_enum_has",
    ),
    (
        "gpu_bridge_evictions_total",
        "what_happens_is_counted_and_what_never_did_is_0",
    ),
    (
        "gpu_bridge_busy_handovers_total",
        "what_happens_is_counted_and_what_never_did_is_0",
    ),
];

/// The values that each sample has had, by family.
#[derive(Default)]
struct Seen {
    families: BTreeSet<String>,
    values: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

impl Seen {
    async fn look(&mut self, world: &World) {
        let (code, page) = world.get("/metrics").await.expect("the daemon answers");
        assert_eq!(code, 200, "{page}");
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let name = rest.split(' ').next().unwrap();
                self.families.insert(name.to_owned());
            }
        }
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            let family = self.family_of(sample);
            let samples = self.values.entry(family).or_default();
            let values = samples.entry(sample.to_owned()).or_default();
            values.insert(value.to_owned());
        }
    }

    /// The family whose name a sample begins with; histograms add `_bucket`, `_sum` and `_count` to it.
    fn family_of(&self, sample: &str) -> String {
        let name = sample.split('{').next().unwrap();
        let names = ["_bucket", "_sum", "_count"].map(|end| name.strip_suffix(end));
        let mut names = names.into_iter().flatten().chain([name]);
        let found = names.find(|name| self.families.contains(*name));
        found
            .unwrap_or_else(|| panic!("{sample} is of no family"))
            .to_owned()
    }

    fn has_moved(&self, family: &str) -> bool {
        let samples = self.values.get(family).into_iter().flatten();
        samples.into_iter().any(|(_, values)| values.len() > 1)
    }

    /// Waits until these families have moved.
    async fn moves(&mut self, world: &World, families: &[&str]) {
        for family in families {
            let family = format!("gpu_bridge_{family}");
            until(&format!("{family} has moved"), SOON, async || {
                self.look(world).await;
                self.has_moved(&family)
            })
            .await;
        }
    }
}

#[tokio::test]
async fn every_metric_moves_when_what_it_is_about_happens() {
    let mut world = limited_and_configured(2, "mode: both\n").await;
    let mut seen = Seen::default();
    seen.look(&world).await;
    a_disk_is_full(&world, &mut seen).await;
    pods_come_and_go(&world, &mut seen).await;
    trouble_comes_and_goes(&mut world, &mut seen).await;
    a_race_is_lost(&mut seen).await;
    taints_are_dropped(&mut seen).await;

    let moved = |family: &String| seen.has_moved(family);
    let still: BTreeSet<&str> = seen
        .families
        .iter()
        .filter(|family| !moved(family))
        .map(String::as_str)
        .collect();
    let elsewhere = BTreeMap::from(MOVED_ELSEWHERE);
    assert_eq!(still, elsewhere.keys().copied().collect());
    let tests = include_str!("../../src/metrics/tests.rs");
    for test in elsewhere.values() {
        assert!(tests.contains(&format!("fn {test}(")), "{test} is no test");
    }
}

async fn a_disk_is_full(world: &World, seen: &mut Seen) {
    world.daemon().limit_files(Some(0));
    let refused = world.allocate(&[&world.gpu("gpu-1").uuid]).await;
    refused.unwrap_err();
    seen.moves(world, &["ledger_save_failures_total"]).await;
    world.daemon().limit_files(None);
}

/// Grants, a substitution, a refusal and an end.
async fn pods_come_and_go(world: &World, seen: &mut Seen) {
    world.run_claimant("b", "gpu-0").await;
    // The kubelet asks for the GPU that the claim has, and gets the other.
    let prepared = world.gpu("gpu-0").uuid;
    let other = world.allocate(&[&prepared]).await.unwrap();
    assert!(other[0].contains(&world.gpu("gpu-1").uuid), "{other:?}");
    seen.moves(
        world,
        &[
            "units",
            "units_allocated",
            "units_offered",
            "ledger_generation",
            "grants_total",
            "substitutions_total",
            "call_duration_seconds",
            "ledger_save_duration_seconds",
            "pod_resources_answer_timestamp_seconds",
        ],
    )
    .await;
    world.end_pod("b").await;
    seen.moves(world, &["holds_ended_total"]).await;
    world.allocate_claim("u", "gpu-77", "u");
    world.admit_claimant("u").await;
    world.prepare("u").await.unwrap_err();
    seen.moves(world, &["refusals_total"]).await;
}

/// Of the driver, the API server and the admin.
async fn trouble_comes_and_goes(world: &mut World, seen: &mut Seen) {
    world.configure("mode: legcy\n");
    seen.moves(world, &["condition"]).await;
    world.api.forbid("update", "resourceslices");
    world.configure("mode: dra\n");
    seen.moves(
        world,
        &[
            "mode",
            "config_generation",
            "config_loaded_timestamp_seconds",
            "events_total",
            "node_allocatable_units",
            "slice_write_failures_total",
        ],
    )
    .await;
    world.api.allow("update", "resourceslices");
    seen.moves(world, &["slice_writes_total"]).await;
    let lost = world.gpu("gpu-1").uuid;
    world.node.lose(&lost).unwrap();
    world.rescan();
    seen.moves(world, &["nvml_errors_total"]).await;
    world.node.find_again(&lost).unwrap();
    world.rescan();
    until("both GPUs answer", SOON, async || {
        world.unit(&lost).await["present"] == true
    })
    .await;
    // A number beyond those that have one of their own.
    world.node.report_xid(&lost, 999).unwrap();
    seen.moves(world, &["xids_total", "units_faulty"]).await;
}

/// On a node where the only GPU that is left is a claim's by allocation, and nobody has prepared it.
async fn a_race_is_lost(seen: &mut Seen) {
    let world = World::running(2).await;
    world.run_counted("a", 1).await;
    world.allocate_claim("r", "gpu-0", "r");
    world.wait_for_holds("Reserved", 1).await;
    let taken = world.allocate(&[&world.gpu("gpu-0").uuid]).await;
    taken.expect("the counted pod comes first");
    seen.moves(&world, &["lost_races_total"]).await;
}

/// On a node whose API server does not know taints.
async fn taints_are_dropped(seen: &mut Seen) {
    let mut world = World::new(2).await;
    world.api.drop_taints();
    world.start_kubelet().await;
    world.start_daemon();
    world.readyz().await;
    seen.moves(&world, &["slice_taints_dropped"]).await;
}
