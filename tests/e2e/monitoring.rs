//! What `manifests/monitoring` has for Prometheus' operator, judged by a real API server with the operator's own kinds.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::shipped::{composed, rendered, text};
use crate::world::{Setup, World, repository};

/// From a new kind until the API server serves it, on two busy cores.
const SERVED: Duration = Duration::from_secs(90);

/// `kubectl` as the cluster's admin, with this on its standard input.
pub fn kubectl(world: &World, arguments: &[&str], input: &str) -> Output {
    let state = world.state();
    let mut child = Command::new(repository().join("tests/cluster/bin/kubectl"))
        .arg("--kubeconfig")
        .arg(state.join("admin.kubeconfig"))
        .arg("--cache-dir")
        .arg(state.join("kubectl-cache"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kubectl starts");
    let mut stdin = child.stdin.take().expect("it was asked for");
    stdin.write_all(input.as_bytes()).expect("kubectl reads");
    drop(stdin);
    child.wait_with_output().expect("kubectl ends")
}

/// The one object of a kind.
fn of_kind(objects: &[Value], kind: &str) -> Value {
    let mut its = objects.iter().filter(|it| it["kind"] == kind);
    let found = its.next().unwrap_or_else(|| panic!("no {kind}")).clone();
    assert!(its.next().is_none(), "one {kind}");
    found
}

#[tokio::test]
async fn an_api_server_with_the_operators_kinds_takes_all_that_is_shipped_and_refuses_what_is_wrong()
 {
    let Some(world) = World::without_daemon(Setup::shared(1)).await else {
        return;
    };
    let kinds = repository().join("tests/e2e/prometheus-operator");
    for file in ["podmonitors.yaml", "prometheusrules.yaml"] {
        let file = kinds.join(file);
        let output = kubectl(&world, &["apply", "-f", &file.display().to_string()], "");
        assert!(output.status.success(), "{}", text(&output));
    }
    let folder = composed(&[
        "components/config-map",
        "components/notice-bind",
        "monitoring",
    ]);
    let path = folder.path().display().to_string();
    world
        .wait_for("the new kinds are served", SERVED, async |world: &World| {
            let asked = ["get", "podmonitors,prometheusrules", "--all-namespaces"];
            kubectl(world, &asked, "").status.success()
        })
        .await;
    let output = kubectl(&world, &["apply", "-k", &path], "");
    assert!(output.status.success(), "{}", text(&output));

    let objects = rendered(folder.path());
    let monitor = of_kind(&objects, "PodMonitor");
    let rule = of_kind(&objects, "PrometheusRule");
    for ours in [&monitor, &rule] {
        let kind = ours["kind"].as_str().expect("a kind").to_lowercase();
        let asked = [
            "get",
            &kind,
            "gpu-bridge",
            "--namespace=gpu-bridge",
            "--output=json",
        ];
        let output = kubectl(&world, &asked, "");
        let stored: Value = serde_json::from_slice(&output.stdout).expect("an object");
        assert_has(&stored["spec"], &ours["spec"]);
    }
    for (object, at, wrong, words) in [
        (
            &monitor,
            "/spec/podMetricsEndpoints/0/interval",
            json!("half a minute"),
            "interval in body should match",
        ),
        (
            &monitor,
            "/spec/podMetricsEndpoints/0/relabelings/0",
            json!({"sourceLabel": ["x"]}),
            "unknown field",
        ),
        (
            &monitor,
            "/spec/podMetricsEndpoints/0/relabelings/0/action",
            json!("forget"),
            "Unsupported value",
        ),
        (&monitor, "/spec/selector", json!(null), "Required value"),
        (
            &rule,
            "/spec/groups/0/rules/2/for",
            json!("10 minutes"),
            "for in body should match",
        ),
        (&rule, "/spec/groups/0/rules/0/expr", json!(["up"]), "expr"),
        (
            &rule,
            "/spec/groups/0/name",
            json!(7),
            "must be of type string",
        ),
    ] {
        let mut object = object.clone();
        set(&mut object, at, wrong);
        let arguments = ["apply", "--dry-run=server", "-f", "-"];
        let output = kubectl(&world, &arguments, &object.to_string());
        let told = text(&output);
        assert!(
            !output.status.success() && told.contains(words),
            "{at}: {told}"
        );
    }
}

/// Nothing of ours was dropped, though defaults may have come in. What is empty may be left out.
pub fn assert_has(stored: &Value, ours: &Value) {
    match (stored, ours) {
        (Value::Null, Value::Object(ours)) if ours.is_empty() => {}
        (Value::Null, Value::Array(ours)) if ours.is_empty() => {}
        (Value::Object(stored), Value::Object(ours)) => {
            for (key, value) in ours {
                assert_has(stored.get(key).unwrap_or(&Value::Null), value);
            }
        }
        (Value::Array(stored), Value::Array(ours)) => {
            assert_eq!(stored.len(), ours.len());
            for (stored, ours) in stored.iter().zip(ours) {
                assert_has(stored, ours);
            }
        }
        (stored, ours) => assert_eq!(stored, ours),
    }
}

/// Sets what is at a JSON pointer, whether or not the last key is there.
fn set(object: &mut Value, at: &str, value: Value) {
    let (parent, key) = at.rsplit_once('/').expect("a pointer");
    let parent = object.pointer_mut(parent).expect("its parent is there");
    match key.parse::<usize>() {
        Ok(index) => parent[index] = value,
        Err(_) => parent[key] = value,
    }
}
