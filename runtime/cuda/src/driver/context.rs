//! Retains a GPU's primary context and makes it current on the threads that use it.

use super::{check, sys};
use perilune_core::error::Result;
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle of the driver: a stream, an event, a module, a function, a context.
#[derive(Debug)]
pub struct Handle<T>(pub *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: the driver's handles belong to the process, not to a thread: any thread may pass one to the driver while the context is
// current on it, and the driver synchronizes such calls. (A graph that was instantiated is no such handle: see `Replay`.)
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a GPU, retained until the last use is dropped.
pub struct Context {
    raw: Handle<sys::CUctx_st>,
    device: sys::CUdevice,
    /// Tells contexts apart: a context that is opened again may have the address of the one before.
    number: u64,
}

thread_local! {
    /// The number of the context that is current on this thread; 0 is none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

impl Context {
    /// Retains the primary context of a device. The driver's library is loaded and initialised.
    pub fn retain(device: sys::CUdevice) -> Result<Context> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut raw = null_mut();
        // SAFETY: the out-pointer is to a local.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "making a context on the GPU")?;
        Ok(Context { raw: Handle(raw), device, number: COUNT.fetch_add(1, Ordering::Relaxed) + 1 })
    }

    /// Makes the context current on this thread. Costs a comparison where it is current already.
    pub fn bind(&self) -> Result<()> {
        if CURRENT.get() == self.number {
            return Ok(());
        }
        // SAFETY: the context is retained.
        check(unsafe { sys::cuCtxSetCurrent(self.raw.0) }, "making the context current")?;
        CURRENT.set(self.number);
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`; whatever used it holds an `Arc` of it.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
