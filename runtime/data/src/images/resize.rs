//! Scales images bilinearly with antialias, to the bits of PIL's `Image.resize(…, BILINEAR)`, which torchvision uses for PIL
//! images.
//!
//! A triangle filter that widens as the image shrinks, one pass along rows and one along columns, with a rounding to u8 between
//! them; weights are whole multiples of 2^-22 (Pillow, src/libImaging/Resample.c). Only the requested part of the result is
//! computed, from the rows that it needs.

/// Fractional bits of a weight: 255 times a sum of weights near 1 fits an i32.
const BITS: u32 = 22;

/// Decoded pixels: RGB, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    pub width: usize,
    pub height: usize,
    pub rgb: &'a [u8],
}

/// A range of pixels along one side, half-open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    pub start: usize,
    pub len: usize,
}

/// The scaling of one side: `source` pixels become `size`, of which `wanted` are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Side {
    pub source: Span,
    pub size: usize,
    pub wanted: Span,
}

/// The weights of one side: for each requested pixel, the start of its sources and their weights.
struct Weights {
    starts: Vec<usize>,
    /// The end of each pixel's range in `values`.
    ends: Vec<usize>,
    values: Vec<i32>,
}

impl Weights {
    /// Reads only pixels in `side.source`: a crop is cut out before it is scaled.
    fn of(side: &Side) -> Weights {
        let scale = side.source.len as f64 / side.size as f64;
        let support = scale.max(1.0);
        let mut out = Weights { starts: Vec::new(), ends: Vec::new(), values: Vec::new() };
        let mut shares = Vec::new();
        for x in side.wanted.start..side.wanted.start + side.wanted.len {
            let center = (x as f64 + 0.5) * scale;
            // Casts saturate at 0, like PIL's explicit test.
            let start = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(side.source.len);
            shares.clear();
            shares.extend((start..end).map(|at| {
                let far = ((at as f64 - center + 0.5) * (1.0 / support)).abs();
                if far < 1.0 { 1.0 - far } else { 0.0 }
            }));
            let total: f64 = shares.iter().sum();
            out.starts.push(side.source.start + start);
            out.values.extend(shares.iter().map(|w| (0.5 + w / total * f64::from(1u32 << BITS)) as i32));
            out.ends.push(out.values.len());
        }
        out
    }

    /// Returns the first source and the weights of the requested pixel `i`.
    fn at(&self, i: usize) -> (usize, &[i32]) {
        let from = if i == 0 { 0 } else { self.ends[i - 1] };
        (self.starts[i], &self.values[from..self.ends[i]])
    }

    /// Returns the range of sources of all pixels.
    fn sources(&self) -> Span {
        let (last, weights) = self.at(self.starts.len() - 1);
        Span { start: self.starts[0], len: last + weights.len() - self.starts[0] }
    }
}

const HALF: i32 = 1 << (BITS - 1);
/// Values of a row that are summed together in the pass along columns.
const BLOCK: usize = 16;

/// Rounds a sum of weighted bytes.
#[inline(always)]
fn rounded(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// Scales and writes channel by channel: `out` is (3, H, W) of the requested part. Integer sums have the same bits with every
/// instruction set.
pub fn resize(picture: Picture, across: &Side, down: &Side, scratch: &mut Rows, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions that the function is compiled for.
        #[allow(unsafe_code)]
        return unsafe { avx2(picture, across, down, scratch, out) };
    }
    passes(picture, across, down, scratch, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(picture: Picture, across: &Side, down: &Side, scratch: &mut Rows, out: &mut [u8]) {
    passes(picture, across, down, scratch, out);
}

/// Buffers of the passes.
#[derive(Default)]
pub struct Rows {
    /// One row of the picture, and the sums of its pixels.
    source: Vec<i32>,
    sums: Vec<i32>,
    /// The rows that the pass along columns reads, pixel by pixel.
    scaled: Vec<u8>,
    /// One row of the result.
    row: Vec<u8>,
}

/// The weights of one side, `taps` for each requested pixel: those beyond its sources are 0.
struct Taps {
    taps: usize,
    /// The first source of each pixel, counted from that of all.
    starts: Vec<usize>,
    weights: Vec<i32>,
}

impl Taps {
    fn of(weights: &Weights, first: usize) -> Taps {
        let pixels = (0..weights.starts.len()).map(|x| weights.at(x));
        // A few numbers of taps have code of their own.
        let taps = pixels.clone().map(|(_, own)| own.len()).max().unwrap_or(0).max(3);
        let mut out = Taps { taps, starts: Vec::new(), weights: Vec::new() };
        for (start, own) in pixels {
            out.starts.push(start - first);
            out.weights.extend_from_slice(own);
            out.weights.resize(out.starts.len() * taps, 0);
        }
        out
    }
}

/// Sums the sources of each pixel of a row. A pixel is four numbers, of which the last belongs to the next one, so that one
/// multiplication has all channels.
#[inline(always)]
fn along_row(taps: usize, columns: &Taps, source: &[i32], sums: &mut [i32]) {
    for (x, (start, weights)) in columns.starts.iter().zip(columns.weights.chunks_exact(taps)).enumerate() {
        let pixels = &source[3 * start..][..3 * taps + 1];
        let mut sum = [HALF; 4];
        for (t, weight) in weights.iter().enumerate() {
            for (lane, sum) in sum.iter_mut().enumerate() {
                *sum = sum.wrapping_add(weight.wrapping_mul(pixels[3 * t + lane]));
            }
        }
        sums[3 * x..][..4].copy_from_slice(&sum);
    }
}

#[inline(always)]
fn passes(picture: Picture, across: &Side, down: &Side, scratch: &mut Rows, out: &mut [u8]) {
    let (w, h) = (across.wanted.len, down.wanted.len);
    assert!(out.len() == 3 * w * h && w * h > 0, "this is a bug: {} bytes for {w} x {h} pixels", out.len());
    let (columns, lines) = (Weights::of(across), Weights::of(down));
    let (needed, within) = (lines.sources(), columns.sources());
    let columns = Taps::of(&columns, within.start);
    let Rows { source, sums, scaled, row } = scratch;

    source.clear();
    source.resize(3 * (within.len + columns.taps) + 1, 0);
    sums.resize(3 * w + 1, 0);
    scaled.resize(needed.len * 3 * w, 0);
    for (y, to) in scaled.chunks_exact_mut(3 * w).enumerate() {
        let from = &picture.rgb[3 * ((needed.start + y) * picture.width + within.start)..][..3 * within.len];
        source.iter_mut().zip(from).for_each(|(wide, byte)| *wide = i32::from(*byte));
        match columns.taps {
            3 => along_row(3, &columns, source, sums),
            4 => along_row(4, &columns, source, sums),
            5 => along_row(5, &columns, source, sums),
            6 => along_row(6, &columns, source, sums),
            taps => along_row(taps, &columns, source, sums),
        }
        to.iter_mut().zip(&sums[..]).for_each(|(to, sum)| *to = rounded(*sum));
    }

    // Along columns: the sums of a block stay in registers.
    row.resize(3 * w, 0);
    for y in 0..h {
        let (start, weights) = lines.at(y);
        let rows = scaled[(start - needed.start) * 3 * w..].chunks_exact(3 * w);
        for (b, to) in row.chunks_mut(BLOCK).enumerate() {
            let mut sums = [HALF; BLOCK];
            for (weight, row) in weights.iter().zip(rows.clone()) {
                let values = &row[b * BLOCK..][..to.len()];
                match values.first_chunk::<BLOCK>() {
                    Some(values) => weigh(*weight, values, &mut sums),
                    None => weigh(*weight, values, &mut sums),
                }
            }
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to = rounded(sum));
        }
        for (c, to) in out.chunks_exact_mut(h * w).enumerate() {
            let pixels = row.as_chunks::<3>().0;
            to[y * w..][..w].iter_mut().zip(pixels).for_each(|(to, pixel)| *to = pixel[c]);
        }
    }
}

/// Adds the weighted values to the sums.
#[inline(always)]
fn weigh(weight: i32, values: &[u8], sums: &mut [i32; BLOCK]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = sum.wrapping_add(weight.wrapping_mul(i32::from(*value)));
    }
}
