//! The library judged by programs that know nothing of it: NVIDIA's Python bindings, and two monitors that people run.
//!
//! They come from PyPI into a virtual environment below `target/`. Where Python or PyPI can't be reached, each test says
//! so and passes.
#![allow(
    clippy::unwrap_used,
    reason = "a judge that says what nobody can read has to fail the test"
)]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use fake_nvml::{FakeNode, Gpu, Scenario};
use serde_json::Value;
use tempfile::TempDir;

/// What is installed, at these versions: a new release must not fail a test of ours on the day that it comes out.
const PACKAGES: [&str; 3] = ["nvidia-ml-py==13.615.71", "nvitop==1.7.2", "gpustat==1.1.1"];
/// Written last, with what the environment is: one that was broken off, has other packages or was made in another place
/// (its programs name that) is made again.
const COMPLETE: &str = "complete";
/// The scenarios that every judge sees.
const SCENARIOS: [&str; 4] = ["h100x16", "a100x8", "l40sx4", "mixed"];
/// Those that NVIDIA's bindings see besides; a monitor takes a second or more for each.
const MORE: [&str; 2] = ["h100x8", "a100x4-old-driver"];

/// The folder of the judges' programs, or why there is none.
fn judges() -> Result<&'static Path, &'static str> {
    static JUDGES: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let judges = JUDGES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvml-judges");
        install(&folder)?;
        Ok(folder.join("bin"))
    });
    judges.as_deref().map_err(String::as_str)
}

fn install(folder: &Path) -> Result<(), String> {
    let what = format!("{} in {}", PACKAGES.join(" "), folder.display());
    let is_complete = || fs::read_to_string(folder.join(COMPLETE)).is_ok_and(|it| it == what);
    if is_complete() {
        return Ok(());
    }
    // Another run of the tests on this target folder may be installing, too.
    let lock = File::create(folder.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    if is_complete() {
        return Ok(());
    }
    let _ = fs::remove_dir_all(folder);
    run(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    // A machine without a network is not waited for.
    let options = [
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries=1",
        "--timeout=15",
    ];
    run(Command::new(folder.join("bin/pip"))
        .args(options)
        .args(PACKAGES))?;
    fs::write(folder.join(COMPLETE), what).unwrap();
    Ok(())
}

fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout).unwrap());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} ended with {}: {errors}", output.status))
}

/// A node that a judge looks at.
struct Node {
    node: FakeNode,
    judges: &'static Path,
    _folder: TempDir,
}

impl Node {
    /// `None`, and a line about it, where there are no judges.
    fn new(scenario: &str) -> Option<Self> {
        let judges = match judges() {
            Ok(judges) => judges,
            Err(why) => {
                let test = std::thread::current();
                let test = test.name().unwrap_or("a test").to_owned();
                // Nobody is left to tell when standard error is closed.
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: {test}: {} can't be installed: {why}",
                    PACKAGES.join(", ")
                );
                return None;
            }
        };
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
        let file = file.join(format!("{scenario}.yaml"));
        let folder = TempDir::new().unwrap();
        let node = FakeNode::create(folder.path(), &Scenario::load(&file).unwrap()).unwrap();
        Some(Self {
            node,
            judges,
            _folder: folder,
        })
    }

    /// What a judge says of the node.
    fn ask(&self, judge: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(self.judges.join(judge));
        let library = self.node.library();
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", library.parent().unwrap())
            .env("TERM", "dumb")
            .env("COLUMNS", "200")
            .env("LC_ALL", "C.UTF-8");
        run(&mut command).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// A PCI address as NVML writes it: eight digits of the domain, in capitals.
fn bus_id(gpu: &Gpu) -> String {
    let (domain, rest) = gpu.pci_bus_id.split_once(':').unwrap();
    let domain = u32::from_str_radix(domain, 16).unwrap();
    format!("{domain:08X}:{}", rest.to_uppercase())
}

#[test]
fn nvidias_python_bindings_read_what_the_scenario_says() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/judges/inventory.py");
    for scenario in SCENARIOS.into_iter().chain(MORE) {
        let Some(judged) = Node::new(scenario) else {
            return;
        };
        let gpus = judged.node.gpus();
        let busy = gpus.last().unwrap();
        let own = std::process::id();
        judged
            .node
            .add_process_with_memory(&busy.uuid, own, 5 << 20)
            .unwrap();
        let seen: Value = serde_json::from_str(&judged.ask("python", &[script])).unwrap();
        let driver = Scenario::load(&judged.node.folder().join("scenario.yaml"))
            .unwrap()
            .driver;
        assert_eq!(seen["driver"], driver.version, "{scenario}");
        let cuda = u32::from(driver.cuda.major) * 1000 + u32::from(driver.cuda.minor) * 10;
        assert_eq!(seen["cuda"], cuda, "{scenario}");
        assert_eq!(seen["gpus"].as_array().unwrap().len(), gpus.len());
        for gpu in &gpus {
            let seen = &seen["gpus"][gpu.index as usize];
            let is_busy = gpu.uuid == busy.uuid;
            let processes: &[(u32, u64)] = if is_busy { &[(own, 5 << 20)] } else { &[] };
            let (major, minor) = gpu.model.compute_capability;
            let wanted = serde_json::json!({
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "minor": gpu.minor,
                "pciBusId": bus_id(gpu),
                "memoryBytes": gpu.model.memory_mib.map(|mib| mib << 20),
                "computeCapability": [major, minor],
                "brand": gpu.brand,
                "architecture": gpu.architecture,
                "processes": processes,
            });
            assert_eq!(*seen, wanted, "{scenario}");
        }
    }
}

#[test]
fn gpustat_lists_every_gpu_with_its_name_and_memory() {
    for scenario in SCENARIOS {
        let Some(judged) = Node::new(scenario) else {
            return;
        };
        let seen: Value = serde_json::from_str(&judged.ask("gpustat", &["--json"])).unwrap();
        let listed: Vec<_> = seen["gpus"].as_array().unwrap().iter().collect();
        let gpus = judged.node.gpus();
        assert_eq!(listed.len(), gpus.len(), "{scenario}");
        for (seen, gpu) in listed.into_iter().zip(&gpus) {
            assert_eq!(seen["index"], gpu.index, "{scenario}");
            assert_eq!(seen["uuid"], gpu.uuid, "{scenario}");
            assert_eq!(seen["name"], gpu.name, "{scenario}");
            if let Some(mib) = gpu.model.memory_mib {
                assert_eq!(seen["memory.total"], mib, "{scenario}");
            }
        }
    }
}

#[test]
fn nvitop_shows_every_gpu_by_its_address() {
    for scenario in SCENARIOS {
        let Some(judged) = Node::new(scenario) else {
            return;
        };
        let seen = judged.ask("nvitop", &["--once", "--ascii"]);
        for gpu in judged.node.gpus() {
            assert!(
                seen.contains(&bus_id(&gpu)),
                "{scenario}: {}: {seen}",
                bus_id(&gpu)
            );
        }
    }
}
