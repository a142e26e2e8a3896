//! What is shipped in `manifests/` fits the code: every document is read as the type that it says it is, and what
//! the DaemonSet gives the daemon is what the daemon asks for.
#![allow(
    clippy::unwrap_used,
    reason = "a manifest that cannot be read has to fail the test"
)]

#[path = "common/dockerfile.rs"]
mod dockerfile;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bridge_core::Mode;
use clap::{CommandFactory as _, Parser as _};
use gpu_bridge::admin::{HEALTHZ, METRICS, READYZ, STATUS};
use gpu_bridge::cli::{Cli, Command, RunOptions};
use gpu_bridge::config::{Config, KEY as CONFIG_KEY, MapName, Source};
use gpu_bridge::daemon::{RIGHTS, Right, WATCH_OF_CLAIMS};
use gpu_bridge::dra::DRIVER;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Container, Namespace, PodSpec, Probe, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding};
use k8s_openapi::api::resource::v1::DeviceClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Namespace, service account, DaemonSet, ConfigMap and ClusterRole are all called so.
const NAME: &str = "gpu-bridge";

/// A `kustomization.yaml`, as far as ours go.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    api_version: String,
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    resources: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    patches: Vec<Patch>,
}

/// A patch in a file of its own, or one that is written down in place.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Patch {
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
}

/// What Prometheus' operator has of its own, as far as ours go; its API is monitoring.coreos.com/v1.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Monitoring<S> {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: S,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PodMonitorSpec {
    selector: LabelSelector,
    pod_metrics_endpoints: Vec<MetricsEndpoint>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct MetricsEndpoint {
    path: String,
    interval: String,
    relabelings: Vec<Relabeling>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Relabeling {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    source_labels: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_label: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replacement: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regex: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleSpec {
    groups: Vec<RuleGroup>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleGroup {
    name: String,
    rules: Vec<Alert>,
}

/// What each asks for is judged in `bridge/src/metrics`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Alert {
    alert: String,
    expr: String,
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    pending: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests")
}

/// Every YAML file below a folder, but for the chart: its templates are no YAML, and `tests/chart` renders them.
fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path != manifests().join("chart") {
                files.extend(yaml_files(&path));
            }
        } else if path.extension().is_some_and(|end| end == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn documents(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    serde_yaml::Deserializer::from_str(&text)
        .map(|document| {
            Value::deserialize(document).unwrap_or_else(|error| panic!("{file:?}: {error}"))
        })
        .collect()
}

/// Reads a document as a type and writes it again: a field that the type does not know, or knows by another name,
/// is lost on the way.
fn read<T: DeserializeOwned + Serialize>(file: &Path, document: &Value) -> T {
    let object: T = serde_json::from_value(document.clone())
        .unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let again = serde_json::to_value(&object).unwrap();
    assert_eq!(again, *document, "{file:?} has a field that is none");
    object
}

/// The only object of its type in the base.
fn base<T: DeserializeOwned + Serialize>(file: &str, kind: &str) -> T {
    let file = manifests().join("base").join(file);
    let found: Vec<T> = documents(&file)
        .iter()
        .filter(|document| document["kind"] == kind)
        .map(|document| read(&file, document))
        .collect();
    assert_eq!(found.len(), 1, "{kind} in {file:?}");
    found.into_iter().next().unwrap()
}

fn pod() -> PodSpec {
    let set: DaemonSet = base("daemonset.yaml", "DaemonSet");
    set.spec.template.spec.unwrap()
}

fn container() -> Container {
    pod().containers.into_iter().next().unwrap()
}

/// The options that the daemon has when the DaemonSet starts it.
fn options() -> RunOptions {
    options_of(container())
}

fn options_of(container: Container) -> RunOptions {
    let command = Cli::command();
    let run = command.find_subcommand("run").unwrap();
    // What the node fills in, as it may look.
    let filled_in = BTreeMap::from([
        ("NODE_NAME", "node-1"),
        ("GPU_BRIDGE_POD_UID", "0b3c8a4e-0000-4000-8000-000000000000"),
    ]);
    let flags = container.env.unwrap().into_iter().map(|variable| {
        let name = variable.name.as_str();
        let mut arguments = run.get_arguments();
        let argument = arguments.find(|it| it.get_env().is_some_and(|env| env == name));
        let argument = argument.unwrap_or_else(|| panic!("{name} is no variable of `run`"));
        let value = variable.value.as_deref().unwrap_or_else(|| filled_in[name]);
        format!("--{}={value}", argument.get_long().unwrap())
    });
    let line = std::iter::once("gpu-bridge".to_owned())
        .chain(container.args.unwrap())
        .chain(flags);
    let cli = Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{error}"));
    let Command::Run(args) = cli.command else {
        panic!("the DaemonSet starts another command than 'run'");
    };
    args.check().unwrap_or_else(|error| panic!("{error}"))
}

/// A path of the container, and where on the host it leads.
#[derive(Debug)]
struct Mounted {
    host: PathBuf,
    read_only: bool,
}

/// Where the host keeps what the container has at a path; `None`: it is not the host's.
fn mounted(path: &Path) -> Option<Mounted> {
    let volumes = pod().volumes.unwrap();
    let mounts = container().volume_mounts.unwrap();
    let mount = mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.mount_path))
        .max_by_key(|mount| mount.mount_path.len())?;
    let volume = volumes
        .iter()
        .find(|volume| volume.name == mount.name)
        .unwrap_or_else(|| panic!("{} is mounted and no volume", mount.name));
    let host = PathBuf::from(&volume.host_path.as_ref()?.path);
    let rest = path.strip_prefix(&mount.mount_path).unwrap();
    Some(Mounted {
        host: if rest.as_os_str().is_empty() {
            host
        } else {
            host.join(rest)
        },
        read_only: mount.read_only == Some(true),
    })
}

/// A runtime makes it before the container starts: in a folder of the host that is read-only the start fails.
#[test]
fn the_termination_message_has_a_place_that_a_runtime_can_make() {
    let container = container();
    let path = container.termination_message_path.as_deref();
    // The default of Kubernetes.
    let path = Path::new(path.unwrap_or("/dev/termination-log"));
    assert!(mounted(path).is_none_or(|place| !place.read_only));
    assert!(path.is_absolute());
}

#[test]
fn every_document_is_read_whole_by_the_type_that_it_names() {
    let mut kinds = BTreeSet::new();
    for file in yaml_files(&manifests()) {
        for document in documents(&file) {
            let api = document["apiVersion"].as_str().unwrap().to_owned();
            let kind = document["kind"].as_str().unwrap().to_owned();
            match (api.as_str(), kind.as_str()) {
                ("v1", "Namespace") => drop(read::<Namespace>(&file, &document)),
                ("v1", "ServiceAccount") => drop(read::<ServiceAccount>(&file, &document)),
                ("v1", "ConfigMap") => drop(read::<ConfigMap>(&file, &document)),
                ("apps/v1", "DaemonSet") => drop(read::<DaemonSet>(&file, &document)),
                ("rbac.authorization.k8s.io/v1", "ClusterRole") => {
                    drop(read::<ClusterRole>(&file, &document));
                }
                ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => {
                    drop(read::<ClusterRoleBinding>(&file, &document));
                }
                ("rbac.authorization.k8s.io/v1", "Role") => drop(read::<Role>(&file, &document)),
                ("rbac.authorization.k8s.io/v1", "RoleBinding") => {
                    drop(read::<RoleBinding>(&file, &document));
                }
                ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => {
                    drop(read::<ValidatingAdmissionPolicy>(&file, &document));
                }
                ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
                    drop(read::<ValidatingAdmissionPolicyBinding>(&file, &document));
                }
                ("resource.k8s.io/v1", "DeviceClass") => {
                    drop(read::<DeviceClass>(&file, &document));
                }
                ("monitoring.coreos.com/v1", "PodMonitor") => {
                    drop(read::<Monitoring<PodMonitorSpec>>(&file, &document));
                }
                ("monitoring.coreos.com/v1", "PrometheusRule") => {
                    drop(read::<Monitoring<RuleSpec>>(&file, &document));
                }
                ("kustomize.config.k8s.io/v1beta1", "Kustomization")
                | ("kustomize.config.k8s.io/v1alpha1", "Component") => {
                    drop(read::<Kustomization>(&file, &document));
                }
                other => panic!("{file:?} has an object that no test reads: {other:?}"),
            }
            kinds.insert(kind);
        }
    }
    assert_eq!(kinds.len(), 15, "{kinds:?}");
}

#[test]
fn every_file_is_applied_by_the_kustomization_beside_it() {
    for file in yaml_files(&manifests()) {
        let folder = file.parent().unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        if name == "kustomization.yaml" {
            continue;
        }
        let kustomization = folder.join("kustomization.yaml");
        let read: Kustomization = read(&kustomization, &documents(&kustomization)[0]);
        let patches = read.patches.into_iter().filter_map(|patch| patch.path);
        let mut named = read.resources.into_iter().chain(patches);
        assert!(
            named.any(|named| named == name),
            "{file:?} is not in {kustomization:?}"
        );
    }
}

/// The configuration in a ConfigMap, read as the daemon reads it.
fn configuration(file: &Path) -> Config {
    let map: ConfigMap = read(file, &documents(file)[0]);
    assert_eq!(map.metadata.name.as_deref(), Some(NAME));
    assert_eq!(map.metadata.namespace.as_deref(), Some(NAME));
    let folder = tempfile::tempdir().unwrap();
    let mounted = folder.path().join(CONFIG_KEY);
    std::fs::write(&mounted, &map.data.unwrap()[CONFIG_KEY]).unwrap();
    let read = gpu_bridge::config::load(&mounted);
    read.unwrap_or_else(|error| panic!("{file:?}: {error}"))
        .base
}

#[test]
fn each_overlay_sets_its_own_mode_and_the_base_sets_what_holds_without_a_file() {
    for mode in [Mode::Legacy, Mode::Both, Mode::Dra] {
        let overlay = manifests().join("overlays").join(mode.as_str());
        let config = configuration(&overlay.join(CONFIG_KEY));
        let mut expected = Config::default();
        expected.settings.mode = mode;
        assert_eq!(config, expected);
    }
    let base = configuration(&manifests().join("base").join(CONFIG_KEY));
    assert_eq!(base, Config::default());
}

#[test]
fn the_daemon_may_do_what_it_does_and_nothing_else() {
    let given = rights_in(&manifests().join("base/rbac.yaml"));
    assert_eq!(given, rights(&RIGHTS));
}

#[test]
fn where_claims_are_noticed_at_bind_they_are_read_by_name_alone() {
    let folder = manifests().join("components/notice-bind");
    let mut left = rights(&RIGHTS);
    for right in rights(&[WATCH_OF_CLAIMS]) {
        assert!(left.remove(&right));
    }
    assert_eq!(rights_in(&folder.join("rbac.yaml")), left);
    let component = folder.join("kustomization.yaml");
    let component: Kustomization = read(&component, &documents(&component)[0]);
    let patched = component.patches.into_iter().filter_map(|patch| patch.path);
    assert_eq!(patched.collect::<Vec<_>>(), ["rbac.yaml"]);
}

/// The component for Prometheus opens the port that it scrapes, and each of the two says which.
#[test]
fn what_is_scraped_is_the_port_that_the_component_opens() {
    let folder = manifests().join("monitoring");
    let component = folder.join("kustomization.yaml");
    let component: Kustomization = read(&component, &documents(&component)[0]);
    assert_eq!(component.kind, "Component");
    let [patch] = &component.patches[..] else {
        panic!("{component:?}");
    };
    let target = patch.target.as_ref().unwrap();
    assert_eq!(
        *target,
        serde_json::json!({"kind": "DaemonSet", "name": NAME})
    );
    let operations: Value = serde_yaml::from_str(patch.patch.as_ref().unwrap()).unwrap();
    let operations = operations.as_array().unwrap();
    assert_eq!(operations.len(), 1);
    assert_eq!(operations[0]["op"], "add");
    assert_eq!(
        operations[0]["path"],
        "/spec/template/spec/containers/0/env/-"
    );
    let variable = operations[0]["value"]["name"].as_str().unwrap();
    let command = Cli::command();
    let run = command.find_subcommand("run").unwrap();
    let mut arguments = run.get_arguments();
    let flag = arguments.find(|it| it.get_env().is_some_and(|env| env == variable));
    assert_eq!(flag.unwrap().get_long(), Some("http-addr"));
    let address = operations[0]["value"]["value"].as_str().unwrap();
    let address: std::net::SocketAddr = address.parse().unwrap();
    assert!(!address.ip().is_loopback());
    assert_eq!(address.port(), options().http_addr.port());

    let monitor = folder.join("podmonitor.yaml");
    let monitor: Monitoring<PodMonitorSpec> = read(&monitor, &documents(&monitor)[0]);
    assert_eq!(monitor.metadata.namespace.as_deref(), Some(NAME));
    let set: DaemonSet = base("daemonset.yaml", "DaemonSet");
    let labels = set.spec.template.metadata.unwrap().labels;
    assert_eq!(monitor.spec.selector.match_labels, labels);
    let [endpoint] = &monitor.spec.pod_metrics_endpoints[..] else {
        panic!("{monitor:?}");
    };
    assert_eq!(endpoint.path, METRICS);
    let mut rules = endpoint.relabelings.iter();
    let scraped = rules.find(|rule| rule.target_label.as_deref() == Some("__address__"));
    let port = format!("$1:{}", address.port());
    assert_eq!(scraped.unwrap().replacement.as_deref(), Some(port.as_str()));
}

#[test]
fn who_opens_the_port_may_ask_who_comes_and_the_right_to_read_is_that_of_the_status() {
    let folder = manifests().join("monitoring");
    let asks = [
        ("authentication.k8s.io", "tokenreviews", &["create"][..]),
        ("authorization.k8s.io", "subjectaccessreviews", &["create"]),
    ];
    assert_eq!(rights_in(&folder.join("rbac.yaml")), rights(&asks));
    let file = folder.join("status-reader.yaml");
    let reader: ClusterRole = read(&file, &documents(&file)[0]);
    let rules = reader.rules.unwrap();
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0].verbs, ["get"]);
    let urls = rules[0].non_resource_urls.as_deref();
    assert_eq!(urls, Some(&[STATUS.to_owned()][..]));
}

/// Does to a list what a strategic merge patch says, as far as ours go: members are told apart by one field.
fn merge_list(list: &mut Vec<Value>, patch: &Value, field: &str) {
    for change in patch.as_array().unwrap() {
        let before = list.len();
        list.retain(|member| member[field] != change[field]);
        if change["$patch"] == "delete" {
            assert!(list.len() < before, "there is nothing to delete: {change}");
        } else {
            list.push(change.clone());
        }
    }
}

#[test]
fn the_component_for_a_config_map_at_the_api_server_exchanges_the_source_and_gives_its_right() {
    let folder = manifests().join("components/config-map");
    let component = folder.join("kustomization.yaml");
    let component: Kustomization = read(&component, &documents(&component)[0]);
    assert_eq!(component.resources, ["rbac.yaml"]);
    let patch = component.patches[0].patch.as_ref().unwrap();
    let patch: Value = serde_yaml::from_str(patch).unwrap();
    assert_eq!(patch["metadata"]["name"], NAME);
    let patch = &patch["spec"]["template"]["spec"];
    let mut pod = serde_json::to_value(pod()).unwrap();
    let volumes = pod["volumes"].as_array_mut().unwrap();
    merge_list(volumes, &patch["volumes"], "name");
    let (container, patch) = (&mut pod["containers"][0], &patch["containers"][0]);
    assert_eq!(container["name"], patch["name"]);
    for (list, field) in [("env", "name"), ("volumeMounts", "mountPath")] {
        merge_list(container[list].as_array_mut().unwrap(), &patch[list], field);
    }
    let pod: PodSpec = serde_json::from_value(pod).unwrap();
    let volumes: BTreeSet<String> = pod.volumes.unwrap().into_iter().map(|it| it.name).collect();
    let container = pod.containers.into_iter().next().unwrap();
    for mount in container.volume_mounts.iter().flatten() {
        assert!(volumes.contains(&mount.name), "{mount:?} has no volume");
    }
    let map = format!("{NAME}/{NAME}");
    let source = MapName::parse(&map).map(Source::ConfigMap);
    assert_eq!(options_of(container).config, source);

    let file = folder.join("rbac.yaml");
    let [role, binding] = documents(&file).try_into().unwrap();
    let role: Role = read(&file, &role);
    assert_eq!(role.metadata.namespace.as_deref(), Some(NAME));
    let [rule] = role.rules.unwrap().try_into().unwrap();
    let rule: PolicyRule = rule;
    assert_eq!(rule.resource_names, Some(vec![NAME.to_owned()]));
    assert_eq!(rule.resources, Some(vec!["configmaps".to_owned()]));
    assert_eq!(rule.verbs, ["get", "list", "watch"]);
    let binding: RoleBinding = read(&file, &binding);
    assert_eq!(binding.metadata.namespace.as_deref(), Some(NAME));
    assert_eq!(Some(binding.role_ref.name), role.metadata.name);
    let subjects = binding.subjects.unwrap();
    assert_eq!(subjects[0].name, NAME);
    assert_eq!(subjects[0].namespace.as_deref(), Some(NAME));
}

type Rights = BTreeSet<(String, String, String)>;

/// Each right of a list, as group, resource and verb.
fn rights(list: &[Right]) -> Rights {
    let each = list.iter().flat_map(|(group, resource, verbs)| {
        let right = |verb: &&str| {
            (
                (*group).to_owned(),
                (*resource).to_owned(),
                (*verb).to_owned(),
            )
        };
        verbs.iter().map(right)
    });
    each.collect()
}

/// What the only role of a file gives.
fn rights_in(file: &Path) -> Rights {
    let roles: Vec<ClusterRole> = documents(file)
        .iter()
        .filter(|document| document["kind"] == "ClusterRole")
        .map(|document| read(file, document))
        .collect();
    let [role] = roles.as_slice() else {
        panic!("{} roles in {file:?}", roles.len());
    };
    role.rules.iter().flatten().flat_map(rights_of).collect()
}

/// Group, resource and verb of everything that a rule allows.
fn rights_of(rule: &PolicyRule) -> Vec<(String, String, String)> {
    assert_eq!(rule.non_resource_urls, None);
    assert_eq!(rule.resource_names, None);
    let mut rights = Vec::new();
    for group in rule.api_groups.iter().flatten() {
        for resource in rule.resources.iter().flatten() {
            for verb in &rule.verbs {
                rights.push((group.clone(), resource.clone(), verb.clone()));
            }
        }
    }
    rights
}

#[test]
fn rights_and_policy_are_those_of_the_daemons_user() {
    let set: DaemonSet = base("daemonset.yaml", "DaemonSet");
    assert_eq!(set.metadata.namespace.as_deref(), Some(NAME));
    assert_eq!(pod().service_account_name.as_deref(), Some(NAME));
    let account: ServiceAccount = base("serviceaccount.yaml", "ServiceAccount");
    assert_eq!(account.metadata.name.as_deref(), Some(NAME));
    assert_eq!(account.metadata.namespace.as_deref(), Some(NAME));
    let binding: ClusterRoleBinding = base("rbac.yaml", "ClusterRoleBinding");
    let subjects = binding.subjects.unwrap();
    assert_eq!(subjects.len(), 1);
    assert_eq!(subjects[0].name, NAME);
    assert_eq!(subjects[0].namespace.as_deref(), Some(NAME));
    let user = format!("\"system:serviceaccount:{NAME}:{NAME}\"");
    for file in ["admission.yaml", "admission-node.yaml"] {
        let policy: ValidatingAdmissionPolicy = base(file, "ValidatingAdmissionPolicy");
        let spec = policy.spec.unwrap();
        assert_eq!(spec.failure_policy.as_deref(), Some("Fail"), "{file}");
        let conditions = spec.match_conditions.unwrap();
        assert_eq!(conditions.len(), 1);
        assert!(conditions[0].expression.ends_with(&user));
    }
}

#[test]
fn class_policy_and_state_folder_name_the_driver() {
    let class: DeviceClass = base("deviceclass.yaml", "DeviceClass");
    assert_eq!(class.metadata.name.as_deref(), Some(DRIVER));
    let spec = class.spec.unwrap();
    assert_eq!(spec.extended_resource_name, None);
    let selectors = spec.selectors.unwrap();
    let expression = &selectors[0].cel.as_ref().unwrap().expression;
    assert!(expression.contains(&format!("device.driver == \"{DRIVER}\"")));
    let policy: ValidatingAdmissionPolicy = base("admission.yaml", "ValidatingAdmissionPolicy");
    let validations = policy.spec.unwrap().validations.unwrap();
    let driver = format!("\"{DRIVER}\"");
    assert!(
        validations
            .iter()
            .any(|validation| validation.expression.ends_with(&driver))
    );
    assert_eq!(options().state_dir.file_name().unwrap(), DRIVER);
}

#[test]
fn what_the_kubelet_and_the_runtime_must_find_is_on_the_host_at_the_same_path() {
    let options = options();
    let sockets = options.kubelet_dir.join("plugins_registry");
    for written in [
        &options.device_plugin_dir,
        &options.cdi_dir,
        &options.state_dir,
        &sockets,
    ] {
        let mounted = mounted(written).unwrap_or_else(|| panic!("{written:?} is not mounted"));
        assert_eq!(mounted.host, *written);
        assert!(!mounted.read_only, "{written:?} cannot be written");
    }
    assert!(options.admin_socket.starts_with(&options.state_dir));
    for read in [
        options.kubelet_dir.join("pod-resources"),
        options.kubelet_dir.join("dra_manager_state"),
        options.dev_root.join("dev"),
        options.sys_root.clone(),
    ] {
        let mounted = mounted(&read).unwrap_or_else(|| panic!("{read:?} is not mounted"));
        assert_eq!(mounted.host, read);
        assert!(mounted.read_only, "{read:?} need not be written");
    }
}

#[test]
fn processes_are_those_of_the_host() {
    let mounted = mounted(&options().proc_root).unwrap();
    assert_eq!(mounted.host, Path::new("/proc"));
    assert!(mounted.read_only);
    assert_eq!(pod().host_pid, Some(true));
}

/// What the pod has of its host, each with the reason beside it in the manifest; SECURITY.md has what follows from it.
#[test]
fn the_pod_asks_for_no_more_of_the_host_than_is_written_down() {
    let pod = pod();
    assert_eq!(pod.host_ipc, None);
    assert_eq!(pod.containers.len(), 1);
    assert_eq!(pod.init_containers, None);
    let container = container();
    let writable: BTreeSet<&str> = container
        .volume_mounts
        .as_deref()
        .unwrap()
        .iter()
        .filter(|mount| mount.read_only != Some(true))
        .map(|mount| mount.mount_path.as_str())
        .collect();
    let expected = [
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/plugins",
        "/var/lib/kubelet/plugins_registry",
        "/var/run/cdi",
    ];
    assert_eq!(writable, BTreeSet::from(expected));
    let security = container.security_context.clone().unwrap();
    assert_eq!(security.read_only_root_filesystem, Some(true));
    assert_eq!(security.privileged, Some(true), "NVML opens device nodes");
    assert_eq!(security.run_as_user, Some(0));
    assert_eq!(
        security.capabilities, None,
        "beside `privileged` it changes nothing"
    );
    assert_eq!(container.ports, None, "nothing listens beyond loopback");
    let written = std::fs::read_to_string(manifests().join("../SECURITY.md")).unwrap();
    for place in expected.into_iter().chain([
        "privileged",
        "hostPID",
        "hostNetwork",
        "readOnlyRootFilesystem",
    ]) {
        assert!(written.contains(place), "SECURITY.md does not name {place}");
    }
}

#[test]
fn configuration_and_library_are_where_the_flags_say() {
    let options = options();
    let Some(Source::File(config)) = options.config else {
        panic!("the base mounts its ConfigMap");
    };
    assert_eq!(config.file_name().unwrap(), CONFIG_KEY);
    let mounts = container().volume_mounts.unwrap();
    let mount = mounts
        .iter()
        .find(|mount| Path::new(&mount.mount_path) == config.parent().unwrap())
        .unwrap();
    assert_eq!(mount.sub_path, None, "a file mounted alone never changes");
    let volumes = pod().volumes.unwrap();
    let volume = volumes
        .iter()
        .find(|volume| volume.name == mount.name)
        .unwrap();
    assert_eq!(volume.config_map.as_ref().unwrap().name, NAME);
    let map: ConfigMap = base("config.yaml", "ConfigMap");
    assert_eq!(map.metadata.name.as_deref(), Some(NAME));
    assert!(map.data.unwrap().contains_key(CONFIG_KEY));
    // What is found below the driver's root here is what specs name below its root on the host.
    for folder in ["usr/lib/x86_64-linux-gnu", "usr/bin"] {
        let seen = mounted(&options.driver_root_ctr_path.join(folder)).unwrap();
        assert_eq!(seen.host, options.driver_root.join(folder));
        assert!(seen.read_only);
    }
    let library = mounted(&options.nvml_library.unwrap()).unwrap();
    assert!(library.read_only);
    assert_eq!(library.host.file_name().unwrap(), "libnvidia-ml.so.1");
}

/// The verb `probe` as a probe of the DaemonSet runs it: with the variables of the pod.
fn probe_of(probe: Option<Probe>) -> (String, String) {
    let line = probe.unwrap().exec.unwrap().command.unwrap();
    let cli = Cli::try_parse_from(&line).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(cli.command, Command::Probe(_)), "{line:?}");
    (line[0].clone(), line.last().unwrap().clone())
}

#[test]
fn the_probes_ask_the_pods_own_daemon_by_the_name_that_the_image_has() {
    let container = container();
    let image = std::fs::read_to_string(manifests().join("Dockerfile")).unwrap();
    for (probe, page) in [
        (container.liveness_probe, HEALTHZ),
        (container.readiness_probe, READYZ),
    ] {
        let (program, asked) = probe_of(probe);
        assert!(image.contains(&format!(" /usr/bin/{program}\n")));
        assert_eq!(format!("/{asked}"), page);
    }
    let options = options();
    assert_ne!(options.own_admin_socket(), Some(options.admin_socket));
}

#[test]
fn in_an_update_two_pods_are_on_a_node_and_no_address_of_theirs_is_reserved() {
    let set: DaemonSet = base("daemonset.yaml", "DaemonSet");
    let update = set.spec.update_strategy.unwrap();
    let update = update.rolling_update.unwrap();
    assert_eq!(update.max_surge, Some(IntOrString::Int(1)));
    assert_eq!(update.max_unavailable, Some(IntOrString::Int(0)));
    // The scheduler would keep the second pod off the node.
    assert_eq!(pod().host_network, Some(true));
    assert_eq!(container().ports, None);
    assert!(options().http_addr.ip().is_loopback());
}
