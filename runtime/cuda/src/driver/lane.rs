//! Streams for collectives and transfers, beside the stream of the device's other work.

use super::{Address, Device, Event, Handle, check, sys};
use perilune_core::error::Result;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// A stream in which collectives or transfers run in order.
pub struct Lane {
    device: Arc<Device>,
    pub(super) stream: Handle<sys::CUstream_st>,
}

impl Lane {
    /// Its blocks go before those of the device's other work that wait: collectives are short, and other devices wait for them.
    pub fn new(device: &Arc<Device>) -> Result<Lane> {
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: out-pointers are to locals.
        unsafe {
            check(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest), "asking for priorities of streams")?;
            check(sys::cuStreamCreateWithPriority(&mut stream, flags, greatest), "making a stream")?;
        }
        Ok(Lane { device: device.clone(), stream: Handle(stream) })
    }

    /// Makes later work of the lane wait until all work queued before the event, which may be of another device, has finished.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: the event is alive, and the driver keeps what it recorded.
        check(unsafe { sys::cuStreamWaitEvent(self.stream.0, event.event.0, 0) }, "waiting for an event")
    }

    /// Records an event of the device in the lane.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both are of this device and alive.
        check(unsafe { sys::cuEventRecord(event.event.0, self.stream.0) }, "recording an event")
    }

    /// The stream, for libraries that queue on it.
    pub fn raw(&self) -> *mut c_void {
        self.stream.0.cast()
    }

    /// Queues a copy between memory that the device may access.
    pub fn copy(&self, from: Address, to: Address, nbytes: usize) -> Result<()> {
        // SAFETY: both ranges hold that many bytes, and do not overlap (callers check).
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, nbytes, self.stream.0) };
        check(status, "copying on a GPU")
    }

    /// Queues a copy between memory of the device and of the host.
    pub fn copy_across(&self, from: Address, to: Address, nbytes: usize) -> Result<()> {
        // SAFETY: as in `copy`; the address of pinned memory is the same for the device and the host.
        check(unsafe { sys::cuMemcpyAsync(to, from, nbytes, self.stream.0) }, "copying between a GPU and the host")
    }

    /// Queues a copy of `rows` rows of `nbytes` within the device. `apart`: from the start of a row to that of the next, where they are
    /// read and where they are written.
    pub fn copy_rows(&self, from: Address, to: Address, nbytes: usize, apart: [usize; 2], rows: usize) -> Result<()> {
        let kind = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: null_mut(),
            srcPitch: apart[0],
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: kind,
            dstHost: null_mut(),
            dstDevice: to,
            dstArray: null_mut(),
            dstPitch: apart[1],
            WidthInBytes: nbytes,
            Height: rows,
        };
        // SAFETY: the rows lie in memory of the device, and do not overlap (callers check).
        check(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.0) }, "copying rows on the GPU")
    }

    /// Waits for all work of the lane.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: see the head of `driver`.
        check(unsafe { sys::cuStreamSynchronize(self.stream.0) }, "waiting for the GPU")
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`; the driver finishes what is queued.
            unsafe {
                sys::cuStreamSynchronize(self.stream.0);
                sys::cuStreamDestroy_v2(self.stream.0);
            }
        }
    }
}
