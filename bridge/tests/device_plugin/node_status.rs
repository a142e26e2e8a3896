//! The count in the own Node's status: down at once, up after the kubelet, and unknown when it can't be kept.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{CountedOffer, DeviceId, Health, Ledger, Mode, Offers, Pool, Settings, Status};
use futures::FutureExt as _;
use gpu_bridge::arbiter::{Call, Handle, Observation};
use gpu_bridge::device_plugin::{
    self, NodeStatusInputs, NodeStatusState, RegistrationState, run_node_status,
};
use serde_json::json;
use testkit::{ApiServer, eventually};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::{DEADLINE, NODE, RESOURCE, gpu};

/// A Node, a kubelet that counts what a test says, and an arbiter whose offers a test sets.
struct Scene {
    api: ApiServer,
    offers: watch::Sender<Arc<Offers>>,
    registered: watch::Sender<RegistrationState>,
    kubelet: Arc<AtomicU32>,
    asked: Arc<AtomicU32>,
    /// How often the arbiter heard that the server is away, which `told` has as `None`.
    away: Arc<AtomicU32>,
    told: Arc<Mutex<Vec<Option<u32>>>>,
    /// What the arbiter offers from the moment on in which it hears of a count.
    withdrawal: Withdrawal,
    state: watch::Receiver<NodeStatusState>,
    _status: watch::Sender<Arc<Status>>,
    _tasks: JoinSet<()>,
}

/// A count, and what is offered from then on.
type Withdrawal = Arc<Mutex<Option<(u32, Arc<Offers>)>>>;

/// So many healthy ids, of which so many are in the count.
fn offers(healthy: u32, count: u32) -> Arc<Offers> {
    let counted = (0..healthy).map(|number| {
        let unit = gpu(number).uuid;
        CountedOffer {
            id: DeviceId::of_unit(unit.clone()),
            unit,
            health: Health::Healthy,
            numa_node: None,
            free: true,
            leaving: false,
            reserved: false,
        }
    });
    Arc::new(Offers {
        mode: Mode::Both,
        count,
        counted: counted.collect(),
        ..Offers::default()
    })
}

impl Scene {
    /// All of them agree on a count.
    async fn start(count: u32) -> Self {
        let api = ApiServer::start().await.unwrap();
        api.put(
            "nodes",
            json!({"metadata": {"name": NODE}, "status": {"allocatable": {"cpu": "2"}}}),
        );
        Self::on(api, count, device_plugin::RIGHT_AGAIN)
    }

    fn on(api: ApiServer, count: u32, right_again: RangeInclusive<Duration>) -> Self {
        Self::with(api, count, right_again, RegistrationState::Registered)
    }

    fn with(
        api: ApiServer,
        count: u32,
        right_again: RangeInclusive<Duration>,
        registration: RegistrationState,
    ) -> Self {
        show(&api, count);
        let (calls, mut queue) = mpsc::channel(32);
        let offers = watch::Sender::new(offers(count, count));
        let pool = Pool::restored(Ledger::default(), Settings::default());
        let status = watch::Sender::new(Arc::new(pool.status(SystemTime::now())));
        let seen = (offers.subscribe(), status.subscribe());
        let handle = Handle::new(calls, seen.0, seen.1, Instant::now());
        let told = Arc::new(Mutex::new(Vec::new()));
        let withdrawal = Withdrawal::default();
        let mut tasks = JoinSet::new();
        let (log, withdraw) = (Arc::clone(&told), Arc::clone(&withdrawal));
        let away = Arc::new(AtomicU32::new(0));
        let gone = Arc::clone(&away);
        let shown = offers.clone();
        tasks.spawn(async move {
            while let Some(call) = queue.recv().await {
                if let Call::Observe { observation, reply } = call {
                    if matches!(observation, Observation::NodeAway) {
                        log.lock().unwrap().push(None);
                        gone.fetch_add(1, Ordering::SeqCst);
                    } else if let Observation::Node(count) = observation {
                        log.lock().unwrap().push(count);
                        let mut withdraw = withdraw.lock().unwrap();
                        if let Some((_, less)) = withdraw.take_if(|(at, _)| Some(*at) == count) {
                            shown.send_replace(less);
                        }
                    }
                    drop(reply.send(Ok(())));
                }
            }
        });
        let kubelet = Arc::new(AtomicU32::new(count));
        let asked = Arc::new(AtomicU32::new(0));
        let registered = watch::Sender::new(registration);
        let (counts, asks) = (Arc::clone(&kubelet), Arc::clone(&asked));
        let inputs = NodeStatusInputs {
            client: kube::Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap(),
            node: NODE.to_owned(),
            handle,
            registered: registered.subscribe(),
            kubelet_count: Arc::new(move || {
                asks.fetch_add(1, Ordering::SeqCst);
                let count = counts.load(Ordering::SeqCst);
                async move { Ok(count) }.boxed()
            }),
            right_again,
        };
        let (state, seen) = watch::channel(NodeStatusState::default());
        tasks.spawn(async move {
            drop(run_node_status(inputs, state, CancellationToken::new()).await);
        });
        Self {
            api,
            offers,
            registered,
            kubelet,
            asked,
            away,
            told,
            withdrawal,
            state: seen,
            _status: status,
            _tasks: tasks,
        }
    }

    fn offer(&self, healthy: u32, count: u32) {
        self.offers.send_replace(offers(healthy, count));
    }

    fn shown(&self) -> String {
        let node = self.api.get("nodes", "", NODE).unwrap();
        node["status"]["allocatable"][RESOURCE]
            .as_str()
            .unwrap_or("none")
            .to_owned()
    }

    fn patches(&self) -> u64 {
        self.api.count("patch", "nodes/status")
    }

    fn last_told(&self) -> Option<Option<u32>> {
        self.told.lock().unwrap().last().copied()
    }

    async fn wait_told(&self, what: Option<u32>) {
        let text = format!("the arbiter hears {what:?}");
        eventually(&text, DEADLINE, || self.last_told() == Some(what)).await;
    }

    async fn wait_shown(&self, count: u32) {
        let text = format!("the Node shows {count}");
        eventually(&text, DEADLINE, || self.shown() == count.to_string()).await;
    }

    async fn wait_state(&mut self, is: impl FnMut(&NodeStatusState) -> bool) {
        let reached = tokio::time::timeout(DEADLINE, self.state.wait_for(is)).await;
        assert!(
            reached.is_ok_and(|it| it.is_ok()),
            "the state stays {:?}",
            *self.state.borrow()
        );
    }
}

/// What the kubelet writes at its tick.
fn show(api: &ApiServer, count: u32) {
    let status = json!({"status": {"allocatable": {RESOURCE: count.to_string()}}});
    api.patch("nodes", "", NODE, &status);
}

#[tokio::test]
async fn what_the_node_shows_is_told_at_first_and_when_it_changes() {
    let scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.offer(8, 5);
    scene.wait_told(Some(5)).await;
    assert_eq!(scene.shown(), "5");
}

#[tokio::test]
async fn a_node_without_the_resource_shows_none_of_it() {
    let api = ApiServer::start().await.unwrap();
    api.put("nodes", json!({"metadata": {"name": NODE}}));
    let scene = Scene::on(api, 0, device_plugin::RIGHT_AGAIN);
    scene.api.put("nodes", json!({"metadata": {"name": NODE}}));
    scene.wait_told(Some(0)).await;
    assert_eq!(scene.patches(), 0);
}

#[tokio::test]
async fn the_count_goes_down_without_asking_the_kubelet() {
    let scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.offer(8, 4);
    scene.wait_shown(4).await;
    assert_eq!(scene.asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_count_goes_up_only_after_the_kubelet_counts_as_many() {
    let scene = Scene::start(4).await;
    scene.wait_told(Some(4)).await;
    scene.offer(8, 8);
    eventually("the kubelet is asked", DEADLINE, || {
        scene.asked.load(Ordering::SeqCst) >= 3
    })
    .await;
    assert_eq!(scene.shown(), "4");
    assert_eq!(scene.patches(), 0);
    scene.kubelet.store(8, Ordering::SeqCst);
    scene.wait_shown(8).await;
    scene.wait_told(Some(8)).await;
    assert_eq!(scene.patches(), 1);
}

#[tokio::test]
async fn a_higher_count_is_told_before_it_is_written() {
    let scene = Scene::start(4).await;
    scene.wait_told(Some(4)).await;
    scene.api.forbid("patch", "nodes/status");
    scene.kubelet.store(8, Ordering::SeqCst);
    scene.offer(8, 8);
    scene.wait_told(None).await;
    assert_eq!(scene.shown(), "4");
    let told = scene.told.lock().unwrap();
    assert!(told.ends_with(&[Some(4), Some(8), None]), "{told:?}");
}

#[tokio::test]
async fn the_arbiter_hears_of_a_higher_count_before_anybody_can_read_it() {
    let scene = Scene::start(4).await;
    scene.wait_told(Some(4)).await;
    // One of the eight is withdrawn in the very moment in which the count is to rise.
    *scene.withdrawal.lock().unwrap() = Some((8, offers(8, 7)));
    scene.kubelet.store(8, Ordering::SeqCst);
    scene.offer(8, 8);
    scene.wait_shown(7).await;
    scene.wait_told(Some(7)).await;
    assert_eq!(scene.patches(), 1, "nobody has read 8");
    scene.offer(8, 8);
    scene.wait_shown(8).await;
    scene.wait_told(Some(8)).await;
}

#[tokio::test]
async fn ids_that_are_about_to_go_do_not_stand_in_for_those_that_come() {
    let scene = Scene::start(4).await;
    scene.wait_told(Some(4)).await;
    // Six are healthy, one of them on its way out. The kubelet's five may be all but one that has just come.
    scene.kubelet.store(5, Ordering::SeqCst);
    scene.offer(6, 5);
    eventually("the kubelet is asked", DEADLINE, || {
        scene.asked.load(Ordering::SeqCst) >= 3
    })
    .await;
    assert_eq!(scene.shown(), "4");
    scene.kubelet.store(6, Ordering::SeqCst);
    scene.wait_shown(5).await;
}

#[tokio::test]
async fn a_count_that_the_kubelet_reverts_is_written_again() {
    let scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.offer(8, 5);
    scene.wait_shown(5).await;
    for _ in 0..3 {
        scene.wait_told(Some(5)).await;
        let before = scene.told.lock().unwrap().len();
        show(&scene.api, 8);
        scene.wait_shown(5).await;
        eventually("the revert was told", DEADLINE, || {
            scene.told.lock().unwrap()[before..].contains(&Some(8))
        })
        .await;
    }
    assert_eq!(scene.patches(), 4);
}

#[tokio::test]
async fn somebody_who_writes_against_us_gets_no_more_than_twenty_answers_a_second() {
    let scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.offer(8, 5);
    let since = Instant::now();
    eventually("ten answers", DEADLINE, || {
        show(&scene.api, 8);
        scene.patches() >= 10
    })
    .await;
    // Nine gaps lie between ten answers.
    assert!(since.elapsed() >= Duration::from_millis(9 * 50));
}

#[tokio::test]
async fn nothing_is_written_when_nothing_changes() {
    let scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    assert_eq!(scene.api.count("dry-run patch", "nodes/status"), 1);
    for heartbeat in 0..20 {
        let status = json!({"status": {"nodeInfo": {"bootID": heartbeat.to_string()}}});
        scene.api.patch("nodes", "", NODE, &status);
        scene.offer(8, 8);
    }
    // Later than all of that.
    scene.offer(8, 7);
    scene.wait_shown(7).await;
    scene.wait_told(Some(7)).await;
    assert_eq!(scene.patches(), 1);
    let told = scene.told.lock().unwrap();
    assert_eq!(*told, [Some(8), Some(7)]);
}

#[tokio::test]
async fn without_the_right_nothing_is_known_and_the_state_says_what_to_do() {
    let mut scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.api.forbid("patch", "nodes/status");
    scene.offer(8, 5);
    scene.wait_told(None).await;
    scene
        .wait_state(|state| matches!(state, NodeStatusState::NoStatusRight { .. }))
        .await;
    let text = scene.state.borrow().to_string();
    assert!(text.contains("NoStatusRight") && text.contains("manifests/base/rbac.yaml"));
    assert_eq!(scene.shown(), "8");
    assert_eq!(scene.patches(), 1, "it is not tried again at once");
    assert_eq!(scene.away.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_right_that_was_missing_from_the_start_is_found_once_it_is_given() {
    let api = ApiServer::start().await.unwrap();
    api.put("nodes", json!({"metadata": {"name": NODE}}));
    api.forbid("patch", "nodes/status");
    let pause = Duration::from_millis(100);
    let mut scene = Scene::on(api, 8, pause..=pause);
    scene
        .wait_state(|state| matches!(state, NodeStatusState::NoStatusRight { .. }))
        .await;
    assert_eq!(scene.last_told(), Some(None));
    scene.api.allow("patch", "nodes/status");
    scene
        .wait_state(|state| *state == NodeStatusState::Kept)
        .await;
    scene.wait_told(Some(8)).await;
}

#[tokio::test]
async fn a_right_that_is_gone_for_a_moment_is_found_again_soon_and_at_last_less_often() {
    const SHORT: Duration = Duration::from_millis(20);
    let api = ApiServer::start().await.unwrap();
    api.put("nodes", json!({"metadata": {"name": NODE}}));
    let mut scene = Scene::on(api, 8, SHORT..=*device_plugin::RIGHT_AGAIN.end());
    scene.wait_told(Some(8)).await;
    scene.api.forbid("patch", "nodes/status");
    scene.offer(8, 5);
    scene
        .wait_state(|state| matches!(state, NodeStatusState::NoStatusRight { .. }))
        .await;
    let since = Instant::now();
    let tries = || scene.api.count("dry-run patch", "nodes/status");
    let before = tries();
    eventually("three more tries", DEADLINE, || tries() >= before + 3).await;
    // 20, 40 and 80 ms.
    assert!(since.elapsed() >= SHORT * 7, "{:?}", since.elapsed());
    scene.api.allow("patch", "nodes/status");
    scene.wait_told(Some(5)).await;
    assert_eq!(scene.shown(), "5");
}

#[tokio::test]
async fn a_kubelet_that_has_lost_the_list_brings_the_count_to_0_until_it_reads_it_again() {
    let mut scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene
        .registered
        .send_replace(RegistrationState::Registering);
    scene.wait_shown(0).await;
    scene.wait_told(Some(0)).await;
    scene
        .wait_state(|state| *state == NodeStatusState::NoKubelet)
        .await;
    // Whatever is offered meanwhile, and whoever raises the count.
    scene.offer(8, 5);
    show(&scene.api, 7);
    scene.wait_shown(0).await;
    scene.wait_told(Some(0)).await;
    assert_eq!(scene.patches(), 2);
    scene.registered.send_replace(RegistrationState::Registered);
    scene.wait_shown(5).await;
    scene.wait_told(Some(5)).await;
    assert_eq!(scene.patches(), 3);
}

#[tokio::test]
async fn a_daemon_that_starts_before_the_kubelet_lowers_the_count_of_before() {
    let api = ApiServer::start().await.unwrap();
    api.put("nodes", json!({"metadata": {"name": NODE}}));
    let starting = RegistrationState::NotStarted;
    let scene = Scene::with(api, 8, device_plugin::RIGHT_AGAIN, starting);
    scene.wait_told(Some(0)).await;
    assert_eq!(*scene.told.lock().unwrap(), [Some(8), Some(0)]);
    assert_eq!(scene.shown(), "0");
}

#[tokio::test]
async fn an_api_server_that_is_away_leaves_nothing_known_until_it_is_back() {
    let mut scene = Scene::start(8).await;
    scene.wait_told(Some(8)).await;
    scene.api.go_away();
    scene.wait_told(None).await;
    assert_eq!(scene.away.load(Ordering::SeqCst), 1);
    scene
        .wait_state(|state| *state == NodeStatusState::Unseen)
        .await;
    scene.offer(8, 5);
    scene.api.come_back();
    scene.wait_told(Some(5)).await;
    assert_eq!(scene.shown(), "5");
}
