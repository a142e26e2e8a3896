//! Reading files: those that nobody else can have written, as in the state folder, and copies of them anywhere.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// A ledger of 256 shared units with a pod each has about 300 kB. What is larger was not written by this daemon,
/// and reading it whole could take the node's memory.
pub(super) const FILE_LIMIT: u64 = 16 * 1024 * 1024;

/// Others than the owner may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Reads a file of the state folder. Who could have written it could have given every GPU to two holders, so it is
/// [trusted](read_trusted), and no link.
pub(super) fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    let file = open(path, OFlags::NOFOLLOW).map_err(|error| {
        if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            return io::Error::other("it is a link, and what it leads to may be anybody's");
        }
        error
    })?;
    check_trusted(&file)?;
    read_bounded(file, FILE_LIMIT)
}

/// Reads a file of root or of our own user that nobody else may write, or what a link leads to if that is one.
///
/// # Errors
/// It can't be read, has more bytes than `limit`, or others can have written it; `NotFound` if it is not there.
pub(crate) fn read_trusted(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path, OFlags::empty())?;
    check_trusted(&file)?;
    read_bounded(file, limit)
}

/// Reads any file, as a copy that an admin looks at.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_bounded(File::open(path)?, FILE_LIMIT)
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    // A FIFO that somebody put there would otherwise keep the start waiting for a writer.
    let flags = (flags | OFlags::NONBLOCK).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn check_trusted(file: &File) -> io::Result<()> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let ours = geteuid().as_raw();
    if ![0, ours].contains(&metadata.uid()) {
        return Err(io::Error::other(format!(
            "it belongs to user {}, and gpu-bridge runs as user {ours} and believes nobody else. \
             If its content can be trusted, chown it to {ours}",
            metadata.uid()
        )));
    }
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(io::Error::other(format!(
            "others than its owner may write it (mode {:o}). If its content can be trusted, run chmod go-w on it",
            metadata.mode() & 0o777
        )));
    }
    Ok(())
}

fn read_bounded(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = file.take(limit + 1).read_to_end(&mut bytes)?;
    if u64::try_from(length).is_ok_and(|length| length > limit) {
        let why = format!("it has more than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}
