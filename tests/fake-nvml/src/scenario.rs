//! The scenario: which driver and which GPUs a node has, in YAML.
//!
//! The GPUs are read when NVML is initialised, since NVML does not look again; `lost` and `faults` are live.
//! Reading is strict: an unknown key or a wrong value is an error that names the key and, where the YAML
//! reader knows it, the line.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use nvml_wrapper_sys::bindings::NVML_NVLINK_MAX_LINKS;
use serde::{Deserialize, Serialize};

use crate::model::{self, Model};

/// Most GPUs of one node: handles have one byte for the index, and no machine comes near.
pub const MAX_GPUS: usize = 64;

/// A fake node: driver, GPUs and what goes wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Scenario {
    /// The driver's versions.
    #[serde(default)]
    pub driver: Driver,
    /// Mixed into the UUIDs, so that two nodes with the same GPUs have different ones.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub seed: String,
    /// The GPUs in the order of their NVML index.
    pub gpus: Vec<GpuGroup>,
    /// How the GPUs are connected, a row for each; without it by what each group says, and by NVLinks to switches where
    /// the model has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology: Vec<Row>,
    /// What NVML calls do wrong, by the name of the call.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub faults: BTreeMap<CallName, Fault>,
}

/// The connections of one GPU with each, as `nvidia-smi topo -m` prints them: `X PIX NV2/SYS`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Row(pub Vec<Cell>);

/// One connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// `nvmlGpuTopologyLevel_t`.
    pub level: u32,
    /// NVLinks from one to the other.
    pub links: u32,
}

/// The levels by the words of `nvidia-smi topo -m`, `X` for a GPU with itself.
const LEVELS: [(&str, u32); 6] = [
    ("X", 0),
    ("PIX", 10),
    ("PXB", 20),
    ("PHB", 30),
    ("NODE", 40),
    ("SYS", 50),
];

impl TryFrom<String> for Row {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let cell = |word: &str| {
            let (links, level) = match word.split_once('/') {
                None => (Some(0), word),
                Some((links, level)) => {
                    let number = links.strip_prefix("NV").and_then(|it| it.parse().ok());
                    (number.filter(|it| *it > 0), level)
                }
            };
            let known = LEVELS.iter().find(|(name, _)| *name == level);
            links
                .zip(known)
                .map(|(links, (_, level))| Cell {
                    level: *level,
                    links,
                })
                .ok_or_else(|| {
                    format!(
                        "topology: \"{word}\" is no connection: write X, PIX, PXB, PHB, NODE or SYS, and NVLinks as in NV2/SYS"
                    )
                })
        };
        text.split_whitespace()
            .map(cell)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl From<Row> for String {
    fn from(row: Row) -> Self {
        let word = |cell: &Cell| {
            let level = LEVELS.iter().find(|(_, level)| *level == cell.level);
            let level = level.map_or("X", |(name, _)| name);
            match cell.links {
                0 => level.to_owned(),
                links => format!("NV{links}/{level}"),
            }
        };
        row.0.iter().map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Versions of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Driver {
    /// `nvmlSystemGetDriverVersion`, for example `580.95.05`.
    pub version: String,
    /// The CUDA version as `major.minor`.
    pub cuda: CudaVersion,
    /// Functions that its library does not have: it is older than they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<CallName>,
}

impl Default for Driver {
    fn default() -> Self {
        Self {
            version: "580.95.05".to_owned(),
            cuda: CudaVersion {
                major: 13,
                minor: 0,
            },
            without: Vec::new(),
        }
    }
}

/// A CUDA version, written `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CudaVersion {
    /// 13 of `13.0`.
    pub major: u16,
    /// 0 of `13.0`.
    pub minor: u16,
}

impl TryFrom<String> for CudaVersion {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.split_once('.')
            .and_then(|(major, minor)| {
                Some(Self {
                    major: major.parse().ok()?,
                    minor: minor.parse().ok().filter(|minor| *minor < 100)?,
                })
            })
            .ok_or_else(|| {
                format!("cuda: \"{text}\" is not a version: write major.minor, as in \"13.0\"")
            })
    }
}

impl From<CudaVersion> for String {
    fn from(version: CudaVersion) -> Self {
        format!("{}.{}", version.major, version.minor)
    }
}

/// The name of an NVML function.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CallName(String);

/// Every function that the library exports.
pub(crate) const SYMBOLS: &str = include_str!("../symbols.txt");

impl TryFrom<String> for CallName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if SYMBOLS.lines().any(|symbol| symbol == name) {
            Ok(Self(name))
        } else {
            Err(format!("there is no NVML call \"{name}\""))
        }
    }
}

impl From<CallName> for String {
    fn from(name: CallName) -> Self {
        name.0
    }
}

impl AsRef<str> for CallName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for CallName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// What an NVML call does wrong.
///
/// It acts on the calls after the first `skip`, `times` of them; the calls are counted over all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Fault {
    /// The `nvmlReturn_t` to answer; without it the call goes on as usual after the delay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<u32>,
    /// How many calls go well before.
    pub skip: u32,
    /// How many calls are hit; without it all that follow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<u32>,
    /// How long the call takes; it ends early when the fault is changed.
    pub delay_ms: u64,
}

impl Fault {
    /// A call that answers `code` (an `nvmlReturn_t`).
    #[must_use]
    pub fn error(code: u32) -> Self {
        Self {
            error: Some(code),
            ..Self::default()
        }
    }

    /// A call that takes that long and then goes on as usual.
    #[must_use]
    pub fn delay(delay: std::time::Duration) -> Self {
        Self {
            delay_ms: u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
            ..Self::default()
        }
    }

    /// Only so many calls are hit.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.times = Some(times);
        self
    }

    /// So many calls go well before.
    #[must_use]
    pub fn skip(mut self, skip: u32) -> Self {
        self.skip = skip;
        self
    }
}

/// One or several GPUs of a model, and what is special about them.
///
/// The keys that identify one GPU (`uuid`, `minor`, `pciBusId`) are for groups of one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GpuGroup {
    /// A key of [`crate::model::MODELS`].
    pub model: ModelKey,
    /// How many GPUs.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub count: u32,
    /// Instead of one made from model and index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The number of the device node; default: the index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// As in sysfs, for example `0000:65:00.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    /// For example `pci0000:64`; default: the bus before the GPU's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_root: Option<String>,
    /// The NUMA node, -1 for none; default: the lower half of the GPUs on 0, the upper on 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<i32>,
    /// Instead of the model's product name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Instead of the model's `nvmlBrandType_t`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brand: Option<u32>,
    /// Instead of the model's `nvmlDeviceArchitecture_t`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<u32>,
    /// Whether MIG is on; there are no instances. For models that know MIG.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mig: bool,
    /// Whether the GPU has fallen off the bus. Live.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lost: bool,
}

/// The key of a GPU model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelKey(&'static Model);

impl Default for ModelKey {
    fn default() -> Self {
        Self(&model::MODELS[0])
    }
}

impl TryFrom<String> for ModelKey {
    type Error = String;

    fn try_from(key: String) -> Result<Self, String> {
        model::find(&key).map(Self).ok_or_else(|| {
            let known: Vec<_> = model::MODELS.iter().map(|model| model.key).collect();
            format!(
                "model: there is no GPU model \"{key}\"; known are {}",
                known.join(", ")
            )
        })
    }
}

impl From<ModelKey> for String {
    fn from(key: ModelKey) -> Self {
        key.0.key.to_owned()
    }
}

fn one() -> u32 {
    1
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes fields by reference"
)]
fn is_one(count: &u32) -> bool {
    *count == 1
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes fields by reference"
)]
fn is_false(flag: &bool) -> bool {
    !*flag
}

/// One GPU of a scenario, with everything filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The NVML index.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: u32,
    /// `GPU-…`.
    pub uuid: String,
    /// Lower case, as in sysfs: `0000:65:00.0`.
    pub pci_bus_id: String,
    /// `pci0000:64`.
    pub pcie_root: String,
    /// -1 for none.
    pub numa_node: i32,
    /// The product name.
    pub name: String,
    /// `nvmlBrandType_t`.
    pub brand: u32,
    /// `nvmlDeviceArchitecture_t`.
    pub architecture: u32,
    /// Whether MIG is on.
    pub mig: bool,
    /// Whether the scenario says that it has fallen off the bus.
    pub lost: bool,
    /// Facts about the model.
    pub model: &'static Model,
}

impl Scenario {
    /// `count` GPUs of type H100, nothing wrong with them.
    #[must_use]
    pub fn h100(count: u32) -> Self {
        Self {
            driver: Driver::default(),
            seed: String::new(),
            gpus: vec![GpuGroup {
                count,
                ..GpuGroup::default()
            }],
            topology: Vec::new(),
            faults: BTreeMap::new(),
        }
    }

    /// The same node with one more GPU of type H100 at the end.
    #[must_use]
    pub fn and_one_more(mut self) -> Self {
        self.gpus.push(GpuGroup {
            count: 1,
            ..GpuGroup::default()
        });
        self
    }

    /// Reads and checks a scenario file.
    ///
    /// # Errors
    ///
    /// [`Invalid`], with the file, and the line and key that are wrong.
    pub fn load(path: &Path) -> Result<Self, Invalid> {
        let text = std::fs::read_to_string(path).map_err(|error| Invalid {
            file: path.to_owned(),
            what: error.to_string(),
        })?;
        Self::parse(path, &text)
    }

    /// Checks the text of a scenario; `path` is only named in the error.
    ///
    /// # Errors
    ///
    /// [`Invalid`], with the file, and the line and key that are wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, Invalid> {
        let invalid = |what: String| Invalid {
            file: path.to_owned(),
            what,
        };
        let scenario: Self =
            serde_yaml::from_str(text).map_err(|error| invalid(error.to_string()))?;
        scenario.check(text).map_err(invalid)?;
        Ok(scenario)
    }

    /// The scenario as YAML that [`Scenario::parse`] reads back.
    ///
    /// # Errors
    ///
    /// [`Invalid`], should YAML ever have no way to write a scenario down.
    pub fn to_yaml(&self) -> Result<String, Invalid> {
        serde_yaml::to_string(self).map_err(|error| Invalid {
            file: PathBuf::new(),
            what: error.to_string(),
        })
    }

    /// The GPUs in the order of their index, with everything filled in.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        let total: u32 = self.gpus.iter().map(|group| group.count).sum();
        self.gpus
            .iter()
            .flat_map(|group| std::iter::repeat_n(group, group.count as usize))
            .zip(0..)
            .map(|(group, index)| self.gpu(group, index, total))
            .collect()
    }

    fn gpu(&self, group: &GpuGroup, index: u32, total: u32) -> Gpu {
        /// GPUs of one PCI domain, so that the bus number stays within a byte.
        const GPUS_PER_DOMAIN: u32 = 16;
        let model = group.model.0;
        let domain = index / GPUS_PER_DOMAIN;
        let bus = 0x10 + 0x0c * (index % GPUS_PER_DOMAIN);
        Gpu {
            index,
            minor: group.minor.unwrap_or(index),
            uuid: group
                .uuid
                .clone()
                .unwrap_or_else(|| uuid(&format!("{}/{}/{index}", self.seed, model.key))),
            pci_bus_id: group
                .pci_bus_id
                .clone()
                .unwrap_or_else(|| format!("{domain:04x}:{bus:02x}:00.0")),
            pcie_root: group
                .pcie_root
                .clone()
                .unwrap_or_else(|| format!("pci{domain:04x}:{:02x}", bus - 1)),
            numa_node: group
                .numa_node
                .unwrap_or_else(|| i32::from(index >= total.div_ceil(2))),
            name: group
                .name
                .clone()
                .unwrap_or_else(|| model.product_name.to_owned()),
            brand: group.brand.unwrap_or(model.brand),
            architecture: group.architecture.unwrap_or(model.architecture),
            mig: group.mig,
            lost: group.lost,
            model,
        }
    }

    /// What the types cannot say: limits, and that identities are unique.
    fn check(&self, text: &str) -> Result<(), String> {
        for (group, place) in self.gpus.iter().zip(0..) {
            let single = [
                ("uuid", group.uuid.is_some()),
                ("minor", group.minor.is_some()),
                ("pciBusId", group.pci_bus_id.is_some()),
            ];
            if let Some((key, _)) = single.iter().find(|(_, set)| *set && group.count != 1) {
                return Err(format!(
                    "gpus[{place}].{key}: it identifies one GPU, but count is {}",
                    group.count
                ));
            }
            if group.mig && !group.model.0.mig_capable {
                return Err(format!(
                    "gpus[{place}].mig: the model {} cannot be split",
                    group.model.0.key
                ));
            }
            if let Some(id) = &group.pci_bus_id
                && parse_pci(id).is_none()
            {
                return Err(format!(
                    "gpus[{place}].pciBusId: \"{id}\" is not a PCI address such as 0000:65:00.0{}",
                    line_of(text, id)
                ));
            }
        }
        let total: usize = self.gpus.iter().map(|group| group.count as usize).sum();
        if total > MAX_GPUS {
            return Err(format!(
                "gpus: {total} GPUs; at most {MAX_GPUS} are possible"
            ));
        }
        self.check_topology(total)?;
        let mut seen = BTreeSet::new();
        for gpu in self.gpus() {
            // A minor number is too short to be looked for in the text.
            for (key, value, line) in [
                ("uuid", gpu.uuid.clone(), line_of(text, &gpu.uuid)),
                (
                    "pciBusId",
                    gpu.pci_bus_id.clone(),
                    line_of(text, &gpu.pci_bus_id),
                ),
                ("minor", gpu.minor.to_string(), String::new()),
            ] {
                if !seen.insert((key, value.clone())) {
                    return Err(format!("gpus: two GPUs have the {key} \"{value}\"{line}"));
                }
            }
        }
        Ok(())
    }

    /// A row for each GPU, or none; the same from both sides.
    fn check_topology(&self, gpus: usize) -> Result<(), String> {
        let rows = &self.topology;
        if rows.is_empty() {
            return Ok(());
        }
        let is_square = rows.len() == gpus && rows.iter().all(|row| row.0.len() == gpus);
        if !is_square {
            return Err(format!(
                "topology: {gpus} rows of {gpus} connections are needed, as there are {gpus} GPUs"
            ));
        }
        for (one, row) in rows.iter().enumerate() {
            for (other, cell) in row.0.iter().enumerate() {
                if *cell != rows[other].0[one] {
                    return Err(format!(
                        "topology: GPUs {one} and {other} are connected in one way here and in another there"
                    ));
                }
            }
            let links: u32 = row.0.iter().map(|cell| cell.links).sum();
            if links > NVML_NVLINK_MAX_LINKS {
                return Err(format!(
                    "topology: GPU {one} has {links} NVLinks; at most {NVML_NVLINK_MAX_LINKS} are possible"
                ));
            }
        }
        Ok(())
    }
}

/// Where a value stands last, for messages about values that are wrong only together with others.
fn line_of(text: &str, value: &str) -> String {
    text.lines()
        .zip(1..)
        .filter(|(line, _)| line.contains(value))
        .last()
        .map_or_else(String::new, |(_, number)| format!(" at line {number}"))
}

/// Domain, bus and device of a PCI address.
pub(crate) fn parse_pci(id: &str) -> Option<(u32, u32, u32)> {
    let (rest, function) = id.split_once('.')?;
    let mut parts = rest.split(':').map(|part| u32::from_str_radix(part, 16));
    let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
    (parts.next().is_none() && function.parse::<u8>().is_ok_and(|function| function < 8))
        .then_some((domain.ok()?, bus.ok()?, device.ok()?))
        .filter(|(_, bus, device)| *bus < 256 && *device < 32)
}

/// A UUID that depends on nothing but the seed.
fn uuid(seed: &str) -> String {
    let half = |salt: u8| {
        // FNV-1a, and the last steps of splitmix64 so that similar seeds do not look alike.
        let hash = seed
            .bytes()
            .chain([salt])
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    };
    let hex = format!("{:016x}{:016x}", half(1), half(2));
    format!(
        "GPU-{}-{}-5{}-8{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..]
    )
}

/// Why a scenario cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// The scenario file.
    pub file: PathBuf,
    /// The key and what is wrong with it, with the line where it is known.
    pub what: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}. Correct the scenario and initialise NVML again",
            self.file.display(),
            self.what
        )
    }
}

impl std::error::Error for Invalid {}
