//! Pods as the kubelet sees them, and the table of those on this node.

use std::collections::{BTreeMap, BTreeSet};

use legacy_proto::pod_subset as proto;

/// A container and the devices that it asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Unique in its pod.
    pub name: String,
    /// Extended resource name to count.
    pub limits: BTreeMap<String, u32>,
    /// What part it has in its pod.
    pub kind: ContainerKind,
}

/// What part a container has in its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// Runs before the app containers and ends; its devices may be used again by later containers.
    Init,
    /// An init container with `restartPolicy: Always`: runs beside the app containers, keeps its devices.
    Sidecar,
    /// Runs while the pod runs.
    App,
}

/// A pod that was bound to this node. Made with [`Pod::new`] and the methods that add containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Namespace.
    pub namespace: String,
    /// Name, unique in the namespace at any one time.
    pub name: String,
    /// Unique for ever.
    pub uid: String,
    /// All containers: those of kind `Init` and `Sidecar` first, each in the order of the pod's spec.
    pub containers: Vec<Container>,
}

impl Pod {
    /// A pod without containers.
    #[must_use]
    pub fn new(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            containers: Vec::new(),
        }
    }

    /// Adds an app container that asks for `count` of `resource`; with 0 it asks for nothing.
    #[must_use]
    pub fn app(self, name: &str, resource: &str, count: u32) -> Self {
        self.with(name, resource, count, ContainerKind::App)
    }

    /// Adds an init container that asks for `count` of `resource`; with 0 it asks for nothing.
    #[must_use]
    pub fn init(self, name: &str, resource: &str, count: u32) -> Self {
        self.with(name, resource, count, ContainerKind::Init)
    }

    /// Adds a sidecar that asks for `count` of `resource`; with 0 it asks for nothing.
    #[must_use]
    pub fn sidecar(self, name: &str, resource: &str, count: u32) -> Self {
        self.with(name, resource, count, ContainerKind::Sidecar)
    }

    fn with(mut self, name: &str, resource: &str, count: u32, kind: ContainerKind) -> Self {
        let limits = (count > 0)
            .then(|| (resource.to_owned(), count))
            .into_iter()
            .collect();
        self.containers.push(Container {
            name: name.to_owned(),
            limits,
            kind,
        });
        // A stable sort: the kubelet goes through all init containers before the first app container.
        self.containers
            .sort_by_key(|container| container.kind == ContainerKind::App);
        self
    }
}

/// A ResourceClaim as the API shows it to the kubelet: allocated, and reserved for the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Namespace: that of the pod.
    pub namespace: String,
    /// Name, unique in the namespace at any one time.
    pub name: String,
    /// Unique for ever.
    pub uid: String,
    /// The drivers that the allocation has results of.
    pub drivers: Vec<String>,
}

impl Claim {
    /// A claim with results of one driver.
    #[must_use]
    pub fn new(namespace: &str, name: &str, uid: &str, driver: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            drivers: vec![driver.to_owned()],
        }
    }
}

/// `status.phase` of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Admitted, its containers not started.
    Pending,
    /// Its app containers run.
    Running,
    /// All its containers ended well.
    Succeeded,
    /// Refused at admission, or a container ended badly.
    Failed,
}

impl Phase {
    /// The text of `status.phase`.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    fn is_terminal(self) -> bool {
        match self {
            Self::Succeeded | Self::Failed => true,
            Self::Pending | Self::Running => false,
        }
    }
}

/// Why a pod was refused at admission. It is Failed from then on, and never tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// `status.reason`.
    pub reason: String,
    /// `status.message`, as `kubectl describe pod` shows it.
    pub message: String,
}

/// How far the deletion of a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deletion {
    None,
    /// `metadata.deletionTimestamp` is set; the containers still run.
    Requested,
}

/// A pod of this node with its state.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) pod: Pod,
    pub(crate) phase: Phase,
    pub(crate) rejection: Option<Rejection>,
    pub(crate) deletion: Deletion,
    /// The claims named at the last Prepare, for pod-resources.
    pub(crate) claims: Vec<Claim>,
    /// The ids that plugins were asked for, answered or not.
    pub(crate) asked: BTreeSet<String>,
}

impl Entry {
    pub(crate) fn new(pod: Pod) -> Self {
        Self {
            pod,
            phase: Phase::Pending,
            rejection: None,
            deletion: Deletion::None,
            claims: Vec::new(),
            asked: BTreeSet::new(),
        }
    }

    /// Whether the pod still owns its devices: it is not terminal, or it is and its end was asked for but
    /// has not come (kubelet.go, `isPodInactive`).
    pub(crate) fn is_active(&self) -> bool {
        !self.phase.is_terminal() || self.deletion == Deletion::Requested
    }

    /// The pod as the Pods API sends it.
    pub(crate) fn to_proto(&self) -> proto::Pod {
        let container = |container: &Container| proto::Container {
            name: container.name.clone(),
            resources: Some(proto::ResourceRequirements {
                limits: quantities(&container.limits),
                requests: quantities(&container.limits),
                claims: Vec::new(),
            }),
            restart_policy: match container.kind {
                ContainerKind::Sidecar => "Always".to_owned(),
                ContainerKind::Init | ContainerKind::App => String::new(),
            },
        };
        let of = |app: bool| {
            self.pod
                .containers
                .iter()
                .filter(move |it| (it.kind == ContainerKind::App) == app)
        };
        proto::Pod {
            metadata: Some(proto::ObjectMeta {
                // Any time will do: what readers look at is whether there is one.
                deletion_timestamp: (self.deletion == Deletion::Requested).then_some(proto::Time {
                    seconds: 1_700_000_000,
                    nanos: 0,
                }),
                ..self.identity()
            }),
            spec: Some(proto::PodSpec {
                containers: of(true).map(container).collect(),
                init_containers: of(false).map(container).collect(),
                resource_claims: self.claims.iter().map(pod_claim).collect(),
                ..proto::PodSpec::default()
            }),
            status: Some(self.status(of(true))),
        }
    }

    /// What is left of the pod in a DELETED event.
    pub(crate) fn to_deleted_proto(&self) -> proto::Pod {
        proto::Pod {
            metadata: Some(self.identity()),
            spec: None,
            status: None,
        }
    }

    fn identity(&self) -> proto::ObjectMeta {
        proto::ObjectMeta {
            name: self.pod.name.clone(),
            namespace: self.pod.namespace.clone(),
            uid: self.pod.uid.clone(),
            ..proto::ObjectMeta::default()
        }
    }

    fn status<'a>(&self, apps: impl Iterator<Item = &'a Container>) -> proto::PodStatus {
        let state = match self.phase {
            Phase::Running => proto::ContainerState {
                running: Some(proto::ContainerStateRunning::default()),
                ..proto::ContainerState::default()
            },
            Phase::Succeeded | Phase::Failed => proto::ContainerState {
                terminated: Some(proto::ContainerStateTerminated::default()),
                ..proto::ContainerState::default()
            },
            Phase::Pending => proto::ContainerState {
                waiting: Some(proto::ContainerStateWaiting::default()),
                ..proto::ContainerState::default()
            },
        };
        let rejection = self.rejection.clone();
        proto::PodStatus {
            phase: self.phase.text().to_owned(),
            message: rejection
                .as_ref()
                .map_or_else(String::new, |it| it.message.clone()),
            // A pod that was refused has no container statuses: nothing of it ever started.
            container_statuses: if rejection.is_some() {
                Vec::new()
            } else {
                apps.map(|container| proto::ContainerStatus {
                    name: container.name.clone(),
                    state: Some(state.clone()),
                    ..proto::ContainerStatus::default()
                })
                .collect()
            },
            reason: rejection.map_or_else(String::new, |it| it.reason),
            ..proto::PodStatus::default()
        }
    }
}

fn quantities(limits: &BTreeMap<String, u32>) -> BTreeMap<String, proto::Quantity> {
    limits
        .iter()
        .map(|(name, count)| {
            let quantity = proto::Quantity {
                string: count.to_string(),
            };
            (name.clone(), quantity)
        })
        .collect()
}

fn pod_claim(claim: &Claim) -> proto::PodResourceClaim {
    proto::PodResourceClaim {
        name: claim.name.clone(),
        resource_claim_name: claim.name.clone(),
        ..proto::PodResourceClaim::default()
    }
}
