//! Waiting for XID errors and the like.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeAll, nvmlEventTypeClock,
    nvmlReturn_t,
};

use super::exports;
use crate::driver::{self, World};
use crate::event;
use crate::ffi::{Handle, code, put};

/// What an event says of a GPU that is not split.
const NO_INSTANCE: u32 = u32::MAX;

exports! {
    fn nvmlEventSetCreate(world, set: *mut nvmlEventSet_t) {
        let state = world.state()?.folder().to_owned();
        put(set, world.event_sets.create(&state)?)
    }
    fn nvmlEventSetFree(world, set: nvmlEventSet_t) {
        world.event_sets.free(set)
    }
    fn nvmlDeviceGetSupportedEventTypes(world, device: nvmlDevice_t, types: *mut c_ulonglong) {
        world.gpu(device)?;
        put(types, supported())
    }
    fn nvmlDeviceRegisterEvents(world, device: nvmlDevice_t, types: c_ulonglong, set: nvmlEventSet_t) {
        let uuid = world.gpu(device)?.uuid.clone();
        if types & !supported() != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        world.event_sets.register(set, &uuid, types)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    timeout_ms: c_uint,
) -> nvmlReturn_t {
    driver::call_unlocked("nvmlEventSetWait_v2", || {
        let event = wait(set, timeout_ms)?;
        // SAFETY: the pointer is the client's, who promises that an event fits there.
        unsafe { put(data, event) }
    })
}

/// The first version of the function, which has the same arguments.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    timeout_ms: c_uint,
) -> nvmlReturn_t {
    driver::call_unlocked("nvmlEventSetWait", || {
        let mut event = wait(set, timeout_ms)?;
        // It knows of no instances.
        (event.gpuInstanceId, event.computeInstanceId) = (0, 0);
        // SAFETY: the pointer is the client's, who promises that an event fits there.
        unsafe { put(data, event) }
    })
}

fn wait(set: nvmlEventSet_t, timeout_ms: c_uint) -> Result<nvmlEventData_t, nvmlReturn_t> {
    let end = Instant::now().checked_add(Duration::from_millis(u64::from(timeout_ms)));
    loop {
        let (event, changes) = driver::with_world(|world| event::next(world, set))?;
        if let Some(event) = event {
            return driver::with_world(|world| data(world, &event));
        }
        if !event::wait_for_change(&changes, end) {
            return Err(code::TIMEOUT);
        }
    }
}

fn data(world: &mut World, event: &event::Event) -> Result<nvmlEventData_t, nvmlReturn_t> {
    let gpu = world
        .gpus()
        .iter()
        .find(|gpu| gpu.uuid == event.gpu_uuid)
        .ok_or(code::NOT_FOUND)?;
    Ok(nvmlEventData_t {
        // Lost or not: an XID error often tells of the loss.
        device: Handle::device(u8::try_from(gpu.index).map_err(|_| code::UNKNOWN)?),
        eventType: event.kind,
        eventData: event.data,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
    })
}

/// Data centre GPUs report all but changes of the clock.
fn supported() -> u64 {
    u64::from(nvmlEventTypeAll & !nvmlEventTypeClock)
}
