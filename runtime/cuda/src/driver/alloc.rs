//! Device memory for buffers: best fit within one address range that grows in place.
//!
//! A freed place may be given out at once: all work of the device goes through one stream, so whoever writes there next
//! does so after everybody who was to read.

use crate::driver::{Address, Device, Range};
use perilune_core::error::Result;
use perilune_plan::DeviceBuffer;
use perilune_plan::memory::Offsets;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// What vector loads and TMA want.
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

    /// Bytes given out now, at most so far, and mapped.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.used.get(), self.peak.get(), self.range.borrow().mapped())
    }

    pub fn alloc(self: &Rc<Heap>, nbytes: usize) -> Result<CudaBuffer> {
        // An empty buffer gets an address too: kernels may be handed it.
        let room = nbytes.max(1).next_multiple_of(ALIGN);
        let mut places = self.places.borrow_mut();
        let at = places.take(room);
        let mut range = self.range.borrow_mut();
        if let Err(e) = range.ensure(places.end) {
            places.give(at, room);
            // Nothing lies behind the last place: what is asked for next need not start there.
            places.trim();
            return Err(e);
        }
        self.used.set(self.used.get() + room);
        self.peak.set(self.peak.get().max(self.used.get()));
        let address = range.base + at as u64;
        Ok(CudaBuffer { heap: self.clone(), at, room, nbytes, address, written: Cell::new(0) })
    }
}

/// Memory of the device, given back on drop.
pub struct CudaBuffer {
    heap: Rc<Heap>,
    at: usize,
    room: usize,
    nbytes: usize,
    pub address: Address,
    /// The number of what was queued last that writes here (`driver/copy_streams.rs`).
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
