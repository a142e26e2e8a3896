//! `gpu-bridge doctor` beside a daemon and without one, on a node that is well and on one that is not.

use std::fs;
use std::os::unix::net::UnixListener;

use serde_json::json;

use crate::process::gpu_bridge;
use crate::world::{RESOURCE, World};

/// Exit code and page.
pub(crate) async fn examine(world: &mut World) -> (Option<i32>, String) {
    let mut command = gpu_bridge();
    command.arg("doctor");
    for (flag, value) in world.flags().iter() {
        command.arg(flag).arg(value);
    }
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = output.await.unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    (output.status.code(), page)
}

/// The page as one line, however it is broken.
pub(crate) fn flat(page: &str) -> String {
    page.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What a cluster has that is well.
fn furnish(world: &World) {
    world.api.allow("patch", "nodes/status");
    let runtime = json!({"containerRuntimeVersion": "containerd://2.4.0"});
    let node = json!({"status": {"nodeInfo": runtime}});
    world.api.patch("nodes", "", crate::world::NODE, &node);
    let class = json!({"metadata": {"name": "gpu.nvidia.com"}, "spec": {}});
    world.api.put("deviceclasses", class);
}

#[tokio::test]
async fn a_node_that_is_well_has_no_problem_with_a_daemon_and_without() {
    let world = World::new(2).await;
    furnish(&world);
    let mut world = world.started().await;
    let (code, page) = examine(&mut world).await;
    assert_eq!(code, Some(0), "{page}");
    let told = flat(&page);
    for part in [
        "0 problems, 0 warnings",
        "2 GPUs, driver 580",
        "v1.37.2 answers",
        "resource.k8s.io/v1 is served",
        "device taints the API server keeps them",
        "verbs of manifests/base/rbac.yaml",
        "containerd://2.4.0",
        "nobody else serves",
        "old sockets none",
    ] {
        assert!(told.contains(part), "{part:?} is missing in:\n{page}");
    }
    for line in page.lines() {
        let word = line.split_whitespace().map(|it| it.chars().count()).max();
        let is_path = word.unwrap_or(0) > 60;
        assert!(is_path || line.chars().count() <= 100, "{line}");
    }

    world.kill_daemon();
    let (code, page) = examine(&mut world).await;
    assert_eq!(
        code,
        Some(0),
        "a daemon that is not there is no problem: {page}"
    );
    let told = flat(&page);
    for part in ["warning daemon no daemon answers", "warning old sockets"] {
        assert!(told.contains(part), "{part:?} is missing in:\n{page}");
    }
}

#[tokio::test]
async fn each_thing_that_is_missing_is_named_with_why_and_what_to_do() {
    let mut world = World::without_library(2).await;
    world.start_kubelet().await;
    furnish(&world);
    world.api.forbid("watch", "pods");
    world.api.forbid("patch", "nodes/status");
    world.api.drop_taints();
    let class = json!({"metadata": {"name": "maps"}, "spec": {"extendedResourceName": RESOURCE}});
    world.api.put("deviceclasses", class);
    let _rival = UnixListener::bind(world.device_plugin_dir().join("nvidia-gpu.sock")).unwrap();
    fs::create_dir_all(world.state_dir()).unwrap();
    fs::write(world.ledger(), "no ledger").unwrap();
    world.configure("mode: drianed\n");
    let (code, page) = examine(&mut world).await;
    assert_eq!(code, Some(1), "{page}");
    let told = flat(&page);
    for part in [
        "problem configuration",
        "problem NVML",
        "do: install the NVIDIA driver",
        "problem ledger",
        "gpu-bridge ledger rebuild",
        "problem other daemons another daemon serves nvidia.com/gpu at",
        "watch pods is missing",
        "patch nodes/status is missing",
        "warning device taints the API server drops them",
        "do: apply manifests/base/rbac.yaml anew",
        "problem DeviceClasses maps has extendedResourceName",
    ] {
        assert!(told.contains(part), "{part:?} is missing in:\n{page}");
    }
    assert!(!told.contains("get pods is missing"), "{page}");

    // Each finding that is not good says why, and what to do.
    let bad = page
        .lines()
        .filter(|line| line.starts_with("problem") || line.starts_with("warning"));
    let bad = bad.count();
    for word in ["why: ", "do: "] {
        assert_eq!(page.matches(word).count(), bad, "{word}\n{page}");
    }

    world.api.go_away();
    let (code, page) = examine(&mut world).await;
    assert_eq!(code, Some(1));
    assert!(flat(&page).contains("problem API server"), "{page}");
}

#[tokio::test]
async fn rights_are_judged_by_what_the_configuration_needs() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    furnish(&world);
    for verb in ["list", "watch"] {
        world.api.forbid(verb, "resourceclaims");
    }
    world.configure("offers: {notice: bind}\n");
    let (code, page) = examine(&mut world).await;
    assert_eq!(code, Some(0), "{page}");
    let told = flat(&page);
    let file = "verbs of manifests/components/notice-bind/rbac.yaml";
    assert!(told.contains(file), "{page}");
    assert!(!told.contains("is missing"), "{page}");

    world.configure("offers: {notice: allocation}\n");
    let (code, page) = examine(&mut world).await;
    assert_eq!(code, Some(1), "{page}");
    let told = flat(&page);
    for verb in ["list", "watch"] {
        let lacks = format!("problem rights {verb} resourceclaims is missing");
        assert!(told.contains(&lacks), "{page}");
    }
    assert_eq!(told.matches("is missing").count(), 2, "{page}");
}

#[tokio::test]
async fn a_class_with_the_counts_name_is_a_problem_only_where_its_scheduler_makes_claims() {
    let mut world = World::new(2).await;
    world.start_kubelet().await;
    furnish(&world);
    let class = json!({"metadata": {"name": "maps"}, "spec": {"extendedResourceName": RESOURCE}});
    world.api.put("deviceclasses", class);
    for (minor, code, words) in [
        (
            34,
            0,
            "warning DeviceClasses maps has extendedResourceName: nvidia.com/gpu why: the scheduler of Kubernetes 1.34 \
             turns no counted pods into claims",
        ),
        (
            35,
            1,
            "problem DeviceClasses maps has extendedResourceName: nvidia.com/gpu why: the scheduler turns counted pods \
             into claims",
        ),
    ] {
        world.api.call_itself(minor);
        let (ended, page) = examine(&mut world).await;
        assert!(flat(&page).contains(words), "{page}");
        assert_eq!(ended, Some(code), "{page}");
    }
}
