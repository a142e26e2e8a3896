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
/// A process id has at most 7 digits, and a pod's UID 36 letters as a rule; what is much longer was not written by
/// this daemon.
const NOTE_LIMIT: u64 = 256;

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

/// What the owner has written into the lock file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Note {
    /// Its process id.
    pub(super) process: Option<u32>,
    /// The UID of its pod.
    pub(super) pod: Option<String>,
}

impl Note {
    /// Reads the note in a state folder. It is a hint: only the lock itself says who owns the folder.
    pub(super) fn read(folder: &Path) -> Self {
        File::open(folder.join(NAME)).map_or_else(|_| Self::default(), |file| Self::of(&file))
    }

    fn of(file: &File) -> Self {
        let mut text = String::new();
        // What is no text is no note.
        let _ = file.take(NOTE_LIMIT).read_to_string(&mut text);
        let mut lines = text.lines();
        Self {
            process: lines.next().and_then(|line| line.trim().parse().ok()),
            pod: lines.next().map(str::to_owned),
        }
    }
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
        let file = OpenOptions::new()
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
                let holder = match Note::of(&file).process {
                    Some(process) => format!("process {process}"),
                    None => "its process is not known".to_owned(),
                };
                return Err(Error::Held { path, holder });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        let mut lock = Self { file, path };
        lock.sign(None);
        Ok(lock)
    }

    /// Writes who we are into the file, for the message of the next one that comes, and for one that has calls for us.
    /// On a full disk the lock holds without it.
    pub(super) fn sign(&mut self, pod: Option<&str>) {
        let pod = pod.unwrap_or_default();
        let file = &mut self.file;
        let note = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}\n{pod}", std::process::id()));
        if let Err(error) = note {
            tracing::debug!(%error, "the lock file could not be signed");
        }
    }

    /// Takes the signature off: nobody owns the folder in a moment.
    pub(super) fn unsign(&mut self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::debug!(%error, "the lock file could not be cleared");
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_says_who_owns_the_folder_and_nothing_once_it_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Note::read(folder.path()), Note::default());
        let mut lock = Lock::acquire(folder.path()).unwrap();
        let own = Note::read(folder.path());
        assert_eq!(own.process, Some(std::process::id()));
        lock.sign(Some("4f2"));
        assert_eq!(Note::read(folder.path()).pod.as_deref(), Some("4f2"));
        let error = Lock::acquire(folder.path()).unwrap_err();
        let process = format!("process {}", std::process::id());
        assert!(error.to_string().contains(&process), "{error}");
        lock.unsign();
        assert_eq!(Note::read(folder.path()), Note::default());
    }

    #[test]
    fn what_somebody_else_wrote_there_is_no_note() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        for text in [b"\xff\xfe".as_slice(), b"here", &[b'7'; 1000]] {
            atomic::replace(&path, text, 0o600).unwrap();
            assert_eq!(Note::read(folder.path()), Note::default());
        }
    }
}
