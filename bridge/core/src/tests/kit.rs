//! A daemon without its adapters: a pool, a disk that keeps one ledger, and a clock that the test turns.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use crate::{
    Access, Adoption, AllocateOutcome, AllocateRequest, AllocatedClaim, AllocatedDevice, Asked,
    BoundPod, CheckpointedDevices, CheckpointedResponse, ClaimRef, ClaimUid, ClaimedDevice, Claims,
    DeviceId, DeviceName, Evidence, Gpu, Hold, HoldKind, Inventory, Ledger, ListedClaim,
    ListedDevice, ListedPod, Listing, Mode, Moment, Moves, Patience, PodName, PodPhase, PodRef,
    PodSource, PodUid, Pods, Pool, PrepareOutcome, PrepareRequest, Process, Processes, Report,
    Settings, Sight, TAINT_KEY, TaintEffect, Toleration, Transition, UnitId, UnitProcesses,
};

pub(super) const POOL: &str = "node-1";
/// Whatever time a test lets pass, it is a multiple of this.
pub(super) const SIGHT: Sight = Sight {
    grain: Duration::from_millis(100),
    moves: Moves::Happen,
};
/// A kubelet that lists nobody.
pub(super) const NOTHING: Listing = Listing { pods: Vec::new() };

pub(super) fn all_legacy() -> Settings {
    Settings {
        mode: Mode::Legacy,
        ..Settings::default()
    }
}

/// A daemon without a ledger file that has seen its GPUs.
pub(super) fn without_ledger(count: u32) -> Daemon {
    let mut daemon = Daemon::with_gpus(count, all_legacy());
    daemon.pool = Pool::waiting(all_legacy());
    daemon.disk = None;
    daemon.act(|t| t.observe_inventory(inventory(0..count)));
    daemon
}

pub(super) fn adoption(listing: Listing, pods: Vec<BoundPod>) -> Adoption {
    Adoption {
        listing,
        pods: Pods {
            source: PodSource::Api,
            pods,
        },
        checkpoint: Vec::new(),
        claims: Claims::default(),
        prepared: Some(BTreeSet::new()),
        unprepared: BTreeSet::new(),
    }
}

pub(super) fn checkpointed(pod: &str, ids: &[&str], units: Option<&[&str]>) -> CheckpointedDevices {
    CheckpointedDevices {
        pod: pod_uid(pod),
        ids: ids.iter().map(|text| id(text)).collect(),
        response: match units {
            Some(units) => {
                CheckpointedResponse::Units(units.iter().map(|text| unit(text)).collect())
            }
            None => CheckpointedResponse::Unknown,
        },
    }
}

/// A daemon under test.
#[derive(Debug, Clone)]
pub(super) struct Daemon {
    pub(super) pool: Pool,
    /// The ledger on disk; `None`: no file.
    pub(super) disk: Option<Ledger>,
    pub(super) uptime: Duration,
    /// Transitions so far.
    pub(super) acts: u32,
    /// What the wall clock shows after so many transitions.
    pub(super) wall: fn(u32) -> SystemTime,
    /// What NVML says about processes whenever it is asked.
    pub(super) processes: Processes,
    /// What the last act reported.
    pub(super) reports: Vec<Report>,
    /// Whether the last act saved the ledger.
    pub(super) saved: bool,
}

/// A wall clock that is right, and that no restart sets back: it counts transitions.
pub(super) fn steady(acts: u32) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(acts.into())
}

/// A wall clock that shows another time of some decades at each transition.
pub(super) fn jumping(acts: u32) -> SystemTime {
    const DECADES: u64 = 1 << 31;
    // The steps of a multiplicative hash go all over the range, back as often as forth.
    let seconds = u64::from(acts).wrapping_mul(0x9E37_79B9_7F4A_7C15) % DECADES;
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

impl Daemon {
    /// A daemon with an empty ledger that sees the GPUs `GPU-0` to `GPU-<count - 1>`, all of them idle.
    pub(super) fn with_gpus(count: u32, settings: Settings) -> Self {
        let mut daemon = Self {
            pool: Pool::restored(Ledger::default(), settings),
            disk: None,
            uptime: Duration::ZERO,
            acts: 0,
            wall: steady,
            processes: idle(count),
            reports: Vec::new(),
            saved: false,
        };
        daemon.act(|t| t.observe_inventory(inventory(0..count)));
        daemon
    }

    /// A daemon on a ledger made by hand, which sees every unit of it, all of them idle.
    pub(super) fn on_ledger(ledger: Ledger, settings: Settings) -> Self {
        let gpus: Vec<Gpu> = ledger
            .in_order()
            .into_iter()
            .map(|(_, record)| Gpu::clone(&record.gpu))
            .collect();
        let mut processes = Processes::default();
        for unit in ledger.units.keys() {
            processes
                .units
                .insert(unit.clone(), UnitProcesses::Known(Vec::new()));
        }
        let mut daemon = Self {
            pool: Pool::restored(ledger, settings),
            disk: None,
            uptime: Duration::ZERO,
            acts: 0,
            wall: steady,
            processes,
            reports: Vec::new(),
            saved: false,
        };
        daemon.act(|t| t.observe_inventory(Inventory::Seen(gpus)));
        daemon
    }

    /// Plan, save, commit: as the arbiter does it.
    pub(super) fn act<T>(&mut self, step: impl FnOnce(&mut Transition) -> T) -> T {
        self.acts += 1;
        let mut transition = self.pool.begin(self.now(), self.processes.clone());
        let outcome = step(&mut transition);
        let to_save = transition.ledger_to_save();
        self.saved = to_save.is_some();
        if let Some(ledger) = to_save {
            self.disk = Some(ledger.clone());
        }
        self.reports = self.pool.commit(transition);
        outcome
    }

    /// Puts the canonical form in the place of pool, disk and clock.
    pub(super) fn go_on_canonically(&mut self) {
        (self.pool, self.uptime) = self.pool.clone().canonical(self.uptime, SIGHT);
        self.disk = self.disk.take().map(Ledger::canonical);
    }

    pub(super) fn now(&self) -> Moment {
        Moment {
            wall: (self.wall)(self.acts),
            uptime: self.uptime,
        }
    }

    pub(super) fn pass(&mut self, seconds: u64) {
        self.uptime += Duration::from_secs(seconds);
    }

    /// One `Allocate` request, answered with the listing where the pool asks for it.
    pub(super) fn allocate(
        &mut self,
        ids: &[&str],
        patience: Patience,
        listing: &Listing,
    ) -> AllocateOutcome {
        let request = AllocateRequest {
            ids: ids.iter().map(|text| id(text)).collect(),
            patience,
        };
        let mut evidence = Evidence { listing: None };
        let outcome = self.act(|t| t.allocate(&request, &evidence));
        if outcome != AllocateOutcome::NeedsListing {
            return outcome;
        }
        evidence.listing = Some(listing.clone());
        self.act(|t| t.allocate(&request, &evidence))
    }

    /// An `Allocate` of one id that must be granted; returns its unit.
    pub(super) fn granted(&mut self, text: &str, listing: &Listing) -> String {
        match self.allocate(&[text], Patience::LastCall, listing) {
            AllocateOutcome::Granted(grants) => grants[0].unit.to_string(),
            other @ (AllocateOutcome::NeedsListing
            | AllocateOutcome::Wait
            | AllocateOutcome::Refused(_)) => panic!("{text} was not granted: {other:?}"),
        }
    }

    pub(super) fn prepare(&mut self, claim: &str, devices: &[&str]) -> PrepareOutcome {
        let request = prepare_request(claim, devices, self.uptime);
        self.act(|t| t.prepare(&request))
    }

    /// The last question of a Prepare: what is not to be had now is refused.
    pub(super) fn prepare_finally(&mut self, claim: &str, devices: &[&str]) -> PrepareOutcome {
        let mut request = prepare_request(claim, devices, self.uptime);
        request.patience = Patience::LastCall;
        self.act(|t| t.prepare(&request))
    }

    pub(super) fn list(&mut self, listing: &Listing) {
        self.act(|t| t.observe_listing(listing.clone()));
    }

    pub(super) fn see_pods(&mut self, pods: &[BoundPod]) {
        let pods = Pods {
            source: PodSource::Api,
            pods: pods.to_vec(),
        };
        self.act(|t| t.observe_pods(Some(pods)));
    }

    pub(super) fn see_claims(&mut self, claims: &[AllocatedClaim]) {
        let claims = Claims::all(claims.to_vec());
        self.act(|t| t.observe_claims(Some(claims)));
    }

    pub(super) fn run(&mut self, text: &str, processes: &[(u32, Option<&str>)]) {
        let processes = processes
            .iter()
            .map(|(pid, pod)| Process {
                pid: *pid,
                pod: pod.map(pod_uid),
            })
            .collect();
        self.processes
            .units
            .insert(unit(text), UnitProcesses::Known(processes));
    }

    /// The holds of a unit, in words.
    pub(super) fn holds(&self, text: &str) -> String {
        let holds = self.pool.ledger().holds_on(&unit(text));
        if holds.is_empty() {
            return "free".to_owned();
        }
        holds
            .iter()
            .map(hold_in_words)
            .collect::<Vec<_>>()
            .join(" and ")
    }

    pub(super) fn reported(&self, which: impl Fn(&Report) -> bool) -> bool {
        self.reports.iter().any(which)
    }
}

/// `Granted GPU-0`, `Bound GPU-0 pod-a`, `Prepared claim-a`, `Foreign Lingering claim-a`, ...
pub(super) fn hold_in_words(hold: &Hold) -> String {
    use crate::{ForeignCause, Former};
    match &hold.kind {
        HoldKind::Granted { id } => format!("Granted {id}"),
        HoldKind::Bound { id, pod } => format!("Bound {id} {}", pod.name.name),
        HoldKind::Reserved { claim } => format!("Reserved {}", claim.name),
        HoldKind::Prepared { claim } => format!("Prepared {}", claim.name),
        HoldKind::Foreign { cause } => match cause {
            ForeignCause::UnknownProcess => "Foreign UnknownProcess".to_owned(),
            ForeignCause::UnknownUnitOf { pod } => {
                format!("Foreign UnknownUnitOf {}", pod.name.name)
            }
            ForeignCause::Lingering {
                former: Former::Counted(None),
            } => "Foreign Lingering".to_owned(),
            ForeignCause::Lingering {
                former: Former::Counted(Some(pod)),
            } => format!("Foreign Lingering {}", pod.name.name),
            ForeignCause::Lingering {
                former: Former::Claim(claim),
            } => format!("Foreign Lingering {}", claim.name),
        },
    }
}

/// `Granted`, `Ended:PodEnded`, ...
pub(super) fn report_in_words(report: &Report) -> String {
    match report {
        Report::Granted { .. } => "Granted".to_owned(),
        Report::Substituted { .. } => "Substituted".to_owned(),
        Report::KubeletLostItsBook { .. } => "KubeletLostItsBook".to_owned(),
        Report::HandedOverBusy { .. } => "HandedOverBusy".to_owned(),
        Report::ClaimLostRace { .. } => "ClaimLostRace".to_owned(),
        Report::EvictionAsked { .. } => "EvictionAsked".to_owned(),
        Report::EvictionOver { .. } => "EvictionOver".to_owned(),
        Report::NotEvicted { why, .. } => format!("NotEvicted:{}", why.as_str()),
        Report::Bound { .. } => "Bound".to_owned(),
        Report::Reserved { .. } => "Reserved".to_owned(),
        Report::Prepared { .. } => "Prepared".to_owned(),
        Report::Ended { cause, .. } => format!("Ended:{}", cause.as_str()),
        Report::Lingering { .. } => "Lingering".to_owned(),
        Report::ForeignFound { .. } => "ForeignFound".to_owned(),
        Report::UnknownHolder { .. } => "UnknownHolder".to_owned(),
        Report::UnitAdded { .. } => "UnitAdded".to_owned(),
        Report::UnitLost { .. } => "UnitLost".to_owned(),
        Report::UnitReturned { .. } => "UnitReturned".to_owned(),
        Report::XidSeen { .. } => "XidSeen".to_owned(),
        Report::UnitFaulty { .. } => "UnitFaulty".to_owned(),
        Report::FaultEnded { cause, .. } => format!("FaultEnded:{}", cause.as_str()),
        Report::Adopted { .. } => "Adopted".to_owned(),
        Report::OtherRegistrant { .. } => "OtherRegistrant".to_owned(),
        Report::ClaimTakenOver { .. } => "ClaimTakenOver".to_owned(),
        Report::RivalsGone => "RivalsGone".to_owned(),
    }
}

pub(super) fn unit(text: &str) -> UnitId {
    UnitId::new(text).expect("the test names a unit")
}

pub(super) fn id(text: &str) -> DeviceId {
    DeviceId::parse(text).expect("the test names a device id")
}

pub(super) fn device(text: &str) -> DeviceName {
    DeviceName::new(text).expect("the test names a device")
}

pub(super) fn pod_name(name: &str) -> PodName {
    PodName {
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

pub(super) fn pod_uid(name: &str) -> PodUid {
    PodUid::new(format!("uid-{name}")).expect("the test names a pod")
}

pub(super) fn pod_ref(name: &str) -> PodRef {
    PodRef {
        name: pod_name(name),
        uid: Some(pod_uid(name)),
    }
}

pub(super) fn claim_ref(name: &str) -> ClaimRef {
    ClaimRef {
        uid: ClaimUid::new(format!("uid-{name}")).expect("the test names a claim"),
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

/// A live pod that may own `may_own` GPUs and has started.
pub(super) fn live(name: &str, may_own: u32) -> BoundPod {
    BoundPod {
        pod: pod_name(name),
        uid: pod_uid(name),
        phase: PodPhase::Live,
        may_own,
        started: true,
    }
}

/// A live pod that is bound here and of which nothing has started.
pub(super) fn in_flight(name: &str, may_own: u32) -> BoundPod {
    BoundPod {
        started: false,
        ..live(name, may_own)
    }
}

pub(super) fn listing(pods: &[(&str, &[&str])]) -> Listing {
    Listing {
        pods: pods
            .iter()
            .map(|(pod, ids)| ListedPod {
                pod: pod_name(pod),
                devices: ids
                    .iter()
                    .map(|text| ListedDevice {
                        container: "main".to_owned(),
                        id: id(text),
                    })
                    .collect(),
                claims: Vec::new(),
            })
            .collect(),
    }
}

pub(super) fn listed_claim(pod: &str, claim: &str, name: &str) -> ListedPod {
    ListedPod {
        pod: pod_name(pod),
        devices: Vec::new(),
        claims: vec![ListedClaim {
            namespace: "default".to_owned(),
            name: claim.to_owned(),
            device: device(name),
        }],
    }
}

/// `gpu-0` is owned, `gpu-0:admin` only looked at; `tolerates` says that its claim tolerates our taint for ever.
pub(super) fn role(text: &str) -> Result<AllocatedDevice, String> {
    let mut words = text.split(':');
    let name = words.next().unwrap_or_default();
    let mut allocated = AllocatedDevice {
        request: "gpu".to_owned(),
        pool: POOL.to_owned(),
        device: DeviceName::new(name).map_err(|why| why.to_string())?,
        access: Access::Owner,
        tolerations: Vec::new(),
    };
    for word in words {
        match word {
            "admin" => allocated.access = Access::Admin,
            "tolerates" => allocated.tolerations = vec![tolerating()],
            other => {
                return Err(format!(
                    "`{other}` is not a role: write gpu-0, gpu-0:admin or gpu-0:admin:tolerates"
                ));
            }
        }
    }
    Ok(allocated)
}

/// Whoever has it stays on a device that evicts.
pub(super) fn tolerating() -> Toleration {
    Toleration {
        key: Some(TAINT_KEY.to_owned()),
        value: None,
        effect: Some(TaintEffect::NoExecute),
        lasts: None,
    }
}

/// A device as a claim names it for Prepare.
pub(super) fn claimed(allocated: AllocatedDevice) -> ClaimedDevice {
    ClaimedDevice {
        requests: vec![allocated.request],
        pool: allocated.pool,
        device: allocated.device,
        access: allocated.access,
    }
}

pub(super) fn allocated(claim: &str, devices: &[&str], pods: &[&str]) -> AllocatedClaim {
    AllocatedClaim {
        claim: claim_ref(claim),
        devices: devices
            .iter()
            .map(|text| role(text).expect("the test names a device and its role"))
            .collect(),
        reserved_for: pods.iter().map(|pod| pod_uid(pod)).collect::<BTreeSet<_>>(),
        asked: Asked::ByClaim,
    }
}

pub(super) fn prepare_request(claim: &str, devices: &[&str], arrived: Duration) -> PrepareRequest {
    PrepareRequest {
        claim: claim_ref(claim),
        devices: devices
            .iter()
            .map(|text| claimed(role(text).expect("the test names a device and its role")))
            .collect(),
        arrived,
        patience: Patience::Waits,
    }
}

pub(super) fn gpu(uuid: &str, minor: u32) -> Gpu {
    Gpu {
        uuid: unit(uuid),
        pci_bus_id: format!("0000:{minor:02x}:00.0"),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory_bytes: 80 << 30,
        driver_version: "580.65.06".to_owned(),
        cuda_driver_version: (13, 0),
        numa_node: Some(minor / 4),
        pcie_root: None,
        addressing_mode: None,
    }
}

pub(super) fn inventory(minors: impl IntoIterator<Item = u32>) -> Inventory {
    Inventory::Seen(
        minors
            .into_iter()
            .map(|minor| gpu(&format!("GPU-{minor}"), minor))
            .collect(),
    )
}

pub(super) fn idle(count: u32) -> Processes {
    let mut processes = Processes::default();
    for minor in 0..count {
        processes.units.insert(
            unit(&format!("GPU-{minor}")),
            UnitProcesses::Known(Vec::new()),
        );
    }
    processes
}
