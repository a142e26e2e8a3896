//! Facts about GPU models, as NVML reports them.

/// One GPU model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// The name a scenario uses.
    pub key: &'static str,
    /// `nvmlDeviceGetName`.
    pub product_name: &'static str,
    /// `nvmlDeviceGetBrand`.
    pub brand: u32,
    /// `nvmlDeviceGetArchitecture`.
    pub architecture: u32,
    /// `nvmlDeviceGetCudaComputeCapability`: major, minor.
    pub compute_capability: (u32, u32),
    /// Total memory in MiB; `None` where NVML says that it is not supported (memory shared with the CPU).
    pub memory_mib: Option<u64>,
    /// Device id in the upper, vendor id in the lower half, as in `nvmlPciInfo_t`.
    pub pci_device_id: u32,
    /// `nvmlDeviceGetAddressingMode`: 0 none, 1 HMM, 2 ATS; `None` where NVML does not support it.
    pub addressing_mode: Option<u32>,
    /// Number of NVLinks, all up.
    pub nvlinks: u32,
    /// Whether the model can be split into MIG instances.
    pub mig_capable: bool,
}

/// `NVML_BRAND_TESLA`, what they said before.
const BRAND_TESLA: u32 = 2;
/// `NVML_BRAND_NVIDIA`, what data centre GPUs say of themselves.
const BRAND_NVIDIA: u32 = 14;
/// `NVML_BRAND_GEFORCE_RTX`.
const BRAND_GEFORCE_RTX: u32 = 15;

/// The models that a scenario can name.
pub const MODELS: &[Model] = &[
    Model {
        key: "h100-sxm5-80gb",
        product_name: "NVIDIA H100 80GB HBM3",
        brand: BRAND_NVIDIA,
        architecture: 9,
        compute_capability: (9, 0),
        memory_mib: Some(81559),
        pci_device_id: 0x2330_10de,
        addressing_mode: Some(1),
        nvlinks: 18,
        mig_capable: true,
    },
    Model {
        key: "a100-sxm4-40gb",
        product_name: "NVIDIA A100-SXM4-40GB",
        brand: BRAND_NVIDIA,
        architecture: 7,
        compute_capability: (8, 0),
        memory_mib: Some(40960),
        pci_device_id: 0x20b0_10de,
        addressing_mode: Some(0),
        nvlinks: 12,
        mig_capable: true,
    },
    Model {
        key: "v100-sxm3-32gb",
        product_name: "Tesla V100-SXM3-32GB",
        brand: BRAND_TESLA,
        architecture: 5,
        compute_capability: (7, 0),
        memory_mib: Some(32510),
        pci_device_id: 0x1db8_10de,
        addressing_mode: None,
        nvlinks: 6,
        mig_capable: false,
    },
    Model {
        key: "l40s",
        product_name: "NVIDIA L40S",
        brand: BRAND_NVIDIA,
        architecture: 8,
        compute_capability: (8, 9),
        memory_mib: Some(46068),
        pci_device_id: 0x26b9_10de,
        addressing_mode: None,
        nvlinks: 0,
        mig_capable: false,
    },
    Model {
        key: "rtx-4090",
        product_name: "NVIDIA GeForce RTX 4090",
        brand: BRAND_GEFORCE_RTX,
        architecture: 8,
        compute_capability: (8, 9),
        memory_mib: Some(24564),
        pci_device_id: 0x2684_10de,
        addressing_mode: None,
        nvlinks: 0,
        mig_capable: false,
    },
    Model {
        key: "gb200",
        product_name: "NVIDIA GB200",
        brand: BRAND_NVIDIA,
        architecture: 10,
        compute_capability: (10, 0),
        memory_mib: Some(189_471),
        pci_device_id: 0x2941_10de,
        addressing_mode: Some(2),
        nvlinks: 18,
        mig_capable: true,
    },
    Model {
        key: "gb10",
        product_name: "NVIDIA GB10",
        brand: BRAND_NVIDIA,
        architecture: 10,
        compute_capability: (12, 1),
        memory_mib: None,
        pci_device_id: 0x2e12_10de,
        addressing_mode: Some(2),
        nvlinks: 0,
        mig_capable: false,
    },
];

/// The model with that key.
#[must_use]
pub fn find(key: &str) -> Option<&'static Model> {
    MODELS.iter().find(|model| model.key == key)
}
