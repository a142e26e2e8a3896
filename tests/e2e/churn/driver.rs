//! Drives one run: pods come, are watched and go, and now and then the daemon or the kubelet is killed.

use std::process::Child;
use std::time::Duration;

use futures::future::join_all;
use kube::api::DeleteParams;

use super::dice::Dice;
use super::gaps::{Strike, Struck};
use super::life::{Life, Lives, now};
use super::load::{Arrivals, Blows, Fate, Kind, Load, Made, Successors};
use super::program::Daemon;
use super::seen::Watches;
use crate::objects::{NUDGE_PERIOD, PodSpec};
use crate::world::World;

/// The longest that the driver looks away from what is due.
const PACE: Duration = Duration::from_millis(20);
/// So long after it was bound a pod that does not run is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(15);
/// And its owner gives it up after this.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(20);
/// Whoever makes a new pod for a failed one waits this long, and so does the driver with all of that kind.
const BACK_OFF: Duration = Duration::from_secs(1);
/// A failed pod is left for this long, so that its events come.
const FAILED_STAYS: Duration = Duration::from_millis(500);
/// How often `Arrivals::Waiting` throws anew how many of each kind should wait.
const DEMAND_EVERY: Duration = Duration::from_secs(2);
/// A pod that waits longer than this is followed by others all the same.
const YOUNG: Duration = Duration::from_secs(4);
/// But by no more than this many of its kind.
const WAITING_LIMIT: usize = 5;
/// Beyond these pods no kind has more than so many of a hundred: the one that is served faster must not take over.
const MIX_FROM: usize = 20;
const MIX_LIMIT_PERCENT: usize = 70;
/// After the last pod came: what does not run by then counts as it is. Longer than the longest life.
const DRAIN_LIMIT: Duration = Duration::from_secs(180);
/// Nothing in a run takes longer unless it hangs.
const NO_NEWS_LIMIT: Duration = Duration::from_secs(300);
/// Pause between two blows, after the one before is over.
const BLOW_PAUSE: (Duration, Duration) = (Duration::from_secs(8), Duration::from_secs(16));
/// The same of updates, of which a run has ten.
const UPDATE_PAUSE: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(8));
/// How often it is looked whether a new daemon is ready. The kubelet looks every 5 s, so here the old one is told to
/// stop sooner.
const PROBE_PERIOD: Duration = Duration::from_millis(200);
/// A killed daemon or kubelet is back by then, on two busy cores.
const BLOW_LIMIT: Duration = Duration::from_secs(90);

/// What happened in a run, without what others recorded of it.
pub struct Run {
    pub load: Load,
    pub seed: u64,
    pub lives: Lives,
    pub began: Duration,
    /// When the last pod came.
    pub last_came: Duration,
    pub ended: Duration,
    pub strikes: Vec<Strike>,
}

/// One run of a load.
pub struct Driver<'a> {
    world: &'a mut World,
    daemon: Daemon<'a>,
    load: Load,
    seed: u64,
    pods: usize,
    watches: Watches,
    lives: Lives,
    /// Of pods of each kind.
    fates: [Dice; 2],
    /// Of everything else.
    dice: Dice,
    made: [usize; 2],
    round: u32,
    /// When the next pods come, or the next demand is thrown; not known before the last round is gone.
    next: Option<Duration>,
    wanted: [usize; 2],
    last_failed: [Option<Duration>; 2],
    blow: Blow,
    strikes: Vec<Strike>,
    last_news: Duration,
    last_nudge: Duration,
}

/// Where a blow is.
enum Blow {
    Never,
    At(Duration),
    /// The kubelet's new start is waited for.
    Kubelet(Child, Duration),
    /// The daemon was told to stop.
    Leaving(Duration),
    /// The daemon is waited for, since then.
    Daemon(Duration),
    /// The readiness of the next pod's daemon is waited for, which was looked at last then.
    Successor {
        since: Duration,
        probed: Duration,
    },
    /// The daemon before it was told to stop.
    Former(Duration),
}

/// Fails a run in which something takes too long.
fn assert_in_time(at: Duration, since: Duration, late: &str) {
    assert!(at.saturating_sub(since) < BLOW_LIMIT, "{late}");
}

impl<'a> Driver<'a> {
    /// Makes the templates and begins to watch.
    pub async fn new(
        world: &'a mut World,
        daemon: Daemon<'a>,
        load: Load,
        seed: u64,
        pods: usize,
    ) -> Self {
        for (gpus, _) in load.sizes {
            world.create_template(&template(*gpus), *gpus).await;
        }
        world.wait_offered_to_both(load.gpus).await;
        let watches = Watches::start(world);
        let now = now();
        let mut dice = Dice::new(seed, 0);
        let blow = match load.blows {
            Blows::None => Blow::Never,
            Blows::Restarts | Blows::Kills | Blows::Updates => {
                Blow::At(now + dice.between(pause(load)))
            }
        };
        Self {
            world,
            daemon,
            load,
            seed,
            pods,
            watches,
            lives: Lives::new(),
            fates: [Dice::new(seed, 1), Dice::new(seed, 2)],
            dice,
            made: [0, 0],
            round: 0,
            next: match load.arrivals {
                Arrivals::Waiting | Arrivals::Stream(_) | Arrivals::Bursts { .. } => Some(now),
                Arrivals::Rounds { .. } => None,
            },
            wanted: [1, 1],
            last_failed: [None, None],
            blow,
            strikes: Vec::new(),
            last_news: now,
            last_nudge: now,
        }
    }

    /// From the first pod until the last one is gone.
    pub async fn run(mut self) -> Run {
        let began = now();
        let mut last_came = began;
        loop {
            if self.come().await > 0 {
                last_came = now();
                self.last_news = last_came;
            }
            self.watches.take(&mut self.lives, PACE).await;
            self.note_failures();
            self.go().await;
            self.succeed().await;
            self.nudge().await;
            self.blow().await;
            let at = now();
            let all_came = self.came() >= self.pods;
            let is_over = self.lives.values().all(|life| life.gone.is_some());
            if all_came && is_over && matches!(self.blow, Blow::Never | Blow::At(_)) {
                break;
            }
            if all_came && at.saturating_sub(last_came) > DRAIN_LIMIT {
                self.give_up().await;
            }
            self.assert_no_hang(at);
        }
        Run {
            load: self.load,
            seed: self.seed,
            lives: self.lives,
            began,
            last_came,
            ended: now(),
            strikes: self.strikes,
        }
    }

    fn assert_no_hang(&mut self, at: Duration) {
        let news = self
            .lives
            .values()
            .flat_map(|life| [life.running, life.gone, life.deleted])
            .flatten()
            .max();
        self.last_news = self.last_news.max(news.unwrap_or_default());
        assert!(
            at.saturating_sub(self.last_news) < NO_NEWS_LIMIT,
            "the run hangs: {:#?}",
            self.lives
                .iter()
                .filter(|(_, life)| life.gone.is_none())
                .collect::<Vec<_>>()
        );
    }

    /// Creates the pods that are due, and tells how many.
    async fn come(&mut self) -> usize {
        let left = self.pods.saturating_sub(self.came());
        if left == 0 {
            return 0;
        }
        let mut kinds = match self.load.arrivals {
            Arrivals::Waiting => self.missing(),
            Arrivals::Stream(mean) => self.stream(mean),
            Arrivals::Bursts { each, every, .. } => self.burst(each, Some(every)),
            Arrivals::Rounds { each, pause } => self.round(each, pause),
        };
        kinds.truncate(left);
        let pods: Vec<(String, Life)> = kinds.into_iter().map(|kind| self.throw(kind)).collect();
        self.create(pods).await
    }

    /// Pods that came by themselves, not in the place of another.
    fn came(&self) -> usize {
        self.made.iter().sum()
    }

    fn throw(&mut self, kind: Kind) -> (String, Life) {
        let mut fate = Fate::next(&self.load, &mut self.fates[kind as usize]);
        if self.load.first_stays && self.made[kind as usize] == 0 {
            fate = fate.staying();
        }
        let name = format!("{}-{}", kind.word(), self.made[kind as usize]);
        self.made[kind as usize] += 1;
        (name, Life::new(kind, fate, self.round))
    }

    async fn create(&mut self, pods: Vec<(String, Life)>) -> usize {
        let count = pods.len();
        let world = &*self.world;
        let created = match self.load.arrivals.made() {
            Made::OneByOne => vec![one_by_one(world, pods).await],
            Made::ByControllers => {
                let (counted, claims) = pods
                    .into_iter()
                    .partition::<Vec<_>, _>(|(_, life)| life.kind == Kind::Counted);
                join_all([counted, claims].map(|pods| slow_start(world, pods))).await
            }
        };
        self.lives.extend(created.into_iter().flatten());
        count
    }

    /// The kinds of which too few pods wait.
    fn missing(&mut self) -> Vec<Kind> {
        let at = now();
        if self.is_time(at) {
            self.next = Some(at + DEMAND_EVERY);
            self.wanted = [0, 0].map(|_: usize| self.dice.weighted(&[(0, 1), (1, 2), (2, 1)]));
        }
        let all = self.came();
        Kind::BOTH
            .into_iter()
            .filter(|kind| {
                let of_kind = self.lives.values().filter(|life| life.kind == *kind);
                let just_bound = |life: &&Life| {
                    life.bound_only_for(at)
                        .is_none_or(|since| since < DEMAND_EVERY)
                };
                let waiting: Vec<&Life> = of_kind
                    .filter(|life| life.waits())
                    .filter(just_bound)
                    .collect();
                let young = waiting
                    .iter()
                    .filter(|life| at.saturating_sub(life.created) < YOUNG)
                    .count();
                let made = self.made[*kind as usize];
                let rests = self.last_failed[*kind as usize]
                    .is_some_and(|failed| at.saturating_sub(failed) < BACK_OFF);
                let has_enough = made > MIX_FROM && made * 100 > MIX_LIMIT_PERCENT * all;
                !rests
                    && !has_enough
                    && young < self.wanted[*kind as usize]
                    && waiting.len() < WAITING_LIMIT
            })
            .collect()
    }

    fn stream(&mut self, mean: Duration) -> Vec<Kind> {
        let mut kinds = Vec::new();
        let at = now();
        while self.is_time(at) {
            let pause = self.dice.pause(mean);
            self.next = self.next.map(|next| next + pause);
            kinds.push(self.dice.weighted(&[(Kind::Counted, 1), (Kind::Claim, 1)]));
        }
        kinds
    }

    fn is_time(&self, at: Duration) -> bool {
        self.next.is_some_and(|next| at >= next)
    }

    fn burst(&mut self, each: u32, pause: Option<Duration>) -> Vec<Kind> {
        let at = now();
        if !self.is_time(at) {
            return Vec::new();
        }
        self.round += 1;
        self.next = pause.map(|pause| at + pause);
        let mut kinds: Vec<Kind> = Kind::BOTH
            .into_iter()
            .flat_map(|kind| std::iter::repeat_n(kind, usize::try_from(each).expect("small")))
            .collect();
        self.dice.shuffle(&mut kinds);
        kinds
    }

    fn round(&mut self, each: u32, pause: (Duration, Duration)) -> Vec<Kind> {
        if self.lives.values().any(|life| life.gone.is_none()) {
            return Vec::new();
        }
        if self.next.is_none() {
            self.next = Some(now() + self.dice.between(pause));
        }
        self.burst(each, None)
    }

    fn note_failures(&mut self) {
        for life in self.lives.values_mut() {
            if let Some(failed) = &life.failed {
                let last = &mut self.last_failed[life.kind as usize];
                *last = (*last).max(Some(failed.at));
            }
            let bound_only_for = life.bound_only_for(now()).unwrap_or_default();
            life.stuck |= bound_only_for > STUCK_AFTER;
        }
    }

    /// Deletes whose time has come.
    async fn go(&mut self) {
        let at = now();
        let others_are_gone = self.came() >= self.pods
            && self
                .lives
                .values()
                .all(|life| life.fate.stays || life.gone.is_some());
        let due = |life: &Life| {
            let after = |since: Option<Duration>, time: Duration| {
                since.is_some_and(|since| at >= since + time)
            };
            let failed = life.failed.as_ref().map(|failed| failed.at);
            let early = life.fate.early.map(|early| life.created + early);
            let has_lived = if life.fate.stays {
                others_are_gone
            } else {
                after(life.running, life.fate.life)
            };
            has_lived
                || after(failed, FAILED_STAYS)
                || early.is_some_and(|early| at >= early)
                || life
                    .bound_only_for(at)
                    .is_some_and(|since| since > GIVEN_UP_AFTER)
        };
        let names: Vec<String> = self
            .lives
            .iter()
            .filter(|(_, life)| life.deleted.is_none() && life.gone.is_none())
            .filter(|(_, life)| life.evicted.is_none() && due(life))
            .map(|(name, _)| name.clone())
            .collect();
        self.delete(names).await;
    }

    async fn delete(&mut self, names: Vec<String>) {
        let mut calls = Vec::new();
        for name in names {
            let life = self.lives.get_mut(&name).expect("it was found here");
            life.deleted = Some(now());
            let mut parameters = DeleteParams::default();
            if life.fate.forced {
                parameters = parameters.grace_period(0);
            }
            let pods = self.world.pods();
            calls.push(async move {
                match pods.delete(&name, &parameters).await {
                    Ok(_) => {}
                    Err(kube::Error::Api(status)) if status.code == 404 => {}
                    Err(error) => panic!("pod {name} could not be deleted: {error}"),
                }
            });
        }
        join_all(calls).await;
    }

    /// Whatever is left has had its time.
    async fn give_up(&mut self) {
        let left = self.lives.iter().filter(|(_, life)| {
            life.deleted.is_none() && life.gone.is_none() && life.running.is_none()
        });
        let names = left.map(|(name, _)| name.clone()).collect();
        self.delete(names).await;
    }

    /// Replaces what failed or was evicted. Each pod has one successor at most, and a successor none.
    async fn succeed(&mut self) {
        if self.load.successors == Successors::None {
            return;
        }
        let lost = self.lives.iter().filter(|(name, life)| {
            life.is_lost()
                && life.successor_of.is_none()
                && !self.lives.contains_key(&successor(name))
        });
        let pods: Vec<(String, Life)> = lost
            .map(|(name, life)| {
                let mut next = Life::new(life.kind, life.fate.clone(), life.round);
                next.successor_of = Some(name.clone());
                (successor(name), next)
            })
            .collect();
        self.create(pods).await;
    }

    async fn nudge(&mut self) {
        let at = now();
        if !self.load.nudges || at.saturating_sub(self.last_nudge) < NUDGE_PERIOD {
            return;
        }
        self.last_nudge = at;
        let stays = |life: &Life| {
            life.bound_only_for(at)
                .is_some_and(|since| since >= NUDGE_PERIOD)
        };
        for (name, _) in self.lives.iter().filter(|(_, life)| stays(life)) {
            self.world.nudge_if_forbidden(name).await;
        }
    }

    async fn blow(&mut self) {
        let at = now();
        let over = match &mut self.blow {
            Blow::Never => return,
            Blow::At(time) => {
                let is_due = at >= *time && self.made.iter().sum::<usize>() < self.pods;
                if is_due {
                    self.blow = self.strike();
                }
                return;
            }
            Blow::Kubelet(control, since) => {
                assert_in_time(at, *since, "the kubelet is not back");
                match control.try_wait().expect("the runner's state can be asked") {
                    Some(status) => assert!(status.success(), "the kubelet is not back: {status}"),
                    None => return,
                }
                serves(self.world, &mut self.daemon).await
            }
            Blow::Leaving(since) => {
                assert_in_time(at, *since, "the daemon does not stop");
                self.world.has_left()
            }
            Blow::Daemon(since) => {
                assert_in_time(at, *since, "the daemon is not back");
                serves(self.world, &mut self.daemon).await
            }
            Blow::Successor { since, probed } => {
                assert_in_time(at, *since, "the successor is not ready");
                if at.saturating_sub(*probed) < PROBE_PERIOD {
                    return;
                }
                *probed = at;
                self.world.probe()
            }
            Blow::Former(since) => {
                assert_in_time(at, *since, "the daemon before the successor does not stop");
                self.world.former_has_left()
            }
        };
        self.blow = match (std::mem::replace(&mut self.blow, Blow::Never), over) {
            (Blow::Leaving(since), true) => {
                self.world.spawn_daemon();
                Blow::Daemon(since)
            }
            (Blow::Successor { since, .. }, true) => {
                self.world.end_former();
                Blow::Former(since)
            }
            (Blow::Former(since), true) | (Blow::Kubelet(_, since), false) => Blow::Daemon(since),
            (blow, false) => blow,
            (_, true) => Blow::At(now() + self.dice.between(pause(self.load))),
        };
    }

    fn strike(&mut self) -> Blow {
        let is_update = self.load.blows == Blows::Updates;
        let whom = match is_update {
            true => Struck::Nobody,
            false if self.dice.below(2) == 1 => Struck::Kubelet,
            false => Struck::Daemon,
        };
        let at = now();
        self.strikes.push(Strike { at, whom });
        let is_kill = self.load.blows == Blows::Kills;
        match (whom, &mut self.daemon) {
            (Struck::Nobody, _) => {
                self.world.begin_update();
                Blow::Successor {
                    since: at,
                    probed: at,
                }
            }
            (Struck::Kubelet, daemon) => {
                if let Daemon::StandIns(stand_ins) = daemon {
                    stand_ins.follow_to_next_kubelet();
                }
                let signal = if is_kill { "KILL" } else { "TERM" };
                let command = format!("restart kubelet {signal}");
                Blow::Kubelet(self.world.begin_control(&command), at)
            }
            (Struck::Daemon, Daemon::StandIns(stand_ins)) => {
                stand_ins.restart();
                Blow::Daemon(at)
            }
            (Struck::Daemon, Daemon::Bridge) if is_kill => {
                self.world.kill_daemon();
                self.world.spawn_daemon();
                Blow::Daemon(at)
            }
            (Struck::Daemon, Daemon::Bridge) => {
                self.world.signal_daemon("TERM");
                Blow::Leaving(at)
            }
        }
    }
}

/// Whether both kinds of pods are served, after a blow.
async fn serves(world: &mut World, daemon: &mut Daemon<'_>) -> bool {
    match daemon {
        Daemon::Bridge => world.is_ready().await,
        Daemon::StandIns(stand_ins) => stand_ins.are_back().await,
    }
}

fn pause(load: Load) -> (Duration, Duration) {
    match load.blows {
        Blows::None | Blows::Restarts | Blows::Kills => BLOW_PAUSE,
        Blows::Updates => UPDATE_PAUSE,
    }
}

fn template(gpus: u32) -> String {
    format!("gpus-{gpus}")
}

fn successor(name: &str) -> String {
    format!("{name}-again")
}

async fn one_by_one(world: &World, mut pods: Vec<(String, Life)>) -> Vec<(String, Life)> {
    for pod in &mut pods {
        create(world, std::slice::from_mut(pod)).await;
    }
    pods
}

async fn slow_start(world: &World, mut pods: Vec<(String, Life)>) -> Vec<(String, Life)> {
    let (mut from, mut batch) = (0, 1);
    while from < pods.len() {
        let until = (from + batch).min(pods.len());
        create(world, &mut pods[from..until]).await;
        (from, batch) = (until, batch * 2);
    }
    pods
}

async fn create(world: &World, pods: &mut [(String, Life)]) {
    for (_, life) in pods.iter_mut() {
        life.created = now();
    }
    let pods = pods.iter().map(|(name, life)| {
        let gpus = life.fate.gpus;
        world.create(match life.kind {
            Kind::Counted => PodSpec::counted(name, gpus),
            Kind::Claim => PodSpec::from_template(name, &template(gpus), &["main"]),
        })
    });
    join_all(pods).await;
}
