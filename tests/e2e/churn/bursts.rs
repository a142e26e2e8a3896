//! Pods of both kinds at the same moment on GPUs that rest, so that both schedulers see the same ones.

use std::collections::BTreeSet;
use std::time::Duration;

use super::life::{Life, Lives};
use super::load::{Arrivals, Kind, Load, Successors};
use super::program::{Daemon, run};
use super::{assert_nothing_doubled, assert_nothing_left, table, trace};
use crate::world::{Setup, World};

/// Any would do; the same each time, so that two runs can be compared.
const SEED: u64 = 1;

/// The last claim pod of a burst runs so soon after its last counted pod has ended, be it the successor of one that had
/// to go: what is free dwells where it was, moves, and the scheduler looks again.
const SOON_AFTER: Duration = Duration::from_secs(5);

/// From the end of a burst until the next: longer than the longer quiet after both kinds have competed, so that GPUs
/// rest again before the next one, unless the bursts are a lesson.
const PAUSE: (Duration, Duration) = (Duration::from_millis(3_500), Duration::from_millis(4_000));

/// How long each pod runs.
const LIVES: (Duration, Duration) = (Duration::from_millis(1_500), Duration::from_millis(2_500));

/// So many pods of one GPU each of both kinds at once, and again when all are gone. In none of these bursts may more
/// claim pods than this be evicted or refused.
async fn bursts(gpus: u32, each: u32, count: u32, lost_at_once: usize) {
    let load = Load {
        name: "bursts",
        gpus,
        arrivals: Arrivals::Rounds { each, pause: PAUSE },
        lives: LIVES,
        successors: Successors::Made,
        nudges: true,
        ..Load::named("one")
    };
    let Some(mut world) = World::start(Setup::shared(gpus)).await else {
        return;
    };
    let bursts = usize::try_from(count).expect("some");
    let pods = bursts * usize::try_from(2 * each).expect("some");
    let evidence = run(&mut world, Daemon::Bridge, load, SEED, pods).await;
    let row = evidence.row(Daemon::Bridge.word());
    println!("{}\n{}", table::head(), table::line(&row));
    println!(
        "{each} + {each} on {gpus}: {count} bursts, {} claim pods evicted, {} refused, {} counted pods failed",
        row.evicted, row.prepare_refused, row.counted_failed
    );
    println!("{:#?}{}", row.words, trace::stories(&evidence));
    // Two of each kind at once are a lesson: nothing rests before the next burst then.
    let meet_rest = if each == 1 { bursts } else { 1 };
    assert_rests(&evidence.daemon_log, gpus, meet_rest);
    assert_nothing_doubled(&evidence, &row);
    assert_eq!(row.counted_failed, 0, "{:#?}", row.words);
    assert!(row.most_lost_in_a_round <= lost_at_once, "{:#?}", row.words);
    let lost = row.evicted.max(row.prepare_refused);
    assert!(lost <= lost_at_once * bursts, "{:#?}", row.words);
    assert_eq!(row.never_ran, 0, "everybody runs at last");
    let after = last_claim_after_counted(&evidence.run.lives);
    println!("the last claim pod ran after the last counted one had ended: {after:?}");
    assert!(after.iter().all(|time| *time <= SOON_AFTER), "{after:?}");
    assert_nothing_left(&world).await;
}

/// How often every GPU has come to rest.
fn times_all_rested(daemon_log: &str, gpus: u32) -> usize {
    let all = usize::try_from(gpus).expect("some");
    let sides = daemon_log.lines();
    let sides = sides.filter(|line| line.contains("what is offered has changed"));
    let rested = sides.map(|line| line.matches(":rest").count() == all);
    let mut before = false;
    rested
        .filter(|now| {
            let news = *now && !before;
            before = *now;
            news
        })
        .count()
}

/// So many bursts at least have each met GPUs that rest, but for those after a lost race: then nothing rests.
fn assert_rests(daemon_log: &str, gpus: u32, bursts: usize) {
    let lost = [
        daemon_log.find("ClaimLostRace"),
        daemon_log.find("ClaimPodEvicted"),
    ];
    let Some(lost) = lost.into_iter().flatten().min() else {
        let rests = times_all_rested(daemon_log, gpus);
        assert!(
            rests >= bursts,
            "{bursts} bursts were to meet GPUs that rest, and {rests} did"
        );
        return;
    };
    let (before, after) = daemon_log.split_at(lost);
    assert!(
        times_all_rested(before, gpus) >= 1,
        "the first burst was to meet GPUs that rest"
    );
    assert_eq!(
        times_all_rested(after, gpus),
        0,
        "after a lost race nothing rests"
    );
}

/// For each burst: from the end of its last counted pod until its last claim pod ran. One that the API server's node
/// authorizer kept from its claim came late for that, and is left out.
fn last_claim_after_counted(lives: &Lives) -> Vec<Duration> {
    let rounds: BTreeSet<u32> = lives.values().map(|life| life.round).collect();
    let last = |round: u32, kind: Kind, time: fn(&Life) -> Option<Duration>| {
        let its = lives.values().filter(|life| life.round == round);
        let of_kind = its.filter(|life| life.kind == kind && !life.was_forbidden());
        of_kind.filter_map(time).max().unwrap_or_default()
    };
    let after = |round: u32| {
        let claim = last(round, Kind::Claim, |life| life.running);
        claim.saturating_sub(last(round, Kind::Counted, |life| life.gone))
    };
    rounds.into_iter().map(after).collect()
}

#[tokio::test]
async fn six_pods_of_each_kind_at_once_on_eight_gpus_refuse_nobody_and_evict_nobody() {
    bursts(8, 6, 2, 0).await;
}

#[tokio::test]
async fn of_two_pods_for_the_only_gpu_the_counted_one_runs_and_the_other_soon_after_it() {
    bursts(1, 1, 3, 1).await;
}

#[tokio::test]
async fn of_eight_pods_of_each_kind_for_eight_gpus_two_at_most_are_evicted() {
    // As a rule none is: this is how many claims are allocated while the first taint is being written, on cores that
    // have other things to do.
    bursts(8, 8, 2, 2).await;
}
