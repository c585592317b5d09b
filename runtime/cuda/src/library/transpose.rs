//! Launches transposes of matrices of 16-bit elements through tiles in shared memory.

use crate::launch::{Arg, Function, Launch};
use std::sync::Arc;

/// Side of the tiles in `kernels/movement/transpose_planes.cuh`.
const SIDE: usize = 64;

/// The largest power of two up to 16 that divides an address; buffers and workspaces start at multiples of 256.
pub(crate) fn aligned(at: &Arg) -> usize {
    match at {
        Arg::Value(_, bytes) => 1 << bytes.trailing_zeros().min(4),
        _ => 16,
    }
}

/// Copies x (N, C, P), whose last dim has stride 1 and whose others have `strides`, to (N, P, C) in dense memory. `None` if the
/// tiles do not fit in one launch.
pub(crate) fn transpose_planes(from: Arg, dims: [usize; 3], strides: [isize; 2], to: Arg) -> Option<Launch> {
    let [n, c, p] = dims;
    let tiles = [p.div_ceil(SIDE), c.div_ceil(SIDE)];
    let blocks = n.checked_mul(tiles[0])?.checked_mul(tiles[1]).filter(|b| i32::try_from(*b).is_ok())?;
    let channels = i32::try_from(c).ok()?;
    let reads = p.is_multiple_of(2) && strides.iter().all(|s| s % 2 == 0) && aligned(&from) >= 4;
    let writes = c.is_multiple_of(2) && aligned(&to) >= 4;
    let text = format!(
        "#include \"movement/transpose_planes.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const u16* x, u16* y, const library::Planes p) {{\n    \
         library::transpose_planes<{reads}, {writes}>(x, y, p);\n}}\n"
    );
    let numbers = [strides[0] as i64, strides[1] as i64, p as i64].into_iter().flat_map(i64::to_le_bytes);
    let counts = [channels, tiles[0] as i32, tiles[1] as i32, 0].into_iter().flat_map(i32::to_le_bytes);
    Some(Launch {
        function: Arc::new(Function { label: "transpose_planes".into(), text }),
        grid: [blocks as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![from, to, Arg::Bytes(numbers.chain(counts).collect())],
    })
}
