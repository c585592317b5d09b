//! Describes iteration spaces with the strides of several operands, as `kernels/library/strided.cuh` reads them.

use crate::launch::Arg;

/// Dims that a kernel iterates in row-major order, with the strides of each operand.
#[derive(Clone, Debug)]
pub struct Strided {
    pub dims: Vec<usize>,
    /// One list per operand, as long as `dims`.
    pub strides: Vec<Vec<isize>>,
}

/// Limit of the `Narrow` index type: division by multiplication is exact below it.
const NARROW: usize = 1 << 31;

impl Strided {
    /// Merges adjacent dims where all operands allow it and drops dims of size 1. At least one dim is left.
    pub fn new(dims: &[usize], operands: &[&[isize]]) -> Strided {
        let mut out = Strided { dims: Vec::new(), strides: vec![Vec::new(); operands.len()] };
        if dims.contains(&0) {
            return Strided { dims: vec![0], strides: vec![vec![0]; operands.len()] };
        }
        for (d, &n) in dims.iter().enumerate().filter(|(_, n)| **n != 1) {
            let last = out.dims.len().wrapping_sub(1);
            let merges = !out.dims.is_empty()
                && out.strides.iter().zip(operands).all(|(have, s)| have[last] == s[d] * n as isize);
            if merges {
                out.dims[last] *= n;
                for (have, s) in out.strides.iter_mut().zip(operands) {
                    have[last] = s[d];
                }
            } else {
                out.dims.push(n);
                for (have, s) in out.strides.iter_mut().zip(operands) {
                    have.push(s[d]);
                }
            }
        }
        if out.dims.is_empty() {
            out.dims.push(1);
            out.strides.iter_mut().for_each(|s| s.push(0));
        }
        out
    }

    pub fn numel(&self) -> usize {
        self.dims.iter().product()
    }

    /// The last dim: its size and the strides along it.
    fn last(&self) -> usize {
        self.dims.len() - 1
    }

    /// Whether every group of `v` adjacent elements of operand `k` is contiguous and aligned.
    pub fn packs(&self, k: usize, v: usize) -> bool {
        let (s, last) = (&self.strides[k], self.last());
        self.dims[last].is_multiple_of(v)
            && (s[last] == 1 || self.dims[last] == 1 && v == 1)
            && s[..last].iter().all(|s| s % v as isize == 0)
    }

    /// Whether operand `k` is constant along the last dim, in groups of `v`.
    pub fn still(&self, k: usize, v: usize) -> bool {
        self.dims[self.last()].is_multiple_of(v) && self.strides[k][self.last()] == 0
    }

    /// Groups `v` elements of the last dim. Operands in `wide` are then addressed in groups; the others advance by `v`
    /// steps per group.
    #[must_use]
    pub fn grouped(mut self, v: usize, wide: &[usize]) -> Strided {
        let last = self.last();
        self.dims[last] /= v;
        for (k, s) in self.strides.iter_mut().enumerate() {
            if wide.contains(&k) {
                s[..last].iter_mut().for_each(|s| *s /= v as isize);
            } else {
                s[last] *= v as isize;
            }
        }
        self
    }

    /// Whether counts and offsets fit in 32 bits.
    pub fn narrow(&self) -> bool {
        let reach = |s: &Vec<isize>| -> usize {
            s.iter().zip(&self.dims).map(|(s, d)| s.unsigned_abs().saturating_mul(d.saturating_sub(1))).sum()
        };
        self.numel() < NARROW && self.strides.iter().all(|s| reach(s) < NARROW)
    }

    /// The device type of `arg`.
    pub fn device_type(&self, narrow: bool) -> String {
        let name = if narrow { "Strided32" } else { "Strided64" };
        format!("library::{name}<{}, {}>", self.dims.len(), self.strides.len())
    }

    /// Encodes the structure passed by value.
    pub fn arg(&self, narrow: bool) -> Arg {
        let mut out = Vec::new();
        if narrow {
            let mut parts = [Vec::new(), Vec::new(), Vec::new()];
            for &d in &self.dims {
                let (magic, shift) = magic(d as u32);
                parts[0].push(d as u32);
                parts[1].push(magic);
                parts[2].push(shift);
            }
            let strides = self.strides.iter().flatten().map(|s| *s as i32 as u32);
            for word in parts.into_iter().flatten().chain(strides) {
                out.extend(word.to_ne_bytes());
            }
            out.resize(out.len().next_multiple_of(8), 0);
        } else {
            self.dims.iter().for_each(|d| out.extend((*d as u64).to_ne_bytes()));
            self.strides.iter().flatten().for_each(|s| out.extend((*s as i64).to_ne_bytes()));
        }
        Arg::Bytes(out)
    }
}

/// Multiplier and shift that divide any number below 2^31 by `d`: `(high word of n * m + n) >> s`.
fn magic(d: u32) -> (u32, u32) {
    let d = d.max(1) as u64;
    let shift = 64 - (d - 1).leading_zeros();
    let m = ((1u64 << 32) * ((1u64 << shift) - d)) / d + 1;
    (m as u32, shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_by_multiplication_are_exact() {
        for d in (1..2000).chain([4095, 4096, 4097, 50304, 65535, 65537, 1 << 20, (1 << 30) + 1, (1 << 31) - 1]) {
            let (m, s) = magic(d);
            let near = |n: u64| (n.saturating_sub(2)..n + 3).filter(|n| *n < 1 << 31);
            let multiples = (0..50).map(|k| k * d as u64).chain([(1 << 31) - 1, (1 << 31) / d as u64 * d as u64]);
            for n in multiples.flat_map(near) {
                let n = n as u32;
                let high = ((n as u64 * m as u64) >> 32) as u32;
                assert_eq!((high + n) >> s, n / d, "{n} / {d}");
            }
        }
    }

    #[test]
    fn dims_merge_where_all_operands_allow() {
        let s = Strided::new(&[2, 3, 4], &[&[12, 4, 1], &[12, 4, 1]]);
        assert_eq!(s.dims, [24]);
        let s = Strided::new(&[2, 1, 3, 4], &[&[12, 9, 4, 1], &[0, 9, 0, 0]]);
        assert_eq!(s.dims, [24]);
        assert_eq!(s.strides[1], [0]);
        let s = Strided::new(&[2, 3, 4], &[&[12, 4, 1], &[1, 0, 0]]);
        assert_eq!((s.dims, s.strides[1].as_slice()), (vec![2, 12], &[1, 0][..]));
        assert_eq!(Strided::new(&[1, 1], &[&[5, 5]]).dims, [1]);
        assert_eq!(Strided::new(&[3, 0], &[&[5, 5]]).numel(), 0);
    }

    #[test]
    fn groups_divide_the_last_dim() {
        let s = Strided::new(&[5, 16], &[&[32, 1], &[1, 0]]);
        assert!(s.packs(0, 8) && s.still(1, 8) && !s.packs(1, 8));
        let s = s.grouped(8, &[0]);
        assert_eq!((s.dims, s.strides), (vec![5, 2], vec![vec![4, 1], vec![1, 0]]));
    }
}
