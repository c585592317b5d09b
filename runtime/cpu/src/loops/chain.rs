//! Chains: f32 functions one after the other on a block that stays in registers.
//!
//! A loop of `map` reads its operands from the L1 cache and writes its result there. A chain keeps the running value of
//! eight vectors in registers and interprets a list of [`Link`]s on them, so that a link costs its operand's load and its
//! arithmetic; what must outlive the next link goes to a small buffer that never leaves L1. All operands advance together,
//! a few cache lines at a time, which lets the processor fetch them from memory while it computes.
//!
//! Each link does to each element what the loop of its function does, so the bits are the same.

use super::vector::Vector;
use super::{Arg, Isa};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::scalar::lane;
use std::mem::MaybeUninit;

/// What a link does to the running value `a`, with `b` read from its operand: element by element, or one number a row
/// (`Still`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    Load,
    LoadStill,
    Store,
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
    Erf,
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
}

impl Place {
    /// The view of the region, if it is one.
    pub fn view(self) -> Option<u16> {
        match self {
            Place::View(v) | Place::Still(v) => Some(v),
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
pub const MAX_LINKS: usize = 48;
pub const MAX_LOCALS: usize = 12;
/// Elements of a block at most.
const BLOCK: usize = 128;

/// `rows` rows of `cols` elements through all links.
pub type Chain = unsafe fn(links: &[Link], views: &[Arg], rows: usize, cols: usize);

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
unsafe fn block<V: Vector, const N: usize>(links: &[Ready], from: usize, n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut a = [V::splat(0.0); N];
        for link in links {
            let b = link.at.add(from & link.moves);
            match link.act {
                Act::Load => zip(&mut a, b, n, |_, b| b),
                Act::LoadStill => still(&mut a, b, |_, b| b),
                Act::Store => {
                    if N == 1 {
                        a[0].store_some(b, n);
                    } else {
                        for k in 0..N {
                            a[k].store(b.add(k * V::LANES));
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
    let mut locals = [MaybeUninit::<[f32; BLOCK]>::uninit(); MAX_LOCALS];
    let mut ready = [Ready { at: std::ptr::null_mut(), moves: 0, act: Act::Load }; MAX_LINKS];
    let ready = &mut ready[..links.len()];
    for r in 0..rows {
        for (to, link) in ready.iter_mut().zip(links) {
            // SAFETY: rows of views are valid, by the caller.
            let (at, moves) = unsafe {
                match link.place {
                    Place::None => (std::ptr::null_mut(), 0),
                    Place::View(v) => (views[v as usize].row::<f32>(r).cast_mut(), usize::MAX),
                    Place::Still(v) => (views[v as usize].row::<f32>(r).cast_mut(), 0),
                    Place::Local(k) => (locals[k as usize].as_mut_ptr().cast::<f32>(), 0),
                }
            };
            *to = Ready { at, moves, act: link.act };
        }
        let mut from = 0;
        // SAFETY: blocks lie within the row; a local is written before it is read, and holds 8 vectors.
        unsafe {
            while from + 8 * V::LANES <= cols {
                block::<V, 8>(ready, from, 0);
                from += 8 * V::LANES;
            }
            while from + 2 * V::LANES <= cols {
                block::<V, 2>(ready, from, 0);
                from += 2 * V::LANES;
            }
            while from < cols {
                let n = V::LANES.min(cols - from);
                block::<V, 1>(ready, from, n);
                from += n;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::vector::Narrow>(links, views, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<super::vector::Wide>(links, views, rows, cols) }
}
