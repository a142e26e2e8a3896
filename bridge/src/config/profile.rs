//! Which profile of the configuration holds on this node: the value of a label of its Node.
//!
//! It is looked at only while the configuration has profiles. The rights are those that the count in the Node's status
//! needs too.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::live::Current;
use crate::follow::{self, Closeness, Event, Lists, UNKNOWN_AFTER, chain};

/// The label whose value is the name of a profile.
pub const LABEL: &str = "gpu-bridge.dev/profile";

/// How long the server may take at a first start, before the daemon goes on without a configuration. With a last good
/// one nothing is waited for.
const FIRST_ANSWER: Duration = Duration::from_secs(5);

/// Events of one object that wait for the task that follows it, which takes each at once.
pub(super) const EVENT_BOUND: usize = 4;

/// What is known of the label.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Label {
    /// Nothing since the start.
    #[default]
    Unknown,
    /// Its value; `None`: the Node has no such label, or an empty one.
    Known(Option<String>),
}

/// Reads the label once, at a first start; `None`: the Node has no such label, or an empty one.
///
/// # Errors
/// It can't be read: why, in words.
pub async fn read(client: &Client, node: &str) -> Result<Option<String>, String> {
    let api = Api::<Node>::all(client.clone());
    first_answer(api.get(node))
        .await
        .map(|node| profile_of(&node))
}

/// What the server answers at a first start, or in words why it does not.
pub(super) async fn first_answer<T>(
    asked: impl Future<Output = kube::Result<T>>,
) -> Result<T, String> {
    match tokio::time::timeout(FIRST_ANSWER, asked).await {
        Ok(answer) => answer.map_err(|error| chain(&error)),
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}

/// Follows the label while the configuration has profiles, until told to stop. What was seen last goes on counting
/// while the server is away.
pub async fn follow(
    client: Client,
    node: String,
    mut current: watch::Receiver<Current>,
    label: watch::Sender<Label>,
    stop: CancellationToken,
) {
    let following = async {
        while current.wait_for(Current::has_profiles).await.is_ok() {
            let gone = async {
                // Who told it has ended, and says so itself.
                drop(current.wait_for(|current| !current.has_profiles()).await);
            };
            tokio::select! {
                // By the time that there are profiles again it may be another one.
                () = gone => drop(label.send_replace(Label::Unknown)),
                () = watch_label(&client, &node, &label) => {}
            }
        }
        std::future::pending::<()>().await;
    };
    stop.run_until_cancelled(following).await;
}

async fn watch_label(client: &Client, node: &str, label: &watch::Sender<Label>) {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let following = follow::run(
        Api::<Node>::all(client.clone()),
        follow::Config {
            what: "nodes",
            fields: Some(format!("metadata.name={node}")),
            page_size: 1,
            lists: Lists::Once,
            closeness: Closeness::Close,
            unknown_after: UNKNOWN_AFTER,
            trouble: None,
        },
        |node| profile_of(&node),
        |_| true,
        events,
    );
    let telling = async {
        while let Some(event) = seen.recv().await {
            let profile = match event {
                Event::Listed(all) => match all.into_iter().next() {
                    Some(profile) => profile,
                    None => continue,
                },
                Event::Applied(profile) => profile,
                // A Node that is made anew says what it says then.
                Event::Deleted(_) | Event::Running | Event::Unknown => continue,
            };
            let known = Label::Known(profile);
            label.send_if_modified(|label| {
                let is_news = *label != known;
                *label = known;
                is_news
            });
        }
    };
    tokio::select! {
        () = following => {}
        () = telling => {}
    }
}

fn profile_of(node: &Node) -> Option<String> {
    let labels = node.metadata.labels.as_ref()?;
    labels.get(LABEL).filter(|name| !name.is_empty()).cloned()
}
