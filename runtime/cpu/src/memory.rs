//! Allocates host memory as aligned blocks and recycles them through a free list.
//!
//! A training step requests the same output sizes repeatedly. Blocks return to a free list by size, so a step neither
//! maps memory nor causes page faults. The list is bounded. Fresh blocks are zeroed, so no byte is ever uninitialised.

use perilune_core::error::{Error, Result};
use perilune_core::{byte_size, host_memory};
use perilune_plan::{BufferDesc, DeviceBuffer, Memory};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of every block: a cache line, and the widest vector.
pub const ALIGN: usize = 64;
/// The size of a huge page, on systems that have them; blocks of two or more are aligned to it.
const HUGE: usize = 2 << 20;
/// Maximum bytes of the free list.
const POOLED_BYTES: usize = 1 << 30;

/// An owned, aligned, initialised piece of host memory.
#[derive(Debug)]
pub struct Block {
    ptr: NonNull<u8>,
    capacity: usize,
    /// For an arena: the bytes that a free list counts as used.
    counted: usize,
}

// SAFETY: a block owns its memory like a `Vec<u8>`.
unsafe impl Send for Block {}

/// Requests huge pages. TLB misses of 4 KiB pages cost twice as much on a virtual machine and slow memory-bound kernels
/// by a few per cent.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(at: *mut u8, nbytes: usize) {
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(at: *mut std::ffi::c_void, nbytes: usize, advice: i32) -> i32;
    }
    // This is a hint: a system without huge pages ignores it.
    // SAFETY: this advice does not change the contents of memory.
    unsafe { madvise(at.cast(), nbytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: *mut u8, _: usize) {}

/// The alignment of a block.
fn align_of(capacity: usize) -> usize {
    if cfg!(target_os = "linux") && capacity >= 2 * HUGE { HUGE } else { ALIGN }
}

/// Allocates zeroed memory.
fn fresh(layout: Layout) -> *mut u8 {
    // SAFETY: the size is not 0.
    unsafe {
        if layout.align() < HUGE {
            return alloc_zeroed(layout);
        }
        let ptr = alloc(layout);
        if !ptr.is_null() {
            ask_for_huge_pages(ptr, layout.size() / HUGE * HUGE);
            ptr.write_bytes(0, layout.size());
        }
        ptr
    }
}

impl Block {
    /// A block of at least that many bytes, or an error if the machine has no memory for it.
    pub fn new(capacity: usize) -> Result<Block> {
        let capacity = capacity.max(ALIGN);
        host_memory::check("cpu", capacity)?;
        let layout = Layout::from_size_align(capacity, align_of(capacity)).ok();
        let ptr = layout.and_then(|l| NonNull::new(fresh(l)));
        match ptr {
            Some(ptr) => Ok(Block { ptr, capacity, counted: 0 }),
            None => Err(host_memory::refused("cpu", capacity)),
        }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout, which was valid then.
        unsafe { dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.capacity, align_of(self.capacity))) }
    }
}

/// Freed blocks by capacity, and the accounting of a device's memory.
#[derive(Debug, Default)]
pub struct FreeList {
    state: Mutex<FreeListState>,
    /// Maximum total bytes of used and free blocks.
    limit: Option<usize>,
}

#[derive(Debug, Default)]
struct FreeListState {
    blocks: BTreeMap<usize, Vec<Block>>,
    /// Bytes of free blocks.
    free: usize,
    /// Bytes of blocks in use, and their peak.
    used: usize,
    peak: usize,
}

impl FreeListState {
    /// Allocates a block within `limit`; evicts free blocks if necessary.
    fn allocate(&mut self, capacity: usize, limit: Option<usize>) -> Result<Block> {
        if let Some(limit) = limit {
            if capacity > limit - limit.min(self.used + self.free) {
                self.blocks.clear();
                self.free = 0;
            }
            if capacity > limit - limit.min(self.used) {
                let message = format!(
                    "out of memory: {} more were requested, {} of {} are in use",
                    byte_size::show(capacity),
                    byte_size::show(self.used),
                    byte_size::show(limit)
                );
                return Err(Error::memory("cpu", message));
            }
        }
        Block::new(capacity).or_else(|error| {
            if self.free == 0 {
                return Err(error);
            }
            self.blocks.clear();
            self.free = 0;
            Block::new(capacity)
        })
    }

    fn count(&mut self, capacity: usize) {
        self.used += capacity;
        self.peak = self.peak.max(self.used);
    }
}

/// The capacity that a request is rounded up to: eight sizes per octave, so at most 1/8 is wasted.
fn capacity_of(nbytes: usize) -> usize {
    if nbytes <= 1024 {
        return nbytes.max(1).next_multiple_of(ALIGN);
    }
    nbytes.checked_next_multiple_of((1usize << nbytes.ilog2()) / 8).unwrap_or(nbytes)
}

impl FreeList {
    /// Creates a list of at most `limit` bytes, used and free.
    pub fn new(limit: Option<usize>) -> FreeList {
        FreeList { limit, ..FreeList::default() }
    }

    fn lock(&self) -> MutexGuard<'_, FreeListState> {
        // Every update below leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn memory(&self) -> Memory {
        let s = self.lock();
        Memory { allocated: s.used, reserved: s.used + s.free, peak: s.peak, limit: self.limit }
    }

    fn take(&self, nbytes: usize) -> Result<Block> {
        let capacity = capacity_of(nbytes);
        let mut s = self.lock();
        let block = match s.blocks.get_mut(&capacity).and_then(Vec::pop) {
            Some(block) => {
                s.free -= capacity;
                block
            }
            None => s.allocate(capacity, self.limit)?,
        };
        s.count(capacity);
        Ok(block)
    }

    /// Replaces `block`, which the list counts but does not own, by one of at least `nbytes`. Its contents are lost.
    pub fn enlarge(&self, block: &mut Block, nbytes: usize) -> Result<()> {
        if block.capacity() >= nbytes {
            return Ok(());
        }
        let mut s = self.lock();
        // Frees the old block first, since both may not fit.
        s.used = s.used.saturating_sub(block.counted);
        *block = Block::new(0)?;
        *block = s.allocate(nbytes, self.limit)?;
        block.counted = nbytes;
        s.count(nbytes);
        Ok(())
    }

    fn put(&self, block: Block) {
        let mut s = self.lock();
        s.used -= block.capacity;
        let total = s.free + block.capacity;
        if total <= POOLED_BYTES {
            s.free = total;
            s.blocks.entry(block.capacity).or_default().push(block);
        }
    }
}

/// A buffer of the CPU device.
#[derive(Debug)]
pub struct CpuBuffer {
    /// `Some` until the buffer is dropped.
    block: Option<Block>,
    desc: BufferDesc,
    free_list: Arc<FreeList>,
}

// SAFETY: every access to the memory happens in a method of the device that the buffer belongs to, under the device's lock
// (`backend::DeviceState`).
unsafe impl Sync for CpuBuffer {}

impl CpuBuffer {
    pub fn new(desc: &BufferDesc, free_list: &Arc<FreeList>) -> Result<CpuBuffer> {
        Ok(CpuBuffer { block: Some(free_list.take(desc.nbytes())?), desc: *desc, free_list: free_list.clone() })
    }

    /// Whether the buffer belongs to the device with that free list.
    pub fn is_of(&self, free_list: &Arc<FreeList>) -> bool {
        Arc::ptr_eq(&self.free_list, free_list)
    }

    pub fn ptr(&self) -> *mut u8 {
        self.block.as_ref().map_or(NonNull::dangling().as_ptr(), Block::ptr)
    }

    /// The bytes of the tensor.
    ///
    /// # Safety
    /// No other code may write to the buffer while the slice is in use: the caller holds the device's lock.
    pub unsafe fn read(&self) -> &[u8] {
        // SAFETY: the block holds at least as many initialised bytes, and lives as long as `self`; the caller guarantees the rest.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.nbytes()) }
    }

    /// Overwrites the first bytes of the buffer.
    ///
    /// # Safety
    /// No other code may access the buffer meanwhile: the caller holds the device's lock, or owns the buffer.
    pub unsafe fn write(&self, bytes: &[u8]) {
        let n = bytes.len().min(self.nbytes());
        // SAFETY: as in `read`; `bytes` is not part of this block, because borrows by `read` end before a write.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.ptr(), n) }
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.free_list.put(block);
        }
    }
}

impl DeviceBuffer for CpuBuffer {
    fn desc(&self) -> &BufferDesc {
        &self.desc
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Marks types whose every bit pattern is valid, so that bytes can be read as a slice of them.
///
/// # Safety
/// Only for plain numbers.
pub unsafe trait Pod: Copy + Default + Send + Sync + 'static {}

macro_rules! pod {
    ($($t:ty),*) => { $(
        // SAFETY: a plain number.
        unsafe impl Pod for $t {}
    )* };
}

pod!(u8, u16, u32, u64, i32, i64, f32, f64, half::f16, half::bf16);

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::{DType, Shape};

    fn buffer(nbytes: usize, home: &Arc<FreeList>) -> Result<CpuBuffer> {
        CpuBuffer::new(&BufferDesc::new(Shape::of(&[nbytes]), DType::U8), home)
    }

    #[test]
    fn blocks_are_used_again_and_sizes_waste_little() {
        let home = Arc::new(FreeList::default());
        let first = buffer(100_000, &home).expect("memory");
        let at = first.ptr();
        assert_eq!(at as usize % ALIGN, 0);
        drop(first);
        assert_eq!(buffer(99_000, &home).expect("memory").ptr(), at);
        for n in [0, 1, 64, 65, 1025, 5000, 123_456_789] {
            let c = capacity_of(n);
            assert!(c >= n && c <= (n + n / 8).max(n + ALIGN) && c.is_multiple_of(ALIGN), "{n} -> {c}");
        }
        assert!(buffer(usize::MAX / 2 + 1 - 64, &home).is_err());
    }

    #[test]
    fn a_limit_is_enforced_and_free_blocks_are_dropped_for_it() {
        let home = Arc::new(FreeList::new(Some(1 << 20)));
        let first = buffer(600 << 10, &home).expect("memory");
        let e = buffer(600 << 10, &home).expect_err("over the limit");
        assert_eq!(e.kind, perilune_core::Kind::Memory);
        assert_eq!(e.message, "out of memory: 640 KiB more were requested, 640 KiB of 1.0 MiB are in use");
        drop(first);
        assert_eq!(home.memory(), Memory { allocated: 0, reserved: 640 << 10, peak: 640 << 10, limit: Some(1 << 20) });
        // The free block has another size, so it is dropped.
        let all = buffer(1 << 20, &home).expect("memory");
        assert_eq!(home.memory().reserved, 1 << 20);
        drop(all);
        let mut arena = Block::new(0).expect("memory");
        home.enlarge(&mut arena, 900 << 10).expect("memory");
        assert!(home.enlarge(&mut arena, 2 << 20).is_err());
        assert_eq!(home.memory().allocated, 0);
        home.enlarge(&mut arena, 1 << 20).expect("memory");
        assert_eq!(home.memory().allocated, 1 << 20);
    }
}
