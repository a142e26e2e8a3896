//! Many pods of both kinds, force deletes among them, judged by the runtime's record and the API server's audit log.
//!
//! A load says which pods come when, a seed throws the dice, and a run becomes one row of a table. Some runs are
//! tests; `make churn` and `make churn-long` measure. See tests/bench/README.md.

mod audit;
mod bursts;
mod dice;
mod driver;
mod gaps;
mod life;
mod load;
mod program;
mod row;
mod seen;
mod table;
mod trace;

pub use life::now;
pub use program::Daemon;
pub use row::{Evidence, quantile};

use crate::churn::load::{Blows, Load};
use crate::churn::program::run;
use crate::churn::row::Row;
use crate::standin::StandIns;
use crate::world::{Setup, World};

/// One run of a load; its row is printed, for people to compare.
pub async fn churn(
    world: &mut World,
    daemon: Daemon<'_>,
    load: &str,
    pods: usize,
) -> (Evidence, Row) {
    /// Any would do; the same each time, so that two runs can be compared.
    const SEED: u64 = 1;
    let word = daemon.word();
    let evidence = run(world, daemon, Load::named(load), SEED, pods).await;
    let row = evidence.row(word);
    println!("{}\n{}", table::head(), table::line(&row));
    println!("{:#?}{}", row.words, trace::stories(&evidence));
    print!("{}", row.gaps.told());
    println!(
        "PROOF churn: {} pods of load {load} on {word}: doubled {}, counted failed {}, evicted {}{}{}",
        row.pods,
        row.doubled.broken(),
        row.counted_failed,
        row.evicted,
        struck(evidence.run.load.blows, row.blows),
        row.gaps.summed_up()
    );
    (evidence, row)
}

/// What happened beside, for the end of a sentence.
fn struck(blows: Blows, times: u32) -> String {
    let what = match blows {
        Blows::None => return String::new(),
        Blows::Restarts => "restarts of daemon or kubelet",
        Blows::Kills => "kills of daemon or kubelet",
        Blows::Updates => "updates of the daemon",
    };
    format!(", {times} {what}")
}

/// The promise, whatever else happened in the run.
pub fn assert_nothing_doubled(evidence: &Evidence, row: &Row) {
    assert_eq!(
        row.doubled.broken(),
        0,
        "{:?}: {:#?}",
        row.doubled,
        evidence.doubles()
    );
}

pub async fn assert_nothing_left(world: &World) {
    world.wait_no_claims().await;
    world.wait_all_free().await;
}

#[tokio::test]
async fn four_hundred_pods_of_both_kinds_double_nothing_and_leave_nothing() {
    /// Counted pods that failed and claim pods that were evicted, in one run.
    const LOST_LIMIT: usize = 1;
    /// A machine that stands still for a third of a second makes a race that no daemon can prevent, so a run with more
    /// than that is made once more. What is doubled or left over fails the test at once.
    const RUNS: usize = 2;
    let mut lost = Vec::new();
    for _ in 0..RUNS {
        let Some(mut world) = World::start(Setup::shared(8)).await else {
            return;
        };
        let (evidence, row) = churn(&mut world, Daemon::Bridge, "high", 400).await;
        assert_nothing_doubled(&evidence, &row);
        assert_nothing_left(&world).await;
        if row.counted_failed + row.evicted <= LOST_LIMIT {
            return;
        }
        lost.push((row.counted_failed, row.evicted, row.words));
    }
    panic!("counted pods that failed, claim pods that were evicted, and why: {lost:#?}");
}

#[tokio::test]
async fn the_same_churn_on_two_unarbitrated_stand_ins_doubles() {
    /// Far less than there are: some 800 for each 1,000 pods.
    const MANY: usize = 20;
    let Some(mut world) = World::without_daemon(Setup::shared(8)).await else {
        return;
    };
    let mut stand_ins = StandIns::start(&world).await;
    let (_, row) = churn(&mut world, Daemon::StandIns(&mut stand_ins), "high", 120).await;
    assert!(
        row.doubled.across_kinds >= MANY,
        "two daemons that know nothing of each other must double, and the judge must see it: {} across kinds",
        row.doubled.across_kinds
    );
    world.wait_no_claims().await;
}

#[tokio::test]
async fn kills_of_the_daemon_and_of_the_kubelet_under_churn_double_and_lose_nothing() {
    /// There are twice as many in such a run; the faster the machine, the fewer.
    const BLOWS: u32 = 4;
    /// A machine that stands still makes a race that no daemon can prevent, as in the test above; so a run in which a
    /// counted pod failed while the kubelet had a list is made once more.
    const RUNS: usize = 2;
    let mut outside = Vec::new();
    for _ in 0..RUNS {
        let Some(mut world) = World::start(Setup::shared(8).impatient()).await else {
            return;
        };
        let (evidence, row) = churn(&mut world, Daemon::Bridge, "kills", 200).await;
        assert!(row.blows >= BLOWS, "only {} blows", row.blows);
        assert_nothing_doubled(&evidence, &row);
        assert_nothing_left(&world).await;
        let gaps = &row.gaps;
        assert_eq!(u32::try_from(gaps.all.len()), Ok(row.blows), "{gaps:#?}");
        assert!(gaps.failed() <= gaps.on_their_way(), "{gaps:#?}");
        if gaps.failed_outside.is_empty() {
            return;
        }
        outside.push((gaps.told(), row.words));
    }
    panic!("counted pods failed while the kubelet had a list: {outside:#?}");
}
