//! The cluster: version, API, rights, classes, and what the Node says of its runtime.
//!
//! Kubernetes' types stop in here.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use bridge_core::{Face, TAINT_KEY, TaintEffect};
use futures::future::join_all;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    Device, DeviceClass, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, ListParams, PostParams};
use tokio::time::timeout;

use super::{Finding, Level};
use crate::cli::RunOptions;
use crate::client;
use crate::config::{Notice, Source};
use crate::daemon::rights::{RIGHTS, Right, WATCH_OF_CLAIMS};
use crate::dra::DRIVER;
use crate::migrate::{
    Candidate, Mapped, MappedClass, NAMES_KEPT_SINCE, minor_version, what_comes_of,
};

/// How long the API server may take for one answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The API that DRA needs: GA in Kubernetes 1.34.
const DRA_API: &str = "resource.k8s.io/v1";
/// The kinds of it that are used.
const DRA_KINDS: [&str; 3] = ["deviceclasses", "resourceclaims", "resourceslices"];
/// The first version that serves [`DRA_API`].
const DRA_SINCE: u32 = 34;
/// The class that claims name, after the driver.
const CLASS: &str = DRIVER;

pub(super) async fn examine(options: &RunOptions) -> Vec<Finding> {
    let client = match client::of_daemon(options.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![unreachable(format!("{error:#}"))],
    };
    let version = match asked(client.apiserver_version()).await {
        Ok(version) => version,
        Err(why) => return vec![unreachable(why)],
    };
    let mut found = vec![self::version(&version.minor, &version.git_version)];
    found.push(dra_api(&client).await);
    found.push(taints(&client, &options.node_name).await);
    found.extend(rights(&client, options).await);
    found.push(runtime(&client, options).await);
    found.extend(classes(&client, minor_version(&version.minor)).await);
    found
}

/// An answer in time, or why there is none.
async fn asked<T, E: Display>(question: impl Future<Output = Result<T, E>>) -> Result<T, String> {
    match timeout(PATIENCE, question).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}

fn unreachable(what: String) -> Finding {
    Finding::problem(
        "API server",
        what,
        "claims and the node's slice are there; without it only what is known already is served",
        "in a pod: look at its ServiceAccount; else give --kubeconfig",
    )
}

fn version(minor: &str, git_version: &str) -> Finding {
    let Some(minor) = minor_version(minor) else {
        return Finding::warning(
            "API server",
            format!("its version {git_version} can't be read"),
            "it is not known what it serves",
            "nothing, if the lines below are fine",
        );
    };
    if minor < DRA_SINCE {
        return Finding::problem(
            "API server",
            format!("{git_version} answers"),
            format!("claims need Kubernetes 1.{DRA_SINCE} or later"),
            "upgrade, or use mode legacy with NVIDIA's own plugin until then",
        );
    }
    // The API server drops the field without a word.
    let without = if minor < NAMES_KEPT_SINCE {
        format!(
            ", and keeps no extendedResourceName of a DeviceClass (KEP-5004): before 1.{NAMES_KEPT_SINCE} that needs the \
             feature gate DRAExtendedResource"
        )
    } else {
        String::new()
    };
    Finding::ok("API server", format!("{git_version} answers{without}"))
}

async fn dra_api(client: &kube::Client) -> Finding {
    let why = "claims can't be served without it";
    let to_do = format!(
        "serve {DRA_API}: it is on from 1.{DRA_SINCE} unless --runtime-config or the gate DynamicResourceAllocation \
         turns it off"
    );
    match asked(client.list_api_group_resources(DRA_API)).await {
        Err(error) => {
            let what = format!("{DRA_API} is not served: {error}");
            Finding::problem("DRA API", what, why, to_do)
        }
        Ok(list) => {
            let mut missing = DRA_KINDS.to_vec();
            missing.retain(|kind| list.resources.iter().all(|it| it.name != *kind));
            if missing.is_empty() {
                return Finding::ok("DRA API", format!("{DRA_API} is served"));
            }
            let what = format!("{DRA_API} lacks {}", missing.join(", "));
            Finding::problem("DRA API", what, why, to_do)
        }
    }
}

/// Whether the server keeps the taints of devices. No page of it says so, and it drops them without a word; a write that
/// is no write (`dryRun`) shows it.
async fn taints(client: &kube::Client, node: &str) -> Finding {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let answer = match asked(slices.create(&dry, &tainted(node))).await {
        Ok(answer) => answer,
        Err(why) => {
            return Finding::warning(
                "device taints",
                format!("whether the API server keeps them can't be tried: {why}"),
                "where it drops them, devices are left out of the slice instead",
                "ask with the daemon's own token, as `kubectl exec` into its pod does",
            );
        }
    };
    let mut devices = answer.spec.devices.into_iter().flatten();
    if devices.any(|device| device.taints.is_some_and(|taints| !taints.is_empty())) {
        return Finding::ok(
            "device taints",
            "the API server keeps them (DRADeviceTaints)",
        );
    }
    Finding::warning(
        "device taints",
        "the API server drops them (DRADeviceTaints is off)",
        "devices are left out of the slice instead, and the pods of a claim that lost a race are not evicted",
        "set the feature gate DRADeviceTaints on API server, scheduler and controller manager: it is on from Kubernetes \
         1.36; or leave it so",
    )
}

/// A slice with one tainted device, for a pool that nobody has.
fn tainted(node: &str) -> ResourceSlice {
    let taint = DeviceTaint {
        key: TAINT_KEY.to_owned(),
        effect: TaintEffect::NoSchedule.as_str().to_owned(),
        ..DeviceTaint::default()
    };
    let device = Device {
        name: "gpu-0".to_owned(),
        taints: Some(vec![taint]),
        ..Device::default()
    };
    ResourceSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("probe-{DRIVER}-")),
            ..ObjectMeta::default()
        },
        spec: ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool {
                name: "probe".to_owned(),
                generation: 1,
                resource_slice_count: 1,
            },
            devices: Some(vec![device]),
            ..ResourceSliceSpec::default()
        },
    }
}

// --- Rights ---

/// A right to do one thing: group, resource (with its subresource), verb.
type Verb = (&'static str, &'static str, &'static str);

async fn rights(client: &kube::Client, options: &RunOptions) -> Vec<Finding> {
    let file = options.config.as_ref().and_then(Source::file);
    // What is wrong with the file is told elsewhere; the daemon goes by its last good one then, or by the defaults.
    let config = file.and_then(|path| crate::config::load(path).ok());
    let config = config.unwrap_or_default().base;
    let mut wanted = verbs(&RIGHTS);
    let mut file = "manifests/base/rbac.yaml";
    if config.notice == Notice::Bind {
        let spared = verbs(&[WATCH_OF_CLAIMS]);
        wanted.retain(|verb| !spared.contains(verb));
        file = "manifests/components/notice-bind/rbac.yaml";
    }
    let why = "the daemon asks for it: SECURITY.md says what for";
    let to_do = format!(
        "apply {file} anew; ask with the daemon's own token, as `kubectl exec` into its pod does"
    );
    let problem = |what| Finding::problem("rights", what, why, &to_do);
    let mut found = lacking(client, &wanted, problem).await;
    if found.is_empty() {
        let what = format!("all {} verbs of {file}", wanted.len());
        found.push(Finding::ok("rights", what));
    }
    found
}

fn verbs(rights: &[Right]) -> Vec<Verb> {
    let each = |(group, resource, verbs): &Right| {
        let (group, resource) = (*group, *resource);
        verbs.iter().map(move |verb| (group, resource, *verb))
    };
    rights.iter().flat_map(each).collect()
}

/// What of these rights the caller does not have, and what is not known. They are asked for all at once: one that hangs
/// takes as long as all.
async fn lacking(
    client: &kube::Client,
    wanted: &[Verb],
    finding: impl Fn(String) -> Finding,
) -> Vec<Finding> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let ask = async |(group, resource, verb): &Verb| {
        let review = review(group, resource, verb);
        match asked(reviews.create(&PostParams::default(), &review)).await {
            Ok(answer) if answer.status.as_ref().is_some_and(|it| it.allowed) => None,
            Ok(_) => Some(finding(format!("{verb} {resource} is missing"))),
            Err(why) => Some(Finding {
                level: Level::Warning,
                ..finding(format!("whether {verb} {resource} is there: {why}"))
            }),
        }
    };
    let answers = join_all(wanted.iter().map(ask)).await;
    answers.into_iter().flatten().collect()
}

fn review(group: &str, resource: &str, verb: &str) -> SelfSubjectAccessReview {
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (resource, None),
    };
    SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                verb: Some(verb.to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    }
}

// --- The Node and the classes ---

async fn runtime(client: &kube::Client, options: &RunOptions) -> Finding {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = match asked(nodes.get(&options.node_name)).await {
        Ok(node) => node,
        Err(why) => {
            return Finding::problem(
                "node",
                format!("the Node {} can't be read: {why}", options.node_name),
                "the slice belongs to it, and the count of GPUs is in it",
                "give the Node's name as --node-name",
            );
        }
    };
    let info = node.status.and_then(|status| status.node_info);
    let runtime = info.map(|info| info.container_runtime_version);
    judge_runtime(runtime.unwrap_or_default())
}

/// Whether the runtime takes CDI devices from the kubelet, by its name and version.
fn judge_runtime(runtime: String) -> Finding {
    let why = "a container gets its GPUs as CDI devices, and a runtime that passes them over starts it without";
    match runtime.split_once("://") {
        Some(("containerd", version)) if version.starts_with("1.") => Finding::warning(
            "runtime",
            runtime,
            why,
            "see to it that `enable_cdi` is true in its configuration, and /var/run/cdi in its cdi_spec_dirs; \
             containerd 2 has that by default",
        ),
        Some(("containerd", _)) => Finding::ok("runtime", runtime),
        _ => Finding::warning(
            "runtime",
            if runtime.is_empty() {
                "the Node does not say which one it has".to_owned()
            } else {
                runtime
            },
            why,
            "see to it that CDI is on; gpu-bridge is tested with containerd 2 alone",
        ),
    }
}

async fn classes(client: &kube::Client, minor: Option<u32>) -> Vec<Finding> {
    let classes: Api<DeviceClass> = Api::all(client.clone());
    let classes = match asked(classes.list(&ListParams::default())).await {
        Ok(classes) => classes.items,
        Err(why) => {
            return vec![Finding::warning(
                "DeviceClasses",
                format!("they can't be listed: {why}"),
                "one that maps nvidia.com/gpu turns counted pods into claims, and nothing warns of it",
                "ask as an admin: kubectl get deviceclass -o \
                 custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName",
            )];
        }
    };
    let resource = Face::Legacy.served_name();
    let name = |class: &DeviceClass| class.metadata.name.clone().unwrap_or_default();
    let mut found = match what_comes_of(classes.iter().filter_map(Candidate::of), minor) {
        Mapped::By(class) => mapping(&class, |what| {
            Finding::problem(
                "DeviceClasses",
                what,
                "the scheduler turns counted pods into claims on every node whose count is 0",
                "take that field away, unless every node is in mode dra: migration-guide/install.md",
            )
        }),
        Mapped::NotHere(class) => mapping(&class, |what| {
            Finding::warning(
                "DeviceClasses",
                what,
                "the scheduler of Kubernetes 1.34 turns no counted pods into claims on nodes with a device plugin, and \
                 that of 1.35 does on every node whose count is 0",
                "take that field away before an upgrade, unless every node is in mode dra by then: \
                 migration-guide/older-kubernetes.md",
            )
        }),
        Mapped::No | Mapped::NotKept | Mapped::Unknown => Vec::new(),
    };
    if classes.iter().any(|class| name(class) == CLASS) {
        if found.is_empty() {
            found.push(Finding::ok(
                "DeviceClasses",
                format!("{CLASS} is there, and none maps {resource}"),
            ));
        }
    } else {
        found.push(Finding::warning(
            "DeviceClasses",
            format!("there is no {CLASS}"),
            "manifests that name it can't be scheduled",
            "apply manifests/base/deviceclass.yaml",
        ));
    }
    found
}

/// A finding for each class that has the name of the count.
fn mapping(class: &MappedClass, finding: impl Fn(String) -> Finding) -> Vec<Finding> {
    let resource = Face::Legacy.served_name();
    let names = [&class.name].into_iter().chain(&class.passed_over);
    names
        .map(|name| finding(format!("{name} has extendedResourceName: {resource}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_judged_by_what_they_serve() {
        for (minor, level) in [
            ("33", Level::Problem),
            ("34+", Level::Ok),
            ("37", Level::Ok),
            ("x", Level::Warning),
        ] {
            let told = version(minor, "v1");
            assert_eq!(told.level, level, "{minor}");
            assert_eq!(told.what.contains("KEP-5004"), minor == "34+", "{minor}");
        }
    }

    #[test]
    fn runtimes_are_judged_by_whether_they_take_cdi_devices() {
        for (runtime, level) in [
            ("containerd://2.4.0", Level::Ok),
            ("containerd://1.7.27", Level::Warning),
            ("cri-o://1.33.0", Level::Warning),
            ("", Level::Warning),
        ] {
            assert_eq!(judge_runtime(runtime.to_owned()).level, level, "{runtime}");
        }
    }
}
