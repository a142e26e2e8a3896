//! What pods do on the node while somebody is killed.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::{LocalBoxFuture, join_all};
use gpu_bridge::steps::Operation;
use rustix::process::Signal;

use crate::world::{NAMESPACE, NODE, RESOURCE, claim, claim_uid, pod_uid};

use super::book::{Of, Told};
use super::table::Cause;
use super::{Kills, device_in};

/// Pods of a kind that there may be at most: both kinds together leave half of the node free.
const PODS: usize = 4;
/// Without anything to do the load looks again after this.
const PAUSE: Duration = Duration::from_millis(20);

/// One thing that a pod may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    StartCounted,
    StartClaim,
    EndCounted,
    EndClaim,
}

const DEEDS: [(Deed, u64); 4] = [
    (Deed::StartCounted, 3),
    (Deed::StartClaim, 3),
    (Deed::EndCounted, 2),
    (Deed::EndClaim, 2),
];

impl Kills {
    /// Some deeds at once; those that lead to an operation first, if there is one to come to.
    pub(super) async fn volley(&self, wanted: Option<Operation>) {
        let mut deeds = Vec::new();
        let counted = self.book.borrow().granted(|of| *of == Of::Counted);
        let claims = self.book.borrow().granted(|of| *of != Of::Counted);
        deeds.extend(wanted.map(|operation| match operation {
            Operation::Allocate if counted.len() < PODS => Deed::StartCounted,
            Operation::Prepare if claims.len() < PODS => Deed::StartClaim,
            Operation::Unprepare if claims.is_empty() => Deed::StartClaim,
            Operation::Release if counted.is_empty() => Deed::StartCounted,
            Operation::Allocate | Operation::Release => Deed::EndCounted,
            Operation::Prepare | Operation::Unprepare => Deed::EndClaim,
        }));
        let others = self.dice.borrow_mut().below(3);
        for _ in 0..others {
            deeds.push(self.dice.borrow_mut().weighted(&DEEDS));
        }
        let mut started = 0;
        let mut ends = [counted, claims];
        let mut calls: Vec<LocalBoxFuture<'_, ()>> = Vec::new();
        for deed in deeds {
            match deed {
                Deed::StartCounted if ends[0].len() < PODS => {
                    calls.push(Box::pin(self.start_counted()));
                }
                Deed::StartClaim if ends[1].len() < PODS => {
                    calls.push(Box::pin(self.start_claim(started)));
                    started += 1;
                }
                Deed::StartCounted | Deed::EndCounted => {
                    let name = ends[0].pop();
                    calls.extend(name.map(|name| self.end_later(name)));
                }
                Deed::StartClaim | Deed::EndClaim => {
                    let name = ends[1].pop();
                    calls.extend(name.map(|name| self.end_later(name)));
                }
            }
        }
        if calls.is_empty() || wanted == Some(Operation::Release) {
            tokio::time::sleep(PAUSE).await;
        }
        join_all(calls).await;
    }

    fn end_later(&self, name: String) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move { self.end(&name).await })
    }

    fn next_name(&self, kind: &str) -> String {
        let mut names = self.names.borrow_mut();
        *names += 1;
        format!("{kind}-{names}")
    }

    /// What the scheduler of counted pods has left to give: it goes by the Node.
    fn counted_left(&self) -> usize {
        let node = self.world.api.get("nodes", "", NODE);
        let node = node.expect("the node is there");
        let count = node["status"]["allocatable"][RESOURCE].as_str();
        let count: usize = count.map_or(0, |it| it.parse().expect("a number"));
        let book = self.book.borrow();
        let used = book.pods.values().filter(|pod| pod.of == Of::Counted);
        let used = used.map(|pod| match &pod.told {
            Told::Granted { ids, .. } => ids.len(),
            Told::Asking(_) | Told::Ending => 2,
        });
        count.saturating_sub(used.sum())
    }

    pub(super) async fn start_counted(&self) {
        let gpus = 1 + usize::from(self.dice.borrow_mut().per_mille(300));
        if self.counted_left() < gpus {
            return tokio::time::sleep(PAUSE).await;
        }
        let name = self.next_name("counted");
        self.book.borrow_mut().ask(&name, Of::Counted);
        let gpus = u32::try_from(gpus).expect("one or two");
        match self.world.admit_counted(&name, gpus).await {
            Ok(()) => {
                self.book.borrow_mut().tell(&name, self.granted(&name));
                self.answered(Operation::Allocate);
                self.world.runs(&name).await;
            }
            Err(rejection) => {
                let asked = self.world.kubelet().asked(&pod_uid(&name));
                let is_refused = rejection.message.contains("FailedPrecondition");
                let cause = match (is_refused, asked.is_empty()) {
                    (true, _) => Cause::Refused,
                    (false, true) => Cause::NotAsked,
                    (false, false) => Cause::NotAnswered,
                };
                self.failed.borrow_mut().add(cause);
                match cause {
                    Cause::Refused | Cause::NotAsked => self.bury(&name, BTreeSet::new()).await,
                    Cause::NotAnswered => self.book.borrow_mut().tell(&name, Told::Asking(asked)),
                }
            }
        }
    }

    /// A claim on one of the devices that are open, each call on another one.
    pub(super) async fn start_claim(&self, at: usize) {
        let Some(device) = self
            .world
            .open_devices()
            .into_iter()
            .filter(|it| !self.is_taken(it))
            .nth(at)
        else {
            return tokio::time::sleep(PAUSE).await;
        };
        let name = self.next_name("claim");
        let unit = self.world.gpu(&device).uuid;
        self.note(format!("{name}, uid {}, starts", claim_uid(&name)));
        self.book.borrow_mut().ask(&name, Of::Claim(unit));
        self.world.allocate_claim(&name, &device, &name);
        self.world.admit_claimant(&name).await;
        let prepared = self.world.prepare(&name).await;
        self.note(format!("{name} is prepared: {prepared:?}"));
        match prepared {
            Ok(()) => {
                self.book.borrow_mut().tell(&name, self.prepared(&name));
                self.answered(Operation::Prepare);
                self.world.runs(&name).await;
            }
            // The driver's own words about this claim are an answer.
            Err(error) if error.contains("NodePrepareResources failed for") => {
                self.end(&name).await;
            }
            Err(_) => {}
        }
    }

    fn is_taken(&self, device: &str) -> bool {
        let unit = self.world.gpu(device).uuid;
        let book = self.book.borrow();
        book.pods
            .values()
            .any(|pod| pod.of == Of::Claim(unit.clone()))
    }

    /// A pod is deleted and ends.
    pub(super) async fn end(&self, name: &str) {
        let pod = self.book.borrow().pods[name].clone();
        let ids = match &pod.told {
            Told::Granted { ids, .. } | Told::Asking(ids) => ids.clone(),
            Told::Ending => BTreeSet::new(),
        };
        match pod.of {
            Of::Counted => self.bury(name, ids).await,
            Of::Claim(_) => {
                self.book.borrow_mut().tell(name, Told::Ending);
                self.note(format!("{name} is to end"));
                let ended = self.world.kubelet().terminate(&pod_uid(name)).await;
                self.note(format!("{name} has ended: {ended:?}"));
                if ended.is_err() {
                    return;
                }
                self.book.borrow_mut().gone(name, []);
                self.delete(name);
                self.answered(Operation::Unprepare);
            }
        }
    }

    /// A counted pod goes, whether it ran or not; of these ids nobody knows more.
    pub(super) async fn bury(&self, name: &str, ids: BTreeSet<String>) {
        let ended = self.world.kubelet().terminate(&pod_uid(name)).await;
        ended.expect("a counted pod has nothing to unprepare");
        self.book.borrow_mut().gone(name, ids);
        self.delete(name);
    }

    /// The API has the pod and its claim no more.
    pub(super) fn delete(&self, name: &str) {
        for plural in ["pods", "resourceclaims"] {
            if self.world.api.get(plural, NAMESPACE, name).is_some() {
                self.world.api.delete(plural, NAMESPACE, name);
            }
        }
    }

    /// What the kubelet's book has of a counted pod.
    fn granted(&self, name: &str) -> Told {
        let devices = self.world.counted_devices(name);
        Told::Granted {
            ids: self.world.ids(name).into_iter().collect(),
            units: devices.iter().map(|it| device_in(it).to_owned()).collect(),
        }
    }

    /// The same of a claim.
    pub(super) fn prepared(&self, name: &str) -> Told {
        let devices = self.world.kubelet().cdi_devices(&claim(name));
        let prefix = format!("{}-", claim_uid(name));
        let unit = |it: &String| {
            let device = device_in(it).strip_prefix(&prefix);
            self.world
                .gpu(device.expect("the name begins with the claim"))
                .uuid
        };
        Told::Granted {
            ids: BTreeSet::new(),
            units: devices.iter().map(unit).collect(),
        }
    }

    /// What the book has of a pod.
    pub(super) fn told(&self, name: &str) -> Told {
        self.book.borrow().pods[name].told.clone()
    }

    /// The kubelet has an answer: the moment to kill the daemon, if it was to be this one.
    fn answered(&self, operation: Operation) {
        let is_it = *self.at_answer.borrow() == Some(operation);
        if is_it {
            *self.at_answer.borrow_mut() = None;
            self.world.daemon().signal(Signal::KILL);
        }
    }
}
