//! Queues copies on a device's stream, waits for it, and records events in it.

use super::{Address, Device, Handle, check, sys};
use perilune_core::error::{Error, Result};
use std::ptr::null_mut;
use std::sync::Arc;

impl Device {
    /// Waits for all queued work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: see the head of the file.
        check(unsafe { sys::cuStreamSynchronize(self.stream.0) }, "waiting for the GPU")
    }

    /// Makes later work wait until all work queued before the event, which may be of another device, has finished.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: the event is alive, and the driver keeps what it recorded.
        check(unsafe { sys::cuStreamWaitEvent(self.stream.0, event.event.0, 0) }, "waiting for an event")
    }

    /// Queues a copy to the device. `bytes` must not change until the stream is synchronized, unless it is pageable
    /// (then the driver copies it before it returns).
    pub fn upload(&self, to: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: `to` has room for the bytes (callers check sizes); the source is a slice.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream.0) };
        check(status, "copying to the GPU")
    }

    /// Queues a copy between memory of the device and of the host.
    pub fn copy_across(&self, from: Address, to: Address, nbytes: usize) -> Result<()> {
        // SAFETY: as in `copy`; the address of pinned memory is the same for the device and the host.
        check(unsafe { sys::cuMemcpyAsync(to, from, nbytes, self.stream.0) }, "copying between a GPU and the host")
    }

    /// Queues a copy within the device.
    pub fn copy(&self, from: Address, to: Address, nbytes: usize) -> Result<()> {
        // SAFETY: both ranges hold that many bytes, and do not overlap (callers check).
        let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, nbytes, self.stream.0) };
        check(status, "copying on the GPU")
    }

    /// Copies from the device after all queued work, and waits for it.
    pub fn download(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        if !bytes.is_empty() {
            // SAFETY: `from` holds that many bytes (callers check sizes); the copy has finished when the stream is
            // idle.
            let status =
                unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream.0) };
            check(status, "copying from the GPU")?;
        }
        self.synchronize()
    }
}

/// A point in the stream, with a time stamp.
pub struct Event {
    device: Arc<Device>,
    pub(super) event: Handle<sys::CUevent_st>,
}

impl Event {
    /// Creates an event and records it now.
    pub fn record(device: &Arc<Device>) -> Result<Event> {
        let mut event = null_mut();
        // SAFETY: out-pointer to a local; the stream is the device's.
        unsafe {
            check(sys::cuEventCreate(&mut event, 0), "making an event")?;
            check(sys::cuEventRecord(event, device.stream.0), "recording an event")?;
        }
        Ok(Event { device: device.clone(), event: Handle(event) })
    }

    /// Creates an event that is not recorded yet.
    pub fn timed(device: &Arc<Device>) -> Result<Event> {
        Event::with_flags(device, 0)
    }

    /// Creates an event that is not recorded yet and stores no time, which costs less.
    pub fn untimed(device: &Arc<Device>) -> Result<Event> {
        Event::with_flags(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    fn with_flags(device: &Arc<Device>, flags: u32) -> Result<Event> {
        let mut event = null_mut();
        // SAFETY: out-pointer to a local.
        check(unsafe { sys::cuEventCreate(&mut event, flags) }, "making an event")?;
        Ok(Event { device: device.clone(), event: Handle(event) })
    }

    /// Records now, and replaces what it recorded before.
    pub fn again(&self) -> Result<()> {
        // SAFETY: the event is alive; the stream is the device's.
        check(unsafe { sys::cuEventRecord(self.event.0, self.device.stream.0) }, "recording an event")
    }

    /// Records here in the device's stream. In a capture the record is a node of the graph: each launch of the graph records the event, and
    /// other streams that wait for it then do not wait for the nodes behind it.
    pub fn record_here(&self) -> Result<()> {
        let stream = self.device.stream.0;
        // SAFETY: the event and the stream are alive; a graph is dropped before the events that it records (`executable.rs`).
        unsafe {
            let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            check(sys::cuStreamIsCapturing(stream, &mut status), "asking for a capture")?;
            let is_captured = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
            let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
            let flags = if is_captured { external } else { 0 };
            check(sys::cuEventRecordWithFlags(self.event.0, stream, flags), "recording an event")
        }
    }

    /// Records now in another stream of the device.
    pub(super) fn again_in(&self, stream: &Handle<sys::CUstream_st>) -> Result<()> {
        // SAFETY: the event and the stream are alive.
        check(unsafe { sys::cuEventRecord(self.event.0, stream.0) }, "recording an event")
    }

    /// Whether all work queued before it has finished; also true if it was never recorded.
    pub fn is_over(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.event.0) as u32 == 0 }
    }

    /// Whether it is known that work queued before it has not finished. After a failure of the GPU it is not known.
    pub fn is_pending(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.event.0) == sys::CUresult::CUDA_ERROR_NOT_READY }
    }

    /// Waits until all work queued before it has finished.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        check(unsafe { sys::cuEventSynchronize(self.event.0) }, "waiting for the GPU")
    }

    /// Seconds from `earlier` to this event; the stream must be idle.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        if self.device.driver_version < 12_080 {
            let message =
                format!("timing kernels needs a driver for CUDA 12.8; this one is for {}", self.device.driver_version);
            return Err(Error::system("cuda", message));
        }
        let mut ms = 0f32;
        // SAFETY: both events are recorded; the driver has the entry point.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.event.0, self.event.0) };
        check(status, "reading an event")?;
        Ok(f64::from(ms) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `record` or `untimed`.
            unsafe { sys::cuEventDestroy_v2(self.event.0) };
        }
    }
}
