//! Admission: the device manager's part of it, container by container.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/manager.go`, `Allocate` and
//! `allocateContainerResources`.

use legacy_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
    PreferredAllocationRequest,
};

use super::devices::{Choice, Ids, Question, Want};
use super::pod::{Container, ContainerKind, Pod, Rejection};
use super::session::Session;
use crate::dial::go_error;
use crate::lock;

impl Session {
    /// Gives devices to all containers of a pod, init containers first.
    pub(crate) async fn allocate_pod(&self, pod: &Pod) -> Result<(), Rejection> {
        for container in &pod.containers {
            let done = self.allocate(&pod.uid, container).await;
            done.map_err(|error| Rejection {
                reason: "UnexpectedAdmissionError".to_owned(),
                message: format!("Allocate failed due to {error}, which is unexpected"),
            })?;
        }
        Ok(())
    }

    /// Gives devices to one container. What it has already it keeps, without a call.
    pub(crate) async fn allocate(
        &self,
        pod_uid: &str,
        container: &Container,
    ) -> Result<(), String> {
        lock(&self.devices).begin_reuse(pod_uid);
        let mut changed = false;
        for (resource, count) in &container.limits {
            if !lock(&self.devices).knows(resource) {
                continue;
            }
            self.free_inactive();
            let want = Want {
                pod_uid,
                container: &container.name,
                resource,
                count: usize::try_from(*count).expect("a u32 fits into usize"),
            };
            let Some(ids) = self.reserve(want).await? else {
                continue;
            };
            changed = true;
            self.call_allocate(want, &ids).await?;
        }
        if changed {
            self.save_devices();
        }
        let mut devices = lock(&self.devices);
        match container.kind {
            ContainerKind::Init => devices.leave_to_later(pod_uid, &container.name),
            ContainerKind::Sidecar | ContainerKind::App => devices.keep(pod_uid, &container.name),
        }
        Ok(())
    }

    async fn reserve(&self, want: Want<'_>) -> Result<Option<Ids>, String> {
        let choice = lock(&self.devices).reserve(want, &mut lock(&self.rng))?;
        let question = match choice {
            Choice::Nothing => return Ok(None),
            Choice::Reserved(ids) => return Ok(Some(ids)),
            Choice::Ask(question) => question,
        };
        let preferred = ask(&question, want.count).await?;
        let mut devices = lock(&self.devices);
        Ok(Some(devices.choose(
            want,
            question,
            &preferred,
            &mut lock(&self.rng),
        )))
    }

    async fn call_allocate(&self, want: Want<'_>, ids: &Ids) -> Result<(), String> {
        let Some(endpoint) = lock(&self.devices).endpoint(want.resource) else {
            lock(&self.devices).recount();
            return Err(format!("unknown Device Plugin {}", want.resource));
        };
        let answer = match endpoint.running() {
            None => Err(stopped(want.resource)),
            Some(mut client) => {
                self.pods.note_asked(want.pod_uid, ids);
                let request = AllocateRequest {
                    container_requests: vec![ContainerAllocateRequest {
                        devices_ids: lock(&self.rng).shuffled(ids),
                    }],
                };
                client.allocate(request).await.map_err(|it| go_error(&it))
            }
        };
        match answer {
            Err(error) => {
                lock(&self.devices).recount();
                Err(error)
            }
            // Here the kubelet forgets to give the reserved devices back.
            Ok(answer) => match answer.into_inner().container_responses.into_iter().next() {
                None => Err("no containers return in allocation response ".to_owned()),
                Some(answer) => {
                    lock(&self.devices).grant(want, ids, answer);
                    Ok(())
                }
            },
        }
    }
}

async fn ask(question: &Question, count: usize) -> Result<Ids, String> {
    let failed = |error: String| {
        format!("device plugin GetPreferredAllocation rpc failed with err: {error}")
    };
    let Some(mut client) = question.endpoint.running() else {
        return Err(failed(stopped("")));
    };
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_i_ds: question.available.iter().cloned().collect(),
            must_include_device_i_ds: question.chosen.iter().cloned().collect(),
            allocation_size: i32::try_from(count).expect("a pod asks for few devices"),
        }],
    };
    let answer = client.get_preferred_allocation(request).await;
    let answer = answer.map_err(|status| failed(go_error(&status)))?;
    let first = answer.into_inner().container_responses.into_iter().next();
    Ok(first.map_or_else(Ids::new, |it| it.device_i_ds.into_iter().collect()))
}

fn stopped(resource: &str) -> String {
    format!("endpoint {resource} has been stopped")
}
