//! Protocol to core, and core to protocol.

use bridge_core::{
    ContainerEdits, CountedOffer, DeviceId, Health, HostPath, Offers, Refusal, shown,
};
use legacy_proto::deviceplugin::{
    CdiDevice, ContainerAllocateResponse, Device, DevicePluginOptions, DeviceSpec, HEALTHY, Mount,
    NumaNode, TopologyInfo, UNHEALTHY,
};
use tonic::Status;

use crate::arbiter;

/// What the plugin wants of the kubelet: to be asked which ids it prefers, and nothing before a container starts
/// (with `pre_start_required` a pod that a claim serves under the same resource name would fail).
pub(super) fn options() -> DevicePluginOptions {
    DevicePluginOptions {
        pre_start_required: false,
        get_preferred_allocation_available: true,
    }
}

/// The list for `ListAndWatch`: all ids, in order.
pub(super) fn devices(offers: &Offers) -> Vec<Device> {
    offers.counted.iter().map(device).collect()
}

fn device(offer: &CountedOffer) -> Device {
    Device {
        id: offer.id.to_string(),
        health: match offer.health {
            Health::Healthy => HEALTHY,
            Health::Unhealthy => UNHEALTHY,
        }
        .to_owned(),
        topology: offer.numa_node.map(|node| TopologyInfo {
            nodes: vec![NumaNode {
                id: i64::from(node),
            }],
        }),
    }
}

/// The ids of one container's request.
pub(super) fn device_ids(texts: &[String]) -> Result<Vec<DeviceId>, Refusal> {
    texts
        .iter()
        .map(|text| DeviceId::parse(text).map_err(|_| Refusal::UnknownDeviceId { id: shown(text) }))
        .collect()
}

/// One container's answer.
pub(super) fn answer(edits: ContainerEdits) -> ContainerAllocateResponse {
    let mount = |path: HostPath| Mount {
        container_path: path.container_path,
        host_path: path.host_path,
        read_only: false,
    };
    let node = |path: HostPath| DeviceSpec {
        container_path: path.container_path,
        host_path: path.host_path,
        permissions: "rw".to_owned(),
    };
    let cdi_device = |name| CdiDevice { name };
    ContainerAllocateResponse {
        envs: edits.envs.into_iter().collect(),
        mounts: edits.mounts.into_iter().map(mount).collect(),
        devices: edits.device_nodes.into_iter().map(node).collect(),
        annotations: edits.annotations.into_iter().collect(),
        cdi_devices: edits.cdi_devices.into_iter().map(cdi_device).collect(),
    }
}

/// A refusal as the kubelet shows it in the pod's status.
pub(super) fn refused(refusal: &Refusal) -> Status {
    if refusal.is_unavailable() {
        Status::unavailable(refusal.to_string())
    } else {
        Status::failed_precondition(refusal.to_string())
    }
}

/// No decision was made.
pub(super) fn undecided(error: &arbiter::Error) -> Status {
    let reason = error.reason();
    Status::unavailable(format!(
        "{reason}: {error}. The kubelet does not try this pod again: delete it, so that it is scheduled anew."
    ))
}

#[cfg(test)]
mod tests {
    use bridge_core::UnitId;
    use tonic::Code;

    use super::*;

    fn offer(uuid: &str, health: Health, numa_node: Option<u32>) -> CountedOffer {
        let unit = UnitId::new(uuid).unwrap();
        CountedOffer {
            id: DeviceId::of_unit(unit.clone()),
            unit,
            health,
            numa_node,
            free: health == Health::Healthy,
            leaving: false,
            reserved: false,
        }
    }

    #[test]
    fn the_list_has_every_id_in_order_with_its_numa_node() {
        let offers = Offers {
            counted: vec![
                offer("GPU-b", Health::Unhealthy, None),
                offer("GPU-a", Health::Healthy, Some(0)),
            ],
            ..Offers::default()
        };
        let list = devices(&offers);
        assert_eq!(list[0].id, "GPU-b");
        assert_eq!(list[0].health, "Unhealthy");
        assert_eq!(list[0].topology, None);
        assert_eq!(list[1].id, "GPU-a");
        assert_eq!(list[1].health, "Healthy");
        let nodes = &list[1].topology.as_ref().unwrap().nodes;
        assert_eq!(nodes, &[NumaNode { id: 0 }]);
    }

    #[test]
    fn an_id_that_is_none_is_refused_by_its_text() {
        let ids = device_ids(&["GPU-a".to_owned(), "GPU-b::3".to_owned()]).unwrap();
        assert_eq!(ids[1].to_string(), "GPU-b::3");
        for bad in ["", "GPU a", "GPU-a::x", "../etc"] {
            let refusal = device_ids(&[bad.to_owned()]).unwrap_err();
            assert_eq!(refusal, Refusal::UnknownDeviceId { id: bad.to_owned() });
        }
    }

    #[test]
    fn a_refusal_is_a_failed_precondition_unless_the_daemon_is_not_ready() {
        let unknown = Refusal::UnknownDeviceId { id: "x".to_owned() };
        assert_eq!(refused(&unknown).code(), Code::FailedPrecondition);
        assert!(refused(&unknown).message().starts_with("UnknownDeviceId: "));
        let waiting = refused(&Refusal::WaitingForAdoption);
        assert_eq!(waiting.code(), Code::Unavailable);
        let undecided = undecided(&arbiter::Error::NotSaved("disk full".to_owned()));
        assert_eq!(undecided.code(), Code::Unavailable);
        let told = undecided.message();
        assert!(told.starts_with("NotSaved: ") && told.contains("disk full"));
        assert!(told.contains("delete it"), "{told}");
    }
}
