//! A kubelet for fast tests: device manager, DRA manager, plugin registration, pod-resources, Pods API.
//!
//! It owns what a plugin can see of a kubelet: which calls come when, which answers are cached, what is
//! written to which checkpoint, what a restart forgets. It follows the source of Kubernetes 1.37.2 (each
//! module names the files), texts of errors included, and decides nothing by itself: a test says when a
//! pod comes, runs and goes. It must not know the product. The real kubelet, which the cluster tests run,
//! stays the judge.
//!
//! Not imitated: the predicates before device admission (`OutOfnvidia.com/gpu`), the topology manager,
//! node status, the DRA health stream, the wiping of ResourceSlices.

mod admission;
mod checkpoint;
mod claims;
mod devices;
mod drivers;
mod health;
mod plugins;
mod pod;
mod pods;
mod registry;
mod servers;
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use legacy_proto::deviceplugin::ContainerAllocateResponse;

pub use devices::Capacity;
pub use drivers::{Driver, Service};
pub use health::DeviceHealth;
pub use pod::{Claim, Container, ContainerKind, Phase, Pod, Rejection};

use crate::lock;
use crate::rng::Rng;
use pod::Deletion;
use pods::Pods;
use session::{Paths, Session};

/// The seed of the random order of devices, unless a test gives its own.
const DEFAULT_SEED: u64 = 1;

/// A kubelet on a folder of its own. Ends when it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    paths: Paths,
    pods: Arc<Pods>,
    rng: Arc<Mutex<Rng>>,
    session: Mutex<Option<Arc<Session>>>,
    /// The kubelet admits one pod at a time.
    admission: tokio::sync::Mutex<()>,
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if let Some(session) = lock(&self.session).take() {
            session.stop.cancel();
        }
    }
}

impl Kubelet {
    /// Starts a kubelet whose root directory is `dir`; `device-plugins` lies in it as well.
    ///
    /// Keep `dir` short: a socket's path has to fit into 107 bytes.
    ///
    /// # Errors
    ///
    /// When folders or sockets can't be made, or `dra_manager_state` is corrupt (`kubelet_internal_checkpoint`
    /// may be: the kubelet goes on without).
    pub async fn start(dir: &Path) -> anyhow::Result<Self> {
        Self::start_seeded(dir, DEFAULT_SEED).await
    }

    /// As [`Kubelet::start`]; `seed` decides the order in which devices are picked where the real kubelet
    /// iterates over a Go map.
    ///
    /// # Errors
    ///
    /// As [`Kubelet::start`].
    pub async fn start_seeded(dir: &Path, seed: u64) -> anyhow::Result<Self> {
        let kubelet = Self {
            paths: Paths::new(dir),
            pods: Arc::new(Pods::new()),
            rng: Arc::new(Mutex::new(Rng::new(seed))),
            session: Mutex::new(None),
            admission: tokio::sync::Mutex::new(()),
        };
        kubelet.resume().await?;
        Ok(kubelet)
    }

    /// Behaves as a kubelet before 1.37 until the next restart: it knows one device plugin for each resource, and the
    /// end of any plugin's stream is the end of the newest one. To be called before a plugin registers.
    pub fn know_one_plugin_of_each(&self) {
        self.session().clients.know_one_of_each();
    }

    /// Behaves as a kubelet of 1.32 or 1.33 until the next restart: of the DRA services it knows `v1beta1.DRAPlugin`
    /// alone. Drivers that are registered already stay as they are.
    pub fn know_dra_v1beta1_alone(&self) {
        self.session().drivers.know_v1beta1_alone();
    }

    // --- The life of the process ---

    /// Ends the process: connections close, everything in memory is lost. Pods run on.
    pub async fn stop(&self) {
        let session = lock(&self.session).take();
        if let Some(session) = session {
            session.end().await;
        }
    }

    /// Starts the process again. Sockets in `device-plugins` are wiped, the checkpoints are read, every
    /// plugin has to register anew, and no claim counts as prepared. Pods that do not run yet are admitted
    /// once more, as the real kubelet does: with devices to come they fail, since no plugin is there.
    ///
    /// # Errors
    ///
    /// As [`Kubelet::start`].
    ///
    /// # Panics
    ///
    /// When it runs already.
    pub async fn resume(&self) -> anyhow::Result<()> {
        self.pods.hold_sources();
        let session = Session::start(
            self.paths.clone(),
            Arc::clone(&self.pods),
            Arc::clone(&self.rng),
        )?;
        let before = lock(&self.session).replace(Arc::clone(&session));
        assert!(before.is_none(), "the kubelet runs already");
        for entry in self.pods.active() {
            if entry.phase == Phase::Pending
                && let Err(rejection) = session.allocate_pod(&entry.pod).await
            {
                self.reject(&entry.pod.uid, rejection);
            }
        }
        self.pods.release_sources();
        Ok(())
    }

    /// [`Kubelet::stop`], then [`Kubelet::resume`].
    ///
    /// # Errors
    ///
    /// As [`Kubelet::start`].
    pub async fn restart(&self) -> anyhow::Result<()> {
        self.stop().await;
        self.resume().await
    }

    /// Removes `kubelet_internal_checkpoint`. With the next restart the kubelet has lost its book: what
    /// running pods have counts as free. (A running kubelet writes the file again at the next change.)
    pub fn forget_checkpoint(&self) {
        remove(&self.paths.device_checkpoint());
    }

    /// Removes `dra_manager_state`, which takes effect with the next restart.
    pub fn forget_claim_checkpoint(&self) {
        remove(&self.paths.claim_checkpoint());
    }

    /// From now on the kubelet has not heard from all its sources of pods: it frees nothing, and the Pods
    /// API answers `FAILED_PRECONDITION`. So it is after a start until the API server answers.
    pub fn hold_sources(&self) {
        self.pods.hold_sources();
    }

    /// Ends [`Kubelet::hold_sources`].
    pub fn release_sources(&self) {
        self.pods.release_sources();
    }

    // --- Pods ---

    /// A pod is bound to this node: its containers get their devices, by one Allocate each.
    ///
    /// The pod is Pending then; see [`Kubelet::run`].
    ///
    /// # Errors
    ///
    /// The reason and the message of the pod's status. It is Failed for good.
    ///
    /// # Panics
    ///
    /// When a pod with that UID was admitted before, or the kubelet is stopped.
    pub async fn admit(&self, pod: Pod) -> Result<(), Rejection> {
        let _one_at_a_time = self.admission.lock().await;
        let session = self.session();
        self.pods.add(pod.clone());
        let outcome = session.allocate_pod(&pod).await;
        if let Err(rejection) = &outcome {
            self.reject(&pod.uid, rejection.clone());
        }
        outcome
    }

    /// The pod's app containers start. A container for which the kubelet has nothing written down (it lost
    /// its checkpoint) is given devices anew.
    ///
    /// # Errors
    ///
    /// The text of that Allocate; the container does not start, and the kubelet will try again.
    ///
    /// # Panics
    ///
    /// When there is no such pod, or the kubelet is stopped.
    pub async fn run(&self, pod_uid: &str) -> Result<(), String> {
        let _one_at_a_time = self.admission.lock().await;
        let session = self.session();
        let pod = self.pods.get(pod_uid).pod;
        let apps = pod.containers.iter();
        for container in apps.filter(|it| it.kind != ContainerKind::Init) {
            let unknown = container.limits.keys().any(|resource| {
                let devices = lock(&session.devices);
                devices.knows(resource)
                    && devices
                        .granted(pod_uid, &container.name, resource)
                        .is_none()
            });
            if unknown {
                session.allocate(pod_uid, container).await?;
            }
        }
        self.pods
            .change(pod_uid, |entry| entry.phase = Phase::Running);
        Ok(())
    }

    /// The pod's sandbox is to be made: its claims are prepared, with one call per driver for all that are
    /// not prepared yet. Called once more, as the kubelet does after an error, it asks only for the rest.
    ///
    /// # Errors
    ///
    /// The text that the pod's event has after "Failed to prepare dynamic resources: ".
    ///
    /// # Panics
    ///
    /// When there is no such pod, or the kubelet is stopped.
    pub async fn prepare(&self, pod_uid: &str, claims: &[Claim]) -> Result<(), String> {
        let session = self.session();
        self.pods
            .change(pod_uid, |entry| entry.claims = claims.to_vec());
        session
            .claims
            .prepare(pod_uid, claims, &session.drivers)
            .await
    }

    /// The pod's containers have ended: claims that no other pod uses are unprepared.
    ///
    /// # Errors
    ///
    /// The kubelet's text. The pod hangs in Terminating, and the kubelet will try again.
    ///
    /// # Panics
    ///
    /// When the kubelet is stopped.
    pub async fn unprepare(&self, pod_uid: &str) -> Result<(), String> {
        let session = self.session();
        session.claims.unprepare(pod_uid, &session.drivers).await
    }

    /// The pod's containers end by themselves: its claims are unprepared, and it is terminal. It stays
    /// known until [`Kubelet::terminate`] or [`Kubelet::force_delete`].
    ///
    /// # Errors
    ///
    /// As [`Kubelet::unprepare`].
    ///
    /// # Panics
    ///
    /// When there is no such pod, the phase is none that a pod ends in, or the kubelet is stopped.
    pub async fn finish(&self, pod_uid: &str, phase: Phase) -> Result<(), String> {
        assert!(
            matches!(phase, Phase::Succeeded | Phase::Failed),
            "a pod does not end as {phase:?}"
        );
        self.unprepare(pod_uid).await?;
        self.pods.change(pod_uid, |entry| entry.phase = phase);
        Ok(())
    }

    /// Someone deletes the pod with a grace period: it is still active, and its containers run.
    ///
    /// # Panics
    ///
    /// When there is no such pod.
    pub fn request_deletion(&self, pod_uid: &str) {
        self.pods
            .change(pod_uid, |entry| entry.deletion = Deletion::Requested);
    }

    /// Someone deletes the pod, its containers end, its claims are unprepared, and it is gone.
    ///
    /// Its devices are freed by the next Allocate or by the next List of pod-resources.
    ///
    /// # Errors
    ///
    /// As [`Kubelet::unprepare`]; then the pod stays, with its deletion requested.
    ///
    /// # Panics
    ///
    /// When there is no such pod, or the kubelet is stopped.
    pub async fn terminate(&self, pod_uid: &str) -> Result<(), String> {
        self.request_deletion(pod_uid);
        self.unprepare(pod_uid).await?;
        self.pods.remove(pod_uid);
        Ok(())
    }

    /// Someone deletes the pod without a grace period: it is gone at once, while its containers still run
    /// and its claims stay prepared (see [`Kubelet::reconcile_claims`]).
    ///
    /// # Panics
    ///
    /// When there is no such pod.
    pub fn force_delete(&self, pod_uid: &str) {
        self.pods.remove(pod_uid);
    }

    /// What the DRA manager does each minute: unprepares what pods have that are no longer active.
    ///
    /// # Errors
    ///
    /// As [`Kubelet::unprepare`].
    ///
    /// # Panics
    ///
    /// When the kubelet is stopped.
    pub async fn reconcile_claims(&self) -> Result<(), String> {
        let session = self.session();
        if !self.pods.sources_are_ready() {
            return Ok(());
        }
        let active = self.pods.active_uids();
        session.claims.reconcile(&active, &session.drivers).await
    }

    // --- What a test may look at ---

    /// The pod's phase; `None` once it is gone.
    #[must_use]
    pub fn phase(&self, pod_uid: &str) -> Option<Phase> {
        self.pods.find(pod_uid).map(|entry| entry.phase)
    }

    /// The ids that plugins were asked for on behalf of a pod that is still known, whether they answered or not.
    #[must_use]
    pub fn asked(&self, pod_uid: &str) -> BTreeSet<String> {
        let entry = self.pods.find(pod_uid);
        entry.map(|entry| entry.asked).unwrap_or_default()
    }

    /// The ids that the kubelet has written down for a container.
    #[must_use]
    pub fn devices(&self, pod_uid: &str, container: &str, resource: &str) -> BTreeSet<String> {
        let session = self.session();
        let ids = lock(&session.devices).granted(pod_uid, container, resource);
        ids.unwrap_or_default()
    }

    /// What the plugin answered for a container: environment, mounts, devices, CDI names.
    #[must_use]
    pub fn answer(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &str,
    ) -> Option<ContainerAllocateResponse> {
        let session = self.session();
        let mut grants = lock(&session.devices).container(pod_uid, container);
        grants.remove(resource).map(|grant| grant.answer)
    }

    /// What the node's status would show for a resource; `None` before a plugin registered it.
    #[must_use]
    pub fn capacity(&self, resource: &str) -> Option<Capacity> {
        lock(&self.session().devices).capacity(resource)
    }

    /// The healthy ids of a resource.
    #[must_use]
    pub fn healthy(&self, resource: &str) -> BTreeSet<String> {
        lock(&self.session().devices).healthy(resource)
    }

    /// The ids of a resource that count as allocated, those of pods that are gone included until the next
    /// Allocate or List.
    #[must_use]
    pub fn allocated(&self, resource: &str) -> BTreeSet<String> {
        lock(&self.session().devices).allocated(resource)
    }

    /// The registered instances of a DRA driver, the newest last.
    #[must_use]
    pub fn drivers(&self, name: &str) -> Vec<Driver> {
        self.session().drivers.instances(name)
    }

    /// How a driver says that its devices are, by pool and device; `None`: it has said nothing, or its stream has ended.
    #[must_use]
    pub fn device_health(&self, name: &str) -> Option<BTreeMap<(String, String), DeviceHealth>> {
        self.session().drivers.health(name)
    }

    /// Why registrations of DRA drivers failed since the kubelet started, in order.
    #[must_use]
    pub fn registration_failures(&self) -> Vec<String> {
        self.session().drivers.failures()
    }

    /// The CDI names that drivers returned for a claim.
    #[must_use]
    pub fn cdi_devices(&self, claim: &Claim) -> Vec<String> {
        let info = self.session().claims.info(&claim.namespace, &claim.name);
        let devices = info.map(|info| info.drivers).unwrap_or_default();
        devices
            .into_values()
            .flatten()
            .flat_map(|device| device.cdi_ids)
            .collect()
    }

    /// Waits until the kubelet counts exactly `count` healthy devices of a resource.
    ///
    /// # Panics
    ///
    /// When that is not so by `deadline`.
    pub async fn wait_for_healthy(&self, resource: &str, count: usize, deadline: Duration) {
        let what = format!("{count} healthy devices of {resource}");
        crate::eventually(&what, deadline, || {
            self.capacity(resource).map(|it| it.allocatable) == Some(count)
        })
        .await;
    }

    /// Waits until a DRA driver is registered.
    ///
    /// # Panics
    ///
    /// When it is not by `deadline`; the message has why registrations failed.
    pub async fn wait_for_driver(&self, name: &str, deadline: Duration) {
        let registered = tokio::time::timeout(deadline, async {
            crate::eventually(name, deadline * 2, || !self.drivers(name).is_empty()).await;
        });
        assert!(
            registered.await.is_ok(),
            "waited {deadline:?} in vain for DRA driver {name} to register; failures: {:?}",
            self.registration_failures()
        );
    }

    fn session(&self) -> Arc<Session> {
        let session = lock(&self.session).clone();
        session.expect("the kubelet is stopped: resume it first")
    }

    fn reject(&self, pod_uid: &str, rejection: Rejection) {
        self.pods.change(pod_uid, |entry| {
            entry.phase = Phase::Failed;
            entry.rejection = Some(rejection);
        });
    }
}

fn remove(file: &Path) {
    if file.exists() {
        fs::remove_file(file).expect("a file of the test's folder can be removed");
    }
}
