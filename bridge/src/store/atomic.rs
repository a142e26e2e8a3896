//! The one way in which this daemon replaces a file: all of the old text or all of the new, never a part.
//!
//! Knows bytes and paths, and nothing of what is in them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::steps::{FileStep, reached_in_file};

/// What a file that is still being written is called: the name of the file and this. It ends in neither `.json`
/// nor `.yaml`, so that whoever watches the folder for those does not read half a file.
pub(crate) const UNFINISHED: &str = ".tmp";

/// Why a file was not replaced, or is not known to be replaced for good.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The old file is as it was.
    #[error("{step} failed")]
    Unchanged {
        /// What was being done.
        step: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The new file is in place, but a power failure may bring back the old one.
    #[error("the folder {} could not be flushed to disk", folder.display())]
    Replaced {
        /// The folder of the file.
        folder: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// Replaces `path`: writes beside it, flushes, renames, and flushes the folder.
///
/// The folder must exist, and nobody else may write this file at the same time.
pub(crate) fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    replace_with(path, bytes, mode, File::sync_all)
}

/// The same with flushing as a parameter, that of the file and then that of the folder: no file system that tests run
/// on fails there when asked.
pub(crate) fn replace_with(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    mut flush: impl FnMut(&File) -> io::Result<()>,
) -> Result<(), Error> {
    let folder_path = path.parent().unwrap_or_else(|| Path::new("."));
    // Opened first: once the file is renamed, running out of file descriptors must not be the reason for doubt.
    let folder = File::open(folder_path).map_err(during("opening", folder_path))?;
    let unfinished = unfinished(path);
    write_unfinished(&unfinished, bytes, mode)
        .inspect(|_| reached_in_file(FileStep::Written))
        .and_then(|file| flush(&file).map_err(during("flushing", &unfinished)))
        .inspect(|()| reached_in_file(FileStep::Flushed))
        .and_then(|()| put_in_place(&unfinished, path))
        .inspect_err(|_| {
            // Only tidies up: the next write begins by removing it as well.
            drop(std::fs::remove_file(&unfinished));
        })?;
    reached_in_file(FileStep::Renamed);
    flush(&folder).map_err(|source| Error::Replaced {
        folder: folder_path.to_owned(),
        source,
    })?;
    reached_in_file(FileStep::Durable);
    Ok(())
}

/// Where the text of `path` is until it is whole.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(UNFINISHED);
    name.into()
}

fn write_unfinished(path: &Path, bytes: &[u8], mode: u32) -> Result<File, Error> {
    // What a crash left behind. A link that somebody put there is removed as well, not followed.
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(during("removing what is left of an earlier write at", path)(source));
        }
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(no_follow())
        .open(path)
        .map_err(during("creating", path))?;
    // The umask may have taken something off the mode.
    file.set_permissions(PermissionsExt::from_mode(mode))
        .map_err(during("setting the mode of", path))?;
    file.write_all(bytes).map_err(during("writing", path))?;
    Ok(file)
}

#[allow(
    clippy::disallowed_methods,
    reason = "this is the place that makes a rename durable"
)]
pub(super) fn put_in_place(unfinished: &Path, path: &Path) -> Result<(), Error> {
    std::fs::rename(unfinished, path).map_err(during("renaming to", path))
}

/// `O_NOFOLLOW` in the type that the standard library takes.
pub(crate) fn no_follow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}

fn during(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let step = format!("{what} {}", path.display());
    |source| Error::Unchanged { step, source }
}

/// Flushing on a disk that fails for folders.
#[cfg(test)]
pub(super) fn fail_for_folders(file: &File) -> io::Result<()> {
    if file.metadata()?.is_dir() {
        return Err(io::Error::other("io"));
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_with_the_mode_asked_for_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        replace(&path, b"old", 0o644).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn what_a_crash_left_behind_does_not_stop_the_next_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        File::create(folder.path().join("a.json.tmp")).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_link_in_the_way_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        replace(&victim, b"untouched", 0o600).unwrap();
        for name in ["a.json", "a.json.tmp"] {
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        replace(&folder.path().join("a.json"), b"new", 0o600).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
        assert_eq!(names(folder.path()), ["a.json", "victim"]);
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        replace(&path, b"old", 0o600).unwrap();
        std::fs::create_dir(folder.path().join("a.json.tmp")).unwrap();
        let error = replace(&path, b"new", 0o600).unwrap_err();
        assert!(matches!(error, Error::Unchanged { .. }), "{error:?}");
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn a_folder_that_can_not_be_flushed_leaves_the_new_file_in_doubt() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let error = replace_with(&path, b"new", 0o600, fail_for_folders).unwrap_err();
        assert!(matches!(error, Error::Replaced { .. }), "{error:?}");
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn a_file_that_can_not_be_flushed_leaves_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        replace(&path, b"old", 0o600).unwrap();
        let fail = |_: &File| Err(io::Error::other("io"));
        let error = replace_with(&path, b"new", 0o600, fail).unwrap_err();
        assert!(matches!(error, Error::Unchanged { .. }), "{error:?}");
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_save_is_two_flushes_the_file_before_it_is_renamed_and_the_folder_after() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let mut flushed = Vec::new();
        replace_with(&path, b"new", 0o600, |file| {
            let kind = file.metadata()?.file_type();
            flushed.push((kind.is_dir(), names(folder.path())));
            file.sync_all()
        })
        .unwrap();
        let names = |name: &str| vec![name.to_owned()];
        assert_eq!(
            flushed,
            [(false, names("a.json.tmp")), (true, names("a.json"))]
        );
    }
}
