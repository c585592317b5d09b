//! Host memory: aligned blocks, the free list they return to, and typed readings of them.
//!
//! A training step asks for the same output sizes again and again; blocks go back to a free list by size, so that a step
//! neither maps memory nor faults pages in. The list is bounded. Fresh blocks are zeroed: no byte is ever uninitialised.

use perilune_core::error::{Error, Result};
use perilune_plan::DeviceBuffer;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// Alignment of every block: a cache line, and the widest vector.
pub const ALIGN: usize = 64;
/// What the free list holds at most.
const POOLED_BYTES: usize = 1 << 30;

/// An owned, aligned, initialised piece of host memory.
#[derive(Debug)]
pub struct Block {
    ptr: NonNull<u8>,
    capacity: usize,
}

// SAFETY: a block owns its memory like a `Vec<u8>`.
unsafe impl Send for Block {}

impl Block {
    pub fn new(capacity: usize) -> Result<Block> {
        let capacity = capacity.max(ALIGN);
        let layout = Layout::from_size_align(capacity, ALIGN).ok();
        // SAFETY: the size is not 0.
        let ptr = layout.and_then(|l| NonNull::new(unsafe { alloc_zeroed(l) }));
        match ptr {
            Some(ptr) => Ok(Block { ptr, capacity }),
            None => Err(Error::system("cpu", format!("out of host memory: {capacity} bytes were asked for"))
                .hint("take smaller batches or tensors; `perilune check` says what a step needs")),
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
        unsafe { dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.capacity, ALIGN)) }
    }
}

/// Blocks waiting for their next use, by capacity.
#[derive(Debug, Default)]
pub struct FreeList {
    blocks: RefCell<BTreeMap<usize, Vec<Block>>>,
    bytes: Cell<usize>,
}

/// The capacity a request is rounded up to: eight sizes an octave, so that at most 1/8 is wasted.
fn capacity_of(nbytes: usize) -> usize {
    if nbytes <= 1024 {
        return nbytes.max(1).next_multiple_of(ALIGN);
    }
    nbytes.next_multiple_of((1usize << nbytes.ilog2()) / 8)
}

impl FreeList {
    fn take(&self, nbytes: usize) -> Result<Block> {
        let capacity = capacity_of(nbytes);
        let found = self.blocks.borrow_mut().get_mut(&capacity).and_then(Vec::pop);
        match found {
            Some(block) => {
                self.bytes.set(self.bytes.get() - capacity);
                Ok(block)
            }
            None => Block::new(capacity),
        }
    }

    fn put(&self, block: Block) {
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
}
