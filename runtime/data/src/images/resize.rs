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

fn round(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// Scales and writes channel by channel: `out` is (3, H, W) of the requested part. `rows` is scratch.
pub fn resize(picture: Picture, across: &Side, down: &Side, rows: &mut Vec<u8>, out: &mut [u8]) {
    let (w, h) = (across.wanted.len, down.wanted.len);
    assert!(out.len() == 3 * w * h && w * h > 0, "this is a bug: {} bytes for {w} x {h} pixels", out.len());
    let (columns, lines) = (Weights::of(across), Weights::of(down));
    let needed = lines.sources();

    // Along rows. A row of the result stores its channels consecutively, so the next pass is a single loop.
    rows.clear();
    rows.resize(needed.len * 3 * w, 0);
    for (y, row) in rows.chunks_exact_mut(3 * w).enumerate() {
        let line = &picture.rgb[(needed.start + y) * 3 * picture.width..][..3 * picture.width];
        let (red, rest) = row.split_at_mut(w);
        let (green, blue) = rest.split_at_mut(w);
        for x in 0..w {
            let (start, weights) = columns.at(x);
            let (mut r, mut g, mut b) = (HALF, HALF, HALF);
            for (k, p) in weights.iter().zip(line[3 * start..].chunks_exact(3)) {
                r += k * i32::from(p[0]);
                g += k * i32::from(p[1]);
                b += k * i32::from(p[2]);
            }
            (red[x], green[x], blue[x]) = (round(r), round(g), round(b));
        }
    }

    let mut sums = vec![0i32; 3 * w];
    for y in 0..h {
        let (start, weights) = lines.at(y);
        sums.fill(HALF);
        for (k, row) in weights.iter().zip(rows[(start - needed.start) * 3 * w..].chunks_exact(3 * w)) {
            for (sum, p) in sums.iter_mut().zip(row) {
                *sum += k * i32::from(*p);
            }
        }
        for (c, sums) in sums.chunks_exact(w).enumerate() {
            for (to, sum) in out[(c * h + y) * w..][..w].iter_mut().zip(sums) {
                *to = round(*sum);
            }
        }
    }
}
