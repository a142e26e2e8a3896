//! Gives the library the name that clients of the NVIDIA driver look for, and tells its tests what they are built for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    let target = std::env::var("TARGET").expect("Cargo tells build scripts the target");
    println!("cargo::rustc-env=BUILT_FOR={target}");
}
