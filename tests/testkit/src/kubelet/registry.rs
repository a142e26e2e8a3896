//! The folder of registration sockets, as the kubelet sees it.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// For so long after a change a folder is read at each look: times of files are coarse, and a second change within one
/// of their steps does not show.
const RESTLESS: Duration = Duration::from_millis(100);

/// Tells a socket from one that was made later under the same name: inode, and time it was made (which a
/// later chmod leaves alone), in seconds and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(u64, i64, i64);

/// What was found below the folder. It is read anew only after a change: the kubelet opens it no more often, and each
/// opening wakes whoever watches it.
#[derive(Debug, Default)]
pub(super) struct Registry {
    found: BTreeMap<PathBuf, Identity>,
    /// When each of the folders had changed.
    folders: BTreeMap<PathBuf, Option<SystemTime>>,
}

impl Registry {
    /// All sockets below a folder whose name does not begin with a dot.
    pub(super) fn sockets(&mut self, dir: &Path) -> &BTreeMap<PathBuf, Identity> {
        let rests = |(folder, changed): (&PathBuf, &Option<SystemTime>)| {
            let age = changed.and_then(|changed| changed.elapsed().ok());
            changed_at(folder) == *changed && age.is_some_and(|age| age > RESTLESS)
        };
        if !self.folders.contains_key(dir) || !self.folders.iter().all(rests) {
            self.found.clear();
            self.folders.clear();
            self.read(dir);
        }
        &self.found
    }

    fn read(&mut self, dir: &Path) {
        // Before the folder is read: what changes meanwhile is a change.
        self.folders.insert(dir.to_owned(), changed_at(dir));
        let Ok(entries) = fs::read_dir(dir) else {
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue;
            };
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            if metadata.is_dir() {
                self.read(&path);
            } else if metadata.file_type().is_socket() {
                self.found.insert(path, identity(&metadata));
            }
        }
    }
}

fn identity(metadata: &Metadata) -> Identity {
    Identity(metadata.ino(), metadata.mtime(), metadata.mtime_nsec())
}

/// `None`: there is no such folder.
fn changed_at(folder: &Path) -> Option<SystemTime> {
    fs::metadata(folder).and_then(|it| it.modified()).ok()
}
