//! What the daemon sees of the node while it decides some calls, and nothing else: as much as those calls bring along.

use crate::broken::Broken;
use crate::daemon::{Call, Look};
use crate::node::{Api, Book, Cached, Node, Source};
use crate::scope::{CLAIMS, FIRST_USER, PODS, Scope, Sides, UNITS};
use crate::set::Set;

/// What NVML says of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Runs {
    /// Nothing that can be known.
    Unknown,
    /// These pods have processes there, and maybe somebody without a pod has.
    Known { pods: Set, stranger: bool },
}

/// What is seen. What no call asks about is left as it is on a node on which nothing has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View {
    pub(crate) runs: [Runs; UNITS],
    /// pod-resources, or an older answer of it that an `Allocate` has brought along.
    pub(crate) book: Book,
    /// Whether the API server answers.
    pub(crate) api: Source,
    /// The counted pods that the API shows, and those whose containers it shows as started.
    pub(crate) live: Set,
    pub(crate) started: Set,
    /// Allocations, and the pods that each is reserved for.
    pub(crate) allocated: [Option<u8>; CLAIMS],
    pub(crate) reserved: [Set; CLAIMS],
    /// GPUs that NVML does not list.
    pub(crate) lost: Set,
    /// Whether the count could be written all the time, so that no counted pod may fail.
    pub(crate) always_right: bool,
    /// The count in the own Node, while it can be seen and written.
    pub(crate) count: Option<u8>,
    /// The kubelet's checkpoints: ids and units of pods, claims, and the claims that were unprepared without a ledger.
    pub(crate) kept: [(Set, Set); PODS],
    pub(crate) named: Set,
    pub(crate) early: Set,
}

impl View {
    /// What some calls bring along.
    pub(crate) fn of(scope: &Scope, node: &Node, calls: &[Call]) -> Self {
        let mut view = Self::empty();
        for unit in scope.units().iter() {
            view.runs[unit] = if node.lost.has(unit) || node.silent.has(unit) {
                Runs::Unknown
            } else {
                Runs::Known {
                    pods: node.processes_on(unit),
                    stranger: node.strangers.has(unit),
                }
            };
        }
        for call in calls {
            view.take(scope, node, *call);
        }
        view
    }

    fn empty() -> Self {
        Self {
            runs: [Runs::Unknown; UNITS],
            book: Book {
                pods: [None; PODS],
                claims: [None; CLAIMS],
            },
            api: Source::Away,
            live: Set::EMPTY,
            started: Set::EMPTY,
            allocated: [None; CLAIMS],
            reserved: [Set::EMPTY; CLAIMS],
            lost: Set::EMPTY,
            always_right: true,
            count: None,
            kept: [(Set::EMPTY, Set::EMPTY); PODS],
            named: Set::EMPTY,
            early: Set::EMPTY,
        }
    }

    fn take(&mut self, scope: &Scope, node: &Node, call: Call) {
        match call {
            Call::Allocate { .. } => {
                self.always_right = node.views.always_right;
                self.book = match node.asking {
                    Some(asking) => asking.book,
                    None => node.book(scope),
                };
            }
            Call::Prepare { pod } | Call::PrepareAtLast { pod } => {
                let claim = scope.users[pod - FIRST_USER];
                self.allocated[claim] = node.claims[claim].allocated;
            }
            Call::Unprepare { .. } => {}
            Call::Look(look) => self.look(scope, node, look),
        }
    }

    fn look(&mut self, scope: &Scope, node: &Node, look: Look) {
        match look {
            Look::Listing => {
                self.book = node.late.unwrap_or_else(|| node.book(scope));
                if scope.broken == Some(Broken::TakesAbsenceForTheEnd) {
                    self.take_pods(scope, node);
                }
            }
            Look::Pods => {
                self.api = node.api;
                if node.is_api_up() {
                    self.take_pods(scope, node);
                }
            }
            Look::Claims => {
                self.api = node.api;
                if node.is_api_up() {
                    self.take_claims(scope, node);
                }
            }
            Look::Inventory => self.lost = node.lost,
            Look::Node => {
                let sees = node.views.right == Source::Answers && node.is_api_up();
                self.count = (sees && scope.sides == Sides::Move).then_some(node.views.node);
            }
            Look::Adoption => {
                self.book = node.book(scope);
                self.take_pods(scope, node);
                self.take_claims(scope, node);
                for (kept, pod) in self.kept.iter_mut().zip(&node.pods) {
                    *kept = (pod.ids, pod.units);
                }
                let named = |claim: &usize| node.claims[*claim].cached != Cached::No;
                self.named = scope.claims().filter(named).collect();
                self.early = node.early;
            }
            Look::Processes | Look::Time => {}
        }
    }

    /// The counted pods bound here; nobody reads the others.
    fn take_pods(&mut self, scope: &Scope, node: &Node) {
        let live = |pod: &usize| node.pods[*pod].api == Api::Live;
        self.live = scope.counted_pods().filter(live).collect();
        let started = |pod: &usize| node.pods[*pod].started;
        self.started = self.live.iter().filter(started).collect();
    }

    fn take_claims(&mut self, scope: &Scope, node: &Node) {
        for claim in scope.claims() {
            self.allocated[claim] = node.claims[claim].allocated;
            self.reserved[claim] = node.claims[claim].reserved;
        }
    }
}
