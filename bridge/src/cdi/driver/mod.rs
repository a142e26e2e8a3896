//! What of the driver a container needs beside its device nodes: libraries, programs, and what has to be done for them.
//!
//! NVIDIA's toolkit writes all of it into a CDI spec of its own, which is taken over where it is there and made for the
//! driver that runs; else the files are looked for. Neither is ever an error: a container whose image brings the
//! libraries needs none of it.

mod imported;
mod lookup;

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::spec::{Hook, Mount};

/// What NVIDIA's toolkit calls its spec (`nvidia-cdi-refresh`).
const TOOLKIT_SPEC: &str = "nvidia.yaml";
/// How long what was looked for is believed: an answer waits while some thousand names are read, and what an installer
/// adds shall be there for the pods that come after it. What was taken over changes with the toolkit's spec alone.
const FRESH: Duration = Duration::from_secs(30);

/// What a container gets of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct DriverFiles {
    /// Environment variables, as `NAME=value`.
    pub(super) env: Vec<String>,
    /// Files, and folders of sockets.
    pub(super) mounts: Vec<Mount>,
    /// Programs that the runtime runs for the container.
    pub(super) hooks: Vec<Hook>,
}

/// Where the driver is installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverRoot {
    /// On the host: flag `--driver-root`. Specs name it.
    pub on_host: PathBuf,
    /// The same folder as this process sees it: flag `--driver-root-ctr-path`.
    pub here: PathBuf,
}

/// Finds the driver's files, and remembers them for a while.
#[derive(Debug, Clone)]
pub(super) struct Finder {
    root: DriverRoot,
    spec: PathBuf,
    found: Arc<Mutex<Option<Found>>>,
}

/// What was found, and for what.
#[derive(Debug)]
struct Found {
    version: String,
    spec: Option<Version>,
    at: Instant,
    files: Arc<DriverFiles>,
    /// Why the toolkit's spec was not used, although it is there.
    unused: Option<String>,
}

impl Found {
    /// Whether it was taken over from the toolkit's spec.
    fn is_imported(&self) -> bool {
        self.spec.is_some() && self.unused.is_none()
    }
}

/// Enough of a file to see that it was replaced, written or closed to others: inode, size, mode, and when it changed.
type Version = (u64, u64, u32, i64, i64);

impl Finder {
    pub(super) fn new(cdi_dir: &Path, root: DriverRoot) -> Self {
        Self {
            root,
            spec: cdi_dir.join(TOOLKIT_SPEC),
            found: Arc::default(),
        }
    }

    /// The files of the driver of this version; nothing while no driver is known.
    pub(super) fn files(&self, version: Option<&str>) -> Arc<DriverFiles> {
        let Some(version) = version else {
            return Arc::default();
        };
        let spec = std::fs::metadata(&self.spec).ok();
        let spec = spec.as_ref().map(version_of);
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*found
            && known.version == version
            && known.spec == spec
            && (known.is_imported() || known.at.elapsed() < FRESH)
        {
            return Arc::clone(&known.files);
        }
        let (files, unused) = self.find(version);
        let now = Found {
            version: version.to_owned(),
            spec,
            at: Instant::now(),
            files: Arc::new(files),
            unused,
        };
        self.tell(found.as_ref(), &now);
        let files = Arc::clone(&now.files);
        *found = Some(now);
        files
    }

    /// The files, and why the toolkit's spec is not used if it is there.
    fn find(&self, version: &str) -> (DriverFiles, Option<String>) {
        match imported::read(&self.spec, version) {
            Ok(files) => (files, None),
            Err(why) => {
                let is_there = !matches!(why, imported::Unused::Absent);
                let unused = is_there.then(|| why.to_string());
                (lookup::find(&self.root, version), unused)
            }
        }
    }

    /// Says what is new.
    fn tell(&self, before: Option<&Found>, now: &Found) {
        if before.is_none_or(|before| before.files != now.files) {
            info!(
                driver = now.version,
                mounts = now.files.mounts.len(),
                hooks = now.files.hooks.len(),
                "containers get these files of the driver beside its device nodes"
            );
        }
        if let Some(why) = &now.unused
            && before.is_none_or(|before| before.unused.as_ref() != Some(why))
        {
            warn!(
                spec = %self.spec.display(),
                why,
                "the spec of NVIDIA's toolkit is not used; the driver's files are looked for"
            );
        }
    }
}

fn version_of(file: &Metadata) -> Version {
    let (changed, nanoseconds) = (file.ctime(), file.ctime_nsec());
    (file.ino(), file.size(), file.mode(), changed, nanoseconds)
}
