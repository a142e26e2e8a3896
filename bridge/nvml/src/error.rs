//! What can go wrong with NVML, for people and for code that decides what to do.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;

/// Why a request to the NVML thread was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(
    clippy::error_impl_error,
    reason = "users name it by its crate: bridge_nvml::Error"
)]
pub enum Error {
    /// The library could not be loaded; the next request tries again.
    #[error(
        "the NVML library {} could not be loaded ({reason}). Install the NVIDIA driver on this node, or point \
         --nvml-library at the driver's libnvidia-ml.so.1; the next scan tries again", library.display()
    )]
    LibraryNotLoaded {
        /// The path or name that was tried.
        library: PathBuf,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The library is there, but NVML did not start; the next request tries again.
    #[error(
        "NVML of {} did not start: {error}. {}; the next scan tries again", library.display(), advice(error)
    )]
    NotInitialized {
        /// The path or name of the library.
        library: PathBuf,
        /// The call that failed.
        error: CallError,
    },
    /// A call about the node as a whole failed; NVML is started anew at the next request.
    #[error("NVML cannot list the GPUs of this node: {0}. NVML is started anew at the next scan")]
    Node(#[source] CallError),
    /// NVML was started anew before a long request was done.
    #[error("NVML was started anew while {what} was being read; it is read again later")]
    Interrupted {
        /// `the topology`.
        what: &'static str,
    },
    /// The driver did not answer in time. The request is still being worked on, but nobody waits for it.
    #[error(
        "NVML has not answered a request for {what} within {after:?}: the driver hangs or is very busy. See the \
         kernel log of this node for messages of NVRM; later requests are answered when the driver is"
    )]
    TimedOut {
        /// `the inventory`, `the processes`.
        what: &'static str,
        /// How long was waited.
        after: Duration,
    },
    /// So many requests wait already that the driver must be hanging.
    #[error(
        "{waiting} requests wait for NVML already: the driver hangs or is very busy. See the kernel log of this \
         node for messages of NVRM"
    )]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// The NVML thread could not be started.
    #[error(
        "the thread for NVML could not be started ({reason}). Raise the limit on threads of this container"
    )]
    NoThread {
        /// What the system said.
        reason: String,
    },
    /// The NVML thread has ended: the session was shut down, or a bug ended it.
    #[error(
        "the NVML thread has ended, so that nothing more is known of the GPUs. Restart the daemon"
    )]
    Ended,
}

/// What to do about an NVML that does not start.
fn advice(error: &CallError) -> &'static str {
    match error.code() {
        Some(Code::DriverNotLoaded) => {
            "Load the kernel module nvidia (lsmod shows it), or wait until the driver container has done so"
        }
        Some(Code::LibRmVersionMismatch) => {
            "The driver was upgraded: this library belongs to another version than the loaded kernel module; \
             load the module of the new version, which may take a reboot"
        }
        Some(Code::NoPermission) => "Run the daemon as root with access to /dev/nvidiactl",
        _ => "nvidia-smi on this node should say more",
    }
}

/// An NVML call that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// It answered something else than success.
    #[error("{call} answered {code}")]
    Answered {
        /// The name of the function.
        call: &'static str,
        /// The answer.
        code: Code,
    },
    /// The library has no such function: the driver is older than the function.
    #[error("{call} is missing from this driver's NVML library")]
    Missing {
        /// The name of the function.
        call: &'static str,
    },
    /// It answered with a value that cannot be right.
    #[error("{call} answered with {what}")]
    Nonsense {
        /// The name of the function.
        call: &'static str,
        /// The value.
        what: String,
    },
}

impl CallError {
    /// The answer, if the function was called and answered an error.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Answered { code, .. } => Some(*code),
            Self::Missing { .. } | Self::Nonsense { .. } => None,
        }
    }

    pub(crate) fn answered(call: &'static str, code: u32) -> Self {
        Self::Answered {
            call,
            code: Code::from(code),
        }
    }

    pub(crate) fn nonsense(call: &'static str, what: impl fmt::Display) -> Self {
        Self::Nonsense {
            call,
            what: what.to_string(),
        }
    }

    /// From the wrapper's error, which has no room for the newer codes but keeps their number.
    #[allow(
        clippy::wildcard_enum_match_arm,
        reason = "all others are codes of NVML, which the wrapper converts back"
    )]
    pub(crate) fn from_wrapper(call: &'static str, error: NvmlError) -> Self {
        match error {
            NvmlError::FailedToLoadSymbol(_) => Self::Missing { call },
            NvmlError::Utf8Error(_) => Self::nonsense(call, "text that is not UTF-8"),
            NvmlError::NulError(_)
            | NvmlError::LibloadingError(_)
            | NvmlError::StringTooLong { .. }
            | NvmlError::IncorrectBits(_)
            | NvmlError::SetReleaseFailed
            | NvmlError::GetPciInfoFailed
            | NvmlError::PciInfoToCFailed => Self::nonsense(call, error),
            answered => Self::answered(call, answered.into()),
        }
    }
}

/// Defines [`Code`] once, with number and meaning of each variant.
macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $meaning:literal;)*) => {
        /// What an NVML call answered, other than success (`nvmlReturn_t`, nvml.h of CUDA 13).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $meaning] $variant,)*
            /// A number that the header of CUDA 13 does not have.
            Other(u32),
        }

        impl Code {
            /// The number in nvml.h.
            #[must_use]
            pub fn number(self) -> u32 {
                match self {
                    $(Self::$variant => $number,)*
                    Self::Other(number) => number,
                }
            }
        }

        impl From<u32> for Code {
            fn from(number: u32) -> Self {
                match number {
                    $($number => Self::$variant,)*
                    other => Self::Other(other),
                }
            }
        }

        impl fmt::Display for Code {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let meaning = match self {
                    $(Self::$variant => $meaning,)*
                    Self::Other(_) => "an error newer than this program",
                };
                write!(f, "\"{meaning}\" (NVML error {})", self.number())
            }
        }
    };
}

codes! {
    Uninitialized = 1, "NVML was not initialized";
    InvalidArgument = 2, "invalid argument";
    NotSupported = 3, "not supported by this device";
    NoPermission = 4, "no permission";
    AlreadyInitialized = 5, "NVML was already initialized";
    NotFound = 6, "not found";
    InsufficientSize = 7, "the buffer is too small";
    InsufficientPower = 8, "the external power cables are not attached properly";
    DriverNotLoaded = 9, "the NVIDIA driver is not loaded";
    Timeout = 10, "the time was up";
    IrqIssue = 11, "the kernel found an interrupt problem with a GPU";
    LibraryNotFound = 12, "a shared library of the driver was not found";
    FunctionNotFound = 13, "the driver does not have this function";
    CorruptedInforom = 14, "the infoROM is corrupted";
    GpuIsLost = 15, "the GPU has fallen off the bus or cannot be reached";
    ResetRequired = 16, "the GPU has to be reset before it can be used";
    OperatingSystem = 17, "the operating system or a cgroup blocks the GPU";
    LibRmVersionMismatch = 18, "library and kernel module are of different driver versions";
    InUse = 19, "the GPU is in use";
    Memory = 20, "not enough memory";
    NoData = 21, "no data";
    VgpuEccNotSupported = 22, "not possible while ECC is enabled";
    InsufficientResources = 23, "not enough resources";
    FreqNotSupported = 24, "the frequency is not supported";
    ArgumentVersionMismatch = 25, "the version of the argument is not supported";
    Deprecated = 26, "the function is deprecated";
    NotReady = 27, "the system is not ready";
    GpuNotFound = 28, "no GPU was found";
    InvalidState = 29, "not possible in this state";
    ResetTypeNotSupported = 30, "the kind of reset is not supported";
    Unknown = 999, "an internal error of the driver";
}
