//! The configuration file.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| gpu_bridge::config::read_config(text));
