//! Which processes compute on which GPU.

use std::collections::{BTreeMap, BTreeSet};

use nvml_wrapper::Nvml;

use crate::error::Code;
use crate::inventory::{self, Handle, Known};
use crate::raw;
use crate::snapshot::GpuProcesses;

/// UUIDs by index, read once in a run of NVML, so that a GPU that stops answering can still be named.
pub(crate) type Uuids = BTreeMap<u32, String>;

/// One entry for each GPU whose UUID is known, in the order of the index.
pub(crate) fn read(
    nvml: &Nvml,
    handles: &[Handle<'_>],
    uuids: &mut Uuids,
    known: &Known,
) -> Vec<GpuProcesses> {
    for (handle, index) in handles.iter().zip(0..) {
        if let Ok(device) = handle
            && !uuids.contains_key(&index)
            && let Ok(uuid) = inventory::uuid(device)
        {
            uuids.insert(index, uuid);
        }
    }
    let answering: BTreeSet<&String> = uuids.values().collect();
    handles
        .iter()
        .zip(0..)
        .filter_map(|(handle, index)| {
            let uuid = uuids.get(&index).or_else(|| {
                let before = known.get(&index)?.uuid.as_ref()?;
                (!answering.contains(before)).then_some(before)
            })?;
            Some(GpuProcesses {
                uuid: uuid.clone(),
                processes: handle
                    .as_ref()
                    .map_err(Clone::clone)
                    .and_then(|device| raw::compute_processes(nvml, device)),
            })
        })
        .collect()
}

/// Whether an answer says that this run of NVML is over: the driver went away or was replaced.
pub(crate) fn nvml_is_over(answer: &[GpuProcesses]) -> bool {
    answer
        .iter()
        .filter_map(|gpu| gpu.processes.as_ref().err()?.code())
        .any(|code| {
            matches!(
                code,
                Code::Uninitialized | Code::DriverNotLoaded | Code::LibRmVersionMismatch
            )
        })
}
