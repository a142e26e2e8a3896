//! Calls that a test makes by itself, as the kubelet makes them.

use std::path::Path;

use dra_proto::v1::dra_plugin_client::DraPluginClient;
use dra_proto::v1::{self, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
    PreferredAllocationRequest,
};
use testkit::dial;
use tonic::Status;
use tonic::transport::Channel;

use crate::world::{NAMESPACE, claim_uid};

/// A connection to a daemon's device plugin.
pub(crate) struct Plugin(DevicePluginClient<Channel>);

impl Plugin {
    pub(crate) fn at(socket: &Path) -> Self {
        Self(DevicePluginClient::new(dial::localhost(socket)))
    }

    /// Nothing but the way there and back.
    pub(crate) async fn nothing(&self) -> Result<(), String> {
        let answer = self.0.clone().get_device_plugin_options(Empty {}).await;
        answer.map(drop).map_err(|it| told(&it))
    }

    /// Calls `Allocate` for one container: CDI names, or code and text of the refusal.
    pub(crate) async fn allocate(&self, ids: &[&str]) -> Result<Vec<String>, String> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            }],
        };
        let answer = self.0.clone().allocate(request).await;
        let answer = answer.map_err(|it| told(&it))?.into_inner();
        let containers = answer.container_responses.into_iter();
        let devices = containers.flat_map(|it| it.cdi_devices);
        Ok(devices.map(|it| it.name).collect())
    }

    /// Asks which ids are preferred for one container.
    pub(crate) async fn prefer(&self, ids: &[String], size: usize) -> Result<Vec<String>, String> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_i_ds: ids.to_vec(),
                must_include_device_i_ds: Vec::new(),
                allocation_size: i32::try_from(size).expect("a node's GPUs"),
            }],
        };
        let answer = self.0.clone().get_preferred_allocation(request).await;
        let answer = answer.map_err(|it| told(&it))?.into_inner();
        let containers = answer.container_responses.into_iter();
        Ok(containers.flat_map(|it| it.device_i_ds).collect())
    }
}

/// A connection to a daemon's DRA driver.
pub(crate) struct Driver(DraPluginClient<Channel>);

impl Driver {
    pub(crate) fn at(socket: &Path) -> Self {
        Self(DraPluginClient::new(dial::localhost(socket)))
    }

    /// Prepares one claim: its devices, or the text of the refusal.
    pub(crate) async fn prepare(&self, claim: &str) -> Result<Vec<v1::Device>, String> {
        let claims = vec![named(claim)];
        let request = NodePrepareResourcesRequest { claims };
        let answer = self.0.clone().node_prepare_resources(request).await;
        let mut answer = answer.map_err(|it| told(&it))?.into_inner();
        let answer = answer.claims.remove(&claim_uid(claim)).unwrap();
        unless_refused(answer.error).map(|()| answer.devices)
    }

    /// Gives one claim back.
    pub(crate) async fn unprepare(&self, claim: &str) -> Result<(), String> {
        let claims = vec![named(claim)];
        let request = NodeUnprepareResourcesRequest { claims };
        let answer = self.0.clone().node_unprepare_resources(request).await;
        let mut answer = answer.map_err(|it| told(&it))?.into_inner();
        let answer = answer.claims.remove(&claim_uid(claim)).unwrap();
        unless_refused(answer.error)
    }
}

fn named(claim: &str) -> v1::Claim {
    v1::Claim {
        namespace: NAMESPACE.to_owned(),
        name: claim.to_owned(),
        uid: claim_uid(claim),
    }
}

fn told(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

fn unless_refused(error: String) -> Result<(), String> {
    if error.is_empty() { Ok(()) } else { Err(error) }
}
