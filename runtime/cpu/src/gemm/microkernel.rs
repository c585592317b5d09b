//! Implements the GEMM microkernels: each keeps a tile of rows by up to four vectors of columns in registers while it
//! loops over K.
//!
//! The left operand is read by broadcasts, one element per row and step; the right one by vectors, from contiguous
//! rows. Each element of a tile is one chain of fused multiply-adds in the order of K , starting from zero, so bits
//! depend neither on the tile's size nor on the instruction set.

use crate::loops::simd::Vector;
use crate::loops::{Isa, prefetch, prefetch_l2, prefetch_write};

/// The arguments of a microkernel, which runs `k` steps and stores `n` columns.
pub struct TileArgs {
    pub k: usize,
    pub n: usize,
    /// Left operand: first element, row stride, step stride.
    pub a: *const f32,
    pub a_row: isize,
    pub a_step: isize,
    /// Right operand: first element, step stride. All vectors are read whole.
    pub b: *const f32,
    pub b_step: isize,
    /// Result: first element, row stride.
    pub c: *mut f32,
    pub c_row: usize,
    /// Whether to add to the result instead of overwriting it.
    pub add: bool,
    /// Partial sums, in whole vectors: first element, row stride.
    pub partial: *mut f32,
    pub partial_row: usize,
    /// Whether the sums start from the partial sums, and whether they are stored as partial sums instead of the result.
    pub loads_partial: bool,
    pub stores_partial: bool,
    /// Lines to prefetch, one in each step.
    pub next: PrefetchLines,
}

/// Queues the prefetches of the next panel, in bursts of a few cache lines spread evenly over tiles and runs. A
/// processor tracks few outstanding lines and stalls on more.
#[derive(Clone, Copy)]
pub struct PrefetchQueue {
    /// The first line of the next burst, and the number of bursts left in its row, including that one.
    pub at: *const f32,
    pub left: usize,
    /// Row stride, and number of bursts in a row.
    pub row: isize,
    pub per_row: usize,
    /// Number of bursts, and number of runs to spread them over.
    pub count: usize,
    pub runs: usize,
    /// Accumulator of the spreading: a burst is issued each time it reaches `runs`.
    pub due: usize,
}

/// Elements of a cache line.
const LINE: usize = 16;
/// Lines and elements of a burst.
const BURST: usize = 2;
pub const BURST_ELEMENTS: usize = BURST * LINE;

impl PrefetchQueue {
    /// Issues the prefetches of one run.
    #[inline(always)]
    fn prefetch(&mut self) {
        self.due += self.count;
        while self.due >= self.runs {
            self.due -= self.runs;
            for k in 0..BURST {
                prefetch_l2(self.at.wrapping_add(k * LINE));
            }
            self.at = self.at.wrapping_add(BURST_ELEMENTS);
            self.left -= 1;
            if self.left == 0 {
                self.at = self.at.wrapping_sub(self.per_row * BURST_ELEMENTS).wrapping_offset(self.row);
                self.left = self.per_row;
            }
        }
    }
}

/// Cache lines to prefetch, in rows of [`RUN`].
#[derive(Clone, Copy)]
pub struct PrefetchLines {
    pub at: *const f32,
    /// Line stride and row stride.
    pub line: isize,
    pub row: isize,
}

/// Steps of a run; each run prefetches one row of lines.
pub const RUN: usize = 16;

/// # Safety
/// The operands must be valid for the rows and vectors of the tile, and the machine must have the instruction set.
pub type Microkernel = unsafe fn(&TileArgs, &mut PrefetchQueue);

/// The microkernels of an instruction set.
pub struct Microkernels {
    pub lanes: usize,
    /// Indexed by vectors, then by rows, both from one up to what the registers hold.
    pub by_size: &'static [&'static [Microkernel]],
    /// Copies contiguous rows from a row stride of `step` elements to a row stride of `width`.
    pub rows: unsafe fn(from: *const f32, step: isize, size: (usize, usize), to: *mut f32, width: usize),
    /// Transposes up to 16 rows of 16 elements: rows `row` elements apart become columns `step` apart.
    pub transpose: Option<unsafe fn(from: *const f32, row: isize, rows: usize, to: *mut f32, step: usize)>,
}

impl Microkernels {
    /// Returns the largest number of rows of a tile with that many vectors.
    pub fn tallest(&self, vectors: usize) -> usize {
        self.by_size[vectors - 1].len()
    }
}

/// The microkernels of an instruction set; `None` if it lacks vectors or fused multiply-adds.
pub fn microkernels(isa: Isa) -> Option<&'static Microkernels> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(&x86::AVX2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(&x86::AVX512),
    }
}

#[inline(always)]
unsafe fn tile<V: Vector, const M: usize, const N: usize>(args: &TileArgs, prefetches: &mut PrefetchQueue) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        let (mut a, mut b) = (args.a, args.b);
        let whole = args.n == N * V::LANES;
        if args.loads_partial {
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = V::load(args.partial.add(i * args.partial_row + j * V::LANES));
                }
            }
        }
        // Rows of the result to prefetch before the store, during two runs.
        let mut results = if args.stores_partial { M } else { 0 };
        let mut steps = args.k;
        let mut rows = args.next.at;
        let mut ahead = *prefetches;
        while steps > 0 {
            let run = RUN.min(steps);
            ahead.prefetch();
            if results < M {
                for i in 0..M.div_ceil(2) {
                    let row = args.c.wrapping_add((results + i).min(M - 1) * args.c_row);
                    for line in (0..N * V::LANES).step_by(LINE) {
                        prefetch_write(row.wrapping_add(line));
                    }
                }
                results += M.div_ceil(2);
            }
            let mut next = rows;
            for _ in 0..run {
                prefetch(next);
                next = next.wrapping_offset(args.next.line);
                let mut y = [V::splat(0.0); N];
                for j in 0..N {
                    y[j] = V::load(b.add(j * V::LANES));
                }
                for i in 0..M {
                    let x = V::splat(*a.offset(i as isize * args.a_row));
                    for j in 0..N {
                        sums[i][j] = x.mul_add(y[j], sums[i][j]);
                    }
                }
                a = a.wrapping_offset(args.a_step);
                b = b.wrapping_offset(args.b_step);
            }
            rows = rows.wrapping_offset(args.next.row);
            steps -= run;
        }
        *prefetches = ahead;
        if args.stores_partial {
            for i in 0..M {
                for j in 0..N {
                    sums[i][j].store(args.partial.add(i * args.partial_row + j * V::LANES));
                }
            }
            return;
        }
        for i in 0..M {
            for j in 0..N {
                let c = args.c.add(i * args.c_row + j * V::LANES);
                if whole {
                    let old = if args.add { V::load(c) + sums[i][j] } else { sums[i][j] };
                    old.store(c);
                } else if j * V::LANES < args.n {
                    let n = V::LANES.min(args.n - j * V::LANES);
                    let old = if args.add { V::load_partial(c, n) + sums[i][j] } else { sums[i][j] };
                    old.store_partial(c, n);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn rows<V: Vector>(from: *const f32, step: isize, (len, cols): (usize, usize), to: *mut f32, width: usize) {
    let whole = cols / V::LANES * V::LANES;
    for p in 0..len {
        let from = from.wrapping_offset(p as isize * step);
        // SAFETY: the caller guarantees `cols` elements in each row.
        unsafe {
            let to = to.add(p * width);
            for j in (0..whole).step_by(V::LANES) {
                V::load(from.add(j)).store(to.add(j));
            }
            if whole < cols {
                V::load_partial(from.add(whole), cols - whole).store_partial(to.add(whole), cols - whole);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Microkernels, PrefetchQueue, TileArgs, rows, tile};
    use crate::loops::simd::{F32x8, F32x16};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const M: usize, const N: usize>(args: &TileArgs, prefetches: &mut PrefetchQueue) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<F32x8, M, N>(args, prefetches) }
    }

    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512<const M: usize, const N: usize>(args: &TileArgs, prefetches: &mut PrefetchQueue) {
        // SAFETY: guaranteed by the caller.
        unsafe { tile::<F32x16, M, N>(args, prefetches) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_rows(from: *const f32, step: isize, size: (usize, usize), to: *mut f32, width: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { rows::<F32x8>(from, step, size, to, width) }
    }

    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512_rows(from: *const f32, step: isize, size: (usize, usize), to: *mut f32, width: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { rows::<F32x16>(from, step, size, to, width) }
    }

    macro_rules! by_size {
        ($($f:ident $n:literal: $($m:literal)*;)*) => { &[$(&[$($f::<$m, $n>),*]),*] };
    }

    // A step of `m` rows by `n` vectors needs `m + n` loads and `m n` multiply-adds. Loads compete with a second
    // hardware thread for issue slots, so these tile sizes minimise loads.
    pub static AVX2: Microkernels = Microkernels {
        lanes: 8,
        by_size: by_size! { avx2 1: 1 2 3 4 5 6; avx2 2: 1 2 3 4 5 6; },
        rows: avx2_rows,
        transpose: None,
    };
    pub static AVX512: Microkernels = Microkernels {
        lanes: 16,
        by_size: by_size! {
            avx512 1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14;
            avx512 2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14;
            avx512 3: 1 2 3 4 5 6 7 8;
            avx512 4: 1 2 3 4 5 6;
        },
        rows: avx512_rows,
        transpose: Some(transpose),
    };

    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose(from: *const f32, row: isize, rows: usize, to: *mut f32, step: usize) {
        // Missing rows alias the last row and are not stored.
        let at = |i: usize| from.wrapping_offset(i.min(rows - 1) as isize * row);
        // SAFETY: the caller guarantees 16 readable elements in each of `rows` rows, and `rows` writable ones in each
        // of 16 columns.
        let mut r: [__m512; 16] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(at(i)) });
        let mask = (0xffffu32 >> (16 - rows)) as __mmask16;
        let mut t = r;
        let (pd, ps) = (|x| _mm512_castps_pd(x), |x| _mm512_castpd_ps(x));
        // Exchanges pairs, then groups of four, then quarters of vectors.
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        for i in (0..16).step_by(4) {
            r[i] = ps(_mm512_unpacklo_pd(pd(t[i]), pd(t[i + 2])));
            r[i + 1] = ps(_mm512_unpackhi_pd(pd(t[i]), pd(t[i + 2])));
            r[i + 2] = ps(_mm512_unpacklo_pd(pd(t[i + 1]), pd(t[i + 3])));
            r[i + 3] = ps(_mm512_unpackhi_pd(pd(t[i + 1]), pd(t[i + 3])));
        }
        for h in [0, 8] {
            for i in h..h + 4 {
                t[i] = _mm512_shuffle_f32x4::<0x88>(r[i], r[i + 4]);
                t[i + 4] = _mm512_shuffle_f32x4::<0xdd>(r[i], r[i + 4]);
            }
        }
        for i in 0..8 {
            r[i] = _mm512_shuffle_f32x4::<0x88>(t[i], t[i + 8]);
            r[i + 8] = _mm512_shuffle_f32x4::<0xdd>(t[i], t[i + 8]);
        }
        for (i, v) in r.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to.add(i * step), mask, v) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn transposes_sixteen_by_sixteen() {
        if Isa::detect() != Isa::Avx512 {
            return;
        }
        let from: Vec<f32> = (0..16 * 20).map(|i| i as f32).collect();
        let mut to = vec![0f32; 16 * 32];
        for rows in 1..=16 {
            to.fill(-1.0);
            // SAFETY: 16 rows of 20 elements, to 16 rows of 32; the instruction set was detected.
            unsafe { x86::transpose(from.as_ptr(), 20, rows, to.as_mut_ptr(), 32) };
            for (i, row) in to.chunks(32).enumerate() {
                for (j, &v) in row.iter().enumerate() {
                    assert_eq!(v, if j < rows { from[j * 20 + i] } else { -1.0 }, "row {i}, column {j} of {rows}");
                }
            }
        }
    }
}
