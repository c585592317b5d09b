//! Describes which keys attention sees, by masks and blocks (`kernels/attention/key_block.cuh`), and launches the preparation of segment
//! ids (`segment_ids.cuh`).

use super::Pass;
use crate::launch::{Arg, Function, Launch};
use perilune_core::Layout;
use std::sync::Arc;

/// Which keys a query attends to, among the masks that kernels support. A window is also causal. `block`: the keys are a block of those
/// of a row, whose positions may be shifted; results are f32.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Mask {
    pub causal: bool,
    pub window: bool,
    pub documents: bool,
    pub block: bool,
}

impl Mask {
    /// The suffix of a kernel's name.
    pub(super) fn name(self) -> String {
        let near = match (self.causal, self.window) {
            (_, true) => "_window",
            (true, false) => "_causal",
            _ => "",
        };
        let documents = if self.documents { "_documents" } else { "" };
        format!("{near}{documents}{}", if self.block { "_block" } else { "" })
    }

    /// The additional parameters and arguments of a kernel with documents or a block. `rows`: whether the kernel has a parameter `rows`.
    pub(super) fn more_text(self, pass: Pass, rows: bool) -> (String, String) {
        let mut parameters = String::new();
        let keys = pass == Pass::BackwardKv;
        let documents = match (self.documents, self.block) {
            (true, false) => {
                parameters += "const i32* labels, const int4* bounds, ";
                "attention::SegmentIds::whole(labels, bounds, p)".into()
            }
            (true, true) => {
                parameters += "const i32* labels, const i32* others, const int4* bounds, ";
                format!("attention::SegmentIds::block<{keys}>(labels, others, bounds, p)")
            }
            (false, true) => "attention::NoSegmentIds()".into(),
            (false, false) => return (parameters, String::new()),
        };
        if !self.block {
            return (parameters, format!(", {documents}"));
        }
        parameters += "const i64* shift, ";
        (parameters, format!(", {documents}, attention::KeyBlock(shift{})", if rows { ", rows" } else { "" }))
    }

    /// The type of the elements of results, for operands of type `t`.
    pub(super) fn result(self, t: &'static str) -> &'static str {
        if self.block { "f32" } else { t }
    }
}

/// Positions that share bounds, as in `segment_ids.cuh`.
pub(super) const BOUND_BLOCK: usize = 64;

/// Labels per batch of `n` positions, as `label_pitch` has it.
pub(super) fn label_pitch(n: usize) -> usize {
    n.next_multiple_of(128) + 128
}

/// Ids of documents: i64 of shape (leading dims, positions).
pub(super) struct Ids {
    pub at: Arg,
    pub layout: Layout,
}

impl Ids {
    pub fn positions(&self) -> usize {
        self.layout.shape.dims()[self.layout.shape.rank() - 1]
    }

    pub fn batches(&self) -> usize {
        self.layout.shape.numel() / self.positions().max(1)
    }

    /// Encodes `attention::SegmentParams`.
    fn params(&self) -> Arg {
        let (layout, n) = (&self.layout, self.positions());
        let lead = layout.shape.rank() - 1;
        let (mut dims, mut strides) = ([1i64; 7], [0i64; 7]);
        for k in 0..lead {
            dims[7 - lead + k] = layout.shape.dims()[k] as i64;
            strides[7 - lead + k] = layout.strides[k] as i64;
        }
        let both = n as i64 | (label_pitch(n) as i64) << 32;
        let numbers = dims.into_iter().chain(strides).chain([layout.strides[lead] as i64, both]);
        Arg::Bytes(numbers.flat_map(i64::to_le_bytes).collect())
    }
}

fn bounds_function(keys: bool) -> Function {
    let text = format!(
        "#include \"attention/segment_ids.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const i64* ids, const i64* others, i32* labels, int4* bounds, \
         const attention::SegmentParams p, const attention::SegmentParams q) {{\n    \
         attention::segment_bounds<{keys}>(ids, others, labels, bounds, p, q);\n}}\n"
    );
    Function { label: "attention_segment_bounds".into(), text }
}

/// Computes labels of rows and the bounds of the columns that blocks of them see. `keys`: rows are keys.
pub(super) fn bounds([rows, columns]: [&Ids; 2], keys: bool, [labels, bounds]: [Arg; 2]) -> Launch {
    Launch {
        function: Arc::new(bounds_function(keys)),
        grid: [rows.batches() as u32 * rows.positions().div_ceil(BOUND_BLOCK) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![rows.at.clone(), columns.at.clone(), labels, bounds, rows.params(), columns.params()],
    }
}
