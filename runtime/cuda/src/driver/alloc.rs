//! Allocates device memory and pinned host memory.
//!
//! [`Range`] reserves addresses for all of a GPU's memory and maps physical memory behind them as it grows, so that
//! nothing moves. [`Heap`] places buffers in such a range by best fit. A freed block is reused at once: all work of the
//! device runs in one stream, so a later write follows every queued read. Reads by other devices of a mesh have ended
//! before the stream goes on (`executable/mesh/mod.rs`).

use super::{Address, Device, check, sys};
use perilune_core::byte_size;
use perilune_core::error::{Error, Result};
use perilune_plan::memory::Offsets;
use perilune_plan::{BufferDesc, DeviceBuffer};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Address space of a device that grows from its start without moving.
pub struct Range {
    device: Arc<Device>,
    pub base: Address,
    reserved: usize,
    mapped: usize,
    granularity: usize,
    parts: Vec<(sys::CUmemGenericAllocationHandle, usize, usize)>,
}

impl Range {
    pub fn new(device: &Arc<Device>) -> Result<Range> {
        let prop = Range::prop(device);
        let mut granularity = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let mut base = 0;
        // SAFETY: out-pointers are to locals.
        let reserved = unsafe {
            let status = sys::cuMemGetAllocationGranularity(&mut granularity, &prop, option);
            check(status, "asking for the allocation granularity")?;
            let reserved = device.total_bytes.next_multiple_of(granularity);
            check(sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0), "reserving addresses on the GPU")?;
            reserved
        };
        Ok(Range { device: device.clone(), base, reserved, mapped: 0, granularity, parts: Vec::new() })
    }

    pub(super) fn prop(device: &Device) -> sys::CUmemAllocationProp {
        // SAFETY: a plain C structure for which zero means "default".
        let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        prop.location.id = device.device;
        prop
    }

    /// Bytes that are mapped to physical memory.
    pub fn mapped(&self) -> usize {
        self.mapped
    }

    /// Maps the first `nbytes` to physical memory.
    pub fn ensure(&mut self, nbytes: usize) -> Result<()> {
        if nbytes <= self.mapped {
            return Ok(());
        }
        let more = (nbytes - self.mapped).next_multiple_of(self.granularity);
        let out = |free: usize| {
            let message = format!(
                "out of memory: {} more were requested, {} of {} are free",
                byte_size::show(more),
                byte_size::show(free),
                byte_size::show(self.device.total_bytes)
            );
            Error::memory(&format!("cuda:{}", self.device.ordinal), message)
        };
        if self.mapped + more > self.reserved {
            return Err(out(self.device.free_bytes()));
        }
        self.device.bind()?;
        let prop = Range::prop(&self.device);
        let at = self.base + self.mapped as u64;
        // SAFETY: the addresses are reserved by this range and not mapped yet; the handle is new.
        unsafe {
            let mut handle = 0;
            let mut take = || sys::cuMemCreate(&mut handle, more, &prop, 0) as u32 == 0;
            // A checkpoint's copies will be freed soon: wait for them before failing.
            let taken = take() || (self.device.snapshots.wait() && take());
            if !taken {
                return Err(out(self.device.free_bytes()));
            }
            check(sys::cuMemMap(at, more, 0, handle, 0), "mapping memory on the GPU")?;
            self.parts.push((handle, self.mapped, more));
            self.device.peer_access.add(&self.device, at, more)?;
        }
        self.mapped += more;
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: nothing queued uses the memory once the stream is idle; each part was mapped once.
        unsafe {
            sys::cuStreamSynchronize(self.device.stream.0);
            self.device.peer_access.remove(self.base, self.reserved);
            for &(handle, at, nbytes) in &self.parts {
                sys::cuMemUnmap(self.base + at as u64, nbytes);
                sys::cuMemRelease(handle);
            }
            sys::cuMemAddressFree(self.base, self.reserved);
        }
    }
}

/// Pinned host memory that the GPU can access.
pub struct Pinned {
    device: Arc<Device>,
    pub(super) ptr: *mut u8,
    nbytes: usize,
    pub address: Address,
}

// SAFETY: the memory is owned and belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: shared access is by words, which are atomic (`read`, `write`). The bytes behind `ptr` are used by `CopyStreams` alone, which
// the backend's lock guards.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn new(device: &Arc<Device>, nbytes: usize) -> Result<Pinned> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        Pinned::with_flags(device, nbytes, flags)
    }

    /// Allocates memory through which devices exchange bytes, and which the host does not read: write-combined, so that a device that reads
    /// it does not snoop the caches of the CPU's cores.
    pub fn between_devices(device: &Arc<Device>, nbytes: usize) -> Result<Pinned> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_WRITECOMBINED;
        Pinned::with_flags(device, nbytes, flags)
    }

    fn with_flags(device: &Arc<Device>, nbytes: usize, flags: u32) -> Result<Pinned> {
        let mut ptr: *mut c_void = null_mut();
        let mut address = 0;
        // SAFETY: out-pointers are to locals; the memory is zeroed before it is read.
        unsafe {
            check(sys::cuMemHostAlloc(&mut ptr, nbytes, flags), "taking pinned host memory")?;
            check(sys::cuMemHostGetDevicePointer_v2(&mut address, ptr, 0), "mapping pinned host memory")?;
            ptr.cast::<u8>().write_bytes(0, nbytes);
        }
        Ok(Pinned { device: device.clone(), ptr: ptr.cast(), nbytes, address })
    }

    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Returns word `k`, as the GPU last wrote it.
    pub fn read(&self, k: usize) -> u64 {
        assert!((k + 1) * 8 <= self.nbytes);
        self.word(k).load(Ordering::Acquire)
    }

    pub fn write(&self, k: usize, word: u64) {
        assert!((k + 1) * 8 <= self.nbytes);
        self.word(k).store(word, Ordering::Release);
    }

    /// Word `k`, which is in bounds.
    fn word(&self, k: usize) -> &AtomicU64 {
        // SAFETY: in bounds and aligned; atomic, since the GPU and several threads may write it.
        unsafe { AtomicU64::from_ptr(self.ptr.cast::<u64>().add(k)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by `cuMemHostAlloc`; callers drop it when the stream is idle.
            unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
        }
    }
}

/// The alignment that vector loads and TMA need.
const ALIGN: usize = 512;

/// The buffers of a device. Any thread may allocate and free.
pub struct Heap(Mutex<Space>);

struct Space {
    range: Range,
    places: Offsets,
    used: usize,
    peak: usize,
}

impl Heap {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Heap>> {
        let space = Space { range: Range::new(device)?, places: Offsets::default(), used: 0, peak: 0 };
        Ok(Arc::new(Heap(Mutex::new(space))))
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes allocated now, their peak, and bytes mapped.
    pub fn counts(&self) -> (usize, usize, usize) {
        let space = self.lock();
        (space.used, space.peak, space.range.mapped())
    }

    pub fn alloc(self: &Arc<Heap>, nbytes: usize) -> Result<Allocation> {
        // An empty buffer gets an address too, since kernels may receive it.
        let room = nbytes.max(1).next_multiple_of(ALIGN);
        let mut space = self.lock();
        let at = space.places.take(room);
        let end = space.places.end;
        if let Err(e) = space.range.ensure(end) {
            space.places.give(at, room);
            // Nothing is allocated after the last block, so the next allocation need not start there.
            space.places.trim();
            return Err(e);
        }
        space.used += room;
        space.peak = space.peak.max(space.used);
        let address = space.range.base + at as u64;
        Ok(Allocation { heap: self.clone(), at, room, address })
    }
}

/// Memory of the device, freed on drop.
pub struct Allocation {
    heap: Arc<Heap>,
    at: usize,
    room: usize,
    pub address: Address,
}

impl Allocation {
    /// Its bytes, at least those that were asked for.
    pub fn nbytes(&self) -> usize {
        self.room
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut space = self.heap.lock();
        space.places.give(self.at, self.room);
        space.used -= self.room;
    }
}

/// A buffer of the device: memory that stores a tensor.
pub struct CudaBuffer {
    memory: Allocation,
    desc: BufferDesc,
    written: AtomicU64,
    maker: AtomicU64,
}

impl CudaBuffer {
    pub fn new(desc: &BufferDesc, heap: &Arc<Heap>) -> Result<CudaBuffer> {
        Ok(CudaBuffer {
            memory: heap.alloc(desc.nbytes())?,
            desc: *desc,
            written: AtomicU64::new(0),
            maker: AtomicU64::new(0),
        })
    }

    pub fn address(&self) -> Address {
        self.memory.address
    }

    /// The number of the last queued operation that writes here (`copy_streams`).
    pub fn last_write(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// The number of the run that made this as an output, or that wrote a State's first value; 0 before.
    pub fn maker(&self) -> u64 {
        self.maker.load(Ordering::Relaxed)
    }

    /// Records run `number` as the maker.
    pub fn set_maker(&self, number: u64) {
        self.maker.store(number, Ordering::Relaxed);
    }

    /// Records operation `number` as the last writer.
    pub fn set_last_write(&self, number: u64) {
        self.written.store(number, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.nbytes(), self.address())
    }
}

impl DeviceBuffer for CudaBuffer {
    fn desc(&self) -> &BufferDesc {
        &self.desc
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
