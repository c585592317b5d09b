//! Generates uniform numbers with Philox 4x32-10, vectorised over counters.

use super::{Arg, Body, Isa, Kernel, pick};
use perilune_core::philox;
use std::slice;

/// The operand of `uniform`.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub seed: u64,
    pub counter: u64,
    /// The index of the first output element.
    pub first: u64,
}

/// Groups of four numbers generated together.
const WIDTH: usize = 16;

struct Uniform;

#[inline(always)]
fn to_unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Generates groups `first..first + WIDTH`.
#[inline(always)]
fn draw(stream: &Stream, first: u64, out: &mut [f32; 4 * WIDTH]) {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut c0, mut c1) = ([0u32; WIDTH], [0u32; WIDTH]);
    let (mut c2, mut c3) = ([stream.counter as u32; WIDTH], [(stream.counter >> 32) as u32; WIDTH]);
    for i in 0..WIDTH {
        let g = first.wrapping_add(i as u64);
        (c0[i], c1[i]) = (g as u32, (g >> 32) as u32);
    }
    let (mut k0, mut k1) = (stream.seed as u32, (stream.seed >> 32) as u32);
    for round in 0..10 {
        if round > 0 {
            (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
        }
        for i in 0..WIDTH {
            let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c0[i]);
            let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c2[i]);
            (c0[i], c2[i]) = ((p1 >> 32) as u32 ^ c1[i] ^ k0, (p0 >> 32) as u32 ^ c3[i] ^ k1);
            (c1[i], c3[i]) = (p1 as u32, p0 as u32);
        }
    }
    for i in 0..WIDTH {
        out[4 * i] = to_unit(c0[i]);
        out[4 * i + 1] = to_unit(c1[i]);
        out[4 * i + 2] = to_unit(c2[i]);
        out[4 * i + 3] = to_unit(c3[i]);
    }
}

impl Body for Uniform {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, _: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`); the operand is one `Stream`.
        let (out, stream) = unsafe { (slice::from_raw_parts_mut(out.cast::<f32>(), cols), *(*args).row::<Stream>(0)) };
        let mut at = 0;
        while at < cols && !(stream.first + at as u64).is_multiple_of(4) {
            out[at] = philox::uniform(stream.seed, stream.counter, stream.first + at as u64);
            at += 1;
        }
        let mut buffer = [0f32; 4 * WIDTH];
        while at < cols {
            draw(&stream, (stream.first + at as u64) / 4, &mut buffer);
            let n = (cols - at).min(buffer.len());
            out[at..at + n].copy_from_slice(&buffer[..n]);
            at += n;
        }
    }
}

pub fn uniform(isa: Isa) -> Kernel {
    pick::<Uniform>(isa)
}
