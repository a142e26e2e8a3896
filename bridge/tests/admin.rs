//! The admin server over real sockets, with an arbiter that the test plays.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot set up its server has to fail"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    ClaimOffer, CountedOffer, DeviceId, DeviceName, Face, ForeignCause, Former, Gpu, Health, Hold,
    HoldKind, Limits, Mode, Offers, PodUid, Presence, Rival, Settings, Side, Standing, Status,
    Taint, TaintReason, UnitState, UnitStatus, Weights,
};
use expect_test::expect_file;
use gpu_bridge::admin::{
    self, ClientError, Condition, ConditionName, Conditions, HandOver, Met, Pages, StatusPage,
};
use gpu_bridge::arbiter::{Call, Error, Handle};
use gpu_bridge::uds;
use tempfile::TempDir;
use testkit::ApiServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

#[path = "common/h100.rs"]
mod h100;
#[path = "common/http.rs"]
mod http;
#[path = "common/names.rs"]
mod names;
use h100::h100;
use names::{claim, pod, unit};

/// Longer than any wait of the server.
const DEADLINE: Duration = Duration::from_secs(60);

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_790_000_000 + seconds)
}

fn gpu(number: u32) -> Gpu {
    Gpu {
        numa_node: Some(0),
        ..h100(number, unit(number))
    }
}

fn unit_status(number: u32, side: Side, state: UnitState, holds: Vec<Hold>) -> UnitStatus {
    UnitStatus {
        unit: unit(number),
        device: DeviceName::new(format!("gpu-{number}")).unwrap(),
        id: Some(DeviceId::of_unit(unit(number))),
        product_name: gpu(number).product_name,
        side,
        state,
        fault: None,
        presence: if state == UnitState::Lost {
            Presence::Lost
        } else {
            Presence::Present
        },
        lacks: None,
        holds,
    }
}

/// A pool in which everything that the page can show is there once.
fn some_of_everything() -> Status {
    let hold = |kind| vec![Hold::exclusive(kind, at(0))];
    let id = |number| DeviceId::of_unit(unit(number));
    let lingering = |former| HoldKind::Foreign {
        cause: ForeignCause::Lingering { former },
    };
    let kinds = [
        HoldKind::Granted { id: id(0) },
        HoldKind::Bound {
            id: id(1),
            pod: pod("default", "counted"),
        },
        HoldKind::Reserved { claim: claim() },
        HoldKind::Prepared { claim: claim() },
        HoldKind::Foreign {
            cause: ForeignCause::UnknownProcess,
        },
        lingering(Former::Counted(Some(pod("default", "killed")))),
        lingering(Former::Claim(claim())),
        HoldKind::Foreign {
            cause: ForeignCause::UnknownUnitOf {
                pod: pod("default", "old"),
            },
        },
    ];
    let mut units: Vec<UnitStatus> = (0..)
        .zip(kinds)
        .map(|(number, kind)| unit_status(number, Side::Legacy, UnitState::Held, hold(kind)))
        .collect();
    units.push(unit_status(8, Side::Legacy, UnitState::FreeLegacy, vec![]));
    units.push(unit_status(9, Side::Dra, UnitState::FreeDra, vec![]));
    units.push(unit_status(10, Side::Dra, UnitState::Lost, vec![]));
    Status {
        standing: Standing::Serving,
        rivals: vec![Rival {
            face: Face::Legacy,
            place: "/k/device-plugins/nvidia-gpu.sock".to_owned(),
            owner: Some("pod kube-system/plugin-x".to_owned()),
        }],
        generation: 12,
        settings: Settings {
            mode: Mode::Both,
            limits: Limits {
                legacy: Some(5),
                dra: None,
            },
            weights: Weights { legacy: 1, dra: 2 },
            ..Settings::default()
        },
        at: at(1),
        units,
        claims: BTreeSet::new(),
    }
}

fn some_offers() -> Offers {
    let counted = |number, health, free| CountedOffer {
        id: DeviceId::of_unit(unit(number)),
        unit: unit(number),
        health,
        numa_node: Some(0),
        free,
        leaving: false,
        reserved: false,
    };
    let claims = |number, taint, held_by_claim| ClaimOffer {
        device: DeviceName::new(format!("gpu-{number}")).unwrap(),
        gpu: gpu(number).into(),
        taint,
        held_by_claim,
    };
    Offers {
        counted: vec![
            counted(8, Health::Healthy, true),
            counted(9, Health::Unhealthy, false),
        ],
        claims: Some(vec![
            claims(3, None, true),
            claims(8, Some(Taint::keeping_out(TaintReason::Counted)), false),
            claims(9, Some(Taint::evicting(TaintReason::Counted)), false),
        ]),
        ..Offers::default()
    }
}

/// A server, and the ends that the test plays.
struct Served {
    folder: TempDir,
    address: SocketAddr,
    conditions: Conditions,
    calls: mpsc::Receiver<Call>,
    requests: mpsc::Receiver<HandOver>,
    status: watch::Sender<Arc<Status>>,
    _offers: watch::Sender<Arc<Offers>>,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Served {
    async fn start(status: Status) -> Self {
        let pages = |conditions| Pages::new("node-1".to_owned(), conditions);
        Self::start_on([127, 0, 0, 1], status, pages).await
    }

    /// The same on an address that others can reach, beside an API server that knows who they are.
    async fn start_for_everybody(api: &ApiServer) -> Self {
        let config = kube::Config::new(api.url().parse().unwrap());
        let client = kube::Client::try_from(config).unwrap();
        let pages = |conditions| Pages::guarded("node-1".to_owned(), conditions, client);
        Self::start_on([0, 0, 0, 0], some_of_everything(), pages).await
    }

    async fn start_on(
        address: [u8; 4],
        status: Status,
        pages: impl FnOnce(Conditions) -> Pages,
    ) -> Self {
        let folder = TempDir::new().unwrap();
        let (sender, calls) = mpsc::channel(1);
        let (offers, offers_seen) = watch::channel(Arc::new(some_offers()));
        let (status, status_seen) = watch::channel(Arc::new(status));
        let conditions = Conditions::new();
        let handle = Handle::new(sender, offers_seen, status_seen, Instant::now());
        let pages = pages(conditions.clone());
        let (ask, requests) = mpsc::channel(1);
        pages.open(handle.clone(), ask);
        let http = admin::http_listener((address, 0).into()).await.unwrap();
        let address = (Ipv4Addr::LOCALHOST, http.local_addr().unwrap().port()).into();
        let socket = uds::bind(&folder.path().join("admin.sock")).unwrap();
        let stop = CancellationToken::new();
        let (cancel, told) = (stop.clone(), conditions.clone());
        let server = tokio::spawn(async move {
            let waiting_for = watch::channel(String::new()).1;
            let reporting = admin::report_ledger(handle, waiting_for, told);
            let serving = async {
                tokio::try_join!(
                    admin::serve_http(pages.clone(), http, cancel.clone()),
                    admin::serve_socket(pages.clone(), socket, cancel.clone()),
                )
            };
            tokio::select! {
                done = serving => done.map(drop),
                () = async { reporting.await; std::future::pending().await } => Ok(()),
            }
        });
        Self {
            folder,
            address,
            conditions,
            calls,
            requests,
            status,
            _offers: offers,
            stop,
            server,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    /// Status code and body of a GET over TCP.
    async fn get(&self, path: &str) -> (u16, String) {
        get(self.address, path).await
    }

    async fn end(self) {
        self.stop.cancel();
        let ended = timeout(DEADLINE, self.server).await.unwrap();
        ended.unwrap().unwrap();
    }
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let stream = TcpStream::connect(address).await.unwrap();
    let what = format!("GET {path}");
    let page = timeout(DEADLINE, http::ask(stream, &what, "")).await;
    page.unwrap().unwrap()
}

/// The whole answer to somebody with a bearer token.
async fn get_with(token: &str, address: SocketAddr, path: &str) -> (u16, String) {
    let stream = TcpStream::connect(address).await.unwrap();
    let what = format!("GET {path}");
    let header = format!("Authorization: Bearer {token}\r\n");
    let answer = timeout(DEADLINE, http::exchange(stream, &what, &header, "")).await;
    answer.unwrap().unwrap()
}

/// Answers the next call of the server.
async fn answer(calls: &mut mpsc::Receiver<Call>, outcome: Result<(), Error>) {
    match timeout(DEADLINE, calls.recv()).await.unwrap().unwrap() {
        Call::Observe { reply, .. } => reply.send(outcome).unwrap(),
        call @ (Call::Allocate { .. }
        | Call::Prepare { .. }
        | Call::Unprepare { .. }
        | Call::Release { .. }
        | Call::ClearFault { .. }
        | Call::HandOver { .. }
        | Call::TakeBack { .. }) => {
            panic!("a health check gives nothing out, and this could: {call:?}")
        }
    }
}

#[test]
fn the_status_page_is_the_golden_one() {
    let condition = |met, message: &str| Condition {
        met,
        since: at(2),
        message: message.to_owned(),
    };
    let conditions = BTreeMap::from([
        (
            ConditionName::LedgerServing,
            condition(Met::Fully, "the ledger is in force"),
        ),
        (
            ConditionName::NvmlAnswering,
            condition(Met::Not(None), "no library: libnvidia-ml.so.1"),
        ),
        (
            ConditionName::NodeCountTended,
            condition(
                Met::Partly(Some("NoStatusRight")),
                "NoStatusRight: the right to patch nodes/status is missing",
            ),
        ),
    ]);
    let page = StatusPage::new("node-1", &some_of_everything(), &some_offers(), &conditions);
    let text = serde_json::to_string_pretty(&StatusPage {
        version: "(of the build)".to_owned(),
        ..page
    });
    expect_file!["../../tests/golden/status.json"].assert_eq(&(text.unwrap() + "\n"));
}

#[tokio::test]
async fn the_socket_gives_the_same_page_as_http() {
    let served = Served::start(some_of_everything()).await;
    let (code, body) = served.get("/status").await;
    assert_eq!(code, 200);
    let over_http: StatusPage = serde_json::from_str(&body).unwrap();
    let over_socket = admin::status(&served.socket()).await.unwrap();
    assert_eq!(over_http.units, over_socket.units);
    assert_eq!(over_http.units.len(), some_of_everything().units.len());
    assert_eq!(over_http.node, "node-1");
    served.end().await;
}

#[tokio::test]
async fn the_socket_is_for_its_owner_alone_and_goes_with_the_server() {
    let served = Served::start(some_of_everything()).await;
    let socket = served.socket();
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    served.stop.cancel();
    let ended = timeout(DEADLINE, served.server).await.unwrap();
    ended.unwrap().unwrap();
    assert!(!socket.exists());
}

#[tokio::test]
async fn ready_is_what_every_condition_agrees_on() {
    let served = Served::start(some_of_everything()).await;
    let (code, body) = served.get("/readyz").await;
    assert_eq!(code, 503);
    assert!(body.contains("nothing has been heard since the start"));
    for name in ConditionName::ALL {
        served.conditions.set(name, true, "fine");
    }
    let (code, body) = served.get("/readyz").await;
    assert_eq!((code, body.contains("\"ready\":true")), (200, true));
    served
        .conditions
        .set(ConditionName::ApiServerReachable, false, "no route to host");
    let (code, body) = served.get("/readyz").await;
    assert_eq!(code, 503);
    let page: serde_json::Value = serde_json::from_str(&body).unwrap();
    let unmet: BTreeSet<&str> = page["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|condition| condition["ok"] == false)
        .map(|condition| condition["name"].as_str().unwrap())
        .collect();
    assert_eq!(unmet, BTreeSet::from(["ApiServerReachable"]));
    served.end().await;
}

#[tokio::test]
async fn the_standing_of_the_ledger_becomes_a_condition() {
    let served = Served::start(Status {
        standing: Standing::WaitingForAdoption,
        ..some_of_everything()
    })
    .await;
    let mut seen = served.conditions.subscribe();
    let says = |word: &'static str| {
        move |all: &BTreeMap<ConditionName, Condition>| {
            all[&ConditionName::LedgerServing].message.contains(word)
        }
    };
    let waiting = timeout(DEADLINE, seen.wait_for(says("missing"))).await;
    assert!(
        !waiting.unwrap().unwrap()[&ConditionName::LedgerServing]
            .met
            .is_ok()
    );
    served.status.send_replace(Arc::new(some_of_everything()));
    let serving = timeout(DEADLINE, seen.wait_for(says("in force"))).await;
    assert!(
        serving.unwrap().unwrap()[&ConditionName::LedgerServing]
            .met
            .is_ok()
    );
    served.end().await;
}

#[tokio::test]
async fn alive_is_an_arbiter_that_answers() {
    let mut served = Served::start(some_of_everything()).await;
    let asked = tokio::spawn(get(served.address, "/healthz"));
    answer(&mut served.calls, Ok(())).await;
    assert_eq!(asked.await.unwrap(), (200, "ok\n".to_owned()));
    served.end().await;
}

#[tokio::test]
async fn a_full_disk_is_not_a_dead_arbiter() {
    let mut served = Served::start(some_of_everything()).await;
    let asked = tokio::spawn(get(served.address, "/healthz"));
    let full = Error::NotSaved("no space left on device".to_owned());
    answer(&mut served.calls, Err(full)).await;
    assert_eq!(asked.await.unwrap().0, 200);
    served.end().await;
}

#[tokio::test]
async fn an_arbiter_that_has_ended_is_not_alive() {
    let mut served = Served::start(some_of_everything()).await;
    served.calls.close();
    let (code, body) = served.get("/healthz").await;
    assert_eq!((code, body.as_str()), (503, "the daemon is stopping\n"));
    served.end().await;
}

#[tokio::test]
async fn asking_where_no_daemon_is_says_so() {
    let folder = TempDir::new().unwrap();
    let error = admin::status(&folder.path().join("admin.sock")).await;
    let error = error.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }));
    assert!(error.to_string().contains("is gpu-bridge running"));
}

#[tokio::test]
async fn a_successor_asks_over_the_socket_and_hears_what_became_of_it() {
    let mut served = Served::start(some_of_everything()).await;
    let socket = served.socket();
    for (outcome, words) in [
        (Ok(()), None),
        (Err("another one has it"), Some("another one has it")),
    ] {
        let to = PodUid::new("4f2").unwrap();
        let asked = admin::hand_over(&socket, &to);
        let told = async {
            let request = timeout(DEADLINE, served.requests.recv()).await;
            let HandOver { to, reply } = request.unwrap().unwrap();
            assert_eq!(to.as_str(), "4f2");
            reply.send(outcome.map_err(str::to_owned)).unwrap();
        };
        let (answer, ()) = tokio::join!(asked, told);
        match (answer, words) {
            (Ok(()), None) => {}
            (Err(error @ ClientError::Refused { .. }), Some(words)) => {
                assert!(error.to_string().contains(words), "{error}");
            }
            (answer, words) => panic!("{answer:?} where {words:?} was expected"),
        }
    }
    served.end().await;
}

#[tokio::test]
async fn nobody_can_ask_for_the_ledger_over_http() {
    let served = Served::start(some_of_everything()).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    let request = "POST /handover HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\nConnection: close\r\n\r\n4f2";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = timeout(DEADLINE, stream.read_to_string(&mut answer)).await;
    read.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    served.end().await;
}

#[tokio::test]
async fn a_daemon_that_waits_for_the_ledger_is_alive_and_has_no_status() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("admin-4f2.sock");
    let pages = Pages::new("node-1".to_owned(), Conditions::new());
    let stop = CancellationToken::new();
    let socket = uds::bind(&path).unwrap();
    let server = tokio::spawn(admin::serve_socket(pages, socket, stop.clone()));
    assert_eq!(admin::probe(&path, admin::HEALTHZ).await.unwrap(), "ok\n");
    let to = PodUid::new("5").unwrap();
    for error in [
        admin::status(&path).await.map(drop).unwrap_err(),
        admin::hand_over(&path, &to).await.unwrap_err(),
    ] {
        assert!(matches!(error, ClientError::Refused { .. }), "{error:?}");
        assert!(
            error.to_string().contains("waits for another one"),
            "{error}"
        );
    }
    stop.cancel();
    server.await.unwrap().unwrap();
}

/// Some of the names of pods, claims and namespaces in [`some_of_everything`].
const NAMES: [&str; 4] = ["killed", "train", "llm", "plugin-x"];

#[tokio::test]
async fn beyond_the_node_three_pages_are_open_and_name_nobody() {
    let api = ApiServer::start().await.unwrap();
    let mut served = Served::start_for_everybody(&api).await;
    let mut seen = served.conditions.subscribe();
    let rival = seen.wait_for(|all| {
        let message = &all[&ConditionName::OnlyRegistrant].message;
        message.contains("plugin-x")
    });
    drop(timeout(DEADLINE, rival).await.unwrap().unwrap());
    let asked = tokio::spawn(get(served.address, "/healthz"));
    answer(&mut served.calls, Ok(())).await;
    assert_eq!(asked.await.unwrap().0, 200);
    let (code, ready) = served.get("/readyz").await;
    assert_eq!(code, 503);
    assert!(ready.contains("OnlyRegistrant"), "{ready}");
    let (code, metrics) = served.get("/metrics").await;
    assert_eq!(code, 200);
    assert!(
        metrics.contains("\ngpu_bridge_units_allocated 4\n"),
        "{metrics}"
    );
    for page in [ready, metrics] {
        for name in NAMES {
            assert!(!page.contains(name), "{name} is on {page}");
        }
    }
    for path in ["/status", "/", "/page.js", "/page.css"] {
        let (code, body) = served.get(path).await;
        assert_eq!(code, 401, "{path}: {body}");
    }
    let (code, _) = served.get("/handover").await;
    assert_eq!(code, 404);
    assert_eq!(api.count("create", "tokenreviews"), 0);
    served.end().await;
}

#[tokio::test]
async fn beyond_the_node_the_status_is_for_those_whom_the_api_server_lets() {
    let api = ApiServer::start().await.unwrap();
    let served = Served::start_for_everybody(&api).await;
    let address = served.address;
    api.know_token("good", "ann", admin::AUDIENCE);
    api.know_token("useless", "bob", admin::AUDIENCE);
    // Good for the API server itself, which is none of this port's business.
    api.know_token("powerful", "ann", "https://kubernetes.default.svc");
    api.let_read("ann", "/status");
    for path in ["/status", "/", "/page.js"] {
        let (code, answer) = get_with("good", address, path).await;
        assert_eq!(code, 200, "{path}: {answer}");
    }
    assert_eq!(
        [
            api.count("create", "tokenreviews"),
            api.count("create", "subjectaccessreviews")
        ],
        [1, 1],
        "the answer is kept for a moment"
    );
    let (code, refused) = get_with("useless", address, "/status").await;
    assert_eq!(code, 403);
    assert!(
        refused.contains("bob") && refused.contains("nonResourceURLs"),
        "{refused}"
    );
    for token in ["powerful", "made-up", ""] {
        let (code, refused) = get_with(token, address, "/status").await;
        assert_eq!(code, 401, "{token}: {refused}");
        assert!(refused.contains("www-authenticate: Bearer"), "{refused}");
        assert!(!refused.contains("gpu-0"), "{refused}");
    }
    api.go_away();
    let (code, refused) = get_with("another", address, "/status").await;
    assert_eq!(code, 503, "{refused}");
    served.end().await;
}

#[tokio::test]
async fn on_the_node_the_page_for_a_browser_is_there_and_on_the_socket_it_is_not() {
    let served = Served::start(some_of_everything()).await;
    for (path, part) in [
        (admin::PAGE, "<!doctype html>"),
        (admin::SCRIPT, "use strict"),
        (admin::STYLE, "color-scheme"),
    ] {
        let (code, body) = served.get(path).await;
        assert_eq!(code, 200, "{path}");
        assert!(body.contains(part), "{path}: {body}");
    }
    let over_socket = admin::probe(&served.socket(), admin::PAGE).await;
    assert!(matches!(over_socket, Err(ClientError::Code { .. })));
    served.end().await;
}

/// How long a browser may take to start and to show a page, on a machine that is busy.
const BROWSER_LIMIT: Duration = Duration::from_secs(180);

/// What a browser is called, by distribution.
const BROWSERS: [&str; 3] = ["chromium", "google-chrome", "chromium-headless-shell"];

/// What a browser shows of a page, as markup after its script has run; `None`: this machine has no browser.
async fn shown_by_a_browser(url: &str) -> Option<String> {
    for browser in BROWSERS {
        if let Some(seen) = shown_by(browser, url).await {
            return Some(seen);
        }
    }
    None
}

/// The same by this one.
async fn shown_by(browser: &str, url: &str) -> Option<String> {
    let profile = TempDir::new().unwrap();
    let run = tokio::process::Command::new(browser)
        // In a container the tests may be root, and then there is no sandbox.
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ])
        .args(["--virtual-time-budget=3000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(url)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let run = timeout(BROWSER_LIMIT, run).await.expect("it ends in time");
    match run {
        Ok(run) => Some(String::from_utf8_lossy(&run.stdout).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("{browser}: {error}"),
    }
}

#[tokio::test]
async fn a_browser_shows_who_has_what_under_the_policy_of_the_page() {
    let served = Served::start(some_of_everything()).await;
    let url = format!("http://{}/", served.address);
    let Some(seen) = shown_by_a_browser(&url).await else {
        // Nobody is left to tell when standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: the page in a browser: there is none of {BROWSERS:?}"
        );
        return;
    };
    for part in [
        "<span id=\"node\">node-1</span>",
        "<td>pod default/counted</td>",
        "<td>claim train/llm</td>",
        "<td>an unknown process</td>",
        "<tr class=\"attention\">",
        "mode both",
        "free: 1 for counted pods, 0 for claims",
        "<p id=\"trouble\" role=\"alert\" hidden=\"\">",
    ] {
        assert!(seen.contains(part), "{part} is missing in {seen}");
    }
    served.end().await;
}
