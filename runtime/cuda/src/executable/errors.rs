//! Reports indices out of range: each kernel that checks indices has a cell in host memory, which it fills on the first one.

use crate::driver::Pinned;
use perilune_core::error::Error;
use perilune_core::ops::grouped::bad_end;
use perilune_core::ops::loss::cure_of_class;
use perilune_plan::ir::Origin;

/// Words of a `Fault` (kernels/device/fault.cuh).
pub(super) const FAULT_WORDS: usize = 3;

/// Where the kernels of a program report bad indices.
pub(crate) struct DeviceErrors {
    pub(super) memory: Pinned,
    pub(super) kernels: Vec<(Origin, &'static str, IndexKind)>,
}

/// IndexKind an index counts.
#[derive(Clone, Copy)]
pub(super) enum IndexKind {
    Elements,
    /// Classes, and the id that is ignored.
    Classes(i64),
    /// Rows: where groups of them end.
    Ends,
}

impl DeviceErrors {
    /// The first report, which is forgotten.
    pub fn take(&self) -> Option<(Origin, Error)> {
        for (k, (origin, op, what)) in self.kernels.iter().enumerate() {
            let at = k * FAULT_WORDS;
            if self.memory.read(at) as u32 != 0 {
                let (value, size) = (self.memory.read(at + 1) as i64, self.memory.read(at + 2) as i64);
                self.memory.write(at, 0);
                let (message, cure) = match what {
                    IndexKind::Ends => return Some((*origin, bad_end(None, value, size))),
                    IndexKind::Classes(ignored) => (
                        format!("a target is class {value}, but there are {size} classes"),
                        cure_of_class(size, *ignored),
                    ),
                    IndexKind::Elements => (
                        format!("index {value} is out of range for a dim of size {size}"),
                        match size {
                            0 => "there is nothing to index".to_string(),
                            n => format!("indices count from 0: here 0 to {}", n - 1),
                        },
                    ),
                };
                return Some((*origin, Error::argument(op, message).hint(cure)));
            }
        }
        None
    }
}
