//! Which boot of the machine this is.

use std::fmt;
use std::io;
use std::path::Path;

/// Where the kernel says it, below `/proc` (`Documentation/admin-guide/sysctl/kernel.rst`, `random`).
const SOURCE: &str = "sys/kernel/random/boot_id";
/// What a boot is called whose id nobody could read.
const UNKNOWN: &str = "unknown";

/// The id that the kernel draws at each boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootId(String);

impl BootId {
    /// Reads it below `proc_root`, the flag `--proc-root`.
    ///
    /// # Errors
    /// The kernel's file can't be read. [`BootId::unknown`] is good enough then: the id is only told, in the
    /// ledger's file and at the start.
    pub fn read(proc_root: &Path) -> io::Result<Self> {
        let text = std::fs::read_to_string(proc_root.join(SOURCE))?;
        Ok(Self(text.trim().to_owned()))
    }

    /// For a machine that does not tell.
    #[must_use]
    pub fn unknown() -> Self {
        Self(UNKNOWN.to_owned())
    }

    /// The text itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
