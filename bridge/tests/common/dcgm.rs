//! How an exporter of GPU metrics finds the pod of a GPU. It knows GPUs by their UUID and asks the kubelet's
//! pod-resources who has what: the id of a counted device is the UUID, and a claim's device is looked up in the
//! ResourceSlices, whose attribute `uuid` has it.
//!
//! Follows NVIDIA's dcgm-exporter, `internal/pkg/transformation/{kubernetes,dra}.go`.

use std::collections::BTreeMap;
use std::path::Path;

use legacy_proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use legacy_proto::podresources::{DIR, ListPodResourcesRequest, SOCKET};
use testkit::dial;

/// The resource of counted pods.
const RESOURCE: &str = "nvidia.com/gpu";
/// The driver of claims.
const DRIVER: &str = "gpu.nvidia.com";

/// What a metric of a GPU is labelled with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) pod: String,
    pub(crate) container: String,
    /// The claim, if it is one's.
    pub(crate) claim: Option<String>,
}

impl Label {
    /// The only container of a pod.
    pub(crate) fn of(pod: &str, claim: Option<&str>) -> Self {
        Self {
            pod: pod.to_owned(),
            container: "main".to_owned(),
            claim: claim.map(str::to_owned),
        }
    }
}

/// The label of each GPU that somebody has, by UUID. `uuids` has what the slices say: (pool, device) to UUID.
pub(crate) async fn labels(
    kubelet_dir: &Path,
    uuids: &BTreeMap<(String, String), String>,
) -> BTreeMap<String, Label> {
    let socket = kubelet_dir.join(DIR).join(SOCKET);
    let mut client = PodResourcesListerClient::new(dial::localhost(&socket));
    let answer = client.list(ListPodResourcesRequest {}).await;
    let pods = answer
        .expect("the kubelet answers")
        .into_inner()
        .pod_resources;
    let mut labels = BTreeMap::new();
    for pod in pods {
        for container in pod.containers {
            let label = |claim: Option<&str>| Label {
                pod: pod.name.clone(),
                container: container.name.clone(),
                claim: claim.map(str::to_owned),
            };
            for claim in &container.dynamic_resources {
                let devices = claim.claim_resources.iter();
                for device in devices.filter(|device| device.driver_name == DRIVER) {
                    let key = (device.pool_name.clone(), device.device_name.clone());
                    let uuid = uuids.get(&key).expect("the slice has the device");
                    labels.insert(uuid.clone(), label(Some(&claim.claim_name)));
                }
            }
            let devices = container.devices.iter();
            let ids = devices
                .filter(|device| device.resource_name == RESOURCE)
                .flat_map(|device| &device.device_ids);
            labels.extend(ids.map(|id| (id.clone(), label(None))));
        }
    }
    labels
}
