//! The node around the daemon, and the daemon's own life.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use super::super::kit::{Daemon, gpu, jumping, pod_uid, report_in_words, unit};
use super::pods::{Api, Claim, Containers, Kubelet, Pod};
use super::{Book, Kind, Late, Look, NodeOp, Op};
use crate::{
    Adoption, CheckpointedDevices, CheckpointedResponse, ClaimUid, Claimed, Demand, Face,
    Inventory, Limits, Mode, PodUid, Pool, Process, Processes, Report, Rival, Settings, Standing,
    Transition, UnitId, UnitProcesses, WaitingPod, Xid,
};

/// The truth.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) daemon: Daemon,
    pub(super) count: u32,
    pub(super) pods: Vec<Pod>,
    pub(super) claims: Vec<Claim>,
    pub(super) api_up: bool,
    pub(super) kubelet_ready: bool,
    /// Units of which NVML does not say what runs there.
    pub(super) silent: BTreeSet<UnitId>,
    pub(super) lost: BTreeSet<UnitId>,
    pub(super) strangers: BTreeSet<UnitId>,
    /// Claims unprepared while the daemon had no ledger.
    pub(super) unprepared: BTreeSet<ClaimUid>,
    /// Who was given a unit over a process, as reported.
    pub(super) handed_over: BTreeMap<UnitId, PodUid>,
    /// Another device plugin serves the resource. It gives nothing out here: the kubelet asks the daemon.
    pub(super) rival: bool,
    /// Whether the daemon has seen the pods since it started, and still sees them.
    pub(super) knows_pods: bool,
    /// Whether the own Node shows the count that the daemon asks for.
    pub(super) count_obeys: bool,
    /// Every kind of report so far.
    pub(super) told: BTreeSet<String>,
    /// Whether the pool goes on in its canonical form after each transition.
    pub(super) canonical: bool,
}

impl World {
    pub(super) fn new(count: u32, mode: Mode, limits: Limits) -> Self {
        let settings = Settings {
            mode,
            limits,
            ..Settings::default()
        };
        let mut daemon = Daemon::with_gpus(count, settings);
        // Nothing may be decided by it.
        daemon.wall = jumping;
        Self {
            daemon,
            count,
            pods: Vec::new(),
            claims: Vec::new(),
            api_up: true,
            kubelet_ready: true,
            silent: BTreeSet::new(),
            lost: BTreeSet::new(),
            strangers: BTreeSet::new(),
            unprepared: BTreeSet::new(),
            handed_over: BTreeMap::new(),
            rival: false,
            knows_pods: false,
            count_obeys: false,
            told: BTreeSet::new(),
            canonical: false,
        }
    }

    pub(super) fn units(&self) -> Vec<UnitId> {
        (0..self.count).map(|n| unit(&format!("GPU-{n}"))).collect()
    }

    pub(super) fn play(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Pod(op) => self.play_pod(op),
            Op::Node(op) => {
                self.play_node(op);
                Ok(())
            }
        }
    }

    fn play_node(&mut self, op: &NodeOp) {
        let count = self.count;
        let nth = |n: &u8| unit(&format!("GPU-{}", u32::from(*n) % count));
        match op {
            NodeOp::Look(look) => self.look(*look),
            NodeOp::Tick { seconds } => self.tick(u64::from(*seconds)),
            NodeOp::Api => {
                self.api_up = !self.api_up;
                self.look(Look::Pods);
                self.look(Look::Claims);
            }
            NodeOp::Count => {
                self.count_obeys = !self.count_obeys;
                self.show_count();
            }
            NodeOp::Nvml { unit } => toggle(&mut self.silent, nth(unit)),
            NodeOp::Gpu { unit } => {
                toggle(&mut self.lost, nth(unit));
                self.look(Look::Inventory);
            }
            NodeOp::Xid { unit } => {
                let unit = nth(unit);
                self.act(|t| {
                    if t.clear_fault(&unit).is_err() {
                        t.observe_xids(&BTreeMap::from([((unit, Xid::new(79)), 1)]));
                    }
                });
            }
            NodeOp::Stranger { unit } => toggle(&mut self.strangers, nth(unit)),
            NodeOp::KubeletRestart { book } => self.restart_kubelet(*book),
            NodeOp::KubeletReady => self.kubelet_ready = true,
            NodeOp::Crash => self.crash(),
            NodeOp::Reboot => self.reboot(),
            NodeOp::LostLedger => self.lose_ledger(),
            NodeOp::Rival => {
                self.rival = !self.rival;
                self.look(Look::Rivals);
            }
            NodeOp::Demand { pods } => {
                let demand = pods.as_ref().map(|pods| Demand {
                    pods: pods.iter().zip(0..).map(waiting).collect(),
                });
                self.act(|t| t.observe_demand(demand));
            }
            NodeOp::Configure { mode, limits } => {
                let settings = Settings {
                    mode: *mode,
                    limits: *limits,
                    ..Settings::default()
                };
                self.act(|t| t.configure(settings));
            }
        }
    }

    /// One transition of the daemon, on what NVML says at this moment.
    pub(super) fn act<T>(&mut self, step: impl FnOnce(&mut Transition) -> T) -> T {
        self.daemon.processes = self.processes();
        let outcome = self.daemon.act(step);
        self.told
            .extend(self.daemon.reports.iter().map(report_in_words));
        if self.canonical {
            self.daemon.go_on_canonically();
        }
        outcome
    }

    pub(super) fn processes(&self) -> Processes {
        let running = self.running();
        let mut processes = Processes::default();
        for (number, unit) in (100u32..).zip(self.units()) {
            if self.silent.contains(&unit) || self.lost.contains(&unit) {
                processes.units.insert(unit, UnitProcesses::Unknown);
                continue;
            }
            let mut known = Vec::new();
            for (pid, pod) in (1000u32..).zip(running.get(&unit).into_iter().flatten()) {
                known.push(Process {
                    pid,
                    pod: Some(pod.clone()),
                });
            }
            if self.strangers.contains(&unit) {
                known.push(Process {
                    pid: number,
                    pod: None,
                });
            }
            processes.units.insert(unit, UnitProcesses::Known(known));
        }
        processes
    }

    pub(super) fn look(&mut self, look: Look) {
        match look {
            Look::Listing => {
                self.collect_book();
                let listing = self.listing();
                self.act(|t| t.observe_listing(listing));
            }
            Look::Pods => {
                self.knows_pods = self.api_up;
                let pods = self.api_up.then(|| self.shown_pods());
                self.act(|t| t.observe_pods(pods));
            }
            Look::Claims => {
                let claims = self.api_up.then(|| self.shown_claims());
                self.act(|t| t.observe_claims(claims));
            }
            Look::Processes => self.act(Transition::observe_processes),
            Look::Rivals => {
                let rivals = self.rival.then(|| Rival {
                    face: Face::Legacy,
                    place: "nvidia-gpu.sock".to_owned(),
                    owner: None,
                });
                self.act(|t| t.observe_rivals(rivals.into_iter().collect()));
            }
            Look::Inventory => {
                let seen = (0..self.count)
                    .map(|n| gpu(&format!("GPU-{n}"), n))
                    .filter(|gpu| !self.lost.contains(&gpu.uuid))
                    .collect();
                self.act(|t| t.observe_inventory(Inventory::Seen(seen)));
            }
        }
    }

    pub(super) fn tick(&mut self, seconds: u64) {
        self.daemon.uptime += Duration::from_secs(seconds);
        for pod in &mut self.pods {
            pod.started |= pod.containers == Containers::Running;
            if pod.api == Api::LiveForNow && self.api_up {
                pod.api = Api::Terminal;
            }
        }
        self.deallocate_unused();
        for look in [
            Look::Inventory,
            Look::Claims,
            Look::Pods,
            Look::Listing,
            Look::Processes,
            Look::Rivals,
        ] {
            self.look(look);
        }
        self.show_count();
        self.adopt();
    }

    fn show_count(&mut self) {
        let count = self.count_obeys.then(|| self.daemon.pool.offers().count);
        self.act(|t| t.observe_node(count));
    }

    /// The daemon looks each second, so what was admitted has been listed before. And a kubelet that loses its book
    /// takes more than ten seconds here: within them nothing tells its call from one that repeats an answer.
    fn restart_kubelet(&mut self, book: Book) {
        self.tick(1);
        self.kubelet_ready = false;
        match book {
            Book::Kept => self.tick(1),
            Book::Lost => {
                self.tick(11);
                for pod in &mut self.pods {
                    pod.booked = false;
                }
                self.look(Look::Listing);
            }
        }
    }

    pub(super) fn crash(&mut self) {
        let settings = self.daemon.pool.settings().clone();
        self.daemon.pool = match &self.daemon.disk {
            Some(ledger) => Pool::restored(ledger.clone(), settings),
            None => Pool::waiting(settings),
        };
        self.daemon.uptime = Duration::ZERO;
        self.knows_pods = false;
        // Both are looked at before a face opens.
        self.look(Look::Inventory);
        self.look(Look::Rivals);
    }

    /// Every process ends. Pods that live are started again by the kubelet from its book.
    fn reboot(&mut self) {
        for place in 0..self.pods.len() {
            self.pods[place].opened = false;
            if self.pods[place].containers == Containers::Orphaned {
                self.reap(place, Late::AtOnce);
            }
        }
        self.strangers.clear();
        self.kubelet_ready = false;
        self.crash();
    }

    fn lose_ledger(&mut self) {
        self.tick(1);
        self.daemon.disk = None;
        self.unprepared.clear();
        self.crash();
        self.adopt();
    }

    /// What the daemon does at start: gathers all that is known of the time before, or waits.
    fn adopt(&mut self) {
        let waits = self.daemon.pool.standing() == Standing::WaitingForAdoption;
        if !waits || !self.api_up || !self.kubelet_ready {
            return;
        }
        // A GPU that is away at that moment is a second fault: what ran on it is then known to nobody.
        self.lost.clear();
        self.look(Look::Inventory);
        let booked = self.pods.iter().filter(|pod| pod.booked);
        let checkpoint = booked
            .flat_map(|pod| {
                pod.answers.iter().map(|(ids, units)| CheckpointedDevices {
                    pod: pod.uid.clone(),
                    ids: ids.clone(),
                    response: CheckpointedResponse::Units(units.clone()),
                })
            })
            .collect();
        let in_state = self.claims.iter().filter(|claim| claim.in_state);
        let adoption = Adoption {
            listing: self.listing(),
            pods: self.shown_pods(),
            checkpoint,
            claims: self.shown_claims(),
            prepared: Some(in_state.map(|claim| claim.claim.uid.clone()).collect()),
            unprepared: self.unprepared.clone(),
        };
        self.act(|t| t.adopt(adoption));
    }

    /// Everything on the node ends; the daemon looks as long as its rules ask for.
    pub(super) fn end_everything(&mut self) {
        self.api_up = true;
        self.kubelet_ready = true;
        self.silent.clear();
        self.lost.clear();
        self.strangers.clear();
        self.rival = false;
        self.tick(1);
        for place in 0..self.pods.len() {
            let pod = &mut self.pods[place];
            pod.api = Api::Gone;
            pod.kubelet = Kubelet::Inactive;
            pod.containers = Containers::None;
            pod.opened = false;
        }
        self.deallocate_unused();
        for seconds in [11, 11, 61, 61] {
            self.tick(seconds);
        }
    }

    /// Notes over whose process a unit was handed, for the check of the truth.
    pub(super) fn note_handed_over(&mut self, place: usize) {
        for report in &self.daemon.reports {
            if let Report::HandedOverBusy { unit, .. } = report {
                self.handed_over
                    .insert(unit.clone(), self.pods[place].uid.clone());
            }
        }
    }
}

fn toggle(set: &mut BTreeSet<UnitId>, unit: UnitId) {
    if !set.remove(&unit) {
        set.insert(unit);
    }
}

/// A pod that waits, older than those with higher numbers.
fn waiting(((kind, size), number): (&(Kind, u8), u32)) -> WaitingPod {
    let units = |of: Kind| if *kind == of { u32::from(*size) } else { 0 };
    WaitingPod {
        uid: pod_uid(&format!("waits-{number}")),
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(number.into()),
        counted: units(Kind::Counted),
        claimed: Claimed::Units(units(Kind::Claim)),
    }
}
