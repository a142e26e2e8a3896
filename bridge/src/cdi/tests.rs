//! The files as a runtime reads them: the judge is the `container-device-interface` crate.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use bridge_core::{Access, ClaimRef, ClaimUid, DeviceName, Preparation, PreparedDevice, UnitId};
use container_device_interface::cache::{Cache, new_cache};
use container_device_interface::spec_dirs::with_spec_dirs;
use expect_test::expect_file;
use serde_json::{Value, json};

use super::*;

mod driver;

const CLAIM: &str = "5f0f1b80-6c1b-4bd5-8df4-5b0e5f3a2c11";

/// A host with these nodes, and an empty CDI folder.
struct Host {
    folder: tempfile::TempDir,
    files: CdiFiles,
}

impl Host {
    fn with(nodes: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let dev = folder.path().join("root/dev");
        std::fs::create_dir_all(&dev).unwrap();
        let files = CdiFiles::new(
            folder.path().join("cdi"),
            Roots::in_one(&folder.path().join("root")),
        );
        let host = Self { folder, files };
        for node in nodes {
            host.add(node);
        }
        host
    }

    fn usual() -> Self {
        Self::with(&["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"])
    }

    /// Ordinary users may make FIFOs, and runtimes take them for devices.
    fn add(&self, node: &str) {
        rustix::fs::mknodat(
            rustix::fs::CWD,
            self.dev().join(node),
            rustix::fs::FileType::Fifo,
            0o666.into(),
            0,
        )
        .unwrap();
    }

    fn dev(&self) -> std::path::PathBuf {
        self.folder.path().join("root/dev")
    }

    fn cdi(&self) -> std::path::PathBuf {
        self.folder.path().join("cdi")
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.cdi())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn runtime(&self) -> Cache {
        let cache = new_cache(vec![with_spec_dirs(&[self.cdi().to_str().unwrap()])]);
        let mut cache = cache.lock().unwrap();
        cache.refresh().expect("every spec is valid");
        std::mem::take(&mut cache)
    }

    /// The OCI spec of a container that is given these devices.
    fn container(&self, devices: &[String]) -> Value {
        let mut spec = Default::default();
        self.runtime()
            .inject_devices(Some(&mut spec), devices.to_vec())
            .expect("the devices are found and injected");
        serde_json::to_value(&spec).unwrap()
    }
}

fn unit(name: &str) -> UnitId {
    UnitId::new(name).unwrap()
}

fn uid(text: &str) -> ClaimUid {
    ClaimUid::new(text).unwrap()
}

fn device(name: &str, unit_name: &str, access: Access) -> PreparedDevice {
    PreparedDevice {
        requests: vec!["gpus".to_owned()],
        pool: "node-1".to_owned(),
        device: DeviceName::new(name).unwrap(),
        unit: unit(unit_name),
        access,
    }
}

fn two_gpus() -> Preparation {
    Preparation {
        claim: ClaimRef {
            uid: uid(CLAIM),
            namespace: "train".to_owned(),
            name: "llm".to_owned(),
        },
        devices: vec![
            device("gpu-0", "GPU-a", Access::Owner),
            device("gpu-3", "GPU-b", Access::Owner),
        ],
    }
}

fn minor_of(unit: &UnitId) -> Option<u32> {
    match unit.as_str() {
        "GPU-a" => Some(0),
        "GPU-b" => Some(3),
        _ => None,
    }
}

fn paths(container: &Value) -> Vec<&str> {
    let devices = container["linux"]["devices"].as_array().unwrap();
    devices
        .iter()
        .map(|device| device["path"].as_str().unwrap())
        .collect()
}

#[test]
fn a_claims_spec_is_what_it_was_last_year() {
    let host = Host::usual();
    host.files.write_claim(&two_gpus(), minor_of, None).unwrap();
    let path = host
        .cdi()
        .join(format!("gpu-bridge.dev-claim_{CLAIM}.json"));
    let text = std::fs::read_to_string(path).unwrap();
    let root = host.folder.path().join("root");
    let text = text.replace(root.to_str().unwrap(), "/dev-root");
    expect_file!["../../../tests/golden/cdi-claim-two-gpus.json"].assert_eq(&text);
}

#[test]
fn a_runtime_gives_a_container_the_devices_of_its_claim_and_no_other() {
    let host = Host::usual();
    host.files.write_claim(&two_gpus(), minor_of, None).unwrap();
    let gpu_3 = claim_device(&uid(CLAIM), &DeviceName::new("gpu-3").unwrap());
    assert_eq!(gpu_3, format!("gpu-bridge.dev/claim={CLAIM}-gpu-3"));

    let container = host.container(std::slice::from_ref(&gpu_3));
    assert_eq!(
        paths(&container),
        ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3"]
    );
    let env = container["process"]["env"].as_array().unwrap();
    assert!(
        env.contains(&json!("NVIDIA_VISIBLE_DEVICES=void")),
        "{env:?}"
    );

    let gpu_0 = claim_device(&uid(CLAIM), &DeviceName::new("gpu-0").unwrap());
    let both = host.container(&[gpu_0, gpu_3]);
    assert_eq!(
        paths(&both),
        [
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia0",
            "/dev/nvidia3"
        ]
    );
}

#[test]
fn a_runtime_gives_a_counted_container_the_units_of_its_grant() {
    let host = Host::usual();
    let units = [(unit("GPU-a"), 0), (unit("GPU-b"), 3)];
    host.files.write_counted(&units, None).unwrap();
    assert_eq!(host.names(), ["gpu-bridge.dev-gpu.json"]);
    let device = counted_device(&unit("GPU-b"));
    assert_eq!(device, "gpu-bridge.dev/gpu=GPU-b");
    assert_eq!(
        paths(&host.container(&[device])),
        ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3"]
    );
}

#[test]
fn a_device_that_answers_two_requests_is_there_once() {
    let host = Host::usual();
    let mut preparation = two_gpus();
    preparation
        .devices
        .push(device("gpu-0", "GPU-a", Access::Admin));
    host.files
        .write_claim(&preparation, minor_of, None)
        .unwrap();
    assert_eq!(host.runtime().list_devices().len(), 2);
}

#[test]
fn without_a_dev_root_of_its_own_no_host_path_is_written() {
    let host = Host::usual();
    let files = CdiFiles::new(host.cdi(), Roots::in_one("/".as_ref()));
    files.write_counted(&[(unit("GPU-a"), 0)], None).unwrap();
    let text = std::fs::read_to_string(host.cdi().join("gpu-bridge.dev-gpu.json")).unwrap();
    assert!(
        text.contains("\"/dev/nvidia0\"") && !text.contains("hostPath"),
        "{text}"
    );
}

#[test]
fn a_unit_whose_node_can_not_be_used_is_named_before_it_is_given_away() {
    let host = Host::with(&["nvidia0"]);
    let check = |minor| {
        let error = host.files.check_nodes(&unit("GPU-a"), minor).unwrap_err();
        error
            .to_string()
            .replace(host.folder.path().to_str().unwrap(), "")
    };
    assert!(
        check(0).starts_with("GPU-a can't be used by a container: /root/dev/nvidiactl is missing;")
    );
    host.add("nvidiactl");
    assert!(check(0).contains("/root/dev/nvidia-uvm is missing"));
    let units = [(unit("GPU-a"), 0), (unit("GPU-b"), 3)];
    assert_eq!(host.files.unfit(&units).len(), 2);
    host.add("nvidia-uvm");
    let unfit = host.files.unfit(&units);
    assert!(
        unfit[&unit("GPU-b")].ends_with("/root/dev/nvidia3 is missing"),
        "{unfit:?}"
    );
    assert_eq!(unfit.len(), 1);
    host.files.check_nodes(&unit("GPU-a"), 0).unwrap();
    assert!(check(1).contains("/root/dev/nvidia1 is missing"));
    std::fs::File::create(host.dev().join("nvidia1")).unwrap();
    assert!(check(1).contains("/root/dev/nvidia1 is no device node"));
    std::os::unix::fs::symlink("nvidia0", host.dev().join("nvidia2")).unwrap();
    assert!(check(2).contains("/root/dev/nvidia2 is a link"));
}

#[test]
fn a_file_is_rewritten_only_when_something_has_changed() {
    let host = Host::usual();
    let path = host.cdi().join("gpu-bridge.dev-gpu.json");
    let written = |path: &Path| path.metadata().unwrap().ino();
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    assert_eq!(
        path.metadata().unwrap().permissions().mode() & 0o7777,
        0o644
    );
    let first = written(&path);
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    assert_eq!(written(&path), first);

    host.add("nvidia-modeset");
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    assert!(
        std::fs::read_to_string(&path)
            .unwrap()
            .contains("nvidia-modeset")
    );

    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    assert_eq!(
        path.metadata().unwrap().permissions().mode() & 0o7777,
        0o644
    );

    host.files.write_counted(&[], None).unwrap();
    assert!(!path.exists(), "a spec without devices would be invalid");
}

#[test]
fn a_link_in_place_of_a_spec_is_replaced_and_not_followed() {
    let host = Host::usual();
    std::fs::create_dir(host.cdi()).unwrap();
    let victim = host.folder.path().join("victim");
    std::fs::File::create(&victim).unwrap();
    let path = host.cdi().join("gpu-bridge.dev-gpu.json");
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    assert_eq!(victim.metadata().unwrap().len(), 0);
    assert!(path.symlink_metadata().unwrap().is_file());
}

#[test]
fn what_a_claims_spec_says_of_its_devices_is_read_back_and_what_is_not_ours_proves_nothing() {
    let host = Host::usual();
    assert_eq!(host.files.minors_on_disk(), BTreeMap::new());
    host.files.write_claim(&two_gpus(), minor_of, None).unwrap();
    let devices = two_gpus().devices.into_iter();
    let minors: BTreeMap<_, _> = devices
        .map(|it| (it.device, minor_of(&it.unit).unwrap()))
        .collect();
    let known = BTreeMap::from([(uid(CLAIM), minors)]);
    assert_eq!(host.files.minors_on_disk(), known);

    let path = host
        .cdi()
        .join(format!("gpu-bridge.dev-claim_{CLAIM}.json"));
    let text = std::fs::read_to_string(&path).unwrap();
    let another = |uid: &str| host.cdi().join(format!("gpu-bridge.dev-claim_{uid}.json"));
    let put = |uid: &str, text: &str| {
        crate::store::replace(&another(uid), text.as_bytes(), 0o644).unwrap();
    };
    put("cut", &text[..text.len() / 2]);
    put("kind", r#"{"devices": [{"name": 7}]}"#);
    std::os::unix::fs::symlink(&path, another("link")).unwrap();
    std::fs::create_dir(another("folder")).unwrap();
    assert_eq!(host.files.minors_on_disk(), known);
    // The names are those of another claim, and a node that no GPU has.
    put("copy", &text);
    put(
        "odd",
        &text
            .replace(CLAIM, "odd")
            .replace("/dev/nvidia", "/dev/nvidia0"),
    );
    let found = host.files.minors_on_disk();
    assert_eq!(found[&uid("copy")], BTreeMap::new());
    assert_eq!(found[&uid("odd")], BTreeMap::new());
}

#[test]
fn a_sweep_removes_what_no_claim_has_any_more_and_nothing_of_others() {
    let host = Host::usual();
    assert_eq!(host.files.claims_on_disk().unwrap(), BTreeSet::new());
    host.files
        .write_counted(&[(unit("GPU-a"), 0)], None)
        .unwrap();
    let mut other = two_gpus();
    other.claim.uid = uid("gone");
    host.files.write_claim(&two_gpus(), minor_of, None).unwrap();
    host.files.write_claim(&other, minor_of, None).unwrap();
    let foreign = [
        "gpu-bridge.dev-claim_.json",
        "gpu-bridge.dev-claim_x.yaml",
        "gpu-bridge.dev-mine.json.tmp",
        "nvidia.yaml",
    ];
    for name in foreign {
        std::fs::File::create(host.cdi().join(name)).unwrap();
    }
    for name in [
        "gpu-bridge.dev-gpu.json.tmp",
        "gpu-bridge.dev-claim_x.json.tmp",
    ] {
        std::fs::File::create(host.cdi().join(name)).unwrap();
    }
    let both = BTreeSet::from([uid(CLAIM), uid("gone")]);
    assert_eq!(host.files.claims_on_disk().unwrap(), both);

    let swept = host.files.sweep(&BTreeSet::from([uid(CLAIM)])).unwrap();
    assert_eq!(swept, BTreeSet::from([uid("gone")]));
    let mut left: Vec<String> = foreign.map(str::to_owned).to_vec();
    left.push(format!("gpu-bridge.dev-claim_{CLAIM}.json"));
    left.push("gpu-bridge.dev-gpu.json".to_owned());
    left.sort();
    assert_eq!(host.names(), left);

    host.files.remove_claim(&uid(CLAIM)).unwrap();
    host.files.remove_claim(&uid(CLAIM)).unwrap();
    assert_eq!(host.files.claims_on_disk().unwrap(), BTreeSet::new());
}

#[test]
fn a_folder_that_can_not_be_used_is_an_error_with_its_name() {
    let host = Host::usual();
    std::fs::File::create(host.cdi()).unwrap();
    let failures = [
        host.files.claims_on_disk().map(drop).unwrap_err(),
        host.files
            .write_claim(&two_gpus(), minor_of, None)
            .unwrap_err(),
    ];
    for failure in failures {
        assert!(
            failure.to_string().contains(host.cdi().to_str().unwrap()),
            "{failure}"
        );
    }
    let unknown = host
        .files
        .write_claim(&two_gpus(), |_| None, None)
        .unwrap_err();
    assert!(matches!(unknown, Error::NoMinor { .. }), "{unknown:?}");
}
