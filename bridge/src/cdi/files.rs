//! The spec files of this daemon in the CDI folder, and the device nodes that they name.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bridge_core::{ClaimUid, DeviceName, HostPath, Preparation, UnitId};
use rustix::fs::OFlags;

use super::driver::{DriverRoot, Finder};
use super::spec::{self, Node, Spec};
use super::{CLAIM_CLASS, COUNTED_CLASS, VENDOR, kind};
use crate::store::{ReplaceError, UNFINISHED, no_follow, replace};

/// Nodes of the driver without which nothing computes: its control node, and the one for memory that CPU and GPU share,
/// which CUDA opens first of all and which is there once the module `nvidia-uvm` is loaded.
const MANDATORY_NODES: [&str; 2] = ["/dev/nvidiactl", "/dev/nvidia-uvm"];
/// Nodes that a container gets as well where the host has them: `nvidia-modeset` comes with a display driver.
const OPTIONAL_NODES: [&str; 2] = ["/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];
/// Runtimes with other users read them, and there is nothing to hide.
const MODE: u32 = 0o644;
/// A spec of 256 devices has 40 kB. What is larger is not ours, and is not read to the end to be compared.
const FILE_LIMIT: u64 = 4 * 1024 * 1024;

/// Why a spec file is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A node that the container could not do without is not there, or is something else.
    #[error(
        "{unit} can't be used by a container: {} {why}; check that the NVIDIA driver is loaded and that --dev-root is \
         the folder above its /dev", path.display()
    )]
    Node {
        /// The unit.
        unit: UnitId,
        /// The node on the host.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A claim has a unit that the ledger does not know.
    #[error("claim {claim} was given {unit}, and nothing says which device node that is")]
    NoMinor {
        /// The claim.
        claim: ClaimUid,
        /// The unit.
        unit: UnitId,
    },
    /// JSON can't carry the path.
    #[error("{} can't be written into a CDI spec, because it is not UTF-8; choose another --dev-root", path.display())]
    NotUtf8 {
        /// The path.
        path: PathBuf,
    },
    /// The spec has no JSON form.
    #[error("the CDI spec {} can't be put into words", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// The file or its folder can't be written or read.
    #[error("{doing} {} failed; check --cdi-dir, its mount, and the space there", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Device minors by claim and device name.
pub type ClaimMinors = BTreeMap<ClaimUid, BTreeMap<DeviceName, u32>>;

/// Where the driver's things are on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// The folder above `/dev` of the host or of the driver's container: flag `--dev-root`.
    pub dev_root: PathBuf,
    /// Where the driver is installed.
    pub driver: DriverRoot,
}

impl Roots {
    /// Device nodes and driver below one folder, which this process sees where the host has it.
    #[must_use]
    pub fn in_one(folder: &Path) -> Self {
        Self {
            dev_root: folder.to_owned(),
            driver: DriverRoot {
                on_host: folder.to_owned(),
                here: folder.to_owned(),
            },
        }
    }

    /// Where the host has a node that the container finds at `path`.
    fn on_host(&self, path: &str) -> PathBuf {
        self.dev_root.join(path.trim_start_matches('/'))
    }

    fn node(&self, path: &str) -> Result<Node, Error> {
        let host = self.on_host(path);
        let Some(host) = host.to_str() else {
            return Err(Error::NotUtf8 { path: host });
        };
        Ok(Node {
            path: path.to_owned(),
            host_path: (host != path).then(|| host.to_owned()),
        })
    }

    fn common(&self) -> Result<Vec<Node>, Error> {
        let there = |path: &&str| self.check(path).is_ok();
        let optional = OPTIONAL_NODES.into_iter().filter(there);
        MANDATORY_NODES
            .into_iter()
            .chain(optional)
            .map(|path| self.node(path))
            .collect()
    }

    /// The driver's nodes, those that are optional where the host has them, and those of these GPUs, in this order: what a
    /// container is given where no CDI spec does it. What can't be put into words is left out.
    #[must_use]
    pub fn host_nodes(&self, minors: &[u32]) -> Vec<HostPath> {
        let common = self.common().unwrap_or_default();
        let own = minors
            .iter()
            .filter_map(|minor| self.node(&node_of(*minor)).ok());
        let nodes = common.into_iter().chain(own);
        nodes
            .map(|node| HostPath {
                host_path: node.host_path.unwrap_or_else(|| node.path.clone()),
                container_path: node.path,
            })
            .collect()
    }

    /// Whether a runtime could take the node. It does not follow links and takes devices and FIFOs only.
    fn check(&self, path: &str) -> Result<(), (PathBuf, String)> {
        let host = self.on_host(path);
        let why = match host.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => "is missing".to_owned(),
            Err(error) => format!("can't be looked at ({error})"),
            Ok(found) => {
                let found = found.file_type();
                if found.is_char_device() || found.is_block_device() || found.is_fifo() {
                    return Ok(());
                }
                if found.is_symlink() {
                    "is a link, which container runtimes do not follow".to_owned()
                } else {
                    "is no device node".to_owned()
                }
            }
        };
        Err((host, why))
    }
}

/// The spec files of this daemon. All calls block; none needs more than the CDI folder.
///
/// The files are functions of ledger and inventory: they are written again on every Prepare and at start, so that
/// deleting them loses nothing.
#[derive(Debug, Clone)]
pub struct CdiFiles {
    folder: PathBuf,
    roots: Roots,
    finder: Finder,
}

impl CdiFiles {
    /// The files in a folder that container runtimes read: flag `--cdi-dir`. Touches nothing yet.
    #[must_use]
    pub fn new(folder: PathBuf, roots: Roots) -> Self {
        let finder = Finder::new(&folder, roots.driver.clone());
        Self {
            folder,
            roots,
            finder,
        }
    }

    /// Whether a container could start with this unit: its own node and the driver's are there. To be asked before each
    /// answer, since one about what a claim has already is given whether the unit is [unfit](Self::unfit) or not.
    ///
    /// # Errors
    /// [`Error::Node`], naming the first node that is not fit.
    pub fn check_nodes(&self, unit: &UnitId, minor: u32) -> Result<(), Error> {
        let node = node_of(minor);
        let fault = self
            .fault(&MANDATORY_NODES)
            .or_else(|| self.fault(&[&node]));
        let Some((path, why)) = fault else {
            return Ok(());
        };
        Err(Error::Node {
            unit: unit.clone(),
            path,
            why,
        })
    }

    /// The units that no container could use, each with the node that it lacks and what is wrong with that.
    #[must_use]
    pub fn unfit(&self, units: &[(UnitId, u32)]) -> BTreeMap<UnitId, String> {
        let common = self.fault(&MANDATORY_NODES);
        let unfit = units.iter().filter_map(|(unit, minor)| {
            let fault = common.clone().or_else(|| self.fault(&[&node_of(*minor)]));
            let (path, why) = fault?;
            Some((unit.clone(), format!("{} {why}", path.display())))
        });
        unfit.collect()
    }

    fn fault(&self, nodes: &[&str]) -> Option<(PathBuf, String)> {
        nodes.iter().find_map(|node| self.roots.check(node).err())
    }

    /// Writes the spec that answers to `Allocate` point into: all units with the minor numbers of their GPUs.
    ///
    /// Costs a read when nothing has changed, so that it can be called before each answer: optional nodes and files of
    /// the driver may have turned up since.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write_counted(
        &self,
        units: &[(UnitId, u32)],
        driver_version: Option<&str>,
    ) -> Result<(), Error> {
        let devices = units
            .iter()
            .map(|(unit, minor)| Ok((unit.to_string(), self.roots.node(&node_of(*minor))?)))
            .collect::<Result<_, _>>()?;
        self.write(COUNTED_CLASS, &counted_file(), devices, driver_version)
    }

    /// Writes the spec of a prepared claim. `minor_of` says which GPU a unit is; the files are those of the driver of this
    /// version, while one is known.
    ///
    /// # Errors
    /// The file can't be written, or a unit is not known.
    pub fn write_claim(
        &self,
        preparation: &Preparation,
        minor_of: impl Fn(&UnitId) -> Option<u32>,
        driver_version: Option<&str>,
    ) -> Result<(), Error> {
        let claim = &preparation.claim.uid;
        // By name: two requests of a claim may get the same device, one of them to look on.
        let mut devices = BTreeMap::new();
        for device in &preparation.devices {
            let minor = minor_of(&device.unit).ok_or_else(|| Error::NoMinor {
                claim: claim.clone(),
                unit: device.unit.clone(),
            })?;
            let name = super::claim_device_name(claim, &device.device);
            devices.insert(name, self.roots.node(&node_of(minor))?);
        }
        self.write(
            CLAIM_CLASS,
            &claim_file(claim),
            devices.into_iter().collect(),
            driver_version,
        )
    }

    /// Removes the spec of a claim; it need not be there.
    ///
    /// # Errors
    /// The file is there and can't be removed.
    pub fn remove_claim(&self, claim: &ClaimUid) -> Result<(), Error> {
        self.remove(&claim_file(claim))
    }

    /// Removes the specs of all claims but these, and what a crash has left half written. Returns the claims whose
    /// specs it removed. Files of others are left alone.
    ///
    /// # Errors
    /// The folder can't be read, or a file in it can't be removed.
    pub fn sweep(&self, keep: &BTreeSet<ClaimUid>) -> Result<BTreeSet<ClaimUid>, Error> {
        let mut swept = BTreeSet::new();
        for name in self.names()? {
            if let Some(whole) = name.strip_suffix(UNFINISHED) {
                if whole == counted_file() || claim_of(whole).is_some() {
                    self.remove(&name)?;
                }
            } else if let Some(claim) = claim_of(&name)
                && !keep.contains(&claim)
            {
                self.remove(&name)?;
                swept.insert(claim);
            }
        }
        Ok(swept)
    }

    /// The claims that have a spec: they were prepared by a daemon before this one. None if there is no folder yet.
    ///
    /// # Errors
    /// The folder is there and can't be read, so that nothing is known.
    pub fn claims_on_disk(&self) -> Result<BTreeSet<ClaimUid>, Error> {
        Ok(self
            .names()?
            .iter()
            .filter_map(|name| claim_of(name))
            .collect())
    }

    /// The device minors that the specs of claims name, by claim and device name. What can't be read is left out: it
    /// proves nothing.
    #[must_use]
    pub fn minors_on_disk(&self) -> ClaimMinors {
        let names = self.names().unwrap_or_default();
        let claims = names.iter().filter_map(|name| {
            let claim = claim_of(name)?;
            let text = read(&self.folder.join(name)).ok()?;
            let devices = spec::devices(&text)?;
            let minors = devices.into_iter().filter_map(|(name, path)| {
                let device = super::device_in(&name, &claim)?;
                Some((device, minor_in(&path)?))
            });
            Some((claim.clone(), minors.collect()))
        });
        claims.collect()
    }

    fn write(
        &self,
        class: &str,
        name: &str,
        devices: Vec<(String, Node)>,
        driver_version: Option<&str>,
    ) -> Result<(), Error> {
        if devices.is_empty() {
            // A spec without devices is not valid.
            return self.remove(name);
        }
        let path = self.folder.join(name);
        let driver = self.finder.files(driver_version);
        let text = Spec::new(kind(class), self.roots.common()?, &driver, devices)
            .to_json()
            .map_err(|source| Error::Json {
                path: path.clone(),
                source,
            })?;
        if is_written(&path, text.as_bytes()) {
            return Ok(());
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.folder)
            .map_err(failed("making the folder", &self.folder))?;
        match replace(&path, text.as_bytes(), MODE) {
            Ok(()) => Ok(()),
            // Runtimes see the file, and after a power failure it is written anew: nothing to worry about.
            Err(ReplaceError::Replaced { .. }) => Ok(()),
            Err(error @ ReplaceError::Unchanged { .. }) => Err(Error::Io {
                doing: "writing the CDI spec",
                path,
                source: error.into(),
            }),
        }
    }

    fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.folder.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("removing the CDI spec", &path)(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The names in the folder that could be ours: those that are text.
    fn names(&self) -> Result<Vec<String>, Error> {
        let failed = || failed("reading the folder", &self.folder);
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed()(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed())?.file_name();
            names.extend(OsStr::to_str(&name).map(str::to_owned));
        }
        Ok(names)
    }
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        doing,
        path,
        source: source.into(),
    }
}

fn node_of(minor: u32) -> String {
    format!("/dev/nvidia{minor}")
}

fn counted_file() -> String {
    format!("{VENDOR}-{COUNTED_CLASS}.json")
}

fn claim_file(claim: &ClaimUid) -> String {
    format!("{VENDOR}-{CLAIM_CLASS}_{claim}.json")
}

fn claim_of(name: &str) -> Option<ClaimUid> {
    let uid = name
        .strip_prefix(VENDOR)?
        .strip_prefix('-')?
        .strip_prefix(CLAIM_CLASS)?
        .strip_prefix('_')?
        .strip_suffix(".json")?;
    ClaimUid::new(uid).ok()
}

fn minor_in(node: &str) -> Option<u32> {
    let minor = node.strip_prefix("/dev/nvidia")?.parse().ok()?;
    (node_of(minor) == node).then_some(minor)
}

/// Whether the file is there as it would be written. Whatever keeps it from being read is found when it is written.
fn is_written(path: &Path, text: &[u8]) -> bool {
    read(path).is_ok_and(|bytes| bytes == text)
}

/// The text of a spec; nothing, if it is no file that this daemon has written as it writes them.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A FIFO that somebody put there would otherwise be waited for.
    let flags = no_follow() | OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    let found = file.metadata()?;
    let mut bytes = Vec::new();
    if found.is_file() && found.permissions().mode() & 0o7777 == MODE {
        file.take(FILE_LIMIT).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}
