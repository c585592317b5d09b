//! Describes attention masks and launches the preparation of segment ids (`kernels/attention/segment_ids.cuh`).

use crate::launch::{Arg, Function, Launch};
use perilune_core::Layout;
use std::sync::Arc;

/// Which keys a query attends to, among the masks that kernels support. A window is also causal.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Mask {
    pub causal: bool,
    pub window: bool,
    pub documents: bool,
}

impl Mask {
    /// The suffix of a kernel's name.
    pub(super) fn name(self) -> String {
        let near = match (self.causal, self.window) {
            (_, true) => "_window",
            (true, false) => "_causal",
            _ => "",
        };
        format!("{near}{}", if self.documents { "_documents" } else { "" })
    }

    /// The additional parameters and argument of a kernel with documents.
    pub(super) fn documents_text(self) -> (&'static str, &'static str) {
        match self.documents {
            true => ("const i32* labels, const int4* bounds, ", ", attention::SegmentIds{labels, bounds}"),
            false => ("", ""),
        }
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
