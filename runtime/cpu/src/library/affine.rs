//! Implements affine_sample: bilinear interpolation of images at positions that a matrix maps.

use super::{Call, Input};
use crate::memory::Pod;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::ops::affine::Border;

/// A float in which positions and values are computed.
trait Real:
    Pod + PartialOrd + std::ops::Add<Output = Self> + std::ops::Sub<Output = Self> + std::ops::Mul<Output = Self>
{
    fn of(x: f64) -> Self;
    fn floor(self) -> Self;
    /// The value limited to [low, high]; `low` for NaN.
    fn limited(self, low: Self, high: Self) -> Self;
    /// The index of a value that is in range.
    fn index(self) -> isize;
}

macro_rules! real {
    ($t:ty) => {
        impl Real for $t {
            fn of(x: f64) -> Self {
                x as $t
            }
            fn floor(self) -> Self {
                <$t>::floor(self)
            }
            fn limited(self, low: Self, high: Self) -> Self {
                self.max(low).min(high)
            }
            fn index(self) -> isize {
                self as isize
            }
        }
    };
}
real!(f32);
real!(f64);

pub fn affine_sample(c: &Call) -> Result<()> {
    match c.input(0).dtype {
        DType::U8 => sample::<u8, f32>(c),
        DType::F64 => sample::<f64, f64>(c),
        _ => sample::<f32, f32>(c),
    }
    Ok(())
}

/// The matrix of an image.
fn matrix<F: Real>(m: &Input, image: usize) -> [[F; 3]; 2] {
    let (all, strides) = (m.elements::<F>(), m.layout.strides());
    std::array::from_fn(|i| {
        std::array::from_fn(|j| {
            let at = m.layout.offset + image as isize * strides[0] + i as isize * strides[1] + j as isize * strides[2];
            all[at as usize]
        })
    })
}

fn sample<T: Pod + Into<F>, F: Real + Sync>(c: &Call) {
    let (x, m, out, border) = (c.input(0), c.input(1), c.output::<F>(), c.border());
    let to = c.out_shape();
    let [_, channels, rows, columns] = std::array::from_fn(|d| to.dims()[d]);
    let [height, width] = [2, 3].map(|d| F::of(x.shape().dims()[d] as f64));
    let (all, strides) = (x.elements::<T>(), x.layout.strides());
    let (zero, half, whole, fill) = (F::of(0.0), F::of(0.5), F::of(1.0), F::of(border.fill));
    c.pool().for_each_chunk(c.parallel(), out, columns, |k, row| {
        let (image, channel, r) = (k / (channels * rows), k / rows % channels, k % rows);
        let [[a, b, e], [f, g, h]] = matrix::<F>(&m, image);
        let plane = x.layout.offset + image as isize * strides[0] + channel as isize * strides[1];
        let pixel = |row: F, column: F| -> F {
            // Comparisons of floats: positions may be far outside, or NaN.
            if row >= zero && row < height && column >= zero && column < width {
                all[(plane + row.index() * strides[2] + column.index() * strides[3]) as usize].into()
            } else {
                fill
            }
        };
        let v = F::of(r as f64) + half;
        for (i, out) in row.iter_mut().enumerate() {
            let u = F::of(i as f64) + half;
            let (mut px, mut py) = (a * u + b * v + e - half, f * u + g * v + h - half);
            if border.edge {
                (px, py) = (px.limited(zero, width - whole), py.limited(zero, height - whole));
            }
            let (left, top) = (px.floor(), py.floor());
            let (right, bottom) = match border.edge {
                true => ((left + whole).limited(zero, width - whole), (top + whole).limited(zero, height - whole)),
                false => (left + whole, top + whole),
            };
            let (fx, fy) = (px - left, py - top);
            let (gx, gy) = (whole - fx, whole - fy);
            let upper = pixel(top, left) * gx + pixel(top, right) * fx;
            let lower = pixel(bottom, left) * gx + pixel(bottom, right) * fx;
            *out = upper * gy + lower * fy;
        }
    });
}

impl Call<'_> {
    fn border(&self) -> Border {
        Border::of(&self.routine.attrs)
    }
}
