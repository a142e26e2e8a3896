//! Names of the files of a fake node, for everything that changes one by hand.
//!
//! A state folder holds (all of it optional; what is absent has not happened):
//!
//! | path | meaning |
//! |---|---|
//! | `processes/<gpu uuid>/<pid>` | a compute process on that GPU; content empty or `{"usedMemoryBytes":n}` |
//! | `lost/<gpu uuid>` | the GPU has fallen off the bus |
//! | `recovery/<gpu uuid>` | what has to be done about the GPU, a number of `nvmlDeviceGpuRecoveryAction_t`; 0 if absent |
//! | `faults/<call>.json` | what that NVML call does wrong: `{"error":n,"skip":n,"times":n,"delayMs":n}` |
//! | `counts/<call>` | how often a call with a fault was made since the fault was set (written by the library) |
//! | `trace.log` | if it exists, the library appends the name of each NVML call to it |
//! | `events.jsonl` | one event a line, `{"gpu":"<uuid>","xid":79}` or `{"gpu":"<uuid>","type":2,"data":0}`, delivered to the event sets that ask for it |

use std::path::{Path, PathBuf};

/// The environment variable that names the scenario file.
pub const SCENARIO_ENV: &str = "FAKE_NVML_SCENARIO";
/// The environment variable that names the state folder; without it, it is `state` beside the scenario.
pub const STATE_ENV: &str = "FAKE_NVML_STATE";
/// The scenario file inside a node folder.
pub const SCENARIO_FILE: &str = "scenario.yaml";
/// The state folder inside a node folder.
pub const STATE_DIR: &str = "state";
/// The library inside a node folder.
pub const LIBRARY: &str = "lib/libnvidia-ml.so.1";

/// Where a compute process of a GPU is recorded.
#[must_use]
pub fn process(state: &Path, gpu_uuid: &str, pid: u32) -> PathBuf {
    processes(state, gpu_uuid).join(pid.to_string())
}

/// The folder of the compute processes of a GPU.
#[must_use]
pub fn processes(state: &Path, gpu_uuid: &str) -> PathBuf {
    all_processes(state).join(gpu_uuid)
}

/// The folder of all compute processes.
#[must_use]
pub fn all_processes(state: &Path) -> PathBuf {
    state.join("processes")
}

/// The marker of a lost GPU.
#[must_use]
pub fn lost(state: &Path, gpu_uuid: &str) -> PathBuf {
    all_lost(state).join(gpu_uuid)
}

/// The folder of the markers of lost GPUs.
#[must_use]
pub fn all_lost(state: &Path) -> PathBuf {
    state.join("lost")
}

/// What has to be done about a GPU.
#[must_use]
pub fn recovery(state: &Path, gpu_uuid: &str) -> PathBuf {
    all_recovery(state).join(gpu_uuid)
}

/// The folder of what has to be done about GPUs.
#[must_use]
pub fn all_recovery(state: &Path) -> PathBuf {
    state.join("recovery")
}

/// The fault of an NVML call.
#[must_use]
pub fn fault(state: &Path, call: &str) -> PathBuf {
    faults(state).join(format!("{call}.json"))
}

/// The folder of the faults of NVML calls.
#[must_use]
pub fn faults(state: &Path) -> PathBuf {
    state.join("faults")
}

/// The count of an NVML call that has a fault.
#[must_use]
pub fn count(state: &Path, call: &str) -> PathBuf {
    state.join("counts").join(call)
}

/// The list of the calls made, if it exists.
#[must_use]
pub fn trace(state: &Path) -> PathBuf {
    state.join("trace.log")
}

/// The events that have happened.
#[must_use]
pub fn events(state: &Path) -> PathBuf {
    state.join("events.jsonl")
}
