//! Calls that come to this daemon after it has given the ledger to its successor.
//!
//! The kubelet calls the old socket until the successor is registered, and a counted pod whose `Allocate` fails has
//! failed for good. So the call is passed on as it is, and the successor's answer is the answer.

use std::path::{Path, PathBuf};

use bridge_core::PodUid;
use legacy_proto::deviceplugin::device_plugin_client::DevicePluginClient;
use legacy_proto::deviceplugin::{AllocateRequest, AllocateResponse};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::uds;

/// Asks the successor; `None` if it does not serve yet, or does not answer by `until`.
pub(super) async fn allocate(
    folder: &Path,
    successor: &PodUid,
    call: &AllocateRequest,
    until: Instant,
) -> Option<Result<AllocateResponse, Status>> {
    let socket = newest_socket(folder, successor)?;
    let mut client = DevicePluginClient::new(uds::channel(&socket));
    match timeout_at(until, client.allocate(call.clone())).await {
        Ok(Ok(answer)) => Some(Ok(answer.into_inner())),
        Ok(Err(status)) if uds::is_answer(&status) => Some(Err(status)),
        Ok(Err(status)) => {
            tracing::debug!(error = %status, socket = %socket.display(), "the successor does not answer yet");
            None
        }
        Err(_) => None,
    }
}

fn newest_socket(folder: &Path, successor: &PodUid) -> Option<PathBuf> {
    match uds::newest_device_plugin_socket(folder, successor.as_str()) {
        Ok(found) => found,
        Err(error) => {
            tracing::debug!(%error, folder = %folder.display(), "could not look for the successor's socket");
            None
        }
    }
}
