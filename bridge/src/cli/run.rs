//! `gpu-bridge run`: the daemon's flags, and the check that finds every mistake in them at once.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use bridge_core::{Face, PodUid, is_object_name};
use clap::Args;

use crate::admin::{SOCKET_PATH_LIMIT_BYTES, own_admin_socket};
use crate::config::{MapName, Source};

/// Driver name and folder of its state below `<kubelet-dir>/plugins`.
const DRIVER: &str = Face::Dra.served_name();

/// The flags of `run` as they were written. Every value is text here, so that all that is wrong is told at once;
/// [`RunArgs::check`] makes [`RunOptions`] of them.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Name of this node in Kubernetes.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// The kubelet's folder, with plugins_registry, plugins and pod-resources in it.
    #[arg(
        long,
        env = "GPU_BRIDGE_KUBELET_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet"
    )]
    kubelet_dir: String,
    /// The kubelet's device plugin folder. It does not move with the kubelet's --root-dir.
    #[arg(
        long,
        env = "GPU_BRIDGE_DEVICE_PLUGIN_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    device_plugin_dir: String,
    /// Where the container runtime looks for CDI files.
    #[arg(
        long,
        env = "GPU_BRIDGE_CDI_DIR",
        value_name = "DIR",
        default_value = "/var/run/cdi"
    )]
    cdi_dir: String,
    /// Where the ledger is kept [default: <kubelet-dir>/plugins/gpu.nvidia.com].
    #[arg(long, env = "GPU_BRIDGE_STATE_DIR", value_name = "DIR")]
    state_dir: Option<String>,
    /// Configuration file; without it the defaults hold.
    #[arg(long, env = "GPU_BRIDGE_CONFIG", value_name = "FILE")]
    config: Option<String>,
    /// ConfigMap with the configuration under the key config.yaml, read from the API server as soon as it changes; in
    /// place of --config.
    #[arg(long, env = "GPU_BRIDGE_CONFIG_MAP", value_name = "NAMESPACE/NAME")]
    config_map: Option<String>,
    /// NVML's library [default: libnvidia-ml.so.1 as the dynamic loader finds it].
    #[arg(long, env = "GPU_BRIDGE_NVML_LIBRARY", value_name = "FILE")]
    nvml_library: Option<String>,
    /// Root folder of the NVIDIA driver's installation on the host.
    #[arg(
        long,
        env = "GPU_BRIDGE_DRIVER_ROOT",
        value_name = "DIR",
        default_value = "/"
    )]
    driver_root: String,
    /// The same folder as this process sees it, where that is another [default: <driver-root>].
    #[arg(long, env = "GPU_BRIDGE_DRIVER_ROOT_CTR_PATH", value_name = "DIR")]
    driver_root_ctr_path: Option<String>,
    /// The folder with dev/nvidia* in it on the host [default: <driver-root>].
    #[arg(long, env = "GPU_BRIDGE_DEV_ROOT", value_name = "DIR")]
    dev_root: Option<String>,
    /// Where sysfs is mounted.
    #[arg(
        long,
        env = "GPU_BRIDGE_SYS_ROOT",
        value_name = "DIR",
        default_value = "/sys"
    )]
    sys_root: String,
    /// Where the host's procfs is mounted; a container needs the host's PIDs to tell whose a process is.
    #[arg(
        long,
        env = "GPU_BRIDGE_PROC_ROOT",
        value_name = "DIR",
        default_value = "/proc"
    )]
    proc_root: String,
    /// How to reach the API server [default: in-cluster].
    #[arg(long, env = "GPU_BRIDGE_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<String>,
    /// Unix socket that `gpu-bridge status` asks [default: <state-dir>/admin.sock].
    #[arg(long, env = "GPU_BRIDGE_ADMIN_SOCKET", value_name = "PATH")]
    admin_socket: Option<String>,
    /// Address of /healthz, /readyz and /status. It answers anybody who can connect: keep it on loopback.
    #[arg(
        long,
        env = "GPU_BRIDGE_HTTP_ADDR",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:9494"
    )]
    http_addr: String,
    /// UID of the pod that this process runs in: keeps the sockets of two of them apart in a rolling update.
    #[arg(long, env = "GPU_BRIDGE_POD_UID", value_name = "UID")]
    pod_uid: Option<String>,
}

/// What the daemon needs to know before it reads anything. Paths are absolute; nothing says that they exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOptions {
    /// Name of this node: a DNS subdomain. Also the name of the DRA pool.
    pub node_name: String,
    /// Holds `plugins_registry`, `plugins` and `pod-resources`.
    pub kubelet_dir: PathBuf,
    /// Holds the kubelet's `kubelet.sock` for device plugins.
    pub device_plugin_dir: PathBuf,
    /// Where CDI files go.
    pub cdi_dir: PathBuf,
    /// Where the ledger, its lock and the DRA socket live.
    pub state_dir: PathBuf,
    /// Where the configuration is; `None`: defaults.
    pub config: Option<Source>,
    /// NVML's library; `None`: what the dynamic loader finds.
    pub nvml_library: Option<PathBuf>,
    /// Root of the driver's installation on the host.
    pub driver_root: PathBuf,
    /// The same folder as this process sees it.
    pub driver_root_ctr_path: PathBuf,
    /// The folder with `dev/nvidia*` in it on the host.
    pub dev_root: PathBuf,
    /// Where sysfs is mounted: `/sys` itself, not its parent.
    pub sys_root: PathBuf,
    /// Where the host's procfs is mounted: `/proc` itself, not its parent.
    pub proc_root: PathBuf,
    /// Kubeconfig; `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Unix socket of `gpu-bridge status`: of the daemon that owns the ledger.
    pub admin_socket: PathBuf,
    /// Address of the HTTP server.
    pub http_addr: SocketAddr,
    /// UID of the pod that this process runs in.
    pub pod_uid: Option<PodUid>,
}

/// One wrong flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The flag with its dashes.
    pub flag: &'static str,
    /// What was written; `None`: nothing.
    pub value: Option<String>,
    /// What is wrong, and what would be right.
    pub why: String,
}

/// All that is wrong with a command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing was started, because of these flags:")?;
        for Mistake { flag, value, why } in &self.0 {
            match value {
                Some(value) => write!(f, "\n  {flag} {value:?}: {why}")?,
                None => write!(f, "\n  {flag}: {why}")?,
            }
        }
        Ok(())
    }
}

impl RunArgs {
    /// Makes options of the flags.
    ///
    /// # Errors
    /// Every mistake, not only the first.
    pub fn check(self) -> Result<RunOptions, Mistakes> {
        let mut found = Found::default();
        let kubelet_dir = found.path("--kubelet-dir", self.kubelet_dir);
        let state_dir = found
            .optional_path("--state-dir", self.state_dir)
            .unwrap_or_else(|| default_state_dir(&kubelet_dir));
        let admin_socket = found
            .optional_path("--admin-socket", self.admin_socket)
            .unwrap_or_else(|| default_admin_socket(&state_dir));
        let pod_uid = found.pod_uid(self.pod_uid);
        let longest = pod_uid
            .as_ref()
            .map(|pod| own_admin_socket(&admin_socket, pod.as_str()));
        found.socket("--admin-socket", longest.as_ref().unwrap_or(&admin_socket));
        let driver_root = found.path("--driver-root", self.driver_root);
        let driver_root_ctr_path = found
            .optional_path("--driver-root-ctr-path", self.driver_root_ctr_path)
            .unwrap_or_else(|| driver_root.clone());
        let dev_root = found
            .optional_path("--dev-root", self.dev_root)
            .unwrap_or_else(|| driver_root.clone());
        let options = RunOptions {
            node_name: found.node_name(self.node_name),
            device_plugin_dir: found.path("--device-plugin-dir", self.device_plugin_dir),
            cdi_dir: found.path("--cdi-dir", self.cdi_dir),
            config: found.source(self.config, self.config_map),
            nvml_library: found.optional_path("--nvml-library", self.nvml_library),
            sys_root: found.path("--sys-root", self.sys_root),
            proc_root: found.path("--proc-root", self.proc_root),
            kubeconfig: found.optional_path("--kubeconfig", self.kubeconfig),
            http_addr: found.address(&self.http_addr),
            pod_uid,
            kubelet_dir,
            state_dir,
            driver_root,
            driver_root_ctr_path,
            dev_root,
            admin_socket,
        };
        found.finish(options)
    }
}

impl RunOptions {
    /// The admin socket that this daemon has for itself, so that it can be asked while another one owns the ledger
    /// and [`admin_socket`](Self::admin_socket); `None` without a pod UID.
    #[must_use]
    pub fn own_admin_socket(&self) -> Option<PathBuf> {
        let pod = self.pod_uid.as_ref()?;
        Some(own_admin_socket(&self.admin_socket, pod.as_str()))
    }
}

/// Where the ledger is kept if nobody says otherwise.
#[must_use]
pub(super) fn default_state_dir(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins").join(DRIVER)
}

/// Where `gpu-bridge status` finds the daemon if nobody says otherwise.
#[must_use]
pub(super) fn default_admin_socket(state_dir: &Path) -> PathBuf {
    state_dir.join("admin.sock")
}

/// Collects mistakes; each check gives back something to go on with, so that the next mistake is found too.
#[derive(Debug, Default)]
struct Found(Vec<Mistake>);

impl Found {
    fn wrong(&mut self, flag: &'static str, value: Option<String>, why: impl Into<String>) {
        self.0.push(Mistake {
            flag,
            value,
            why: why.into(),
        });
    }

    fn finish(self, options: RunOptions) -> Result<RunOptions, Mistakes> {
        if self.0.is_empty() {
            Ok(options)
        } else {
            Err(Mistakes(self.0))
        }
    }

    fn path(&mut self, flag: &'static str, value: String) -> PathBuf {
        let path = PathBuf::from(&value);
        if !path.is_absolute() {
            self.wrong(
                flag,
                Some(value),
                "must be an absolute path, since a daemon has no folder of its own to start from",
            );
        }
        path
    }

    fn optional_path(&mut self, flag: &'static str, value: Option<String>) -> Option<PathBuf> {
        value.map(|value| self.path(flag, value))
    }

    fn source(&mut self, file: Option<String>, map: Option<String>) -> Option<Source> {
        const FLAG: &str = "--config-map";
        let file = self.optional_path("--config", file);
        let Some(text) = map else {
            return file.map(Source::File);
        };
        if file.is_some() {
            let why = "can't be given beside --config: the configuration has one source at a time";
            self.wrong(FLAG, Some(text.clone()), why);
        }
        let map = MapName::parse(&text);
        if map.is_none() {
            let why =
                "is no ConfigMap: write its namespace and its name, as in gpu-bridge/gpu-bridge";
            self.wrong(FLAG, Some(text), why);
        }
        map.map(Source::ConfigMap)
    }

    fn socket(&mut self, flag: &'static str, path: &Path) {
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_LIMIT_BYTES {
            self.wrong(
                flag,
                Some(path.display().to_string()),
                format!(
                    "is {length} bytes long, and a unix socket's path may have {SOCKET_PATH_LIMIT_BYTES}; \
                     give a shorter --admin-socket or --state-dir"
                ),
            );
        }
    }

    fn node_name(&mut self, value: Option<String>) -> String {
        const FLAG: &str = "--node-name";
        let Some(name) = value else {
            self.wrong(
                FLAG,
                None,
                "is missing; give it, or set NODE_NAME from spec.nodeName in the pod",
            );
            return String::new();
        };
        if !is_object_name(&name) {
            self.wrong(
                FLAG,
                Some(name.clone()),
                "is no node name: lower-case letters, digits, '-' and '.', at most 253 of them, as `kubectl get nodes` shows it",
            );
        }
        name
    }

    fn address(&mut self, value: &str) -> SocketAddr {
        value.parse().unwrap_or_else(|_| {
            self.wrong(
                "--http-addr",
                Some(value.to_owned()),
                "must be an IP address and a port, as in 127.0.0.1:9494 or [::1]:9494",
            );
            SocketAddr::from(([127, 0, 0, 1], 0))
        })
    }

    fn pod_uid(&mut self, value: Option<String>) -> Option<PodUid> {
        match PodUid::new(value?) {
            Ok(uid) => Some(uid),
            Err(error) => {
                self.wrong("--pod-uid", None, error.to_string());
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use expect_test::{Expect, expect};

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(flags: &[&str]) -> RunArgs {
        let line = ["gpu-bridge", "run"].iter().chain(flags);
        let cli = Cli::try_parse_from(line).unwrap();
        let Command::Run(args) = cli.command else {
            panic!("'run' is read as another command")
        };
        *args
    }

    fn check(flags: &[&str], expected: Expect) {
        let text = match parse(flags).check() {
            Ok(options) => format!("{options:#?}"),
            Err(mistakes) => mistakes.to_string(),
        };
        expected.assert_eq(&text);
    }

    #[test]
    fn the_defaults_are_those_of_a_plain_node() {
        check(
            &["--node-name", "gpu-1"],
            expect![[r#"
                RunOptions {
                    node_name: "gpu-1",
                    kubelet_dir: "/var/lib/kubelet",
                    device_plugin_dir: "/var/lib/kubelet/device-plugins",
                    cdi_dir: "/var/run/cdi",
                    state_dir: "/var/lib/kubelet/plugins/gpu.nvidia.com",
                    config: None,
                    nvml_library: None,
                    driver_root: "/",
                    driver_root_ctr_path: "/",
                    dev_root: "/",
                    sys_root: "/sys",
                    proc_root: "/proc",
                    kubeconfig: None,
                    admin_socket: "/var/lib/kubelet/plugins/gpu.nvidia.com/admin.sock",
                    http_addr: 127.0.0.1:9494,
                    pod_uid: None,
                }"#]],
        );
    }

    #[test]
    fn what_is_not_given_follows_what_is() {
        let options = parse(&[
            "--node-name=n",
            "--kubelet-dir=/k",
            "--driver-root=/run/nvidia/driver",
        ])
        .check()
        .unwrap();
        assert_eq!(
            options.state_dir,
            Path::new("/k/plugins").join("gpu.nvidia.com")
        );
        assert_eq!(options.admin_socket, options.state_dir.join("admin.sock"));
        assert_eq!(options.dev_root, Path::new("/run/nvidia/driver"));
    }

    #[test]
    fn all_mistakes_are_told_at_once() {
        let long = format!("--admin-socket=/{}", "s".repeat(107));
        check(
            &[
                "--node-name=Node_1",
                "--cdi-dir=cdi",
                "--config=",
                &long,
                "--http-addr=localhost",
                "--pod-uid=../x",
            ],
            expect![[r#"
                nothing was started, because of these flags:
                  --pod-uid: "../x" is not a valid pod UID: only letters, digits, '-', '_' and '.' are allowed
                  --admin-socket "/sssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssss": is 108 bytes long, and a unix socket's path may have 107; give a shorter --admin-socket or --state-dir
                  --node-name "Node_1": is no node name: lower-case letters, digits, '-' and '.', at most 253 of them, as `kubectl get nodes` shows it
                  --cdi-dir "cdi": must be an absolute path, since a daemon has no folder of its own to start from
                  --config "": must be an absolute path, since a daemon has no folder of its own to start from
                  --http-addr "localhost": must be an IP address and a port, as in 127.0.0.1:9494 or [::1]:9494"#]],
        );
    }

    #[test]
    fn the_configuration_has_one_source() {
        let source = |flag: &str| parse(&["--node-name=n", flag]).check().unwrap().config;
        assert_eq!(
            source("--config=/c/config.yaml"),
            Some(Source::File("/c/config.yaml".into()))
        );
        let map = MapName::parse("gpu-bridge/nodes").map(Source::ConfigMap);
        assert_eq!(source("--config-map=gpu-bridge/nodes"), map);
        check(
            &["--node-name=n", "--config=/c", "--config-map=nodes"],
            expect![[r#"
                nothing was started, because of these flags:
                  --config-map "nodes": can't be given beside --config: the configuration has one source at a time
                  --config-map "nodes": is no ConfigMap: write its namespace and its name, as in gpu-bridge/gpu-bridge"#]],
        );
    }

    #[test]
    fn a_missing_node_name_says_where_it_comes_from() {
        check(
            &[],
            expect![[r#"
            nothing was started, because of these flags:
              --node-name: is missing; give it, or set NODE_NAME from spec.nodeName in the pod"#]],
        );
    }
}
