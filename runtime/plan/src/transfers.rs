//! Lists what the devices of a mesh send each other in a planned step.

use crate::cache::PlannedStep;
use crate::ir::Library;
use crate::{lanes, show};
use perilune_core::Mesh;
use perilune_core::mesh::Axis;
use perilune_core::ops::collective;
use perilune_core::source_loc::SourceLoc;

/// One tensor that a collective of a step moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    pub op: &'static str,
    pub axis: Axis,
    /// The number of the call, which may move several tensors.
    pub call: usize,
    /// Bytes of the tensor that all devices along the axis have together, or that each has a term of.
    pub bytes: usize,
    /// The recipe line of what is sent.
    pub loc: SourceLoc,
    /// Whether a backward pass recorded it.
    pub backward: bool,
}

impl Transfer {
    /// Bytes that a device sends at least, on a mesh: of an all-reduce twice those of a gathering or scattering.
    pub fn sent(&self, mesh: &Mesh) -> usize {
        let (n, passes) = (mesh.size(self.axis), if self.op == collective::ALL_REDUCE.name { 2 } else { 1 });
        passes * (self.bytes / n) * (n - 1)
    }
}

/// Returns what the collectives of a step move, in the order in which they start.
pub fn transfers(step: &PlannedStep) -> Vec<Transfer> {
    let program = &step.program;
    let calls = program.kernels.iter().filter_map(lanes::collective).enumerate();
    let of_call = |(call, l): (usize, &Library)| -> Vec<Transfer> {
        let tensor = |k: usize| {
            let result = &program.values[l.outputs[k].0 as usize];
            Transfer {
                op: l.op.name,
                axis: lanes::axis(l),
                call,
                bytes: result.nbytes().max(l.inputs[k].shape().numel() * l.dtypes[k].size()),
                loc: show::place(result.origin, &step.source_map),
                backward: result.origin.position().and_then(|p| step.backward.get(p)).copied().unwrap_or(false),
            }
        };
        (0..l.inputs.len()).map(tensor).collect()
    };
    calls.flat_map(of_call).collect()
}
