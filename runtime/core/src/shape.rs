//! Implements shapes, strided layouts, and the arithmetic of broadcasting.
//!
//! A `Shape` is a small `Copy` value of at most `MAX_RANK` dims. A `Layout` maps the elements of a tensor to positions in a
//! buffer: a view is a layout over the buffer of another tensor. All numbers are in elements.
//!
//! Every shape of a graph has at most `MAX_NUMEL` elements (`Graph::push` checks each node), so a product of dims of one shape, a
//! stride, a byte count and a sum of a few of them fit in 64 bits. Whatever mixes dims of several shapes, or dims with numbers
//! of the recipe, is computed in 128 bits and becomes a dim through [`size`].

use crate::error::{Error, Result};
use std::fmt::{self, Display};

/// Every op here needs fewer dims: the im2col view of a batched conv2d has 6.
pub const MAX_RANK: usize = 8;

/// The most elements of a tensor, where a dim of 0 counts as 1. No machine has the memory for as many bytes.
pub const MAX_NUMEL: usize = 1 << 48;

/// A dim that was computed in 128 bits; an error that names `what` unless it is 0 to `MAX_NUMEL`.
pub fn size(op: &str, what: impl Display, n: i128) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if n <= MAX_NUMEL => Ok(n),
        _ => Err(Error::shape(op, format!("{what} would be {n}; a dim has 0 to 2^48 elements"))),
    }
}

/// The dims of a tensor. Rank 0 is a scalar.
///
/// The rank and 7 dims are in the first cache line of a node, which 80 bytes are before its attributes (`graph::Node`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C, align(16))]
pub struct Shape {
    rank: u8,
    dims: [usize; MAX_RANK],
}

impl Shape {
    pub const SCALAR: Shape = Shape { rank: 0, dims: [0; MAX_RANK] };

    /// The shape of those dims; more than `MAX_RANK` of them, or more than `MAX_NUMEL` elements, is an error.
    pub fn new(dims: &[usize]) -> Result<Shape> {
        if dims.len() > MAX_RANK {
            let message = format!("shape {} has {} dims; at most {MAX_RANK} are allowed", Dims(dims), dims.len());
            return Err(Error::shape("", message).hint("merge dims that are always used together with reshape"));
        }
        Shape::of(dims).check("")
    }

    /// This shape, or an error of `op` if it has more than `MAX_NUMEL` elements. Dims of 0 count as 1, so that the strides of
    /// an empty tensor are bounded too.
    pub fn check(self, op: &str) -> Result<Shape> {
        let numel = self.dims().iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)).filter(|n| *n <= MAX_NUMEL));
        if numel.is_some() {
            return Ok(self);
        }
        let rule = if self.dims().contains(&0) { ", a dim of 0 counted as 1" } else { "" };
        let message = format!("shape {self} has more than 2^48 elements{rule}");
        Err(Error::shape(op, message).hint("check the sizes that make this shape: no machine has memory for more"))
    }

    /// As `new`, for dims already known to be valid.
    pub fn of(dims: &[usize]) -> Shape {
        let mut s = Shape { rank: dims.len() as u8, dims: [0; MAX_RANK] };
        s.dims[..dims.len()].copy_from_slice(dims);
        s
    }

    #[inline]
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    #[inline]
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    #[inline]
    pub fn dims_mut(&mut self) -> &mut [usize] {
        &mut self.dims[..self.rank as usize]
    }

    #[inline]
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    #[inline]
    pub fn is_scalar(&self) -> bool {
        self.rank == 0
    }

    /// Converts a dim given by the user (negative counts from the end) to an index into `dims()`.
    pub fn axis(&self, op: &str, dim: i64) -> Result<usize> {
        let rank = self.rank() as i64;
        let at = if dim < 0 { dim + rank } else { dim };
        if at < 0 || at >= rank {
            let message = if rank == 0 {
                format!("dim {dim} given, but the tensor is a scalar and has no dims")
            } else {
                format!("dim {dim} is out of range for shape {self}: it has dims {} to {}", -rank, rank - 1)
            };
            return Err(Error::shape(op, message));
        }
        Ok(at as usize)
    }

    /// This shape with `dim` inserted before position `at`.
    pub fn insert(&self, at: usize, dim: usize) -> Result<Shape> {
        let mut dims = self.dims().to_vec();
        dims.insert(at, dim);
        Shape::new(&dims)
    }

    /// This shape without the dim at `at`.
    pub fn remove(&self, at: usize) -> Shape {
        let mut dims = self.dims().to_vec();
        dims.remove(at);
        Shape::of(&dims)
    }

    /// This shape with the dim at `at` replaced.
    pub fn with(&self, at: usize, dim: usize) -> Shape {
        let mut s = *self;
        s.dims_mut()[at] = dim;
        s
    }

    /// The shape that both broadcast to, aligned at the last dim; `None` if two dims differ and neither is 1.
    pub fn broadcast(a: &Shape, b: &Shape) -> Option<Shape> {
        if a == b {
            return Some(*a);
        }
        let rank = a.rank().max(b.rank());
        let mut out = Shape::of(&[0; MAX_RANK][..rank]);
        for i in 0..rank {
            let at = |s: &Shape| (i + s.rank()).checked_sub(rank).map_or(1, |k| s.dims()[k]);
            let (x, y) = (at(a), at(b));
            out.dims_mut()[i] = match (x, y) {
                _ if x == y => x,
                (1, _) => y,
                (_, 1) => x,
                _ => return None,
            };
        }
        Some(out)
    }

    /// Row-major strides of a contiguous buffer of this shape.
    pub fn strides(&self) -> [isize; MAX_RANK] {
        let mut strides = [0; MAX_RANK];
        let mut step = 1isize;
        for i in (0..self.rank()).rev() {
            strides[i] = step;
            step *= self.dims[i].max(1) as isize;
        }
        strides
    }
}

/// Prints dims as Lua would write them: `{2, 3}`. Of a long list the beginning.
pub struct Dims<'a, T = usize>(pub &'a [T]);

impl<T: Display> Display for Dims<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            if i > 2 * MAX_RANK {
                f.write_str("…")?;
                break;
            }
            write!(f, "{d}")?;
        }
        f.write_str("}")
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Dims(self.dims()).fmt(f)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Dims(self.dims()).fmt(f)
    }
}

/// The positions of the elements of a tensor of shape `shape`: element `i` is at `offset + sum(i[d] * strides[d])`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    pub shape: Shape,
    pub strides: [isize; MAX_RANK],
    pub offset: isize,
}

impl Layout {
    pub fn contiguous(shape: Shape) -> Layout {
        Layout { shape, strides: shape.strides(), offset: 0 }
    }

    /// The layout of `numel` elements in order: a contiguous layout, collapsed.
    #[inline]
    pub fn sequence(numel: usize) -> Layout {
        Layout::contiguous(if numel == 1 { Shape::SCALAR } else { Shape::of(&[numel]) })
    }

    #[inline]
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    #[inline]
    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.shape.rank()]
    }

    /// Whether element order is buffer order, without holes, from offset 0.
    pub fn is_contiguous(&self) -> bool {
        self.offset == 0 && self.is_dense()
    }

    /// Whether element order is buffer order, without holes, from any offset.
    pub fn is_dense(&self) -> bool {
        let mut step = 1isize;
        for i in (0..self.shape.rank()).rev() {
            let d = self.shape.dims()[i];
            if d == 0 {
                return true;
            }
            if d != 1 && self.strides[i] != step {
                return false;
            }
            step *= d as isize;
        }
        true
    }

    /// Merges adjacent dims where their strides allow, without changing the elements or their order. The result has the
    /// fewest possible dims: dims of size 1 are removed, and an empty layout becomes one dim of size 0.
    #[must_use]
    pub fn collapse(&self) -> Layout {
        let mut dims = [0usize; MAX_RANK];
        let mut strides = [0isize; MAX_RANK];
        let mut rank = 0;
        if self.numel() == 0 {
            let mut out = Layout::contiguous(Shape::of(&[0]));
            out.offset = self.offset;
            return out;
        }
        for i in 0..self.shape.rank() {
            let (d, s) = (self.shape.dims()[i], self.strides[i]);
            if d == 1 {
                continue;
            }
            if rank > 0 && strides[rank - 1] == s * d as isize {
                dims[rank - 1] *= d;
                strides[rank - 1] = s;
            } else {
                dims[rank] = d;
                strides[rank] = s;
                rank += 1;
            }
        }
        Layout { shape: Shape::of(&dims[..rank]), strides, offset: self.offset }
    }

    /// The layout of the same elements read with dims `shape`, if strides can express it without a copy.
    pub fn reshape(&self, shape: Shape) -> Option<Layout> {
        if self.shape == shape {
            return Some(*self);
        }
        if self.numel() == 0 || self.is_dense() {
            let mut out = Layout::contiguous(shape);
            out.offset = self.offset;
            return Some(out);
        }
        let from = self.collapse();
        let mut out = Layout { shape, strides: [0; MAX_RANK], offset: self.offset };
        // Walk both shapes from the right; each merged source dim must be an exact product of target dims.
        let mut i = shape.rank();
        for k in (0..from.shape.rank()).rev() {
            let (mut left, mut step) = (from.shape.dims()[k], from.strides[k]);
            while left > 1 {
                if i == 0 {
                    return None;
                }
                i -= 1;
                let d = shape.dims()[i];
                if d == 0 || left % d != 0 {
                    return None;
                }
                out.strides[i] = step;
                step *= d as isize;
                left /= d;
            }
        }
        // Only dims of size 1 remain on the left; their strides do not matter.
        Some(out)
    }

    /// Dim `i` of the result is dim `axes[i]`.
    pub fn permute(&self, axes: &[usize]) -> Layout {
        let mut out = *self;
        for (i, &a) in axes.iter().enumerate() {
            out.shape.dims_mut()[i] = self.shape.dims()[a];
            out.strides[i] = self.strides[a];
        }
        out
    }

    /// The layout after `expand`: dims of size 1 (and new leading dims) repeat with stride 0.
    pub fn expand(&self, shape: Shape) -> Layout {
        let lead = shape.rank() - self.shape.rank();
        let mut out = Layout { shape, strides: [0; MAX_RANK], offset: self.offset };
        for i in 0..self.shape.rank() {
            if self.shape.dims()[i] == shape.dims()[lead + i] {
                out.strides[lead + i] = self.strides[i];
            }
        }
        out
    }

    /// The smallest and largest element position of this layout, or `None` if it has no elements.
    pub fn extent(&self) -> Option<(isize, isize)> {
        if self.numel() == 0 {
            return None;
        }
        let (mut low, mut high) = (self.offset, self.offset);
        for i in 0..self.shape.rank() {
            let reach = (self.shape.dims()[i] as isize - 1) * self.strides[i];
            if reach < 0 { low += reach } else { high += reach }
        }
        Some((low, high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_is_a_collapsed_contiguous_layout() {
        for dims in [&[][..], &[1, 1], &[0], &[3, 0], &[7], &[1, 5, 1], &[2, 3, 4]] {
            let contiguous = Layout::contiguous(Shape::of(dims));
            assert_eq!(Layout::sequence(contiguous.numel()), contiguous.collapse(), "{dims:?}");
        }
    }

    fn layout(dims: &[usize], strides: &[isize]) -> Layout {
        let mut s = [0; MAX_RANK];
        s[..strides.len()].copy_from_slice(strides);
        Layout { shape: Shape::of(dims), strides: s, offset: 0 }
    }

    #[test]
    fn broadcasting_aligns_at_the_last_dim() {
        let b = |x: &[usize], y: &[usize]| Shape::broadcast(&Shape::of(x), &Shape::of(y)).map(|s| s.dims().to_vec());
        assert_eq!(b(&[2, 1, 4], &[3, 1]), Some(vec![2, 3, 4]));
        assert_eq!(b(&[], &[5]), Some(vec![5]));
        assert_eq!(b(&[0], &[1]), Some(vec![0]));
        assert_eq!(b(&[2], &[3]), None);
    }

    #[test]
    fn collapse_merges_what_is_contiguous() {
        assert_eq!(Layout::contiguous(Shape::of(&[2, 3, 4])).collapse().shape.dims(), &[24]);
        let t = layout(&[4, 2, 3], &[1, 12, 4]).collapse();
        assert_eq!((t.shape.dims(), t.strides()), (&[4usize, 6][..], &[1isize, 4][..]));
        assert_eq!(layout(&[1, 1], &[7, 9]).collapse().shape.rank(), 0);
    }

    #[test]
    fn reshape_of_a_view_needs_divisible_runs() {
        let t = layout(&[2, 3, 4], &[1, 8, 2]); // {2, 12} transposed view: inner dims merge to 12 elements of stride 2
        assert_eq!(t.reshape(Shape::of(&[2, 12])).map(|l| l.strides().to_vec()), Some(vec![1, 2]));
        assert_eq!(t.reshape(Shape::of(&[2, 2, 6])).map(|l| l.strides().to_vec()), Some(vec![1, 12, 2]));
        assert!(t.reshape(Shape::of(&[24])).is_none());
    }

    #[test]
    fn huge_shapes_are_refused() {
        assert!(Shape::new(&[usize::MAX, 2]).is_err());
        assert!(Shape::new(&[1; 9]).is_err());
        assert!(Shape::new(&[1 << 40, 0, 1 << 40]).is_err());
        assert!(Shape::new(&[1 << 24, 0, 1 << 24]).is_ok());
        assert!(Shape::new(&[MAX_NUMEL + 1]).is_err());
        let e = Shape::new(&[1 << 62, 0, 1 << 62]).unwrap_err();
        assert_eq!(
            e.message,
            "shape {4611686018427387904, 0, 4611686018427387904} has more than 2^48 elements, a dim of 0 counted as 1"
        );
        let e = Shape::new(&vec![3; 100_000]).unwrap_err();
        assert!(e.message.len() < 200, "{e}");
    }

    #[test]
    fn sizes_are_checked_after_wide_arithmetic() {
        assert_eq!(size("pad", "dim 0", 1 << 48), Ok(1 << 48));
        let e = size("pad", "dim 0", i128::from(i64::MAX) * 3).unwrap_err();
        assert_eq!(e.to_string(), "pad: dim 0 would be 27670116110564327421; a dim has 0 to 2^48 elements");
        assert!(size("pad", "dim 0", -1).is_err());
    }
}
