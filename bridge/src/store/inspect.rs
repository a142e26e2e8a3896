//! A look at a ledger's file from outside: no lock, no change, also while a daemon owns it.

use std::io;
use std::path::{Path, PathBuf};

use bridge_core::Ledger;

use super::own_file::read;
use super::{LEDGER_FILE, format};

/// What a ledger's file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspected {
    /// The file.
    pub path: PathBuf,
    /// Its ledger.
    pub ledger: Ledger,
    /// The boot in which it was written.
    pub boot_id: String,
}

/// The file can't be shown.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It can't be read.
    #[error("{} can't be read; give the ledger's file, or the folder of --state-dir", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is read, and not understood.
    #[error("{} {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, in words that follow its name.
        why: String,
    },
}

/// Reads a ledger's file, or the one in a state folder. A daemon replaces its file as a whole, so that what is read
/// is one state of it.
///
/// # Errors
/// The file can't be read, is damaged, or was written in a format that this version does not know.
pub fn inspect(path: &Path) -> Result<Inspected, InspectError> {
    let path = if path.is_dir() {
        path.join(LEDGER_FILE)
    } else {
        path.to_owned()
    };
    let bytes = match read(&path) {
        Ok(bytes) => bytes,
        Err(source) => return Err(InspectError::Read { path, source }),
    };
    match format::decode(&bytes) {
        Ok(decoded) => Ok(Inspected {
            path,
            ledger: decoded.ledger,
            boot_id: decoded.boot_id,
        }),
        Err(error) => Err(InspectError::Content {
            path,
            why: error.to_string(),
        }),
    }
}
