//! What the container runtime recorded: who had which GPU from when to when.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

/// One line of the record, as far as the tests read it.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    pub mono_ns: u64,
    pub event: String,
    pub pod: Pod,
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub container: String,
    #[serde(default)]
    pub gpus: Vec<String>,
    #[serde(default)]
    pub config: Config,
    #[serde(default)]
    pub resolved: Resolved,
}

/// The pod of a line.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// The kubelet's request for a container.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Config {
    #[serde(default)]
    pub command: Vec<String>,
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    #[serde(default)]
    pub mounts: Vec<Mount>,
    #[serde(default)]
    pub cdi_devices: Vec<String>,
}

/// A folder or file of the node in a container.
#[derive(Debug, Clone, Deserialize)]
pub struct Mount {
    pub container_path: String,
    pub host_path: String,
    pub read_only: bool,
}

/// What its CDI devices came to.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Resolved {
    #[serde(default)]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// A device node in a container.
#[derive(Debug, Clone, Deserialize)]
pub struct DeviceNode {
    pub path: String,
}

/// The present time by the clock of the record.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).expect("the clock is positive");
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).expect("nanoseconds are positive")
}

/// Who holds a GPU: containers of one counted pod, or all users of one claim, are one holder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A counted pod, by UID.
    Counted(String),
    /// A claim, by UID.
    Claim(String),
}

/// A GPU in use by a container.
#[derive(Debug, Clone)]
pub struct Use {
    pub gpu: String,
    pub holder: Holder,
    pub pod: Pod,
    pub from_ns: u64,
    /// `None`: it still runs.
    pub to_ns: Option<u64>,
}

/// Two holders on one GPU at once.
#[derive(Debug, Clone)]
pub struct Double {
    pub first: Use,
    pub second: Use,
    pub overlap: Duration,
}

/// The whole record.
#[derive(Debug, Default)]
pub struct Record {
    pub lines: Vec<Line>,
}

impl Record {
    /// Reads the record; a last line that is not complete yet is left out.
    pub fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = complete
            .lines()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|e| panic!("record line {line}: {e}"))
            })
            .collect();
        Self { lines }
    }

    /// Every use of a GPU by a container.
    pub fn uses(&self) -> Vec<Use> {
        let mut holders: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut uses: Vec<(String, Use)> = Vec::new();
        for line in &self.lines {
            match line.event.as_str() {
                "created" => {
                    let devices = line.config.cdi_devices.iter().map(String::as_str).collect();
                    holders.insert(&line.container, devices);
                }
                "started" => {
                    let devices = holders
                        .get(line.container.as_str())
                        .cloned()
                        .unwrap_or_default();
                    for gpu in &line.gpus {
                        let used = Use {
                            gpu: gpu.clone(),
                            holder: holder_of(&devices, &line.pod),
                            pod: line.pod.clone(),
                            from_ns: line.mono_ns,
                            to_ns: None,
                        };
                        uses.push((line.container.clone(), used));
                    }
                }
                "process_gone" => {
                    for (container, used) in &mut uses {
                        if *container == line.container {
                            used.to_ns = Some(line.mono_ns);
                        }
                    }
                }
                _ => {}
            }
        }
        uses.into_iter().map(|(_, used)| used).collect()
    }

    /// Every pair of different holders that used one GPU at once.
    pub fn doubles(&self) -> Vec<Double> {
        let mut uses = self.uses();
        uses.sort_by_key(|used| used.from_ns);
        let mut doubles = Vec::new();
        for (at, second) in uses.iter().enumerate() {
            for first in &uses[..at] {
                let end = first
                    .to_ns
                    .unwrap_or(u64::MAX)
                    .min(second.to_ns.unwrap_or(u64::MAX));
                if first.gpu == second.gpu && first.holder != second.holder && end > second.from_ns
                {
                    doubles.push(Double {
                        first: first.clone(),
                        second: second.clone(),
                        overlap: Duration::from_nanos(end - second.from_ns),
                    });
                }
            }
        }
        doubles
    }

    /// The GPUs that containers of a pod have been started with, sorted, each once.
    pub fn gpus_of(&self, pod: &str) -> Vec<String> {
        let mut gpus: Vec<String> = self
            .lines
            .iter()
            .filter(|line| line.event == "started" && line.pod.name == pod)
            .flat_map(|line| line.gpus.clone())
            .collect();
        gpus.sort();
        gpus.dedup();
        gpus
    }
}

/// A container has all its GPUs from one source in these tests. Drivers for claims name their CDI devices
/// `VENDOR/claim=UID-DEVICE`, the bridge as well as the stand-in.
fn holder_of(devices: &[&str], pod: &Pod) -> Holder {
    /// UID length of Kubernetes objects: what is behind it is the device.
    const UID_LENGTH: usize = 36;
    devices
        .iter()
        .find_map(|device| device.split_once("/claim="))
        .map_or_else(
            || Holder::Counted(pod.uid.clone()),
            |(_, claim)| Holder::Claim(claim.chars().take(UID_LENGTH).collect()),
        )
}

impl Double {
    /// Both holders are counted pods.
    pub fn is_counted_to_counted(&self) -> bool {
        matches!(
            (&self.first.holder, &self.second.holder),
            (Holder::Counted(_), Holder::Counted(_))
        )
    }
}
