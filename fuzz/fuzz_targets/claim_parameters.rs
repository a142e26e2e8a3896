//! The opaque parameters of a claim or of a DeviceClass.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpu_bridge::dra::check_parameters(bytes));
