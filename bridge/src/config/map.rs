//! The configuration from a ConfigMap at the API server: in force as soon as it is changed, where the kubelet brings a
//! mounted one to the node within a minute or two.
//!
//! What can't be read changes nothing: a server that is away, a right that is missing, a ConfigMap that is gone. The
//! last good text is kept on the node, so none of it matters to a restart either.

use std::path::Path;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::live::{self, Current, Lack, Taker};
use super::load::{self, Error};
use super::profile::{self, EVENT_BOUND};
use super::{KEY, MapName, Source};
use crate::follow::{self, Closeness, Event, Lists, Trouble, UNKNOWN_AFTER};

/// What holds at the start: the last good text, or what the ConfigMap says now. Where neither is to be had nothing is
/// offered, since nobody knows what an admin wants here, and what runs is served.
///
/// # Errors
/// What the ConfigMap says has mistakes, and no good text was kept.
pub async fn at_start(
    client: &Client,
    map: &MapName,
    node: &str,
    kept: &Path,
) -> Result<Current, Error> {
    let unread = || {
        Lack::Unread(format!(
            "the ConfigMap {map} has not been read since the start"
        ))
    };
    if let Some(current) = Current::kept(kept, unread) {
        return Ok(current);
    }
    let api = Api::<ConfigMap>::namespaced(client.clone(), &map.namespace);
    let found = profile::first_answer(api.get_opt(&map.name)).await;
    let text = found
        .map_err(|why| unreadable(map, &why))
        .and_then(|found| text_of(map, found));
    match text {
        Ok(text) => {
            let origin = Source::ConfigMap(map.clone()).origin();
            let label = || profile::read(client, node);
            live::begin(&origin, load::check_size(text), kept, label).await
        }
        Err(why) => Ok(Current::never_read(why)),
    }
}

/// Follows the ConfigMap until it is told to stop.
///
/// Needs the rights to list and watch this one ConfigMap.
pub async fn follow<K: Fn(&str)>(
    client: Client,
    map: MapName,
    mut taker: Taker<K>,
    stop: CancellationToken,
) {
    let (events, mut seen) = mpsc::channel(EVENT_BOUND);
    let (trouble, mut troubles) = watch::channel(Trouble::None);
    let following = follow::run(
        Api::<ConfigMap>::namespaced(client, &map.namespace),
        follow::Config {
            what: "configmaps",
            fields: Some(format!("metadata.name={}", map.name)),
            page_size: 1,
            lists: Lists::Once,
            closeness: Closeness::Close,
            unknown_after: UNKNOWN_AFTER,
            trouble: Some(trouble),
        },
        |map| map,
        |_| true,
        events,
    );
    let taking = async {
        // Whether a watch has shown the ConfigMap, and was not lost for long since.
        let mut is_shown = false;
        loop {
            tokio::select! {
                () = taker.relabelled() => {}
                event = seen.recv() => match event {
                    None => return,
                    Some(Event::Listed(all)) => {
                        is_shown = true;
                        take(&taker, &map, all.into_iter().next());
                    }
                    Some(Event::Applied(found)) => take(&taker, &map, Some(found)),
                    Some(Event::Deleted(_)) => take(&taker, &map, None),
                    Some(Event::Running) => {}
                    Some(Event::Unknown) => {
                        is_shown = false;
                        let trouble = troubles.borrow_and_update().clone();
                        taker.unread(&unreadable(&map, words(&trouble)));
                    }
                },
                Ok(()) = troubles.changed() => {
                    let trouble = troubles.borrow_and_update().clone();
                    if !is_shown && trouble != Trouble::None {
                        taker.unread(&unreadable(&map, words(&trouble)));
                    }
                }
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = following => {}
        () = taking => {}
    }
}

fn take<K: Fn(&str)>(taker: &Taker<K>, map: &MapName, found: Option<ConfigMap>) {
    match text_of(map, found) {
        Ok(text) => taker.take(load::check_size(text)),
        Err(why) => taker.unread(&why),
    }
}

/// The text in a ConfigMap, or why there is none.
fn text_of(map: &MapName, found: Option<ConfigMap>) -> Result<String, String> {
    let Some(found) = found else {
        return Err(format!(
            "there is no ConfigMap {map}; make it, or put it back"
        ));
    };
    let mut data = found.data.unwrap_or_default();
    data.remove(KEY).ok_or_else(|| {
        let keys: Vec<&str> = data.keys().map(String::as_str).collect();
        let has = if keys.is_empty() {
            "no key at all".to_owned()
        } else {
            format!("only {}", keys.join(", "))
        };
        format!("the ConfigMap {map} has {has}, and the configuration is expected under {KEY}")
    })
}

fn unreadable(map: &MapName, why: &str) -> String {
    format!("the ConfigMap {map} can't be read: {why}")
}

fn words(trouble: &Trouble) -> &str {
    match trouble {
        Trouble::None => "its watch has ended",
        Trouble::Forbidden(why) | Trouble::Other(why) => why,
    }
}
