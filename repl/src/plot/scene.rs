//! Lays out a figure on a page, in points from the upper left corner. SVG and PNG render the same scene.

use super::axis::{Axis, drawable, range};
use super::{Figure, Mark, Series, shrink, viridis};
use crate::format::{grouped, short};

/// The colours of curves, each visible on white and on black.
pub const PALETTE: [(u8, u8, u8); 8] = [
    (59, 130, 246),
    (224, 102, 43),
    (31, 157, 85),
    (194, 64, 143),
    (139, 108, 240),
    (184, 134, 11),
    (15, 159, 181),
    (214, 69, 69),
];

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Ink {
    Text,
    Grid,
    Frame,
    Mark,
    Series(usize),
    Faint(usize),
    Exact(u8, u8, u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Anchor {
    Begin,
    Middle,
    End,
}

#[derive(Clone, Debug)]
pub enum Shape {
    /// `tip` is shown by viewers of SVG when the pointer rests on the line.
    Line {
        points: Vec<(f64, f64)>,
        ink: Ink,
        width: f64,
        dashed: bool,
        tip: Option<String>,
    },
    Dot {
        at: (f64, f64),
        r: f64,
        ink: Ink,
    },
    Box {
        x: f64,
        y: f64,
        w: f64,
        h: f64,
        ink: Ink,
    },
    /// `at` is the end or middle of the base line.
    Text {
        at: (f64, f64),
        text: String,
        anchor: Anchor,
        title: bool,
    },
}

/// The shapes, in drawing order.
pub struct Scene {
    pub width: f64,
    pub height: f64,
    pub shapes: Vec<Shape>,
}

const WIDTH: f64 = 760.0;
const PLOT_HEIGHT: f64 = 340.0;
/// Estimated width of a character.
pub const ADVANCE: f64 = 6.6;
const LINE: f64 = 17.0;
const MARKS: usize = 30;
/// The most pixels of a heat map, each way.
const PIXELS: usize = 128;

impl Scene {
    fn words(&mut self, at: (f64, f64), text: &str, anchor: Anchor) {
        self.shapes.push(Shape::Text { at, text: text.into(), anchor, title: false });
    }

    fn line(&mut self, points: Vec<(f64, f64)>, ink: Ink, width: f64) {
        self.shapes.push(Shape::Line { points, ink, width, dashed: false, tip: None });
    }

    fn title(&mut self, text: &str) -> f64 {
        if text.is_empty() {
            return 12.0;
        }
        self.shapes.push(Shape::Text { at: (16.0, 24.0), text: text.into(), anchor: Anchor::Begin, title: true });
        36.0
    }
}

/// The position of the axes on the page.
struct Area {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Area {
    fn x(&self, axis: &Axis, v: f64) -> f64 {
        self.left + axis.at(v) * (self.right - self.left)
    }

    fn y(&self, axis: &Axis, v: f64) -> f64 {
        self.bottom - axis.at(v) * (self.bottom - self.top)
    }

    fn draw_axes(&self, scene: &mut Scene, x: &Axis, y: &Axis, x_label: &str) {
        for (v, label) in &y.ticks {
            let at = self.y(y, *v);
            scene.line(vec![(self.left, at), (self.right, at)], Ink::Grid, 1.0);
            scene.words((self.left - 8.0, at + 4.0), label, Anchor::End);
        }
        for (v, label) in &x.ticks {
            let at = self.x(x, *v);
            scene.line(vec![(at, self.bottom), (at, self.bottom + 5.0)], Ink::Frame, 1.0);
            scene.words((at, self.bottom + 19.0), label, Anchor::Middle);
        }
        scene.line(vec![(self.left, self.bottom), (self.right, self.bottom)], Ink::Frame, 1.0);
        if !x_label.is_empty() {
            scene.words(((self.left + self.right) / 2.0, self.bottom + 37.0), x_label, Anchor::Middle);
        }
    }
}

/// Lays out a figure.
pub fn lay_out(figure: &Figure) -> Scene {
    let mut scene = Scene { width: WIDTH, height: 0.0, shapes: Vec::new() };
    match figure {
        Figure::Lines { title, x_label, series, marks, log_y } => {
            let top = scene.title(title);
            curves(&mut scene, top, x_label, series, marks, *log_y);
        }
        Figure::Histogram { title, lo, hi, counts, left_out } => {
            let top = scene.title(title);
            histogram(&mut scene, top, (*lo, *hi), counts, *left_out);
        }
        Figure::Heat { title, rows, cols, values } => {
            let top = scene.title(title);
            heat(&mut scene, top, *rows, *cols, values);
        }
    }
    scene
}

fn nothing(scene: &mut Scene, top: f64) {
    scene.words((WIDTH / 2.0, top + 60.0), "no data", Anchor::Middle);
    scene.height = top + 120.0;
}

/// Draws the legend in as many lines as it needs; returns the lower end of the last one.
fn legend(scene: &mut Scene, top: f64, names: &[&str]) -> f64 {
    let (mut x, mut y) = (16.0, top + 6.0);
    for (i, name) in names.iter().enumerate() {
        let wide = 30.0 + name.chars().count() as f64 * ADVANCE + 18.0;
        if x > 16.0 && x + wide > WIDTH - 10.0 {
            (x, y) = (16.0, y + LINE);
        }
        scene.line(vec![(x, y), (x + 22.0, y)], Ink::Series(i), 3.0);
        scene.words((x + 30.0, y + 4.0), name, Anchor::Begin);
        x += wide;
    }
    y + LINE
}

fn curves(scene: &mut Scene, top: f64, x_label: &str, series: &[Series], marks: &[Mark], log: bool) {
    let names: Vec<&str> = series.iter().filter(|s| !s.faint).map(|s| s.name.as_str()).collect();
    let top = legend(scene, top, &names);
    let good = |p: &(f64, f64)| drawable(p.0, false) && drawable(p.1, log);
    let points = || series.iter().flat_map(|s| s.points.iter()).filter(|p| good(p));
    let (Some(xs), Some(ys)) = (range(points().map(|p| p.0)), range(points().map(|p| p.1))) else {
        return nothing(scene, top);
    };
    let y = Axis::new(ys, log, 0.03, 7);
    let x = Axis::new(xs, false, 0.0, 8);
    let labels = y.ticks.iter().map(|t| t.1.len()).max().unwrap_or(0) as f64;
    let top = if marks.is_empty() { top } else { top + 10.0 };
    let area = Area { left: 24.0 + labels * ADVANCE, right: WIDTH - 24.0, top, bottom: top + PLOT_HEIGHT };
    area.draw_axes(scene, &x, &y, x_label);
    let shown = |m: &Mark| m.x >= xs.0 && m.x <= xs.1;
    let mut free = 0.0;
    for (k, mark) in marks.iter().enumerate().filter(|(_, m)| shown(m)) {
        let at = area.x(&x, mark.x);
        scene.shapes.push(Shape::Line {
            points: vec![(at, area.top), (at, area.bottom)],
            ink: Ink::Mark,
            width: 1.0,
            dashed: true,
            tip: Some(mark.label.clone()),
        });
        let number = (k + 1).to_string();
        if at >= free {
            scene.words((at, area.top - 4.0), &number, Anchor::Middle);
            free = at + (number.len() as f64 + 0.5) * ADVANCE;
        }
    }
    let mut color = 0;
    for s in series {
        let (ink, width) = if s.faint { (Ink::Faint(color), 1.0) } else { (Ink::Series(color), 1.8) };
        // The numbers between two gaps; a lone one is a dot.
        for run in s.points.split(|p| !good(p)) {
            let placed: Vec<(f64, f64)> = run.iter().map(|p| (area.x(&x, p.0), area.y(&y, p.1))).collect();
            match placed[..] {
                [] => {}
                [at] => scene.shapes.push(Shape::Dot { at, r: 2.2, ink }),
                _ => scene.line(thin(&placed), ink, width),
            }
        }
        color += usize::from(!s.faint);
    }
    let mut bottom = area.bottom + if x_label.is_empty() { 28.0 } else { 46.0 };
    for (k, mark) in marks.iter().enumerate().take(MARKS) {
        scene.words((16.0, bottom + 12.0), &format!("{}  {}", k + 1, mark.label), Anchor::Begin);
        bottom += LINE;
    }
    if marks.len() > MARKS {
        scene.words((16.0, bottom + 12.0), &format!("and {} more", marks.len() - MARKS), Anchor::Begin);
        bottom += LINE;
    }
    scene.height = bottom + 10.0;
}

/// Decimates points: of those in one column of half a point's width it keeps the first, the lowest, the highest and the last,
/// which gives the same picture.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let column = |p: &(f64, f64)| (p.0 * 2.0).floor();
    let mut out = Vec::new();
    for run in points.chunk_by(|a, b| column(a) == column(b)) {
        if run.len() <= 4 {
            out.extend_from_slice(run);
            continue;
        }
        let by_y = |a: &usize, b: &usize| run[*a].1.total_cmp(&run[*b].1);
        let low = (0..run.len()).min_by(by_y).unwrap_or(0);
        let high = (0..run.len()).max_by(by_y).unwrap_or(0);
        let mut keep = [0, low, high, run.len() - 1];
        keep.sort_unstable();
        out.extend(keep.chunk_by(|a, b| a == b).map(|k| run[k[0]]));
    }
    out
}

fn histogram(scene: &mut Scene, top: f64, ends: (f64, f64), counts: &[u64], left_out: u64) {
    let total: u64 = counts.iter().sum();
    let mut about = format!("{} numbers", grouped(total));
    if left_out > 0 {
        about.push_str(&format!(", {} NaN or infinite", grouped(left_out)));
    }
    scene.words((16.0, top + 8.0), &about, Anchor::Begin);
    let top = top + 22.0;
    if total == 0 {
        return nothing(scene, top);
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let y = Axis::new((0.0, most as f64), false, 0.0, 6);
    let x = Axis::new(ends, false, 0.0, 8);
    let labels = y.ticks.iter().map(|t| t.1.len()).max().unwrap_or(0) as f64;
    let area = Area { left: 24.0 + labels * ADVANCE, right: WIDTH - 24.0, top, bottom: top + PLOT_HEIGHT };
    area.draw_axes(scene, &x, &y, "");
    let wide = (area.right - area.left) / counts.len() as f64;
    for (i, n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
        let at = area.y(&y, *n as f64);
        let x = area.left + i as f64 * wide + 0.5;
        scene.shapes.push(Shape::Box { x, y: at, w: wide - 1.0, h: area.bottom - at, ink: Ink::Series(0) });
    }
    scene.height = area.bottom + 34.0;
}

fn heat(scene: &mut Scene, top: f64, rows: usize, cols: usize, values: &[f64]) {
    let Some((lo, hi)) = range(values.iter().copied().filter(|v| drawable(*v, false))) else {
        return nothing(scene, top);
    };
    let (r, c, small) = shrink(rows, cols, values, (PIXELS, PIXELS));
    // Square pixels, unless the picture would be too narrow.
    let size = ((WIDTH - 150.0) / c as f64).min(PLOT_HEIGHT / r as f64);
    let (w, h) = (size.max(60.0 / c as f64), size.max(40.0 / r as f64));
    let left = 54.0;
    for (i, v) in small.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
        let (red, green, blue) = viridis((v - lo) / (hi - lo));
        let (x, y) = (left + (i % c) as f64 * w, top + (i / c) as f64 * h);
        scene.shapes.push(Shape::Box { x, y, w, h, ink: Ink::Exact(red, green, blue) });
    }
    let (right, bottom) = (left + w * c as f64, top + h * r as f64);
    scene.words((left - 8.0, top + 10.0), "0", Anchor::End);
    if rows > 1 {
        scene.words((left - 8.0, bottom), &(rows - 1).to_string(), Anchor::End);
    }
    scene.words((left, bottom + 16.0), "0", Anchor::Begin);
    if cols > 1 {
        scene.words((right, bottom + 16.0), &(cols - 1).to_string(), Anchor::End);
    }
    // The scale.
    let (x, steps) = (right + 24.0, 40);
    let tall = (bottom - top).max(80.0) / f64::from(steps);
    for i in 0..steps {
        let (red, green, blue) = viridis(1.0 - (f64::from(i) + 0.5) / f64::from(steps));
        let y = top + f64::from(i) * tall;
        scene.shapes.push(Shape::Box { x, y, w: 14.0, h: tall, ink: Ink::Exact(red, green, blue) });
    }
    let end = top + tall * f64::from(steps);
    scene.words((x + 20.0, top + 10.0), &short(hi), Anchor::Begin);
    scene.words((x + 20.0, end), &short(lo), Anchor::Begin);
    scene.height = bottom.max(end) + 30.0;
}
