//! Writing through the pointers of a C caller, and handles that are numbers.

use std::ffi::{CStr, c_char, c_uint};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventSet_t, nvmlReturn_t};

/// What an NVML call answers; the error is an `nvmlReturn_t`.
pub(crate) type Answer = Result<(), nvmlReturn_t>;

/// The answers that the fake gives of its own accord.
pub(crate) mod code {
    pub(crate) use nvml_wrapper_sys::bindings::{
        nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as VERSION_MISMATCH,
        nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED as DRIVER_NOT_LOADED,
        nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST as GPU_IS_LOST,
        nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES,
        nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
        nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
        nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
        nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
        nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT,
        nvmlReturn_enum_NVML_ERROR_UNINITIALIZED as UNINITIALIZED,
        nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
    };
}

/// A handle that was given to a client.
///
/// Handles are numbers with a tag and never pointers, so a wrong one is noticed and not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handle {
    /// A GPU, by its index.
    Gpu(u8),
    /// An event set, by its number.
    EventSet(u8),
}

/// The upper half of every handle.
const TAG: usize = 0x464b_4e56 << 32;
const GPU: usize = 0x0100;
const EVENT_SET: usize = 0x0200;

impl Handle {
    fn bits(self) -> usize {
        TAG | match self {
            Self::Gpu(index) => GPU | usize::from(index),
            Self::EventSet(number) => EVENT_SET | usize::from(number),
        }
    }

    /// As a client sees a GPU.
    pub(crate) fn device(index: u8) -> nvmlDevice_t {
        std::ptr::without_provenance_mut(Self::Gpu(index).bits())
    }

    /// As a client sees an event set.
    pub(crate) fn event_set(number: u8) -> nvmlEventSet_t {
        std::ptr::without_provenance_mut(Self::EventSet(number).bits())
    }

    /// Reads back what a client passed.
    pub(crate) fn read<T>(handle: *mut T) -> Result<Self, nvmlReturn_t> {
        let bits = handle.addr();
        let low = u8::try_from(bits & 0xff).map_err(|_| code::INVALID_ARGUMENT)?;
        match (bits & !0xffff, bits & 0xff00) {
            (TAG, GPU) => Ok(Self::Gpu(low)),
            (TAG, EVENT_SET) => Ok(Self::EventSet(low)),
            _ => Err(code::INVALID_ARGUMENT),
        }
    }
}

/// Writes a value where the client wants it.
///
/// # Safety
///
/// `out` is null or points to memory that holds a `T`.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and by the caller's promise large enough.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes a string with its closing zero.
///
/// # Safety
///
/// `out` is null or points to `len` bytes.
pub(crate) unsafe fn put_str(out: *mut c_char, len: c_uint, text: &str) -> Answer {
    if out.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    if text.len() >= len as usize {
        return Err(code::INSUFFICIENT_SIZE);
    }
    // SAFETY: `text` and its zero fit into `len` bytes, which `out` points to by the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// Writes a list by NVML's convention: `count` holds the room on entry and the need on return.
///
/// # Safety
///
/// `count` is null or points to a number, and `out` is null or points to that many `T`.
pub(crate) unsafe fn put_list<T: Copy>(count: *mut c_uint, out: *mut T, list: &[T]) -> Answer {
    if count.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    let need = c_uint::try_from(list.len()).map_err(|_| code::UNKNOWN)?;
    // SAFETY: `count` points to a number by the caller's promise.
    let room = unsafe { count.replace(need) };
    if room < need {
        return Err(code::INSUFFICIENT_SIZE);
    }
    if need > 0 && out.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: `out` has room for all of it by the check above and the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(list.as_ptr(), out, list.len()) };
    Ok(())
}

/// A string that a client passed.
///
/// # Safety
///
/// `text` is null or points to a string that ends with a zero.
pub(crate) unsafe fn read_str(text: *const c_char) -> Result<String, nvmlReturn_t> {
    if text.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: by the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map(str::to_owned)
        .map_err(|_| code::INVALID_ARGUMENT)
}

/// A string in a fixed array, cut where it does not fit.
pub(crate) fn char_array<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (place, byte) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = c_char::from_ne_bytes([byte]);
    }
    array
}

/// The version word that NVML puts at the start of growing structs.
pub(crate) fn struct_version<T>(version: u32) -> u32 {
    u32::try_from(size_of::<T>()).expect("NVML structs are small") | version << 24
}
