//! What another plugin says of itself.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use dra_proto::registration::registration_client::RegistrationClient;
use dra_proto::registration::{DEVICE_PLUGIN, DRA_PLUGIN, GET_INFO_TIMEOUT, InfoRequest};
use legacy_proto::deviceplugin::Empty;
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use tokio::time::timeout;

use super::{DRIVER, RESOURCE};
use crate::uds;

/// How long a plugin may take to send its list. It is the first thing that any of them does.
const LIST_LIMIT: Duration = Duration::from_secs(1);

/// What a registration socket is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plugin {
    /// A DRA driver of our name.
    Driver,
    /// A device plugin of our resource.
    Resource,
    /// Anything else.
    Other,
}

/// Asks who listens on a registration socket, with the call that the kubelet makes. `None`: no answer.
pub(super) async fn plugin(socket: &Path) -> Option<Plugin> {
    let mut client = RegistrationClient::new(uds::channel(socket));
    let answer = timeout(GET_INFO_TIMEOUT, client.get_info(InfoRequest {})).await;
    let info = answer.ok()?.ok()?.into_inner();
    Some(match (info.r#type.as_str(), info.name.as_str()) {
        (DRA_PLUGIN, DRIVER) => Plugin::Driver,
        (DEVICE_PLUGIN, RESOURCE) => Plugin::Resource,
        _ => Plugin::Other,
    })
}

/// The ids that a device plugin lists first. `None`: no answer.
pub(super) async fn first_list(socket: &Path) -> Option<BTreeSet<String>> {
    let mut client = DevicePluginClient::new(uds::channel(socket));
    let first = async {
        let mut stream = client.list_and_watch(Empty {}).await.ok()?.into_inner();
        stream.message().await.ok()?
    };
    let list = timeout(LIST_LIMIT, first).await.ok()??;
    Some(list.devices.into_iter().map(|device| device.id).collect())
}
