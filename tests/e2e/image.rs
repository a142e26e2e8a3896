//! The image that `manifests/Dockerfile` makes, started by the real kubelet, containerd and runc as the DaemonSet says.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};
use serde_json::{Value, json};

use crate::monitoring::kubectl;
use crate::shipped::{install, label, of_the_server, stand_ins, text};
use crate::world::{Setup, World, repository};

/// The image, as `docker save` writes it: `tests/image.sh` sets it.
const IMAGE: &str = "GPU_BRIDGE_IMAGE";
/// From the DaemonSet until its pod is ready, an image of a hundred megabytes and two busy cores included.
const READY: Duration = Duration::from_secs(180);
/// Where the pod has the folder of the fake node, which no real one has.
const FAKE_NODE: &str = "/fake-node";

/// Gives an image to containerd.
fn import(world: &World, archive: &Path) {
    let output = Command::new(repository().join("tests/cluster/bin/ctr"))
        .arg("--address")
        .arg(world.state().join("cri.sock"))
        .args(["--namespace", "k8s.io", "images", "import", "--local"])
        .args(["--snapshotter", "native"])
        .arg(archive)
        .output()
        .expect("ctr starts");
    assert!(output.status.success(), "{}", text(&output));
}

/// What a node has and the cluster's mount namespace has not: a shared folder of the kubelet, as every mount is with
/// systemd, in which a pod may ask to see what is mounted later (`HostToContainer`); and a name that leads to it, by which
/// the API server passes on what `kubectl exec` asks.
fn make_a_node_of_the_namespace(world: &World) {
    let state = world.state();
    let pids = std::fs::read_to_string(state.join("pids")).expect("the runner writes it");
    let kubelets = pids.split_whitespace().last().expect("two processes");
    let hosts = state.join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost node-0\n").expect("it is written");
    let script = format!(
        "mount --make-shared /var/lib/kubelet && mount --bind {} /etc/hosts",
        hosts.display()
    );
    let output = Command::new("nsenter")
        .args(["--target", kubelets, "--mount", "sh", "-c", &script])
        .output()
        .expect("nsenter starts");
    assert!(output.status.success(), "{}", text(&output));
}

/// What the pod of a test has besides: the way to the API server, and the fake driver's own files.
fn for_this_machine(world: &World, pod: &mut Value) {
    let push = |list: &mut Value, value: Value| {
        let list = list.as_array_mut();
        list.expect("the pod has a list of them").push(value);
    };
    push(
        &mut pod["volumes"],
        json!({"name": "fake-node", "hostPath": {"path": world.node.folder()}}),
    );
    let container = &mut pod["containers"][0];
    push(
        &mut container["volumeMounts"],
        json!({"name": "fake-node", "mountPath": FAKE_NODE}),
    );
    let fake = |name: &str| format!("{FAKE_NODE}/{name}");
    let scenario = fake_nvml::layout::SCENARIO_FILE;
    let state = fake_nvml::layout::STATE_DIR;
    for (name, value) in [
        (fake_nvml::layout::SCENARIO_ENV, fake(scenario)),
        (fake_nvml::layout::STATE_ENV, fake(state)),
    ]
    .into_iter()
    .chain(of_the_server(&world.state()))
    {
        push(&mut container["env"], json!({"name": name, "value": value}));
    }
}

/// Why the pod is not ready, as far as the API knows.
async fn trouble(world: &World) -> String {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "gpu-bridge");
    let pods = pods.list(&ListParams::default()).await;
    let states = pods.expect("pods can be listed").items;
    let states = states.into_iter().filter_map(|pod| pod.status);
    let states: Vec<_> = states.map(|status| status.container_statuses).collect();
    let events = kubectl(world, &["get", "events", "--namespace=gpu-bridge"], "");
    format!("{states:#?}\n{}", text(&events))
}

#[tokio::test]
#[ignore = "needs root, buildah and minutes: make image"]
async fn the_image_is_started_as_its_daemonset_says_and_serves_the_node() {
    let archive = std::env::var_os(IMAGE).expect("tests/image.sh builds the image and says where");
    let Some(world) = World::without_daemon(Setup::shared(2).on_containerd()).await else {
        return;
    };
    import(&world, Path::new(&archive));
    make_a_node_of_the_namespace(&world);
    let mut folders = stand_ins(&world);
    // Device nodes, as real containers need them.
    folders.insert("/dev", world.state().join("dev"));
    // As on every host; a runtime can't make it, where a pod has the folder read-only.
    std::fs::create_dir(world.state().join("dev/shm")).expect("a folder is made");
    // Where a runtime mounts the container's own.
    let cgroups = world.node.sys_root().join("fs/cgroup");
    std::fs::create_dir_all(cgroups).expect("a folder is made");
    install(&world, "both", folders, |pod| for_this_machine(&world, pod));
    label(&world).await;
    let sets: Api<DaemonSet> = Api::namespaced(world.client.clone(), "gpu-bridge");
    let is_ready = async || {
        let set = sets.get("gpu-bridge").await.expect("it is there");
        set.status.is_some_and(|status| status.number_ready == 1)
    };
    let deadline = std::time::Instant::now() + READY;
    while !is_ready().await {
        let in_time = std::time::Instant::now() < deadline;
        assert!(in_time, "no daemon is ready: {}", trouble(&world).await);
        crate::world::tick().await;
    }

    let nodes: Api<Node> = Api::all(world.client.clone());
    world
        .wait_for("the node counts its GPUs", READY, async |_: &World| {
            let node = nodes.get("node-0").await.expect("the node exists");
            let counts = node.status.and_then(|status| status.allocatable);
            counts.is_some_and(|counts| counts.get("nvidia.com/gpu").is_some_and(|it| it.0 == "2"))
        })
        .await;
    // The commands of the README, to their end.
    let exec = |words: &[&str]| {
        let pod = ["--namespace=gpu-bridge", "exec", "ds/gpu-bridge", "--"];
        kubectl(&world, &[&pod, words].concat(), "")
    };
    for (words, told) in [
        (
            ["gpu-bridge", "doctor"],
            "verbs of manifests/base/rbac.yaml",
        ),
        (
            ["gpu-bridge", "status"],
            "free: 2 for counted pods, 2 for claims",
        ),
    ] {
        let output = exec(&words);
        let text = text(&output);
        assert!(output.status.success() && text.contains(told), "{text}");
    }
    let write = exec(&["touch", "/termination-log-of-others"]);
    let told = text(&write);
    assert!(told.contains("Read-only file system"), "{told}");
}
