//! Lists what the devices of a mesh send each other in a planned step, and how attention gets its keys.

use crate::cache::PlannedStep;
use crate::ir::{Kernel, Library};
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
    /// Bytes of the tensor that all devices along the axis have together, or that each has a term of; of an all-reduce of 16-bit terms to
    /// f32 the mean of both.
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
            op if op == collective::COLLECTIVE_PERMUTE.name || op == collective::SEND.name => self.bytes,
            _ => others,
        }
    }
}

/// Returns what the collectives of a step move, in the order in which they start.
pub fn transfers(step: &PlannedStep) -> Vec<Transfer> {
    let program = &step.program;
    let calls = program.kernels.iter().filter_map(sends).enumerate();
    let of_call = |(call, l): (usize, &Library)| -> Vec<Transfer> {
        let tensor = |k: usize| {
            let result = &program.values[l.outputs[k].0 as usize];
            let (given, taken) = (l.inputs[k].shape().numel() * l.dtypes[k].size(), result.nbytes());
            let origin = if l.op == &collective::SEND { l.origin } else { result.origin };
            Transfer {
                op: l.op.name,
                axis: lanes::axis(l),
                call,
                bytes: if l.op == &collective::ALL_REDUCE { (given + taken) / 2 } else { given.max(taken) },
                loc: show::place(origin, &step.source_map),
                backward: origin.position().and_then(|p| step.backward.get(p)).copied().unwrap_or(false),
            }
        };
        (0..l.inputs.len()).map(tensor).collect()
    };
    calls.flat_map(of_call).collect()
}

/// How attention gets its keys: the form of the exchange, its axis and the recipe line of each attention node, forward and backward.
pub fn exchanges(step: &PlannedStep) -> Vec<(&'static str, Axis, SourceLoc)> {
    step.program.exchanges.iter().map(|x| (x.form, x.axis, show::place(x.origin, &step.source_map))).collect()
}

/// The call of a kernel that sends something. A transfer from stage to stage counts where it is sent.
fn sends(kernel: &Kernel) -> Option<&Library> {
    match kernel {
        Kernel::Library(l) if l.op == &collective::SEND => Some(l),
        _ => lanes::collective(kernel),
    }
}
