//! The health stream of DRA drivers.
//!
//! Follows kubernetes v1.37.2, `pkg/kubelet/cm/dra/plugin` and `healthinfo.go`: one stream for each registered
//! instance, opened anew some seconds after its end, at which everything is forgotten. Not imitated: that a
//! report is forgotten when its time is over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dra_proto::health_v1::dra_resource_health_client::DraResourceHealthClient as ClientV1;
use dra_proto::health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as ClientV1alpha1;
use dra_proto::{health_v1, health_v1alpha1};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::drivers::{Driver, Drivers};

/// The pause before a stream that has ended is opened anew; the kubelet's is 5 s, and a test need not wait for that.
const OPEN_AGAIN: Duration = Duration::from_millis(100);

/// How a driver says that one of its devices is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// `Healthy`, `Unhealthy` or `Unknown`, as in `allocatedResourcesStatus` of a container.
    pub health: &'static str,
    /// The driver's words.
    pub message: String,
}

/// What one driver has reported, by pool and device.
pub(crate) type Reported = BTreeMap<(String, String), DeviceHealth>;

/// Follows the stream of an instance until it is no longer registered, or the kubelet stops.
pub(crate) async fn follow(
    drivers: Arc<Drivers>,
    name: String,
    driver: Driver,
    stop: CancellationToken,
) {
    let Some(service) = driver.health_service else {
        return;
    };
    while drivers.is_registered(&name, &driver.endpoint) {
        let told = |reported| drivers.note_health(&name, reported);
        let followed = async {
            if service == health_v1::SERVICE {
                follow_v1(&driver, told).await
            } else {
                follow_v1alpha1(&driver, told).await
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            _ended = followed => {}
        }
        drivers.forget_health(&name);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(OPEN_AGAIN) => {}
        }
    }
}

/// Follows one stream to its end. The versions of the API differ in their names alone, which are types to Rust.
macro_rules! follow {
    ($name:ident, $api:ident, $client:ident) => {
        async fn $name(driver: &Driver, told: impl Fn(Reported)) -> Result<(), Status> {
            let mut client = $client::new(driver.channel.clone());
            let request = $api::NodeWatchResourcesRequest {};
            let mut reports = client.node_watch_resources(request).await?.into_inner();
            while let Some(report) = reports.message().await? {
                let devices = report.devices.into_iter().map(|device| {
                    let named = device.device.unwrap_or_default();
                    let health = DeviceHealth {
                        health: word(device.health),
                        message: device.message,
                    };
                    ((named.pool_name, named.device_name), health)
                });
                told(devices.collect());
            }
            Ok(())
        }
    };
}

follow!(follow_v1, health_v1, ClientV1);
follow!(follow_v1alpha1, health_v1alpha1, ClientV1alpha1);

fn word(health: i32) -> &'static str {
    match health {
        1 => "Healthy",
        2 => "Unhealthy",
        _ => "Unknown",
    }
}
