//! Device nodes of a host, as far as a daemon looks at them.

use std::path::Path;

use rustix::fs::{CWD, FileType, mknodat};

/// Makes the driver's nodes and those of so many GPUs, if they are not there. Ordinary users may make FIFOs, and
/// runtimes take them for devices.
pub(crate) fn make_nodes(root: &Path, gpus: u32) {
    let dev = root.join("dev");
    std::fs::create_dir_all(&dev).unwrap();
    let driver = ["nvidiactl", "nvidia-uvm"].map(str::to_owned);
    let gpus = (0..gpus).map(|number| format!("nvidia{number}"));
    for name in driver.into_iter().chain(gpus) {
        let node = dev.join(name);
        if !node.exists() {
            mknodat(CWD, node, FileType::Fifo, 0o666.into(), 0).unwrap();
        }
    }
}
