//! The last seconds of a daemon that was told to stop: who serves the counted pods that are on their way.

use std::path::Path;
use std::time::Duration;

use bridge_core::PodUid;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::admin::{self, ConditionName, StatusPage};
use crate::arbiter::{Handle, Observation};
use crate::uds;

/// How long the counted pods that are on their way may take after SIGTERM. As a rule they are served within half a
/// second; one that hangs in the kubelet must not keep the daemon.
const CLEAR_LIMIT: Duration = Duration::from_secs(3);

/// How long a successor may take until the kubelet calls it. It needs some hundred milliseconds; with a kubelet that is
/// away nobody comes, and the one that stays registers when it is back.
const SUCCESSOR_LIMIT: Duration = Duration::from_secs(5);

/// How often the successor is asked: as long a pod's end is late at most.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// What a successor that serves has reported on.
const SERVES: [ConditionName; 3] = [
    ConditionName::LedgerServing,
    ConditionName::DevicePluginRegistered,
    ConditionName::DraPluginRegistered,
];

/// Returns when the daemon may end.
///
/// Without a successor that is when no counted pod is on its way here any more: where nobody serves, the kubelet fails
/// it for good. With one, the count is not this daemon's any more and stays as it is, and what this daemon does is to
/// pass calls on until the kubelet has learnt of the successor.
pub(super) async fn leave(handle: &Handle, admin_socket: &Path) {
    let mut successor = handle.successor();
    loop {
        let given = successor.wait_for(Option::is_some);
        let to = tokio::select! {
            biased;
            Ok(to) = given => to.clone(),
            () = until_clear(handle) => return,
        };
        let Some(to) = to else { continue };
        let mut taken_back = handle.successor();
        tokio::select! {
            () = until_it_serves(admin_socket, &to) => return,
            Ok(_) = taken_back.wait_for(Option::is_none) => {}
        }
    }
}

async fn until_clear(handle: &Handle) {
    if let Err(failure) = handle.observe(Observation::Leaving).await {
        warn!(error = %failure, "the count in the own Node stays as it is");
        return;
    }
    let mut offers = handle.offers();
    let clear = offers.wait_for(|offers| offers.clear);
    if timeout(CLEAR_LIMIT, clear).await.is_err() {
        warn!("counted pods may still be on their way here; the kubelet fails them");
    }
}

async fn until_it_serves(admin_socket: &Path, successor: &PodUid) {
    let socket = uds::own_admin_socket(admin_socket, successor.as_str());
    let serving = async {
        while !admin::status(&socket).await.is_ok_and(|page| serves(&page)) {
            sleep(ASK_AGAIN).await;
        }
    };
    match timeout(SUCCESSOR_LIMIT, serving).await {
        Ok(()) => info!(pod = %successor, "the successor serves"),
        Err(_) => {
            warn!(pod = %successor, "the successor does not serve yet, and this daemon ends all the same");
        }
    }
}

fn serves(page: &StatusPage) -> bool {
    SERVES.iter().all(|name| {
        let mut named = page.conditions.iter();
        named.any(|condition| condition.name == name.as_str() && condition.ok)
    })
}
