//! How GPUs are connected: as the scenario's `topology` says, else by PCIe root and NUMA node, and by NVLinks to switches.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL, nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH, nvmlIntNvLinkDeviceType_t,
    nvmlPciInfo_t, nvmlReturn_t,
};

use super::device::pci_info;
use super::exports;
use crate::driver::World;
use crate::ffi::{char_array, code, put};
use crate::scenario::{Cell, Gpu};

/// An NVSwitch, by device and vendor.
const SWITCH_DEVICE_ID: u32 = 0x22a3_10de;
/// The switches of a node; the links of each GPU are spread over them.
const SWITCHES: u32 = 4;
/// The bus of the first switch, where no GPU is.
const FIRST_SWITCH_BUS: u32 = 0x05;

/// Where a link of a GPU ends.
enum End {
    /// At another GPU.
    Gpu(nvmlPciInfo_t),
    /// At a switch, by its bus.
    Switch(u32),
}

exports! {
    fn nvmlDeviceGetTopologyCommonAncestor(
        world, one: nvmlDevice_t, other: nvmlDevice_t, level: *mut c_uint,
    ) {
        let (one, other) = (world.gpu(one)?, world.gpu(other)?);
        let known = cell(world, one, other)?;
        put(level, if let Some(known) = known {
            known.level
        } else if one.index == other.index {
            nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
        } else if one.pcie_root == other.pcie_root {
            nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE
        } else if one.numa_node == other.numa_node {
            nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE
        } else {
            nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM
        })
    }
    fn nvmlDeviceGetNvLinkState(world, device: nvmlDevice_t, link: c_uint, active: *mut c_uint) {
        end_of(world, device, link)?;
        put(active, 1)
    }
    fn nvmlDeviceGetNvLinkRemoteDeviceType(
        world, device: nvmlDevice_t, link: c_uint, kind: *mut nvmlIntNvLinkDeviceType_t,
    ) {
        put(kind, match end_of(world, device, link)? {
            End::Gpu(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            End::Switch(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
        world, device: nvmlDevice_t, link: c_uint, info: *mut nvmlPciInfo_t,
    ) {
        put(info, match end_of(world, device, link)? {
            End::Gpu(info) => info,
            End::Switch(bus) => nvmlPciInfo_t {
                busIdLegacy: char_array(&format!("0000:{bus:02X}:00.0")),
                domain: 0,
                bus,
                device: 0,
                pciDeviceId: SWITCH_DEVICE_ID,
                pciSubSystemId: 0,
                busId: char_array(&format!("00000000:{bus:02X}:00.0")),
            },
        })
    }
}

/// The connection of two GPUs, if the scenario has any.
fn cell(world: &World, one: &Gpu, other: &Gpu) -> Result<Option<Cell>, nvmlReturn_t> {
    let row = world.scenario()?.topology.get(one.index as usize);
    Ok(row.and_then(|row| row.0.get(other.index as usize)).copied())
}

/// The links of a GPU are numbered by the GPUs at their ends, or over the switches.
fn end_of(world: &World, device: nvmlDevice_t, link: u32) -> Result<End, nvmlReturn_t> {
    let gpu = world.gpu(device)?;
    let row = world.scenario()?.topology.get(gpu.index as usize);
    let cells = row.iter().flat_map(|row| &row.0).zip(world.gpus());
    let mut peers = cells.flat_map(|(cell, peer)| std::iter::repeat_n(peer, cell.links as usize));
    if let Some(peer) = peers.nth(link as usize) {
        return Ok(End::Gpu(pci_info(peer)?));
    }
    let has_peers = row.is_some_and(|row| row.0.iter().any(|cell| cell.links > 0));
    let switched = if has_peers { 0 } else { gpu.model.nvlinks };
    if !has_peers && switched == 0 {
        Err(code::NOT_SUPPORTED)
    } else if link >= switched {
        Err(code::INVALID_ARGUMENT)
    } else {
        Ok(End::Switch(FIRST_SWITCH_BUS + link % SWITCHES))
    }
}
