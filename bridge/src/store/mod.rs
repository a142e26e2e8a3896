//! What survives a restart: the ledger's file, and the lock that lets one daemon own it.
//!
//! Owns every byte in the state folder, and knows nothing of who asks. A ledger that can't be read is never taken
//! for an empty one, and never overwritten (rule 11). All calls block; none takes longer than the disk.
//!
//! Files in the state folder, all 0600: `lock`; `ledger.json`; `unprepared.json`, only while there is no ledger to
//! write into; `ledger.bad-<time>`, which an admin has had set aside and nobody reads; `history.jsonl` and
//! `history.older.jsonl`, which people read alone. The layout around their contents is described in `envelope.rs`.

mod aside;
mod atomic;
mod boot;
mod envelope;
mod format;
mod history;
#[cfg(any(test, fuzzing))]
mod hostile;
mod inspect;
mod lock;
mod own_file;
#[cfg(test)]
mod tests;
mod unknown;
mod v1;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bridge_core::{ClaimRef, ClaimUid, Ledger, PodUid};

use self::aside::BAD;
pub use self::aside::{
    AsideError, Condition, NoDaemon, condition, keep_daemons_away, set_aside, unprepared,
};
pub(crate) use self::atomic::{Error as ReplaceError, UNFINISHED, no_follow, replace};
pub use self::boot::BootId;
use self::history::History;
pub use self::history::{Event, KEPT as HISTORY_KEPT, history};
#[cfg(any(test, fuzzing))]
pub use self::hostile::read_files;
pub use self::inspect::{InspectError, Inspected, inspect};
use self::lock::Lock;
use self::own_file::read_own;
pub(crate) use self::own_file::read_trusted;
use self::unknown::Unknown;

/// The ledger's file in the state folder.
pub const LEDGER_FILE: &str = "ledger.json";
/// The list of claims that were unprepared while there was no ledger.
pub const UNPREPARED_FILE: &str = "unprepared.json";
/// Mode bit of a folder in which anybody may put a file of their own in the place of ours.
const WRITABLE_BY_ALL: u32 = 0o002;
/// Claims remembered beside the ledger. Only claims prepared before the ledger was lost are ever unprepared then,
/// and a node runs a few hundred pods at most.
const UNPREPARED_LIMIT: usize = 4096;

/// Why the state folder can't be used at all. The daemon must not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder is not there and can't be made.
    #[error(
        "the state folder {} can't be made; give a writable place with --state-dir", path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Everybody may write to the folder, so that what is in it may be anybody's.
    #[error(
        "everybody may write to the state folder {}, so anybody could say there who has which GPU: \
         take the write permission of others away (chmod o-w)", path.display()
    )]
    OpenToAll {
        /// The folder.
        path: PathBuf,
    },
    /// Another daemon owns the folder.
    #[error("the state folder {} can't be locked", path.display())]
    Owned {
        /// The folder.
        path: PathBuf,
        /// Who has it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nobody can own the folder.
    #[error("the state folder {} can't be locked", path.display())]
    Lock {
        /// The folder.
        path: PathBuf,
        /// Why the lock can't be taken.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// What was read could be gone after a power failure.
    #[error("{} was read but can't be flushed to disk; see to the disk", path.display())]
    Flush {
        /// File or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why a save has not, or not certainly, reached the disk.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Nothing on disk has changed. What was planned must be dropped.
    #[error("{} was not written and is as it was before", path.display())]
    NotSaved {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The new text is in place, but a power failure may bring back the old one: nothing may be granted until a
    /// later save has succeeded.
    #[error("{} was written, but may not outlast a power failure", path.display())]
    Doubtful {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// What was found in the state folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loaded {
    /// The ledger, whole and durable.
    Ledger(Ledger),
    /// There is none: a first start, or the folder was wiped.
    Missing,
    /// There is one that can't be used. It is left as it is, and [`Store::save`] refuses to touch it until an admin
    /// has acted and the daemon is started again.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do, in whole sentences, with the name of the file.
        why: String,
    },
}

/// The state folder of this node, ours alone while this lives, unless it was [let go](Store::let_go).
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    boot_id: BootId,
    /// Whether the ledger that was read at the start was written before the node was booted.
    is_from_before: bool,
    unknown: Unknown,
    history: History,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None`: another daemon may own the folder now, and nothing in it is written.
    lock: Option<Lock>,
    /// With which the lock is signed.
    pod: Option<PodUid>,
    ledger: OnDisk,
    unprepared: BTreeMap<ClaimUid, ClaimRef>,
}

impl State {
    fn own(&mut self, mut lock: Lock) {
        lock.sign(self.pod.as_ref().map(PodUid::as_str));
        self.lock = Some(lock);
    }
}

/// What may be done with the ledger's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDisk {
    /// It is ours to replace.
    Ours,
    /// There was none at the start. One that turns up is not ours.
    None,
    /// It can't be read and must stay.
    Unreadable,
}

impl Store {
    /// Makes the state folder if need be (0700), takes its lock, and reads what is in it.
    ///
    /// # Errors
    /// The folder can't be made, another daemon owns it, or the disk does not hold what was read.
    pub fn open(folder: &Path, boot_id: BootId) -> Result<(Self, Loaded), Error> {
        make_folder(folder)?;
        let lock = lock(folder)?;
        let (loaded, unknown, written_in) = load(folder, &boot_id)?;
        let ledger = match loaded {
            Loaded::Ledger(_) => OnDisk::Ours,
            Loaded::Missing => OnDisk::None,
            Loaded::Unreadable { .. } => OnDisk::Unreadable,
        };
        let store = Self {
            folder: folder.to_owned(),
            is_from_before: written_in.is_some_and(|boot| boot != boot_id.as_str()),
            boot_id,
            unknown,
            history: History::new(folder),
            state: Mutex::new(State {
                lock: Some(lock),
                pod: None,
                ledger,
                unprepared: load_unprepared(folder),
            }),
        };
        Ok((store, loaded))
    }

    /// Writes the ledger so that it outlasts a crash of anything, and forgets the claims of
    /// [`remember_unprepared`](Self::remember_unprepared): the ledger must say by now what they said.
    ///
    /// # Errors
    /// The file is as it was, or its new text is not certain to stay; see [`SaveError`].
    pub fn save(&self, ledger: &Ledger) -> Result<(), SaveError> {
        let mut state = self.state();
        let path = self.folder.join(LEDGER_FILE);
        self.may_write(&mut state, &path)
            .and_then(|()| {
                Ok(format::encode(
                    ledger,
                    &self.unknown,
                    format::WRITER,
                    self.boot_id.as_str(),
                )?)
            })
            .map_err(|source| not_saved(&path, source))
            .and_then(|bytes| write(&path, &bytes))
            .inspect_err(|error| {
                // The text in place is ours even if it is in doubt.
                if matches!(error, SaveError::Doubtful { .. }) {
                    state.ledger = OnDisk::Ours;
                }
            })?;
        state.ledger = OnDisk::Ours;
        self.forget_unprepared(&mut state)
    }

    /// Remembers that a claim was unprepared while the ledger is missing or can't be read.
    ///
    /// # Errors
    /// As for [`save`](Self::save). Nothing is remembered then, and the kubelet must be asked to come again.
    pub fn remember_unprepared(&self, claim: &ClaimRef) -> Result<(), SaveError> {
        let mut state = self.state();
        let path = self.folder.join(UNPREPARED_FILE);
        self.own(&mut state)
            .map_err(|source| not_saved(&path, source))?;
        let mut claims = state.unprepared.clone();
        claims.insert(claim.uid.clone(), claim.clone());
        if claims.len() > UNPREPARED_LIMIT {
            let why = format!("more than {UNPREPARED_LIMIT} claims are remembered already");
            return Err(not_saved(&path, why.into()));
        }
        let bytes =
            format::encode_unprepared(&claims).map_err(|why| not_saved(&path, why.into()))?;
        write(&path, &bytes)?;
        state.unprepared = claims;
        Ok(())
    }

    /// Whether the ledger that was read at the start is from before the node was booted.
    #[must_use]
    pub fn is_from_before_the_boot(&self) -> bool {
        self.is_from_before
    }

    /// Writes down what has happened, for people: see [`history`]. Never waits and never fails; only the owner of the
    /// folder may.
    pub fn note(&self, event: Event) {
        self.history.add(event);
    }

    /// The claims remembered, also over restarts. Whoever has a ledger again, adopted or read, applies them to it
    /// before the first [`save`](Self::save).
    #[must_use]
    pub fn unprepared(&self) -> BTreeSet<ClaimUid> {
        self.state().unprepared.keys().cloned().collect()
    }

    /// Says in the lock file whose daemon this is, so that another one can pass on what comes to it.
    pub fn sign(&self, pod: PodUid) {
        let mut state = self.state();
        state.pod = Some(pod);
        if let Some(lock) = state.lock.take() {
            state.own(lock);
        }
    }

    /// The pod of another daemon that owns the folder, as it has signed; `None` if it has not, or there is none.
    #[must_use]
    pub fn other_owner(&self) -> Option<PodUid> {
        let pod = PodUid::new(lock::Note::read(&self.folder).pod?).ok()?;
        Some(pod).filter(|pod| self.state().pod.as_ref() != Some(pod))
    }

    /// Gives the lock back, so that another daemon can own the folder. Nothing is written from then on.
    pub fn let_go(&self) {
        if let Some(mut lock) = self.state().lock.take() {
            lock.unsign();
        }
    }

    /// Takes the lock again after [`let_go`](Self::let_go), and reads what is there now. Whoever finds it to be what
    /// was there before may go on; what another daemon has written needs a new start.
    ///
    /// # Errors
    /// As for [`open`](Self::open); nothing has changed then.
    pub fn take_back(&self) -> Result<Loaded, Error> {
        let mut state = self.state();
        let lock = lock(&self.folder)?;
        let (loaded, ..) = load(&self.folder, &self.boot_id)?;
        state.unprepared = load_unprepared(&self.folder);
        state.own(lock);
        Ok(loaded)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // What it guards is changed only after the disk was: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_write(&self, state: &mut State, path: &Path) -> Result<(), BoxError> {
        match state.ledger {
            OnDisk::Ours => {}
            OnDisk::None if !path.exists() => {}
            OnDisk::None => {
                return Err(
                    "a ledger has turned up since the start; restart gpu-bridge to use it".into(),
                );
            }
            OnDisk::Unreadable => {
                return Err("the ledger in it could not be read and is kept for an admin".into());
            }
        }
        self.own(state)
    }

    /// Takes the lock again if somebody has removed its file: the next daemon would not find ours.
    fn own(&self, state: &mut State) -> Result<(), BoxError> {
        match &state.lock {
            None => return Err("it was handed over to another gpu-bridge".into()),
            Some(lock) if lock.stands() => {}
            Some(_) => {
                let lock = Lock::acquire(&self.folder)?;
                state.own(lock);
            }
        }
        Ok(())
    }

    fn forget_unprepared(&self, state: &mut State) -> Result<(), SaveError> {
        if state.unprepared.is_empty() {
            return Ok(());
        }
        let path = self.folder.join(UNPREPARED_FILE);
        // Left there, they would be applied at the next start to claims that were prepared again in between.
        let gone = match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => File::open(&self.folder).and_then(|folder| folder.sync_all()),
        };
        gone.map_err(|source| SaveError::Doubtful {
            path,
            source: source.into(),
        })?;
        state.unprepared.clear();
        Ok(())
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

fn not_saved(path: &Path, source: BoxError) -> SaveError {
    SaveError::NotSaved {
        path: path.to_owned(),
        source,
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), SaveError> {
    told(path, replace(path, bytes, 0o600))
}

fn told(path: &Path, outcome: Result<(), ReplaceError>) -> Result<(), SaveError> {
    outcome.map_err(|error| match error {
        ReplaceError::Unchanged { .. } => not_saved(path, error.into()),
        ReplaceError::Replaced { .. } => SaveError::Doubtful {
            path: path.to_owned(),
            source: error.into(),
        },
    })
}

/// Makes the state folder if need be, for its owner alone (0700).
///
/// # Errors
/// It can't be made, or is open to everybody.
pub fn make_folder(folder: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|source| Error::Folder {
            path: folder.to_owned(),
            source,
        })?;
    if folder
        .metadata()
        .is_ok_and(|found| found.mode() & WRITABLE_BY_ALL != 0)
    {
        return Err(Error::OpenToAll {
            path: folder.to_owned(),
        });
    }
    Ok(())
}

fn lock(folder: &Path) -> Result<Lock, Error> {
    let path = folder.to_owned();
    Lock::acquire(folder).map_err(|error| match error {
        lock::Error::Held { .. } => Error::Owned {
            path,
            source: error.into(),
        },
        lock::Error::Failed { .. } => Error::Lock {
            path,
            source: error.into(),
        },
    })
}

/// What is in the folder, what this version does not know of it, and in which boot it was written.
fn load(folder: &Path, boot_id: &BootId) -> Result<(Loaded, Unknown, Option<String>), Error> {
    let path = folder.join(LEDGER_FILE);
    let unreadable = |why: &dyn std::fmt::Display| {
        let why = format!(
            "The ledger {} {why}. Nothing is offered or given out until this is settled, and the file stays as it is. \
             Put a good copy in its place, or start the version that wrote it; or run `gpu-bridge ledger rebuild`, which \
             moves it to {BAD}<time>, so that who holds which GPU is found out anew from the kubelet and the API server. \
             Then restart gpu-bridge.",
            path.display()
        );
        let path = path.clone();
        Ok((Loaded::Unreadable { path, why }, Unknown::default(), None))
    };
    let bytes = match read_own(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok((Loaded::Missing, Unknown::default(), None));
        }
        Err(error) => return unreadable(&format_args!("can't be read: {error}")),
    };
    let decoded = match format::decode(&bytes) {
        Ok(decoded) => decoded,
        Err(error) => return unreadable(&error),
    };
    // The writer may have died between the rename and the flush of the folder. What is answered from this ledger
    // without a save of its own must not be undone by a power failure.
    for path in [&path, folder] {
        File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|source| Error::Flush {
                path: path.to_owned(),
                source,
            })?;
    }
    tracing::info!(
        generation = decoded.ledger.generation,
        same_boot = decoded.boot_id == boot_id.as_str(),
        "read the ledger"
    );
    Ok((
        Loaded::Ledger(decoded.ledger),
        decoded.unknown,
        Some(decoded.boot_id),
    ))
}

/// The list can be lost without harm: a claim that is not known to be unprepared keeps its unit until the API shows
/// it to be gone.
fn load_unprepared(folder: &Path) -> BTreeMap<ClaimUid, ClaimRef> {
    let path = folder.join(UNPREPARED_FILE);
    let claims = match read_own(&path) {
        Ok(bytes) => format::decode_unprepared(&bytes).map_err(BoxError::from),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return BTreeMap::new(),
        Err(error) => Err(error.into()),
    };
    claims.unwrap_or_else(|error| {
        tracing::warn!(
            error,
            path = %path.display(),
            "the list of unprepared claims can't be read and is not used; those claims count as prepared until they are gone"
        );
        BTreeMap::new()
    })
}
