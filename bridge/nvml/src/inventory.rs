//! Reading a [`Snapshot`] through an open NVML.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::NVML_DEVICE_MIG_ENABLE;

use crate::error::{CallError, Code};
use crate::snapshot::{FailedGpu, GpuInfo, MigMode, Snapshot, Version};
use crate::{names, raw, sysfs};

/// Most GPUs of a node that are looked at: a wrong count must not keep the thread busy for ever.
pub(crate) const MAX_GPUS: u32 = 256;

/// A GPU as far as it can be told apart from others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uuid: Option<String>,
    pub(crate) pci_bus_id: Option<String>,
}

/// Who answered last under each index; kept while NVML is closed and opened again.
pub(crate) type Known = BTreeMap<u32, Identity>;

/// A GPU as NVML hands it out: its handle, or why there is none.
pub(crate) type Handle<'nvml> = Result<Device<'nvml>, CallError>;

/// A handle for each GPU that NVML counts, in the order of the index.
pub(crate) fn handles(nvml: &Nvml) -> Result<Vec<Handle<'_>>, CallError> {
    let count = nvml
        .device_count()
        .map_err(named("nvmlDeviceGetCount_v2"))?;
    if count > MAX_GPUS {
        return Err(CallError::nonsense(
            "nvmlDeviceGetCount_v2",
            format_args!("{count} GPUs, more than {MAX_GPUS}"),
        ));
    }
    Ok((0..count)
        .map(|index| {
            nvml.device_by_index(index)
                .map_err(named("nvmlDeviceGetHandleByIndex_v2"))
        })
        .collect())
}

/// Reads everything about the node and its GPUs.
pub(crate) fn read(
    nvml: &Nvml,
    handles: &[Handle<'_>],
    sys_root: &Path,
    known: &mut Known,
) -> Result<Snapshot, CallError> {
    let driver_version = nvml
        .sys_driver_version()
        .map_err(named("nvmlSystemGetDriverVersion"))?;
    let mut gpus = Vec::new();
    let mut failed = Vec::new();
    for (handle, index) in handles.iter().zip(0..) {
        let mut identity = Identity::default();
        match handle
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|device| gpu(nvml, device, index, sys_root, &mut identity))
        {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => failed.push(FailedGpu {
                index,
                uuid: identity.uuid,
                pci_bus_id: identity.pci_bus_id,
                error,
            }),
        }
    }
    recall(&gpus, &mut failed, known);
    Ok(Snapshot {
        driver_version,
        cuda_driver_version: cuda_driver_version(nvml),
        gpus,
        failed,
    })
}

/// What NVML says of CUDA; it asks libcuda, so that the answer is missing where libcuda is.
fn cuda_driver_version(nvml: &Nvml) -> Option<Version> {
    let version = nvml
        .sys_cuda_driver_version()
        .map_err(named("nvmlSystemGetCudaDriverVersion_v2"))
        .inspect_err(|error| tracing::debug!(%error, "the CUDA version of the driver is not known"))
        .ok()?;
    let version = u32::try_from(version).ok()?;
    // 12040 is 12.4: thousands and tens, as CUDA_VERSION in cuda.h.
    Some(Version {
        major: version / 1000,
        minor: version % 1000 / 10,
    })
}

/// Reads one GPU. What identifies it goes to `identity` as soon as it is known, for the case that the rest fails.
fn gpu(
    nvml: &Nvml,
    device: &Device<'_>,
    index: u32,
    sys_root: &Path,
    identity: &mut Identity,
) -> Result<GpuInfo, CallError> {
    let pci_bus_id = pci_bus_id(device)?;
    identity.pci_bus_id = Some(pci_bus_id.clone());
    let uuid = uuid(device)?;
    identity.uuid = Some(uuid.clone());
    let capability = device
        .cuda_compute_capability()
        .map_err(named("nvmlDeviceGetCudaComputeCapability"))?;
    Ok(GpuInfo {
        minor: device
            .minor_number()
            .map_err(named("nvmlDeviceGetMinorNumber"))?,
        index,
        product_name: device.name().map_err(named("nvmlDeviceGetName"))?,
        brand: names::brand(raw::brand(nvml, device)?),
        architecture: names::architecture(raw::architecture(nvml, device)?),
        cuda_compute_capability: Version {
            major: positive(capability.major)?,
            minor: positive(capability.minor)?,
        },
        memory_bytes: raw::memory_bytes(nvml, device)?,
        numa_node: sysfs::numa_node(sys_root, &pci_bus_id).unwrap_or_else(|| {
            // Meant for GPU memory that is a NUMA node of its own; on most machines it is not supported.
            device.numa_node_id().ok()
        }),
        pcie_root: sysfs::pcie_root(sys_root, &pci_bus_id),
        addressing_mode: raw::addressing_mode(nvml, device)?.map(names::addressing_mode),
        mig: mig_mode(device)?,
        // What keeps the driver from saying so is no reason not to serve the GPU.
        recovery: raw::recovery_action(nvml, device)
            .inspect_err(|error| tracing::debug!(%error, uuid, "what has to be done about a GPU is not known"))
            .unwrap_or_default()
            .map(Into::into),
        pci_bus_id,
        uuid,
    })
}

pub(crate) fn uuid(device: &Device<'_>) -> Result<String, CallError> {
    device.uuid().map_err(named("nvmlDeviceGetUUID"))
}

pub(crate) fn pci_bus_id(device: &Device<'_>) -> Result<String, CallError> {
    const CALL: &str = "nvmlDeviceGetPciInfo_v3";
    let bus_id = device.pci_info().map_err(named(CALL))?.bus_id;
    sysfs::pci_bus_id(&bus_id)
        .ok_or_else(|| CallError::nonsense(CALL, format_args!("the bus id \"{bus_id}\"")))
}

fn mig_mode(device: &Device<'_>) -> Result<MigMode, CallError> {
    const CALL: &str = "nvmlDeviceGetMigMode";
    match device.mig_mode().map_err(named(CALL)) {
        Ok(mode) if mode.current == NVML_DEVICE_MIG_ENABLE => Ok(MigMode::Enabled),
        Ok(_) => Ok(MigMode::Disabled),
        Err(CallError::Missing { .. }) => Ok(MigMode::NotSupported),
        Err(error) if error.code() == Some(Code::NotSupported) => Ok(MigMode::NotSupported),
        Err(error) => Err(error),
    }
}

fn positive(number: i32) -> Result<u32, CallError> {
    u32::try_from(number).map_err(|_negative| {
        CallError::nonsense(
            "nvmlDeviceGetCudaComputeCapability",
            format_args!("the number {number}"),
        )
    })
}

/// Gives GPUs that did not say who they are the identity that their index had, unless another GPU has it now.
fn recall(gpus: &[GpuInfo], failed: &mut [FailedGpu], known: &mut Known) {
    let taken: BTreeSet<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    for gpu in failed.iter_mut().filter(|gpu| gpu.uuid.is_none()) {
        let Some(before) = known.get(&gpu.index) else {
            continue;
        };
        let moved = before
            .uuid
            .as_deref()
            .is_some_and(|uuid| taken.contains(uuid));
        let same_slot = gpu.pci_bus_id.is_none() || gpu.pci_bus_id == before.pci_bus_id;
        if !moved && same_slot {
            gpu.uuid.clone_from(&before.uuid);
            gpu.pci_bus_id.clone_from(&before.pci_bus_id);
        }
    }
    *known = gpus
        .iter()
        .map(|gpu| {
            (
                gpu.index,
                Some(gpu.uuid.clone()),
                Some(gpu.pci_bus_id.clone()),
            )
        })
        .chain(
            failed
                .iter()
                .map(|gpu| (gpu.index, gpu.uuid.clone(), gpu.pci_bus_id.clone())),
        )
        .map(|(index, uuid, pci_bus_id)| (index, Identity { uuid, pci_bus_id }))
        .collect();
}

/// For `map_err`: the wrapper's error with the name of the call.
fn named(call: &'static str) -> impl Fn(NvmlError) -> CallError {
    move |error| CallError::from_wrapper(call, error)
}
