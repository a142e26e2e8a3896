//! How GPUs are connected: by NUMA node, and by NVLink through a switch.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL, nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
    nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM, nvmlPciInfo_t,
};

use super::exports;
use crate::ffi::{char_array, code, put};

/// An NVSwitch, by device and vendor.
const SWITCH_DEVICE_ID: u32 = 0x22a3_10de;
/// The switches of a node; the links of each GPU are spread over them.
const SWITCHES: u32 = 4;
/// The bus of the first switch, where no GPU is.
const FIRST_SWITCH_BUS: u32 = 0x05;

exports! {
    fn nvmlDeviceGetTopologyCommonAncestor(
        world, one: nvmlDevice_t, other: nvmlDevice_t, level: *mut c_uint,
    ) {
        let (one, other) = (world.gpu(one)?, world.gpu(other)?);
        put(level, if one.index == other.index {
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
        check_link(world.gpu(device)?.model.nvlinks, link)?;
        put(active, 1)
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
        world, device: nvmlDevice_t, link: c_uint, info: *mut nvmlPciInfo_t,
    ) {
        check_link(world.gpu(device)?.model.nvlinks, link)?;
        let bus = FIRST_SWITCH_BUS + link % SWITCHES;
        put(info, nvmlPciInfo_t {
            busIdLegacy: char_array(&format!("0000:{bus:02X}:00.0")),
            domain: 0,
            bus,
            device: 0,
            pciDeviceId: SWITCH_DEVICE_ID,
            pciSubSystemId: 0,
            busId: char_array(&format!("00000000:{bus:02X}:00.0")),
        })
    }
}

fn check_link(links: u32, link: u32) -> crate::ffi::Answer {
    if links == 0 {
        Err(code::NOT_SUPPORTED)
    } else if link >= links {
        Err(code::INVALID_ARGUMENT)
    } else {
        Ok(())
    }
}
