//! The files of a state folder, as the library reads them.
//!
//! Every change is one file that appears, disappears or is replaced, so that a writer in any language needs
//! no lock: what a reader sees is either before or after.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::layout;
use crate::scenario::Fault;

/// A compute process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) used_memory_bytes: Option<u64>,
}

/// What may stand in a process file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProcessFile {
    used_memory_bytes: u64,
}

/// A state folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State(PathBuf);

impl State {
    pub(crate) fn at(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    pub(crate) fn is_lost(&self, gpu_uuid: &str) -> bool {
        layout::lost(&self.0, gpu_uuid).exists()
    }

    /// What has to be done about a GPU (`nvmlDeviceGpuRecoveryAction_t`).
    pub(crate) fn recovery(&self, gpu_uuid: &str) -> u32 {
        let number = fs::read_to_string(layout::recovery(&self.0, gpu_uuid));
        let number = number.ok().and_then(|text| text.trim().parse().ok());
        number.unwrap_or(0)
    }

    /// The compute processes of a GPU, by PID.
    pub(crate) fn processes(&self, gpu_uuid: &str) -> Vec<Process> {
        let Ok(folder) = fs::read_dir(layout::processes(&self.0, gpu_uuid)) else {
            return Vec::new();
        };
        let mut processes: Vec<_> = folder
            .flatten()
            // A name that is no PID is a writer's temporary file.
            .filter_map(|entry| {
                Some((
                    entry.file_name().to_str()?.parse::<u32>().ok()?,
                    entry.path(),
                ))
            })
            .map(|(pid, file)| Process {
                pid,
                // A file that is empty, half written or just deleted says nothing about memory.
                used_memory_bytes: fs::read(file)
                    .ok()
                    .and_then(|content| serde_json::from_slice::<ProcessFile>(&content).ok())
                    .map(|content| content.used_memory_bytes),
            })
            .collect();
        processes.sort_unstable();
        processes
    }

    /// The fault of a call that was set beside the scenario.
    pub(crate) fn fault(&self, call: &str) -> Result<Option<Fault>, String> {
        let file = layout::fault(&self.0, call);
        match fs::read(&file) {
            Ok(content) => serde_json::from_slice(&content)
                .map(Some)
                .map_err(|error| format!("{}: {error}. Correct or delete it", file.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{}: {error}", file.display())),
        }
    }

    /// Counts a call that has a fault, over all processes; answers how many there were before this one.
    pub(crate) fn count(&self, call: &str) -> io::Result<u32> {
        let file = layout::count(&self.0, call);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(file)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let before = text.trim().parse().unwrap_or(0_u32);
        file.rewind()?;
        file.set_len(0)?;
        write!(file, "{}", before.saturating_add(1))?;
        Ok(before)
    }

    /// Adds a call to the trace, if a trace is wanted.
    pub(crate) fn trace(&self, call: &str) {
        if let Ok(mut trace) = OpenOptions::new().append(true).open(layout::trace(&self.0)) {
            // One write, so that lines of several processes do not mix; a full disk loses a line of a trace.
            let _ = trace.write_all(format!("{call}\n").as_bytes());
        }
    }
}

/// Puts a file in place in one step.
pub(crate) fn replace(file: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = file.with_extension("tmp");
    let mut writer = File::create(&temporary)?;
    writer.write_all(content)?;
    drop(writer);
    rustix::fs::rename(&temporary, file)?;
    Ok(())
}
