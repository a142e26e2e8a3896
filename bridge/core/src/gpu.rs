//! What a GPU is, as far as anybody outside NVML needs to know.

use crate::id::UnitId;

/// One whole GPU as NVML describes it. Everything but the UUID is for people and selectors; identity is the UUID.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// `nvmlDeviceGetUUID`.
    pub uuid: UnitId,
    /// PCI bus id as sysfs writes it: `0000:65:00.0`.
    pub pci_bus_id: String,
    /// `nvmlDeviceGetMinorNumber`: the N of `/dev/nvidiaN`. It may change with a reboot.
    pub minor: u32,
    /// `nvmlDeviceGetName`, for example `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    /// `nvmlDeviceGetBrand` as NVIDIA's DRA driver prints it, for example `Nvidia`.
    pub brand: String,
    /// `nvmlDeviceGetArchitecture`, for example `Hopper`.
    pub architecture: String,
    /// `nvmlDeviceGetCudaComputeCapability`.
    pub compute_capability: (u32, u32),
    /// Total memory of the GPU, in bytes.
    pub memory_bytes: u64,
    /// `nvmlSystemGetDriverVersion`.
    pub driver_version: String,
    /// `nvmlSystemGetCudaDriverVersion` as major, minor.
    pub cuda_driver_version: (u32, u32),
    /// The NUMA node from sysfs; `None` where the platform does not say.
    pub numa_node: Option<u32>,
    /// The PCIe root complex, for example `pci0000:64` (attribute `resource.kubernetes.io/pcieRoot`).
    pub pcie_root: Option<String>,
    /// `HMM`, `ATS` or `None` where the driver tells (`nvmlDeviceGetAddressingMode`).
    pub addressing_mode: Option<String>,
}
