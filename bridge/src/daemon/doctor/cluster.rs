//! The cluster: version, API, rights, classes, and what the Node says of its runtime.
//!
//! Kubernetes' types stop in here.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, ListParams, PostParams};
use tokio::time::timeout;

use super::Finding;
use crate::cli::RunOptions;
use crate::config::Demand;
use crate::daemon::client;
use crate::daemon::rights::{DEMAND_RIGHTS, RIGHTS, Right};

/// How long the API server may take for one answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The API that DRA needs: GA in Kubernetes 1.34.
const DRA_API: &str = "resource.k8s.io/v1";
/// The kinds of it that are used.
const DRA_KINDS: [&str; 3] = ["deviceclasses", "resourceclaims", "resourceslices"];
/// The version from which device taints are on without a gate (`DRADeviceTaints`, beta in 1.36).
const TAINTS_SINCE: u32 = 36;
/// The first version that serves [`DRA_API`].
const DRA_SINCE: u32 = 34;
/// The resource of counted pods.
const RESOURCE: &str = "nvidia.com/gpu";
/// The class that claims name.
const CLASS: &str = "gpu.nvidia.com";

pub(super) async fn examine(options: &RunOptions) -> Vec<Finding> {
    let client = match client(options.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![unreachable(format!("{error:#}"))],
    };
    let version = match asked(client.apiserver_version()).await {
        Ok(version) => version,
        Err(why) => return vec![unreachable(why)],
    };
    let mut found = vec![self::version(&version.minor, &version.git_version)];
    found.push(dra_api(&client).await);
    found.extend(rights(&client, options).await);
    found.push(runtime(&client, options).await);
    found.extend(classes(&client).await);
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
    // Providers write `34+`.
    let digits: String = minor.chars().take_while(char::is_ascii_digit).collect();
    let Ok(minor) = digits.parse::<u32>() else {
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
    if minor < TAINTS_SINCE {
        return Finding::warning(
            "API server",
            format!("{git_version} answers"),
            format!(
                "device taints (DRADeviceTaints) are off by default before 1.{TAINTS_SINCE}: devices are left out of \
                 the slice instead, and the pods of a claim that lost a race are not evicted"
            ),
            "set the feature gate DRADeviceTaints on API server, scheduler and controller manager, or leave it so",
        );
    }
    Finding::ok("API server", format!("{git_version} answers"))
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
            let served = |kind: &&&str| list.resources.iter().any(|it| it.name == **kind);
            let missing: Vec<&str> = DRA_KINDS
                .iter()
                .filter(|kind| !served(kind))
                .copied()
                .collect();
            if missing.is_empty() {
                return Finding::ok("DRA API", format!("{DRA_API} is served"));
            }
            let what = format!("{DRA_API} lacks {}", missing.join(", "));
            Finding::problem("DRA API", what, why, to_do)
        }
    }
}

// --- Rights ---

async fn rights(client: &kube::Client, options: &RunOptions) -> Vec<Finding> {
    let why = "the daemon asks for it: SECURITY.md says what for";
    let to_do = "apply manifests/base/rbac.yaml anew; ask with the daemon's own token, as `kubectl exec` into its pod does";
    let mut found = missing(client, &RIGHTS).await;
    let mut findings = match found.as_slice() {
        [] => vec![Finding::ok(
            "rights",
            format!("all {} verbs of manifests/base/rbac.yaml", verbs(&RIGHTS)),
        )],
        _ => found
            .drain(..)
            .map(|what| Finding::problem("rights", what, why, to_do))
            .collect(),
    };
    let config = options
        .config
        .as_ref()
        .and_then(|path| crate::config::load(path).ok());
    if config.is_some_and(|config| config.demand == Demand::Watch) {
        let why = "offers.demand is watch: without it turns decide where free GPUs are";
        let to_do = "apply manifests/components/demand: migration-guide/pods-that-wait.md";
        let missing = missing(client, &DEMAND_RIGHTS).await.into_iter();
        findings.extend(missing.map(|what| Finding::warning("rights", what, why, to_do)));
    }
    findings
}

fn verbs(rights: &[Right]) -> usize {
    rights.iter().map(|(_, _, verbs)| verbs.len()).sum()
}

/// What of these rights the caller does not have, in words.
async fn missing(client: &kube::Client, rights: &[Right]) -> Vec<String> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let mut missing = Vec::new();
    for (group, resource, verbs) in rights {
        for verb in *verbs {
            let review = review(group, resource, verb);
            match asked(reviews.create(&PostParams::default(), &review)).await {
                Ok(answer) if answer.status.as_ref().is_some_and(|it| it.allowed) => {}
                Ok(_) => missing.push(format!("{verb} {resource} is missing")),
                Err(why) => missing.push(format!("whether {verb} {resource} is there: {why}")),
            }
        }
    }
    missing
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

async fn classes(client: &kube::Client) -> Vec<Finding> {
    let classes: Api<DeviceClass> = Api::all(client.clone());
    let classes = match asked(classes.list(&ListParams::default())).await {
        Ok(classes) => classes.items,
        Err(why) => {
            return vec![Finding::warning(
                "DeviceClasses",
                format!("they can't be listed: {why}"),
                "one that maps nvidia.com/gpu turns counted pods into claims; the daemon itself need not list them",
                "ask as an admin: kubectl get deviceclass -o \
                 custom-columns=NAME:.metadata.name,RESOURCE:.spec.extendedResourceName",
            )];
        }
    };
    let name = |class: &DeviceClass| class.metadata.name.clone().unwrap_or_default();
    let mapping = classes.iter().filter(|class| {
        let spec = class.spec.as_ref();
        spec.and_then(|spec| spec.extended_resource_name.as_deref()) == Some(RESOURCE)
    });
    let mut found: Vec<Finding> = mapping
        .map(|class| {
            Finding::problem(
                "DeviceClasses",
                format!("{} has extendedResourceName: {RESOURCE}", name(class)),
                "the scheduler turns counted pods into claims on every node whose count is 0",
                "take that field away, unless every node is in mode dra: migration-guide/install.md",
            )
        })
        .collect();
    if classes.iter().any(|class| name(class) == CLASS) {
        if found.is_empty() {
            found.push(Finding::ok(
                "DeviceClasses",
                format!("{CLASS} is there, and none maps {RESOURCE}"),
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

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn versions_are_judged_by_what_they_serve() {
        for (minor, level) in [
            ("33", Level::Problem),
            ("34+", Level::Warning),
            ("36", Level::Ok),
            ("37", Level::Ok),
            ("x", Level::Warning),
        ] {
            assert_eq!(version(minor, "v1").level, level, "{minor}");
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
