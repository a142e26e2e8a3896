//! Being registered, and staying so.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu_bridge::device_plugin::RegistrationState;
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::registration_server::{Registration, RegistrationServer};
use legacy_proto::deviceplugin::{Empty, RegisterRequest};
use testkit::{Kubelet, Pod, eventually};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::support::{Arbiter, DEADLINE, Plugin, RESOURCE, no_listing, sockets};

#[tokio::test]
async fn all_ids_are_healthy_within_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(4).await;
    let folder = dir.path().join("device-plugins");
    let since = Instant::now();
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 4, DEADLINE).await;
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;
    assert!(since.elapsed() < Duration::from_secs(5));
    assert_eq!(sockets(&folder).len(), 1);
}

#[tokio::test]
async fn a_kubelet_that_is_not_there_yet_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    plugin
        .wait("KubeletAbsent", |state| {
            matches!(state, RegistrationState::KubeletAbsent { .. })
        })
        .await;
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;
}

#[tokio::test]
async fn a_restarted_kubelet_is_registered_with_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(3).await;
    let folder = dir.path().join("device-plugins");
    let _plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 3, DEADLINE).await;
    for _ in 0..3 {
        kubelet.restart().await.unwrap();
        kubelet.wait_for_healthy(RESOURCE, 3, DEADLINE).await;
        kubelet
            .admit(Pod::new("a", "p", &uid()).app("c", RESOURCE, 1))
            .await
            .expect("a kubelet that has registered us allocates");
    }
}

#[tokio::test]
async fn a_kubelet_that_was_away_for_long_is_registered_with() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(3).await;
    let folder = dir.path().join("device-plugins");
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 3, DEADLINE).await;
    kubelet.stop().await;
    // Its socket is still there, and nobody listens on it.
    plugin
        .wait("Failing", |state| {
            matches!(state, RegistrationState::Failing { .. })
        })
        .await;
    kubelet.resume().await.unwrap();
    kubelet.wait_for_healthy(RESOURCE, 3, DEADLINE).await;
}

#[tokio::test]
async fn a_folder_that_is_made_anew_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    let _plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    kubelet.stop().await;
    std::fs::remove_dir_all(&folder).unwrap();
    kubelet.resume().await.unwrap();
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
}

#[tokio::test]
async fn our_socket_comes_back_when_somebody_removes_it_and_the_kubelet_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;
    let before = sockets(&folder);
    std::fs::remove_file(folder.join(&before[0])).unwrap();
    eventually("our socket's file", DEADLINE, || sockets(&folder) == before).await;
    // The new file leads to us.
    let mut client = DevicePluginClient::new(testkit::dial::localhost(&folder.join(&before[0])));
    let options = client.get_device_plugin_options(Empty {}).await.unwrap();
    assert!(options.into_inner().get_preferred_allocation_available);
    assert_eq!(kubelet.capacity(RESOURCE).unwrap().allocatable, 2);
    kubelet
        .admit(Pod::new("a", "p", &uid()).app("c", RESOURCE, 2))
        .await
        .expect("the kubelet's connection is as it was");
}

#[tokio::test]
async fn our_socket_is_removed_when_serving_ends() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path()).await.unwrap();
    let arbiter = Arbiter::start(2).await;
    let folder = dir.path().join("device-plugins");
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    kubelet.wait_for_healthy(RESOURCE, 2, DEADLINE).await;
    plugin.stop.cancel();
    let ended = tokio::time::timeout(DEADLINE, &mut plugin.task).await;
    ended.expect("it ends").unwrap().unwrap();
    assert_eq!(sockets(&folder), Vec::<String>::new());
    kubelet.wait_for_healthy(RESOURCE, 0, DEADLINE).await;
}

#[tokio::test]
async fn sockets_of_a_former_process_are_swept_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let _kubelet = Kubelet::start(dir.path()).await.unwrap();
    let folder = dir.path().join("device-plugins");
    let stale = folder.join("gpu-bridge-node-1-1.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let other = folder.join("nvidia-gpu.sock");
    drop(std::os::unix::net::UnixListener::bind(&other).unwrap());
    let arbiter = Arbiter::start(1).await;
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;
    assert!(!stale.exists());
    assert!(other.exists());
}

#[tokio::test]
async fn a_folder_whose_path_is_too_long_ends_it_with_words() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("x".repeat(100));
    std::fs::create_dir(&folder).unwrap();
    std::fs::File::create(folder.join("kubelet.sock")).unwrap();
    let arbiter = Arbiter::start(1).await;
    let mut plugin = Plugin::start(&folder, arbiter.handle.clone(), no_listing());
    let ended = tokio::time::timeout(DEADLINE, &mut plugin.task).await;
    let error = anyhow::Error::from(ended.expect("it ends").unwrap().unwrap_err());
    assert!(
        format!("{error:#}").contains("107 is the most"),
        "{error:#}"
    );
}

/// A kubelet's registration service that a test answers for.
struct Desk {
    requests: mpsc::UnboundedReceiver<RegisterRequest>,
    answer: Arc<Mutex<Result<(), String>>>,
    stop: CancellationToken,
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct DeskService {
    requests: mpsc::UnboundedSender<RegisterRequest>,
    answer: Arc<Mutex<Result<(), String>>>,
}

#[tonic::async_trait]
impl Registration for DeskService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let answer = self.answer.lock().unwrap().clone();
        self.requests.send(request.into_inner()).unwrap();
        answer
            .map(|()| Response::new(Empty {}))
            .map_err(Status::unknown)
    }
}

impl Desk {
    fn open(folder: &Path) -> Self {
        let (sender, requests) = mpsc::unbounded_channel();
        let answer = Arc::new(Mutex::new(Ok(())));
        let service = DeskService {
            requests: sender,
            answer: Arc::clone(&answer),
        };
        let stop = CancellationToken::new();
        let (incoming, file) = gpu_bridge::uds::bind(&folder.join("kubelet.sock"))
            .unwrap()
            .into_parts();
        let stopped = stop.clone();
        tokio::spawn(async move {
            let _file = file;
            tonic::transport::Server::builder()
                .serve_with_incoming_shutdown(
                    RegistrationServer::new(service),
                    incoming,
                    stopped.cancelled_owned(),
                )
                .await
        });
        Self {
            requests,
            answer,
            stop,
        }
    }

    async fn request(&mut self) -> RegisterRequest {
        tokio::time::timeout(DEADLINE, self.requests.recv())
            .await
            .expect("a registration in time")
            .unwrap()
    }
}

#[tokio::test]
async fn a_stream_that_ends_makes_it_register_anew_from_another_socket() {
    let dir = tempfile::tempdir().unwrap();
    let mut desk = Desk::open(dir.path());
    let arbiter = Arbiter::start(2).await;
    let mut plugin = Plugin::start(dir.path(), arbiter.handle.clone(), no_listing());

    let first = desk.request().await;
    assert_eq!(first.version, "v1beta1");
    assert_eq!(first.resource_name, "nvidia.com/gpu");
    let options = first.options.unwrap();
    assert!(options.get_preferred_allocation_available);
    assert!(!options.pre_start_required);
    let socket = dir.path().join(&first.endpoint);
    let mut client = DevicePluginClient::new(testkit::dial::localhost(&socket));
    let mut stream = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), 2);
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;

    let ended = Instant::now();
    drop(stream);
    let second = desk.request().await;
    assert!(
        ended.elapsed() >= Duration::from_millis(900),
        "the kubelet needs a moment to clear its side away, and had {:?}",
        ended.elapsed()
    );
    assert_ne!(first.endpoint, second.endpoint);
    assert_eq!(sockets(dir.path()), [second.endpoint]);
}

#[tokio::test]
async fn a_registration_that_is_refused_is_tried_again_from_another_socket() {
    let dir = tempfile::tempdir().unwrap();
    let mut desk = Desk::open(dir.path());
    *desk.answer.lock().unwrap() = Err("device plugin already connected".to_owned());
    let arbiter = Arbiter::start(2).await;
    let mut plugin = Plugin::start(dir.path(), arbiter.handle.clone(), no_listing());
    let first = desk.request().await;
    plugin
        .wait("the kubelet's words", |state| {
            state
                .to_string()
                .contains("device plugin already connected")
        })
        .await;
    *desk.answer.lock().unwrap() = Ok(());
    let second = desk.request().await;
    assert_ne!(first.endpoint, second.endpoint);
}

#[tokio::test]
async fn a_registered_plugin_does_not_register_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut desk = Desk::open(dir.path());
    let arbiter = Arbiter::start(2).await;
    let mut plugin = Plugin::start(dir.path(), arbiter.handle.clone(), no_listing());
    let first = desk.request().await;
    let socket = dir.path().join(&first.endpoint);
    let mut client = DevicePluginClient::new(testkit::dial::localhost(&socket));
    let _stream = client.list_and_watch(Empty {}).await.unwrap();
    plugin
        .wait("Registered", RegistrationState::is_registered)
        .await;
    // Files that come and go beside it are none of its business.
    for name in ["other.sock", "kubelet_internal_checkpoint"] {
        std::fs::File::create(dir.path().join(name)).unwrap();
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    let again = tokio::time::timeout(Duration::from_secs(3), desk.requests.recv()).await;
    assert!(again.is_err(), "registered again: {again:?}");
}

/// A UID that no other pod of the test has.
fn uid() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("uid-{}", NEXT.fetch_add(1, Ordering::SeqCst))
}
