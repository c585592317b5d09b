//! Cuts tensors into the parts of devices and joins them, in host memory.

use perilune_core::error::Result;
use perilune_core::mesh::{Along, Axis, Coordinates, Local};
use perilune_core::{Mesh, Shape, host_memory};
use perilune_plan::BufferDesc;

/// Calls `f` with (element of the tensor, element of the part, count) for each run of elements that are adjacent in both.
fn for_each_run(
    desc: &BufferDesc,
    mesh: &Mesh,
    at: &Coordinates,
    mut f: impl FnMut(usize, usize, usize),
) -> Result<()> {
    if Axis::ALL.into_iter().any(|axis| matches!(desc.placement.along(axis), Along::Segments(..) | Along::Sections(..)))
    {
        for run in desc.placement.runs(mesh, at, &desc.shape)? {
            f(run.global, run.local, run.len);
        }
    } else {
        for_each_row(&desc.shape, &desc.placement.local(mesh, at, &desc.shape)?, f);
    }
    Ok(())
}

/// As [`for_each_run`] for a part that is one block of each dim.
fn for_each_row(global: &Shape, part: &Local, mut f: impl FnMut(usize, usize, usize)) {
    let rank = global.rank();
    let (whole, local, valid) = (global.dims(), part.shape.dims(), part.valid.dims());
    if part.valid.numel() == 0 {
        return;
    }
    // The dims behind `outer` are whole in the part; of dim `outer` it has a block.
    let outer = (0..rank).rev().find(|d| valid[*d] != whole[*d] || local[*d] != whole[*d]);
    let Some(outer) = outer else { return f(0, 0, global.numel()) };
    let inner: usize = whole[outer + 1..].iter().product();
    let (from, to) = (global.strides(), part.shape.strides());
    let mut at = vec![0usize; outer];
    loop {
        let mut first = part.start[outer] * inner;
        let mut own = 0;
        for d in 0..outer {
            first += (part.start[d] + at[d]) * from[d] as usize;
            own += at[d] * to[d] as usize;
        }
        f(first, own, valid[outer] * inner);
        // The next position in the dims before `outer`.
        let Some(d) = (0..outer).rev().find(|d| at[*d] + 1 < valid[*d]) else { return };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}

/// Returns the part of a tensor on the device at `at`; its padding is zero. `bytes`: the whole tensor.
pub fn cut(desc: &BufferDesc, mesh: &Mesh, at: &Coordinates, bytes: &[u8]) -> Result<Vec<u8>> {
    let size = desc.dtype.size();
    let mut out = host_memory::filled("mesh", desc.local(mesh)?.nbytes())?;
    for_each_run(desc, mesh, at, |from, to, n| {
        out[to * size..(to + n) * size].copy_from_slice(&bytes[from * size..(from + n) * size]);
    })?;
    Ok(out)
}

/// Copies the part of the device at `at` into the whole tensor.
pub fn join(desc: &BufferDesc, mesh: &Mesh, at: &Coordinates, part: &[u8], whole: &mut [u8]) -> Result<()> {
    let size = desc.dtype.size();
    for_each_run(desc, mesh, at, |to, from, n| {
        whole[to * size..(to + n) * size].copy_from_slice(&part[from * size..(from + n) * size]);
    })
}

/// The first device among `ranks` that stores each part of a tensor, in the order of `ranks`; `None` if no device among them has
/// some part.
pub fn holders(desc: &BufferDesc, mesh: &Mesh, ranks: &[usize]) -> Option<Vec<usize>> {
    let split: Vec<Axis> = Axis::ALL.into_iter().filter(|axis| desc.placement.along(*axis).split().is_some()).collect();
    let all: usize = split.iter().map(|axis| mesh.size(*axis)).product();
    // A part is numbered by the coordinates along the axes that divide the tensor.
    let part = |rank: usize| {
        let at = mesh.coordinates(rank);
        split.iter().fold(0, |n, axis| n * mesh.size(*axis) + at[*axis as usize])
    };
    let has = |rank: &usize| mesh.size(Axis::Pp) == 1 || desc.placement.is_held(&mesh.coordinates(*rank));
    let mut found = vec![false; all];
    let first: Vec<usize> =
        ranks.iter().copied().filter(has).filter(|rank| !std::mem::replace(&mut found[part(*rank)], true)).collect();
    (first.len() == all).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::{DType, Placement};

    #[test]
    fn joined_parts_are_the_tensor() {
        let mesh = Mesh::parse("pp=2,dp=2,tp=3").unwrap();
        let mut cases = 0;
        let along = [Along::Replicated, Along::Split(0), Along::Split(1), Along::Split(2), Along::Segments(1, 3)];
        for dims in [[4, 6, 2], [5, 9, 3], [1, 3, 1], [2, 0, 3], [3, 12, 8]] {
            let shape = Shape::of(&dims);
            for dtype in [DType::U8, DType::F32] {
                let bytes: Vec<u8> = (0..shape.numel() * dtype.size()).map(|i| i as u8).collect();
                for (outer, inner) in along.iter().flat_map(|a| along.map(|b| (*a, b))) {
                    let pp = if cases % 2 == 0 { Along::Stage { device: 1, stage: 1 } } else { Along::Replicated };
                    let placement =
                        Placement::REPLICATED.with(Axis::Pp, pp).with(Axis::Dp, outer).with(Axis::Tp, inner);
                    let desc = BufferDesc { placement, ..BufferDesc::new(shape, dtype) };
                    if desc.local(&mesh).is_err() {
                        continue; // segments of unequal size
                    }
                    cases += 1;
                    let mut whole = vec![0; bytes.len()];
                    let all: Vec<usize> = (0..mesh.devices()).collect();
                    let holders = holders(&desc, &mesh, &all).unwrap();
                    for rank in all {
                        let part = cut(&desc, &mesh, &mesh.coordinates(rank), &bytes).unwrap();
                        assert_eq!(part.len(), desc.local(&mesh).unwrap().nbytes());
                        if holders.contains(&rank) {
                            join(&desc, &mesh, &mesh.coordinates(rank), &part, &mut whole).unwrap();
                        }
                    }
                    assert_eq!(whole, bytes, "{shape} {dtype}, {placement}");
                }
            }
        }
        assert!(cases > 150, "{cases}");
    }

    #[test]
    fn some_devices_have_a_whole_tensor_and_others_lack_parts() {
        let mesh = Mesh::parse("dp=2,tp=2").unwrap();
        let of = |axis: Option<Axis>, ranks: &[usize]| {
            let placement = axis.map_or(Placement::REPLICATED, |a| Placement::REPLICATED.with(a, Along::Split(0)));
            let desc = BufferDesc { placement, ..BufferDesc::new(Shape::of(&[4, 2]), DType::F32) };
            holders(&desc, &mesh, ranks)
        };
        assert_eq!(of(None, &[2, 3]), Some(vec![2]));
        assert_eq!(of(Some(Axis::Tp), &[2, 3]), Some(vec![2, 3]));
        assert_eq!(of(Some(Axis::Dp), &[2, 3]), None);
        assert_eq!(of(Some(Axis::Dp), &[0, 1, 2, 3]), Some(vec![0, 2]));
        assert_eq!(of(None, &[]), None);
    }
}
