//! The subset of Pod reads what upstream writes.
//!
//! `golden/pod-v0.37.2.bin` is the output of `v1.Pod#Marshal()` of k8s.io/api v0.37.2 for a pod that has
//! every field of the subset set, and a dozen others that a reader has to skip.

use legacy_proto::pod_subset::Pod;
use prost::Message;

const UPSTREAM: &[u8] = include_bytes!("golden/pod-v0.37.2.bin");

fn pod() -> Pod {
    Pod::decode(UPSTREAM).expect("upstream's bytes decode")
}

#[test]
fn the_identity_and_the_deletion_of_an_upstream_pod_are_read() {
    let meta = pod().metadata.expect("metadata");
    assert_eq!(
        (meta.namespace.as_str(), meta.name.as_str()),
        ("train", "llm-0")
    );
    assert_eq!(
        (meta.uid.as_str(), meta.resource_version.as_str()),
        ("uid-7c", "42")
    );
    let seconds = |time: Option<legacy_proto::pod_subset::Time>| time.map(|time| time.seconds);
    assert_eq!(seconds(meta.creation_timestamp), Some(1_700_000_000));
    assert_eq!(seconds(meta.deletion_timestamp), Some(1_700_000_100));
    assert_eq!(meta.deletion_grace_period_seconds, Some(30));
    assert_eq!(meta.annotations["note"], "a");
}

#[test]
fn the_requests_and_claims_of_an_upstream_pod_are_read() {
    let spec = pod().spec.expect("spec");
    assert_eq!(spec.node_name, "node-1");
    assert_eq!(spec.termination_grace_period_seconds, Some(30));
    assert_eq!(spec.init_containers[0].name, "sidecar");
    assert_eq!(spec.init_containers[0].restart_policy, "Always");
    let main = &spec.containers[0];
    assert_eq!(
        (main.name.as_str(), main.restart_policy.as_str()),
        ("main", "")
    );
    let resources = main.resources.clone().expect("resources");
    assert_eq!(resources.limits["nvidia.com/gpu"].string, "2");
    assert_eq!(resources.requests["nvidia.com/gpu"].string, "2");
    assert_eq!(
        (
            resources.claims[0].name.as_str(),
            resources.claims[0].request.as_str()
        ),
        ("gpu", "one")
    );
    assert_eq!(spec.resource_claims[0].name, "gpu");
    assert_eq!(spec.resource_claims[0].resource_claim_template_name, "tmpl");
    assert_eq!(spec.resource_claims[1].resource_claim_name, "shared-claim");
}

#[test]
fn the_status_of_an_upstream_pod_is_read() {
    let status = pod().status.expect("status");
    assert_eq!(status.phase, "Failed");
    assert_eq!(status.message, "m");
    assert_eq!(status.reason, "UnexpectedAdmissionError");
    let init = &status.init_container_statuses[0];
    assert_eq!(
        (init.name.as_str(), init.container_id.as_str()),
        ("sidecar", "containerd://1")
    );
    let running = init.state.clone().and_then(|state| state.running);
    assert_eq!(
        running.and_then(|it| it.started_at).map(|it| it.seconds),
        Some(1_700_000_001)
    );
    let main = &status.container_statuses[0];
    assert_eq!(
        (
            main.name.as_str(),
            main.restart_count,
            main.container_id.as_str()
        ),
        ("main", 4, "containerd://2")
    );
    let state = main.state.clone().expect("a state");
    assert!(state.waiting.is_none() && state.running.is_none());
    let ended = state.terminated.expect("a terminated container");
    assert_eq!((ended.exit_code, ended.reason.as_str()), (137, "OOMKilled"));
    assert_eq!(ended.finished_at.map(|it| it.seconds), Some(1_700_000_003));
    assert_eq!(status.resource_claim_statuses[0].name, "gpu");
    assert_eq!(
        status.resource_claim_statuses[0].resource_claim_name,
        "llm-0-gpu-x"
    );
    let extended = status.extended_resource_claim_status.expect("its claim");
    assert_eq!(extended.resource_claim_name, "llm-0-extended-resources-y");
    let mapping = &extended.request_mappings[0];
    assert_eq!(mapping.container_name, "main");
    assert_eq!(mapping.resource_name, "nvidia.com/gpu");
    assert_eq!(mapping.request_name, "container-0-request-0");
}
