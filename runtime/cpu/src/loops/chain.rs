//! Chains: f32 functions one after the other on a block that stays in registers.
//!
//! A loop of `map` reads its operands from the L1 cache and writes its result there. A chain keeps the running value of
//! eight vectors in registers and interprets a list of [`Link`]s on them, so that a link costs its operand's load and its
//! arithmetic; what must outlive the next link goes to a small buffer that never leaves L1. All operands advance together,
//! a few cache lines at a time, which lets the processor fetch them from memory while it computes.
//!
//! Each link does to each element what the loop of its function does, so the bits are the same.

use super::reduce::fold_sum;
use super::vector::Vector;
use super::{Arg, Isa, ask};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::scalar::lane;
use perilune_plan::ir::LANES;
use std::mem::MaybeUninit;

/// What a link does to the running value `a`, with `b` read from its operand: element by element, or one number a row
/// (`Still`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// Asks for what the chain will read two blocks later.
    Near,
    /// Asks for what the next run of the chain will read: one tile further.
    Next,
    Load,
    Store,
    /// As `Store`, past the caches where the operand is aligned to lines.
    Stream,
    /// Added to the lanes of the row's sum, which is written at the row's end.
    Sum,
    Add,
    AddStill,
    /// a - b
    Sub,
    SubStill,
    /// b - a
    From,
    FromStill,
    Mul,
    MulStill,
    /// a / b
    Div,
    DivStill,
    /// b / a
    Into,
    IntoStill,
    /// a * a
    Square,
    Neg,
    Abs,
    Relu,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Exp,
    Tanh,
    Sigmoid,
    Sigmoid2,
    Sigmoid2Rest,
    Erf,
}

impl Act {
    /// Roughly how many cycles a vector takes.
    pub fn cost(self) -> usize {
        match self {
            Act::Exp | Act::Tanh | Act::Sigmoid | Act::Sigmoid2 | Act::Sigmoid2Rest | Act::Erf => 20,
            Act::Div | Act::DivStill | Act::Into | Act::IntoStill | Act::Sqrt | Act::Reciprocal => 16,
            Act::Rsqrt => 32,
            _ => 1,
        }
    }
}

/// Where a link's operand lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    None,
    /// A view of the region: advances with the block.
    View(u16),
    /// One number a row of a view of the region.
    Still(u16),
    /// A buffer of the chain's, one block long.
    Local(u8),
    /// The sum of that number, whose result goes to one element a row of the view.
    Sum(u8, u16),
}

impl Place {
    /// The view of the region, if it is one.
    pub fn view(self) -> Option<u16> {
        match self {
            Place::View(v) | Place::Still(v) | Place::Sum(_, v) => Some(v),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub act: Act,
    pub place: Place,
}

/// Links of a chain at most, and buffers of its own.
pub const MAX_LINKS: usize = 96;
pub const MAX_LOCALS: usize = 12;
pub const MAX_SUMS: usize = 4;
/// Elements of a block at most.
const BLOCK: usize = 128;
/// Bytes of a cache line, and of the widest vector.
const LINE: usize = 64;
/// How far ahead `Act::Near` asks.
pub const NEAR: usize = 2 * BLOCK;

/// `rows` rows of `cols` elements through all links.
pub type Chain = unsafe fn(links: &[Link], views: &[Arg], rows: usize, cols: usize);

/// Makes what this thread's chains wrote past the caches visible in order: due once a thread's part of a kernel is done. After
/// each tile it would have the thread wait for its stores.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// The unary link of a function.
pub fn unary(f: MapFn) -> Option<Act> {
    Some(match f {
        MapFn::Neg => Act::Neg,
        MapFn::Abs => Act::Abs,
        MapFn::Relu => Act::Relu,
        MapFn::Sqrt => Act::Sqrt,
        MapFn::Rsqrt => Act::Rsqrt,
        MapFn::Reciprocal => Act::Reciprocal,
        MapFn::Exp => Act::Exp,
        MapFn::Tanh => Act::Tanh,
        MapFn::Sigmoid => Act::Sigmoid,
        MapFn::Sigmoid2 => Act::Sigmoid2,
        MapFn::Sigmoid2Rest => Act::Sigmoid2Rest,
        MapFn::Erf => Act::Erf,
        _ => return None,
    })
}

/// The links of a binary function: with the running value as first operand, and as second; each with an operand that
/// advances and one held still.
pub fn binary(f: MapFn) -> Option<[(Act, Act); 2]> {
    Some(match f {
        MapFn::Add => [(Act::Add, Act::AddStill); 2],
        MapFn::Mul => [(Act::Mul, Act::MulStill); 2],
        MapFn::Sub => [(Act::Sub, Act::SubStill), (Act::From, Act::FromStill)],
        MapFn::Div => [(Act::Div, Act::DivStill), (Act::Into, Act::IntoStill)],
        _ => return None,
    })
}

/// The interpreter for an instruction set; none without vectors.
pub fn chain(isa: Isa) -> Option<Chain> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512),
    }
}

/// A link with its operand's address in this row; `moves` masks the block's position.
#[derive(Clone, Copy)]
struct Ready {
    at: *mut f32,
    moves: usize,
    act: Act,
    /// Lines to ask for meanwhile, from the block's position on: a processor waits for few lines at a time, so that asking
    /// for all in one go would stop it.
    asks: [*const f32; ASKS],
}

/// Lines that a link asks for.
const ASKS: usize = 2;
/// Rows that chains with sums take side by side: the additions of one row need not wait for each other.
const SIDE: usize = 4;

/// Asks for `n` elements that will be read soon, line by line; any address will do.
#[inline(always)]
fn prefetch(at: *const f32, n: usize) {
    for k in (0..n).step_by(LANES) {
        ask(at.wrapping_add(k));
    }
}

#[inline(always)]
unsafe fn zip<V: Vector, const N: usize>(a: &mut [V; N], b: *const f32, n: usize, f: impl Fn(V, V) -> V) {
    // SAFETY: the caller's promise.
    unsafe {
        if N == 1 {
            a[0] = f(a[0], V::load_some(b, n));
        } else {
            for k in 0..N {
                a[k] = f(a[k], V::load(b.add(k * V::LANES)));
            }
        }
    }
}

#[inline(always)]
unsafe fn still<V: Vector, const N: usize>(a: &mut [V; N], b: *const f32, f: impl Fn(V, V) -> V) {
    // SAFETY: the caller's promise.
    let b = unsafe { V::splat(*b) };
    for v in a {
        *v = f(*v, b);
    }
}

#[inline(always)]
fn each<V: Vector, const N: usize>(a: &mut [V; N], f: impl Fn(V) -> V) {
    for v in a {
        *v = f(*v);
    }
}

/// `N` vectors from element `from` of the row on; if `N` is 1, `n` elements of one.
///
/// # Safety
/// As for `Chain`.
#[inline(always)]
unsafe fn block<V: Vector, const N: usize, const ASK: bool>(links: &[Ready], from: usize, n: usize, tile: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut a = [V::splat(0.0); N];
        for link in links {
            let b = link.at.wrapping_add(from & link.moves);
            if ASK {
                for at in link.asks {
                    ask(at.wrapping_add(from));
                }
            }
            match link.act {
                Act::Near => prefetch(b.wrapping_add(NEAR), N * V::LANES),
                Act::Next => prefetch(b.wrapping_add(tile), N * V::LANES),
                Act::Load => zip(&mut a, b, n, |_, b| b),
                Act::Store => {
                    if N == 1 {
                        a[0].store_some(b, n);
                    } else {
                        for k in 0..N {
                            a[k].store(b.add(k * V::LANES));
                        }
                    }
                }
                Act::Stream => {
                    if N == 1 {
                        a[0].store_some(b, n);
                    } else {
                        for k in 0..N {
                            a[k].stream(b.add(k * V::LANES));
                        }
                    }
                }
                Act::Sum => {
                    // `b` are the 16 lanes; a vector of 8 goes to their lower or upper half in turn.
                    if N == 1 {
                        let mut some = [0.0; LANES];
                        a[0].store_some(some.as_mut_ptr(), n);
                        for k in 0..n {
                            *b.add(from % LANES + k) += some[k];
                        }
                    } else {
                        let parts = LANES / V::LANES;
                        for part in 0..parts {
                            let at = b.add(part * V::LANES);
                            let mut lanes = V::load(at);
                            for k in (part..N).step_by(parts) {
                                lanes = lanes + a[k];
                            }
                            lanes.store(at);
                        }
                    }
                }
                Act::Add => zip(&mut a, b, n, |a, b| a + b),
                Act::AddStill => still(&mut a, b, |a, b| a + b),
                Act::Sub => zip(&mut a, b, n, |a, b| a - b),
                Act::SubStill => still(&mut a, b, |a, b| a - b),
                Act::From => zip(&mut a, b, n, |a, b| b - a),
                Act::FromStill => still(&mut a, b, |a, b| b - a),
                Act::Mul => zip(&mut a, b, n, |a, b| a * b),
                Act::MulStill => still(&mut a, b, |a, b| a * b),
                Act::Div => zip(&mut a, b, n, |a, b| a / b),
                Act::DivStill => still(&mut a, b, |a, b| a / b),
                Act::Into => zip(&mut a, b, n, |a, b| b / a),
                Act::IntoStill => still(&mut a, b, |a, b| b / a),
                Act::Square => each(&mut a, |a| a * a),
                Act::Neg => each(&mut a, |a| a.neg()),
                Act::Abs => each(&mut a, |a| a.abs()),
                Act::Relu => each(&mut a, |a| a.relu()),
                Act::Sqrt => each(&mut a, |a| a.sqrt()),
                Act::Rsqrt => {
                    let one = V::splat(1.0);
                    each(&mut a, |a| one / a.sqrt())
                }
                Act::Reciprocal => {
                    let one = V::splat(1.0);
                    each(&mut a, |a| one / a)
                }
                // No closures here: these are large, and must be compiled for the instruction set, that is, inlined.
                Act::Exp => {
                    for v in &mut a {
                        *v = lane::exp(*v);
                    }
                }
                Act::Tanh => {
                    for v in &mut a {
                        *v = lane::tanh(*v);
                    }
                }
                Act::Sigmoid => {
                    for v in &mut a {
                        *v = lane::sigmoid(*v);
                    }
                }
                Act::Sigmoid2 => {
                    for v in &mut a {
                        *v = lane::sigmoid2(*v);
                    }
                }
                Act::Sigmoid2Rest => {
                    for v in &mut a {
                        *v = lane::sigmoid2(v.neg());
                    }
                }
                Act::Erf => {
                    for v in &mut a {
                        *v = lane::erf(*v);
                    }
                }
            }
        }
    }
}

/// # Safety
/// Views must be valid for `rows` x `cols` elements, those held still for one element a row; a view that is stored to
/// may be one that is loaded, element for element, but must not overlap others.
#[inline(always)]
unsafe fn run<V: Vector>(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    let tile = rows * cols;
    // Nothing here is larger than it is used: tiles are small, and clearing some KiB would show.
    let mut sums = [const { MaybeUninit::<[[f32; LANES]; MAX_SUMS]>::uninit() }; SIDE];
    let mut locals = [MaybeUninit::<[f32; BLOCK]>::uninit(); MAX_LOCALS];
    // All links reach them by these.
    let (sums, locals) = (sums.as_mut_ptr(), locals.as_mut_ptr());
    let sum = |r: usize, k: u8| sums.wrapping_add(r).cast::<[f32; LANES]>().wrapping_add(k as usize);
    let mut ready = [const { [const { MaybeUninit::<Ready>::uninit() }; MAX_LINKS] }; SIDE];
    // Elements from row to row, of a link's operand and of what it asks for.
    let mut steps = [const { MaybeUninit::<[isize; 1 + ASKS]>::uninit() }; MAX_LINKS];
    let summed = links.iter().any(|l| matches!(l.place, Place::Sum(..)));
    let side = if summed { rows.clamp(1, SIDE) } else { 1 };
    // What is asked for ahead, one line of each operand after the other, spread over the links.
    let lines = 8 * V::LANES / LANES;
    let first = links.iter().take_while(|l| matches!(l.act, Act::Near | Act::Next)).count();
    let spread = first.min(ASKS * (links.len() - first) / lines);
    let (ahead, links) = links.split_at(spread);
    let (slots, total) = (ASKS * links.len(), spread * lines);
    let (mut due, mut operand, mut depth) = (0, 0, 0);
    for (i, link) in links.iter().enumerate() {
        let (at, moves, step) = match link.place {
            Place::None => (std::ptr::null_mut(), 0, 0),
            Place::View(v) | Place::Still(v) => {
                let view = &views[v as usize];
                let moves = if matches!(link.place, Place::View(_)) { usize::MAX } else { 0 };
                (view.ptr.cast::<f32>().cast_mut(), moves, view.step)
            }
            Place::Sum(k, _) => {
                for r in 0..side {
                    // SAFETY: there is room for `MAX_SUMS` of each of the rows side by side.
                    unsafe { sum(r, k).write([0.0; LANES]) };
                }
                (sum(0, k).cast(), 0, 0)
            }
            Place::Local(k) => (locals.wrapping_add(k as usize).cast(), 0, 0),
        };
        let act = match link.act {
            Act::Stream if at.addr() % LINE != 0 || (rows > 1 && step % LANES as isize != 0) => Act::Store,
            act => act,
        };
        let (mut asks, mut ask_steps) = ([at.cast_const(); ASKS], [0; ASKS]);
        for k in 0..if spread > 0 { ASKS } else { 0 } {
            let link = &ahead[operand];
            let view = &views[link.place.view().unwrap_or(0) as usize];
            let far = depth + if link.act == Act::Near { NEAR } else { tile };
            (asks[k], ask_steps[k]) = (view.ptr.cast::<f32>().wrapping_add(far), view.step);
            due += total;
            if due >= slots {
                due -= slots;
                operand += 1;
                if operand == spread {
                    (operand, depth) = (0, depth + LANES);
                }
            }
        }
        steps[i].write([step, ask_steps[0], ask_steps[1]]);
        for (r, ready) in ready[..side].iter_mut().enumerate() {
            let at = match link.place {
                Place::Sum(k, _) => sum(r, k).cast(),
                _ => at.wrapping_offset(r as isize * step),
            };
            let asks = [0, 1].map(|k| asks[k].wrapping_offset(r as isize * ask_steps[k]));
            ready[i].write(Ready { at, moves, act, asks });
        }
    }
    for first in (0..rows).step_by(side) {
        let now = side.min(rows - first);
        // SAFETY: as many were written as there are links, for each of the rows side by side.
        let row = |ready: &[[MaybeUninit<Ready>; MAX_LINKS]], r: usize| unsafe {
            std::slice::from_raw_parts(ready[r].as_ptr().cast::<Ready>(), links.len())
        };
        let mut from = 0;
        // SAFETY: rows of views are valid, by the caller, and blocks lie within them; a local is written before it is read,
        // and holds 8 vectors.
        unsafe {
            while from + 8 * V::LANES <= cols {
                for r in 0..now {
                    if spread > 0 {
                        block::<V, 8, true>(row(&ready, r), from, 0, tile);
                    } else {
                        block::<V, 8, false>(row(&ready, r), from, 0, tile);
                    }
                }
                from += 8 * V::LANES;
            }
            while from + 4 * V::LANES <= cols {
                for r in 0..now {
                    block::<V, 4, false>(row(&ready, r), from, 0, tile);
                }
                from += 4 * V::LANES;
            }
            while from < cols {
                let n = V::LANES.min(cols - from);
                for r in 0..now {
                    block::<V, 1, false>(row(&ready, r), from, n, tile);
                }
                from += n;
            }
            if summed {
                for r in 0..now {
                    for link in links {
                        if let Place::Sum(k, v) = link.place {
                            let sum = &mut *sum(r, k);
                            *views[v as usize].ptr.cast::<f32>().cast_mut().add(first + r) = fold_sum(*sum);
                            *sum = [0.0; LANES];
                        }
                    }
                }
            }
        }
        if first + side >= rows {
            break;
        }
        for i in 0..links.len() {
            // SAFETY: written above, here and below.
            let [step, ask_steps @ ..] = unsafe { steps[i].assume_init() };
            for ready in &mut ready[..side] {
                let link = unsafe { ready[i].assume_init_mut() };
                link.at = link.at.wrapping_offset(side as isize * step);
                for k in 0..ASKS {
                    link.asks[k] = link.asks[k].wrapping_offset(side as isize * ask_steps[k]);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn avx2(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::vector::Narrow>(links, views, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
pub unsafe fn avx512(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::vector::Wide>(links, views, rows, cols) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loops::map::{Still, map};
    use perilune_core::DType;

    /// The instruction sets of this machine.
    fn isas() -> Vec<Isa> {
        #[cfg(target_arch = "x86_64")]
        return match Isa::detect() {
            Isa::Avx512 => vec![Isa::Avx2, Isa::Avx512],
            Isa::Baseline => vec![],
            other => vec![other],
        };
        #[cfg(not(target_arch = "x86_64"))]
        vec![]
    }

    /// Bit patterns of all kinds, then numbers of everyday size.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            state ^ (state >> 15)
        };
        let specials =
            [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -1.0, 1e-40, 88.8, -103.9, 0.6, 0.92];
        let any = |i: usize, bits: u32| match i % 3 {
            0 => f32::from_bits(bits),
            1 => (bits as i32 as f32) / 4e8,
            _ => specials[bits as usize % specials.len()],
        };
        (0..n).map(|i| any(i, next())).collect()
    }

    fn same(got: &[f32], want: &[f32], what: &str) {
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!(g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()), "{what}: {i} is {g:e}, not {w:e}");
        }
    }

    fn view(x: &[f32], step: isize) -> Arg {
        Arg { ptr: x.as_ptr().cast(), step }
    }

    /// One function as a chain against its loop for the baseline, over rows that end in the middle of a vector.
    #[test]
    fn links_give_the_bits_of_loops() {
        let (rows, cols) = (3, 1003);
        let n = rows * cols;
        let (x, y) = (numbers(n, 1), numbers(n, 2));
        for isa in isas() {
            let run = chain(isa).expect("a vector class has one");
            let check = |f: MapFn, links: &[Link], loops: &[Arg], still: Still| {
                let (mut got, mut want) = (vec![7f32; n], vec![7f32; n]);
                let views = [
                    view(&x, cols as isize),
                    view(&y, cols as isize),
                    Arg { ptr: got.as_mut_ptr().cast(), step: cols as isize },
                    view(&y, 1),
                ];
                let kernel = map(f, DType::F32, Isa::Baseline, still).expect("defined");
                // SAFETY: all views have the elements that the links and the loop touch.
                unsafe {
                    run(links, &views, rows, cols);
                    kernel(want.as_mut_ptr().cast(), loops.as_ptr(), rows, cols);
                }
                same(&got, &want, &format!("{f:?} {still:?} {isa:?}"));
            };
            let link = |act, place| Link { act, place };
            let store = link(Act::Store, Place::View(2));
            for &f in MapFn::ALL {
                let (vx, vy, one) = (view(&x, cols as isize), view(&y, cols as isize), view(&y, 1));
                if let Some(act) = unary(f) {
                    let links = [link(Act::Load, Place::View(0)), link(act, Place::None), store];
                    check(f, &links, &[vx], Still::NONE);
                }
                if let Some([first, second]) = binary(f) {
                    let load = |v| link(Act::Load, Place::View(v));
                    let y_still = Still { x: false, y: true };
                    let x_still = Still { x: true, y: false };
                    check(f, &[load(0), link(first.0, Place::View(1)), store], &[vx, vy], Still::NONE);
                    check(f, &[load(1), link(second.0, Place::View(0)), store], &[vx, vy], Still::NONE);
                    check(f, &[load(0), link(first.1, Place::Still(3)), store], &[vx, one], y_still);
                    check(f, &[load(0), link(second.1, Place::Still(3)), store], &[one, vx], x_still);
                }
            }
        }
    }

    /// A sum beside other links has the bits of the reduction's own loop.
    #[test]
    fn sums_have_the_order_of_reductions() {
        for cols in [1, 7, 16, 64, 100, 127, 128, 300, 1003] {
            let x: Vec<f32> = (0..5 * cols).map(|i| ((i * 7919) % 1000) as f32 * 1.7e-3 - 0.4).collect();
            let loops = crate::loops::reduce::reduction(perilune_core::ops::ReduceFn::Sum, DType::F32, Isa::Baseline);
            let squares: Vec<f32> = x.iter().map(|v| v * v).collect();
            let mut want = [0f32; 5];
            // SAFETY: five rows of `cols` elements.
            unsafe { (loops.rows)(want.as_mut_ptr().cast(), &view(&squares, cols as isize), 5, cols) };
            for isa in isas() {
                let mut got = [0f32; 5];
                let views = [view(&x, cols as isize), Arg { ptr: got.as_mut_ptr().cast(), step: 1 }];
                let links = [
                    Link { act: Act::Load, place: Place::View(0) },
                    Link { act: Act::Square, place: Place::None },
                    Link { act: Act::Sum, place: Place::Sum(0, 1) },
                ];
                // SAFETY: as above.
                unsafe { chain(isa).expect("a vector class has one")(&links, &views, 5, cols) };
                same(&got, &want, &format!("{cols} columns, {isa:?}"));
            }
        }
    }
}
