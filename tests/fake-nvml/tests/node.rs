//! Scenarios, and the folder that is made of one.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot make its node has to fail"
)]

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use expect_test::expect;
use fake_nvml::scenario::GpuGroup;
use fake_nvml::{FakeNode, Scenario, layout};
use tempfile::TempDir;

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scenarios")
        .join(name)
}

#[test]
fn a_wrong_scenario_is_told_with_file_key_and_line() {
    let cases = [
        "gpus:\n  - modle: l40s\n",
        "gpus:\n  - { model: h1000 }\n",
        "gpus:\n  - { model: l40s, count: many }\n",
        "gpus: []\nfaults:\n  nvmlDeviceGetUuid: { error: 999 }\n",
        "gpus: []\nfaults:\n  nvmlDeviceGetUUID:\n    delay: 5\n",
        "driver: { version: \"580\", cuda: \"13\" }\ngpus: []\n",
        "driver: { version: \"470\", cuda: \"11.4\", without: [nvmlGetName] }\ngpus: []\n",
        "gpus:\n  - { model: l40s, count: 2, minor: 3 }\n",
        "gpus:\n  - { model: l40s }\n  - { model: l40s, pciBusId: \"65:00\" }\n",
        "gpus:\n  - { model: l40s, uuid: GPU-1 }\n  - { model: l40s, uuid: GPU-1 }\n",
        "gpus:\n  - { model: l40s }\n  - { model: l40s, minor: 0 }\n",
        "gpus:\n  - { model: l40s, mig: true }\n",
        "gpus:\n  - { model: l40s, count: 65 }\n",
        "gpus:\n  - { model: l40s }\ntopology: [\"X NEAR\"]\n",
        "gpus:\n  - { model: l40s, count: 2 }\ntopology: [\"X SYS\"]\n",
        "gpus:\n  - { model: l40s, count: 2 }\ntopology: [\"X SYS\", \"PIX X\"]\n",
        "gpus:\n  - { model: l40s, count: 2 }\ntopology: [\"X NV19/SYS\", \"NV19/SYS X\"]\n",
    ];
    let advice = ". Correct the scenario and initialise NVML again";
    let told: Vec<_> = cases
        .iter()
        .map(|text| {
            let error = Scenario::parse(Path::new("node.yaml"), text).unwrap_err();
            error.to_string().strip_suffix(advice).unwrap().to_owned()
        })
        .collect();
    expect![[r#"
        node.yaml: gpus[0]: unknown field `modle`, expected one of `model`, `count`, `uuid`, `minor`, `pciBusId`, `pcieRoot`, `numaNode`, `name`, `brand`, `architecture`, `mig`, `lost` at line 2 column 5
        node.yaml: gpus[0]: model: there is no GPU model "h1000"; known are h100-sxm5-80gb, a100-sxm4-40gb, v100-sxm3-32gb, l40s, rtx-4090, gb200, gb10 at line 2 column 5
        node.yaml: gpus[0].count: invalid type: string "many", expected u32 at line 2 column 27
        node.yaml: faults: there is no NVML call "nvmlDeviceGetUuid" at line 3 column 3
        node.yaml: faults.nvmlDeviceGetUUID: unknown field `delay`, expected one of `error`, `skip`, `times`, `delayMs` at line 4 column 5
        node.yaml: driver: cuda: "13" is not a version: write major.minor, as in "13.0" at line 1 column 9
        node.yaml: driver.without: there is no NVML call "nvmlGetName" at line 1 column 50
        node.yaml: gpus[0].minor: it identifies one GPU, but count is 2
        node.yaml: gpus[1].pciBusId: "65:00" is not a PCI address such as 0000:65:00.0 at line 3
        node.yaml: gpus: two GPUs have the uuid "GPU-1" at line 3
        node.yaml: gpus: two GPUs have the minor "0"
        node.yaml: gpus[0].mig: the model l40s cannot be split
        node.yaml: gpus: 65 GPUs; at most 64 are possible
        node.yaml: topology: topology: "NEAR" is no connection: write X, PIX, PXB, PHB, NODE or SYS, and NVLinks as in NV2/SYS at line 3 column 11
        node.yaml: topology: 2 rows of 2 connections are needed, as there are 2 GPUs
        node.yaml: topology: GPUs 0 and 1 are connected in one way here and in another there
        node.yaml: topology: GPU 0 has 19 NVLinks; at most 18 are possible"#]].assert_eq(&told.join("\n"));
}

#[test]
fn a_scenario_that_is_missing_is_named() {
    let error = Scenario::load(Path::new("/nowhere/node.yaml")).unwrap_err();
    assert!(error.to_string().contains("/nowhere/node.yaml"), "{error}");
}

#[test]
fn the_shipped_scenarios_have_as_many_gpus_as_their_names_say() {
    let shipped_ones = [
        ("h100x1", 1),
        ("h100x8", 8),
        ("h100x16", 16),
        ("a100x8", 8),
        ("a100x4-old-driver", 4),
        ("l40sx4", 4),
        ("mixed", 6),
        ("dgx-h100", 8),
        ("dgx-1v", 8),
        ("dgx-2", 16),
        ("pcie-pairs", 4),
    ];
    for (name, count) in shipped_ones {
        let scenario = Scenario::load(&shipped(&format!("{name}.yaml"))).unwrap();
        assert_eq!(scenario.gpus().len(), count, "{name}");
        let file = shipped("again.yaml");
        let again = Scenario::parse(&file, &scenario.to_yaml().unwrap()).unwrap();
        assert_eq!(again, scenario);
    }
    let files = fs::read_dir(shipped("")).unwrap().count();
    assert_eq!(files, shipped_ones.len());
}

#[test]
fn uuids_last_and_differ_between_nodes() {
    let first = Scenario::h100(16);
    let mut second = Scenario::h100(16);
    second.seed = "node-b".to_owned();
    let uuids = |scenario: &Scenario| -> Vec<_> {
        scenario.gpus().into_iter().map(|gpu| gpu.uuid).collect()
    };
    assert_eq!(uuids(&first)[..8], uuids(&Scenario::h100(8))[..]);
    let mut all = [uuids(&first), uuids(&second)].concat();
    expect!["GPU-"].assert_eq(&all[0][..4]);
    assert!(all.iter().all(|uuid| uuid.len() == 40));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 32);
}

#[test]
fn a_node_has_the_files_that_a_daemon_reads() {
    let folder = TempDir::new().unwrap();
    let node = FakeNode::create(folder.path(), &Scenario::h100(2)).unwrap();
    for name in [
        "nvidia0",
        "nvidia1",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
    ] {
        let kind = fs::metadata(node.dev_root().join(name))
            .unwrap()
            .file_type();
        assert!(kind.is_char_device() || kind.is_fifo(), "{name}");
    }
    let device = node.sys_root().join("bus/pci/devices/0000:1c:00.0");
    assert_eq!(
        fs::read_link(&device).unwrap(),
        Path::new("../../../devices/pci0000:1b/0000:1b:01.0/0000:1c:00.0")
    );
    assert_eq!(fs::read_to_string(device.join("numa_node")).unwrap(), "1\n");
    let devices = fs::read_to_string(node.proc_root().join("devices")).unwrap();
    assert!(devices.contains("195 nvidia\n"), "{devices}");
    let version = fs::read_to_string(node.proc_root().join("driver/nvidia/version")).unwrap();
    assert!(version.contains("580.95.05"), "{version}");
    assert!(node.library().ends_with("libnvidia-ml.so.1"));
    // A writer in another language can count on the folder.
    assert!(layout::processes(&node.state_dir(), &node.gpus()[1].uuid).is_dir());
}

#[test]
fn a_node_may_be_made_anew_in_the_same_folder() {
    let folder = TempDir::new().unwrap();
    FakeNode::create(folder.path(), &Scenario::h100(2)).unwrap();
    let node = FakeNode::create(folder.path(), &Scenario::h100(3)).unwrap();
    assert_eq!(node.gpus(), FakeNode::open(folder.path()).unwrap().gpus());
}

#[test]
fn what_a_test_builds_obeys_the_rules_of_the_file() {
    let folder = TempDir::new().unwrap();
    let mut scenario = Scenario::h100(1);
    scenario.gpus.push(GpuGroup {
        count: 2,
        uuid: Some("GPU-1".to_owned()),
        ..GpuGroup::default()
    });
    let error = FakeNode::create(folder.path(), &scenario).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("gpus[1].uuid"), "{source}");
    assert!(!folder.path().join("scenario.yaml").exists());
}

#[test]
fn a_fault_for_a_call_that_does_not_exist_is_refused() {
    let folder = TempDir::new().unwrap();
    let node = FakeNode::create(folder.path(), &Scenario::h100(1)).unwrap();
    let error = node
        .set_fault("nvmlDeviceGetUuid", &fake_nvml::Fault::error(999))
        .unwrap_err();
    assert!(error.to_string().contains("nvmlDeviceGetUuid"), "{error}");
}

fn command(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fake-nvml"))
        .args(arguments)
        .output()
        .unwrap()
}

fn stdout(arguments: &[&str]) -> String {
    let output = command(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_shell_can_make_and_change_a_node() {
    let temporary = TempDir::new().unwrap();
    let folder = temporary.path().join("node");
    let folder = folder.to_str().unwrap();
    let scenario = shipped("h100x8.yaml");
    let library = stdout(&["mkroot", "--scenario", scenario.to_str().unwrap(), folder]);
    assert!(Path::new(library.trim()).is_file(), "{library}");

    let gpus = stdout(&["gpus", folder]);
    assert_eq!(gpus.lines().count(), 8);
    let uuid = gpus.split(' ').nth(1).unwrap();
    stdout(&["lose", folder, uuid]);
    let state = Path::new(folder).join("state");
    assert!(layout::lost(&state, uuid).exists());
    stdout(&["find", folder, uuid]);
    assert!(!layout::lost(&state, uuid).exists());
    stdout(&["fault", folder, "nvmlDeviceGetUUID", "--error", "15"]);
    assert!(layout::fault(&state, "nvmlDeviceGetUUID").exists());
    stdout(&["clear", folder, "nvmlDeviceGetUUID"]);
    assert!(!layout::fault(&state, "nvmlDeviceGetUUID").exists());
    stdout(&["xid", folder, uuid, "79"]);
    assert!(layout::events(&state).exists());
}

#[test]
fn a_shell_gets_one_line_about_a_wrong_scenario() {
    let temporary = TempDir::new().unwrap();
    let scenario = temporary.path().join("bad.yaml");
    fs::write(&scenario, "gpus:\n  - { model: h1000 }\n").unwrap();
    let node = temporary.path().join("node");
    let output = command(&[
        "mkroot",
        "--scenario",
        scenario.to_str().unwrap(),
        node.to_str().unwrap(),
    ]);
    assert!(!output.status.success());
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("bad.yaml") && text.contains("line 2"),
        "{text}"
    );
    assert!(!node.exists());
}
