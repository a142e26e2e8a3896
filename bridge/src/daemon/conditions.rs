//! What the tasks say about themselves, as conditions of `/readyz`.

use bridge_core::{Claims, Face, Pods};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Ended;
use super::classes::Classes;
use crate::admin::{ConditionName, Conditions, Met};
use crate::config::live::Current;
use crate::config::{Demand, Source};
use crate::inventory::Scan;
use crate::migrate::Mapped;
use crate::usage::DemandState;
use crate::{device_plugin, dra};

/// Sets a condition to what `say` makes of each new value of a watch.
async fn follow<T, M: Into<Met>>(
    name: ConditionName,
    seen: watch::Receiver<T>,
    conditions: Conditions,
    stop: CancellationToken,
    say: impl Fn(&T) -> (M, String),
) -> Ended {
    // A second one of which nothing ever comes.
    let (_never, nothing) = watch::channel(());
    let seen = (seen, nothing);
    follow_both(name, seen, conditions, stop, |seen, ()| say(seen)).await
}

/// The same of two watches.
async fn follow_both<A, B, M: Into<Met>>(
    name: ConditionName,
    (mut one, mut other): (watch::Receiver<A>, watch::Receiver<B>),
    conditions: Conditions,
    stop: CancellationToken,
    say: impl Fn(&A, &B) -> (M, String),
) -> Ended {
    loop {
        let (met, message) = say(&one.borrow_and_update(), &other.borrow_and_update());
        conditions.set(name, met, message);
        let changed = tokio::select! {
            () = stop.cancelled() => return (name.as_str(), Ok(())),
            changed = one.changed() => changed,
            changed = other.changed() => changed,
        };
        if changed.is_err() {
            // The task that told it has ended, and says so itself.
            stop.cancelled().await;
            return (name.as_str(), Ok(()));
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
            Scan::Pending => (Met::Not(None), "NVML has not answered yet".to_owned()),
            Scan::Seen { gpus, failed, .. } if failed.is_empty() => {
                (Met::Fully, format!("{} GPUs answer", gpus.len()))
            }
            Scan::Seen { gpus, failed, .. } => (
                Met::Partly(None),
                format!(
                    "{} GPUs answer; these do not: {}",
                    gpus.len(),
                    failed.join("; ")
                ),
            ),
            Scan::Unavailable(error) => (Met::Not(None), error.clone()),
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
    use dra::{PublishState as State, TaintSupport};
    follow(
        ConditionName::SlicePublished,
        seen,
        conditions,
        stop,
        |state| match state {
            State::Waiting => (
                Met::Not(None),
                "the ResourceSlice is not published yet".to_owned(),
            ),
            State::Published {
                slice,
                devices,
                taints: TaintSupport::Dropped,
            } => (
                Met::Partly(None),
                format!(
                    "ResourceSlice {slice} has {devices} devices; the API server drops the taints of devices, so what claims may not take is left out of it, and the pods of a claim that lost a race are not evicted: that needs Kubernetes 1.36 and its feature gate DRADeviceTaints"
                ),
            ),
            State::Published {
                slice,
                devices,
                taints: TaintSupport::Unknown | TaintSupport::Kept,
            } => (
                Met::Fully,
                format!("ResourceSlice {slice} has {devices} devices"),
            ),
            State::Withdrawn => (
                Met::Fully,
                "the DRA face is closed, so there is no ResourceSlice".to_owned(),
            ),
            State::Failed { error } => (Met::Not(None), error.clone()),
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
            let met = match state {
                State::Starting => Met::Not(None),
                State::Kept => Met::Fully,
                State::NoKubelet
                | State::Unseen
                | State::NoStatusRight { .. }
                | State::Failing { .. } => Met::Partly(state.reason()),
            };
            (met, state.to_string())
        },
    )
    .await
}

/// Whoever waits need not be known for pods to be served: without that free units move by turns.
pub(super) async fn demand(
    seen: watch::Receiver<DemandState>,
    config: watch::Receiver<Current>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow_both(
        ConditionName::DemandTended,
        (seen, config),
        conditions,
        stop,
        |state, current| match (current.config.demand, state) {
            (Demand::Turns, _) => (
                Met::Fully,
                "free GPUs move by turns: offers.demand is turns".to_owned(),
            ),
            (Demand::Watch, state @ DemandState::Known) => (Met::Fully, state.to_string()),
            (
                Demand::Watch,
                state @ (DemandState::Starting
                | DemandState::NoDemandRight { .. }
                | DemandState::Unseen { .. }),
            ) => (Met::Partly(state.reason()), state.to_string()),
        },
    )
    .await
}

/// A class that makes claims of counted pods is no reason not to serve: both ways lead through one book.
pub(super) async fn classes(
    seen: watch::Receiver<Classes>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow(
        ConditionName::CountsStayCounts,
        seen,
        conditions,
        stop,
        |classes| {
            let (met, message) = match classes {
                Classes::Harmless => (
                    Met::Fully,
                    "no DeviceClass changes how counted pods come here: only one kind is served, or offers.minLegacy keeps the count above 0".to_owned(),
                ),
                Classes::Unread => (
                    Met::Fully,
                    "the DeviceClasses have not been read yet".to_owned(),
                ),
                Classes::Forbidden(why) => (
                    Met::Partly(None),
                    format!(
                        "whether a DeviceClass makes claims of counted pods is not known, because a right is missing; grant it as in manifests/base/rbac.yaml: {why}"
                    ),
                ),
                Classes::Known(Mapped::No | Mapped::NotKept | Mapped::Unknown) => (
                    Met::Fully,
                    format!(
                        "no DeviceClass has the extendedResourceName {}",
                        Face::Legacy.served_name()
                    ),
                ),
                Classes::Known(Mapped::NotHere(class)) => (
                    Met::Fully,
                    format!(
                        "{class} has the extendedResourceName {}, by which the scheduler of Kubernetes 1.34 makes no claims on a node that has a device plugin for it; from 1.35 on it does while the count is 0",
                        Face::Legacy.served_name()
                    ),
                ),
                Classes::Known(Mapped::By(class)) => (
                    Met::Partly(Some("MappedClass")),
                    format!(
                        "{class} has the extendedResourceName {}, so the scheduler makes claims of counted pods whenever the count of this node is 0. Set offers.minLegacy: 1, or take the name from the class until every node is in mode dra.",
                        Face::Legacy.served_name()
                    ),
                ),
            };
            (met, message)
        },
    )
    .await
}

/// A configuration that is not used is no reason not to serve, as long as there was a good one: that goes on.
pub(super) async fn config(
    seen: watch::Receiver<Current>,
    source: Option<Source>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow(
        ConditionName::ConfigInForce,
        seen,
        conditions,
        stop,
        |current| match (&current.lack, &source) {
            (Some(lack), _) if current.never_read => (
                Met::Not(Some(lack.reason())),
                format!(
                    "{}\nNothing is offered until there is a good configuration.",
                    lack.why()
                ),
            ),
            (Some(lack), _) => (
                Met::Partly(Some(lack.reason())),
                format!(
                    "{}\nThe last good configuration stays in force.",
                    lack.why()
                ),
            ),
            (None, Some(source)) => {
                let mut says = format!("{} is in force", source.origin().display());
                if let Some(profile) = &current.profile {
                    says.push_str(&format!(", with its profile {profile}"));
                }
                match current.remarks() {
                    [] => (Met::Fully, says),
                    remarks => {
                        let undone = remarks.join("\n  ");
                        (Met::Partly(None), format!("{says}; not done:\n  {undone}"))
                    }
                }
            }
            (None, None) => (
                Met::Fully,
                "there is no configuration file; the defaults are in force".to_owned(),
            ),
        },
    )
    .await
}

/// The API server, judged by the two watches that decisions need.
pub(super) async fn api(
    claims: watch::Receiver<Option<Claims>>,
    pods: watch::Receiver<Option<Pods>>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Ended {
    follow_both(
        ConditionName::ApiServerReachable,
        (claims, pods),
        conditions,
        stop,
        |claims, pods| {
            let (ok, message) = match (claims, pods) {
                (Some(_), Some(_)) => (true, "claims and pods are in sync"),
                (None, Some(_)) => (
                    false,
                    "the ResourceClaims of this node are not known: the API server does not answer, or a right to resourceclaims is missing: get, and, unless offers.notice is bind, list and watch",
                ),
                (Some(_), None) => (
                    false,
                    "the pods of this node are not known: neither the API server nor the kubelet's Pods API answers",
                ),
                (None, None) => (
                    false,
                    "the API server does not answer; what runs goes on, and counted pods are served",
                ),
            };
            (ok, message.to_owned())
        },
    )
    .await
}
