//! Wraps NCCL: a communicator of several GPUs, each driven by a thread of one of several processes.
//!
//! GPUs join a communicator whose calls do not block, so that the wait for the others has an end. NCCL starts a thread for each call of
//! such a communicator, so collectives use a second one, split from the first. Its calls return when they are queued, and wait only where
//! two GPUs connect. Both share their memory and the flag that aborts them: aborting the first one ends the kernels and a call in
//! progress of the second, from any thread ([`Communicator::retire`]). NCCL ends a communicator when the other processes end theirs, so
//! a thread of its own waits for that. Types and functions are declared here, because those of cudarc panic where only
//! `libnccl.so.2` is installed, and because results are plain numbers, which newer versions extend.

use crate::driver::{Address, Device, Event, Handle, Lane};
use crate::dylib;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the name of a new communicator, which all its devices get.
pub const ID_BYTES: usize = 128;
/// How long operations that other devices may still join are waited for before they are aborted.
const GRACE: Duration = Duration::from_secs(2);
/// How long a communicator waits for its last operations when it is closed.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// How often a call in progress is asked about.
const POLLED: Duration = Duration::from_micros(100);
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

impl Config {
    /// `is_blocking`: calls return when they are queued. Communicators that are split from it share its memory and its abort flag.
    fn new(is_blocking: bool) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: c_int::from(is_blocking),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: 1,
        }
    }
}

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
    split: fn(Raw, c_int, c_int, *mut Raw, *mut Config) -> c_int = b"ncclCommSplit\0",
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
static ENDING: Mutex<Option<usize>> = Mutex::new(Some(0));
static ENDED: Condvar = Condvar::new();

fn ending() -> MutexGuard<'static, Option<usize>> {
    ENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread that ends a communicator, unless the process ends.
fn end_on_thread(work: impl FnOnce() + Send + 'static) {
    let Some(count) = &mut *ending() else { return };
    *count += 1;
    let work = move || {
        work();
        if let Some(count) = &mut *ending() {
            *count -= 1;
        }
        ENDED.notify_all();
    };
    if std::thread::Builder::new().name("nccl-end".into()).spawn(work).is_err() {
        *count -= 1;
    }
}

/// Ends a communicator on a thread of its own: a kernel of one may wait behind that of another. See [`Communicator::retire`].
pub fn retire(communicator: Arc<Communicator>) {
    end_on_thread(move || communicator.retire());
}

/// Waits for threads that end communicators. NCCL must not be unloaded under them, as it is when a process ends.
pub fn settle() {
    drop(settled());
}

/// Waits, before the process ends, for threads that end communicators. Later calls of [`retire`] do nothing.
pub fn finish() {
    *settled() = None;
}

fn settled() -> MutexGuard<'static, Option<usize>> {
    let until = Instant::now() + GRACE + CLOSE_WAIT;
    let mut guard = ending();
    while guard.is_some_and(|count| count > 0) && Instant::now() < until {
        guard = ENDED.wait_timeout(guard, GRACE).unwrap_or_else(PoisonError::into_inner).0;
    }
    guard
}

/// A place of a device in a group of GPUs that exchange messages.
pub struct Communicator {
    pair: Pair,
    calls: Mutex<Calls>,
    /// A call has returned.
    returned: Condvar,
    /// Behind what was queued last.
    last: Event,
}

#[derive(Default)]
struct Calls {
    /// The communicators were aborted, or a thread ends them.
    is_over: bool,
    /// A thread is in a call of the second one, which it makes without the lock.
    is_called: bool,
}

/// Two communicators of the same GPUs.
#[derive(Clone)]
struct Pair {
    api: &'static Api,
    device: Arc<Device>,
    /// Its calls do not block: joins, splits and aborts.
    meeting: Handle<Opaque>,
    /// Queues collectives; split from the other one. NCCL writes it when it is complete; null before.
    queueing: Arc<AtomicPtr<Opaque>>,
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
        let (mut raw, last) = (null_mut(), Event::untimed(device)?);
        let id = Id(bytes.map(|b| b as c_char));
        // SAFETY: the out-pointer and the configuration are locals; NCCL copies the configuration before it returns.
        let status = unsafe { (api.join)(&mut raw, ranks as c_int, id, rank as c_int, &mut Config::new(false)) };
        let what = format!("joining {ranks} GPUs");
        if raw.is_null() {
            return Err(failure(api, status, None, &what));
        }
        let queueing = Arc::new(AtomicPtr::default());
        let pair = Pair { api, device: device.clone(), meeting: Handle(raw), queueing };
        let out = Communicator { pair, calls: Mutex::default(), returned: Condvar::new(), last };
        let split = || {
            // SAFETY: the communicator is alive, and the out-pointer until it has ended.
            let status =
                unsafe { (api.split)(raw, 0, rank as c_int, out.pair.queueing.as_ptr(), &mut Config::new(true)) };
            // It returns success while it is in progress.
            out.settle(if status == SUCCESS { out.pair.poll(raw) } else { status }, &what, is_cut_off)
        };
        let joined = out.settle(status, &what, is_cut_off).and_then(|()| split());
        if joined.is_err() && out.close_to_calls() {
            let pair = out.pair.clone();
            end_on_thread(move || pair.abort(|| true));
        }
        joined.map(|()| out)
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a call of the first communicator is no longer in progress.
    fn settle(&self, mut status: c_int, what: &str, is_cut_off: &dyn Fn() -> bool) -> Result<()> {
        let raw = self.pair.meeting.0;
        while status == IN_PROGRESS {
            if is_cut_off() {
                return Err(cut_off());
            }
            std::thread::sleep(POLLED);
            status = self.pair.poll(raw);
        }
        if status == SUCCESS { Ok(()) } else { Err(failure(self.pair.api, status, Some(raw), what)) }
    }

    /// Calls functions of the second communicator, which another thread may abort meanwhile.
    fn call(&self, functions: impl FnOnce(Raw) -> Result<c_int>) -> Result<()> {
        {
            let mut calls = self.lock();
            while calls.is_called {
                calls = self.returned.wait(calls).unwrap_or_else(PoisonError::into_inner);
            }
            if calls.is_over {
                return Err(cut_off());
            }
            calls.is_called = true;
        }
        let raw = self.pair.queueing.load(Ordering::Acquire);
        let status = functions(raw);
        let mut calls = self.lock();
        calls.is_called = false;
        self.returned.notify_all();
        // What a call returns that was aborted is no reason.
        match (calls.is_over, status?) {
            (true, _) => Err(cut_off()),
            (false, SUCCESS) => Ok(()),
            (false, status) => Err(failure(self.pair.api, status, Some(raw), "a collective")),
        }
    }

    /// Queues functions on a lane, which are in flight together.
    pub fn queue(&self, all: &[Queued], lane: &Lane) -> Result<()> {
        if all.is_empty() {
            return Ok(());
        }
        let (api, stream) = (self.pair.api, lane.raw());
        self.call(|raw| {
            let one = |queued: &Queued| {
                let (at, to) = (|a: Address| a as *const c_void, |a: Address| a as *mut c_void);
                // SAFETY: the memory holds what the lengths say (`library::messages`), and lives until the lane has finished; the
                // communicator is alive until this call has returned.
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
            let worst = all.iter().map(one).find(|status| !matches!(status, Ok(SUCCESS))).unwrap_or(Ok(SUCCESS));
            // SAFETY: as above.
            let ended = unsafe { (api.end)() };
            Ok(match worst? {
                SUCCESS => ended,
                status => status,
            })
        })?;
        lane.record(&self.last)
    }

    /// An error that NCCL has met since the last call, as one of the network.
    pub fn error(&self) -> Option<Error> {
        let alive = ending();
        (*alive)?;
        let calls = self.lock();
        if calls.is_over {
            return None;
        }
        let raw = self.pair.queueing.load(Ordering::Acquire);
        match self.pair.poll(raw) {
            SUCCESS | IN_PROGRESS => None,
            status => Some(failure(self.pair.api, status, Some(raw), "a collective")),
        }
    }

    /// Waits for what is queued, for a while, and ends the rest. What that had to write is undefined then.
    pub fn retire(&self) {
        self.wait_for_last(GRACE);
        self.abort();
    }

    /// Waits for what is queued, at most so long. Returns whether it is over.
    fn wait_for_last(&self, most: Duration) -> bool {
        let start = Instant::now();
        while self.pair.device.bind().is_ok() && !self.last.is_over() {
            if start.elapsed() >= most {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Refuses all later calls. Returns whether this call is the first to do so: its caller ends the communicators.
    fn close_to_calls(&self) -> bool {
        !std::mem::replace(&mut self.lock().is_over, true)
    }

    /// Ends all its operations at once, on any thread. What they had to write is undefined then.
    fn abort(&self) {
        if self.close_to_calls() {
            self.pair.abort(|| {
                let waited = self.returned.wait_timeout_while(self.lock(), CLOSE_WAIT, |calls| calls.is_called);
                !waited.unwrap_or_else(PoisonError::into_inner).0.is_called
            });
        }
    }
}

impl Drop for Communicator {
    /// Waits for what is queued, which other devices may need.
    fn drop(&mut self) {
        if self.close_to_calls() {
            let (is_over, pair) = (self.wait_for_last(CLOSE_WAIT), self.pair.clone());
            end_on_thread(move || if is_over { pair.close() } else { pair.abort(|| true) });
        }
    }
}

impl Pair {
    /// The state of what was called last of one of both.
    fn poll(&self, raw: Raw) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the caller knows that it is alive; NCCL refuses null.
        let status = unsafe { (self.api.state)(raw, &mut state) };
        if status == SUCCESS { state } else { status }
    }

    /// Aborts what both have queued. `has_returned` waits for a call of the second one.
    fn abort(&self, has_returned: impl FnOnce() -> bool) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: nothing else uses it any more. It ends the call of the other one.
        unsafe { (self.api.abort)(self.meeting.0) };
        let raw = self.queueing.load(Ordering::Acquire);
        if !raw.is_null() && has_returned() {
            // SAFETY: as above. Otherwise its memory is left to the call.
            unsafe { (self.api.abort)(raw) };
        }
    }

    /// Ends both, whose operations are over. NCCL waits for other processes that have yet to end theirs.
    fn close(&self) {
        if self.device.bind().is_err() {
            return;
        }
        let (first, second) = (self.meeting.0, self.queueing.load(Ordering::Acquire));
        // SAFETY: nothing else uses them any more.
        unsafe {
            if !second.is_null() {
                (self.api.destroy)(second);
            }
            let mut state = (self.api.finalize)(first);
            let start = Instant::now();
            while state == IN_PROGRESS && start.elapsed() < CLOSE_WAIT {
                std::thread::sleep(Duration::from_millis(1));
                state = self.poll(first);
            }
            if state == SUCCESS {
                (self.api.destroy)(first)
            } else {
                (self.api.abort)(first)
            };
        }
    }
}
