//! GPUs: identity, memory, modes, processes.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE, nvmlDevice_t, nvmlDeviceAddressingMode_v1_t,
    nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlReturn_t,
};

use super::exports;
use crate::driver::World;
use crate::ffi::{Answer, char_array, code, put, put_list, put_str, read_str, struct_version};
use crate::model::Model;
use crate::scenario::{Gpu, parse_pci};

/// Memory that the driver keeps for itself.
const RESERVED_BYTES: u64 = 600 << 20;
/// `NVML_VALUE_NOT_AVAILABLE` in a 64-bit field.
const NOT_AVAILABLE: u64 = u64::MAX;
/// What `nvmlProcessInfo_t` says of a process that is on no MIG instance.
const NO_INSTANCE: u32 = u32::MAX;
/// Most MIG instances of a GPU that has any.
const MIG_INSTANCES: u32 = 7;

exports! {
    fn nvmlDeviceGetCount_v2(world, count: *mut c_uint) {
        put(count, self::count(world)?)
    }
    fn nvmlDeviceGetHandleByIndex_v2(world, index: c_uint, device: *mut nvmlDevice_t) {
        put(device, by_index(world, index)?)
    }
    fn nvmlDeviceGetHandleByUUID(world, uuid: *const c_char, device: *mut nvmlDevice_t) {
        let uuid = read_str(uuid)?;
        put(device, world.handle_of(|gpu| gpu.uuid == uuid)?)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(world, id: *const c_char, device: *mut nvmlDevice_t) {
        put(device, by_pci_bus_id(world, id)?)
    }
    fn nvmlDeviceGetIndex(world, device: nvmlDevice_t, index: *mut c_uint) {
        put(index, world.gpu(device)?.index)
    }
    fn nvmlDeviceGetUUID(world, device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) {
        put_str(uuid, length, &world.gpu(device)?.uuid)
    }
    fn nvmlDeviceGetName(world, device: nvmlDevice_t, name: *mut c_char, length: c_uint) {
        put_str(name, length, &world.gpu(device)?.name)
    }
    fn nvmlDeviceGetMinorNumber(world, device: nvmlDevice_t, minor: *mut c_uint) {
        put(minor, world.gpu(device)?.minor)
    }
    fn nvmlDeviceGetBrand(world, device: nvmlDevice_t, brand: *mut c_uint) {
        put(brand, world.gpu(device)?.brand)
    }
    fn nvmlDeviceGetArchitecture(world, device: nvmlDevice_t, architecture: *mut c_uint) {
        put(architecture, world.gpu(device)?.architecture)
    }
    fn nvmlDeviceGetCudaComputeCapability(world, device: nvmlDevice_t, major: *mut c_int, minor: *mut c_int) {
        let capability = world.gpu(device)?.model.compute_capability;
        put(major, c_int::try_from(capability.0).map_err(|_| code::UNKNOWN)?)?;
        put(minor, c_int::try_from(capability.1).map_err(|_| code::UNKNOWN)?)
    }
    fn nvmlDeviceGetPciInfo_v3(world, device: nvmlDevice_t, info: *mut nvmlPciInfo_t) {
        put(info, pci_info(world.gpu(device)?)?)
    }
    fn nvmlDeviceGetNumaNodeId(world, device: nvmlDevice_t, node: *mut c_uint) {
        let gpu = world.gpu(device)?;
        put(node, c_uint::try_from(gpu.numa_node).map_err(|_| code::NOT_SUPPORTED)?)
    }
    fn nvmlDeviceGetMemoryInfo(world, device: nvmlDevice_t, memory: *mut nvmlMemory_t) {
        let (total, used) = memory_bytes(world, device)?;
        put(memory, nvmlMemory_t { total, free: total - used, used })
    }
    fn nvmlDeviceGetMemoryInfo_v2(world, device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) {
        check_version(memory.cast(), struct_version::<nvmlMemory_v2_t>(2))?;
        let (total, used) = memory_bytes(world, device)?;
        let free = total - used - RESERVED_BYTES;
        let version = struct_version::<nvmlMemory_v2_t>(2);
        put(memory, nvmlMemory_v2_t { version, total, reserved: RESERVED_BYTES, free, used })
    }
    fn nvmlDeviceGetAddressingMode(world, device: nvmlDevice_t, mode: *mut nvmlDeviceAddressingMode_v1_t) {
        let version = struct_version::<nvmlDeviceAddressingMode_v1_t>(1);
        check_version(mode.cast(), version)?;
        let value = world.gpu(device)?.model.addressing_mode.ok_or(code::NOT_SUPPORTED)?;
        put(mode, nvmlDeviceAddressingMode_v1_t { version, value })
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(
        world, device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t,
    ) {
        put_list(count, infos, &processes(world, device)?)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        world, device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t,
    ) {
        world.gpu(device)?;
        put_list(count, infos, &[])
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        world, device: nvmlDevice_t, count: *mut c_uint, infos: *mut nvmlProcessInfo_t,
    ) {
        world.gpu(device)?;
        put_list(count, infos, &[])
    }
    fn nvmlDeviceGetPersistenceMode(world, device: nvmlDevice_t, mode: *mut c_uint) {
        world.gpu(device)?;
        put(mode, 1)
    }
    fn nvmlDeviceGetComputeMode(world, device: nvmlDevice_t, mode: *mut c_uint) {
        world.gpu(device)?;
        put(mode, 0)
    }
    fn nvmlDeviceGetVirtualizationMode(world, device: nvmlDevice_t, mode: *mut c_uint) {
        world.gpu(device)?;
        put(mode, 0)
    }
    fn nvmlDeviceIsMigDeviceHandle(world, device: nvmlDevice_t, is_mig: *mut c_uint) {
        world.gpu(device)?;
        put(is_mig, 0)
    }
    fn nvmlDeviceGetMigMode(world, device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) {
        let gpu = world.gpu(device)?;
        mig_capable(gpu.model)?;
        let mode = if gpu.mig { NVML_DEVICE_MIG_ENABLE } else { NVML_DEVICE_MIG_DISABLE };
        put(current, mode)?;
        put(pending, mode)
    }
    fn nvmlDeviceGetMaxMigDeviceCount(world, device: nvmlDevice_t, count: *mut c_uint) {
        let model = world.gpu(device)?.model;
        put(count, if model.mig_capable { MIG_INSTANCES } else { 0 })
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(
        world, device: nvmlDevice_t, _index: c_uint, _mig_device: *mut nvmlDevice_t,
    ) {
        mig_capable(world.gpu(device)?.model)?;
        Err(code::NOT_FOUND)
    }
}

pub(super) fn count(world: &World) -> Result<c_uint, nvmlReturn_t> {
    c_uint::try_from(world.gpus().len()).map_err(|_| code::UNKNOWN)
}

pub(super) fn by_index(world: &World, index: c_uint) -> Result<nvmlDevice_t, nvmlReturn_t> {
    if index >= count(world)? {
        return Err(code::INVALID_ARGUMENT);
    }
    world.handle_of(|gpu| gpu.index == index)
}

/// # Safety
///
/// `id` is null or points to a string that ends with a zero.
pub(super) unsafe fn by_pci_bus_id(
    world: &World,
    id: *const c_char,
) -> Result<nvmlDevice_t, nvmlReturn_t> {
    // SAFETY: by the caller's promise.
    let id = parse_pci(&unsafe { read_str(id) }?).ok_or(code::INVALID_ARGUMENT)?;
    world.handle_of(|gpu| parse_pci(&gpu.pci_bus_id) == Some(id))
}

pub(super) fn processes(
    world: &mut World,
    device: nvmlDevice_t,
) -> Result<Vec<nvmlProcessInfo_t>, nvmlReturn_t> {
    let gpu = world.gpu(device)?.uuid.clone();
    Ok(world
        .processes(&gpu)?
        .into_iter()
        .map(|process| nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: process.used_memory_bytes.unwrap_or(NOT_AVAILABLE),
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        })
        .collect())
}

fn mig_capable(model: &Model) -> Answer {
    if model.mig_capable {
        Ok(())
    } else {
        Err(code::NOT_SUPPORTED)
    }
}

/// NVML compares the word at the start of a struct with the version that it knows.
///
/// # Safety
///
/// `given` is null or points to the first word of a struct.
unsafe fn check_version(given: *const u32, known: u32) -> Answer {
    if given.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and by the caller's promise a struct that begins with its version.
    if unsafe { given.read() } == known {
        Ok(())
    } else {
        Err(code::VERSION_MISMATCH)
    }
}

/// Total and used memory.
fn memory_bytes(world: &mut World, device: nvmlDevice_t) -> Result<(u64, u64), nvmlReturn_t> {
    let gpu = world.gpu(device)?;
    let total = gpu.model.memory_mib.ok_or(code::NOT_SUPPORTED)? << 20;
    let gpu = gpu.uuid.clone();
    let used: u64 = world
        .processes(&gpu)?
        .iter()
        .filter_map(|process| process.used_memory_bytes)
        .sum();
    Ok((total, used.min(total - RESERVED_BYTES)))
}

pub(super) fn pci_info(gpu: &Gpu) -> Result<nvmlPciInfo_t, nvmlReturn_t> {
    let (domain, bus, slot) = parse_pci(&gpu.pci_bus_id).ok_or(code::UNKNOWN)?;
    Ok(nvmlPciInfo_t {
        busIdLegacy: char_array(&format!("{domain:04X}:{bus:02X}:{slot:02X}.0")),
        domain,
        bus,
        device: slot,
        pciDeviceId: gpu.model.pci_device_id,
        pciSubSystemId: 0x16c1_10de,
        busId: char_array(&format!("{domain:08X}:{bus:02X}:{slot:02X}.0")),
    })
}
