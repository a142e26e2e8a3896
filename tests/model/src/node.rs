//! The truth: which container was given which unit, what runs, and what the kubelet and the API server know. The
//! daemon sees of it only what `shown` shows.

use crate::scope::{CLAIMS, FIRST_USER, PODS, Rare, Scope, UNITS};
use crate::set::Set;

/// A pod in the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Api {
    /// Not bound here yet.
    Absent,
    /// Bound here.
    Live,
    /// Ended or deleted: to the daemon it is the same.
    Gone,
}

/// A pod on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    /// The kubelet has nothing for it yet.
    Waiting,
    /// It has its units; its containers may run, and none has opened a GPU yet.
    Given,
    /// NVML shows its processes.
    Open,
    /// It was force-deleted: the kubelet has given it up, and its processes run on.
    Orphan,
    /// Nothing of it is left.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pod {
    pub(crate) api: Api,
    pub(crate) stage: Stage,
    /// Whether the API shows the status of a container.
    pub(crate) started: bool,
    /// The ids of a counted pod in the kubelet's book.
    pub(crate) ids: Set,
    /// What its containers were given.
    pub(crate) units: Set,
}

/// A claim in the kubelet's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cached {
    No,
    /// Prepare was called, and not answered with success since the kubelet started.
    Named,
    /// Prepare was answered with this unit.
    Prepared(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    /// The unit that its allocation names.
    pub(crate) allocated: Option<u8>,
    /// The pods in `status.reservedFor`.
    pub(crate) reserved: Set,
    pub(crate) cached: Cached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kubelet {
    /// It lists nothing yet and admits nothing.
    Starting,
    Ready,
}

/// Whether something outside answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Answers,
    Away,
}

/// What pod-resources would answer at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Book {
    /// Active pods, each with its ids.
    pub(crate) pods: [Option<Set>; PODS],
    /// Prepared claims, each with its unit.
    pub(crate) claims: [Option<u8>; CLAIMS],
}

/// An `Allocate` whose evidence was read and that is not decided yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Asking {
    pub(crate) pod: u8,
    pub(crate) ids: Set,
    pub(crate) book: Book,
}

/// Counts of free units as others see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Views {
    /// `status.allocatable` of the Node in the API.
    pub(crate) node: u8,
    /// The same in the cache of the scheduler.
    pub(crate) scheduler: u8,
    /// The untainted devices of the published slice.
    pub(crate) slice: Set,
    /// The same in the cache of the scheduler.
    pub(crate) claimable: Set,
    /// Whether the daemon may write the Node's status.
    pub(crate) right: Source,
    /// Whether it may write it, and could ever since the start: only then no counted pod fails.
    pub(crate) always_right: bool,
    /// Whether the daemon has seen the count as it is in the API.
    pub(crate) node_seen: bool,
    /// Whether the daemon has seen every pod that is bound.
    pub(crate) pods_seen: bool,
}

/// The node and what is around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) pods: [Pod; PODS],
    pub(crate) claims: [Claim; CLAIMS],
    pub(crate) asking: Option<Asking>,
    /// An answer of pod-resources that is on its way: the next look at the listing finds this.
    pub(crate) late: Option<Book>,
    pub(crate) api: Source,
    pub(crate) kubelet: Kubelet,
    pub(crate) lost: Set,
    pub(crate) silent: Set,
    pub(crate) strangers: Set,
    /// The pod that was given a unit over a process, as reported.
    pub(crate) over: [Option<u8>; UNITS],
    /// Claims with a CDI file.
    pub(crate) cdi: Set,
    /// Claims that were unprepared while the daemon had no ledger.
    pub(crate) early: Set,
    pub(crate) views: Views,
    spent: [u8; Rare::COUNT],
}

impl Pod {
    /// Whether the kubelet counts it among the active ones.
    pub(crate) fn is_active(self) -> bool {
        match self.stage {
            Stage::Given | Stage::Open => true,
            Stage::Waiting | Stage::Orphan | Stage::Over => false,
        }
    }

    /// Whether its containers use its units, or may begin to without asking anybody.
    pub(crate) fn occupies(self) -> bool {
        self.is_active() || self.stage == Stage::Orphan
    }

    /// Whether NVML shows its processes.
    pub(crate) fn has_processes(self) -> bool {
        matches!(self.stage, Stage::Open | Stage::Orphan)
    }

    pub(crate) fn is_live(self) -> bool {
        self.api == Api::Live
    }

    pub(crate) fn waits(self) -> bool {
        self.is_live() && self.stage == Stage::Waiting
    }

    /// Its containers are gone, and the kubelet has freed what it had.
    pub(crate) fn end(&mut self) {
        self.stage = Stage::Over;
        self.ids = Set::EMPTY;
        self.units = Set::EMPTY;
        self.started = false;
    }
}

impl Node {
    pub(crate) fn new(scope: &Scope) -> Self {
        let pod = Pod {
            api: Api::Absent,
            stage: Stage::Waiting,
            started: false,
            ids: Set::EMPTY,
            units: Set::EMPTY,
        };
        let claim = Claim {
            allocated: None,
            reserved: Set::EMPTY,
            cached: Cached::No,
        };
        let count = u8::try_from(scope.parents.len()).unwrap_or(u8::MAX);
        Self {
            pods: [pod; PODS],
            claims: [claim; CLAIMS],
            asking: None,
            late: None,
            api: Source::Answers,
            kubelet: Kubelet::Ready,
            lost: Set::EMPTY,
            silent: Set::EMPTY,
            strangers: Set::EMPTY,
            over: [None; UNITS],
            cdi: Set::EMPTY,
            early: Set::EMPTY,
            views: Views {
                node: count,
                scheduler: count,
                slice: scope.units(),
                claimable: scope.units(),
                right: Source::Answers,
                always_right: true,
                node_seen: true,
                pods_seen: true,
            },
            spent: [0; Rare::COUNT],
        }
    }

    pub(crate) fn may(&self, scope: &Scope, rare: Rare) -> bool {
        self.spent[rare.place()] < scope.limit(rare)
    }

    pub(crate) fn spend(&mut self, rare: Rare) {
        self.spent[rare.place()] += 1;
    }

    /// Everything may be spent again.
    pub(crate) fn forget_spending(&mut self) {
        self.spent = [0; Rare::COUNT];
    }

    pub(crate) fn is_api_up(&self) -> bool {
        self.api == Source::Answers
    }

    pub(crate) fn is_kubelet_ready(&self) -> bool {
        self.kubelet == Kubelet::Ready
    }

    /// Ids in the kubelet's book.
    pub(crate) fn booked(&self) -> Set {
        let ids = self.pods.iter().map(|pod| pod.ids);
        ids.fold(Set::EMPTY, Set::and)
    }

    pub(crate) fn book(&self, scope: &Scope) -> Book {
        let mut book = Book {
            pods: [None; PODS],
            claims: [None; CLAIMS],
        };
        if !self.is_kubelet_ready() {
            return book;
        }
        for pod in scope.counted_pods().chain(scope.user_pods()) {
            book.pods[pod] = self.pods[pod].is_active().then_some(self.pods[pod].ids);
        }
        for claim in scope.claims() {
            book.claims[claim] = match self.claims[claim].cached {
                Cached::Prepared(unit) => Some(unit),
                Cached::No | Cached::Named => None,
            };
        }
        book
    }

    /// Pods with processes on a unit, by number.
    pub(crate) fn processes_on(&self, unit: usize) -> Set {
        let runs = |pod: &usize| self.pods[*pod].has_processes() && self.pods[*pod].units.has(unit);
        (0..PODS).filter(runs).collect()
    }

    /// Two pods that use the same hardware and must not, if there are such.
    pub(crate) fn doubled(&self, scope: &Scope) -> Option<(usize, usize)> {
        let using: Vec<usize> = (0..PODS).filter(|pod| self.pods[*pod].occupies()).collect();
        let hardware = |pod: usize| scope.hardware_of(self.pods[pod].units);
        for (place, one) in using.iter().enumerate() {
            for other in &using[place + 1..] {
                let meet = hardware(*one).meets(self.pods[*other].units);
                if meet
                    && !self.share_a_claim(scope, *one, *other)
                    && !self.may_follow(scope, *one, *other)
                {
                    return Some((*one, *other));
                }
            }
        }
        None
    }

    fn share_a_claim(&self, scope: &Scope, one: usize, other: usize) -> bool {
        let claim = scope.claim_of(one);
        let same_unit = self.pods[one].units == self.pods[other].units;
        claim.is_some() && claim == scope.claim_of(other) && same_unit
    }

    /// The one exception: a counted pod after a force-deleted counted pod, as reported.
    fn may_follow(&self, scope: &Scope, one: usize, other: usize) -> bool {
        let orphan = |pod: usize| self.pods[pod].stage == Stage::Orphan;
        let followed = |former: usize, pod: usize| {
            let shared = scope.hardware_of(self.pods[former].units);
            let handed = |unit: usize| self.over[unit].map(usize::from) == Some(pod);
            orphan(former) && self.pods[pod].units.common(shared).iter().all(handed)
        };
        let counted = one < FIRST_USER && other < FIRST_USER;
        counted && ((orphan(one) && orphan(other)) || followed(one, other) || followed(other, one))
    }
}
