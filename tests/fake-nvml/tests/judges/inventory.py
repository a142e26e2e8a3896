"""Tells in JSON what NVIDIA's own Python bindings see through the NVML library that the loader finds."""

import json

import pynvml as nvml


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def processes(handle):
    try:
        return nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError_FunctionNotFound:
        return nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)


def gpu(index):
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = text(nvml.nvmlDeviceGetUUID(handle))
    again = nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError_NotSupported:
        memory = None
    return {
        "index": nvml.nvmlDeviceGetIndex(again),
        "uuid": uuid,
        "name": text(nvml.nvmlDeviceGetName(handle)),
        "minor": nvml.nvmlDeviceGetMinorNumber(handle),
        "pciBusId": text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "memoryBytes": memory,
        "computeCapability": list(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "brand": nvml.nvmlDeviceGetBrand(handle),
        "architecture": nvml.nvmlDeviceGetArchitecture(handle),
        "processes": sorted(
            [process.pid, process.usedGpuMemory]
            for process in processes(handle)
        ),
    }


nvml.nvmlInit()
print(
    json.dumps(
        {
            "driver": text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": nvml.nvmlSystemGetCudaDriverVersion(),
            "gpus": [gpu(index) for index in range(nvml.nvmlDeviceGetCount())],
        }
    )
)
nvml.nvmlShutdown()
