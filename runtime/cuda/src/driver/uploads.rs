//! Copies inputs to the device while its compute stream works.
//!
//! A large input goes in pieces through pinned host memory, since the driver may synchronize the stream to copy pageable memory, and
//! then through a landing of device memory. The copy to the landing has a stream of its own and waits for no queued work; the compute
//! stream moves a piece from the landing to its place in stream order, at the speed of the device's memory. So the batch of a step is on
//! the device when the step before it ends, and memory that is freed and reused keeps the order of one stream.
//!
//! Small inputs are copied on the compute stream: they take as long as the move. So are all inputs without memory for the landing.

use super::{Address, Device, Event, Handle, Pinned, Range, check, sys};
use perilune_core::error::Result;
use std::collections::VecDeque;
use std::ptr::null_mut;
use std::sync::Arc;

/// Bytes of a piece.
const PIECE: usize = 4 << 20;
/// Maximum number of pinned pieces: while one is filled, others are copied.
const PINNED: usize = 4;
/// Maximum number of pieces of the landing: a batch of 128 MiB while the one before is in use.
const LANDED: usize = 64;
/// The driver copies smaller inputs into its own buffer at once, without waiting.
const TAKEN_ALONG: usize = 16 << 10;
/// Smaller inputs are copied on the compute stream. At 50 GB/s, 1 MiB takes 20 µs.
const BESIDE: usize = 1 << 20;

/// The copies of inputs to a device.
pub struct Uploads {
    device: Arc<Device>,
    stream: Handle<sys::CUstream_st>,
    /// Each with the event after which the host may write it again; oldest first.
    pinned: VecDeque<(Pinned, Event)>,
    landing: Range,
    /// The pieces of the landing, each with the event of its last move; oldest first.
    landed: VecDeque<(Address, Event)>,
}

impl Uploads {
    pub fn new(device: &Arc<Device>) -> Result<Uploads> {
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: out-pointer to a local.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "making a stream")?;
        let (stream, pinned, landed) = (Handle(stream), VecDeque::new(), VecDeque::new());
        Ok(Uploads { device: device.clone(), stream, pinned, landing: Range::new(device)?, landed })
    }

    /// Bytes of device memory of the landing.
    pub fn held(&self) -> usize {
        self.landing.mapped()
    }

    /// Copies to the device before the work that is queued from now on. The bytes may change as soon as this returns.
    pub fn upload(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        if bytes.len() < TAKEN_ALONG {
            return self.device.upload(to, bytes);
        }
        for (k, part) in bytes.chunks(PIECE).enumerate() {
            let (pinned, free) = self.pinned()?;
            // SAFETY: the piece is free (`pinned` waited for it) and as long as the longest part.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), pinned.ptr, part.len()) };
            let to = to + (k * PIECE) as u64;
            let queued = match if bytes.len() < BESIDE { None } else { self.landed() } {
                Some((at, moved)) => {
                    let queued = self.copy_beside(&pinned, part.len(), (at, &moved), to, &free);
                    self.landed.push_back((at, moved));
                    queued
                }
                None => self.copy(&pinned, part.len(), to, self.device.stream.0).and_then(|()| free.again()),
            };
            self.pinned.push_back((pinned, free));
            queued?;
        }
        Ok(())
    }

    /// Copies a piece to the landing, and moves it to its place.
    fn copy_beside(
        &self,
        pinned: &Pinned,
        nbytes: usize,
        (at, moved): (Address, &Event),
        to: Address,
        free: &Event,
    ) -> Result<()> {
        // SAFETY: both events and the stream are alive.
        check(unsafe { sys::cuStreamWaitEvent(self.stream.0, moved.event.0, 0) }, "waiting for the landing")?;
        self.copy(pinned, nbytes, at, self.stream.0)?;
        free.again_in(&self.stream)?;
        self.device.wait_for(free)?;
        self.device.copy(at, to, nbytes)?;
        moved.again()
    }

    fn copy(&self, pinned: &Pinned, nbytes: usize, to: Address, stream: sys::CUstream) -> Result<()> {
        let from = pinned.ptr.cast_const().cast();
        // SAFETY: the piece holds that many bytes and is written again after its event only; `to` has room for them (callers check sizes).
        check(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, nbytes, stream) }, "copying to the GPU")
    }

    /// Returns a pinned piece that is no longer read.
    fn pinned(&mut self) -> Result<(Pinned, Event)> {
        let is_free = self.pinned.front().is_some_and(|(_, free)| free.is_over());
        if (is_free || self.pinned.len() >= PINNED)
            && let Some((piece, free)) = self.pinned.pop_front()
        {
            free.wait()?;
            return Ok((piece, free));
        }
        Ok((Pinned::new(&self.device, PIECE)?, Event::untimed(&self.device)?))
    }

    /// Returns a piece of the landing, with the event after which it may be written; none without memory for it.
    fn landed(&mut self) -> Option<(Address, Event)> {
        let count = self.landed.len();
        if self.landed.front().is_some_and(|(_, moved)| moved.is_over()) || count >= LANDED {
            return self.landed.pop_front();
        }
        let more = Event::untimed(&self.device).and_then(|moved| {
            self.landing.ensure((count + 1) * PIECE)?;
            Ok((self.landing.base + (count * PIECE) as u64, moved))
        });
        more.ok().or_else(|| self.landed.pop_front())
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        // SAFETY: created by `new`; the pieces may still be read and written by both streams.
        unsafe {
            sys::cuStreamSynchronize(self.stream.0);
            sys::cuStreamSynchronize(self.device.stream.0);
            sys::cuStreamDestroy_v2(self.stream.0);
        }
    }
}
