//! What every test of the face stands on.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use bridge_core::{
    ClaimRef, Claims, DeviceName, Offers, Pool, PrepareRequest, PreparedDevice, Settings, Status,
    UnitId,
};
use gpu_bridge::arbiter::{Call, Error, Handle, Observation, PrepareReply, PreparedReply};
use gpu_bridge::dra::{Place, RegistrationState, register};
use kube::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{ApiServer, Kubelet};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// No state in these tests takes this long to come.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The node's name, and so its pool's.
pub(crate) const NODE: &str = "node-a";

/// What the arbiter was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    Prepare(PrepareRequest),
    Unprepare(ClaimRef),
    Claims(Option<Claims>),
}

type Prepare = dyn Fn(&PrepareRequest, usize) -> Result<PrepareReply, Error> + Send + Sync;
type Unprepare = dyn Fn(&ClaimRef) -> Result<(), Error> + Send + Sync;

/// What the arbiter answers. The number is how often it was asked for the claim before.
pub(crate) struct Script {
    pub(crate) prepare: Box<Prepare>,
    pub(crate) unprepare: Box<Unprepare>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            prepare: Box::new(|request, _| Ok(prepared(request))),
            unprepare: Box::new(|_| Ok(())),
        }
    }
}

/// Everything that was asked for, as a pool without conflicts would answer.
pub(crate) fn prepared(request: &PrepareRequest) -> PrepareReply {
    let devices = request.devices.iter().map(|device| PreparedReply {
        device: PreparedDevice {
            requests: device.requests.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            unit: unit_of(&device.device),
            access: device.access,
        },
        cdi_device: format!(
            "gpu-bridge.dev/claim={}-{}",
            request.claim.uid, device.device
        ),
    });
    PrepareReply::Prepared(devices.collect())
}

pub(crate) fn unit_of(device: &DeviceName) -> UnitId {
    UnitId::new(format!("GPU-{device}")).unwrap()
}

/// An arbiter that follows a script.
pub(crate) struct Arbiter {
    pub(crate) handle: Handle,
    _offers: watch::Sender<Arc<Offers>>,
    pub(crate) status: watch::Sender<Arc<Status>>,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Arbiter {
    pub(crate) fn start(script: Script) -> Self {
        let (calls, mut queue) = mpsc::channel(32);
        let (offers, offers_seen) = watch::channel(Arc::new(Offers::default()));
        let pool = Pool::waiting(Settings::default());
        let (status, status_seen) = watch::channel(Arc::new(pool.status(SystemTime::now())));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let task = tokio::spawn(async move {
            while let Some(call) = queue.recv().await {
                answer(call, &script, &log);
            }
        });
        Self {
            handle: Handle::new(calls, offers_seen, status_seen, Instant::now()),
            _offers: offers,
            status,
            asked,
            task,
        }
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub(crate) fn prepares(&self) -> Vec<PrepareRequest> {
        let prepares = self.asked().into_iter().filter_map(|asked| match asked {
            Asked::Prepare(request) => Some(request),
            Asked::Unprepare(_) | Asked::Claims(_) => None,
        });
        prepares.collect()
    }

    pub(crate) fn last_claims(&self) -> Option<Option<Claims>> {
        self.asked()
            .into_iter()
            .rev()
            .find_map(|asked| match asked {
                Asked::Claims(claims) => Some(claims),
                Asked::Prepare(_) | Asked::Unprepare(_) => None,
            })
    }

    /// As when anything in the pool has changed.
    pub(crate) fn touch_status(&self) {
        self.status.send_modify(|_| {});
    }
}

fn answer(call: Call, script: &Script, log: &Mutex<Vec<Asked>>) {
    // Whoever asked may be gone; that is no concern of the arbiter's.
    match call {
        Call::Prepare { request, reply } => {
            let mut log = log.lock().unwrap();
            let same =
                |asked: &&Asked| matches!(asked, Asked::Prepare(it) if it.claim == request.claim);
            let before = log.iter().filter(same).count();
            log.push(Asked::Prepare(request.clone()));
            drop(log);
            drop(reply.send((script.prepare)(&request, before)));
        }
        Call::Unprepare { claim, reply } => {
            log.lock().unwrap().push(Asked::Unprepare(claim.clone()));
            drop(reply.send((script.unprepare)(&claim)));
        }
        Call::Observe { observation, reply } => {
            if let Observation::Claims(claims) = observation {
                log.lock().unwrap().push(Asked::Claims(claims));
            }
            drop(reply.send(Ok(())));
        }
        Call::Allocate { .. } => panic!("the DRA face allocates nothing"),
        Call::Release { .. }
        | Call::ClearFault { .. }
        | Call::HandOver { .. }
        | Call::TakeBack { .. } => {
            panic!("no face gives the ledger away")
        }
    }
}

/// A folder with a short path, since sockets lie in it.
pub(crate) fn folder() -> TempDir {
    tempfile::Builder::new().prefix("dra").tempdir().unwrap()
}

pub(crate) fn client(api: &ApiServer) -> Client {
    Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap()
}

/// A kubelet, an API server, and the face's sockets between them.
pub(crate) struct World {
    pub(crate) kubelet: Kubelet,
    pub(crate) api: ApiServer,
    pub(crate) arbiter: Arbiter,
    pub(crate) face: Face,
    _folder: TempDir,
}

impl World {
    pub(crate) async fn start(script: Script) -> Self {
        let folder = folder();
        let kubelet = Kubelet::start(folder.path()).await.unwrap();
        let api = ApiServer::start().await.unwrap();
        let arbiter = Arbiter::start(script);
        let face = Face::start(folder.path(), &api, &arbiter);
        kubelet.wait_for_driver("gpu.nvidia.com", DEADLINE).await;
        Self {
            kubelet,
            api,
            arbiter,
            face,
            _folder: folder,
        }
    }
}

/// The task that serves the sockets.
pub(crate) struct Face {
    pub(crate) place: Place,
    pub(crate) state: watch::Receiver<RegistrationState>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) task: JoinHandle<Result<(), register::Error>>,
}

impl Drop for Face {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Face {
    pub(crate) fn start(kubelet_dir: &Path, api: &ApiServer, arbiter: &Arbiter) -> Self {
        let place = Place {
            kubelet_dir: kubelet_dir.to_owned(),
            pod: None,
        };
        Self::start_at(place, api, arbiter)
    }

    pub(crate) fn start_at(place: Place, api: &ApiServer, arbiter: &Arbiter) -> Self {
        let (sender, state) = watch::channel(RegistrationState::Starting);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(register::run(
            client(api),
            NODE.to_owned(),
            place.clone(),
            arbiter.handle.clone(),
            sender,
            shutdown.clone(),
        ));
        Self {
            place,
            state,
            shutdown,
            task,
        }
    }

    pub(crate) async fn wait_for(&mut self, wanted: impl Fn(&RegistrationState) -> bool) {
        let waited = tokio::time::timeout(DEADLINE, self.state.wait_for(|state| wanted(state)));
        waited
            .await
            .expect("the registration state is reached in time")
            .expect("the task runs");
    }
}

/// A result of an allocation.
pub(crate) fn result(request: &str, device: &str) -> Value {
    json!({"request": request, "driver": "gpu.nvidia.com", "pool": NODE, "device": device})
}

/// A claim in the API, allocated as given. `config` is what goes into the allocation.
pub(crate) fn claim(name: &str, uid: &str, results: &[Value], config: &[Value]) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "train", "name": name, "uid": uid},
        "spec": {"devices": {}},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": "llm-0", "uid": "pod-1"}],
        },
    })
}

/// A configuration in an allocation.
pub(crate) fn config(driver: &str, parameters: &Value) -> Value {
    json!({"source": "FromClaim", "opaque": {"driver": driver, "parameters": parameters}})
}
