//! Captures a sequence of launches as a CUDA graph and replays it with one call.

use super::{Device, check, sys};
use perilune_core::error::Result;
use std::ptr::null_mut;
use std::sync::{Arc, PoisonError, RwLock};

/// Read while a stream is captured, written while something waits for all work of a device: that ends captures of other threads, since
/// the streams of all runtimes on a GPU are in its one context.
static CAPTURES: RwLock<()> = RwLock::new(());

/// Runs `f`, which waits for all work of a device, while no stream is captured.
pub fn outside_captures<T>(f: impl FnOnce() -> T) -> T {
    let _none = CAPTURES.write().unwrap_or_else(PoisonError::into_inner);
    f()
}

/// A recorded sequence of launches that is replayed with one call.
pub struct Replay {
    device: Arc<Device>,
    exec: sys::CUgraphExec,
}

// SAFETY: any thread may launch or destroy an instantiated graph, one at a time: the type is not `Sync`.
unsafe impl Send for Replay {}

impl Replay {
    /// Records what `f` queues instead of running it.
    pub fn capture(device: &Arc<Device>, f: impl FnOnce() -> Result<()>) -> Result<Replay> {
        let _undisturbed = CAPTURES.read().unwrap_or_else(PoisonError::into_inner);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is the device's; every capture that begins is ended.
        unsafe {
            check(sys::cuStreamBeginCapture_v2(device.stream.0, mode), "starting a capture")?;
            let done = f();
            let mut graph = null_mut();
            let ended = check(sys::cuStreamEndCapture(device.stream.0, &mut graph), "ending a capture");
            if let Err(e) = done.and(ended) {
                if !graph.is_null() {
                    sys::cuGraphDestroy(graph);
                }
                return Err(e);
            }
            let mut exec = null_mut();
            let made = check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "making a graph");
            sys::cuGraphDestroy(graph);
            made?;
            Ok(Replay { device: device.clone(), exec })
        }
    }

    pub fn launch(&self) -> Result<()> {
        // SAFETY: instantiated above.
        check(unsafe { sys::cuGraphLaunch(self.exec, self.device.stream.0) }, "replaying a step")
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: instantiated by `capture`; the driver keeps what a running launch needs.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
