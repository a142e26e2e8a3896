//! What the tasks say about themselves, as conditions of `/readyz`.

use bridge_core::{Claims, Pods};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Ended;
use crate::admin::{ConditionName, Conditions};
use crate::inventory::Scan;
use crate::usage::DemandState;
use crate::{device_plugin, dra};

/// Sets a condition to what `say` makes of each new value of a watch.
async fn follow<T>(
    name: ConditionName,
    mut seen: watch::Receiver<T>,
    conditions: Conditions,
    stop: CancellationToken,
    say: impl Fn(&T) -> (bool, String),
) -> Ended {
    loop {
        let (ok, message) = say(&seen.borrow_and_update());
        conditions.set(name, ok, message);
        tokio::select! {
            () = stop.cancelled() => return (name.as_str(), Ok(())),
            changed = seen.changed() => if changed.is_err() {
                // The task that told it has ended, and says so itself.
                stop.cancelled().await;
                return (name.as_str(), Ok(()));
            }
        }
    }
}

pub(super) async fn nvml(
    seen: watch::Receiver<Scan>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow(
        ConditionName::NvmlAnswering,
        seen,
        conditions,
        stop,
        |scan| match scan {
            Scan::Pending => (false, "NVML has not answered yet".to_owned()),
            Scan::Seen { gpus, failed } if failed.is_empty() => {
                (true, format!("{} GPUs answer", gpus.len()))
            }
            Scan::Seen { gpus, failed } => (
                true,
                format!(
                    "{} GPUs answer; these do not: {}",
                    gpus.len(),
                    failed.join("; ")
                ),
            ),
            Scan::Unavailable(error) => (false, error.clone()),
        },
    )
    .await
}

pub(super) async fn device_plugin(
    seen: watch::Receiver<device_plugin::RegistrationState>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow(
        ConditionName::DevicePluginRegistered,
        seen,
        conditions,
        stop,
        |state| (state.is_registered(), state.to_string()),
    )
    .await
}

pub(super) async fn dra(
    seen: watch::Receiver<dra::RegistrationState>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    use dra::RegistrationState as State;
    follow(
        ConditionName::DraPluginRegistered,
        seen,
        conditions,
        stop,
        |state| match state {
            State::Starting => (
                false,
                "the DRA plugin's sockets are not there yet".to_owned(),
            ),
            State::NoSocket { error } => (false, error.clone()),
            State::Waiting => (
                false,
                "the kubelet has not come to the DRA plugin yet".to_owned(),
            ),
            State::Registered => (true, "the kubelet knows the DRA plugin".to_owned()),
            State::Refused { error } => (
                false,
                format!("the kubelet refused the DRA plugin: {error}"),
            ),
        },
    )
    .await
}

pub(super) async fn slice(
    seen: watch::Receiver<dra::PublishState>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    use dra::PublishState as State;
    follow(
        ConditionName::SlicePublished,
        seen,
        conditions,
        stop,
        |state| match state {
            State::Waiting => (false, "the ResourceSlice is not published yet".to_owned()),
            State::Published { slice, devices, .. } => {
                (true, format!("ResourceSlice {slice} has {devices} devices"))
            }
            State::Withdrawn => (
                true,
                "the DRA face is closed, so there is no ResourceSlice".to_owned(),
            ),
            State::Failed { error } => (false, error.clone()),
        },
    )
    .await
}

/// A count that can't be kept is no reason not to serve: free units stay on their side, and the message says so.
pub(super) async fn node_status(
    seen: watch::Receiver<device_plugin::NodeStatusState>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    use device_plugin::NodeStatusState as State;
    follow(
        ConditionName::NodeCountTended,
        seen,
        conditions,
        stop,
        |state| {
            let known = match state {
                State::Starting => false,
                State::Kept
                | State::NoKubelet
                | State::Unseen
                | State::NoStatusRight { .. }
                | State::Failing { .. } => true,
            };
            (known, state.to_string())
        },
    )
    .await
}

/// Whoever waits need not be known for pods to be served: without that free units move by turns.
pub(super) async fn demand(
    seen: watch::Receiver<DemandState>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow(
        ConditionName::DemandTended,
        seen,
        conditions,
        stop,
        |state| (true, state.to_string()),
    )
    .await
}

/// The API server, judged by the two watches that decisions need.
pub(super) async fn api(
    mut claims: watch::Receiver<Option<Claims>>,
    mut pods: watch::Receiver<Option<Pods>>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    let name = ConditionName::ApiServerReachable;
    loop {
        let claims_known = claims.borrow_and_update().is_some();
        let pods_known = pods.borrow_and_update().is_some();
        let (ok, message) = match (claims_known, pods_known) {
            (true, true) => (true, "claims and pods are in sync"),
            (false, true) => (
                false,
                "the ResourceClaims of this node are not known: the API server does not answer, or a right to resourceclaims is missing: get, and, unless offers.notice is bind, list and watch",
            ),
            (true, false) => (
                false,
                "the pods of this node are not known: neither the API server nor the kubelet's Pods API answers",
            ),
            (false, false) => (
                false,
                "the API server does not answer; what runs goes on, and counted pods are served",
            ),
        };
        conditions.set(name, ok, message);
        tokio::select! {
            () = stop.cancelled() => return (name.as_str(), Ok(())),
            changed = claims.changed() => if changed.is_err() { break },
            changed = pods.changed() => if changed.is_err() { break },
        }
    }
    stop.cancelled().await;
    (name.as_str(), Ok(()))
}
