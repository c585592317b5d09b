//! Chains that are spelled out when this crate is compiled.
//!
//! The interpreter of `chain` pays for every link of every block: a jump, an address, a request for memory. The sequences
//! that training runs most are listed here, and each becomes one loop whose values, sums and buffers are registers. The
//! region's compiler looks a finished chain up in the list ([`find`]); it takes the interpreter's place where all its acts
//! and buffers are those of an entry. Each act does what the interpreter's does to each element, and sums keep their 16
//! lanes, so the bits are the same; a chain that is not listed is only slower, and so are rows that end within a line.

use super::chain::{self, Act, Chain, Link, MAX_LOCALS, MAX_SUMS, NEAR, Place};
use super::reduce::fold_sum;
use super::vector::Vector;
use super::{Arg, Isa, ask};
use perilune_core::scalar::lane;
use perilune_plan::ir::LANES;

/// Links of an entry at most.
const MAX: usize = 48;
/// Operands that are asked for ahead at most.
const MAX_AHEAD: usize = 8;

/// What a row of a chain keeps while it runs: where each operand begins, numbers held still, sums.
pub(super) struct Row<V, const P: usize> {
    pub(super) at: [*mut f32; MAX],
    still: [V; MAX],
    pub(super) sums: [[V; P]; MAX_SUMS],
}

impl<V: Vector, const P: usize> Row<V, P> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        let zero = V::splat(0.0);
        Row { at: [std::ptr::null_mut(); MAX], still: [zero; MAX], sums: [[zero; P]; MAX_SUMS] }
    }
}

/// An entry: its acts, each with the number of its buffer or sum. The two functions are spelled out link by link, so that
/// every act and index is a constant to the compiler.
pub(super) trait Spelled {
    const LINKS: &'static [(Act, Option<u8>)];

    /// # Safety
    /// As for `Chain`; `links` are those of the entry.
    unsafe fn row<V: Vector, const P: usize>(links: &[Link], views: &[Arg], row: usize) -> Row<V, P>;

    /// All links on 16 elements from `from` on; `past`: what may go past the caches does.
    ///
    /// # Safety
    /// As for `Chain`.
    unsafe fn unit<V: Vector, const P: usize>(row: &mut Row<V, P>, from: usize, past: bool);

    /// Folds the sums of a row of `cols` elements to their places.
    ///
    /// # Safety
    /// As for `Chain`.
    unsafe fn finish<V: Vector, const P: usize>(of: &Row<V, P>, links: &[Link], views: &[Arg], row: usize, cols: usize);
}

/// Whether an act reads one number a row.
pub(super) const fn holds_still(act: Act) -> bool {
    matches!(act, Act::AddStill | Act::SubStill | Act::FromStill | Act::MulStill | Act::DivStill | Act::IntoStill)
}

/// Puts a link's operand, as it is in that row, into its place.
///
/// # Safety
/// As for `Chain`.
#[inline(always)]
unsafe fn place<V: Vector, const P: usize>(
    act: Act,
    i: usize,
    link: &Link,
    views: &[Arg],
    row: usize,
    to: &mut Row<V, P>,
) {
    if let Place::View(v) | Place::Still(v) = link.place {
        // SAFETY: the caller's promise.
        unsafe {
            let at = views.get_unchecked(v as usize).row::<f32>(row).cast_mut();
            if holds_still(act) {
                to.still[i] = V::splat(*at);
            } else {
                to.at[i] = at;
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn read<V: Vector, const P: usize>(at: *const f32) -> [V; P] {
    let mut b = [V::splat(0.0); P];
    for (p, b) in b.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *b = unsafe { V::load(at.add(p * V::LANES)) };
    }
    b
}

#[inline(always)]
pub(super) unsafe fn write<V: Vector, const P: usize>(a: [V; P], at: *mut f32, past: bool) {
    for (p, a) in a.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let at = at.add(p * V::LANES);
            if past { a.stream(at) } else { a.store(at) }
        }
    }
}

#[inline(always)]
fn zip<V: Vector, const P: usize>(mut a: [V; P], b: [V; P], f: impl Fn(V, V) -> V) -> [V; P] {
    for p in 0..P {
        a[p] = f(a[p], b[p]);
    }
    a
}

/// One link: the running values after it.
///
/// # Safety
/// As for `Chain`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn step<V: Vector, const P: usize>(
    (act, local): (Act, Option<u8>),
    i: usize,
    mut a: [V; P],
    row: &mut Row<V, P>,
    locals: &mut [[V; P]; MAX_LOCALS],
    from: usize,
    past: bool,
) -> [V; P] {
    // SAFETY: the caller's promise, here and below.
    let operand = |row: &Row<V, P>, locals: &[[V; P]; MAX_LOCALS]| match local {
        Some(k) => locals[k as usize],
        None => unsafe { read::<V, P>(row.at[i].add(from)) },
    };
    let still = [row.still[i]; P];
    match act {
        Act::Near | Act::Next => a,
        Act::Load => operand(row, locals),
        Act::Store | Act::Stream => {
            match local {
                Some(k) => locals[k as usize] = a,
                None => unsafe { write::<V, P>(a, row.at[i].add(from), past && act == Act::Stream) },
            }
            a
        }
        Act::Sum => {
            let sum = &mut row.sums[local.unwrap_or(0) as usize];
            *sum = zip(*sum, a, |s, a| s + a);
            a
        }
        Act::Add => zip(a, operand(row, locals), |a, b| a + b),
        Act::AddStill => zip(a, still, |a, b| a + b),
        Act::Sub => zip(a, operand(row, locals), |a, b| a - b),
        Act::SubStill => zip(a, still, |a, b| a - b),
        Act::From => zip(a, operand(row, locals), |a, b| b - a),
        Act::FromStill => zip(a, still, |a, b| b - a),
        Act::Mul => zip(a, operand(row, locals), |a, b| a * b),
        Act::MulStill => zip(a, still, |a, b| a * b),
        Act::Div => zip(a, operand(row, locals), |a, b| a / b),
        Act::DivStill => zip(a, still, |a, b| a / b),
        Act::Into => zip(a, operand(row, locals), |a, b| b / a),
        Act::IntoStill => zip(a, still, |a, b| b / a),
        Act::Square => zip(a, a, |a, _| a * a),
        Act::Neg => zip(a, a, |a, _| a.neg()),
        Act::Abs => zip(a, a, |a, _| a.abs()),
        Act::Relu => zip(a, a, |a, _| a.relu()),
        Act::Sqrt => zip(a, a, |a, _| a.sqrt()),
        Act::Rsqrt => zip(a, a, |a, _| V::splat(1.0) / a.sqrt()),
        Act::Reciprocal => zip(a, a, |a, _| V::splat(1.0) / a),
        // No closures for large functions: they must be inlined to be compiled for the instruction set.
        Act::Exp => {
            for a in &mut a {
                *a = lane::exp(*a);
            }
            a
        }
        Act::Tanh => {
            for a in &mut a {
                *a = lane::tanh(*a);
            }
            a
        }
        Act::Sigmoid => {
            for a in &mut a {
                *a = lane::sigmoid(*a);
            }
            a
        }
        Act::Sigmoid2 => {
            for a in &mut a {
                *a = lane::sigmoid2(*a);
            }
            a
        }
        Act::Sigmoid2Rest => {
            for a in &mut a {
                *a = lane::sigmoid2(a.neg());
            }
            a
        }
        Act::Erf => {
            for a in &mut a {
                *a = lane::erf(*a);
            }
            a
        }
    }
}

/// A row's sum to its place.
///
/// # Safety
/// As for `Chain`.
#[inline(always)]
unsafe fn fold<V: Vector, const P: usize>(sum: [V; P], link: &Link, views: &[Arg], row: usize) {
    if let Some(v) = link.place.view() {
        let mut lanes = [0.0; LANES];
        // SAFETY: 16 elements, and one a row by the caller.
        unsafe {
            write::<V, P>(sum, lanes.as_mut_ptr(), false);
            *views.get_unchecked(v as usize).ptr.cast::<f32>().cast_mut().add(row) = fold_sum(lanes);
        }
    }
}

macro_rules! number {
    () => {
        None
    };
    ($k:literal) => {
        Some($k)
    };
}

macro_rules! entries {
    ($($(#[doc = $what:literal])+ $name:ident: $($act:ident $(@ $local:literal)?)+;)*) => {
        $(
            $(#[doc = $what])+
            pub(super) struct $name;

            impl Spelled for $name {
                const LINKS: &'static [(Act, Option<u8>)] = &[$((Act::$act, number!($($local)?))),+];

                #[inline(always)]
                unsafe fn row<V: Vector, const P: usize>(links: &[Link], views: &[Arg], row: usize) -> Row<V, P> {
                    let mut to = Row::new();
                    let mut i = 0;
                    $(
                        // SAFETY: the caller's promise; an entry has as many links as `links`.
                        unsafe { place(Act::$act, i, links.get_unchecked(i), views, row, &mut to) };
                        i += 1;
                    )+
                    let _ = i;
                    to
                }

                #[inline(always)]
                unsafe fn unit<V: Vector, const P: usize>(row: &mut Row<V, P>, from: usize, past: bool) {
                    let mut locals = [[V::splat(0.0); P]; MAX_LOCALS];
                    let mut a = [V::splat(0.0); P];
                    let mut i = 0;
                    $(
                        // SAFETY: the caller's promise.
                        a = unsafe {
                            let link = (Act::$act, number!($($local)?));
                            step::<V, P>(link, i, a, row, &mut locals, from, past)
                        };
                        i += 1;
                    )+
                    let _ = (a, i);
                }

                #[inline(always)]
                unsafe fn finish<V: Vector, const P: usize>(
                    of: &Row<V, P>,
                    links: &[Link],
                    views: &[Arg],
                    row: usize,
                    _: usize,
                ) {
                    let mut i = 0;
                    $(
                        let sum: Option<u8> = number!($($local)?);
                        if let (Act::Sum, Some(k)) = (Act::$act, sum) {
                            // SAFETY: the caller's promise.
                            unsafe { fold(of.sums[k as usize], links.get_unchecked(i), views, row) };
                        }
                        i += 1;
                    )+
                    let _ = i;
                }
            }
        )*

        /// The loop of a chain that is listed here.
        pub fn find(isa: Isa, links: &[Link]) -> Option<Chain> {
            let links = &links[reads_ahead(links)..];
            $(
                if same($name::LINKS, links) {
                    return entry::<$name>(isa);
                }
            )*
            None
        }

        #[cfg(test)]
        const ALL: &[(&str, &[(Act, Option<u8>)])] = &[$((stringify!($name), $name::LINKS)),*];
    };
}

entries! {
    /// The sum of the row.
    Total: Load Sum@0;
    /// Layer norm: the sum of the squares of the row less its mean.
    Centered: Load SubStill Square Sum@0;
    /// Layer norm: to zero mean and unit variance, with weight and bias.
    Affine: Load SubStill MulStill Mul Add Stream;
    /// The same without bias.
    Normed: Load SubStill MulStill Mul Stream;
    /// RMS norm.
    Scaled: Load MulStill Mul Stream;
    /// Softmax: powers of the row less its largest, and their sum.
    Powers: Load SubStill Exp Store Sum@0;
    /// Softmax: shares of the sum.
    Shares: Load MulStill Stream;
    /// Softmax backwards: the row times its gradient, summed.
    Dot: Load Mul Sum@0;
    /// Softmax backwards: what is left of the gradient, scaled.
    Balanced: Load SubStill Mul MulStill Stream;
    /// A residual, and the sum of its rows.
    Residual: Load Add Store Sum@0;
    /// Layer norm backwards: sums over rows.
    Weighed: Load SubStill MulStill Store Load Mul Store Mul Sum@0;
    /// Layer norm backwards: the gradient of the row, and what goes to the weight.
    Gradient: Load MulStill Store@0 Load SubStill Sub@0 MulStill Store Load Mul Stream;
    /// What goes back along a residual.
    Joined: Load MulStill Add Stream;
    /// GELU by erf.
    Gelu: Load MulStill Erf AddStill MulStill Mul Stream;
    /// Its slope times the gradient.
    GeluSlope: Load MulStill Erf AddStill MulStill Store@0 Load Square MulStill Exp MulStill Mul Add@0 Mul Stream;
    /// The sum of the squares of the row.
    Squares: Load Square Sum@0;
    /// AdamW.
    AdamWAlone: Load Sub MulStill Add Store Load Square Sub MulStill Add Store Sqrt MulStill AddStill Store@0
        Load MulStill Div@0 Store@0 Load MulStill Sub@0 Store;
    /// AdamW with a scaled gradient.
    AdamW: Load MulStill Store@0 Sub MulStill Add Store Load@0 Square Sub MulStill Add Store Sqrt MulStill AddStill
        Store@0 Load MulStill Div@0 Store@0 Load MulStill Sub@0 Store;
}

/// How many links at the start only ask for memory.
pub fn reads_ahead(links: &[Link]) -> usize {
    links.iter().take_while(|l| matches!(l.act, Act::Near | Act::Next)).count()
}

/// Whether a chain is an entry. An entry says `Stream` where the chain may store either way.
pub(super) fn same(entry: &[(Act, Option<u8>)], links: &[Link]) -> bool {
    entry.len() == links.len()
        && entry.iter().zip(links).all(|((act, local), link)| {
            let number = match link.place {
                Place::Local(k) | Place::Sum(k, _) => Some(k),
                _ => None,
            };
            let either = *act == Act::Stream && link.act == Act::Store;
            (*act == link.act || either) && *local == number
        })
}

fn entry<S: Spelled>(isa: Isa) -> Option<Chain> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2::<S>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512::<S>),
    }
}

/// Whether all that may go past the caches shall, and lies on whole lines.
#[inline(always)]
pub(super) fn streams<S: Spelled>(links: &[Link], views: &[Arg], rows: usize) -> bool {
    let mut any = false;
    for ((act, _), link) in S::LINKS.iter().zip(links) {
        if *act == Act::Stream {
            let Some(v) = link.place.view() else { return false };
            let view = &views[v as usize];
            let whole = view.ptr.addr().is_multiple_of(4 * LANES) && (rows == 1 || view.step % LANES as isize == 0);
            if link.act != Act::Stream || !whole {
                return false;
            }
            any = true;
        }
    }
    any
}

/// # Safety
/// As for `Chain`; rows of whole lines.
#[inline(always)]
unsafe fn run<S: Spelled, V: Vector, const P: usize>(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    let (ahead, links) = links.split_at(reads_ahead(links));
    let past = streams::<S>(links, views, rows);
    let mut asks = [(std::ptr::null(), 0isize); MAX_AHEAD];
    let asked = ahead.len().min(MAX_AHEAD);
    for (ask, link) in asks.iter_mut().zip(ahead) {
        let view = &views[link.place.view().unwrap_or(0) as usize];
        let far = if link.act == Act::Near { NEAR } else { rows * cols };
        *ask = (view.ptr.cast::<f32>().wrapping_add(far), view.step);
    }
    let look = |row: usize, from: usize| {
        for (at, step) in &asks[..asked] {
            ask(at.wrapping_offset(row as isize * step).wrapping_add(from));
        }
    };
    let sums = S::LINKS.iter().any(|l| l.0 == Act::Sum);
    let mut at = 0;
    // SAFETY: rows and elements lie within the views, by the caller.
    unsafe {
        // Four rows side by side where there are sums: the additions of one need not wait for each other. Spelt out,
        // because LLVM keeps an array of them in memory.
        while sums && at + 4 <= rows {
            let mut a = S::row::<V, P>(links, views, at);
            let mut b = S::row::<V, P>(links, views, at + 1);
            let mut c = S::row::<V, P>(links, views, at + 2);
            let mut d = S::row::<V, P>(links, views, at + 3);
            for from in (0..cols).step_by(LANES) {
                S::unit(&mut a, from, past);
                look(at, from);
                S::unit(&mut b, from, past);
                look(at + 1, from);
                S::unit(&mut c, from, past);
                look(at + 2, from);
                S::unit(&mut d, from, past);
                look(at + 3, from);
            }
            S::finish(&a, links, views, at, cols);
            S::finish(&b, links, views, at + 1, cols);
            S::finish(&c, links, views, at + 2, cols);
            S::finish(&d, links, views, at + 3, cols);
            at += 4;
        }
        while at < rows {
            let mut row = S::row::<V, P>(links, views, at);
            for from in (0..cols).step_by(LANES) {
                S::unit(&mut row, from, past);
                look(at, from);
            }
            S::finish(&row, links, views, at, cols);
            at += 1;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<S: Spelled>(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, super::vector::Narrow, 2>(links, views, rows, cols)
        } else {
            chain::avx2(links, views, rows, cols)
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<S: Spelled>(links: &[Link], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, super::vector::Wide, 1>(links, views, rows, cols)
        } else {
            chain::avx512(links, views, rows, cols)
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::memory::Block;

    /// Numbers of everyday size with zeros, infinities and NaN among them: positive for divisors and roots.
    fn fill(block: &Block, n: usize, seed: u32) {
        let mut state = seed.wrapping_mul(747_796_405) | 1;
        for i in 0..n {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = match state >> 24 {
                0 => 0.0,
                1 => f32::NAN,
                2 => f32::INFINITY,
                _ => (state >> 8) as f32 / 4e6 - 1.7,
            };
            // SAFETY: the block has `n` elements.
            unsafe { *block.ptr().cast::<f32>().add(i) = x };
        }
    }

    fn bits(block: &Block, n: usize) -> Vec<u32> {
        // SAFETY: the block has `n` elements.
        let x = unsafe { std::slice::from_raw_parts(block.ptr().cast::<f32>(), n) };
        x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    /// The views after a run, each operand on memory of its own; `shift` elements off whole lines.
    fn after(run: Chain, links: &[Link], rows: usize, cols: usize, shift: usize) -> Vec<Vec<u32>> {
        let n = rows * cols;
        let blocks: Vec<Block> = (0..links.len()).map(|_| Block::new(4 * (n + 32)).expect("memory")).collect();
        blocks.iter().enumerate().for_each(|(k, b)| fill(b, n + 32, k as u32 + 1));
        let view = |(link, block): (&Link, &Block)| {
            let step = if matches!(link.place, Place::Still(_) | Place::Sum(..)) { 1 } else { cols as isize };
            Arg { ptr: block.ptr().wrapping_add(4 * shift), step }
        };
        let views: Vec<Arg> = links[reads_ahead(links)..].iter().zip(&blocks).map(view).collect();
        // SAFETY: every view has its rows and columns.
        unsafe { run(links, &views, rows, cols) };
        blocks.iter().map(|b| bits(b, n + 32)).collect()
    }

    #[test]
    fn entries_give_the_bits_of_the_interpreter() {
        for (name, entry) in ALL {
            assert!(entry.len() <= MAX, "{name} has too many links");
            for (stream, ahead) in [(false, false), (true, true)] {
                let links: Vec<Link> = entry
                    .iter()
                    .enumerate()
                    .map(|(i, &(act, local))| {
                        let v = i as u16;
                        let place = match (act, local) {
                            (Act::Sum, k) => Place::Sum(k.expect("a sum has a number"), v),
                            (_, Some(k)) => Place::Local(k),
                            (act, _) if holds_still(act) => Place::Still(v),
                            _ => Place::View(v),
                        };
                        let act = if act == Act::Stream && !stream { Act::Store } else { act };
                        Link { act, place }
                    })
                    .collect();
                let asks =
                    [Link { act: Act::Next, place: Place::View(0) }, Link { act: Act::Near, place: Place::View(0) }];
                let links: Vec<Link> = if ahead { asks.into_iter().chain(links).collect() } else { links };
                let other: Vec<Isa> =
                    if Isa::detect() == Isa::Avx512 { vec![Isa::Avx2, Isa::Avx512] } else { vec![Isa::detect()] };
                for isa in other.into_iter().filter(|i| *i != Isa::Baseline) {
                    let spelled = find(isa, &links).expect("it is listed");
                    for (rows, cols) in [(1, 5), (1, 64), (3, 128), (4, 100), (5, 16), (9, 131), (8, 7), (1, 1003)] {
                        for shift in [0, 1] {
                            let want = after(chain::chain(isa).expect("a vector class"), &links, rows, cols, shift);
                            let got = after(spelled, &links, rows, cols, shift);
                            assert!(got == want, "{name} on {isa:?}, {rows} x {cols}, stream {stream}, shift {shift}");
                        }
                    }
                }
            }
        }
    }
}
