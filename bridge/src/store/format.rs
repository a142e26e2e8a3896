//! Between the bytes of a file and what they say, in whatever version they were written.

use std::collections::BTreeMap;

use bridge_core::{ClaimRef, ClaimUid, Ledger};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::envelope::{self, Damage};
use super::unknown::Unknown;
use super::v1;

/// The version of this program, as it is written into its files.
pub(super) const WRITER: &str = env!("CARGO_PKG_VERSION");

/// Why a file can't be used. A sentence that follows the name of the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("is damaged: {0}")]
    Damaged(#[from] Damage),
    #[error(
        "has format {format}, written by gpu-bridge {writer}; this is gpu-bridge {WRITER}, which reads formats up \
         to {}",
        v1::FORMAT
    )]
    Newer { format: u64, writer: String },
    #[error("is whole, but this version can't make sense of what gpu-bridge {writer} wrote: {why}")]
    Senseless { writer: String, why: String },
}

/// A ledger and all else that its file says.
#[derive(Debug)]
pub(super) struct Decoded {
    pub(super) ledger: Ledger,
    pub(super) unknown: Unknown,
    pub(super) boot_id: String,
}

/// The bytes of the ledger's file. Fails only for a ledger that breaks its own rules.
pub(super) fn encode(
    ledger: &Ledger,
    unknown: &Unknown,
    writer: &str,
    boot_id: &str,
) -> Result<Vec<u8>, String> {
    ledger.check()?;
    let file = v1::File::of(ledger, writer, boot_id);
    if *unknown == Unknown::default() {
        return pretty(&file);
    }
    // The detour sorts the fields by name; only what a newer version has written goes through it.
    let mut value = serde_json::to_value(&file).map_err(|error| error.to_string())?;
    unknown.put_back(&mut value);
    pretty(&value)
}

/// Reads the ledger's file.
pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, Error> {
    let (value, writer) = content(bytes)?;
    let senseless = |why: String| Error::Senseless {
        writer: writer.clone(),
        why,
    };
    let file: v1::File =
        serde_json::from_value(value.clone()).map_err(|error| senseless(error.to_string()))?;
    let understood = serde_json::to_value(&file).map_err(|error| senseless(error.to_string()))?;
    let unknown = Unknown::between(&value, &understood);
    let boot_id = file.boot_id.clone();
    let ledger = file
        .into_ledger()
        .map_err(|error| senseless(error.to_string()))?;
    ledger.check().map_err(senseless)?;
    Ok(Decoded {
        ledger,
        unknown,
        boot_id,
    })
}

/// The content of the list of claims that were unprepared while there was no ledger to say so.
#[derive(Debug, Serialize, Deserialize)]
struct Unprepared {
    format: u32,
    writer: String,
    claims: Vec<v1::Claim>,
}

/// The bytes of the list of unprepared claims.
pub(super) fn encode_unprepared(claims: &BTreeMap<ClaimUid, ClaimRef>) -> Result<Vec<u8>, String> {
    pretty(&Unprepared {
        format: v1::FORMAT,
        writer: WRITER.to_owned(),
        claims: claims.values().map(v1::Claim::of).collect(),
    })
}

/// Reads the list of unprepared claims.
pub(super) fn decode_unprepared(bytes: &[u8]) -> Result<BTreeMap<ClaimUid, ClaimRef>, Error> {
    let (value, writer) = content(bytes)?;
    let senseless = |why: String| Error::Senseless {
        writer: writer.clone(),
        why,
    };
    let list: Unprepared =
        serde_json::from_value(value).map_err(|error| senseless(error.to_string()))?;
    list.claims
        .into_iter()
        .map(|claim| {
            let claim = claim
                .into_core()
                .map_err(|error| senseless(error.to_string()))?;
            Ok((claim.uid.clone(), claim))
        })
        .collect()
}

fn pretty(content: &impl Serialize) -> Result<Vec<u8>, String> {
    let text = serde_json::to_string_pretty(content).map_err(|error| error.to_string())?;
    Ok(envelope::seal(&text))
}

/// What is inside the envelope, and who wrote it, provided that the format is one that this version reads.
fn content(bytes: &[u8]) -> Result<(Value, String), Error> {
    let unknown = || "of an unknown version".to_owned();
    let senseless = |writer, why: &str| Error::Senseless {
        writer,
        why: why.to_owned(),
    };
    let value: Value = serde_json::from_slice(envelope::open(bytes)?)
        .map_err(|error| senseless(unknown(), &error.to_string()))?;
    let writer = match value.get("writer").and_then(Value::as_str) {
        Some(writer) => writer.to_owned(),
        None => unknown(),
    };
    match value.get("format").and_then(Value::as_u64) {
        Some(format) if format > u64::from(v1::FORMAT) => Err(Error::Newer { format, writer }),
        Some(1) => Ok((value, writer)),
        Some(_) | None => Err(senseless(writer, "it does not say which format it has")),
    }
}
