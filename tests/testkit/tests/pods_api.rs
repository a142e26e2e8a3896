//! The kubelet's Pods API.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of tests are tests, which clippy does not see"
)]

use legacy_proto::pod_subset::Pod as ProtoPod;
use legacy_proto::pods::pods_client::PodsClient;
use legacy_proto::pods::{EventType, GetPodRequest, ListPodsRequest, WatchPodsRequest};
use prost::Message as _;
use testkit::{Kubelet, Phase, Pod};
use tonic::Code;
use tonic::transport::Channel;

const GPU: &str = "nvidia.com/gpu";

fn client(dir: &tempfile::TempDir) -> PodsClient<Channel> {
    let socket = dir.path().join("pods-api/pods-api.sock");
    PodsClient::new(testkit::dial::localhost(&socket))
}

fn decode(bytes: &[u8]) -> ProtoPod {
    ProtoPod::decode(bytes).unwrap()
}

#[tokio::test]
async fn pods_are_listed_with_their_uid_requests_and_phase() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let pod = Pod::new("train", "llm", "uid-llm")
        .app("main", GPU, 2)
        .sidecar("proxy", GPU, 0);
    kubelet.admit(pod).await.unwrap();
    kubelet.run("uid-llm").await.unwrap();
    let answer = client(&dir).list_pods(ListPodsRequest {}).await.unwrap();
    let pods = answer.into_inner().pods;
    assert_eq!(pods.len(), 1);
    let pod = decode(&pods[0]);
    let (meta, spec) = (pod.metadata.unwrap(), pod.spec.unwrap());
    assert_eq!(
        (meta.namespace.as_str(), meta.uid.as_str()),
        ("train", "uid-llm")
    );
    let limits = spec.containers[0].resources.clone().unwrap().limits;
    assert_eq!(limits[GPU].string, "2");
    assert_eq!(spec.init_containers[0].restart_policy, "Always");
    let status = pod.status.unwrap();
    assert_eq!(status.phase, "Running");
    let state = status.container_statuses[0].state.clone().unwrap();
    assert!(state.running.is_some());

    let request = GetPodRequest {
        pod_uid: "uid-other".to_owned(),
    };
    let missing = client(&dir).get_pod(request).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

#[tokio::test]
async fn nothing_is_answered_before_the_kubelet_knows_all_its_pods() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    kubelet.hold_sources();
    let status = client(&dir)
        .list_pods(ListPodsRequest {})
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    let status = client(&dir)
        .watch_pods(WatchPodsRequest {})
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    kubelet.release_sources();
    client(&dir).list_pods(ListPodsRequest {}).await.unwrap();
}

#[tokio::test]
async fn a_watch_begins_with_what_there_is_and_goes_on_with_what_happens() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let pod = |name: &str| Pod::new("default", name, &format!("uid-{name}")).app("main", GPU, 0);
    kubelet.admit(pod("p")).await.unwrap();
    let answer = client(&dir).watch_pods(WatchPodsRequest {}).await.unwrap();
    let mut events = answer.into_inner();
    let mut next = async || {
        let event = events.message().await.unwrap().unwrap();
        let pod = decode(&event.pod);
        let uid = pod.metadata.as_ref().map(|it| it.uid.clone());
        (event.r#type(), uid.unwrap_or_default(), pod)
    };
    let (kind, uid, _) = next().await;
    assert_eq!((kind, uid.as_str()), (EventType::Added, "uid-p"));
    assert_eq!(next().await.0, EventType::InitialSyncComplete);

    kubelet.admit(pod("q")).await.unwrap();
    let (kind, uid, _) = next().await;
    assert_eq!((kind, uid.as_str()), (EventType::Added, "uid-q"));
    kubelet.finish("uid-p", Phase::Succeeded).await.unwrap();
    let (kind, uid, seen) = next().await;
    assert_eq!((kind, uid.as_str()), (EventType::Modified, "uid-p"));
    assert_eq!(seen.status.unwrap().phase, "Succeeded");
    kubelet.request_deletion("uid-q");
    let (_, _, seen) = next().await;
    assert!(seen.metadata.unwrap().deletion_timestamp.is_some());
    kubelet.force_delete("uid-q");
    let (kind, uid, seen) = next().await;
    assert_eq!((kind, uid.as_str()), (EventType::Deleted, "uid-q"));
    assert!(seen.spec.is_none());
}

#[tokio::test]
async fn a_watch_ends_with_the_kubelet() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let answer = client(&dir).watch_pods(WatchPodsRequest {}).await.unwrap();
    let mut events = answer.into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert_eq!(first.r#type(), EventType::InitialSyncComplete);
    kubelet.stop().await;
    assert!(!matches!(events.message().await, Ok(Some(_))));
    client(&dir)
        .list_pods(ListPodsRequest {})
        .await
        .unwrap_err();
}
