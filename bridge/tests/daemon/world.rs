//! One node for one test: folders, fake NVML, API server, kubelet and the daemon. All of it ends with the value.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use fake_nvml::{FakeNode, Gpu, Scenario};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{ApiServer, Claim, Kubelet, Pod, Rejection, wait_for};
use tokio::net::UnixStream;

use crate::calls::{Driver, Plugin};
use crate::http;
use crate::process::{Daemon, Flags, Log};

pub(crate) const NODE: &str = "node-0";
pub(crate) const RESOURCE: &str = "nvidia.com/gpu";
pub(crate) const DRIVER: &str = "gpu.nvidia.com";
pub(crate) const NAMESPACE: &str = "train";
/// Namespace and name of the ConfigMap that a daemon can read from the API server.
pub(crate) const MAP: (&str, &str) = ("gpu-bridge", "nodes");

/// Far more than anything here takes, on a machine that is busy.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// How often a state is looked at that needs a question to the daemon.
const TICK: Duration = Duration::from_millis(20);

/// Status code and body of an answer over a unix socket; `None` if nobody answers.
pub(crate) async fn ask(socket: &Path, what: &str, body: &str) -> Option<(u16, String)> {
    let stream = UnixStream::connect(socket).await.ok()?;
    http::ask(stream, what, body).await
}

/// Waits until something is so.
pub(crate) async fn until(what: &str, limit: Duration, mut is_so: impl AsyncFnMut() -> bool) {
    wait_for(what, limit, async || {
        if is_so().await {
            return Some(());
        }
        tokio::time::sleep(TICK).await;
        None
    })
    .await;
}

/// Waits until what is looked at is the same as so long before, and returns it.
pub(crate) async fn calm<T: PartialEq>(
    what: &str,
    period: Duration,
    mut look: impl AsyncFnMut() -> T,
) -> T {
    wait_for(what, SOON, async || {
        let before = look().await;
        tokio::time::sleep(period).await;
        let now = look().await;
        (before == now).then_some(now)
    })
    .await
}

/// Sees to it that something stays so.
pub(crate) async fn stays(what: &str, period: Duration, mut is_so: impl AsyncFnMut() -> bool) {
    let watched = async {
        while is_so().await {
            tokio::time::sleep(TICK).await;
        }
    };
    let broken = tokio::time::timeout(period, watched).await;
    assert!(
        broken.is_err(),
        "within {period:?} it was no more so: {what}"
    );
}

/// Says that a test can't be done on this machine, also where the output of tests that pass is not shown.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test").to_owned();
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// Tells what a test has measured, in a line that is shown where the output of tests that pass is not, too.
pub(crate) fn proof(what: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "PROOF {what}");
}

/// The number in a variable that `make` sets, or this one.
pub(crate) fn from_environment(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| text.parse().expect("a number"))
}

pub(crate) struct World {
    pub(crate) api: ApiServer,
    pub(crate) node: FakeNode,
    kubelet: Option<Kubelet>,
    daemon: Option<Daemon>,
    /// Logs of the daemons that have ended.
    logs: Vec<Log>,
    flags: Flags,
    dir: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for log in &self.logs {
                eprintln!("--- a daemon's log ---\n{}", log.text());
            }
        }
    }
}

// --- Making it ---

impl World {
    /// A node with so many GPUs, an API server that knows it, and nothing that runs.
    pub(crate) async fn new(gpus: u32) -> Self {
        Self::with(&Scenario::h100(gpus), FakeNode::create).await
    }

    /// The same on a node where the driver's library is not there yet.
    pub(crate) async fn without_library(gpus: u32) -> Self {
        Self::with(&Scenario::h100(gpus), FakeNode::without_library).await
    }

    pub(crate) async fn with(
        scenario: &Scenario,
        make: fn(&Path, &Scenario) -> Result<FakeNode, fake_nvml::Error>,
    ) -> Self {
        let dir = tempfile::Builder::new().prefix("gb").tempdir().unwrap();
        let node = make(&dir.path().join("node"), scenario).expect("a fake node");
        let api = ApiServer::start().await.unwrap();
        api.put("nodes", json!({"metadata": {"name": NODE}}));
        // Without the right to lower the count free GPUs stay on their side, so a test knows which those are.
        api.forbid("patch", "nodes/status");
        api.kubeconfig(&dir.path().join("kubeconfig"));
        let mut world = Self {
            flags: Flags::new(),
            api,
            node,
            kubelet: None,
            daemon: None,
            logs: Vec::new(),
            dir,
        };
        world.boot("6c5b3b0a-0000-4000-8000-000000000001");
        world.flags = world.usual_flags();
        world
    }

    /// A node on which everything runs and is ready.
    pub(crate) async fn running(gpus: u32) -> Self {
        let world = Self::new(gpus).await;
        world.started().await
    }

    /// The same with a configuration file.
    pub(crate) async fn configured(gpus: u32, config: &str) -> Self {
        let mut world = Self::new(gpus).await;
        world.configure(config);
        world.started().await
    }

    /// The same on a node of a scenario.
    pub(crate) async fn of(scenario: &Scenario) -> Self {
        let world = Self::with(scenario, FakeNode::create).await;
        world.started().await
    }

    /// The same with a configuration file.
    pub(crate) async fn of_configured(scenario: &Scenario, config: &str) -> Self {
        let mut world = Self::with(scenario, FakeNode::create).await;
        world.configure(config);
        world.started().await
    }

    pub(crate) async fn started(mut self) -> Self {
        self.start_kubelet().await;
        self.start_daemon();
        self.ready().await;
        self
    }

    fn usual_flags(&self) -> Flags {
        let text = |text: &str| text.to_owned().into();
        Flags::from([
            ("--node-name", text(NODE)),
            ("--http-addr", text("127.0.0.1:0")),
            ("--kubelet-dir", self.path("k").into()),
            ("--device-plugin-dir", self.device_plugin_dir().into()),
            ("--cdi-dir", self.cdi_dir().into()),
            ("--state-dir", self.state_dir().into()),
            ("--admin-socket", self.admin_socket().into()),
            ("--kubeconfig", self.path("kubeconfig").into()),
            ("--nvml-library", self.node.library().into()),
            ("--sys-root", self.node.sys_root().into()),
            ("--proc-root", self.node.proc_root().into()),
            ("--driver-root", self.node.folder().into()),
            ("--dev-root", self.node.folder().into()),
        ])
    }

    /// Writes the configuration file: what follows the `apiVersion`.
    pub(crate) fn configure(&mut self, rest: &str) {
        let path = self.path("config.yaml");
        let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\n{rest}");
        fs::write(&path, text).unwrap();
        self.flags.insert("--config", path.into());
    }

    /// Writes the configuration into a ConfigMap at the API server: what follows the `apiVersion`.
    pub(crate) fn configure_map(&mut self, rest: &str) {
        let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\n{rest}");
        self.put_map(&json!({"config.yaml": text}));
        self.read_map();
    }

    /// Writes what that ConfigMap has.
    pub(crate) fn put_map(&self, data: &Value) {
        let metadata = json!({"namespace": MAP.0, "name": MAP.1});
        self.api
            .put("configmaps", json!({"metadata": metadata, "data": data}));
    }

    /// The next daemon reads that ConfigMap, be it there or not.
    pub(crate) fn read_map(&mut self) {
        let name = format!("{}/{}", MAP.0, MAP.1);
        self.flags.insert("--config-map", name.into());
    }

    /// The flags that the next daemon gets.
    pub(crate) fn flags(&mut self) -> &mut Flags {
        &mut self.flags
    }

    /// The machine was started: the kernel has another boot id.
    pub(crate) fn boot(&self, id: &str) {
        let folder = self.node.proc_root().join("sys/kernel/random");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn device_plugin_dir(&self) -> PathBuf {
        self.path("k/device-plugins")
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.path("k/plugins_registry")
    }

    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.path("cdi")
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.path("state")
    }

    pub(crate) fn admin_socket(&self) -> PathBuf {
        self.path("admin.sock")
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.state_dir().join("ledger.json")
    }

    pub(crate) fn counted_spec(&self) -> PathBuf {
        self.cdi_dir().join("gpu-bridge.dev-gpu.json")
    }

    pub(crate) fn claim_spec(&self, uid: &str) -> PathBuf {
        self.cdi_dir()
            .join(format!("gpu-bridge.dev-claim_{uid}.json"))
    }
}

// --- Processes ---

impl World {
    pub(crate) async fn start_kubelet(&mut self) {
        let kubelet = Kubelet::start(&self.path("k")).await.unwrap();
        self.kubelet = Some(kubelet);
    }

    pub(crate) fn kubelet(&self) -> &Kubelet {
        self.kubelet.as_ref().expect("the kubelet was started")
    }

    pub(crate) fn start_daemon(&mut self) {
        let daemon = Daemon::spawn(&self.flags);
        self.adopt(daemon);
    }

    /// Takes a daemon that was started otherwise.
    pub(crate) fn adopt(&mut self, daemon: Daemon) {
        assert!(self.daemon.is_none(), "one daemon at a time");
        self.logs.push(daemon.log().clone());
        self.daemon = Some(daemon);
    }

    /// Starts a daemon beside the one that runs.
    pub(crate) fn start_successor(&mut self, pod: &str) -> Daemon {
        self.flags.insert("--pod-uid", pod.into());
        let successor = Daemon::spawn(&self.flags);
        self.logs.push(successor.log().clone());
        successor
    }

    /// Takes the successor for the daemon of this node, and gives back the one before.
    pub(crate) fn succeed(&mut self, successor: Daemon) -> Daemon {
        let former = self.daemon.replace(successor);
        former.expect("the daemon was started")
    }

    pub(crate) fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("the daemon was started")
    }

    pub(crate) fn daemon_mut(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("the daemon was started")
    }

    /// The log of the daemon that runs.
    pub(crate) fn log(&self) -> Log {
        self.daemon().log().clone()
    }

    /// `kill -9`.
    pub(crate) fn kill_daemon(&mut self) {
        self.daemon = None;
    }

    /// SIGTERM, and a good end.
    pub(crate) async fn stop_daemon(&mut self) {
        let daemon = self.daemon.take().expect("the daemon was started");
        daemon.signal(Signal::TERM);
        let (status, said) = daemon.ended().await;
        assert!(status.success(), "{status}: {said}");
    }

    /// Waits until the daemon has ended by itself; returns how, with everything that it has written.
    pub(crate) async fn daemon_ended(&mut self) -> (ExitStatus, String) {
        let daemon = self.daemon.take().expect("the daemon was started");
        daemon.ended().await
    }

    /// Has the daemon read the GPUs anew, and does not wait.
    pub(crate) fn rescan(&self) {
        self.daemon().signal(Signal::HUP);
    }

    /// Waits until the daemon is ready, and kubelet and API server show what it offers.
    pub(crate) async fn ready(&mut self) {
        self.readyz().await;
        until("both faces show the offers", SOON, async || {
            let status = self.status().await;
            let offers = status["offers"]["dra"].as_array();
            let text = |value: &Value| value.as_str().map(str::to_owned);
            let devices = offers.map(|offers| {
                let devices = offers.iter();
                devices
                    .map(|it| (text(&it["device"]).unwrap(), text(&it["taint"])))
                    .collect::<Vec<_>>()
            });
            let ids = status["offers"]["legacy"].as_array().unwrap().iter();
            let healthy = ids.filter(|it| it["health"] == "Healthy");
            let healthy = healthy.map(|it| text(&it["id"]).unwrap()).collect();
            self.slice() == devices && self.kubelet().healthy(RESOURCE) == healthy
        })
        .await;
    }

    /// Waits until /readyz says yes.
    pub(crate) async fn readyz(&mut self) {
        let unready = async {
            loop {
                if let Some((200, _)) = self.get("/readyz").await {
                    return;
                }
                let ended = self.daemon_mut().status();
                assert!(ended.is_none(), "the daemon ended: {ended:?}");
                tokio::time::sleep(TICK).await;
            }
        };
        if tokio::time::timeout(SOON, unready).await.is_err() {
            panic!("not ready in time: {:?}", self.get("/readyz").await);
        }
    }
}

// --- What the daemon shows ---

impl World {
    /// Status code and body of a page from the admin socket; `None` if nobody answers.
    pub(crate) async fn get(&self, path: &str) -> Option<(u16, String)> {
        ask(&self.admin_socket(), &format!("GET {path}"), "").await
    }

    /// A page of JSON; null if nobody answers.
    async fn page(&self, path: &str) -> Value {
        let answer = self.get(path).await;
        answer.map_or(Value::Null, |(_, body)| {
            serde_json::from_str(&body).unwrap()
        })
    }

    pub(crate) async fn status(&self) -> Value {
        self.page("/status").await
    }

    /// Whether a condition of /readyz is met, and its message; `None` if nobody answers.
    pub(crate) async fn condition(&self, name: &str) -> Option<(bool, String)> {
        let page = self.page("/readyz").await;
        let all = page["conditions"].as_array()?;
        let found = all.iter().find(|it| it["name"] == name);
        let found = found.unwrap_or_else(|| panic!("no condition {name} in {page}"));
        let message = found["message"].as_str().unwrap().to_owned();
        Some((found["ok"].as_bool().unwrap(), message))
    }

    /// Waits until a condition is not met, for a reason with these words.
    pub(crate) async fn lacks(&self, name: &str, words: &[&str]) {
        let what = format!("{name} is not met, because of {words:?}");
        until(&what, SOON, async || {
            self.condition(name)
                .await
                .is_some_and(|(ok, message)| !ok && words.iter().all(|word| message.contains(word)))
        })
        .await;
    }

    /// Waits until a condition is met.
    pub(crate) async fn has(&self, name: &str) {
        until(&format!("{name} is met"), SOON, async || {
            self.condition(name).await.is_some_and(|(ok, _)| ok)
        })
        .await;
    }

    pub(crate) async fn standing(&self) -> Option<String> {
        let status = self.status().await;
        Some(status["standing"].as_str()?.to_owned())
    }

    pub(crate) async fn wait_for_standing(&self, standing: &str) {
        let what = format!("the pool is {standing}");
        until(&what, SOON, async || {
            self.standing().await.as_deref() == Some(standing)
        })
        .await;
    }

    /// The unit's part of /status.
    pub(crate) async fn unit(&self, unit: &str) -> Value {
        let status = self.status().await;
        let units = status["units"].as_array().cloned().unwrap_or_default();
        let found = units.into_iter().find(|it| it["unit"] == unit);
        found.unwrap_or_else(|| panic!("no unit {unit} in {status}"))
    }

    /// Who has what, in a form that two moments can be compared in: unit, phase, id, pod or claim.
    pub(crate) async fn holds(&self) -> Vec<(String, String, String, String)> {
        let status = self.status().await;
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let units = status["units"].as_array().cloned().unwrap_or_default();
        let holds = units.iter().flat_map(|unit| {
            let holds = unit["holds"].as_array().cloned().unwrap_or_default();
            holds.into_iter().map(move |hold| {
                let claim = hold["claim"]["uid"].as_str();
                let holder = claim.or_else(|| hold["pod"]["uid"].as_str()).unwrap_or("-");
                let (phase, id) = (text(&hold["phase"]), text(&hold["id"]));
                (text(&unit["unit"]), phase, id, holder.to_owned())
            })
        });
        holds.collect()
    }

    /// Waits until there are so many holds in this phase, and returns all holds.
    pub(crate) async fn wait_for_holds(
        &self,
        phase: &str,
        count: usize,
    ) -> Vec<(String, String, String, String)> {
        let what = format!("{count} holds are {phase}");
        wait_for(&what, SOON, async || {
            let holds = self.holds().await;
            let number = holds.iter().filter(|(_, is, _, _)| is == phase).count();
            if number == count {
                return Some(holds);
            }
            tokio::time::sleep(TICK).await;
            None
        })
        .await
    }

    /// The slice's devices in the API: name and value of our taint.
    pub(crate) fn slice(&self) -> Option<Vec<(String, Option<String>)>> {
        let slices = self.api.list("resourceslices");
        assert!(slices.len() <= 1, "more than one slice: {slices:?}");
        let devices = slices.first()?["spec"]["devices"].as_array()?.clone();
        let device = |it: &Value| {
            let taints = it["taints"].as_array().cloned().unwrap_or_default();
            let ours = taints.iter().find(|it| it["key"] == "gpu-bridge.dev/unit");
            let value = ours.map(|it| it["value"].as_str().unwrap().to_owned());
            (it["name"].as_str().unwrap().to_owned(), value)
        };
        Some(devices.iter().map(device).collect())
    }

    /// The value of our taint on a device of the slice; `None`: it has none, or is not there.
    pub(crate) fn taint(&self, device: &str) -> Option<String> {
        let slice = self.slice().unwrap_or_default();
        let found = slice.into_iter().find(|(name, _)| name == device);
        found.and_then(|(_, taint)| taint)
    }

    /// Devices that claims can get now, in order.
    pub(crate) fn open_devices(&self) -> Vec<String> {
        let slice = self.slice().unwrap_or_default();
        let open = slice.into_iter().filter(|(_, taint)| taint.is_none());
        open.map(|(name, _)| name).collect()
    }

    /// The first device that nobody has and that claims can get.
    pub(crate) async fn free_device(&self) -> String {
        let status = self.status().await;
        let offers = status["offers"]["dra"].as_array().unwrap().iter();
        let mut free = offers.filter(|it| it["taint"].is_null() && it["heldByClaim"] == false);
        let first = free
            .next()
            .unwrap_or_else(|| panic!("nothing is free: {status}"));
        first["device"].as_str().unwrap().to_owned()
    }

    /// How many requests so far could have changed something in the API.
    pub(crate) fn writes(&self) -> u64 {
        const VERBS: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];
        const RESOURCES: [&str; 12] = [
            "configmaps",
            "pods",
            "pods/status",
            "pods/eviction",
            "nodes",
            "nodes/status",
            "events",
            "resourceclaims",
            "resourceclaims/status",
            "resourceslices",
            "resourceslices/status",
            "deviceclasses",
        ];
        let pairs = VERBS
            .iter()
            .flat_map(|verb| RESOURCES.iter().map(move |resource| (verb, resource)));
        pairs
            .map(|(verb, resource)| self.api.count(verb, resource))
            .sum()
    }

    /// How many requests of any kind the API server has had so far.
    pub(crate) fn requests(&self) -> u64 {
        self.api.counts().values().sum()
    }

    /// The generation of the ledger: how often it was saved.
    pub(crate) async fn generation(&self) -> u64 {
        let status = self.status().await;
        status["generation"].as_u64().expect("a number")
    }

    /// The GPU with that device name.
    pub(crate) fn gpu(&self, device: &str) -> Gpu {
        let gpus = self.node.gpus().into_iter();
        let mut found = gpus.filter(|gpu| format!("gpu-{}", gpu.minor) == device);
        found.next().unwrap_or_else(|| panic!("no GPU {device}"))
    }
}

// --- Pods and claims ---

/// The UID of a test's pod.
pub(crate) fn pod_uid(name: &str) -> String {
    uid("pods", name)
}

/// The UID of a test's claim.
pub(crate) fn claim_uid(name: &str) -> String {
    uid("claims", name)
}

/// A UID in the form that the API server gives them.
fn uid(kind: &str, name: &str) -> String {
    let (kind, name) = (
        crc32fast::hash(kind.as_bytes()),
        crc32fast::hash(name.as_bytes()),
    );
    format!("{name:08x}-0000-4000-8000-0000{kind:08x}")
}

/// A test's claim as the kubelet knows it.
pub(crate) fn claim(name: &str) -> Claim {
    Claim::new(NAMESPACE, name, &claim_uid(name), DRIVER)
}

impl World {
    /// A counted pod is bound and admitted, and runs.
    pub(crate) async fn run_counted(&self, name: &str, gpus: u32) {
        let admitted = self.admit_counted(name, gpus).await;
        admitted.unwrap_or_else(|rejection| panic!("{name}: {rejection:?}"));
        self.runs(name).await;
    }

    /// The containers of a pod that was admitted start.
    pub(crate) async fn runs(&self, name: &str) {
        self.kubelet().run(&pod_uid(name)).await.unwrap();
        let running = json!({"status": {"phase": "Running"}});
        self.api.patch("pods", NAMESPACE, name, &running);
    }

    /// A counted pod is bound, and not yet with the kubelet.
    pub(crate) fn bind_counted(&self, name: &str, gpus: u32) {
        let resources = json!({RESOURCE: gpus.to_string()});
        self.api.put(
            "pods",
            json!({
                "metadata": {"name": name, "namespace": NAMESPACE, "uid": pod_uid(name)},
                "spec": {"nodeName": NODE, "containers": [{
                    "name": "main", "image": "any",
                    "resources": {"limits": resources, "requests": resources}}]},
                "status": {"phase": "Pending"},
            }),
        );
    }

    /// A counted pod is bound, and the kubelet admits it or not.
    pub(crate) async fn admit_counted(&self, name: &str, gpus: u32) -> Result<(), Rejection> {
        self.bind_counted(name, gpus);
        let admitted = self.admit_unseen(name, gpus).await;
        if let Err(rejection) = &admitted {
            let failed = json!({"status": {"phase": "Failed", "message": rejection.message}});
            self.api.patch("pods", NAMESPACE, name, &failed);
        }
        admitted
    }

    /// The kubelet admits a counted pod that the API server does not show, or not.
    pub(crate) async fn admit_unseen(&self, name: &str, gpus: u32) -> Result<(), Rejection> {
        let pod = Pod::new(NAMESPACE, name, &pod_uid(name)).app("main", RESOURCE, gpus);
        self.kubelet().admit(pod).await
    }

    /// The ids that the kubelet has given to a counted pod.
    pub(crate) fn ids(&self, pod: &str) -> Vec<String> {
        let ids = self.kubelet().devices(&pod_uid(pod), "main", RESOURCE);
        ids.into_iter().collect()
    }

    /// The CDI names that a counted pod's container got.
    pub(crate) fn counted_devices(&self, pod: &str) -> Vec<String> {
        let answer = self.kubelet().answer(&pod_uid(pod), "main", RESOURCE);
        let devices = answer.map(|it| it.cdi_devices).unwrap_or_default();
        devices.into_iter().map(|it| it.name).collect()
    }

    /// A claim is allocated to a device and reserved for a pod, as a scheduler does it, or nobody would.
    pub(crate) fn allocate_claim(&self, name: &str, device: &str, pod: &str) -> Value {
        let claim = json!({
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": claim_uid(name)},
            "spec": {"devices": {"requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}]}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": pod_uid(pod)}],
            },
        });
        self.api.put("resourceclaims", claim)
    }

    /// A pod that uses a claim of its own name is bound and admitted.
    pub(crate) async fn admit_claimant(&self, name: &str) {
        self.api.put(
            "pods",
            json!({
                "metadata": {"name": name, "namespace": NAMESPACE, "uid": pod_uid(name)},
                "spec": {"nodeName": NODE,
                    "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                    "containers": [{"name": "main", "image": "any",
                        "resources": {"claims": [{"name": "gpu"}]}}]},
                "status": {"phase": "Pending"},
            }),
        );
        let pod = Pod::new(NAMESPACE, name, &pod_uid(name)).app("main", RESOURCE, 0);
        self.kubelet().admit(pod).await.unwrap();
    }

    /// The kubelet prepares the claim of such a pod.
    pub(crate) async fn prepare(&self, name: &str) -> Result<(), String> {
        self.kubelet().prepare(&pod_uid(name), &[claim(name)]).await
    }

    /// A pod with a claim, allocated to that device, runs.
    pub(crate) async fn run_claimant(&self, name: &str, device: &str) {
        self.allocate_claim(name, device, name);
        self.admit_claimant(name).await;
        let prepared = self.prepare(name).await;
        prepared.unwrap_or_else(|error| panic!("{name}: {error}"));
        self.runs(name).await;
    }

    /// A pod is deleted and ends well, and its claim with it.
    pub(crate) async fn end_pod(&self, name: &str) {
        let ended = self.kubelet().terminate(&pod_uid(name)).await;
        ended.unwrap_or_else(|error| panic!("{name}: {error}"));
        self.api.delete("pods", NAMESPACE, name);
        if self.api.get("resourceclaims", NAMESPACE, name).is_some() {
            self.api.delete("resourceclaims", NAMESPACE, name);
        }
    }
}

// --- Calls and processes that a test makes by itself ---

impl World {
    /// Calls the daemon's `Allocate` for one container: CDI names, or code and text of the refusal.
    pub(crate) async fn allocate(&self, ids: &[&str]) -> Result<Vec<String>, String> {
        let socket = self.device_plugin_socket().ok_or("no socket")?;
        Plugin::at(&socket).allocate(ids).await
    }

    /// A connection to the daemon's device plugin, which serves.
    pub(crate) fn plugin(&self) -> Plugin {
        Plugin::at(&self.device_plugin_socket().expect("the plugin serves"))
    }

    /// A connection to the daemon's DRA driver.
    pub(crate) fn driver(&self) -> Driver {
        Driver::at(&self.path("k/plugins").join(DRIVER).join("dra.sock"))
    }

    /// The newest socket of our device plugin.
    pub(crate) fn device_plugin_socket(&self) -> Option<PathBuf> {
        let entries = fs::read_dir(self.device_plugin_dir()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let ours = paths.filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("gpu-bridge-"))
        });
        ours.max_by_key(|path| path.symlink_metadata().and_then(|it| it.modified()).ok())
    }

    /// A process of a pod starts to compute on a GPU.
    pub(crate) fn start_process(&self, gpu: &str, pid: u32, pod: &str) {
        self.show_process(pid, pod);
        self.node.add_process(gpu, pid).unwrap();
    }

    /// The process of this test is one of a pod that is bound here, as far as the node's procfs says.
    pub(crate) fn own_process_is_of(&self, pod: &str) {
        self.show_process(std::process::id(), &pod_uid(pod));
        let metadata = json!({"name": pod, "namespace": NAMESPACE, "uid": pod_uid(pod)});
        let spec = json!({"nodeName": NODE, "containers": [{"name": "main", "image": "any"}]});
        let status = json!({"phase": "Running"});
        let pod = json!({"metadata": metadata, "spec": spec, "status": status});
        self.api.put("pods", pod);
    }

    fn show_process(&self, pid: u32, pod: &str) {
        let folder = self.node.proc_root().join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        let cgroup = format!("0::/kubepods/besteffort/pod{pod}/app\n");
        fs::write(folder.join("cgroup"), cgroup).unwrap();
        fs::write(folder.join("comm"), "python\n").unwrap();
    }

    /// It ends.
    pub(crate) fn end_process(&self, gpu: &str, pid: u32) {
        self.node.remove_process(gpu, pid).unwrap();
        fs::remove_dir_all(self.node.proc_root().join(pid.to_string())).unwrap();
    }
}
