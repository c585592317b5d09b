//! Copies small results to the host on a stream of their own, after the work that produced them but not after work queued since: a
//! training loop reads the loss of the previous step while a step runs. Inputs have a stream too (`uploads`).
//!
//! Ordering: every queued operation has a number, a buffer stores the number of its last writer, and an event is recorded after each
//! program. A result waits for the first event that is not older than its number.

use super::uploads::Uploads;
use super::{Address, Device, Event, Handle, Pinned, check, sys};
use perilune_core::error::Result;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;

/// Maximum bytes of a result that uses the second stream.
const SMALL: usize = 64 << 10;
/// Number of marks that are kept, those of the last programs.
const MARKS: usize = 8;

/// Copies of a device that do not wait for its compute stream.
pub struct CopyStreams {
    device: Arc<Device>,
    stream: Handle<sys::CUstream_st>,
    /// The pinned memory that results are copied to.
    landing: Pinned,
    pub uploads: Uploads,
    /// The number of the last queued operation.
    queued: u64,
    /// Oldest first.
    marks: VecDeque<(u64, Event)>,
}

impl CopyStreams {
    pub fn new(device: &Arc<Device>) -> Result<CopyStreams> {
        let landing = Pinned::new(device, SMALL)?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: out-pointer to a local.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "making a stream")?;
        let (stream, uploads, marks) = (Handle(stream), Uploads::new(device)?, VecDeque::new());
        Ok(CopyStreams { device: device.clone(), stream, landing, uploads, queued: 0, marks })
    }

    /// Returns the number of the next queued operation, to be stored in the buffers that it writes.
    pub fn number(&mut self) -> u64 {
        self.queued += 1;
        self.queued
    }

    /// Returns the number of the last queued operation.
    pub fn queued(&self) -> u64 {
        self.queued
    }

    /// Returns the number of an operation up to which all have finished; 0 if none is known.
    pub fn finished(&self) -> u64 {
        self.marks.iter().rev().find(|(_, event)| event.is_over()).map_or(0, |(number, _)| *number)
    }

    /// Records a mark after all queued operations.
    pub fn mark(&mut self) -> Result<()> {
        let event = match if self.marks.len() == MARKS { self.marks.pop_front() } else { None } {
            Some((_, event)) => event,
            None => Event::untimed(&self.device)?,
        };
        event.again()?;
        self.marks.push_back((self.queued, event));
        Ok(())
    }

    /// Copies memory whose last writer has the number `written`. Returns the number of an operation up to which all have
    /// finished, or `None` if the second stream cannot be used.
    pub fn download(&self, from: Address, bytes: &mut [u8], written: u64) -> Result<Option<u64>> {
        let mark = self.marks.iter().find(|m| m.0 >= written);
        let (Some((number, mark)), true) = (mark, bytes.len() <= SMALL) else { return Ok(None) };
        // SAFETY: `from` holds that many bytes (callers check sizes) and the landing has room; nothing queued before
        // the mark writes there later than it, and the copy has finished when this stream is idle.
        unsafe {
            check(sys::cuStreamWaitEvent(self.stream.0, mark.event.0, 0), "waiting for a result")?;
            let to = self.landing.ptr.cast();
            check(sys::cuMemcpyDtoHAsync_v2(to, from, bytes.len(), self.stream.0), "copying from the GPU")?;
            check(sys::cuStreamSynchronize(self.stream.0), "waiting for the GPU")?;
            bytes.copy_from_slice(std::slice::from_raw_parts(self.landing.ptr, bytes.len()));
        }
        Ok(Some(*number))
    }
}

impl Drop for CopyStreams {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: created by `new`.
        unsafe {
            sys::cuStreamSynchronize(self.stream.0);
            sys::cuStreamDestroy_v2(self.stream.0);
        }
    }
}
