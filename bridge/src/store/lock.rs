//! The lock that lets one daemon own a node's ledger.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::atomic;

/// The name of the lock file in the state folder.
const NAME: &str = "lock";
/// How often the lock is taken anew when its file is removed while it is being taken.
const ATTEMPTS: u32 = 3;
/// A process id has at most 7 digits; what is longer was not written by this daemon.
const HOLDER_LIMIT: u64 = 16;

/// Why the lock is not ours.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Another process has it.
    #[error(
        "another gpu-bridge ({holder}) owns {}, and two would give the same GPU twice; \
         stop it, or give this one a --state-dir and a node of its own", path.display()
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// Process id of the other one, or that it is not known.
        holder: String,
    },
    /// It can't be taken.
    #[error("the lock file {} can't be taken; see to it that the folder is writable", path.display())]
    Failed {
        /// The lock file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Ours as long as this lives; the kernel lets go of it when the process ends in whatever way.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock of a state folder at once or not at all.
    pub(super) fn acquire(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(NAME);
        for _ in 0..ATTEMPTS {
            let lock = Self::attempt(path.clone())?;
            if lock.stands() {
                return Ok(lock);
            }
        }
        Err(Error::Failed {
            path,
            source: io::Error::other("somebody keeps removing it"),
        })
    }

    fn attempt(path: PathBuf) -> Result<Self, Error> {
        let failed = |source| Error::Failed {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(atomic::no_follow())
            .open(&path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let holder = holder(&mut file);
                return Err(Error::Held { path, holder });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        // For the message of the next one that comes. On a full disk the lock holds without it.
        let note = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        if let Err(error) = note {
            tracing::debug!(%error, "the process id could not be written into the lock file");
        }
        Ok(Self { file, path })
    }

    /// Whether the file with our lock is the one that the next daemon would find.
    pub(super) fn stands(&self) -> bool {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), self.path.symlink_metadata()) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (there.dev(), there.ino())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Not left to the closing of the file: a process that is just being started still has a copy of it.
        if let Err(error) = rustix::fs::flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(%error, "the lock could not be given back before its file was closed");
        }
    }
}

fn holder(file: &mut File) -> String {
    let mut text = String::new();
    match file.take(HOLDER_LIMIT).read_to_string(&mut text) {
        Ok(_) if text.trim().parse::<u32>().is_ok() => format!("process {}", text.trim()),
        Ok(_) | Err(_) => "its process is not known".to_owned(),
    }
}
