//! What comes of an action.

use std::collections::BTreeMap;
use std::time::Duration;

use bridge_core::Ledger;

use crate::actions::{Action, DaemonEvent, Fate, Found, KubeletEvent, Step, slice};
use crate::broken::Broken;
use crate::daemon::{Answer, Call, Daemon, Disk, Doing, Look, Plan, Progress, Up, first_ledger};
use crate::decided::Game;
use crate::keyed::Keyed;
use crate::node::{Asking, Cached, Kubelet, Node};
use crate::properties::{self, Breach};
use crate::scope::{FIRST_USER, Rare, Sides};
use crate::set::Set;

/// A kubelet that has lost its book is away for longer than it takes the daemon to look at everything.
const LOST_BOOK: Duration = Duration::from_secs(11);

/// Everything: the daemon, its disk, and the node around it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) daemon: Daemon,
    pub(crate) disk: Disk,
    /// The ledger that may be on disk instead, after a save in doubt.
    pub(crate) doubt: Option<Keyed<Ledger>>,
    pub(crate) node: Node,
    /// What the last step did that must not be; nothing happens after it.
    pub(crate) broken: Option<Breach>,
}

impl State {
    /// A node on which nothing has happened yet, and a daemon that has looked at its GPUs.
    pub(crate) fn first(scope: &Game) -> Self {
        let ledger = first_ledger(scope);
        let mut state = Self {
            daemon: Daemon::Down,
            disk: Disk::Is(Keyed::new(ledger.canonical())),
            doubt: None,
            node: Node::new(scope),
            broken: None,
        };
        state.start(scope);
        if scope.sides == Sides::Move {
            state.look(scope, Look::Node);
        }
        state
    }

    /// The state after an action; `None` if it changes nothing.
    pub(crate) fn after(&self, scope: &Game, action: Action) -> Option<Self> {
        let mut next = self.clone();
        next.play(scope, action);
        (next != *self).then_some(next)
    }

    pub(crate) fn play(&mut self, scope: &Game, action: Action) {
        match action {
            Action::Api(event) => self.node.play_api(scope, event),
            Action::Pod(event) => self.node.play_pod(scope, event),
            Action::Fault(fault) => self.node.play_fault(fault),
            Action::Kubelet(event) => self.play_kubelet(scope, event),
            Action::Daemon(event) => self.play_daemon(scope, event),
            Action::Arbiter(step) => self.play_arbiter(scope, step),
        }
    }

    fn breach(&mut self, breach: Breach) {
        self.broken.get_or_insert(breach);
    }

    fn up(&mut self) -> Option<&mut Up> {
        match &mut self.daemon {
            Daemon::Down => None,
            Daemon::Up(up) => Some(up),
        }
    }

    // ---- The arbiter ----

    fn play_arbiter(&mut self, scope: &Game, step: Step) {
        match step {
            Step::Serve { call, fate } => self.serve(scope, call, fate),
            Step::Plan { first, second } => self.begin(scope, first, second),
            Step::Save { fate } => self.save_step(scope, fate),
            Step::Commit => {
                if let Some(plan) = self.batch_at(Progress::Saved) {
                    self.commit(&plan);
                    self.set_doing(Doing::Batch(Progress::Committed, plan));
                }
            }
            Step::WriteFiles => {
                if let Some(plan) = self.batch_at(Progress::Committed) {
                    self.write_files(scope);
                    self.set_doing(Doing::Batch(Progress::Written, plan));
                }
            }
            Step::Answer => {
                if let Some(plan) = self.batch_at(Progress::Written) {
                    self.set_doing(Doing::Idle);
                    self.answer(scope, &plan);
                }
            }
        }
    }

    fn plan(&mut self, scope: &Game, calls: &[Call]) -> Option<Keyed<Plan>> {
        let Daemon::Up(up) = &self.daemon else {
            return None;
        };
        let planned = if scope.broken == Some(Broken::DecidesCallsApart) {
            scope.plan_apart(up, &self.node, calls)
        } else {
            scope.plan(up, &self.node, calls)
        };
        match planned {
            Ok(plan) => Some(plan),
            Err(breach) => {
                self.breach(breach);
                None
            }
        }
    }

    /// A call from its arrival to its answer.
    pub(crate) fn serve(&mut self, scope: &Game, call: Call, fate: Fate) {
        self.comes_in(scope, call);
        let Some(plan) = self.plan(scope, &[call]) else {
            return;
        };
        let saves = self.must_save(scope, &plan);
        match fate {
            Fate::Fine => self.finish_batch(scope, &plan),
            Fate::SaveFails => {
                self.node.spend(Rare::SaveFails);
                if saves && scope.broken == Some(Broken::AnswersAfterFailedSave) {
                    self.keep_disk();
                    self.commit(&plan);
                    self.write_files(scope);
                    self.answer(scope, &plan);
                } else if saves {
                    self.fail(scope, &plan);
                } else {
                    self.finish_batch(scope, &plan);
                }
            }
            Fate::SaveInDoubt => {
                self.node.spend(Rare::SaveInDoubt);
                if saves {
                    self.keep_disk();
                    self.doubt = Some(plan.after.ledger.clone());
                    self.fail(scope, &plan);
                } else {
                    self.finish_batch(scope, &plan);
                }
            }
            Fate::DiesUnsaved => {
                self.node.spend(Rare::Crash);
                if scope.broken == Some(Broken::AnswersBeforeSaving) {
                    self.answer(scope, &plan);
                } else {
                    self.fail(scope, &plan);
                }
                self.die(Found::Older);
            }
            Fate::DiesSaved => {
                self.node.spend(Rare::Crash);
                self.save(scope, &plan);
                self.fail(scope, &plan);
                self.die(Found::Older);
            }
            Fate::Unheard => {
                self.node.spend(Rare::KubeletRestart);
                self.save(scope, &plan);
                self.commit(&plan);
                self.write_files(scope);
                self.node.restart_kubelet(scope);
            }
        }
    }

    /// What the kubelet notes before it calls.
    fn comes_in(&mut self, scope: &Game, call: Call) {
        match call {
            Call::Prepare { pod } | Call::PrepareAtLast { pod } => {
                if matches!(call, Call::PrepareAtLast { .. }) {
                    self.node.spend(Rare::LastCall);
                }
                let active = self.node.pods[pod].is_active();
                let claim = &mut self.node.claims[scope.users[pod - FIRST_USER]];
                match claim.cached {
                    Cached::No => claim.cached = Cached::Named,
                    Cached::Named => {}
                    Cached::Prepared(_) if active => self.node.spend(Rare::Repeat),
                    Cached::Prepared(_) => {}
                }
            }
            Call::Unprepare { claim } => {
                if self.node.claims[claim].cached == Cached::No {
                    self.node.spend(Rare::Repeat);
                }
            }
            Call::Allocate { .. } | Call::Look(_) => {}
        }
    }

    fn begin(&mut self, scope: &Game, first: Call, second: Option<Call>) {
        let calls: Vec<Call> = [first].into_iter().chain(second).collect();
        for call in &calls {
            self.comes_in(scope, *call);
        }
        let plan = self.plan(scope, &calls);
        if let (Some(plan), Some(up)) = (plan, self.up()) {
            up.doing = Doing::Batch(Progress::Planned, plan);
        }
    }

    /// The batch that is under way, if it has come so far.
    fn batch_at(&self, progress: Progress) -> Option<Keyed<Plan>> {
        match &self.daemon {
            Daemon::Up(up) => match &up.doing {
                Doing::Batch(at, plan) if *at == progress => Some(plan.clone()),
                Doing::Batch(..) | Doing::Idle => None,
            },
            Daemon::Down => None,
        }
    }

    fn set_doing(&mut self, doing: Doing) {
        if let Some(up) = self.up() {
            up.doing = doing;
        }
    }

    fn save_step(&mut self, scope: &Game, fate: Fate) {
        let Some(plan) = self.batch_at(Progress::Planned) else {
            return;
        };
        let saves = self.must_save(scope, &plan);
        match fate {
            Fate::SaveFails if saves => {
                self.node.spend(Rare::SaveFails);
                self.set_doing(Doing::Idle);
                self.fail(scope, &plan);
            }
            Fate::SaveInDoubt if saves => {
                self.node.spend(Rare::SaveInDoubt);
                self.keep_disk();
                self.doubt = Some(plan.after.ledger.clone());
                self.set_doing(Doing::Idle);
                self.fail(scope, &plan);
            }
            Fate::Fine => {
                self.save(scope, &plan);
                self.set_doing(Doing::Batch(Progress::Saved, plan));
            }
            Fate::SaveFails
            | Fate::SaveInDoubt
            | Fate::DiesUnsaved
            | Fate::DiesSaved
            | Fate::Unheard => {}
        }
    }

    /// Saves, commits, writes the files and answers, with nothing in between.
    fn finish_batch(&mut self, scope: &Game, plan: &Keyed<Plan>) {
        self.save(scope, plan);
        self.commit(plan);
        self.write_files(scope);
        self.answer(scope, plan);
    }

    /// What has changed is saved; after a save in doubt, everything is.
    fn must_save(&self, scope: &Game, plan: &Plan) -> bool {
        let doubted = self.doubt.is_some() && scope.broken != Some(Broken::ForgetsTheDoubt);
        plan.saves || doubted
    }

    fn save(&mut self, scope: &Game, plan: &Plan) {
        let prepares = |answer: &Answer| matches!(answer, Answer::Prepared { .. });
        let skips =
            scope.broken == Some(Broken::SavesNoPreparation) && plan.answers.iter().any(prepares);
        if skips {
            self.keep_disk();
        } else if self.must_save(scope, plan) {
            self.disk = Disk::Is(plan.after.ledger.clone());
            self.doubt = None;
        }
    }

    /// Memory goes on, and the disk stays as it is.
    fn keep_disk(&mut self) {
        if let (Disk::AsInMemory, Daemon::Up(up)) = (&self.disk, &self.daemon) {
            self.disk = Disk::Is(up.memory.ledger.clone());
        }
    }

    fn commit(&mut self, plan: &Plan) {
        if let Some(up) = self.up() {
            up.memory = plan.after.clone();
        }
        self.compare_disk();
    }

    /// One state where there is nothing to tell apart.
    fn compare_disk(&mut self) {
        if let (Disk::Is(ledger), Daemon::Up(up)) = (&self.disk, &self.daemon)
            && *ledger == up.memory.ledger
        {
            self.disk = Disk::AsInMemory;
        }
    }

    fn write_files(&mut self, scope: &Game) {
        if let Daemon::Up(up) = &self.daemon
            && up.serves()
        {
            self.node.cdi = up.prepared(scope);
        }
    }

    fn answer(&mut self, scope: &Game, plan: &Plan) {
        for (call, answer) in plan.calls.iter().zip(&plan.answers) {
            match call {
                Call::Look(Look::Pods) => self.node.views.pods_seen = true,
                Call::Look(Look::Node) => self.node.views.node_seen = true,
                Call::Look(Look::Listing) => self.node.late = None,
                Call::Look(_)
                | Call::Allocate { .. }
                | Call::Prepare { .. }
                | Call::PrepareAtLast { .. }
                | Call::Unprepare { .. } => {}
            }
            self.node.hear(scope, *answer);
            let serves = self.up().is_some_and(|up| up.serves());
            if let Answer::Unprepared { claim } = answer
                && !serves
            {
                self.node.early.insert(*claim);
            }
        }
    }

    /// Every call of a batch gets an error. For an `Allocate` that is the end of the pod.
    fn fail(&mut self, scope: &Game, plan: &Plan) {
        for answer in &plan.answers {
            match answer {
                Answer::Granted { pod, .. } | Answer::Refused { pod } => {
                    self.node.hear(scope, Answer::Refused { pod: *pod });
                }
                Answer::Prepared { .. }
                | Answer::NotNow { .. }
                | Answer::Unprepared { .. }
                | Answer::Seen => {}
            }
        }
    }

    // ---- The daemon's life ----

    fn play_daemon(&mut self, scope: &Game, event: DaemonEvent) {
        match event {
            DaemonEvent::Die { finds } => {
                self.node.spend(Rare::Crash);
                if let Some(Doing::Batch(_, plan)) = self.up().map(|up| up.doing.clone()) {
                    self.fail(scope, &plan);
                }
                if let Some(asking) = self.node.asking {
                    let pod = asking.pod.into();
                    self.node.hear(scope, Answer::Refused { pod });
                }
                self.die(finds);
            }
            DaemonEvent::Start => self.start(scope),
            DaemonEvent::StartWithoutLedger => {
                self.node.spend(Rare::LostLedger);
                self.disk = Disk::Missing;
                self.doubt = None;
                self.node.early = Set::EMPTY;
                self.start(scope);
            }
            DaemonEvent::WriteCount => {
                if let Daemon::Up(up) = &self.daemon {
                    let count = up.memory.offered.count;
                    self.node.views.node_seen = false;
                    self.node.views.node = u8::try_from(count).unwrap_or(u8::MAX);
                }
            }
            DaemonEvent::WriteSlice => {
                if let Daemon::Up(up) = &self.daemon {
                    self.node.views.slice = slice(scope, &self.node, up);
                }
            }
            DaemonEvent::RevertCount => {
                self.node.spend(Rare::CountReverted);
                if let Daemon::Up(up) = &self.daemon {
                    let count = up.memory.offered.healthy.len();
                    self.node.views.node_seen = false;
                    self.node.views.node = u8::try_from(count).unwrap_or(u8::MAX);
                }
            }
            DaemonEvent::LookAround => self.look_at_everything(scope),
            DaemonEvent::Tick => {
                if let Daemon::Up(up) = &self.daemon
                    && let Err(breach) = properties::check_views(scope, &self.node, &up.memory.pool)
                {
                    self.breach(breach);
                }
                self.pass(scope, scope.tick);
            }
        }
    }

    fn die(&mut self, finds: Found) {
        self.keep_disk();
        if let (Found::Newer, Some(newer)) = (finds, self.doubt.take()) {
            self.disk = Disk::Is(newer);
        }
        self.doubt = None;
        self.daemon = Daemon::Down;
        self.node.asking = None;
        self.node.late = None;
    }

    /// Starts on whatever ledger is there: the GPUs are looked at before any call is served.
    pub(crate) fn start(&mut self, scope: &Game) {
        let ledger = match &self.disk {
            Disk::Is(ledger) => Some((**ledger).clone()),
            Disk::AsInMemory | Disk::Missing => None,
        };
        let ledger = match scope.broken {
            Some(Broken::StartsEmpty) => ledger.map(|ledger| Ledger {
                holds: BTreeMap::new(),
                prepared: BTreeMap::new(),
                ..ledger
            }),
            Some(_) | None => ledger,
        };
        match Up::start(scope, ledger.as_ref()) {
            Ok(up) => self.daemon = Daemon::Up(up),
            Err(breach) => return self.breach(breach),
        }
        self.compare_disk();
        self.node.views.pods_seen = false;
        self.look(scope, Look::Inventory);
        if scope.sides == Sides::Fixed {
            // The count can't be lowered, and the daemon finds that out at once.
            self.look(scope, Look::Node);
        }
    }

    pub(crate) fn look(&mut self, scope: &Game, look: Look) {
        self.serve(scope, Call::Look(look), Fate::Fine);
    }

    /// Time passes, and the daemon does what is due.
    pub(crate) fn pass(&mut self, scope: &Game, time: Duration) {
        for pod in scope.counted_pods() {
            self.node.pods[pod].started |= self.node.pods[pod].is_active();
        }
        if let Some(up) = self.up() {
            up.memory.uptime += time;
            if up.is_idle() {
                self.look(scope, Look::Time);
            }
        }
    }

    // ---- The kubelet's life, as far as the daemon has a part in it ----

    fn play_kubelet(&mut self, scope: &Game, event: KubeletEvent) {
        match event {
            KubeletEvent::Ask { pod, ids } => {
                let book = self.node.book(scope);
                self.node.asking = Some(Asking {
                    pod: u8::try_from(pod).unwrap_or(u8::MAX),
                    ids,
                    book,
                });
            }
            KubeletEvent::List => {
                self.node.spend(Rare::LateListing);
                self.node.late = Some(self.node.book(scope));
            }
            KubeletEvent::NoHealthyId { pod } => {
                self.node.hear(scope, Answer::Refused { pod });
                if scope.sides == Sides::Move && self.node.views.always_right {
                    self.breach(Breach::CountedPodFails);
                }
            }
            KubeletEvent::Restart => {
                self.node.spend(Rare::KubeletRestart);
                self.forget_callers();
                self.node.restart_kubelet(scope);
            }
            KubeletEvent::LoseBook => {
                self.node.spend(Rare::LostBook);
                self.look_at_everything(scope);
                self.node.restart_kubelet(scope);
                self.pass(scope, LOST_BOOK);
                self.look_at_everything(scope);
                for pod in &mut self.node.pods {
                    pod.ids = Set::EMPTY;
                }
                for claim in &mut self.node.claims {
                    claim.cached = Cached::No;
                }
            }
            KubeletEvent::Reboot => {
                self.node.spend(Rare::Reboot);
                self.die(Found::Older);
                self.node.reboot(scope);
            }
            KubeletEvent::BeReady => self.node.kubelet = Kubelet::Ready,
        }
    }

    /// The calls of a kubelet that is gone are served, and nobody hears the answers.
    fn forget_callers(&mut self) {
        let Some(up) = self.up() else { return };
        if let Doing::Batch(progress, plan) = &up.doing {
            let unheard = Plan {
                after: plan.after.clone(),
                saves: plan.saves,
                calls: Vec::new(),
                answers: Vec::new(),
            };
            up.doing = Doing::Batch(*progress, Keyed::new(unheard));
        }
    }

    /// What a daemon does each second.
    pub(crate) fn look_at_everything(&mut self, scope: &Game) {
        let waits = matches!(&self.daemon, Daemon::Up(up) if !up.serves());
        let mut looks = vec![Look::Inventory];
        if waits && self.node.is_api_up() && self.node.is_kubelet_ready() {
            looks.push(Look::Adoption);
        }
        looks.extend([Look::Claims, Look::Pods, Look::Listing, Look::Processes]);
        if scope.sides == Sides::Move {
            looks.push(Look::Node);
        }
        for look in looks {
            self.look(scope, look);
        }
    }
}
