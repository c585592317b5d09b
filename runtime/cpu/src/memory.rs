//! Host memory: aligned blocks, the free list they return to, and typed readings of them.
//!
//! A training step asks for the same output sizes again and again; blocks go back to a free list by size, so that a step
//! neither maps memory nor faults pages in. The list is bounded. Fresh blocks are zeroed: no byte is ever uninitialised.

use perilune_core::byte_size;
use perilune_core::error::{Error, Result};
use perilune_plan::{DeviceBuffer, Memory};
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// Alignment of every block: a cache line, and the widest vector.
pub const ALIGN: usize = 64;
/// A huge page, on machines that have them: blocks of several are aligned to it.
const HUGE: usize = 2 << 20;
/// What the free list holds at most.
const POOLED_BYTES: usize = 1 << 30;

/// An owned, aligned, initialised piece of host memory.
#[derive(Debug)]
pub struct Block {
    ptr: NonNull<u8>,
    capacity: usize,
    /// Of an arena: how much of it a free list counts as used.
    counted: usize,
}

// SAFETY: a block owns its memory like a `Vec<u8>`.
unsafe impl Send for Block {}

/// Asks for huge pages: a page table entry for each 4 KiB, looked up twice on a virtual machine, costs some per cent of
/// what reads through memory.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(at: *mut u8, nbytes: usize) {
    const MADV_HUGEPAGE: i32 = 14;
    unsafe extern "C" {
        fn madvise(at: *mut std::ffi::c_void, nbytes: usize, advice: i32) -> i32;
    }
    // A hint: a system without huge pages refuses it, and that is all.
    // SAFETY: this advice leaves what memory holds as it is, whoever owns it.
    unsafe { madvise(at.cast(), nbytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: *mut u8, _: usize) {}

/// The alignment of a block.
fn align_of(capacity: usize) -> usize {
    if cfg!(target_os = "linux") && capacity >= 2 * HUGE { HUGE } else { ALIGN }
}

/// Fresh memory, zeroed.
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
    pub fn new(capacity: usize) -> Result<Block> {
        let capacity = capacity.max(ALIGN);
        let layout = Layout::from_size_align(capacity, align_of(capacity)).ok();
        let ptr = layout.and_then(|l| NonNull::new(fresh(l)));
        match ptr {
            Some(ptr) => Ok(Block { ptr, capacity, counted: 0 }),
            None => {
                let asked = byte_size::show(capacity);
                Err(Error::memory("cpu", format!("out of memory: the system has no {asked} more to give")))
            }
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
        // SAFETY: allocated in `new` with this very layout, which was valid then.
        unsafe { dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.capacity, align_of(self.capacity))) }
    }
}

/// Blocks waiting for their next use, by capacity.
#[derive(Debug, Default)]
pub struct FreeList {
    blocks: RefCell<BTreeMap<usize, Vec<Block>>>,
    bytes: Cell<usize>,
    /// Bytes of blocks that are in use.
    used: Cell<usize>,
    peak: Cell<usize>,
    /// What used and waiting blocks may be together.
    limit: Option<usize>,
}

/// The capacity a request is rounded up to: eight sizes an octave, so that at most 1/8 is wasted.
fn capacity_of(nbytes: usize) -> usize {
    if nbytes <= 1024 {
        return nbytes.max(1).next_multiple_of(ALIGN);
    }
    nbytes.next_multiple_of((1usize << nbytes.ilog2()) / 8)
}

impl FreeList {
    /// A list that never holds more than `limit` bytes, in use and waiting.
    pub fn new(limit: Option<usize>) -> FreeList {
        FreeList { limit, ..FreeList::default() }
    }

    pub fn memory(&self) -> Memory {
        let used = self.used.get();
        Memory { allocated: used, reserved: used + self.bytes.get(), peak: self.peak.get(), limit: self.limit }
    }

    /// A fresh block, within the limit; waiting blocks give way to it.
    fn fresh(&self, capacity: usize) -> Result<Block> {
        if let Some(limit) = self.limit {
            let used = self.used.get();
            if used + self.bytes.get() + capacity > limit {
                self.blocks.borrow_mut().clear();
                self.bytes.set(0);
            }
            if used + capacity > limit {
                let message = format!(
                    "out of memory: {} more are asked for, {} of {} are in use",
                    byte_size::show(capacity),
                    byte_size::show(used),
                    byte_size::show(limit)
                );
                return Err(Error::memory("cpu", message));
            }
        }
        Block::new(capacity)
    }

    fn count(&self, capacity: usize) {
        self.used.set(self.used.get() + capacity);
        self.peak.set(self.peak.get().max(self.used.get()));
    }

    fn take(&self, nbytes: usize) -> Result<Block> {
        let capacity = capacity_of(nbytes);
        let found = self.blocks.borrow_mut().get_mut(&capacity).and_then(Vec::pop);
        let block = match found {
            Some(block) => {
                self.bytes.set(self.bytes.get() - capacity);
                block
            }
            None => self.fresh(capacity)?,
        };
        self.count(capacity);
        Ok(block)
    }

    /// Makes `block`, which is none of this list's and counted as used, at least `nbytes` long. What it held is gone.
    pub fn enlarge(&self, block: &mut Block, nbytes: usize) -> Result<()> {
        if block.capacity() >= nbytes {
            return Ok(());
        }
        // Give the old one back first: both need not fit.
        self.used.set(self.used.get().saturating_sub(block.counted));
        *block = Block::new(0)?;
        *block = self.fresh(nbytes)?;
        block.counted = nbytes;
        self.count(nbytes);
        Ok(())
    }

    fn put(&self, block: Block) {
        self.used.set(self.used.get() - block.capacity);
        let total = self.bytes.get() + block.capacity;
        if total <= POOLED_BYTES {
            self.bytes.set(total);
            self.blocks.borrow_mut().entry(block.capacity).or_default().push(block);
        }
    }
}

/// A buffer of the CPU device.
#[derive(Debug)]
pub struct CpuBuffer {
    /// Always there until the drop.
    block: Option<Block>,
    nbytes: usize,
    home: Rc<FreeList>,
}

impl CpuBuffer {
    pub fn new(nbytes: usize, home: &Rc<FreeList>) -> Result<CpuBuffer> {
        Ok(CpuBuffer { block: Some(home.take(nbytes)?), nbytes, home: home.clone() })
    }

    pub fn ptr(&self) -> *mut u8 {
        self.block.as_ref().map_or(NonNull::dangling().as_ptr(), Block::ptr)
    }

    pub fn read(&self, nbytes: usize) -> &[u8] {
        // SAFETY: the block holds at least `self.nbytes` initialised bytes, and lives as long as `self`; nothing runs
        // beside the caller that writes to it, since a program runs to its end within `run`.
        unsafe { std::slice::from_raw_parts(self.ptr(), nbytes.min(self.nbytes)) }
    }

    pub fn write(&self, bytes: &[u8]) {
        let n = bytes.len().min(self.nbytes);
        // SAFETY: as in `read`; `bytes` is no part of this block, because `read` borrows end before a write.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.ptr(), n) }
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.home.put(block);
        }
    }
}

impl DeviceBuffer for CpuBuffer {
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Marks types whose every bit pattern is a value, so that bytes of a value can be read as a slice of them.
///
/// # Safety
/// Only for plain numbers.
pub unsafe trait Plain: Copy + Default + Send + Sync + 'static {}

macro_rules! plain {
    ($($t:ty),*) => { $(
        // SAFETY: a plain number.
        unsafe impl Plain for $t {}
    )* };
}

plain!(u8, u16, u32, u64, i32, i64, f32, f64, half::f16, half::bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_used_again_and_sizes_waste_little() {
        let home = Rc::new(FreeList::default());
        let first = CpuBuffer::new(100_000, &home).expect("memory");
        let at = first.ptr();
        assert_eq!(at as usize % ALIGN, 0);
        drop(first);
        assert_eq!(CpuBuffer::new(99_000, &home).expect("memory").ptr(), at);
        for n in [0, 1, 64, 65, 1025, 5000, 123_456_789] {
            let c = capacity_of(n);
            assert!(c >= n && c <= (n + n / 8).max(n + ALIGN) && c.is_multiple_of(ALIGN), "{n} -> {c}");
        }
        assert!(CpuBuffer::new(usize::MAX / 2 + 1 - 64, &home).is_err());
    }

    #[test]
    fn a_limit_is_kept_and_waiting_blocks_give_way() {
        let home = Rc::new(FreeList::new(Some(1 << 20)));
        let first = CpuBuffer::new(600 << 10, &home).expect("memory");
        let e = CpuBuffer::new(600 << 10, &home).expect_err("over the limit");
        assert_eq!(e.kind, perilune_core::Kind::Memory);
        assert_eq!(e.message, "out of memory: 640 KiB more are asked for, 640 KiB of 1.0 MiB are in use");
        drop(first);
        assert_eq!(home.memory(), Memory { allocated: 0, reserved: 640 << 10, peak: 640 << 10, limit: Some(1 << 20) });
        // The block that waits is of another size: it is dropped.
        let all = CpuBuffer::new(1 << 20, &home).expect("memory");
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
