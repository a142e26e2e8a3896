//! A listening socket and its file.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::net::UnixListener;

use super::incoming::Incoming;

/// The longest path of a unix socket: `sun_path` has 108 bytes, the last of which is NUL (unix(7)).
pub const PATH_LIMIT_BYTES: usize = 107;

/// Connections that may wait to be accepted. The kubelet opens one or two; the rest is room for tools.
const BACKLOG: i32 = 16;

/// The folder may be written by everybody: then anybody can put a socket of their own in the place of ours.
const WRITABLE_BY_OTHERS: u32 = 0o002;
/// Only the owner of a file may remove it from such a folder.
const STICKY: u32 = 0o1000;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path does not fit into a socket address.
    #[error(
        "the path of the socket {} has {length} bytes, and {PATH_LIMIT_BYTES} is the most that a unix socket may have: choose a shorter folder",
        path.display()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// The folder of the socket is missing or no folder.
    #[error(
        "there is no folder {} for the socket {name:?}: check the path that was configured, and that it is mounted",
        folder.display()
    )]
    NoFolder {
        /// The folder.
        folder: PathBuf,
        /// File name of the socket.
        name: String,
    },
    /// Everybody may write to the folder of the socket.
    #[error(
        "everybody may write to {}, so anybody could replace the socket {name:?}: take the write permission of others away (chmod o-w)",
        folder.display()
    )]
    OpenFolder {
        /// The folder.
        folder: PathBuf,
        /// File name of the socket.
        name: String,
    },
    /// Another process listens there.
    #[error(
        "another process listens on {}: end it, or wait until it has gone, before starting this one",
        path.display()
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something that is no socket has the name.
    #[error(
        "{} is in the way of the socket, and is no socket: move it away",
        path.display()
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("could not {what} {}", path.display())]
    Os {
        /// What was being done.
        what: &'static str,
        /// With which path.
        path: PathBuf,
        /// The refusal.
        source: io::Error,
    },
}

/// A socket that listens, and its file.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of a listening socket. Dropping it removes the file, if it is still the one that was made.
///
/// It is told by device and inode. The kernel keeps the inode of a socket's file while the socket is open, so as
/// long as the listener lives no other file can be taken for it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// Makes a socket that listens on `path`, with a file of mode 0600. A file left behind by a process that is gone is
/// replaced. Must be called within a tokio runtime.
///
/// # Errors
/// The path is too long, its folder is missing or open to everybody, another process listens there, something else
/// is in the way, or the operating system refuses.
pub fn bind(path: &Path) -> Result<Socket, Error> {
    check_path(path)?;
    let os = |what| {
        move |source: io::Error| Error::Os {
            what,
            path: path.to_owned(),
            source,
        }
    };
    let address = SocketAddrUnix::new(path)
        .map_err(io::Error::from)
        .map_err(os("use the socket path"))?;
    let socket = open().map_err(os("make a socket for"))?;
    // On Linux bind(2) makes the file with the mode of the socket, less the umask: never is it open to others.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)
        .map_err(io::Error::from)
        .map_err(os("set the mode of"))?;
    let mut bound = rustix::net::bind(&socket, &address);
    if bound == Err(Errno::ADDRINUSE) {
        remove_stale(path)?;
        bound = rustix::net::bind(&socket, &address);
    }
    match bound {
        Ok(()) => {}
        Err(Errno::ADDRINUSE) => {
            return Err(Error::InUse {
                path: path.to_owned(),
            });
        }
        Err(errno) => return Err(os("bind the socket")(errno.into())),
    }
    let metadata = fs::symlink_metadata(path).map_err(os("look at the socket"))?;
    let file = SocketFile {
        path: path.to_owned(),
        identity: identity(&metadata),
    };
    rustix::net::listen(&socket, BACKLOG)
        .map_err(io::Error::from)
        .map_err(os("listen on"))?;
    let listener = UnixListener::from_std(std::os::unix::net::UnixListener::from(socket))
        .map_err(os("serve"))?;
    Ok(Socket { listener, file })
}

impl Socket {
    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The connections for a tonic server, and the file, to be kept as long as it serves.
    #[must_use]
    pub fn into_parts(self) -> (Incoming, SocketFile) {
        let incoming = Incoming::new(self.listener, self.file.path.clone());
        (incoming, self.file)
    }
}

impl SocketFile {
    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still leads to our socket: nobody has removed or replaced the file.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(%error, path = %self.path.display(), "could not remove a socket file");
        }
    }
}

fn check_path(path: &Path) -> Result<(), Error> {
    let length = path.as_os_str().as_bytes().len();
    if length > PATH_LIMIT_BYTES {
        return Err(Error::PathTooLong {
            path: path.to_owned(),
            length,
        });
    }
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let name = || {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let Some(metadata) = fs::metadata(folder).ok().filter(fs::Metadata::is_dir) else {
        return Err(Error::NoFolder {
            folder: folder.to_owned(),
            name: name(),
        });
    };
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 && metadata.mode() & STICKY == 0 {
        return Err(Error::OpenFolder {
            folder: folder.to_owned(),
            name: name(),
        });
    }
    Ok(())
}

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Removes the socket file of a process that is gone.
fn remove_stale(path: &Path) -> Result<(), Error> {
    let os = |what| {
        move |source: io::Error| Error::Os {
            what,
            path: path.to_owned(),
            source,
        }
    };
    match remove_if_stale(path) {
        Ok(Stale::Removed | Stale::Missing) => Ok(()),
        Ok(Stale::Alive) => Err(Error::InUse {
            path: path.to_owned(),
        }),
        Ok(Stale::NoSocket) => Err(Error::NotASocket {
            path: path.to_owned(),
        }),
        Err(error) => Err(os("replace the old socket")(error)),
    }
}

/// What became of a socket file that may be stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stale {
    /// Nobody listened; it is gone now.
    Removed,
    /// It was gone already.
    Missing,
    /// Somebody listens.
    Alive,
    /// It is no socket.
    NoSocket,
}

/// Removes a socket file on which nobody listens. What can't be told apart from a live one is left alone.
pub(super) fn remove_if_stale(path: &Path) -> io::Result<Stale> {
    let before = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Stale::Missing),
        Err(error) => return Err(error),
    };
    if !before.file_type().is_socket() {
        return Ok(Stale::NoSocket);
    }
    // Without blocking: a full backlog would hold a blocking connect, and says that somebody listens.
    match rustix::net::connect(open()?, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(Stale::Missing),
        Ok(()) | Err(_) => return Ok(Stale::Alive),
    }
    let now = fs::symlink_metadata(path).map(|now| identity(&now));
    if now.is_ok_and(|now| now == identity(&before)) {
        fs::remove_file(path)?;
    }
    Ok(Stale::Removed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary folder")
    }

    #[tokio::test]
    async fn a_socket_has_mode_0600_and_its_file_goes_with_it() {
        let folder = folder();
        let path = folder.path().join("a.sock");
        let socket = bind(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(socket.path(), path);
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_that_is_not_ours_any_more_stays() {
        let folder = folder();
        let path = folder.path().join("a.sock");
        let first = bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = bind(&path).unwrap();
        assert!(!first.file.is_in_place());
        assert!(second.file.is_in_place());
        drop(first);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_named() {
        let folder = folder();
        let path = folder.path().join("a.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let alive = bind(&path).expect("a socket that nobody listens on is in nobody's way");
        let error = bind(&path).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error:?}");
        assert!(error.to_string().contains(path.to_str().unwrap()));
        drop(alive);
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let folder = folder();
        let path = folder.path().join("a.sock");
        fs::File::create(&path).unwrap();
        let error = bind(&path).unwrap_err();
        assert!(matches!(error, Error::NotASocket { .. }), "{error:?}");
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_path_that_can_not_be_bound_is_told_in_words() {
        let folder = folder();
        let long = folder.path().join("x".repeat(PATH_LIMIT_BYTES));
        let text = bind(&long).unwrap_err().to_string();
        assert!(text.contains("107 is the most"), "{text}");

        let text = bind(Path::new("/nowhere/a.sock")).unwrap_err().to_string();
        assert!(text.contains("no folder /nowhere"), "{text}");

        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let error = bind(&open.join("a.sock")).unwrap_err();
        assert!(matches!(error, Error::OpenFolder { .. }), "{error:?}");
    }
}
