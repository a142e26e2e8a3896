//! List and watch of one kind of object, told as events.
//!
//! It differs from `kube::runtime::watcher` in what the bridge must know: whether a watch is running *now*. There,
//! a watch that was broken and runs again says nothing until the next object changes; here, that is
//! [`Event::Running`]. It also lets go of each page of a list before it asks for the next.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use kube::api::{ListParams, WatchParams};
use kube::core::WatchEvent;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{debug, info, warn};

/// How long a watch runs before it is opened anew where nothing else ends it. It also bounds how long a connection
/// that died in silence goes unnoticed. client-go uses 5 to 10 minutes; shorter costs the server a request each.
const WATCH_TIME: Duration = Duration::from_secs(240);

/// The same where nothing is decided by what is seen: on thousands of nodes each request less counts.
const LONG_WATCH_TIME: Duration = Duration::from_secs(1200);

/// What a watch may run over its time before it counts as dead.
const WATCH_MARGIN: Duration = Duration::from_secs(10);

/// How long the server may take to answer a list (per page), or to open a watch.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// After this long without a running watch most of what was seen counts as unknown, and is listed anew. Shorter
/// breaks (a closed connection, an API server that restarts) change nothing: the watch goes on where it ended.
pub(crate) const UNKNOWN_AFTER: Duration = Duration::from_secs(10);

/// Pause before the first retry; it doubles with each.
const RETRY_FIRST: Duration = Duration::from_millis(250);

/// The longest pause. A restarted API server is noticed within it; some thousand nodes then come back spread over it.
const RETRY_LAST: Duration = Duration::from_secs(15);

/// The same where nothing is decided by what is seen. A right that an older installation lacks may be missing for ever.
const LONG_RETRY_LAST: Duration = Duration::from_secs(300);

/// An error that stays the same is logged once in this time.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// What is to be followed.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The plural name, for the log.
    pub(crate) what: &'static str,
    /// Field selector.
    pub(crate) fields: Option<String>,
    /// Objects per page of a list.
    pub(crate) page_size: u32,
    /// How often everything is listed.
    pub(crate) lists: Lists,
    /// How closely it is followed.
    pub(crate) closeness: Closeness,
    /// After this long without a running watch what was seen counts as unknown.
    pub(crate) unknown_after: Duration,
    /// Where it is said why no watch runs, at once and in every attempt; for those who must tell a missing right from
    /// a server that is away.
    pub(crate) trouble: Option<watch::Sender<Trouble>>,
}

/// How closely something is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closeness {
    /// Decisions go by what is seen.
    Close,
    /// It is told, and nothing is decided by it.
    Loose,
}

impl Closeness {
    fn watch_time(self) -> Duration {
        match self {
            Self::Close => WATCH_TIME,
            Self::Loose => LONG_WATCH_TIME,
        }
    }

    fn retry_last(self) -> Duration {
        match self {
            Self::Close => RETRY_LAST,
            Self::Loose => LONG_RETRY_LAST,
        }
    }
}

/// Why no watch runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Trouble {
    /// One does, or the first attempt is not over.
    #[default]
    None,
    /// A role does not allow it; the server's words.
    Forbidden(String),
    /// Anything else, in words.
    Other(String),
}

/// Whether a watch is believed by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lists {
    /// Everything is listed where no watch can go on from what was seen.
    Once,
    /// Everything is listed again after this time, too, beside the watch. A list shows what a watch has lost
    /// (k/k#132683).
    Every(Duration),
}

/// What was seen.
#[derive(Debug)]
pub(crate) enum Event<T> {
    /// All there is. Unless the watch runs already, [`Event::Running`] follows at once.
    Listed(Vec<T>),
    /// One was made or changed.
    Applied(T),
    /// One is gone.
    Deleted(T),
    /// The watch runs: what was missed, if anything, comes now.
    Running,
    /// No watch for [`Config::unknown_after`]: what was seen is out of date. The next event is a list.
    Unknown,
}

/// Follows until the receiver is dropped. An API server that is away is waited for.
///
/// `digest` makes of an object what is kept of it; of a list only what `keep` wants is kept.
pub(crate) async fn run<K, T>(
    api: Api<K>,
    config: Config,
    digest: impl Fn(K) -> T + Send + Sync,
    keep: impl Fn(&T) -> bool + Send + Sync,
    events: mpsc::Sender<Event<T>>,
) where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
    T: Send,
{
    let mut complaints = Complaints::new(config.what);
    let follower = Follower {
        api,
        config,
        digest,
        keep,
        events,
    };
    let mut at = None;
    let mut lost = None;
    loop {
        let Some((stream, version)) = follower.connect(at, lost, &mut complaints).await else {
            return;
        };
        let opened = Instant::now();
        // Events of this size are in it several times.
        let Some(end) = Box::pin(follower.pass_on(stream, version)).await else {
            return;
        };
        if let Some(error) = &end.error {
            complaints.about(error);
        }
        let time = follower.config.closeness.watch_time();
        let ran_its_time = opened.elapsed() + WATCH_MARGIN >= time;
        at = end.version.map(|version| Resume {
            version,
            server: if end.error.is_none() && ran_its_time {
                Server::TheSame
            } else {
                Server::PerhapsAnother
            },
        });
        lost = Some(Instant::now());
    }
}

struct Follower<K, D, W, T> {
    api: Api<K>,
    config: Config,
    digest: D,
    keep: W,
    events: mpsc::Sender<Event<T>>,
}

type Stream<K> = BoxStream<'static, kube::Result<WatchEvent<K>>>;

/// From where a watch goes on.
#[derive(Debug, Clone)]
struct Resume {
    version: String,
    server: Server,
}

/// Whether the state of the server can be an older one than that which was seen: etcd may have been restored from a
/// backup, which takes an API server that is started anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// The watch ran its time.
    TheSame,
    /// It was broken off.
    PerhapsAnother,
}

/// Where a watch ended.
struct End {
    /// From where the next can go on; `None`: it can't.
    version: Option<String>,
    error: Option<String>,
}

impl End {
    /// The next follows on a list.
    fn anew(error: Option<String>) -> Self {
        Self {
            version: None,
            error,
        }
    }
}

impl<K, D, W, T> Follower<K, D, W, T>
where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
    D: Fn(K) -> T + Send + Sync,
    W: Fn(&T) -> bool + Send + Sync,
    T: Send,
{
    /// Tries until a watch runs. `None`: nobody listens any more.
    async fn connect(
        &self,
        resume: Option<Resume>,
        lost: Option<Instant>,
        complaints: &mut Complaints,
    ) -> Option<(Stream<K>, String)> {
        let connected = match lost {
            None => self.try_on(resume, complaints).await?,
            Some(lost) => {
                let resumed = {
                    let trying = pin!(self.try_on(resume, complaints));
                    timeout_at(lost + self.config.unknown_after, trying)
                        .await
                        .ok()
                };
                match resumed {
                    Some(connected) => connected?,
                    None => {
                        self.events.send(Event::Unknown).await.ok()?;
                        self.try_on(None, complaints).await?
                    }
                }
            }
        };
        complaints.none();
        self.tell_trouble(Trouble::None);
        self.events.send(Event::Running).await.ok()?;
        Some(connected)
    }

    fn tell_trouble(&self, trouble: Trouble) {
        if let Some(out) = &self.config.trouble {
            out.send_if_modified(|told| {
                let news = *told != trouble;
                *told = trouble;
                news
            });
        }
    }

    async fn try_on(
        &self,
        mut resume: Option<Resume>,
        complaints: &mut Complaints,
    ) -> Option<(Stream<K>, String)> {
        let mut pause = RETRY_FIRST;
        loop {
            match self.attempt(resume.as_ref()).await {
                Ok(connected) => return Some(connected),
                Err(Failed::NobodyListens) => return None,
                // Too much has happened since: at once to the list.
                Err(Failed::Expired) if resume.is_some() => {
                    resume = None;
                    continue;
                }
                Err(Failed::Expired) => {
                    let error = "a list is too old as soon as it is read";
                    self.tell_trouble(Trouble::Other(error.to_owned()));
                    complaints.about(error);
                }
                Err(Failed::Forbidden(error)) => {
                    complaints.about(&error);
                    self.tell_trouble(Trouble::Forbidden(error));
                }
                Err(Failed::Error(error)) => {
                    complaints.about(&error);
                    self.tell_trouble(Trouble::Other(error));
                }
            }
            if let Some(resume) = &mut resume {
                resume.server = Server::PerhapsAnother;
            }
            sleep(spread(pause)).await;
            pause = (pause * 2).min(self.config.closeness.retry_last());
        }
    }

    /// Opens a watch, from a list where there is no version to go on from. The list is told once the watch is open:
    /// what nothing would correct is not told.
    async fn attempt(&self, resume: Option<&Resume>) -> Result<(Stream<K>, String), Failed> {
        if let Some(Resume { version, server }) = resume {
            if *server == Server::PerhapsAnother && self.is_behind(version).await? {
                info!(
                    what = self.config.what,
                    "the API server has an older state than was seen; everything is listed anew"
                );
                return Err(Failed::Expired);
            }
            return Ok((self.open(version).await?, version.clone()));
        }
        let (all, listed) = self.list().await?;
        let stream = self.open(&listed).await?;
        self.events
            .send(Event::Listed(all))
            .await
            .map_err(|_| Failed::NobodyListens)?;
        Ok((stream, listed))
    }

    async fn open(&self, from: &str) -> Result<Stream<K>, Failed> {
        let time = self.config.closeness.watch_time();
        let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        let mut params = WatchParams::default().timeout(seconds);
        if let Some(fields) = &self.config.fields {
            params = params.fields(fields);
        }
        match timeout(ANSWER_TIMEOUT, self.api.watch(&params, from)).await {
            Err(_) => Err(Failed::Error(no_answer("watch"))),
            Ok(Ok(stream)) => Ok(stream.boxed()),
            Ok(Err(error)) => Err(failed(&error)),
        }
    }

    /// Whether the server has not come to a version yet that was seen. A watch from there would be silent until it has
    /// (kubernetes v1.37.2, `apiserver/pkg/storage/cacher`, `processInterval`), and show nothing of what is different.
    async fn is_behind(&self, seen: &str) -> Result<bool, Failed> {
        // One object is enough: the version is that of the whole list.
        let params = self.list_params(1);
        let page = match timeout(ANSWER_TIMEOUT, self.api.list(&params)).await {
            Err(_) => return Err(Failed::Error(no_answer("list"))),
            Ok(Err(error)) => return Err(failed(&error)),
            Ok(Ok(page)) => page,
        };
        let now = page.metadata.resource_version.as_deref().and_then(number);
        // What is no number can't be gone on from.
        Ok(match (now, number(seen)) {
            (Some(now), Some(seen)) => now < seen,
            (None, _) | (_, None) => true,
        })
    }

    fn list_params(&self, page_size: u32) -> ListParams {
        let params = ListParams::default().limit(page_size);
        match &self.config.fields {
            Some(fields) => params.fields(fields),
            None => params,
        }
    }

    async fn list(&self) -> Result<(Vec<T>, String), Failed> {
        let mut kept = Vec::new();
        let mut params = self.list_params(self.config.page_size);
        loop {
            let page = match timeout(ANSWER_TIMEOUT, self.api.list(&params)).await {
                Err(_) => return Err(Failed::Error(no_answer("list"))),
                Ok(Err(error)) => return Err(failed(&error)),
                Ok(Ok(page)) => page,
            };
            kept.extend(page.items.into_iter().map(&self.digest).filter(&self.keep));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => {
                    let version = page.metadata.resource_version.ok_or_else(|| {
                        Failed::Error("the list has no resourceVersion".to_owned())
                    })?;
                    return Ok((kept, version));
                }
            }
        }
    }

    /// When everything is listed again, if nothing else happens.
    fn next_list(&self) -> Option<Instant> {
        match self.config.lists {
            Lists::Once => None,
            Lists::Every(time) => Some(Instant::now() + time),
        }
    }

    /// Passes events on until the watch ends. `None`: nobody listens any more.
    async fn pass_on(&self, mut stream: Stream<K>, version: String) -> Option<End> {
        let deadline = Instant::now() + self.config.closeness.watch_time() + WATCH_MARGIN;
        let mut due = self.next_list();
        let mut progress = Progress::from(version);
        let error = loop {
            let event = tokio::select! {
                event = timeout_at(deadline, stream.try_next()) => event,
                () = at(due) => match self.list().await {
                    Ok((all, version)) if progress.lists(&version) => {
                        due = self.next_list();
                        self.events.send(Event::Listed(all)).await.ok()?;
                        continue;
                    }
                    // Of a server with an older state, or overtaken by the watch: only a watch from a list is sure.
                    Ok(_) => return Some(End::anew(None)),
                    Err(failed) => return Some(End::anew(failed.into_text())),
                }
            };
            let event = match event {
                Err(_) => break Some("the watch did not end in its time".to_owned()),
                Ok(Err(error)) => break Some(chain(&error)),
                Ok(Ok(None)) => break None,
                Ok(Ok(Some(event))) => event,
            };
            let told = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => progress
                    .sees(&object)
                    .then(|| Event::Applied((self.digest)(object))),
                WatchEvent::Deleted(object) => progress
                    .sees(&object)
                    .then(|| Event::Deleted((self.digest)(object))),
                WatchEvent::Bookmark(bookmark) => {
                    progress.comes_to(&bookmark.metadata.resource_version);
                    None
                }
                WatchEvent::Error(status) => {
                    debug!(
                        what = self.config.what,
                        code = status.code,
                        "watch ended by the server"
                    );
                    return Some(End::anew(
                        (status.code != EXPIRED).then(|| status.message.clone()),
                    ));
                }
            };
            if let Some(told) = told {
                self.events.send(told).await.ok()?;
            }
        };
        let version = Some(progress.version);
        Some(End { version, error })
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// How far a watch has come.
struct Progress {
    /// From where the next can go on.
    version: String,
    /// The version of the newest object that it has shown.
    newest: Option<u64>,
    /// The version of the last list beside it.
    listed: Option<u64>,
}

impl Progress {
    fn from(version: String) -> Self {
        Self {
            version,
            newest: None,
            listed: None,
        }
    }

    /// Whether an object is news: what was listed beside the watch may come out of it later.
    fn sees(&mut self, object: &impl Resource) -> bool {
        let Some(version) = &object.meta().resource_version else {
            return true;
        };
        let is_news = self.comes_to(version);
        if is_news {
            self.newest = number(version);
        }
        is_news
    }

    /// Whether a version is later than the last list, as far as that can be told.
    fn comes_to(&mut self, version: &str) -> bool {
        let number = number(version);
        let is_later = number.is_none() || number > self.listed;
        if is_later {
            version.clone_into(&mut self.version);
        }
        is_later
    }

    /// Whether a list shows all that the watch has shown.
    fn lists(&mut self, version: &str) -> bool {
        let number = number(version);
        let shows_all = number >= self.newest;
        if shows_all {
            self.listed = number;
            version.clone_into(&mut self.version);
        }
        shows_all
    }
}

/// Versions are numbers that grow (KEP-5504).
fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

/// HTTP status of a resource version that is too old to go on from.
const EXPIRED: u16 = 410;

/// HTTP status of a missing right.
const FORBIDDEN: u16 = 403;

enum Failed {
    NobodyListens,
    /// The version to go on from is too old.
    Expired,
    /// A role does not allow it.
    Forbidden(String),
    Error(String),
}

impl Failed {
    /// What there is to complain about.
    fn into_text(self) -> Option<String> {
        match self {
            Self::NobodyListens | Self::Expired => None,
            Self::Forbidden(error) | Self::Error(error) => Some(error),
        }
    }
}

fn failed(error: &kube::Error) -> Failed {
    if let kube::Error::Api(status) = error {
        match status.code {
            EXPIRED => return Failed::Expired,
            FORBIDDEN => return Failed::Forbidden(chain(error)),
            _ => {}
        }
    }
    Failed::Error(chain(error))
}

fn no_answer(to: &str) -> String {
    format!(
        "no answer to the {to} within {} s",
        ANSWER_TIMEOUT.as_secs()
    )
}

/// Between half and all of a pause, so that the nodes of a cluster do not come back in step.
fn spread(pause: Duration) -> Duration {
    let half = pause / 2;
    let part = u32::try_from(RandomState::new().hash_one(0_u8) % 1024).unwrap_or(0);
    half + half * part / 1024
}

/// Logs an error when it is new, and then once in a while.
pub(crate) struct Complaints {
    what: &'static str,
    last: Option<(String, Instant)>,
}

impl Complaints {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, last: None }
    }

    pub(crate) fn about(&mut self, error: &str) {
        if let Some((text, at)) = &self.last
            && text == error
            && at.elapsed() < LOG_AGAIN
        {
            return;
        }
        warn!(
            what = self.what,
            error, "something of the API failed; it is tried again"
        );
        self.last = Some((error.to_owned(), Instant::now()));
    }

    pub(crate) fn none(&mut self) {
        if self.last.take().is_some() {
            info!(what = self.what, "what of the API had failed works again");
        }
    }
}

/// An error with all its causes. A cause that the text before has named already is not named again: some errors
/// show their source, as kube's do.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use kube::Client;
    use serde_json::json;
    use testkit::ApiServer;
    use tokio::task::JoinHandle;

    use super::*;

    fn node(name: &str) -> serde_json::Value {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    }

    /// Follows the names of all nodes.
    fn follow_nodes(
        api: &ApiServer,
        lists: Lists,
    ) -> (mpsc::Receiver<Event<String>>, JoinHandle<()>) {
        let client =
            Client::try_from(kube::Config::new(api.url().parse().expect("a URL"))).unwrap();
        let (events, seen) = mpsc::channel(4);
        let config = Config {
            what: "nodes",
            fields: None,
            page_size: 10,
            lists,
            closeness: Closeness::Close,
            unknown_after: UNKNOWN_AFTER,
            trouble: None,
        };
        let name = |node: Node| node.metadata.name.unwrap_or_default();
        let following = tokio::spawn(run(Api::all(client), config, name, |_| true, events));
        (seen, following)
    }

    #[tokio::test]
    async fn a_follower_that_relists_shows_everything_again_and_again() {
        let api = ApiServer::start().await.unwrap();
        api.put("nodes", node("a"));
        let (mut seen, following) = follow_nodes(&api, Lists::Every(Duration::from_secs(1)));
        let (mut lists, mut runs) = (0, 0);
        while lists < 3 {
            match seen.recv().await.expect("it goes on") {
                Event::Listed(all) => {
                    assert_eq!(all, ["a"]);
                    lists += 1;
                }
                Event::Running => runs += 1,
                Event::Applied(_) | Event::Deleted(_) | Event::Unknown => {
                    panic!("nothing happened in between")
                }
            }
        }
        let watches = api.count("watch", "nodes");
        assert_eq!((runs, watches), (1, 1), "one watch goes on beside them");
        api.put("nodes", node("b"));
        while !matches!(seen.recv().await, Some(Event::Applied(name)) if name == "b") {}
        drop(seen);
        following.await.expect("it ends when nobody listens");
    }

    #[test]
    fn a_list_beside_a_watch_is_believed_if_it_shows_all_that_the_watch_has_shown() {
        let node = |version: &str| Node {
            metadata: ObjectMeta {
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            ..Node::default()
        };
        let mut progress = Progress::from("5".to_owned());
        assert!(progress.sees(&node("7")));
        assert!(!progress.lists("6"), "the server is put back, or was slow");
        assert!(progress.lists("9"));
        // On its way since before the list: it would bring back what the list shows as changed or gone.
        assert!(!progress.sees(&node("8")));
        assert!(!progress.comes_to("8"));
        assert_eq!(progress.version, "9");
        assert!(progress.sees(&node("10")));
        assert!(progress.comes_to("12"));
        assert!(progress.lists("11"), "a bookmark shows nothing");
        assert_eq!(progress.version, "11");
    }

    #[tokio::test]
    async fn a_follower_of_an_api_server_that_is_put_back_to_an_older_state_lists_anew() {
        let api = ApiServer::start().await.unwrap();
        api.put("nodes", node("old"));
        let backup = api.back_up();
        api.delete("nodes", "", "old");
        api.put("nodes", node("new"));
        let (mut seen, following) = follow_nodes(&api, Lists::Once);
        let mut listed = async || {
            loop {
                match seen.recv().await.expect("it goes on") {
                    Event::Listed(all) => return all,
                    Event::Running | Event::Applied(_) | Event::Deleted(_) | Event::Unknown => {}
                }
            }
        };
        assert_eq!(listed().await, ["new"]);
        api.restore(backup);
        let listed_anew = timeout(Duration::from_secs(10), listed()).await;
        assert_eq!(listed_anew.expect("in time"), ["old"]);
        following.abort();
    }

    #[test]
    fn pauses_are_spread_over_half_of_their_length() {
        let pause = Duration::from_secs(8);
        for _ in 0..100 {
            let spread = spread(pause);
            assert!(spread >= pause / 2 && spread <= pause);
        }
    }
}
