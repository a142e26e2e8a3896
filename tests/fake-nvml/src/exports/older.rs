//! Older versions of implemented functions, for clients that ask for those.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t,
    nvmlReturn_t,
};

use super::device;
use super::exports;
use crate::driver;
use crate::ffi::{put, put_list};

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> nvmlReturn_t {
    driver::init("nvmlInit", 0)
}

exports! {
    fn nvmlDeviceGetCount(world, count: *mut c_uint) {
        put(count, device::count(world)?)
    }
    fn nvmlDeviceGetHandleByIndex(world, index: c_uint, handle: *mut nvmlDevice_t) {
        put(handle, device::by_index(world, index)?)
    }
    fn nvmlDeviceGetHandleByPciBusId(world, id: *const c_char, handle: *mut nvmlDevice_t) {
        put(handle, device::by_pci_bus_id(world, id)?)
    }
    fn nvmlDeviceGetPciInfo(world, device: nvmlDevice_t, info: *mut nvmlPciInfo_t) {
        put(info, device::pci_info(world.gpu(device)?)?)
    }
    fn nvmlDeviceGetPciInfo_v2(world, device: nvmlDevice_t, info: *mut nvmlPciInfo_t) {
        put(info, device::pci_info(world.gpu(device)?)?)
    }
    fn nvmlDeviceGetComputeRunningProcesses(
        world, device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v1_t,
    ) {
        let processes: Vec<_> = device::processes(world, device)?.iter().map(first_version).collect();
        put_list(count, infos, &processes)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(
        world, device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_v2_t,
    ) {
        put_list(count, infos, &device::processes(world, device)?)
    }
}

fn first_version(process: &nvmlProcessInfo_t) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.usedGpuMemory,
    }
}
