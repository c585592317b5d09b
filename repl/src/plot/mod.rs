//! Draws curves, histograms and heat maps, as text for a terminal, as SVG and as PNG.
//!
//! A `Figure` is plain data. `text.rs` draws it with characters; `scene.rs` lays it out as lines, boxes and words, which
//! `svg.rs` and `png.rs` write. Numbers that are NaN or infinite, or have no logarithm on a logarithmic axis, are gaps. The
//! numbers come from the command `cmd/plot.rs` or from the prompt.

mod axis;
mod font;
mod png;
mod scene;
mod svg;
mod text;

pub use text::Look;

use crate::terminal::one_line;

/// One curve. Its points are in the order in which they are joined.
#[derive(Clone, Debug, Default)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// The raw numbers behind a smoothed curve: drawn faintly in the colour of the series after it, not named, and not
    /// drawn in a terminal.
    pub faint: bool,
}

impl Series {
    /// Returns a curve through these points.
    pub fn new(name: &str, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.to_string(), points, faint: false }
    }
}

/// A labelled position on the x axis.
#[derive(Clone, Debug)]
pub struct Mark {
    pub x: f64,
    pub label: String,
}

#[derive(Clone, Debug)]
pub enum Figure {
    Lines {
        title: String,
        x_label: String,
        series: Vec<Series>,
        marks: Vec<Mark>,
        log_y: bool,
    },
    /// Counts of equal bins from `lo` to `hi`; `left_out` numbers were NaN or infinite.
    Histogram {
        title: String,
        lo: f64,
        hi: f64,
        counts: Vec<u64>,
        left_out: u64,
    },
    /// Rows from the top, columns from the left.
    Heat {
        title: String,
        rows: usize,
        cols: usize,
        values: Vec<f64>,
    },
}

impl Figure {
    /// Returns curves on one pair of axes.
    pub fn lines(title: &str, x_label: &str, series: Vec<Series>) -> Figure {
        Figure::Lines { title: title.into(), x_label: x_label.into(), series, marks: Vec::new(), log_y: false }
    }

    /// Returns a histogram of `values`, of `bins` bins or as many as suit their number.
    pub fn histogram(title: &str, values: &[f64], bins: Option<usize>) -> Figure {
        let drawn = || values.iter().copied().filter(|v| axis::drawable(*v, false));
        let n = drawn().count();
        let (lo, hi) = axis::range(drawn()).unwrap_or((0.0, 1.0));
        let bins = bins.unwrap_or(((n as f64).cbrt() * 2.0).ceil() as usize).clamp(1, 60);
        let mut counts = vec![0; bins];
        for v in drawn() {
            let at = ((v - lo) / (hi - lo) * bins as f64) as usize;
            counts[at.min(bins - 1)] += 1;
        }
        Figure::Histogram { title: title.into(), lo, hi, counts, left_out: (values.len() - n) as u64 }
    }

    /// Returns a heat map of `values`, row by row. Missing values at the end are gaps.
    pub fn heat(title: &str, rows: usize, cols: usize, mut values: Vec<f64>) -> Figure {
        values.resize(rows * cols, f64::NAN);
        Figure::Heat { title: title.into(), rows, cols, values }
    }

    /// Draws for a terminal, at most `cols` wide and `rows` high (a list of marks comes below that), without a newline at the
    /// end. ASCII where the locale is not UTF-8.
    pub fn text(&self, cols: usize, rows: usize, color: bool) -> String {
        self.text_with(cols, rows, Look { color, unicode: text::utf8_locale() })
    }

    /// Draws for a terminal with these capabilities.
    pub fn text_with(&self, cols: usize, rows: usize, look: Look) -> String {
        text::draw(&self.with_escaped_words(), cols, rows, look)
    }

    /// Returns a copy with escaped words, because names of metrics come from recipes and files.
    fn with_escaped_words(&self) -> Figure {
        let mut out = self.clone();
        match &mut out {
            Figure::Lines { title, x_label, series, marks, .. } => {
                let words = [title, x_label].into_iter().chain(series.iter_mut().map(|s| &mut s.name));
                words.chain(marks.iter_mut().map(|m| &mut m.label)).for_each(|word| *word = one_line(word));
            }
            Figure::Histogram { title, .. } | Figure::Heat { title, .. } => *title = one_line(title),
        }
        out
    }

    /// Renders as SVG.
    pub fn svg(&self) -> String {
        svg::write(&scene::lay_out(self))
    }

    /// Renders as PNG.
    pub fn png(&self) -> Vec<u8> {
        png::write(&scene::lay_out(self))
    }
}

/// Averages over blocks, so that at most `most.0` rows and `most.1` columns are left; gaps do not count.
fn shrink(rows: usize, cols: usize, values: &[f64], most: (usize, usize)) -> (usize, usize, Vec<f64>) {
    let (r, c) = (rows.min(most.0), cols.min(most.1));
    let mut out = Vec::with_capacity(r * c);
    for i in 0..r {
        for j in 0..c {
            let (mut sum, mut n) = (0.0, 0.0);
            for y in i * rows / r..(i + 1) * rows / r {
                for x in j * cols / c..(j + 1) * cols / c {
                    let v = values[y * cols + x];
                    if axis::drawable(v, false) {
                        (sum, n) = (sum + v, n + 1.0);
                    }
                }
            }
            out.push(if n > 0.0 { sum / n } else { f64::NAN });
        }
    }
    (r, c, out)
}

/// The colour map viridis (Smith and van der Walt, CC0), by six of its points.
fn viridis(t: f64) -> (u8, u8, u8) {
    const POINTS: [(f64, f64, f64); 6] = [
        (68.0, 1.0, 84.0),
        (65.0, 68.0, 135.0),
        (42.0, 120.0, 142.0),
        (34.0, 168.0, 132.0),
        (122.0, 209.0, 81.0),
        (253.0, 231.0, 37.0),
    ];
    let at = t.clamp(0.0, 1.0) * 5.0;
    let i = (at as usize).min(4);
    let mix = |a: f64, b: f64| (a + (b - a) * (at - i as f64)).round() as u8;
    let (a, b) = (POINTS[i], POINTS[i + 1]);
    (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
