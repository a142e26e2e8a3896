//! Whose a socket is that somebody else listens on.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

/// Which file a path leads to; a file that was removed and made again has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// File systems use inode numbers again at once, so the time tells as well. Not the change time: a `chmod`
    /// makes no new file.
    modified: (i64, i64),
}

impl Identity {
    /// `None` when nothing is there.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// Who listens on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// Nobody: the file was left behind, or is gone.
    Nobody,
    /// Somebody; the process that began to listen, if it can be seen from here.
    Somebody(Option<u32>),
}

/// Looks who listens on a socket, by a connection that is closed at once. What can't be told apart from somebody
/// counts as somebody.
#[must_use]
pub fn listener(path: &Path) -> Listener {
    match peer(path) {
        Ok(pid) => Listener::Somebody(pid),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Listener::Nobody,
        Err(_) => Listener::Somebody(None),
    }
}

fn peer(path: &Path) -> Result<Option<u32>, Errno> {
    let socket = stream()?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    // The kernel says who called listen(2), and gives 0 for a process of another PID namespace.
    let pid = sockopt::socket_peercred(&socket)?
        .pid
        .as_raw_nonzero()
        .get();
    Ok(u32::try_from(pid).ok().filter(|pid| *pid != 0))
}

fn stream() -> Result<OwnedFd, Errno> {
    // Without blocking: a full backlog would hold a blocking connect, and says that somebody listens.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_process_behind_a_socket_is_told_and_a_file_without_one_is_nobodys() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.sock");
        assert_eq!(listener(&path), Listener::Nobody);
        let open = UnixListener::bind(&path).unwrap();
        assert_eq!(
            listener(&path),
            Listener::Somebody(Some(std::process::id()))
        );
        drop(open);
        assert!(path.exists());
        assert_eq!(listener(&path), Listener::Nobody);
    }

    #[test]
    fn a_file_made_anew_has_another_identity() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("kubelet.sock");
        assert_eq!(Identity::of(&path), None);
        fs::File::create(&path).unwrap();
        let first = Identity::of(&path);
        assert_eq!(first, Identity::of(&path));
        // The clock of a file system ticks every few milliseconds, and a kubelet takes longer to restart.
        testkit::eventually_blocking(
            "another identity",
            std::time::Duration::from_secs(5),
            || {
                fs::remove_file(&path).unwrap();
                fs::File::create(&path).unwrap();
                first != Identity::of(&path)
            },
        );
    }
}
