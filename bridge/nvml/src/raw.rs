//! NVML calls below the wrapper: those that it lacks, and those whose answers it would turn into errors.

use std::os::raw::c_uint;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use crate::error::{CallError, Code};
use crate::snapshot::Process;

/// How many processes fit into the first try; more are rare and cost a second call.
const PROCESS_ROOM: c_uint = 64;
/// How often the list of processes may grow while it is read, before it is called a failure.
const PROCESS_TRIES: u32 = 4;

/// A function of the library, or that it does not have it.
macro_rules! function {
    ($nvml:expr, $name:ident) => {
        $nvml
            .lib()
            .$name
            .as_ref()
            .map_err(|_not_there| CallError::Missing {
                call: stringify!($name),
            })
    };
}

/// Success, or what the call answered instead.
fn check(call: &'static str, answer: sys::nvmlReturn_t) -> Result<(), CallError> {
    if answer == sys::nvmlReturn_enum_NVML_SUCCESS {
        Ok(())
    } else {
        Err(CallError::answered(call, answer))
    }
}

/// The version word at the start of NVML's growing structs (`NVML_STRUCT_VERSION`).
fn struct_version<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).expect("NVML's structs are a few hundred bytes") | version << 24
}

/// `nvmlDeviceGetBrand`, as a number.
pub(crate) fn brand(nvml: &Nvml, device: &Device<'_>) -> Result<u32, CallError> {
    let function = function!(nvml, nvmlDeviceGetBrand)?;
    let mut brand = 0;
    // SAFETY: the handle belongs to this library, and `brand` is written only.
    check("nvmlDeviceGetBrand", unsafe {
        function(device.handle(), &raw mut brand)
    })?;
    Ok(brand)
}

/// `nvmlDeviceGetArchitecture`, as a number.
pub(crate) fn architecture(nvml: &Nvml, device: &Device<'_>) -> Result<u32, CallError> {
    let function = function!(nvml, nvmlDeviceGetArchitecture)?;
    let mut architecture = 0;
    // SAFETY: the handle belongs to this library, and `architecture` is written only.
    check("nvmlDeviceGetArchitecture", unsafe {
        function(device.handle(), &raw mut architecture)
    })?;
    Ok(architecture)
}

/// Total memory by `nvmlDeviceGetMemoryInfo_v2`, or by the first version on a driver without it.
///
/// `None` where NVML does not support the question.
pub(crate) fn memory_bytes(nvml: &Nvml, device: &Device<'_>) -> Result<Option<u64>, CallError> {
    let result = match memory_bytes_v2(nvml, device) {
        Err(CallError::Missing { .. }) => memory_bytes_v1(nvml, device),
        Err(error) if error.code() == Some(Code::ArgumentVersionMismatch) => {
            memory_bytes_v1(nvml, device)
        }
        other => other,
    };
    optional(result)
}

fn memory_bytes_v2(nvml: &Nvml, device: &Device<'_>) -> Result<u64, CallError> {
    let function = function!(nvml, nvmlDeviceGetMemoryInfo_v2)?;
    let mut memory = sys::nvmlMemory_v2_t {
        version: struct_version::<sys::nvmlMemory_v2_t>(2),
        total: 0,
        reserved: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: the handle belongs to this library, and the struct states its own size and version.
    check("nvmlDeviceGetMemoryInfo_v2", unsafe {
        function(device.handle(), &raw mut memory)
    })?;
    Ok(memory.total)
}

fn memory_bytes_v1(nvml: &Nvml, device: &Device<'_>) -> Result<u64, CallError> {
    let function = function!(nvml, nvmlDeviceGetMemoryInfo)?;
    let mut memory = sys::nvmlMemory_t {
        total: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: the handle belongs to this library, and this struct has one version only.
    check("nvmlDeviceGetMemoryInfo", unsafe {
        function(device.handle(), &raw mut memory)
    })?;
    Ok(memory.total)
}

/// `nvmlDeviceGetAddressingMode`, as a number; `None` where driver or GPU do not support the question.
pub(crate) fn addressing_mode(nvml: &Nvml, device: &Device<'_>) -> Result<Option<u32>, CallError> {
    let Ok(function) = function!(nvml, nvmlDeviceGetAddressingMode) else {
        return Ok(None);
    };
    let mut mode = sys::nvmlDeviceAddressingMode_t {
        version: struct_version::<sys::nvmlDeviceAddressingMode_v1_t>(1),
        value: 0,
    };
    // SAFETY: the handle belongs to this library, and the struct states its own size and version.
    let answer = check("nvmlDeviceGetAddressingMode", unsafe {
        function(device.handle(), &raw mut mode)
    });
    optional(answer.map(|()| mode.value))
}

/// `nvmlDeviceGetTopologyCommonAncestor`, as a number. The wrapper takes a device by value, and devices can't be copied.
pub(crate) fn common_ancestor(
    nvml: &Nvml,
    one: &Device<'_>,
    other: &Device<'_>,
) -> Result<u32, CallError> {
    let function = function!(nvml, nvmlDeviceGetTopologyCommonAncestor)?;
    let mut level = sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM;
    // SAFETY: both handles belong to this library, and `level` is written only.
    check("nvmlDeviceGetTopologyCommonAncestor", unsafe {
        function(one.handle(), other.handle(), &raw mut level)
    })?;
    Ok(level)
}

/// `nvmlDeviceGetNvLinkRemoteDeviceType`, as a number. The wrapper answers "unknown" always: it has NVML write into a copy.
pub(crate) fn nvlink_remote_device_type(
    nvml: &Nvml,
    device: &Device<'_>,
    link: u32,
) -> Result<u32, CallError> {
    let function = function!(nvml, nvmlDeviceGetNvLinkRemoteDeviceType)?;
    let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // SAFETY: the handle belongs to this library, and `kind` is written only.
    check("nvmlDeviceGetNvLinkRemoteDeviceType", unsafe {
        function(device.handle(), link, &raw mut kind)
    })?;
    Ok(kind)
}

/// `nvmlDeviceGetComputeRunningProcesses_v3`, or the second version on a driver without it (before R510), with one call
/// unless there are very many.
///
/// The wrapper asks for the count first and gives up if the list has grown by more than five since.
pub(crate) fn compute_processes(
    nvml: &Nvml,
    device: &Device<'_>,
) -> Result<Vec<Process>, CallError> {
    const NEWER: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
    const OLDER: &str = "nvmlDeviceGetComputeRunningProcesses_v2";
    if let Ok(newer) = function!(nvml, nvmlDeviceGetComputeRunningProcesses_v3) {
        // SAFETY: the handle belongs to this library, and the list has room for as many as `count` says.
        return list(NEWER, |count, infos| unsafe {
            newer(device.handle(), count, infos)
        });
    }
    let older = function!(nvml, nvmlDeviceGetComputeRunningProcesses_v2)?;
    // SAFETY: the same; the entries are those of the third version.
    list(OLDER, |count, infos| unsafe {
        older(device.handle(), count, infos)
    })
}

/// Reads a list of processes through a call that is given the room and where it is.
fn list(
    name: &'static str,
    call: impl Fn(*mut c_uint, *mut sys::nvmlProcessInfo_t) -> sys::nvmlReturn_t,
) -> Result<Vec<Process>, CallError> {
    const EMPTY: sys::nvmlProcessInfo_t = sys::nvmlProcessInfo_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    };
    let mut room = PROCESS_ROOM;
    for _try in 0..PROCESS_TRIES {
        let mut processes = vec![EMPTY; room as usize];
        let mut count = room;
        let answer = call(&raw mut count, processes.as_mut_ptr());
        match check(name, answer) {
            Ok(()) => {
                processes.truncate(count as usize);
                return Ok(processes.iter().map(process).collect());
            }
            Err(error) if error.code() == Some(Code::InsufficientSize) => {
                // As many as there were just now, and as many again, so that it fits at the next try.
                room = count.max(room).saturating_mul(2);
            }
            Err(error) => return Err(error),
        }
    }
    Err(CallError::nonsense(name, "a list that grows without end"))
}

fn process(info: &sys::nvmlProcessInfo_t) -> Process {
    /// `NVML_VALUE_NOT_AVAILABLE` in a 64-bit field.
    const NOT_AVAILABLE: u64 = u64::MAX;
    Process {
        pid: info.pid,
        used_memory_bytes: Some(info.usedGpuMemory).filter(|bytes| *bytes != NOT_AVAILABLE),
    }
}

/// Turns "not supported" into absence.
fn optional<T>(result: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match result {
        Err(error) if error.code() == Some(Code::NotSupported) => Ok(None),
        other => other.map(Some),
    }
}
