//! Describes matrix products in cuBLASLt's terms: transposes, leading dimensions and strided batches of views, without
//! copies.

use super::ALIGNMENT;
use perilune_core::ops::fp8;
use perilune_core::{DType, Layout, Shape};

/// Maximum number of calls for one product whose batch strides are irregular.
const MOST_CALLS: usize = 4096;

/// The layout of one operand: column-major after the operands are swapped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Side {
    pub(super) transposed: bool,
    pub(super) ld: i64,
    pub(super) batch_stride: i64,
}

/// The layout of a `rows x cols` matrix with these strides, if cuBLASLt can read it.
fn side(rows: usize, cols: usize, row_stride: isize, col_stride: isize, batch_stride: isize) -> Option<Side> {
    let (r, c) = (rows as isize, cols as isize);
    let batch_stride = batch_stride as i64;
    if (row_stride == 1 || r == 1) && (c == 1 || col_stride >= r) {
        let ld = if c == 1 { r } else { col_stride };
        return Some(Side { transposed: false, ld: ld as i64, batch_stride });
    }
    if (col_stride == 1 || c == 1) && (r == 1 || row_stride >= c) {
        let ld = if r == 1 { c } else { row_stride };
        return Some(Side { transposed: true, ld: ld as i64, batch_stride });
    }
    None
}

/// One cuBLASLt call, strided over a batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    /// The dtype of the result and, except for fp8, of the operands.
    pub(super) dtype: DType,
    /// The formats of fp8 operands.
    pub(super) fp8: Option<fp8::Product>,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
    pub(super) a: Side,
    pub(super) b: Side,
    /// Powers of two that divide all addresses of the operands, in bytes.
    pub(super) align: (u32, u32),
}

/// A product of the plan: calls with their offsets in elements.
#[derive(Clone, Debug)]
pub struct Product {
    pub problem: Problem,
    /// Offsets of A, B and the result.
    pub offsets: Vec<(isize, isize, usize)>,
}

/// How cuBLASLt can compute a product of views, if it can. `a` (B..., M, K), `b` (B..., K, N).
pub fn product(a: &Layout, b: &Layout, dtype: DType) -> Option<Product> {
    if !dtype.is_float() {
        return None;
    }
    let r = a.shape.rank();
    let (m, k, n) = (a.shape.dims()[r - 2], a.shape.dims()[r - 1], b.shape.dims()[r - 1]);
    if a.shape.numel() == 0 || b.shape.numel() == 0 {
        return None;
    }
    // The last batch dim whose strides do not continue regularly into the dims before it.
    let dims = &a.shape.dims()[..r - 2];
    let mut batch = 1usize;
    let mut outer = dims.len();
    let (mut sa, mut sb) = (0, 0);
    while outer > 0 {
        let d = outer - 1;
        let regular = batch == 1
            || (a.strides()[d] == sa * batch as isize && b.strides()[d] == sb * batch as isize)
            || dims[d] == 1;
        if !regular {
            break;
        }
        if batch == 1 {
            (sa, sb) = (a.strides()[d], b.strides()[d]);
        }
        batch *= dims[d];
        outer = d;
    }
    if batch == 1 {
        (sa, sb) = (0, 0);
    }
    let b_side = side(n, k, b.strides()[r - 1], b.strides()[r - 2], sb)?;
    let a_side = side(k, m, a.strides()[r - 1], a.strides()[r - 2], sa)?;
    if sa < 0 || sb < 0 {
        return None;
    }
    let calls: usize = dims[..outer].iter().product();
    if calls == 0 || calls > MOST_CALLS {
        return None;
    }
    let outer_shape = Shape::of(&dims[..outer]);
    let mut offsets = Vec::with_capacity(calls);
    for call in 0..calls {
        let (mut rest, mut oa, mut ob) = (call, a.offset, b.offset);
        for d in (0..outer).rev() {
            let i = (rest % outer_shape.dims()[d]) as isize;
            rest /= outer_shape.dims()[d];
            oa += i * a.strides()[d];
            ob += i * b.strides()[d];
        }
        offsets.push((oa, ob, call * batch * m * n));
    }
    let size = dtype.size();
    let align = |at: &dyn Fn(&(isize, isize, usize)) -> isize, s: &Side| {
        let all = offsets.iter().map(|o| at(o).unsigned_abs() * size);
        let all = all.chain([s.batch_stride.unsigned_abs() as usize * size, s.ld as usize * size]);
        all.map(|bytes| if bytes == 0 { 256 } else { 1 << bytes.trailing_zeros().min(8) }).min().unwrap_or(256) as u32
    };
    let problem = Problem {
        dtype,
        fp8: None,
        m,
        n,
        k,
        batch,
        align: (align(&|o| o.0, &a_side), align(&|o| o.1, &b_side)),
        a: a_side,
        b: b_side,
    };
    Some(Product { problem, offsets })
}

impl Problem {
    /// The fp8 product of a (M, K) and b (N, K) transposed, both dense.
    pub fn fp8(how: fp8::Product, dtype: DType, m: usize, n: usize, k: usize) -> Problem {
        let lies = |transposed| Side { transposed, ld: k as i64, batch_stride: 0 };
        let (a, b) = (lies(false), lies(true));
        Problem { dtype, fp8: Some(how), m, n, k, batch: 1, a, b, align: (ALIGNMENT, ALIGNMENT) }
    }

    pub fn n(&self) -> usize {
        self.n
    }

    /// A description for plans and errors.
    pub fn describe(&self, tf32: bool) -> String {
        let turned = |s: &Side| if s.transposed { ", transposed" } else { "" };
        let Problem { dtype, m, n, k, batch, a, b, .. } = self;
        let how = match self.fp8 {
            Some(p) => format!("{} and {} to {dtype}", p.formats[0].name(), p.formats[1].name()),
            None if tf32 && *dtype == DType::F32 => "tf32".to_string(),
            None => dtype.name().to_string(),
        };
        let many = if *batch > 1 { format!("{batch} times ") } else { String::new() };
        format!("{many}({m}, {k}{}) x ({k}, {n}{}) in {how}", turned(a), turned(b))
    }

    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dims: &[usize], strides: &[isize]) -> Layout {
        let mut l = Layout::contiguous(Shape::of(dims));
        l.strides[..strides.len()].copy_from_slice(strides);
        l
    }

    #[test]
    fn views_that_need_no_copy() {
        let (a, b) = (layout(&[5, 7], &[7, 1]), layout(&[7, 3], &[3, 1]));
        let p = product(&a, &b, DType::F32).unwrap().problem;
        assert_eq!((p.m, p.n, p.k, p.batch), (5, 3, 7, 1));
        assert_eq!((p.b.transposed, p.b.ld, p.a.transposed, p.a.ld), (false, 3, false, 7));
        // The transpose of a weight (N, K).
        let p = product(&a, &layout(&[7, 3], &[1, 7]), DType::BF16).unwrap().problem;
        assert_eq!((p.b.transposed, p.b.ld), (true, 7));
        assert!(product(&a, &layout(&[7, 3], &[0, 0]), DType::F32).is_none());
    }

    #[test]
    fn heads_of_a_projection_take_a_call_a_batch() {
        // q and k as (B, H, T, D) views of (B, T, 3, H, D).
        let (bs, h, t, d) = (2usize, 4, 6, 8);
        let row = 3 * h * d;
        let q = layout(&[bs, h, t, d], &[(t * row) as isize, d as isize, row as isize, 1]);
        let k = layout(&[bs, h, d, t], &[(t * row) as isize, d as isize, 1, row as isize]);
        let p = product(&q, &k, DType::F32).unwrap();
        assert_eq!((p.problem.batch, p.offsets.len()), (h, bs));
        assert_eq!(p.offsets[1], ((t * row) as isize, (t * row) as isize, h * t * t));
    }
}
