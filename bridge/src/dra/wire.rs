//! The kubelet's DRA and registration messages, translated. Protobuf types of this face stop here.
//!
//! Sources: `k8s.io/kubelet` v0.37.2 `pkg/apis/dra/{v1,v1beta1}/api.proto`,
//! `pkg/apis/dra-health/{v1,v1alpha1}/api.proto` and `pkg/apis/pluginregistration/v1/api.proto`.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dra_proto::health_v1::dra_resource_health_server::{
    DraResourceHealth as HealthV1, DraResourceHealthServer as HealthServerV1,
};
use dra_proto::health_v1alpha1::dra_resource_health_server::{
    DraResourceHealth as HealthV1alpha1, DraResourceHealthServer as HealthServerV1alpha1,
};
use dra_proto::registration::registration_server::{Registration, RegistrationServer};
use dra_proto::registration::{
    DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use dra_proto::v1::dra_plugin_client::DraPluginClient as ClientV1;
use dra_proto::v1::dra_plugin_server::{DraPlugin as DraPluginV1, DraPluginServer as ServerV1};
use dra_proto::v1beta1::dra_plugin_server::{
    DraPlugin as DraPluginV1beta1, DraPluginServer as ServerV1beta1,
};
use dra_proto::{MAX_MESSAGE_BYTES, health_v1, health_v1alpha1, v1, v1beta1};
use futures::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tower::Service as _;

use super::DRIVER;
use super::health::{DeviceHealth, Health, STREAMS_LIMIT};
use super::register::Registrar;
use super::service::{Asked, CLAIMS_LIMIT, Service};
use crate::arbiter::PreparedReply;

/// The services of the DRA socket, in the order in which the kubelet is to prefer them: of each kind it takes the first
/// that it knows.
pub(super) const SERVICES: [&str; 4] = [
    v1::SERVICE,
    v1beta1::SERVICE,
    health_v1::SERVICE,
    health_v1alpha1::SERVICE,
];

/// An answer about prepared claims, by claim UID: devices, or the text for the pod's event.
pub(super) type Prepared = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

/// A device as the kubelet is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PreparedDevice {
    requests: Vec<String>,
    pool: String,
    device: String,
    cdi_devices: Vec<String>,
}

impl From<PreparedReply> for PreparedDevice {
    fn from(reply: PreparedReply) -> Self {
        Self {
            requests: reply.device.requests,
            pool: reply.device.pool,
            device: reply.device.device.to_string(),
            cdi_devices: vec![reply.cdi_device],
        }
    }
}

/// An answer about unprepared claims.
pub(super) type Unprepared = BTreeMap<String, Result<(), String>>;

/// All services of the DRA socket.
pub(super) fn dra_service(
    service: Arc<Service>,
) -> impl tower::Service<
    http::Request<Body>,
    Response = http::Response<Body>,
    Error = Infallible,
    Future: Send,
> + Clone
+ Send
+ 'static {
    let v1 = ServerV1::new(V1(Arc::clone(&service)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let v1beta1 = ServerV1beta1::new(V1beta1(Arc::clone(&service)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let health = HealthServerV1::new(V1(Arc::clone(&service)));
    let health_alpha = HealthServerV1alpha1::new(V1alpha1(service));
    tower::service_fn(move |request: http::Request<Body>| {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        match service {
            v1beta1::dra_plugin_server::SERVICE_NAME => v1beta1.clone().call(request),
            health_v1::dra_resource_health_server::SERVICE_NAME => health.clone().call(request),
            health_v1alpha1::dra_resource_health_server::SERVICE_NAME => {
                health_alpha.clone().call(request)
            }
            // What none knows, v1 answers: "unimplemented".
            _ => v1.clone().call(request),
        }
    })
}

/// The registration service.
pub(super) fn registration_service(registrar: Registrar) -> RegistrationServer<RegistrationV1> {
    RegistrationServer::new(RegistrationV1(registrar))
}

/// The v1 service.
#[derive(Debug)]
pub(super) struct V1(Arc<Service>);

#[tonic::async_trait]
impl DraPluginV1 for V1 {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let asked = asked(request.into_inner().claims)?;
        let claims = self
            .0
            .prepare(asked)
            .await
            .into_iter()
            .map(|(uid, answer)| (uid, v1_answer(answer)))
            .collect();
        Ok(Response::new(v1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let asked = asked(request.into_inner().claims)?;
        let claims = self
            .0
            .unprepare(asked)
            .await
            .into_iter()
            .map(|(uid, answer)| {
                let error = answer.err().unwrap_or_default();
                (uid, v1::NodeUnprepareResourceResponse { error })
            })
            .collect();
        Ok(Response::new(v1::NodeUnprepareResourcesResponse { claims }))
    }
}

/// The claims of a call, if they are not more than any kubelet asks for.
fn asked(claims: Vec<impl Into<Asked>>) -> Result<Vec<Asked>, Status> {
    if claims.len() > CLAIMS_LIMIT {
        return Err(Status::invalid_argument(format!(
            "the call names {} claims, and no kubelet asks for more than {CLAIMS_LIMIT} at once, so nothing was done",
            claims.len()
        )));
    }
    Ok(claims.into_iter().map(Into::into).collect())
}

impl From<Asked> for v1::Claim {
    fn from(asked: Asked) -> Self {
        Self {
            namespace: asked.namespace,
            name: asked.name,
            uid: asked.uid,
        }
    }
}

impl From<v1::Claim> for Asked {
    fn from(claim: v1::Claim) -> Self {
        Self {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
        }
    }
}

fn v1_answer(answer: Result<Vec<PreparedDevice>, String>) -> v1::NodePrepareResourceResponse {
    match answer {
        Ok(devices) => v1::NodePrepareResourceResponse {
            devices: devices.into_iter().map(v1_device).collect(),
            error: String::new(),
        },
        Err(error) => v1::NodePrepareResourceResponse {
            devices: Vec::new(),
            error,
        },
    }
}

fn v1_device(device: PreparedDevice) -> v1::Device {
    v1::Device {
        request_names: device.requests,
        pool_name: device.pool,
        device_name: device.device,
        cdi_device_ids: device.cdi_devices,
        share_id: None,
    }
}

/// The v1beta1 service: what kubelets before 1.34 know.
#[derive(Debug)]
pub(super) struct V1beta1(Arc<Service>);

#[tonic::async_trait]
impl DraPluginV1beta1 for V1beta1 {
    async fn node_prepare_resources(
        &self,
        request: Request<v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodePrepareResourcesResponse>, Status> {
        let asked = asked(request.into_inner().claims)?;
        let claims = self
            .0
            .prepare(asked)
            .await
            .into_iter()
            .map(|(uid, answer)| (uid, v1beta1_answer(answer)))
            .collect();
        Ok(Response::new(v1beta1::NodePrepareResourcesResponse {
            claims,
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1beta1::NodeUnprepareResourcesResponse>, Status> {
        let asked = asked(request.into_inner().claims)?;
        let claims = self
            .0
            .unprepare(asked)
            .await
            .into_iter()
            .map(|(uid, answer)| {
                let error = answer.err().unwrap_or_default();
                (uid, v1beta1::NodeUnprepareResourceResponse { error })
            })
            .collect();
        Ok(Response::new(v1beta1::NodeUnprepareResourcesResponse {
            claims,
        }))
    }
}

impl From<v1beta1::Claim> for Asked {
    fn from(claim: v1beta1::Claim) -> Self {
        Self {
            namespace: claim.namespace,
            name: claim.name,
            uid: claim.uid,
        }
    }
}

fn v1beta1_answer(
    answer: Result<Vec<PreparedDevice>, String>,
) -> v1beta1::NodePrepareResourceResponse {
    match answer {
        Ok(devices) => v1beta1::NodePrepareResourceResponse {
            devices: devices.into_iter().map(v1beta1_device).collect(),
            error: String::new(),
        },
        Err(error) => v1beta1::NodePrepareResourceResponse {
            devices: Vec::new(),
            error,
        },
    }
}

fn v1beta1_device(device: PreparedDevice) -> v1beta1::Device {
    v1beta1::Device {
        request_names: device.requests,
        pool_name: device.pool,
        device_name: device.device,
        cdi_device_ids: device.cdi_devices,
    }
}

/// Answers of a health stream.
type Reports<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Reports of how the devices are, each in the words of one version of the API.
fn reports<T: 'static>(
    service: &Service,
    in_words: impl Fn(&str, Vec<DeviceHealth>) -> T + Send + 'static,
) -> Result<Response<Reports<T>>, Status> {
    let reports = service.watch_health().ok_or_else(|| {
        Status::resource_exhausted(format!(
            "{STREAMS_LIMIT} streams of device health are open, and the kubelet has one"
        ))
    })?;
    let pool = service.pool().to_owned();
    let answers = reports.map(move |report| Ok(in_words(&pool, report)));
    Ok(Response::new(Box::pin(answers)))
}

/// Seconds since 1970.
fn unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}

#[tonic::async_trait]
impl HealthV1 for V1 {
    type NodeWatchResourcesStream = Reports<health_v1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _request: Request<health_v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        reports(&self.0, v1_report)
    }
}

fn v1_report(pool: &str, report: Vec<DeviceHealth>) -> health_v1::NodeWatchResourcesResponse {
    let at = unix_seconds();
    let devices = report.into_iter().map(|device| health_v1::DeviceHealth {
        device: Some(health_v1::DeviceIdentifier {
            pool_name: pool.to_owned(),
            device_name: device.device,
        }),
        health: match device.health {
            Health::Unknown => health_v1::HealthStatus::Unknown,
            Health::Healthy => health_v1::HealthStatus::Healthy,
            Health::Unhealthy => health_v1::HealthStatus::Unhealthy,
        }
        .into(),
        last_updated_time: at,
        // The kubelet's own, 30 s.
        health_check_timeout_seconds: 0,
        message: device.message,
    });
    health_v1::NodeWatchResourcesResponse {
        devices: devices.collect(),
    }
}

/// The health service of kubelets before 1.37.
#[derive(Debug)]
pub(super) struct V1alpha1(Arc<Service>);

#[tonic::async_trait]
impl HealthV1alpha1 for V1alpha1 {
    type NodeWatchResourcesStream = Reports<health_v1alpha1::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _request: Request<health_v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        reports(&self.0, v1alpha1_report)
    }
}

fn v1alpha1_report(
    pool: &str,
    report: Vec<DeviceHealth>,
) -> health_v1alpha1::NodeWatchResourcesResponse {
    let devices = v1_report(pool, report).devices.into_iter();
    let devices = devices.map(|device| health_v1alpha1::DeviceHealth {
        device: device
            .device
            .map(|device| health_v1alpha1::DeviceIdentifier {
                pool_name: device.pool_name,
                device_name: device.device_name,
            }),
        // The numbers are the same in both.
        health: device.health,
        last_updated_time: device.last_updated_time,
        health_check_timeout_seconds: device.health_check_timeout_seconds,
        message: device.message,
    });
    health_v1alpha1::NodeWatchResourcesResponse {
        devices: devices.collect(),
    }
}

/// Asks the daemon on another socket to prepare one claim: devices, or the text for the pod's event.
pub(super) async fn ask_to_prepare(
    channel: Channel,
    asked: Asked,
) -> Result<Result<Vec<PreparedDevice>, String>, Status> {
    let uid = asked.uid.clone();
    let request = v1::NodePrepareResourcesRequest {
        claims: vec![asked.into()],
    };
    let mut client = ClientV1::new(channel);
    let mut answers = client.node_prepare_resources(request).await?.into_inner();
    let answer = answers.claims.remove(&uid).ok_or_else(no_answer)?;
    if !answer.error.is_empty() {
        return Ok(Err(answer.error));
    }
    let devices = answer.devices.into_iter().map(|device| PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        cdi_devices: device.cdi_device_ids,
    });
    Ok(Ok(devices.collect()))
}

/// Asks the daemon on another socket to unprepare one claim; the inner error is its text.
pub(super) async fn ask_to_unprepare(
    channel: Channel,
    asked: Asked,
) -> Result<Result<(), String>, Status> {
    let uid = asked.uid.clone();
    let request = v1::NodeUnprepareResourcesRequest {
        claims: vec![asked.into()],
    };
    let mut client = ClientV1::new(channel);
    let mut answers = client.node_unprepare_resources(request).await?.into_inner();
    let answer = answers.claims.remove(&uid).ok_or_else(no_answer)?;
    Ok(if answer.error.is_empty() {
        Ok(())
    } else {
        Err(answer.error)
    })
}

fn no_answer() -> Status {
    Status::internal("there is no answer about the claim that was asked for")
}

/// The registration service.
#[derive(Debug)]
pub(super) struct RegistrationV1(Registrar);

#[tonic::async_trait]
impl Registration for RegistrationV1 {
    async fn get_info(
        &self,
        _request: Request<InfoRequest>,
    ) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(plugin_info(self.0.endpoint())))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            self.0.registered();
        } else {
            self.0.refused(&bridge_core::shown(&status.error));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

fn plugin_info(endpoint: &Path) -> PluginInfo {
    PluginInfo {
        r#type: DRA_PLUGIN.to_owned(),
        name: DRIVER.to_owned(),
        endpoint: endpoint.to_string_lossy().into_owned(),
        supported_versions: SERVICES.map(str::to_owned).to_vec(),
    }
}
