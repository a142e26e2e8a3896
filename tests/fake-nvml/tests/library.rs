//! The C library, called as C calls it.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "these are tests of C functions, and of nothing if the node cannot be made"
)]

use std::ffi::{CStr, c_char, c_uint};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fake_nvml::{FakeNode, Fault, Scenario, layout};
use nvml_wrapper_sys::bindings::{
    NvmlLib, nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlPciInfo_t, nvmlProcessInfo_t, nvmlProcessInfo_v1_t,
};
use tempfile::TempDir;

const SUCCESS: u32 = 0;
const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const INSUFFICIENT_SIZE: u32 = 7;
const DRIVER_NOT_LOADED: u32 = 9;
const TIMEOUT: u32 = 10;
const GPU_IS_LOST: u32 = 15;
const VERSION_MISMATCH: u32 = 25;
const UNKNOWN: u32 = 999;

/// XID errors, and double-bit ECC errors.
const XID: u64 = 8;
const DOUBLE_BIT: u64 = 2;
const NO_INSTANCE: u32 = u32::MAX;

/// A node with its library loaded and initialised.
struct Loaded {
    library: NvmlLib,
    node: FakeNode,
    _folder: TempDir,
}

impl Loaded {
    fn new(gpus: u32) -> Self {
        let folder = TempDir::new().unwrap();
        let node = FakeNode::create(folder.path(), &Scenario::h100(gpus)).unwrap();
        let library = load(&node.library());
        // SAFETY: as nvml.h says.
        assert_eq!(unsafe { library.nvmlInit_v2() }, SUCCESS);
        Self {
            library,
            node,
            _folder: folder,
        }
    }

    /// The processes that compute on a GPU, as far as there are four.
    fn running(&self, device: nvmlDevice_t) -> (u32, Vec<nvmlProcessInfo_t>) {
        let mut infos = [nvmlProcessInfo_t {
            pid: 0,
            usedGpuMemory: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        }; 4];
        let mut count = 4;
        // SAFETY: as nvml.h says.
        let code = unsafe {
            self.library.nvmlDeviceGetComputeRunningProcesses_v3(
                device,
                &raw mut count,
                infos.as_mut_ptr(),
            )
        };
        (code, infos.into_iter().take(count as usize).collect())
    }

    fn device(&self, index: c_uint) -> nvmlDevice_t {
        let mut device = std::ptr::null_mut();
        // SAFETY: as nvml.h says.
        let code = unsafe {
            self.library
                .nvmlDeviceGetHandleByIndex_v2(index, &raw mut device)
        };
        assert_eq!(code, SUCCESS);
        device
    }

    fn uuid(&self, index: usize) -> String {
        self.node.gpus()[index].uuid.clone()
    }

    fn name(&self, device: nvmlDevice_t) -> Result<String, u32> {
        text(|out, length| {
            // SAFETY: as nvml.h says.
            unsafe { self.library.nvmlDeviceGetName(device, out, length) }
        })
    }

    fn event_set(&self) -> nvmlEventSet_t {
        let mut set = std::ptr::null_mut();
        // SAFETY: as nvml.h says.
        assert_eq!(
            unsafe { self.library.nvmlEventSetCreate(&raw mut set) },
            SUCCESS
        );
        set
    }

    fn register(&self, device: nvmlDevice_t, types: u64, set: nvmlEventSet_t) -> u32 {
        // SAFETY: as nvml.h says.
        unsafe { self.library.nvmlDeviceRegisterEvents(device, types, set) }
    }

    fn wait(&self, set: nvmlEventSet_t, timeout_ms: u32) -> Result<nvmlEventData_t, u32> {
        let mut data = nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        // SAFETY: as nvml.h says.
        let code = unsafe {
            self.library
                .nvmlEventSetWait_v2(set, &raw mut data, timeout_ms)
        };
        if code == SUCCESS { Ok(data) } else { Err(code) }
    }
}

fn load(path: &Path) -> NvmlLib {
    // SAFETY: loading runs no code of the library's own.
    unsafe { NvmlLib::new(path) }.unwrap()
}

fn text(call: impl FnOnce(*mut c_char, c_uint) -> u32) -> Result<String, u32> {
    let mut buffer: [c_char; 96] = [0; 96];
    match call(buffer.as_mut_ptr(), 96) {
        // SAFETY: the call has filled the buffer, up to a zero.
        SUCCESS => Ok(unsafe { CStr::from_ptr(buffer.as_ptr()) }
            .to_str()
            .unwrap()
            .to_owned()),
        code => Err(code),
    }
}

#[test]
fn every_function_of_the_header_is_there() {
    let folder = TempDir::new().unwrap();
    let node = FakeNode::create(folder.path(), &Scenario::h100(1)).unwrap();
    let library = load(&node.library());
    let names: Vec<_> = include_str!("../symbols.txt").lines().collect();
    assert_eq!(names.len(), 396);
    let missing: Vec<_> = names
        .into_iter()
        .filter(|name| {
            // SAFETY: the function is looked up and not called.
            unsafe {
                library
                    .__library
                    .get::<unsafe extern "C" fn()>(name.as_bytes())
            }
            .is_err()
        })
        .collect();
    assert_eq!(missing, [""; 0]);
}

#[test]
fn the_list_of_functions_is_that_of_the_bindings_made_from_the_header() {
    // Of this platform alone: those of the others need not be on this machine, and nothing is fetched.
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--offline"])
        .args(["--filter-platform", env!("BUILT_FOR")])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let bindings = packages.iter().find(|it| it["name"] == "nvml-wrapper-sys");
    let manifest = Path::new(bindings.unwrap()["manifest_path"].as_str().unwrap());
    let bindings = manifest.parent().unwrap().join("src/bindings.rs");
    let bindings = std::fs::read_to_string(bindings).unwrap();
    let table = bindings.split_once("pub struct NvmlLib {").unwrap().1;
    let table = table.split_once("\n}").unwrap().0.lines();
    let fields = table.filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(':'));
    let mut functions: Vec<_> = fields
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("nvml"))
        .collect();
    functions.sort_unstable();
    let mut ours: Vec<_> = include_str!("../symbols.txt").lines().collect();
    ours.sort_unstable();
    assert_eq!(ours, functions);
}

#[test]
fn a_function_that_the_scenario_takes_away_is_not_there() {
    let mut scenario = Scenario::h100(1);
    scenario.driver.without = vec!["nvmlDeviceGetMemoryInfo_v2".to_owned().try_into().unwrap()];
    let folder = TempDir::new().unwrap();
    let node = FakeNode::create(folder.path(), &scenario).unwrap();
    let library = load(&node.library());
    assert!(library.nvmlDeviceGetMemoryInfo_v2.is_err());
    assert!(library.nvmlDeviceGetMemoryInfo.is_ok());
}

#[test]
fn the_library_has_the_name_that_clients_of_the_driver_link_to() {
    let content = std::fs::read(fake_nvml::library_path().unwrap()).unwrap();
    let name = b"\0libnvidia-ml.so.1\0";
    assert!(content.windows(name.len()).any(|window| window == name));
}

#[test]
fn structs_have_the_sizes_of_the_c_header() {
    let sizes = [
        ("nvmlPciInfo_t", size_of::<nvmlPciInfo_t>(), 68),
        ("nvmlMemory_t", size_of::<nvmlMemory_t>(), 24),
        ("nvmlMemory_v2_t", size_of::<nvmlMemory_v2_t>(), 40),
        ("nvmlProcessInfo_t", size_of::<nvmlProcessInfo_t>(), 24),
        (
            "nvmlProcessInfo_v1_t",
            size_of::<nvmlProcessInfo_v1_t>(),
            16,
        ),
        ("nvmlEventData_t", size_of::<nvmlEventData_t>(), 32),
    ];
    for (name, size, expected) in sizes {
        assert_eq!(size, expected, "{name}");
    }
}

#[test]
fn nothing_is_answered_before_init_and_after_the_last_shutdown() {
    let loaded = Loaded::new(1);
    let device = loaded.device(0);
    // SAFETY: as nvml.h says.
    unsafe {
        assert_eq!(loaded.library.nvmlInit_v2(), SUCCESS);
        assert_eq!(loaded.library.nvmlShutdown(), SUCCESS);
        assert!(loaded.name(device).is_ok());
        assert_eq!(loaded.library.nvmlShutdown(), SUCCESS);
        assert_eq!(loaded.name(device), Err(UNINITIALIZED));
        assert_eq!(loaded.library.nvmlShutdown(), UNINITIALIZED);
    }
}

#[test]
fn a_handle_that_was_not_given_out_is_refused() {
    let loaded = Loaded::new(1);
    for wrong in [0, 1, usize::MAX, loaded.device(0).addr() + 1] {
        let handle = std::ptr::without_provenance_mut(wrong);
        assert_eq!(loaded.name(handle), Err(INVALID_ARGUMENT));
    }
    assert_eq!(
        loaded.wait(std::ptr::null_mut(), 0).err(),
        Some(INVALID_ARGUMENT)
    );
}

#[test]
fn a_buffer_that_is_too_small_is_not_overrun() {
    let loaded = Loaded::new(1);
    let mut buffer: [c_char; 4] = [7; 4];
    // SAFETY: as nvml.h says.
    let code = unsafe {
        loaded
            .library
            .nvmlDeviceGetName(loaded.device(0), buffer.as_mut_ptr(), 4)
    };
    assert_eq!(code, INSUFFICIENT_SIZE);
    assert_eq!(buffer, [7; 4]);
}

#[test]
fn a_struct_of_another_version_is_refused() {
    let loaded = Loaded::new(1);
    let mut memory = nvmlMemory_v2_t {
        version: 40 | 3 << 24,
        total: 0,
        reserved: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: as nvml.h says.
    let code = unsafe {
        loaded
            .library
            .nvmlDeviceGetMemoryInfo_v2(loaded.device(0), &raw mut memory)
    };
    assert_eq!(code, VERSION_MISMATCH);
}

#[test]
fn a_function_that_is_not_written_is_not_supported() {
    let loaded = Loaded::new(1);
    let mut celsius = 0;
    // SAFETY: as nvml.h says.
    let code = unsafe {
        loaded
            .library
            .nvmlDeviceGetTemperature(loaded.device(0), 0, &raw mut celsius)
    };
    assert_eq!(code, NOT_SUPPORTED);
}

#[test]
fn a_gpu_is_lost_and_found_by_its_marker_and_by_the_scenario() {
    let mut loaded = Loaded::new(2);
    let device = loaded.device(1);
    loaded.node.lose(&loaded.uuid(1)).unwrap();
    assert_eq!(loaded.name(device), Err(GPU_IS_LOST));
    assert!(loaded.name(loaded.device(0)).is_ok());
    loaded.node.find_again(&loaded.uuid(1)).unwrap();
    assert!(loaded.name(device).is_ok());

    let mut scenario = Scenario::h100(1).and_one_more();
    loaded.node.replace_scenario(&scenario).unwrap();
    assert!(loaded.name(device).is_ok());
    scenario.gpus[1].lost = true;
    loaded.node.replace_scenario(&scenario).unwrap();
    assert_eq!(loaded.name(device), Err(GPU_IS_LOST));
}

#[test]
fn files_that_are_no_processes_are_not_listed() {
    let loaded = Loaded::new(1);
    loaded.node.add_process(&loaded.uuid(0), 7).unwrap();
    let folder = layout::processes(&loaded.node.state_dir(), &loaded.uuid(0));
    std::fs::write(folder.join("8.tmp"), "").unwrap();
    std::fs::write(folder.join("9"), "{\"usedMem").unwrap();
    let (code, infos) = loaded.running(loaded.device(0));
    assert_eq!((code, infos.len()), (SUCCESS, 2));
    assert_eq!((infos[0].pid, infos[1].pid), (7, 9));
    assert_eq!(infos[1].usedGpuMemory, u64::MAX);
}

#[test]
fn faults_are_counted_over_all_processes() {
    let loaded = Loaded::new(1);
    // A second copy of the library stands for a second process.
    let other = loaded.node.folder().join("other/libnvidia-ml.so.1");
    std::fs::create_dir_all(other.parent().unwrap()).unwrap();
    std::fs::copy(loaded.node.library(), &other).unwrap();
    let other = load(&other);
    // SAFETY: as nvml.h says.
    assert_eq!(unsafe { other.nvmlInit_v2() }, SUCCESS);

    let fault = Fault::error(UNKNOWN).skip(1).times(2);
    loaded.node.set_fault("nvmlDeviceGetName", &fault).unwrap();
    let device = loaded.device(0);
    let codes: Vec<_> = (0..5)
        .map(|call| {
            let library = if call % 2 == 0 {
                &loaded.library
            } else {
                &other
            };
            text(|out, length| {
                // SAFETY: as nvml.h says; both copies number their GPUs in the same way.
                unsafe { library.nvmlDeviceGetName(device, out, length) }
            })
            .err()
            .unwrap_or(SUCCESS)
        })
        .collect();
    assert_eq!(codes, [SUCCESS, UNKNOWN, UNKNOWN, SUCCESS, SUCCESS]);
    assert_eq!(loaded.node.calls_that_met_the_fault("nvmlDeviceGetName"), 5);
}

#[test]
fn an_event_reaches_the_sets_that_asked_for_its_kind() {
    let loaded = Loaded::new(3);
    loaded.node.report_xid(&loaded.uuid(1), 13).unwrap();
    let (xids, ecc) = (loaded.event_set(), loaded.event_set());
    for index in 0..3 {
        let device = loaded.device(index);
        assert_eq!(loaded.register(device, XID, xids), SUCCESS);
        assert_eq!(loaded.register(device, DOUBLE_BIT, ecc), SUCCESS);
    }
    // What happened before the set was made is not news.
    assert_eq!(loaded.wait(xids, 0).err(), Some(TIMEOUT));

    loaded.node.report_xid(&loaded.uuid(1), 79).unwrap();
    let event = loaded.wait(xids, 10_000).unwrap();
    assert_eq!(event.device, loaded.device(1));
    assert_eq!((event.eventType, event.eventData), (XID, 79));
    assert_eq!(event.gpuInstanceId, NO_INSTANCE);
    assert_eq!(loaded.wait(xids, 0).err(), Some(TIMEOUT));
    assert_eq!(loaded.wait(ecc, 0).err(), Some(TIMEOUT));

    // SAFETY: as nvml.h says.
    assert_eq!(unsafe { loaded.library.nvmlEventSetFree(xids) }, SUCCESS);
    assert_eq!(loaded.wait(xids, 0).err(), Some(INVALID_ARGUMENT));
}

#[test]
fn a_waiting_client_is_woken_by_the_event() {
    let loaded = Loaded::new(1);
    let set = loaded.event_set();
    assert_eq!(loaded.register(loaded.device(0), XID, set), SUCCESS);
    let (node, uuid) = (loaded.node.clone(), loaded.uuid(0));
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || node.report_xid(&uuid, 48).unwrap());
        let event = loaded.wait(set, 30_000).unwrap();
        assert_eq!(event.eventData, 48);
    });
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn the_environment_names_scenario_and_state() {
    let folder = TempDir::new().unwrap();
    // The node that the library lies in has one GPU, the one that the environment names has five.
    let node = FakeNode::create(&folder.path().join("one"), &Scenario::h100(1)).unwrap();
    let other = FakeNode::create(&folder.path().join("five"), &Scenario::h100(5)).unwrap();
    other.start_trace().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_of_the_test_above", "--ignored"])
        .env("TEST_LIBRARY", node.library())
        .env(layout::SCENARIO_ENV, other.folder().join("scenario.yaml"))
        .env(layout::STATE_ENV, other.state_dir())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(other.trace(), ["nvmlInit_v2", "nvmlDeviceGetCount_v2"]);
}

#[test]
#[ignore = "run by the test above, with another environment"]
fn child_of_the_test_above() {
    let Some(path) = std::env::var_os("TEST_LIBRARY") else {
        return;
    };
    let library = load(path.as_ref());
    let mut count = 0;
    // SAFETY: as nvml.h says.
    unsafe {
        assert_eq!(library.nvmlInit_v2(), SUCCESS);
        assert_eq!(library.nvmlDeviceGetCount_v2(&raw mut count), SUCCESS);
    }
    assert_eq!(count, 5);
}

#[test]
fn without_gpus_init_fails_unless_the_client_says_otherwise() {
    let folder = TempDir::new().unwrap();
    let node = FakeNode::create(folder.path(), &Scenario::h100(0)).unwrap();
    let library = load(&node.library());
    // SAFETY: as nvml.h says.
    unsafe {
        assert_eq!(library.nvmlInit_v2(), DRIVER_NOT_LOADED);
        assert_eq!(library.nvmlInitWithFlags(1), SUCCESS);
    }
}

#[test]
fn whatever_changes_between_two_calls_is_heard_by_the_second() {
    let mut loaded = Loaded::new(2);
    let (device, uuid) = (loaded.device(0), loaded.uuid(0));
    let state = loaded.node.state_dir();
    let running = |loaded: &Loaded| {
        let (code, infos) = loaded.running(device);
        let pids: Vec<u32> = infos.iter().map(|info| info.pid).collect();
        (code, pids)
    };
    for round in 0..20_u32 {
        assert_eq!(running(&loaded), (SUCCESS, Vec::new()), "round {round}");
        loaded.node.add_process(&uuid, 7).unwrap();
        assert_eq!(running(&loaded), (SUCCESS, vec![7]));
        loaded.node.add_process(&uuid, 9).unwrap();
        assert_eq!(running(&loaded), (SUCCESS, vec![7, 9]));
        loaded.node.lose(&uuid).unwrap();
        assert_eq!(running(&loaded).0, GPU_IS_LOST);
        loaded.node.find_again(&uuid).unwrap();
        let call = "nvmlDeviceGetComputeRunningProcesses_v3";
        loaded.node.set_fault(call, &Fault::error(UNKNOWN)).unwrap();
        assert_eq!(running(&loaded).0, UNKNOWN);
        loaded.node.clear_fault(call).unwrap();
        loaded.node.remove_process(&uuid, 7).unwrap();
        assert_eq!(running(&loaded), (SUCCESS, vec![9]));
        if round % 2 == 0 {
            loaded.node.remove_process(&uuid, 9).unwrap();
        } else {
            // Everything at once, and all of it begins anew.
            std::fs::remove_dir_all(&state).unwrap();
        }
        let mut scenario = Scenario::h100(2);
        scenario.driver.version = format!("600.{round}");
        loaded.node.replace_scenario(&scenario).unwrap();
        let version = text(|out, length| {
            // SAFETY: as nvml.h says.
            unsafe { loaded.library.nvmlSystemGetDriverVersion(out, length) }
        });
        assert_eq!(version, Ok(format!("600.{round}")));
    }
}
