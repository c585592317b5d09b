//! Classifies how a kernel reads the elements of a stored value: in order, one for each run of adjacent elements, or
//! neither.

use perilune_core::Layout;

/// How a node over `n` elements reads a producer of `m` elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// Element for element.
    Same,
    /// Each element of the producer for a run of `n / m` adjacent elements.
    Broadcast,
    Other,
}

/// Classifies `layout`, through which a node over `n` elements reads a producer of `m` elements.
pub fn reading(layout: &Layout, n: usize, m: usize) -> Reading {
    if layout.offset != 0 || n == 0 || m == 0 {
        return Reading::Other;
    }
    let (dims, strides) = (layout.shape.dims(), layout.strides());
    match dims.len() {
        0 if n == 1 && m == 1 => Reading::Same,
        1 if n == m && strides[0] == 1 => Reading::Same,
        1 if m == 1 && strides[0] == 0 => Reading::Broadcast,
        2 if dims[0] == m && dims[0] * dims[1] == n && strides == [1, 0] => Reading::Broadcast,
        _ => Reading::Other,
    }
}
