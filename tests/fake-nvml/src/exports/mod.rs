//! The C functions. `stubs` has all that no client of ours needs.
#![allow(non_snake_case, reason = "the names are NVIDIA's")]

mod device;
mod event;
mod field;
mod older;
mod stubs;
mod system;
mod topology;

/// Defines C functions whose body runs behind [`crate::driver::call`].
macro_rules! exports {
    ($(fn $name:ident($world:pat $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            $crate::driver::call(stringify!($name), |$world: &mut $crate::driver::World| {
                #[allow(unused_unsafe, reason = "some bodies have nothing unsafe in them")]
                // SAFETY: the pointers are the client's, who promises what nvml.h asks for.
                unsafe { $body }
            })
        }
    )*};
}
use exports;
