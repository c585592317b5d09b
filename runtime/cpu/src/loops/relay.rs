//! Three loops over rows as one loop: the last of them on one row, the one before it on the next row, the first on the row
//! behind that.
//!
//! Where rows are normalised, a first loop reads a row from memory, a second one reduces it again, a third one writes the
//! result past the caches. One after the other, memory is only read for a while, then neither read nor written, then
//! only written, and a processor keeps few stores in flight; in step, it is read and written all the time.

use super::chain::Link;
use super::reduce::fold_largest;
use super::spelled::{self, Row, Spelled};
use super::vector::Vector;
use super::{Arg, Isa, ask};
use perilune_plan::ir::LANES;

/// A loop with the rows that it is at.
#[derive(Clone, Copy)]
pub struct Runner<'a> {
    pub links: &'a [Link],
    pub views: &'a [Arg],
}

/// `rows` rows of `cols` elements, first loop first; `asks` are one or two views of the first one's, whose next rows are
/// asked for ahead.
pub type Relay = unsafe fn(runners: [Runner; 3], asks: &[u16], rows: usize, cols: usize);

/// What the first loop does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum First {
    Chain,
    /// The largest of a row: links as of a sum.
    Largest,
}

/// The largest of the row, with marks for NaN as in `reduce`.
struct Largest;

impl Spelled for Largest {
    const LINKS: &'static [(super::chain::Act, Option<u8>)] = &[];

    #[inline(always)]
    unsafe fn row<V: Vector, const P: usize>(links: &[Link], views: &[Arg], row: usize) -> Row<V, P> {
        // SAFETY: the caller's promise, here and below.
        let mut to = unsafe { spelled::Total::row::<V, P>(links, views, row) };
        to.sums[0] = [V::splat(f32::NEG_INFINITY); P];
        to
    }

    #[inline(always)]
    unsafe fn unit<V: Vector, const P: usize>(row: &mut Row<V, P>, from: usize, _: bool) {
        // SAFETY: as above.
        let x = unsafe { spelled::read::<V, P>(row.at[0].add(from)) };
        for p in 0..P {
            row.sums[0][p] = x[p].at_least(row.sums[0][p]);
            row.sums[1][p] = x[p].abs().larger_bits(row.sums[1][p]);
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector, const P: usize>(
        of: &Row<V, P>,
        links: &[Link],
        views: &[Arg],
        row: usize,
        cols: usize,
    ) {
        let (mut lanes, mut marks) = ([0.0; LANES], [0.0; LANES]);
        // SAFETY: as above; 16 lanes each.
        unsafe {
            spelled::write::<V, P>(of.sums[0], lanes.as_mut_ptr(), false);
            spelled::write::<V, P>(of.sums[1], marks.as_mut_ptr(), false);
            if let Some(v) = links[1].place.view() {
                let x = std::slice::from_raw_parts(of.at[0], cols);
                let out = views.get_unchecked(v as usize).ptr.cast::<f32>().cast_mut();
                *out.add(row) = fold_largest(lanes, marks.map(f32::to_bits), x);
            }
        }
    }
}

macro_rules! relays {
    ($($(#[doc = $what:literal])+ $first:ident $second:ident $third:ident;)*) => {
        /// The loop for three chains, if it is listed here; rows must be whole lanes.
        pub fn find(isa: Isa, first: First, links: [&[Link]; 3]) -> Option<Relay> {
            $(
                let begins = match first {
                    First::Chain => spelled::same($first::LINKS, links[0]),
                    First::Largest => $first::LINKS.is_empty(),
                };
                if begins && spelled::same($second::LINKS, links[1]) && spelled::same($third::LINKS, links[2]) {
                    return entry::<$first, $second, $third>(isa);
                }
            )*
            None
        }
    };
}

use spelled::{Affine, Centered, Normed, Powers, Shares, Total};

relays! {
    /// Layer norm.
    Total Centered Affine;
    /// Layer norm without bias.
    Total Centered Normed;
    /// Softmax.
    Largest Powers Shares;
}

fn entry<A: Spelled, B: Spelled, C: Spelled>(isa: Isa) -> Option<Relay> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2::<A, B, C>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512::<A, B, C>),
    }
}

/// # Safety
/// As for `Chain`, of each of the three; rows of whole lanes.
#[inline(always)]
unsafe fn run<A: Spelled, B: Spelled, C: Spelled, V: Vector, const P: usize>(
    [first, second, third]: [Runner; 3],
    asks: &[u16],
    rows: usize,
    cols: usize,
) {
    let past = spelled::streams::<C>(third.links, third.views, rows);
    let look = |k: usize| {
        let view = &first.views[asks[k.min(asks.len() - 1)] as usize];
        (view.ptr.cast::<f32>().wrapping_add(rows * cols), view.step)
    };
    let (one, two) = (look(0), look(1));
    // SAFETY: rows and elements lie within the views, by the caller.
    unsafe {
        for r in 0..rows {
            let mut a = A::row::<V, P>(first.links, first.views, r);
            let mut b = B::row::<V, P>(second.links, second.views, r);
            let mut c = C::row::<V, P>(third.links, third.views, r);
            let one = one.0.wrapping_offset(r as isize * one.1);
            let two = two.0.wrapping_offset(r as isize * two.1);
            for from in (0..cols).step_by(LANES) {
                C::unit(&mut c, from, past);
                B::unit(&mut b, from, false);
                A::unit(&mut a, from, false);
                ask(one.wrapping_add(from));
                ask(two.wrapping_add(from));
            }
            A::finish(&a, first.links, first.views, r, cols);
            B::finish(&b, second.links, second.views, r, cols);
            C::finish(&c, third.links, third.views, r, cols);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<A: Spelled, B: Spelled, C: Spelled>(runners: [Runner; 3], asks: &[u16], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<A, B, C, super::vector::Narrow, 2>(runners, asks, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<A: Spelled, B: Spelled, C: Spelled>(runners: [Runner; 3], asks: &[u16], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe { run::<A, B, C, super::vector::Wide, 1>(runners, asks, rows, cols) }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::loops::chain::{self, Act, Place};
    use crate::loops::reduce::reduction;
    use crate::memory::Block;
    use perilune_core::DType;
    use perilune_core::ops::ReduceFn;

    /// Views of blocks with numbers of everyday size, and some rows with infinities and NaN.
    fn views(blocks: &[Block], n: usize, cols: usize) -> Vec<Arg> {
        for (k, block) in blocks.iter().enumerate() {
            let mut state = (k as u32 + 1).wrapping_mul(747_796_405) | 1;
            for i in 0..n {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let x = match state >> 20 {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    2 => -0.0,
                    _ => (state >> 8) as f32 / 4e6 - 1.7,
                };
                // SAFETY: the block has `n` elements.
                unsafe { *block.ptr().cast::<f32>().add(i) = x };
            }
        }
        blocks.iter().map(|b| Arg { ptr: b.ptr(), step: cols as isize }).collect()
    }

    fn bits(blocks: &[Block], n: usize) -> Vec<u32> {
        let all = blocks.iter().flat_map(|b| {
            // SAFETY: the block has `n` elements.
            let x = unsafe { std::slice::from_raw_parts(b.ptr().cast::<f32>(), n) };
            x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() })
        });
        all.collect()
    }

    /// The three loops of a relay, each on blocks of its own, against the same loops one by one.
    #[test]
    fn a_relay_has_the_bits_of_its_loops() {
        let link = |(k, &(act, local)): (usize, &(Act, Option<u8>))| {
            let v = k as u16;
            let place = match (act, local) {
                (Act::Sum, k) => Place::Sum(k.expect("a sum has a number"), v),
                (_, Some(k)) => Place::Local(k),
                (act, _) if spelled::holds_still(act) => Place::Still(v),
                _ => Place::View(v),
            };
            Link { act, place }
        };
        let links = |entry: &[(Act, Option<u8>)]| entry.iter().enumerate().map(link).collect::<Vec<_>>();
        let cases = [
            (First::Chain, Centered::LINKS, Affine::LINKS),
            (First::Chain, Centered::LINKS, Normed::LINKS),
            (First::Largest, Powers::LINKS, Shares::LINKS),
        ];
        let isas = if Isa::detect() == Isa::Avx512 { vec![Isa::Avx2, Isa::Avx512] } else { vec![Isa::detect()] };
        for isa in isas.into_iter().filter(|i| *i != Isa::Baseline) {
            for (what, second, third) in cases {
                let links = [links(Total::LINKS), links(second), links(third)];
                let relay = find(isa, what, [&links[0], &links[1], &links[2]]).expect("it is listed");
                for (rows, cols) in [(1, 16), (2, 768), (3, 1024), (5, 48)] {
                    let n = rows * cols;
                    let blocks =
                        || links.each_ref().map(|l| (0..l.len()).map(|_| Block::new(4 * n).unwrap()).collect());
                    let (one, all): ([Vec<Block>; 3], [Vec<Block>; 3]) = (blocks(), blocks());
                    let view = |b: &[Vec<Block>; 3]| b.each_ref().map(|b| views(b, n, cols));
                    let (v, w) = (view(&one), view(&all));
                    let runner = |k: usize| Runner { links: &links[k], views: &w[k] };
                    // SAFETY: every view has its rows and columns.
                    unsafe {
                        match what {
                            First::Largest => {
                                let largest = reduction(ReduceFn::Max, DType::F32, isa).rows;
                                largest(v[0][1].ptr.cast_mut(), &v[0][0], rows, cols);
                            }
                            First::Chain => chain::chain(isa).expect("vectors")(&links[0], &v[0], rows, cols),
                        }
                        for k in 1..3 {
                            chain::chain(isa).expect("vectors")(&links[k], &v[k], rows, cols);
                        }
                        relay([runner(0), runner(1), runner(2)], &[0], rows, cols);
                    }
                    chain::fence();
                    for k in 0..3 {
                        assert!(
                            bits(&one[k], n) == bits(&all[k], n),
                            "loop {k} of {what:?} on {isa:?}, {rows} x {cols}"
                        );
                    }
                }
            }
        }
    }
}
