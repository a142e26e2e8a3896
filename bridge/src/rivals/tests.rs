use std::os::unix::net::UnixListener;

use bridge_core::{Offers, Pool, Settings};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::*;
use crate::arbiter::Call;

/// Well under the time between two looks without an event.
const QUICK: Duration = Duration::from_secs(3);

/// A search on a node where nothing has happened for long, and the arbiter's end of its handle.
fn calm(folder: &Path) -> (Lookout, mpsc::Receiver<Call>) {
    let (calls, received) = mpsc::channel(1);
    let status = Pool::waiting(Settings::default()).status(std::time::SystemTime::UNIX_EPOCH);
    let handle = Handle::new(
        calls,
        watch::channel(Arc::new(Offers::default())).1,
        watch::channel(Arc::new(status)).1,
        std::time::Instant::now(),
    );
    let [device_plugins, registry] =
        ["device-plugins", "plugins_registry"].map(|it| folder.join(it));
    for folder in [&device_plugins, &registry] {
        std::fs::create_dir(folder).unwrap();
    }
    let places = Places {
        device_plugins,
        registry,
        kubelet_ids: Arc::new(|| Box::pin(async { Ok(BTreeSet::new()) })),
        is_registered: Arc::new(|| true),
        owner: Arc::new(|_| None),
    };
    let mut lookout = Lookout::new(places, handle);
    lookout.agrees = true;
    lookout.news = Instant::now() - 2 * WATCHFUL;
    (lookout, received)
}

#[tokio::test]
async fn where_nothing_happens_it_is_looked_rarely_and_where_somebody_may_come_often() {
    let folder = tempfile::tempdir().unwrap();
    let (mut lookout, _calls) = calm(folder.path());
    assert_eq!(lookout.pause(), WATCHED);
    lookout.agrees = false;
    assert_eq!(lookout.pause(), LOOK, "the kubelet counts something else");
    lookout.agrees = true;
    lookout.legacy.due.push(Instant::now() + WATCHFUL);
    assert_eq!(lookout.pause(), LOOK, "a face is to register anew");
    lookout.legacy.due.clear();
    lookout.news = Instant::now();
    assert_eq!(lookout.pause(), LOOK, "something has just changed");
}

#[tokio::test]
async fn while_a_rival_is_there_it_is_looked_often() {
    let folder = tempfile::tempdir().unwrap();
    let (mut lookout, mut calls) = calm(folder.path());
    let socket = lookout.places.device_plugins.join("nvidia-gpu.sock");
    let _plugin = UnixListener::bind(socket).unwrap();
    let (looked, _) = tokio::join!(lookout.look(), answer(&mut calls));
    looked.unwrap();
    assert_eq!(lookout.pause(), LOOK);
}

#[tokio::test]
async fn a_plugin_that_comes_is_told_at_once_though_nothing_has_happened_for_long() {
    let folder = tempfile::tempdir().unwrap();
    let (lookout, mut calls) = calm(folder.path());
    let below = lookout.places.device_plugins.join("below");
    let place = below.join("nvidia-gpu.sock");
    let stop = CancellationToken::new();
    let (stopped, path) = (stop.clone(), place.clone());
    let comes = async move {
        // Also where its folder has come a moment before.
        std::fs::create_dir(below).unwrap();
        let plugin = UnixListener::bind(path).unwrap();
        let told = timeout(QUICK, answer(&mut calls)).await;
        stopped.cancel();
        drop(plugin);
        told.expect("it is noticed by an event")
    };
    let (told, looked) = tokio::join!(comes, lookout.run(stop));
    looked.unwrap();
    let Observation::Rivals(rivals) = told else {
        panic!("{told:?}");
    };
    let places: Vec<&String> = rivals.iter().map(|rival| &rival.place).collect();
    assert_eq!(places, [&place.display().to_string()]);
}

/// Takes what the arbiter is told next.
async fn answer(calls: &mut mpsc::Receiver<Call>) -> Observation {
    match calls.recv().await {
        Some(Call::Observe { observation, reply }) => {
            reply.send(Ok(())).unwrap();
            observation
        }
        other => panic!("{other:?}"),
    }
}
