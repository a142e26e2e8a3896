use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;

use tokio::time::timeout;

use super::*;

/// Well under the time without an event: only an event can be that quick.
const QUICK: Duration = Duration::from_millis(700);
/// Far more than anything here takes.
const SOON: Duration = Duration::from_secs(10);

fn sockets(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".sock")
}

fn watch(folder: &Path) -> Folders {
    Folders::new([folder.to_owned()], sockets)
}

/// Waits until a file is there, by changes alone, and says how long that took.
async fn appears(folders: &mut Folders, path: &Path, since: Instant) -> Duration {
    while !path.exists() {
        folders.changed().await;
        assert!(since.elapsed() < SOON, "no change seen");
    }
    since.elapsed()
}

#[tokio::test]
async fn a_file_that_comes_is_told_by_an_event() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubelet.sock");
    let mut folders = watch(folder.path());
    assert_eq!(folders.changed().await, Why::Changed, "before the watch");
    let since = Instant::now();
    let (took, _) = tokio::join!(appears(&mut folders, &path, since), async {
        File::create(&path).unwrap()
    });
    assert!(took < QUICK, "{took:?}");
    // What came between two calls is told by the next one.
    fs::remove_file(&path).unwrap();
    let told = timeout(QUICK, folders.changed()).await;
    assert_eq!(told, Ok(Why::Changed));
}

#[tokio::test]
async fn what_is_read_or_of_no_interest_is_not_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.sock");
    fs::write(&path, "text").unwrap();
    let mut folders = watch(folder.path());
    folders.changed().await;
    fs::read_dir(folder.path()).unwrap().for_each(drop);
    fs::read(&path).unwrap();
    fs::write(folder.path().join("checkpoint"), "text").unwrap();
    let why = folders.changed_within(Duration::from_millis(50)).await;
    assert_eq!(why, Why::Due);
}

#[tokio::test]
async fn a_file_that_is_written_or_renamed_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("a.sock"), folder.path().join("b"));
    fs::write(&path, "text").unwrap();
    let mut folders = watch(folder.path());
    folders.changed().await;
    fs::write(&path, "another text").unwrap();
    assert_eq!(timeout(QUICK, folders.changed()).await, Ok(Why::Changed));
    rustix::fs::rename(&path, &other).unwrap();
    assert_eq!(timeout(QUICK, folders.changed()).await, Ok(Why::Changed));
    rustix::fs::rename(&other, &path).unwrap();
    assert_eq!(timeout(QUICK, folders.changed()).await, Ok(Why::Changed));
}

#[tokio::test]
async fn a_folder_that_is_replaced_is_watched_again() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("device-plugins");
    let path = folder.join("kubelet.sock");
    let mut folders = watch(&folder);
    assert_eq!(folders.changed().await, Why::Due, "it is not there");
    fs::create_dir(&folder).unwrap();
    assert_eq!(folders.changed().await, Why::Changed);
    fs::remove_dir(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    File::create(&path).unwrap();
    appears(&mut folders, &path, Instant::now()).await;
    // The end of the former folder may be told yet.
    while folders.changed_within(QUICK).await == Why::Changed {}
    for moved_away in [false, true] {
        if moved_away {
            rustix::fs::rename(&folder, parent.path().join("elsewhere")).unwrap();
            fs::create_dir(&folder).unwrap();
            while folders.changed_within(QUICK).await == Why::Changed {}
        }
        let since = Instant::now();
        let second = folder.join("second.sock");
        let (took, _) = tokio::join!(appears(&mut folders, &second, since), async {
            File::create(&second).unwrap()
        });
        assert!(took < QUICK, "{took:?}");
    }
}

#[tokio::test]
async fn of_several_folders_each_is_watched_and_one_that_is_missing_is_looked_for() {
    let parent = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| parent.path().join(name));
    fs::create_dir(&first).unwrap();
    let mut folders = Folders::new([first.clone(), second.clone()], sockets);
    assert_eq!(folders.changed().await, Why::Changed);
    let since = Instant::now();
    assert_eq!(folders.changed().await, Why::Due);
    assert!(since.elapsed() < WATCHED, "the second may come any moment");
    fs::create_dir(&second).unwrap();
    assert_eq!(folders.changed().await, Why::Changed);
    for folder in [&first, &second] {
        File::create(folder.join("a.sock")).unwrap();
        let told = timeout(QUICK, folders.changed()).await;
        assert_eq!(told, Ok(Why::Changed), "{folder:?}");
        // Created and closed may be told one after the other.
        while folders.changed_within(Duration::from_millis(20)).await == Why::Changed {}
    }
    folders.watch(BTreeSet::from([first.clone()]));
    File::create(second.join("b.sock")).unwrap();
    let why = folders.changed_within(Duration::from_millis(50)).await;
    assert_eq!(why, Why::Due, "it is not watched any more");
}
