//! Lists what the devices of a mesh send each other in a planned step.

use crate::cache::PlannedStep;
use crate::ir::{Kernel, Library, Operand};
use crate::show;
use perilune_core::Mesh;
use perilune_core::mesh::Axis;
use perilune_core::ops::collective;
use perilune_core::source_loc::SourceLoc;

/// One collective of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    pub op: &'static str,
    pub axis: Axis,
    /// Bytes of the tensor that all devices along the axis have together, or that each has a term of.
    pub bytes: usize,
    /// The recipe line of what is sent.
    pub loc: SourceLoc,
    /// Whether a backward pass recorded it.
    pub backward: bool,
}

impl Transfer {
    /// Bytes that a device sends at least, on a mesh: of an all-reduce twice those of a gathering or scattering. From stage to stage
    /// one device sends all.
    pub fn sent(&self, mesh: &Mesh) -> usize {
        let n = mesh.size(self.axis);
        let others = self.bytes / n * (n - 1);
        match self.op {
            op if op == collective::ALL_REDUCE.name => 2 * others,
            op if op == collective::SHIFT.name || op == collective::SEND.name => self.bytes,
            _ => others,
        }
    }
}

/// Returns the collectives of a step in the order in which they run.
pub fn transfers(step: &PlannedStep) -> Vec<Transfer> {
    let program = &step.program;
    let bytes = |l: &Library| {
        let result: usize = l.outputs.iter().map(|v| program.values[v.0 as usize].nbytes()).sum();
        let operand = |(k, x): (usize, &Operand)| x.shape().numel() * l.dtypes[k].size();
        l.inputs.iter().enumerate().map(operand).sum::<usize>().max(result)
    };
    let transfer = |kernel: &Kernel| match kernel {
        // A transfer counts where it is sent.
        Kernel::Library(l) if collective::is_collective(l.op) && l.op != &collective::RECV => Some(Transfer {
            op: l.op.name,
            axis: collective::axis(&l.attrs),
            bytes: bytes(l),
            loc: show::place(l.origin, &step.source_map),
            backward: l.origin.position().and_then(|p| step.backward.get(p)).copied().unwrap_or(false),
        }),
        _ => None,
    };
    program.kernels.iter().filter_map(transfer).collect()
}
