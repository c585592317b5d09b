//! Allocates device memory and pinned host memory.
//!
//! [`Range`] reserves addresses for all of a GPU's memory and maps physical memory behind them as it grows, so that
//! nothing moves. [`Heap`] places buffers in such a range by best fit. A freed block is reused at once: all work of the
//! device runs in one stream, so a later write follows every queued read.

use super::{Address, Device, check, sys};
use perilune_core::byte_size;
use perilune_core::error::{Error, Result};
use perilune_plan::DeviceBuffer;
use perilune_plan::memory::Offsets;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;

/// Address space of a device that grows from its start without moving.
pub struct Range {
    device: Rc<Device>,
    pub base: Address,
    reserved: usize,
    mapped: usize,
    granularity: usize,
    parts: Vec<(sys::CUmemGenericAllocationHandle, usize, usize)>,
}

impl Range {
    pub fn new(device: &Rc<Device>) -> Result<Range> {
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
                "out of memory: {} more are asked for, {} of {} are free",
                byte_size::show(more),
                byte_size::show(free),
                byte_size::show(self.device.total_bytes)
            );
            Error::memory(&format!("cuda:{}", self.device.ordinal), message)
        };
        if self.mapped + more > self.reserved {
            return Err(out(self.device.free_bytes()));
        }
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
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = prop.location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            check(sys::cuMemSetAccess(at, more, &access, 1), "opening memory on the GPU")?;
            self.parts.push((handle, self.mapped, more));
        }
        self.mapped += more;
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: nothing queued uses the memory once the stream is idle; each part was mapped once.
        unsafe {
            sys::cuStreamSynchronize(self.device.stream);
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
    _device: Rc<Device>,
    pub(super) ptr: *mut u8,
    nbytes: usize,
    pub address: Address,
}

impl Pinned {
    pub fn new(device: &Rc<Device>, nbytes: usize) -> Result<Pinned> {
        let mut ptr: *mut c_void = null_mut();
        let mut address = 0;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: out-pointers are to locals; the memory is zeroed before it is read.
        unsafe {
            check(sys::cuMemHostAlloc(&mut ptr, nbytes, flags), "taking pinned host memory")?;
            check(sys::cuMemHostGetDevicePointer_v2(&mut address, ptr, 0), "mapping pinned host memory")?;
            ptr.cast::<u8>().write_bytes(0, nbytes);
        }
        Ok(Pinned { _device: device.clone(), ptr: ptr.cast(), nbytes, address })
    }

    /// Returns word `k`, as the GPU last wrote it.
    pub fn read(&self, k: usize) -> u64 {
        assert!((k + 1) * 8 <= self.nbytes);
        // SAFETY: in bounds and aligned; volatile, since the GPU writes it.
        unsafe { self.ptr.cast::<u64>().add(k).read_volatile() }
    }

    pub fn write(&self, k: usize, word: u64) {
        assert!((k + 1) * 8 <= self.nbytes);
        // SAFETY: in bounds and aligned.
        unsafe { self.ptr.cast::<u64>().add(k).write_volatile(word) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `cuMemHostAlloc`; callers drop it when the stream is idle.
        unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
    }
}

/// The alignment that vector loads and TMA need.
const ALIGN: usize = 512;

pub struct Heap {
    range: RefCell<Range>,
    places: RefCell<Offsets>,
    used: Cell<usize>,
    peak: Cell<usize>,
}

impl Heap {
    pub fn new(device: &Rc<Device>) -> Result<Rc<Heap>> {
        Ok(Rc::new(Heap {
            range: RefCell::new(Range::new(device)?),
            places: RefCell::default(),
            used: Cell::new(0),
            peak: Cell::new(0),
        }))
    }

    /// Bytes allocated now, their peak, and bytes mapped.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.used.get(), self.peak.get(), self.range.borrow().mapped())
    }

    pub fn alloc(self: &Rc<Heap>, nbytes: usize) -> Result<CudaBuffer> {
        // An empty buffer gets an address too, since kernels may receive it.
        let room = nbytes.max(1).next_multiple_of(ALIGN);
        let mut places = self.places.borrow_mut();
        let at = places.take(room);
        let mut range = self.range.borrow_mut();
        if let Err(e) = range.ensure(places.end) {
            places.give(at, room);
            // Nothing is allocated after the last block, so the next allocation need not start there.
            places.trim();
            return Err(e);
        }
        self.used.set(self.used.get() + room);
        self.peak.set(self.peak.get().max(self.used.get()));
        let address = range.base + at as u64;
        Ok(CudaBuffer { heap: self.clone(), at, room, nbytes, address, written: Cell::new(0) })
    }
}

/// Memory of the device, freed on drop.
pub struct CudaBuffer {
    heap: Rc<Heap>,
    at: usize,
    room: usize,
    nbytes: usize,
    pub address: Address,
    /// The number of the last queued operation that writes here (`copy_streams`).
    pub written: Cell<u64>,
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.nbytes, self.address)
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.heap.places.borrow_mut().give(self.at, self.room);
        self.heap.used.set(self.heap.used.get() - self.room);
    }
}

impl DeviceBuffer for CudaBuffer {
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
