//! Who has certain ids, asked pod by pod: inside of an `Allocate` a `List` does harm, and a `Get` does not.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use bridge_core::{DeviceId, HoldKind, ListedPod, Listing, PodName, PodPhase, Pods, Status};
use futures::future::{BoxFuture, try_join_all};
use legacy_proto::podresources::GetPodResourcesRequest;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Code;
use tracing::debug;

use super::{Error, LIST_LIMIT, PodResources, within_the_rate};
use crate::usage::status_text;

/// The most Gets for one question. The kubelet serves 100 calls a second and 10 at once, List included.
const GET_LIMIT: usize = 8;

/// Asks about the pods that may have the ids; the error is in words.
pub type AskAbout =
    Arc<dyn Fn(Vec<DeviceId>) -> BoxFuture<'static, Result<Listing, String>> + Send + Sync>;

/// [`PodResources::about`] with what is known when it is asked.
#[must_use]
pub fn ask_about(
    resources: PodResources,
    status: watch::Receiver<Arc<Status>>,
    pods: watch::Receiver<Option<Pods>>,
) -> AskAbout {
    Arc::new(move |ids| {
        let resources = resources.clone();
        let status = Arc::clone(&status.borrow());
        let pods = pods.borrow().clone();
        Box::pin(async move {
            let answer = resources.about(&ids, &status, pods.as_ref()).await;
            answer.map_err(|error| error.to_string())
        })
    })
}

/// Why a Get gave no answer about its pod.
enum Failed {
    /// The kubelet does not serve Get, or not now.
    NotServed(String),
}

impl PodResources {
    /// Asks for each pod that may have one of `ids`; takes 2 s at most, or 4 s with a kubelet that does not serve Get.
    ///
    /// The pods that are not asked about are as the last List showed them, so this is no proof that one of them has
    /// ended.
    ///
    /// # Errors
    /// The kubelet does not answer. That says nothing about any pod.
    pub async fn about(
        &self,
        ids: &[DeviceId],
        status: &Status,
        pods: Option<&Pods>,
    ) -> Result<Listing, Error> {
        let last = self.last_listing();
        let mut names = in_question(ids, status, pods, last.as_ref());
        if last.is_none() && (pods.is_none() || names.len() > GET_LIMIT) {
            // Without an answer to complete it, a part would be taken for the whole.
            return self.list().await;
        }
        names.truncate(GET_LIMIT);
        let gets = try_join_all(names.iter().map(|name| self.get(name)));
        let found = match timeout(LIST_LIMIT, gets).await {
            Ok(Ok(found)) => found,
            Ok(Err(Failed::NotServed(reason))) => {
                debug!(
                    error = reason,
                    "pod-resources serves no Get; it is asked for a List"
                );
                return self.list().await;
            }
            Err(_) => {
                return Err(Error::TimedOut {
                    socket: self.socket.clone(),
                });
            }
        };
        let others = last.map(|last| last.pods).unwrap_or_default();
        let others = others
            .into_iter()
            .filter(|listed| !names.contains(&listed.pod));
        Ok(Listing {
            pods: found.into_iter().flatten().chain(others).collect(),
        })
    }

    fn last_listing(&self) -> Option<Listing> {
        let last = self.last.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One pod; `None` if it is not active for the kubelet.
    async fn get(&self, name: &PodName) -> Result<Option<ListedPod>, Failed> {
        let request = GetPodResourcesRequest {
            pod_name: name.name.clone(),
            pod_namespace: name.namespace.clone(),
        };
        let get = within_the_rate(|| {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.get(request).await }
        });
        match get.await {
            Ok(answer) => Ok(answer
                .into_inner()
                .pod_resources
                .map(|pod| self.listed(pod))),
            Err(status) if is_absent(&status) => Ok(None),
            Err(status) => Err(Failed::NotServed(status_text(&status))),
        }
    }
}

/// A pod that is not there is an error without a code of its own; so is a Get that a feature gate switches off, as in
/// kubelets before 1.34, but its text is another.
fn is_absent(status: &tonic::Status) -> bool {
    let plain = matches!(status.code(), Code::Unknown | Code::NotFound);
    plain && status.message().ends_with("not found")
}

/// The pods that may have one of the ids, the likeliest first: who holds it or was listed with it, then counted pods
/// whose holds are not known, then all others that hold something counted.
fn in_question(
    ids: &[DeviceId],
    status: &Status,
    pods: Option<&Pods>,
    last: Option<&Listing>,
) -> Vec<PodName> {
    let bound: Vec<(&DeviceId, &PodName)> = status
        .units
        .iter()
        .flat_map(|unit| &unit.holds)
        .filter_map(|hold| match &hold.kind {
            HoldKind::Bound { id, pod } => Some((id, &pod.name)),
            HoldKind::Granted { .. }
            | HoldKind::Reserved { .. }
            | HoldKind::Prepared { .. }
            | HoldKind::Foreign { .. } => None,
        })
        .collect();
    let holders = bound.iter().filter(|(id, _)| ids.contains(id));
    let listed = last.into_iter().flat_map(|last| &last.pods);
    let listed = listed.filter(|listed| listed.ids().iter().any(|id| ids.contains(id)));
    let counted = pods.into_iter().flat_map(|pods| &pods.pods);
    let counted = counted.filter(|pod| pod.phase == PodPhase::Live && pod.may_own > 0);
    let unheld = counted.filter(|pod| bound.iter().all(|(_, name)| **name != pod.pod));
    let mut seen = BTreeSet::new();
    holders
        .map(|(_, name)| *name)
        .chain(listed.map(|listed| &listed.pod))
        .chain(unheld.map(|pod| &pod.pod))
        .chain(bound.iter().map(|(_, name)| *name))
        .filter(|name| seen.insert((*name).clone()))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pod_that_is_not_found_is_absent() {
        for (code, text) in [
            (Code::Unknown, "pod p in namespace a not found"),
            (Code::NotFound, "pod p in namespace a not found"),
        ] {
            assert!(is_absent(&tonic::Status::new(code, text)), "{text}");
        }
        for (code, text) in [
            (Code::Unknown, "PodResources API Get method disabled"),
            (Code::Unimplemented, "method Get not found"),
            (Code::ResourceExhausted, "too many requests"),
        ] {
            assert!(!is_absent(&tonic::Status::new(code, text)), "{text}");
        }
    }
}
