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

/// What has to be done about a GPU (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, field 230 of nvml.h), as a number; `None` where
/// driver or GPU do not support the question.
pub(crate) fn recovery_action(nvml: &Nvml, device: &Device<'_>) -> Result<Option<u32>, CallError> {
    const CALL: &str = "nvmlDeviceGetFieldValues";
    let Ok(function) = function!(nvml, nvmlDeviceGetFieldValues) else {
        return Ok(None);
    };
    let mut field = sys::nvmlFieldValue_t {
        fieldId: sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        scopeId: 0,
        timestamp: 0,
        latencyUsec: 0,
        valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
        nvmlReturn: sys::nvmlReturn_enum_NVML_SUCCESS,
        value: sys::nvmlValue_t { ullVal: 0 },
    };
    // SAFETY: the handle belongs to this library, and there is room for the one field that is asked for.
    let answer = check(CALL, unsafe {
        function(device.handle(), 1, &raw mut field)
    });
    let answer = answer.and_then(|()| check(CALL, field.nvmlReturn));
    // An older driver calls a field that it does not know an invalid argument.
    match optional(answer) {
        Err(error) if error.code() == Some(Code::InvalidArgument) => Ok(None),
        Err(error) => Err(error),
        Ok(None) => Ok(None),
        // SAFETY: the union was written as a whole before the call, and each of its bits is one of a number.
        Ok(Some(())) => Ok(Some(unsafe { field.value.uiVal })),
    }
}

/// A GPU as NVML's functions know it; it is good for as long as NVML is not shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawGpu(sys::nvmlDevice_t);

// SAFETY: the library hands it out and takes it back from any thread; nobody looks behind it here.
unsafe impl Send for RawGpu {}
// SAFETY: the same.
unsafe impl Sync for RawGpu {}

impl RawGpu {
    /// The same GPU as a handle of the wrapper.
    pub(crate) fn of(device: &Device<'_>) -> Self {
        // SAFETY: what comes out is only passed to functions of the library that made it.
        Self(unsafe { device.handle() })
    }
}

/// An error that a GPU's driver has told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawXid {
    pub(crate) gpu: RawGpu,
    pub(crate) xid: u64,
}

/// What tells of the XIDs of the GPUs that were added to it. The wrapper's own set is freed by the first GPU that can't
/// be added, and loses the numbers that it does not know.
pub(crate) struct EventSet<'nvml> {
    nvml: &'nvml Nvml,
    set: sys::nvmlEventSet_t,
}

impl<'nvml> EventSet<'nvml> {
    /// An empty one (`nvmlEventSetCreate`).
    pub(crate) fn create(nvml: &'nvml Nvml) -> Result<Self, CallError> {
        let function = function!(nvml, nvmlEventSetCreate)?;
        let mut set = std::ptr::null_mut();
        // SAFETY: `set` is written only.
        check("nvmlEventSetCreate", unsafe { function(&raw mut set) })?;
        Ok(Self { nvml, set })
    }

    /// Adds a GPU (`nvmlDeviceRegisterEvents`).
    pub(crate) fn add(&self, gpu: RawGpu) -> Result<(), CallError> {
        let supported = function!(self.nvml, nvmlDeviceGetSupportedEventTypes)?;
        let mut types = 0;
        // SAFETY: the handle belongs to this library, which is open, and `types` is written only.
        check("nvmlDeviceGetSupportedEventTypes", unsafe {
            supported(gpu.0, &raw mut types)
        })?;
        let xid = u64::from(sys::nvmlEventTypeXidCriticalError);
        if types & xid == 0 {
            let code = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
            return Err(CallError::answered("nvmlDeviceRegisterEvents", code));
        }
        let register = function!(self.nvml, nvmlDeviceRegisterEvents)?;
        // SAFETY: handle and set belong to this library, which is open.
        check("nvmlDeviceRegisterEvents", unsafe {
            register(gpu.0, xid, self.set)
        })
    }

    /// Sleeps until there is an XID, no longer than so many milliseconds (`nvmlEventSetWait_v2`).
    pub(crate) fn wait(&self, milliseconds: u32) -> Result<Option<RawXid>, CallError> {
        let function = function!(self.nvml, nvmlEventSetWait_v2)?;
        let mut event = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        // SAFETY: the set belongs to this library, which is open, and `event` is written only.
        let answer = check("nvmlEventSetWait_v2", unsafe {
            function(self.set, &raw mut event, milliseconds)
        });
        match answer {
            Err(error) if error.code() == Some(Code::Timeout) => Ok(None),
            Err(error) => Err(error),
            Ok(()) => Ok(Some(RawXid {
                gpu: RawGpu(event.device),
                xid: event.eventData,
            })),
        }
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        if let Ok(free) = function!(self.nvml, nvmlEventSetFree) {
            // SAFETY: the set belongs to this library, which is open, and nobody uses it any more.
            let freed = check("nvmlEventSetFree", unsafe { free(self.set) });
            if let Err(error) = freed {
                tracing::debug!(%error, "a set of events was not freed; it goes with NVML");
            }
        }
    }
}

/// Turns "not supported" into absence.
fn optional<T>(result: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match result {
        Err(error) if error.code() == Some(Code::NotSupported) => Ok(None),
        other => other.map(Some),
    }
}
