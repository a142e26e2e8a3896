//! The kubelet's own files: which ids it has allocated with which answer, and which claims it has prepared.
//!
//! Read only, and only while the ledger is missing or can't be read. Sources, all of kubernetes v1.37.2:
//! `pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go`, `pkg/kubelet/cm/dra/state/{checkpoint,state}.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bridge_core::{
    BoundPod, CheckpointedDevices, CheckpointedResponse, ClaimName, ClaimRef, ClaimUid, DeviceId,
    PodPhase, PodUid, Pods, UnitId, shown,
};
use legacy_proto::deviceplugin::ContainerAllocateResponse;
use prost::Message as _;
use serde::Deserialize;
use tokio::io::AsyncReadExt as _;
use tracing::warn;

use super::answer;
use super::{DRIVER, RESOURCE};
use crate::follow::chain;

/// File in the device plugin folder (`pkg/kubelet/cm/devicemanager/types.go`, `kubeletDeviceManagerCheckpoint`).
const DEVICES_FILE: &str = "kubelet_internal_checkpoint";
/// File in the kubelet's root folder (`pkg/kubelet/cm/dra/manager.go`, `draManagerStateFileName`).
const CLAIMS_FILE: &str = "dra_manager_state";

/// A container with GPUs has some 1 kB in the kubelet's book, and a node a few hundred. What is larger was not written
/// by a kubelet, and reading it whole could take the node's memory.
const FILE_LIMIT: u64 = 16 * 1024 * 1024;

/// Why a checkpoint says nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The file is there and can't be read.
    #[error("{} can't be read. Check the mount and the rights of gpu-bridge", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no JSON of the expected shape.
    #[error("{} is not a checkpoint that this version knows: {why}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The parser's words, which repeat what it did not expect.
        why: String,
    },
    /// Some part of it is not what it should be.
    #[error(
        "{} is damaged: {what}. A restart of the kubelet makes it write the file anew", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part, and what is wrong.
        what: String,
    },
}

/// What the kubelet has written down about our resource.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Devices {
    /// There is no such file: the kubelet has allocated nothing since the file was last removed.
    Missing,
    /// Each container's part.
    Entries(Vec<Entry>),
}

/// A container's part.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pod: PodUid,
    ids: BTreeSet<DeviceId>,
    /// Whether an id was left out because it can't be one of ours.
    ids_are_all: bool,
    answer: ContainerAllocateResponse,
}

impl Devices {
    /// The entries; none when the file is missing.
    pub(super) fn entries(&self) -> &[Entry] {
        match self {
            Self::Missing => &[],
            Self::Entries(entries) => entries,
        }
    }

    /// All ids that the kubelet counts as allocated, without those of pods that have ended: the kubelet leaves them in
    /// its book until it allocates again, and schedulers would take them for free. `None`: the pods are not known.
    pub(super) fn ids(&self, pods: Option<&Pods>) -> BTreeSet<DeviceId> {
        let has_ended = |entry: &&Entry| {
            let live = |bound: &BoundPod| bound.phase == PodPhase::Live && bound.uid == entry.pod;
            pods.is_some_and(|pods| !pods.pods.iter().any(live))
        };
        self.entries()
            .iter()
            .filter(|entry| !has_ended(entry))
            .flat_map(|entry| entry.ids.iter().cloned())
            .collect()
    }
}

impl Entry {
    /// The pod's UID.
    pub(super) fn pod(&self) -> &PodUid {
        &self.pod
    }

    /// For the pool. `minors` are the units of this node with their device minors.
    ///
    /// An answer that names more or fewer GPUs than the ids leaves a unit unexplained, so it counts as unknown. One that
    /// names indices is of NVIDIA's plugin, which never gives another GPU than the id names.
    pub(super) fn for_pool(&self, minors: &[(UnitId, u32)]) -> CheckpointedDevices {
        let mut units = answer::units(&self.answer, minors);
        let named: BTreeSet<UnitId> = self.ids.iter().map(|id| id.named_unit().clone()).collect();
        if units.is_empty() && answer::indices(&self.answer) == named.len() {
            units.clone_from(&named);
        }
        let explained = self.ids_are_all && !units.is_empty() && units.len() == named.len();
        CheckpointedDevices {
            pod: self.pod.clone(),
            ids: self.ids.iter().cloned().collect(),
            response: if explained {
                CheckpointedResponse::Units(units.into_iter().collect())
            } else {
                CheckpointedResponse::Unknown
            },
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicesFile {
    data: DevicesData,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicesData {
    pod_device_entries: Option<Vec<DevicesEntry>>,
}

#[derive(Deserialize)]
struct DevicesEntry {
    #[serde(rename = "PodUID")]
    pod: String,
    #[serde(rename = "ResourceName")]
    resource: String,
    /// By NUMA node; a device of several nodes is in each.
    #[serde(rename = "DeviceIDs")]
    ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    /// Base64, as Go writes bytes.
    #[serde(rename = "AllocResp")]
    answer: Option<String>,
}

/// Reads `kubelet_internal_checkpoint` in the device plugin folder.
///
/// Its checksum is over a Go dump of the structure and is not checked: the kubelet writes the file whole and renames
/// it, so a broken one does not parse.
pub(super) async fn read_devices(folder: &Path) -> Result<Devices, Error> {
    let path = folder.join(DEVICES_FILE);
    match read(&path).await? {
        None => Ok(Devices::Missing),
        Some(bytes) => devices_in(&path, &bytes),
    }
}

/// The content of `kubelet_internal_checkpoint`; `path` is for the errors.
pub(super) fn devices_in(path: &Path, bytes: &[u8]) -> Result<Devices, Error> {
    let file: DevicesFile = parse(path, bytes)?;
    let ours = file.data.pod_device_entries.unwrap_or_default();
    let entries = ours
        .into_iter()
        .filter(|entry| entry.resource == RESOURCE)
        .map(|entry| entry_of(entry).map_err(|what| damaged(path, what)))
        .collect::<Result<_, _>>()?;
    Ok(Devices::Entries(entries))
}

fn entry_of(entry: DevicesEntry) -> Result<Entry, String> {
    let about = |what: &str, why: String| format!("{what} of pod {:?}: {why}", entry.pod);
    let pod = PodUid::new(entry.pod.clone()).map_err(|error| error.to_string())?;
    let texts: BTreeSet<String> = entry
        .ids
        .into_iter()
        .flatten()
        .flat_map(|(_, ids)| ids.unwrap_or_default())
        .collect();
    let ids: BTreeSet<DeviceId> = texts
        .iter()
        .filter_map(|text| DeviceId::parse(text).ok())
        .collect();
    let bytes = STANDARD
        .decode(entry.answer.unwrap_or_default())
        .map_err(|error| about("AllocResp", error.to_string()))?;
    let answer = ContainerAllocateResponse::decode(bytes.as_slice())
        .map_err(|error| about("AllocResp", error.to_string()))?;
    Ok(Entry {
        pod,
        ids_are_all: ids.len() == texts.len(),
        ids,
        answer,
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ClaimsFile {
    /// JSON in JSON.
    data: String,
    /// CRC-32 (IEEE) of `data`.
    checksum: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ClaimsData {
    claim_info_state_list: Option<Vec<ClaimEntry>>,
}

#[derive(Deserialize)]
struct ClaimEntry {
    #[serde(rename = "ClaimUID")]
    uid: String,
    #[serde(rename = "Namespace")]
    namespace: String,
    #[serde(rename = "ClaimName")]
    name: String,
    #[serde(rename = "DriverState")]
    drivers: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

/// Reads the claims with a part of our driver from `dra_manager_state` in the kubelet's root folder. `None`: there is
/// no such file. A kubelet makes it when it starts, so that says nothing about claims.
pub(super) async fn read_claims(kubelet_dir: &Path) -> Result<Option<BTreeSet<ClaimRef>>, Error> {
    let path = kubelet_dir.join(CLAIMS_FILE);
    let bytes = read(&path).await?;
    bytes.map(|bytes| claims_in(&path, &bytes)).transpose()
}

/// The content of `dra_manager_state`; `path` is for the errors.
pub(super) fn claims_in(path: &Path, bytes: &[u8]) -> Result<BTreeSet<ClaimRef>, Error> {
    let file: ClaimsFile = parse(path, bytes)?;
    let found = crc32fast::hash(file.data.as_bytes());
    if found != file.checksum {
        let what = format!("its checksum is {}, and should be {found}", file.checksum);
        return Err(damaged(path, what));
    }
    let data: ClaimsData = parse(path, file.data.as_bytes())?;
    let ours = data
        .claim_info_state_list
        .into_iter()
        .flatten()
        .filter(|claim| {
            claim
                .drivers
                .as_ref()
                .is_some_and(|it| it.contains_key(DRIVER))
        });
    ours.map(|claim| {
        Ok(ClaimRef {
            uid: ClaimUid::new(claim.uid).map_err(|error| damaged(path, error.to_string()))?,
            namespace: claim.namespace,
            name: claim.name,
        })
    })
    .collect()
}

/// The names of the claims that the kubelet's state has with a part of our driver; none where it can't be read, which
/// is said in the log.
pub async fn checkpointed_claims(kubelet_dir: &Path) -> BTreeSet<ClaimName> {
    match read_claims(kubelet_dir).await {
        Ok(claims) => claims
            .into_iter()
            .flatten()
            .map(|claim| claim.full_name())
            .collect(),
        Err(error) => {
            warn!(
                error = chain(&error),
                "which claims the kubelet has prepared can't be read"
            );
            BTreeSet::new()
        }
    }
}

/// Reads a file of the kubelet up to [`FILE_LIMIT`].
async fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let whole = async {
        let mut bytes = Vec::new();
        let file = tokio::fs::File::open(path).await?;
        file.take(FILE_LIMIT + 1).read_to_end(&mut bytes).await?;
        if u64::try_from(bytes.len()).is_ok_and(|length| length > FILE_LIMIT) {
            let why = format!("it has more than {FILE_LIMIT} bytes");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
        Ok(bytes)
    };
    match whole.await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|error| Error::Parse {
        path: path.to_owned(),
        why: shown(&error.to_string()),
    })
}

fn damaged(path: &Path, what: String) -> Error {
    Error::Damaged {
        path: path.to_owned(),
        what,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Written with the kubelet's own types.
    const CLAIMS_OF_GO: &str = include_str!("../../../tests/testkit/golden/dra_manager_state.json");
    const NO_CLAIMS_OF_GO: &str =
        include_str!("../../../tests/testkit/golden/dra_manager_state-empty.json");
    /// In the form that Go writes; the second entry is of another resource.
    const DEVICES_OF_GO: &str = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a","GPU-b"],"0":["GPU-c"],"1":["GPU-c"]},"AllocResp":""},{"PodUID":"uid-2","ContainerName":"m","ResourceName":"r","DeviceIDs":{},"AllocResp":""}],"RegisteredDevices":{"a.b/c":[],"nvidia.com/gpu":["GPU-b","GPU-a"]}},"Checksum":1091373870}"#;

    async fn claims(text: &str) -> Result<Option<BTreeSet<ClaimRef>>, Error> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(CLAIMS_FILE), text).unwrap();
        read_claims(folder.path()).await
    }

    async fn devices(text: &str) -> Result<Devices, Error> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(DEVICES_FILE), text).unwrap();
        read_devices(folder.path()).await
    }

    #[tokio::test]
    async fn the_claims_of_our_driver_are_read_from_what_go_wrote() {
        let found = claims(CLAIMS_OF_GO).await.unwrap().unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|claim| (claim.uid.as_str(), claim.to_string()))
            .collect();
        let named = [("uid-1", "train/one"), ("uid-2", "train/two")];
        assert_eq!(found, named.map(|(uid, name)| (uid, name.to_owned())));
        assert!(claims(NO_CLAIMS_OF_GO).await.unwrap().unwrap().is_empty());
        let foreign = CLAIMS_OF_GO.replace("gpu-0", "gpu-7");
        let error = claims(&foreign).await.unwrap_err().to_string();
        assert!(error.contains("its checksum is"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_claims(folder.path()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_ids_of_our_resource_are_read_once_each() {
        let read = devices(DEVICES_OF_GO).await.unwrap();
        assert_eq!(read.entries().len(), 1);
        let ids: Vec<String> = read.ids(None).iter().map(ToString::to_string).collect();
        assert_eq!(ids, ["GPU-a", "GPU-b", "GPU-c"]);
        let gone = Pods {
            source: bridge_core::PodSource::Api,
            pods: Vec::new(),
        };
        assert_eq!(read.ids(Some(&gone)), BTreeSet::new());
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(devices(empty).await.unwrap(), Devices::Entries(Vec::new()));
        let folder = tempfile::tempdir().unwrap();
        let missing = read_devices(folder.path()).await.unwrap();
        assert_eq!(missing, Devices::Missing);
    }

    #[tokio::test]
    async fn an_answer_that_explains_fewer_units_than_ids_counts_as_unknown() {
        let answer = |names: &str| ContainerAllocateResponse {
            envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), names.to_owned())]
                .into_iter()
                .collect(),
            ..ContainerAllocateResponse::default()
        };
        for (names, explained) in [
            ("GPU-a", false),
            ("GPU-a,GPU-x", false),
            ("GPU-a,GPU-b,GPU-x", true),
            ("GPU-a,GPU-b,GPU-c,GPU-x", false),
        ] {
            let encoded = STANDARD.encode(answer(names).encode_to_vec());
            let text = DEVICES_OF_GO.replacen(
                r#""AllocResp":"""#,
                &format!(r#""AllocResp":"{encoded}""#),
                1,
            );
            let read = devices(&text).await.unwrap();
            let given = read.entries()[0].for_pool(&[]).response;
            let is_explained = matches!(given, CheckpointedResponse::Units(_));
            assert_eq!(is_explained, explained, "{names}");
        }
    }

    #[tokio::test]
    async fn a_damaged_answer_is_named() {
        for damaged in ["Kv8ACQ==", "?"] {
            let text = DEVICES_OF_GO.replacen(
                r#""AllocResp":"""#,
                &format!(r#""AllocResp":"{damaged}""#),
                1,
            );
            let error = devices(&text).await.unwrap_err().to_string();
            assert!(error.contains(r#"AllocResp of pod "uid-1""#), "{error}");
            assert!(error.contains(DEVICES_FILE), "{error}");
        }
    }
}
