//! What can happen next.

use crate::broken::Broken;
use crate::daemon::{Call, Daemon, Doing, Look, Progress, Up};
use crate::node::{Api, Cached, Node, Pod, Source, Stage};
use crate::play::State;
use crate::scope::{CAUSELESS, FIRST_USER, Ids, Looks, Rare, Scope, Sides, Steps};
use crate::set::Set;

/// What becomes of a call that is served at one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fate {
    Fine,
    /// The save fails; the old ledger is on disk.
    SaveFails,
    /// The save fails; either ledger may be on disk.
    SaveInDoubt,
    /// The daemon dies before it saves.
    DiesUnsaved,
    /// The daemon dies after it has saved, and before it answers.
    DiesSaved,
    /// The kubelet starts anew before it hears the answer.
    Unheard,
}

/// Which of the two ledgers a daemon that died during a save finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Found {
    Older,
    Newer,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Api(ApiEvent),
    Pod(PodEvent),
    Kubelet(KubeletEvent),
    Arbiter(Step),
    Daemon(DaemonEvent),
    Fault(Fault),
}

/// What the schedulers and the API do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ApiEvent {
    /// A counted pod is bound here.
    Bind { pod: usize },
    /// A claim is allocated here, for a pod that is bound here with that.
    AllocateClaim { pod: usize, unit: usize },
    /// One more pod is bound here that uses an allocated claim.
    ShareClaim { pod: usize },
    /// The API hears that a pod has ended, and the claim controller does its part.
    HearEnd { pod: usize },
    /// A pod is deleted with grace 0.
    ForceDelete { pod: usize },
    /// Both schedulers see what is in the API now.
    SchedulersLook,
}

/// What pods do on their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PodEvent {
    /// It starts with a claim that the kubelet has prepared already.
    StartWithClaim { pod: usize },
    /// Its container opens its GPUs.
    Open { pod: usize },
    /// It ends as it should, and the API hears of it.
    Finish { pod: usize },
    /// It ends as it should, and the API does not hear of it yet.
    FinishUnheard { pod: usize },
    /// The processes of a force-deleted pod end.
    Reap { pod: usize },
}

/// What the kubelet does, but for the calls that are served at one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KubeletEvent {
    /// An `Allocate` comes in, and its evidence is read.
    Ask {
        pod: usize,
        ids: Set,
    },
    /// It answers what it lists, and the answer is on its way.
    List,
    /// It finds no healthy id for a pod.
    NoHealthyId {
        pod: usize,
    },
    Restart,
    /// It starts anew without what it had written down.
    LoseBook,
    BeReady,
    /// The node starts anew.
    Reboot,
}

/// What the arbiter does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// A call comes in and is served at one go.
    Serve {
        call: Call,
        fate: Fate,
    },
    /// One or two calls are planned.
    Plan {
        first: Call,
        second: Option<Call>,
    },
    Save {
        fate: Fate,
    },
    Commit,
    WriteFiles,
    Answer,
}

/// What happens to the daemon, and what it writes to the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DaemonEvent {
    Die {
        finds: Found,
    },
    Start,
    StartWithoutLedger,
    /// The count goes out to the Node.
    WriteCount,
    /// The kubelet writes its own count there.
    RevertCount,
    /// The slice goes out.
    WriteSlice,
    /// It looks at everything.
    LookAround,
    /// Time passes.
    Tick,
}

/// What fails, and what is mended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    ApiGoes,
    ApiComes,
    GpuGoes { unit: usize },
    GpuComes { unit: usize },
    NvmlGoes { unit: usize },
    NvmlComes { unit: usize },
    StrangerComes { unit: usize },
    StrangerGoes { unit: usize },
    RightGoes,
    RightComes,
}

/// Everything that can happen in a state.
pub(crate) fn actions(scope: &Scope, state: &State) -> Vec<Action> {
    let mut actions = Vec::new();
    if state.broken.is_some() {
        return actions;
    }
    let here = Here {
        scope,
        node: &state.node,
    };
    here.of_the_api(&mut actions);
    here.of_the_kubelet(&mut actions);
    here.of_the_node(&mut actions);
    match &state.daemon {
        Daemon::Down => here.of_a_dead_daemon(&mut actions),
        Daemon::Up(up) => here.of_the_arbiter(state, up, &mut actions),
    }
    actions
}

#[derive(Clone, Copy)]
struct Here<'a> {
    scope: &'a Scope,
    node: &'a Node,
}

impl Here<'_> {
    fn may(self, rare: Rare) -> bool {
        self.node.may(self.scope, rare)
    }

    fn of_the_api(self, actions: &mut Vec<Action>) {
        if !self.node.is_api_up() {
            return;
        }
        let pods = &self.node.pods;
        for pod in self.scope.counted_pods() {
            if self.may_bind(pod) {
                actions.push(Action::Api(ApiEvent::Bind { pod }));
            }
        }
        for pod in self.scope.user_pods() {
            self.claim(pod, actions);
        }
        for pod in self.scope.counted_pods().chain(self.scope.user_pods()) {
            if pods[pod].stage == Stage::Over && pods[pod].is_live() {
                actions.push(Action::Api(ApiEvent::HearEnd { pod }));
            }
            if pods[pod].is_live() && pods[pod].stage != Stage::Over && self.may(Rare::ForceDelete)
            {
                actions.push(Action::Api(ApiEvent::ForceDelete { pod }));
            }
        }
    }

    /// Pods of one kind come in the order of their numbers, since they differ in nothing else.
    fn may_bind(self, pod: usize) -> bool {
        let pods = &self.node.pods;
        let before = match pod.checked_sub(1).map(|before| pods[before].api) {
            None => true,
            Some(Api::Gone) => true,
            Some(Api::Live) => !self.scope.name_comes_back,
            Some(Api::Absent) => false,
        };
        let room = match self.scope.sides {
            Sides::Fixed => true,
            Sides::Move => {
                let live = self.scope.counted_pods().filter(|pod| pods[*pod].is_live());
                let used: usize = live.map(|pod| self.scope.counted[pod]).sum();
                used + self.scope.counted[pod] <= usize::from(self.node.views.scheduler)
            }
        };
        pods[pod].api == Api::Absent && before && room
    }

    fn claim(self, pod: usize, actions: &mut Vec<Action>) {
        let pods = &self.node.pods;
        let number = self.scope.users[pod - FIRST_USER];
        let mut before =
            (FIRST_USER..pod).filter(|other| self.scope.claim_of(*other) == Some(number));
        if pods[pod].api != Api::Absent || before.any(|other| pods[other].api == Api::Absent) {
            return;
        }
        if self.node.claims[number].allocated.is_some() {
            actions.push(Action::Api(ApiEvent::ShareClaim { pod }));
            return;
        }
        let others = self.scope.claims().filter(|other| *other != number);
        let taken: Set = others
            .filter_map(|other| self.node.claims[other].allocated.map(usize::from))
            .collect();
        let offered = match self.scope.sides {
            Sides::Fixed => self.scope.units(),
            Sides::Move => self.node.views.claimable,
        };
        let free = offered.without(taken).iter();
        actions.extend(free.map(|unit| Action::Api(ApiEvent::AllocateClaim { pod, unit })));
    }

    fn of_the_kubelet(self, actions: &mut Vec<Action>) {
        let node = self.node;
        for pod in self.scope.counted_pods().chain(self.scope.user_pods()) {
            match node.pods[pod].stage {
                Stage::Waiting => {
                    let prepared = self
                        .cached(pod)
                        .is_some_and(|c| matches!(c, Cached::Prepared(_)));
                    if prepared && self.may_prepare(pod) {
                        actions.push(Action::Pod(PodEvent::StartWithClaim { pod }));
                    }
                }
                Stage::Given => {
                    actions.push(Action::Pod(PodEvent::Open { pod }));
                    self.finish(pod, actions);
                }
                Stage::Open => self.finish(pod, actions),
                Stage::Orphan => actions.push(Action::Pod(PodEvent::Reap { pod })),
                Stage::Over => {}
            }
        }
        if node.is_kubelet_ready() {
            if self.may(Rare::KubeletRestart) {
                actions.push(Action::Kubelet(KubeletEvent::Restart));
            }
            if self.may(Rare::LostBook) {
                actions.push(Action::Kubelet(KubeletEvent::LoseBook));
            }
        } else {
            actions.push(Action::Kubelet(KubeletEvent::BeReady));
        }
    }

    fn finish(self, pod: usize, actions: &mut Vec<Action>) {
        actions.push(Action::Pod(PodEvent::Finish { pod }));
        if self.may(Rare::LateNews) {
            actions.push(Action::Pod(PodEvent::FinishUnheard { pod }));
        }
    }

    fn cached(self, pod: usize) -> Option<Cached> {
        let claim = self.scope.claim_of(pod)?;
        Some(self.node.claims[claim].cached)
    }

    /// Whether the kubelet may come to prepare: it has read the claim, and the pod is in it.
    fn may_prepare(self, pod: usize) -> bool {
        let claim = self.scope.claim_of(pod);
        let reserved = claim.is_some_and(|claim| {
            let claim = self.node.claims[claim];
            claim.reserved.has(pod) && claim.allocated.is_some()
        });
        reserved && self.node.is_api_up() && self.node.is_kubelet_ready()
    }

    fn of_the_node(self, actions: &mut Vec<Action>) {
        let node = self.node;
        match node.api {
            Source::Answers if self.may(Rare::ApiAway) => {
                actions.push(Action::Fault(Fault::ApiGoes))
            }
            Source::Answers => {}
            Source::Away => actions.push(Action::Fault(Fault::ApiComes)),
        }
        for unit in self.scope.units().iter() {
            for (is_so, rare, begins, ends) in [
                (
                    node.lost.has(unit),
                    Rare::GpuLost,
                    Action::Fault(Fault::GpuGoes { unit }),
                    Action::Fault(Fault::GpuComes { unit }),
                ),
                (
                    node.silent.has(unit),
                    Rare::NvmlSilent,
                    Action::Fault(Fault::NvmlGoes { unit }),
                    Action::Fault(Fault::NvmlComes { unit }),
                ),
                (
                    node.strangers.has(unit),
                    Rare::Stranger,
                    Action::Fault(Fault::StrangerComes { unit }),
                    Action::Fault(Fault::StrangerGoes { unit }),
                ),
            ] {
                if is_so {
                    actions.push(ends);
                } else if self.may(rare) {
                    actions.push(begins);
                }
            }
        }
        if self.may(Rare::Reboot) {
            actions.push(Action::Kubelet(KubeletEvent::Reboot));
        }
        if self.scope.sides == Sides::Move {
            match node.views.right {
                Source::Answers if self.may(Rare::NoRight) => {
                    actions.push(Action::Fault(Fault::RightGoes))
                }
                Source::Answers => {}
                Source::Away => actions.push(Action::Fault(Fault::RightComes)),
            }
            let views = node.views;
            if views.scheduler != views.node || views.claimable != views.slice {
                actions.push(Action::Api(ApiEvent::SchedulersLook));
            }
        }
    }

    fn of_a_dead_daemon(self, actions: &mut Vec<Action>) {
        actions.push(Action::Daemon(DaemonEvent::Start));
        // A GPU that is away just then would get another number when it comes back.
        if self.may(Rare::LostLedger) && self.node.lost.is_empty() {
            actions.push(Action::Daemon(DaemonEvent::StartWithoutLedger));
        }
    }

    fn of_the_arbiter(self, state: &State, up: &Up, actions: &mut Vec<Action>) {
        if self.may(Rare::Crash) {
            actions.push(Action::Daemon(DaemonEvent::Die {
                finds: Found::Older,
            }));
            if state.doubt.is_some() {
                actions.push(Action::Daemon(DaemonEvent::Die {
                    finds: Found::Newer,
                }));
            }
        }
        let progress = match &up.doing {
            Doing::Idle => return self.of_an_idle_arbiter(up, actions),
            Doing::Batch(progress, _) => progress,
        };
        match progress {
            Progress::Planned => {
                let mut save = |fate| actions.push(Action::Arbiter(Step::Save { fate }));
                save(Fate::Fine);
                if self.may(Rare::SaveFails) {
                    save(Fate::SaveFails);
                }
                if self.may(Rare::SaveInDoubt) {
                    save(Fate::SaveInDoubt);
                }
            }
            Progress::Saved => actions.push(Action::Arbiter(Step::Commit)),
            Progress::Committed => actions.push(Action::Arbiter(Step::WriteFiles)),
            Progress::Written => actions.push(Action::Arbiter(Step::Answer)),
        }
    }

    fn of_an_idle_arbiter(self, up: &Up, actions: &mut Vec<Action>) {
        let calls = self.calls(up, actions);
        for call in &calls {
            match self.scope.steps {
                Steps::Whole => self.fates(*call, actions),
                Steps::Each => {
                    let (first, second) = (*call, None);
                    actions.push(Action::Arbiter(Step::Plan { first, second }));
                }
            }
        }
        if self.scope.steps == Steps::Each {
            self.pairs(&calls, actions);
        }
        match self.scope.looks {
            Looks::Apart(looks) => {
                for look in looks {
                    let first = Call::Look(*look);
                    let fate = Fate::Fine;
                    let second = None;
                    actions.push(Action::Arbiter(match self.scope.steps {
                        Steps::Whole => Step::Serve { call: first, fate },
                        Steps::Each => Step::Plan { first, second },
                    }));
                }
            }
            Looks::Together => actions.push(Action::Daemon(DaemonEvent::LookAround)),
        }
        let waits = !up.serves() && self.node.is_api_up() && self.node.is_kubelet_ready();
        if waits {
            actions.push(Action::Arbiter(Step::Serve {
                call: Call::Look(Look::Adoption),
                fate: Fate::Fine,
            }));
        }
        if self.scope.sides == Sides::Move {
            self.of_the_views(up, actions);
        }
        let may_list = self.node.is_kubelet_ready() && self.node.late.is_none();
        if may_list && self.may(Rare::LateListing) {
            actions.push(Action::Kubelet(KubeletEvent::List));
        }
        if self.may_tick(up) {
            actions.push(Action::Daemon(DaemonEvent::Tick));
        }
    }

    /// Writes to the API, and the look at what has come of them.
    fn of_the_views(self, up: &Up, actions: &mut Vec<Action>) {
        let views = self.node.views;
        actions.push(Action::Arbiter(Step::Serve {
            call: Call::Look(Look::Node),
            fate: Fate::Fine,
        }));
        if !self.node.is_api_up() {
            return;
        }
        if u32::from(views.node) != up.memory.offered.count && views.right == Source::Answers {
            actions.push(Action::Daemon(DaemonEvent::WriteCount));
        }
        if self.slice(up) != views.slice {
            actions.push(Action::Daemon(DaemonEvent::WriteSlice));
        }
        if self.may(Rare::CountReverted) {
            actions.push(Action::Daemon(DaemonEvent::RevertCount));
        }
    }

    /// The devices that the daemon would publish as untainted.
    pub(crate) fn slice(self, up: &Up) -> Set {
        let untainted = up.memory.offered.untainted;
        match self.scope.broken {
            Some(Broken::NeverTaintsAgain) => untainted.and(self.node.views.slice),
            Some(_) | None => untainted,
        }
    }

    /// Where units move, nobody is behind by more than a tick: that is what the settle time is for. No answer is on its
    /// way for so long. And a kubelet does not keep a claim that nobody uses for a minute, unless it has forgotten it.
    fn may_tick(self, up: &Up) -> bool {
        let views = self.node.views;
        let in_step = match self.scope.sides {
            Sides::Fixed => true,
            Sides::Move => {
                views.scheduler == views.node
                    && views.claimable == views.slice
                    && views.slice == self.slice(up)
                    && views.pods_seen
                    && views.node_seen
            }
        };
        let keeps = |claim: usize| match self.node.claims[claim].cached {
            Cached::No => false,
            Cached::Named => !self.users(claim).any(|pod| pod.is_active() || pod.waits()),
            Cached::Prepared(_) => !self.users(claim).any(|pod| pod.is_active()),
        };
        let is_long = self.scope.tick >= CAUSELESS;
        in_step
            && self.node.late.is_none()
            && !(is_long && self.node.is_kubelet_ready() && self.scope.claims().any(keeps))
    }

    /// The pods that use a claim.
    fn users(self, claim: usize) -> impl Iterator<Item = Pod> {
        let pods = self.scope.user_pods();
        pods.filter(move |pod| self.scope.claim_of(*pod) == Some(claim))
            .map(move |pod| self.node.pods[pod])
    }

    /// The calls that the kubelet may make now.
    fn calls(self, up: &Up, actions: &mut Vec<Action>) -> Vec<Call> {
        let node = self.node;
        let mut calls = Vec::new();
        if !node.is_kubelet_ready() {
            return calls;
        }
        match node.asking {
            Some(asking) => calls.push(Call::Allocate {
                pod: asking.pod.into(),
                ids: asking.ids,
            }),
            None => {
                for pod in self
                    .scope
                    .counted_pods()
                    .filter(|pod| node.pods[*pod].waits())
                {
                    self.admit(pod, up, &mut calls, actions);
                }
            }
        }
        for pod in self.scope.user_pods().filter(|pod| self.may_prepare(*pod)) {
            let begins =
                node.pods[pod].waits() && !matches!(self.cached(pod), Some(Cached::Prepared(_)));
            // A kubelet that has started anew prepares again for what runs.
            let again = node.pods[pod].is_active() && self.cached(pod) == Some(Cached::Named);
            if begins && self.may(Rare::LastCall) {
                calls.push(Call::PrepareAtLast { pod });
            }
            if begins || again || (node.pods[pod].is_active() && self.may(Rare::Repeat)) {
                calls.push(Call::Prepare { pod });
            }
        }
        for claim in self.scope.claims() {
            let used = self.users(claim).any(|pod| pod.is_active());
            let one_left = self.users(claim).any(|pod| pod.stage == Stage::Over);
            let early = self.scope.broken == Some(Broken::UnpreparesWithTheFirstPod) && one_left;
            let cached = node.claims[claim].cached != Cached::No;
            if (!used || early) && (cached || self.may(Rare::Repeat)) {
                calls.push(Call::Unprepare { claim });
            }
        }
        calls
    }

    /// The kubelet picks ids for a pod.
    fn admit(self, pod: usize, up: &Up, calls: &mut Vec<Call>, actions: &mut Vec<Action>) {
        let booked = self.node.booked();
        let listed = match self.scope.ids {
            Ids::Any => self.scope.units(),
            Ids::Healthy => up.memory.offered.healthy,
        };
        let size = self.scope.counted[pod];
        let mut any = false;
        for ids in listed.without(booked).choices(size) {
            any = true;
            match self.scope.steps {
                Steps::Whole => calls.push(Call::Allocate { pod, ids }),
                Steps::Each => actions.push(Action::Kubelet(KubeletEvent::Ask { pod, ids })),
            }
        }
        if !any {
            actions.push(Action::Kubelet(KubeletEvent::NoHealthyId { pod }));
        }
    }

    fn fates(self, call: Call, actions: &mut Vec<Action>) {
        let mut push = |fate| actions.push(Action::Arbiter(Step::Serve { call, fate }));
        push(Fate::Fine);
        if self.may(Rare::SaveFails) {
            push(Fate::SaveFails);
        }
        if self.may(Rare::SaveInDoubt) {
            push(Fate::SaveInDoubt);
        }
        if self.may(Rare::Crash) {
            push(Fate::DiesUnsaved);
            push(Fate::DiesSaved);
        }
        if self.may(Rare::KubeletRestart) {
            push(Fate::Unheard);
        }
    }

    /// Calls that wait for the arbiter together, in both orders. The kubelet has one `Allocate` at a time, and one
    /// call for a claim.
    fn pairs(self, calls: &[Call], actions: &mut Vec<Action>) {
        let subject = |call: &Call| match call {
            Call::Allocate { .. } => None,
            Call::Prepare { pod } | Call::PrepareAtLast { pod } => self.scope.claim_of(*pod),
            Call::Unprepare { claim } => Some(*claim),
            Call::Look(_) => None,
        };
        for first in calls {
            for second in calls
                .iter()
                .filter(|second| subject(first) != subject(second))
            {
                actions.push(Action::Arbiter(Step::Plan {
                    first: *first,
                    second: Some(*second),
                }));
            }
        }
    }
}

/// The devices that a daemon would publish as untainted.
pub(crate) fn slice(scope: &Scope, node: &Node, up: &Up) -> Set {
    Here { scope, node }.slice(up)
}
