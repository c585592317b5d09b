//! Stores a tensor in host memory: the result of readers, `item` and `tolist`, and the contents of checkpoints.
//!
//! Contiguous, row-major, little-endian. Bools are bytes of 0 or 1.

use crate::{DType, Shape};
use half::{bf16, f16};

#[derive(Clone, PartialEq, Debug)]
pub struct HostTensor {
    pub dtype: DType,
    pub shape: Shape,
    /// Exactly `shape.numel() * dtype.size()` bytes.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// Creates a tensor from its bytes. Panics if the length does not match, which is a bug of the caller.
    pub fn new(dtype: DType, shape: Shape, bytes: Vec<u8>) -> HostTensor {
        assert_eq!(bytes.len(), shape.numel() * dtype.size(), "this is a bug: {dtype} {shape} does not hold its bytes");
        HostTensor { dtype, shape, bytes }
    }

    pub fn from_f32(shape: Shape, values: &[f32]) -> HostTensor {
        HostTensor::new(DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn from_i64(shape: Shape, values: &[i64]) -> HostTensor {
        HostTensor::new(DType::I64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// Values rounded to `dtype` (see [`to_integer`] for integers and bools).
    pub fn from_f64(dtype: DType, shape: Shape, values: &[f64]) -> HostTensor {
        let mut bytes = Vec::with_capacity(values.len() * dtype.size());
        for &v in values {
            push_f64(dtype, v, &mut bytes);
        }
        HostTensor::new(dtype, shape, bytes)
    }

    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Element `i` in row-major order as a float. i64 beyond 2^53 rounds; `get_i64` is exact.
    pub fn get_f64(&self, i: usize) -> f64 {
        let b = self.element(i);
        match self.dtype {
            DType::F64 => f64::from_le_bytes(array(b)),
            DType::F32 => f32::from_le_bytes(array(b)) as f64,
            DType::BF16 => bf16::from_le_bytes(array(b)).to_f64(),
            DType::F16 => f16::from_le_bytes(array(b)).to_f64(),
            DType::I64 => i64::from_le_bytes(array(b)) as f64,
            DType::I32 => i32::from_le_bytes(array(b)) as f64,
            DType::U8 | DType::Bool => b[0] as f64,
        }
    }

    /// Element `i` as an i64; of a float as [`to_integer`].
    pub fn get_i64(&self, i: usize) -> i64 {
        let b = self.element(i);
        match self.dtype {
            DType::I64 => i64::from_le_bytes(array(b)),
            DType::I32 => i32::from_le_bytes(array(b)) as i64,
            DType::U8 | DType::Bool => b[0] as i64,
            _ => self.get_f64(i) as i64,
        }
    }

    pub fn to_f64(&self) -> Vec<f64> {
        (0..self.numel()).map(|i| self.get_f64(i)).collect()
    }

    pub fn to_i64(&self) -> Vec<i64> {
        (0..self.numel()).map(|i| self.get_i64(i)).collect()
    }

    /// Converts to another dtype, rounding once.
    pub fn cast(&self, dtype: DType) -> HostTensor {
        if dtype == self.dtype {
            return self.clone();
        }
        let mut bytes = Vec::with_capacity(self.numel() * dtype.size());
        for i in 0..self.numel() {
            if self.dtype.is_float() || dtype.is_float() || dtype == DType::Bool {
                push_f64(dtype, self.get_f64(i), &mut bytes);
            } else {
                push_i64(dtype, self.get_i64(i), &mut bytes);
            }
        }
        HostTensor::new(dtype, self.shape, bytes)
    }

    fn element(&self, i: usize) -> &[u8] {
        let size = self.dtype.size();
        &self.bytes[i * size..(i + 1) * size]
    }
}

fn array<const N: usize>(b: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(b);
    out
}

/// The nearest bf16, ties to even. (`bf16::from_f64` drops the low 32 bits first and so mistakes near-ties for ties.)
#[inline(always)]
pub fn to_bf16(v: f64) -> bf16 {
    bf16::from_f32(to_odd(v))
}

/// The nearest f16, ties to even.
#[inline(always)]
pub fn to_f16(v: f64) -> f16 {
    f16::from_f32(to_odd(v))
}

/// `v` as f32 with an odd last bit if inexact, so that rounding it again equals rounding `v` once.
#[inline(always)]
pub fn to_odd(v: f64) -> f32 {
    let y = v as f32;
    let bits = y.to_bits();
    let toward = if (y as f64).abs() > v.abs() { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    let odd = if (bits & 1 == 0) & (y as f64 != v) & !v.is_nan() { toward } else { bits };
    f32::from_bits(odd)
}

/// `v` as an integer of `dtype`: truncated toward zero and, beyond the limits of `dtype`, the nearer limit; NaN is 0. Bool is "not
/// zero".
#[inline(always)]
pub fn to_integer(dtype: DType, v: f64) -> i64 {
    match dtype {
        DType::Bool => i64::from(v != 0.0),
        DType::U8 => i64::from(v as u8),
        DType::I32 => i64::from(v as i32),
        _ => v as i64,
    }
}

/// An integer as one of `dtype`: the low bits. Bool is "not zero".
#[inline(always)]
pub fn wrap_integer(dtype: DType, v: i64) -> i64 {
    match dtype {
        DType::Bool => i64::from(v != 0),
        DType::U8 => i64::from(v as u8),
        DType::I32 => i64::from(v as i32),
        _ => v,
    }
}

/// Appends `v` rounded to `dtype`; to an integer as [`to_integer`].
pub fn push_f64(dtype: DType, v: f64, out: &mut Vec<u8>) {
    match dtype {
        DType::F64 => out.extend(v.to_le_bytes()),
        DType::F32 => out.extend((v as f32).to_le_bytes()),
        DType::BF16 => out.extend(to_bf16(v).to_le_bytes()),
        DType::F16 => out.extend(to_f16(v).to_le_bytes()),
        _ => push_i64(dtype, to_integer(dtype, v), out),
    }
}

/// Appends `v` to a buffer of integers of `dtype` (wrapping), or rounded if `dtype` is a float.
pub fn push_i64(dtype: DType, v: i64, out: &mut Vec<u8>) {
    match dtype {
        DType::I64 => out.extend(v.to_le_bytes()),
        DType::I32 => out.extend((v as i32).to_le_bytes()),
        DType::U8 => out.push(v as u8),
        DType::Bool => out.push(u8::from(v != 0)),
        _ => push_f64(dtype, v as f64, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ties_round_by_their_last_bits() {
        // The midpoint between two bf16 is 1 + 2^-8; between two f16, 1 + 2^-11. Slightly more rounds up, exact ties to
        // even.
        let hair = 2f64.powi(-40);
        assert_eq!(to_bf16(1.0 + 2f64.powi(-8)).to_f64(), 1.0);
        assert_eq!(to_bf16(1.0 + 2f64.powi(-8) + hair).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(to_f16(-1.0 - 2f64.powi(-11) - hair).to_f64(), -1.0 - 2f64.powi(-10));
        assert_eq!((to_bf16(1e300).to_f64(), to_f16(1e6).to_f64()), (f64::INFINITY, f64::INFINITY));
        assert!(to_bf16(f64::NAN).is_nan());
    }
}
