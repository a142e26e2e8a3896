//! A node without Kubernetes: folders, eight fake GPUs, an API server, a kubelet, and the daemon as a process.
//!
//! What else a cluster has is played here: the two schedulers, and the controller that evicts pods from tainted devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use fake_nvml::{FakeNode, Scenario};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{ApiServer, Claim, Kubelet, Pod};

/// GPUs of the node.
pub(crate) const GPUS: usize = 8;
/// Name of the node, which is the DRA pool too.
const NODE: &str = "node-0";
/// Where all pods are.
const NAMESPACE: &str = "train";
/// What counted pods ask for.
const RESOURCE: &str = "nvidia.com/gpu";
/// What claims are served by.
const DRIVER: &str = "gpu.nvidia.com";
/// Far more than any state here takes, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a state is looked at. Each look may start a program.
const TICK: Duration = Duration::from_millis(50);
/// How much of the daemon's log is told when something is not as it should be.
const LOG_LINES: usize = 12;

/// One node. All of it ends with the value.
pub(crate) struct Node {
    program: PathBuf,
    api: ApiServer,
    kubelet: Kubelet,
    driver: FakeNode,
    daemon: Option<Child>,
    dir: TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.kill();
    }
}

/// Waits until something is so.
pub(crate) async fn until(
    what: &str,
    mut is_so: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let last = match is_so().await {
            Ok(true) => return Ok(()),
            Ok(false) => None,
            Err(error) => Some(error),
        };
        if started.elapsed() > PATIENCE {
            let why = last.map(|it| format!(": {it:#}")).unwrap_or_default();
            bail!("waited {} s in vain until {what}{why}", PATIENCE.as_secs());
        }
        tokio::time::sleep(TICK).await;
    }
}

// --- The node and its daemon ---

impl Node {
    /// A node on which the kubelet runs, and no daemon yet.
    pub(crate) async fn new(program: &Path) -> anyhow::Result<Self> {
        ensure!(
            program.is_file(),
            "there is no {}: build it with `cargo build -p gpu-bridge`",
            program.display()
        );
        let dir = tempfile::Builder::new().prefix("gb").tempdir()?;
        let gpus = u32::try_from(GPUS).context("a number of GPUs")?;
        let driver = FakeNode::create(&dir.path().join("node"), &Scenario::h100(gpus))?;
        let boot = driver.proc_root().join("sys/kernel/random");
        fs::create_dir_all(&boot)?;
        fs::write(
            boot.join("boot_id"),
            "6c5b3b0a-0000-4000-8000-000000000001\n",
        )?;
        let api = ApiServer::start().await?;
        api.put("nodes", json!({"metadata": {"name": NODE}}));
        api.kubeconfig(&dir.path().join("kubeconfig"));
        let kubelet = Kubelet::start(&dir.path().join("k")).await?;
        Ok(Self {
            program: program.to_owned(),
            api,
            kubelet,
            driver,
            daemon: None,
            dir,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the configuration file, as an editor does.
    pub(crate) fn configure(&self, mode: &str) -> anyhow::Result<()> {
        let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\nmode: {mode}\n");
        Ok(fs::write(self.path("config.yaml"), text)?)
    }

    /// `gpu-bridge` in an environment that has nothing to say.
    fn gpu_bridge(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().stdin(Stdio::null());
        command
    }

    /// Starts `gpu-bridge run`.
    pub(crate) fn start(&mut self) -> anyhow::Result<()> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))?;
        let mut command = self.gpu_bridge();
        command.args(["run", "--node-name", NODE, "--http-addr", "127.0.0.1:0"]);
        for (flag, path) in [
            ("--kubelet-dir", self.path("k")),
            ("--device-plugin-dir", self.path("k/device-plugins")),
            ("--cdi-dir", self.path("cdi")),
            ("--state-dir", self.path("state")),
            ("--admin-socket", self.path("admin.sock")),
            ("--kubeconfig", self.path("kubeconfig")),
            ("--config", self.path("config.yaml")),
            ("--nvml-library", self.driver.library()),
            ("--sys-root", self.driver.sys_root()),
            ("--proc-root", self.driver.proc_root()),
            ("--driver-root", self.driver.folder().to_owned()),
            ("--dev-root", self.driver.folder().to_owned()),
        ] {
            command.arg(flag).arg(path);
        }
        let child = command.stdout(Stdio::null()).stderr(log).spawn();
        let started = child.with_context(|| format!("{} starts", self.program.display()))?;
        self.daemon = Some(started);
        Ok(())
    }

    /// The process id of the daemon.
    pub(crate) fn pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, Child::id)
    }

    /// `kill -9` of the daemon, by its process id.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill()?;
            daemon.wait()?;
        }
        Ok(())
    }

    /// Waits until the daemon calls itself ready.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let mut ended = None;
        until("the daemon is ready", async || {
            ended = match &mut self.daemon {
                Some(daemon) => daemon.try_wait()?,
                None => bail!("no daemon was started"),
            };
            Ok(ended.is_some() || self.ask(&["probe", "readyz"])?.status.success())
        })
        .await?;
        match ended {
            Some(status) => bail!("the daemon is ready; it has ended: {status}"),
            None => Ok(()),
        }
    }

    /// The last lines of the daemon's log.
    pub(crate) fn log(&self) -> String {
        let text = fs::read_to_string(self.path("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    // --- What the daemon says ---

    /// Runs a verb of `gpu-bridge` that asks the daemon.
    fn ask(&self, verb: &[&str]) -> anyhow::Result<Output> {
        let mut command = self.gpu_bridge();
        command
            .args(verb)
            .arg("--admin-socket")
            .arg(self.path("admin.sock"));
        Ok(command.output()?)
    }

    /// What `gpu-bridge status` prints.
    pub(crate) fn table(&self) -> anyhow::Result<String> {
        let output = self.ask(&["status"])?;
        ensure!(output.status.success(), "`gpu-bridge status` failed");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Whether a daemon answers.
    pub(crate) fn answers(&self) -> anyhow::Result<bool> {
        Ok(self.ask(&["status"])?.status.success())
    }

    /// `gpu-bridge status -o json`.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        let output = self.ask(&["status", "-o", "json"])?;
        ensure!(output.status.success(), "`gpu-bridge status` failed");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Every hold: UUID, phase, holder, since when.
    pub(crate) fn holds(&self) -> anyhow::Result<Vec<[String; 4]>> {
        let status = self.status()?;
        let units = status["units"].as_array().context("units in the status")?;
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let holds = units.iter().flat_map(|unit| {
            let holds = unit["holds"].as_array().into_iter().flatten();
            holds.map(|hold| {
                let pod = hold["pod"]["name"].as_str();
                let holder = pod.or_else(|| hold["claim"]["name"].as_str());
                [
                    text(&unit["unit"]),
                    text(&hold["phase"]),
                    holder.unwrap_or("-").to_owned(),
                    text(&hold["since"]),
                ]
            })
        });
        Ok(holds.collect())
    }

    /// The GPU that a pod or claim of this name holds.
    pub(crate) fn unit_of(&self, holder: &str) -> anyhow::Result<String> {
        let holds = self.holds()?;
        let found = holds.into_iter().find(|[_, _, by, _]| by == holder);
        let [unit, ..] = found.with_context(|| format!("{holder} holds a GPU"))?;
        Ok(unit)
    }

    /// The device name of a GPU.
    pub(crate) fn device_of(&self, unit: &str) -> anyhow::Result<String> {
        let status = self.status()?;
        let units = status["units"].as_array().into_iter().flatten();
        let mut found = units.filter(|it| it["unit"] == unit);
        let found = found.next().and_then(|it| it["device"].as_str());
        Ok(found.with_context(|| format!("{unit} has a name"))?.into())
    }

    // --- What the cluster sees ---

    /// The count in the Node's status, which the scheduler of counted pods goes by.
    pub(crate) fn count(&self) -> Option<usize> {
        let node = self.api.get("nodes", "", NODE)?;
        let count = node["status"]["allocatable"][RESOURCE].as_str()?;
        count.parse().ok()
    }

    /// Healthy ids at the kubelet.
    pub(crate) fn healthy(&self) -> usize {
        self.kubelet.healthy(RESOURCE).len()
    }

    /// Our taint on each device of the slice, by name: its effect, if it has one.
    fn taints(&self) -> BTreeMap<String, Option<String>> {
        let slices = self.api.list("resourceslices");
        let devices = slices
            .iter()
            .filter_map(|it| it["spec"]["devices"].as_array())
            .flatten();
        let taint = |device: &Value| {
            let taints = device["taints"].as_array().into_iter().flatten();
            let mut ours = taints.filter(|it| it["key"] == "gpu-bridge.dev/unit");
            let effect = ours.next().map(|it| it["effect"].clone());
            let name = device["name"].as_str().unwrap_or_default().to_owned();
            (name, effect.and_then(|it| it.as_str().map(str::to_owned)))
        };
        devices.map(taint).collect()
    }

    /// The effect of our taint on a device.
    pub(crate) fn taint_effect(&self, device: &str) -> Option<String> {
        self.taints().remove(device).flatten()
    }

    /// Devices without a taint that no claim is allocated, which the allocator of claims would choose from.
    pub(crate) fn open_devices(&self) -> Vec<String> {
        let claims = self.api.list("resourceclaims");
        let taken: BTreeSet<&str> = claims
            .iter()
            .filter_map(|it| it["status"]["allocation"]["devices"]["results"][0]["device"].as_str())
            .collect();
        let open = self.taints().into_iter().filter(|(_, it)| it.is_none());
        let open = open.map(|(name, _)| name);
        open.filter(|name| !taken.contains(name.as_str())).collect()
    }

    /// The device files that a pod's container gets: the names that the kubelet passes on, looked up in the CDI files as
    /// a container runtime does.
    pub(crate) fn device_files(&self, pod: &str) -> anyhow::Result<BTreeSet<String>> {
        let uid = uid("pods", pod);
        let counted = self.kubelet.answer(&uid, "main", RESOURCE);
        let counted = counted.into_iter().flat_map(|it| it.cdi_devices);
        let mut names: Vec<String> = counted.map(|it| it.name).collect();
        names.extend(self.kubelet.cdi_devices(&claim(pod)));
        let mut files = BTreeSet::new();
        for entry in fs::read_dir(self.path("cdi"))? {
            let spec: Value = serde_json::from_slice(&fs::read(entry?.path())?)?;
            let kind = spec["kind"].as_str().unwrap_or_default();
            for device in spec["devices"].as_array().into_iter().flatten() {
                let name = format!("{kind}={}", device["name"].as_str().unwrap_or_default());
                if names.contains(&name) {
                    let nodes = device["containerEdits"]["deviceNodes"].as_array();
                    let paths = nodes.into_iter().flatten();
                    files.extend(paths.filter_map(|it| it["path"].as_str().map(str::to_owned)));
                }
            }
        }
        Ok(files)
    }
}

// --- Pods and claims ---

/// A UID in the form that the API server gives them.
fn uid(kind: &str, name: &str) -> String {
    let sum = |text: &str| {
        let step = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
    };
    let (name, kind) = (sum(name) & 0xffff_ffff, sum(kind) & 0xffff_ffff_ffff);
    format!("{name:08x}-0000-4000-8000-{kind:012x}")
}

fn claim(name: &str) -> Claim {
    Claim::new(NAMESPACE, name, &uid("claims", name), DRIVER)
}

impl Node {
    fn create_pod(&self, name: &str, mut spec: Value) {
        spec["nodeName"] = NODE.into();
        let metadata = json!({"name": name, "namespace": NAMESPACE, "uid": uid("pods", name)});
        let pod = json!({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}});
        self.api.put("pods", pod);
    }

    async fn containers_start(&self, name: &str) -> anyhow::Result<()> {
        let started = self.kubelet.run(&uid("pods", name)).await;
        started.map_err(|error| anyhow::anyhow!("{name} did not start: {error}"))?;
        let running = json!({"status": {"phase": "Running"}});
        self.api.patch("pods", NAMESPACE, name, &running);
        Ok(())
    }

    /// A pod with `nvidia.com/gpu: 1` is bound here, and runs.
    pub(crate) async fn run_counted(&self, name: &str) -> anyhow::Result<()> {
        until(
            &format!("the Node's count has room for {name}"),
            async || {
                let counted = self.api.list("pods").into_iter();
                let counted = counted.filter(|it| it["spec"]["resourceClaims"].is_null());
                Ok(self.count() > Some(counted.count()))
            },
        )
        .await?;
        let limits = json!({"limits": {RESOURCE: "1"}, "requests": {RESOURCE: "1"}});
        let container = json!({"name": "main", "image": "any", "resources": limits});
        self.create_pod(name, json!({"containers": [container]}));
        let pod = Pod::new(NAMESPACE, name, &uid("pods", name)).app("main", RESOURCE, 1);
        let admitted = self.kubelet.admit(pod).await;
        admitted.map_err(|it| anyhow::anyhow!("{name} failed: {}", it.message))?;
        self.containers_start(name).await
    }

    /// A pod with a claim of its own name comes, and the claim is allocated to this device, as a scheduler does it, or
    /// nobody would. The kubelet prepares it.
    ///
    /// # Errors
    ///
    /// The text of the pod's event.
    pub(crate) async fn prepare_claimant(&self, name: &str, device: &str) -> Result<(), String> {
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": DRIVER}});
        let result = json!({"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device});
        let pod = uid("pods", name);
        self.api.put(
            "resourceclaims",
            json!({
                "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid("claims", name)},
                "spec": {"devices": {"requests": [request]}},
                "status": {
                    "allocation": {"devices": {"results": [result]}},
                    "reservedFor": [{"resource": "pods", "name": name, "uid": pod}],
                },
            }),
        );
        let uses = json!({"claims": [{"name": "gpu"}]});
        let container = json!({"name": "main", "image": "any", "resources": uses});
        let claims = json!([{"name": "gpu", "resourceClaimName": name}]);
        self.create_pod(
            name,
            json!({"resourceClaims": claims, "containers": [container]}),
        );
        let admitted = Pod::new(NAMESPACE, name, &pod).app("main", RESOURCE, 0);
        let admitted = self.kubelet.admit(admitted).await;
        admitted.map_err(|it| it.message)?;
        self.kubelet.prepare(&pod, &[claim(name)]).await
    }

    /// A pod with a claim comes; the claim is allocated to a device that is open, or to this one once it is; it runs.
    pub(crate) async fn run_claimant(
        &self,
        name: &str,
        device: Option<&str>,
    ) -> anyhow::Result<()> {
        let fits = |open: &String| device.is_none_or(|device| open == device);
        let open = || self.open_devices().into_iter().find(fits);
        let what = format!("claims are offered {}", device.unwrap_or("a device"));
        until(&what, async || Ok(open().is_some())).await?;
        let device = open().with_context(|| format!("it stays so that {what}"))?;
        let prepared = self.prepare_claimant(name, &device).await;
        prepared.map_err(|error| anyhow::anyhow!("{name} was refused: {error}"))?;
        self.containers_start(name).await
    }

    /// A pod is deleted and ends well, and its claim with it.
    pub(crate) async fn end_pod(&self, name: &str) -> anyhow::Result<()> {
        let ended = self.kubelet.terminate(&uid("pods", name)).await;
        ended.map_err(|error| anyhow::anyhow!("{name} does not end: {error}"))?;
        self.api.delete("pods", NAMESPACE, name);
        if self.api.get("resourceclaims", NAMESPACE, name).is_some() {
            self.api.delete("resourceclaims", NAMESPACE, name);
        }
        Ok(())
    }

    /// The names of all pods of the node.
    pub(crate) fn pods(&self) -> Vec<String> {
        let pods = self.api.list("pods").into_iter();
        let name = |it: Value| it["metadata"]["name"].as_str().map(str::to_owned);
        pods.filter_map(name).collect()
    }
}
