//! Renders a scene as PNG, two pixels a point, on white. Lines are antialiased by their distance from the centre of a pixel;
//! text uses the characters of `font.rs`.

use super::font;
use super::scene::{Anchor, Ink, PALETTE, Scene, Shape};
use perilune_core::{DType, HostTensor, Shape as Dims};

/// Pixels a point.
const SCALE: f64 = 2.0;

struct Raster {
    w: usize,
    h: usize,
    rgb: Vec<u8>,
}

impl Raster {
    fn mix(&mut self, x: usize, y: usize, (r, g, b): (u8, u8, u8), share: f64) {
        if x >= self.w || y >= self.h || share <= 0.0 {
            return;
        }
        let at = (y * self.w + x) * 3;
        for (old, new) in self.rgb[at..at + 3].iter_mut().zip([r, g, b]) {
            *old = (f64::from(*old) + (f64::from(new) - f64::from(*old)) * share.min(1.0)).round() as u8;
        }
    }

    /// Draws a straight stroke with round ends. If several strokes cover a pixel, `cover` keeps the strongest coverage.
    fn stroke(&self, a: (f64, f64), b: (f64, f64), half: f64, cover: &mut impl FnMut(usize, usize, f64)) {
        let bound = |lo: f64, hi: f64, n: usize| {
            let (lo, hi) = (lo.min(hi) - half - 1.0, lo.max(hi) + half + 1.0);
            (lo.clamp(0.0, n as f64) as usize, hi.clamp(0.0, n as f64) as usize)
        };
        let ((x0, x1), (y0, y1)) = (bound(a.0, b.0, self.w), bound(a.1, b.1, self.h));
        let (dx, dy) = (b.0 - a.0, b.1 - a.1);
        let length = (dx * dx + dy * dy).max(1e-12);
        for y in y0..y1 {
            for x in x0..x1 {
                let (px, py) = (x as f64 + 0.5 - a.0, y as f64 + 0.5 - a.1);
                let t = ((px * dx + py * dy) / length).clamp(0.0, 1.0);
                let distance = (px - t * dx).hypot(py - t * dy);
                cover(x, y, (half + 0.5 - distance).clamp(0.0, 1.0));
            }
        }
    }

    fn polyline(&mut self, points: &[(f64, f64)], half: f64, color: (u8, u8, u8), strength: f64) {
        // A pixel that two pieces of a line share is painted once.
        let mut cover: std::collections::HashMap<(usize, usize), f64> = std::collections::HashMap::new();
        for pair in points.windows(2) {
            self.stroke(pair[0], pair[1], half, &mut |x, y, share| {
                if share > 0.0 {
                    let known = cover.entry((x, y)).or_default();
                    *known = known.max(share);
                }
            });
        }
        for ((x, y), share) in cover {
            self.mix(x, y, color, share * strength);
        }
    }

    fn words(&mut self, at: (f64, f64), text: &str, anchor: Anchor, size: usize, color: (u8, u8, u8)) {
        let wide = text.chars().count() as f64 * (font::WIDTH * size) as f64;
        let back = match anchor {
            Anchor::Begin => 0.0,
            Anchor::Middle => wide / 2.0,
            Anchor::End => wide,
        };
        let (left, top) = ((at.0 - back).round(), (at.1 - (font::BASE * size) as f64).round());
        for (i, c) in text.chars().enumerate() {
            for (row, bits) in font::glyph(c).into_iter().enumerate() {
                for col in (0..5).filter(|col| bits >> (4 - col) & 1 == 1) {
                    for (dx, dy) in (0..size).flat_map(|y| (0..size).map(move |x| (x, y))) {
                        let x = left + ((i * font::WIDTH + col) * size + dx) as f64;
                        let y = top + (row * size + dy) as f64;
                        if x >= 0.0 && y >= 0.0 {
                            self.mix(x as usize, y as usize, color, 1.0);
                        }
                    }
                }
            }
        }
    }
}

/// A colour and its opacity.
fn color(ink: Ink) -> ((u8, u8, u8), f64) {
    match ink {
        Ink::Text => ((51, 51, 51), 1.0),
        Ink::Grid => ((228, 228, 228), 1.0),
        Ink::Frame => ((136, 136, 136), 1.0),
        Ink::Mark => ((119, 119, 119), 1.0),
        Ink::Series(i) => (PALETTE[i % PALETTE.len()], 1.0),
        Ink::Faint(i) => (PALETTE[i % PALETTE.len()], 0.35),
        Ink::Exact(r, g, b) => ((r, g, b), 1.0),
    }
}

/// Renders the file.
pub fn write(scene: &Scene) -> Vec<u8> {
    let (w, h) = ((scene.width * SCALE).ceil() as usize, (scene.height * SCALE).ceil() as usize);
    let mut page = Raster { w, h, rgb: vec![255; w * h * 3] };
    let big = |p: &(f64, f64)| (p.0 * SCALE, p.1 * SCALE);
    for shape in &scene.shapes {
        match shape {
            Shape::Line { points, ink, width, dashed, .. } => {
                let (c, strength) = color(*ink);
                let points: Vec<(f64, f64)> = points.iter().map(big).collect();
                let half = width * SCALE / 2.0;
                match (*dashed, &points[..]) {
                    (true, [a, b]) => {
                        let length = (b.0 - a.0).hypot(b.1 - a.1).max(1e-9);
                        let at = |d: f64| (a.0 + (b.0 - a.0) * d / length, a.1 + (b.1 - a.1) * d / length);
                        let mut d = 0.0;
                        while d < length {
                            page.polyline(&[at(d), at((d + 5.0).min(length))], half * 0.8, c, strength);
                            d += 12.0;
                        }
                    }
                    _ => page.polyline(&points, half, c, strength),
                }
            }
            Shape::Dot { at, r, ink } => {
                let (c, strength) = color(*ink);
                page.polyline(&[big(at), big(at)], r * SCALE, c, strength);
            }
            Shape::Box { x, y, w, h, ink } => {
                let (c, strength) = color(*ink);
                let ((x0, y0), (x1, y1)) = (big(&(*x, *y)), big(&(x + w, y + h)));
                for py in y0.round() as usize..(y1.round() as usize).min(page.h) {
                    for px in x0.round() as usize..(x1.round() as usize).min(page.w) {
                        page.mix(px, py, c, strength);
                    }
                }
            }
            Shape::Text { at, text, anchor, title } => {
                page.words(big(at), text, *anchor, if *title { 3 } else { 2 }, color(Ink::Text).0);
            }
        }
    }
    let image = Dims::new(&[h, w, 3]).map(|shape| HostTensor::new(DType::U8, shape, page.rgb));
    let bytes = image.ok().and_then(|image| perilune_data::image::encode(&image, "the plot").ok());
    bytes.expect("this is a bug: the sides of a plot are those of a PNG")
}
