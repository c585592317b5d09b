//! Takes snapshots of buffers for checkpoints.
//!
//! The compute stream only copies buffers on the device, at the speed of its memory. Another thread transfers the
//! copies to the host on a separate stream, through a few pinned pieces, and frees them. If there is no room for
//! copies, the caller waits while the buffers themselves are transferred.
//!
//! The copies have a separate mapping, outside the heap: another thread unmaps it as a whole. That thread receives raw
//! driver handles, which any thread may use once the context is current on it.

use super::{Address, Context, Device, Range, check, sys};
use perilune_core::byte_size;
use perilune_core::error::{Error, Result};
use perilune_plan::Snapshot;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of a pinned piece, and the number of pieces: while one is emptied, the others are filled.
const PIECE: usize = 8 << 20;
const PIECES: usize = 3;
/// Device memory that copies leave free for other uses: the next allocations of a step, libraries, modules.
const LEFT: usize = 512 << 20;
/// How long an allocation without free memory waits for copies to be freed.
const PATIENCE: Duration = Duration::from_secs(20);

/// A device's state for snapshots.
#[derive(Default)]
pub struct Snapshots {
    /// Kept from one snapshot to the next.
    lane: Mutex<Option<Lane>>,
    /// Bytes of device memory used by copies.
    held: AtomicUsize,
    gate: Mutex<()>,
    gone: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Snapshots {
    /// Bytes of device memory that copies use now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// Waits until copies have freed their memory; returns whether there were any.
    pub fn wait(&self) -> bool {
        if self.held() == 0 {
            return false;
        }
        let gate = lock(&self.gate);
        let waited = self.gone.wait_timeout_while(gate, PATIENCE, |()| self.held() > 0);
        waited.is_ok_and(|(_, timeout)| !timeout.timed_out())
    }

    fn let_go(&self, nbytes: usize) {
        let _gate = lock(&self.gate);
        self.held.fetch_sub(nbytes, Ordering::AcqRel);
        self.gone.notify_all();
    }
}

/// Copies `parts` of the device's memory, after all queued work.
pub fn snapshot(device: &Arc<Device>, parts: Vec<(Address, usize)>, room: Option<usize>) -> Result<Snapshot> {
    let lane = match lock(&device.snapshots.lane).take() {
        Some(lane) => lane,
        None => Lane::new(device)?,
    };
    let total: usize = parts.iter().map(|p| padded(p.1)).sum();
    let free = device.free_bytes();
    let waited = if room.is_some_and(|room| total > room) {
        let room = byte_size::show(room.unwrap_or(0));
        Some(format!("a copy on the device takes {}, and the memory budget has {room} left", byte_size::show(total)))
    } else if total + LEFT > free {
        let (total, free) = (byte_size::show(total), byte_size::show(free));
        Some(format!("a copy on the device takes {total}, and {free} are free"))
    } else {
        None
    };
    let mapped = match waited {
        None => Mapped::new(device, total).map_err(|e| format!("there was no copy on the device: {}", e.message)),
        Some(note) => Err(note),
    };
    match mapped {
        Ok(mapped) => apart(device, lane, mapped, &parts),
        Err(note) => {
            let mut lane = Held { lane: Some(lane), snapshots: device.snapshots.clone(), mapped: None };
            lane.follow(device)?;
            let mut snapshot = Snapshot::of(lane.transfer(&parts)?);
            snapshot.waited = Some(format!("the loop waited for the bytes: {note}"));
            Ok(snapshot)
        }
    }
}

/// Bytes that a part takes in a copy: keeps parts aligned.
fn padded(nbytes: usize) -> usize {
    nbytes.next_multiple_of(512)
}

/// Queues copies into `mapped`, which another thread transfers to the host.
fn apart(device: &Arc<Device>, lane: Lane, mapped: Mapped, parts: &[(Address, usize)]) -> Result<Snapshot> {
    let snapshots = device.snapshots.clone();
    let held = Arc::new(AtomicUsize::new(mapped.nbytes));
    let mut at = mapped.base;
    snapshots.held.fetch_add(mapped.nbytes, Ordering::AcqRel);
    let mut lane = Held { lane: Some(lane), snapshots, mapped: Some(mapped) };
    let mut copies = Vec::with_capacity(parts.len());
    for &(from, nbytes) in parts {
        if nbytes > 0 {
            // SAFETY: both sides have that many bytes: the caller checked the buffer, `mapped` is as large as all parts.
            check(unsafe { sys::cuMemcpyDtoDAsync_v2(at, from, nbytes, device.stream.0) }, "copying on the GPU")?;
        }
        copies.push((at, nbytes));
        at += padded(nbytes) as u64;
    }
    lane.follow(device)?;
    let gone = held.clone();
    let transfer = move || {
        let out = lane.transfer(&copies);
        drop(lane);
        gone.store(0, Ordering::Release);
        out
    };
    Ok(Snapshot { held, waited: None, bytes: Box::new(transfer) })
}

/// A lane in use and the copies that it transfers. Drop frees the copies and returns the lane.
struct Held {
    lane: Option<Lane>,
    snapshots: Arc<Snapshots>,
    mapped: Option<Mapped>,
}

impl Held {
    fn lane(&mut self) -> Result<&mut Lane> {
        self.lane.as_mut().ok_or_else(|| Error::system("cuda", "this is a bug: a snapshot has no stream"))
    }

    /// Makes later work on the lane wait for everything that is queued on the device's stream now.
    fn follow(&mut self, device: &Device) -> Result<()> {
        let lane = self.lane()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the out-pointer is to a local; both streams are alive. The driver keeps a destroyed event while a
        // stream waits for it.
        unsafe {
            check(sys::cuEventCreate(&mut event, flags), "making an event")?;
            let recorded = check(sys::cuEventRecord(event, device.stream.0), "recording an event");
            let follows = check(sys::cuStreamWaitEvent(lane.stream, event, 0), "waiting for an event");
            sys::cuEventDestroy_v2(event);
            recorded.and(follows)
        }
    }

    fn transfer(&mut self, parts: &[(Address, usize)]) -> Result<Vec<Vec<u8>>> {
        self.lane()?.transfer(parts)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            // No transfer may be in flight when the memory is unmapped.
            let idle = lane.bind().and_then(|()| lane.synchronize()).is_ok();
            if let Some(nbytes) = self.mapped.take().map(|m| m.nbytes) {
                self.snapshots.let_go(nbytes);
            }
            if idle {
                *lock(&self.snapshots.lane) = Some(lane);
            }
        }
    }
}

/// A stream for copies to the host, with the pinned memory that they use.
struct Lane {
    context: Arc<Context>,
    stream: sys::CUstream,
    /// Created at first use, on the thread that uses them.
    pieces: Vec<Piece>,
}

struct Piece {
    at: *mut u8,
    /// Recorded when the last copy into the piece has arrived.
    full: sys::CUevent,
}

// SAFETY: handles of the driver, for any thread on which the context is current (`bind`); the pinned memory is owned.
unsafe impl Send for Lane {}

impl Lane {
    /// The context must be current on this thread.
    fn new(device: &Device) -> Result<Lane> {
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the out-pointer is to a local.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "making a stream")?;
        Ok(Lane { context: device.context.clone(), stream, pieces: Vec::new() })
    }

    fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is this lane's.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, "waiting for the GPU")
    }

    fn prepare(&mut self) -> Result<()> {
        self.bind()?;
        while self.pieces.len() < PIECES {
            let (mut at, mut full) = (null_mut(), null_mut());
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: out-pointers are to locals; the memory is freed if creating its event fails.
            unsafe {
                let all = sys::CU_MEMHOSTALLOC_PORTABLE;
                check(sys::cuMemHostAlloc(&mut at, PIECE, all), "taking pinned host memory")?;
                if let Err(e) = check(sys::cuEventCreate(&mut full, flags), "making an event") {
                    sys::cuMemFreeHost(at);
                    return Err(e);
                }
            }
            self.pieces.push(Piece { at: at.cast(), full });
        }
        Ok(())
    }

    /// Returns the bytes of `parts`. Small parts share a piece, large ones take several.
    fn transfer(&mut self, parts: &[(Address, usize)]) -> Result<Vec<Vec<u8>>> {
        self.prepare()?;
        let mut out: Vec<Vec<u8>> = parts.iter().map(|p| Vec::with_capacity(p.1)).collect();
        // Pieces in flight, with the parts whose bytes they hold.
        let mut queued: VecDeque<(usize, Vec<(usize, usize)>)> = VecDeque::new();
        let (mut part, mut done, mut turn) = (0, 0, 0);
        loop {
            let piece = turn % PIECES;
            if queued.len() == PIECES || part == parts.len() {
                let Some((piece, inside)) = queued.pop_front() else { break };
                self.empty(piece, &inside, &mut out)?;
                continue;
            }
            let (mut inside, mut at) = (Vec::new(), 0);
            while at < PIECE && part < parts.len() {
                let (from, nbytes) = parts[part];
                let n = (nbytes - done).min(PIECE - at);
                if n > 0 {
                    // SAFETY: the piece has room for `n` bytes from `at` on, and the part has that many from `done` on.
                    let status = unsafe {
                        let to = self.pieces[piece].at.add(at);
                        sys::cuMemcpyDtoHAsync_v2(to.cast(), from + done as u64, n, self.stream)
                    };
                    check(status, "copying from the GPU")?;
                    inside.push((part, n));
                }
                at += n;
                done += n;
                if done == nbytes {
                    (part, done) = (part + 1, 0);
                }
            }
            // SAFETY: the event is the piece's, the stream this lane's.
            check(unsafe { sys::cuEventRecord(self.pieces[piece].full, self.stream) }, "recording an event")?;
            queued.push_back((piece, inside));
            turn += 1;
        }
        Ok(out)
    }

    fn empty(&self, piece: usize, inside: &[(usize, usize)], out: &mut [Vec<u8>]) -> Result<()> {
        let piece = &self.pieces[piece];
        // SAFETY: recorded when the piece was filled.
        check(unsafe { sys::cuEventSynchronize(piece.full) }, "waiting for the GPU")?;
        let mut at = 0;
        for &(part, n) in inside {
            // SAFETY: the copies into the piece have arrived, and the next ones are queued after this; `at + n` is within it.
            out[part].extend_from_slice(unsafe { std::slice::from_raw_parts(piece.at.add(at), n) });
            at += n;
        }
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: all of it was created by this lane, which retains the context; the stream is idle before memory is
        // freed.
        unsafe {
            sys::cuStreamSynchronize(self.stream);
            for piece in &self.pieces {
                sys::cuEventDestroy_v2(piece.full);
                sys::cuMemFreeHost(piece.at.cast());
            }
            sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// Device memory with a separate mapping. Any thread may unmap it once nothing uses it.
struct Mapped {
    base: Address,
    nbytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Mapped {
    fn new(device: &Device, nbytes: usize) -> Result<Mapped> {
        let prop = Range::prop(device);
        let (mut granularity, mut base, mut handle) = (0, 0, 0);
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: out-pointers are to locals; what was created is undone if the next call fails.
        unsafe {
            let status = sys::cuMemGetAllocationGranularity(&mut granularity, &prop, option);
            check(status, "asking for the allocation granularity")?;
            let nbytes = nbytes.max(1).next_multiple_of(granularity);
            check(sys::cuMemCreate(&mut handle, nbytes, &prop, 0), "taking memory on the GPU")?;
            if let Err(e) =
                check(sys::cuMemAddressReserve(&mut base, nbytes, 0, 0, 0), "reserving addresses on the GPU")
            {
                sys::cuMemRelease(handle);
                return Err(e);
            }
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = prop.location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let mapped = check(sys::cuMemMap(base, nbytes, 0, handle, 0), "mapping memory on the GPU");
            let open = || check(sys::cuMemSetAccess(base, nbytes, &access, 1), "opening memory on the GPU");
            let new = Mapped { base, nbytes, handle };
            mapped.and_then(|()| open())?;
            Ok(new)
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: reserved and created in `new`; nothing queued uses it (see the type).
        unsafe {
            sys::cuMemUnmap(self.base, self.nbytes);
            sys::cuMemRelease(self.handle);
            sys::cuMemAddressFree(self.base, self.nbytes);
        }
    }
}
