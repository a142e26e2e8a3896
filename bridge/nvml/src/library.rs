//! Loading, starting and leaving NVML.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::error::NvmlError;

use crate::error::{CallError, Error};

/// What the dynamic loader finds on a node with the driver installed.
const DEFAULT_LIBRARY: &str = "libnvidia-ml.so.1";

/// The library to load: the configured one, else what the dynamic loader finds.
pub(crate) fn path(configured: Option<&Path>) -> PathBuf {
    configured.map_or_else(|| PathBuf::from(DEFAULT_LIBRARY), Path::to_owned)
}

/// Loads the library and starts NVML.
pub(crate) fn open(library: &Path) -> Result<Nvml, Error> {
    // A node whose GPUs are all gone is a node with no GPU, and not one without NVML.
    match start(library.as_os_str(), InitFlags::NO_GPUS) {
        // A driver before nvmlInitWithFlags.
        Err(NvmlError::FailedToLoadSymbol(_)) => start(library.as_os_str(), InitFlags::empty())
            .map_err(|error| failure(library, "nvmlInit_v2", error)),
        other => other.map_err(|error| failure(library, "nvmlInitWithFlags", error)),
    }
}

/// Stops NVML and unloads the library, so that the next start sees new GPUs and a new driver.
pub(crate) fn close(nvml: Nvml) {
    // Dropping an `Nvml` whose library has no nvmlShutdown panics.
    if nvml.lib().nvmlShutdown.is_err() {
        tracing::warn!("the NVML library has no nvmlShutdown; it stays loaded");
        std::mem::forget(nvml);
        return;
    }
    if let Err(error) = nvml.shutdown() {
        tracing::debug!(%error, "NVML did not shut down cleanly");
    }
}

fn start(library: &OsStr, flags: InitFlags) -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(library).flags(flags).init()
}

fn failure(library: &Path, call: &'static str, error: NvmlError) -> Error {
    if let NvmlError::LibloadingError(reason) = error {
        return Error::LibraryNotLoaded {
            library: library.to_owned(),
            reason: chain(&reason),
        };
    }
    Error::NotInitialized {
        library: library.to_owned(),
        error: CallError::from_wrapper(call, error),
    }
}

/// An error and its causes, without what is said twice.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
