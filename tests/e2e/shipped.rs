//! The daemon as the manifests ship it: what `kubectl apply -k` applies makes its pod, the real kubelet says what its
//! container is, and the real program runs in such a container, with the pod's own token.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fake_nvml::layout;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde::Deserialize as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::objects::PodSpec;
use crate::record::Config;
use crate::versions;
use crate::world::{Setup, World, repository};

/// Namespace, and name of everything in it.
pub const NAME: &str = "gpu-bridge";
/// Where the daemon serves HTTP if nobody says otherwise; the shipped pod does not.
pub const HTTP: &str = "127.0.0.1:9494";
/// From the DaemonSet until its container is asked for, and then until the daemon is ready, on two busy cores.
pub const STARTED: Duration = Duration::from_secs(60);
/// From a change of the ConfigMap until the node has it: a kubelet that looks every two seconds, and two busy cores.
const BROUGHT: Duration = Duration::from_secs(60);
/// The program in the container.
const PROGRAM: &str = "/image/gpu-bridge";

/// The folders of the host that the pod mounts, but for the kubelet's, and what a test has in their places.
pub fn stand_ins(world: &World) -> BTreeMap<&'static str, PathBuf> {
    let state = world.state();
    let library = world.node.library();
    let programs = state.join("programs");
    fs::create_dir_all(&programs).expect("the folder of programs");
    BTreeMap::from([
        ("/var/run/cdi", state.join("cdi")),
        ("/dev", world.node.dev_root()),
        ("/sys", world.node.sys_root()),
        ("/proc", state.join("proc")),
        (
            "/usr/lib/x86_64-linux-gnu",
            library.parent().expect("a file is in a folder").to_owned(),
        ),
        ("/usr/bin", programs),
    ])
}

fn manifests() -> PathBuf {
    let folder = repository().join("manifests").canonicalize();
    folder.expect("the folder of the manifests")
}

/// What `kubectl apply -k` sends for a folder.
pub fn rendered(folder: &Path) -> Vec<Value> {
    let output = Command::new(versions::program("kubectl"))
        .arg("kustomize")
        .arg(folder)
        .output()
        .expect("kubectl starts");
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    let documents = serde_yaml::Deserializer::from_slice(&output.stdout);
    documents
        .map(|document| Value::deserialize(document).expect("an object"))
        .collect()
}

/// A folder with a kustomization of the overlay `both` and these components, as an admin writes one.
pub fn composed(components: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let folder = dir.path().canonicalize().expect("it is there");
    // Kustomize takes folders by relative paths alone.
    let up = "../".repeat(folder.components().count() - 1);
    let manifests = manifests().display().to_string();
    let manifests = format!("{up}{}", manifests.trim_start_matches('/'));
    let mut text = format!("resources: [{manifests}/overlays/both]\ncomponents:\n");
    for component in components {
        writeln!(text, "  - {manifests}/{component}").expect("a text grows");
    }
    fs::write(folder.join("kustomization.yaml"), text).expect("it is written");
    dir
}

/// Both streams of a program.
pub fn text(output: &Output) -> String {
    let of = |stream| String::from_utf8_lossy(stream).into_owned();
    of(&output.stdout) + &of(&output.stderr)
}

/// Applies an overlay as it is, with these folders in the places of the host's, and what else a test changes in the
/// pod. Returns the DaemonSet.
pub fn install(
    world: &World,
    overlay: &str,
    stand_ins: BTreeMap<&str, PathBuf>,
    change: impl FnOnce(&mut Value),
) -> Value {
    let objects = rendered(&manifests().join("overlays").join(overlay));
    install_objects(world, objects, stand_ins, change)
}

/// The same with these objects.
pub fn install_objects(
    world: &World,
    mut objects: Vec<Value>,
    stand_ins: BTreeMap<&str, PathBuf>,
    change: impl FnOnce(&mut Value),
) -> Value {
    let mut is_set = objects.iter_mut().filter(|it| it["kind"] == "DaemonSet");
    let set = is_set.next().expect("there is a DaemonSet");
    let pod = &mut set["spec"]["template"]["spec"];
    let mut left = stand_ins;
    let volumes = pod["volumes"].as_array_mut();
    for volume in volumes.expect("the pod has volumes") {
        let path = volume["hostPath"]["path"].as_str();
        let Some(path) = path.filter(|path| !path.starts_with("/var/lib/kubelet")) else {
            continue;
        };
        let stand_in = left.remove(path);
        volume["hostPath"]["path"] = json!(stand_in.unwrap_or_else(|| panic!("{path} has none")));
    }
    assert!(left.is_empty(), "the pod does not mount {left:?}");
    change(pod);
    let set = set.clone();
    let file = world.state().join("manifests.yaml");
    let documents: Vec<String> = objects.iter().map(Value::to_string).collect();
    fs::write(&file, documents.join("\n---\n")).expect("the manifests are written");
    world.apply(file.to_str().expect("a path of letters"));
    set
}

fn read_ready(state: &Path) -> Value {
    let text = fs::read_to_string(state.join("ready")).expect("the runner writes it");
    serde_json::from_str(&text).expect("the runner writes JSON")
}

/// The variables that lead a pod to the API server, with its real address: no proxy leads there from the service's.
pub fn of_the_server(state: &Path) -> [(&'static str, String); 2] {
    let ready = read_ready(state);
    let server = ready["server"].as_str().expect("a server");
    let (_, address) = server.split_once("://").expect("a URL");
    let (host, port) = address.split_once(':').expect("an address with a port");
    [
        ("KUBERNETES_SERVICE_HOST", host.to_owned()),
        ("KUBERNETES_SERVICE_PORT", port.to_owned()),
    ]
}

/// The daemon's container, as the kubelet has asked the runtime for it.
pub struct Container {
    pub asked: Config,
    world_state: PathBuf,
    root: PathBuf,
    mounts: PathBuf,
}

impl Container {
    /// Waits for it.
    pub async fn of(world: &World) -> Self {
        let asked = |world: &World| {
            let lines = world.record().lines.into_iter();
            let mut its = lines.filter(|line| line.pod.namespace == NAME);
            its.find(|line| line.event == "started" || line.event == "created")
                .map(|line| line.config)
        };
        world
            .wait_for(
                "the runtime is asked for the daemon's container",
                STARTED,
                async |world: &World| asked(world).is_some(),
            )
            .await;
        let state = world.state();
        let container = Self {
            asked: asked(world).expect("it was there a moment ago"),
            root: state.join("root"),
            mounts: state.join("mounts"),
            world_state: state,
        };
        fs::create_dir(&container.root).expect("the root of the container");
        fs::write(&container.mounts, container.table(world)).expect("the mounts are written");
        container
    }

    /// The kubelet's mounts; before them the program, and what the fake driver's library looks for beside itself.
    fn table(&self, world: &World) -> String {
        let beside = |name: &str| world.node.folder().join(name).display().to_string();
        let beside_libraries = |name: &str| format!("/driver-root/usr/lib/{name}");
        let mut lines = vec![
            (
                env!("CARGO_BIN_EXE_gpu-bridge").to_owned(),
                PROGRAM.to_owned(),
                true,
            ),
            (
                beside(layout::SCENARIO_FILE),
                beside_libraries(layout::SCENARIO_FILE),
                true,
            ),
            (
                beside(layout::STATE_DIR),
                beside_libraries(layout::STATE_DIR),
                false,
            ),
        ];
        let mut asked = self.asked.mounts.clone();
        // As runtimes do: what is mounted in another mount comes after it.
        asked.sort_by_key(|mount| mount.container_path.split('/').count());
        let asked = asked.into_iter();
        lines.extend(asked.map(|it| (it.host_path, it.container_path, it.read_only)));
        let mut table = String::new();
        for (here, inside, read_only) in lines {
            let mode = if read_only { "ro" } else { "rw" };
            writeln!(table, "{here}\t{inside}\t{mode}").expect("a text grows");
        }
        table
    }

    /// The program with these arguments in such a container. Its environment is what the kubelet gave it; only the
    /// address of the API server is the real one, since no proxy leads there from the address of the service.
    pub fn command(&self, arguments: &[String]) -> Command {
        let ready = read_ready(&self.world_state);
        let mut environment = self.asked.envs.clone();
        for (variable, value) in of_the_server(&self.world_state) {
            let before = environment.insert(variable.to_owned(), value);
            assert!(
                before.is_some(),
                "the kubelet gives {variable} to every pod"
            );
        }
        let pids = self.world_state.join("pids");
        let pids = fs::read_to_string(pids).expect("the runner writes it");
        let kubelets = pids.split_whitespace().last().expect("two processes");
        let mut command = Command::new("nsenter");
        command.args(["--target", kubelets, "--mount"]);
        if ready["user_namespace"] == true {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.args(["unshare", "--mount", "sh"]);
        command.arg(
            repository()
                .join("tests/e2e/container.sh")
                .canonicalize()
                .expect("the script"),
        );
        command.args([&self.root, &self.mounts]);
        command.args(
            environment
                .iter()
                .map(|(name, value)| format!("{name}={value}")),
        );
        command.arg(PROGRAM).args(arguments);
        command
    }

    /// What `kubectl exec` of a verb would answer.
    pub fn exec(&self, verb: &[&str]) -> Output {
        let verb: Vec<String> = verb.iter().map(|&word| word.to_owned()).collect();
        let mut command = self.command(&verb);
        command
            .stdin(Stdio::null())
            .output()
            .expect("nsenter starts")
    }
}

/// Lets the DaemonSet come to the node.
pub async fn label(world: &World) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let label = json!({"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}});
    nodes
        .patch("node-0", &PatchParams::default(), &Patch::Merge(&label))
        .await
        .expect("the node is labelled");
}

/// Edits the ConfigMap, as an admin does.
pub async fn switch(world: &World, mode: &str) {
    let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), NAME);
    let text = format!("apiVersion: gpu-bridge.dev/v1alpha1\nmode: {mode}\n");
    let change = json!({"data": {"config.yaml": text}});
    maps.patch(NAME, &PatchParams::default(), &Patch::Merge(&change))
        .await
        .expect("the ConfigMap is changed");
    world
        .wait_for(mode, BROUGHT, async |world: &World| {
            world.status().await["mode"] == mode
        })
        .await;
}

/// `status --all-nodes` in the daemon's container, with the daemon's own rights.
async fn all_nodes_say_the_same(world: &World, container: &Container) {
    world
        .wait_for("all GPUs are told as held", STARTED, async |_: &World| {
            let output = container.exec(&["status", "--all-nodes", "-o", "json"]);
            assert!(output.status.success(), "{}", text(&output));
            let page: Value = serde_json::from_slice(&output.stdout).expect("a page of JSON");
            let held = json!({"held": 1, "free": 0});
            page["nodes"]
                == json!([{"node": "node-0", "state": "Ready", "mode": "both", "gpus": 2,
                    "counted": held, "claims": held}])
        })
        .await;
}

/// Waits until what the daemon has written in the API includes this.
async fn wait_written(world: &World, verb: &str, path: &str) {
    let what = format!("{verb} {path} by the daemon");
    world
        .wait_for(&what, STARTED, async |world: &World| {
            let verb = format!("{:?}", verb);
            let writes = world.writes();
            writes
                .iter()
                .any(|it| it.starts_with(&verb) && it.contains(path))
        })
        .await;
}

#[tokio::test]
async fn the_shipped_daemonset_brings_a_daemon_that_has_all_it_needs_and_serves_both_kinds() {
    let Some(mut world) = World::without_daemon(Setup::shared(2).impatient()).await else {
        return;
    };
    let set = install(&world, "both", stand_ins(&world), |_| ());
    label(&world).await;
    let container = Container::of(&world).await;
    let shipped = &set["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(json!(container.asked.args), shipped["args"]);
    assert!(
        container.asked.command.is_empty(),
        "the image's own program runs"
    );
    world.run_daemon(container.command(&container.asked.args), HTTP);

    let probe: Vec<String> =
        serde_json::from_value(shipped["readinessProbe"]["exec"]["command"].clone())
            .expect("the pod has a probe");
    world
        .wait_for(
            "the readiness probe says yes",
            STARTED,
            async |_: &World| {
                let mut command = container.command(&probe[1..]);
                command.output().expect("nsenter starts").status.success()
            },
        )
        .await;
    let doctor = container.exec(&["doctor"]);
    let told = text(&doctor);
    assert!(doctor.status.success(), "{told}");
    assert!(told.contains("verbs of manifests/base/rbac.yaml"), "{told}");

    world.create_template("one", 1).await;
    world.create(PodSpec::counted("counted", 1)).await;
    world
        .create(PodSpec::from_template("claimed", "one", &["main"]))
        .await;
    let counted = world.gpus_of("counted").await;
    let claimed = world.gpus_of("claimed").await;
    assert_eq!((counted.len(), claimed.len()), (1, 1));
    assert_ne!(counted, claimed);
    all_nodes_say_the_same(&world, &container).await;
    world.delete("claimed").await;
    switch(&world, "legacy").await;

    for (verb, path) in [
        ("create", "/resourceslices"),
        ("update", "/resourceslices/"),
        ("delete", "/resourceslices/"),
        ("patch", "/nodes/node-0/status"),
        ("create", "/events"),
    ] {
        wait_written(&world, verb, path).await;
    }
    assert_eq!(
        world.forbidden(),
        Vec::<String>::new(),
        "a right is missing"
    );
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let about = ListParams::default().fields("involvedObject.kind=Node,involvedObject.name=node-0");
    let told = events.list(&about).await.expect("events can be listed");
    assert!(
        told.items
            .iter()
            .any(|event| event.reason.as_deref() == Some("ModeChanged")),
        "{told:?}"
    );
}

/// The object of a kind with the name of everything.
fn object<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut its = objects
        .iter()
        .filter(|it| it["kind"] == kind && it["metadata"]["name"] == NAME);
    its.next().unwrap_or_else(|| panic!("no {kind}"))
}

#[test]
fn each_overlay_and_each_component_comes_out_of_kubectl_as_it_is_meant() {
    let of = |overlay: &str| rendered(&manifests().join("overlays").join(overlay));
    let both = of("both");
    for mode in ["legacy", "both", "dra"] {
        let objects = of(mode);
        let config = object(&objects, "ConfigMap")["data"]["config.yaml"].as_str();
        assert!(config.is_some_and(|it| it.contains(&format!("mode: {mode}\n"))));
        assert_eq!(object(&objects, "DaemonSet"), object(&both, "DaemonSet"));
    }
    let with = |component: &str| rendered(composed(&[component]).path());
    let role = |objects: &[Value]| object(objects, "ClusterRole")["rules"].clone();
    let at_bind = with("components/notice-bind");
    assert_eq!(role(&at_bind)[0]["verbs"], json!(["get"]));
    assert_eq!(at_bind.len(), both.len(), "a role changes");
    let by_map = with("components/config-map");
    let pod = object(&by_map, "DaemonSet")["spec"]["template"]["spec"].to_string();
    assert!(pod.contains("GPU_BRIDGE_CONFIG_MAP") && !pod.contains("/etc/gpu-bridge"));
    assert_eq!(by_map.len(), both.len() + 2, "a role and its binding");
    let monitored = with("monitoring");
    let pod = &object(&monitored, "DaemonSet")["spec"]["template"]["spec"];
    let variables = pod["containers"][0]["env"].as_array().expect("variables");
    let opens = |it: &Value| it["name"] == "GPU_BRIDGE_HTTP_ADDR" && it["value"] == "0.0.0.0:9494";
    assert!(variables.iter().any(opens), "{variables:?}");
    object(&monitored, "PodMonitor");
}
