//! Pads the operands of large GEMMs so that every row is a multiple of 16 bytes.
//!
//! Tensor cores read 16 bytes at a time. If a row of an operand or of the result, or the summed dim, is not a multiple
//! of that, libraries use kernels that are several times slower (cuBLASLt on an H200, bf16: (8192, 768) x (768, 50257)
//! 4.9 ms, 1.1 with 50264 columns; (8192, 50257) x (50257, 768) 4.8 and 0.8). Such a product therefore runs over
//! operands padded with zeros, and its result is a view of the padded one. Operands are copied, and `cse` merges equal
//! copies; an operand that a fused kernel computes (the gradient of a loss) is stored padded by that kernel, if the
//! backend can (`fuse`). This is a graph-to-graph pass before views are resolved.

use crate::backend::Backend;
use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::Class;
use perilune_core::ops::matmul::{self, LINEAR, MATMUL};
use perilune_core::ops::{movement, slicing};

/// Minimum operations of a product that make an additional kernel worthwhile.
const LEAST_FLOPS: f64 = 1e9;
/// Minimum FLOP of the product per copied byte. At 600 TFLOP/s and a third of that, over memory that is read and
/// written at 3 TB/s, padding begins to pay at about 200.
const FLOPS_A_BYTE: f64 = 300.0;

/// Bytes of a memory line. Writes to rows aligned to it are faster (`docs/adr/030-pad-gemm.md`).
pub const LINE: usize = 128;
/// A dim may grow by at most its size divided by this, to reach whole, half or quarter lines.
const SLACK: usize = 32;

/// The padded size of a dim of elements of `size` bytes, if it is not a multiple of `row` bytes.
fn up(d: usize, size: usize, row: usize) -> usize {
    if (d * size).is_multiple_of(row) {
        return d;
    }
    let mut bytes = LINE;
    while bytes > row && (d.next_multiple_of(bytes / size) - d) * SLACK > d {
        bytes /= 2;
    }
    d.next_multiple_of(bytes / size)
}

/// The padded dims of a product.
struct Grown {
    m: usize,
    n: usize,
    k: usize,
}

/// Runs the pass. The backend has a kernel for every fused op of `from`.
pub fn apply(from: Lowered, backend: &dyn Backend) -> Result<Lowered> {
    let Some(row) = backend.row_bytes() else { return Ok(from) };
    let fills = backend.fills_rows();
    if !from.graph.nodes().iter().any(|n| grown(&from.graph, n, row, fills).is_some()) {
        return Ok(from);
    }
    let mut to = Rewriter::new(&from);
    for id in from.graph.ids() {
        let node = from.graph.node(id);
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let new = match grown(&from.graph, node, row, fills) {
            Some(dims) => {
                let inputs = to.inputs(node);
                product(&mut to.out.graph, node, &inputs, &dims)?
            }
            None => to.copy(&from, id),
        };
        to.map.push(new);
    }
    Ok(to.finish(&from))
}

/// The padded dims of a product, if they differ and padding is profitable. `fills`: regions can store padded rows.
fn grown(g: &Graph, node: &Node, row: usize, fills: bool) -> Option<Grown> {
    let linear = node.op == &LINEAR;
    if !linear && node.op != &MATMUL {
        return None;
    }
    let low = matches!(node.dtype, DType::BF16 | DType::F16) || node.tf32;
    let (a, b) = (g.shape(node.inputs[0]), g.shape(node.inputs[1]));
    let r = a.rank();
    let (m, k) = (a.dims()[r - 2], a.dims()[r - 1]);
    let n = if linear { b.dims()[0] } else { b.dims()[r - 1] };
    let turned = !linear && matmul::is_transpose(g, node.inputs[0]);
    let up = |d: usize| up(d, node.dtype.size(), row);
    let dims = Grown { m: if turned { up(m) } else { m }, n: up(n), k: up(k) };
    if !low || (dims.m, dims.n, dims.k) == (m, n, k) {
        return None;
    }
    // Elements of an operand, stored as rows x cols, that are copied if its rows or cols grow. More rows always need a copy.
    let copied = |x: NodeId, (rows, cols): (bool, bool)| match rows || (cols && !(fills && is_computed(g, x))) {
        true => g.shape(x).numel(),
        false => 0,
    };
    let (m_grows, n_grows, k_grows) = (dims.m != m, dims.n != n, dims.k != k);
    let by_rows = linear || matmul::is_transpose(g, node.inputs[1]);
    let of_a = copied(node.inputs[0], if turned { (k_grows, m_grows) } else { (m_grows, k_grows) });
    let of_b = copied(node.inputs[1], if by_rows { (n_grows, k_grows) } else { (k_grows, n_grows) });
    let flops = 2.0 * a.numel() as f64 * n as f64;
    let copied = ((of_a + of_b) * node.dtype.size()) as f64;
    (flops >= LEAST_FLOPS && flops >= FLOPS_A_BYTE * copied).then_some(dims)
}

/// Whether a region computes `x`, or the node that `x` is a transpose of.
fn is_computed(g: &Graph, x: NodeId) -> bool {
    let mut x = if matmul::is_transpose(g, x) { g.node(x).inputs[0] } else { x };
    while g.node(x).op == &movement::RESHAPE {
        x = g.node(x).inputs[0];
    }
    matches!(g.node(x).op.class, Class::Map(_) | Class::Cast)
}

/// Appends the product over padded operands and the slice that is the result.
fn product(g: &mut Graph, node: &Node, inputs: &[NodeId], to: &Grown) -> Result<NodeId> {
    let r = node.shape.rank();
    let a = grow(g, inputs[0], [to.m, to.k])?;
    let tf32 = std::mem::replace(&mut g.modes.tf32, node.tf32);
    let y = if node.op == &LINEAR {
        let w = grow(g, inputs[1], [to.n, to.k])?;
        let bias = slicing::strided_pad(g, inputs[2], 0, 0, 1, to.n, 0.0)?;
        g.push(&LINEAR, &[a, w, bias], &[])
    } else {
        let b = grow(g, inputs[1], [to.k, to.n])?;
        g.push(&MATMUL, &[a, b], &[])
    };
    g.modes.tf32 = tf32;
    let y = g.slice(y?, r - 2, 0, node.shape.dims()[r - 2], 1)?;
    g.slice(y, r - 1, 0, node.shape.dims()[r - 1], 1)
}

/// `x` with its last two dims padded with zeros. A transpose is padded in its storage order.
fn grow(g: &mut Graph, x: NodeId, [rows, cols]: [usize; 2]) -> Result<NodeId> {
    if matmul::is_transpose(g, x) {
        let stored = g.node(x).inputs[0];
        let grown = grow(g, stored, [cols, rows])?;
        return g.t(grown);
    }
    let r = g.shape(x).rank();
    let x = slicing::strided_pad(g, x, r - 1, 0, 1, cols, 0.0)?;
    slicing::strided_pad(g, x, r - 2, 0, 1, rows, 0.0)
}

#[cfg(test)]
mod tests {
    use super::up;

    #[test]
    fn dims_grow_to_whole_lines_where_that_is_little() {
        for (d, size, to) in
            [(50257, 2, 50304), (50264, 2, 50264), (1003, 4, 1024), (1003, 2, 1024), (801, 2, 816), (301, 2, 304)]
        {
            assert_eq!(up(d, size, 16), to, "{d} of {size} bytes");
        }
        assert_eq!((up(67, 2, 16), up(1, 2, 16)), (72, 8));
    }
}
