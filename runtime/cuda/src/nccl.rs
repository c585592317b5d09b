//! Wraps NCCL: a communicator of several GPUs, each driven by a thread of one of several processes.
//!
//! Communicators do not block: a call that is in progress is polled, and any thread may end it ([`Communicator::retire`]). A kernel of NCCL
//! that waits for another device ends then too. Types and functions are declared here, because those of cudarc panic where only
//! `libnccl.so.2` is installed, and because results are plain numbers, which newer versions extend.

use crate::driver::{Address, Device, Event, Handle, Lane};
use crate::dylib;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the name of a new communicator, which all its devices get.
pub const ID_BYTES: usize = 128;
/// How long operations that other devices may still join are waited for before they are aborted.
const GRACE: Duration = Duration::from_secs(2);
/// How long a communicator waits for its last operations when it is closed.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// How long a call in progress is asked about without a pause.
const POLLED: Duration = Duration::from_millis(2);
/// The oldest version whose communicators do not block.
const OLDEST: c_int = 21_800;

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([c_char; ID_BYTES]);

/// `ncclConfig_t` of NCCL 2.17, which newer versions accept.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

enum Opaque {}
type Raw = *mut Opaque;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclSum`
const SUM: c_int = 0;
/// `ncclUint8`
const BYTES: c_int = 1;

dylib::functions! {
    "NCCL", "NCCL 2.18 or newer is needed",
    version: fn(*mut c_int) -> c_int = b"ncclGetVersion\0",
    unique_id: fn(*mut Id) -> c_int = b"ncclGetUniqueId\0",
    join: fn(*mut Raw, c_int, Id, c_int, *mut Config) -> c_int = b"ncclCommInitRankConfig\0",
    finalize: fn(Raw) -> c_int = b"ncclCommFinalize\0",
    destroy: fn(Raw) -> c_int = b"ncclCommDestroy\0",
    abort: fn(Raw) -> c_int = b"ncclCommAbort\0",
    state: fn(Raw, *mut c_int) -> c_int = b"ncclCommGetAsyncError\0",
    error: fn(c_int) -> *const c_char = b"ncclGetErrorString\0",
    last_error: fn(Raw) -> *const c_char = b"ncclGetLastError\0",
    begin: fn() -> c_int = b"ncclGroupStart\0",
    end: fn() -> c_int = b"ncclGroupEnd\0",
    all_reduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int = b"ncclAllReduce\0",
    reduce_scatter: fn(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int = b"ncclReduceScatter\0",
    all_gather: fn(*const c_void, *mut c_void, usize, c_int, Raw, *mut c_void) -> c_int = b"ncclAllGather\0",
    send: fn(*const c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int = b"ncclSend\0",
    receive: fn(*mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int = b"ncclRecv\0",
}

/// The library, opened once.
fn api() -> Result<&'static Api> {
    static API: OnceLock<Result<Api>> = OnceLock::new();
    API.get_or_init(|| {
        let api = Api::load()?;
        let mut version = 0;
        // SAFETY: the out-pointer is to a local.
        unsafe { (api.version)(&mut version) };
        if version < OLDEST {
            let message = format!("NCCL {version} is too old; several processes with GPUs need 2.18 or newer");
            return Err(Error::system("cuda", message).hint("pip install nvidia-nccl-cu13"));
        }
        Ok(api)
    })
    .as_ref()
    .map_err(Clone::clone)
}

/// Sets defaults of NCCL's environment, which it reads once: multicast over NVLink is off, and the kernels of several communicators of a
/// GPU start in the order in which they are queued, without which they may wait for each other in a circle.
///
/// # Safety
/// No other thread may use the environment meanwhile.
pub unsafe fn set_environment() {
    for (name, value) in [("NCCL_NVLS_ENABLE", "0"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: the caller's.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// Makes the name of a new communicator.
pub fn unique_id() -> Result<[u8; ID_BYTES]> {
    let api = api()?;
    let mut id = Id([0; ID_BYTES]);
    // SAFETY: the out-pointer is to a local.
    let status = unsafe { (api.unique_id)(&mut id) };
    if status != SUCCESS {
        return Err(failure(api, status, None, "naming a communicator"));
    }
    Ok(id.0.map(|c| c as u8))
}

fn failure(api: &Api, status: c_int, raw: Option<Raw>, what: &str) -> Error {
    let text = |at: *const c_char| {
        // SAFETY: NCCL returns a static string, or one that lives until its next error on this thread, or null.
        if at.is_null() { String::new() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_string() }
    };
    // SAFETY: the communicator is alive; NCCL accepts null.
    let (name, last) = unsafe { (text((api.error)(status)), text((api.last_error)(raw.unwrap_or(null_mut())))) };
    let last = if last.is_empty() || last == name { String::new() } else { format!(": {last}") };
    Error::system("cuda", format!("{what} failed: {name}{last} (NCCL error {status})"))
        .hint("NCCL_DEBUG=INFO prints what NCCL does")
}

/// Communicators that threads are about to end; `None` once the process ends.
static RETIRING: Mutex<Option<usize>> = Mutex::new(Some(0));
static RETIRED: Condvar = Condvar::new();

fn retiring() -> MutexGuard<'static, Option<usize>> {
    RETIRING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a communicator on a thread of its own: a kernel of one may wait behind that of another. See [`Communicator::retire`].
pub fn retire(communicator: Arc<Communicator>) {
    let Some(count) = &mut *retiring() else { return };
    *count += 1;
    let own = communicator.clone();
    let work = move || {
        own.retire();
        drop(own);
        if let Some(count) = &mut *retiring() {
            *count -= 1;
        }
        RETIRED.notify_all();
    };
    if std::thread::Builder::new().name("nccl-retire".into()).spawn(work).is_err() {
        *count -= 1;
    }
}

/// Waits, before the process ends, for threads that use NCCL, which must not be unloaded meanwhile. Later calls of [`retire`] do nothing.
pub fn finish() {
    let until = Instant::now() + GRACE + CLOSE_WAIT;
    let mut guard = retiring();
    while guard.is_some_and(|count| count > 0) && Instant::now() < until {
        guard = RETIRED.wait_timeout(guard, GRACE).unwrap_or_else(PoisonError::into_inner).0;
    }
    *guard = None;
}

/// A place of a device in a group of GPUs that exchange messages.
pub struct Communicator {
    api: &'static Api,
    device: Arc<Device>,
    /// `None` after it has been aborted.
    raw: Mutex<Option<Handle<Opaque>>>,
    /// Behind what was queued last.
    last: Event,
}

/// A function of NCCL with its addresses; lengths as in `library::messages`.
#[derive(Clone, Copy, Debug)]
pub enum Queued {
    Sum { from: Address, to: Address, n: usize, dtype: DType },
    SumSlices { from: Address, to: Address, n: usize, dtype: DType },
    Gather { from: Address, to: Address, nbytes: usize },
    Send { from: Address, nbytes: usize, peer: usize },
    Receive { to: Address, nbytes: usize, peer: usize },
}

/// `ncclDataType_t` of the dtypes that NCCL adds.
fn data_type(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::F16 | DType::BF16 | DType::Bool => {
            return Err(Error::system("cuda", format!("this is a bug: NCCL does not add {dtype} here")));
        }
    })
}

fn cut_off() -> Error {
    Error::system("cuda", "a collective was cut off, because another device has failed")
}

impl Communicator {
    /// Joins the communicator with that name as device `rank` of `ranks`; all of them join at the same time. `is_cut_off` ends the wait
    /// for the others.
    pub fn join(
        device: &Arc<Device>,
        id: &[u8],
        rank: usize,
        ranks: usize,
        is_cut_off: &dyn Fn() -> bool,
    ) -> Result<Communicator> {
        let api = api()?;
        device.bind()?;
        let bad = || Error::system("cuda", "this is a bug: the name of a communicator has another length");
        let bytes: [u8; ID_BYTES] = id.try_into().map_err(|_| bad())?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let (mut raw, last) = (null_mut(), Event::untimed(device)?);
        let id = Id(bytes.map(|b| b as c_char));
        // SAFETY: the out-pointer and the configuration are locals; NCCL copies the configuration before it returns.
        let status = unsafe { (api.join)(&mut raw, ranks as c_int, id, rank as c_int, &mut config) };
        let what = format!("joining {ranks} GPUs");
        if raw.is_null() {
            return Err(failure(api, status, None, &what));
        }
        let raw = Mutex::new(Some(Handle(raw)));
        let out = Communicator { api, device: device.clone(), raw, last };
        out.settle(status, &what, is_cut_off).inspect_err(|_| out.abort())?;
        Ok(out)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle<Opaque>>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of what was called last.
    fn poll(&self, raw: Raw) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the caller holds the lock, and the communicator is alive.
        let status = unsafe { (self.api.state)(raw, &mut state) };
        if status == SUCCESS { state } else { status }
    }

    /// Waits until a call is no longer in progress.
    fn settle(&self, mut status: c_int, what: &str, is_cut_off: &dyn Fn() -> bool) -> Result<()> {
        let (start, mut is_first) = (Instant::now(), true);
        loop {
            let guard = self.lock();
            let raw = guard.ok_or_else(cut_off)?.0;
            if !std::mem::take(&mut is_first) {
                status = self.poll(raw);
            }
            match status {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                _ => return Err(failure(self.api, status, Some(raw), what)),
            }
            drop(guard);
            if is_cut_off() {
                return Err(cut_off());
            }
            // A thread of NCCL queues a collective within tens of microseconds, for which a sleep would be too long.
            if start.elapsed() < POLLED {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// Queues functions on a lane, which are in flight together.
    pub fn queue(&self, all: &[Queued], lane: &Lane) -> Result<()> {
        if all.is_empty() {
            return Ok(());
        }
        let api = self.api;
        let status = {
            let guard = self.lock();
            let raw = guard.ok_or_else(cut_off)?.0;
            let stream = lane.raw();
            let one = |queued: &Queued| {
                let (at, to) = (|a: Address| a as *const c_void, |a: Address| a as *mut c_void);
                // SAFETY: the memory holds what the lengths say (`library::messages`), and lives until the lane has finished; the lock is
                // held and the communicator alive.
                Ok(unsafe {
                    match *queued {
                        Queued::Sum { from, to: out, n, dtype } => {
                            (api.all_reduce)(at(from), to(out), n, data_type(dtype)?, SUM, raw, stream)
                        }
                        Queued::SumSlices { from, to: out, n, dtype } => {
                            (api.reduce_scatter)(at(from), to(out), n, data_type(dtype)?, SUM, raw, stream)
                        }
                        Queued::Gather { from, to: out, nbytes } => {
                            (api.all_gather)(at(from), to(out), nbytes, BYTES, raw, stream)
                        }
                        Queued::Send { from, nbytes, peer } => {
                            (api.send)(at(from), nbytes, BYTES, peer as c_int, raw, stream)
                        }
                        Queued::Receive { to: out, nbytes, peer } => {
                            (api.receive)(to(out), nbytes, BYTES, peer as c_int, raw, stream)
                        }
                    }
                })
            };
            // SAFETY: a group belongs to this thread, and is ended below.
            unsafe { (api.begin)() };
            let mut worst = Ok(SUCCESS);
            for queued in all {
                worst = one(queued).map(|status| if status == IN_PROGRESS { SUCCESS } else { status });
                if !matches!(worst, Ok(SUCCESS)) {
                    break;
                }
            }
            // SAFETY: as above.
            let ended = unsafe { (api.end)() };
            match worst? {
                SUCCESS => ended,
                status => status,
            }
        };
        self.settle(status, "a collective", &|| false)?;
        lane.record(&self.last)
    }

    /// An error that NCCL has met since the last call, as one of the network.
    pub fn error(&self) -> Option<Error> {
        let alive = retiring();
        (*alive)?;
        let guard = self.lock();
        let raw = (*guard)?.0;
        match self.poll(raw) {
            SUCCESS | IN_PROGRESS => None,
            status => Some(failure(self.api, status, Some(raw), "a collective")),
        }
    }

    /// Waits for what is queued, for a while, and ends the rest. What that had to write is undefined then.
    pub fn retire(&self) {
        let start = Instant::now();
        while self.device.bind().is_ok() && !self.last.is_over() && start.elapsed() < GRACE {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.abort();
    }

    /// Ends all its operations at once, on any thread. What they had to write is undefined then.
    fn abort(&self) {
        let raw = self.lock().take();
        if let Some(Handle(raw)) = raw.filter(|_| self.device.bind().is_ok()) {
            // SAFETY: no other thread has the communicator any more.
            unsafe { (self.api.abort)(raw) };
        }
    }
}

impl Drop for Communicator {
    /// Waits for what is queued, which other devices may need.
    fn drop(&mut self) {
        let Some(Handle(raw)) = self.lock().take().filter(|_| self.device.bind().is_ok()) else { return };
        // SAFETY: nothing else has the communicator any more.
        unsafe {
            let mut state = (self.api.finalize)(raw);
            let start = Instant::now();
            while state == IN_PROGRESS && start.elapsed() < CLOSE_WAIT {
                std::thread::sleep(Duration::from_millis(1));
                state = self.poll(raw);
            }
            if state == SUCCESS {
                (self.api.destroy)(raw)
            } else {
                (self.api.abort)(raw)
            };
        }
    }
}
