//! The configuration while the daemon runs: what is in force, and why what its source shows now is not.
//!
//! A ConfigMap's volume changes by one rename of the link `..data`, an editor's file in several steps, so the folder is
//! watched and the text is compared. A text with mistakes changes nothing, nor does a profile that is not in it: what
//! was good goes on, and a copy of it is kept beside the ledger, so that a restart does not take the node's GPUs away for
//! a typing mistake.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bridge_core::Mode;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::load::{self, Error};
use super::profile::{LABEL, Label};
use super::{Config, Document};
use crate::folders::{Folders, Why};

/// So long after an event the file is read: who writes it in steps is done by then.
const WRITING: Duration = Duration::from_millis(100);

/// A text that was looked at; `Err`: it could not be read.
type Seen = Result<String, io::ErrorKind>;

/// What the source says. The default is what holds without one.
#[derive(Debug, Clone, Default)]
pub struct Current {
    /// What is in force.
    pub config: Arc<Config>,
    /// The profile by which it is.
    pub profile: Option<String>,
    /// Why it is not what the source shows now; `None`: it is.
    pub lack: Option<Lack>,
    /// No good configuration has ever been read, so nothing is offered until one is.
    pub never_read: bool,
    /// How many good texts there were since the start.
    pub generation: u64,
    /// The newest text without mistakes.
    document: Arc<Document>,
    /// The text that was looked at last.
    seen: Option<Seen>,
}

/// Why what is in force is not what the source shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// It has mistakes: all of them.
    Rejected(String),
    /// It shows nothing, or nobody knows what: why.
    Unread(String),
}

impl Lack {
    /// The name of its page in `migration-guide/reasons`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Rejected(_) => "ConfigFileRejected",
            Self::Unread(_) => "ConfigUnread",
        }
    }

    /// Why, in words.
    #[must_use]
    pub fn why(&self) -> &str {
        match self {
            Self::Rejected(why) | Self::Unread(why) => why,
        }
    }
}

impl Current {
    /// What holds where no good configuration was ever read: nobody knows what an admin wants here, so nothing is
    /// offered, and what runs is served.
    pub(super) fn never_read(why: String) -> Self {
        let mut config = Config::default();
        config.settings.mode = Mode::Drained;
        Self {
            config: Arc::new(config),
            lack: Some(Lack::Unread(why)),
            never_read: true,
            ..Self::default()
        }
    }

    /// The last good configuration, if one was kept.
    pub(super) fn kept(kept: &Path, lack: impl FnOnce() -> Lack) -> Option<Self> {
        let text = load::read(kept).ok()?;
        let profile = profile_of(&text);
        let document = load::interpret(kept, Ok(text)).ok()?;
        let config = document.choose(profile.as_deref()).ok()?.clone();
        Some(Self {
            config: Arc::new(config),
            profile,
            lack: Some(lack()),
            document: Arc::new(document),
            ..Self::default()
        })
    }

    /// Whether the node's label matters.
    #[must_use]
    pub fn has_profiles(&self) -> bool {
        !self.document.profiles.is_empty()
    }

    /// What of the file is not done, key by key.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.document.remarks
    }
}

/// What a kept text begins with, before the name of its profile: a comment of the file.
const KEPT_PROFILE: &str = "# profile: ";

/// A text to keep: with it the next start knows what was in force without asking for the node's label.
fn to_keep(text: &str, profile: Option<&str>) -> String {
    match profile {
        Some(profile) => format!("{KEPT_PROFILE}{profile}\n{text}"),
        None => text.to_owned(),
    }
}

fn profile_of(kept: &str) -> Option<String> {
    let first = kept.lines().next()?;
    first.strip_prefix(KEPT_PROFILE).map(str::to_owned)
}

/// What is in force at the start, when the source shows this text. `label` asks for the node's label, should that matter.
///
/// # Errors
/// The text is not good, and no good one was kept.
pub async fn begin<L: Future<Output = Result<Option<String>, String>>>(
    origin: &Path,
    text: io::Result<String>,
    kept: &Path,
    label: impl FnOnce() -> L,
) -> Result<Current, Error> {
    let seen = Some(seen(&text));
    let document = match load::interpret(origin, text) {
        Ok(document) => document,
        Err(error) => return rejected(error, kept, seen),
    };
    let mut profile = None;
    if !document.profiles.is_empty() {
        let unread = || {
            Lack::Unread(format!(
                "the label {LABEL} has not been read since the start"
            ))
        };
        if let Some(mut current) = Current::kept(kept, unread) {
            // The label goes on counting as it was, and what was in force where nobody has known it, until it is read.
            if current.profile.is_some()
                && let Ok(config) = document.choose(current.profile.as_deref())
            {
                current.config = Arc::new(config.clone());
            }
            current.document = Arc::new(document);
            current.seen = seen;
            return Ok(current);
        }
        match label().await {
            Ok(known) => profile = known,
            Err(why) => {
                let why = format!("the label {LABEL} of this node can't be read: {why}");
                return Ok(Current {
                    document: Arc::new(document),
                    seen,
                    ..Current::never_read(why)
                });
            }
        }
    }
    let config = document
        .choose(profile.as_deref())
        .map_err(|known| no_profile(origin, profile.as_deref(), &known))?
        .clone();
    tell_remarks(&document);
    Ok(Current {
        config: Arc::new(config),
        profile,
        document: Arc::new(document),
        seen,
        generation: 1,
        ..Current::default()
    })
}

fn rejected(error: Error, kept: &Path, seen: Option<Seen>) -> Result<Current, Error> {
    let Some(mut current) = Current::kept(kept, || Lack::Rejected(tell(&error))) else {
        return Err(error);
    };
    current.seen = seen;
    Ok(current)
}

fn no_profile(origin: &Path, name: Option<&str>, known: &[&str]) -> Error {
    Error::NoProfile {
        path: origin.to_owned(),
        profile: name.unwrap_or_default().to_owned(),
        known: known.join(", "),
    }
}

fn seen(text: &io::Result<String>) -> Seen {
    text.as_ref().cloned().map_err(io::Error::kind)
}

/// Reads the file.
///
/// # Errors
/// It can't be read, or is larger than a ConfigMap can be.
pub fn read(path: &Path) -> io::Result<String> {
    load::read(path)
}

/// Follows the file until it is told to stop.
pub async fn follow<K: Fn(&str)>(path: PathBuf, mut taker: Taker<K>, stop: CancellationToken) {
    let folder = path.parent().map(Path::to_owned);
    // A volume of a ConfigMap changes a link beside the file.
    let mut folders = Folders::new(folder, |_| true);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = taker.relabelled() => continue,
            why = folders.changed() => if why == Why::Changed {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(WRITING) => {}
                }
            },
        }
        taker.take(load::read(&path));
    }
}

/// Takes what a source and the node's label show, and says what is in force.
#[derive(Debug)]
pub struct Taker<K> {
    /// What messages call the source.
    origin: PathBuf,
    /// Keeps a good text for the next start.
    keep: K,
    current: watch::Sender<Current>,
    label: watch::Receiver<Label>,
}

impl<K: Fn(&str)> Taker<K> {
    /// One that goes on from what is in force. A good text is handed to `keep`, for the next start.
    pub fn new(
        origin: PathBuf,
        keep: K,
        current: watch::Sender<Current>,
        label: watch::Receiver<Label>,
    ) -> Self {
        if let Current {
            lack: None,
            seen: Some(Ok(text)),
            profile,
            ..
        } = &*current.borrow()
        {
            keep(&to_keep(text, profile.as_deref()));
        }
        Self {
            origin,
            keep,
            current,
            label,
        }
    }

    /// The source shows this.
    pub fn take(&self, text: io::Result<String>) {
        let seen = Some(seen(&text));
        if self.current.borrow().seen == seen {
            return;
        }
        match load::interpret(&self.origin, text) {
            Ok(document) => {
                if document.remarks != self.current.borrow().document.remarks {
                    tell_remarks(&document);
                }
                self.choose(document, seen);
            }
            Err(error) => {
                let lack = Lack::Rejected(tell(&error));
                self.current.send_modify(|current| {
                    current.lack = Some(lack);
                    current.seen = seen;
                });
            }
        }
    }

    /// Waits until the node's label is another one, and takes that.
    pub(super) async fn relabelled(&mut self) {
        if self.label.changed().await.is_err() {
            // Who told it has ended, and says so itself.
            return std::future::pending().await;
        }
        let seen = self.current.borrow().seen.clone();
        if let Some(Ok(text)) = &seen
            && let Ok(document) = load::interpret(&self.origin, Ok(text.clone()))
            && !document.profiles.is_empty()
        {
            self.choose(document, seen);
        }
    }

    /// Puts in force what a good text says for this node.
    fn choose(&self, document: Document, seen: Option<Seen>) {
        let label = self.label.borrow().clone();
        let profile = match label {
            _ if document.profiles.is_empty() => None,
            Label::Known(profile) => profile,
            // As it was before the start, until it is read.
            Label::Unknown if self.current.borrow().profile.is_some() => {
                self.current.borrow().profile.clone()
            }
            Label::Unknown => {
                let why = format!("the label {LABEL} of this node has not been read yet");
                return self.lacks(Lack::Unread(why), document, seen);
            }
        };
        let config = match document.choose(profile.as_deref()) {
            Ok(config) => config.clone(),
            Err(known) => {
                let error = no_profile(&self.origin, profile.as_deref(), &known);
                return self.lacks(Lack::Rejected(tell(&error)), document, seen);
            }
        };
        let former = self.current.borrow().clone();
        let is_same = *former.config == config && former.profile == profile && !former.never_read;
        let named = profile.as_deref().unwrap_or("none");
        if is_same {
            info!(origin = %self.origin.display(), profile = named, "the configuration was read and means what is in force already");
        } else {
            info!(origin = %self.origin.display(), profile = named, mode = config.settings.mode.as_str(), "the configuration has changed and is in force");
        }
        if let Some(Ok(text)) = &seen
            && !(is_same && *former.document == document)
        {
            (self.keep)(&to_keep(text, profile.as_deref()));
        }
        self.current.send_replace(Current {
            config: if is_same {
                former.config
            } else {
                Arc::new(config)
            },
            profile,
            lack: None,
            never_read: false,
            generation: former.generation + 1,
            document: Arc::new(document),
            seen,
        });
    }

    fn lacks(&self, lack: Lack, document: Document, seen: Option<Seen>) {
        self.current.send_modify(|current| {
            current.lack = Some(lack);
            current.document = Arc::new(document);
            current.seen = seen;
        });
    }

    /// The source shows nothing, or can't be asked: what is in force stays so.
    pub(super) fn unread(&self, why: &str) {
        let lack = Some(Lack::Unread(why.to_owned()));
        if self.current.borrow().lack == lack {
            return;
        }
        warn!(reason = "ConfigUnread", origin = %self.origin.display(), why, "the configuration is not read; what is in force stays so");
        self.current.send_modify(|current| {
            current.lack = lack;
            // The same text is news again.
            current.seen = None;
        });
    }
}

fn tell(error: &Error) -> String {
    error!(reason = "ConfigFileRejected", %error, "the configuration is not used; the last good one stays in force");
    error.to_string()
}

fn tell_remarks(document: &Document) {
    for remark in &document.remarks {
        warn!(remark, "something of the configuration is not done");
    }
}
