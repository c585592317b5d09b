//! Lowers matrix products to cuBLASLt calls: which products it can compute, with which epilogue and which algorithm.

use super::Step;
use crate::autotune::{Search, Trial};
use crate::backend::DeviceContext;
use crate::blas::{self, Addresses, Epilogue, Product};
use crate::library;
use perilune_core::error::{Error, Result};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::matmul::{LINEAR, MATMUL};
use perilune_core::{DType, Layout};
use perilune_plan::ir::{Code, Library, Operand, Program, Region, Source, ValueId};

/// Minimum operations of a product to be timed, even if timing is enabled.
const WORTH_TIMING: f64 = 1e8;

/// Returns the step of a product, and whether it includes the epilogue.
pub(super) fn gemm(
    context: &mut DeviceContext,
    program: &Program,
    l: &Library,
    product: Product,
) -> Result<(Step, bool)> {
    let (Operand::View(a, _), Operand::View(b, _)) = (&l.inputs[0], &l.inputs[1]) else {
        return Err(Error::system("cuda", "this is a bug: a product of constants"));
    };
    let fused = l.epilogue.as_ref().and_then(|r| epilogue(program, l, r, &product));
    let (how, bias, residual, out) = match fused {
        Some(f) => {
            let how = Epilogue { bias: f.bias.is_some(), residual: f.residual.is_some(), plain_sums: true };
            (how, f.bias, f.residual, f.out)
        }
        None => (Epilogue::default(), None, None, l.outputs[0]),
    };
    let size = l.dtypes[0].size();
    let p = &product.problem;
    let trial = trial(context, program, [*a, *b, out], &product, l.dtypes[0]);
    let align = bias.map_or(256, |(_, n)| alignment(n, size));
    let gemm = match context.blas.gemm(p, l.tf32, how, align, trial.as_ref()) {
        Err(_) if how != Epilogue::default() => {
            // The map then runs as a separate launch.
            let plain = context.blas.gemm(p, l.tf32, Epilogue::default(), align, trial.as_ref())?;
            let (out, bias, residual) = (l.outputs[0], None, None);
            return Ok((Step::Gemm { gemm: plain, product, a: *a, b: *b, out, bias, residual, size }, false));
        }
        other => other?,
    };
    let step = Step::Gemm { gemm, product, a: *a, b: *b, out, bias, residual, size };
    Ok((step, how != Epilogue::default()))
}

/// Returns the step of `linear`, if cuBLASLt has a product for it that adds the bias before it rounds.
pub(super) fn linear(context: &mut DeviceContext, program: &Program, l: &Library, product: Product) -> Option<Step> {
    let [Operand::View(a, _), Operand::View(b, _), Operand::View(v, layout)] = &l.inputs[..] else { return None };
    let (size, out) = (l.dtypes[0].size(), l.outputs[0]);
    let trial = trial(context, program, [*a, *b, out], &product, l.dtypes[0]);
    let how = Epilogue { bias: true, ..Epilogue::default() };
    let align = alignment(layout.offset, size);
    let gemm = context.blas.gemm(&product.problem, l.tf32, how, align, trial.as_ref()).ok()?;
    let bias = Some((*v, layout.offset));
    Some(Step::Gemm { gemm, product, a: *a, b: *b, out, bias, residual: None, size })
}

/// Returns memory of the arena for timing algorithms, if timing is enabled and worthwhile. The plan needs that much
/// memory anyway, and its contents are not live until this product has run.
fn trial(
    context: &mut DeviceContext,
    program: &Program,
    [a, b, out]: [ValueId; 3],
    product: &Product,
    dtype: DType,
) -> Option<Trial> {
    if context.search == Search::Off || product.problem.flops() <= WORTH_TIMING {
        return None;
    }
    let nbytes = |v: ValueId| program.values[v.0 as usize].nbytes();
    let (reach, written) = ([nbytes(a), nbytes(b)], nbytes(out));
    // A, B, the result, and the source of a residual.
    let [of_a, of_b, of_out] = [reach[0], reach[1], written].map(|n| n.next_multiple_of(512));
    let starts = [0, of_a, of_a + of_b, of_a + of_b + of_out];
    let needed = starts[3] + written;
    if needed > program.arena_bytes {
        return None;
    }
    context.arena.ensure(needed).ok()?;
    let base = context.arena.base;
    let at = |k: usize, elements: isize| {
        (base + starts[k] as u64).wrapping_add_signed((elements * dtype.size() as isize) as i64)
    };
    let (oa, ob, _) = product.offsets[0];
    let addresses =
        Addresses { a: at(0, oa), b: at(1, ob), out: at(2, 0), bias: at(1, 0), residual: at(3, 0), scales: [0; 2] };
    Some(Trial { search: context.search, dtype, base, nbytes: needed, at: addresses, written })
}

/// Returns the product of a library call, if cuBLASLt can compute it and this is profitable.
pub(crate) fn product(program: &Program, l: &Library) -> Option<Product> {
    let (Some(Operand::View(_, a)), Some(Operand::View(_, b))) = (l.inputs.first(), l.inputs.get(1)) else {
        return None;
    };
    let dtype = program.values[l.outputs[0].0 as usize].dtype;
    let (sa, sb) = (a.shape, if l.op == &LINEAR { b.permute(&[1, 0]).shape } else { b.shape });
    if let ([batch @ .., m, k], [.., n]) = (sa.dims(), sb.dims())
        && library::is_small(dtype, batch.iter().product(), *m, *n, *k)
    {
        return None;
    }
    if l.op == &MATMUL {
        return blas::product(a, b, dtype);
    }
    // The bias in the form that cuBLASLt reads.
    let Some(Operand::View(_, bias)) = l.inputs.get(2).filter(|_| l.op == &LINEAR) else { return None };
    let dense = bias.strides() == [1] || bias.numel() == 1;
    if dense { blas::product(a, &b.permute(&[1, 0]), dtype) } else { None }
}

/// The alignment in bytes of element `n` of a buffer.
fn alignment(n: isize, size: usize) -> u32 {
    match n.unsigned_abs() * size {
        0 => 256,
        bytes => 1 << bytes.trailing_zeros().min(8),
    }
}

/// An epilogue that cuBLASLt executes.
pub(crate) struct Fused {
    bias: Option<(ValueId, isize)>,
    residual: Option<ValueId>,
    out: ValueId,
}

/// Matches `r` as a bias of the columns or as a matrix added to the product, if the bits equal those of the separate
/// map. That holds in f32 and f64, whose sums are kept in the result's own precision.
pub(crate) fn epilogue(program: &Program, l: &Library, r: &Region, product: &Product) -> Option<Fused> {
    let result = &program.values[l.outputs[0].0 as usize];
    let wide = matches!(result.dtype, DType::F32 | DType::F64);
    let ([store], [a, b, sum]) = (&r.stores[..], &r.body[..]) else { return None };
    if !wide || store.0 != 2 || product.offsets.len() != 1 || !matches!(sum.code, Code::Map(MapFn::Add, _)) {
        return None;
    }
    let load = |i: &perilune_plan::ir::Instr| match &i.code {
        Code::Load { source: Source::Value(v), layout } if i.dtype == result.dtype => Some((*v, **layout)),
        _ => None,
    };
    let ((v, x), (w, y)) = (load(a)?, load(b)?);
    let (other, layout): (ValueId, Layout) = if v == l.outputs[0] { (w, y) } else { (v, x) };
    let p = &product.problem;
    let n = r.cols;
    let whole = layout.is_contiguous() && layout.offset == 0 && layout.numel() == n;
    if whole && program.values[other.0 as usize].shape.numel() == n {
        return Some(Fused { bias: None, residual: Some(other), out: store.1 });
    }
    let dims = layout.shape.dims();
    let columns = dims.len() == 2 && layout.strides() == [0, 1] && dims[1] == p.n();
    columns.then_some(Fused { bias: Some((other, layout.offset)), residual: None, out: store.1 })
}
