//! The ledger's file and the list beside it, with whatever checksum and with a good one.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpu_bridge::store::read_files(bytes));
