//! What the library keeps in memory between two calls, and what every call goes through.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, c_void};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nvml_wrapper_sys::bindings::{NVML_INIT_FLAG_NO_GPUS, nvmlDevice_t, nvmlReturn_t};

use crate::event::EventSets;
use crate::ffi::{Answer, Handle, code};
use crate::layout;
use crate::scenario::{Fault, Gpu, Scenario};
use crate::seen::{Changes, Seen};
use crate::state::{Process, State};

/// How often a delayed call looks whether its fault is still there.
const DELAY_STEP: Duration = Duration::from_millis(10);

static WORLD: Mutex<World> = Mutex::new(World::new());

/// Everything that lives in memory.
#[derive(Debug)]
pub(crate) struct World {
    /// `nvmlInit` calls without their `nvmlShutdown`.
    references: u32,
    place: Option<Place>,
    live: Option<Live>,
    changes: Option<Changes>,
    /// What the files said; `None` if something may have changed since.
    seen: Option<Seen>,
    /// As they were at initialisation: NVML does not look for new GPUs later.
    gpus: Vec<Gpu>,
    pub(crate) event_sets: EventSets,
}

/// Where the scenario and the state are.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    scenario: PathBuf,
    state: State,
}

/// The scenario as last read.
#[derive(Debug)]
struct Live {
    version: FileVersion,
    scenario: Scenario,
    /// UUIDs of the GPUs that the scenario says are lost.
    lost: BTreeSet<String>,
}

/// Enough to see that a file was written or replaced.
type FileVersion = (SystemTime, u64, u64);

impl World {
    const fn new() -> Self {
        Self {
            references: 0,
            place: None,
            live: None,
            changes: None,
            seen: None,
            gpus: Vec::new(),
            event_sets: EventSets::new(),
        }
    }

    /// The driver's versions.
    pub(crate) fn scenario(&self) -> Result<&Scenario, nvmlReturn_t> {
        self.live
            .as_ref()
            .map(|live| &live.scenario)
            .ok_or(code::UNINITIALIZED)
    }

    /// The state folder.
    pub(crate) fn state(&self) -> Result<&State, nvmlReturn_t> {
        self.place
            .as_ref()
            .map(|place| &place.state)
            .ok_or(code::UNINITIALIZED)
    }

    /// All GPUs, lost or not.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The GPU behind a handle, if it is still on the bus.
    pub(crate) fn gpu(&self, device: nvmlDevice_t) -> Result<&Gpu, nvmlReturn_t> {
        let Handle::Gpu(index) = Handle::read(device)? else {
            return Err(code::INVALID_ARGUMENT);
        };
        let gpu = self
            .gpus
            .get(usize::from(index))
            .ok_or(code::INVALID_ARGUMENT)?;
        if self.is_lost(gpu)? {
            return Err(code::GPU_IS_LOST);
        }
        Ok(gpu)
    }

    /// A handle to the first GPU that fits.
    pub(crate) fn handle_of(
        &self,
        fits: impl Fn(&Gpu) -> bool,
    ) -> Result<nvmlDevice_t, nvmlReturn_t> {
        let gpu = self
            .gpus
            .iter()
            .find(|gpu| fits(gpu))
            .ok_or(code::NOT_FOUND)?;
        if self.is_lost(gpu)? {
            return Err(code::GPU_IS_LOST);
        }
        u8::try_from(gpu.index)
            .map(Handle::device)
            .map_err(|_| code::UNKNOWN)
    }

    fn is_lost(&self, gpu: &Gpu) -> Result<bool, nvmlReturn_t> {
        let live = self.live.as_ref().ok_or(code::UNINITIALIZED)?;
        let is_marked = self.seen.as_ref().is_none_or(|seen| seen.has_lost);
        Ok(live.lost.contains(&gpu.uuid) || (is_marked && self.state()?.is_lost(&gpu.uuid)))
    }

    /// The compute processes of a GPU.
    pub(crate) fn processes(&mut self, gpu_uuid: &str) -> Result<Vec<Process>, nvmlReturn_t> {
        let known = self
            .seen
            .as_ref()
            .and_then(|seen| seen.processes.get(gpu_uuid));
        if let Some(known) = known {
            return Ok(known.clone());
        }
        let processes = self.state()?.processes(gpu_uuid);
        if let Some(seen) = &mut self.seen {
            seen.processes
                .insert(gpu_uuid.to_owned(), processes.clone());
        }
        Ok(processes)
    }

    /// What has to be done about a GPU.
    pub(crate) fn recovery(&self, gpu_uuid: &str) -> Result<u32, nvmlReturn_t> {
        match &self.seen {
            Some(seen) if !seen.has_recovery => Ok(0),
            Some(_) | None => Ok(self.state()?.recovery(gpu_uuid)),
        }
    }

    /// Whether an event may have happened.
    pub(crate) fn has_events(&self) -> bool {
        self.seen.as_ref().is_none_or(|seen| seen.has_events)
    }

    /// Whether the files are as they were seen.
    fn is_same(&mut self) -> bool {
        let is_same = self.changes.as_ref().is_some_and(Changes::are_none);
        if !is_same {
            self.seen = None;
        }
        self.live.is_some() && self.seen.is_some()
    }

    /// Reads the scenario again if its file has changed.
    fn refresh(&mut self) -> Answer {
        if self.is_same() {
            return Ok(());
        }
        // Watched before anything is read: what changes meanwhile is seen by the next call.
        let place = self.place.as_ref().ok_or(code::UNINITIALIZED)?;
        let changes = self.changes.as_ref();
        let seen = changes.and_then(|it| it.look(&place.scenario, &place.state));
        self.reload()?;
        self.seen = seen;
        Ok(())
    }

    fn reload(&mut self) -> Answer {
        let place = self.place.as_ref().ok_or(code::UNINITIALIZED)?;
        let version = file_version(&place.scenario).map_err(|error| {
            complain(&format!("{}: {error}", place.scenario.display()));
            // As on a node whose driver is not there (yet).
            code::DRIVER_NOT_LOADED
        })?;
        if self
            .live
            .as_ref()
            .is_some_and(|live| live.version == version)
        {
            return Ok(());
        }
        self.live = None;
        let scenario = Scenario::load(&place.scenario).map_err(|invalid| {
            complain(&invalid.to_string());
            code::UNKNOWN
        })?;
        let gpus = scenario.gpus().into_iter();
        self.live = Some(Live {
            lost: gpus.filter(|gpu| gpu.lost).map(|gpu| gpu.uuid).collect(),
            version,
            scenario,
        });
        Ok(())
    }

    fn initialize(&mut self, flags: u32) -> Answer {
        if self.references == 0 {
            self.live = None;
            self.refresh()?;
            self.gpus = self.scenario()?.gpus();
            if self.gpus.is_empty() && flags & NVML_INIT_FLAG_NO_GPUS == 0 {
                return Err(code::DRIVER_NOT_LOADED);
            }
        }
        self.references += 1;
        Ok(())
    }

    fn shut_down(&mut self) -> Answer {
        self.references = self.references.checked_sub(1).ok_or(code::UNINITIALIZED)?;
        if self.references == 0 {
            // A client may unload the library now, and nobody would ever free what a static holds.
            *self = Self::new();
        }
        Ok(())
    }

    /// The fault of a call: one set in the state folder goes before the scenario's.
    fn fault(&mut self, name: &str) -> Result<Option<(Fault, State)>, nvmlReturn_t> {
        let state = self.state()?.clone();
        let is_same = self.is_same();
        let set = match &self.seen {
            Some(seen) if is_same && !seen.has_faults => None,
            Some(_) | None => state.fault(name).map_err(|error| {
                complain(&error);
                code::UNKNOWN
            })?,
        };
        let fault = match set {
            Some(fault) => Some(fault),
            None => {
                if !is_same {
                    self.refresh()?;
                }
                self.scenario()?.faults.get(name).cloned()
            }
        };
        Ok(fault.map(|fault| (fault, state)))
    }
}

/// What every exported function but those of the life cycle goes through.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut World) -> Answer) -> nvmlReturn_t {
    call_unlocked(name, || with_world(body))
}

/// As [`call`], for a body that waits and takes the world itself, with [`with_world`].
pub(crate) fn call_unlocked(name: &'static str, body: impl FnOnce() -> Answer) -> nvmlReturn_t {
    barrier(|| {
        if world().references == 0 {
            return Err(code::UNINITIALIZED);
        }
        misbehave(name)?;
        body()
    })
}

/// Runs with the world as it is now.
pub(crate) fn with_world<T>(
    body: impl FnOnce(&mut World) -> Result<T, nvmlReturn_t>,
) -> Result<T, nvmlReturn_t> {
    let mut world = world();
    world.refresh()?;
    body(&mut world)
}

/// `nvmlInit` and its kin.
pub(crate) fn init(name: &'static str, flags: u32) -> nvmlReturn_t {
    barrier(|| {
        let first = world().references == 0;
        if first {
            let place = Place::find()?;
            let mut world = world();
            world.place = Some(place);
            world.changes = Changes::new();
        }
        misbehave(name)?;
        world().initialize(flags)
    })
}

/// `nvmlShutdown`.
pub(crate) fn shutdown(name: &'static str) -> nvmlReturn_t {
    barrier(|| {
        misbehave(name)?;
        world().shut_down()
    })
}

/// No panic may cross into C, where it would end the process.
fn barrier(body: impl FnOnce() -> Answer) -> nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_panic) => code::UNKNOWN,
    }
}

fn world() -> MutexGuard<'static, World> {
    // A panic is reported to its caller; the next call finds a world that is at worst out of date.
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the trace and does what the scenario says goes wrong, without holding the world meanwhile.
fn misbehave(name: &'static str) -> Answer {
    let (state, fault, has_trace) = {
        let mut world = world();
        let state = world.state()?.clone();
        let fault = world.fault(name)?;
        let has_trace = world.seen.as_ref().is_none_or(|seen| seen.has_trace);
        (state, fault, has_trace)
    };
    if has_trace {
        state.trace(name);
    }
    let Some((fault, state)) = fault else {
        return Ok(());
    };
    let before = state.count(name).map_err(|error| {
        complain(&format!("cannot count {name}: {error}"));
        code::UNKNOWN
    })?;
    let hits = before >= fault.skip && fault.times.is_none_or(|times| before - fault.skip < times);
    if !hits {
        return Ok(());
    }
    let end = Instant::now().checked_add(Duration::from_millis(fault.delay_ms));
    while let Some(left) = time_left(end) {
        std::thread::sleep(left.min(DELAY_STEP));
        if world().fault(name)?.map(|(fault, _)| fault).as_ref() != Some(&fault) {
            return Ok(());
        }
    }
    fault.error.map_or(Ok(()), Err)
}

/// `None` when the time is over; a time too far away to be told never is.
fn time_left(end: Option<Instant>) -> Option<Duration> {
    end.map_or(Some(DELAY_STEP), |end| {
        end.checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero())
    })
}

impl Place {
    /// From the environment, else from the node folder that this library lies in.
    fn find() -> Result<Self, nvmlReturn_t> {
        let scenario = std::env::var_os(layout::SCENARIO_ENV)
            .map(PathBuf::from)
            .or_else(|| {
                let library = own_path()?;
                let node = library.parent()?.parent()?;
                Some(node.join(layout::SCENARIO_FILE))
            })
            .ok_or_else(|| {
                complain(&format!(
                    "no scenario: set {} to the path of one",
                    layout::SCENARIO_ENV
                ));
                code::DRIVER_NOT_LOADED
            })?;
        let state = std::env::var_os(layout::STATE_ENV)
            .map_or_else(|| scenario.with_file_name(layout::STATE_DIR), PathBuf::from);
        Ok(Self {
            scenario,
            state: State::at(state),
        })
    }
}

/// The path that this library was loaded from.
fn own_path() -> Option<PathBuf> {
    let address: *const c_void = std::ptr::from_ref(&WORLD).cast();
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked about; the name found lives as long as the library is loaded.
    let name = unsafe {
        if libc::dladdr(address, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        CStr::from_ptr(info.dli_fname)
    };
    Path::new(OsStr::from_bytes(name.to_bytes()))
        .canonicalize()
        .ok()
}

fn file_version(path: &Path) -> std::io::Result<FileVersion> {
    let metadata = std::fs::metadata(path)?;
    Ok((metadata.modified()?, metadata.len(), metadata.ino()))
}

/// Tells whoever started the client what is wrong, once.
fn complain(what: &str) {
    static LAST: Mutex<String> = Mutex::new(String::new());
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if *last != what {
        what.clone_into(&mut last);
        // A client without a stderr has nobody to tell.
        let _ = writeln!(std::io::stderr(), "fake-nvml: {what}");
    }
}
