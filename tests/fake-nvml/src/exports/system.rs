//! Life cycle and the driver as a whole.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::nvmlReturn_t;

use super::exports;
use crate::driver;
use crate::ffi::{code, put, put_str};

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    driver::init("nvmlInit_v2", 0)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(flags: c_uint) -> nvmlReturn_t {
    driver::init("nvmlInitWithFlags", flags)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    driver::shutdown("nvmlShutdown")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    let text = match result {
        code::SUCCESS => c"Success",
        code::UNINITIALIZED => c"Uninitialized",
        code::INVALID_ARGUMENT => c"Invalid Argument",
        code::NOT_SUPPORTED => c"Not Supported",
        code::NOT_FOUND => c"Not Found",
        code::INSUFFICIENT_SIZE => c"Insufficient Size",
        code::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        code::TIMEOUT => c"Timeout",
        code::GPU_IS_LOST => c"GPU is lost",
        code::VERSION_MISMATCH => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

exports! {
    fn nvmlSystemGetDriverVersion(world, version: *mut c_char, length: c_uint) {
        put_str(version, length, &world.scenario()?.driver.version)
    }
    fn nvmlSystemGetNVMLVersion(world, version: *mut c_char, length: c_uint) {
        let driver = &world.scenario()?.driver;
        put_str(version, length, &format!("{}.{}", driver.cuda.major, driver.version))
    }
    fn nvmlSystemGetCudaDriverVersion(world, version: *mut c_int) {
        let cuda = world.scenario()?.driver.cuda;
        put(version, c_int::from(cuda.major) * 1000 + c_int::from(cuda.minor) * 10)
    }
    fn nvmlSystemGetCudaDriverVersion_v2(world, version: *mut c_int) {
        let cuda = world.scenario()?.driver.cuda;
        put(version, c_int::from(cuda.major) * 1000 + c_int::from(cuda.minor) * 10)
    }
    fn nvmlSystemGetProcessName(_, pid: c_uint, name: *mut c_char, length: c_uint) {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| code::NOT_FOUND)?;
        put_str(name, length, comm.trim())
    }
}
