//! The Helm chart at a real API server: `tests/chart` renders it with Helm's own engine, for each set of values in
//! `tests/chart/values`.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::monitoring::{assert_has, kubectl};
use crate::shipped::{
    Container, HTTP, NAME, STARTED, install_objects, label, stand_ins, switch, text,
};
use crate::world::{Setup, World, repository};

/// The objects of a release for each set of values, by the name of the set, which is the release's namespace, too.
fn releases() -> BTreeMap<String, Vec<Value>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = Command::new(repository().join("tests/chart.sh"))
        .env("CHART_WRITE_TO", folder.path())
        .output()
        .expect("the chart can be rendered");
    assert!(output.status.success(), "{}", text(&output));
    let files = fs::read_dir(folder.path()).expect("the folder is there");
    files
        .map(|file| {
            let path = file.expect("a file").path();
            let name = path.file_stem().expect("a name").display().to_string();
            let documents = fs::read_to_string(&path).expect("it can be read");
            let objects = documents.lines().map(serde_json::from_str);
            let objects: Result<Vec<Value>, _> = objects.collect();
            let mut objects = objects.expect("objects of JSON");
            // Helm makes the namespace.
            let metadata = json!({"name": name});
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
            objects.insert(0, namespace);
            (name, objects)
        })
        .collect()
}

/// Applies objects as Helm does, and returns what the API server has of them. A field that it does not know is an
/// error.
fn apply(world: &World, objects: &[Value]) -> Result<Vec<Value>, String> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let arguments = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=helm",
        "--validate=strict",
        "--output=json",
        "--filename=-",
    ];
    let output = kubectl(world, &arguments, &list.to_string());
    if !output.status.success() {
        return Err(text(&output));
    }
    let stored: Value = serde_json::from_slice(&output.stdout).expect("objects of JSON");
    let items = stored["items"].as_array().cloned();
    Ok(items.unwrap_or_else(|| vec![stored]))
}

#[tokio::test]
async fn an_api_server_takes_and_keeps_all_that_the_chart_makes_of_each_set_of_values() {
    let Some(world) = World::without_daemon(Setup::shared(1)).await else {
        return;
    };
    let releases = releases();
    assert!(releases.len() >= 6, "{:?}", releases.keys());
    // One after the other, as an upgrade to other values: most objects belong to the whole cluster.
    for (name, objects) in &releases {
        let stored = apply(&world, objects).unwrap_or_else(|why| panic!("{name}: {why}"));
        let key = |it: &Value| (it["kind"].to_string(), it["metadata"]["name"].to_string());
        let stored: BTreeMap<_, &Value> = stored.iter().map(|it| (key(it), it)).collect();
        assert_eq!(stored.len(), objects.len(), "{name}");
        for object in objects {
            assert_has(stored[&key(object)], object);
        }
    }

    let is_set = |it: &&Value| it["kind"] == "DaemonSet";
    let set = releases["plain"].iter().find(is_set);
    let set = set.expect("there is a DaemonSet");
    for (at, key, wrong, words) in [
        (
            "/spec/template/spec",
            "hostNetworks",
            json!(true),
            "unknown field",
        ),
        (
            "/spec/updateStrategy",
            "type",
            json!("Sometimes"),
            "Unsupported value",
        ),
    ] {
        let mut set = set.clone();
        set.pointer_mut(at).expect("it is there")[key] = wrong;
        let told = apply(&world, &[set]).expect_err("a wrong object is refused");
        assert!(told.contains(words), "{key}: {told}");
    }
}

/// The pods of both kinds that the guide begins with.
fn first_two_pods() -> String {
    let page = repository().join("migration-guide/install.md");
    let page = fs::read_to_string(page).expect("the page is there");
    let (_, block) = page.split_once("```yaml\n").expect("it has manifests");
    let (block, _) = block.split_once("```").expect("they end");
    block.to_owned()
}

#[tokio::test]
async fn the_daemonset_of_the_chart_brings_a_daemon_that_reads_its_configuration_at_the_api_server()
{
    let Some(mut world) = World::without_daemon(Setup::shared(2).impatient()).await else {
        return;
    };
    let objects = releases().remove(NAME).expect("there is such a set");
    let set = install_objects(&world, objects, stand_ins(&world), |_| ());
    label(&world).await;
    let container = Container::of(&world).await;
    let shipped = &set["spec"]["template"]["spec"]["containers"][0];
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
    assert!(doctor.status.success(), "{}", text(&doctor));

    let output = kubectl(
        &world,
        &["create", "--validate=strict", "-f", "-"],
        &first_two_pods(),
    );
    assert!(output.status.success(), "{}", text(&output));
    let counted = world.gpus_of("counted").await;
    let claimed = world.gpus_of("claimed").await;
    assert_eq!((counted.len(), claimed.len()), (1, 1));
    assert_ne!(counted, claimed);
    world.delete("claimed").await;
    switch(&world, "legacy").await;
    assert_eq!(
        world.forbidden(),
        Vec::<String>::new(),
        "a right is missing"
    );
}
