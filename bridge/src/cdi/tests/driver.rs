//! The driver's files in a container: those that NVIDIA's toolkit names, or those that are found.

use super::*;

const VERSION: &str = "580.95.05";
const FOLDER: &str = "usr/lib/x86_64-linux-gnu";

/// A spec as the toolkit writes it, cut down to one thing of each kind.
const TOOLKIT: &str = r#"---
cdiVersion: 0.7.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/card1
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  - NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu
  deviceNodes:
  - path: /dev/nvidia-uvm
  - path: /dev/nvidiactl
  additionalGids:
  - 44
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args:
    - nvidia-cdi-hook
    - create-symlinks
    - --link
    - libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so
    env:
    - NVIDIA_CTK_DEBUG=false
  mounts:
  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
    containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
    options:
    - ro
    - nosuid
    - nodev
    - rbind
    - rprivate
  - hostPath: /run/nvidia-persistenced/socket
    containerPath: /run/nvidia-persistenced/socket
    type: bind
    options:
    - ro
    - noexec
"#;

/// What comes from the host; every container has mounts of its own kernel besides.
fn from_host(container: &Value) -> Vec<&Value> {
    let mounts = container["mounts"].as_array().into_iter().flatten();
    let is_hosts = |mount: &&Value| mount["source"].as_str().unwrap().starts_with('/');
    mounts.filter(is_hosts).collect()
}

impl Host {
    /// A file of the host below its root, with the folders above it.
    fn put(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        crate::store::replace(&path, text.as_bytes(), 0o644).unwrap();
    }

    fn link(&self, to: &str, path: &str) {
        std::os::unix::fs::symlink(to, self.folder.path().join(path)).unwrap();
    }

    /// What a counted container gets: NVIDIA's variables, and its mounts as `source at destination`.
    fn gets(&self) -> (Value, Vec<String>, Vec<String>) {
        let units = [(unit("GPU-a"), 0)];
        self.files.write_counted(&units, Some(VERSION)).unwrap();
        let container = self.container(&[counted_device(&unit("GPU-a"))]);
        let root = self.folder.path().join("root");
        let text = |value: &Value| value.as_str().unwrap().replace(root.to_str().unwrap(), "");
        let env = container["process"]["env"].as_array().unwrap();
        let env = env.iter().map(text);
        let env = env.filter(|it| it.starts_with("NVIDIA_")).collect();
        let mounts = from_host(&container).into_iter().map(|mount| {
            let (from, to) = (text(&mount["source"]), text(&mount["destination"]));
            if from == to {
                from
            } else {
                format!("{from} at {to}")
            }
        });
        let mounts = mounts.collect();
        (container, env, mounts)
    }
}

#[test]
fn the_common_part_of_the_toolkits_spec_is_taken_over() {
    let host = Host::usual();
    host.put("cdi/nvidia.yaml", TOOLKIT);
    let (container, env, mounts) = host.gets();
    assert_eq!(
        env,
        [
            "NVIDIA_VISIBLE_DEVICES=void",
            "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu"
        ]
    );
    assert_eq!(
        mounts,
        [
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
            "/run/nvidia-persistenced/socket"
        ]
    );
    let hooks = &container["hooks"]["createContainer"];
    assert_eq!(hooks[0]["path"], "/usr/bin/nvidia-cdi-hook");
    assert_eq!(hooks[0]["args"][1], "create-symlinks");
    // Of devices it has those of the GPU that was given, and no other's.
    assert_eq!(
        paths(&container),
        ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
    );
    // A claim's container gets the same.
    host.files
        .write_claim(&two_gpus(), minor_of, Some(VERSION))
        .unwrap();
    let gpu_3 = claim_device(&uid(CLAIM), &DeviceName::new("gpu-3").unwrap());
    let claims = host.container(&[gpu_3]);
    assert_eq!(claims["mounts"], container["mounts"]);
    assert_eq!(claims["hooks"], container["hooks"]);
}

#[test]
fn a_spec_that_is_for_another_driver_or_not_understood_in_full_is_not_taken_over() {
    let without_library = TOOLKIT.replace("libcuda.so.580.95.05", "libcuda.so.1");
    for (what, text) in [
        ("another driver", TOOLKIT.replace("580.95.05", "570.86.10")),
        ("no driver", without_library),
        ("no YAML", "{".to_owned()),
        ("no spec", "- a\n- b\n".to_owned()),
        ("nothing", String::new()),
        (
            "a new field",
            TOOLKIT.replace("  env:\n", "  netDevices: []\n  env:\n"),
        ),
        (
            "a new field of a mount",
            TOOLKIT.replace("type: bind", "idmap: 7"),
        ),
        (
            "a hook that no runtime knows",
            TOOLKIT.replace("createContainer", "beforeLunch"),
        ),
        (
            "a path that is none",
            TOOLKIT.replace("hostPath: /run", "hostPath: run"),
        ),
        (
            "a variable without a value",
            TOOLKIT.replace("NVIDIA_CTK_LIBCUDA_DIR=", "A-"),
        ),
    ] {
        let host = Host::usual();
        host.put("cdi/nvidia.yaml", &text);
        // The judge would refuse to read the folder for what is wrong with the toolkit's own file.
        let units = [(unit("GPU-a"), 0)];
        host.files.write_counted(&units, Some(VERSION)).unwrap();
        std::fs::remove_file(host.cdi().join("nvidia.yaml")).unwrap();
        let container = host.container(&[counted_device(&unit("GPU-a"))]);
        assert_eq!(from_host(&container).len(), 0, "{what}");
        assert_eq!(container["hooks"], Value::Null, "{what}");
    }
}

#[test]
fn a_spec_that_others_can_have_written_is_not_taken_over() {
    let host = Host::usual();
    host.put("cdi/nvidia.yaml", TOOLKIT);
    let path = host.cdi().join("nvidia.yaml");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    assert_eq!(host.gets().2, [""; 0]);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    assert_eq!(host.gets().2.len(), 2);
}

#[test]
fn without_the_toolkit_the_drivers_libraries_are_found_under_all_their_names() {
    let host = Host::usual();
    for file in [
        "libcuda.so.580.95.05",
        "libnvidia-ml.so.580.95.05",
        "vdpau/libvdpau_nvidia.so.580.95.05",
        // Another driver's, and not the driver's.
        "libcuda.so.570.86.10",
        "libc.so.6",
    ] {
        host.put(&format!("root/{FOLDER}/{file}"), "");
    }
    host.link(
        "libcuda.so.580.95.05",
        &format!("root/{FOLDER}/libcuda.so.1"),
    );
    host.link("libcuda.so.1", &format!("root/{FOLDER}/libcuda.so"));
    host.link("libc.so.6", &format!("root/{FOLDER}/libc.so"));
    host.link("/nowhere", &format!("root/{FOLDER}/libnvidia-ml.so.1"));
    for program in ["nvidia-smi", "nvidia-cdi-hook", "bash"] {
        host.put(&format!("root/usr/bin/{program}"), "");
    }
    host.put("root/run/nvidia-persistenced/socket", "");
    let (container, env, mounts) = host.gets();
    let library = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05";
    assert_eq!(
        mounts,
        [
            format!("{library} at /usr/lib/x86_64-linux-gnu/libcuda.so"),
            format!("{library} at /usr/lib/x86_64-linux-gnu/libcuda.so.1"),
            library.to_owned(),
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05".to_owned(),
            "/usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.580.95.05".to_owned(),
            "/usr/bin/nvidia-smi".to_owned(),
            "/run/nvidia-persistenced/socket".to_owned(),
        ]
    );
    let options = &from_host(&container)[1]["options"];
    assert_eq!(
        *options,
        json!(["ro", "nosuid", "nodev", "rbind", "rprivate"])
    );
    let hooks = &container["hooks"]["createContainer"];
    assert_eq!(
        hooks[0]["args"],
        json!([
            "nvidia-cdi-hook",
            "update-ldcache",
            "--folder",
            "/usr/lib/x86_64-linux-gnu"
        ])
    );
    assert_eq!(env, ["NVIDIA_VISIBLE_DEVICES=void"]);
}

#[test]
fn the_driver_may_be_seen_elsewhere_than_the_host_has_it() {
    let host = Host::usual();
    host.put(&format!("here/{FOLDER}/libcuda.so.{VERSION}"), "");
    let roots = Roots {
        driver: DriverRoot {
            on_host: "/run/nvidia/driver".into(),
            here: host.folder.path().join("here"),
        },
        ..Roots::in_one(&host.folder.path().join("root"))
    };
    let files = CdiFiles::new(host.cdi(), roots);
    files
        .write_counted(&[(unit("GPU-a"), 0)], Some(VERSION))
        .unwrap();
    let container = host.container(&[counted_device(&unit("GPU-a"))]);
    let mount = from_host(&container)[0];
    let library = format!("{FOLDER}/libcuda.so.{VERSION}");
    assert_eq!(mount["source"], format!("/run/nvidia/driver/{library}"));
    assert_eq!(mount["destination"], format!("/{library}"));
}

#[test]
fn another_driver_and_another_spec_are_noticed_at_once() {
    let host = Host::usual();
    assert_eq!(host.gets().2, [""; 0]);
    host.put("cdi/nvidia.yaml", TOOLKIT);
    assert_eq!(host.gets().2.len(), 2);
    let units = [(unit("GPU-a"), 0)];
    let written = |version| {
        host.files.write_counted(&units, version).unwrap();
        std::fs::read_to_string(host.cdi().join("gpu-bridge.dev-gpu.json")).unwrap()
    };
    assert!(!written(Some("590.44.01")).contains("mounts"));
    assert!(written(Some(VERSION)).contains("mounts"));
    // While no driver is known nothing is promised of one.
    assert!(!written(None).contains("mounts"));
}
