//! Taking a ledger out of the way, so that the next start finds out anew who has what (rule 11).
//!
//! Nothing is deleted and nothing is written but the name of one file: the start that follows is the same as after a
//! lost ledger, and the claims that were unprepared meanwhile are still remembered beside.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bridge_core::ClaimUid;
use jiff::Timestamp;

use super::lock::{self, Lock};
use super::{LEDGER_FILE, atomic, format, load_unprepared, own_file};

/// What a ledger that was set aside is called, before the time.
pub(super) const BAD: &str = "ledger.bad-";
/// Two within one second are told apart by a number; more have no admin behind them.
const NAMES_PER_SECOND: u32 = 100;

/// Why a ledger was not set aside. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AsideError {
    /// A daemon has the folder.
    #[error("a gpu-bridge ({holder}) owns {}", folder.display())]
    Owned {
        /// The state folder.
        folder: PathBuf,
        /// Its process, or that it is not known.
        holder: String,
    },
    /// The lock can't be taken, for another reason.
    #[error("the state folder {} can't be locked; give the one of the daemon with --state-dir", folder.display())]
    Lock {
        /// The state folder.
        folder: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file can't be given another name.
    #[error("{} can't be renamed", path.display())]
    Rename {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// While this lives no daemon can start on the state folder.
#[derive(Debug)]
pub struct NoDaemon {
    _lock: Lock,
}

/// Keeps daemons away from a state folder.
///
/// # Errors
/// [`AsideError::Owned`] while one is there, [`AsideError::Lock`] if the folder is missing or can't be written.
pub fn keep_daemons_away(folder: &Path) -> Result<NoDaemon, AsideError> {
    match Lock::acquire(folder) {
        Ok(lock) => Ok(NoDaemon { _lock: lock }),
        Err(lock::Error::Held { holder, .. }) => Err(AsideError::Owned {
            folder: folder.to_owned(),
            holder,
        }),
        Err(error @ lock::Error::Failed { .. }) => Err(AsideError::Lock {
            folder: folder.to_owned(),
            source: error.into(),
        }),
    }
}

/// How a daemon that starts would find the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// There is none.
    Missing,
    /// It can be used.
    Whole {
        /// Its generation.
        generation: u64,
    },
    /// It can't be used.
    Unreadable {
        /// Why, in words that follow its name.
        why: String,
    },
}

/// Looks at the ledger of a state folder as a start does, and changes nothing.
#[must_use]
pub fn condition(folder: &Path) -> Condition {
    match own_file::read_own(&folder.join(LEDGER_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Condition::Missing,
        Err(error) => Condition::Unreadable {
            why: format!("can't be read: {error}"),
        },
        Ok(bytes) => match format::decode(&bytes) {
            Ok(decoded) => Condition::Whole {
                generation: decoded.ledger.generation,
            },
            Err(error) => Condition::Unreadable {
                why: error.to_string(),
            },
        },
    }
}

/// The claims that were unprepared while there was no ledger to write that into.
#[must_use]
pub fn unprepared(folder: &Path) -> BTreeSet<ClaimUid> {
    load_unprepared(folder).into_keys().collect()
}

/// Gives the ledger of a state folder the name `ledger.bad-<time>`, and returns its new path. The caller has seen to
/// it that no daemon writes it: it keeps them away, or the one that is there can't read the file and never will.
///
/// # Errors
/// [`AsideError::Rename`].
pub fn set_aside(folder: &Path, at: SystemTime) -> Result<PathBuf, AsideError> {
    let path = folder.join(LEDGER_FILE);
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| AsideError::Rename {
        path: path.clone(),
        source,
    };
    let at = Timestamp::try_from(at).map_err(|error| failed(error.into()))?;
    let time = at.strftime("%Y%m%dT%H%M%SZ");
    let free = (1..=NAMES_PER_SECOND)
        .map(|number| match number {
            1 => folder.join(format!("{BAD}{time}")),
            _ => folder.join(format!("{BAD}{time}-{number}")),
        })
        .find(|name| name.symlink_metadata().is_err())
        .ok_or_else(|| failed(format!("there are too many {BAD}{time}").into()))?;
    atomic::put_in_place(&path, &free).map_err(|error| failed(error.into()))?;
    // Should a power failure undo the renaming, the next start finds the same file and gives nothing out.
    drop(File::open(folder).and_then(|folder| folder.sync_all()));
    Ok(free)
}
