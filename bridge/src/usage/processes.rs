//! Whose a process is: from its cgroup to the UID of its pod.
//!
//! Source of the paths: kubernetes v1.37.2, `pkg/kubelet/cm/cgroup_manager_linux.go` and
//! `pod_container_manager_linux.go`.

use std::fs;
use std::path::Path;

use bridge_core::PodUid;

/// In the path of every pod's cgroup, whatever the driver and the root (`--cgroup-root`, kind's `kubelet.slice`).
const PODS_CGROUP: &str = "kubepods";
/// Where a path begins that leads out of the daemon's own cgroup namespace.
const ABOVE_NAMESPACE: &str = "/../";
/// Before the UID in the name of a pod's cgroup.
const POD_PREFIX: &str = "pod";
/// Before the pod's own part in the name of a systemd slice, which repeats the names of its parents.
const SLICE_POD_PREFIX: &str = "-pod";
/// What the name of a systemd slice ends in.
const SLICE_SUFFIX: &str = ".slice";

/// The UID of the pod that a process of the host belongs to, by `<proc-root>/<pid>/cgroup` (v1 or v2, cgroup driver
/// `cgroupfs` or `systemd`).
///
/// `None`: it belongs to no pod, or has ended. For a static pod it is the UID that the kubelet gave it.
#[must_use]
pub fn pod_of_process(proc_root: &Path, pid: u32) -> Option<PodUid> {
    let text = fs::read_to_string(proc_root.join(pid.to_string()).join("cgroup")).ok()?;
    text.lines().find_map(pod_of_line)
}

/// The name of a process of the host, by `<proc-root>/<pid>/comm`: at most 15 bytes. `None`: it has ended.
#[must_use]
pub fn process_name(proc_root: &Path, pid: u32) -> Option<String> {
    let text = fs::read_to_string(proc_root.join(pid.to_string()).join("comm")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// A line is `<hierarchy>:<controllers>:<path>`; controllers are empty with v2.
fn pod_of_line(line: &str) -> Option<PodUid> {
    let path = line.splitn(3, ':').nth(2)?;
    if path.starts_with(ABOVE_NAMESPACE) {
        // What is above the namespace is not shown, so the cgroup of all pods may be missing from the path.
        return path
            .split('/')
            .filter_map(pod_of_name)
            .find(looks_like_a_uid);
    }
    let mut below_pods = false;
    // The first match is the outermost: a pod that runs a kubelet of its own is one holder to us.
    path.split('/').find_map(|name| {
        below_pods |= name.contains(PODS_CGROUP);
        below_pods.then(|| pod_of_name(name)).flatten()
    })
}

fn pod_of_name(name: &str) -> Option<PodUid> {
    let uid = match name.strip_suffix(SLICE_SUFFIX) {
        // systemd takes '-' for a level, so the kubelet writes '_' in its place.
        Some(slice) => slice.rsplit_once(SLICE_POD_PREFIX)?.1.replace('_', "-"),
        None => name.strip_prefix(POD_PREFIX)?.to_owned(),
    };
    PodUid::new(uid).ok()
}

/// The API server makes UUIDs, and the kubelet 32 hexadecimal digits for a pod from a file.
fn looks_like_a_uid(uid: &PodUid) -> bool {
    const UUID: [usize; 5] = [8, 4, 4, 4, 12];
    const HASH: [usize; 1] = [32];
    let lengths: Vec<usize> = uid.as_str().split('-').map(str::len).collect();
    let digits = uid
        .as_str()
        .chars()
        .all(|c| c == '-' || c.is_ascii_hexdigit());
    digits && (lengths == UUID || lengths == HASH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "7c0f9a2e-3b1d-4a55-8f6e-0123456789ab";

    fn pod_of(text: &str) -> Option<String> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("42");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("cgroup"), text).unwrap();
        pod_of_process(root.path(), 42).map(|uid| uid.as_str().to_owned())
    }

    #[test]
    fn the_pod_is_found_with_every_cgroup_version_and_driver() {
        let systemd = UID.replace('-', "_");
        for text in [
            format!("0::/kubepods/burstable/pod{UID}/0a1b\n"),
            format!("0::/kubepods/pod{UID}/0a1b\n"),
            format!("0::/../../kubepods/besteffort/pod{UID}/0a1b\n"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-containerd-0a1b.scope\n"
            ),
            format!("0::/kubepods.slice/kubepods-pod{systemd}.slice/crio-0a1b.scope/container\n"),
            format!(
                "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{systemd}.slice/cri-containerd-0a1b.scope\n"
            ),
            format!(
                "12:misc:/\n11:devices:/kubepods/burstable/pod{UID}/0a1b\n1:name=systemd:/init.scope\n"
            ),
        ] {
            assert_eq!(pod_of(&text).as_deref(), Some(UID), "{text}");
        }
    }

    #[test]
    fn the_pod_is_found_from_within_a_cgroup_namespace() {
        let systemd = UID.replace('-', "_");
        for text in [
            format!("0::/../../pod{UID}/0a1b\n"),
            format!("0::/../../../besteffort/pod{UID}/0a1b\n"),
            format!("0::/../../kubepods-burstable-pod{systemd}.slice/cri-containerd-0a1b.scope\n"),
        ] {
            assert_eq!(pod_of(&text).as_deref(), Some(UID), "{text}");
        }
        for text in ["0::/../../podman/x\n", "0::/../system.slice/x.service\n"] {
            assert_eq!(pod_of(text), None, "{text}");
        }
    }

    #[test]
    fn a_static_pod_has_the_uid_that_the_kubelet_gave_it() {
        let text = "0::/kubepods/pod0123456789abcdef0123456789abcdef/0a1b\n";
        assert_eq!(
            pod_of(text).as_deref(),
            Some("0123456789abcdef0123456789abcdef")
        );
    }

    #[test]
    fn of_nested_kubelets_the_nodes_own_pod_is_named() {
        let text = format!("0::/kubepods/pod{UID}/0a1b/kubepods/burstable/podinner/2c\n");
        assert_eq!(pod_of(&text).as_deref(), Some(UID));
    }

    #[test]
    fn what_is_no_pod_has_none() {
        for text in [
            "",
            "0::/\n",
            "0::/system.slice/nvidia-persistenced.service\n",
            "0::/kubepods\n",
            "0::/kubepods.slice/kubepods-burstable.slice\n",
            "0::/machine.slice/libpod-0a1b.scope\n",
            "0::/user/podman/x\n",
            "0::/kubepods/burstable/pod/x\n",
            "nonsense\n",
        ] {
            assert_eq!(pod_of(text), None, "{text}");
        }
        assert_eq!(pod_of_process(Path::new("/nonexistent"), 1), None);
    }

    #[test]
    fn a_process_has_its_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("7")).unwrap();
        fs::write(root.path().join("7/comm"), "python3\n").unwrap();
        assert_eq!(process_name(root.path(), 7).as_deref(), Some("python3"));
        assert_eq!(process_name(root.path(), 8), None);
    }
}
