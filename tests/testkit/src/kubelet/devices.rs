//! The device manager's book: which devices there are, and who has them. No I/O.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/manager.go` and `pod_devices.go`; the error
//! texts are the kubelet's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{ContainerAllocateResponse, Device, DevicePluginOptions, HEALTHY};
use tonic::transport::Channel;

use crate::rng::Rng;

/// A set of device ids of one resource.
pub(crate) type Ids = BTreeSet<String>;

/// A connection to a plugin, or what is left of one.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) socket: PathBuf,
    /// `None` for a resource that a checkpoint names and that nobody has registered since.
    pub(crate) client: Option<DevicePluginClient<Channel>>,
    pub(crate) options: DevicePluginOptions,
    stopped: AtomicBool,
}

impl Endpoint {
    pub(crate) fn new(
        socket: PathBuf,
        client: DevicePluginClient<Channel>,
        options: DevicePluginOptions,
    ) -> Self {
        Self {
            socket,
            client: Some(client),
            options,
            stopped: AtomicBool::new(false),
        }
    }

    /// The client, unless the plugin has gone.
    pub(crate) fn running(&self) -> Option<DevicePluginClient<Channel>> {
        if self.stopped.load(Ordering::SeqCst) {
            return None;
        }
        self.client.clone()
    }
}

/// What one container has of one resource.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Grant {
    /// Ids by NUMA node; -1 for a device without topology. One id may be under several nodes.
    pub(crate) ids: BTreeMap<i64, Vec<String>>,
    pub(crate) answer: ContainerAllocateResponse,
}

impl Grant {
    pub(crate) fn all_ids(&self) -> Ids {
        self.ids.values().flatten().cloned().collect()
    }
}

/// NUMA node of a device without topology.
const WITHOUT_TOPOLOGY: i64 = -1;

/// Resource name to something.
type ByResource<T> = BTreeMap<String, T>;

/// Pod UID to container name to resource name to what the container has of it.
pub(crate) type Grants = BTreeMap<String, BTreeMap<String, ByResource<Grant>>>;

/// A request for devices of one resource for one container.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want<'a> {
    pub(crate) pod_uid: &'a str,
    pub(crate) container: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) count: usize,
}

/// What is to be done for a [`Want`].
#[derive(Debug)]
pub(crate) enum Choice {
    /// The container has its devices already.
    Nothing,
    /// These devices are reserved for the container; the plugin is to be told.
    Reserved(Ids),
    /// The plugin offers to choose: ask it, then call [`Devices::choose`].
    Ask(Question),
}

/// The question of `GetPreferredAllocation`, and what was chosen before it.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) endpoint: Arc<Endpoint>,
    /// Free devices and those that were chosen before.
    pub(crate) available: Ids,
    /// What was chosen before, from the devices of init containers.
    pub(crate) chosen: Ids,
    free: Ids,
}

/// How many devices of a resource the node status shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// All that the plugin lists.
    pub capacity: usize,
    /// Those of them that are healthy.
    pub allocatable: usize,
}

/// The book.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// The endpoint that is asked for a resource.
    endpoints: ByResource<Arc<Endpoint>>,
    /// All endpoints that are connected for a resource, by socket.
    connected: ByResource<BTreeMap<PathBuf, Arc<Endpoint>>>,
    all: ByResource<BTreeMap<String, Device>>,
    healthy: ByResource<Ids>,
    unhealthy: ByResource<Ids>,
    allocated: ByResource<Ids>,
    grants: Grants,
    /// What init containers of the pod that is being admitted leave to its later containers.
    reusable: ByResource<Ids>,
    reusable_of: String,
}

impl Devices {
    /// The book after a restart: what the checkpoint has, with no device until a plugin registers.
    pub(crate) fn restored(grants: Grants, resources: Vec<String>) -> Self {
        let mut book = Self {
            grants,
            ..Self::default()
        };
        book.recount();
        for resource in resources {
            book.healthy.insert(resource.clone(), Ids::new());
            book.unhealthy.insert(resource.clone(), Ids::new());
            let gone = Endpoint {
                socket: PathBuf::new(),
                client: None,
                options: DevicePluginOptions::default(),
                stopped: AtomicBool::new(true),
            };
            book.endpoints.insert(resource, Arc::new(gone));
        }
        book
    }

    /// `PluginConnected`.
    ///
    /// An endpoint of the same socket that has not gone yet makes it an error.
    pub(crate) fn connect(&mut self, resource: &str, endpoint: Endpoint) -> Result<(), String> {
        let connected = self.connected.entry(resource.to_owned()).or_default();
        if connected.contains_key(&endpoint.socket) {
            return Err(format!(
                "device plugin already connected: {}",
                endpoint.socket.display()
            ));
        }
        let endpoint = Arc::new(endpoint);
        connected.insert(endpoint.socket.clone(), Arc::clone(&endpoint));
        self.endpoints.insert(resource.to_owned(), endpoint);
        Ok(())
    }

    /// `PluginDisconnected`: with the last endpoint of a resource all its devices become unhealthy.
    pub(crate) fn disconnect(&mut self, resource: &str, socket: &Path) {
        let Some(connected) = self.connected.get_mut(resource) else {
            return;
        };
        let Some(gone) = connected.remove(socket) else {
            return;
        };
        gone.stopped.store(true, Ordering::SeqCst);
        if let Some(other) = connected.values().next() {
            self.endpoints
                .insert(resource.to_owned(), Arc::clone(other));
            return;
        }
        self.connected.remove(resource);
        self.mark_unhealthy(resource);
    }

    /// The same before 1.37, where a resource has one endpoint.
    pub(crate) fn disconnect_all(&mut self, resource: &str) {
        for gone in self.connected.remove(resource).unwrap_or_default().values() {
            gone.stopped.store(true, Ordering::SeqCst);
        }
        self.mark_unhealthy(resource);
    }

    fn mark_unhealthy(&mut self, resource: &str) {
        let were_healthy = self
            .healthy
            .get_mut(resource)
            .map(std::mem::take)
            .unwrap_or_default();
        self.unhealthy
            .entry(resource.to_owned())
            .or_default()
            .extend(were_healthy);
    }

    /// A message of `ListAndWatch`: the whole list.
    pub(crate) fn update(&mut self, resource: &str, devices: Vec<Device>) {
        let (healthy, unhealthy): (Vec<&Device>, Vec<&Device>) =
            devices.iter().partition(|device| device.health == HEALTHY);
        let ids = |devices: Vec<&Device>| devices.into_iter().map(|it| it.id.clone()).collect();
        self.healthy.insert(resource.to_owned(), ids(healthy));
        self.unhealthy.insert(resource.to_owned(), ids(unhealthy));
        let by_id = devices.into_iter().map(|it| (it.id.clone(), it)).collect();
        self.all.insert(resource.to_owned(), by_id);
    }

    /// Frees what pods have that are no longer active (`UpdateAllocatedDevices`).
    pub(crate) fn free_inactive(&mut self, active: &BTreeSet<String>) {
        let before = self.grants.len();
        self.grants.retain(|uid, _| active.contains(uid));
        if self.grants.len() != before {
            self.recount();
        }
    }

    /// Makes `allocated` what the grants say: what a failed Allocate had reserved is free again.
    pub(crate) fn recount(&mut self) {
        self.allocated.clear();
        let grants = self.grants.values().flat_map(BTreeMap::values).flatten();
        for (resource, grant) in grants {
            self.allocated
                .entry(resource.clone())
                .or_default()
                .extend(grant.all_ids());
        }
    }

    /// Whether the kubelet takes `resource` for one of a device plugin. What it does not know it ignores:
    /// the pod is admitted without devices.
    pub(crate) fn knows(&self, resource: &str) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// Reserves devices for a container (`devicesToAllocate`).
    ///
    /// # Errors
    ///
    /// The kubelet's text when there are not enough.
    pub(crate) fn reserve(&mut self, want: Want<'_>, rng: &mut Rng) -> Result<Choice, String> {
        let resource = want.resource;
        let had = self.granted(want.pod_uid, want.container, resource);
        let has = had.as_ref().map_or(0, Ids::len);
        if had.is_some() && has != want.count {
            return Err(format!(
                "pod \"{}\" container \"{}\" changed request for resource \"{resource}\" from {has} to {}",
                want.pod_uid, want.container, want.count
            ));
        }
        let Some(healthy) = self.healthy.get(resource) else {
            return Err(format!("cannot allocate unregistered device {resource}"));
        };
        if healthy.is_empty() {
            return Err(format!(
                "no healthy devices present; cannot allocate unhealthy devices {resource}"
            ));
        }
        if !had.unwrap_or_default().is_subset(healthy) {
            return Err(format!(
                "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            ));
        }
        let needed = want.count - has;
        if needed == 0 {
            return Ok(Choice::Nothing);
        }
        self.reserve_new(want, needed, rng)
    }

    fn reserve_new(
        &mut self,
        want: Want<'_>,
        needed: usize,
        rng: &mut Rng,
    ) -> Result<Choice, String> {
        let resource = want.resource;
        // Devices of the pod's init containers come first, whatever their health is by now.
        let reusable = if self.reusable_of == want.pod_uid {
            self.reusable.get(resource).cloned().unwrap_or_default()
        } else {
            Ids::new()
        };
        let mut chosen = Ids::new();
        self.take(resource, &reusable, needed, &mut chosen, rng);
        if chosen.len() == needed {
            return Ok(Choice::Reserved(chosen));
        }
        let in_use = self.allocated.get(resource).cloned().unwrap_or_default();
        let free: Ids = self.healthy[resource]
            .difference(&in_use)
            .cloned()
            .collect();
        let missing = needed - chosen.len();
        if free.len() < missing {
            return Err(format!(
                "requested number of devices unavailable for {resource}. Requested: {missing}, Available: {}",
                free.len()
            ));
        }
        let Some(endpoint) = self.endpoints.get(resource) else {
            return Err(format!(
                "endpoint not found in cache for a registered resource: {resource}"
            ));
        };
        if endpoint.options.get_preferred_allocation_available {
            return Ok(Choice::Ask(Question {
                endpoint: Arc::clone(endpoint),
                available: free.union(&chosen).cloned().collect(),
                chosen,
                free,
            }));
        }
        self.take(resource, &free, needed, &mut chosen, rng);
        Ok(Choice::Reserved(chosen))
    }

    /// Reserves what the plugin prefers, and what else is needed in random order.
    pub(crate) fn choose(
        &mut self,
        want: Want<'_>,
        question: Question,
        preferred: &Ids,
        rng: &mut Rng,
    ) -> Ids {
        let mut chosen = question.chosen;
        let good: Ids = preferred.intersection(&question.free).cloned().collect();
        self.take(want.resource, &good, want.count, &mut chosen, rng);
        self.take(want.resource, &question.free, want.count, &mut chosen, rng);
        chosen
    }

    fn take(&mut self, resource: &str, from: &Ids, count: usize, chosen: &mut Ids, rng: &mut Rng) {
        let allocated = self.allocated.entry(resource.to_owned()).or_default();
        let new: Ids = from.difference(chosen).cloned().collect();
        for id in rng.shuffled(&new) {
            if chosen.len() >= count {
                break;
            }
            allocated.insert(id.clone());
            chosen.insert(id);
        }
    }

    /// Writes down what the plugin answered for reserved devices.
    pub(crate) fn grant(&mut self, want: Want<'_>, ids: &Ids, answer: ContainerAllocateResponse) {
        let mut by_node: BTreeMap<i64, Vec<String>> = BTreeMap::new();
        for id in ids {
            let device = self.all.get(want.resource).and_then(|all| all.get(id));
            let nodes = device
                .and_then(|device| device.topology.as_ref())
                .map(|topology| topology.nodes.iter().map(|node| node.id).collect())
                .filter(|nodes: &Vec<i64>| !nodes.is_empty())
                .unwrap_or_else(|| vec![WITHOUT_TOPOLOGY]);
            for node in nodes {
                by_node.entry(node).or_default().push(id.clone());
            }
        }
        let grant = Grant {
            ids: by_node,
            answer,
        };
        self.grants
            .entry(want.pod_uid.to_owned())
            .or_default()
            .entry(want.container.to_owned())
            .or_default()
            .insert(want.resource.to_owned(), grant);
    }

    /// Begins the admission of a pod: what init containers of another pod left is no longer reusable.
    pub(crate) fn begin_reuse(&mut self, pod_uid: &str) {
        if self.reusable_of != pod_uid {
            self.reusable.clear();
            pod_uid.clone_into(&mut self.reusable_of);
        }
    }

    /// An ordinary init container leaves its devices to the containers after it.
    pub(crate) fn leave_to_later(&mut self, pod_uid: &str, container: &str) {
        for (resource, grant) in self.container(pod_uid, container) {
            self.reusable
                .entry(resource)
                .or_default()
                .extend(grant.all_ids());
        }
    }

    /// A container that runs beside the others keeps its devices.
    pub(crate) fn keep(&mut self, pod_uid: &str, container: &str) {
        for (resource, grant) in self.container(pod_uid, container) {
            let kept = grant.all_ids();
            if let Some(reusable) = self.reusable.get_mut(&resource) {
                reusable.retain(|id| !kept.contains(id));
            }
        }
    }

    /// What a container has, by resource.
    pub(crate) fn container(&self, pod_uid: &str, container: &str) -> ByResource<Grant> {
        let containers = self.grants.get(pod_uid);
        containers
            .and_then(|containers| containers.get(container))
            .cloned()
            .unwrap_or_default()
    }

    /// The ids of a container, `None` when nothing is written down for it.
    pub(crate) fn granted(&self, pod_uid: &str, container: &str, resource: &str) -> Option<Ids> {
        let grant = self.grants.get(pod_uid)?.get(container)?.get(resource)?;
        Some(grant.all_ids())
    }

    /// The endpoint to ask for a resource.
    pub(crate) fn endpoint(&self, resource: &str) -> Option<Arc<Endpoint>> {
        self.endpoints.get(resource).cloned()
    }

    /// What the node status would show; `None` for a resource that nobody ever registered.
    pub(crate) fn capacity(&self, resource: &str) -> Option<Capacity> {
        let healthy = self.healthy.get(resource)?.len();
        let unhealthy = self.unhealthy.get(resource).map_or(0, Ids::len);
        Some(Capacity {
            capacity: healthy + unhealthy,
            allocatable: healthy,
        })
    }

    /// The healthy ids of a resource.
    pub(crate) fn healthy(&self, resource: &str) -> Ids {
        self.healthy.get(resource).cloned().unwrap_or_default()
    }

    /// The ids of a resource that the book holds for someone.
    pub(crate) fn allocated(&self, resource: &str) -> Ids {
        self.allocated.get(resource).cloned().unwrap_or_default()
    }

    /// All healthy devices, by resource (`GetAllocatableDevices`).
    pub(crate) fn allocatable(&self) -> Vec<(&str, &Device)> {
        let devices = self.all.iter().flat_map(|(resource, devices)| {
            let healthy = self.healthy.get(resource);
            devices
                .values()
                .filter(move |device| healthy.is_some_and(|ids| ids.contains(&device.id)))
                .map(move |device| (resource.as_str(), device))
        });
        devices.collect()
    }

    /// All grants, and the healthy ids by resource: what goes into the checkpoint.
    pub(crate) fn for_checkpoint(&self) -> (&Grants, &BTreeMap<String, Ids>) {
        (&self.grants, &self.healthy)
    }
}
