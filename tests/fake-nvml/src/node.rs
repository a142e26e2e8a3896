//! A folder that looks like a node with an NVIDIA driver, and the means to change it while it is in use.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode};

use crate::layout;
use crate::scenario::{Fault, Gpu, Invalid, SYMBOLS, Scenario};
use crate::state;

/// The name that Cargo gives to the C library.
const BUILT_LIBRARY: &str = "libfake_nvml.so";
/// Character device numbers as the driver has them.
const NVIDIA_MAJOR: u32 = 195;
const NVIDIACTL_MINOR: u32 = 255;
const UVM_MAJOR: u32 = 510;
/// What the driver sets on its device nodes.
const DEVICE_MODE: u32 = 0o666;

/// A fake node: what is in its folder, and what can happen to it.
///
/// The folder belongs to the caller (a temporary one in most tests) and stays when the value is dropped.
#[derive(Debug, Clone)]
pub struct FakeNode {
    folder: PathBuf,
    scenario: Scenario,
}

/// Why a fake node could not be made or changed.
#[derive(Debug, thiserror::Error)]
#[allow(
    clippy::error_impl_error,
    reason = "users name it by its crate: fake_nvml::Error"
)]
pub enum Error {
    /// A file could not be read or written.
    #[error("fake node: {} could not be read or written", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The scenario is wrong.
    #[error("fake node: the scenario is wrong")]
    Scenario(#[from] Invalid),
    /// The C library was not found beside the running program.
    #[error(
        "fake node: there is no {BUILT_LIBRARY} in {}: build it with `cargo build -p fake-nvml`, or have \
         `fake-nvml` among the dependencies of the test", looked_in.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Library {
        /// Where it was looked for.
        looked_in: Vec<PathBuf>,
    },
    /// A fault was set for a function that NVML does not have.
    #[error("fake node: there is no NVML call \"{call}\"")]
    NoSuchCall {
        /// The name that was given.
        call: String,
    },
}

impl FakeNode {
    /// Lays out a node in `folder`, which may exist, and is created if not.
    ///
    /// It gets the scenario, an empty state folder, a copy of the library in `lib/`, and beside them what a
    /// daemon reads of a node: `dev/`, `proc/` and `sys/`.
    /// The library is a copy, for the dynamic loader maps one file once in a process, however it is called:
    /// with a copy for each node, several nodes live in one test process without knowing of each other.
    ///
    /// # Errors
    ///
    /// [`Error`], when the scenario is wrong, the library was not built, or the folder cannot be written.
    pub fn create(folder: &Path, scenario: &Scenario) -> Result<Self, Error> {
        let node = Self::without_library(folder, scenario)?;
        node.install_library()?;
        Ok(node)
    }

    /// A node whose driver library is not there yet; see [`FakeNode::install_library`].
    ///
    /// # Errors
    ///
    /// As [`FakeNode::create`].
    pub fn without_library(folder: &Path, scenario: &Scenario) -> Result<Self, Error> {
        let folder = std::path::absolute(folder).map_err(at(folder))?;
        let mut node = Self {
            folder,
            scenario: scenario.clone(),
        };
        for name in ["processes", "lost", "recovery", "faults", "counts"] {
            make_folder(&node.state_dir().join(name))?;
        }
        node.replace_scenario(scenario)?;
        Ok(node)
    }

    /// Takes up a node that was laid out before.
    ///
    /// # Errors
    ///
    /// [`Error::Scenario`] when the folder has no scenario or a wrong one.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let folder = std::path::absolute(folder).map_err(at(folder))?;
        let scenario = Scenario::load(&folder.join(layout::SCENARIO_FILE))?;
        Ok(Self { folder, scenario })
    }

    /// Puts the driver library in place.
    ///
    /// # Errors
    ///
    /// [`Error::Library`] when it was not built, [`Error::File`] when it cannot be copied.
    pub fn install_library(&self) -> Result<(), Error> {
        let library = self.library();
        make_parent(&library)?;
        let built = library_path()?;
        let mut content = fs::read(&built).map_err(at(&built))?;
        for call in &self.scenario.driver.without {
            hide(&mut content, call.as_ref())?;
        }
        // Written aside and renamed, so that nobody loads half of it.
        write(&library, &content)
    }

    /// Takes a function out of the node's library, as in a driver from before that function.
    ///
    /// Seen by who loads the library from now on.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchCall`] when the library has no such function, [`Error::File`].
    pub fn hide_function(&self, call: &str) -> Result<(), Error> {
        let library = self.library();
        let mut content = fs::read(&library).map_err(at(&library))?;
        hide(&mut content, call)?;
        // In its place and not over it: the old file may be in use.
        write(&library, &content)
    }

    /// Gives the node another scenario: other GPUs are seen at the next initialisation of NVML.
    ///
    /// # Errors
    ///
    /// [`Error`], when the scenario is wrong or the folder cannot be written.
    pub fn replace_scenario(&mut self, scenario: &Scenario) -> Result<(), Error> {
        let file = self.folder.join(layout::SCENARIO_FILE);
        let yaml = scenario.to_yaml()?;
        // What was built in Rust has to obey the same rules as what is written by hand.
        Scenario::parse(&file, &yaml)?;
        self.scenario = scenario.clone();
        for gpu in scenario.gpus() {
            self.lay_out_gpu(&gpu)?;
        }
        self.lay_out_driver()?;
        write(&file, yaml.as_bytes())
    }

    /// The folder of the node.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The library to load instead of the driver's.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.folder.join(layout::LIBRARY)
    }

    /// What changes while the node is in use; [`layout`] says what is in it.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.folder.join(layout::STATE_DIR)
    }

    /// Stands for `/dev`.
    #[must_use]
    pub fn dev_root(&self) -> PathBuf {
        self.folder.join("dev")
    }

    /// Stands for `/proc`.
    #[must_use]
    pub fn proc_root(&self) -> PathBuf {
        self.folder.join("proc")
    }

    /// Stands for `/sys`.
    #[must_use]
    pub fn sys_root(&self) -> PathBuf {
        self.folder.join("sys")
    }

    /// The GPUs of the scenario, in the order of their index.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        self.scenario.gpus()
    }

    /// The GPU falls off the bus.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn lose(&self, gpu_uuid: &str) -> Result<(), Error> {
        write(&layout::lost(&self.state_dir(), gpu_uuid), b"")
    }

    /// The GPU is back.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn find_again(&self, gpu_uuid: &str) -> Result<(), Error> {
        remove(&layout::lost(&self.state_dir(), gpu_uuid))
    }

    /// A compute process starts to use the GPU; the driver does not know how much memory it takes.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn add_process(&self, gpu_uuid: &str, pid: u32) -> Result<(), Error> {
        write(&layout::process(&self.state_dir(), gpu_uuid, pid), b"")
    }

    /// A compute process uses so much memory of the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn add_process_with_memory(
        &self,
        gpu_uuid: &str,
        pid: u32,
        used_memory_bytes: u64,
    ) -> Result<(), Error> {
        write(
            &layout::process(&self.state_dir(), gpu_uuid, pid),
            format!("{{\"usedMemoryBytes\":{used_memory_bytes}}}").as_bytes(),
        )
    }

    /// The process has left the GPU; nothing happens if it was not there.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn remove_process(&self, gpu_uuid: &str, pid: u32) -> Result<(), Error> {
        remove(&layout::process(&self.state_dir(), gpu_uuid, pid))
    }

    /// The driver reports an XID error of the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn report_xid(&self, gpu_uuid: &str, xid: u64) -> Result<(), Error> {
        let events = layout::events(&self.state_dir());
        let append = || {
            let mut file = fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(&events)?;
            file.write_all(format!("{{\"gpu\":\"{gpu_uuid}\",\"xid\":{xid}}}\n").as_bytes())
        };
        append().map_err(at(&events))
    }

    /// From now on the driver says that this has to be done about the GPU: a number of
    /// `nvmlDeviceGpuRecoveryAction_t`, 0 for nothing.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn set_recovery(&self, gpu_uuid: &str, action: u32) -> Result<(), Error> {
        let file = layout::recovery(&self.state_dir(), gpu_uuid);
        write(&file, action.to_string().as_bytes())
    }

    /// From now on that NVML call does this; the calls are counted anew.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchCall`] or [`Error::File`].
    pub fn set_fault(&self, call: &str, fault: &Fault) -> Result<(), Error> {
        self.check_call(call)?;
        remove(&layout::count(&self.state_dir(), call))?;
        let path = layout::fault(&self.state_dir(), call);
        let json = serde_json::to_vec(fault).map_err(|error| at(&path)(error.into()))?;
        write(&path, &json)
    }

    /// That NVML call does again what it should; one that is being delayed ends.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchCall`] or [`Error::File`].
    pub fn clear_fault(&self, call: &str) -> Result<(), Error> {
        self.check_call(call)?;
        remove(&layout::fault(&self.state_dir(), call))?;
        remove(&layout::count(&self.state_dir(), call))
    }

    /// How many calls met the fault that is set for `call`, those that it skips included.
    #[must_use]
    pub fn calls_that_met_the_fault(&self, call: &str) -> u32 {
        fs::read_to_string(layout::count(&self.state_dir(), call))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Begins a new trace; see [`FakeNode::trace`].
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn start_trace(&self) -> Result<(), Error> {
        write(&layout::trace(&self.state_dir()), b"")
    }

    /// The NVML calls since [`FakeNode::start_trace`], in their order.
    #[must_use]
    pub fn trace(&self) -> Vec<String> {
        fs::read_to_string(layout::trace(&self.state_dir()))
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    fn check_call(&self, call: &str) -> Result<(), Error> {
        if SYMBOLS.lines().any(|symbol| symbol == call) {
            Ok(())
        } else {
            Err(Error::NoSuchCall {
                call: call.to_owned(),
            })
        }
    }

    fn lay_out_gpu(&self, gpu: &Gpu) -> Result<(), Error> {
        make_folder(&layout::processes(&self.state_dir(), &gpu.uuid))?;
        device_node(
            &self.dev_root().join(format!("nvidia{}", gpu.minor)),
            NVIDIA_MAJOR,
            gpu.minor,
        )?;
        // As in sysfs, where bus/pci/devices holds links into the tree of PCIe roots and bridges.
        let root_bus = gpu.pcie_root.trim_start_matches("pci");
        let place = format!("{}/{root_bus}:01.0/{}", gpu.pcie_root, gpu.pci_bus_id);
        let device = self.sys_root().join("devices").join(&place);
        make_folder(&device)?;
        write(
            &device.join("numa_node"),
            format!("{}\n", gpu.numa_node).as_bytes(),
        )?;
        let link = self
            .sys_root()
            .join("bus/pci/devices")
            .join(&gpu.pci_bus_id);
        make_parent(&link)?;
        match symlink(format!("../../../devices/{place}"), &link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map_err(at(&link)),
        }
    }

    fn lay_out_driver(&self) -> Result<(), Error> {
        let dev = self.dev_root();
        device_node(&dev.join("nvidiactl"), NVIDIA_MAJOR, NVIDIACTL_MINOR)?;
        device_node(&dev.join("nvidia-uvm"), UVM_MAJOR, 0)?;
        device_node(&dev.join("nvidia-uvm-tools"), UVM_MAJOR, 1)?;
        write(
            &self.proc_root().join("devices"),
            format!(
                "Character devices:\n  1 mem\n{NVIDIA_MAJOR} nvidia\n{NVIDIA_MAJOR} nvidiactl\n\
                 {UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n259 blkext\n"
            )
            .as_bytes(),
        )?;
        write(
            &self.proc_root().join("driver/nvidia/version"),
            format!(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n",
                self.scenario.driver.version
            )
            .as_bytes(),
        )
    }
}

/// Takes a function out of the content of a library.
fn hide(content: &mut [u8], call: &str) -> Result<(), Error> {
    // The dynamic symbol table finds a function by comparing with its name, which stands between two
    // zeros in the table of strings; spelled otherwise, it is not found.
    let name = [b"\0", call.as_bytes(), b"\0"].concat();
    let place = content
        .windows(name.len())
        .position(|window| window == name)
        .ok_or_else(|| Error::NoSuchCall {
            call: call.to_owned(),
        })?;
    content[place + 1] = b'_';
    Ok(())
}

/// The C library as Cargo built it.
///
/// Cargo leaves it in `target/<profile>/deps`, where test programs are too, when the tested package depends on
/// this one. `FAKE_NVML_LIBRARY` overrides the search.
///
/// # Errors
///
/// [`Error::Library`], which says where it was looked for.
pub fn library_path() -> Result<PathBuf, Error> {
    if let Some(path) = std::env::var_os("FAKE_NVML_LIBRARY") {
        return Ok(path.into());
    }
    let program = std::env::current_exe().map_err(at(Path::new("/proc/self/exe")))?;
    let looked_in: Vec<PathBuf> = program
        .ancestors()
        .skip(1)
        .take(2)
        // `deps` first: the file one folder above is only renewed by a build of this package itself.
        .flat_map(|folder| [folder.join("deps"), folder.to_owned()])
        .collect();
    looked_in
        .iter()
        .map(|folder| folder.join(BUILT_LIBRARY))
        .find(|path| path.is_file())
        .ok_or(Error::Library { looked_in })
}

/// A character device where the system lets us make one, else a FIFO, which CDI accepts too.
fn device_node(path: &Path, major: u32, minor: u32) -> Result<(), Error> {
    make_parent(path)?;
    if path.exists() {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(DEVICE_MODE);
    let make = |kind, number| rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, number);
    make(FileType::CharacterDevice, rustix::fs::makedev(major, minor))
        .or_else(|_not_allowed| make(FileType::Fifo, 0))
        .map_err(|errno| at(path)(errno.into()))?;
    // The umask takes away what the driver grants.
    fs::set_permissions(path, Permissions::from_mode(DEVICE_MODE)).map_err(at(path))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

fn make_folder(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(at(path))
}

fn make_parent(path: &Path) -> Result<(), Error> {
    path.parent().map_or(Ok(()), make_folder)
}

fn write(path: &Path, content: &[u8]) -> Result<(), Error> {
    make_parent(path)?;
    state::replace(path, content).map_err(at(path))
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(at(path)),
    }
}
