//! Running sums and products along an axis, in order; 16-bit floats accumulate in f32 and round at each store.

use super::movement::part;
use super::{Call, Element, around, by_type};
use crate::loops::num::Num;
use crate::region::walk;
use perilune_core::error::Result;

pub fn cumsum(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), sums(c))
}

pub fn cumprod(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), products(c))
}

fn sums<T: Element>(c: &Call) -> Result<()> {
    scan::<T>(c, T::Acc::ZERO, T::Acc::add)
}

fn products<T: Element>(c: &Call) -> Result<()> {
    scan::<T>(c, T::Acc::ONE, T::Acc::mul)
}

fn scan<T: Element>(c: &Call, identity: T::Acc, join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync) -> Result<()> {
    let (x, out) = (c.input(0), c.output::<T>());
    let (_, n, inner) = around(&c.out_shape(), c.axis());
    let from = x.elements::<T>();
    c.pool().pieces(c.share(), out, n * inner, |outer, out| {
        let layout = part(&x.layout, c.axis(), outer);
        let mut totals = vec![identity; inner];
        for (i, out) in out.chunks_mut(inner.max(1)).enumerate() {
            walk(&part(&layout, 1, i).collapse(), 0, inner, |position, stride, count, done| {
                for k in 0..count {
                    let total = &mut totals[done + k];
                    *total = join(*total, from[(position + k as isize * stride) as usize].acc());
                    out[done + k] = T::back(*total);
                }
            });
        }
    });
    let _ = n;
    Ok(())
}
