//! What a script plays on: a daemon, and all that it can ask on its node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use super::super::kit::{
    Daemon, claim_ref, claimed, gpu, hold_in_words, jumping, pod_name, report_in_words, role,
    steady,
};
use super::words;
use crate::{
    Adoption, AllocateOutcome, AllocateRequest, AllocatedClaim, Asked, BoundPod,
    CheckpointedDevices, CheckpointedResponse, ClaimScope, Claims, Demand, Evidence, Inventory,
    Ledger, ListedClaim, ListedDevice, ListedPod, Listing, Patience, PodPhase, PodSource, PodUid,
    Pods, Pool, PrepareRequest, Process, Processes, Rival, Settings, Transition, UnitProcesses,
    WaitingPod, Xid,
};

const COMMANDS: [&str; 31] = [
    "gpus",
    "gpu",
    "nvml",
    "mode",
    "limits",
    "pods",
    "listed",
    "kubelet",
    "claims",
    "node",
    "waits",
    "process",
    "time",
    "look",
    "allocate",
    "prepare",
    "again",
    "unprepare",
    "crash",
    "boot",
    "lost-ledger",
    "unreadable-ledger",
    "checkpoint",
    "dra-state",
    "adopt",
    "rival",
    "xid",
    "recovery",
    "xids",
    "clear-fault",
    "expect",
];

/// Whether a source answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Source {
    #[default]
    Answers,
    Away,
}

/// The node of a script.
#[derive(Debug)]
pub(super) struct Node {
    daemon: Daemon,
    /// UUID and minor of the GPUs that NVML sees.
    gpus: BTreeMap<String, u32>,
    nvml: Source,
    kubelet: Source,
    pods: Option<BTreeMap<String, BoundPod>>,
    /// The UID that a name had last.
    uids: BTreeMap<String, PodUid>,
    listed: BTreeMap<String, ListedPod>,
    claims: Option<BTreeMap<String, AllocatedClaim>>,
    /// The claims that were read, where they are noticed at bind; `None`: all are watched.
    read: Option<BTreeSet<crate::ClaimUid>>,
    /// Whether the Node shows the count that the daemon wants.
    node: Source,
    /// The pods that wait, the oldest first; `None`: nobody looks.
    waiting: Option<Vec<WaitingPod>>,
    /// The open Prepare calls, by claim.
    calls: BTreeMap<String, PrepareRequest>,
    checkpoint: Vec<CheckpointedDevices>,
    dra_state: Option<BTreeSet<crate::ClaimUid>>,
    unprepared: BTreeSet<crate::ClaimUid>,
    rivals: BTreeSet<Rival>,
    reports: Vec<String>,
    /// Only hardware and settings were named so far: the daemon begins with those.
    begins: bool,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            daemon: Daemon {
                pool: Pool::restored(Ledger::default(), Settings::default()),
                disk: None,
                uptime: Duration::ZERO,
                acts: 0,
                wall: steady,
                processes: Processes::default(),
                reports: Vec::new(),
                saved: false,
            },
            gpus: BTreeMap::new(),
            nvml: Source::Answers,
            kubelet: Source::Answers,
            pods: Some(BTreeMap::new()),
            uids: BTreeMap::new(),
            listed: BTreeMap::new(),
            claims: Some(BTreeMap::new()),
            read: None,
            node: Source::Away,
            waiting: None,
            calls: BTreeMap::new(),
            checkpoint: Vec::new(),
            dra_state: Some(BTreeSet::new()),
            unprepared: BTreeSet::new(),
            rivals: BTreeSet::new(),
            reports: Vec::new(),
            begins: true,
        }
    }
}

impl Node {
    /// A node whose wall clock jumps back and forth.
    pub(super) fn with_a_jumping_clock() -> Self {
        let mut node = Self::default();
        node.daemon.wall = jumping;
        node
    }

    /// Runs one line without its comment.
    pub(super) fn run(&mut self, line: &str) -> Result<(), String> {
        let (left, right) = match line.split_once("->") {
            Some((left, right)) => (left, Some(right.split_whitespace().collect::<Vec<_>>())),
            None => (line, None),
        };
        let words: Vec<&str> = left.split_whitespace().collect();
        let (&command, rest) = words.split_first().ok_or("the line says nothing")?;
        if command != "expect" {
            self.reports.clear();
        }
        self.begins &= ["gpus", "mode", "limits"].contains(&command);
        match command {
            "allocate" | "prepare" | "again" | "checkpoint" => {
                let right = right.ok_or("what should come of it is missing: write `-> ...`")?;
                self.call(command, rest, &right.join(" "))
            }
            known if right.is_some() && COMMANDS.contains(&known) => {
                Err(format!("`{known}` has no outcome"))
            }
            "gpus" | "gpu" | "nvml" | "process" => self.hardware(command, rest),
            "mode" | "limits" => self.configure(command, rest),
            _ => self.play(command, rest),
        }
    }

    /// Runs a line that is no part of how the node begins.
    fn play(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match command {
            "pods" => self.pods(rest),
            "listed" | "kubelet" => self.kubelet(command, rest),
            "claims" => self.claims(rest),
            "rival" => self.rival(rest),
            "xid" | "recovery" | "xids" | "clear-fault" => self.faults(command, rest),
            "node" | "waits" => self.schedulers(command, rest),
            "time" | "look" => self.wait(command, rest),
            "unprepare" => self.unprepare(rest),
            "crash" | "boot" | "lost-ledger" | "unreadable-ledger" | "dra-state" | "adopt" => {
                self.start(command, rest)
            }
            "expect" => self.expect(rest),
            other => Err(format!(
                "there is no command `{other}`; there are: {}",
                COMMANDS.join(", ")
            )),
        }
    }

    fn act<T>(&mut self, step: impl FnOnce(&mut Transition) -> T) -> T {
        let outcome = self.daemon.act(step);
        self.reports
            .extend(self.daemon.reports.iter().map(report_in_words));
        if self.node == Source::Answers {
            let count = self.daemon.pool.offers().count;
            self.daemon.act(|t| t.observe_node(Some(count)));
        }
        outcome
    }

    // ---- Hardware and settings ----

    fn hardware(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match (command, rest) {
            ("gpus", [count]) => {
                for minor in 0..words::number(count, "a number of GPUs")? {
                    self.gpus.insert(format!("GPU-{minor}"), minor);
                    self.set_processes(&format!("GPU-{minor}"), Some(Vec::new()))?;
                }
            }
            ("gpu", [uuid, "lost"]) => {
                self.gpus
                    .remove(*uuid)
                    .ok_or_else(|| format!("there is no `{uuid}`"))?;
            }
            ("gpu", [uuid, "minor", minor]) => {
                let minor = words::number(minor, "a minor number")?;
                self.gpus.insert((*uuid).to_owned(), minor);
                self.set_processes(uuid, Some(Vec::new()))?;
            }
            ("nvml", ["away"]) => self.nvml = Source::Away,
            ("nvml", ["back"]) => self.nvml = Source::Answers,
            ("process", [unit, "none"]) => return self.set_processes(unit, Some(Vec::new())),
            ("process", [unit, "unknown"]) => return self.set_processes(unit, None),
            ("process", [unit, pid]) => {
                let pid = words::number(pid, "a process id, `none` or `unknown`")?;
                return self.set_processes(unit, Some(vec![Process { pid, pod: None }]));
            }
            ("process", [unit, pid, "of", pod]) => {
                let pid = words::number(pid, "a process id")?;
                let pod = Some(self.uid_of(pod)?);
                return self.set_processes(unit, Some(vec![Process { pid, pod }]));
            }
            _ => {
                return Err(
                    "write `gpus 8`, `gpu GPU-3 lost`, `gpu GPU-9 minor 3`, `nvml away`, `nvml back`, or `process GPU-3 4711 of pod-a`, `process GPU-3 4711`, `... none`, `... unknown`"
                        .to_owned(),
                );
            }
        }
        self.scan();
        Ok(())
    }

    fn scan(&mut self) {
        let inventory = match self.nvml {
            Source::Away => Inventory::Unavailable,
            Source::Answers => {
                let gpus = self.gpus.iter();
                Inventory::Seen(gpus.map(|(uuid, minor)| gpu(uuid, *minor)).collect())
            }
        };
        self.act(|t| t.observe_inventory(inventory));
    }

    fn set_processes(&mut self, unit: &str, processes: Option<Vec<Process>>) -> Result<(), String> {
        let processes = processes.map_or(UnitProcesses::Unknown, UnitProcesses::Known);
        self.daemon
            .processes
            .units
            .insert(words::unit(unit)?, processes);
        Ok(())
    }

    fn configure(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        let mut settings = self.daemon.pool.settings().clone();
        match (command, rest) {
            ("mode", [mode]) => settings.mode = words::mode(mode)?,
            ("limits", rest) => settings.limits = words::limits(rest)?,
            _ => return Err("write `mode both`".to_owned()),
        }
        if self.begins {
            self.daemon.pool = Pool::restored(Ledger::default(), settings);
            self.scan();
        } else {
            self.act(|t| t.configure(settings));
        }
        Ok(())
    }

    // ---- What the kubelet and the API say ----

    /// The UID of a pod by name, made up at its first mention.
    fn uid_of(&mut self, name: &str) -> Result<PodUid, String> {
        if let Some(uid) = self.uids.get(name) {
            return Ok(uid.clone());
        }
        let uid = PodUid::new(format!("uid-{name}")).map_err(|why| why.to_string())?;
        self.uids.insert(name.to_owned(), uid.clone());
        Ok(uid)
    }

    fn pods(&mut self, rest: &[&str]) -> Result<(), String> {
        let (name, phase, may_own, started) = match rest {
            ["unknown"] => {
                self.pods = None;
                self.act(|t| t.observe_pods(None));
                return Ok(());
            }
            [name, "gone"] => {
                self.pods.get_or_insert_default().remove(*name);
                return self.send_pods();
            }
            [name, "terminal"] => (*name, PodPhase::Terminal, "0", true),
            [name, "live", may_own] => (*name, PodPhase::Live, *may_own, true),
            [name, "bound", may_own] => (*name, PodPhase::Live, *may_own, false),
            [name, "live", may_own, "uid", uid] => {
                let uid = PodUid::new(*uid).map_err(|why| why.to_string())?;
                self.uids.insert((*name).to_owned(), uid);
                (*name, PodPhase::Live, *may_own, true)
            }
            [_, other, ..] => {
                return Err(format!(
                    "`{other}` is not a state of a pod: live N, bound N, terminal or gone"
                ));
            }
            _ => return Err("write `pods pod-a live 1`, or `pods unknown`".to_owned()),
        };
        let pod = BoundPod {
            pod: pod_name(name),
            uid: self.uid_of(name)?,
            phase,
            may_own: words::number(may_own, "a number of GPUs")?,
            started,
        };
        self.pods
            .get_or_insert_default()
            .insert(name.to_owned(), pod);
        self.send_pods()
    }

    fn send_pods(&mut self) -> Result<(), String> {
        let pods = self.pods.as_ref().map(|pods| Pods {
            source: PodSource::Api,
            pods: pods.values().cloned().collect(),
        });
        self.act(|t| t.observe_pods(pods));
        Ok(())
    }

    fn kubelet(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match (command, rest) {
            ("kubelet", ["away"]) => {
                self.kubelet = Source::Away;
                return Ok(());
            }
            ("kubelet", ["back"]) => {
                self.kubelet = Source::Answers;
                return Ok(());
            }
            ("listed", ["nobody"]) => self.listed.clear(),
            ("listed", [pod, "gone"]) => drop(self.listed.remove(*pod)),
            ("listed", [pod, "claim", claim, device]) => {
                let claim = ListedClaim {
                    namespace: "default".to_owned(),
                    name: (*claim).to_owned(),
                    device: words::device(device)?,
                };
                self.listed_pod(pod).claims.push(claim);
            }
            ("listed", [pod, "nothing"]) => {
                let listed = self.listed_pod(pod);
                listed.devices.clear();
                listed.claims.clear();
            }
            ("listed", [pod, ids @ ..]) if !ids.is_empty() => {
                let mut devices = Vec::new();
                for id in ids {
                    devices.push(ListedDevice {
                        container: "main".to_owned(),
                        id: words::id(id)?,
                    });
                }
                self.listed_pod(pod).devices = devices;
            }
            _ => {
                return Err(
                    "write `listed pod-a GPU-7`, `listed pod-a claim claim-a gpu-0`, `listed pod-a nothing`, `listed pod-a gone`, `listed nobody`, or `kubelet away`, `kubelet back`"
                        .to_owned(),
                );
            }
        }
        let listing = self.listing();
        self.act(|t| t.observe_listing(listing));
        Ok(())
    }

    fn listed_pod(&mut self, pod: &str) -> &mut ListedPod {
        self.listed
            .entry(pod.to_owned())
            .or_insert_with(|| ListedPod {
                pod: pod_name(pod),
                devices: Vec::new(),
                claims: Vec::new(),
            })
    }

    fn listing(&self) -> Listing {
        Listing {
            pods: self.listed.values().cloned().collect(),
        }
    }

    fn claims(&mut self, rest: &[&str]) -> Result<(), String> {
        match rest {
            ["unknown"] => self.claims = None,
            ["read-one-by-one"] => self.read = Some(BTreeSet::new()),
            [claim, "gone"] => {
                self.note_read(claim);
                self.claims.get_or_insert_default().remove(*claim);
            }
            [claim, words @ ..] => {
                self.note_read(claim);
                let (devices, pods) = match words.iter().position(|word| *word == "for") {
                    Some(place) => (&words[..place], &words[place + 1..]),
                    None => (words, &words[..0]),
                };
                let mut allocated = AllocatedClaim {
                    claim: claim_ref(claim),
                    devices: Vec::new(),
                    reserved_for: BTreeSet::new(),
                    asked: Asked::ByClaim,
                };
                for word in devices {
                    allocated.devices.push(role(word)?);
                }
                for pod in pods {
                    let uid = self.uid_of(pod)?;
                    allocated.reserved_for.insert(uid);
                }
                self.claims
                    .get_or_insert_default()
                    .insert((*claim).to_owned(), allocated);
            }
            [] => return Err("write `claims claim-a gpu-0 for pod-b`".to_owned()),
        }
        self.send_claims();
        Ok(())
    }

    // ---- What schedulers read and leave ----

    fn schedulers(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match (command, rest) {
            ("node", ["follows"]) => {
                self.node = Source::Answers;
                self.act(|_| ());
                return Ok(());
            }
            ("node", ["away"]) => {
                self.node = Source::Away;
                self.act(|t| t.observe_node(None));
                return Ok(());
            }
            ("waits", ["unknown"]) => self.waiting = None,
            ("waits", ["nobody"]) => self.waiting = Some(Vec::new()),
            ("waits", [name, "gone"]) => {
                let uid = self.uid_of(name)?;
                let pods = self.waiting.get_or_insert_default();
                pods.retain(|pod| pod.uid != uid);
            }
            ("waits", [name, wants @ ..]) => {
                let (counted, claimed) = words::wants(wants)?;
                let uid = self.uid_of(name)?;
                let pods = self.waiting.get_or_insert_default();
                let age = u64::try_from(pods.len()).map_err(|why| why.to_string())?;
                pods.push(WaitingPod {
                    uid,
                    created: SystemTime::UNIX_EPOCH + Duration::from_secs(age),
                    counted,
                    claimed,
                });
            }
            _ => return Err("write `node follows`, or `waits pod-a counted 2`".to_owned()),
        }
        let demand = self.waiting.clone().map(|pods| Demand { pods });
        self.act(|t| t.observe_demand(demand));
        Ok(())
    }

    fn note_read(&mut self, claim: &str) {
        if let Some(read) = &mut self.read {
            read.insert(claim_ref(claim).uid);
        }
    }

    fn send_claims(&mut self) {
        let scope = match &self.read {
            None => ClaimScope::All,
            Some(read) => ClaimScope::Read(read.clone()),
        };
        let claims = self.claims.as_ref().map(|claims| Claims {
            claims: claims.values().cloned().collect(),
            scope,
        });
        self.act(|t| t.observe_claims(claims));
    }

    fn rival(&mut self, rest: &[&str]) -> Result<(), String> {
        match rest {
            ["gone"] => self.rivals.clear(),
            [face, place] => {
                let rival = Rival {
                    face: words::face(face)?,
                    place: (*place).to_owned(),
                    owner: None,
                };
                self.rivals.insert(rival);
            }
            _ => return Err("write `rival legacy nvidia-gpu.sock`, or `rival gone`".to_owned()),
        }
        self.send_rivals();
        Ok(())
    }

    fn send_rivals(&mut self) {
        let rivals = self.rivals.clone();
        self.act(|t| t.observe_rivals(rivals));
    }

    fn wait(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match (command, rest) {
            ("time", [span]) => self.daemon.uptime += words::span(span)?,
            ("look", []) => {
                self.scan();
                self.send_claims();
                self.send_pods()?;
                if self.kubelet == Source::Answers {
                    let listing = self.listing();
                    self.act(|t| t.observe_listing(listing));
                }
                self.act(Transition::observe_processes);
                self.send_rivals();
            }
            _ => return Err("write `time +11s`, or `look`".to_owned()),
        }
        Ok(())
    }

    // ---- Errors of GPUs ----

    fn faults(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        match (command, rest) {
            ("xid", [unit, xid]) => {
                let xid = Xid::new(words::number(xid, "an XID")?);
                let xids = BTreeMap::from([((words::unit(unit)?, xid), 1)]);
                self.act(|t| t.observe_xids(&xids));
            }
            ("recovery", [unit, action]) => {
                let action = words::recovery(action)?;
                let actions = BTreeMap::from([(words::unit(unit)?, action)]);
                let asked = self.daemon.uptime;
                self.act(|t| t.observe_recovery(asked, &actions));
            }
            ("xids", rest) => {
                let mut settings = self.daemon.pool.settings().clone();
                settings.xids = words::xids(rest)?;
                self.act(|t| t.configure(settings));
            }
            ("clear-fault", [unit]) => {
                let unit = words::unit(unit)?;
                let cleared = self.act(|t| t.clear_fault(&unit));
                return cleared.map_err(|why| why.to_string());
            }
            _ => {
                return Err(
                    "write `xid GPU-3 79`, `recovery GPU-3 reset`, `xids ignore 48`, `clear-fault GPU-3`"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }

    // ---- Calls ----

    fn call(&mut self, command: &str, rest: &[&str], wanted: &str) -> Result<(), String> {
        let outcome = match (command, rest) {
            ("allocate", words) => {
                let (ids, patience) = last_call(words);
                self.allocate(ids, patience)?
            }
            ("prepare", [claim, words @ ..]) => {
                let (devices, patience) = last_call(words);
                let mut request = PrepareRequest {
                    claim: claim_ref(claim),
                    devices: Vec::new(),
                    arrived: self.daemon.uptime,
                    patience,
                };
                for word in devices {
                    request.devices.push(claimed(role(word)?));
                }
                self.calls.insert((*claim).to_owned(), request.clone());
                words::prepare_outcome(&self.act(|t| t.prepare(&request)))
            }
            ("again", [claim, words @ ..]) => {
                let mut request = self
                    .calls
                    .get(*claim)
                    .cloned()
                    .ok_or_else(|| format!("there was no `prepare {claim}` yet"))?;
                (_, request.patience) = last_call(words);
                words::prepare_outcome(&self.act(|t| t.prepare(&request)))
            }
            ("checkpoint", [pod, ids @ ..]) => return self.checkpoint(pod, ids, wanted),
            _ => return Err(format!("write `{command} claim-a ...`")),
        };
        same(wanted, &outcome)
    }

    fn allocate(&mut self, ids: &[&str], patience: Patience) -> Result<String, String> {
        let mut request = AllocateRequest {
            ids: Vec::new(),
            patience,
        };
        for word in ids {
            request.ids.push(words::id(word)?);
        }
        let mut evidence = Evidence { listing: None };
        let mut outcome = self.act(|t| t.allocate(&request, &evidence));
        if outcome == AllocateOutcome::NeedsListing {
            evidence.listing = Some(self.listing());
            outcome = self.act(|t| t.allocate(&request, &evidence));
        }
        Ok(words::allocate_outcome(&outcome))
    }

    fn unprepare(&mut self, rest: &[&str]) -> Result<(), String> {
        let [claim] = rest else {
            return Err("write `unprepare claim-a`".to_owned());
        };
        let uid = claim_ref(claim).uid;
        if self.daemon.pool.standing() != crate::Standing::Serving {
            self.unprepared.insert(uid.clone());
        }
        self.act(|t| t.unprepare(&uid));
        Ok(())
    }

    // ---- Start, and what is left of the time before ----

    fn checkpoint(&mut self, pod: &str, ids: &[&str], units: &str) -> Result<(), String> {
        let mut entry = CheckpointedDevices {
            pod: self.uid_of(pod)?,
            ids: Vec::new(),
            response: CheckpointedResponse::Unknown,
        };
        for word in ids {
            entry.ids.push(words::id(word)?);
        }
        if units != "unknown" {
            let mut known = Vec::new();
            for word in units.split_whitespace() {
                known.push(words::unit(word)?);
            }
            entry.response = CheckpointedResponse::Units(known);
        }
        self.checkpoint.push(entry);
        let ids = self.checkpoint.iter().flat_map(|entry| entry.ids.clone());
        let ids = ids.collect();
        self.act(|t| t.observe_kubelet_ids(ids));
        Ok(())
    }

    fn start(&mut self, command: &str, rest: &[&str]) -> Result<(), String> {
        let settings = self.daemon.pool.settings().clone();
        let pool = match (command, rest) {
            ("crash" | "boot", []) => match &self.daemon.disk {
                Some(ledger) => Pool::restored(ledger.clone(), settings),
                None => Pool::waiting(settings),
            },
            ("lost-ledger", []) => {
                self.daemon.disk = None;
                Pool::waiting(settings)
            }
            ("unreadable-ledger", []) => Pool::unreadable(settings),
            ("dra-state", ["unreadable"]) => {
                self.dra_state = None;
                return Ok(());
            }
            ("dra-state", claims) => {
                let uids = claims.iter().map(|claim| claim_ref(claim).uid);
                self.dra_state = Some(uids.collect());
                return Ok(());
            }
            ("adopt", []) => return self.adopt(),
            _ => return Err(format!("`{command}` stands alone")),
        };
        self.daemon.pool = pool;
        self.daemon.uptime = Duration::ZERO;
        self.calls.clear();
        if command == "boot" {
            self.act(Transition::observe_boot);
        }
        self.scan();
        Ok(())
    }

    fn adopt(&mut self) -> Result<(), String> {
        let (Some(pods), Some(claims)) = (&self.pods, &self.claims) else {
            return Err("the API can't be asked, so nobody would adopt".to_owned());
        };
        let adoption = Adoption {
            listing: self.listing(),
            pods: Pods {
                source: PodSource::Api,
                pods: pods.values().cloned().collect(),
            },
            checkpoint: self.checkpoint.clone(),
            claims: Claims::all(claims.values().cloned().collect()),
            prepared: self.dra_state.clone(),
            unprepared: self.unprepared.clone(),
        };
        self.act(|t| t.adopt(adoption));
        Ok(())
    }

    // ---- Expectations ----

    fn expect(&mut self, rest: &[&str]) -> Result<(), String> {
        match rest {
            ["holds", unit, wanted @ ..] => {
                let holds = self.daemon.pool.ledger().holds_on(&words::unit(unit)?);
                let holds: Vec<String> = holds.iter().map(hold_in_words).collect();
                let holds = if holds.is_empty() {
                    "free".to_owned()
                } else {
                    holds.join(" and ")
                };
                same(&wanted.join(" "), &holds)
            }
            ["offers", "counted", wanted @ ..] => {
                let offers = self.daemon.pool.offers();
                same(&wanted.join(" "), &words::counted_offers(&offers))
            }
            ["offers", "claims", wanted @ ..] => {
                let offers = self.daemon.pool.offers();
                same(&wanted.join(" "), &words::claim_offers(&offers))
            }
            ["reported", wanted] if self.reports.iter().any(|report| report == wanted) => Ok(()),
            ["reported", wanted] => Err(format!(
                "expected `{wanted}` to be reported, but there is `{}`",
                self.reports.join(" ")
            )),
            [standing] => same(standing, words::standing(self.daemon.pool.standing())),
            _ => Err(
                "write `expect holds GPU-7 free`, `expect offers counted H U`, `expect offers claims on Counted`, `expect reported HandedOverBusy`, or `expect serving`"
                    .to_owned(),
            ),
        }
    }
}

/// Whether a call says that it is the last one, and what else it says.
fn last_call<'a, 'b>(words: &'a [&'b str]) -> (&'a [&'b str], Patience) {
    match words {
        [words @ .., "last", "call"] => (words, Patience::LastCall),
        words => (words, Patience::Waits),
    }
}

fn same(wanted: &str, found: &str) -> Result<(), String> {
    if wanted == found {
        Ok(())
    } else {
        Err(format!("expected `{wanted}`, but it is `{found}`"))
    }
}
