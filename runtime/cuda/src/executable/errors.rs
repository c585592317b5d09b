//! Reports indices out of range. Each kernel that checks indices has a cell in host memory, in which it stores the
//! first bad index.

use crate::driver::Pinned;
use perilune_core::error::Error;
use perilune_core::op::IndexFault;
use perilune_plan::ir::Origin;

/// Words of a `Fault` (kernels/device/fault.cuh).
pub(super) const FAULT_WORDS: usize = 3;

/// Where the kernels of a program report bad indices.
pub(crate) struct DeviceErrors {
    pub(super) memory: Pinned,
    pub(super) kernels: Vec<(Origin, IndexFault)>,
}

impl DeviceErrors {
    /// Returns and clears the first report.
    pub fn take(&self) -> Option<(Origin, Error)> {
        for (k, (origin, fault)) in self.kernels.iter().enumerate() {
            let at = k * FAULT_WORDS;
            if self.memory.read(at) as u32 != 0 {
                let (value, size) = (self.memory.read(at + 1) as i64, self.memory.read(at + 2) as i64);
                self.memory.write(at, 0);
                return Some((*origin, fault.error(value, size)));
            }
        }
        None
    }
}
