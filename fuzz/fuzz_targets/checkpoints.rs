//! The kubelet's `kubelet_internal_checkpoint` and `dra_manager_state`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpu_bridge::usage::read_checkpoints(bytes));
