//! What happens without the daemon: in the API, in pods, in the kubelet and to the node.

use crate::actions::{ApiEvent, Fault, PodEvent};
use crate::daemon::Answer;
use crate::node::{Api, Cached, Kubelet, Node, Source, Stage};
use crate::scope::{FIRST_USER, Rare, Scope};
use crate::set::Set;

impl Node {
    pub(crate) fn play_api(&mut self, scope: &Scope, event: ApiEvent) {
        match event {
            ApiEvent::Bind { pod } => {
                self.pods[pod].api = Api::Live;
                self.views.pods_seen = false;
            }
            ApiEvent::AllocateClaim { pod, unit } => {
                let claim = &mut self.claims[scope.users[pod - FIRST_USER]];
                claim.allocated = u8::try_from(unit).ok();
                claim.reserved.insert(pod);
                self.pods[pod].api = Api::Live;
            }
            ApiEvent::ShareClaim { pod } => {
                self.claims[scope.users[pod - FIRST_USER]]
                    .reserved
                    .insert(pod);
                self.pods[pod].api = Api::Live;
            }
            ApiEvent::HearEnd { pod } => self.be_gone(scope, pod),
            ApiEvent::ForceDelete { pod } => {
                self.spend(Rare::ForceDelete);
                self.be_gone(scope, pod);
                let pod = &mut self.pods[pod];
                pod.started = false;
                match pod.stage {
                    Stage::Open => {
                        pod.stage = Stage::Orphan;
                        pod.ids = Set::EMPTY;
                    }
                    // What has opened no GPU does not open one any more: its containers are killed.
                    Stage::Waiting | Stage::Given | Stage::Orphan | Stage::Over => pod.end(),
                }
            }
            ApiEvent::SchedulersLook => {
                self.views.scheduler = self.views.node;
                self.views.claimable = self.views.slice;
            }
        }
    }

    /// The API shows no more of a pod, once it is there.
    fn be_gone(&mut self, scope: &Scope, pod: usize) {
        if self.is_api_up() {
            self.pods[pod].api = Api::Gone;
            if let Some(claim) = scope.claim_of(pod) {
                self.drop_ended(claim);
            }
        }
    }

    /// The claim controller: drops pods that are gone, and an allocation that nobody uses.
    pub(crate) fn drop_ended(&mut self, claim: usize) {
        let gone = |pod: &usize| self.pods[*pod].api == Api::Gone;
        let reserved = self.claims[claim].reserved;
        let left = reserved.without(reserved.iter().filter(gone).collect());
        self.claims[claim].reserved = left;
        if left.is_empty() {
            self.claims[claim].allocated = None;
        }
    }

    pub(crate) fn play_pod(&mut self, scope: &Scope, event: PodEvent) {
        match event {
            PodEvent::StartWithClaim { pod } => {
                let claim = self.claims[scope.users[pod - FIRST_USER]];
                if let Cached::Prepared(unit) = claim.cached {
                    self.pods[pod].stage = Stage::Given;
                    self.pods[pod].units = Set::of(unit.into());
                }
            }
            PodEvent::Open { pod } => self.pods[pod].stage = Stage::Open,
            PodEvent::Finish { pod } => {
                self.end(pod);
                self.be_gone(scope, pod);
            }
            PodEvent::FinishUnheard { pod } => {
                self.spend(Rare::LateNews);
                self.end(pod);
            }
            PodEvent::Reap { pod } => self.end(pod),
        }
    }

    /// Nothing of a pod is left, and nobody follows it any more.
    pub(crate) fn end(&mut self, pod: usize) {
        self.pods[pod].end();
        for over in &mut self.over {
            if over.map(usize::from) == Some(pod) {
                *over = None;
            }
        }
    }

    /// The kubelet hears an answer.
    pub(crate) fn hear(&mut self, scope: &Scope, answer: Answer) {
        match answer {
            Answer::Granted {
                pod,
                ids,
                units,
                over,
            } => {
                self.asking = None;
                let waits = self.pods[pod].stage == Stage::Waiting && self.pods[pod].is_live();
                if !waits {
                    return; // it was deleted meanwhile, and the kubelet frees the ids at once
                }
                for unit in over.iter() {
                    self.over[unit] = u8::try_from(pod).ok();
                }
                let pod = &mut self.pods[pod];
                pod.stage = Stage::Given;
                pod.ids = ids;
                pod.units = units;
            }
            Answer::Refused { pod } => {
                self.asking = None;
                self.end(pod);
                self.be_gone(scope, pod);
            }
            Answer::Prepared { pod, unit } => {
                let claim = scope.users[pod - FIRST_USER];
                let Ok(number) = u8::try_from(unit) else {
                    return;
                };
                self.claims[claim].cached = Cached::Prepared(number);
                if self.pods[pod].waits() {
                    self.pods[pod].stage = Stage::Given;
                    self.pods[pod].units = Set::of(unit);
                }
            }
            Answer::Unprepared { claim } => self.claims[claim].cached = Cached::No,
            Answer::NotNow { .. } | Answer::Seen => {}
        }
    }

    pub(crate) fn restart_kubelet(&mut self, scope: &Scope) {
        self.kubelet = Kubelet::Starting;
        self.asking = None;
        self.late = None;
        for claim in scope.claims() {
            if self.claims[claim].cached != Cached::No {
                self.claims[claim].cached = Cached::Named;
            }
        }
    }

    /// Every process ends. What lives is started again: counted pods from the kubelet's book, claims by a new Prepare.
    pub(crate) fn reboot(&mut self, scope: &Scope) {
        self.restart_kubelet(scope);
        self.cdi = Set::EMPTY;
        self.strangers = Set::EMPTY;
        for pod in scope.counted_pods() {
            if self.pods[pod].is_active() {
                self.pods[pod].stage = Stage::Given;
            }
        }
        for pod in scope.user_pods() {
            if self.pods[pod].is_active() {
                self.pods[pod].stage = Stage::Waiting;
                self.pods[pod].units = Set::EMPTY;
            }
        }
        for pod in scope.counted_pods().chain(scope.user_pods()) {
            if self.pods[pod].stage == Stage::Orphan {
                self.end(pod);
            }
        }
    }

    pub(crate) fn play_fault(&mut self, fault: Fault) {
        match fault {
            Fault::ApiGoes => {
                self.spend(Rare::ApiAway);
                self.api = Source::Away;
            }
            Fault::ApiComes => self.api = Source::Answers,
            Fault::GpuGoes { unit } => {
                self.spend(Rare::GpuLost);
                self.lost.insert(unit);
            }
            Fault::GpuComes { unit } => self.lost.remove(unit),
            Fault::NvmlGoes { unit } => {
                self.spend(Rare::NvmlSilent);
                self.silent.insert(unit);
            }
            Fault::NvmlComes { unit } => self.silent.remove(unit),
            Fault::StrangerComes { unit } => {
                self.spend(Rare::Stranger);
                self.strangers.insert(unit);
            }
            Fault::StrangerGoes { unit } => self.strangers.remove(unit),
            Fault::RightGoes => {
                self.spend(Rare::NoRight);
                self.views.right = Source::Away;
                self.views.always_right = false;
            }
            Fault::RightComes => self.views.right = Source::Answers,
        }
    }
}
