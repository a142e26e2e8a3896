//! What NVML said, as plain values.

use crate::error::CallError;

/// A version of two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 13 of `13.0`.
    pub major: u32,
    /// 0 of `13.0`.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver and all GPUs of the node at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// `nvmlSystemGetDriverVersion`, for example `580.95.05`.
    pub driver_version: String,
    /// `nvmlSystemGetCudaDriverVersion_v2`; `None` where NVML cannot say, as without a libcuda beside it.
    pub cuda_driver_version: Option<Version>,
    /// The GPUs that answered, in the order of their index.
    pub gpus: Vec<GpuInfo>,
    /// The GPUs that NVML counts but that did not answer, in the order of their index.
    pub failed: Vec<FailedGpu>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// `GPU-…`, the only identity that lasts.
    pub uuid: String,
    /// In lower case as in sysfs, for example `0000:65:00.0`.
    pub pci_bus_id: String,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// NVML's index; another after a reboot or when a GPU is gone.
    pub index: u32,
    /// For example `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// As NVIDIA's DRA driver prints it, for example `Nvidia`; `Unknown(17)` for a brand without a name here.
    pub brand: String,
    /// As NVIDIA's DRA driver prints it, for example `Hopper`; `Unknown(13)` for one without a name here.
    pub architecture: String,
    /// For example 9.0.
    pub cuda_compute_capability: Version,
    /// Total memory; `None` where NVML does not support the question (memory shared with the CPU).
    pub memory_bytes: Option<u64>,
    /// The NUMA node of the PCI device, from sysfs, else from NVML; `None` without affinity.
    pub numa_node: Option<u32>,
    /// The PCIe root complex, for example `pci0000:64`, from sysfs; `None` where sysfs does not say.
    pub pcie_root: Option<String>,
    /// `HMM`, `ATS` or `None` as NVIDIA's DRA driver prints it; absent where NVML does not support the question.
    pub addressing_mode: Option<String>,
    /// Whether the GPU is split, in which case nothing can compute on the whole of it.
    pub mig: MigMode,
    /// What has to be done about the GPU (`NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`); `None` where driver or GPU do not say.
    pub recovery: Option<RecoveryAction>,
}

/// What has to be done about a GPU (`nvmlDeviceGpuRecoveryAction_t` of nvml.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecoveryAction {
    /// Nothing.
    None,
    /// Reset the GPU.
    Reset,
    /// Boot the node anew.
    Reboot,
    /// End what uses connections between GPUs.
    DrainP2p,
    /// End what uses the GPU, and reset it.
    DrainAndReset,
    /// Newer than this program.
    Other(u32),
}

impl From<u32> for RecoveryAction {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Reset,
            2 => Self::Reboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

/// Whether a GPU is split into MIG instances (`nvmlDeviceGetMigMode`, the current mode).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MigMode {
    /// GPU or driver know nothing of MIG.
    NotSupported,
    /// The GPU is whole.
    Disabled,
    /// Only instances can be used, and there may be none.
    Enabled,
}

/// A GPU that NVML counts and that does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedGpu {
    /// NVML's index.
    pub index: u32,
    /// Its UUID: what it still tells, else what the same index told when it last answered, unless another GPU
    /// answers with that now.
    pub uuid: Option<String>,
    /// Its PCI bus id, known in the same way.
    pub pci_bus_id: Option<String>,
    /// The call that failed.
    pub error: CallError,
}

/// Two GPUs, and how they are connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPair {
    /// The UUID of one.
    pub one: String,
    /// The UUID of the other.
    pub other: String,
    /// What they have in common by PCIe; `None` where NVML does not say.
    pub common_ancestor: Option<CommonAncestor>,
    /// NVLinks from one to the other, and through switches as many as both have to switches.
    pub nvlinks: u32,
}

/// The nearest thing in the PCIe tree above two GPUs (`nvmlDeviceGetTopologyCommonAncestor`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommonAncestor {
    /// They are on one board.
    Board,
    /// One PCIe switch.
    Switch,
    /// Several PCIe switches.
    Switches,
    /// A host bridge.
    HostBridge,
    /// The same CPU, by different host bridges.
    Node,
    /// They are on different CPUs.
    System,
}

/// The compute processes of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcesses {
    /// The GPU.
    pub uuid: String,
    /// By PID; an error means that nobody knows what runs there, not that nothing does.
    pub processes: Result<Vec<Process>, CallError>,
}

/// A process with a compute context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// The PID in the PID namespace of the host.
    pub pid: u32,
    /// What it uses of the GPU's memory; `None` where the driver cannot say.
    pub used_memory_bytes: Option<u64>,
}
