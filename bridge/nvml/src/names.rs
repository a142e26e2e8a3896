//! Names for NVML's numbers, spelled as NVIDIA's DRA driver publishes them (go-nvlib, `pkg/nvlib/device`).
//!
//! A number without a name here is data and not an error: a GPU newer than this program still works.

use nvml_wrapper_sys::bindings as sys;

/// `nvmlDeviceArchitecture_t`.
pub(crate) fn architecture(number: u32) -> String {
    let name = match number {
        sys::NVML_DEVICE_ARCH_KEPLER => "Kepler",
        sys::NVML_DEVICE_ARCH_MAXWELL => "Maxwell",
        sys::NVML_DEVICE_ARCH_PASCAL => "Pascal",
        sys::NVML_DEVICE_ARCH_VOLTA => "Volta",
        sys::NVML_DEVICE_ARCH_TURING => "Turing",
        sys::NVML_DEVICE_ARCH_AMPERE => "Ampere",
        sys::NVML_DEVICE_ARCH_ADA => "Ada Lovelace",
        sys::NVML_DEVICE_ARCH_HOPPER => "Hopper",
        sys::NVML_DEVICE_ARCH_BLACKWELL => "Blackwell",
        sys::NVML_DEVICE_ARCH_UNKNOWN => "Unknown",
        other => return unknown(other),
    };
    name.to_owned()
}

/// `nvmlBrandType_t`.
pub(crate) fn brand(number: u32) -> String {
    let name = match number {
        sys::nvmlBrandType_enum_NVML_BRAND_UNKNOWN => "Unknown",
        sys::nvmlBrandType_enum_NVML_BRAND_QUADRO => "Quadro",
        sys::nvmlBrandType_enum_NVML_BRAND_TESLA => "Tesla",
        sys::nvmlBrandType_enum_NVML_BRAND_NVS => "NVS",
        sys::nvmlBrandType_enum_NVML_BRAND_GRID => "Grid",
        sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE => "GeForce",
        sys::nvmlBrandType_enum_NVML_BRAND_TITAN => "Titan",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_VAPPS => "NvidiaVApps",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_VPC => "NvidiaVPC",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_VCS => "NvidiaVCS",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_VWS => "NvidiaVWS",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_CLOUD_GAMING => "NvidiaCloudGaming",
        sys::nvmlBrandType_enum_NVML_BRAND_QUADRO_RTX => "QuadroRTX",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX => "NvidiaRTX",
        sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA => "Nvidia",
        sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE_RTX => "GeForceRTX",
        sys::nvmlBrandType_enum_NVML_BRAND_TITAN_RTX => "TitanRTX",
        other => return unknown(other),
    };
    name.to_owned()
}

/// `nvmlDeviceAddressingModeType_t`.
pub(crate) fn addressing_mode(number: u32) -> String {
    let name = match number {
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE => "None",
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM => "HMM",
        sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS => "ATS",
        other => return unknown(other),
    };
    name.to_owned()
}

fn unknown(number: u32) -> String {
    format!("Unknown({number})")
}
