//! Recognises regions that only transpose: one load, stored as it is, whose adjacent elements lie along another dim.
//!
//! Read element by element, each 32-byte sector of such a load serves one element of a warp. Large ones go through tiles in
//! shared memory instead, with the same bits.

use crate::launch::{Arg, Launch};
use crate::library::transpose_planes;
use perilune_core::Layout;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Instr, Level, Program, Region, Source, Storage, ValueId};

/// Minimum elements: smaller copies are launches more than transfers.
const LEAST: usize = 1 << 20;
/// Minimum rows and columns, so that tiles are not mostly empty.
const LEAST_SIDE: usize = 32;

/// The launch of a region that transposes 16-bit elements into a value of the program.
pub fn lower(program: &Program, region: &Region) -> Option<Launch> {
    let (Instr { code, dtype, level, .. }, rest) = region.body.split_first()?;
    let Code::Load { source: Source::Value(from), layout } = code else { return None };
    let copies = |i: &Instr| matches!(&i.code, Code::Map(MapFn::Copy, _)) && i.dtype == *dtype;
    let [(stored, to)] = region.stores[..] else { return None };
    if *level != Level::Full || rest.len() > 1 || !rest.iter().all(copies) || stored as usize != rest.len() {
        return None;
    }
    let value = |v: ValueId| &program.values[v.0 as usize];
    // A State is written in place, behind the checks of indices.
    let plain = !matches!(value(to).storage, Storage::Input(_)) && region.pitch(value(to)).is_none();
    if !plain
        || dtype.size() != 2
        || value(*from).dtype != *dtype
        || value(to).dtype != *dtype
        || region.numel() < LEAST
    {
        return None;
    }
    let (dims, strides) = planes(layout)?;
    transpose_planes(Arg::Value(*from, layout.offset as i64 * 2), dims, strides, Arg::Value(to, 0))
}

/// The dims (N, C, P) and the strides along N and C of a layout that reads (N, P, C), in which P is adjacent.
fn planes(layout: &Layout) -> Option<([usize; 3], [isize; 2])> {
    let (d, s) = (layout.shape.dims(), layout.strides());
    let (d, s) = match d.len() {
        2 => ([1, d[0], d[1]], [0, s[0], s[1]]),
        3 => ([d[0], d[1], d[2]], [s[0], s[1], s[2]]),
        _ => return None,
    };
    let fits = s[1] == 1 && s[2] > 1 && d[1] >= LEAST_SIDE && d[2] >= LEAST_SIDE;
    fits.then_some(([d[0], d[2], d[1]], [s[0], s[2]]))
}
