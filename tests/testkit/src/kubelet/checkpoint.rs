//! The kubelet's two checkpoint files, in their real formats, checksums included.
//!
//! Sources: kubernetes v1.37.2, `pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go`,
//! `pkg/kubelet/checkpointmanager/checksum`, `pkg/kubelet/cm/dra/state/{state,checkpoint}.go`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use legacy_proto::deviceplugin::ContainerAllocateResponse;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::claims::{ClaimInfo, PreparedDevice};
use super::devices::{Devices, Grant, Grants};

/// `kubelet_internal_checkpoint`.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicesFile {
    data: DevicesData,
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicesData {
    pod_device_entries: Option<Vec<DevicesEntry>>,
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicesEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// Keys are NUMA nodes; Go and serde both write integer keys as strings.
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<i64, Vec<String>>,
    /// Base64 of the bytes of a `ContainerAllocateResponse`.
    alloc_resp: Option<String>,
}

/// Writes the device manager's checkpoint.
pub(crate) fn write_devices(path: &Path, devices: &Devices) -> anyhow::Result<()> {
    let (grants, healthy) = devices.for_checkpoint();
    let mut entries = Vec::new();
    for (pod_uid, containers) in grants {
        for (container_name, resources) in containers {
            for (resource_name, grant) in resources {
                entries.push(DevicesEntry {
                    pod_uid: pod_uid.clone(),
                    container_name: container_name.clone(),
                    resource_name: resource_name.clone(),
                    device_ids: grant.ids.clone(),
                    alloc_resp: Some(STANDARD.encode(grant.answer.encode_to_vec())),
                });
            }
        }
    }
    let registered = healthy
        .iter()
        .map(|(resource, ids)| (resource.clone(), Some(ids.iter().cloned().collect())))
        .collect();
    let data = DevicesData {
        // Go writes an empty list that was never appended to as null.
        pod_device_entries: (!entries.is_empty()).then_some(entries),
        registered_devices: Some(registered),
    };
    let checksum = u64::from(fnv32a(go_dump(&data)?.as_bytes()));
    write(path, &serde_json::to_vec(&DevicesFile { data, checksum })?)
}

/// Reads the device manager's checkpoint: who has what, and the resources that plugins had registered.
/// A missing file is an empty one.
///
/// # Errors
///
/// When the file can't be read, or its checksum is wrong.
pub(crate) fn read_devices(path: &Path) -> anyhow::Result<(Grants, Vec<String>)> {
    let Some(bytes) = read(path)? else {
        return Ok((Grants::new(), Vec::new()));
    };
    let file: DevicesFile = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is not a device checkpoint", path.display()))?;
    let expected = u64::from(fnv32a(go_dump(&file.data)?.as_bytes()));
    ensure!(
        file.checksum == expected,
        "{} is corrupt: its checksum is {}, its data make {expected}",
        path.display(),
        file.checksum
    );
    let mut grants = Grants::new();
    for entry in file.data.pod_device_entries.unwrap_or_default() {
        let answer = STANDARD.decode(entry.alloc_resp.unwrap_or_default())?;
        let grant = Grant {
            ids: entry.device_ids,
            answer: ContainerAllocateResponse::decode(answer.as_slice())?,
        };
        grants
            .entry(entry.pod_uid)
            .or_default()
            .entry(entry.container_name)
            .or_default()
            .insert(entry.resource_name, grant);
    }
    let registered = file.data.registered_devices.unwrap_or_default();
    Ok((grants, registered.into_keys().collect()))
}

/// The text that the kubelet takes the checksum of: the data as go-spew prints them with `%#v`.
fn go_dump(data: &DevicesData) -> anyhow::Result<String> {
    let mut text =
        String::from("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)");
    match &data.pod_device_entries {
        None => text.push_str("<nil>"),
        Some(entries) => {
            let entries: anyhow::Result<Vec<String>> = entries.iter().map(go_dump_entry).collect();
            write!(text, "[{}]", entries?.join(" "))?;
        }
    }
    text.push_str(" RegisteredDevices:(map[string][]string)");
    match &data.registered_devices {
        None => text.push_str("<nil>"),
        Some(registered) => {
            let lists: Vec<String> = registered
                .iter()
                .map(|(resource, ids)| match ids {
                    None => format!("{resource}:<nil>"),
                    Some(ids) => format!("{resource}:[{}]", ids.join(" ")),
                })
                .collect();
            write!(text, "map[{}]", lists.join(" "))?;
        }
    }
    text.push('}');
    Ok(text)
}

fn go_dump_entry(entry: &DevicesEntry) -> anyhow::Result<String> {
    let ids: Vec<String> = entry
        .device_ids
        .iter()
        .map(|(node, ids)| format!("{node}:[{}]", ids.join(" ")))
        .collect();
    let answer = match &entry.alloc_resp {
        None => "<nil>".to_owned(),
        Some(text) => {
            let bytes: Vec<String> = STANDARD.decode(text)?.iter().map(u8::to_string).collect();
            format!("[{}]", bytes.join(" "))
        }
    };
    Ok(format!(
        "{{PodUID:(string){} ContainerName:(string){} ResourceName:(string){} \
         DeviceIDs:(checkpoint.DevicesPerNUMA)map[{}] AllocResp:([]uint8){answer}}}",
        entry.pod_uid,
        entry.container_name,
        entry.resource_name,
        ids.join(" ")
    ))
}

fn fnv32a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

/// `dra_manager_state`: the data are JSON inside of a JSON string.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ClaimsFile {
    data: String,
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
struct ClaimsData {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Option<Vec<ClaimEntry>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ClaimEntry {
    #[serde(rename = "ClaimUID")]
    claim_uid: String,
    claim_name: String,
    namespace: String,
    /// A Go set: an empty object for each member.
    #[serde(rename = "PodUIDs")]
    pod_uids: BTreeMap<String, Empty>,
    driver_state: BTreeMap<String, DriverEntry>,
}

#[derive(Serialize, Deserialize)]
struct Empty {}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DriverEntry {
    devices: Option<Vec<DeviceEntry>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DeviceEntry {
    pool_name: String,
    device_name: String,
    #[serde(rename = "ShareID")]
    share_id: Option<String>,
    request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs")]
    cdi_device_ids: Option<Vec<String>>,
}

const CLAIMS_KIND: &str = "DRACheckpoint";
const CLAIMS_API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// Writes the DRA manager's checkpoint.
pub(crate) fn write_claims<'a>(
    path: &Path,
    claims: impl Iterator<Item = &'a ClaimInfo>,
) -> anyhow::Result<()> {
    let claims: Vec<ClaimEntry> = claims.map(claim_entry).collect();
    let data = serde_json::to_string(&ClaimsData {
        kind: CLAIMS_KIND.to_owned(),
        api_version: CLAIMS_API_VERSION.to_owned(),
        claims: (!claims.is_empty()).then_some(claims),
    })?;
    let checksum = crc32fast::hash(data.as_bytes());
    write(path, &serde_json::to_vec(&ClaimsFile { data, checksum })?)
}

fn claim_entry(info: &ClaimInfo) -> ClaimEntry {
    let device = |device: &PreparedDevice| DeviceEntry {
        pool_name: device.pool.clone(),
        device_name: device.device.clone(),
        share_id: device.share_id.clone(),
        request_names: (!device.requests.is_empty()).then(|| device.requests.clone()),
        cdi_device_ids: (!device.cdi_ids.is_empty()).then(|| device.cdi_ids.clone()),
    };
    ClaimEntry {
        claim_uid: info.uid.clone(),
        claim_name: info.name.clone(),
        namespace: info.namespace.clone(),
        pod_uids: info
            .pods
            .iter()
            .map(|uid| (uid.clone(), Empty {}))
            .collect(),
        driver_state: info
            .drivers
            .iter()
            .map(|(driver, devices)| {
                let devices: Vec<DeviceEntry> = devices.iter().map(device).collect();
                let entry = DriverEntry {
                    devices: (!devices.is_empty()).then_some(devices),
                };
                (driver.clone(), entry)
            })
            .collect(),
    }
}

/// Reads the DRA manager's checkpoint. A missing file is an empty one; no claim counts as prepared.
///
/// # Errors
///
/// When the file can't be read, or its checksum is wrong. The real kubelet does not start then.
pub(crate) fn read_claims(path: &Path) -> anyhow::Result<Vec<ClaimInfo>> {
    let Some(bytes) = read(path)? else {
        return Ok(Vec::new());
    };
    let file: ClaimsFile = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is not a claim checkpoint", path.display()))?;
    let expected = crc32fast::hash(file.data.as_bytes());
    ensure!(
        file.checksum == expected,
        "{} is corrupt: its checksum is {}, its data make {expected}",
        path.display(),
        file.checksum
    );
    let data: ClaimsData = serde_json::from_str(&file.data)?;
    let claims = data.claims.unwrap_or_default().into_iter().map(claim_info);
    Ok(claims.collect())
}

fn claim_info(entry: ClaimEntry) -> ClaimInfo {
    let device = |device: DeviceEntry| PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share_id: device.share_id,
        requests: device.request_names.unwrap_or_default(),
        cdi_ids: device.cdi_device_ids.unwrap_or_default(),
    };
    let drivers = entry.driver_state.into_iter().map(|(driver, state)| {
        let devices = state.devices.unwrap_or_default();
        (driver, devices.into_iter().map(device).collect())
    });
    ClaimInfo {
        uid: entry.claim_uid,
        name: entry.claim_name,
        namespace: entry.namespace,
        pods: entry.pod_uids.into_keys().collect(),
        drivers: drivers.collect(),
        prepared: false,
        unpreparing: false,
    }
}

fn read(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{} can't be read", path.display())),
    }
}

/// As the kubelet's file store: a temporary file in the same folder, renamed.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let dir = path.parent().context("a checkpoint lies in a folder")?;
    let mut file = tempfile::Builder::new().prefix(".").tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)
        .with_context(|| format!("{} can't be written", path.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files made with the kubelet's own types and go-spew's configuration.
    const OF_GO: [&str; 4] = [
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}"#,
        r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1944006890}"#,
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a","GPU-b"],"0":["GPU-c"],"1":["GPU-c"]},"AllocResp":"Kv8ACQ=="},{"PodUID":"uid-2","ContainerName":"m","ResourceName":"r","DeviceIDs":{},"AllocResp":""}],"RegisteredDevices":{"a.b/c":[],"nvidia.com/gpu":["GPU-b","GPU-a"]}},"Checksum":1091373870}"#,
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u\"x","ContainerName":"m","ResourceName":"r","DeviceIDs":{"10":["a"],"9":["b"]},"AllocResp":null}],"RegisteredDevices":{"x":null}},"Checksum":1272966373}"#,
    ];

    #[test]
    fn the_device_checksum_is_the_one_that_go_computes() {
        for text in OF_GO {
            let file: DevicesFile = serde_json::from_str(text).expect(text);
            let dump = go_dump(&file.data).expect(text);
            assert_eq!(u64::from(fnv32a(dump.as_bytes())), file.checksum, "{dump}");
        }
    }

    #[test]
    fn a_changed_device_checkpoint_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("checkpoint");
        fs::write(&path, OF_GO[0].replace("{}", r#"{"a.b/c":[]}"#)).expect("written");
        let error = read_devices(&path).expect_err("a wrong checksum");
        assert!(error.to_string().contains("is corrupt"), "{error}");
    }

    /// Files made with the kubelet's own types.
    const CLAIMS_OF_GO: [&str; 2] = [
        include_str!("../../golden/dra_manager_state-empty.json"),
        include_str!("../../golden/dra_manager_state.json"),
    ];

    #[test]
    fn a_claim_checkpoint_of_go_is_read_and_written_again_byte_by_byte() {
        let dir = tempfile::tempdir().expect("a folder");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        for (text, count) in CLAIMS_OF_GO.into_iter().zip([0, 2]) {
            fs::write(&from, text).expect("written");
            let claims = read_claims(&from).expect(text);
            assert_eq!(claims.len(), count);
            write_claims(&to, claims.iter()).expect(text);
            assert_eq!(fs::read_to_string(&to).expect("read"), text);
        }
    }

    #[test]
    fn a_changed_claim_checkpoint_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("checkpoint");
        fs::write(&path, CLAIMS_OF_GO[1].replace("gpu-0", "gpu-7")).expect("written");
        let error = read_claims(&path).expect_err("a wrong checksum");
        assert!(error.to_string().contains("is corrupt"), "{error}");
    }
}
