//! A wall clock that is off by as many seconds as a file says, for one program: `LD_PRELOAD` has this library loaded
//! before the C library, and `FAKE_CLOCK` names the file, eight bytes with a number of the machine's byte order.
//!
//! Whoever writes the file makes the clock jump. The machine's own clock is never touched, and clocks that only go
//! forward are what they were. `bridge/tests/daemon/clock.rs` builds it with rustc alone: as a package that a test
//! depends on, it would become the clock of the test as well.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

/// Linux' own numbers.
#[cfg(target_arch = "x86_64")]
const SYS_CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const SYS_CLOCK_GETTIME: c_long = 113;
const CLOCK_REALTIME: c_int = 0;
const CLOCK_REALTIME_COARSE: c_int = 5;
const CLOCK_TAI: c_int = 11;
const O_RDONLY_CLOEXEC: c_int = 0o2_000_000;
const PROT_READ: c_int = 1;
const MAP_SHARED: c_int = 1;
const SIZE: usize = size_of::<i64>();

/// A time of 64 bits.
#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: c_long,
}

/// The same in microseconds.
#[repr(C)]
pub struct Timeval {
    seconds: i64,
    microseconds: c_long,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn mmap(
        address: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
}

/// Where a program has no file, or one that can't be read.
static ZERO: AtomicI64 = AtomicI64::new(0);
/// What the file says; null before it was asked for. Two threads may map it twice, which does no harm.
static OFFSET: AtomicPtr<AtomicI64> = AtomicPtr::new(null_mut());

fn offset() -> i64 {
    let mut found = OFFSET.load(Ordering::Acquire);
    if found.is_null() {
        found = map().unwrap_or((&raw const ZERO).cast_mut());
        OFFSET.store(found, Ordering::Release);
    }
    // SAFETY: it is `ZERO`, or a mapping that is never taken away and as long and aligned as a number.
    unsafe { (*found).load(Ordering::Relaxed) }
}

fn map() -> Option<*mut AtomicI64> {
    // SAFETY: the names are C strings, and a mapping that failed is recognised by its address, which is -1.
    unsafe {
        let path = getenv(c"FAKE_CLOCK".as_ptr());
        if path == null() {
            return None;
        }
        let file = open(path, O_RDONLY_CLOEXEC);
        let mapped = mmap(null_mut(), SIZE, PROT_READ, MAP_SHARED, file, 0);
        (mapped.addr() != usize::MAX).then(|| mapped.cast())
    }
}

/// As the C library has it.
///
/// # Safety
/// `time` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    // SAFETY: the kernel looks at the pointer itself, and has written to it where it says 0.
    unsafe {
        let answer = syscall(SYS_CLOCK_GETTIME, clock, time);
        if answer != 0 {
            return -1;
        }
        if [CLOCK_REALTIME, CLOCK_REALTIME_COARSE, CLOCK_TAI].contains(&clock) {
            (*time).seconds += offset();
        }
    }
    0
}

fn now() -> Timespec {
    let mut now = Timespec {
        seconds: 0,
        nanoseconds: 0,
    };
    // SAFETY: it can be written.
    unsafe { clock_gettime(CLOCK_REALTIME, &raw mut now) };
    now
}

/// As the C library has it.
///
/// # Safety
/// `time` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut Timeval, _zone: *mut c_void) -> c_int {
    let now = now();
    if !time.is_null() {
        // SAFETY: the caller says so.
        unsafe {
            time.write(Timeval {
                seconds: now.seconds,
                microseconds: now.nanoseconds / 1_000,
            });
        }
    }
    0
}

/// As the C library has it.
///
/// # Safety
/// `time` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut i64) -> i64 {
    let now = now();
    if !time.is_null() {
        // SAFETY: the caller says so.
        unsafe { time.write(now.seconds) };
    }
    now.seconds
}
