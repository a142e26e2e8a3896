//! Whether a DeviceClass makes claims of counted pods (KEP-5004) while this node serves both kinds.
//!
//! Classes are for the whole cluster, and modes for each node, so the one who makes the class need not know of this node.
//! Nothing is decided by it: it is told.

use std::collections::BTreeMap;
use std::future::pending;

use k8s_openapi::api::resource::v1::DeviceClass;
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::{Faces, Tasks, conditions, feeds};
use crate::follow::{self, Closeness, Event, Lists, Trouble, UNKNOWN_AFTER};
use crate::migrate::{Candidate, Mapped, minor_of, what_comes_of};

/// Classes per page of a list: a cluster has a few for each kind of device.
const PAGE_SIZE: u32 = 100;
/// Events that wait for this task, which takes each at once.
const EVENT_BOUND: usize = 16;

/// What is known of the classes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Classes {
    /// Nobody looks, since none of them could do anything to this node.
    #[default]
    Harmless,
    /// They have not been read since they matter.
    Unread,
    /// A right is missing: the server's words.
    Forbidden(String),
    /// They are followed: what they come to on this version of Kubernetes. What was seen last counts while the server
    /// is away.
    Known(Mapped),
}

impl Faces<'_> {
    /// Starts what looks at the classes, while the count of this node can be 0 beside free GPUs for claims.
    pub(super) fn start_classes(&self, tasks: &mut Tasks) {
        let (client, stop) = (self.client.clone(), self.stop.clone());
        let (out, seen) = watch::channel(Classes::default());
        tasks.spawn(conditions::classes(
            seen,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        tasks.spawn(feeds::while_chosen(
            "watch of DeviceClasses",
            self.config.clone(),
            |config| config.settings.can_count_be_0_beside_claims(),
            stop.clone(),
            move |they_matter| {
                let (client, out, stop) = (client.clone(), out.clone(), stop.clone());
                async move {
                    let looking = async {
                        if they_matter {
                            out.send_replace(Classes::Unread);
                            follow_classes(client, &out).await;
                        } else {
                            out.send_replace(Classes::Harmless);
                            pending::<()>().await;
                        }
                    };
                    stop.run_until_cancelled(looking).await;
                    Ok(())
                }
            },
        ));
    }
}

async fn follow_classes(client: Client, out: &watch::Sender<Classes>) {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let (told, mut trouble) = watch::channel(Trouble::None);
    let following = follow::run(
        Api::<DeviceClass>::all(client.clone()),
        follow::Config {
            what: "deviceclasses",
            fields: None,
            page_size: PAGE_SIZE,
            lists: Lists::Once,
            unknown_after: UNKNOWN_AFTER,
            closeness: Closeness::Loose,
            trouble: Some(told),
        },
        |class| Seen::of(&class),
        |seen: &Seen| seen.maps.is_some(),
        events,
    );
    let telling = async {
        let mut mapped = BTreeMap::new();
        let mut minor = None;
        loop {
            let now = tokio::select! {
                Some(event) = seen.recv() => {
                    match event {
                        Event::Unknown => continue,
                        // It may be another server, of a newer version.
                        Event::Listed(_) | Event::Running => minor = None,
                        Event::Applied(_) | Event::Deleted(_) => {}
                    }
                    take(&mut mapped, event);
                    if minor.is_none() && !mapped.is_empty() {
                        minor = minor_of(&client).await;
                    }
                    Classes::Known(what_comes_of(mapped.values().cloned(), minor))
                }
                Ok(()) = trouble.changed() => match &*trouble.borrow_and_update() {
                    Trouble::Forbidden(why) => Classes::Forbidden(why.clone()),
                    // With a watch that runs comes what it has missed.
                    Trouble::None | Trouble::Other(_) => continue,
                },
            };
            tell(out, now);
        }
    };
    tokio::select! {
        () = following => {}
        () = telling => {}
    }
}

fn tell(out: &watch::Sender<Classes>, now: Classes) {
    out.send_if_modified(|known| {
        let is_news = *known != now;
        if is_news && let Classes::Known(Mapped::By(class)) = &now {
            warn!(
                reason = "MappedClass",
                %class,
                "a class makes claims of counted pods whenever the count of this node is 0"
            );
        }
        *known = now;
        is_news
    });
}

/// A class, as far as it matters.
#[derive(Debug)]
struct Seen {
    name: String,
    /// `None`: it does not make claims of counted pods.
    maps: Option<Candidate>,
}

impl Seen {
    fn of(class: &DeviceClass) -> Self {
        Self {
            name: class.metadata.name.clone().unwrap_or_default(),
            maps: Candidate::of(class),
        }
    }
}

fn take(mapped: &mut BTreeMap<String, Candidate>, event: Event<Seen>) {
    match event {
        Event::Listed(all) => {
            let each = all.into_iter();
            *mapped = each
                .filter_map(|class| Some((class.name, class.maps?)))
                .collect();
        }
        Event::Applied(Seen { name, maps }) => match maps {
            Some(candidate) => drop(mapped.insert(name, candidate)),
            None => drop(mapped.remove(&name)),
        },
        Event::Deleted(class) => drop(mapped.remove(&class.name)),
        // After a right was missing, the watch alone says that what was seen before counts again.
        Event::Running | Event::Unknown => {}
    }
}
