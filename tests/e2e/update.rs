//! Rolling updates of the daemon, while pods of both kinds come and go.

use std::time::Duration;

use crate::churn::{
    Daemon, Evidence, assert_nothing_doubled, assert_nothing_left, churn, quantile,
};
use crate::versions::{self, Feature};
use crate::world::{Setup, World};

/// From the moment in which a daemon let the ledger go until its successor was registered, for each update.
fn hand_overs(evidence: &Evidence) -> Vec<Duration> {
    let mut began = None;
    let mut took = Vec::new();
    for line in evidence.daemon_log.lines() {
        let time = line.split(' ').next().unwrap_or_default();
        let at = evidence.clock.monotonic(time);
        if line.contains("handing the ledger over to a successor") {
            began = Some(at);
        } else if line.contains("registered the device plugin") {
            took.extend(began.take().map(|from| at.saturating_sub(from)));
        }
    }
    took
}

/// Whoever stayed had the same GPUs from its only start until the driver deleted it.
fn assert_stayed(evidence: &Evidence) {
    let lives = evidence.run.lives.iter();
    let stayed: Vec<_> = lives.filter(|(_, life)| life.fate.stays).collect();
    assert_eq!(stayed.len(), 2, "one of each kind");
    let uses = evidence.record.uses();
    for (name, life) in stayed {
        let deleted = life
            .deleted
            .unwrap_or_else(|| panic!("{name} ended by itself: {life:#?}"));
        let its: Vec<_> = uses.iter().filter(|used| used.pod.name == *name).collect();
        let gpus = usize::try_from(life.fate.gpus).expect("a few");
        assert_eq!(its.len(), gpus, "{name} was started once: {its:#?}");
        for used in its {
            let ended = used.to_ns.map(Duration::from_nanos);
            let is_late = ended.is_none_or(|ended| ended >= deleted);
            assert!(is_late, "{name} lost its GPU: {used:#?}, {life:#?}");
        }
    }
}

#[tokio::test]
async fn ten_updates_under_churn_double_nothing_fail_no_counted_pod_and_lose_no_hold() {
    const UPDATES: u32 = 10;
    /// More than come in ten updates; the faster the machine, the fewer updates.
    const PODS: usize = 200;
    if versions::lacks(Feature::TwoPlugins) {
        return;
    }
    let Some(mut world) = World::start(Setup::shared(8).in_pods()).await else {
        return;
    };
    let (evidence, row) = churn(&mut world, Daemon::Bridge, "updates", PODS).await;
    let hand_overs = hand_overs(&evidence);
    println!(
        "PROOF updates: {} under churn, {} by a hand-over of {:?} in the median and {:?} at most; of {} counted pods {} failed; doubled {}, evicted {}, stuck {}",
        row.blows,
        hand_overs.len(),
        quantile(&hand_overs, 50),
        quantile(&hand_overs, 100),
        row.counted,
        row.counted_failed,
        row.doubled.broken(),
        row.evicted,
        row.stuck,
    );
    assert!(row.blows >= UPDATES, "only {} updates", row.blows);
    assert_eq!(u32::try_from(hand_overs.len()), Ok(row.blows));
    assert_nothing_doubled(&evidence, &row);
    assert_eq!(row.counted_failed, 0, "{:#?}", row.words);
    assert_eq!(row.stuck, 0, "{:#?}", evidence.stuck().collect::<Vec<_>>());
    assert_stayed(&evidence);
    assert_nothing_left(&world).await;
}
