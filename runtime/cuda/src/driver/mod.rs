//! Wraps the CUDA driver: devices, streams, memory, modules, events and graphs, each freed on drop.
//!
//! All `unsafe` calls of the driver are in this directory. Every block relies on three facts: `Device::open` loaded the driver's
//! library; the context is current on the thread that calls ([`Context::bind`]: each entry point of the backend and each `drop`
//! calls it); handles are freed once. The driver's functions may be called from several threads at once. What is queued on a
//! stream must come in an order, so the backend's lock is held by the thread that queues.

mod alloc;
mod context;
mod copy_streams;
mod device;
mod graph;
mod lane;
mod mailbox;
mod module;
mod peers;
mod snapshot;
mod stream;
mod uploads;

pub use alloc::{Allocation, CudaBuffer, Heap, Pinned, Range};
pub use context::{Context, Handle};
pub use copy_streams::CopyStreams;
pub use device::Device;
pub use graph::{Replay, outside_captures};
pub use lane::Lane;
pub use mailbox::{Outbox, SLOTS, Slot};
pub use module::{Entry, Module, TensorMap};
pub use peers::{Endpoint, PeerAccess, Point, Recorded};
pub use snapshot::{Snapshots, snapshot};
pub use stream::Event;

use cudarc::driver::sys;
use perilune_core::error::{Error, Result};
use std::ffi::CStr;
use std::ptr::null;

/// A device address.
pub type Address = u64;

/// Converts a status to an error that names the call.
pub(crate) fn check(status: sys::CUresult, what: &str) -> Result<()> {
    if status as u32 == 0 {
        return Ok(());
    }
    let mut name: *const std::ffi::c_char = null();
    // SAFETY: the driver stores a pointer to a static string, or leaves it null.
    let text = unsafe {
        sys::cuGetErrorString(status, &mut name);
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    };
    Err(Error::system("cuda", format!("{what} failed: {text} (CUDA error {})", status as u32)))
}
