//! Field values: the one that tells what has to be done about a GPU.

use std::ffi::{c_int, c_longlong};

use nvml_wrapper_sys::bindings::{
    field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, nvmlDevice_t, nvmlFieldValue_t, nvmlValue_t,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
};

use super::exports;
use crate::ffi::{Answer, code};

exports! {
    fn nvmlDeviceGetFieldValues(world, device: nvmlDevice_t, count: c_int, values: *mut nvmlFieldValue_t) {
        let gpu = world.gpu(device)?.uuid.clone();
        let action = world.recovery(&gpu)?;
        let count = usize::try_from(count).map_err(|_| code::INVALID_ARGUMENT)?;
        answer(values, count, action)
    }
}

/// Answers each field, or that it is not supported.
///
/// # Safety
///
/// `values` is null or points to so many fields.
unsafe fn answer(values: *mut nvmlFieldValue_t, count: usize, action: u32) -> Answer {
    if values.is_null() || count == 0 {
        return Err(code::INVALID_ARGUMENT);
    }
    for place in 0..count {
        // SAFETY: within the list, by the caller's promise.
        let value = unsafe { &mut *values.add(place) };
        value.timestamp = c_longlong::from(0_i32);
        value.latencyUsec = c_longlong::from(0_i32);
        if value.fieldId == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION {
            value.valueType = nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
            value.value = nvmlValue_t { uiVal: action };
            value.nvmlReturn = code::SUCCESS;
        } else {
            value.nvmlReturn = code::NOT_SUPPORTED;
        }
    }
    Ok(())
}
