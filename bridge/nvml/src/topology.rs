//! How the GPUs are connected, read GPU by GPU: some hundred calls, each of which may take milliseconds, between which
//! whoever asks for processes must not wait long.
//!
//! It is about speed alone, so that whatever a GPU does not say counts as no connection.

use std::collections::{BTreeMap, BTreeSet};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use crate::inventory::{self, Handle};
use crate::snapshot::{CommonAncestor, GpuPair};
use crate::{raw, sysfs};

/// What a GPU tells of itself.
#[derive(Debug)]
struct Wired {
    /// Its place among the handles.
    place: usize,
    uuid: String,
    pci_bus_id: Option<String>,
    /// Its NVLinks by the bus id of what is at the other end.
    peers: BTreeMap<String, u32>,
    /// Those of them of which NVML does not say what is there.
    unsaid: BTreeMap<String, u32>,
    /// Its NVLinks to switches.
    switched: u32,
    /// By the places of those that were read before.
    ancestors: BTreeMap<usize, CommonAncestor>,
}

/// A reading that is under way.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    next: usize,
    wired: Vec<Wired>,
}

impl Reading {
    /// Reads the next GPU; returns all pairs after the last one.
    pub(crate) fn step(&mut self, nvml: &Nvml, handles: &[Handle<'_>]) -> Option<Vec<GpuPair>> {
        if let Some(handle) = handles.get(self.next) {
            if let Ok(device) = handle {
                self.read(nvml, handles, device);
            }
            self.next += 1;
        }
        (self.next >= handles.len()).then(|| self.pairs())
    }

    fn read(&mut self, nvml: &Nvml, handles: &[Handle<'_>], device: &Device<'_>) {
        let Ok(uuid) = inventory::uuid(device) else {
            return;
        };
        let before = self.wired.iter().filter_map(|other| {
            let handle = handles.get(other.place)?.as_ref().ok()?;
            Some((other.place, common_ancestor(nvml, device, handle)?))
        });
        let ancestors = before.collect();
        let mut wired = Wired {
            place: self.next,
            uuid,
            pci_bus_id: inventory::pci_bus_id(device).ok(),
            peers: BTreeMap::new(),
            unsaid: BTreeMap::new(),
            switched: 0,
            ancestors,
        };
        read_links(nvml, device, &mut wired);
        self.wired.push(wired);
    }

    fn pairs(&self) -> Vec<GpuPair> {
        let gpus = self.wired.iter().filter_map(|it| it.pci_bus_id.as_ref());
        let gpus: BTreeSet<&String> = gpus.collect();
        let mut pairs = Vec::new();
        for (place, one) in self.wired.iter().enumerate() {
            for other in &self.wired[..place] {
                // Counted from both sides; one of them may not have answered.
                let direct = one.links_to(other).max(other.links_to(one));
                pairs.push(GpuPair {
                    one: one.uuid.clone(),
                    other: other.uuid.clone(),
                    common_ancestor: one.ancestors.get(&other.place).copied(),
                    nvlinks: direct + one.to_switches(&gpus).min(other.to_switches(&gpus)),
                });
            }
        }
        pairs
    }
}

impl Wired {
    fn links_to(&self, other: &Self) -> u32 {
        let bus_id = other.pci_bus_id.as_ref();
        let links = bus_id.and_then(|bus_id| self.peers.get(bus_id));
        links.copied().unwrap_or(0)
    }

    /// Its NVLinks to switches: what is at the other end of a link, and is no GPU of this node, is taken for one.
    fn to_switches(&self, gpus: &BTreeSet<&String>) -> u32 {
        let unsaid = self
            .unsaid
            .iter()
            .filter(|(bus_id, _)| !gpus.contains(bus_id));
        self.switched + unsaid.map(|(_, links)| links).sum::<u32>()
    }
}

fn common_ancestor(nvml: &Nvml, one: &Device<'_>, other: &Device<'_>) -> Option<CommonAncestor> {
    match raw::common_ancestor(nvml, one, other) {
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL) => Some(CommonAncestor::Board),
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE) => Some(CommonAncestor::Switch),
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE) => Some(CommonAncestor::Switches),
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE) => Some(CommonAncestor::HostBridge),
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE) => Some(CommonAncestor::Node),
        Ok(sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM) => Some(CommonAncestor::System),
        Ok(level) => {
            tracing::debug!(
                level,
                "NVML says of two GPUs what this version does not know"
            );
            None
        }
        Err(error) => {
            tracing::debug!(%error, "NVML does not say what two GPUs have in common");
            None
        }
    }
}

fn read_links(nvml: &Nvml, device: &Device<'_>, wired: &mut Wired) {
    for number in 0..sys::NVML_NVLINK_MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {}
            // Some links of a GPU may be off or not there.
            Ok(false) | Err(NvmlError::NotSupported) => continue,
            // There is no such link, no such function, or no GPU any more.
            Err(_) => return,
        }
        // Without an answer the bus id says whether it is one of the GPUs.
        match raw::nvlink_remote_device_type(nvml, device, number) {
            Ok(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH) => {
                wired.switched += 1;
            }
            Ok(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU) => {}
            kind @ (Ok(_) | Err(_)) => {
                let remote = link.remote_pci_info().ok();
                if let Some(bus_id) = remote.and_then(|it| sysfs::pci_bus_id(&it.bus_id)) {
                    if kind != Ok(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU) {
                        *wired.unsaid.entry(bus_id.clone()).or_default() += 1;
                    }
                    *wired.peers.entry(bus_id).or_default() += 1;
                }
            }
        }
    }
}
