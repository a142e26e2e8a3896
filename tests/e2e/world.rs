//! One cluster, one fake node, one daemon, for one test. All of it ends with the value.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_nvml::{FakeNode, Scenario};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tempfile::TempDir;

use crate::http;
use crate::record::Record;
use crate::versions;

/// A cluster on two busy cores.
const CLUSTER_LIMIT: Duration = Duration::from_secs(120);
/// Start of the daemon until it is ready, real kubelet included (it looks at its folders once a second).
const READY_LIMIT: Duration = Duration::from_secs(30);
/// The daemon's own user, as the API server knows it.
pub const DAEMON_USER: &str = "system:serviceaccount:gpu-bridge:gpu-bridge";
/// Namespace and name of the ConfigMap that `manifests/components/config-map` gives the right to.
pub const MAP: &str = "gpu-bridge";
/// The node that every cluster has.
const FIRST_NODE: &str = "node-0";
/// What `cluster up` answers on a machine that can't run one.
const SKIPPED: i32 = 77;

/// What runs the containers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    /// The runtime that runs nothing and records everything.
    Fake,
    /// containerd and runc: real containers, no record, nothing in the fake NVML. Needs root.
    Containerd,
}

/// How a world is made.
pub struct Setup {
    /// What runs the containers.
    pub runtime: Runtime,
    /// The fake node.
    pub scenario: Scenario,
    /// The daemon's configuration file.
    pub config: String,
    /// Flags of `cluster up`.
    pub cluster_flags: Vec<String>,
    /// Whether the daemon is in a pod, so that the next pod's can follow it.
    pub in_pods: bool,
    /// Whether the daemon reads its configuration from the API server, from the ConfigMap [`MAP`].
    pub by_map: bool,
}

impl Setup {
    /// A fixed split of as many GPUs as both faces have together.
    pub fn split(legacy: u32, dra: u32) -> Self {
        Self {
            runtime: Runtime::Fake,
            scenario: Scenario::h100(legacy + dra),
            config: format!(
                "apiVersion: gpu-bridge.dev/v1alpha1\nmode: both\nlimits:\n  legacy: {legacy}\n  dra: {dra}\n"
            ),
            cluster_flags: Vec::new(),
            in_pods: false,
            by_map: false,
        }
    }

    /// So many GPUs that both kinds of pods draw from.
    pub fn shared(gpus: u32) -> Self {
        Self {
            runtime: Runtime::Fake,
            scenario: Scenario::h100(gpus),
            config: "apiVersion: gpu-bridge.dev/v1alpha1\nmode: both\n".to_owned(),
            cluster_flags: Vec::new(),
            in_pods: false,
            by_map: false,
        }
    }

    /// As [`shared`](Self::shared), with more lines of `offers` in the configuration.
    pub fn offering(gpus: u32, offers: &[&str]) -> Self {
        let mut setup = Self::shared(gpus);
        setup.config.push_str("offers:\n");
        for line in offers {
            setup.config.push_str(&format!("  {line}\n"));
        }
        setup
    }

    /// On a node of a scenario, given as YAML.
    pub fn on(mut self, scenario: &str) -> Self {
        let parsed = Scenario::parse(Path::new("scenario.yaml"), scenario);
        self.scenario = parsed.expect("a scenario");
        self
    }

    /// With a file of `manifests/` applied besides what every world has.
    pub fn applying(mut self, file: &str) -> Self {
        let file = repository().join("manifests").join(file);
        self.cluster_flags
            .push(format!("--apply={}", file.display()));
        self
    }

    /// On containerd and runc; pods must name its one image.
    pub fn on_containerd(mut self) -> Self {
        self.runtime = Runtime::Containerd;
        self.cluster_flags.push("--runtime=containerd".to_owned());
        self
    }

    /// With a daemon that knows its pod, so that [`begin_update`](World::begin_update) is possible.
    pub fn in_pods(mut self) -> Self {
        self.in_pods = true;
        self
    }

    /// With a daemon that reads the ConfigMap at the API server, which the test has to make.
    pub fn by_map(mut self) -> Self {
        self.by_map = true;
        self
    }

    /// With room for more nodes, which [`join`](World::join) adds.
    pub fn with_members(mut self, names: &[&str]) -> Self {
        let members = names.iter().map(|name| format!("--member={name}"));
        self.cluster_flags.extend(members);
        self
    }

    /// With a label of the Node.
    pub fn labelled(mut self, label: &str, value: &str) -> Self {
        let flag = format!("--kubelet-flag=--node-labels={label}={value}");
        self.cluster_flags.push(flag);
        self
    }

    /// With a kubelet that comes back to failed pods after 2 s, not after 77 to 89 s.
    pub fn impatient(mut self) -> Self {
        self.cluster_flags
            .push("--kubelet-config=syncFrequency: 2s".to_owned());
        self
    }
}

/// Everything a test needs.
pub struct World {
    pub client: Client,
    pub node: FakeNode,
    pub daemon: Option<Daemon>,
    /// In an update the daemon of the pod before.
    former: Option<Daemon>,
    /// The number of the daemon's pod; `None`: it is in none.
    pod: Option<u32>,
    name: String,
    cluster: Child,
    runtime: Runtime,
    config: PathBuf,
    by_map: bool,
    http: String,
    dir: TempDir,
}

/// The daemon under test.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Sends it a signal, by its name without SIG.
    fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([format!("-{signal}"), self.child.id().to_string()])
            .status()
            .expect("a signal can be sent");
        assert!(sent.success(), "{signal} was not sent");
    }

    /// Whether it has ended, and well.
    fn has_ended(&mut self) -> bool {
        let Some(status) = self.child.try_wait().expect("its state can be asked") else {
            return false;
        };
        assert!(status.success(), "the daemon ended with {status}");
        true
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.daemon = None;
        self.former = None;
        let _ = self.cluster.kill();
        let _ = self.cluster.wait();
        if std::thread::panicking() {
            self.tell_what_happened();
        }
    }
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn manifest(name: &str) -> PathBuf {
    repository().join("manifests/base").join(name)
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    listener.local_addr().expect("it is bound").port()
}

impl World {
    /// Cluster, node and daemon, ready. `None` on a machine that can't run a cluster.
    pub async fn start(setup: Setup) -> Option<Self> {
        let mut world = Self::without_daemon(setup).await?;
        world.start_daemon().await;
        Some(world)
    }

    /// As [`start`](Self::start), without the daemon.
    pub async fn without_daemon(mut setup: Setup) -> Option<Self> {
        let base = ["rbac.yaml", "admission.yaml", "admission-node.yaml"].map(manifest);
        let base = base.map(|file| format!("--apply={}", file.display()));
        // What the test applies may be another form of one of these.
        setup.cluster_flags.splice(0..0, base);
        let world = Self::on_node(FIRST_NODE, setup).await?;
        world.create_class().await;
        Some(world)
    }

    /// One more node of the cluster, without a daemon; its name must be known
    /// [from the start](Setup::with_members). The cluster's audit log is that of its first node.
    pub async fn join(&self, name: &str, mut setup: Setup) -> Option<Self> {
        let flag = format!("--join={}", self.state().display());
        setup.cluster_flags.push(flag);
        Self::on_node(name, setup).await
    }

    async fn on_node(name: &str, setup: Setup) -> Option<Self> {
        let dir = tempfile::Builder::new()
            .prefix("gb")
            .tempdir()
            .expect("a temporary folder");
        let node =
            FakeNode::create(&dir.path().join("node"), &setup.scenario).expect("a fake node");
        let config = dir.path().join("config.yaml");
        fs::write(&config, &setup.config).expect("the configuration is written");
        write_gpu_table(&node, &dir.path().join("gpus.json"));
        let cluster = start_cluster(dir.path(), name, &node, &setup.cluster_flags)?;
        let client = client(&dir.path().join("c/admin.kubeconfig")).await;
        let http = format!("127.0.0.1:{}", free_port());
        Some(Self {
            client,
            node,
            daemon: None,
            former: None,
            pod: setup.in_pods.then_some(0),
            name: name.to_owned(),
            cluster,
            runtime: setup.runtime,
            config,
            by_map: setup.by_map,
            http,
            dir,
        })
    }

    /// The name of the Node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder of the cluster.
    pub fn state(&self) -> PathBuf {
        self.dir.path().join("c")
    }

    /// The folder with `dev/nvidia*` in it: real containers need real device nodes, which the cluster makes.
    fn dev_root(&self) -> PathBuf {
        match self.runtime {
            Runtime::Fake => self.node.folder().to_owned(),
            Runtime::Containerd => self.state(),
        }
    }

    /// The folder of the daemon's ledger.
    pub fn ledger_dir(&self) -> PathBuf {
        self.state().join("kubelet/plugins/gpu.nvidia.com")
    }

    /// Starts the daemon and waits until it is ready.
    pub async fn start_daemon(&mut self) {
        self.spawn_daemon();
        self.wait_ready().await;
    }

    /// Starts the daemon.
    pub fn spawn_daemon(&mut self) {
        let mut command = self.verb_of_daemon("run");
        command.env("GPU_BRIDGE_LOG", "info,gpu_bridge=debug");
        self.spawn(command);
    }

    /// What `gpu-bridge doctor` says with the flags and the credentials of the daemon.
    pub fn doctor(&self) -> String {
        let output = self.verb_of_daemon("doctor").stdin(Stdio::null()).output();
        let page = output.expect("the doctor starts").stdout;
        // However its lines are broken.
        let page = String::from_utf8_lossy(&page);
        page.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn verb_of_daemon(&self, verb: &str) -> Command {
        let state = self.state();
        let dir = |name: &str| state.join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-bridge"));
        command
            .arg(verb)
            .args(["--node-name", &self.name, "--http-addr", &self.http])
            .arg("--kubelet-dir")
            .arg(dir("kubelet"))
            .arg("--device-plugin-dir")
            .arg(dir("kubelet/device-plugins"))
            .arg("--cdi-dir")
            .arg(dir("cdi"))
            .arg("--proc-root")
            .arg(dir("proc"))
            .arg("--kubeconfig")
            .arg(dir("gpu-bridge.kubeconfig"))
            .arg("--nvml-library")
            .arg(self.node.library())
            .arg("--sys-root")
            .arg(self.node.sys_root())
            .arg("--dev-root")
            .arg(self.dev_root())
            .args(self.config_flag())
            .args(self.pod_flag());
        command
    }

    /// Starts the daemon by a command line that is not the tests' own, and that has it serve HTTP at this address.
    pub fn run_daemon(&mut self, command: Command, http: &str) {
        http.clone_into(&mut self.http);
        self.spawn(command);
    }

    fn spawn(&mut self, mut command: Command) {
        assert!(self.daemon.is_none(), "one daemon at a time");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("daemon.log"))
            .expect("the daemon's log");
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the daemon starts");
        self.daemon = Some(Daemon { child });
    }

    /// Kills the daemon with SIGKILL.
    pub fn kill_daemon(&mut self) {
        self.daemon = None;
    }

    fn config_flag(&self) -> [OsString; 2] {
        if self.by_map {
            ["--config-map".into(), format!("{MAP}/{MAP}").into()]
        } else {
            ["--config".into(), self.config.clone().into()]
        }
    }

    fn pod_flag(&self) -> Vec<String> {
        let uid = |pod: u32| format!("dae30000-0000-4000-8000-{pod:012}");
        let flag = self.pod.map(|pod| ["--pod-uid".to_owned(), uid(pod)]);
        flag.into_iter().flatten().collect()
    }

    /// Starts the daemon of the next pod beside the one that runs, as a DaemonSet with `maxSurge: 1` does.
    pub fn begin_update(&mut self) {
        assert!(self.former.is_none(), "one update at a time");
        self.former = self.daemon.take();
        assert!(self.former.is_some(), "a daemon was started");
        *self.pod.as_mut().expect("the daemon is in a pod") += 1;
        self.spawn_daemon();
    }

    /// What the readiness probe of the newest pod says.
    pub fn probe(&self) -> bool {
        let probed = Command::new(env!("CARGO_BIN_EXE_gpu-bridge"))
            .args(["probe", "readyz", "--state-dir"])
            .arg(self.ledger_dir())
            .args(self.pod_flag())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        probed.expect("the probe starts").success()
    }

    /// Tells the daemon before the newest to stop, as the DaemonSet does once the new pod is ready.
    pub fn end_former(&self) {
        let former = self.former.as_ref().expect("an update has begun");
        former.signal("TERM");
    }

    /// Whether it has.
    pub fn former_has_left(&mut self) -> bool {
        let former = self.former.as_mut().expect("an update has begun");
        let has_ended = former.has_ended();
        if has_ended {
            self.former = None;
        }
        has_ended
    }

    /// Sends the daemon a signal, by its name without SIG.
    pub fn signal_daemon(&self, signal: &str) {
        let daemon = self.daemon.as_ref().expect("the daemon was started");
        daemon.signal(signal);
    }

    /// Tells the daemon to stop and waits until it has.
    pub fn terminate_daemon(&mut self) {
        self.signal_daemon("TERM");
        let mut daemon = self.daemon.take().expect("the daemon was started");
        let status = daemon.child.wait().expect("it ends");
        assert!(status.success(), "the daemon ended with {status}");
    }

    /// Whether a daemon that was told to stop has stopped; then another one may be started.
    pub fn has_left(&mut self) -> bool {
        let daemon = self.daemon.as_mut().expect("the daemon was started");
        let has_ended = daemon.has_ended();
        if has_ended {
            self.daemon = None;
        }
        has_ended
    }

    /// Waits until /readyz says yes.
    pub async fn wait_ready(&mut self) {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            if self.is_ready().await {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "the daemon was not ready in time: {:?}",
                self.get("/readyz").await
            );
            tick().await;
        }
    }

    /// Whether /readyz says yes. A daemon that has ended fails the test.
    pub async fn is_ready(&mut self) -> bool {
        if let Some((200, _)) = self.get("/readyz").await {
            return true;
        }
        let daemon = self.daemon.as_mut().expect("the daemon was started");
        if let Some(status) = daemon.child.try_wait().expect("its state can be asked") {
            panic!("the daemon ended with {status}");
        }
        false
    }

    /// Status code and body of the daemon's HTTP server; `None` if it does not answer.
    pub async fn get(&self, path: &str) -> Option<(u16, String)> {
        let stream = tokio::net::TcpStream::connect(&self.http).await.ok()?;
        http::ask(stream, &format!("GET {path}"), "").await
    }

    /// The daemon's /status.
    pub async fn status(&self) -> serde_json::Value {
        let (code, body) = self.get("/status").await.expect("/status answers");
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).expect("/status is JSON")
    }

    /// How many units have a hold.
    pub async fn held(&self) -> usize {
        let status = self.status().await;
        let units = status["units"]
            .as_array()
            .expect("/status has units")
            .clone();
        units
            .iter()
            .filter(|unit| {
                unit["holds"]
                    .as_array()
                    .is_some_and(|holds| !holds.is_empty())
            })
            .count()
    }

    /// Waits until nothing is held any more: nothing leaked.
    pub async fn wait_all_free(&self) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while self.held().await > 0 {
            assert!(
                Instant::now() < deadline,
                "holds are left over: {:#}",
                self.status().await["units"]
            );
            tick().await;
        }
    }

    /// Writes another configuration: what follows the `apiVersion`.
    pub fn configure(&self, rest: &str) {
        let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\n{rest}");
        fs::write(&self.config, text).expect("the configuration is written");
    }

    /// What the runtime recorded so far.
    pub fn record(&self) -> Record {
        Record::read(&self.state().join("cri.jsonl"))
    }

    /// The daemon's log so far.
    pub fn daemon_log(&self) -> String {
        fs::read_to_string(self.dir.path().join("daemon.log")).unwrap_or_default()
    }

    /// What the API server refused to the daemon's own user: a right that the manifests should give.
    pub fn forbidden(&self) -> Vec<String> {
        self.requests(|event| event["responseStatus"]["code"] == 403)
    }

    /// What the daemon's own user has written so far.
    pub fn writes(&self) -> Vec<String> {
        self.requests(|event| {
            let verb = event["verb"].as_str().unwrap_or_default();
            ["create", "update", "patch", "delete"].contains(&verb)
        })
    }

    /// The requests of the daemon's own user in the audit log, as far as they are of a kind.
    pub fn requests(&self, is_meant: impl Fn(&serde_json::Value) -> bool) -> Vec<String> {
        let audit = fs::read_to_string(self.state().join("audit.log")).unwrap_or_default();
        let complete = audit.rfind('\n').map_or("", |end| &audit[..end]);
        complete
            .lines()
            .map(|line| serde_json::from_str(line).expect("the audit log has JSON lines"))
            .filter(|event: &serde_json::Value| {
                event["user"]["username"] == DAEMON_USER && is_meant(event)
            })
            .map(|event| format!("{} {}", event["verb"], event["requestURI"]))
            .collect()
    }

    /// Applies a file of `manifests/` as admin.
    pub fn apply(&self, file: &str) {
        let output = versions::cluster("apply")
            .arg(self.state())
            .arg(repository().join("manifests").join(file))
            .output()
            .expect("the runner can be asked");
        assert!(
            output.status.success(),
            "{file}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// Sends a command to the cluster's runner and waits until it is done.
    pub fn control(&self, command: &str) {
        let asked = self.begin_control(command);
        let output = asked.wait_with_output().expect("the runner can be asked");
        assert!(
            output.status.success(),
            "{command}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// Starts an API server again that was stopped, and with it those that by themselves come back to it only after half
    /// a minute or more. Where they were not cut off they go on at once, on what they knew before.
    pub fn bring_api_server_back(&self) {
        self.control("start kube-apiserver");
        self.control("restart kube-scheduler KILL");
        self.control("restart kube-controller-manager KILL");
    }

    /// Sends a command to the cluster's runner; the child ends when it is done.
    pub fn begin_control(&self, command: &str) -> Child {
        versions::cluster("control")
            .arg(self.state())
            .args(command.split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the runner can be asked")
    }

    fn tell_what_happened(&self) {
        /// Enough of the log to see the reason.
        const TAIL: usize = 60;
        let log = self.daemon_log();
        let lines: Vec<_> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        eprintln!("--- the end of the daemon's log ---\n{}", tail.join("\n"));
        if let Some(kept) = std::env::var_os("E2E_KEEP") {
            self.keep(Path::new(&kept));
        }
    }

    /// Copies everything, logs and records among it, into a folder.
    pub fn keep(&self, folder: &Path) {
        let name = self.dir.path().file_name();
        let kept = folder.join(name.expect("a temporary folder has a name"));
        let _ = Command::new("cp")
            .arg("-r")
            .arg(self.dir.path())
            .arg(&kept)
            .status();
        eprintln!("--- everything is kept in {} ---", kept.display());
    }
}

/// The pace of waiting: short beside every deadline, long beside a request.
pub async fn tick() {
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn write_gpu_table(node: &FakeNode, file: &Path) {
    let table: Vec<_> = node
        .gpus()
        .iter()
        .map(|gpu| serde_json::json!({"minor": gpu.minor, "uuid": gpu.uuid}))
        .collect();
    fs::write(file, serde_json::to_vec(&table).expect("a table is JSON"))
        .expect("the table is written");
}

fn start_cluster(dir: &Path, name: &str, node: &FakeNode, flags: &[String]) -> Option<Child> {
    let state = dir.join("c");
    fs::create_dir(&state).expect("the folder of the cluster");
    let log = File::create(dir.join("cluster.log")).expect("the cluster's log");
    let mut cluster = versions::cluster("up")
        .arg(&state)
        .arg("--gpus")
        .arg(dir.join("gpus.json"))
        .arg("--nvml-state")
        .arg(node.state_dir())
        .args(["--node", name])
        .args(flags)
        // The kubelet's log has the local time.
        .env("TZ", "UTC")
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the log can be shared"))
        .stderr(log)
        .spawn()
        .expect("the cluster's runner starts");
    let deadline = Instant::now() + CLUSTER_LIMIT;
    while !state.join("ready").exists() {
        let said = || fs::read_to_string(dir.join("cluster.log")).unwrap_or_default();
        if let Some(status) = cluster.try_wait().expect("its state can be asked") {
            if status.code() == Some(SKIPPED) {
                eprintln!("SKIPPED: this machine cannot run a cluster: {}", said());
                return None;
            }
            panic!("the cluster ended with {status}: {}", said());
        }
        assert!(
            Instant::now() < deadline,
            "the cluster was not ready in time: {}",
            said()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(cluster)
}

/// A client with the credentials of a kubeconfig.
pub async fn client(kubeconfig: &Path) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).expect("the admin's kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .expect("the admin's kubeconfig is complete");
    Client::try_from(config).expect("a client")
}
