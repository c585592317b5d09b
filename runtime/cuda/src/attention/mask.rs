//! Describes which keys attention sees, by masks and blocks (`kernels/attention/key_block.cuh`), and launches the preparation of segment
//! ids (`segment_ids.cuh`).

use crate::launch::{Arg, Function, Launch};
use perilune_core::Layout;
use std::sync::Arc;

/// Which keys a query attends to, among the masks that kernels support. A window is also causal. `block`: the keys are a block of those
/// of a row, whose positions may be shifted; results are f32. A block has no documents.
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
    pub(super) fn more_text(self, rows: bool) -> (&'static str, &'static str) {
        match (self.documents, self.block, rows) {
            (true, ..) => ("const i32* labels, const int4* bounds, ", ", attention::SegmentIds{labels, bounds}"),
            (_, true, false) => ("const i64* shift, ", ", attention::NoSegmentIds(), attention::KeyBlock(shift)"),
            (_, true, true) => ("const i64* shift, ", ", attention::NoSegmentIds(), attention::KeyBlock(shift, rows)"),
            _ => ("", ""),
        }
    }

    /// The type of the elements of results, for operands of type `t`.
    pub(super) fn result(self, t: &'static str) -> &'static str {
        if self.block { "f32" } else { t }
    }
}

/// Positions that share bounds, as in `segment_ids.cuh`.
pub(super) const BOUND_BLOCK: usize = 64;

fn bounds_function() -> Function {
    let text = "#include \"attention/segment_ids.cuh\"\n\
                extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const i64* ids, i32* labels, int4* bounds, const attention::SegmentParams p) {\n    \
                attention::segment_bounds(ids, labels, bounds, p);\n}\n";
    Function { label: "attention_segment_bounds".into(), text: text.into() }
}

/// Computes labels (`padded` per batch) and bounds from ids, i64 of shape (leading dims, t) with `layout`.
pub(super) fn bounds([ids, labels, bounds]: [Arg; 3], layout: &Layout, t: usize, padded: usize) -> Launch {
    let lead = layout.shape.rank() - 1;
    let (mut dims, mut strides) = ([1i64; 7], [0i64; 7]);
    for k in 0..lead {
        dims[7 - lead + k] = layout.shape.dims()[k] as i64;
        strides[7 - lead + k] = layout.strides[k] as i64;
    }
    let both = t as i64 | (padded as i64) << 32;
    let numbers = dims.into_iter().chain(strides).chain([layout.strides[lead] as i64, both]);
    let batches: i64 = dims.iter().product();
    Launch {
        function: Arc::new(bounds_function()),
        grid: [batches as u32 * t.div_ceil(BOUND_BLOCK) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![ids, labels, bounds, Arg::Bytes(numbers.flat_map(i64::to_le_bytes).collect())],
    }
}
